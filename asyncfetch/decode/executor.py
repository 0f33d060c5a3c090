"""The threads that decode: as many as there are cores, whatever the number of tasks that ask."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio

from asyncfetch.config import usable_cpus
from asyncfetch.errors import ClosedError, ConfigError
from asyncfetch.observe import Figures, Histogram
from asyncfetch.runtime.threads import ThreadCall, no_thread, run_sync

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.observe import Quantiles

ResultT = TypeVar("ResultT")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True, repr=False)
class DecodePoolStatistics(Figures):
    """A snapshot; counters and sums run from the pool's making."""

    _telling = ("threads", "busy", "waiting", "finished", "call")
    _of_moment = ("threads", "busy", "waiting")

    threads: int
    """Most calls that run at a time."""
    busy: int
    """Calls that run now."""
    waiting: int
    """Callers that wait for a thread now."""
    finished: int
    """Calls that ran to their end, errors included."""
    busy_seconds: float
    """Sum of the times that finished calls ran, by the clock on the wall."""
    call: Quantiles
    """Quantiles of those times."""


class DecodePool:
    """Runs blocking calls in worker threads, at most ``threads`` at a time, in the order of their turns.

    A turn is a number, the lowest is next, and calls of the same one are taken as they came. A pass over a stream
    counts its samples from the ``turn`` on that the pool has when it begins: so what its consumer needs first goes
    before what was ready earlier and is needed later, and passes side by side get on alike.

    A thread that is done takes the next call by itself: on busy cores the loop would take its time, and a thread that
    is woken for each call mostly begins it on its waker's core while another one is idle.

    The callers bound the queue: each waits in its own task. The threads end with ``close``, or when the pool is
    collected.

    Args:
        threads: None means one a core that this process may use.

    Raises:
        ConfigError: ``threads`` is below 1.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = usable_cpus() if threads is None else threads
        """Calls that run at a time."""
        if self.threads < 1:
            raise ConfigError(f"threads must be at least 1, not {threads}")
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, ThreadCall[Any], Future[Any]]] = []
        """A heap of calls that wait for a thread: turn, number of calls that came before, call, its result."""
        self._came = itertools.count()
        self.turn = 0
        """The highest of the calls that began so far."""
        self._is_closed = False
        self._late: anyio.CapacityLimiter | None = None
        self._calls: set[ThreadCall[Any]] = set()
        self._finished = 0
        self._busy_seconds = 0.0
        self._call_times = Histogram()

    async def run(
        self, function: Callable[[*Arguments], ResultT], *args: *Arguments, turn: int | None = None
    ) -> ResultT:
        """``function(*args)``, called in a worker thread when it is its ``turn``; without one, at the pool's own.

        Cancelled while it waits, it never calls. A call that runs can't be stopped: a cancelled caller waits for its
        end and throws the result away, and the thread counts as busy until then. A second ``Task.cancel()`` is raised
        at once: then the call runs on, and no longer counts.

        Raises:
            ClosedError: The pool was closed.
            Exception: What the function raises.
        """
        call: ThreadCall[ResultT] = ThreadCall(lambda: function(*args))
        self._calls.add(call)
        try:
            return await self._in_thread(call, self.turn if turn is None else turn)
        except asyncio.CancelledError:
            await call.ended()
            raise
        finally:
            self._calls.discard(call)
            self._finished += call.began
            self._busy_seconds += call.seconds
            if call.began and not call.runs:
                self._call_times.record(call.seconds)

    async def _in_thread(self, call: ThreadCall[ResultT], turn: int) -> ResultT:
        result: Future[ResultT] = Future()
        try:
            with self._lock:  # it waits here for the call, and no other thread takes a call that was given up
                self._executor.submit(self._run_next)
                heapq.heappush(self._waiting, (turn, next(self._came), call, result))
        except RuntimeError as error:
            if self._is_closed:
                raise ClosedError("the threads that decode have ended: open the dataset again") from error
            if "shutdown" not in str(error):  # no thread can be started
                await call.ended()
                raise no_thread(error) or error from error
            # The program's main thread is over, and all executors with it; the loop is in another one, and goes on.
            self._late = self._late or anyio.CapacityLimiter(self.threads)
            return await run_sync(call.run, limiter=self._late)
        return await asyncio.wrap_future(result)

    def _run_next(self) -> None:
        """Run the call that has the turn, in a thread; one comes here for each call."""
        with self._lock:
            if not self._waiting:  # it was queued although its thread couldn't start: its call has failed
                return
            turn, _, call, result = heapq.heappop(self._waiting)
            self.turn = max(self.turn, turn)
        if not result.set_running_or_notify_cancel():
            return
        try:
            value = call.run()
        except BaseException as error:  # noqa: BLE001 - it is raised to the caller
            result.set_exception(error)
        else:
            result.set_result(value)
        finally:
            del call, result  # else error -> traceback -> this frame -> result -> error is a cycle

    def close(self) -> None:
        """Let the threads end, each after its last call; new calls are refused. Idempotent."""
        self._is_closed = True
        self._executor.shutdown(wait=False)

    def statistics(self) -> DecodePoolStatistics:
        """A snapshot; taken off the loop, its figures can be one event apart."""
        calls = tuple(self._calls)  # in one go, which the loop's thread can't come between
        busy = sum(call.runs for call in calls)
        return DecodePoolStatistics(
            threads=self.threads,
            busy=busy,
            waiting=len(calls) - busy,
            finished=self._finished,
            busy_seconds=self._busy_seconds,
            call=self._call_times.snapshot(),
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<DecodePool {now.busy}/{now.threads} threads busy, {now.waiting} waiting>"

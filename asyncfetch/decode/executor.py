"""The threads that decode: as many as there are cores, whatever the number of tasks that ask."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio
from anyio import to_thread

from asyncfetch.config import usable_cpus
from asyncfetch.errors import ConfigError
from asyncfetch.observe import Histogram
from asyncfetch.runtime.thread_call import ThreadCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.observe import Quantiles

__all__ = ["DecodePool", "DecodePoolStatistics"]

ResultT = TypeVar("ResultT")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True)
class DecodePoolStatistics:
    """A snapshot; counters and sums run from the pool's making."""

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
    """Of those times."""


class DecodePool:
    """Runs blocking calls in worker threads, at most ``threads`` at a time, first come, first served.

    As many calls again stand by in threads of their own, which sleep until one of the others is done: between two calls
    of a thread the loop need not run, which on busy cores would take longer than handing over.

    There is no queue but the callers themselves: each waits in its own task, so what waits is bounded by who asks.
    The threads are anyio's, which ends them with the loop; there is nothing to close. A pool belongs to the loop that
    uses it first.

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
        self._limiter = anyio.CapacityLimiter(2 * self.threads)
        self._unlimited = anyio.CapacityLimiter(math.inf)  # else anyio's own 40 for the loop would count too
        self._turns = threading.Semaphore(self.threads)
        self._calls: set[ThreadCall[Any]] = set()
        self._finished = 0
        self._busy_seconds = 0.0
        self._call_times = Histogram()

    async def run(self, function: Callable[[*Arguments], ResultT], *args: *Arguments) -> ResultT:
        """``function(*args)``, called in a worker thread.

        Cancelled while it waits, it never calls. A call that runs can't be stopped: a cancelled caller waits for its
        end and throws the result away, and the thread counts as busy until then. A second ``Task.cancel()`` is raised
        at once: then the call runs on, and no longer counts.
        """
        async with self._limiter:
            call: ThreadCall[ResultT] = ThreadCall(lambda: function(*args), self._turns)
            self._calls.add(call)
            try:
                return await to_thread.run_sync(call.run, limiter=self._unlimited, abandon_on_cancel=True)
            except asyncio.CancelledError:
                await call.ended()
                raise
            finally:
                self._calls.discard(call)
                self._finished += call.began
                self._busy_seconds += call.seconds
                if call.began and not call.runs:
                    self._call_times.record(call.seconds)

    def statistics(self) -> DecodePoolStatistics:
        """What it does and did; taken off the loop, its figures can be one event apart."""
        calls = tuple(self._calls)  # in one go, which the loop's thread can't come between
        busy = sum(call.runs for call in calls)
        return DecodePoolStatistics(
            threads=self.threads,
            busy=busy,
            waiting=self._limiter.statistics().tasks_waiting + len(calls) - busy,
            finished=self._finished,
            busy_seconds=self._busy_seconds,
            call=self._call_times.snapshot(),
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<DecodePool {now.busy}/{now.threads} threads busy, {now.waiting} waiting>"

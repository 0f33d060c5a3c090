"""Threads for calls into back ends of fsspec, which can't be stopped, and may never return.

A job is a series of calls into a back end by one thread, each of which may take as long as the limit. The job notes the
time at which a call begins; a timer of the loop looks at it when the limit has passed, so calls in time cost nothing. A
job that was abandoned, because its caller was cancelled or a call took too long, ends before its next call. Until then
its thread keeps its place, and the call's bytes are dropped.

A thread then takes the next job, since starting a thread takes longer than reading a range in memory. There are never
more threads than places, and they end with their owner. They aren't anyio's: at its exit the interpreter waits for
those, and one that hangs would block it for ever.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncfetch.errors import FetchError, FetchTimeout
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.runtime.cancellation import Deadlines
from asyncfetch.runtime.fork import leave_openssl
from asyncfetch.runtime.threads import call_on, no_thread

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class FsspecThreads:
    """Runs jobs, each in a thread, which keeps its place until the job ends, however late.

    A job is overdue when a call of it runs longer than the limit, even if it was abandoned. If all places have overdue
    jobs, callers that wait for a place, or come later, get an error.

    Bound to the loop that it was made on.
    """

    def __init__(self, places: int, limit_seconds: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.limit_seconds = limit_seconds
        """Time limit of a call."""
        self._count = places
        self._places = asyncio.Semaphore(places)
        self._waiting: set[anyio.CancelScope] = set()
        self._deadlines = Deadlines(self.loop)
        self._overdue: set[ThreadJob] = set()
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        self._idle = 0
        # A forgotten owner leaves no thread behind, either. At exit they are daemons.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def close(self) -> None:
        """End idle threads at once, others after their job. No job may come any more."""
        self._deadlines.close()
        self._jobs.put(None)

    async def run(self, function: Callable[[ThreadJob], T], scheme: str) -> T:
        """``function(job)`` in a thread. A cancelled caller abandons it.

        It calls the back end of ``scheme``, each time after ``job.next_call()``. AttemptFailed where a call took too
        long, and where there was no place or no thread.
        """
        outcome: asyncio.Future[T] = self.loop.create_future()
        job = ThreadJob(function, scheme, self, outcome)
        try:
            await self._take_place()
            self._start(job)
            return await outcome
        finally:
            job.leave()
            del outcome  # it holds the error, and its traceback this frame

    async def _take_place(self) -> None:
        if not self._is_stuck:
            with anyio.CancelScope() as block:
                self._waiting.add(block)
                try:
                    await self._places.acquire()
                    return
                finally:
                    self._waiting.discard(block)
        message = (
            f"all {self._count} threads wait for back ends of fsspec that don't answer, each since more"
            f" than {self.limit_seconds:g} s: are their servers up?"
        )
        raise AttemptFailed(FetchTimeout, message)

    def _start(self, job: ThreadJob) -> None:
        if self._idle:
            self._idle -= 1
        else:
            thread = threading.Thread(target=_work, args=(self._jobs,), name="asyncfetch back end", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._places.release()
                raise AttemptFailed(FetchError, str(no_thread(error) or error)) from error
        job.begin()
        self._deadlines.watch(job)
        self._jobs.put(job)

    @property
    def _is_stuck(self) -> bool:
        return len(self._overdue) >= self._count

    def is_late(self, job: ThreadJob) -> None:
        """Note that a call of the job takes too long; it may end any time, or never."""
        self._deadlines.leave(job)
        self._overdue.add(job)
        if self._is_stuck:
            for block in self._waiting:
                block.cancel()

    def has_ended(self, job: ThreadJob) -> None:
        """Note that the job's thread is free."""
        self._idle += 1
        self._deadlines.leave(job)
        self._overdue.discard(job)
        self._places.release()


class ThreadJob:
    """The work of a thread for one caller. It calls ``work`` and ``next_call``, the loop the rest."""

    __slots__ = ("_began", "_function", "_outcome", "_scheme", "_threads", "due")

    def __init__(
        self, function: Callable[[ThreadJob], T], scheme: str, threads: FsspecThreads, outcome: asyncio.Future[T]
    ) -> None:
        """``outcome`` gets the function's value or error, or that it is late."""
        self._function = function
        self._scheme = scheme
        self._threads = threads
        self._outcome: asyncio.Future[Any] | None = outcome  # None once it was abandoned
        self._began = math.inf
        self.due = math.inf
        """The time at which Deadlines looks at it next."""

    def next_call(self) -> None:
        """Begin a call into the back end, which has the whole limit from now on; raises if the job was abandoned."""
        if self._outcome is None:
            raise CancelledError  # no caller is left
        self._began = time.monotonic()

    def leave(self) -> None:
        """Abandon the job. Its outcome isn't kept: an error's traceback holds the frames that hold the job."""
        self._outcome = None

    def begin(self) -> None:
        """Note that it goes to a thread."""
        self._began = time.monotonic()
        self.due = self._threads.loop.time() + self._threads.limit_seconds

    def is_due(self, now: float) -> None:
        """Check the call under way at the deadline, which may be that of an earlier call."""
        limit_seconds = self._threads.limit_seconds
        left_seconds = self._began + limit_seconds - time.monotonic()
        if left_seconds > 0:
            self.due = now + left_seconds
            return
        outcome = self._outcome
        self.leave()
        self._threads.is_late(self)
        if outcome is not None and not outcome.done():
            message = (
                f"fsspec's back end for {self._scheme}:// gave no answer within {limit_seconds:g} s: is its server up?"
                " A slow one gets longer by FetchConfig(timeouts=...), whose three phases together are this limit"
            )
            outcome.set_exception(AttemptFailed(FetchTimeout, message))

    def work(self) -> None:
        """Run the function, and report to the loop."""
        result, failure = None, None
        try:
            result = self._function(self)
        except BaseException as error:  # noqa: BLE001 - the caller's
            failure = error
        del self._function  # it may hold the caller's buffer, which must be free at the end
        try:
            call_on(self._threads.loop, self._end, result, failure)
        finally:
            del failure  # its traceback holds this frame

    def _end(self, result: object, failure: BaseException | None) -> None:
        self._threads.has_ended(self)
        if self._outcome is None or self._outcome.done():  # too late, or its caller was cancelled
            return
        if failure is None:
            self._outcome.set_result(result)
        else:
            self._outcome.set_exception(failure)


def _work(jobs: SimpleQueue[ThreadJob | None]) -> None:
    """Run jobs until the end. The thread refers only to the queue, so it keeps no owner alive, and no ended job."""
    while (job := jobs.get()) is not None:
        job.work()
        del job
    jobs.put(None)  # for the others
    leave_openssl()

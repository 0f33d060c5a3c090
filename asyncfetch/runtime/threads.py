"""Calls from a loop into a thread, whose end can be awaited despite cancellation, and back; a thread's work time.

And the interpreter's exit, from the end of the main thread on. Daemon threads run on for a moment. Loops are stopped
meanwhile, and a daemon that waits for one would print a useless error. From Python 3.12 on no thread can be started, so
things are closed in the threads that exist.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple

import anyio
from anyio import to_thread

from asyncfetch.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")


def no_thread(error: RuntimeError) -> WorkerError | None:
    """The error to raise instead if ``error`` says that no thread can be started; None for another error."""
    if "can't start new thread" not in str(error):
        return None
    return WorkerError(
        f"no thread can be started ({error}): raise the limit of processes (ulimit -u), or of memory (ulimit -v, the"
        " container's), or use fewer threads: decode_threads, num_workers"
    )


class _CallsInThreads:
    """The running calls of ``run_sync``, which the interpreter's exit waits for.

    The threads of a loop that runs in a daemon are daemons, too: nothing joins them. One that returned from a C++
    library after the interpreter's end would abort the process.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._count = 0
        self._is_over = False

    def run(self, function: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> ResultT:
        """``function(*args)``."""
        with self._changed:
            is_late = self._is_over and threading.current_thread().daemon
            self._count += not is_late
        if is_late:
            threading.Event().wait()
        try:
            return function(*args)
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def end(self, timeout_seconds: float) -> None:
        """Wait for the running calls, and let daemons begin no more."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._count, timeout_seconds)


_calls = _CallsInThreads()


def _forget_calls_in_child() -> None:
    global _calls  # those of the parent run there alone
    _calls = _CallsInThreads()


os.register_at_fork(after_in_child=_forget_calls_in_child)


def end_calls(timeout_seconds: float) -> None:
    """Wait for the calls that run in threads; daemons begin no more. For the interpreter's exit."""
    _calls.end(timeout_seconds)


async def run_sync(
    function: Callable[[*ArgsT], ResultT], /, *args: *ArgsT, limiter: anyio.CapacityLimiter | None = None
) -> ResultT:
    """``function(*args)`` in a thread, as anyio's of this name; WorkerError if no thread can be started."""
    try:
        return await to_thread.run_sync(_calls.run, function, *args, limiter=limiter)
    except RuntimeError as error:
        instead = no_thread(error)
        if instead is None:
            raise
        raise instead from error


class ThreadCall(Generic[ResultT]):
    """One call, from the loop's side and the thread's.

    The future distinguishes three states, unlike anyio: not begun, running, ended. The thread writes the numbers before
    it ends the future; the loop reads them after that.
    """

    def __init__(self, function: Callable[[], ResultT]) -> None:
        self._function = function
        self._ended: Future[None] = Future()
        self.began = False
        self.seconds = 0.0

    def run(self) -> ResultT:
        """Run it, in the thread."""
        if not self._ended.set_running_or_notify_cancel():
            raise CancelledError  # no caller is left
        self.began = True
        start = time.perf_counter()
        try:
            return self._function()
        except StopIteration as stop:  # no future takes it
            raise RuntimeError("a call in a thread raised StopIteration") from stop
        finally:
            self.seconds = time.perf_counter() - start
            self._ended.set_result(None)

    @property
    def runs(self) -> bool:
        """True while the thread runs it."""
        return self._ended.running()

    async def ended(self) -> None:
        """Returns when the call doesn't run and won't."""
        if self._ended.cancel():
            return
        with anyio.CancelScope(shield=True):
            await asyncio.wrap_future(self._ended)


async def run_to_its_end(
    function: Callable[[], ResultT], limiter: anyio.CapacityLimiter, *, stop: Callable[[], object] | None = None
) -> ResultT:
    """``function()`` in a thread; a caller that is cancelled, in whichever way, waits for its end.

    So the thread doesn't touch a buffer that was given back. Before that wait, ``stop`` is called, to hasten the end.
    """
    call = ThreadCall(function)
    try:
        return await run_sync(call.run, limiter=limiter)
    except asyncio.CancelledError:  # Task.cancel() goes through anyio's shield
        if stop is not None:
            stop()
        await call.ended()
        raise


class ThreadClock:
    """Seconds in which the thread that makes this had work: it ran, or waited for a core.

    Only Linux counts the waits; elsewhere these are the seconds in which it ran. Any thread may ask. Holds a file open
    until ``close``.
    """

    def __init__(self) -> None:
        has_clock = hasattr(time, "pthread_getcpuclockid")
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clock else None
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self._finalizer = weakref.finalize(self, os.close, self._file) if self._file >= 0 else None

    def close(self) -> None:
        """Close the file; from now on only the seconds count in which the thread ran. Idempotent."""
        self._file = -1
        if self._finalizer is not None:
            self._finalizer()

    def seconds(self) -> float:
        """The seconds since the thread began; 0 if it has ended, or nothing is known."""
        try:
            seconds = 0.0 if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)
            if self._file >= 0:
                _, waited_nanoseconds, _ = os.pread(self._file, 64, 0).split()
                seconds += int(waited_nanoseconds) / 1e9
        except (OSError, ValueError):
            return 0.0
        return seconds


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[*ArgsT], object], *args: *ArgsT) -> bool:
    """Have the loop call it soon; returns False if the loop is closed.

    The callback runs outside of any task, so it mustn't be anyio's: beside sniffio those find no loop there.
    """
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


OFF_LOOP_BYTES = 2 * 1024 * 1024
"""Checksums and copies of more than this run in a thread. The switch takes as long as a checksum of them, 0.1 ms."""


async def run_in_thread(nbytes: int, work: Callable[[], ResultT], *, blocks: bool = False) -> ResultT:
    """``work()``, in a thread if it reads or writes many bytes or may block; a cancelled caller waits for it."""
    if not blocks and nbytes <= OFF_LOOP_BYTES:
        return work()
    return await run_to_its_end(work, to_thread.current_default_thread_limiter())


_exiting = threading.Event()


def begin_exit() -> None:
    """Note that the main thread is over."""
    _exiting.set()


def hold_daemon_at_exit() -> None:
    """Stop a daemon thread here when the interpreter exits, before an error is raised in it.

    It ends with the process, like every daemon that wants to run Python a moment later.
    """
    if _exiting.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


def close_executor_here_at_exit(loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop start no thread to close its default executor when the interpreter exits.

    ``concurrent.futures`` then joins the executor's threads, after our loops have ended.
    """
    close = loop.shutdown_default_executor

    async def close_unless_exiting(*timeout: Any) -> None:  # noqa: ANN401 - Python 3.11 has none
        if not _exiting.is_set():
            await close(*timeout)

    loop.shutdown_default_executor = close_unless_exiting  # type: ignore[method-assign]


async def in_thread(function: Callable[[], ResultT]) -> ResultT:
    """``function()`` in a thread beyond any limit; in this one if no thread can be started."""
    call = ThreadCall(function)
    try:
        return await to_thread.run_sync(call.run, limiter=anyio.CapacityLimiter(1))
    except RuntimeError:
        if call.began:
            raise
        return function()


async def in_daemon(function: Callable[[], ResultT], *, name: str) -> ResultT:
    """``function()`` in a thread of its own, which neither a cancelled caller nor the exit waits for.

    RuntimeError if no thread can be started.
    """
    outcome: Future[ResultT] = Future()
    outcome.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(outcome, function), name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _settle(outcome: Future[ResultT], function: Callable[[], ResultT]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:  # noqa: BLE001 - it is the caller's
        outcome.set_exception(error)

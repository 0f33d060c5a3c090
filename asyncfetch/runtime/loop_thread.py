"""An event loop in a thread, for callers that aren't coroutines.

No anyio blocking portal, because that doesn't handle an interrupted caller (the coroutine must be cancelled and
awaited), a loop that ends between a call and its start (the caller must not wait for ever), a fork, collection without
``close``, or interpreter exit.

The thread refers to a ``_LoopEngine``, never to the ``LoopThread``, so a forgotten LoopThread is collected, and that
ends the thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # its exit hook comes after ours, because hooks run last in, first out
import logging
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio
from anyio._backends._asyncio import WorkerThread

from asyncfetch.errors import ClosedError, WrongLoop, anew
from asyncfetch.runtime.cancellation import was_cancelled
from asyncfetch.runtime.fork import ForkGuard, leave_openssl, running_loop, stand_still_at_forks
from asyncfetch.runtime.single_flight import SharedFuture
from asyncfetch.runtime.threads import (
    begin_exit,
    call_on,
    close_executor_here_at_exit,
    end_calls,
    hold_daemon_at_exit,
    no_thread,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from contextvars import Context
    from typing import Self

    from anyio.abc import TaskGroup

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

STOP_SECONDS: Final = 0.8
"""Seconds that a close, an interrupt or an early exit waits for coroutines to end; Ctrl-C must act within a second.
A wait in vain isn't repeated: an interrupt is often followed by a close, and that by the interpreter's exit."""
LATE_SECONDS: Final = 0.4
"""Second wait, at the interpreter's exit, for coroutines that had to wait for a call in a thread."""
LATE_CALL_SECONDS: Final = 10.0
"""Longest wait, at the exit, for calls in threads of a daemon's loop: decoding or parsing takes less than a second."""


class LoopCall(Generic[T]):
    """One coroutine on a LoopThread, as other threads see it. Every method may be called from any thread.

    It exists before its coroutine starts, so its owner can end it whenever Ctrl-C strikes; see ``LoopThread.call``.
    """

    def __init__(self, engine: _LoopEngine, work: Callable[[], Awaitable[T]]) -> None:
        self._engine = engine
        self._work = work
        self._future: Future[T] = Future()
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False
        self.given_up = False
        """True after a wait for its end in vain."""

    def start(self) -> None:
        """Start the coroutine, once. The call is always settled, even if the loop ends before it starts."""
        self._engine.start(self)

    def result(self) -> T:
        """Wait for the coroutine and return its result, or raise its exception of whatever type.

        Interrupted by Ctrl-C, it cancels the coroutine and waits for its end, but no longer than STOP_SECONDS.

        Raises:
            ClosedError: The call was cancelled, or the LoopThread closed, before the coroutine was done.
            WrongLoop: In a forked child.
        """
        self._engine.guard.check()
        try:
            error = self._future.exception()
        except BaseException:  # it is the wait that was interrupted
            self.end()
            raise
        if error is None:
            return self._future.result()
        hold_daemon_at_exit()
        try:
            raise anew(error)
        finally:
            del self, error  # else error -> traceback -> this frame -> future -> error is a cycle

    def cancel(self) -> None:
        """Request the coroutine's cancellation, without waiting for it. Does nothing once it is done."""
        if not self._engine.guard.in_child and not self._future.done():
            self._engine.call_soon(self._cancel_on_loop)

    def end(self) -> None:
        """Cancel the coroutine and wait for its end, but no longer than STOP_SECONDS, and not twice in vain."""
        self.cancel()
        self.given_up = not self.wait(0 if self.given_up else STOP_SECONDS)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the coroutine's end, at most so long; returns whether it came.

        On the loop's own thread, and in a forked child, the end can't come while we wait, so this returns at once.
        """
        if self._engine.guard.in_child:
            return False  # without a look at the future, whose lock the parent may have held at the fork
        if not (self._future.done() or self._engine.is_current_thread):
            concurrent.futures.wait([self._future], timeout_seconds)
        return self._future.done()

    def add_done_callback(self, callback: Callable[[BaseException | None], object]) -> None:
        """Call ``callback(error or None)`` on the loop's thread when the coroutine is done, or now if it is."""
        self._future.add_done_callback(lambda future: callback(future.exception()))

    async def serve(self) -> None:
        """Run the coroutine, on the loop, and settle the call. Raises only the LoopThread's own cancellation."""
        try:
            with anyio.CancelScope() as self._scope:
                if not self._cancelled:
                    self.settle(await self._work())
            if not self._future.done():
                self._settle_cancelled()
        except asyncio.CancelledError as error:
            if was_cancelled():
                self.settle(error=self._engine.closed_error())
                raise
            self.settle(error=error)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.settle(error=error)
        finally:
            self._engine.calls.discard(self)
            del self  # for the same reason as in ``result``

    def settle(self, value: T | None = None, *, error: BaseException | None = None) -> None:
        """Give the outcome; the first one counts."""
        try:
            if error is None:
                self._future.set_result(value)  # type: ignore[arg-type]  # None only where T allows it
            else:
                self._future.set_exception(error)
        except concurrent.futures.InvalidStateError:
            pass
        finally:
            del error

    def _settle_cancelled(self) -> None:
        self.settle(error=ClosedError("this call was cancelled before it was done"))

    def _cancel_on_loop(self) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        else:  # it has not begun, and never will
            self._settle_cancelled()
            self._engine.calls.discard(self)


class _LoopEngine:
    """The thread, its loop and the calls on it."""

    _group: TaskGroup

    def __init__(self, name: str) -> None:
        self.guard = ForkGuard("this LoopThread")
        self.calls: set[LoopCall[Any]] = set()
        self.ended = False
        self._stops = False
        self._given_up = False
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callbacks: asyncio.Queue[Callable[[], object]] = asyncio.Queue()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def run(self) -> None:
        """Start the thread and wait for its loop. It ends by ``request_stop``, even if that comes first."""
        try:
            self._thread.start()
        except RuntimeError as error:  # "can't start new thread", among others at interpreter exit
            hold_daemon_at_exit()
            raise no_thread(error) or ClosedError(f"no thread for an event loop could be started: {error}") from error
        self._started.result()

    @property
    def is_current_thread(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run the callback on the loop, in a task, as anyio needs it; never if the loop has ended."""
        assert self._loop is not None
        call_on(self._loop, self._callbacks.put_nowait, callback)  # the thread's end settles what waits there

    def start(self, call: LoopCall[Any]) -> None:
        """Start the call on the loop, and settle it where that has ended already."""
        self.calls.add(call)
        context = _context()
        self.call_soon(lambda: context.run(self._group.start_soon, call.serve))
        if self.ended:  # looked at after the call was added; ``_main`` sets it before it looks at the calls
            self._settle_calls()

    def request_stop(self) -> None:
        """Cancel all calls and end the loop, without waiting. Does nothing in a forked child."""
        if self.guard.in_child:
            return
        self._stops = True
        if self._loop is not None:  # else ``_serve`` sees it, which sets ``_loop`` before it looks at ``_stops``
            self.call_soon(lambda: None)  # which wakes it

    def join(self, timeout_seconds: float, *, again: bool = False) -> bool:
        """Wait for the thread's end, at most so long; returns whether it came.

        Unless ``again``, it doesn't wait after a wait in vain for this, or for a call that is still running.
        """
        given_up = not again and (self._given_up or any(call.given_up for call in list(self.calls)))
        self._thread.join(0 if given_up else timeout_seconds)
        self._given_up = self._thread.is_alive()
        return not self._given_up

    def _main(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:  # for the threads that wait: this one has no caller
            if self._started.done():  # ``_serve`` has noted its own error; else other code stopped the loop
                _LOGGER.exception("the event loop of %s died", self._thread.name)
            else:
                self._failure = error
        finally:
            self.ended = True
            if not self._started.done():
                self._started.set_exception(self.closed_error())
            self._settle_calls()
            leave_openssl()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        close_executor_here_at_exit(self._loop)
        stand_still_at_forks()
        async with anyio.create_task_group() as self._group:
            self._started.set_result(None)
            while not self._stops:
                callback = await self._callbacks.get()
                try:
                    callback()
                except BaseException as error:
                    self._failure = error  # for the calls under way, which are cancelled now
                    raise
                del callback  # else its call is kept until the next one
            self._group.cancel_scope.cancel()

    def closed_error(self) -> ClosedError:
        """The reason why a call won't be done."""
        if self._stops:
            return ClosedError("the LoopThread was closed before this call was done")
        if self._failure is None:
            return ClosedError(
                f"other code on the event loop of {self._thread.name} stopped it, or cancelled this call"
            )
        error = ClosedError(f"the event loop of {self._thread.name} died of {self._failure!r}: make a new one")
        error.__cause__ = self._failure
        return error

    def _settle_calls(self) -> None:
        for call in list(self.calls):
            call.settle(error=self.closed_error())
        self.calls.clear()


def _context() -> Context:
    """The caller's context, but with asyncio as its async library: the caller may run on trio."""
    context = copy_context()
    if "sniffio" in sys.modules:
        context.run(sys.modules["sniffio"].current_async_library_cvar.set, "asyncio")
    return context


_engines: weakref.WeakSet[_LoopEngine] = weakref.WeakSet()


def _stop_at_exit() -> None:
    """Stop every loop of ours that is still running, within one bound for all; then anyio's threads of other loops.

    Its threads end with the task that a loop was run for, in a callback. A loop that is left before that and not
    closed never calls it: by Ctrl-C, by ``stop``, or by nest_asyncio's ``asyncio.run``, which always leaves it so. The
    interpreter, which waits for all threads, would wait for ever.
    """
    begin_exit()
    engines = [engine for engine in _engines if not engine.guard.in_child]
    for engine in engines:
        engine.request_stop()
    deadline = time.monotonic() + STOP_SECONDS
    for engine in engines:
        engine.join(max(0.0, deadline - time.monotonic()))
    for thread in threading.enumerate():
        if isinstance(thread, WorkerThread) and not (thread.stopping or thread.loop.is_running()):
            thread.stop()


def _join_late_loops() -> None:
    """Wait for loops that didn't end in time because they waited for a call in a thread: those have all ended by now.

    A loop's thread that reached its next line of Python after the interpreter's end would stop amid a call of torch's,
    which aborts the process.
    """
    deadline = time.monotonic() + LATE_SECONDS
    for engine in [engine for engine in _engines if not engine.guard.in_child]:
        engine.join(max(0.0, deadline - time.monotonic()), again=True)
    end_calls(LATE_CALL_SECONDS)


# Not ``atexit``: that comes after the interpreter has joined all threads that aren't daemons, and anyio's worker
# threads aren't. They end with the loop they work for, so the loop must end first. concurrent.futures does the same.
threading._register_atexit(_stop_at_exit)  # type: ignore[attr-defined]
atexit.register(_join_late_loops)


class LoopThread:
    """Owns one thread and the event loop in it, which runs at once.

    ``close`` or a ``with`` block ends it, and so do collection and interpreter exit: coroutines are cancelled and get
    STOP_SECONDS to end. The thread is a daemon, so it can't keep the process alive.

    Thread-safe. Not fork-safe: in a child every call raises WrongLoop and ``close`` does nothing; the parent's goes on
    undisturbed.

    Args:
        name: The thread's name.

    Raises:
        ClosedError: The thread or its loop can't be started.
    """

    def __init__(self, *, name: str = "asyncfetch loop") -> None:
        self._engine = _LoopEngine(name)
        self._closed = False
        # It may run in the middle of anything, even on the loop's own thread, so it doesn't wait. At exit our hook is
        # earlier. It comes before the start, where Ctrl-C may strike and leave this without an owner.
        weakref.finalize(self, self._engine.request_stop).atexit = False
        self._engine.run()
        _engines.add(self._engine)

    def run(self, async_fn: Callable[..., Awaitable[T]], *args: Any) -> T:  # noqa: ANN401
        """Run ``async_fn(*args)`` on the loop and wait for its result; see ``LoopCall.result``.

        Raises:
            WrongLoop: Called on the loop's own thread, which would wait for itself, or in a forked child.
            ClosedError: The LoopThread is closed, or was before the coroutine was done.
        """
        call = self.call(async_fn, *args)
        try:
            call.start()
            return call.result()
        except BaseException:  # an interrupt may strike anywhere in there
            call.end()
            raise
        finally:
            del call  # for the same reason as in ``LoopCall.result``

    def start(self, async_fn: Callable[..., Awaitable[T]], *args: Any) -> LoopCall[T]:  # noqa: ANN401
        """Start ``async_fn(*args)`` on the loop; raises as ``run`` does."""
        call = self.call(async_fn, *args)
        call.start()
        return call

    def call(self, async_fn: Callable[..., Awaitable[T]], *args: Any) -> LoopCall[T]:  # noqa: ANN401
        """``async_fn(*args)``, not started yet, so its owner can end it from the start on. Raises as ``run`` does."""
        self._engine.guard.check()
        if self._closed or self._engine.ended:  # asked first: the system gives an ended thread's number to a new one
            hold_daemon_at_exit()
            if not self._closed:  # other code ended its loop
                raise self._engine.closed_error()
            raise ClosedError("this LoopThread is closed: make a new one")
        if self._engine.is_current_thread:
            raise WrongLoop("called on the LoopThread's own thread, where waiting would stop its loop: await instead")
        return LoopCall(self._engine, partial(async_fn, *args))

    async def acall(self, async_fn: Callable[..., Awaitable[T]], *args: Any) -> T:  # noqa: ANN401
        """Run ``async_fn(*args)`` on the loop for a coroutine of another loop.

        Cancelled, however often, it cancels the coroutine and waits for its end: until then the coroutine may still
        write to its arguments.

        Raises:
            WrongLoop, ClosedError: As ``run`` does.
        """
        loop = running_loop("this call")
        ended = asyncio.Event()
        call = self.start(async_fn, *args)
        call.add_done_callback(lambda _: call_on(loop, ended.set))
        try:
            await ended.wait()
        except BaseException:
            call.cancel()
            while not ended.is_set():
                with suppress(asyncio.CancelledError), anyio.CancelScope(shield=True):
                    await ended.wait()  # a scope shields from scopes; a second ``Task.cancel()`` comes through
            raise
        return call.result()

    def close(self) -> None:
        """Cancel all calls, end the thread and wait for that, at most STOP_SECONDS. Idempotent."""
        if self._engine.guard.in_child:
            return
        self._closed = True
        self._engine.request_stop()
        if not self._engine.is_current_thread and not self._engine.join(STOP_SECONDS):
            _LOGGER.warning("the event loop did not end within %s s: a coroutine on it blocks", STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed or self._engine.ended else f"{len(self._engine.calls)} calls"
        return f"<LoopThread {state}>"


class BackgroundContext(Generic[T]):
    """An async context that is entered on a loop thread, and left there by the same task, as task groups require.

    Closing the thread leaves it as well.

    Args:
        thread: The loop thread.
        make: Returns the context; called on the loop.
        name: Its name, for an error.
    """

    def __init__(self, thread: LoopThread, make: Callable[[], AbstractAsyncContextManager[T]], *, name: str) -> None:
        self._guard = ForkGuard(name)
        self._thread = thread
        entered = self._entered = SharedFuture[T]()  # not self below: the thread must not keep its owner alive
        self._left = asyncio.Event()
        self._call = thread.start(_keep, make, entered, self._left)
        self._call.add_done_callback(lambda error: _settle(entered, name, error))

    @property
    def has_failed(self) -> bool:
        """True if it could not be entered."""
        return self._entered.done() and self._entered.exception() is not None

    def value(self) -> T:
        """The entered value; waits for it. Raises the error of entering, or ClosedError."""
        if self._entered.exception() is not None:
            hold_daemon_at_exit()
        return self._entered.result()

    def leave(self) -> None:
        """Leave it and wait for that; raises the error of leaving. Nothing if not entered, or in a forked child."""
        if not self._guard.in_child and self._entered.done() and not self.has_failed:
            self._thread.run(_set, self._left)
            self._call.result()


async def _keep(
    make: Callable[[], AbstractAsyncContextManager[Any]], entered: SharedFuture[Any], left: asyncio.Event
) -> None:
    async with AsyncExitStack() as stack:
        try:
            value = await stack.enter_async_context(make())
        except Exception as error:  # noqa: BLE001 - for the callers of ``value``
            entered.fail(error)
            return
        entered.set_result(value)
        await left.wait()


async def _set(event: asyncio.Event) -> None:
    event.set()


def _settle(entered: Future[Any], name: str, error: BaseException | None) -> None:
    if not entered.done():
        entered.set_exception(error or ClosedError(f"{name} was closed while it was being opened"))

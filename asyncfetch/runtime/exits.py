"""The interpreter's exit, from the end of the program's main thread on.

Daemon threads run on for a moment. Loops are stopped meanwhile, and what is asked of them is an error, which a daemon
that waits would print though nobody wants to know. From Python 3.12 on no thread can be started, so what is closed then
is closed in those that are there.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio import to_thread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["begin_exit", "close_executor_here_at_exit", "hold_daemon_at_exit", "in_daemon", "in_thread"]

T = TypeVar("T")

_exiting = threading.Event()


def begin_exit() -> None:
    """The main thread is over."""
    _exiting.set()


def hold_daemon_at_exit() -> None:
    """Comes before an error is raised to a thread: a daemon gets no further than here when the interpreter exits.

    It ends with the process, as every daemon does that wants to run Python a moment later.
    """
    if _exiting.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


def close_executor_here_at_exit(loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop start no thread to close its default executor when the interpreter exits.

    The executor's threads are then seen off by ``concurrent.futures``, which comes after our loops.
    """
    close = loop.shutdown_default_executor

    async def close_unless_exiting(*timeout: Any) -> None:  # noqa: ANN401 - Python 3.11 has none
        if not _exiting.is_set():
            await close(*timeout)

    loop.shutdown_default_executor = close_unless_exiting  # type: ignore[method-assign]


async def in_thread(function: Callable[[], T]) -> T:
    """Return what ``function()`` does, from a thread that waits for nobody's turn; from this one if there is none."""
    began = False

    def run() -> T:
        nonlocal began
        began = True
        return function()

    try:
        return await to_thread.run_sync(run, limiter=anyio.CapacityLimiter(1))
    except RuntimeError:
        if began:
            raise
        return run()


async def in_daemon(function: Callable[[], T], *, name: str) -> T:
    """Return what ``function()`` does, from its own thread, which neither a cancelled caller nor the exit waits for.

    Raises:
        RuntimeError: No thread can be started.
        Exception: What the function raises.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(outcome, function), name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _settle(outcome: Future[T], function: Callable[[], T]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:  # noqa: BLE001 - it is raised to who waits
        outcome.set_exception(error)

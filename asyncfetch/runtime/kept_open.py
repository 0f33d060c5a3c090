"""An async context manager for owners that aren't coroutines."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from asyncfetch.errors import ClosedError
from asyncfetch.runtime.exits import hold_daemon_at_exit
from asyncfetch.runtime.failures import copied, kept
from asyncfetch.runtime.fork import ForkGuard

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.runtime.loop_thread import LoopThread

__all__ = ["KeptOpen"]

T = TypeVar("T")


class KeptOpen(Generic[T]):
    """Enters it on a loop thread, and leaves it there in the very task that entered it, as task groups insist on.

    Closing the thread leaves it as well.

    Args:
        thread: Where it lives.
        make: Called on the loop; what it returns is entered.
        name: What it is, for an error.
    """

    def __init__(self, thread: LoopThread, make: Callable[[], AbstractAsyncContextManager[T]], *, name: str) -> None:
        self._guard = ForkGuard(name)
        self._thread = thread
        self._entered: Future[T] = Future()
        self._leave: Future[Callable[[], object]] = Future()
        entered, leave = self._entered, self._leave  # not self: the thread must not keep its owner alive
        self._call = thread.start(_keep, make, entered, leave)
        self._call.add_done_callback(lambda error: _settle(entered, name, error))

    @property
    def has_failed(self) -> bool:
        """Whether it could not be entered."""
        return self._entered.done() and self._entered.exception() is not None

    def value(self) -> T:
        """What entering gave; waits for it. Raises what entering raised, or ClosedError."""
        error = self._entered.exception()
        if error is None:
            return self._entered.result()
        hold_daemon_at_exit()
        raise copied(error)

    def leave(self) -> None:
        """Leave it and wait until that is done; raises what leaving raises.

        Does nothing where it wasn't entered, and in a forked child.
        """
        if not self._guard.in_child and self._leave.done():
            self._thread.run(_call, self._leave.result())
            self._call.result()


async def _keep(
    make: Callable[[], AbstractAsyncContextManager[Any]],
    entered: Future[Any],
    leave: Future[Callable[[], object]],
) -> None:
    left = anyio.Event()
    async with AsyncExitStack() as stack:
        try:
            value = await stack.enter_async_context(make())
        except Exception as error:  # noqa: BLE001 - it is for those who ask for the value
            entered.set_exception(kept(error))
            return
        leave.set_result(left.set)
        entered.set_result(value)
        await left.wait()


async def _call(function: Callable[[], object]) -> None:
    function()


def _settle(entered: Future[Any], name: str, error: BaseException | None) -> None:
    if not entered.done():
        entered.set_exception(error or ClosedError(f"{name} was closed while it was being opened"))

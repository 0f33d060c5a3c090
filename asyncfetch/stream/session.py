"""An open dataset on a loop in a thread, kept from one synchronous pass to the next."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from asyncfetch.errors import ClosedError, anew
from asyncfetch.observe import Histogram
from asyncfetch.runtime import LoopThread
from asyncfetch.runtime.fork import ForkGuard

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.lerobot import DatasetStatistics
    from asyncfetch.stream.readable import Readable

__all__ = ["Session"]

R = TypeVar("R", bound="Readable")


class Session(Generic[R]):
    """A loop thread with one thing open on it: a dataset, or a mixture of them.

    Belongs to the process that made it. Collected or closed, it ends its thread and with it all that is open.

    Args:
        opener: Gives it; it is entered on the loop thread.

    Raises:
        AsyncFetchError: It can't be opened, by ``opened``.
    """

    def __init__(self, opener: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        self._guard = ForkGuard("the open dataset of this stream")
        self._opened: Future[R] = Future()
        self.hand_over = Histogram()
        """Of the samples, from this thread to its consumers."""
        self.thread = LoopThread(name="asyncfetch stream")
        opened = self._opened  # not self: the thread must not keep the session alive
        self._call = self.thread.start(_keep_open, opener, opened)
        self._call.add_done_callback(lambda error: _settle(opened, error))

    @property
    def is_usable(self) -> bool:
        """False in a forked child, after ``close``, and where it could not be opened."""
        return not self._guard.in_child and not (self._opened.done() and self._opened.exception() is not None)

    def opened(self) -> R:
        """What is open; waits for it."""
        try:
            error = self._opened.exception()
        except BaseException:  # it is the wait that was interrupted
            self.close()
            raise
        if error is not None:
            self.close()
            raise anew(error)
        return self._opened.result()

    def statistics(self) -> DatasetStatistics:
        """Of what is open, taken on its loop, and of the way to its consumers; waits for it, and raises, as opened."""
        self._guard.check()
        opened = self.opened()  # waited for here: on the loop it would keep itself from being opened

        async def take() -> DatasetStatistics:
            return opened.statistics()

        return replace(self.thread.run(take), hand_over=self.hand_over.snapshot())

    def close(self) -> None:
        """End the thread. Does nothing in a forked child."""
        self.thread.close()


async def _keep_open(opener: Callable[[], AbstractAsyncContextManager[R]], opened: Future[R]) -> None:
    async with opener() as value:
        opened.set_result(value)
        await anyio.sleep_forever()


def _settle(opened: Future[R], error: BaseException | None) -> None:
    if not opened.done():
        opened.set_exception(error or ClosedError("the stream was closed while its dataset was being opened"))

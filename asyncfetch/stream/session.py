"""An open dataset on a loop in a thread, kept from one synchronous pass to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from asyncfetch.errors import NotFound
from asyncfetch.observe import Histogram
from asyncfetch.runtime import LoopThread
from asyncfetch.runtime.fork import ForkGuard
from asyncfetch.runtime.loop_thread import BackgroundContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.lerobot import DatasetStatistics
    from asyncfetch.stream.protocols import Readable

__all__ = ["DatasetSession"]

R = TypeVar("R", bound="Readable")


class DatasetSession(Generic[R]):
    """A loop thread with one thing open on it: a dataset, or a mixture of them.

    Belongs to the process that made it. Collected or closed, it ends its thread and with it all that is open.

    Args:
        opener: Gives it; it is entered on the loop thread.

    Raises:
        AsyncFetchError: It can't be opened, by ``opened``.
    """

    def __init__(self, opener: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        self._guard = ForkGuard("the open dataset of this stream")
        self.hand_over = Histogram()
        """Durations of the samples' way from this thread to its consumers."""
        self.thread = LoopThread(name="asyncfetch stream")
        self._kept = BackgroundContext(self.thread, opener, name="the dataset of this stream")

    @property
    def is_usable(self) -> bool:
        """False in a forked child, and where it could not be opened."""
        return not self._guard.in_child and not self._kept.has_failed

    def opened(self) -> R:
        """Return what is open; waits for it. Whatever ends the wait without it closes the session."""
        try:
            return self._kept.value()
        except BaseException as error:
            self.close()
            if isinstance(error, NotFound):  # most often a typing error: the way to it tells nothing
                raise error.with_traceback(None) from None
            raise

    def statistics(self) -> DatasetStatistics:
        """Return those of what is open, taken on its loop, and of the way to its consumers; waits, raises as opened."""
        self._guard.check()
        opened = self.opened()  # waited for here: on the loop it would keep itself from being opened

        async def take() -> DatasetStatistics:
            return opened.statistics()

        return replace(self.thread.run(take), hand_over=self.hand_over.snapshot())

    def close(self) -> None:
        """End the thread. Does nothing in a forked child."""
        self.thread.close()

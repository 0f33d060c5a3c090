"""An open dataset on a loop in a thread, kept from one synchronous pass to the next."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from asyncfetch.errors import ClosedError
from asyncfetch.observe import Histogram
from asyncfetch.runtime import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.lerobot import DatasetStatistics, LeRobotDataset

__all__ = ["Session"]


class Session:
    """A loop thread with one dataset open on it.

    Belongs to the process that made it. Collected or closed, it ends its thread and with it all that is open.

    Args:
        open_dataset: Gives the dataset, which is entered on the loop thread.

    Raises:
        AsyncFetchError: The dataset can't be opened, by ``dataset``.
    """

    def __init__(self, open_dataset: Callable[[], AbstractAsyncContextManager[LeRobotDataset]]) -> None:
        self._pid = os.getpid()
        self._opened: Future[LeRobotDataset] = Future()
        self.hand_over = Histogram()
        """Of the samples, from this thread to its consumers."""
        self.thread = LoopThread(name="asyncfetch stream")
        opened = self._opened  # not self: the thread must not keep the session alive
        self._call = self.thread.start(_keep_open, open_dataset, opened)
        self._call.add_done_callback(lambda error: _settle(opened, error))

    @property
    def is_usable(self) -> bool:
        """False in a forked child, after ``close``, and where the dataset could not be opened."""
        return self._pid == os.getpid() and not (self._opened.done() and self._opened.exception() is not None)

    def dataset(self) -> LeRobotDataset:
        """The open dataset; waits for it."""
        try:
            return self._opened.result()
        except BaseException:
            self.close()
            raise

    def statistics(self) -> DatasetStatistics:
        """Of the dataset, taken on its loop, and of the way to its consumers."""

        async def take() -> DatasetStatistics:
            return self.dataset().statistics()

        return replace(self.thread.run(take), hand_over=self.hand_over.snapshot())

    def close(self) -> None:
        """End the thread. Does nothing in a forked child."""
        self.thread.close()


async def _keep_open(
    open_dataset: Callable[[], AbstractAsyncContextManager[LeRobotDataset]], opened: Future[LeRobotDataset]
) -> None:
    async with open_dataset() as dataset:
        opened.set_result(dataset)
        await anyio.sleep_forever()


def _settle(opened: Future[LeRobotDataset], error: BaseException | None) -> None:
    if not opened.done():
        opened.set_exception(error or ClosedError("the stream was closed while its dataset was being opened"))

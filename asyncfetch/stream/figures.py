"""Figures of what the processes that read for another one have done, in memory that both have mapped.

Nobody asks a worker, which may be in the middle of something: it writes now and then, and whoever has it looks. The
times of its consumer are numbers that it counts in there; its statistics are pickled beside them, twice a second.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from asyncfetch.observe.waits import FIGURES, WaitAccount, Waits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncfetch.lerobot import DatasetStatistics

__all__ = ["BOARD_BYTES", "PUBLISH_SECONDS", "FiguresBoard", "FiguresPage"]

WORKERS = 64
"""That have a page; what those beyond them do isn't known elsewhere."""
PUBLISH_SECONDS = 0.5
SILENT_SECONDS = 5.0
"""A process that has written nothing for so long has ended: it doesn't wait any longer."""
_FIGURES_BYTES = 8 * FIGURES
_LOADER, _NUM_WORKERS, _PUBLISHED_AT, _VERSION, _LENGTHS = range(5)
_HEAD_BYTES = 8 * 6
PAGE_BYTES = 64 * 1024
_PICKLED_AT = _FIGURES_BYTES + _HEAD_BYTES
_PICKLED_BYTES = (PAGE_BYTES - _PICKLED_AT) // 2
"""Of each of the latest two snapshots: while one is written the other stays, and if the writer is killed then."""
BOARD_BYTES = WORKERS * PAGE_BYTES
"""The size of all pages; what isn't written to takes no memory."""


class FiguresPage:
    """The page of one worker: written there, on its loop's thread, and read in any process that has it mapped."""

    def __init__(self, memory: memoryview, descriptor: int | None = None) -> None:
        """``descriptor`` is that of the memory's file, for a process that is started with this page."""
        self._memory = memory
        self._descriptor = descriptor
        self.numbers = memory[:_FIGURES_BYTES].cast("d")
        """Numbers in which the worker's account counts."""
        self._head = memory[_FIGURES_BYTES:_PICKLED_AT].cast("d")

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[FiguresPage]:
        """Make a page that goes, in this block, to a process that multiprocessing starts, and stays mapped after it."""
        with tempfile.TemporaryFile() as file:
            file.truncate(PAGE_BYTES)
            page = cls(memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)), file.fileno())
            yield page
            page._descriptor = None

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._descriptor is not None
        return _mapped, (reduction.DupFd(self._descriptor),)

    def begin(self, loader: int, num_workers: int) -> None:
        """Belong to a worker of this loader from now on."""
        head = self._head
        head[_VERSION] = head[_LENGTHS] = 0
        head[_LOADER], head[_NUM_WORKERS], head[_PUBLISHED_AT] = loader % 2**48, num_workers, time.perf_counter()

    def publish(self, statistics: DatasetStatistics) -> None:
        """Write a snapshot. One that is too long goes without what is known of each host."""
        pickled = pickle.dumps(statistics, pickle.HIGHEST_PROTOCOL)
        if len(pickled) > _PICKLED_BYTES:
            pickled = pickle.dumps(statistics.without_hosts(), pickle.HIGHEST_PROTOCOL)
        head = self._head
        head[_PUBLISHED_AT] = time.perf_counter()
        if len(pickled) <= _PICKLED_BYTES:
            version = int(head[_VERSION]) + 1
            start = _PICKLED_AT + version % 2 * _PICKLED_BYTES
            self._memory[start : start + len(pickled)] = pickled
            head[_LENGTHS + version % 2] = len(pickled)
            head[_VERSION] = version

    @property
    def loader(self) -> tuple[float, int]:
        """The time at which it was last written, and the loader's number."""
        return self._head[_PUBLISHED_AT], int(self._head[_LOADER])

    @property
    def num_workers(self) -> int:
        """The loader's workers; 0 where nobody has written here."""
        return int(self._head[_NUM_WORKERS])

    def waits(self) -> Waits:
        """Return where the time of the worker's consumer went."""
        return WaitAccount.read(self.numbers, min(time.perf_counter(), self._head[_PUBLISHED_AT] + SILENT_SECONDS))

    def statistics(self) -> DatasetStatistics | None:
        """Return the latest snapshot; None where there is none, or one is being written again and again."""
        for _ in range(100):
            version = int(self._head[_VERSION])
            start, length = _PICKLED_AT + version % 2 * _PICKLED_BYTES, int(self._head[_LENGTHS + version % 2])
            pickled = bytes(self._memory[start : start + length])
            if version == self._head[_VERSION]:  # else two have been written meanwhile, it may be
                found: DatasetStatistics | None = pickle.loads(pickled) if pickled else None
                return found
        return None


def _mapped(descriptor: Any) -> FiguresPage:  # noqa: ANN401 - multiprocessing's own
    number = descriptor.detach()
    try:
        return FiguresPage(memoryview(mmap.mmap(number, PAGE_BYTES)))
    finally:
        os.close(number)


class FiguresBoard:
    """The pages of a rank's workers.

    Args:
        memory: ``BOARD_BYTES`` zeros, or what other processes made of them.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def page(self, worker: int) -> FiguresPage | None:
        """Return a worker's page; None where there is none left."""
        return FiguresPage(self._memory[worker * PAGE_BYTES : (worker + 1) * PAGE_BYTES]) if worker < WORKERS else None

    def latest(self) -> Sequence[FiguresPage]:
        """Return the pages of the latest loader's workers; none where no worker has begun."""
        pages = [page for worker in range(WORKERS) if (page := self.page(worker)) is not None and page.num_workers]
        if not pages:
            return []
        _, loader = max(page.loader for page in pages)
        return [page for page in pages if page.loader[1] == loader]

"""A merge's pieces on this machine: on this loop with threads, or in processes when they pay.

Pieces compute little: the pictures of a video are copied without the GIL, a header of 38,400 frames takes 43 ms, an
episode's rows and their summary 2 ms. For most merges a process, which takes 1.1 s of CPU for its imports, costs more
than it saves, so ``processes_pay`` decides by the plan. Sums are made here, where they are needed.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncfetch.fetch import Fetcher
from asyncfetch.merge.executor import WorkerSetup
from asyncfetch.merge.summaries import add
from asyncfetch.merge.worker_process import PieceProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.executor import Piece

START_SECONDS = 1.5
"""Seconds of a processor for the imports of one process."""


def processes_pay(work_seconds: float, workers: int) -> bool:
    """Return whether work ends earlier with so many processes than with threads of this one. Pure.

    Threads count as one processor, since most of the work holds the GIL. The gain must be twice the time that a process
    takes to start, since it is an estimate, and processes take memory, too.
    """
    return workers > 1 and work_seconds - work_seconds / workers > 2 * START_SECONDS


class OnThisMachine:
    """An Executor that starts a process for each worker if there is enough work.

    Args:
        pays: Decides, from seconds of work and a number of workers, whether processes pay.

    Raises:
        WorkerError: A process died, or can't be started.
    """

    def __init__(self, pays: Callable[[float, int], bool] = processes_pay) -> None:
        self._pays = pays

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_LocalPool]:
        """Open the workers; leaving the block ends the processes at once."""
        async with Fetcher(fetch) as fetcher, AsyncExitStack() as processes:
            yield _LocalPool(WorkerSetup(fetcher, wrote), workers or os.cpu_count() or 1, fetch, processes, self._pays)


class InProcess(OnThisMachine):
    """An Executor without processes."""

    def __init__(self) -> None:
        super().__init__(pays=lambda _seconds, _workers: False)


class _LocalPool:
    def __init__(
        self,
        setup: WorkerSetup,
        workers: int,
        fetch: FetchConfig,
        processes: AsyncExitStack,
        pays: Callable[[float, int], bool],
    ) -> None:
        self.workers = workers
        self.fetcher = setup.fetcher
        self._setup = setup
        if fetch.max_bytes_per_second is not None:  # a bound of each process
            fetch = replace(fetch, max_bytes_per_second=max(1, fetch.max_bytes_per_second // workers))
        self._fetch = fetch
        self._processes = processes
        self._idle: list[PieceProcess] = []
        self._pays = pays
        self._in_processes = False

    def expect(self, seconds: float) -> None:
        self._in_processes = seconds > 0 and self._pays(seconds, self.workers)

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        if not self._in_processes or piece is add:
            return await piece(self._setup, *arguments)
        if self._idle:
            worker = self._idle.pop()
        else:
            worker = await PieceProcess.start(self._fetch)
            self._processes.push_async_callback(worker.end)
        try:
            value = await worker.run(piece, arguments, self._setup.wrote)
        except BaseException:
            await worker.end()
            raise
        self._idle.append(worker)
        return value

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        return value

"""The places where pieces of a merge run: in this process, in others, or on a cluster.

On this machine they run on this loop with threads, or in processes when those pay. Pieces compute little: the pictures
of a video are copied without the GIL, a header of 38,400 frames takes 43 ms, an episode's rows and their summary 2 ms.
For most merges a process, which takes 1.1 s of CPU for its imports, costs more than it saves, so ``processes_pay``
decides by the plan.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from asyncfetch.fetch import Fetcher
from asyncfetch.merge.worker_process import PieceProcess, WorkerSetup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.worker_process import Piece


class WorkerPool(Protocol):
    """Open workers."""

    workers: int
    """Pieces that run at a time."""
    fetcher: Fetcher
    """The fetcher of this process, for the work around the pieces."""

    def expect(self, seconds: float) -> None:
        """Expect about so many seconds of one processor's work now; 0 for work that must stay in this process."""
        ...

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        """The piece's value."""
        ...


class Executor(Protocol):
    """The place where a merge's pieces run."""

    def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AbstractAsyncContextManager[WorkerPool]:
        """Open the workers for one merge. They are gone when the block is left.

        Args:
            fetch: Configuration for reading the sources.
            workers: Number of workers; None for the number of processors.
            wrote: ``WorkerSetup.wrote``, called as far as the executor hears of the pieces' writes.
        """
        ...


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
            workers = workers or os.cpu_count() or 1
            if fetch.max_bytes_per_second is not None:  # a bound of each process
                fetch = replace(fetch, max_bytes_per_second=max(1, fetch.max_bytes_per_second // workers))
            yield _LocalPool(workers, fetcher, wrote, fetch, self._pays, processes)


class InProcess(OnThisMachine):
    """An Executor without processes."""

    def __init__(self) -> None:
        super().__init__(pays=lambda _seconds, _workers: False)


@dataclass
class _LocalPool:
    workers: int
    fetcher: Fetcher
    wrote: Callable[[str, int], object]
    fetch: FetchConfig
    """Each process's."""
    pays: Callable[[float, int], bool]
    processes: AsyncExitStack
    idle: list[PieceProcess] = field(default_factory=list)
    in_processes: bool = False

    def expect(self, seconds: float) -> None:
        self.in_processes = seconds > 0 and self.pays(seconds, self.workers)

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        if not self.in_processes:
            return await piece(WorkerSetup(self.fetcher, self.wrote), *arguments)
        if self.idle:
            worker = self.idle.pop()
        else:
            worker = await PieceProcess.start(self.fetch)
            self.processes.push_async_callback(worker.end)
        try:
            value = await worker.run(piece, arguments, self.wrote)
        except BaseException:
            await worker.end()
            raise
        self.idle.append(worker)
        return value

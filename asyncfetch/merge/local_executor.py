"""A merge's pieces on this machine: coroutines on this loop, what blocks in threads, or in processes where they pay.

Little is computed for a piece: the pictures of a video are copied without the interpreter, a header of 38,400 frames
takes 43 ms, an episode's rows and their summary 2 ms. So for most merges to start a process, 1.1 s of CPU for imports,
costs more than it brings, and ``processes_pay`` decides by what the plan says. The reductions stay here, where their
values are wanted.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncfetch.fetch import Fetcher
from asyncfetch.merge.scheduler import WorkerSetup
from asyncfetch.merge.summaries import add
from asyncfetch.merge.worker_process import Child, processes_pay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.scheduler import TaskPiece

__all__ = ["InProcess", "OnThisMachine"]


class InProcess:
    """An Executor without processes."""

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_Loop]:
        """One fetcher for all pieces."""
        async with Fetcher(fetch) as fetcher:
            yield _Loop(WorkerSetup(fetcher, wrote), workers or os.cpu_count() or 1)


class _Loop:
    def __init__(self, place: WorkerSetup, workers: int) -> None:
        self.workers = workers
        self.fetcher = place.fetcher
        self._place = place

    def expect(self, seconds: float) -> None:
        """It is all done here."""

    async def run(self, piece: TaskPiece, *arguments: Any) -> Any:  # noqa: ANN401
        return await piece(self._place, *arguments)

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        return value


class OnThisMachine:
    """An Executor that starts a process for each worker where there is enough to do.

    Args:
        pays: Whether processes do so many seconds of work earlier, by so many workers.

    Raises:
        WorkerError: A process died, or can't be started.
    """

    def __init__(self, pays: Callable[[float, int], bool] = processes_pay) -> None:
        self._pays = pays

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_Processes]:
        """The processes are gone when the block is left, whatever they were doing."""
        async with Fetcher(fetch) as fetcher, AsyncExitStack() as children:
            place = WorkerSetup(fetcher, wrote)
            yield _Processes(place, workers or os.cpu_count() or 1, fetch, children, self._pays)


class _Processes(_Loop):
    def __init__(
        self,
        place: WorkerSetup,
        workers: int,
        fetch: FetchConfig,
        children: AsyncExitStack,
        pays: Callable[[float, int], bool],
    ) -> None:
        super().__init__(place, workers)
        if fetch.max_bytes_per_second is not None:  # which is each process's
            fetch = replace(fetch, max_bytes_per_second=max(1, fetch.max_bytes_per_second // workers))
        self._fetch = fetch
        self._children = children
        self._idle: list[Child] = []
        self._pay = pays
        self._is_worth_it = False

    def expect(self, seconds: float) -> None:
        self._is_worth_it = seconds > 0 and self._pay(seconds, self.workers)

    async def run(self, piece: TaskPiece, *arguments: Any) -> Any:  # noqa: ANN401
        if not self._is_worth_it or piece is add:
            return await super().run(piece, *arguments)
        if self._idle:
            child = self._idle.pop()
        else:
            child = await Child.start(self._fetch)
            self._children.push_async_callback(child.end)
        try:
            value = await child.do(piece, arguments, self._place.wrote)
        except BaseException:
            await child.end()
            raise
        self._idle.append(child)
        return value

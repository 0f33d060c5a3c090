"""The order in which a merge's work is done: each piece as soon as what it needs is there and a worker is free.

Of pieces that are ready the one furthest up the tree goes first. So values are combined before more are made, and at
any time there is about one for each worker and level, however many leaves there are.

Pieces form a graph: files that only need placing depend on nothing, what has to be reduced is combined two by two. The
graph is known beforehand and its shape is the plan's, so the result is the same whoever works on it and however fast;
there are no rounds, so what is slow delays its own ancestors and nothing else. n leaves are log2(n) combinations deep.

A piece is a coroutine function at the top of a module, called with a ``WorkerSetup`` and arguments that pickle. Where
it runs is the executor's to say: in this process, in others, on a cluster.
"""

from __future__ import annotations

import heapq
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import TaskGroup

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch import Fetcher

TaskPiece = Any
"""``async def piece(place: Workplace, *arguments)``, at the top of a module."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """All that a piece finds where it runs."""

    fetcher: Fetcher
    """Reads the sources, and writes where the destination isn't local."""
    wrote: Callable[[str, int], object]
    """Told where a file lies when it is finished, and its bytes so far."""


class TaskPool(Protocol):
    """Workers that are there. Values that ``run`` returns may be references; ``get`` has them brought here."""

    workers: int
    """Pieces that run at a time."""
    fetcher: Fetcher
    """The fetcher of this process, for what is done around the pieces."""

    def expect(self, seconds: float) -> None:
        """Expect so much work now: what one processor takes for it, about; 0 where it must stay in this process."""
        ...

    async def run(self, piece: TaskPiece, *arguments: Any) -> Any:  # noqa: ANN401
        """The piece's value, or its error. Arguments may be values of earlier calls."""
        ...

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        """Return what ``run`` returned, in this process."""
        ...


class Executor(Protocol):
    """The place where a merge's pieces run."""

    def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AbstractAsyncContextManager[TaskPool]:
        """Workers for one merge, gone when the block is left.

        Args:
            fetch: How the sources are read.
            workers: How many; None: as many as there are processors.
            wrote: Told what the pieces write, as far as the executor learns of it.
        """
        ...


class PendingTask:
    """A piece that was handed in.

    Args:
        depth: Of the pieces below it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._done = anyio.Event()
        self._value: Any = None

    async def value(self) -> Any:  # noqa: ANN401
        """Return the value as ``TaskPool.run`` did, once it has."""
        await self._done.wait()
        return self._value

    def settle(self, value: Any) -> None:  # noqa: ANN401
        """Give it its value."""
        self._value = value
        self._done.set()


class Schedule:
    """Hands pieces to a pool, each when its arguments are there: the deepest first, else as they were handed in.

    The first error comes out of the task group and cancels everything else.
    """

    def __init__(self, tasks: TaskGroup, pool: TaskPool) -> None:
        self._tasks = tasks
        self._pool = pool
        self._idle_workers = pool.workers
        self._waiting: list[tuple[int, int, anyio.Event]] = []
        self._submitted = 0

    def submit(self, piece: TaskPiece, *arguments: object) -> PendingTask:
        """Have it run. Of arguments that are pending the piece gets the values."""
        pending = PendingTask(max((one.depth + 1 for one in arguments if isinstance(one, PendingTask)), default=0))
        self._submitted += 1
        self._tasks.start_soon(self._run, pending, (-pending.depth, self._submitted), piece, arguments)
        return pending

    def reduce(self, piece: TaskPiece, leaves: Sequence[PendingTask]) -> PendingTask:
        """Combine at least one leaf to one value, neighbour with neighbour, in their order."""
        while len(leaves) > 1:
            pairs = [leaves[at : at + 2] for at in range(0, len(leaves), 2)]
            leaves = [self.submit(piece, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return leaves[0]

    async def get(self, pending: PendingTask) -> Any:  # noqa: ANN401
        """The value, in this process."""
        return await self._pool.get(await pending.value())

    def then(self, pending: PendingTask, call: Callable[[Any], Awaitable[object]]) -> None:
        """Await the call with the value, once it is there."""

        async def follow() -> None:
            await call(await self.get(pending))

        self._tasks.start_soon(follow)

    async def _run(
        self, pending: PendingTask, rank: tuple[int, int], piece: TaskPiece, arguments: Sequence[object]
    ) -> None:
        values = [await one.value() if isinstance(one, PendingTask) else one for one in arguments]
        async with self._worker(rank):
            value = await self._pool.run(piece, *values)
        pending.settle(value)

    @asynccontextmanager
    async def _worker(self, rank: tuple[int, int]) -> AsyncIterator[None]:
        """One to oneself; of those who wait the least rank gets the next."""
        if self._idle_workers:
            self._idle_workers -= 1
        else:
            turn = anyio.Event()
            heapq.heappush(self._waiting, (*rank, turn))
            await turn.wait()  # whoever is cancelled here is cancelled with all others
        yield
        if self._waiting:
            heapq.heappop(self._waiting)[-1].set()
        else:
            self._idle_workers += 1

"""Calls side by side, and values loaded once for all who ask."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio

from asyncfetch.errors import AsyncFetchError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterator

    from anyio.abc import TaskGroup

__all__ = ["Eventual", "RunSync", "SharedLRU", "Weighed", "gather", "ungrouped"]

T = TypeVar("T")


class RunSync(Protocol):
    """Runs a blocking call off the loop, as ``anyio.to_thread.run_sync`` does."""

    def __call__(self, func: Callable[[], T], /) -> Awaitable[T]:
        """Its result or its error, once it has ended; a cancelled caller waits for that too."""
        ...


@contextmanager
def ungrouped() -> Iterator[None]:
    """Around a task group: what comes out is the first error alone, not a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


async def gather(*calls: Callable[[], Awaitable[T]]) -> list[T]:
    """The results of all calls, run side by side, in the order of the arguments. The first error cancels the rest."""
    results: dict[int, T] = {}

    async def run(position: int, call: Callable[[], Awaitable[T]]) -> None:
        results[position] = await call()

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for position, call in enumerate(calls):
                tasks.start_soon(run, position, call)
    return [results[position] for position in range(len(calls))]


class Eventual(Generic[T]):
    """A call under way in somebody's task group. An error of ours is kept for those who ask for the result."""

    def __init__(self, tasks: TaskGroup, call: Callable[[], Awaitable[T]]) -> None:
        self._done = anyio.Event()
        self._results: list[T] = []
        self._error: AsyncFetchError | None = None
        tasks.start_soon(self._run, call)

    async def _run(self, call: Callable[[], Awaitable[T]]) -> None:
        try:
            self._results.append(await call())
        except AsyncFetchError as error:
            self._error = error
        self._done.set()

    async def get(self) -> T:
        """The result, as soon as it is there; or the call's error."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]


class Weighed(Protocol):
    """Knows its own weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        ...


K = TypeVar("K", bound="Hashable")
V = TypeVar("V", bound=Weighed)


class _Flight(Generic[V]):
    __slots__ = ("error", "landed", "value")

    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.value: V | None = None
        self.error: AsyncFetchError | None = None


class SharedLRU(Generic[K, V]):
    """Values by key, the least recently used dropped first, each loaded once however many ask at the same time.

    The first who asks loads in its own task, so this needs no owner and leaves nothing going. An error of ours reaches
    all who wait, each its own copy, and the next call tries again. Where the loading task is cancelled, one of those
    who wait starts over. A value heavier than the whole bound is handed out and not kept. For one loop; not
    thread-safe.

    Args:
        max_bytes: Bound on the weight of what is kept. What callers hold or load isn't counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._flights: dict[K, _Flight[V]] = {}

    def __repr__(self) -> str:
        loading = f", {len(self._flights)} loading" if self._flights else ""
        return f"<SharedLRU {len(self._kept)} kept, {self.nbytes} of {self.max_bytes} bytes{loading}>"

    async def get(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """The value of the key: kept, being loaded, or loaded now."""
        while True:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            flight = self._flights.get(key)
            if flight is None:
                return await self._load(key, load)
            await flight.landed.wait()
            if flight.error is not None:
                raise copy.copy(flight.error) from flight.error
            if flight.value is not None:
                return flight.value

    async def _load(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        flight = self._flights[key] = _Flight()
        try:
            value = flight.value = await load()
            self._keep(key, value)
        except AsyncFetchError as error:
            flight.error = error
            raise
        finally:
            del self._flights[key]
            flight.landed.set()
        return value

    def _keep(self, key: K, value: V) -> None:
        if value.nbytes > self.max_bytes:
            return
        self._kept[key] = value
        self.nbytes += value.nbytes
        while self.nbytes > self.max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes

"""Values by key, loaded once for all who ask, bounded by their weight."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio

from asyncfetch.errors import AsyncFetchError
from asyncfetch.runtime.failures import copied, kept

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

__all__ = ["LRUPart", "SharedLRU", "Weighed"]


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

    def __len__(self) -> int:
        """Values kept."""
        return len(self._kept)

    def get_nowait(self, key: K) -> V | None:
        """The value of the key, if it is kept."""
        value = self._kept.get(key)
        if value is not None:
            self._kept.move_to_end(key)
        return value

    async def get(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """The value of the key: kept, being loaded, or loaded now."""
        while True:
            value = self.get_nowait(key)
            if value is not None:
                return value
            flight = self._flights.get(key)
            if flight is None:
                return await self._load(key, load)
            await flight.landed.wait()
            if flight.error is not None:
                raise copied(flight.error)
            if flight.value is not None:
                return flight.value

    def clear(self, of: Callable[[K], bool] = lambda _: True) -> None:
        """Forget all values of such keys; those being loaded go to who waits for them, but aren't kept."""
        for key in [key for key in self._kept if of(key)]:
            self.nbytes -= self._kept.pop(key).nbytes
        for key in [key for key in self._flights if of(key)]:
            del self._flights[key]

    def kept(self, of: Callable[[K], bool]) -> list[V]:
        """The values of such keys."""
        return [value for key, value in self._kept.items() if of(key)]

    async def _load(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        flight = self._flights[key] = _Flight()
        try:
            value = flight.value = await load()
            if self._flights.get(key) is flight:
                self._keep(key, value)
        except AsyncFetchError as error:
            flight.error = kept(error)
            raise
        finally:
            if self._flights.get(key) is flight:  # not the one that came after a clear()
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


class LRUPart(Generic[K, V]):
    """One user's part of a SharedLRU that several have: its keys are its own, the bound is that of all together.

    Args:
        lru: Shared by all.
        number: The user's.
    """

    def __init__(self, lru: SharedLRU[tuple[int, K], V], number: int) -> None:
        self._lru = lru
        self._number = number

    def __repr__(self) -> str:
        return f"<part {self._number} of {self._lru!r}>"

    def __len__(self) -> int:
        """Values kept."""
        return len(self._lru.kept(self._is_own))

    @property
    def nbytes(self) -> int:
        """What they weigh."""
        return sum(value.nbytes for value in self._lru.kept(self._is_own))

    def get_nowait(self, key: K) -> V | None:
        """See SharedLRU, as for the others."""
        return self._lru.get_nowait((self._number, key))

    async def get(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """The value of the key: kept, being loaded, or loaded now."""
        return await self._lru.get((self._number, key), load)

    def clear(self) -> None:
        """Forget this part's values."""
        self._lru.clear(self._is_own)

    def _is_own(self, key: tuple[int, K]) -> bool:
        return key[0] == self._number

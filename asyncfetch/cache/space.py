"""Room in a cache: who gets it, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from asyncfetch.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from asyncfetch.ranges import ByteRange
    from asyncfetch.runtime.leased_lru import LeasedLRU, Reservation

__all__ = ["SpaceQueue", "require_room"]

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class _Waiter(Generic[K, V]):
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.served = anyio.Event()
        self.reservation: Reservation[K, V] | None = None


class SpaceQueue(Generic[K, V]):
    """Reservations in a LeasedLRU, first come, first served.

    A small request behind a large one waits for it: otherwise a stream of small ones would starve the large one.

    Whoever frees room (a lease or a reservation given back, entries dropped) calls ``grant`` afterwards. Bound to one
    loop, not thread-safe.
    """

    def __init__(self, lru: LeasedLRU[K, V]) -> None:
        self._lru = lru
        self._waiters: dict[_Waiter[K, V], None] = {}  # ordered, and one that leaves in the middle costs O(1)
        self._granting = False
        self.waited = 0
        """Requests that had to wait, so far."""

    def __len__(self) -> int:
        """Requests that are waiting."""
        return len(self._waiters)

    async def reserve(self, size_bytes: int) -> Reservation[K, V]:
        """Room for ``size_bytes``, after those who asked before. Cancelled, it gives its place and its room away."""
        reservation = self.reserve_nowait(size_bytes)
        if reservation is not None:
            return reservation
        self.waited += 1
        waiter: _Waiter[K, V] = _Waiter(size_bytes)
        self._waiters[waiter] = None
        try:
            await waiter.served.wait()
        except BaseException:
            self._waiters.pop(waiter, None)
            if waiter.reservation is not None:
                waiter.reservation.release()
            self.grant()  # it may have stood in the way of those behind
            raise
        assert waiter.reservation is not None
        return waiter.reservation

    def reserve_nowait(self, size_bytes: int) -> Reservation[K, V] | None:
        """Room for ``size_bytes`` if it is there and nobody waits for some, or None."""
        return None if self._waiters else self._lru.reserve(size_bytes)

    def grant(self) -> None:
        """Serve those at the head of the queue for whom there is room now."""
        if self._granting:
            return  # called back by an eviction of ours; the loop below looks again anyway
        self._granting = True
        try:
            while self._waiters:
                waiter = next(iter(self._waiters))
                reservation = self._lru.reserve(waiter.size_bytes)
                if reservation is None:
                    return
                del self._waiters[waiter]
                waiter.reservation = reservation
                waiter.served.set()
        finally:
            self._granting = False


def require_room(ranges: Iterable[ByteRange], max_bytes: int) -> None:
    """CacheError where the ranges, without those that bypass the cache, are larger than it is."""
    sizes = [byte_range.stop - byte_range.start for byte_range in set(ranges) if byte_range.stop is not None]
    needed_bytes = sum(size for size in sizes if size <= max_bytes)
    if needed_bytes > max_bytes:
        raise CacheError(
            f"{len(sizes)} ranges asked for at once need {needed_bytes} bytes, the cache has max_bytes={max_bytes}:"
            " ask for fewer at a time, read them with fetch_stream, or raise max_bytes"
        )

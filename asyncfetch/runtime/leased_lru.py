"""A byte-bounded LRU whose entries can be in use. A state machine: no loop, no clock, no waiting."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class LRUStatistics:
    """A snapshot. ``leased_bytes <= used_bytes`` and ``used_bytes + reserved_bytes <= max_bytes`` hold always."""

    max_bytes: int
    used_bytes: int
    """Bytes of all entries, and of those that left the table while they were leased."""
    leased_bytes: int
    """Part of ``used_bytes`` that can't be evicted now."""
    reserved_bytes: int
    """Bytes reserved for values to come."""
    entries: int
    """Entries that a lookup can find."""
    hits: int
    misses: int
    evictions: int
    """Entries that made room for a reservation; dropped and replaced ones don't count."""


class _Entry(Generic[K, V]):
    __slots__ = ("key", "leases", "listed", "size_bytes", "value")

    def __init__(self, key: K, value: V, size_bytes: int) -> None:
        self.key, self.value, self.size_bytes = key, value, size_bytes
        self.leases = 0
        self.listed = True


class EntryLease(Generic[K, V]):
    """Keeps one entry from eviction until ``release``; a second ``release`` does nothing."""

    __slots__ = ("_entry", "_lru", "_released", "value")

    def __init__(self, lru: LeasedLRU[K, V], entry: _Entry[K, V]) -> None:
        self._lru, self._entry, self._released = lru, entry, False
        self.value = entry.value
        """The committed value; valid after the release too, but then its bytes don't count any more."""
        lru._take(entry)

    def share(self) -> EntryLease[K, V]:
        """One more lease on the same entry, even if it was dropped or replaced; RuntimeError after the release."""
        if self._released:
            raise RuntimeError(f"the lease on {self._entry.key!r} was released")
        return EntryLease(self._lru, self._entry)

    def release(self) -> None:
        """Give the lease back. The entry whose last lease goes becomes the most recently used."""
        if not self._released:
            self._released = True
            self._lru._give_back(self._entry)


class RoomReservation(Generic[K, V]):
    """Room for one value: ``commit`` makes it an entry; ``release`` gives it back, once."""

    __slots__ = ("_lru", "_open", "size_bytes")

    def __init__(self, lru: LeasedLRU[K, V], size_bytes: int) -> None:
        self._lru, self.size_bytes, self._open = lru, size_bytes, True

    def commit(self, key: K, value: V) -> EntryLease[K, V]:
        """Turn the room into a leased entry. An earlier entry of the key is dropped; its leases stay valid.

        Raises:
            RuntimeError: The room was committed or released before.
        """
        if not self._open:
            raise RuntimeError(f"the {self.size_bytes} bytes reserved for {key!r} were committed or released before")
        self.release()
        return self._lru._commit(key, value, self.size_bytes)

    def release(self) -> None:
        """Give the room back."""
        if self._open:
            self._open = False
            self._lru._reserved_bytes -= self.size_bytes


class LeasedLRU(Generic[K, V]):
    """Values by key, within a bound in bytes.

    Room is reserved before a value is made, so the bound holds at any time. Making room evicts the least recently used
    entries without a lease; if that isn't enough, nothing is evicted and the reservation is refused. Nothing here
    waits.

    Not thread-safe, except ``statistics``, whose figures then can be one event apart.

    Args:
        max_bytes: Bound on entries and reservations together.
        on_evict: Called with key and value of each entry that leaves the table (evicted, dropped, replaced), once the
            table is consistent again, so it may call back. Its errors go to the caller of the verb.
    """

    def __init__(self, max_bytes: int, *, on_evict: Callable[[K, V], None] | None = None) -> None:
        self._max_bytes = max_bytes
        self._on_evict = on_evict
        self._entries: dict[K, _Entry[K, V]] = {}
        self._idle: OrderedDict[K, _Entry[K, V]] = OrderedDict()  # listed and not leased, least recently used first
        self._used_bytes = self._leased_bytes = self._reserved_bytes = 0
        self._hits = self._misses = self._evictions = 0

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return (
            f"<LeasedLRU {len(self)} entries, {self._used_bytes} used ({self._leased_bytes} leased) + "
            f"{self._reserved_bytes} reserved of {self._max_bytes} bytes>"
        )

    def lease(self, key: K) -> EntryLease[K, V] | None:
        """A lease on the entry of ``key``, or None. Counts as a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        return EntryLease(self, entry)

    def reserve(self, size_bytes: int) -> RoomReservation[K, V] | None:
        """Room for ``size_bytes``, or None if leases and reservations leave less than that."""
        if self._leased_bytes + self._reserved_bytes + size_bytes > self._max_bytes:
            return None
        victims = []
        while self._used_bytes + self._reserved_bytes + size_bytes > self._max_bytes:
            _, entry = self._idle.popitem(last=False)
            self._unlist(entry)
            victims.append(entry)
        self._evictions += len(victims)
        self._reserved_bytes += size_bytes
        reservation = RoomReservation(self, size_bytes)
        try:
            self._tell(victims)
        except BaseException:
            reservation.release()
            raise
        return reservation

    def drop(self, match: Callable[[K], bool]) -> int:
        """Forget the entries whose key matches; returns their number. Leased ones still count until their release.

        Looks at all entries; ``drop_keys`` only at those named.
        """
        return self.drop_keys([key for key in self._entries if match(key)])

    def drop_keys(self, keys: Iterable[K]) -> int:
        """Like ``drop``, for these keys. Unknown and repeated keys don't count."""
        victims = [self._entries[key] for key in dict.fromkeys(keys) if key in self._entries]
        for entry in victims:
            self._unlist(entry)
        self._tell(victims)
        return len(victims)

    def statistics(self) -> LRUStatistics:
        """A frozen snapshot."""
        return LRUStatistics(
            max_bytes=self._max_bytes,
            used_bytes=self._used_bytes,
            leased_bytes=self._leased_bytes,
            reserved_bytes=self._reserved_bytes,
            entries=len(self._entries),
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    def _commit(self, key: K, value: V, size_bytes: int) -> EntryLease[K, V]:
        replaced = self._entries.get(key)
        if replaced is not None:
            self._unlist(replaced)
        entry = self._entries[key] = _Entry(key, value, size_bytes)
        self._used_bytes += size_bytes
        lease = EntryLease(self, entry)
        if replaced is not None:
            self._tell([replaced])
        return lease

    def _take(self, entry: _Entry[K, V]) -> None:
        if entry.leases == 0:
            self._idle.pop(entry.key, None)
            self._leased_bytes += entry.size_bytes
        entry.leases += 1

    def _give_back(self, entry: _Entry[K, V]) -> None:
        entry.leases -= 1
        if entry.leases:
            return
        self._leased_bytes -= entry.size_bytes
        if entry.listed:
            self._idle[entry.key] = entry
        else:
            self._used_bytes -= entry.size_bytes

    def _unlist(self, entry: _Entry[K, V]) -> None:
        """Take an entry off the table; its bytes are free now, or with its last lease."""
        entry.listed = False
        del self._entries[entry.key]
        self._idle.pop(entry.key, None)
        if not entry.leases:
            self._used_bytes -= entry.size_bytes

    def _tell(self, gone: list[_Entry[K, V]]) -> None:
        if self._on_evict is not None:
            for entry in gone:
                self._on_evict(entry.key, entry.value)

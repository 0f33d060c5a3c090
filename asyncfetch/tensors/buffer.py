"""The fetch buffer: shards that came, bounded in bytes, and who may put one there. Safe to use from any thread."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncfetch.runtime.leased_lru import LeasedLRU
from asyncfetch.tensors.remote import tensor_on

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from asyncfetch.runtime.leased_lru import Reservation
    from asyncfetch.tensors.remote import RemoteTensor

__all__ = ["BufferStatistics", "FetchBuffer", "Shard", "Ticket"]


class Shard:
    """The bytes of one tensor on this side.

    Args:
        array: These, in this machine's byte order.
        dtype: What its server says that they are.
        shape: As above.
    """

    __slots__ = ("_tensor", "array", "dtype", "shape")

    def __init__(self, array: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> None:
        self.array = array
        self.dtype = dtype
        self.shape = shape
        self._tensor: torch.Tensor | None = None

    def is_of(self, remote: RemoteTensor) -> bool:
        """Whether it is what the remote tensor says."""
        return (self.dtype, self.shape) == (remote.dtype_name, remote.shape)

    def shared_tensor(self, remote: RemoteTensor) -> torch.Tensor:
        """A tensor on these very bytes, which all who ask share."""
        if self._tensor is None:
            self._tensor = tensor_on(self.array, remote)
        return self._tensor.view(remote.shape)

    @property
    def is_spoilt(self) -> bool:
        """Whether torch has seen somebody write to a shared tensor: all views of a tensor count their writes as one."""
        return self._tensor is not None and self._tensor._version > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatistics:
    """A snapshot. ``bytes + in_flight_bytes <= max_bytes`` always; counters are since the start."""

    entries: int
    """Shards kept."""
    bytes: int
    """Of these."""
    max_bytes: int
    in_flight: int
    """Shards being fetched."""
    in_flight_bytes: int
    """Room set aside for these; a shard that found none is fetched and not kept."""
    pinned_bytes: int
    """Of shards that aren't kept (any more), but are still in memory because somebody has a tensor on them."""
    hits: int
    """Shards that were asked for and kept."""
    misses: int
    """Shards that were asked for and not kept, whether they had to be fetched or were on their way."""
    evictions: int
    """Shards that made room for others."""
    cleared: int
    """Shards that a clear took out."""


class Ticket:
    """The right to put one shard into the buffer, once; a clear of that shard takes it away."""

    __slots__ = ("room", "shard_id", "void")

    def __init__(self, shard_id: str, room: Reservation[str, Shard] | None) -> None:
        self.shard_id = shard_id
        self.room = room
        """None where the buffer has no room for it."""
        self.void = False
        """Whether the shard was cleared since; who asks for it from then on must not be given what comes."""


class FetchBuffer:
    """Shards by id, the least recently used dropped first.

    Room is set aside before a shard is fetched. What is cleared while it is on its way is delivered to those who had
    asked, and not kept: its ticket is void.

    Args:
        max_bytes: Bound on what is kept and what room is set aside for. Tensors that callers hold don't count.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._lru: LeasedLRU[str, Shard] = LeasedLRU(max_bytes, on_evict=self._pin)
        self._tickets: dict[str, Ticket] = {}
        self._cleared = 0
        self._pins: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next_pin = 0

    def find(self, shard_ids: Iterable[str]) -> dict[str, Shard]:
        """Those that are kept, each counted as a hit; the others are misses."""
        found = {}
        with self._lock:
            for shard_id in shard_ids:
                lease = self._lru.lease(shard_id)
                if lease is not None:
                    found[shard_id] = lease.value
                    lease.release()
        return found

    def expect(self, shard_id: str, nbytes: int) -> Ticket:
        """A ticket for a shard that is about to be fetched, in the place of any older one; land or drop it."""
        with self._lock:
            ticket = self._tickets[shard_id] = Ticket(shard_id, self._lru.reserve(nbytes))
            return ticket

    def land(self, ticket: Ticket, shard: Shard) -> None:
        """Keep what came, where the ticket is still good and has room; give the ticket back."""
        with self._lock:
            if ticket.room is not None and not ticket.void:
                ticket.room.commit(ticket.shard_id, shard).release()
            else:
                self._pin(ticket.shard_id, shard)
            self._give_back(ticket)

    def drop(self, ticket: Ticket) -> None:
        """Give the ticket back; nothing came."""
        with self._lock:
            self._give_back(ticket)

    def clear(self, shard_ids: Collection[str] | None = None) -> int:
        """Forget these shards, or all; how many of them were kept. Those on their way won't be kept."""
        with self._lock:
            for shard_id in list(self._tickets) if shard_ids is None else shard_ids:
                if (ticket := self._tickets.pop(shard_id, None)) is not None:
                    ticket.void = True
            count = self._lru.drop(lambda _: True) if shard_ids is None else self._lru.drop_keys(shard_ids)
            self._cleared += count
        return count

    def statistics(self) -> BufferStatistics:
        """A snapshot."""
        with self._lock:
            kept = self._lru.statistics()
            return BufferStatistics(
                entries=kept.entries,
                bytes=kept.used_bytes,
                max_bytes=kept.max_bytes,
                in_flight=len(self._tickets),
                in_flight_bytes=kept.reserved_bytes,
                pinned_bytes=sum(nbytes for nbytes, _ in list(self._pins.values())),
                hits=kept.hits,
                misses=kept.misses,
                evictions=kept.evictions,
                cleared=self._cleared,
            )

    def _give_back(self, ticket: Ticket) -> None:
        if ticket.room is not None:
            ticket.room.release()
        if self._tickets.get(ticket.shard_id) is ticket:
            del self._tickets[ticket.shard_id]

    def _pin(self, shard_id: str, shard: Shard) -> None:
        """Count a shard that isn't kept until nobody has it; where nobody has it now, that is at once."""
        self._next_pin += 1
        # It takes no lock: it may run in any thread, in the middle of anything, also of what holds ours.
        end = weakref.ref(shard.array, partial(self._pins.pop, self._next_pin))
        self._pins[self._next_pin] = len(shard.array), end

"""Shards at a client: those on their way, each fetched once, and the fetch buffer.

The buffer is bounded in bytes, and safe to use from any thread.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from asyncfetch.errors import ClosedError
from asyncfetch.observe import Figures
from asyncfetch.runtime.leased_lru import LeasedLRU
from asyncfetch.runtime.single_flight import SingleFlight
from asyncfetch.tensors.remote import tensor_on

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    import numpy as np
    import torch
    from anyio.abc import TaskGroup
    from numpy.typing import NDArray

    from asyncfetch.runtime.leased_lru import RoomReservation
    from asyncfetch.tensors.remote import RemoteTensor

MAX_BATCH_SHARDS = 128
"""Bound on shards in one request; the server's limit."""
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Bound on one request for several shards. Their bytes are copied once more, so they should fit into the processor's
caches."""
ALONE_FROM_BYTES = 128 * 1024
"""From this size on, a shard comes by a request of its own, straight into its final memory. A request costs about as
much as a copy of 1 MiB; requests of this size share the connections evenly."""


def plan_batches(remotes: Sequence[RemoteTensor]) -> list[list[RemoteTensor]]:
    """Distinct shards as requests, each of one server, in order: large ones alone, small ones together. Pure."""
    batches: list[list[RemoteTensor]] = []
    open_batches: dict[str, tuple[list[RemoteTensor], int]] = {}
    for remote in remotes:
        size = remote.frame_bytes
        if size >= ALONE_FROM_BYTES:
            batches.append([remote])
            continue
        batch, nbytes = open_batches.get(remote.server, ([], MAX_BATCH_BYTES))
        if nbytes + size > MAX_BATCH_BYTES or len(batch) == MAX_BATCH_SHARDS:
            batch, nbytes = [], 0
            batches.append(batch)
        batch.append(remote)
        open_batches[remote.server] = batch, nbytes + size
    return batches


class FetchedShards(NamedTuple):
    """Fetched shards, by id."""

    shards: dict[str, Shard]
    copies: dict[str, NDArray[np.uint8]]
    """Copies of the bytes of some of them, for one caller each."""


class _ShardBatch:
    """The shards of one request, and their tickets until it has ended."""

    def __init__(self, remotes: Sequence[RemoteTensor], buffer: FetchBuffer) -> None:
        self.remotes = remotes
        self.tickets = [buffer.expect(remote.shard_id, remote.nbytes, batch=self) for remote in remotes]


class Flights:
    """Fetches shards, each once for all concurrent callers: a SingleFlight for each request of several shards.

    Errors are not kept: the next call tries again. The task group owns all requests; ``fetch`` fetches one batch.
    """

    def __init__(
        self,
        task_group: TaskGroup,
        buffer: FetchBuffer,
        fetch: Callable[[Sequence[RemoteTensor]], Awaitable[FetchedShards]],
    ) -> None:
        self._flights: SingleFlight[_ShardBatch, FetchedShards] = SingleFlight(task_group)
        self._buffer = buffer
        self._fetch = fetch

    async def bring(self, remotes: Sequence[RemoteTensor]) -> tuple[FetchedShards, list[Exception]]:
        """Distinct shards, the copies that no call has taken yet, and the errors of failed requests.

        It waits for all requests, even if some fail. Without any error, a shard that isn't returned doesn't exist.
        """
        awaited: dict[str, _ShardBatch] = {}
        for remote in remotes:
            batch = self._buffer.batch_of(remote.shard_id)
            if batch is not None and batch in self._flights:
                awaited[remote.shard_id] = batch
        for planned in plan_batches([remote for remote in remotes if remote.shard_id not in awaited]):
            awaited |= dict.fromkeys((remote.shard_id for remote in planned), _ShardBatch(planned, self._buffer))
        works = {batch: partial(self._bring, batch) for batch in awaited.values()}
        try:
            outcomes = dict(zip(works, await self._flights.outcomes(works), strict=True))
        except ClosedError:
            for batch in works:
                self._land(batch, {})
            raise
        brought = FetchedShards({}, {})
        for shard_id, batch in awaited.items():
            fetched = outcomes[batch]
            if isinstance(fetched, FetchedShards) and shard_id in fetched.shards:
                brought.shards[shard_id] = fetched.shards[shard_id]
                if shard_id in fetched.copies:
                    brought.copies[shard_id] = fetched.copies.pop(shard_id)
        return brought, [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]

    async def _bring(self, batch: _ShardBatch) -> FetchedShards:
        shards: dict[str, Shard] = {}
        try:
            fetched = await self._fetch(batch.remotes)
            shards = fetched.shards
            return fetched
        finally:
            self._land(batch, shards)

    def _land(self, batch: _ShardBatch, shards: dict[str, Shard]) -> None:
        """Keep the shards and give tickets back, once."""
        tickets, batch.tickets = batch.tickets, []
        for ticket in tickets:
            self._buffer.land(ticket, shards.get(ticket.shard_id))


@dataclass(eq=False, slots=True)
class Shard:
    """The bytes of one tensor at the client, in this machine's byte order; its dtype and shape are its server's."""

    array: NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]
    _tensor: torch.Tensor | None = None

    def shared_tensor(self, remote: RemoteTensor) -> torch.Tensor:
        """A tensor on these very bytes, shared by all callers."""
        if self._tensor is None:
            self._tensor = tensor_on(self.array, remote)
        return self._tensor.view(remote.shape)

    @property
    def is_spoilt(self) -> bool:
        """True if torch has seen a write to a shared tensor: all views of a tensor count their writes as one."""
        return self._tensor is not None and self._tensor._version > 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BufferStatistics(Figures):
    """A snapshot. ``bytes + in_flight_bytes <= max_bytes`` always; counters are since the start."""

    _telling: ClassVar[tuple[str, ...]] = ("entries", "bytes", "max_bytes", "in_flight", "hits", "misses", "evictions")
    _of_moment = ("entries", "bytes", "max_bytes", "in_flight", "in_flight_bytes", "pinned_bytes")

    entries: int
    """Shards kept."""
    bytes: int
    """Bytes of the shards kept."""
    max_bytes: int
    in_flight: int
    """Shards being fetched."""
    in_flight_bytes: int
    """Room reserved for these; a shard without room is fetched and not kept."""
    pinned_bytes: int
    """Bytes of shards that aren't kept (any more), but are still in memory because a tensor is on them."""
    hits: int
    """Requested shards that were kept."""
    misses: int
    """Requested shards that weren't kept: they had to be fetched, or were on their way."""
    evictions: int
    """Shards that made room for others."""
    cleared: int
    """Shards dropped by a clear."""


@dataclass(eq=False, slots=True)
class Ticket:
    """The right to put one shard into the buffer, once; a clear of that shard voids it."""

    shard_id: str
    room: RoomReservation[str, Shard] | None
    """None if the buffer has no room for it."""
    batch: _ShardBatch | None
    """What it comes with."""
    void: bool = False
    """True if the shard was cleared since: later calls must not get it."""


class FetchBuffer:
    """Shards by id, the least recently used dropped first.

    Room is reserved before a shard is fetched. A shard that is cleared on its way still goes to its callers, but isn't
    kept: its ticket is void.

    Args:
        max_bytes: Bound on kept shards and reserved room. Tensors that callers hold don't count.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._lru: LeasedLRU[str, Shard] = LeasedLRU(max_bytes, on_evict=self._pin)
        self._tickets: dict[str, Ticket] = {}
        self._cleared = 0
        self._pins: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next_pin = 0

    def find(self, shard_ids: Iterable[str]) -> dict[str, Shard]:
        """The kept ones of these shards, each counted as a hit; the others are misses."""
        found = {}
        with self._lock:
            for shard_id in shard_ids:
                lease = self._lru.lease(shard_id)
                if lease is not None:
                    found[shard_id] = lease.value
                    lease.release()
        return found

    def expect(self, shard_id: str, nbytes: int, batch: _ShardBatch | None = None) -> Ticket:
        """A ticket for a shard that is about to be fetched, in place of any older one; land it."""
        with self._lock:
            ticket = self._tickets[shard_id] = Ticket(shard_id, self._lru.reserve(nbytes), batch)
            return ticket

    def batch_of(self, shard_id: str) -> _ShardBatch | None:
        """What a shard comes with that is on its way, and wasn't cleared."""
        ticket = self._tickets.get(shard_id)
        return None if ticket is None else ticket.batch

    def land(self, ticket: Ticket, shard: Shard | None) -> None:
        """Give the ticket back; keep the shard, if there is one, and the ticket is still valid and has room."""
        with self._lock:
            if shard is not None and ticket.room is not None and not ticket.void:
                ticket.room.commit(ticket.shard_id, shard).release()
            elif shard is not None:
                self._pin(ticket.shard_id, shard)
            if ticket.room is not None:
                ticket.room.release()
            if self._tickets.get(ticket.shard_id) is ticket:
                del self._tickets[ticket.shard_id]

    def clear(self, shard_ids: Collection[str] | None = None) -> int:
        """Forget these shards, or all; returns how many were kept. Those on their way won't be kept."""
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
            kept = self._lru
            return BufferStatistics(
                entries=len(kept),
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

    def _pin(self, shard_id: str, shard: Shard) -> None:
        """Count a shard that isn't kept for as long as any tensor is on it."""
        self._next_pin += 1
        # It takes no lock: it may run in any thread, in the middle of anything, even while that holds our lock.
        end = weakref.ref(shard.array, partial(self._pins.pop, self._next_pin))
        self._pins[self._next_pin] = len(shard.array), end

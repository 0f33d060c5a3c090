"""Shards on their way: each is fetched once, however many tasks and threads ask."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import anyio

from asyncfetch.errors import ClosedError
from asyncfetch.runtime.cancellation import was_cancelled
from asyncfetch.runtime.failures import kept
from asyncfetch.tensors.stores import plan_batches

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import numpy as np
    from anyio.abc import TaskGroup
    from numpy.typing import NDArray

    from asyncfetch.tensors.buffer import FetchBuffer, Shard, Ticket
    from asyncfetch.tensors.remote import RemoteTensor

__all__ = ["Fetched", "Flights"]


class Fetched(NamedTuple):
    """What came, by id."""

    shards: dict[str, Shard]
    copies: dict[str, NDArray[np.uint8]]
    """Of the bytes of some of them, for one caller each."""


class _Flight:
    """One request under way and those who wait for it."""

    def __init__(self, tickets: list[Ticket]) -> None:
        self.tickets = tickets
        self.waiters = 0
        self.scope = anyio.CancelScope()
        self.landed = anyio.Event()
        self.fetched = Fetched({}, {})
        self.error: Exception | None = ClosedError("this TensorClient was closed before the shards came")
        """None when they have come."""


class Flights:
    """Fetches what isn't on its way yet, and waits for what is.

    Requests are children of the owner's task group, not of any caller: a cancelled one costs the others nothing. When
    the last who waits for a request is cancelled, so is the request. Errors are not kept: who asks next tries again.

    Belongs to the task group's loop.

    Args:
        task_group: The owner of all requests, entered.
        buffer: Where shards are kept, and who knows which of those under way were cleared.
        fetch: Brings one batch.
    """

    def __init__(
        self,
        task_group: TaskGroup,
        buffer: FetchBuffer,
        fetch: Callable[[Sequence[RemoteTensor]], Awaitable[Fetched]],
    ) -> None:
        self._task_group = task_group
        self._buffer = buffer
        self._fetch = fetch
        self._flights: dict[str, tuple[_Flight, Ticket]] = {}

    async def bring(self, remotes: Sequence[RemoteTensor]) -> tuple[Fetched, list[Exception]]:
        """Distinct shards, those copies that nobody has taken yet, and the errors of the requests that failed.

        All requests are waited for, whatever becomes of the others. A shard that is in no answer and for which no
        error stands isn't there.
        """
        awaited = {remote.shard_id: self._joinable(remote) for remote in remotes}
        for batch in plan_batches([remote for remote in remotes if awaited[remote.shard_id] is None]):
            flight = self._launch(batch)
            awaited |= dict.fromkeys((remote.shard_id for remote in batch), flight)
        flights = {id(flight): flight for flight in awaited.values() if flight is not None}.values()
        for flight in flights:
            flight.waiters += 1
        try:
            for flight in flights:
                await flight.landed.wait()
        except BaseException:
            await self._leave(list(flights))
            raise
        brought = Fetched({}, {})
        for shard_id, one in awaited.items():
            if one is not None and shard_id in one.fetched.shards:
                brought.shards[shard_id] = one.fetched.shards[shard_id]
                if shard_id in one.fetched.copies:
                    brought.copies[shard_id] = one.fetched.copies.pop(shard_id)
        return brought, [flight.error for flight in flights if flight.error is not None]

    def _joinable(self, remote: RemoteTensor) -> _Flight | None:
        flight, ticket = self._flights.get(remote.shard_id, (None, None))
        return None if ticket is None or ticket.void else flight

    def _launch(self, batch: list[RemoteTensor]) -> _Flight:
        flight = _Flight([self._buffer.expect(remote.shard_id, remote.nbytes) for remote in batch])
        for ticket in flight.tickets:
            self._flights[ticket.shard_id] = flight, ticket
        try:
            self._task_group.start_soon(self._fly, flight, batch)
        except RuntimeError as error:
            self._forget(flight)
            raise ClosedError("this TensorClient is closed") from error
        return flight

    async def _fly(self, flight: _Flight, batch: list[RemoteTensor]) -> None:
        try:
            with flight.scope:
                flight.fetched = await self._fetch(batch)
                flight.error = None
        except asyncio.CancelledError:
            # From a future that somebody else cancelled; let out, it would cancel the whole task group.
            if was_cancelled():
                raise
        except Exception as error:  # noqa: BLE001 - it goes to the waiters, whatever it is
            flight.error = kept(error)
        finally:
            self._forget(flight)
            flight.landed.set()

    async def _leave(self, flights: list[_Flight]) -> None:
        """A caller gives up: cancel the requests that nobody else waits for, and see them off."""
        abandoned = []
        for flight in flights:
            flight.waiters -= 1
            if not flight.waiters and not flight.landed.is_set():
                self._forget(flight)
                flight.scope.cancel()
                abandoned.append(flight)
        with anyio.CancelScope(shield=True):
            for flight in abandoned:
                await flight.landed.wait()

    def _forget(self, flight: _Flight) -> None:
        """Nobody joins it any more. What it brought is kept, tickets are given back."""
        for ticket in flight.tickets:
            if self._flights.get(ticket.shard_id, (None, None))[1] is ticket:
                del self._flights[ticket.shard_id]
            shard = flight.fetched.shards.get(ticket.shard_id)
            if shard is None:
                self._buffer.drop(ticket)
            else:
                self._buffer.land(ticket, shard)
        flight.tickets = []

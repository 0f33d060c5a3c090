"""The fetch buffer against a model: bounds, generations, and sums that are right at any time."""

from __future__ import annotations

import gc

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncfetch.tensors.buffer import FetchBuffer, Shard, Ticket

MAX_BYTES = 1000
ids = st.sampled_from("abcdef")


class BufferMachine(RuleBasedStateMachine):
    """Random tickets, landings, clears and consumers who hold on to what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = FetchBuffer(MAX_BYTES)
        self.open: list[tuple[Ticket, int, int]] = []
        self.current: dict[str, Ticket] = {}
        self.void: list[Ticket] = []
        self.versions = 0
        self.held: list[Shard] = []

    @rule(shard_id=ids, nbytes=st.integers(0, 600))
    def expect(self, shard_id: str, nbytes: int) -> None:
        self.versions += 1
        ticket = self.current[shard_id] = self.buffer.expect(shard_id, nbytes)
        self.open.append((ticket, nbytes, self.versions))

    @rule(data=st.data(), hold=st.booleans())
    def land(self, data: st.DataObject, hold: bool) -> None:
        if not self.open:
            return
        ticket, nbytes, version = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        shard = Shard(np.full(nbytes, version % 256, np.uint8), "uint8", (nbytes,))
        self.buffer.land(ticket, shard)
        found = self.buffer.find([ticket.shard_id])
        assert (found.get(ticket.shard_id) is shard) == (ticket not in self.void and ticket.room is not None)
        del found
        self.give_back(ticket)
        if hold:
            self.held.append(shard)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.open:
            ticket, _, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.buffer.land(ticket, None)
            self.give_back(ticket)

    def give_back(self, ticket: Ticket) -> None:
        if self.current.get(ticket.shard_id) is ticket:
            del self.current[ticket.shard_id]

    @rule(some=st.one_of(st.none(), st.sets(ids)))
    def clear(self, some: set[str] | None) -> None:
        cleared = set("abcdef") if some is None else some
        there = set(self.buffer.find("abcdef")) & cleared
        assert self.buffer.clear(some) == len(there)
        self.void += [self.current.pop(shard_id) for shard_id in cleared & self.current.keys()]
        assert not set(self.buffer.find("abcdef")) & cleared

    @rule()
    def let_go(self) -> None:
        self.held.clear()

    @invariant()
    def sums_are_right(self) -> None:
        now = self.buffer.statistics()
        kept = self.buffer.find("abcdef")
        assert now.entries == len(kept)
        assert now.bytes == sum(len(shard.array) for shard in kept.values())
        assert now.bytes + now.in_flight_bytes <= MAX_BYTES
        reserved = sum(nbytes for ticket, nbytes, _ in self.open if ticket.room is not None)
        assert now.in_flight_bytes == reserved
        mine = set(map(id, kept.values()))
        del kept
        gc.collect(0)
        assert self.buffer.statistics().pinned_bytes == sum(
            len(shard.array) for shard in self.held if id(shard) not in mine
        )


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_a_buffer_does_what_the_model_does = BufferMachine.TestCase

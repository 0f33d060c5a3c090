"""The rest of an epoch, dealt to ranks: each gets as many samples of each member, and an order of its own.

An epoch goes in *legs*. A leg is a way of sharing: so many ranks, pools of so many segments. While that stays as it is,
each rank goes on in its order, also after a stop. With other ranks, or other pools, a new leg begins: the rest of the
leg before (runs, by member) is laid end to end, and cut anew. So a run may be moved any number of times, and each
sample comes once.

In a leg, a rank's samples are numbered. A plain stream's rank gives its share in order, number by number.
A mixture's rank has an order of each member's share, and takes its samples from them by turns, so weights hold for each
rank. Where only samples of one member can be batched, a turn is a batch: what a member has left beyond whole batches
comes after all of those, in shorter ones, each with *empty* numbers behind it, up to the length of a batch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from asyncfetch.order.lanes import Lanes
from asyncfetch.order.mixing import Stage, Turns, counts_before

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncfetch.order.lanes import Cursor
    from asyncfetch.order.line import Piece
    from asyncfetch.order.runs import Runs

_FAR_BLOCKS = 1000
"""Turns that are found by a search, which takes as long as going through so many."""
Ends = Literal["uneven", "drop", "pad"]
"""The choice of what becomes of the last samples of an epoch, fewer than there are ranks."""


@dataclass(frozen=True, slots=True)
class Leg:
    """The way in which ranks share what is left."""

    world_size: int
    pools: tuple[int, ...]
    """Segments that a rank draws from at a time, of each member."""
    ends: Ends = "uneven"
    block_samples: int = 1
    """Samples of one member that a rank takes in a row."""
    batches: Literal["any", "one", "whole"] = "any"
    """Samples that can be batched: any, or a block's; "whole" leaves out what makes no whole block."""


@dataclass(frozen=True, slots=True)
class Left:
    """The rest of an epoch."""

    members: tuple[Runs, ...]
    cells: NDArray[np.int64]
    """Samples of each member in each stage of weights, (stages, members)."""

    @property
    def total(self) -> int:
        """Samples."""
        return int(self.cells.sum())


class Visit(NamedTuple):
    """The sample at a number of a rank's order."""

    left: list[Piece]
    """Pieces that were used and aren't from here on."""
    piece: Piece
    frame: int
    """Frame in the episode."""
    is_padding: bool = False
    """True if it is there a second time, to make ranks even."""


class Deal:
    """The rest of an epoch, and the part of it that each rank takes; ``seed`` is that of members' turns."""

    def __init__(self, left: Left, leg: Leg, seed: int = 0) -> None:
        self.left, self.leg, self.seed = left, leg, seed
        self.upto, self.real = _amounts(left.cells, leg)
        self._cuts = np.concatenate([np.zeros((1, len(left.members)), np.int64), np.cumsum(self.real, axis=0)])

    def rank(self, number: int) -> RankOrder:
        """The order of one rank."""
        return RankOrder(self, number)

    def lanes(self, rank: int, member: int) -> Lanes:
        """A rank's order of one member."""
        start, stop = self._cuts[rank : rank + 2, member].tolist()
        if start == stop:  # padding repeats another's first sample
            start, stop = 0, min(1, self.left.members[member].total)
        return Lanes(self.left.members[member], start, stop, self.leg.pools[member], member)

    def after(self, taken: Sequence[Sequence[tuple[int, int]]]) -> Left:
        """Return what is left where each rank was given the samples of these spans of its numbers, which ascend."""
        members = []
        spans = [self.rank(rank).by_member(given) for rank, given in enumerate(taken)]
        for member, runs in enumerate(self.left.members):
            bounds, starts, stops = [], [], []
            for rank, of_members in enumerate(spans):
                if self.real[rank, member]:
                    lanes = self.lanes(rank, member)
                    bounds += [lanes.starts, lanes.stops]
                    begin, end = lanes.left(of_members[member])
                    starts.append(begin)
                    stops.append(end)
            dealt = int(self._cuts[-1, member])
            starts.append(np.array([dealt]))
            stops.append(np.array([runs.total]))
            begins = np.concatenate(starts)
            by_place = np.argsort(begins, kind="stable")
            cut = runs.cut(np.concatenate([*bounds, [dealt]]))
            members.append(cut.left(begins[by_place], np.concatenate(stops)[by_place]))
        cells = self.left.cells.copy()
        for member, runs in enumerate(members):
            gone = int(cells[:, member].sum()) - runs.total
            for stage in range(len(cells)):
                here = min(gone, int(cells[stage, member]))
                cells[stage, member] -= here
                gone -= here
        return Left(tuple(members), cells)


def _amounts(cells: NDArray[np.int64], leg: Leg) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each rank the samples of each member up to the end of each stage, padding included, and those in all.

    Ranks differ by one sample at most: what doesn't divide evenly goes to the ranks in turns, through all members.
    """
    ranks, world = np.arange(leg.world_size)[:, None], leg.world_size
    if leg.batches == "any":
        if leg.ends == "drop":
            cells = _without_last(cells, int(cells.sum()) % world)
        flat = cells.ravel()
        turns = np.cumsum(flat % world) - flat % world
        amounts = flat // world + ((ranks - turns) % world < flat % world)
        upto = np.cumsum(amounts.reshape(world, *cells.shape), axis=1)
        return upto, upto[:, -1]
    sums = np.cumsum(cells, axis=0)
    whole = sums[-1] - (sums[-1] % world if leg.ends == "drop" else 0)
    turns = np.cumsum(whole % world) - whole % world
    real = whole // world + ((ranks - turns) % world < whole % world)
    padded = np.broadcast_to(-(-whole // world), real.shape) if leg.ends == "pad" else real
    upto = np.minimum(sums[None] // world, padded[:, None])
    upto[:, -1] = padded
    return upto, real


def _without_last(cells: NDArray[np.int64], samples: int) -> NDArray[np.int64]:
    left = cells.copy().ravel()
    for cell in reversed(range(len(left))):
        fewer = min(samples, int(left[cell]))
        left[cell] -= fewer
        samples -= fewer
    return left.reshape(cells.shape)


class RankOrder:
    """The order in which one rank takes its samples, by their numbers."""

    def __init__(self, deal: Deal, rank: int) -> None:
        self._deal, self._rank = deal, rank
        leg, upto = deal.leg, deal.upto[rank]
        self.block_samples = size = leg.block_samples
        self.real: list[int] = deal.real[rank].tolist()
        """Samples of each member, without padding."""
        blocks = upto // size
        each = np.diff(blocks, axis=0, prepend=0)
        self.stages: list[Stage] = []
        first = 0
        for before, turns in zip(np.concatenate([np.zeros_like(blocks[:1]), blocks]), each, strict=False):
            if turns.any():
                self.stages.append(Stage(first, Turns(turns.tolist(), deal.seed), before.tolist()))
            first += int(turns.sum())
        self.whole = first * size
        """Numbers of whole blocks; what makes none follows."""
        over = {member: int(upto[-1, member]) - int(blocks[-1, member]) * size for member in range(upto.shape[1])}
        self.short: list[tuple[int, int, int]] = []
        """The first number of each shorter block, its member, and its samples."""
        at = self.whole
        for member, left in sorted(over.items(), key=lambda each: -each[1]):
            if left and leg.batches != "whole":
                self.short.append((at, member, left))
                at += left if leg.batches == "any" else size
        self.last: int = self.short[-1][0] + self.short[-1][2] if self.short else self.whole
        """The number after the last that isn't only padding."""
        pads = leg.batches == "any" and leg.ends == "pad"
        self.total: int = -(-deal.left.total // leg.world_size) if pads else self.last
        """Its numbers, those of padding and empty ones included."""
        self.blocks_of: list[int] = blocks[-1].tolist()

    @cached_property
    def lanes(self) -> list[Lanes]:
        """Lanes of each member."""
        return [self._deal.lanes(self._rank, member) for member in range(len(self.real))]

    def by_member(self, spans: Sequence[tuple[int, int]]) -> list[NDArray[np.int64]]:
        """Return for each member which of its samples these spans of numbers hold, as spans, (n, 2)."""
        if len(self.real) == 1:
            inside = [(start, min(stop, self.real[0])) for start, stop in spans if start < self.real[0]]
            return [np.array(inside, np.int64).reshape(-1, 2)]
        found: list[list[tuple[int, int]]] = [[] for _ in self.real]
        walk = _Walk(self)
        for start, stop in spans:
            if start == 0:
                for member, count in enumerate(self.counts(stop)):
                    found[member] += [(0, min(count, self.real[member]))] if count else []
                continue
            for number in range(start, min(stop, self.last)):  # what follows is padding
                given = walk.at(number)
                if given is not None and given[1] < self.real[given[0]]:
                    own = found[given[0]]
                    if own and own[-1][1] == given[1]:
                        own[-1] = (own[-1][0], given[1] + 1)
                    else:
                        own.append((given[1], given[1] + 1))
        return [np.array(each, np.int64).reshape(-1, 2) for each in found]

    def counts(self, number: int) -> list[int]:
        """Return how many samples of each member come before a number, padding included."""
        if number >= self.whole:
            counts = [blocks * self.block_samples for blocks in self.blocks_of]
            for start, member, samples in self.short:
                counts[member] += min(max(0, number - start), samples)
            return counts
        return counts_before(self.stages, number, self.block_samples)

    def visits(self) -> Visits:
        """Return a way through it that takes some of its samples, in ascending order."""
        return Visits(self)


class _Walk:
    """The turns of members, forwards."""

    def __init__(self, order: RankOrder) -> None:
        self._order = order
        self._stages = iter(order.stages)
        self._block, self._until = 0, 0
        self.members_through: list[int] = []
        """Members that have given all they have, since this was last looked at."""

    def at(self, number: int) -> tuple[int, int] | None:
        """Return the member that has the turn, and its sample's number; None where the number is empty."""
        order, size = self._order, self._order.block_samples
        if len(order.real) == 1:
            return 0, number
        if number < order.whole:
            block, inside = divmod(number, size)
            while block >= self._until:
                self._enter()
            if block - self._block > _FAR_BLOCKS:
                self._turn = self._turns.counts(block - self._first)
                self._heap, self._block = self._turns.walk(self._turn), block
            while self._block < block:
                member = self._heap[0][1]
                self._turn[member] += 1
                heapq.heapreplace(self._heap, self._turns.due(member, self._turn[member]))
                self._block += 1
            member = self._heap[0][1]
            return member, (self._before[member] + self._turn[member]) * size + inside
        place = bisect_right(order.short, (number, len(order.real), 0)) - 1
        start, member, samples = order.short[place]
        inside = number - start
        return (member, order.blocks_of[member] * size + inside) if inside < samples else None

    def _enter(self) -> None:
        stage = next(self._stages)
        self._first, self._turns, self._before = stage.first, stage.turns, stage.given
        self._block, self._until = self._first, self._first + self._turns.total
        self._turn = [0] * len(self._before)
        self._heap = self._turns.walk(self._turn)
        short = {member for _, member, _ in self._order.short}
        self.members_through += [
            member
            for member, blocks in enumerate(self._order.blocks_of)
            if self._before[member] == blocks and member not in short
        ]


class Visits:
    """The samples that one consumer takes of a rank's order, by ascending numbers."""

    def __init__(self, order: RankOrder) -> None:
        self._order = order
        self._walk = _Walk(order)
        self._cursors: dict[int, Cursor] = {}

    def at(self, number: int) -> Visit | None:
        """The sample at this number; None where it is empty."""
        order = self._order
        if number >= order.last:
            return self._padding(None)
        given = self._walk.at(number)
        if given is None:
            return None
        member, its_number = given
        left: list[Piece] = []
        for through in self._walk.members_through:
            gone = self._cursors.pop(through, None)
            left += [] if gone is None else gone.used()
        self._walk.members_through.clear()
        if its_number >= order.real[member]:
            return self._padding(member)._replace(left=left)
        cursor = self._cursors.get(member)
        if cursor is None:
            cursor = self._cursors[member] = order.lanes[member].cursor()
        over, piece, frame = cursor.at(its_number)
        return Visit(left + over, piece, frame)

    def _padding(self, member: int | None) -> Visit:
        """Return the last sample once more: of this member, or of all."""
        order = self._order
        if member is None:
            # The last with samples of this rank, or where there are none with others'.
            member = max(range(len(order.real)), key=lambda each: (order.real[each] > 0, order.lanes[each].total, each))
        lanes = order.lanes[member]
        cursor = lanes.cursor()
        _, piece, frame = cursor.at(max(0, min(order.real[member], lanes.total) - 1))
        return Visit([], piece._replace(begin=piece.stop - piece.start), frame, is_padding=True)

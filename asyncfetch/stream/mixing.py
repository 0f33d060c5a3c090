"""The turns of a mixture's members: whose sample comes when. Pure arithmetic on weights, lengths and a seed.

Each member has an ideal time for each of its turns, evenly spaced by its weight: its k-th turn is due at
``(k + phase) / weight``, and turns come in the order in which they are due. The phases are spread evenly over the
members in a drawn order, so that members of equal weight don't all fall due at once. At any point a member of weight w,
of M members with a turn in sight, has been given w of all turns within 1 + (M - 2) * w, within 1 where there are two.

Why this and not the earliest deadline first, which keeps every member within 1: how many turns each member had before
a given one follows here from a search for its time, in O(M log), so a mixture is gone on with at any place without
going through what is before it; and the weights are met to 1 in 2**32, so nothing drifts in a run of any length.

A turn is a *block* of samples in a row, one or more. Turns are dealt out anew, from the phases on, where an epoch
begins and where the schedule changes the weights, which is at the first block that begins at or after the stated step.
Steps of the schedule are counted over the whole run, over all epochs.

What a member gives goes on from epoch to epoch of the mixture: its k-th sample of the run is the k-th of its own
epochs, one after the other. So where one member ends the mixture's epoch, what the others had left comes in the next.
That holds for epochs of different blocks, too: an epoch is counted on from the place of one before it, which is all
that a saved state says of the run.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from asyncfetch.errors import ConfigError
from asyncfetch.stream.order import draw_key
from asyncfetch.stream.remaining import Remaining

if TYPE_CHECKING:
    from collections.abc import KeysView, Sequence

    from asyncfetch.stream.remaining import Ends

__all__ = [
    "Batching",
    "EpochPlace",
    "Given",
    "MixedEpoch",
    "MixedRemaining",
    "Mixing",
    "Stage",
    "StopOn",
    "Turns",
    "Walk",
    "left_of_members",
]

StopOn = Literal["first", "all"] | int
"""The end of an epoch of a mixture: where the first member is used up, where the last one has been used up once, or
after so many samples."""

_ONE_BITS = 32
_ONE = 1 << _ONE_BITS
"""Weights and phases are fractions of it, and so are times: exact on every machine."""


class Turns:
    """The members' turns under fixed weights, from 0.

    Args:
        weights: Of each member, whole numbers. Of the first turns, as many as their sum, each member has just that.
        seed: Of the phases.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        self._weights = {member: weight for member, weight in enumerate(weights) if weight}
        self._sum = sum(weights)
        drawn = sorted(self._weights, key=lambda member: draw_key("phase", seed, member))
        self._phases = {member: ((2 * rank + 1) << (_ONE_BITS - 1)) // len(drawn) for rank, member in enumerate(drawn)}
        self._count_of_members = len(weights)

    @classmethod
    def by_shares(cls, weights: Sequence[float], seed: int) -> Turns:
        """Make turns under weights of any size."""
        total = sum(weights)
        return cls([max(1, round(weight / total * _ONE)) if weight else 0 for weight in weights], seed)

    @property
    def members(self) -> KeysView[int]:
        """The members that have turns."""
        return self._weights.keys()

    def due(self, member: int, turn: int) -> tuple[int, int]:
        """Return when the turn comes; what is smaller comes first."""
        return ((turn << _ONE_BITS) + self._phases[member]) * self._sum // self._weights[member], member

    def counts_before(self, time: int, member: int) -> list[int]:
        """Return how many turns of each member are due before ``(time, member)``."""
        return [self._count(other, time + (other < member)) for other in range(self._count_of_members)]

    def counts(self, turns: int) -> list[int]:
        """Return how many of the first so many turns each member has."""
        if not turns:
            return [0] * self._count_of_members
        # With the time x, every member's count is its weight * x within 1.
        margin = len(self._weights) + 1
        low, high = max(0, turns - margin) << _ONE_BITS, (turns + margin) << _ONE_BITS
        while low < high:  # the earliest time before which, or at which, so many are due
            middle = (low + high) // 2
            if sum(self.counts_before(middle + 1, 0)) >= turns:
                high = middle
            else:
                low = middle + 1
        counts = self.counts_before(low, 0)
        for member, then in enumerate(self.counts_before(low + 1, 0)):
            if sum(counts) < turns:
                counts[member] = then
        return counts

    def walk(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """A heap of the next turn of each member that has had so many."""
        heap = [self.due(member, counts[member]) for member in self._weights]
        heapq.heapify(heap)
        return heap

    def _count(self, member: int, time: int) -> int:
        """Return how many of a member's turns are due before the time."""
        if member not in self._weights or time <= 0:
            return 0
        last = (time * self._weights[member] - 1) // self._sum - self._phases[member]
        return max(0, (last >> _ONE_BITS) + 1)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of an epoch under the same weights."""

    first: int
    """Its first block, counted in the epoch."""
    turns: Turns
    given: list[int]
    """Blocks of each member before it, in the epoch."""


class Given(NamedTuple):
    """A sample that is at a position."""

    member: int
    number: int
    """The sample's number in the member's run."""
    is_padding: bool = False
    """True if it is there a second time, to make ranks even."""


class Walk(Protocol):
    """A way through an order, forwards. Memory: a few numbers for each member."""

    members: set[int]
    """Members that have something from here on, or more; another set where some are left out."""

    def at(self, position: int) -> Given | None:
        """Return what is at this position, which isn't below that of an earlier call; None where it is empty."""
        ...


@dataclass(frozen=True, slots=True)
class MixedEpoch:
    """One epoch of a mixture: which sample of which member is at which position."""

    block_samples: int
    taken: tuple[int, ...]
    """Samples of each member in the run before it."""
    stages: tuple[Stage, ...]
    total: int
    """Its samples."""

    @property
    def start(self) -> int:
        """Samples of the run before it."""
        return sum(self.taken)

    @property
    def affinity_stop(self) -> int:
        """Positions below it hold something, and each once."""
        return self.total

    def counts(self, position: int) -> list[int]:
        """Samples of each member in the run before this position of the epoch."""
        block, inside = divmod(position, self.block_samples)
        stage = self._stage(block)
        turns = stage.turns.counts(block - stage.first)
        counts = [
            before + (given + more) * self.block_samples
            for before, given, more in zip(self.taken, stage.given, turns, strict=True)
        ]
        if inside:
            counts[stage.turns.walk(turns)[0][1]] += inside
        return counts

    def suits(self, batching: Batching) -> bool:
        """Return whether each of its blocks is whole batches."""
        return self.block_samples % batching.round_samples == 0

    def left(self, position: int) -> list[Remaining]:
        """Return what of each member's run comes from this position on, up to the epoch's end."""
        return [Remaining(count) for count in self.counts(position)]

    def walk(self, position: int = 0) -> Walk:
        """The way through it from this position on."""
        return _EpochWalk(self, position)

    def ends(self) -> list[list[int]]:
        """Samples of each member in the run before the end of each of its stages, the epoch's end being the last."""
        firsts = [stage.first * self.block_samples for stage in self.stages[1:]]
        return [self.counts(position) for position in [*firsts, self.total]]

    def _stage(self, block: int) -> Stage:
        return next(stage for stage in reversed(self.stages) if stage.first <= block)


class _EpochWalk:
    """See Walk."""

    def __init__(self, epoch: MixedEpoch, position: int) -> None:
        self._epoch = epoch
        self._block = position // epoch.block_samples
        stage = epoch._stage(self._block)
        self._stages = [later for later in epoch.stages if later.first > stage.first]
        self._enter(stage, stage.turns.counts(self._block - stage.first))

    def at(self, position: int) -> Given:
        """See Walk."""
        block, inside = divmod(position, self._epoch.block_samples)
        while self._block < block:
            member = self._heap[0][1]
            self._given[member] += 1
            self._turn[member] += 1
            heapq.heapreplace(self._heap, self._turns.due(member, self._turn[member]))
            self._block += 1
            if self._stages and self._stages[0].first == self._block:
                stage = self._stages.pop(0)
                self._enter(stage, [0] * len(self._given))
        member = self._heap[0][1]
        return Given(member, self._epoch.taken[member] + self._given[member] * self._epoch.block_samples + inside)

    def _enter(self, stage: Stage, turns: list[int]) -> None:
        self.members = {member for each in (stage, *self._stages) for member in each.turns.members}
        self._turns, self._turn = stage.turns, turns
        self._given = [before + more for before, more in zip(stage.given, turns, strict=True)]
        self._heap = stage.turns.walk(turns)


@dataclass(frozen=True, slots=True)
class EpochPlace:
    """An epoch's place in a run."""

    epoch: int
    block_samples: int
    """Its own."""
    taken: tuple[int, ...]
    """Samples of each member in the run before it."""


@dataclass(frozen=True)
class Mixing:
    """All that the choice of members depends on.

    Raises:
        ConfigError: An epoch would have no end, or no sample.
    """

    lengths: tuple[int, ...]
    """Samples in an epoch of each member."""
    schedule: tuple[tuple[int, tuple[float, ...]], ...]
    """(step from which on, weight of each member), ascending, from step 0."""
    stop_on: StopOn
    block_samples: int
    """Samples in a row of one member."""
    seed: int

    def __post_init__(self) -> None:
        for member, length in enumerate(self.lengths):
            if not length and any(weights[member] for _, weights in self.schedule):
                raise ConfigError(f"member {member} of the mixture has no samples: leave it out, or give it weight 0")
        never = [member for member in range(len(self.lengths)) if not self.schedule[-1][1][member]]
        if self.stop_on == "all" and any(self.lengths[member] for member in never):
            raise ConfigError(
                f'stop_on="all" would never come about: in the end members {never} have weight 0. Give them another '
                'weight, or stop_on="first" or a number'
            )

    def epoch(self, number: int, known: EpochPlace | None = None) -> MixedEpoch:
        """The number-th epoch of the run, from 0, in blocks of this size.

        It is counted on from a known epoch, in blocks of a size of its own, unless that is behind it; else from the
        run's beginning, as if all had been in blocks of this size.
        """
        if known is None or known.epoch > number:
            return self._from((0,) * len(self.lengths), number)
        if known.epoch == number:
            return self._from(known.taken, 0)
        last = replace(self, block_samples=known.block_samples)._from(known.taken, 0)
        return self._from(last.counts(last.total), number - known.epoch - 1)

    def _from(self, taken: Sequence[int], more: int) -> MixedEpoch:
        """The epoch so many behind that before which each member has given so much."""
        epoch = self._build(tuple(taken))
        while more:
            skipped = min(more, self._alike(epoch))
            counts = epoch.counts(epoch.total)
            epoch = self._build(
                tuple(before + skipped * (after - before) for before, after in zip(epoch.taken, counts, strict=True))
            )
            more -= skipped
        return epoch

    def _alike(self, epoch: MixedEpoch) -> int:
        """Return how many epochs from this one on differ in nothing but where they begin, at least 1."""
        step = next((step for step, _ in self.schedule if step > epoch.start), None)
        if step is None:
            return sys.maxsize
        if len(epoch.stages) > 1:
            return 1
        # Those whose last block begins in front of the step at which the weights change.
        last_block = (epoch.total - 1) // self.block_samples * self.block_samples
        return max(1, -(-(step - epoch.start - last_block) // epoch.total))

    @cached_property
    def _turns(self) -> list[Turns]:
        return [Turns.by_shares(weights, self.seed) for _, weights in self.schedule]

    def _build(self, taken: tuple[int, ...]) -> MixedEpoch:
        size, start = self.block_samples, sum(taken)
        stages: list[Stage] = []
        given = [0] * len(self.lengths)
        ends = [max(0, -(-(step - start) // size)) for step, _ in self.schedule]
        for turns, (first, end) in zip(self._turns, pairwise([*ends, None]), strict=True):
            assert first is not None
            if end is not None and end <= first:
                continue
            stages.append(Stage(first, turns, given))
            total = self._end(stages[-1], end)
            if total is not None:
                return MixedEpoch(size, taken, tuple(stages), total)
            assert end is not None
            given = [before + more for before, more in zip(given, turns.counts(end - first), strict=True)]
        raise AssertionError("the last stage has no end of its own, so the epoch ends in it")

    def _end(self, stage: Stage, end: int | None) -> int | None:
        """The epoch's samples, if it ends in this stage, which ends before the block ``end``."""
        size = self.block_samples
        if isinstance(self.stop_on, int):
            return self.stop_on if end is None or self.stop_on <= end * size else None
        left = {
            member: (length - 1) // size - stage.given[member]
            for member, length in enumerate(self.lengths)
            if length and (length - 1) // size >= stage.given[member]
        }
        due = [stage.turns.due(member, turn) for member, turn in left.items() if member in stage.turns.members]
        if self.stop_on == "all" and len(due) < len(left):
            return None  # some have no turn in this stage
        if not due:
            return None
        time, member = min(due) if self.stop_on == "first" else max(due)
        block = stage.first + sum(stage.turns.counts_before(time, member))
        if end is not None and block >= end:
            return None
        return block * size + (self.lengths[member] - 1) % size + 1


# What is left of a mixture's epoch, dealt out anew for those who go on with it. An epoch whose members disagree comes
# in blocks of one member, each a batch for every rank. Where other ranks go on, or with other batches, or it was left
# inside of a batch, those blocks don't suit any more. Then each member's share of the rest, which is what it is, is
# dealt out in blocks of the new size: evenly, by what each has left, and where the schedule changes the weights, so
# does that. What a member has left beyond whole blocks comes after all of those, in a block with empty positions at its
# end. So each rank's positions make whole batches, which are the same for any number of workers.


@dataclass(frozen=True, slots=True)
class Batching:
    """The way in which those who share an order make batches of one member each."""

    batch_size: int
    world_size: int
    drop_last: bool
    ends: Ends

    @property
    def round_samples(self) -> int:
        """The samples that all ranks take for a batch each."""
        return self.batch_size * self.world_size


class MixedRemaining:
    """The rest of an epoch, dealt out anew, each member's in blocks of one batch for each rank.

    What a member has left beyond whole blocks comes after all of those, the longest first, in a block with empty
    positions at its end; by ``drop`` the ranks have equally many of it, by ``pad`` too, ``drop_last`` leaves it out.

    Args:
        epoch: What it is left of.
        rests: What is left of each member's run: up to the epoch's end.
        batching: Of who goes on.
        seed: As that of the epoch.
    """

    def __init__(self, epoch: MixedEpoch, rests: Sequence[Remaining], batching: Batching, seed: int) -> None:
        self._rests = tuple(rests)
        self._batching = batching
        size = self.block_samples = batching.round_samples
        ends = epoch.ends()
        stages: list[Stage] = []
        given = [0] * len(rests)
        for stops in ends:  # the schedule changes the weights where it did, to the block
            until = [_count(rest, stop) // size for rest, stop in zip(rests, stops, strict=True)]
            blocks = [after - before for after, before in zip(until, given, strict=True)]
            if any(blocks):
                stages.append(Stage(sum(given), Turns(blocks, seed), given))
            given = until
        self._whole = MixedEpoch(size, (0,) * len(rests), tuple(stages), sum(given) * size)
        self._given = given
        over = {member: _count(rests[member], stop) % size for member, stop in enumerate(ends[-1])}
        if batching.drop_last:
            over = {}
        elif batching.ends == "drop":
            over = {member: samples - samples % batching.world_size for member, samples in over.items()}
        # Where some ranks have none of a block, they have none of those behind it: their batches come without a gap.
        self._short = sorted(((member, left) for member, left in over.items() if left), key=lambda each: -each[1])
        self.total = self._whole.total + len(self._short) * size

    @property
    def affinity_stop(self) -> int:
        """See MixedEpoch."""
        return self._whole.total

    def left(self, position: int) -> list[Remaining]:
        """See MixedEpoch."""
        whole = min(position, self._whole.total)
        given = [rest.position for rest in self._whole.left(whole)] if self._whole.stages else [0] * len(self._rests)
        blocks, inside = divmod(position - whole, self.block_samples)
        for number, (member, left) in enumerate(self._short[: blocks + 1]):
            given[member] += left if number < blocks else min(inside, left)
        return [
            Remaining(rest.position + max(0, count - len(rest.missing)), rest.missing[count:], rest.stride)
            for rest, count in zip(self._rests, given, strict=True)
        ]

    def empty_at(self, position: int) -> range:
        """The positions around this one that hold nothing; none where this one does hold something."""
        if position >= self._whole.total:
            block, inside = divmod(position - self._whole.total, self.block_samples)
            _, left = self._short[block]
            full = left + (-left % self._batching.world_size if self._batching.ends == "pad" else 0)
            if inside >= full:
                start = position - inside
                return range(start + full, start + self.block_samples)
        return range(0)

    def suits(self, batching: Batching) -> bool:
        """Return whether it was dealt out for these."""
        return batching == self._batching

    def walk(self, position: int = 0) -> Walk:
        """The way through it from this position on."""
        return _RestWalk(self, position)

    def _number(self, member: int, index: int) -> int:
        return self._rests[member].position_of(index)


class _RestWalk:
    """See Walk."""

    def __init__(self, rest: MixedRemaining, position: int) -> None:
        self._rest = rest
        self._walk = rest._whole.walk(position) if position < rest._whole.total else None
        self.members = {member for member, blocks in enumerate(rest._given) if blocks} | {
            member for member, _ in rest._short
        }

    def at(self, position: int) -> Given | None:
        """See Walk."""
        rest = self._rest
        if self._walk is not None and position < rest._whole.total:
            found = self._walk.at(position)
            assert found is not None
            return Given(found.member, rest._number(found.member, found.number))
        if rest.empty_at(position):
            return None
        block, inside = divmod(position - rest._whole.total, rest.block_samples)
        member, left = rest._short[block]
        index = rest._given[member] * rest.block_samples + min(inside, left - 1)
        return Given(member, rest._number(member, index), is_padding=inside >= left)


def left_of_members(order: MixedEpoch | MixedRemaining, rest: Remaining) -> list[Remaining]:
    """Return what each member has left where ``rest`` is left of the order's positions."""
    behind = order.left(rest.position)
    missing: list[list[int]] = [[] for _ in behind]
    walk = order.walk(rest.missing[0]) if rest.missing else None
    for position in rest.missing:
        assert walk is not None
        given = walk.at(position)
        if given is not None and not given.is_padding:
            missing[given.member].append(given.number)
    each = zip(missing, behind, strict=True)
    return [Remaining(left.position, (*numbers, *left.missing), rest.stride) for numbers, left in each]


def _count(rest: Remaining, stop: int) -> int:
    """Return how many of what is left are before ``stop``."""
    return bisect_left(rest.missing, stop) + max(0, stop - rest.position)

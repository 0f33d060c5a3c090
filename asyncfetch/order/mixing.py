"""The proportions of a mixture's members: how many samples of each an epoch has, and the order of their turns. Pure.

Each member has an ideal time for each of its turns, evenly spaced by its weight: its k-th turn is due at
``(k + phase) / weight``, and turns come in the order in which they are due. The phases are spread evenly over the
members in a drawn order, so that members of equal weight don't all fall due at once. At any point a member of weight w,
of M members with a turn in sight, has been given w of all turns within 1 + (M - 2) * w, within 1 where there are two.

Why this and not the earliest deadline first, which keeps every member within 1: how many turns each member had before
a given one follows here from a search for its time, in O(M log), so a mixture resumes at any place without
going through what is before it; and the weights are met to 1 in 2**32, so nothing drifts in a run of any length.

A turn is a *block* of samples in a row, one or more. Turns are dealt out anew, from the phases on, where an epoch
begins and where the schedule changes the weights, which is at the first block that begins at or after the stated step.
Steps of the schedule are counted over the whole run, over all epochs and ranks.

So an epoch has for each of its *stages*, of one set of weights each, a number of samples of each member, however it is
shared. A member goes on from epoch to epoch of the mixture: its k-th sample of the run is the k-th of its own epochs,
one after the other. So where one member ends the mixture's epoch, the rest of the others comes in the next.
That holds for epochs of different blocks, too: an epoch is counted on from the place of one before it, which is all
that a saved state says of the run.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import add, sub
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncfetch.errors import ConfigError
from asyncfetch.order.line import draw_key

if TYPE_CHECKING:
    from collections.abc import KeysView, Sequence

    from numpy.typing import NDArray

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
    def total(self) -> int:
        """Turns after which each member has had as many as its weight says."""
        return self._sum

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
    """A stretch of an epoch, or of a rank's order, under the same weights."""

    first: int
    """Its first block, counted in that."""
    turns: Turns
    given: list[int]
    """Blocks of each member before it."""


def counts_before(stages: Sequence[Stage], number: int, block_samples: int) -> list[int]:
    """Return how many samples of each member come before a number of what these stages give."""
    block, inside = divmod(number, block_samples)
    stage = next(stage for stage in reversed(stages) if stage.first <= block)
    turns = stage.turns.counts(block - stage.first)
    counts = [(given + more) * block_samples for given, more in zip(stage.given, turns, strict=True)]
    if inside:
        counts[stage.turns.walk(turns)[0][1]] += inside
    return counts


@dataclass(frozen=True, slots=True)
class MixedEpoch:
    """One epoch of a mixture: how many samples of each member it has."""

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

    def counts(self, position: int) -> list[int]:
        """Samples of each member in the run before this position of the epoch."""
        return list(map(add, self.taken, counts_before(self.stages, position, self.block_samples)))

    def cells(self) -> NDArray[np.int64]:
        """Samples of each member in each of its stages, (stages, members)."""
        ends = [*(stage.first * self.block_samples for stage in self.stages[1:]), self.total]
        counts = [self.taken, *map(self.counts, ends)]
        return np.array([list(map(sub, after, before)) for before, after in pairwise(counts)], np.int64)


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
        # Epochs with a last block that begins before the step at which the weights change.
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

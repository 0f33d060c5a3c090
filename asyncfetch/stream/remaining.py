"""The rest of an epoch, and who takes which part of it. Pure arithmetic on positions of an order.

All that an epoch has given is told by how many samples each of its consumers was given: the order is the same for all,
and each takes its positions ascending. So what is left is every position from some point on, and a few before it,
of consumers that were slower than others. Who goes on, however many they are, share *that*, as they would share a whole
epoch.

They share it *step* by step: in each, all ranks take as many samples, a batch where that is known. Which samples are in
a step is the same for any ranks; who takes which of them is free. Each sample is on an *affinity* of the order, a
number from 0 to 1 that its episode keeps (see ``order``). The samples of a step are laid out by affinity and cut into
as many pieces of one size as there are ranks. Each affinity has about as many samples in each step, so a rank gets the
same affinities again and again, and with them their episodes; where the ranks don't divide the affinities, it shares
the first and the last of its own with its neighbours. Where no affinities are known, ranks take samples in turns.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from asyncfetch.errors import StateMismatch
from asyncfetch.ranges import is_whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from asyncfetch.stream.placement import Placement

__all__ = ["AffinityWalk", "Deal", "Ends", "Remaining", "SharedOrder", "cut", "rest_in"]

Ends = Literal["uneven", "drop", "pad"]
"""The choice of what becomes of the last samples of an epoch, fewer than there are ranks."""
_TURNS = 1024
"""Turns of a rank that are looked at together where ranks take turns."""
MAX_MISSING = 1 << 24
"""That a state may tell of: so far behind no consumer is, and they take 0.7 GB."""


class AffinityWalk(Protocol):
    """A way through the affinities of an order, forwards."""

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return those of these positions, which ascend and aren't below those of an earlier call."""
        ...


class SharedOrder(Protocol):
    """An order, as far as it matters to those who share it."""

    @property
    def slots(self) -> int:
        """After so many samples each affinity mostly has its turn again."""
        ...

    @property
    def affinity_stop(self) -> int:
        """Positions below it have an affinity."""
        ...

    def assignment(self, position: int) -> Any:  # noqa: ANN401
        """Return where ``affinities`` may begin."""
        ...

    def affinities(self, assignment: Any, ranks: int) -> AffinityWalk:  # noqa: ANN401
        """The affinities of all positions from there on, for so many ranks."""
        ...


def cut(affinities: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Return each sample's rank, in a step. Each rank gets as many, but the first ones one more if that isn't even."""
    each, more = divmod(len(affinities), ranks)
    counts = np.full(min(ranks, len(affinities)), each)
    counts[:more] += 1
    taken = np.empty(len(affinities), np.int64)
    taken[np.argsort(affinities, kind="stable")] = np.repeat(np.arange(len(counts)), counts)
    return taken


@dataclass(frozen=True, slots=True)
class Remaining:
    """The samples that are left of an epoch; of a whole one, all.

    It is numbered: its samples are ``index`` 0, 1 ... in the order of their positions.
    """

    position: int = 0
    """Everything from here on is left."""
    missing: tuple[int, ...] = ()
    """Positions before that one that are left too, ascending."""
    stride: int = field(default=1, compare=False)
    """The distance between those of one consumer, mostly: what is left of each then takes little room in a state."""

    def left(self, total: int) -> int:
        """Return how many samples, in an epoch of ``total``."""
        return len(self.missing) + total - self.position

    def shared(self, total: int, placement: Placement, ends: Ends) -> tuple[int, int]:
        """Return how many samples one consumer takes, and how many of those are padding: repeated at the end."""
        left, world = self.left(total), placement.world_size
        given = {"uneven": left, "drop": left - left % world, "pad": left + -left % world}[ends]
        return placement.count(given), max(0, placement.count(given) - placement.count(left))

    def positions(
        self,
        total: int,
        placement: Placement,
        ends: Ends,
        order: SharedOrder | None = None,
        *,
        assignment: Any = None,  # noqa: ANN401
        skip: int = 0,
    ) -> Iterator[int]:
        """The positions of one consumer, ascending, without those of its padding and its first ``skip``.

        ``assignment`` of the order is that of the first of their step, or of one before it, to save finding it.
        """
        taken, padded = self.shared(total, placement, ends)
        deal = Deal(self, total, placement, order, assignment)
        for number in range(skip, taken - padded):
            yield self.position_of(deal.index(number))

    def position_of(self, index: int) -> int:
        """Return where the sample of this index is."""
        known = len(self.missing)
        return self.missing[index] if index < known else self.position + index - known

    def positions_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return where the samples of these indices are."""
        known = len(self.missing)
        behind = np.arange(max(start, known), max(stop, known), dtype=np.int64) + (self.position - known)
        return np.concatenate([np.array(self.missing[start:stop], np.int64), behind])

    def index_from(self, position: int) -> int:
        """Index of the first sample that isn't before the position."""
        return bisect_left(self.missing, position) + max(0, position - self.position)

    def after(self, delivered: Mapping[Placement, int], total: int, order: SharedOrder | None = None) -> Remaining:
        """Return what is left when its consumers, all of them, were given so many samples each."""
        left, one = self.left(total), next(iter(delivered))
        deal = Deal(self, total, one, order)
        size = deal.step_samples
        # All in front of the first step of which somebody lacks a sample was delivered, and nothing behind the last one
        # of which somebody has one.
        first = min(placement.of_rank(count) for placement, count in delivered.items()) // size
        latest = max(placement.of_rank(count - 1) if count else -1 for placement, count in delivered.items()) // size
        low, high = (min(step * size * one.world_size, left) for step in (first, max(first, latest + 1)))
        if high - low > MAX_MISSING:  # before they take room
            raise StateMismatch(
                f"of those who shared an epoch some have come {high - low} samples further than others, and up to "
                f"{MAX_MISSING} can be told of"
            )
        steps = range(first, max(first, latest + 1)) if low < high else range(0)
        each = min(len(steps) * size, high - low)  # of a rank at most: a step may be larger than the epoch
        given = np.zeros((one.world_size, each), dtype=bool)
        for placement, count in delivered.items():
            of_rank = map(placement.of_rank, range(placement.count_of(first * size), count))
            given[placement.rank, [number - first * size for number in of_rank if number < first * size + each]] = True
        found = [np.zeros(0, dtype=bool)]
        for step in steps:
            ranks, numbers = deal.shares(step)
            found.append(given[ranks, numbers - first * size])
        is_given = np.concatenate(found)
        end = low + (int(np.flatnonzero(is_given)[-1]) + 1 if is_given.any() else 0)
        lacking = (np.flatnonzero(~is_given[: end - low]) + low).tolist()
        missing = tuple(map(self.position_of, itertools.chain(lacking, range(end, len(self.missing)))))
        return Remaining(self.position + max(0, end - len(self.missing)), missing, deal.stride)

    def as_json(self) -> dict[str, Any]:
        """Return it for a state. ``missing`` as [start, stop, step], of which a slow consumer takes a few."""
        return {"position": self.position, "missing": _runs(self.missing, self.stride)}

    @classmethod
    def of_json(cls, state: Mapping[str, Any], total: int) -> Remaining:
        """Return what ``as_json`` gave, of an epoch of ``total`` samples."""
        position, runs = rest_in(state, total)
        missing = tuple(sorted(itertools.chain.from_iterable(runs)))
        if len(set(missing)) != len(missing):
            raise StateMismatch(f"missing={state['missing']} names positions twice")
        return cls(position, missing, max((1, *(run.step for run in runs))))


class Deal:
    """A division of the samples that are left among those who share them.

    Args:
        rest: What is left.
        total: Samples of the epoch.
        placement: Who asks; all who share have its layout.
        order: None where ranks take samples in turns.
        assignment: Of the order, at the first sample that will be asked for or before it.
    """

    def __init__(
        self,
        rest: Remaining,
        total: int,
        placement: Placement,
        order: SharedOrder | None = None,
        assignment: Any = None,  # noqa: ANN401
    ) -> None:
        self._rest, self._left, self._placement = rest, rest.left(total), placement
        self._order = order if placement.step_samples and placement.world_size > 1 else None
        self.step_samples: int = placement.step_samples if self._order is not None else _TURNS
        """That each rank takes of a step."""
        self._affinities = (
            None
            if self._order is None or assignment is None
            else self._order.affinities(assignment, placement.world_size)
        )
        self._own: tuple[int, NDArray[np.int64]] = -1, np.zeros(0, np.int64)

    @property
    def stride(self) -> int:
        """The distance between the positions of one rank, mostly."""
        if self._order is None:
            return self._placement.period
        return math.lcm(self.step_samples * self._placement.world_size, self._order.slots)

    def begin(self, number: int) -> int:
        """An index at the consumer's ``number``-th sample or before it, after which ``index`` goes on."""
        of_rank, world_size = self._placement.of_rank(number), self._placement.world_size
        if self._order is None:
            return self._placement.rank + world_size * of_rank
        return of_rank // self.step_samples * self.step_samples * world_size

    def index(self, number: int) -> int:
        """That of the consumer's ``number``-th sample. They ascend; asked for that way, they cost least."""
        if self._order is None:
            return self.begin(number)
        step, place = divmod(self._placement.of_rank(number), self.step_samples)
        if self._own[0] != step:
            ranks, _ = self.shares(step)
            start = step * self.step_samples * self._placement.world_size
            self._own = step, np.flatnonzero(ranks == self._placement.rank) + start
        return int(self._own[1][place])

    def shares(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each sample of a step its rank, and which of the rank's samples it is."""
        size, world_size = self.step_samples, self._placement.world_size
        start = step * size * world_size
        stop = min(start + size * world_size, self._left)
        turns, in_turns = np.divmod(np.arange(stop - start, dtype=np.int64), world_size)
        if self._order is None:
            return in_turns, turns + step * size
        positions = self._rest.positions_of(start, stop)
        if positions[-1] >= self._order.affinity_stop:
            return in_turns, turns + step * size
        if self._affinities is None or step < self._own[0]:
            self._affinities = self._order.affinities(self._order.assignment(int(positions[0])), world_size)
        ranks = cut(self._affinities.at(positions), world_size)
        numbers = np.empty(len(ranks), np.int64)
        by_rank = np.argsort(ranks, kind="stable")
        ascending = ranks[by_rank]
        numbers[by_rank] = np.arange(len(ranks)) - np.searchsorted(ascending, ascending)
        return ranks, numbers + step * size


def rest_in(state: Mapping[str, Any], total: int) -> tuple[int, list[range]]:
    """The position and the runs of missing ones that a Rest's JSON tells of, however many those are.

    Raises:
        StateMismatch: They can't be, or are none of an epoch of ``total`` samples.
    """
    try:
        position = state["position"]
        runs = [range(*run) for run in state["missing"]]
        if not is_whole_number(position):
            raise TypeError(f"position is {position!r}")  # noqa: TRY301
        if not sum(map(len, runs)) <= min(position, MAX_MISSING) or position > total:  # before they take room
            raise ValueError(f"more than the {position} samples in front, or than {total}")  # noqa: TRY301
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateMismatch(f"a state's rest of an epoch must have position and missing, not {state!r}") from error
    ends = [end for run in runs if run for end in (run[0], run[-1])]
    if not 0 <= min(ends, default=0) <= max(ends, default=0) < max(1, position):
        raise StateMismatch(f"position={position} and missing={state['missing']} are none of {total} samples")
    return position, runs


def _runs(numbers: Sequence[int], stride: int) -> list[list[int]]:
    """Return ascending numbers as ranges [start, stop, stride]; those of one number with their neighbours, by 1."""
    runs: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    for number in numbers:
        run = latest.get(number % stride)
        if run is not None and number == run[1] - 1 + stride:
            run[1] = number + 1
        else:
            run = latest[number % stride] = [number, number + 1, stride]
            runs.append(run)
    found: list[list[int]] = []
    for start, stop, step in runs:
        is_alone = stop == start + 1
        if is_alone and found and found[-1][1:] == [start, 1]:
            found[-1][1] = stop
        else:
            found.append([start, stop, 1 if is_alone else step])
    return found

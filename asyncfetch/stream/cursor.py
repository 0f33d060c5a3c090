"""What is left of an epoch, and who takes which part of it. Pure arithmetic on positions of an order.

All that an epoch has given is told by how many samples each of its consumers was given: the order is the same for all,
and each takes its positions ascending. So what is left is every position from some point on, and a few in front of it,
of consumers that were slower than others. Who goes on, however many they are, share *that*, as they would share a whole
epoch: in turns, or by batches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncfetch.errors import StateMismatch
from asyncfetch.ranges import is_whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncfetch.stream.placement import Placement

__all__ = ["Ends", "Rest", "rest_in"]

Ends = Literal["uneven", "drop", "pad"]
"""What becomes of the last samples of an epoch, fewer than there are ranks."""
MAX_MISSING = 1 << 24
"""That a state may tell of: so far behind no consumer is, and they take 0.7 GB."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of an epoch; of a whole one, everything.

    It is numbered: its samples are ``index`` 0, 1 ... in the order of their positions.
    """

    position: int = 0
    """Everything from here on is left."""
    missing: tuple[int, ...] = ()
    """Positions in front of that which are left too, ascending."""
    stride: int = field(default=1, compare=False)
    """How far apart those of one consumer lie, mostly: what is left of each then takes little room in a state."""

    def left(self, total: int) -> int:
        """How many samples, in an epoch of ``total``."""
        return len(self.missing) + total - self.position

    def shared(self, total: int, placement: Placement, ends: Ends) -> tuple[int, int]:
        """How many samples one consumer takes, and how many of those are padding: repeated at the end."""
        left, world = self.left(total), placement.world_size
        given = {"uneven": left, "drop": left - left % world, "pad": left + -left % world}[ends]
        return placement.count(given), max(0, placement.count(given) - placement.count(left))

    def positions(self, total: int, placement: Placement, ends: Ends, *, skip: int = 0) -> Iterator[int]:
        """The positions of one consumer, ascending, without those of its padding and its first ``skip``."""
        taken, padded = self.shared(total, placement, ends)
        for number in range(skip, taken - padded):
            yield self.position_of(placement.index(number))

    def position_of(self, index: int) -> int:
        """Where the sample of this index is."""
        known = len(self.missing)
        return self.missing[index] if index < known else self.position + index - known

    def after(self, delivered: Mapping[Placement, int], total: int) -> Rest:
        """What is left when its consumers, all of them, were given so many samples each."""
        left = self.left(total)
        # All below the first sample that somebody lacks was delivered, and none from the last that somebody has on.
        low = min(placement.index(count) for placement, count in delivered.items())
        high = 1 + max(placement.index(count - 1) if count else -1 for placement, count in delivered.items())
        low, high = min(low, left), min(high, left)
        if high - low > MAX_MISSING:  # before they take room
            raise StateMismatch(
                f"of those who shared an epoch some have come {high - low} samples further than others, and up to "
                f"{MAX_MISSING} can be told of"
            )
        lacking = np.ones(max(0, high - low), dtype=bool)
        for placement, count in delivered.items():
            numbers = range(placement.count(low), min(count, placement.count(high)))
            lacking[[placement.index(number) - low for number in numbers]] = False
        indices = itertools.chain((np.flatnonzero(lacking) + low).tolist(), range(max(low, high), len(self.missing)))
        missing = tuple(map(self.position_of, indices))
        stride = max(placement.period for placement in delivered)
        return Rest(self.position + max(0, max(low, high) - len(self.missing)), missing, stride)

    def as_json(self) -> dict[str, Any]:
        """For a state. ``missing`` as [start, stop, step], of which a slow consumer takes one or a few."""
        return {"position": self.position, "missing": _runs(self.missing, self.stride)}

    @classmethod
    def of_json(cls, state: Mapping[str, Any], total: int) -> Rest:
        """What ``as_json`` gave, of an epoch of ``total`` samples."""
        position, runs = rest_in(state, total)
        missing = tuple(sorted(itertools.chain.from_iterable(runs)))
        if len(set(missing)) != len(missing):
            raise StateMismatch(f"missing={state['missing']} names positions twice")
        return cls(position, missing, max((1, *(run.step for run in runs))))


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
    """Ascending numbers as ranges [start, stop, stride]."""
    runs: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    for number in numbers:
        run = latest.get(number % stride)
        if run is not None and number == run[1] - 1 + stride:
            run[1] = number + 1
        else:
            run = latest[number % stride] = [number, number + 1, stride]
            runs.append(run)
    return runs

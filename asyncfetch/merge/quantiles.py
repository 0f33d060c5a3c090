"""Exact values at given places of a sorted order that is never in memory. Pure.

Numbers become whole ones of the same order, from the bits of a float64. Their bits are searched from the left, in
rounds. The first round counts all rows by their first bits, which gives the first bits of the value at each place; the
next counts only rows that begin with those, by some bits more; and so on, until all bits are known that any row has. A
round's counts are sums over rows, counted anywhere and added in any order. Their size doesn't grow with the rows: in
the first round 1024 counts for each power of two that occurs, later up to 32,768 for each place.

float32, and whole numbers below 2**24, need two rounds; a small number of rows is counted by all bits at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_SHIFTS = (42, 29, 14, 0)
"""Bits on the right that a round leaves out. 10 bits of a float64's fraction, all that a float32 has, then the rest."""
_FEW_ROWS = 65_536
"""Number of rows whose keys and counts take at most 1 MiB for each component."""
_SIGN = np.int64(-(2**63))


@dataclass(frozen=True, slots=True, eq=False)
class KnownValues:
    """The known bits of the values at some places of one component's order."""

    shift: int
    """Number of bits that aren't known yet."""
    bins: NDArray[np.int64]
    """The bits left of those, by place."""
    ranks: NDArray[np.int64]
    """Number of rows with the same bits before the place."""

    def values(self) -> NDArray[np.float64]:
        """The values, with zeros for unknown bits."""
        keys = self.bins << self.shift
        bits: NDArray[np.int64] = np.where(keys < 0, -keys | _SIGN, keys)
        return bits.view(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixCounters:
    """One component's rows, counted by their first bits."""

    bins: NDArray[np.int64]
    """First bits that occur, ascending."""
    counts: NDArray[np.int64]
    used_bits: int
    """Bits set in any key."""

    def __add__(self, other: PrefixCounters) -> PrefixCounters:
        bins, places = np.unique(np.concatenate((self.bins, other.bins)), return_inverse=True)
        counts = np.zeros(len(bins), np.int64)
        np.add.at(counts, places, np.concatenate((self.counts, other.counts)))
        return PrefixCounters(bins, counts, self.used_bits | other.used_bits)

    def find(self, ranks: NDArray[np.int64], shift: int) -> KnownValues:
        """The values with so many of the counted rows before them."""
        behind = np.cumsum(self.counts)
        at = np.searchsorted(behind, ranks, "right")
        return KnownValues(shift, self.bins[at], ranks - (behind[at] - self.counts[at]))

    def narrow(self, place: KnownValues, shift: int) -> KnownValues:
        """The same places with more bits known, from a count of the rows that ``place`` asks for."""
        first = np.searchsorted(self.bins >> (place.shift - shift), place.bins)
        before = np.concatenate(([0], np.cumsum(self.counts)))
        return self.find(before[first] + place.ranks, shift)


class QuantileSearch:
    """A search in rounds, for the places with so many rows before them in the order of each feature's components."""

    def __init__(self, num_rows: int, ranks: NDArray[np.int64]) -> None:
        self.shift = 0 if num_rows <= _FEW_ROWS else _SHIFTS[0]
        self.wanted: dict[str, list[KnownValues]] = {}
        """Places that the next round asks for, by feature; without features that are known."""
        self._ranks = ranks
        self._found: dict[str, list[KnownValues]] = {}

    def learn(self, counted: Mapping[str, Sequence[PrefixCounters]]) -> None:
        """Learn from a round's counts: the first round's of all features, later ones' of ``wanted``."""
        wanted = {}
        for key, tallies in counted.items():
            before = self.wanted.get(key, [None] * len(tallies))
            self._found[key] = [
                one.find(self._ranks, self.shift) if place is None else one.narrow(place, self.shift)
                for one, place in zip(tallies, before, strict=True)
            ]
            if any(one.used_bits & ((1 << self.shift) - 1) for one in tallies):
                wanted[key] = self._found[key]
        self.wanted = wanted
        self.shift = next((shift for shift in _SHIFTS if shift < self.shift), 0)

    def values(self, key: str) -> NDArray[np.float64]:
        """(components, places) of a feature."""
        return np.stack([place.values() for place in self._found[key]])


def keys_of(values: NDArray[Any]) -> NDArray[np.int64]:
    """Whole numbers of the same order as these, of the same shape; NaN first or last, -0.0 as 0.0.

    Bits that are zero in all values are zero in all keys.
    """
    bits = values.astype(np.float64).view(np.int64)
    return np.where(bits < 0, -(bits & ~_SIGN), bits)


def count_prefixes(keys: NDArray[np.int64], shift: int, place: KnownValues | None = None) -> PrefixCounters:
    """Counts of one component's keys: of all, or only those that ``place`` asks for."""
    if place is not None:
        keys = keys[np.isin(keys >> place.shift, place.bins)]
    bins, counts = np.unique(keys >> shift, return_counts=True)
    return PrefixCounters(bins, counts, int(np.bitwise_or.reduce(keys)) if len(keys) else 0)

"""Statistics of features, and the pieces of a merge that read written rows back for them.

Reading back makes no difference between files written now and before an interruption.

Statistics are those of ``meta/stats.json`` and the ``stats/*`` columns. Those of an episode's numbers are computed from
its rows, and a QuantileSearch finds the values of all rows between which QUANTILES are interpolated. Those of pictures
would need decoding, so the sources' stay. What episodes have in common is combined: counts, means, deviations and
extremes exactly, quantiles of pictures as an envelope, since they can't be recovered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.lerobot.columns import to_column
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.parquet import open_table, read_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.destination import Destination
    from asyncfetch.merge.executor import WorkerSetup

Statistics = dict[str, "NDArray[Any]"]

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", "count", *QUANTILES)
"""Statistics in the order in which LeRobot writes them."""
_LOWER = ("min", "q01", "q10", "q50")
"""Statistics whose envelope is the least of the parts' values, as in LeRobot; for the others it is the greatest."""
_SHARES = np.array(list(QUANTILES.values()))


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeColumn:
    """One statistic of a feature, by the episodes' positions in a table."""

    values: NDArray[Any]
    """(episodes, \\*shape)."""
    is_known: NDArray[np.bool_]
    """(episodes,). Unknown ones have any values."""

    @classmethod
    def unknown(cls, count: int, like: NDArray[Any]) -> EpisodeColumn:
        """Unknown values for so many episodes, of this shape and dtype."""
        return cls(np.zeros((count, *like.shape[1:]), like.dtype), np.zeros(count, np.bool_))

    def take(self, positions: NDArray[np.int64]) -> EpisodeColumn:
        """The column of these episodes, in this order."""
        return EpisodeColumn(self.values[positions], self.is_known[positions])


def components_of(values: NDArray[Any]) -> NDArray[Any]:
    r"""(rows, \*shape) as (\*shape, rows); scalars count as one component."""
    return np.ascontiguousarray(np.moveaxis(values[:, None] if values.ndim == 1 else values, 0, -1))


def quantile_ranks(count: int) -> NDArray[np.int64]:
    """The 10 places in the order of so many rows around QUANTILES: those below, then those above."""
    below = np.floor(_SHARES * (count - 1)).astype(np.int64)
    return np.concatenate((below, np.minimum(below + 1, count - 1)))


def quantiles_between(ordered: NDArray[np.float64], count: int, least: NDArray[np.float64]) -> Statistics:
    r"""QUANTILES of so many rows; NaN where the ``least`` value is.

    Linear between ``ordered``, the values at ``quantile_ranks``, (\*shape, 10).
    """
    low, high = np.split(ordered, 2, axis=-1)
    position = _SHARES * (count - 1)
    with np.errstate(invalid="ignore"):
        quantiles = low + (high - low) * (position - np.floor(position))
    quantiles = np.where(np.isnan(least)[..., None], np.nan, quantiles)
    return {name: quantiles[..., at] for at, name in enumerate(QUANTILES)}


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
    """A search in rounds, for the places with so many rows before them in the order of each feature's components.

    The values there are exact, and the order is never in memory.

    Numbers become whole ones of the same order, from the bits of a float64. Their bits are searched from the left, in
    rounds. The first round counts all rows by their first bits, which gives the first bits of the value at each place;
    the next counts only rows that begin with those, by some bits more; and so on, until all bits are known that any row
    has. A round's counts are sums over rows, counted anywhere and added in any order. Their size doesn't grow with the
    rows: in the first round 1024 counts for each power of two that occurs, later up to 32,768 for each place.

    float32, and whole numbers below 2**24, need two rounds; a small number of rows is counted by all bits at once.
    """

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


def describe(components: NDArray[Any]) -> Statistics:
    """The statistics of rows in memory under LeRobot's names, over the last axis; one NaN makes all of them NaN."""
    exact, count = components.astype(np.float64), components.shape[-1]
    ordered = np.sort(components, axis=-1)[..., quantile_ranks(count)].astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinities the deviation is NaN
        described = {"min": exact.min(-1), "max": exact.max(-1), "mean": exact.mean(-1), "std": exact.std(-1)}
    return {**described, "count": np.array([count]), **quantiles_between(ordered, count, described["min"])}


def combine(parts: Sequence[Mapping[str, Any]]) -> Statistics | None:
    """The combined statistics of parts; None without any value. A quantile that a part lacks is left out."""
    filled = [part for part in parts if np.any(part["count"])]
    if not filled:
        return None
    names = [name for name in STATISTICS if all(name in part for part in filled)]
    return combine_columns({name: np.stack([np.asarray(part[name], np.float64) for part in filled]) for name in names})


def combine_columns(columns: Statistics) -> Statistics:
    """The combined statistics of the parts along the first axis, none of them empty."""
    counts = columns["count"].reshape(-1)
    shares = counts / counts.sum()
    with np.errstate(invalid="ignore"):
        mean = np.tensordot(shares, columns["mean"], axes=1)
        variance = np.tensordot(shares, columns["std"] ** 2 + (columns["mean"] - mean) ** 2, axes=1)
    combined = {"mean": mean, "std": np.sqrt(variance), "count": np.array([int(counts.sum())])}
    for name in columns.keys() - combined.keys():
        combined[name] = columns[name].min(axis=0) if name in _LOWER else columns[name].max(axis=0)
    return {name: combined[name] for name in STATISTICS if name in combined}


@dataclass(frozen=True, slots=True)
class SummaryTask:
    """Episodes in a written file of rows that are summarised together."""

    path: str
    number: int
    """Index of the first of them, by which parts are put in order."""
    first_group: int
    lengths: tuple[int, ...]
    """Rows of this group and the following ones."""
    features: tuple[Feature, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of the rows of some parts; of a further round of the search, only ``counted`` means anything."""

    tasks: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Distinct tasks of each episode, in the order of its frames, by the number of the part."""
    episodes: Mapping[int, Mapping[str, Statistics]] = field(default_factory=dict)
    """Statistics by feature, the first axis over the episodes, by the number of the part."""
    counted: Mapping[str, Sequence[PrefixCounters]] = field(default_factory=dict)
    """Counts of a round of the search for quantiles, by feature: one for each component."""

    def by_episode(self) -> dict[str, Statistics]:
        """Statistics by feature, the first axis over all episodes."""
        parts = [part for _, part in sorted(self.episodes.items())]
        features = parts[0] if parts else {}
        return {
            key: {name: np.concatenate([part[key][name] for part in parts]) for name in STATISTICS} for key in features
        }

    def __add__(self, other: Summary) -> Summary:
        counted = {
            key: [one + another for one, another in zip(own, other.counted[key], strict=True)]
            for key, own in self.counted.items()
        }
        return Summary({**self.tasks, **other.tasks}, {**self.episodes, **other.episodes}, counted)


async def summarise(
    setup: WorkerSetup,
    destination: Destination,
    part: SummaryTask,
    shift: int,
    wanted: Mapping[str, Sequence[KnownValues]] | None = None,
) -> Summary:
    """A summary of the part, with the first round of the search for quantiles; or a further round, for ``wanted``."""
    features = [feature for feature in part.features if wanted is None or feature.key in wanted]
    url = destination.url(part.path)
    file = await open_table(setup.fetcher, url, run=run_sync)
    groups = range(part.first_group, part.first_group + len(part.lengths))
    table = await read_columns(setup.fetcher, file, groups, [feature.key for feature in features], run=run_sync)

    def work() -> Summary:
        tasks: tuple[tuple[int, ...], ...] = ()
        episodes, counted = {}, {}
        cuts = np.cumsum(part.lengths)[:-1]
        for feature in features:
            values = to_column(table[feature.key], feature, url)
            components = components_of(values)
            keys = keys_of(components.reshape(-1, components.shape[-1]))
            places: Sequence[KnownValues | None] = [None] * len(keys) if wanted is None else wanted[feature.key]
            counted[feature.key] = [count_prefixes(own, shift, place) for own, place in zip(keys, places, strict=True)]
            if wanted is None:
                described = [describe(own) for own in np.split(components, cuts, axis=-1)]
                episodes[feature.key] = {name: np.stack([one[name] for one in described]) for name in described[0]}
            if feature.key == "task_index":
                tasks = tuple(tuple(dict.fromkeys(own.tolist())) for own in np.split(values, cuts))
        return Summary({part.number: tasks}, {part.number: episodes}, counted)

    return await run_sync(work)

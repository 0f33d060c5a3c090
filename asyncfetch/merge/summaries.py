"""Statistics of features, and the pieces of a merge that read written rows back for them.

Reading back makes no difference between files written now and before an interruption.

Statistics are those of ``meta/stats.json`` and the ``stats/*`` columns. Those of numbers are computed from the rows:
Moments add up, and ``quantiles`` finds the values between which QUANTILES are interpolated. Those of pictures would
need decoding, so the sources' are combined: counts, means and deviations exactly, extremes and quantiles as an
envelope, since quantiles can't be recovered.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from asyncfetch.lerobot.columns import to_column
from asyncfetch.merge.quantiles import CountersByFeature, count_prefixes, keys_of
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.parquet import open_table, read_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.destination import Build
    from asyncfetch.merge.executor import WorkerSetup
    from asyncfetch.merge.quantiles import KnownValues

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

    def take(self, positions: NDArray[np.int64]) -> EpisodeColumn:
        """The column of these episodes, in this order."""
        return EpisodeColumn(self.values[positions], self.is_known[positions])


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Moments of a feature's values in some rows, which add up, by component: arrays have its shape."""

    count: int
    least: NDArray[np.float64]
    """NaN if one of the values is; the others likewise."""
    greatest: NDArray[np.float64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]
    """Sum of the squared distances from the mean."""

    @classmethod
    def of_rows(cls, values: NDArray[Any]) -> Moments:
        """The moments over the last axis, which isn't empty."""
        exact = values.astype(np.float64)
        with np.errstate(invalid="ignore"):  # of infinities the deviation is NaN
            mean = exact.mean(axis=-1)
            squares = ((exact - mean[..., None]) ** 2).sum(axis=-1)
        return cls(exact.shape[-1], exact.min(axis=-1), exact.max(axis=-1), mean, squares)

    def __add__(self, other: Moments) -> Moments:
        n, m = self.count, other.count
        with np.errstate(invalid="ignore"):
            apart = other.mean - self.mean
            return Moments(
                count=n + m,
                least=np.minimum(self.least, other.least),
                greatest=np.maximum(self.greatest, other.greatest),
                mean=self.mean + apart * (m / (n + m)),
                squares=self.squares + other.squares + apart**2 * (n * m / (n + m)),
            )

    def statistics(self, ordered: NDArray[np.float64]) -> Statistics:
        r"""The statistics under LeRobot's names; quantiles are linear between neighbours.

        Args:
            ordered: (\*shape, 10) values at the ``quantile_ranks`` of so many rows.
        """
        low, high = np.split(ordered, 2, axis=-1)
        position = _SHARES * (self.count - 1)
        with np.errstate(invalid="ignore"):
            quantiles = low + (high - low) * (position - np.floor(position))
        quantiles = np.where(np.isnan(self.least)[..., None], np.nan, quantiles)  # one NaN makes all of them NaN
        return {
            "min": self.least,
            "max": self.greatest,
            "mean": self.mean,
            "std": np.sqrt(self.squares / self.count),
            "count": np.array([self.count]),
            **{name: quantiles[..., at] for at, name in enumerate(QUANTILES)},
        }


def components_of(values: NDArray[Any]) -> NDArray[Any]:
    r"""(rows, \*shape) as (\*shape, rows); scalars count as one component."""
    return np.ascontiguousarray(np.moveaxis(values[:, None] if values.ndim == 1 else values, 0, -1))


def quantile_ranks(count: int) -> NDArray[np.int64]:
    """The 10 places in the order of so many rows around QUANTILES: those below, then those above."""
    below = np.floor(_SHARES * (count - 1)).astype(np.int64)
    return np.concatenate((below, np.minimum(below + 1, count - 1)))


def describe(components: NDArray[Any]) -> Statistics:
    """The statistics of rows in memory, over the last axis."""
    ordered = np.sort(components, axis=-1)[..., quantile_ranks(components.shape[-1])]
    return Moments.of_rows(components).statistics(ordered.astype(np.float64))


def combine(parts: Sequence[Mapping[str, Any]]) -> Statistics | None:
    """The combined statistics of parts; None without any value. A quantile that a part lacks is left out."""
    arrays = [
        {name: np.asarray(part[name], np.float64) for name in STATISTICS if name in part}
        for part in parts
        if np.any(part["count"])
    ]
    if not arrays:
        return None
    counts = np.array([part["count"].item() for part in arrays])
    shares = counts / counts.sum()

    def weighted(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.tensordot(shares, np.stack(values), axes=1)

    mean = weighted([part["mean"] for part in arrays])
    variance = weighted([part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in arrays])
    combined = {"mean": mean, "std": np.sqrt(variance), "count": np.array([int(counts.sum())])}
    for name in ("min", "max", *QUANTILES):
        if all(name in part for part in arrays):
            values = np.stack([part[name] for part in arrays])
            combined[name] = values.min(axis=0) if name in _LOWER else values.max(axis=0)
    return {name: combined[name] for name in STATISTICS if name in combined}


_PART_ROWS = 262_144
"""Rows read back at a time, which takes 2 s and for 14 numbers some 100 MB. A file holds a million, and its footer,
which lists its episodes and takes 0.1 s, is read for each part."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SummaryTask:
    """Episodes in a written file of rows that are summarised together."""

    path: str
    """Path in the dataset of the file."""
    first_group: int
    lengths: tuple[int, ...]
    """Rows of this group and the following ones."""
    features: tuple[Feature, ...]
    """Features with statistics of numbers."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of the rows of some consecutive episodes."""

    tasks: tuple[tuple[int, ...], ...] = ()
    """Distinct tasks of each episode, in the order of its frames."""
    episodes: tuple[Mapping[str, Statistics], ...] = ()
    """Statistics by feature, the first axis over some of the episodes."""
    moments: Mapping[str, Moments] = field(default_factory=dict)
    counted: CountersByFeature = field(default_factory=lambda: CountersByFeature({}))

    def __add__(self, other: Summary) -> Summary:
        moments = {key: own + other.moments[key] for key, own in self.moments.items()}
        return Summary(self.tasks + other.tasks, self.episodes + other.episodes, moments, self.counted + other.counted)


def cut_parts(path: str, lengths: Sequence[int], features: tuple[Feature, ...]) -> list[SummaryTask]:
    """A file's row groups, of these lengths, as tasks of bounded size."""
    parts = []
    first = rows = 0
    for at, length in enumerate(lengths):
        if rows and rows + length > _PART_ROWS:
            parts.append(SummaryTask(path, first, tuple(lengths[first:at]), features))
            first, rows = at, 0
        rows += length
    return [*parts, SummaryTask(path, first, tuple(lengths[first:]), features)] if rows else parts


async def summarise(setup: WorkerSetup, build: Build, part: SummaryTask, shift: int) -> Summary:
    """A summary of some row groups of a written file, with the first round of the search for quantiles."""
    url, table = await _read_part(setup, build, part, [feature.key for feature in part.features])
    return await run_sync(_summarise, table, part, url, shift)


async def count_prefixes_again(
    setup: WorkerSetup, build: Build, part: SummaryTask, wanted: Mapping[str, Sequence[KnownValues]], shift: int
) -> CountersByFeature:
    """A further round of the search for quantiles."""
    url, table = await _read_part(setup, build, part, list(wanted))
    return await run_sync(_count_prefixes_again, table, part, url, wanted, shift)


async def add(setup: WorkerSetup, left: T, right: T) -> T:
    """Two summaries or counts, the left one's episodes first."""
    return await run_sync(operator.add, left, right)


async def _read_part(
    setup: WorkerSetup, build: Build, part: SummaryTask, columns: Sequence[str]
) -> tuple[str, pa.Table]:
    url = build.url(part.path)
    file = await open_table(setup.fetcher, url, run=run_sync)
    groups = range(part.first_group, part.first_group + len(part.lengths))
    return url, await read_columns(setup.fetcher, file, groups, columns, run=run_sync)


def _summarise(table: pa.Table, part: SummaryTask, url: str, shift: int) -> Summary:
    moments, episodes, counted = {}, {}, {}
    tasks: tuple[tuple[int, ...], ...] = ()
    cuts = np.cumsum(part.lengths)[:-1]
    for feature in part.features:
        values = to_column(table[feature.key], feature, url)
        if feature.key == "task_index":
            tasks = tuple(tuple(dict.fromkeys(own.tolist())) for own in np.split(values, cuts))
        components = components_of(values)
        moments[feature.key] = Moments.of_rows(components)
        described = [describe(own) for own in np.split(components, cuts, axis=-1)]
        episodes[feature.key] = {name: np.stack([one[name] for one in described]) for name in described[0]}
        counted[feature.key] = [count_prefixes(keys, shift) for keys in _keys_by_component(components)]
    return Summary(tasks, (episodes,), moments, CountersByFeature(counted))


def _count_prefixes_again(
    table: pa.Table, part: SummaryTask, url: str, wanted: Mapping[str, Sequence[KnownValues]], shift: int
) -> CountersByFeature:
    counted = {}
    for feature in part.features:
        if places := wanted.get(feature.key):
            keys = _keys_by_component(components_of(to_column(table[feature.key], feature, url)))
            counted[feature.key] = [count_prefixes(own, shift, place) for own, place in zip(keys, places, strict=True)]
    return CountersByFeature(counted)


def _keys_by_component(components: NDArray[Any]) -> NDArray[np.int64]:
    """(components, rows)."""
    return keys_of(components.reshape(-1, components.shape[-1]))

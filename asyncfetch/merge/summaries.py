"""What is known of the rows: the pieces of a merge that read back what was written.

Then it doesn't matter whether a file was written now or before an interruption.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread
import numpy as np

from asyncfetch.lerobot.columns import to_column
from asyncfetch.lerobot.parquet import open_table, read_columns
from asyncfetch.merge.quantiles import TallySet, keys_of, tally
from asyncfetch.merge.statistics import Moments, components_of, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.destination import Build, WrittenFile
    from asyncfetch.merge.kernel import Workplace
    from asyncfetch.merge.quantiles import Place
    from asyncfetch.merge.statistics import Statistics

__all__ = ["PartUnit", "Summary", "add", "cut_parts", "summarise", "tally_again"]

_PART_ROWS = 262_144
"""Read back at a time, which takes 2 s and for 14 numbers some 100 MB. A file holds a million, and its footer, which
lists its episodes and takes 0.1 s, is read for each part."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PartUnit:
    """Episodes in a written file of rows that are summarised together."""

    first_group: int
    lengths: tuple[int, ...]
    """Rows of this group and the following ones."""
    features: tuple[Feature, ...]
    """Those with statistics of numbers."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known of the rows of some episodes that follow each other."""

    tasks: tuple[tuple[int, ...], ...] = ()
    """Of each episode, different ones, in the order of its frames."""
    episodes: tuple[Mapping[str, Statistics], ...] = ()
    """Statistics by feature, the first axis over some of the episodes."""
    moments: Mapping[str, Moments] = field(default_factory=dict)
    counted: TallySet = field(default_factory=lambda: TallySet({}))

    def __add__(self, other: Summary) -> Summary:
        moments = {key: own + other.moments[key] for key, own in self.moments.items()}
        return Summary(self.tasks + other.tasks, self.episodes + other.episodes, moments, self.counted + other.counted)


def cut_parts(lengths: Sequence[int], features: tuple[Feature, ...]) -> list[PartUnit]:
    """A file's row groups, of these lengths, some at a time."""
    parts = []
    first = rows = 0
    for at, length in enumerate(lengths):
        if rows and rows + length > _PART_ROWS:
            parts.append(PartUnit(first, tuple(lengths[first:at]), features))
            first, rows = at, 0
        rows += length
    return [*parts, PartUnit(first, tuple(lengths[first:]), features)] if rows else parts


async def summarise(place: Workplace, build: Build, written: WrittenFile, part: PartUnit, shift: int) -> Summary:
    """What is known of some row groups of a written file, its quantiles as a first round of their search."""
    url, table = await _read_part(place, build, written, part, [feature.key for feature in part.features])
    return await anyio.to_thread.run_sync(_summarise, table, part, url, shift)


async def tally_again(
    place: Workplace,
    build: Build,
    written: WrittenFile,
    part: PartUnit,
    wanted: Mapping[str, Sequence[Place]],
    shift: int,
) -> TallySet:
    """A further round of the search for quantiles."""
    url, table = await _read_part(place, build, written, part, list(wanted))
    return await anyio.to_thread.run_sync(_tally_again, table, part, url, wanted, shift)


async def add(place: Workplace, left: T, right: T) -> T:
    """Two summaries or counts, the left one's episodes first."""
    return await anyio.to_thread.run_sync(operator.add, left, right)


async def _read_part(
    place: Workplace, build: Build, written: WrittenFile, part: PartUnit, columns: Sequence[str]
) -> tuple[str, pa.Table]:
    url = build.url(written.path)
    file = await open_table(place.fetcher, url, run=anyio.to_thread.run_sync)
    groups = range(part.first_group, part.first_group + len(part.lengths))
    return url, await read_columns(place.fetcher, file, groups, columns, run=anyio.to_thread.run_sync)


def _summarise(table: pa.Table, part: PartUnit, url: str, shift: int) -> Summary:
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
        counted[feature.key] = [tally(keys, shift) for keys in _keys_by_component(components)]
    return Summary(tasks, (episodes,), moments, TallySet(counted))


def _tally_again(
    table: pa.Table, part: PartUnit, url: str, wanted: Mapping[str, Sequence[Place]], shift: int
) -> TallySet:
    counted = {}
    for feature in part.features:
        if places := wanted.get(feature.key):
            keys = _keys_by_component(components_of(to_column(table[feature.key], feature, url)))
            counted[feature.key] = [tally(own, shift, place) for own, place in zip(keys, places, strict=True)]
    return TallySet(counted)


def _keys_by_component(components: NDArray[Any]) -> NDArray[np.int64]:
    """(components, rows)."""
    return keys_of(components.reshape(-1, components.shape[-1]))

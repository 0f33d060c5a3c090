"""In which row groups of a data file the rows with given numbers lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.lerobot.columns import to_integers
from asyncfetch.lerobot.parquet import read_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.parquet import TableFile
    from asyncfetch.runtime.concurrently import RunSync

__all__ = ["IndexedTable", "index_table"]

_MOST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class IndexedTable:
    """An open data file; row group g holds values of ``index`` from first[g] to last[g], both included."""

    table: TableFile
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        return self.table.nbytes + self.first.nbytes + self.last.nbytes

    def beginning(self, episode: Episode) -> Episode:
        """The episode, all of whose rows these are, where its ``index`` begins by them."""
        filled = self.first[self.first <= self.last]
        index = int(filled.min()) if len(filled) else 0
        return replace(episode, from_index=index, to_index=index + episode.length)

    def covers(self, start: int, stop: int) -> bool:
        """Whether rows with an ``index`` of [start, stop) may all be here, by the first and the last one."""
        filled = self.first <= self.last
        return bool(filled.any() and self.first[filled].min() <= start and self.last[filled].max() >= stop - 1)

    def groups_of(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """The row groups with an ``index`` in [start, stop): those with no other, and those that may have others."""
        touched = (self.first < stop) & (self.last >= start)
        own = touched & (self.first >= start) & (self.last < stop)
        return np.flatnonzero(own).tolist(), np.flatnonzero(touched & ~own).tolist()


async def index_table(reader: RangeReader, table: TableFile, *, run: RunSync) -> IndexedTable:
    """By the footer's statistics; of row groups that have none the column is read.

    Raises:
        FetchError: A range could not be fetched.
        FormatError: The file is damaged, or has no whole numbers in ``index``.
    """
    table.require(["index"])
    first, last, unknown = await run(partial(_index_spans, table))
    if unknown:
        rows = await read_columns(reader, table, unknown, ["index"], run=run)
        await run(partial(_fill_spans, table, rows, unknown, first, last))
    return IndexedTable(table, first, last)


def _index_spans(table: TableFile) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """First and last ``index`` of each row group by the footer, and the groups of which it doesn't tell."""
    groups = table.metadata.num_row_groups
    # What is empty holds no index: its span ends before it begins.
    first, last = np.zeros(groups, np.int64), np.full(groups, -1, np.int64)
    unknown = []
    leaf = table.leaves["index"].start
    for group in range(groups):
        row_group = table.metadata.row_group(group)
        if not row_group.num_rows:
            continue
        bounds = _bounds(row_group.column(leaf).statistics)
        if bounds is None:
            unknown.append(group)
        else:
            first[group], last[group] = bounds
    return first, last, unknown


def _bounds(statistics: pq.Statistics | None) -> tuple[int, int] | None:
    """The least and the greatest value, where they are told and are numbers that an ``index`` may be."""
    try:
        low, high = (statistics.min, statistics.max) if statistics is not None else (None, None)
    except (ValueError, ArithmeticError):
        return None  # texts that aren't UTF-8, times that Python hasn't: reading the column says what it holds
    if isinstance(low, int) and isinstance(high, int) and -_MOST <= low <= high <= _MOST:
        return low, high
    return None


def _fill_spans(
    table: TableFile, rows: pa.Table, groups: Sequence[int], first: NDArray[np.int64], last: NDArray[np.int64]
) -> None:
    index = to_integers(rows["index"], "index", table.url)
    start = 0
    for group in groups:
        stop = start + table.metadata.row_group(group).num_rows
        first[group], last[group] = index[start:stop].min(), index[start:stop].max()
        start = stop

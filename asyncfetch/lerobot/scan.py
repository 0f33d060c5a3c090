"""Columns of many episodes as Arrow record batches, in the order of their frames.

Row groups are read in units of some tens of thousands of rows, cut where an episode and a row group end together. What
comes is compared with the ``index`` that the episodes' rows must have: rows of no episode are left out, rows in another
order are put right, and missing ones are an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.errors import LEAVE_OUT_EPISODE, DatasetError, FormatError, redact_url
from asyncfetch.runtime.concurrently import gather
from asyncfetch.tables.columns import take_rows, to_integers
from asyncfetch.tables.parquet import fetch_groups, require_pyarrow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.rows import IndexedTable, RowReader
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.tables.parquet import FetchedGroups, TableFile

UNIT_ROWS = 64 * 1024
UNIT_BYTES = 16 * 1024 * 1024
"""Bytes of a unit as pages hold them, before compression; more only where one row group has more."""
FULL_UNITS_AT_ONCE = 4
"""Units fetched and decoded side by side, and held until they are taken."""
FILES_AT_ONCE = 32
"""Footers that are fetched side by side."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Whole episodes and the row groups of a file that have their rows."""

    table: TableFile
    groups: Sequence[int]
    episodes: NDArray[np.int64]
    starts: NDArray[np.int64]
    """The ``index`` of each one's first row, in this file."""
    lengths: NDArray[np.int64]
    full_rows: int
    """Rows of a full unit of this file."""
    key: str = "index"
    """The column that numbers its rows, from ``starts`` on; "frame_index" of a single episode."""

    @property
    def share(self) -> float:
        """The part of a full unit that it is."""
        return int(self.lengths.sum()) / self.full_rows

    def index(self) -> NDArray[np.int64]:
        """Return the ``index`` of each row, in order."""
        before = np.cumsum(self.lengths) - self.lengths
        index: NDArray[np.int64] = np.arange(int(self.lengths.sum())) + np.repeat(self.starts - before, self.lengths)
        return index


async def scan(
    rows: RowReader, reader: RangeReader, columns: Sequence[str], positions: NDArray[np.int64], *, run: RunSync
) -> AsyncGenerator[pa.RecordBatch]:
    """Yield these different columns of the rows of the episodes at these positions in the table, in these orders.

    FormatError where a file is damaged, or lacks a column; DatasetError where the rows aren't those that are counted.
    """
    files = rows.metadata.episodes.data_files()[positions]
    parts = np.split(positions, np.flatnonzero(np.diff(files)) + 1)
    for start in range(0, len(parts), FILES_AT_ONCE):
        look = (partial(_units, rows, columns, part) for part in parts[start : start + FILES_AT_ONCE])
        for units in _together([unit for found in await gather(*look) for unit in found]):
            for batches in await gather(*(partial(_read, reader, columns, unit, run=run) for unit in units)):
                for batch in batches:
                    yield batch


def _together(units: Sequence[_Unit]) -> Iterator[list[_Unit]]:
    """Yield units that are read side by side: as many as are as much as some full ones."""
    some: list[_Unit] = []
    for unit in units:
        if some and sum(one.share for one in some) + unit.share > FULL_UNITS_AT_ONCE:
            yield some
            some = []
        some.append(unit)
    if some:
        yield some


async def _units(rows: RowReader, columns: Sequence[str], positions: NDArray[np.int64]) -> list[_Unit]:
    """Return the units of episodes that are in one file by the metadata."""
    table = rows.metadata.episodes
    positions = positions[table.lengths[positions] > 0]
    if not len(positions):
        return []
    indices = np.array([table.indices[position] for position in positions.tolist()])
    starts, lengths = table.starts[positions], table.lengths[positions].astype(np.int64)
    first = table[int(indices[0])]
    file = await rows.file(first)
    most = _unit_rows(file.table, columns)
    if file.key != "index":
        units = []
        for number, length in zip(indices.tolist(), lengths, strict=True):
            groups = sorted(group for some in file.groups_of(table[number]) for group in some)
            if not groups:
                message = f"{redact_url(file.table.url)} has no row of episode {number}, which has {length} frames"
                raise DatasetError(message, remedy=LEAVE_OUT_EPISODE)
            one = np.array([number]), np.zeros(1, np.int64), np.array([length])
            units.append(_Unit(file.table, groups, *one, most, "frame_index"))
        return units
    if rows.metadata.has_files_of_episodes:
        starts = np.array([file.beginning(first).from_index])
    elif not file.covers(int(starts.min()), int((starts + lengths).max())) and len(positions) > 1:
        # Some of them lie beside the file that they should be in.
        return [unit for one in positions for unit in await _units(rows, columns, np.array([one]))]
    return [
        _Unit(file.table, groups, indices[begin:stop], starts[begin:stop], lengths[begin:stop], most)
        for begin, stop, groups in _cut(file, most, starts, lengths)
    ]


def _cut(
    file: IndexedTable, most_rows: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Yield runs of episodes, the first and one past the last, and the row groups of each run."""
    stops = starts + lengths
    groups = np.flatnonzero(file.first <= file.last)
    first, last = file.first[groups], file.last[groups]
    if (first[1:] <= last[:-1]).any() or (starts[1:] < stops[:-1]).any():  # in no order: all of them together
        touched = (first < stops.max()) & (last >= starts.min())
        yield 0, len(starts), groups[touched].tolist()
        return
    low, high = np.searchsorted(last, starts), np.searchsorted(first, stops)
    cuts = np.append(np.flatnonzero(low[1:] >= high[:-1]) + 1, len(starts))
    begin, ends = 0, np.cumsum(lengths)
    while begin < len(starts):
        full = np.searchsorted(ends, (ends[begin - 1] if begin else 0) + most_rows, side="right")
        stop = int(cuts[min(np.searchsorted(cuts, max(full, begin + 1)), len(cuts) - 1)])
        yield begin, stop, groups[low[begin] : high[stop - 1]].tolist()
        begin = stop


def _unit_rows(table: TableFile, columns: Sequence[str]) -> int:
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        if group.num_rows:
            leaves = [leaf for column in columns for leaf in table.leaves[column]]
            group_bytes = sum(max(0, group.column(leaf).total_uncompressed_size) for leaf in leaves)
            return min(UNIT_ROWS, max(1, UNIT_BYTES * group.num_rows // max(1, group_bytes)))
    return UNIT_ROWS


async def _read(reader: RangeReader, columns: Sequence[str], unit: _Unit, *, run: RunSync) -> list[pa.RecordBatch]:
    if not unit.groups:
        raise _wrong_count(unit, 0, 0)
    wanted = [*columns, *({unit.key} - {*columns})]
    fetched = await fetch_groups(reader, unit.table, unit.groups, wanted, together=True)
    batches = await run(partial(_in_order, fetched, columns, unit))
    if batches is None:
        wanted += {"episode_index"} - {*wanted}
        fetched = await fetch_groups(reader, unit.table, unit.groups, wanted, together=False)
        batches = await run(partial(_sorted_out, fetched, columns, unit))
    return batches


def _in_order(fetched: FetchedGroups, columns: Sequence[str], unit: _Unit) -> list[pa.RecordBatch] | None:
    """Return the batches where they are just the unit's rows, in order."""
    try:
        batches = fetched.decode()
    except FormatError:  # read once more, each group where it lies
        return None
    if not np.array_equal(_integers(batches, unit.key, unit), unit.index()):
        return None
    return [batch.select(list(columns)) for batch in batches]


def _sorted_out(fetched: FetchedGroups, columns: Sequence[str], unit: _Unit) -> list[pa.RecordBatch]:
    """Return the unit's rows alone, in order."""
    batches = fetched.decode()
    index, episode = _integers(batches, unit.key, unit), _integers(batches, "episode_index", unit)
    due, owners = unit.index(), np.repeat(unit.episodes, unit.lengths)
    order = np.argsort(due)
    place = order[np.minimum(np.searchsorted(due, index, sorter=order), len(due) - 1)]
    mine = (due[place] == index) & (owners[place] == episode)
    counts = np.bincount(place[mine], minlength=len(due))
    if (counts != 1).any():
        wrong = int(np.flatnonzero(counts != 1)[0])
        raise _wrong_count(unit, wrong, int(counts[wrong]))
    found = np.flatnonzero(mine)
    found = found[np.argsort(place[found])]
    return list(take_rows(require_pyarrow().Table.from_batches(batches).select(list(columns)), found).to_batches())


def _wrong_count(unit: _Unit, row: int, count: int) -> DatasetError:
    """Return the error of a row of the unit that is there so many times."""
    owner, index = np.repeat(unit.episodes, unit.lengths)[row], unit.index()[row]
    message = f"{redact_url(unit.table.url)}, episode {owner}: {count} rows have its episode_index"
    return DatasetError(f"{message} and index {index}; it should be one", remedy=LEAVE_OUT_EPISODE)


def _integers(batches: list[pa.RecordBatch], name: str, unit: _Unit) -> NDArray[np.int64]:
    columns = [batch.column(name) for batch in batches]
    column = require_pyarrow().chunked_array(columns, None if columns else "int64")
    return to_integers(column, name, unit.table.url)

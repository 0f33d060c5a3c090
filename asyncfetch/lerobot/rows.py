"""The table rows of an episode, by range.

A data file's row groups are found by their statistics of ``index``, so neither the order of files nor that of rows
matters, and rows that no episode claims are skipped; where ``index`` begins anew in each episode, by those of
``episode_index``. LeRobot records one row group per episode; converted and older files hold many episodes in one. Such
a shared group is decoded once and kept, an episode's own group is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncfetch.errors import LEAVE_OUT_EPISODE, AccessDenied, DatasetError, NotFound, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.columns import empty_column, to_column
from asyncfetch.lerobot.frame_times import own_seconds
from asyncfetch.lerobot.info import DEFAULT_FEATURES, INDEX_FEATURES
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.single_flight import LRUPart, SharedLRU
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.columns import take_rows, to_integers
from asyncfetch.tables.pages import PageTable, find_pages, has_pages, read_pages
from asyncfetch.tables.parquet import (
    MAX_TAIL_BYTES,
    FetchedColumns,
    fetch_columns,
    open_table,
    read_columns,
    require_pyarrow,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection

    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.columns import Column
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.lerobot.listing import ListTables
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.tables.parquet import TableFile

_MOST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class IndexedTable:
    """An open data file; row group g holds values of the key from first[g] to last[g], both included."""

    table: TableFile
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    key: Literal["index", "episode_index"] = "index"
    """The column by which an episode's rows are found."""

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        return self.table.nbytes + self.first.nbytes + self.last.nbytes

    @property
    def span(self) -> tuple[int, int]:
        """The least key, and one past the greatest; (0, 0) without rows."""
        filled = self.first <= self.last
        return (int(self.first[filled].min()), int(self.last[filled].max()) + 1) if filled.any() else (0, 0)

    def beginning(self, episode: Episode) -> Episode:
        """The episode, all of whose rows these are, where its ``index`` begins by them."""
        index, _ = self.span
        return replace(episode, from_index=index, to_index=index + episode.length)

    def covers(self, start: int, stop: int) -> bool:
        """Return whether rows with a key in [start, stop) may all be here, by the first and the last one."""
        least, end = self.span
        return least <= start and stop <= end

    def may_have(self, episode: Episode) -> bool:
        """Return whether the episode's rows may all be here."""
        return self.covers(*self._keys(episode))

    def groups_of(self, episode: Episode) -> tuple[list[int], list[int]]:
        """The row groups with rows of the episode, by the key: those with no other, and those that may have others."""
        start, stop = self._keys(episode)
        touched = (self.first < stop) & (self.last >= start)
        own = touched & (self.first >= start) & (self.last < stop)
        return np.flatnonzero(own).tolist(), np.flatnonzero(touched & ~own).tolist()

    def _keys(self, episode: Episode) -> tuple[int, int]:
        if self.key == "index":
            return episode.from_index, episode.to_index
        return episode.index, episode.index + 1


async def index_table(reader: RangeReader, table: TableFile, *, run: RunSync) -> IndexedTable:
    """Index it by the footer's statistics of ``index``, or of ``episode_index`` where that begins anew in each episode.

    Of row groups that have none the column is read. FormatError where it has no whole numbers.
    """
    indexed = await _index_by(reader, table, "index", run)
    least, end = indexed.span
    if table.metadata.num_rows > end - least:  # two rows have one ``index``: one of them may be a deleted episode's
        begin = (await first_indices(reader, table, run=run)).values()
        if len(begin) > 1 and not any(begin):
            return await _index_by(reader, table, "episode_index", run)
    return indexed


async def first_indices(reader: RangeReader, table: TableFile, *, run: RunSync) -> dict[int, int]:
    """The least ``index`` of each episode that has rows in the file, whatever the metadata says."""
    keys = ("index", "episode_index")
    table.require(keys)
    rows = await read_columns(reader, table, range(table.metadata.num_row_groups), keys, run=run)

    def find() -> dict[int, int]:
        index, episodes = (to_integers(rows[key], key, table.url) for key in keys)
        different, which = np.unique(episodes, return_inverse=True)
        least = np.full(len(different), _MOST)
        np.minimum.at(least, which, index)
        return dict(zip(different.tolist(), least.tolist(), strict=True))

    return await run(find)


async def _index_by(
    reader: RangeReader, table: TableFile, key: Literal["index", "episode_index"], run: RunSync
) -> IndexedTable:
    table.require([key])
    first, last, unknown = await run(partial(_index_spans, table, key))
    if unknown:
        rows = await read_columns(reader, table, unknown, [key], run=run)

        def fill() -> None:
            values, start = to_integers(rows[key], key, table.url), 0
            for group in unknown:
                stop = start + table.metadata.row_group(group).num_rows
                first[group], last[group] = values[start:stop].min(), values[start:stop].max()
                start = stop

        await run(fill)
    return IndexedTable(table, first, last, key)


def _index_spans(table: TableFile, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """First and last key of each row group by the footer, and the groups of which it doesn't tell."""
    groups = table.metadata.num_row_groups
    # What is empty holds no index: its span ends before it begins.
    first, last = np.zeros(groups, np.int64), np.full(groups, -1, np.int64)
    unknown = []
    leaf = table.leaves[key].start
    for group in range(groups):
        row_group = table.metadata.row_group(group)
        if row_group.num_rows and (bounds := _bounds(row_group.column(leaf).statistics)) is not None:
            first[group], last[group] = bounds
        elif row_group.num_rows:
            unknown.append(group)
    return first, last, unknown


def _bounds(statistics: pq.Statistics | None) -> tuple[int, int] | None:
    """The least and the greatest value, where they are given and are numbers that an ``index`` may be."""
    try:
        low, high = (statistics.min, statistics.max) if statistics is not None else (None, None)
    except (ValueError, ArithmeticError):
        return None  # texts that aren't UTF-8, times that Python hasn't: reading the column says what it holds
    if isinstance(low, int) and isinstance(high, int) and -_MOST <= low <= high <= _MOST:
        return low, high
    return None


_Key = str | tuple[str, int] | tuple[str, int, int]
"""Key of what is kept: a file's url; that and the number of a row group, of which all is kept; or these and
``_NUMBERS``, or the physical column that has the pages."""
_NUMBERS = -1
"""Stands for all columns but those of pictures."""
_FOOTER_BYTES = 16 * 1024
"""Bytes asked for beside what each column chunk takes: the schema, and the whole of a file that is hardly larger."""
_CHUNK_FOOTER_BYTES = 150
"""Bytes of a footer for a column and row group, statistics included: 100-140 measured. A row group is one episode's, or
that of many, and the tail then holds more than the footer, but never more than ``MAX_TAIL_BYTES``."""
_DIRECTORY = "data"
"""The directory of all files of rows, which LeRobot lists."""
_MAX_FILES_ASIDE = 64
"""Looked at on one side of the data file that an episode should be in, and isn't."""
_LIST_ITEM_BYTES = 64
"""A Python string or bytes object and the reference to it, beside its content."""


class EpisodeRows(dict[str, "Column"]):
    """The rows of one episode by feature, in frame order; row k of each column is frame k.

    A column is an NDArray of the feature's dtype, (length, *shape) or (length,) for shape (1,), the caller's own;
    or a list: str, pictures as the bytes of their file, anything else as Python objects. ``index``, ``frame_index``,
    ``episode_index`` and ``task_index`` are int64, however they are stored. Of pictures there may be a part.
    """

    def __init__(
        self, columns: Mapping[str, Column], nbytes: int, own_seconds: NDArray[np.float64] | None = None
    ) -> None:
        super().__init__(columns)
        self.nbytes = nbytes + (0 if own_seconds is None else own_seconds.nbytes)
        """Memory held; of lists about."""
        self.own_seconds = own_seconds
        """Times of the rows in their episode, where they aren't those of the rate of frames."""

    def with_pictures(self, parts: Mapping[str, PicturePart]) -> EpisodeRows:
        """Return the same with these beside them."""
        both = EpisodeRows({**self, **parts}, self.nbytes + sum(part.nbytes for part in parts.values()))
        both.own_seconds = self.own_seconds
        return both

    def __repr__(self) -> str:
        return f"<EpisodeRows {len(self['index'])} rows of {', '.join(self)}, {self.nbytes} bytes>"


class PicturePart(Sequence[bytes]):
    """Pictures of neighbouring frames as the bytes of their files, by their number in the episode."""

    __slots__ = ("_first", "_pictures", "nbytes")

    def __init__(self, first: int, pictures: list[bytes]) -> None:
        self._first = first
        self._pictures = pictures
        self.nbytes = sum(map(len, pictures)) + _LIST_ITEM_BYTES * len(pictures)
        """Memory held, about."""

    def __getitem__(self, frame: Any) -> Any:  # noqa: ANN401
        if not 0 <= frame - self._first < len(self):
            held = self._first, self._first + len(self)
            raise AssertionError(f"frame {frame} of pictures, of which [{held[0]}, {held[1]}) are held")
        return self._pictures[frame - self._first]

    def __len__(self) -> int:
        return len(self._pictures)


@dataclass(frozen=True, slots=True)
class _Group:
    """Decoded row groups."""

    rows: pa.Table
    index: NDArray[np.int64]
    ascending: bool

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes)

    def places_of(self, episode: Episode, url: str, key: str) -> NDArray[np.int64]:
        """Numbers of the rows with the episode's ``episode_index`` and, where that is the key, ``index``; ascending."""
        if key != "index":
            places: NDArray[np.int64] = np.arange(len(self.index))
        elif self.ascending:
            start, stop = np.searchsorted(self.index, (episode.from_index, episode.to_index))
            places = np.arange(start, stop)
        else:
            places = np.flatnonzero((self.index >= episode.from_index) & (self.index < episode.to_index))
        # Rows of a deleted episode may carry the same numbers.
        numbers = take_rows(self.rows.select(["episode_index"]), places)["episode_index"]
        mine: NDArray[np.int64] = places[to_integers(numbers, "episode_index", url) == episode.index]
        return mine


class RowCache(SharedLRU[tuple[int, _Key], IndexedTable | _Group | PageTable]):
    """All that is kept to read rows of any number of datasets: footers, and decoded row groups that episodes share.

    One bound for both: where each episode has a row group of its own the footers are long and nothing is shared, where
    many share one they are short. A row group larger than the bound isn't kept, but read anew for each episode.
    """


class RowReader:
    """Reads the rows of episodes, fetching only the columns and row groups that are needed.

    For one event loop; not thread-safe.

    Args:
        columns: Keys of the features to read; cameras among them are ignored. None means all of
            ``metadata.features``. The default features always come along.
        kept: Where to keep footers and row groups. What calls under way hold comes on top.
        number: Of the dataset, among those that keep theirs there.
        list_tables: Lists the files, where their names don't hold; None where nothing can.
    """

    def __init__(
        self,
        reader: RangeReader,
        metadata: Metadata,
        *,
        columns: Collection[str] | None = None,
        kept: RowCache,
        number: int = 0,
        list_tables: ListTables | None = None,
        run: RunSync = run_sync,
    ) -> None:
        self._features = {
            key: feature
            for key, feature in metadata.features.items()
            if feature.has_column and (columns is None or key in columns or key in DEFAULT_FEATURES)
        }
        self._numbers = {key: feature for key, feature in self._features.items() if feature.kind != "image"}
        self.picture_keys = tuple(key for key in self._features if key not in self._numbers)
        """Keys of the features that are pictures in the table."""
        self._reader = reader
        self.metadata = metadata
        self._run = run
        self._kept: LRUPart[_Key, Any] = LRUPart(kept, number)
        self._moved: dict[int, str] = {}  # files of episodes that the metadata places elsewhere
        self._by_episode: set[str] = set()  # files in which ``index`` begins anew
        self._list_tables = list_tables
        self._listed: list[str] | None = None

    def __repr__(self) -> str:
        return f"<RowReader of {redact_url(self.metadata.url)!r}, {self._kept!r}>"

    async def rows(self, episode: Episode, *, pictures: bool = True) -> EpisodeRows:
        """All rows of the episode, where ``pictures`` aren't wanted without those.

        Can be cancelled at any time; calls for other episodes that wait for the same bytes go on.

        Raises:
            FormatError: The file is damaged, or a column isn't there or isn't what info.json says.
            DatasetError: The rows aren't those that the metadata counts.
        """
        if episode.length == 0:
            return EpisodeRows({key: empty_column(feature) for key, feature in self._features.items()}, 0)
        features = self._features if pictures else self._numbers
        async with self._reading(episode) as (file, episode):
            own, shared = file.groups_of(episode)
            reads: list[Callable[[], Awaitable[_Group | FetchedColumns]]] = []
            if not pictures:
                reads += [partial(self._numbers_in, file, group) for group in sorted(own + shared)]
            else:
                for group in shared:
                    reads.append(partial(self._kept.get, (file.table.url, group), partial(self._read, file, group)))
                if own:
                    reads.append(partial(self._fetch, file, own))
            parts = await gather(*reads)
            return await self._run(partial(_select, parts, episode, features, self.metadata, file.key))

    async def pictures(self, episode: Episode, key: str, start: int, stop: int) -> PicturePart:
        """Pictures of frames [start, stop) of the episode, from a large row group by its pages; errors as ``rows``."""
        async with self._reading(episode) as (file, episode):
            begin = episode.from_index if file.key == "index" else 0
            part = replace(episode, from_index=begin + start, to_index=begin + stop)
            own, shared = file.groups_of(part)
            found = await gather(*(partial(self._pictures_in, file, group, key, part) for group in own + shared))
            return await self._run(partial(_in_order, found, self._features[key], part, start))

    @asynccontextmanager
    async def _reading(self, episode: Episode) -> AsyncIterator[tuple[IndexedTable, Episode]]:
        """The file that has the episode's rows, and the episode as it is there."""
        file = await self.file(episode)
        url = file.table.url
        if self.metadata.has_files_of_episodes:
            episode = file.beginning(episode)
        try:
            yield file, replace(episode, data_url=url)
        except DatasetError:  # the next caller reads the file as it is then
            self._kept.clear(lambda key: key == url or key[0] == url)
            raise

    async def _numbers_in(self, file: IndexedTable, group: int) -> _Group:
        """A row group but for its pictures, kept: it says which of those are wanted."""
        key = file.table.url, group, _NUMBERS
        kept: _Group = await self._kept.get(key, partial(self._read, file, group, self._numbers))
        return kept

    async def _pictures_in(
        self, file: IndexedTable, group: int, key: str, part: Episode
    ) -> tuple[NDArray[np.int64], pa.ChunkedArray[Any]]:
        """The ``index`` and the picture of those rows of a group that belong to a part of an episode.

        Where ``index`` isn't the key, its place is taken by ``frame_index``.
        """
        table, reader = file.table, self._reader
        numbers = await self._numbers_in(file, group)
        places = await self._run(partial(numbers.places_of, part, table.url, file.key))
        index = numbers.index
        if file.key != "index":
            index = to_integers(numbers.rows["frame_index"], "frame_index", table.url)
            places = places[(index[places] >= part.from_index) & (index[places] < part.to_index)]
        rows = range(int(places.min()), int(places.max()) + 1) if len(places) else range(0)
        leaf = next((leaf for leaf in table.leaves[key] if table.path(leaf) in {key, f"{key}.bytes"}), None)
        are_few = 2 * len(rows) < table.metadata.row_group(group).num_rows
        if rows and are_few and leaf is not None and has_pages(table, group, leaf):
            find = partial(find_pages, reader, table, group, leaf, run=self._run)
            pages: PageTable = await self._kept.get((table.url, group, leaf), find)
            column = await read_pages(reader, table, group, leaf, pages, rows, run=self._run)
        else:
            column = (await read_columns(reader, table, [group], [key], run=self._run))[key].slice(
                rows.start, len(rows)
            )
        wanted = take_rows(require_pyarrow().table({key: column}), places - rows.start)
        return index[places], wanted[key]

    def clear(self) -> None:
        """Forget what is kept and what is on its way: a file was replaced."""
        self._kept.clear()
        self._listed = None

    async def file(self, episode: Episode) -> IndexedTable:
        """The open file that has the episode's rows, whatever the metadata says."""
        url = self._moved.get(episode.index, episode.data_url)
        if self.metadata.has_files_of_episodes:
            return await self._table(url, episode)
        try:
            file = await self._table(url, episode)
        except (AccessDenied, NotFound):
            found = await self._look_beside(episode, (-1, 1))
            if found is None:
                self._moved.pop(episode.index, None)
                raise
            return found
        if url not in self._by_episode:
            if file.may_have(episode):
                return file
            found = await self._look_beside(episode, (_side(file, episode),))
            if found is not None:
                return found
            begin = (await first_indices(self._reader, file.table, run=self._run)).get(episode.index)
            if begin not in self.metadata.episodes.other_starts(episode.index):
                return file
            self._by_episode.add(url)
        return await _index_by(self._reader, file.table, "episode_index", self._run)

    async def _look_beside(self, episode: Episode, directions: Sequence[int]) -> IndexedTable | None:
        """The data file that has the episode's rows by its own index ranges, where the metadata names another one.

        Files follow each other in the order of ``index``, so their ranges tell which way to go.
        """
        table = self.metadata.episodes
        for direction in directions:
            step, place, seen = direction, table.data_place(episode.index), set[str]()
            for _ in range(_MAX_FILES_ASIDE):
                for beside, url in table.data_urls_beside(place, step).items():
                    file = None if url in seen else await self._table_if_there(url, episode)
                    seen.add(url)
                    if file is not None:
                        place = beside
                        break
                else:
                    break
                if file.may_have(episode):
                    return self._found(episode, file)
                step = _side(file, episode)
        return await self._look_in_listing(episode)

    async def _look_in_listing(self, episode: Episode) -> IndexedTable | None:
        """Return the file among all that are there."""
        if self._listed is None and self._list_tables is not None:
            self._listed = await self._list_tables(join_url(self.metadata.url, _DIRECTORY))
        listed = self._listed or []
        first, stop = 0, len(listed)
        while first < stop:
            middle = (first + stop) // 2
            file = await self._table_if_there(listed[middle], episode)
            if file is not None and file.may_have(episode):
                return self._found(episode, file)
            first, stop = (middle + 1, stop) if file is None or _side(file, episode) > 0 else (first, middle)
        self._listed = None  # the file may come: the next caller lists anew
        return None

    def _found(self, episode: Episode, file: IndexedTable) -> IndexedTable:
        self.metadata.oddities.note(
            "file of rows",
            f"meta/episodes names {redact_url(episode.data_url)} for the rows of episode {episode.index}, which "
            f"are in {redact_url(file.table.url)}. They are read from there, and so are those of other episodes of "
            "this dataset where it is wrong; to mend it, write the dataset anew: `asyncfetch select`",
        )
        self._moved[episode.index] = file.table.url
        return file

    async def _table_if_there(self, url: str, episode: Episode) -> IndexedTable | None:
        try:
            return await self._table(url, episode)
        except (AccessDenied, NotFound):
            return None

    async def _table(self, url: str, episode: Episode) -> IndexedTable:
        file: IndexedTable = await self._kept.get(url, partial(self._open, url, episode))
        return file

    async def _open(self, url: str, episode: Episode) -> IndexedTable:
        chunks = self.metadata.episodes.sharing_data_file(episode.index) * len(self.metadata.info.features)
        tail_bytes = min(_FOOTER_BYTES + chunks * _CHUNK_FOOTER_BYTES, MAX_TAIL_BYTES)
        table = await open_table(self._reader, url, run=self._run, tail_bytes=tail_bytes)
        table.require(self._features)
        return await index_table(self._reader, table, run=self._run)

    async def _read(self, file: IndexedTable, group: int, keys: Collection[str] | None = None) -> _Group:
        return await self._run(partial(_decode, await self._fetch(file, [group], keys)))

    async def _fetch(
        self, file: IndexedTable, groups: Sequence[int], keys: Collection[str] | None = None
    ) -> FetchedColumns:
        return await fetch_columns(self._reader, file.table, groups, keys or self._features, run=self._run)


def _side(file: IndexedTable, episode: Episode) -> int:
    """1 where the episode's rows come after the file's first one, -1 where they come before it."""
    wanted = episode.from_index if file.key == "index" else episode.index
    return 1 if not len(file.first) or int(file.first.min()) <= wanted else -1


def _decode(part: _Group | FetchedColumns) -> _Group:
    if isinstance(part, _Group):
        return part
    rows = part.decode()
    index = to_integers(rows["index"], "index", part.file.url)
    return _Group(rows, index, bool((index[1:] > index[:-1]).all()))


def _select(
    groups: Sequence[_Group | FetchedColumns],
    episode: Episode,
    features: Mapping[str, Feature],
    metadata: Metadata,
    key: str,
) -> EpisodeRows:
    url = episode.data_url
    where = f"{redact_url(url)}, episode {episode.index}"
    parts = [take_rows(group.rows, group.places_of(episode, url, key)) for group in map(_decode, groups)]
    found = sum(map(len, parts))
    if found != episode.length:
        index = f" and an index in [{episode.from_index}, {episode.to_index})" if key == "index" else ""
        message = f"{where}: {found} rows have its episode_index{index}, but its length is {episode.length}"
        raise DatasetError(message, remedy=LEAVE_OUT_EPISODE)
    rows = require_pyarrow().concat_tables(parts) if len(parts) > 1 else parts[0]
    frames = to_integers(rows["frame_index"], "frame_index", url)
    if (frames[1:] < frames[:-1]).any():
        rows = take_rows(rows, np.argsort(frames, kind="stable"))
    columns: dict[str, Any] = {}
    nbytes = 0
    for key, feature in features.items():
        if key in INDEX_FEATURES:
            columns[key] = np.array(to_integers(rows[key], key, url))
        else:
            columns[key] = to_column(rows[key], feature, url)
        nbytes += _nbytes(columns[key], rows[key])
    _check_rows(columns, episode.from_index if key == "index" else int(columns["index"][0]), metadata.tasks, where)
    return EpisodeRows(columns, nbytes, own_seconds(columns["timestamp"], metadata.info.fps))


def _in_order(
    found: Sequence[tuple[NDArray[np.int64], pa.ChunkedArray[Any]]], feature: Feature, part: Episode, start: int
) -> PicturePart:
    index = np.concatenate([np.empty(0, np.int64), *(numbers for numbers, _ in found)])
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], np.arange(part.from_index, part.to_index)):
        message = f"{redact_url(part.data_url)}, episode {part.index}: {len(index)} rows have its episode_index and an"
        message += f" index in [{part.from_index}, {part.to_index}), not one each"
        raise DatasetError(message, remedy=LEAVE_OUT_EPISODE)
    pictures = [picture for _, column in found for picture in to_column(column, feature, part.data_url)]
    return PicturePart(start, [pictures[place] for place in order.tolist()])


def _check_rows(columns: Mapping[str, Column], from_index: int, tasks: Mapping[int, str], where: str) -> None:
    for key, first in (("frame_index", 0), ("index", from_index)):
        wrong = columns[key] != np.arange(first, first + len(columns[key]))
        if wrong.any():
            row = int(wrong.argmax())
            message = f"{where}: {key} of row {row} is {columns[key][row]}, it should be {first + row}"
            raise DatasetError(message, remedy=LEAVE_OUT_EPISODE)
    unknown = sorted(set(np.unique(columns["task_index"]).tolist()) - set(tasks))
    if unknown:
        message = f"{where}: its rows have task_index {', '.join(map(str, unknown))}"
        message += f", meta/tasks.parquet has {', '.join(map(str, tasks)) or 'none'}"
        raise DatasetError(message, remedy=LEAVE_OUT_EPISODE)


def _nbytes(column: Column, stored: pa.ChunkedArray[Any]) -> int:
    if isinstance(column, np.ndarray):
        return column.nbytes
    return int(stored.nbytes) + _LIST_ITEM_BYTES * len(column)

"""meta/episodes: from its parquet files to the checked table.

There is no list of the files over HTTP. File 0 is there, and others are likely where it is as large as files get: then
some are opened along with it. While episodes are missing further ones follow, as many at once as the files so far
suggest. Where that comes to other totals than those of info.json, the directory is listed, as LeRobot does, or other
names are tried that may come next; what is then found counts. The rows are ordered by episode_index. The statistics in
these files, by far the most of their bytes, are never asked for but with the rest of a short file.

LeRobot records a row group for 10 episodes, and to tell its place takes more bytes than what is read of it: 100,000
episodes have 160 MB of footers, and pyarrow takes seven times as much memory to parse one. So of such files no more
than two are read at a time.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import numpy as np

from asyncfetch.errors import (
    COPY_ANEW,
    WRITE_ANEW,
    AccessDenied,
    DatasetError,
    FetchError,
    FormatError,
    NotFound,
    redact_url,
)
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.episode_table import ABSENT, EpisodeTable, FilePlaces, TaskLists, VideoPlaces
from asyncfetch.lerobot.info import EPISODES_PATH
from asyncfetch.lerobot.listing import places_beside, table_name
from asyncfetch.runtime.concurrently import gather
from asyncfetch.tables.columns import is_list, is_text, to_array, to_floats, to_integers, to_objects
from asyncfetch.tables.parquet import (
    MAX_TAIL_BYTES,
    TAIL_BYTES,
    fetch_end,
    open_end,
    read_columns,
    read_whole,
    require_pyarrow,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.info import DatasetInfo, PathTemplate
    from asyncfetch.lerobot.listing import ListTables
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.tables.parquet import TableEnd

_Loaded: TypeAlias = "pa.Table | DatasetError | FetchError"
_MAX_FILES_AT_ONCE = 8
"""Episode files read side by side."""
_LARGE_FOOTER_BYTES = 8 * 1024 * 1024
_LARGE_AT_ONCE = 2
"""Number of files with a footer of that size: parsing takes a core each, and hundreds of MB."""
MAX_NUMBER = 2**31 - 1
"""Highest number of a chunk, a file or a frame, and of the frames of an episode."""
_DIRECTORY = "meta/episodes"
_FRAME_COLUMNS = ("episode_index", "length", "dataset_from_index", "dataset_to_index")
_FILE_NUMBERS = ("chunk_index", "file_index")
_TASKS = "tasks"


def episodes_url(root: str, number: int, chunks_size: int) -> str:
    """Url of the episode table's file ``number``, counted on over the chunk directories."""
    chunk_index, file_index = divmod(number, chunks_size)
    return join_url(root, EPISODES_PATH.format(chunk_index=chunk_index, file_index=file_index))


def read_episodes(root: str, info: DatasetInfo, cameras: Sequence[str], end: TableEnd) -> EpisodeTable | None:
    """Return what ``load_episodes`` does, in a thread, of a whole file 0; None if more files may have episodes."""
    tables = [(end.url, read_whole(end, partial(_columns, cameras)))]
    is_all = len(tables[0][1]) >= info.total_episodes and _has_totals(tables, info)
    return _build(root, info, cameras, tables) if is_all else None


async def load_episodes(
    reader: RangeReader,
    root: str,
    info: DatasetInfo,
    cameras: Sequence[str],
    *,
    first: TableEnd | None,
    list_tables: ListTables | None,
    run: RunSync,
) -> EpisodeTable:
    """Read and check the episode table, with the places of these cameras.

    ``first`` is the end of file 0, if that could be had. FormatError where there is no table, or it is damaged, or
    contradicts itself.
    """
    files = _Files(reader, root, info, cameras, first, run)
    await files.read_by_names()
    if not _has_totals(files.tables, info):
        listed = None if list_tables is None else await list_tables(join_url(root, _DIRECTORY))
        await (files.read_next_names() if listed is None else files.read_all(listed))
    files.check_any()
    return await run(partial(_build, root, info, cameras, files.tables))


@dataclass(slots=True)
class _Files:
    """The files of the table as they are read: see ``load_episodes``."""

    _reader: RangeReader
    _root: str
    _info: DatasetInfo
    _cameras: Sequence[str]
    _first: TableEnd | None
    _run: RunSync
    _footer_bytes: int = 0
    _large_files: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(_LARGE_AT_ONCE))
    _missing: FetchError | None = None
    tables: list[tuple[str, pa.Table]] = field(default_factory=list)

    async def read_by_names(self) -> None:
        """Read them as they are counted on over the chunks, as long as episodes are missing."""
        total = self._info.total_episodes
        try:
            first = self._first or await fetch_end(self._reader, episodes_url(self._root, 0, 1))
        except (DatasetError, FetchError) as error:
            if total and not isinstance(error, AccessDenied | NotFound):
                raise
            self._missing = error if isinstance(error, FetchError) else None
            return
        self._footer_bytes = first.footer_bytes
        while not self.tables or self._rows < total:
            if self._rows:
                likely = math.ceil((total - self._rows) * len(self.tables) / self._rows)
            else:
                likely = _MAX_FILES_AT_ONCE if total and first.file.size >= self._info.data_file_bytes // 2 else 1
            numbers = range(len(self.tables), len(self.tables) + min(likely, _MAX_FILES_AT_ONCE))
            urls = [episodes_url(self._root, number, self._info.chunks_size) for number in numbers]
            for url, loaded in zip(urls, await self._load(urls, first), strict=True):
                if self.tables and self._rows >= total:
                    return  # it is of one file too many, whatever is in it
                if not self._add(url, loaded):
                    return

    async def read_all(self, urls: Sequence[str]) -> None:
        """Read those of these that weren't read before."""
        read = {table_name(url) for url, _ in self.tables}
        urls = [url for url in urls if table_name(url) not in read]
        for start in range(0, len(urls), _MAX_FILES_AT_ONCE):
            some = urls[start : start + _MAX_FILES_AT_ONCE]
            for url, loaded in zip(some, await self._load(some), strict=True):
                self._add(url, loaded)

    async def read_next_names(self) -> None:
        """Read those that may follow the last one by their names, until all that info.json counts is found."""
        size = self._info.chunks_size
        place, read = divmod(max(0, len(self.tables) - 1), size), {url for url, _ in self.tables}
        while not _has_totals(self.tables, self._info):
            for chunk, file in places_beside(place, 1, size):
                url = join_url(self._root, EPISODES_PATH.format(chunk_index=chunk, file_index=file))
                if url not in read and self._add(url, *await self._load([url])):
                    place, read = (chunk, file), read | {url}
                    break
            else:
                return

    def check_any(self) -> None:
        """Raise where no episode is found of those that info.json counts, or one may not read on."""
        total = self._info.total_episodes
        if self._rows >= total or (self._rows and _has_totals(self.tables, self._info)):
            return
        if isinstance(self._missing, AccessDenied):
            raise self._missing
        if not self._rows:
            url = redact_url(episodes_url(self._root, 0, 1))
            message = f"{url} {'has no episode' if self.tables else 'is not there'}, but info.json counts {total}"
            raise FormatError(message, remedy=WRITE_ANEW) from self._missing

    @property
    def _rows(self) -> int:
        return sum(len(table) for _, table in self.tables)

    def _add(self, url: str, loaded: _Loaded) -> bool:
        """Return whether it is there; raise what else it failed by."""
        if isinstance(loaded, AccessDenied | NotFound):
            self._missing = self._missing or loaded
            return False
        if isinstance(loaded, DatasetError | FetchError):
            raise loaded
        self.tables.append((url, loaded))
        return True

    async def _load(self, urls: Sequence[str], first: TableEnd | None = None) -> list[_Loaded]:
        return await gather(*(partial(self._load_one, url, first) for url in urls))

    async def _load_one(self, url: str, first: TableEnd | None) -> _Loaded:
        try:
            # Files of one writer are alike.
            tail_bytes = min(max(TAIL_BYTES, self._footer_bytes + self._footer_bytes // 8), MAX_TAIL_BYTES)
            end = first if first and first.url == url else await fetch_end(self._reader, url, tail_bytes)
            async with self._large_files if end.footer_bytes >= _LARGE_FOOTER_BYTES else nullcontext():
                file = await open_end(self._reader, end, run=self._run)
                columns, groups = _columns(self._cameras, file.columns), range(file.metadata.num_row_groups)
                return await read_columns(self._reader, file, groups, columns, run=self._run)
        except (DatasetError, FetchError) as error:
            return error  # it may be of one file too many: whether it matters is seen when its turn comes


def _has_totals(tables: Sequence[tuple[str, pa.Table]], info: DatasetInfo) -> bool:
    """Return whether the rows are all that info.json counts, in one way or the other."""
    numbers, lengths, _, stops = (_integers(tables, name, missing=None) for name in _FRAME_COLUMNS)
    return not wrong_totals(info, numbers, lengths, stops)


def wrong_totals(
    info: DatasetInfo,
    numbers: NDArray[np.int64],
    lengths: NDArray[np.int64] | NDArray[np.int32],
    stops: NDArray[np.int64],
) -> dict[str, tuple[int, int]]:
    """The counts of info.json that aren't those of the table of these episodes: its number, and the table's.

    Numbers and frames that no episode has are no contradiction: an episode may have been taken out of the table, and
    its rows still be there. info.json may count them or not.
    """
    counts = (
        ("episodes", info.total_episodes, len(numbers), int(numbers.max(initial=-1)) + 1),
        ("frames", info.total_frames, int(lengths.sum()), int(stops.max(initial=0))),
    )
    return {
        what: (said, found) for what, said, found, other in counts if said is not None and said not in {found, other}
    }


def _columns(cameras: Sequence[str], there: Collection[str]) -> list[str]:
    columns = [*_FRAME_COLUMNS, *(f"data/{name}" for name in _FILE_NUMBERS)]
    optional = [_TASKS]
    for camera in cameras:
        columns += [f"videos/{camera}/{name}" for name in (*_FILE_NUMBERS, "from_timestamp")]
        optional.append(f"videos/{camera}/to_timestamp")
    return columns + [name for name in optional if name in there]


def _build(
    root: str, info: DatasetInfo, cameras: Sequence[str], tables: Sequence[tuple[str, pa.Table]]
) -> EpisodeTable:
    read, tables = tables, [(url, table) for url, table in tables if len(table)]
    columns = {name: _integers(tables, name, missing=None) for name in _FRAME_COLUMNS}
    urls = [redact_url(url) for url, table in tables for _ in range(len(table))]
    order = np.argsort(columns["episode_index"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    urls = [urls[row] for row in order]
    check_episodes(columns, urls)
    return EpisodeTable(
        root,
        info,
        numbers=columns["episode_index"],
        lengths=columns["length"].astype(np.int32),
        starts=columns["dataset_from_index"],
        tasks=_task_lists(tables, order),
        data=_file_places(tables, "data", order, info.data_path),
        videos={
            camera: _video_places(tables, camera, order, columns=columns, urls=urls, info=info) for camera in cameras
        },
        urls=tuple(url for url, _ in read),
    )


def check_episodes(columns: Mapping[str, NDArray[np.int64]], urls: Sequence[str]) -> None:
    """Raise FormatError at the first row, in the order of episodes, that contradicts the others."""
    episodes, lengths = columns["episode_index"], columns["length"]
    starts, stops = columns["dataset_from_index"], columns["dataset_to_index"]

    def fail(wrong: NDArray[np.bool_], says: Callable[[int], str]) -> None:
        if wrong.any():
            row = int(wrong.argmax())
            raise FormatError(f"{urls[row]}: {says(row)}", remedy=WRITE_ANEW)

    fail(episodes < 0, lambda i: f"episode_index {episodes[i]} is below 0")
    is_repeated, is_impossible = np.diff(episodes, prepend=-1) == 0, (lengths < 0) | (lengths > MAX_NUMBER)
    fail(
        is_repeated,
        lambda i: f"episode_index {episodes[i]} is that of a row in {urls[i - 1]}, too; each must occur once",
    )
    fail(is_impossible, lambda i: f"episode {episodes[i]} has length {lengths[i]}")
    frames = "episode {} has frames [{}, {}), which isn't its length {}".format
    fail(stops - starts != lengths, lambda i: frames(episodes[i], starts[i], stops[i], lengths[i]))
    fail(starts < 0, lambda i: f"episode {episodes[i]} begins at frame {starts[i]}")
    rows = np.argsort(starts, kind="stable")
    rows = rows[lengths[rows] > 0]
    for place in np.flatnonzero(starts[rows[1:]] < stops[rows[:-1]])[:1]:
        one, other = sorted(rows[place : place + 2].tolist())
        raise FormatError(
            f"{urls[other]}: episode {episodes[other]} has frames [{starts[other]}, {stops[other]}), and episode "
            f"{episodes[one]} [{starts[one]}, {stops[one]})",
            remedy=WRITE_ANEW,
        )


def _integers(tables: Sequence[tuple[str, pa.Table]], name: str, *, missing: int | None) -> NDArray[np.int64]:
    parts = [to_integers(table[name], name, url, missing=missing) for url, table in tables]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _file_places(
    tables: Sequence[tuple[str, pa.Table]], prefix: str, order: NDArray[np.int64], path: PathTemplate | None
) -> FilePlaces:
    """The numbers that tell files apart: one that no path has in it is 0."""

    def numbers(name: str) -> NDArray[np.int32]:
        if path is not None and not path.has(name):
            return np.zeros(len(order), np.int32)
        values = _integers(tables, f"{prefix}/{name}", missing=ABSENT)[order]
        return np.where((values < 0) | (values > MAX_NUMBER), ABSENT, values).astype(np.int32)

    return FilePlaces(*map(numbers, _FILE_NUMBERS))


def _video_places(
    tables: Sequence[tuple[str, pa.Table]],
    camera: str,
    order: NDArray[np.int64],
    *,
    columns: Mapping[str, NDArray[np.int64]],
    urls: Sequence[str],
    info: DatasetInfo,
) -> VideoPlaces:
    """Return where the frames are, with what can't be true of it: read on, it would be the frames of another episode.

    It fails the episodes alone that it is about. Videos of converted datasets may be shorter than their rows, and
    episodes longer or shorter than their number of frames where rows are at times of their own: see VideoSpan.
    """

    def seconds(name: str) -> NDArray[np.float64]:
        name = f"videos/{camera}/{name}"
        parts = [
            to_floats(table[name], name, url) if name in table.column_names else np.full(len(table), np.nan)
            for url, table in tables
        ]
        return np.concatenate(parts)[order] if parts else np.empty(0)

    episodes, lengths = columns["episode_index"], columns["length"]
    fps, path = info.fps, info.video_path
    files = _file_places(tables, f"videos/{camera}", order, path)
    starts, stops = seconds("from_timestamp"), seconds("to_timestamp")
    with np.errstate(invalid="ignore", over="ignore"):
        frames, durations = np.rint(starts * fps), (stops - starts) * fps
        placed = (frames >= 0) & (frames <= MAX_NUMBER)
        no_place = ~placed & ~np.isnan(starts)
        wrong_length = placed & ~np.isnan(durations) & ~(np.abs(durations - lengths) <= 1 / 2)
        first_frames = np.where(placed, frames, ABSENT).astype(np.int64)
    refusals = {
        row: f"{urls[row]}: episode {episodes[row]} begins at {starts[row]} s of {camera}, where no video can"
        for row in np.flatnonzero(no_place).tolist()
    }
    contradictions = {
        row: f"{urls[row]}: episode {episodes[row]} has {lengths[row]} frames, but from {starts[row]} s to "
        f"{stops[row]} s of {camera} are {durations[row]:.10g} at {fps:g} fps"
        for row in np.flatnonzero(wrong_length).tolist()
    }
    lacking = [name for name in _FILE_NUMBERS if path is not None and not path.has(name)]
    note = f"; video_path of info.json has no {' and no '.join(lacking)}" if lacking else ""
    known = placed & ~wrong_length & (lengths > 0) & (files.chunk != ABSENT) & (files.file != ABSENT)
    for row, other in _overlaps(files, first_frames, lengths, np.flatnonzero(known)):
        never = lacking or first_frames[row] == first_frames[other]  # at whatever times their rows are
        for one, two in ((row, other), (other, row)):
            (refusals if never else contradictions)[one] = (
                f"{urls[one]}: episode {episodes[one]} has frames [{first_frames[one]}, "
                f"{first_frames[one] + lengths[one]}) of {camera} file {files.file[one]} in chunk {files.chunk[one]}, "
                f"and episode {episodes[two]} [{first_frames[two]}, {first_frames[two] + lengths[two]}){note}"
            )
    return VideoPlaces(files, np.where(placed, starts, np.nan), contradictions, refusals)


def _overlaps(
    files: FilePlaces, first_frames: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """Yield each row with frames that begin before those of an earlier one in the file end, and that one."""
    rows = rows[np.lexsort((first_frames[rows], files.file[rows], files.chunk[rows]))]
    chunk, file = files.chunk[rows], files.file[rows]
    new_file = np.append(True, (chunk[1:] != chunk[:-1]) | (file[1:] != file[:-1]))[: len(rows)]
    # On one axis, where a file begins behind all that may be in the one before it.
    offsets = (np.cumsum(new_file) - 1) * (2 * MAX_NUMBER + 2)
    starts = first_frames[rows] + offsets
    stops = starts + lengths[rows]
    latest = np.maximum.accumulate(stops)
    holder = np.maximum.accumulate(np.where(stops == latest, np.arange(len(rows)), 0))
    for place in np.flatnonzero(starts[1:] < latest[:-1]).tolist():
        yield int(rows[place + 1]), int(rows[holder[place]])


def _task_lists(tables: Sequence[tuple[str, pa.Table]], order: NDArray[np.int64]) -> TaskLists:
    numbers: dict[str, int] = {}
    codes, counts = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for url, table in tables:
        if _TASKS not in table.column_names:
            counts.append(np.zeros(len(table), np.int32))
            continue
        words, places, sizes = _encode_lists(to_array(table[_TASKS]), url)
        translation = np.array([numbers.setdefault(word, len(numbers)) for word in words] or [0], np.int32)
        codes.append(translation[places])
        counts.append(sizes)
    all_counts = np.concatenate(counts)
    starts = np.cumsum(all_counts, dtype=np.int64) - all_counts
    return TaskLists(tuple(numbers), np.concatenate(codes), starts[order], all_counts[order])


def _encode_lists(lists: Any, url: str) -> tuple[list[str], NDArray[np.int32], NDArray[np.int32]]:  # noqa: ANN401
    """The distinct strings in a column of lists, the number of each one in turn, and the length of each list."""
    pa = require_pyarrow()
    where = f"column {_TASKS} of {redact_url(url)}"
    if not is_list(lists.type) or not is_text(lists.type.value_type):
        raise FormatError(f"{where} must hold lists of strings, not {lists.type}", remedy=WRITE_ANEW)
    sizes = pa.compute.list_value_length(lists).fill_null(0).cast("int32")
    words = lists.flatten().cast(pa.string()).fill_null("").dictionary_encode()
    texts = to_objects(words.dictionary, where, remedy=COPY_ANEW)
    return texts, words.indices.to_numpy(), sizes.to_numpy(zero_copy_only=False)

"""meta/episodes: from its parquet files to the checked table.

There is no list of the files over HTTP. File 0 is there, and others are likely where it is as large as files get: then
some are opened along with it. While episodes are missing further ones follow, as many at once as the files so far
suggest. They are read in the order of their numbers, and the rows are ordered by episode_index. The statistics in
these files, by far the most of their bytes, are never asked for but with the rest of a short file.

LeRobot records a row group for 10 episodes, and to tell its place takes more bytes than what is read of it: 100,000
episodes have 160 MB of footers, and pyarrow takes seven times as much memory to parse one. So of such files no more
than two are read at a time.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

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
from asyncfetch.lerobot.columns import is_list, is_text, to_array, to_floats, to_integers, to_objects
from asyncfetch.lerobot.episode_table import ABSENT, EpisodeTable, FilePlaces, TaskLists, VideoPlaces
from asyncfetch.lerobot.info import EPISODES_PATH
from asyncfetch.lerobot.parquet import (
    MAX_TAIL_BYTES,
    TAIL_BYTES,
    fetch_end,
    open_end,
    read_columns,
    read_whole,
    require_pyarrow,
)
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.info import DatasetInfo, PathTemplate
    from asyncfetch.lerobot.parquet import TableEnd
    from asyncfetch.runtime.concurrently import RunSync

__all__ = ["MAX_NUMBER", "check_episodes", "episodes_url", "load_episodes", "read_episodes"]

_MAX_FILES_AT_ONCE = 8
"""Episode files read side by side."""
_LARGE_FOOTER_BYTES = 8 * 1024 * 1024
_LARGE_AT_ONCE = 2
"""Number of files with a footer of that size: parsing takes a core each, and hundreds of MB."""
MAX_NUMBER = 2**31 - 1
"""Highest number of a chunk, a file or a frame, and of the frames of an episode."""
_FRAME_COLUMNS = ("episode_index", "length", "dataset_from_index", "dataset_to_index")
_FILE_NUMBERS = ("chunk_index", "file_index")
_TASKS = "tasks"


def episodes_url(root: str, number: int, chunks_size: int) -> str:
    """Url of the episode table's file ``number``, counted on over the chunk directories."""
    chunk_index, file_index = divmod(number, chunks_size)
    return join_url(root, EPISODES_PATH.format(chunk_index=chunk_index, file_index=file_index))


def read_episodes(root: str, info: DatasetInfo, cameras: Sequence[str], end: TableEnd) -> EpisodeTable | None:
    """Return what ``load_episodes`` does, of a dataset whose file 0 is whole; None if more files have episodes.

    Blocks: call it in a thread.
    """
    found = read_whole(end, partial(_columns, cameras))
    if info.total_episodes:
        _rows_or_raise(found, end.url, 0, info.total_episodes)
    if len(found) < info.total_episodes:
        return None
    return _build(root, info, cameras, [(end.url, found)] if len(found) else [])


async def load_episodes(
    reader: RangeReader,
    root: str,
    info: DatasetInfo,
    cameras: Sequence[str],
    *,
    first_end: Callable[[], Awaitable[TableEnd]],
    run: RunSync,
) -> EpisodeTable:
    """Read and check the episode table.

    Args:
        reader: Fetches the files.
        root: The dataset.
        info: Its info.json.
        cameras: Video features to know the places of.
        first_end: Fetches the end of file 0; it may be there already.
        run: Runs the blocking parts.

    Raises:
        FetchError: A file could not be fetched.
        FormatError: A file is missing or damaged, or the rows contradict each other or info.json.
    """
    total = info.total_episodes
    tables: list[tuple[str, pa.Table]] = []
    rows = 0
    large_files = anyio.Semaphore(_LARGE_AT_ONCE)
    try:
        first = await first_end()
    except (DatasetError, FetchError) as error:
        if total:
            _rows_or_raise(error, episodes_url(root, 0, info.chunks_size), rows, total)
        return await run(partial(_build, root, info, cameras, tables))

    async def load(number: int) -> pa.Table | DatasetError | FetchError:
        url = episodes_url(root, number, info.chunks_size)
        try:
            # Files of one writer are alike.
            tail_bytes = min(max(TAIL_BYTES, first.footer_bytes + first.footer_bytes // 8), MAX_TAIL_BYTES)
            end = first if number == 0 else await fetch_end(reader, url, tail_bytes)
            async with large_files if end.footer_bytes >= _LARGE_FOOTER_BYTES else nullcontext():
                file = await open_end(reader, end, run=run)
                columns = _columns(cameras, file.columns)
                return await read_columns(reader, file, range(file.metadata.num_row_groups), columns, run=run)
        except (DatasetError, FetchError) as error:
            return error  # It may be of one file too many: whether it matters is seen when its turn comes.

    if not total:
        found = await load(0)
        if not isinstance(found, DatasetError | FetchError) and len(found):  # a contradiction, as of other totals
            tables.append((first.url, found))
    while rows < total:
        if rows:
            likely = math.ceil((total - rows) * len(tables) / rows)
        else:
            likely = _MAX_FILES_AT_ONCE if first.file.size >= info.data_file_bytes // 2 else 1
        numbers = range(len(tables), len(tables) + min(likely, _MAX_FILES_AT_ONCE))
        for number, loaded in zip(numbers, await gather(*(partial(load, number) for number in numbers)), strict=True):
            if isinstance(loaded, AccessDenied | NotFound) and _counts_up_to_last(tables, total):
                total = rows
            if rows < total:
                url = episodes_url(root, number, info.chunks_size)
                tables.append((url, _rows_or_raise(loaded, url, rows, total)))
                rows += len(tables[-1][1])
    return await run(partial(_build, root, info, cameras, tables))


def _counts_up_to_last(tables: Sequence[tuple[str, pa.Table]], total: int) -> bool:
    """Return whether info.json counts the episodes that were taken out of the table, too: all up to the last number."""
    return int(_integers(tables, "episode_index", missing=None).max(initial=-1)) + 1 == total


def _rows_or_raise(loaded: pa.Table | DatasetError | FetchError, url: str, rows: int, total: int) -> pa.Table:
    if isinstance(loaded, NotFound):
        message = f"{redact_url(url)} isn't there, but the files before it have {rows} of the {total} episodes"
        raise FormatError(f"{message} that info.json counts", remedy=WRITE_ANEW) from loaded
    if isinstance(loaded, DatasetError | FetchError):
        raise loaded
    if not len(loaded):
        message = f"{redact_url(url)} has no episode, but info.json counts {total} and {rows} are found so far"
        raise FormatError(message, remedy=WRITE_ANEW)
    return loaded


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
    columns = {name: _integers(tables, name, missing=None) for name in _FRAME_COLUMNS}
    urls = [redact_url(url) for url, table in tables for _ in range(len(table))]
    order = np.argsort(columns["episode_index"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    urls = [urls[row] for row in order]
    check_episodes(columns, urls, join_url(root, "meta/info.json"), info)
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
    )


def check_episodes(
    columns: Mapping[str, NDArray[np.int64]], urls: Sequence[str], info_url: str, info: DatasetInfo
) -> None:
    """Raise FormatError at the first row, in the order of episodes, that contradicts the others.

    Numbers and frames that no episode has are no contradiction: an episode may have been taken out of the table, and
    its rows still be there. info.json may count them or not.
    """
    episodes, lengths = columns["episode_index"], columns["length"]
    starts, stops = columns["dataset_from_index"], columns["dataset_to_index"]
    if info.total_episodes not in {len(episodes), int(episodes.max(initial=-1)) + 1}:
        message = f"meta/episodes has {len(episodes)} episodes (the last one in {urls[-1] if urls else 'none'})"
        raise FormatError(f"{message}, {redact_url(info_url)} counts {info.total_episodes}", remedy=WRITE_ANEW)

    def fail(wrong: NDArray[np.bool_], says: Callable[[int], str]) -> None:
        if wrong.any():
            row = int(wrong.argmax())
            raise FormatError(f"{urls[row]}: {says(row)}", remedy=WRITE_ANEW)

    fail(episodes < 0, lambda row: f"episode_index {episodes[row]} is below 0")
    fail(
        np.diff(episodes, prepend=-1) == 0,
        lambda row: f"episode_index {episodes[row]} is that of a row in {urls[row - 1]}, too; each must occur once",
    )
    fail((lengths < 0) | (lengths > MAX_NUMBER), lambda row: f"episode {episodes[row]} has length {lengths[row]}")
    fail(
        stops - starts != lengths,
        lambda row: (
            f"episode {episodes[row]} has frames [{starts[row]}, {stops[row]}), which isn't its length {lengths[row]}"
        ),
    )
    fail(starts < 0, lambda row: f"episode {episodes[row]} begins at frame {starts[row]}")
    rows = np.argsort(starts, kind="stable")
    rows = rows[lengths[rows] > 0]
    for place in np.flatnonzero(starts[rows[1:]] < stops[rows[:-1]])[:1]:
        one, other = sorted(rows[place : place + 2].tolist())
        raise FormatError(
            f"{urls[other]}: episode {episodes[other]} has frames [{starts[other]}, {stops[other]}), and episode "
            f"{episodes[one]} [{starts[one]}, {stops[one]})",
            remedy=WRITE_ANEW,
        )
    frames, last = int(lengths.sum()), int(stops.max(initial=0))
    if info.total_frames not in {frames, last}:  # either way of counting frames that no episode has
        message = f"the lengths in meta/episodes add up to {frames} frames"
        raise FormatError(f"{message}, {redact_url(info_url)} counts {info.total_frames}", remedy=WRITE_ANEW)


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
    contradictions = {}
    for row in np.flatnonzero(wrong_length).tolist():
        contradictions[row] = (
            f"{urls[row]}: episode {episodes[row]} has {lengths[row]} frames, but from {starts[row]} s to {stops[row]} "
            f"s of {camera} are {durations[row]:.10g} at {fps:g} fps"
        )
    lacking = [name for name in _FILE_NUMBERS if path is not None and not path.has(name)]
    note = f"; video_path of info.json has no {' and no '.join(lacking)}" if lacking else ""
    told = placed & ~wrong_length & (lengths > 0) & (files.chunk != ABSENT) & (files.file != ABSENT)
    for row, other in _overlaps(files, first_frames, lengths, np.flatnonzero(told)):
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
    """Each of the rows whose frames begin before those of an earlier one in the file end, with that one."""
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

"""The pieces of a merge that write its files.

A unit is a complete description of one file as plain data, so any process can write it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from asyncfetch.fetch import insist_on
from asyncfetch.lerobot.info import DATA_PATH, EPISODES_PATH, INFO_PATH, VIDEO_PATH, PathTemplate
from asyncfetch.lerobot.rows import index_table
from asyncfetch.merge.info import merged_info
from asyncfetch.merge.plan import open_writer, rows_schema, write_episodes, write_rows, write_tasks
from asyncfetch.merge.sources import has_pictures, pack_schema, unpack_schema
from asyncfetch.merge.summaries import STATISTICS, EpisodeColumn, SummaryTask, combine
from asyncfetch.merge.videos import build_video
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.parquet import open_table, read_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.fetch import Fetcher
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.destination import Destination
    from asyncfetch.merge.executor import WorkerSetup
    from asyncfetch.merge.local_folder import WrittenFile
    from asyncfetch.merge.plan import MergePlan, PlannedEpisode
    from asyncfetch.merge.sources import MergeSource
    from asyncfetch.merge.summaries import Statistics, Summary
    from asyncfetch.merge.videos import Segment
    from asyncfetch.ranges import ObjectInfo

_PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of a video read and written at a time: enough for an efficient request, and little beside a file of 200 MB."""
_SEGMENT_SECONDS, _EPISODE_SECONDS, _BYTE_SECONDS = 0.0003, 0.002, 1 / 1024**3
"""Seconds of a processor (2.1 GHz, Python 3.11): for a segment of 60 pictures, for 60 rows, and to read, write and
check."""
_PART_ROWS = 262_144
"""Rows read back at a time, which takes 2 s and for 14 numbers some 100 MB. A file holds a million, and its footer,
which lists its episodes and takes 0.1 s, is read for each part."""


@dataclass(frozen=True, slots=True)
class VideoTask:
    """A video to write, at this path in the dataset."""

    path: str
    segments: tuple[Segment, ...]
    objects: Mapping[str, ObjectInfo]
    """The segments' files by url, in their versions at planning."""
    fps: float

    @property
    def nbytes(self) -> int:
        """Bytes without its header."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def seconds(self) -> float:
        """Seconds of a processor to write it, about."""
        return _SEGMENT_SECONDS * len(self.segments) + _BYTE_SECONDS * self.nbytes

    @property
    def num_episodes(self) -> int:
        """Number of its episodes."""
        return sum(len(segment.places) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class RowsTask:
    """A file of rows to write, with a row group for each episode, none of them empty."""

    path: str
    episodes: tuple[PlannedEpisode, ...]
    objects: Mapping[str, ObjectInfo]
    """Their files by url, in their versions at planning."""
    task_maps: Mapping[int, Mapping[int, int]]
    packed_schema: bytes
    features: tuple[Feature, ...]
    nbytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a processor to write and summarise it, about."""
        return _EPISODE_SECONDS * len(self.episodes) + _BYTE_SECONDS * self.nbytes

    @property
    def num_episodes(self) -> int:
        """Number of episodes with rows in it."""
        return len(self.episodes)

    def parts(self) -> list[SummaryTask]:
        """The tasks of its summary, some episodes each."""
        lengths = [planned.episode.length for planned in self.episodes]
        cuts, rows = [0], 0
        for group, length in enumerate(lengths):
            if rows and rows + length > _PART_ROWS:
                cuts.append(group)
                rows = 0
            rows += length
        return [
            SummaryTask(self.path, self.episodes[first].index, first, tuple(lengths[first:stop]), self.features)
            for first, stop in pairwise([*cuts, len(lengths)])
            if first < stop
        ]


FileUnit = VideoTask | RowsTask


def file_units(plan: MergePlan) -> list[FileUnit]:
    """All files of rows, then all videos. Blocks: it may import pyarrow."""
    schema = pack_schema(rows_schema(plan))
    first = plan.sources[0].metadata
    numeric = tuple(feature for feature in first.features.values() if feature.kind == "value")
    objects = {url: info for source in plan.sources for url, info in source.objects.items()}
    rows: list[FileUnit] = []
    by_file = [list(own) for _, own in groupby(plan.episodes, key=lambda planned: planned.data_file)]
    for number, episodes in enumerate(by_file or [[]]):
        filled = tuple(planned for planned in episodes if planned.episode.length)
        maps = {planned.source: plan.task_maps[planned.source] for planned in filled}
        nbytes = round(sum(planned.row_bytes for planned in filled))
        own = {planned.episode.data_url: objects[planned.episode.data_url] for planned in filled}
        rows.append(RowsTask(file_path(plan, DATA_PATH, number), filled, own, maps, schema, numeric, nbytes))
    videos: list[FileUnit] = []
    for camera, files in plan.videos.items():
        for number, segments in enumerate(files):
            own = {segment.index.url: objects[segment.index.url] for segment in segments}
            videos.append(VideoTask(file_path(plan, VIDEO_PATH, number, camera), tuple(segments), own, first.info.fps))
    return rows + videos


def file_path(plan: MergePlan, template: str, number: int, camera: str = "") -> str:
    """Path in the dataset of a file whose number runs over the chunk directories."""
    chunk, file = divmod(number, plan.limits.files_per_chunk)
    return PathTemplate(template).format(chunk_index=chunk, file_index=file, video_key=camera)


async def write(setup: WorkerSetup, destination: Destination, unit: FileUnit) -> WrittenFile:
    """Write the file, unless it is finished already; ObjectChanged if a source has changed since this was planned."""
    written = await destination.find(setup.fetcher, unit.path)
    if written is None:
        async with destination.room() as room:
            path = room / unit.path
            await run_sync(partial(path.parent.mkdir, parents=True, exist_ok=True))
            if isinstance(unit, VideoTask):
                await _write_video(unit, path, setup.fetcher, partial(setup.wrote, destination.url(unit.path)))
            else:
                await _write_rows(setup, path, unit)
            written = await destination.finish(setup.fetcher, room, unit.path)
    setup.wrote(destination.url(unit.path), written.nbytes)
    return written


async def _write_video(unit: VideoTask, path: Path, fetcher: Fetcher, wrote: Callable[[int], object]) -> None:
    header, ranges = await run_sync(build_video, unit.segments, unit.fps)
    nbytes = 0
    async with await anyio.open_file(path, "wb") as file:
        await run_sync(file.wrapped.write, header)
        for url, start, stop in ranges:
            for first in range(start, stop, _PIECE_BYTES):
                insist_on(fetcher, unit.objects[url])
                piece = await fetcher.fetch(url, first, min(stop, first + _PIECE_BYTES))
                await run_sync(file.wrapped.write, piece)
                nbytes += len(piece)
                wrote(nbytes)


async def _write_rows(setup: WorkerSetup, path: Path, unit: RowsTask) -> None:
    writer = await run_sync(lambda: open_writer(path, unpack_schema(unit.packed_schema)))
    try:
        for url, from_one_file in groupby(unit.episodes, key=lambda planned: planned.episode.data_url):
            episodes = list(from_one_file)
            insist_on(setup.fetcher, unit.objects[url])
            table = await _read_rows(setup.fetcher, url, writer.schema.names, episodes)
            await run_sync(write_rows, writer, table, episodes, unit.task_maps)
    finally:
        with anyio.CancelScope(shield=True):
            await run_sync(writer.close)


async def _read_rows(
    fetcher: Fetcher, url: str, columns: Sequence[str], episodes: Sequence[PlannedEpisode]
) -> pa.Table:
    indexed = await index_table(fetcher, await open_table(fetcher, url, run=run_sync), run=run_sync)
    groups = {one for planned in episodes for some in indexed.groups_of(planned.episode) for one in some}
    return await read_columns(fetcher, indexed.table, sorted(groups), columns, run=run_sync)


_NEEDED = {"count", "mean", "std"}
"""Statistics of a part that are needed to combine it with others."""


def write_metadata(plan: MergePlan, summary: Summary, numbers: Mapping[str, Statistics], root: Path) -> list[str]:
    """Write the files of metadata; returns their paths in the dataset, info.json last.

    ``numbers`` are the statistics of numeric features over all rows.
    """
    meta = root / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    write_tasks(meta / "tasks.parquet", plan.tasks)
    columns, count = _episode_columns(plan, summary), len(plan.episodes)
    per_file = _episodes_per_file(plan, len(columns))
    for number, first in enumerate(range(0, max(1, count), per_file)):
        path = root / file_path(plan, EPISODES_PATH.text, number)
        write_episodes(path, columns, first, min(count, first + per_file))
    if overall := _overall_statistics(plan, numbers):
        listed = {key: {name: value.tolist() for name, value in values.items()} for key, values in overall.items()}
        (meta / "stats.json").write_text(json.dumps(listed, indent=4))
    (root / INFO_PATH).write_text(json.dumps(merged_info(plan), indent=4, ensure_ascii=False))
    paths = [path.relative_to(root).as_posix() for path in sorted(meta.rglob("*")) if path.is_file()]
    return sorted(paths, key=lambda path: path == INFO_PATH)


def _overall_statistics(plan: MergePlan, numbers: Mapping[str, Statistics]) -> dict[str, Statistics]:
    overall: dict[str, Statistics] = {}
    for key, feature in plan.sources[0].metadata.features.items():
        if has_pictures(feature):
            parts = [_picture_statistics(source, key) for source in plan.sources]
            if all(parts) and (combined := combine([part for own in parts for part in own])) is not None:
                overall[key] = combined
        elif key in numbers:
            overall[key] = numbers[key]
    return overall


def _picture_statistics(source: MergeSource, key: str) -> Sequence[Mapping[str, Any]]:
    """A source's own statistics, or those of its episodes; empty if both are incomplete, or of no picture.

    If both agree, counts, means and deviations are those of its episodes: then the sums of a merge of merges are those
    of the merge of all, term by term.
    """
    columns = source.picture_statistics[key]
    parts: list[dict[str, Any]] = []
    if columns.keys() >= _NEEDED:
        is_known = np.all([columns[name].is_known for name in _NEEDED], axis=0)
        parts = [
            {name: column.values[episode] for name, column in columns.items() if column.is_known[episode]}
            for episode in np.flatnonzero(is_known)
        ]
    combined = combine(parts)
    own = (source.metadata.stats or {}).get(key)
    if own is None or not own.keys() >= _NEEDED:
        return parts if combined is not None else ()
    if not np.any(own["count"]):
        return ()
    if combined is None or not all(_is_same(own[name], combined[name]) for name in _NEEDED):
        return (own,)
    return [{**own, **{name: part[name] for name in _NEEDED}} for part in parts]


def _is_same(one: Any, other: NDArray[Any]) -> bool:  # noqa: ANN401 - as JSON has it
    """Return whether they are equal but for rounding: LeRobot's deviations from square sums are off by 1e-8."""
    return np.shape(one) == other.shape and np.allclose(one, other, rtol=1e-6, atol=1e-9)


def _episodes_per_file(plan: MergePlan, num_columns: int) -> int:
    """The number of episodes that fit at five uncompressed numbers a column, more than most have."""
    return max(1, plan.limits.data_file_max_bytes // (40 * num_columns))


def _episode_columns(plan: MergePlan, summary: Summary) -> dict[str, list[Any] | EpisodeColumn]:
    per_chunk = plan.limits.files_per_chunk
    fps = plan.sources[0].metadata.info.fps
    episodes, tasks = plan.episodes, (one for _, part in sorted(summary.tasks.items()) for one in part)
    columns: dict[str, list[Any] | EpisodeColumn] = {
        "episode_index": [planned.index for planned in episodes],
        "tasks": [[plan.tasks[task] for task in next(tasks)] if planned.episode.length else [] for planned in episodes],
        "length": [planned.episode.length for planned in episodes],
        "data/chunk_index": [planned.data_file // per_chunk for planned in episodes],
        "data/file_index": [planned.data_file % per_chunk for planned in episodes],
        "dataset_from_index": [planned.from_index for planned in episodes],
        "dataset_to_index": [planned.from_index + planned.episode.length for planned in episodes],
    }
    for camera in plan.sources[0].metadata.cameras:
        places = [planned.videos[camera] for planned in episodes]
        columns[f"videos/{camera}/chunk_index"] = [place.file // per_chunk for place in places]
        columns[f"videos/{camera}/file_index"] = [place.file % per_chunk for place in places]
        columns[f"videos/{camera}/from_timestamp"] = [place.first / fps for place in places]
        columns[f"videos/{camera}/to_timestamp"] = [(place.first + place.length) / fps for place in places]
    columns |= _statistics_columns(plan, summary)
    per_file = _episodes_per_file(plan, len(columns) + 2)
    columns["meta/episodes/chunk_index"] = [planned.index // per_file // per_chunk for planned in episodes]
    columns["meta/episodes/file_index"] = [planned.index // per_file % per_chunk for planned in episodes]
    return columns


def _statistics_columns(plan: MergePlan, summary: Summary) -> dict[str, EpisodeColumn]:
    has_frames = np.array([planned.episode.length > 0 for planned in plan.episodes], np.bool_)
    numbers = summary.by_episode()
    columns: dict[str, EpisodeColumn] = {}
    for key, feature in plan.sources[0].metadata.features.items():
        for name in STATISTICS:
            column = _picture_column(plan, key, name) if has_pictures(feature) else None
            if key in numbers:
                column = EpisodeColumn.unknown(len(has_frames), numbers[key][name])
                column.values[has_frames] = numbers[key][name]
                column.is_known[has_frames] = True
            if column is not None:
                columns[f"stats/{key}/{name}"] = column
    return columns


def _picture_column(plan: MergePlan, key: str, name: str) -> EpisodeColumn | None:
    columns = [(len(source.episodes), source.picture_statistics[key].get(name)) for source in plan.sources]
    like = next((column.values for _, column in columns if column is not None), None)
    if like is None:
        return None
    parts = [EpisodeColumn.unknown(count, like) if column is None else column for count, column in columns]
    return EpisodeColumn(
        np.concatenate([part.values for part in parts]), np.concatenate([part.is_known for part in parts])
    )

"""The pieces of a merge: each file that is written, and what the statistics need of it.

A unit is plain data that says all about one file, so whoever gets it can write it. What is known of the rows is read
back from the file once it is there: then it doesn't matter whether it was written now or before an interruption.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncfetch.lerobot.columns import to_column
from asyncfetch.lerobot.layout import PathTemplate
from asyncfetch.lerobot.parquet import open_table, read_columns
from asyncfetch.merge.info import DATA_PATH, VIDEO_PATH
from asyncfetch.merge.schemas import pack_schema, unpack_schema
from asyncfetch.merge.statistics import Distribution
from asyncfetch.merge.tables import episode_rows, open_writer, rows_schema
from asyncfetch.merge.videos import build_video

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.destination import Build, WrittenFile
    from asyncfetch.merge.kernel import Workplace
    from asyncfetch.merge.plan import MergePlan, PlannedEpisode
    from asyncfetch.merge.segments import Segment
    from asyncfetch.merge.videos import VideoFile

__all__ = [
    "EpisodeSummary",
    "FileUnit",
    "PartUnit",
    "RowsUnit",
    "Summary",
    "VideoUnit",
    "add",
    "file_units",
    "summarise",
    "write",
]

_PIECE_BYTES = 8 * 1024 * 1024
"""Read and written at a time of a video: large enough for one request to pay, small beside a file of 200 MB."""
_PART_EPISODES = 64
"""Episodes that are summarised at a time, which takes some 0.1 s: one file of rows holds thousands."""


@dataclass(frozen=True, slots=True)
class VideoUnit:
    """A video to be written."""

    path: str
    """In the dataset."""
    segments: tuple[Segment, ...]
    fps: float

    @property
    def nbytes(self) -> int:
        """Without its header."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def num_episodes(self) -> int:
        """Episodes that are in it."""
        return sum(len(segment.offsets) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class RowsUnit:
    """A file of rows to be written, a row group an episode."""

    path: str
    episodes: tuple[PlannedEpisode, ...]
    """Those that have rows."""
    task_maps: Mapping[int, Mapping[int, int]]
    """By number of the source."""
    packed_schema: bytes
    features: tuple[Feature, ...]
    """Those with statistics of numbers."""
    nbytes: int
    """About."""

    @property
    def num_episodes(self) -> int:
        """Episodes that have rows in it."""
        return len(self.episodes)

    def parts(self) -> list[PartUnit]:
        """What is to be known of it, some episodes at a time."""
        lengths = [planned.episode.length for planned in self.episodes]
        return [
            PartUnit(at, tuple(lengths[at : at + _PART_EPISODES]), self.features)
            for at in range(0, len(lengths), _PART_EPISODES)
        ]


FileUnit = VideoUnit | RowsUnit


@dataclass(frozen=True, slots=True)
class PartUnit:
    """Episodes in a written file of rows whose statistics are to be taken."""

    first_group: int
    lengths: tuple[int, ...]
    """Rows of this group and the following ones."""
    features: tuple[Feature, ...]


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """What is known of an episode's rows."""

    tasks: tuple[int, ...]
    """Different ones, in the order of the frames."""
    statistics: Mapping[str, Mapping[str, list[Any]]]
    """By numeric feature."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known of the rows of some episodes that follow each other."""

    episodes: tuple[EpisodeSummary, ...] = ()
    numbers: Mapping[str, Distribution] = field(default_factory=dict)
    """By numeric feature."""


def file_units(plan: MergePlan) -> list[FileUnit]:
    """All files of rows, then all videos. Blocks: it may import pyarrow."""
    schema = pack_schema(rows_schema(plan))
    first = plan.sources[0].metadata
    numeric = tuple(feature for feature in first.features.values() if feature.kind == "value")
    rows: list[FileUnit] = []
    for number, episodes in enumerate(plan.data_files()):
        filled = tuple(planned for planned in episodes if planned.episode.length)
        maps = {planned.source: plan.task_maps[planned.source] for planned in filled}
        nbytes = round(sum(map(plan.row_bytes, filled)))
        rows.append(RowsUnit(file_path(plan, DATA_PATH, number), filled, maps, schema, numeric, nbytes))
    videos: list[FileUnit] = [
        VideoUnit(file_path(plan, VIDEO_PATH, video.file, video.camera), video.segments, first.info.fps)
        for video in plan.videos
    ]
    return rows + videos


def file_path(plan: MergePlan, template: str, number: int, camera: str = "") -> str:
    """Path in the dataset of a file that is counted on over the chunk directories."""
    chunk, file = divmod(number, plan.limits.files_per_chunk)
    return PathTemplate(template).format(chunk_index=chunk, file_index=file, video_key=camera)


async def write(place: Workplace, build: Build, unit: FileUnit) -> WrittenFile:
    """Write the file, or find that it was.

    Raises:
        FetchError: A source could not be read.
        DatasetError: A source isn't what its metadata say.
    """
    written = await build.find(place.fetcher, unit.path)
    if written is None:
        async with build.room() as room:
            path = room / unit.path
            await anyio.to_thread.run_sync(partial(path.parent.mkdir, parents=True, exist_ok=True))
            if isinstance(unit, VideoUnit):
                await _write_video(place, path, unit)
            else:
                await _write_rows(place, path, unit)
            written = await build.finish(place.fetcher, room, unit.path)
    place.wrote(unit.path, written.nbytes)
    return written


async def summarise(place: Workplace, build: Build, written: WrittenFile, part: PartUnit) -> Summary:
    """What is known of some row groups of a written file."""
    url, names = build.url(written.path), [feature.key for feature in part.features]
    groups = range(part.first_group, part.first_group + len(part.lengths))
    table = await _read_table(place.fetcher, url, names, groups)
    return await anyio.to_thread.run_sync(_summarise, table, part, url)


async def add(place: Workplace, left: Summary, right: Summary) -> Summary:
    """Of both, the left one's episodes first."""
    return await anyio.to_thread.run_sync(_add, left, right)


async def _write_video(place: Workplace, path: Path, unit: VideoUnit) -> None:
    video: VideoFile = await anyio.to_thread.run_sync(partial(build_video, unit.segments, fps=unit.fps))
    nbytes = 0
    async with await anyio.open_file(path, "wb") as file:
        await anyio.to_thread.run_sync(_write_all, file.wrapped, video.header)
        for url, first, stop in _pieces(video):
            piece = await place.fetcher.fetch(url, first, stop)
            await anyio.to_thread.run_sync(_write_all, file.wrapped, piece)
            nbytes += len(piece)
            place.wrote(unit.path, nbytes)


def _pieces(video: VideoFile) -> Iterator[tuple[str, int, int]]:
    for url, start, stop in video.ranges:
        for first in range(start, stop, _PIECE_BYTES):
            yield url, first, min(stop, first + _PIECE_BYTES)


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    file.write(data)


async def _write_rows(place: Workplace, path: Path, unit: RowsUnit) -> None:
    writer = await anyio.to_thread.run_sync(lambda: open_writer(path, unpack_schema(unit.packed_schema)))
    try:
        for url, from_one_file in groupby(unit.episodes, key=lambda planned: planned.episode.data_url):
            table = await _read_table(place.fetcher, url, writer.schema.names)
            await anyio.to_thread.run_sync(_write_episodes, writer, unit, list(from_one_file), table)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(writer.close)


async def _read_table(
    reader: RangeReader, url: str, columns: Sequence[str], groups: Sequence[int] | None = None
) -> pa.Table:
    """All row groups, or these."""
    file = await open_table(reader, url, run=anyio.to_thread.run_sync)
    groups = range(file.metadata.num_row_groups) if groups is None else groups
    return await read_columns(reader, file, groups, columns, run=anyio.to_thread.run_sync)


def _write_episodes(writer: Any, unit: RowsUnit, episodes: Sequence[PlannedEpisode], table: pa.Table) -> None:  # noqa: ANN401
    for planned in episodes:
        rows = episode_rows(table, planned, unit.task_maps[planned.source], writer.schema)
        writer.write_table(rows, row_group_size=len(rows))


def _summarise(table: pa.Table, part: PartUnit, url: str) -> Summary:
    columns = {feature.key: to_column(table[feature.key], feature, url) for feature in part.features}
    episodes = []
    start = 0
    for length in part.lengths:
        own = {key: values[start : start + length] for key, values in columns.items()}
        tasks = tuple(dict.fromkeys(own["task_index"].tolist()))
        taken = {key: Distribution.of_rows(values).statistics() for key, values in own.items()}
        listed = {key: {name: value.tolist() for name, value in values.items()} for key, values in taken.items()}
        episodes.append(EpisodeSummary(tasks, listed))
        start += length
    return Summary(tuple(episodes), {key: Distribution.of_rows(values) for key, values in columns.items()})


def _add(left: Summary, right: Summary) -> Summary:
    numbers = {key: own + right.numbers[key] for key, own in left.numbers.items()}
    return Summary(left.episodes + right.episodes, numbers)

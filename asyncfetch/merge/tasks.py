"""The pieces of a merge that write its files.

A unit is plain data that says all about one file, so whoever gets it can write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncfetch.errors import redact_url
from asyncfetch.lerobot.info import PathTemplate
from asyncfetch.lerobot.parquet import open_table, read_columns
from asyncfetch.lerobot.rows import index_table
from asyncfetch.merge.info import DATA_PATH, VIDEO_PATH
from asyncfetch.merge.plan import RowsByIndex, open_writer, rows_schema, write_rows
from asyncfetch.merge.sources import pack_schema, unpack_schema
from asyncfetch.merge.summaries import cut_parts
from asyncfetch.merge.videos import build_video

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from asyncfetch.fetch import Fetcher
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.destination import Build, WrittenFile
    from asyncfetch.merge.plan import MergePlan, PlannedEpisode
    from asyncfetch.merge.scheduler import WorkerSetup
    from asyncfetch.merge.summaries import SummaryTask
    from asyncfetch.merge.videos import Segment, SourceVideo
    from asyncfetch.ranges import ObjectInfo

__all__ = [
    "FileUnit",
    "RowsTask",
    "VideoTask",
    "file_path",
    "file_units",
    "write",
]

_PIECE_BYTES = 8 * 1024 * 1024
"""Bytes read and written at a time of a video: large enough for one request to pay, small beside a file of 200 MB."""
_SEGMENT_SECONDS, _EPISODE_SECONDS, _BYTE_SECONDS = 0.0003, 0.002, 1 / 1024**3
"""Seconds of a processor (2.1 GHz, Python 3.11): for a segment of 60 pictures, for 60 rows, and to read, write and
check."""


@dataclass(frozen=True, slots=True)
class VideoTask:
    """A video to be written."""

    path: str
    """Path in the dataset."""
    segments: tuple[Segment, ...]
    objects: Mapping[str, ObjectInfo]
    """Objects by url, the files that these lie in, as they were when it was planned."""
    fps: float

    @property
    def nbytes(self) -> int:
        """Bytes without its header."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def seconds(self) -> float:
        """Seconds that a processor takes to write it, about."""
        return _SEGMENT_SECONDS * len(self.segments) + _BYTE_SECONDS * self.nbytes

    @property
    def num_episodes(self) -> int:
        """Episodes that are in it."""
        return sum(len(segment.offsets) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class RowsTask:
    """A file of rows to be written, a row group an episode."""

    path: str
    episodes: tuple[PlannedEpisode, ...]
    """Episodes that have rows."""
    objects: Mapping[str, ObjectInfo]
    """Objects by url, the files that these lie in, as they were when it was planned."""
    task_maps: Mapping[int, Mapping[int, int]]
    """Maps of tasks by number of the source."""
    packed_schema: bytes
    features: tuple[Feature, ...]
    """Features with statistics of numbers."""
    nbytes: int
    """Bytes of the file, about."""

    @property
    def seconds(self) -> float:
        """Seconds that a processor takes to write and to summarise it, about."""
        return _EPISODE_SECONDS * len(self.episodes) + _BYTE_SECONDS * self.nbytes

    @property
    def num_episodes(self) -> int:
        """Episodes that have rows in it."""
        return len(self.episodes)

    def parts(self) -> list[SummaryTask]:
        """Return what is to be known of it, some episodes at a time."""
        return cut_parts([planned.episode.length for planned in self.episodes], self.features)


FileUnit = VideoTask | RowsTask


def file_units(plan: MergePlan) -> list[FileUnit]:
    """All files of rows, then all videos. Blocks: it may import pyarrow."""
    schema = pack_schema(rows_schema(plan))
    first = plan.sources[0].metadata
    numeric = tuple(feature for feature in first.features.values() if feature.kind == "value")
    objects = {url: info for source in plan.sources for url, info in source.objects.items()}
    rows: list[FileUnit] = []
    for number, episodes in enumerate(plan.data_files()):
        filled = tuple(planned for planned in episodes if planned.episode.length)
        maps = {planned.source: plan.task_maps[planned.source] for planned in filled}
        nbytes = round(sum(planned.row_bytes for planned in filled))
        own = {planned.episode.data_url: objects[planned.episode.data_url] for planned in filled}
        rows.append(RowsTask(file_path(plan, DATA_PATH, number), filled, own, maps, schema, numeric, nbytes))
    videos: list[FileUnit] = []
    for video in plan.videos:
        own = {segment.index.url: objects[segment.index.url] for segment in video.segments}
        path = file_path(plan, VIDEO_PATH, video.file, video.camera)
        videos.append(VideoTask(path, video.segments, own, first.info.fps))
    return rows + videos


def file_path(plan: MergePlan, template: str, number: int, camera: str = "") -> str:
    """Path in the dataset of a file that is counted on over the chunk directories."""
    chunk, file = divmod(number, plan.limits.files_per_chunk)
    return PathTemplate(template).format(chunk_index=chunk, file_index=file, video_key=camera)


async def write(place: WorkerSetup, build: Build, unit: FileUnit) -> WrittenFile:
    """Write the file, or find that it was.

    Raises:
        FetchError: A source could not be read; ObjectChanged where it isn't what it was when this was planned.
        DatasetError: A source isn't what its metadata say.
    """
    written = await build.find(place.fetcher, unit.path)
    if written is None:
        async with build.room() as room:
            path = room / unit.path
            await anyio.to_thread.run_sync(partial(path.parent.mkdir, parents=True, exist_ok=True))
            if isinstance(unit, VideoTask):
                await _write_video(unit, path, place.fetcher, partial(place.wrote, build.url(unit.path)))
            else:
                await _write_rows(place, path, unit)
            written = await build.finish(place.fetcher, room, unit.path)
    place.wrote(build.url(unit.path), written.nbytes)
    return written


async def _write_video(unit: VideoTask, path: Path, fetcher: Fetcher, wrote: Callable[[int], object]) -> None:
    video: SourceVideo = await anyio.to_thread.run_sync(partial(build_video, unit.segments, fps=unit.fps))
    nbytes = 0
    async with await anyio.open_file(path, "wb") as file:
        await anyio.to_thread.run_sync(_write_all, file.wrapped, video.header)
        for url, first, stop in _pieces(video):
            fetcher.insist_on(unit.objects[url])
            piece = await fetcher.fetch(url, first, stop)
            await anyio.to_thread.run_sync(_write_all, file.wrapped, piece)
            nbytes += len(piece)
            wrote(nbytes)


def _pieces(video: SourceVideo) -> Iterator[tuple[str, int, int]]:
    for url, start, stop in video.ranges:
        for first in range(start, stop, _PIECE_BYTES):
            yield url, first, min(stop, first + _PIECE_BYTES)


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    file.write(data)


async def _write_rows(place: WorkerSetup, path: Path, unit: RowsTask) -> None:
    writer = await anyio.to_thread.run_sync(lambda: open_writer(path, unpack_schema(unit.packed_schema)))
    try:
        for url, from_one_file in groupby(unit.episodes, key=lambda planned: planned.episode.data_url):
            episodes = list(from_one_file)
            place.fetcher.insist_on(unit.objects[url])
            table = await _read_rows(place.fetcher, url, writer.schema.names, episodes)
            await anyio.to_thread.run_sync(_write_episodes, writer, unit, episodes, table)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(writer.close)


async def _read_rows(
    fetcher: Fetcher, url: str, columns: Sequence[str], episodes: Sequence[PlannedEpisode]
) -> pa.Table:
    """The row groups with rows of these episodes, which are of this file; nothing of the others."""
    run = anyio.to_thread.run_sync
    indexed = await index_table(fetcher, await open_table(fetcher, url, run=run), run=run)
    groups: set[int] = set()
    for planned in episodes:
        for some in indexed.groups_of(planned.episode.from_index, planned.episode.to_index):
            groups.update(some)
    return await read_columns(fetcher, indexed.table, sorted(groups), columns, run=run)


def _write_episodes(writer: Any, unit: RowsTask, episodes: Sequence[PlannedEpisode], table: pa.Table) -> None:  # noqa: ANN401
    source = RowsByIndex(table, episodes[0].episode.data_url)
    for planned in episodes:
        rows = source.find(planned, unit.task_maps[planned.source], writer.schema)
        write_rows(writer, rows, f"{redact_url(planned.episode.data_url)}: episode {planned.episode.index}")

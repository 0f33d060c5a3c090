"""Writing what a plan says into a folder: every file on its own, once, as many at a time as there are workers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np

from asyncfetch.lerobot.layout import EPISODES_PATH, PathTemplate
from asyncfetch.lerobot.parquet import open_table, read_columns
from asyncfetch.merge import statistics
from asyncfetch.merge.info import DATA_PATH, INFO_PATH, VIDEO_PATH, merged_info
from asyncfetch.merge.sources import has_pictures
from asyncfetch.merge.tables import episode_rows, numbers_of, open_writer, rows_schema, write_episodes, write_tasks
from asyncfetch.merge.videos import build_video
from asyncfetch.runtime.concurrently import ungrouped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.merge.plan import MergePlan, PlannedEpisode, VideoPlan
    from asyncfetch.merge.videos import VideoFile

__all__ = ["build_dataset"]

_PIECE_BYTES = 8 * 1024 * 1024
"""Read and written at a time of a video: large enough for one request to pay, small beside a file of 200 MB."""

_Statistics = dict[str, "NDArray[Any]"]
Place = Callable[["Path", str], Awaitable[None]]
"""Told of a file that is whole, and of its name in the dataset."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What is known of an episode once its rows are written."""

    tasks: list[str]
    numbers: Mapping[str, NDArray[Any]]
    """By numeric feature: its rows, of which the whole dataset's statistics are taken."""
    statistics: Mapping[str, _Statistics]


@dataclass(slots=True)
class _Build:
    reader: RangeReader
    plan: MergePlan
    root: Path
    wrote: Callable[[int], object]
    place: Place
    files: int = 0
    nbytes: int = 0
    rows: dict[int, _Written] = field(default_factory=dict)
    """By episode; without those that have no frames."""


async def build_dataset(
    reader: RangeReader, plan: MergePlan, root: Path, *, workers: int, wrote: Callable[[int], object], place: Place
) -> tuple[int, int]:
    """Write the planned dataset into ``root``, info.json last: (number of files, their bytes).

    The numbers in the rows stay in memory until their statistics are taken: for a state and an action of 7 float32
    each, 56 bytes a frame.

    Args:
        reader: Reads the sources.
        plan: What to write.
        root: An empty directory, which only this call writes to.
        workers: How many files are written at a time.
        wrote: Told how many bytes were written to a video or a data file.
        place: Has each file as soon as it is whole; it isn't read here any more.

    Raises:
        FetchError: A source could not be read.
        DatasetError: A source isn't what its metadata say.
    """
    build = _Build(reader, plan, root, wrote, place)
    schema = await anyio.to_thread.run_sync(rows_schema, plan)
    limiter = anyio.CapacityLimiter(workers)
    units = [partial(_write_video, build, video) for video in plan.videos]
    units += [partial(_write_rows, build, *file, schema) for file in enumerate(plan.data_files())]

    async def work(unit: Callable[[], Awaitable[Path]]) -> None:
        async with limiter:
            await _place(build, await unit())

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for unit in units:
                tasks.start_soon(work, unit)
    for path in await anyio.to_thread.run_sync(_write_metadata, build):
        await _place(build, path)
    return build.files, build.nbytes


async def _place(build: _Build, path: Path) -> None:
    status = await anyio.Path(path).stat()
    build.files += 1
    build.nbytes += status.st_size
    await build.place(path, path.relative_to(build.root).as_posix())


def _path(build: _Build, template: str, number: int, camera: str = "") -> Path:
    chunk, file = divmod(number, build.plan.limits.files_per_chunk)
    path = build.root / PathTemplate(template).format(chunk_index=chunk, file_index=file, video_key=camera)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


async def _write_video(build: _Build, planned: VideoPlan) -> Path:
    fps = build.plan.sources[0].metadata.info.fps
    video: VideoFile = await anyio.to_thread.run_sync(partial(build_video, planned.segments, fps=fps))
    path = await anyio.to_thread.run_sync(_path, build, VIDEO_PATH, planned.file, planned.camera)
    async with await anyio.open_file(path, "wb") as file:
        await anyio.to_thread.run_sync(_write_all, file.wrapped, video.header)
        for url, start, stop in video.ranges:
            for first in range(start, stop, _PIECE_BYTES):
                piece = await build.reader.fetch(url, first, min(stop, first + _PIECE_BYTES))
                await anyio.to_thread.run_sync(_write_all, file.wrapped, piece)
                build.wrote(len(piece))
    return path


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    file.write(data)


async def _write_rows(build: _Build, number: int, episodes: Sequence[PlannedEpisode], schema: pa.Schema) -> Path:
    path = await anyio.to_thread.run_sync(_path, build, DATA_PATH, number)
    writer = await anyio.to_thread.run_sync(open_writer, path, schema)
    try:
        with_rows = [planned for planned in episodes if planned.episode.length]
        for url, from_one_file in groupby(with_rows, key=lambda planned: planned.episode.data_url):
            table = await _read_table(build, url, schema.names)
            for planned in from_one_file:
                build.rows[planned.index] = await anyio.to_thread.run_sync(
                    _write_episode, build.plan, planned, table, schema, writer
                )
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(writer.close)
    build.wrote((await anyio.Path(path).stat()).st_size)
    return path


async def _read_table(build: _Build, url: str, columns: Sequence[str]) -> pa.Table:
    file = await open_table(build.reader, url, run=anyio.to_thread.run_sync)
    groups = range(file.metadata.num_row_groups)
    return await read_columns(build.reader, file, groups, columns, run=anyio.to_thread.run_sync)


def _write_episode(
    plan: MergePlan,
    planned: PlannedEpisode,
    table: pa.Table,
    schema: pa.Schema,
    writer: Any,  # noqa: ANN401
) -> _Written:
    rows = episode_rows(table, planned, plan.task_maps[planned.source], schema)
    writer.write_table(rows, row_group_size=len(rows))
    numbers = numbers_of(rows, plan.sources[0].metadata.features.values(), planned.episode.data_url)
    tasks = dict.fromkeys(numbers["task_index"].tolist())
    taken = {key: statistics.of_rows(values) for key, values in numbers.items()}
    return _Written([plan.tasks[task] for task in tasks], numbers, taken)


def _write_metadata(build: _Build) -> list[Path]:
    """The files, info.json last."""
    meta = build.root / "meta"
    write_tasks(meta / "tasks.parquet", build.plan.tasks)
    _write_episode_table(build)
    if overall := _overall_statistics(build):
        listed = {key: {name: value.tolist() for name, value in values.items()} for key, values in overall.items()}
        (meta / "stats.json").write_text(json.dumps(listed, indent=4))
    written = sorted(path for path in meta.rglob("*") if path.is_file())
    info_path = build.root / INFO_PATH
    info_path.write_text(json.dumps(merged_info(build.plan), indent=4, ensure_ascii=False))
    return [*written, info_path]


def _overall_statistics(build: _Build) -> dict[str, _Statistics]:
    overall: dict[str, _Statistics] = {}
    sources = build.plan.sources
    written = [build.rows[index] for index in sorted(build.rows)]
    for key, feature in sources[0].metadata.features.items():
        if has_pictures(feature):
            parts = [_picture_statistics(build, number, key) for number in range(len(sources))]
            weighed = [part for part in parts if part is not None]
            if weighed and len(weighed) == len(parts):
                overall[key] = statistics.combine(weighed)
        elif feature.kind == "value" and written:
            overall[key] = statistics.of_rows(np.concatenate([episode.numbers[key] for episode in written]))
    return overall


def _picture_statistics(build: _Build, number: int, key: str) -> Mapping[str, Any] | None:
    """A source's own, or those of its episodes; None where neither are there."""
    source = build.plan.sources[number]
    own = (source.metadata.stats or {}).get(key)
    if own is not None:
        return own  # type: ignore[no-any-return]  # JSON
    parts = [part for part in source.picture_statistics[key] if part is not None]
    return statistics.combine(parts) if parts else None


def _write_episode_table(build: _Build) -> None:
    columns = _episode_columns(build)
    per_file = _episodes_per_file(build, len(columns))
    count = len(build.plan.episodes)
    for number, first in enumerate(range(0, max(1, count), per_file)):
        path = _path(build, EPISODES_PATH.text, number)
        write_episodes(path, columns, first, min(count, first + per_file))


def _episodes_per_file(build: _Build, num_columns: int) -> int:
    """As many as fit with about five numbers a column, unpacked: more than most have."""
    return max(1, build.plan.limits.data_file_max_bytes // (40 * num_columns))


def _episode_columns(build: _Build) -> dict[str, list[Any]]:
    plan, per_chunk = build.plan, build.plan.limits.files_per_chunk
    fps = plan.sources[0].metadata.info.fps
    episodes = plan.episodes
    columns: dict[str, list[Any]] = {
        "episode_index": [planned.index for planned in episodes],
        "tasks": [build.rows[planned.index].tasks if planned.episode.length else [] for planned in episodes],
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
        columns[f"videos/{camera}/to_timestamp"] = [
            (place.first + planned.episode.length) / fps for place, planned in zip(places, episodes, strict=True)
        ]
    columns |= _statistics_columns(build)
    per_file = _episodes_per_file(build, len(columns) + 2)
    columns["meta/episodes/chunk_index"] = [planned.index // per_file // per_chunk for planned in episodes]
    columns["meta/episodes/file_index"] = [planned.index // per_file % per_chunk for planned in episodes]
    return columns


def _statistics_columns(build: _Build) -> dict[str, list[Any]]:
    plan = build.plan
    columns: dict[str, list[Any]] = {}
    for key, feature in plan.sources[0].metadata.features.items():
        taken: list[Mapping[str, Any] | None]
        if has_pictures(feature):
            taken = [plan.sources[one.source].picture_statistics[key][one.episode.index] for one in plan.episodes]
        elif feature.kind == "value":
            taken = [build.rows[one.index].statistics[key] if one.episode.length else None for one in plan.episodes]
        else:
            continue
        for name in statistics.STATISTICS:
            values = [None if one is None or name not in one else np.asarray(one[name]).tolist() for one in taken]
            if any(value is not None for value in values):
                columns[f"stats/{key}/{name}"] = values
    return columns

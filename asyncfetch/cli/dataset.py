"""``asyncfetch info``, ``check`` and ``frames``: a dataset's content, its defects, and its pictures."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from asyncfetch.cli.source import KindOption, Source, StartOption, StopOption, VideoOption, find_source
from asyncfetch.cli.terminal import CaFile, format_bytes, progress
from asyncfetch.cli.videos import entry_pictures, show_defects, show_info
from asyncfetch.config import FetchConfig, StreamConfig
from asyncfetch.decode.image import encode_png
from asyncfetch.errors import AccessDenied, DatasetError, NotFound, RangeNotSatisfiable
from asyncfetch.lerobot.columns import to_column
from asyncfetch.lerobot.info import DEFAULT_FEATURES
from asyncfetch.runtime.concurrently import gather
from asyncfetch.tables.columns import to_floats
from asyncfetch.videos import Videos

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.lerobot import DatasetSummary, FileSizes, LeRobotDataset
    from asyncfetch.stream.traffic import TrafficPlan

WORLD_SIZES = (1, 8, 64)
CHECKED_AT_ONCE = 64
"""Episodes whose videos' indexes are compared at a time."""
BAD = (DatasetError, AccessDenied, NotFound, RangeNotSatisfiable)
"""Errors that are findings. A host that is down or slow is no defect of the dataset: it ends the command."""
OFF_THE_GRID = "timestamps off the grid"
MOST_STILL = 0.5
"""Share of an episode's pictures that may repeat the one before: some do when the scene is at rest, most when a camera
hung."""
THUMBNAIL_PX = 160
"""Width of a picture on a sheet, at most."""


def info(
    source: Source,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a rank's batch.")] = 32,
    num_workers: Annotated[int, typer.Option(min=0, help="Loader workers per rank.")] = 0,
    kind: KindOption = None,
    video: VideoOption = None,
    start: StartOption = None,
    stop: StopOption = None,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with bytes as numbers.")] = False,
) -> None:
    """Show what is in a dataset, and what a shuffled epoch of a LeRobot dataset fetches on 1, 8 and 64 ranks."""
    from asyncfetch.streams import Stream  # slow to load

    config = FetchConfig(ca_file=ca_file)
    found = find_source(source, config, kind, video=video, start=start, stop=stop)
    if isinstance(found, Videos):
        show_info(found, config, as_json=as_json)
        return
    stream = Stream(found, config=StreamConfig(fetch=config))
    try:
        plans = [
            stream.traffic_plan(world_size=ranks, num_workers=num_workers, batch_size=batch_size)
            for ranks in WORLD_SIZES
        ]
        summary = stream.dataset_info()
    finally:
        stream.close()
    if as_json:
        typer.echo(json.dumps(_as_json(summary, plans)))
        return
    typer.echo(
        f"LeRobot {summary.version}: {summary.num_episodes:,} episodes, {summary.num_frames:,} frames at "
        f"{summary.fps:g} fps"
    )
    typer.echo(f"{format_bytes(summary.bytes)}: rows {_sizes(summary.rows)}")
    for camera in summary.cameras:
        size = f"{camera.width or '?'}x{camera.height or '?'}"
        depth = " depth" if camera.is_depth else ""
        typer.echo(f"  {camera.key}: {size}{depth} {camera.codec or 'video'}, {_sizes(camera.videos)}")
    videos = {camera.key for camera in summary.cameras}
    for key, feature in summary.features.items():
        if key not in videos:
            typer.echo(f"  {key}: {feature.dtype} ({'x'.join(map(str, feature.shape)) or '1'})")
    typer.echo(
        f"{len(summary.tasks):,} tasks: {'; '.join(summary.tasks[:5])}{'; ...' if len(summary.tasks) > 5 else ''}"
    )
    table = Table(
        "ranks", "fetched", "of the videos", "largest rank", "requests", "segments in a batch",
        title="video fetched in a shuffled epoch",
    )  # fmt: skip
    for plan in plans:
        times = plan.fetched_bytes / max(1, plan.least_bytes)
        table.add_row(
            str(plan.world_size),
            format_bytes(plan.fetched_bytes),
            f"{times:.2f} x",
            format_bytes(plan.largest_rank_bytes),
            f"{plan.requests:,}",
            str(plan.distinct_segments),
        )
    Console().print(table)
    typer.echo(f"a run with a disk cache on each machine: {format_bytes(plans[-1].run_bytes)}")


def _as_json(summary: DatasetSummary, plans: Sequence[TrafficPlan]) -> dict[str, Any]:
    """The summary and plans for JSON."""
    features = {
        key: {"dtype": feature.dtype, "shape": list(feature.shape), "codec": feature.info.get("video.codec")}
        for key, feature in summary.features.items()
    }
    return {
        "version": summary.version,
        "robot_type": summary.robot_type,
        "episodes": summary.num_episodes,
        "frames": summary.num_frames,
        "fps": summary.fps,
        "bytes": summary.bytes,
        "rows": asdict(summary.rows),
        "cameras": [asdict(camera) for camera in summary.cameras],
        "features": features,
        "tasks": list(summary.tasks),
        "traffic": [asdict(plan) for plan in plans],
    }


def _sizes(sizes: FileSizes) -> str:
    missing = f", of which {sizes.missing:,} are missing" if sizes.missing else ""
    return f"{format_bytes(sizes.bytes)} in {sizes.files:,} file{'' if sizes.files == 1 else 's'}{missing}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect or oddity."""

    what: str
    episode: int | None
    """None for the whole dataset."""
    details: str
    rows: int | None = None
    """The number of affected rows, if counted."""


def check(
    source: Source,
    deep: Annotated[
        bool,
        typer.Option("--deep", "--decode", help="Also fetch and decode every frame, or of videos a clip of each."),
    ] = False,
    kind: KindOption = None,
    video: VideoOption = None,
    start: StartOption = None,
    stop: StopOption = None,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Find what is broken or odd in a dataset before you spend GPU hours. Exits with 1 if it finds something."""
    config = StreamConfig(on_error="skip", fetch=FetchConfig(ca_file=ca_file))
    found = find_source(source, config.fetch, kind, video=video, start=start, stop=stop)
    if isinstance(found, Videos):
        show_defects(found, config, deep=deep, as_json=as_json)
        return
    findings = anyio.run(partial(_check, source, config, deep=deep))
    off = sum(finding.rows or 0 for finding in findings if finding.what == OFF_THE_GRID)
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings], "rows_off_the_grid": off}))
    else:
        for finding in findings:
            where = "" if finding.episode is None else f"episode {finding.episode}: "
            typer.echo(f"{finding.what}: {where}{finding.details}")
        count = f"{len(findings):,} finding{'s' * (len(findings) > 1)}" if findings else "nothing found"
        typer.echo(f"{count}; rows off the grid: {off:,}" if off else count)
    if findings:
        raise typer.Exit(1)


async def _check(source: str, config: StreamConfig, *, deep: bool) -> list[Finding]:
    from asyncfetch.lerobot import open_dataset  # slow to load

    # Warnings of a reader are findings here.
    with progress("metadata") as show, warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        async with AsyncExitStack() as stack:
            try:
                dataset = await stack.enter_async_context(open_dataset(source, config=config))
            except DatasetError as error:  # nothing of it can be read
                return [Finding(type(error).__name__, None, str(error))]
            findings = [*_metadata_findings(dataset), *await _row_findings(dataset, show)]
            off_the_grid = {finding.episode for finding in findings if finding.what == OFF_THE_GRID}
            findings += await _video_findings(dataset, off_the_grid, show)
            findings += await _sample_findings(dataset, show) if deep else []
            return [*(Finding(kind, None, text) for kind, text in dataset.metadata.oddities), *findings]


def _metadata_findings(dataset: LeRobotDataset) -> Iterator[Finding]:
    table, features = dataset.episodes, dataset.features
    stats = dataset.stats or {}
    missing = [
        key for key, feature in features.items() if feature.kind in {"value", "video", "image"} and key not in stats
    ]
    if missing:
        yield Finding("missing statistics", None, ", ".join(missing))
    for task, count in Counter(dataset.tasks.values()).items():
        if count > 1:
            yield Finding("duplicate task", None, f"{count} task numbers mean {task!r:.80}")
    ends = table.starts + table.lengths
    for position in np.flatnonzero(table.starts[1:] != ends[:-1]).tolist():
        before, after = int(ends[position]), int(table.starts[position + 1])
        what = "orphan rows" if after > before else "rows of two episodes"
        rows = f"rows {min(before, after)} to {max(before, after) - 1} follow it"
        yield Finding(what, int(table.indices[position]), rows)
    for episode in np.flatnonzero(table.lengths == 0).tolist():
        yield Finding("empty episode", int(table.indices[episode]), "it has no frames")


async def _row_findings(dataset: LeRobotDataset, show: Callable[..., None]) -> list[Finding]:
    """Findings about the tables: missing and duplicate rows, timestamps, duplicate episodes."""
    keys = ["frame_index", "timestamp"]
    keys += [
        key for key, feature in dataset.features.items() if feature.kind == "value" and key not in DEFAULT_FEATURES
    ]
    indices, done, found = list(dataset.episodes.indices), 0, list[Finding]()
    seen: dict[bytes, int] = {}
    pieces = [indices[start : start + CHECKED_AT_ONCE] for start in range(0, len(indices), CHECKED_AT_ONCE)]
    while pieces:
        piece = pieces.pop(0)
        try:
            rows = [batch async for batch in dataset.columns(keys, episodes=piece)]
            _check_values(dataset, rows)
        except BAD as error:
            if len(piece) > 1:  # find its episode
                pieces[:0] = [[episode] for episode in piece]
                continue
            found.append(Finding(type(error).__name__, piece[0], str(error)))
        else:
            found += _rows_of(dataset, piece, rows, seen)
        done += len(piece)
        show("rows", done / len(indices), f"{done:,}/{len(indices):,} episodes")
    return found


def _check_values(dataset: LeRobotDataset, batches: list[pa.RecordBatch]) -> None:
    """Raise FormatError if a column contradicts info.json."""
    import pyarrow as pa

    if batches:
        rows = pa.Table.from_batches(batches)
        for key in rows.column_names:
            to_column(rows[key], dataset.features[key], dataset.url)


def _rows_of(
    dataset: LeRobotDataset, episodes: Sequence[int], batches: list[pa.RecordBatch], seen: dict[bytes, int]
) -> Iterator[Finding]:
    """Yield findings about readable rows; ``seen`` has the episode of each content."""
    import pyarrow as pa

    if not batches:
        return
    rows, start = pa.Table.from_batches(batches), 0
    tolerance_seconds = dataset.config.tolerance_seconds
    for episode in episodes:
        length = dataset.episodes[episode].length
        own, start = rows.slice(start, length), start + length
        if not length:
            continue
        due = to_floats(own["frame_index"], "frame_index", dataset.url) / dataset.fps
        seconds = to_floats(own["timestamp"], "timestamp", dataset.url)
        off = np.flatnonzero(~(np.abs(seconds - due) <= tolerance_seconds))
        if len(off):
            yield Finding(
                OFF_THE_GRID,
                episode,
                f"frame {off[0]} is at {seconds[off[0]]:g} s, not {due[off[0]]:g} s; {len(off)} of {length} rows are "
                "off, and each has the frame that a video shows at the row's own time",
                len(off),
            )
        content = own.drop_columns(["frame_index", "timestamp"])
        if content.num_columns:
            digest = hashlib.sha256(repr(content.combine_chunks().to_pydict()).encode()).digest()
            first = seen.setdefault(digest, episode)
            if first != episode:
                yield Finding("duplicate episode", episode, f"its {length} rows equal those of episode {first}")


async def _video_findings(
    dataset: LeRobotDataset, off_the_grid: Collection[int | None], show: Callable[..., None]
) -> list[Finding]:
    """Findings from the videos' indexes, without decoding."""
    from asyncfetch.lerobot.dataset import reader_of  # slow to load

    reader = reader_of(dataset)

    async def look(episode: int) -> Finding | None:
        try:
            missing = await reader.missing_frames(episode, by_rows=episode in off_the_grid)
        except BAD as error:
            return Finding(type(error).__name__, episode, str(error))
        missed = [f"{count} of {camera}" for camera, count in missing.items() if count]
        return Finding("missing frames", episode, ", ".join(missed)) if missed else None

    indices, found = list(dataset.episodes.indices), list[Finding | None]()
    for start in range(0, len(indices), CHECKED_AT_ONCE):
        found += await gather(*(partial(look, episode) for episode in indices[start : start + CHECKED_AT_ONCE]))
        show("videos' indexes", len(found) / len(indices), f"{len(found):,}/{len(indices):,} episodes")
    return [finding for finding in found if finding is not None]


async def _sample_findings(dataset: LeRobotDataset, show: Callable[..., None]) -> list[Finding]:
    """Findings about all frames, fetched and decoded."""
    from asyncfetch.streams import Stream

    stream, number = Stream(dataset, shuffle=False), 0
    latest: dict[str, Any] = {}
    still: Counter[tuple[int, str]] = Counter()
    async with stream.samples() as samples:
        async for sample in samples:
            number += 1
            show("frames", number / dataset.num_frames, f"{number:,}/{dataset.num_frames:,}")
            episode = int(sample["episode_index"])
            for camera in dataset.cameras:
                if latest.get("episode_index") == episode and bool((sample[camera] == latest[camera]).all()):
                    still[episode, camera] += 1
            latest = {"episode_index": episode, **{camera: sample[camera] for camera in dataset.cameras}}
    bad = [
        Finding("bad data", each.episode, f"{each.samples} frames: {each.cause}")
        for each in stream.quarantine.episodes()
    ]
    lengths = dict(zip(dataset.episodes.indices, dataset.episodes.lengths.tolist(), strict=True))
    return bad + [
        Finding("duplicate frames", episode, f"{count} of {lengths[episode]} pictures of {camera} repeat the last one")
        for (episode, camera), count in still.items()
        if count > lengths[episode] * MOST_STILL
    ]


def frames(
    source: Source,
    out: Annotated[Path, typer.Option(help="The PNG file to write.")],
    episode: Annotated[int, typer.Option(min=0, help="Which episode, or entry.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Pictures of each camera, from its first frame to its last.")] = 8,
    kind: KindOption = None,
    video: VideoOption = None,
    start: StartOption = None,
    stop: StopOption = None,
    ca_file: CaFile = None,
) -> None:
    """Draw a contact sheet of an episode or a video: a row of pictures for each camera."""
    config = StreamConfig(fetch=FetchConfig(ca_file=ca_file))
    found = find_source(source, config.fetch, kind, video=video, start=start, stop=stop)
    if isinstance(found, Videos):
        sheet = np.concatenate([_thumbnail(each) for each in entry_pictures(found, config, episode, count)], axis=1)
    else:
        sheet = anyio.run(_sheet, found, config, episode, count)
    out.write_bytes(encode_png(sheet))
    typer.echo(f"{out}: {sheet.shape[1]}x{sheet.shape[0]}")


async def _sheet(source: str, config: StreamConfig, episode: int, count: int) -> NDArray[np.uint8]:
    from asyncfetch.lerobot import open_dataset

    async with open_dataset(source, config=config) as dataset:
        cameras = [camera for camera in dataset.cameras if not dataset.features[camera].is_depth]
        if not cameras:
            raise DatasetError(f"{dataset!r} has no camera to draw")
        length = dataset.episodes[episode].length
        numbers = np.unique(np.linspace(0, length - 1, min(count, length)).astype(int)).tolist()
        samples = await gather(*(partial(dataset.sample, episode, number) for number in numbers))
    rows = [np.concatenate([_thumbnail(sample[camera]) for sample in samples], axis=1) for camera in cameras]
    width = max(row.shape[1] for row in rows)
    return np.concatenate([np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0))) for row in rows])


def _thumbnail(picture: Any) -> NDArray[np.uint8]:  # noqa: ANN401 - a tensor, (3, height, width)
    step = -(-picture.shape[2] // THUMBNAIL_PX)
    small: NDArray[np.uint8] = picture[:, ::step, ::step].numpy().transpose(1, 2, 0)
    return small

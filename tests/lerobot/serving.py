"""Datasets behind real HTTPS servers, and what their samples must be."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import anyio
import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torchcodec.decoders  # noqa: F401  at collection: this takes seconds, which aren't the first test's

from asyncfetch.config import FetchConfig, RetryConfig, StreamConfig
from asyncfetch.errors import EpisodeNotFound
from asyncfetch.lerobot import LeRobotDataset, open_dataset
from asyncfetch.testing import DatasetTruth, RangeServer, read_identity, write_dataset

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from pathlib import Path

    from asyncfetch.config import DecoderBackend
    from asyncfetch.formats import Sample
    from asyncfetch.testing import FaultRule, ServedRequest

TOP, WRIST = "observation.images.top", "observation.images.wrist"
SNAPSHOT, DEPTH = "observation.images.snapshot", "observation.images.depth"
DEFAULTS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Library:
    """Writes each dataset once a session: encoding takes most of the time here. Don't change what it gives."""

    paths: pytest.TempPathFactory
    written: dict[str, DatasetTruth]

    def __call__(self, **options: Any) -> DatasetTruth:  # noqa: ANN401
        options = {"width": 96, "height": 64, "codec": "h264", **options}
        name = repr(sorted(options.items()))
        if name not in self.written:
            self.written[name] = write_dataset(self.paths.mktemp("dataset"), **options)
        return self.written[name]


@dataclass(frozen=True, slots=True)
class Served:
    """An open dataset and the server that it reads from."""

    dataset: LeRobotDataset
    server: RangeServer

    def requests(self, part: str = "") -> list[ServedRequest]:
        """Those for paths with this in them, since the last reset."""
        return [request for request in self.server.requests if part in request.path]


@asynccontextmanager
async def serve(
    content: str | os.PathLike[str] | Mapping[str, bytes],
    *,
    fault: FaultRule | None = None,
    first_byte_seconds: float = 0.0,
    max_bytes: int = 64 * MIB,
    max_requests_per_host: int = 64,
    joins: bool = True,
    decoder: DecoderBackend = "auto",
    tolerance_seconds: float = 1e-4,
    segment_seconds: float = 20.0,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[Served]:
    """A dataset over HTTPS on a server of its own; failed requests are not tried again.

    Without ``joins`` each range is asked for by one request of its own: for tests that count those.
    """
    async with RangeServer(content, fault=fault, first_byte_seconds=first_byte_seconds) as server:
        fetch = FetchConfig(
            max_requests_per_host=max_requests_per_host,
            learn_limit=False,
            max_span_bytes=FetchConfig().max_span_bytes if joins else 0,
            hedge=None,  # a second request, where the machine is busy, is one too many for tests that count
            ca_file=server.ca_file,
            trust_env=False,
            retry=RetryConfig(attempts=1),
        )
        config = StreamConfig(
            fetch=fetch,
            max_bytes=max_bytes,
            decode_threads=2,
            decoder=decoder,
            tolerance_seconds=tolerance_seconds,
            segment_seconds=segment_seconds,
        )
        async with open_dataset(server.url, config=config, **options) as dataset:
            yield Served(dataset, server)


def in_memory(truth: DatasetTruth) -> dict[str, bytes]:
    """The dataset's files by path, to be changed."""
    return content_of(truth.root)


def content_of(root: Path) -> dict[str, bytes]:
    """The files below, by path, to be changed."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def shifted(truth: DatasetTruth, by_frames: float, *, camera: str = TOP) -> dict[str, bytes]:
    """The dataset's files, its metadata telling of all frames of a camera that they are shown so much later."""
    content = in_memory(truth)
    path = "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(pa.BufferReader(content[path]))
    for name in (f"videos/{camera}/from_timestamp", f"videos/{camera}/to_timestamp"):
        moved = np.asarray(table[name]) + by_frames / truth.fps
        table = table.set_column(table.column_names.index(name), name, pa.array(moved))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    content[path] = sink.getvalue().to_pybytes()
    return content


def restarting(truth: DatasetTruth, root: Path, of: str, group_rows: int | None) -> Path:
    """A copy whose ``index`` begins anew in each episode, or file; in row groups as they are, or of so many rows."""
    shutil.copytree(truth.root, root)
    for path in (root / "data").rglob("*.parquet"):
        file = pq.ParquetFile(path)
        groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
        first, written = groups[0]["index"][0].as_py(), []
        for rows in groups:
            column = rows.column_names.index("index")
            index = np.asarray(rows["frame_index"] if of == "episode" else rows["index"])
            index = index - (0 if of == "episode" else first)
            written.append(rows.set_column(column, rows.schema.field(column), pa.array(index)))
        if group_rows is not None:
            whole = pa.concat_tables(written)
            written = [whole.slice(start, group_rows) for start in range(0, len(whole), group_rows)]
        with pq.ParquetWriter(path, written[0].schema) as writer:
            for rows in written:
                writer.write_table(rows)
    return root


async def refreshed(truth: DatasetTruth, root: Path, options: str) -> Path:
    """A copy whose videos have recovery points in place of key frames."""
    shutil.copytree(truth.root, root)
    for path in (root / "videos").rglob("*.mp4"):
        made = path.with_name("made.mp4")
        command = ["ffmpeg", "-v", "error", "-i", str(path), "-c:v", "libx264", "-sc_threshold", "0"]
        await anyio.run_process([*command, *options.split(), "-video_track_timescale", "15360", str(made)])
        made.rename(path)
    return root


def renumbered(
    truth: DatasetTruth,
    root: Path,
    numbers: Sequence[int | None],
    *,
    order: Sequence[int] = (),
    per_file: int = 1000,
    counts_all: bool = False,
) -> Path:
    """A copy whose table gives each episode another number. Of None it has no row; all else of it is still there.

    Args:
        truth: The dataset to copy.
        root: Where to.
        numbers: By episode.
        order: Of the table's rows; none is that of the episodes.
        per_file: Rows in a file of the table.
        counts_all: Whether info.json counts all numbers up to the last one, and not the rows of the table.
    """
    shutil.copytree(truth.root, root)
    info = json.loads((root / "meta/info.json").read_text())
    named_rows = [row for row in order or range(len(numbers)) if numbers[row] is not None]
    table = pa.concat_tables(map(pq.read_table, sorted((root / "meta/episodes").rglob("*.parquet"))))
    table = _with_numbers(table.take(named_rows), numbers)
    for number, first in enumerate(range(0, len(table), per_file)):
        chunk, file = divmod(number, info["chunks_size"])
        path = root / f"meta/episodes/chunk-{chunk:03d}/file-{file:03d}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(table.slice(first, per_file), path)
    for path in (root / "data").rglob("*.parquet"):
        groups = pq.ParquetFile(path)
        parts = [_with_numbers(groups.read_row_group(group), numbers) for group in range(groups.num_row_groups)]
        with pq.ParquetWriter(path, parts[0].schema) as writer:
            for part in parts:
                writer.write_table(part)
    rows: list[dict[str, Any]] = table.select(["episode_index", "length", "dataset_to_index"]).to_pylist()
    if counts_all:
        info["total_episodes"] = max(row["episode_index"] for row in rows) + 1
        info["total_frames"] = max(row["dataset_to_index"] for row in rows)
    else:
        info["total_episodes"] = len(rows)
        info["total_frames"] = sum(row["length"] for row in rows)
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def _with_numbers(table: pa.Table, numbers: Sequence[int | None]) -> pa.Table:
    """Rows of an episode that is taken out keep their number."""
    column = table.column_names.index("episode_index")
    own: list[Any] = table["episode_index"].to_pylist()
    given = [number if numbers[number] is None else numbers[number] for number in own]
    return table.set_column(column, table.schema.field(column), pa.array(given, pa.int64()))


async def check_renumbered(dataset: LeRobotDataset, truth: DatasetTruth, numbers: Sequence[int | None]) -> None:
    """Every frame that is named, and that no other is."""
    named = {number: own for own, number in enumerate(numbers) if number is not None}
    assert [*dataset.episodes.indices] == sorted(named)
    assert (dataset.num_episodes, dataset.num_frames) == (len(named), sum(truth.lengths[own] for own in named.values()))
    for number, own in named.items():
        assert dataset.episodes[number].index == number
        for frame in range(truth.lengths[own]):
            sample = await dataset.sample(number, frame)
            assert sample["episode_index"] == number
            check_sample({**sample, "episode_index": own}, truth, own, frame)
    for unknown in {*range(len(numbers) + 2), -1, max(named) + 1, 2**63, 10**30} - named.keys():
        assert unknown not in dataset.episodes
        with pytest.raises(EpisodeNotFound, match=rf"no episode {unknown}; it has {min(named)} to {max(named)}"):
            await dataset.sample(unknown, 0)


def video_path(camera: str, file: int = 0) -> str:
    return f"videos/{camera}/chunk-000/file-{file:03d}.mp4"


def all_frames(truth: DatasetTruth, *, seed: int = 0) -> Sequence[tuple[int, int]]:
    """Every (episode, frame), shuffled."""
    places = [(episode, frame) for episode, length in enumerate(truth.lengths) for frame in range(length)]
    np.random.default_rng(seed).shuffle(places)
    return [(int(episode), int(frame)) for episode, frame in places]


def check_sample(sample: Sample, truth: DatasetTruth, episode: int, frame: int) -> None:
    """Every camera by its pixels, every column by its value."""
    for camera in truth.cameras:
        assert read_identity(sample[camera]) == truth.identity(episode, frame, camera)
    for key in ("observation.state", "action", "next.reward", *DEFAULTS):
        np.testing.assert_array_equal(sample[key], truth.column(key, episode)[frame], err_msg=key)
    assert sample["task"] == truth.task(episode)


async def check_all(dataset: LeRobotDataset, truth: DatasetTruth) -> None:
    for episode, frame in all_frames(truth):
        check_sample(await dataset.sample(episode, frame), truth, episode, frame)


def in_use_bytes(dataset: LeRobotDataset) -> int:
    """What readers and fetches hold of the clip cache; 0 when nobody reads."""
    clips = dataset.statistics().clips
    return clips.leased_bytes + clips.reserved_bytes


def retimed(
    truth: DatasetTruth,
    shown: Sequence[int],
    rows: Sequence[Sequence[float]],
    starts: Sequence[float],
    *,
    stops: Sequence[float] = (),
) -> dict[str, bytes]:
    """The files of a dataset of one video a camera, whose rows and frames are at times of their own; see ``retime``."""
    content = in_memory(truth)
    retime(content, truth.video_features, shown, rows, starts, stops)
    return content


def retime(
    content: dict[str, bytes],
    cameras: Iterable[str],
    shown: Sequence[int],
    rows: Sequence[Sequence[float]],
    starts: Sequence[float],
    stops: Sequence[float] = (),
) -> None:
    """Give a dataset's rows and frames other times.

    Args:
        content: Its files, of which each camera has one video.
        cameras: Whose videos.
        shown: When the videos show their frames, in ticks of which a second has 15,360; the first at 0.
        rows: The timestamps of each episode's rows.
        starts: When each episode begins in the videos by the metadata.
        stops: When it ends; none is as LeRobot's recorder counts it at 30 frames a second, one after its last row.
    """

    def put(path: str, columns: Mapping[str, Sequence[float]]) -> None:
        table = pq.read_table(pa.BufferReader(content[path]))
        for name, values in columns.items():
            place = table.schema.get_field_index(name)
            field = table.schema.field(place)
            table = table.set_column(place, field, pa.array(values, field.type))
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        content[path] = sink.getvalue().to_pybytes()

    stops = stops or [start + max(own) + 1 / 30 for start, own in zip(starts, rows, strict=True)]
    put("data/chunk-000/file-000.parquet", {"timestamp": [time for own in rows for time in own]})
    for camera in cameras:
        content[video_path(camera)] = with_times(content[video_path(camera)], shown)
        places = {f"videos/{camera}/from_timestamp": starts, f"videos/{camera}/to_timestamp": stops}
        put("meta/episodes/chunk-000/file-000.parquet", places)


def shown_after(gaps: Sequence[int]) -> list[int]:
    """Times of frames, from the ticks between them."""
    return list(itertools.accumulate(gaps, initial=0))


def variable(truth: DatasetTruth) -> tuple[list[int], list[list[float]], list[float]]:
    """Times for ``retimed``: a frame at two of each three places of 30 a second, the rows at their frames' times."""
    shown = shown_after(([1024, 512, 512] * truth.num_frames)[: truth.num_frames - 1])
    firsts = [truth.first_index(episode) for episode in range(truth.num_episodes)]
    starts = [shown[first] / 15360 for first in firsts]
    rows = [
        [shown[first + frame] / 15360 - start for frame in range(length)]
        for first, start, length in zip(firsts, starts, truth.lengths, strict=True)
    ]
    return shown, rows, starts


def with_times(video: bytes, shown: Sequence[int]) -> bytes:
    """The same coded frames, shown at other times: in ticks of which a second has 15,360."""
    options = {"video_track_timescale": "15360"}
    source: Any
    with (
        av.open(io.BytesIO(video)) as source,
        av.open(sink := io.BytesIO(), "w", format="mp4", options=options) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0], opaque=True)
        packets = [packet for packet in source.demux(video=0) if packet.size]
        ranks = np.argsort(np.argsort([packet.pts for packet in packets]))
        lag = max(shown[number] - shown[rank] for number, rank in enumerate(ranks))
        for number, packet in enumerate(packets):
            packet.time_base = Fraction(1, 15360)
            packet.pts, packet.dts = shown[ranks[number]], shown[number] - lag
            packet.duration = 512
            packet.stream = stream
            target.mux(packet)
    return sink.getvalue()


def write_files(content: Mapping[str, bytes], root: Path) -> Path:
    """The files in a directory."""
    for path, data in content.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root

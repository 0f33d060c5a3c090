"""Datasets behind real HTTPS servers, and what their samples must be."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torchcodec.decoders  # noqa: F401  at collection: this takes seconds, which aren't the first test's

from asyncfetch.config import FetchConfig, HedgeConfig, RetryConfig, StreamConfig
from asyncfetch.lerobot import LeRobotDataset, open_dataset
from asyncfetch.testing import DatasetTruth, RangeServer, read_identity, write_dataset

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Mapping, Sequence

    import pytest

    from asyncfetch.config import DecoderBackend
    from asyncfetch.lerobot import Sample
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
            hedge=HedgeConfig() if joins else None,
            ca_file=server.ca_file,
            trust_env=False,
            retry=RetryConfig(attempts=1),
        )
        config = StreamConfig(fetch=fetch, max_bytes=max_bytes, decode_threads=2, decoder=decoder)
        async with open_dataset(server.url, config=config, **options) as dataset:
            yield Served(dataset, server)


def in_memory(truth: DatasetTruth) -> dict[str, bytes]:
    """The dataset's files by path, to be changed."""
    return {str(path.relative_to(truth.root)): path.read_bytes() for path in truth.root.rglob("*") if path.is_file()}


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

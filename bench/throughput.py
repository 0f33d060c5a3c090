"""How fast a dataset streams, and how well that keeps up with decoding.

    python -m bench.throughput                          makes a dataset and serves it over a shaped HTTPS link
    python -m bench.throughput https://host/dataset     any LeRobot v3 dataset

Keep-up is frames/s streamed, cold start included, over frames/s of the same pipeline for the same samples over clips
that are in memory already. Beside it: that pipeline over bare decoding with the same threads, and one frame at a time
through torchcodec over an fsspec file. All in one run, interleaved; the table shows medians over the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.config import usable_cpus
from asyncfetch.stream.order import Order, Step
from bench.baselines import decode_bare, read_by_file
from bench.data import bench_dataset
from bench.nginx import NginxServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.lerobot import HeldEpisode

MIB = 1024 * 1024


@dataclass(frozen=True)
class Setting:
    """What is measured, on what."""

    url: str
    ca_file: str | None
    seconds: float
    config: af.StreamConfig

    def steps(self, dataset: af.LeRobotDataset) -> Iterator[Step]:
        """The order of the first epoch of a stream of this setting."""
        return Order(
            dataset.episodes.lengths,
            shuffle=True,
            seed=0,
            epoch=0,
            lanes=self.config.lanes,
            pool_episodes=self.config.pool_episodes,
        ).steps()


@dataclass(frozen=True)
class Streamed:
    """A cold stream, read for so many seconds."""

    samples: int
    frames_per_second: float
    """From the start of the pass on: metadata, indexes and the first clips included."""
    steady_frames_per_second: float
    """From the first sample on."""
    first_sample_seconds: float
    mib_per_second: float
    requests: int
    retries: int
    hits: int
    misses: int


@dataclass(frozen=True)
class Resident:
    """The same samples over clips in memory, and what they are made of."""

    frames_per_second: float
    bare_frames_per_second: float
    header_milliseconds: float
    """Planning one clip and writing its header."""
    decode_seconds: float
    """Of all threads, for all samples."""


@dataclass(frozen=True)
class Row:
    """The medians of one concurrency."""

    concurrency: int
    samples_per_second: float
    frames_per_second: float
    mib_per_second: float
    keep_up: float
    keep_up_spread: tuple[float, float]
    steady_keep_up: float
    pipeline_over_bare: float
    resident_frames_per_second: float
    first_sample_seconds: float
    requests: float
    header_milliseconds: float
    decode_milliseconds_per_frame: float
    by_file_keep_up: float | None


def stream_cold(setting: Setting) -> Streamed:
    """Read a fresh stream by a plain loop."""
    stream = af.Stream(setting.url, config=setting.config)
    started = time.perf_counter()
    first = ended = 0.0
    samples = 0
    for _ in stream:
        samples += 1
        ended = time.perf_counter() - started
        first = first or ended
        if ended >= setting.seconds:
            break
    figures = stream.statistics()
    stream.close()
    if figures is None or not samples:
        raise SystemExit(f"{setting.url} has no samples to measure")
    cameras = figures.cameras
    return Streamed(
        samples=samples,
        frames_per_second=samples * cameras / ended,
        steady_frames_per_second=(samples - 1) * cameras / max(ended - first, 1e-9),
        first_sample_seconds=first,
        mib_per_second=figures.fetch.bytes / ended / MIB,
        requests=figures.fetch.requests,
        retries=figures.fetch.retries,
        hits=figures.clips.hits,
        misses=figures.clips.misses,
    )


async def read_resident(setting: Setting, samples: int) -> Resident:
    """Read the first samples again, their clips in memory, and decode the same frames with torchcodec alone."""
    unlimited = replace(setting.config, fetch=replace(setting.config.fetch, max_requests_per_host=64))
    async with af.open_dataset(setting.url, config=unlimited) as dataset:
        steps = list(itertools.islice(setting.steps(dataset), samples))
        episodes = sorted({step.episode for step in itertools.islice(setting.steps(dataset), samples + 10_000)})
        for some in itertools.batched(episodes, 64) if hasattr(itertools, "batched") else _batched(episodes, 64):
            for episode in some:
                dataset.prefetch(episode)
            for episode in some:
                await dataset.ready(episode)
        pipeline = await _time_pipeline(dataset, setting, samples)
        decoded = dataset.statistics().decode.busy_seconds
        held = {episode: await dataset.hold(episode) for episode in sorted({step.episode for step in steps})}
        clips = {episode: one.clips() for episode, one in held.items()}
        bare = await anyio.to_thread.run_sync(decode_bare, clips, steps, dataset.decode_pool.statistics().threads)
        header = _time_headers(held)
        for one in held.values():
            one.release()
    return Resident(pipeline, bare, header, decoded)

"""How fast a dataset streams, and how well that keeps up with decoding.

    python -m bench.throughput                          makes a dataset and serves it over a shaped HTTPS link
    python -m bench.throughput https://host/dataset     any LeRobot v3 dataset

Keep-up is frames/s streamed, cold start included, over frames/s of the same pipeline in the same order over clips that
are in memory already. Beside it: that pipeline over bare decoding with the same threads, and one frame at a time
through torchcodec over an fsspec file. All in one run, interleaved; figures are medians over the repeats.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import asyncfetch as af
from asyncfetch.stream.order import Order

MIB = 1024 * 1024


@dataclass(frozen=True)
class Rates:
    """One repeat at one concurrency."""

    streamed: float
    """Frames a second from the start of the pass on, metadata and indexes included."""
    steady: float
    """Frames a second from the first sample on."""
    resident: float
    """Frames a second of the same samples over clips in memory."""
    bare: float
    """Frames a second of torchcodec alone, same frames, same order, same threads."""
    samples_per_second: float
    mib_per_second: float
    requests: int
    first_sample_seconds: float
    header_milliseconds: float
    """Planning and writing one clip's header."""
    fetch_cpu: float
    hand_over_microseconds: float


@dataclass(frozen=True)
class Setting:
    """What is measured, on what."""

    url: str
    config: af.StreamConfig
    ca_file: str | None
    seconds: float


def order_of(setting: Setting, dataset: af.LeRobotDataset) -> Order:
    """The order that a stream of this setting has in its first epoch."""
    return Order(
        dataset.episodes.lengths,
        shuffle=True,
        seed=0,
        epoch=0,
        lanes=setting.config.lanes,
        pool_episodes=setting.config.pool_episodes,
    )


def stream_cold(setting: Setting) -> tuple[int, float, float, Any]:
    """(samples, seconds, seconds to the first sample, statistics) of a fresh stream, consumed by a plain loop."""
    stream = af.Stream(setting.url, config=setting.config)
    started = time.perf_counter()
    first = ended = 0.0
    count = 0
    for count, _ in enumerate(stream, start=1):  # noqa: B007  the count is wanted behind the loop
        ended = time.perf_counter() - started
        first = first or ended
        if ended >= setting.seconds:
            break
    figures = stream.statistics()
    stream.close()
    return count, ended, first, figures

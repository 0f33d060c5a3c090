"""What shuffling costs: frames a second from memory, in the order of a stream, beside decoding in sequence.

Clips are in memory, so that decoding alone counts. In each repeat, by turns, a whole epoch of the same episodes from
start to end, each way with decoders of its own to open: bare torchcodec in sequence, a whole clip by one thread; a
stream in sequence (``shuffle=False``); a stream whose order takes a group of pictures together (``group_frames`` as the
dataset states it); and the beginning of an epoch that draws each frame for itself (``group_frames=1``), which takes
long. Beside it the price: from how many groups and episodes 32 consecutive samples come.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from rich.console import Console
from rich.table import Table

import asyncfetch as af
from asyncfetch.cli.bench import preload, time_samples
from asyncfetch.lerobot import reader_of
from asyncfetch.order.line import Piece
from asyncfetch.order.plan import Step
from bench.baselines import decode_bare, first_epoch
from bench.data import bench_dataset

if TYPE_CHECKING:
    from pathlib import Path

NEIGHBOURS = 32
"""Consecutive samples whose spread is told: a small batch."""
SINGLY = 1500
"""Samples that are drawn singly."""


@dataclass(frozen=True)
class Row:
    """One kind of video: medians over the repeats."""

    video: str
    sequential_frames_per_second: float
    grouped: float
    """Over sequential, the median of the repeats' ratios."""
    grouped_spread: tuple[float, float]
    stream_in_sequence: float
    """Over sequential: what a stream costs that doesn't shuffle."""
    grouped_over_stream: float
    """Over that stream, the median of the repeats' ratios: what shuffling alone costs."""
    grouped_over_stream_spread: tuple[float, float]
    drawn_singly: float
    """Over sequential."""
    groups_of_neighbours: tuple[int, float]
    """Fewest, and mean, of the groups that 32 consecutive samples come from."""
    groups_of_neighbours_drawn_singly: tuple[int, float]
    episodes_of_neighbours: int
    """Fewest."""


def groups_of_neighbours(steps: list[Step], gop: int) -> tuple[int, float]:
    """Fewest and mean, over all runs of consecutive samples, of the groups of pictures that they come from."""
    counts = [
        len({(step.piece.episode, step.frame // gop) for step in steps[start : start + NEIGHBOURS]})
        for start in range(0, len(steps) - NEIGHBOURS, NEIGHBOURS)
    ]
    return min(counts), statistics.mean(counts)


async def time_epoch(
    path: Path, config: af.StreamConfig, episodes: range, samples: int, *, shuffle: bool = True
) -> float:
    """Frames a second of so many samples of an epoch of some episodes, which were brought into memory before."""
    async with af.open_dataset(str(path), config=config) as dataset:
        await preload(dataset, set(episodes))
        seconds = await time_samples(dataset, samples, episodes=episodes, shuffle=shuffle)
        return samples * len(dataset.cameras) / seconds[-1]


async def measure(path: Path, video: str, num_episodes: int, repeats: int) -> Row:
    """All ways by turns."""
    episodes = range(num_episodes)
    config = af.StreamConfig(max_bytes=8 << 30)
    config_singly = replace(config, group_frames=1)
    sequential, unshuffled, together, apart = [], [], [], []
    async with af.open_dataset(str(path), config=config) as dataset:
        gop, order = dataset.group_frames, await first_epoch(af.Stream(dataset, episodes=episodes))
        await preload(dataset, set(episodes))
        with ExitStack() as held:
            clips = {
                episode: {key: one.clip(key) for key in dataset.cameras}
                for episode in episodes
                for one in [held.enter_context(await reader_of(dataset).hold(episode))]
            }
            whole = [
                [Step(Piece(episode, 0, length), frame) for frame in range(length)]
                for episode in episodes
                for length in [dataset.episodes[episode].length]
            ]
            bare = partial(decode_bare, clips, whole, reader_of(dataset).engine.decode.threads)
            for _ in range(repeats):
                sequential.append(await anyio.to_thread.run_sync(bare))
                unshuffled.append(await time_epoch(path, config, episodes, len(order), shuffle=False))
                together.append(await time_epoch(path, config, episodes, len(order)))
                apart.append(await time_epoch(path, config_singly, episodes, SINGLY))
    async with af.open_dataset(str(path), config=config_singly) as dataset:
        order_singly = await first_epoch(af.Stream(dataset, episodes=episodes))
    ratios = [rate / base for rate, base in zip(together, sequential, strict=True)]
    shuffling = [rate / base for rate, base in zip(together, unshuffled, strict=True)]
    return Row(
        video=video,
        sequential_frames_per_second=statistics.median(sequential),
        grouped=statistics.median(ratios),
        grouped_spread=(min(ratios), max(ratios)),
        stream_in_sequence=statistics.median(rate / base for rate, base in zip(unshuffled, sequential, strict=True)),
        grouped_over_stream=statistics.median(shuffling),
        grouped_over_stream_spread=(min(shuffling), max(shuffling)),
        drawn_singly=statistics.median(rate / base for rate, base in zip(apart, sequential, strict=True)),
        groups_of_neighbours=groups_of_neighbours(order, gop),
        groups_of_neighbours_drawn_singly=groups_of_neighbours(order_singly, gop),
        episodes_of_neighbours=min(
            len({step.piece.episode for step in order[start : start + NEIGHBOURS]})
            for start in range(0, len(order) - NEIGHBOURS, NEIGHBOURS)
        ),
    )


def show(rows: list[Row]) -> None:
    """The figures for people."""
    table = Table("", *(row.video for row in rows), title="from memory")

    table.add_row("bare, in sequence", *(f"{row.sequential_frames_per_second:.0f} frames/s" for row in rows))
    table.add_row("a stream in sequence / bare", *(f"{row.stream_in_sequence:.2f}" for row in rows))
    table.add_row("shuffled / bare", *(_spread(row.grouped, row.grouped_spread) for row in rows))
    table.add_row(
        "shuffled / in sequence", *(_spread(row.grouped_over_stream, row.grouped_over_stream_spread) for row in rows)
    )
    table.add_row("frames drawn singly / bare", *(f"{row.drawn_singly:.2f}" for row in rows))
    table.add_row("groups of 32 samples", *("{}, mean {:.1f}".format(*row.groups_of_neighbours) for row in rows))
    table.add_row("drawn singly", *("{}, mean {:.1f}".format(*row.groups_of_neighbours_drawn_singly) for row in rows))
    Console().print(table)


def _spread(ratio: float, spread: tuple[float, float]) -> str:
    return f"{ratio:.2f} ({spread[0]:.2f}-{spread[1]:.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=96, help="of the epoch, 150 frames each (default: 96)")
    parser.add_argument("--repeats", type=int, default=5, help="by turns (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    kinds = {"640x480 -g 2": (640, 480, 2), "320x240 -g 30": (320, 240, 30)}
    rows = [
        anyio.run(
            measure, bench_dataset(width=width, height=height, gop=gop), video, arguments.episodes, arguments.repeats
        )
        for video, (width, height, gop) in kinds.items()
    ]
    print(json.dumps([asdict(row) for row in rows])) if arguments.json else show(rows)


if __name__ == "__main__":
    main()

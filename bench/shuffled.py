"""What shuffling costs: frames a second from memory, in the order of a stream, beside decoding in sequence.

Clips are in memory, so that decoding alone counts. In each repeat, by turns: bare torchcodec in sequence, a whole clip
by one thread; a stream whose order takes a group of pictures together (``group_frames`` as the dataset states it); and
one that draws each frame for itself (``group_frames=1``). Beside it the price: from how many groups and episodes 32
consecutive samples come.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from rich.console import Console
from rich.table import Table

import asyncfetch as af
from asyncfetch.stream import Placement
from asyncfetch.stream.order import Step
from bench.baselines import decode_bare
from bench.data import bench_dataset
from bench.throughput import preload, time_pipeline

if TYPE_CHECKING:
    from pathlib import Path

NEIGHBOURS = 32
"""Consecutive samples whose spread is told: a small batch."""


@dataclass(frozen=True)
class Row:
    """One kind of video: medians over the repeats."""

    video: str
    sequential_frames_per_second: float
    grouped: float
    """Over sequential, the median of the repeats' ratios."""
    grouped_spread: tuple[float, float]
    drawn_singly: float
    """Over sequential."""
    groups_of_neighbours: tuple[int, float]
    """Fewest, and mean, of the groups that 32 consecutive samples come from."""
    groups_of_neighbours_drawn_singly: tuple[int, float]
    episodes_of_neighbours: int
    """Fewest."""


def order_of(dataset: af.LeRobotDataset) -> list[Step]:
    """The first epoch of a stream of the dataset."""
    return list(af.Stream(dataset).plan(dataset, Placement(), epoch=0).steps())


def groups_of_neighbours(steps: list[Step], gop: int) -> tuple[int, float]:
    """Fewest and mean, over all runs of consecutive samples, of the groups of pictures that they come from."""
    counts = [
        len({(step.episode, step.frame // gop) for step in steps[start : start + NEIGHBOURS]})
        for start in range(0, len(steps) - NEIGHBOURS, NEIGHBOURS)
    ]
    return min(counts), statistics.mean(counts)


async def measure(path: Path, video: str, samples: int, repeats: int) -> Row:
    """All ways by turns."""
    async with AsyncExitStack() as stack:
        config = af.StreamConfig(max_bytes=8 << 30)
        grouped = await stack.enter_async_context(af.open_dataset(str(path), config=config))
        singly = await stack.enter_async_context(
            af.open_dataset(str(path), config=af.StreamConfig(max_bytes=8 << 30, group_frames=1))
        )
        gop = grouped.group_frames
        orders = {grouped: order_of(grouped), singly: order_of(singly)}
        for dataset, steps in orders.items():
            await preload(dataset, {step.episode for step in steps})
        chosen = range(max(1, samples // int(grouped.episodes.lengths[0])))
        with ExitStack() as held:
            clips = {
                episode: {key: one.clip(key) for key in grouped.cameras}
                for episode in chosen
                for one in [held.enter_context(await grouped.hold(episode))]
            }
            whole = [[Step(episode, frame) for frame in range(grouped.episodes[episode].length)] for episode in chosen]
            sequential, together, apart = [], [], []
            for _ in range(repeats):
                bare = partial(decode_bare, clips, whole, grouped.decode_pool.threads)
                sequential.append(await anyio.to_thread.run_sync(bare))
                together.append(await time_pipeline(grouped, samples))
                apart.append(await time_pipeline(singly, samples))
    ratios = [rate / base for rate, base in zip(together, sequential, strict=True)]
    return Row(
        video=video,
        sequential_frames_per_second=statistics.median(sequential),
        grouped=statistics.median(ratios),
        grouped_spread=(min(ratios), max(ratios)),
        drawn_singly=statistics.median(rate / base for rate, base in zip(apart, sequential, strict=True)),
        groups_of_neighbours=groups_of_neighbours(orders[grouped][:samples], gop),
        groups_of_neighbours_drawn_singly=groups_of_neighbours(orders[singly][:samples], gop),
        episodes_of_neighbours=min(
            len({step.episode for step in orders[grouped][start : start + NEIGHBOURS]})
            for start in range(0, samples, NEIGHBOURS)
        ),
    )


def show(rows: list[Row]) -> None:
    """The figures for people."""
    table = Table(title="from memory, frames/s over decoding in sequence")
    for name in ("video", "in sequence", "shuffled", "(spread)", "frames drawn singly", "groups of 32", "drawn singly"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.video,
            f"{row.sequential_frames_per_second:.0f} frames/s",
            f"{row.grouped:.2f}",
            "-".join(f"{ratio:.2f}" for ratio in row.grouped_spread),
            f"{row.drawn_singly:.2f}",
            "{}, mean {:.1f}".format(*row.groups_of_neighbours),
            "{}, mean {:.1f}".format(*row.groups_of_neighbours_drawn_singly),
        )
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--samples", type=int, default=3000, help="of each run (default: 3000)")
    parser.add_argument("--repeats", type=int, default=5, help="by turns (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    kinds = {"640x480 -g 2": (640, 480, 2), "320x240 -g 30": (320, 240, 30)}
    rows = [
        anyio.run(
            measure, bench_dataset(width=width, height=height, gop=gop), video, arguments.samples, arguments.repeats
        )
        for video, (width, height, gop) in kinds.items()
    ]
    print(json.dumps([asdict(row) for row in rows])) if arguments.json else show(rows)


if __name__ == "__main__":
    main()

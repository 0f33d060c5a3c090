"""What shuffling costs: frames a second from memory, in the order of a stream, beside decoding in sequence.

Clips are in memory, so that decoding alone counts. In each repeat, by turns, a whole epoch of the same episodes from
start to end, each way with decoders of its own to open: bare torchcodec in sequence, a whole clip by one thread; a
stream in sequence (``shuffle=False``); a stream whose order takes a group of pictures together (``group_frames`` as the
dataset states it); and the beginning of an epoch that draws each frame for itself (``group_frames=1``), which takes
long. Beside it the price: from how many groups 32 consecutive samples come.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

import asyncfetch as af
from asyncfetch.cli.bench import preload, time_samples
from asyncfetch.lerobot import reader_of
from asyncfetch.order.line import Piece
from asyncfetch.order.plan import Step
from bench.baselines import decode_bare, first_epoch
from bench.data import bench_dataset
from bench.rows import Row, show

if TYPE_CHECKING:
    from pathlib import Path

NEIGHBOURS = 32
"""Consecutive samples whose spread is told: a small batch."""
SINGLY = 1500
"""Samples that are drawn singly."""


def groups_of_neighbours(question: str, steps: list[Step], gop: int) -> Row:
    """From how many groups of pictures consecutive samples come: the mean in place of the median, fewest and most."""
    counts = [
        len({(step.piece.episode, step.frame // gop) for step in steps[start : start + NEIGHBOURS]})
        for start in range(0, len(steps) - NEIGHBOURS, NEIGHBOURS)
    ]
    question = f"{question}: groups that {NEIGHBOURS} samples come from"
    return Row(question, "", statistics.mean(counts), min(counts), max(counts))


async def time_epoch(
    path: Path, config: af.StreamConfig, episodes: range, samples: int, *, shuffle: bool = True
) -> float:
    """Frames a second of so many samples of an epoch of some episodes, which were brought into memory before."""
    async with af.open_dataset(str(path), config=config) as dataset:
        await preload(dataset, set(episodes))
        seconds = await time_samples(dataset, samples, episodes=episodes, shuffle=shuffle)
        return samples * len(dataset.cameras) / seconds[-1]


async def measure(path: Path, video: str, num_episodes: int, repeats: int) -> list[Row]:
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

    def row(what: str, rates: list[float], bases: list[float]) -> Row:
        return Row.of(f"{video}: {what}", "x", [rate / base for rate, base in zip(rates, bases, strict=True)])

    return [
        Row.of(f"{video}: bare, in sequence", "frames/s", sequential),
        row("a stream in sequence / bare", unshuffled, sequential),
        row("shuffled / bare", together, sequential),
        row("shuffled / a stream in sequence", together, unshuffled),
        row("frames drawn singly / bare", apart, sequential),
        groups_of_neighbours(f"{video}, shuffled", order, gop),
        groups_of_neighbours(f"{video}, drawn singly", order_singly, gop),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=96, help="of the epoch, 150 frames each (default: 96)")
    parser.add_argument("--repeats", type=int, default=5, help="by turns (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    kinds = {"640x480 -g 2": (640, 480, 2), "320x240 -g 30": (320, 240, 30)}
    rows = []
    for video, (width, height, gop) in kinds.items():
        path = bench_dataset(width=width, height=height, gop=gop)
        rows += anyio.run(measure, path, video, arguments.episodes, arguments.repeats)
    show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()

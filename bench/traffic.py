"""How often an episode is fetched in an epoch, over all ranks and workers: counted from the order, and by a server.

    python -m bench.traffic                     a minute; a table for each kind of lengths
    python -m bench.traffic --every             all of 1 to 128 ranks, and up to 100,000 episodes; half an hour
    python -m bench.traffic --serve             2, 3 and 8 processes read from a server that counts its bytes

*Fetched*: pairs of a consumer and an episode that it reads something of, over the episodes there are. *Least*: what
can't be gone below where a step is short against an episode, since each rank takes as many samples of each step, and
each of the pool's seats gives as many: such ranks and seats make (seats + ranks - their greatest common divisor) pairs.
It minds no ends of an epoch. *Distinct*: episodes in a rank's batch, and in the batches of all ranks together, on
average; beside those of ranks that take samples in turns, whose steps are the same.

What the server counts are the bytes of clips, over those that one process takes; and all bytes, of which a dataset as
small as this one has many in what each process reads for itself: metadata, indexes of videos, row groups.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import asyncfetch as af
from asyncfetch.stream.cursor import Rest
from asyncfetch.stream.order import Order
from asyncfetch.stream.placement import Placement
from asyncfetch.stream.traffic import readers
from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Counted", "Mixed", "Served", "count", "measure_served", "mix"]

SEATS = 64
"""The default pool."""
EPISODES = (48, 200, 256, 1000, 1280, 4000)
MOST_EPISODES = (20_000, 100_000)
RANKS = (1, 2, 3, 6, 8, 12, 24, 32, 48, 64, 96, 100, 128, 1000)
MANY_RANKS = (*range(1, 129), 192, 256, 384, 512, 768, 1000, 1024)
BATCHES = (1, 4, 8, 32, 256)


@dataclass(frozen=True)
class Counted:
    """One layout."""

    lengths: str
    episodes: int
    ranks: int
    workers: int
    batch: int | None
    """None: the loader makes the batches."""
    fetched: float
    least: float
    largest: float
    """Share of the rank that reads most, over an even one's."""


@dataclass(frozen=True)
class Mixed:
    """How many episodes are in a batch of 32, on average."""

    episodes: int
    ranks: int
    batch: float
    in_turns: float
    step: float
    """In the batches of all ranks together."""


@dataclass(frozen=True)
class Served:
    """One number of processes at a server."""

    ranks: int
    fetched: float
    """Bytes of clips."""
    all_bytes: float
    counted: float
    """From the order."""


def lengths_of(kind: str, episodes: int) -> NDArray[np.int64]:
    """Of about 150 frames."""
    rng = np.random.default_rng(episodes)
    if kind == "equal":
        return np.full(episodes, 150)
    if kind == "130-170":
        return rng.integers(130, 171, episodes)
    return np.maximum(1, np.exp(rng.normal(math.log(150) - 0.18, 0.6, episodes))).astype(np.int64)


def order_of(kind: str, episodes: int) -> Order:
    """With the defaults."""
    lengths = lengths_of(kind, episodes)
    return Order(lengths, shuffle=True, seed=0, epoch=0, lanes=SEATS, pool_episodes=SEATS, group_frames=2)


def layout_of(ranks: int, workers: int = 0, batch: int | None = 32, rank: int = 0) -> Placement:
    """As a StreamDataset has it."""
    one = Placement(rank, ranks, workers=max(1, workers), block_samples=(batch or 1) if workers else 1)
    return one.in_batches(batch, drop_last=False)


def count(kind: str, episodes: int, ranks: int, workers: int = 0, batch: int | None = 32) -> Counted:
    """From the order alone."""
    order = order_of(kind, episodes)
    read = readers(order, layout_of(ranks, workers, batch))
    by_rank = np.bincount(read.ranks, minlength=ranks)
    least = (SEATS + ranks - math.gcd(SEATS, ranks)) / SEATS
    fetched, largest = len(read.episodes) / episodes, float(by_rank.max() * ranks / by_rank.sum())
    return Counted(kind, episodes, ranks, workers, batch, fetched, least, largest)


def mix(episodes: int, ranks: int) -> Mixed:
    """Of batches of 32, by seat and in turns."""
    order = order_of("130-170", episodes)
    slots = order.slots(order.seating(), ranks)
    all_episodes = slots.episodes(np.arange(len(order)))
    found = []
    for step_samples in (32, 0):
        placements = [Placement(rank, ranks, step_samples=step_samples) for rank in range(ranks)]
        taken = [
            all_episodes[list(Rest().positions(len(order), one, "drop", order))] for one in placements[: min(ranks, 8)]
        ]
        starts = range(0, len(taken[0]) - 31, 32)
        batch = np.mean([len(set(part[start : start + 32].tolist())) for part in taken for start in starts])
        found.append(float(batch))
    size = 32 * ranks
    steps = [all_episodes[start : start + size] for start in range(0, len(order) - size + 1, size)]
    together = float(np.mean([len(set(step.tolist())) for step in steps]))
    return Mixed(episodes, ranks, batch=found[0], in_turns=found[1], step=together)


def measure_served(directory: Path, ranks: Sequence[int], *, episodes: int, length: int, seats: int) -> list[Served]:
    """Processes that read one epoch from a server, by its own count of bytes."""
    root = directory / "data"
    options: dict[str, Any] = {"cameras": ["observation.images.top"], "width": 320, "height": 240, "texture": 4.4}
    write_dataset(root, episodes=episodes, length=length, episodes_per_video_file=20, distinct_videos=4, **options)
    served = []
    with RangeServer(root, tls=False, max_log=1_000_000) as server:
        alone = _bytes_of(server, 1, seats)
        for world_size in ranks:
            clips, everything = (
                some / one for some, one in zip(_bytes_of(server, world_size, seats), alone, strict=True)
            )
            lengths = np.full(episodes, length)
            order = Order(lengths, shuffle=True, seed=0, epoch=0, lanes=seats, pool_episodes=seats, group_frames=2)
            counted = len(readers(order, layout_of(world_size, batch=8)).episodes) / episodes
            served.append(Served(world_size, clips, everything, counted))
    return served


def _bytes_of(server: RangeServer, world_size: int, seats: int) -> tuple[int, int]:
    server.reset()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.traffic", "--read", server.url, "--seats", str(seats)],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world_size)},
            stdout=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    given = [int(process.communicate()[0]) for process in processes]
    if any(process.returncode for process in processes) or max(given) - min(given) > 1:
        raise RuntimeError(f"of {world_size} processes each reads its part of the epoch, not {given} samples")
    clips = [one.bytes_sent for one in server.requests if "/videos/" in one.path and one.start]
    return sum(clips), server.statistics().bytes_sent


def _read(url: str, seats: int) -> int:
    # Second requests say how busy the machine is.
    fetch = af.FetchConfig(hedge=None)
    config = af.StreamConfig(lanes=seats, pool_episodes=seats, decode_threads=1, prefetch_episodes=2, fetch=fetch)
    stream = af.Stream(url, config=config)
    placement = stream.placement().in_batches(8, drop_last=False)
    return sum(1 for _ in stream.iterate(placement, epoch=0))  # of an epoch that is given none follows


def show(counted: Sequence[Counted], mixed: Sequence[Mixed], served: Sequence[Served], console: Console) -> None:
    """The tables."""
    kinds = list(dict.fromkeys((one.lengths, one.workers, one.batch) for one in counted))
    for kind, workers, batch in kinds:
        those = [one for one in counted if (one.lengths, one.workers, one.batch) == (kind, workers, batch)]
        made = f"batches of {batch}" if batch else "batches made by the loader"
        table = Table(title=f"fetched / needed: lengths {kind}, {made}, {workers} workers")
        ranks = list(dict.fromkeys(one.ranks for one in those))
        for name in ("ranks", "least"):
            table.add_column(name, justify="right")
        episodes = list(dict.fromkeys(one.episodes for one in those))
        for number in episodes:
            table.add_column(f"{number:,}", justify="right")
        for world_size in ranks:
            row = {one.episodes: one for one in those if one.ranks == world_size}
            figures = [f"{row[number].fetched:.2f}" if number in row else "" for number in episodes]
            table.add_row(str(world_size), f"{next(iter(row.values())).least:.2f}", *figures)
        console.print(table)
    if mixed:
        table = Table("episodes", "ranks", "batch of 32", "in turns", "step", title="distinct episodes")
        for each in mixed:
            figures = [f"{value:.2f}" for value in (each.batch, each.in_turns, each.step)]
            table.add_row(f"{each.episodes:,}", str(each.ranks), *figures)
        console.print(table)
    if served:
        table = Table("processes", "clips / one process's", "all bytes", "from the order", title="by a server's count")
        for one in served:
            table.add_row(str(one.ranks), *(f"{value:.3f}" for value in (one.fetched, one.all_bytes, one.counted)))
        console.print(table)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--seats", type=int, default=16, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(_read(arguments.read, arguments.seats))
        return
    counted: list[Counted] = []
    mixed: list[Mixed] = []
    served: list[Served] = []
    if arguments.serve:
        with tempfile.TemporaryDirectory() as directory:
            served = measure_served(Path(directory), (2, 3, 8), episodes=160, length=30, seats=16)
    else:
        ranks = MANY_RANKS if arguments.every else RANKS
        for kind in ("130-170", "equal", "lognormal"):
            counted += [count(kind, episodes, world_size) for episodes in EPISODES for world_size in ranks]
        counted += [count("130-170", 1280, world_size, 0, batch) for batch in BATCHES for world_size in RANKS]
        for workers, batch in ((2, 32), (8, 32), (16, 32), (2, None), (3, None)):
            counted += [count("130-170", episodes, 1, workers, batch) for episodes in EPISODES]
        if arguments.every:
            counted += [count("lognormal", many, few) for many in MOST_EPISODES for few in (2, 3, 8, 24, 64, 1000)]
        mixed = [mix(1280, world_size) for world_size in (1, 2, 3, 8, 24, 64)]
    show(counted, mixed, served, Console())
    if arguments.json:
        arguments.json.write_text(
            json.dumps([*map(asdict, counted), *map(asdict, mixed), *map(asdict, served)], indent=1)
        )


if __name__ == "__main__":
    main()

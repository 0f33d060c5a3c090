"""How often an episode is fetched in an epoch, over all ranks and workers: counted from the order, and by a server.

    python -m bench.traffic                     a minute; a table for each kind of lengths
    python -m bench.traffic --every             all of 1 to 128 ranks, and up to 100,000 episodes; half an hour
    python -m bench.traffic --serve             2, 3 and 8 ranks, or loader workers, read from a server that counts

*Fetched*: pairs of a rank and an episode that it reads something of, over the episodes there are. *Least*: what
can't be gone below where a step is short against an episode, since each rank takes as many samples of each step, and
each of the pool's slots gives as many: such ranks and slots make (slots + ranks - their greatest common divisor) pairs.
It minds no ends of an epoch. *Distinct*: episodes in a rank's batch, and in the batches of all ranks together, on
average; beside those of ranks that take samples in turns, whose steps are the same.

What the server counts are the bytes of clips, over those that one process takes; and all bytes, of which a dataset as
small as this one has many in what each rank reads for itself: metadata, indexes of videos, row groups. A rank's loader
workers read as one, whether they or the loader make the batches, so nothing is counted for them from the order.
"""

from __future__ import annotations

import argparse
import functools
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
from asyncfetch.stream.order import Order
from asyncfetch.stream.placement import Placement, found_placement
from asyncfetch.stream.remaining import Remaining
from rich.console import Console
from rich.table import Table

import asyncfetch as af
from asyncfetch.stream.source import source_of
from asyncfetch.stream.traffic import readers
from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Counted", "Mixed", "Served", "count", "measure_served", "mix"]

SLOTS = 64
"""The default pool."""
EPISODES = (48, 200, 256, 1000, 1280, 4000)
MOST_EPISODES = (20_000, 100_000)
RANKS = (1, 2, 3, 6, 8, 12, 24, 32, 48, 64, 96, 100, 128, 1000)
MANY_RANKS = (*range(1, 129), 192, 256, 384, 512, 768, 1000, 1024)
BATCHES = (1, 4, 8, 32, 256)
LAYOUTS = ((2, 0, 8), (3, 0, 8), (8, 0, 8), (1, 2, 8), (1, 3, 8), (1, 8, 8), (1, 2, None), (1, 3, None), (2, 3, 8))
"""Ranks, loader workers of each, and batches that are measured at a server."""


@dataclass(frozen=True)
class Counted:
    """One layout."""

    lengths: str
    episodes: int
    ranks: int
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
    workers: int
    """Of each."""
    batch: int | None
    """None: the loader makes the batches."""
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
    return Order(lengths, shuffle=True, seed=0, epoch=0, lanes=SLOTS, pool_segments=SLOTS, group_frames=2)


class WalkedOrder:
    """An order that was gone through once, whatever the number of ranks. See NamedOrder."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._known: dict[bool, _Known] = {}
        self.slots, self.affinity_stop = order.slots, order.affinity_stop

    def __len__(self) -> int:
        return len(self._order)

    def assignment(self, position: int) -> None:
        """All are known."""

    def affinities(self, assignment: None, ranks: int) -> _Known:
        """See NamedOrder."""
        walk, again = (self._order.affinities(self._order.assignment(), ranks) for _ in range(2))
        if walk.keeps_together not in self._known:
            positions = np.arange(len(self))
            self._known[walk.keeps_together] = _Known(walk.at(positions), again.episodes(positions))
        return self._known[walk.keeps_together]


@dataclass(frozen=True)
class _Known:
    affinities: NDArray[np.float64]
    """By position."""
    named: NDArray[np.int64]

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.affinities[positions]

    def episodes(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.named[positions]


@functools.lru_cache(maxsize=1)
def walked_order_of(kind: str, episodes: int) -> WalkedOrder:
    """The same order, asked for again and again."""
    return WalkedOrder(order_of(kind, episodes))


def layout_of(ranks: int, batch: int | None = 32) -> Placement:
    """As a StreamDataset has it."""
    return Placement(0, ranks, batch_size=batch, drop_last=False)


def count(kind: str, episodes: int, ranks: int, batch: int | None = 32) -> Counted:
    """From the order alone."""
    read = readers(walked_order_of(kind, episodes), layout_of(ranks, batch))
    by_rank = np.bincount(read.ranks, minlength=ranks)
    least = (SLOTS + ranks - math.gcd(SLOTS, ranks)) / SLOTS
    fetched, largest = len(read.episodes) / episodes, float(by_rank.max() * ranks / by_rank.sum())
    return Counted(kind, episodes, ranks, batch, fetched, least, largest)


def mix(episodes: int, ranks: int) -> Mixed:
    """Of batches of 32, by slot and in turns."""
    order = order_of("130-170", episodes)
    affinities = order.affinities(order.assignment(), ranks)
    all_episodes = affinities.episodes(np.arange(len(order)))
    found = []
    for step_samples in (32, 0):
        placements = [Placement(rank, ranks, step_samples=step_samples) for rank in range(ranks)]
        taken = [
            all_episodes[list(Remaining().positions(len(order), one, "drop", order))]
            for one in placements[: min(ranks, 8)]
        ]
        starts = range(0, len(taken[0]) - 31, 32)
        batch = np.mean([len(set(part[start : start + 32].tolist())) for part in taken for start in starts])
        found.append(float(batch))
    size = 32 * ranks
    steps = [all_episodes[start : start + size] for start in range(0, len(order) - size + 1, size)]
    together = float(np.mean([len(set(step.tolist())) for step in steps]))
    return Mixed(episodes, ranks, batch=found[0], in_turns=found[1], step=together)


def measure_served(
    directory: Path, layouts: Sequence[tuple[int, int, int | None]], *, episodes: int, length: int, slots: int
) -> list[Served]:
    """Ranks and their workers, with batches of their own or not, read an epoch from a server that counts its bytes."""
    root = directory / "data"
    options: dict[str, Any] = {"cameras": ["observation.images.top"], "width": 320, "height": 240, "texture": 4.4}
    write_dataset(root, episodes=episodes, length=length, episodes_per_video_file=20, distinct_videos=4, **options)
    served = []
    with RangeServer(root, tls=False, max_log=1_000_000) as server:
        alone = _bytes_of(server, 1, 0, 8, slots)
        for world_size, workers, batch in layouts:
            found = _bytes_of(server, world_size, workers, batch, slots)
            clips, everything = (some / one for some, one in zip(found, alone, strict=True))
            lengths = np.full(episodes, length)
            order = Order(lengths, shuffle=True, seed=0, epoch=0, lanes=slots, pool_segments=slots, group_frames=2)
            counted = len(readers(order, layout_of(world_size, batch)).episodes) / episodes
            served.append(Served(world_size, workers, batch, clips, everything, counted))
    return served


def _bytes_of(server: RangeServer, world_size: int, workers: int, batch: int | None, slots: int) -> tuple[int, int]:
    server.reset()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.traffic", "--read", server.url, json.dumps([workers, batch, slots])],
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


def _read(url: str, workers: int, batch: int | None, slots: int) -> int:
    from torch.utils.data import DataLoader

    import asyncfetch.torch

    # Second requests say how busy the machine is.
    fetch = af.FetchConfig(hedge=None)
    config = af.StreamConfig(lanes=slots, pool_segments=slots, decode_threads=8, prefetch_segments=2, fetch=fetch)
    stream = af.Stream(url, config=config)
    if not workers:
        placement = found_placement().in_batches(batch, drop_last=False)
        return sum(1 for _ in source_of(stream).iterate(placement, epoch=0))  # of an epoch that is given none follows
    dataset = asyncfetch.torch.StreamDataset(stream, batch)
    loader = DataLoader(dataset, batch_size=None if batch else 8, num_workers=workers)
    return sum(len(given["index"]) for given in loader)


def show(counted: Sequence[Counted], mixed: Sequence[Mixed], served: Sequence[Served], console: Console) -> None:
    """The tables."""
    kinds = list(dict.fromkeys((one.lengths, one.batch) for one in counted))
    for kind, batch in kinds:
        those = [one for one in counted if (one.lengths, one.batch) == (kind, batch)]
        made = f"batches of {batch}" if batch else "batches made by the loader"
        table = Table(title=f"fetched / needed: lengths {kind}, {made}")
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
        table = Table(
            "ranks",
            "workers",
            "batches",
            "clips / one process's",
            "all bytes",
            "from the order",
            title="by a server's count",
        )
        for one in served:
            made = "the loader's" if one.batch is None else f"of {one.batch}"
            table.add_row(
                str(one.ranks),
                str(one.workers),
                made,
                *(f"{value:.3f}" for value in (one.fetched, one.all_bytes, one.counted)),
            )
        console.print(table)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        url, how = arguments.read
        print(_read(url, *json.loads(how)))
        return
    counted: list[Counted] = []
    mixed: list[Mixed] = []
    served: list[Served] = []
    if arguments.serve:
        with tempfile.TemporaryDirectory() as directory:
            served = measure_served(Path(directory), LAYOUTS, episodes=160, length=30, slots=16)
    else:
        ranks = MANY_RANKS if arguments.every else RANKS
        for kind in ("130-170", "equal", "lognormal"):
            counted += [count(kind, episodes, world_size) for episodes in EPISODES for world_size in ranks]
        counted += [count("130-170", 1280, world_size, batch) for batch in BATCHES for world_size in RANKS]
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

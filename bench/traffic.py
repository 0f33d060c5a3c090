"""What an epoch fetches at many ranks, and how well each is mixed: counted from the order, and by a server.

    python -m bench.traffic                     a minute
    python -m bench.traffic --every             all of 1 to 256 ranks, and up to 100,000 episodes; ten minutes
    python -m bench.traffic --serve             2, 3 and 8 ranks, or loader workers, read from a server that counts

*Fetched* are the frames of all groups of pictures that some rank needs, a group as often as ranks need it, over those
of the epoch. *Distinct* are segments that 32 consecutive samples of a rank come from, and those of a step over the
samples of it, of all ranks.

What the server counts are the bytes of clips, over those that one process takes; and all bytes, of which a dataset as
small as this one has many in what each rank reads for itself: metadata, indexes of videos, rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import asyncfetch as af
from asyncfetch.order.deal import Deal, Left, Leg
from asyncfetch.order.line import Line
from asyncfetch.order.runs import FIRST, Runs
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.stream.ranks import found_placement
from asyncfetch.stream.traffic import frames_fetched
from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["Counted", "Mixed", "Served", "count", "measure_served", "mix"]

POOL = 64
"""The default pool."""
BATCH = 32
EPISODES = (200, 400, 1000, 4000)
MANY_EPISODES = (*EPISODES, 20_000, 100_000)
RANKS = (1, 2, 3, 6, 8, 12, 24, 32, 48, 64, 96, 100, 128, 192, 256, 512, 1024)
MANY_RANKS = (*range(1, 257), 512, 1000, 1024)
MIXED_RANKS = (1, 3, 8, 24, 64, 100)
KINDS = ("equal", "130-170", "lognormal")
GROUPS = (2, 30)
LAYOUTS = ((2, 0, 8), (3, 0, 8), (8, 0, 8), (1, 2, 8), (1, 3, 8), (1, 8, 8), (1, 2, None), (1, 3, None), (2, 3, 8))
"""Ranks, loader workers of each, and batches that are measured at a server."""


@dataclass(frozen=True)
class Counted:
    """The worst of many numbers of ranks."""

    lengths: str
    episodes: int
    group_frames: int
    fetched: float
    ranks: int
    """There."""
    over_bound: float
    """The most that it is beyond all frames, over ranks / segments."""
    fetched_by_20: float
    """The worst where each rank has 20 segments."""


@dataclass(frozen=True)
class Mixed:
    """Distinct segments of 32 samples."""

    ranks: int
    first: float
    """In a rank's first batch: the mean over ranks."""
    middle: float
    """In the batches of the middle half."""
    last: float
    """In those of the last twentieth."""
    step: float
    """In a step of all ranks, over its samples."""


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
    if kind == "lognormal":
        return np.maximum(1, np.exp(rng.normal(math.log(150) - 0.18, 0.6, episodes))).astype(np.int64)
    shortest, longest = map(int, kind.split("-"))
    return rng.integers(shortest, longest + 1, episodes)


def deal_of(line: Line, ranks: int, pool: int = POOL) -> Deal:
    """The first epoch of a line."""
    return Deal(Left((Runs.whole(line, 0, line.total),), np.array([[line.total]])), Leg(ranks, (pool,)))


def line_of(lengths: NDArray[np.int64], group_frames: int) -> Line:
    """At 30 frames a second, with the defaults."""
    return Line(lengths, segment_frames=600, group_frames=group_frames)


def count(kind: str, episodes: int, group_frames: int, ranks: Iterable[int]) -> Counted:
    """From the order alone."""
    line = line_of(lengths_of(kind, episodes), group_frames)
    found = {each: float(frames_fetched(deal_of(line, each), 0).frames.sum()) / line.total for each in ranks}
    worst = max(found, key=lambda each: found[each])
    over = max((fetched - 1) * line.segments / each for each, fetched in found.items())
    by_20 = max((fetched for each, fetched in found.items() if line.segments >= 20 * each), default=1.0)
    return Counted(kind, episodes, group_frames, found[worst], worst, over, by_20)


def mix(ranks: int, kind: str = "90-210", episodes: int = 4000) -> Mixed:
    """Distinct segments, from the order alone."""
    line = line_of(lengths_of(kind, episodes), 2)
    deal = deal_of(line, ranks)
    taken = [_segments(deal, rank) for rank in range(ranks)]
    batches = [
        np.array([len(set(some[start : start + BATCH].tolist())) for start in range(0, len(some) - BATCH + 1, BATCH)])
        for some in taken
    ]
    size = min(map(len, taken))
    steps = [np.concatenate([some[at : at + BATCH] for some in taken]) for at in range(0, size - BATCH + 1, BATCH)]
    return Mixed(
        ranks,
        first=float(np.mean([each[0] for each in batches])),
        middle=float(np.mean([each[len(each) // 4 : 3 * len(each) // 4].mean() for each in batches])),
        last=float(np.mean([each[-max(1, len(each) // 20) :].mean() for each in batches])),
        step=float(np.mean([len(np.unique(each)) / len(each) for each in steps])),
    )


def _segments(deal: Deal, rank: int) -> NDArray[np.int64]:
    """The segment of each sample of a rank."""
    lanes = deal.lanes(rank, 0)
    order, cycles = lanes.visits(np.arange(lanes.total))
    found, before = deal.left.members[0].at(lanes.starts[order] + cycles)
    return lanes.line.index_of(deal.left.members[0].rows[found, FIRST] + before)


def measure_served(
    directory: Path, layouts: Sequence[tuple[int, int, int | None]], *, episodes: int, length: int, pool: int
) -> list[Served]:
    """Ranks and their workers, with batches of their own or not, read an epoch from a server that counts its bytes."""
    root = directory / "data"
    options: dict[str, Any] = {"cameras": ["observation.images.top"], "width": 320, "height": 240, "texture": 4.4}
    write_dataset(root, episodes=episodes, length=length, episodes_per_video_file=20, distinct_videos=4, **options)
    served = []
    line = line_of(np.full(episodes, length), 2)
    with RangeServer(root, tls=False, max_log=1_000_000) as server:
        alone = _bytes_of(server, 1, 0, 8, pool)
        for world_size, workers, batch in layouts:
            found = _bytes_of(server, world_size, workers, batch, pool)
            clips, everything = (some / one for some, one in zip(found, alone, strict=True))
            counted = float(frames_fetched(deal_of(line, world_size, pool), 0).frames.sum()) / line.total
            served.append(Served(world_size, workers, batch, clips, everything, counted))
    return served


def _bytes_of(server: RangeServer, world_size: int, workers: int, batch: int | None, pool: int) -> tuple[int, int]:
    server.reset()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.traffic", "--read", server.url, json.dumps([workers, batch, pool])],
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


def _read(url: str, workers: int, batch: int | None, pool: int) -> int:
    from torch.utils.data import DataLoader

    import asyncfetch.torch

    # Second requests say how busy the machine is.
    fetch = af.FetchConfig(hedge=None)
    config = af.StreamConfig(pool_segments=pool, decode_threads=8, prefetch_segments=2, fetch=fetch)
    stream = af.Stream(url, config=config)
    if not workers:
        placement = replace(found_placement(), batch_size=batch)
        return sum(1 for _ in source_of(stream).iterate(placement, epoch=0))  # of an epoch that is given none follows
    dataset = asyncfetch.torch.StreamDataset(stream, batch)
    loader = DataLoader(dataset, batch_size=None if batch else 8, num_workers=workers)
    return sum(len(given["index"]) for given in loader)


def show(counted: Sequence[Counted], mixed: Sequence[Mixed], served: Sequence[Served], console: Console) -> None:
    """The tables."""
    if counted:
        names = ("lengths", "episodes", "group", "fetched / needed", "ranks", "over 1, / (ranks / segments)", "by 20")
        table = Table(*names, title="the most that any number of ranks fetches")
        for each in counted:
            figures = [f"{value:.3f}" for value in (each.over_bound, each.fetched_by_20)]
            size = (f"{each.episodes:,}", str(each.group_frames))
            table.add_row(each.lengths, *size, f"{each.fetched:.3f}", str(each.ranks), *figures)
        console.print(table)
    if mixed:
        table = Table("ranks", "first", "middle", "last 1/20", "step", title=f"distinct segments of {BATCH} samples")
        for one in mixed:
            table.add_row(str(one.ranks), *(f"{value:.2f}" for value in (one.first, one.middle, one.last, one.step)))
        console.print(table)
    if served:
        table = Table("ranks", "workers", "batches", title="by a server's count")
        for name in ("clips / one process's", "all bytes", "from the order"):
            table.add_column(name)
        for some in served:
            made = "the loader's" if some.batch is None else f"of {some.batch}"
            figures = [f"{value:.3f}" for value in (some.fetched, some.all_bytes, some.counted)]
            table.add_row(str(some.ranks), str(some.workers), made, *figures)
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
            served = measure_served(Path(directory), LAYOUTS, episodes=400, length=30, pool=16)
    else:
        episodes, ranks = (MANY_EPISODES, MANY_RANKS) if arguments.every else (EPISODES, RANKS)
        counted = [count(kind, some, group, ranks) for group in GROUPS for kind in KINDS for some in episodes]
        mixed = [mix(each) for each in MIXED_RANKS]
    show(counted, mixed, served, Console())
    if arguments.json:
        arguments.json.write_text(
            json.dumps([*map(asdict, counted), *map(asdict, mixed), *map(asdict, served)], indent=1)
        )


if __name__ == "__main__":
    main()

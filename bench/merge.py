"""What a merge costs: beside merging pairs in rounds, and beside adding one dataset after the other.

    python -m bench.merge              64 members, 5 repeats, 1 and 2 workers; some minutes
    python -m bench.merge --quick      8 members, 3 repeats
    python -m bench.merge --members 8 --episodes 1000 --repeats 3 --processes --only "local, flat"
                                       much work, in threads and in processes

All ways read and write with the same code, and only the order differs. "flat" is ``merge_datasets`` of all members.
"pairs" merges neighbours, then what that gave, round by round, the pairs of a round side by side. "one by one" merges
the first two, then that and the third, as LeRobot's ``aggregate_datasets`` grows its files. "threads" and "processes"
(``--processes``) are "flat" in nothing but these, whatever ``merge_datasets`` would choose. Each repeat runs all ways
in a new order; "flat" also with members on a server that gives each stream a rate. Times are of the wall; the CPU's, of
this process and those that it started and with the server's, say how much others took of it. Bytes written are those
that the process handed to the system; what processes tell each other is among them.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import psutil

from asyncfetch.config import FetchConfig
from asyncfetch.merge import merge_datasets
from asyncfetch.merge.executor import InProcess, OnThisMachine
from asyncfetch.testing import RangeServer, write_dataset
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.merge.executor import Executor

MIB = 1024**2
RATE_BYTES = 4 * MIB
FIRST_BYTE_SECONDS = 0.05
"""Of the server."""


async def flat(
    workers: int, members: list[str], out: Path, fetch: FetchConfig | None, executor: Executor | None = None
) -> None:
    """All at once."""
    await merge_datasets(members, out, workers=workers, fetch=fetch, executor=executor)


async def pairs(workers: int, members: list[str], out: Path, fetch: FetchConfig | None) -> None:
    """Rounds of pairs, with a barrier behind each."""
    level = members
    limiter = anyio.CapacityLimiter(workers)
    while len(level) > 2:
        targets = [out.parent / f"round-{len(level)}-{at}" for at in range(0, len(level), 2)]

        async def merge(at: int, target: Path, level: list[str]) -> None:
            async with limiter:
                await merge_datasets(level[2 * at : 2 * at + 2], target, workers=1, fetch=fetch)

        async with anyio.create_task_group() as tasks:
            for at, target in enumerate(targets):
                tasks.start_soon(merge, at, target, level)
        level = [str(target) for target in targets]
    await merge_datasets(level, out, workers=workers, fetch=fetch)


async def one_by_one(members: list[str], out: Path, fetch: FetchConfig | None) -> None:
    """Each to what there is."""
    grown = members[0]
    for number, member in enumerate(members[1:]):
        target = out.parent / f"grown-{number}"
        await merge_datasets([grown, member], target, workers=1, fetch=fetch)
        grown = str(target)
    await anyio.Path(grown).rename(out)


Way = Callable[[list[str], Path, FetchConfig | None], Awaitable[None]]


def ways(workers: Sequence[int], *, processes: bool = False) -> dict[str, Way]:
    """All of them, by name; with ``processes`` also what ``merge_datasets`` chooses between."""
    named = {count: f"{count} worker{'s' if count > 1 else ''}" for count in workers}
    return {
        **{f"flat, {name}": partial(flat, count) for count, name in named.items()},
        **{
            f"flat, {count} {what}": partial(flat, count, executor=executor)
            for count in workers
            if processes and count > 1
            for what, executor in (("threads", InProcess()), ("processes", OnThisMachine(pays=lambda *_: True)))
        },
        **{f"pairs, {name}": partial(pairs, count) for count, name in named.items()},
        "one by one": one_by_one,
    }


def spent_seconds() -> float:
    """CPU of this process and of those that it had and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def written_bytes() -> int:
    """What this process, and those that it had, have handed to write calls."""
    counters = psutil.Process().io_counters()
    return int(counters.write_chars)


@dataclass(frozen=True)
class Run:
    """One way, once."""

    seconds: float
    cpu_seconds: float
    written_to_output: float


async def measure(
    root: Path, count: int, episodes: int, repeats: int, workers: Sequence[int], processes: bool, only: str
) -> list[Row]:
    """All ways for local members and for served ones, or those that begin with ``only``, interleaved.

    Times over "flat" are over the first of that name in the same repeat.
    """
    make = partial(write_dataset, codec="h264", width=160, height=128, texture=0.3, length=40, distinct_videos=1)
    for number in range(count):
        await anyio.to_thread.run_sync(
            partial(make, root / f"members/{number:03d}", episodes=episodes, seed=number, tasks=(f"{number % 5}", "b"))
        )
    taken: dict[tuple[str, str], list[Run]] = {}
    named = ways(workers, processes=processes)
    async with RangeServer(
        root / "members", bytes_per_second=RATE_BYTES, first_byte_seconds=FIRST_BYTE_SECONDS
    ) as server:
        slow = FetchConfig(ca_file=server.ca_file, trust_env=False)
        places: dict[str, tuple[str, FetchConfig | None]] = {
            "local": (str(root / "members"), None),
            "served": (server.url, slow),
        }
        cells = [(place, way) for place in places for way in named if place == "local" or "flat" in way]
        cells = [cell for cell in cells if ", ".join(cell).startswith(only)]
        for _ in range(repeats):
            for place, way in random.sample(cells, len(cells)):
                base, fetch = places[place]
                members = [f"{base}/{number:03d}" for number in range(count)]
                taken.setdefault((place, way), []).append(await timed(named[way], members, root / "work", fetch))
    rows = []
    for place, way in cells:
        own, first = taken[place, way], taken[place, next(iter(named))]
        ratios = [one.seconds / other.seconds for one, other in zip(own, first, strict=True)]
        rows += [
            Row.of(f"{place}, {way}: time", "s", [one.seconds for one in own]),
            Row.of(f"{place}, {way}: CPU", "s", [one.cpu_seconds for one in own]),
            Row.of(f"{place}, {way}: time / flat", "x", ratios),
            Row.of(f"{place}, {way}: written / output", "x", [one.written_to_output for one in own]),
        ]
    return rows


async def timed(way: Way, members: list[str], work: Path, fetch: FetchConfig | None) -> Run:
    """What it took, and bytes written over those of the result."""
    await anyio.Path(work).mkdir()
    started, cpu, before = time.perf_counter(), spent_seconds(), written_bytes()
    await way(members, work / "out", fetch)
    seconds, cpu_seconds = time.perf_counter() - started, spent_seconds() - cpu
    written = written_bytes() - before
    size = sum(path.stat().st_size for path in (work / "out").rglob("*") if path.is_file())
    await anyio.to_thread.run_sync(shutil.rmtree, work)
    return Run(seconds, cpu_seconds, written / size)


def parse_counts(text: str) -> list[int]:
    """The numbers in "1,2"."""
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="8 members, 3 repeats")
    parser.add_argument("--members", type=int)
    parser.add_argument("--episodes", type=int, default=1, help="of a member, 40 frames each, two cameras")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--workers", type=parse_counts, default=[1, 2], help="such as 1,2")
    parser.add_argument("--processes", action="store_true", help="also in threads alone, and in processes alone")
    parser.add_argument("--only", choices=("local", "local, flat", "served"), default="", help="of the rows")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    asked = parser.parse_args(arguments)
    count = asked.members or (8 if asked.quick else 64)
    repeats = asked.repeats or (3 if asked.quick else 5)
    with tempfile.TemporaryDirectory(prefix="asyncfetch-bench-") as directory:
        measured = partial(measure, Path(directory), count, asked.episodes, repeats, asked.workers)
        rows = anyio.run(measured, asked.processes, asked.only)
    show(rows, as_json=asked.json)


if __name__ == "__main__":
    main()

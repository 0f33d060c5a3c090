"""What a small range costs: this engine beside a bare asyncio loop, obstore and aiohttp, and the steps that it takes.

    python -m bench.small_ranges [--sizes 16,64] [--concurrency 16,64] [--only plain] [--repeats 9] [--json]

The bare loop writes a request, and counts the bytes of an answer of 206: what is above it is the engine's. All by turns
at one nginx, as bench.engine measures; medians over the repeats. A client that isn't installed is left out.

The steps are those of one warm range with nothing else in flight, the shortest of several: functions and files of
asyncfetch that it enters, how often it does (a coroutine that goes on is entered again), its frames on the stack where
that is deepest, and calls of Python functions of all packages.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
from rich.console import Console
from rich.table import Table

import asyncfetch as af
from bench import engine
from bench.nginx import NginxServer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

__all__ = ["Steps", "steps_of"]

CLIENTS = ("asyncfetch", "asyncio", "obstore", "aiohttp")
SIZES, CONCURRENCIES = (16, 64), (16, 64)
WARMING_RANGES, COUNTED_RANGES = 64, 20
REQUESTS = 4000
"""In one repeat."""
PACKAGE = str(Path(af.__file__).parent)


@dataclass(frozen=True, order=True)
class Steps:
    """What one range enters."""

    calls: int
    functions: int
    files: int
    frames: int
    python_calls: int


class _Profile:
    """Counts what the thread enters in its block."""

    def __init__(self) -> None:
        self._entered: Counter[tuple[str, str]] = Counter()
        self._python_calls = self._frames = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._enter)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        self._python_calls += 1
        if frame.f_code.co_filename.startswith(PACKAGE):
            self._entered[frame.f_code.co_filename, frame.f_code.co_qualname] += 1
            self._frames = max(self._frames, _own_frames(frame))

    def steps(self) -> Steps:
        """What was counted."""
        files = {file for file, _ in self._entered}
        return Steps(self._entered.total(), len(self._entered), len(files), self._frames, self._python_calls)


def _own_frames(frame: FrameType | None) -> int:
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return count


async def steps_of(config: af.FetchConfig, url: str, range_bytes: int) -> Steps:
    """Return what a warm range of the object takes, the least of several: a chunk may come in two."""
    found = []
    async with af.Fetcher(config) as fetcher:
        last = (await fetcher.stat(url)).size - range_bytes
        starts = [last * number // COUNTED_RANGES for number in range(COUNTED_RANGES)]
        for number in range(WARMING_RANGES):
            await fetcher.fetch(url, starts[number % COUNTED_RANGES], starts[number % COUNTED_RANGES] + range_bytes)
        for start in starts:
            with _Profile() as profile:
                await fetcher.fetch(url, start, start + range_bytes)
            found.append(profile.steps())
    return min(found)


def measure(plan: engine.Plan, directory: Path) -> tuple[list[engine.Row], dict[str, Steps]]:
    """The rows of all cases, and the steps by "plain" or "TLS" and size."""
    rows = [row for case in engine.measure(plan, directory) for row in case]
    steps = {}
    for tls in plan.tls:
        with NginxServer(directory, tls=tls) as server:
            config = af.FetchConfig(ca_file=server.ca_file, trust_env=False)
            for size in plan.sizes:
                steps[_name(tls, size)] = anyio.run(steps_of, config, f"{server.url}/object", size)
    return rows, steps


def _name(tls: bool, range_bytes: int) -> str:
    return f"{'TLS' if tls else 'plain'}, {range_bytes // engine.KIB} KiB"


def show(rows: Sequence[engine.Row], steps: dict[str, Steps], console: Console) -> None:
    """Print both tables."""
    table = Table("", "at a time", "client", "us of CPU a range", "ours / this", "lowest-highest", "ranges/s")
    for row in rows:
        [ours] = [one for one in rows if one.client == "asyncfetch" and engine.case_of(one) == engine.case_of(row)] or [
            row
        ]
        low, high = (row.range_bytes / engine.GIB * 1e6 * spread for spread in row.cpu_spread)
        table.add_row(
            _name(row.tls, row.range_bytes),
            str(row.concurrency),
            row.client,
            f"{row.cpu_microseconds_per_request:.0f}",
            f"{ours.cpu_microseconds_per_request / row.cpu_microseconds_per_request:.2f}",
            f"{low:.0f}-{high:.0f}",
            f"{row.requests_per_second:.0f}",
            end_section=row.client == rows[-1].client,
        )
    console.print(table)
    table = Table("one warm range", "own functions", "files", "own calls", "own frames", "calls of all packages")
    for name, one in steps.items():
        figures = (one.functions, one.files, one.calls, one.frames, one.python_calls)
        table.add_row(name, *map(str, figures))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="KiB, with commas; default: %(default)s")
    parser.add_argument("--concurrency", default=",".join(map(str, CONCURRENCIES)), help="default: %(default)s")
    parser.add_argument("--only", choices=("plain", "tls"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="in one repeat; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    asked = parser.parse_args(arguments)
    plan = engine.Plan(
        clients=[name for name in CLIENTS if engine.is_installed(name)],
        sizes=[int(size) * engine.KIB for size in asked.sizes.split(",")],
        concurrencies=[int(number) for number in asked.concurrency.split(",")],
        tls=[False, True] if asked.only is None else [asked.only == "tls"],
        repeats=asked.repeats,
        repeat_bytes=engine.GIB,
        max_requests=asked.requests,
    )
    shared_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="asyncfetch-bench-", dir=shared_memory) as directory:
        rows, steps = measure(plan, Path(directory))
    if asked.json:
        print(
            json.dumps({"rows": list(map(asdict, rows)), "steps": {name: asdict(one) for name, one in steps.items()}})
        )
    else:
        show(rows, steps, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()

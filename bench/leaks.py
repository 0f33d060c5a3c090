"""What a hundred thousand requests leave behind.

    python -m bench.leaks

Asks nginx for 100,000 ranges of 16 KiB over HTTPS, every tenth of them cancelled on its way, and prints what this
process holds after each tenth of them: open files, tasks, threads, objects and blocks of Python, resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import psutil
from rich.console import Console
from rich.table import Table

import asyncfetch as af
from bench.nginx import NginxServer

if TYPE_CHECKING:
    from collections.abc import Sequence

OBJECT_BYTES = 16 * 1024 * 1024
RANGE_BYTES = 16 * 1024
REQUESTS = 100_000
CONCURRENT = 64
STEPS = 10
CANCELLED_SECONDS = 0.002
"""A tenth of what an answer takes with so many under way."""


@dataclass(frozen=True)
class Held:
    """What this process holds when nothing is under way."""

    requests: int
    files: int
    tasks: int
    threads: int
    objects: int
    blocks: int
    rss_mib: float
    garbage: int

    @classmethod
    def now(cls, requests: int) -> Self:
        """After so many requests."""
        gc.collect()
        process = psutil.Process()
        return cls(
            requests=requests,
            files=process.num_fds(),
            tasks=len(asyncio.all_tasks()),
            threads=threading.active_count(),
            objects=len(gc.get_objects()),
            blocks=sys.getallocatedblocks(),
            rss_mib=round(process.memory_info().rss / 2**20, 1),
            garbage=len(gc.garbage),
        )


async def ask(fetcher: af.Fetcher, url: str, requests: int) -> None:
    """Asks for so many ranges, 64 at a time, and gives up every tenth of them on its way."""
    left = iter(range(requests))

    async def work() -> None:
        for number in left:
            start = number * 7_919 % (OBJECT_BYTES - RANGE_BYTES)
            with anyio.move_on_after(CANCELLED_SECONDS if number % 10 == 9 else None):
                view = await fetcher.fetch(url, start, start + RANGE_BYTES)
                assert len(view) == RANGE_BYTES

    async with anyio.create_task_group() as group:
        for _ in range(CONCURRENT):
            group.start_soon(work)


async def measure(requests: int, *, tls: bool) -> tuple[list[Held], float]:
    """What is held after each tenth of the requests, the first once one has warmed up, and requests/s."""
    with tempfile.TemporaryDirectory() as root:
        await anyio.Path(root, "x").write_bytes(bytes(OBJECT_BYTES))
        with NginxServer(Path(root), tls=tls) as server:
            async with af.Fetcher(af.FetchConfig(ca_file=server.ca_file, trust_env=False)) as fetcher:
                await ask(fetcher, f"{server.url}/x", requests // STEPS)
                held = [Held.now(0)]
                began = time.perf_counter()
                for step in range(1, STEPS + 1):
                    await ask(fetcher, f"{server.url}/x", requests // STEPS)
                    held.append(Held.now(step * (requests // STEPS)))
                rate = requests / (time.perf_counter() - began)
            held.append(Held.now(requests))
    return held, rate


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--plain", action="store_true", help="http instead of https")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    held, rate = anyio.run(lambda: measure(options.requests, tls=not options.plain))
    if options.json:
        print(json.dumps({"requests_per_second": rate, "held": [asdict(row) for row in held]}))
        return
    table = Table(*asdict(held[0]), title=f"{rate:,.0f} requests/s; the last row is after closing")
    for row in held:
        table.add_row(*(f"{value:,}" for value in asdict(row).values()))
    Console().print(table)


if __name__ == "__main__":
    main()

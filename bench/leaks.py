"""What a hundred thousand requests leave behind.

    python -m bench.leaks [--of web s3 hub fsspec]

Asks for 100,000 ranges of 16 KiB, every tenth of them cancelled on its way, and prints what this process holds after
each tenth of them: open files, tasks, threads, objects and blocks of Python, resident memory. Of nginx over HTTPS: a
plain url, one of S3, signed, and one of a Hub; and of fsspec's memory. Each in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import psutil
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console
from rich.table import Table

import asyncfetch as af
from bench.engine_client import KEYS
from bench.nginx import NginxServer

if TYPE_CHECKING:
    from collections.abc import Sequence

OBJECT_BYTES = 16 * 1024 * 1024
RANGE_BYTES = 16 * 1024
REQUESTS = 100_000
CONCURRENT = 64
STEPS = 10
AT_HUB = f"datasets/org/name/resolve/{'0' * 40}"
URLS = {
    "web": "{}/x",
    "s3": "s3://bucket/x",
    "hub": f"hf://datasets/org/name@{'0' * 40}/x",
    "fsspec": "memory://leaks/x",
}
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


async def measure(of: str, requests: int, *, tls: bool) -> tuple[list[Held], float]:
    """What is held after each tenth of the requests, the first once one has warmed up, and requests/s."""
    with tempfile.TemporaryDirectory() as root:
        for directory in ("", "bucket", AT_HUB):
            path = anyio.Path(root, directory)
            await path.mkdir(parents=True, exist_ok=True)
            await (path / "x").write_bytes(bytes(OBJECT_BYTES))
        MemoryFileSystem().pipe_file("/leaks/x", bytes(OBJECT_BYTES))
        with NginxServer(Path(root), tls=tls) as server:
            url = URLS[of].format(server.url)
            config = af.FetchConfig(
                ca_file=server.ca_file,
                trust_env=False,
                s3=af.S3Config(endpoint_url=server.url, region="us-east-1"),
                hub_endpoint=server.url,
            )
            async with af.Fetcher(config) as fetcher:
                await ask(fetcher, url, requests // STEPS)
                held = [Held.now(0)]
                began = time.perf_counter()
                for step in range(1, STEPS + 1):
                    await ask(fetcher, url, requests // STEPS)
                    held.append(Held.now(step * (requests // STEPS)))
                rate = requests / (time.perf_counter() - began)
            held.append(Held.now(requests))
    return held, rate


def run(of: str, requests: int, tls: bool) -> tuple[list[Held], float]:
    """In a process of its own."""
    os.environ.update(KEYS)
    return anyio.run(lambda: measure(of, requests, tls=tls))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--plain", action="store_true", help="http instead of https")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--of", nargs="+", choices=URLS, default=[*URLS])
    options = parser.parse_args(arguments)
    found = {}
    for of in options.of:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            held, rate = found[of] = process.submit(run, of, options.requests, not options.plain).result()
        if options.json:
            continue
        table = Table(*asdict(held[0]), title=f"{of}: {rate:,.0f} requests/s; the last row is after closing")
        for row in held:
            table.add_row(*(f"{value:,}" for value in asdict(row).values()))
        Console().print(table)
    if options.json:
        rows = {
            of: {"requests_per_second": rate, "held": [asdict(row) for row in held]}
            for of, (held, rate) in found.items()
        }
        print(json.dumps(rows))


if __name__ == "__main__":
    main()

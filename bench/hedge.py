"""What second requests for late answers bring and cost: with and without them, interleaved.

    python -m bench.hedge [--requests 3000] [--concurrency 32] [--repeats 5] [--json]

Ranges of 4 KiB from a RangeServer in a process of its own, over connections that are there, on three kinds of host:

even    every first byte after 50 ms
late    one first byte in a hundred takes 20 times as long
slow    it was even when the client learned its times, and then every first byte takes 100 ms and more: 100 on average,
        exponentially, as they do where a queue is the reason

Times are those of whole calls; medians over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from asyncfetch import FetchConfig, Fetcher, HedgeConfig
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Iterator

RANGE_BYTES = 4096
LEARNED_FROM = 320
"""Requests before those that are measured: they open the connections, and the client learns the host's times."""
FIRST_BYTE_SECONDS = 0.05
LATE_SHARE, LATE_SECONDS = 0.01, 1.0
KINDS = ("even", "late", "slow")
SERVER = f"""
import random, sys
from asyncfetch.testing import Fault, RangeServer

def fault(request):
    if request.path == "/slow":
        return Fault.slow(first_byte_seconds=0.1 + random.expovariate(10))
    if request.path == "/late" and random.random() < {LATE_SHARE}:
        return Fault.slow(first_byte_seconds={LATE_SECONDS})

content = {{name: bytes(1 << 20) for name in {KINDS}}}
with RangeServer(content, fault=fault, first_byte_seconds={FIRST_BYTE_SECONDS}, max_log=1) as server:
    print(server.url, server.ca_file, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Run:
    """One client's calls in one repeat."""

    p50_seconds: float
    p99_seconds: float
    p999_seconds: float
    extra_share: float
    """Second requests, by all others."""
    won_share: float
    """Of the second requests."""


@contextmanager
def range_server() -> Iterator[tuple[str, str]]:
    """Its url and the file of its authority."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        url, ca_file = child.stdout.readline().split()
        yield url, ca_file


async def time_calls(fetcher: Fetcher, url: str, count: int, concurrency: int) -> list[float]:
    """Seconds of each call, sorted."""
    times: list[float] = []
    starts = iter(range(count))

    async def worker() -> None:
        for start in starts:
            began = time.perf_counter()
            await fetcher.fetch(url, start, start + RANGE_BYTES)
            times.append(time.perf_counter() - began)

    async with anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(worker)
    return sorted(times)


async def measure(url: str, ca_file: str, kind: str, hedge: HedgeConfig | None, arguments: argparse.Namespace) -> Run:
    """One run of a new client."""
    config = FetchConfig(ca_file=ca_file, trust_env=False, hedge=hedge, max_requests_per_host=2 * arguments.concurrency)
    async with Fetcher(config) as fetcher:
        await time_calls(fetcher, f"{url}/even", LEARNED_FROM, arguments.concurrency)
        before = fetcher.statistics()
        times = await time_calls(fetcher, f"{url}/{kind}", arguments.requests, arguments.concurrency)
        after = fetcher.statistics()
    hedges, wins = after.hedges - before.hedges, after.hedge_wins - before.hedge_wins
    p50, p99, p999 = (times[int(share * len(times))] for share in (0.5, 0.99, 0.999))
    return Run(p50, p99, p999, hedges / arguments.requests, wins / max(hedges, 1))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    ways = {"without second requests": None, "with": HedgeConfig()}
    runs: dict[tuple[str, str], list[Run]] = {(kind, name): [] for kind in arguments.kinds.split(",") for name in ways}
    with range_server() as (url, ca_file):
        for _ in range(arguments.repeats):
            for (kind, name), found in runs.items():
                found.append(asyncio.run(measure(url, ca_file, kind, ways[name], arguments)))
    rows = []
    for (kind, name), found in runs.items():
        rows += [
            Row.of(f"{kind}, {name}: p50", "ms", [1e3 * run.p50_seconds for run in found]),
            Row.of(f"{kind}, {name}: p99", "ms", [1e3 * run.p99_seconds for run in found]),
            Row.of(f"{kind}, {name}: p99.9", "ms", [1e3 * run.p999_seconds for run in found]),
            Row.of(f"{kind}, {name}: second requests", "%", [100 * run.extra_share for run in found]),
            Row.of(f"{kind}, {name}: those that came first", "%", [100 * run.won_share for run in found]),
        ]
    show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()

"""What one bad host costs the others, and how late the event loop is while all decode threads are busy.

    python -m bench.isolation                   a few requests at a time
    python -m bench.isolation --at-once 128     512 requests in flight

Four HTTPS servers in a process of their own; the time of some ranges from three of them while the fourth stalls, or
says 503, over the time right before or behind that while nobody asks the fourth anything. The ranges are small, and the
servers' first bytes take the longer the more are asked for at a time, so that hardly anything else takes time: a
quarter of a core. Medians of the ratios. Then the delay of a callback on the loop during a pass over clips in memory,
alone and while the four servers are asked for as many ranges at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
from rich.console import Console
from rich.progress import track

import asyncfetch as af
from asyncfetch.cli.bench import preload, time_samples
from asyncfetch.testing import Fault, RangeServer
from bench.data import bench_dataset
from bench.rows import Row, show
from bench.throughput import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

AT_ONCE = 4
"""Requests of a host, where nothing else is asked for."""
RANGE_BYTES = 4 * 1024
FIRST_BYTE_SECONDS = 0.0125
"""For each request that a host is asked at a time."""
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
BAD = {"stalls": Fault.stall(after_bytes=0), "says 503": Fault.status(503)}
LAG_SAMPLES = 1_500


def serve(first_byte_seconds: float, connection: Connection) -> None:
    """Serve on all hosts until the other end closes: sends their (url, authority), takes what the last one does."""
    fault: Fault | None = None
    content = {"/x": bytes(1 << 20)}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(RangeServer(content, host=host, first_byte_seconds=first_byte_seconds))
            for host in HOSTS[:-1]
        ]
        servers.append(
            stack.enter_context(
                RangeServer(content, host=HOSTS[-1], first_byte_seconds=first_byte_seconds, fault=lambda _: fault)
            )
        )
        connection.send([(f"{server.url}/x", Path(server.ca_file or "").read_text()) for server in servers])
        with suppress(EOFError):
            while True:
                fault = BAD.get(connection.recv())
                connection.send(None)


class Hosts:
    """Four hosts that run in a process of their own, so that they take no time of the client's loop."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            process = context.Process(target=serve, args=(FIRST_BYTE_SECONDS * self._at_once, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(self._connection.close)
            theirs.close()
            self.urls, authorities = zip(*self._connection.recv(), strict=True)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ca_file = directory / "all.pem"
            ca_file.write_text("".join(authorities))
            self.config = af.FetchConfig(
                ca_file=str(ca_file), max_requests_per_host=self._at_once, learn_limit=False, max_span_bytes=0
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def let_last(self, fault: str | None) -> None:
        """What becomes of requests of the last host: one of BAD, or nothing."""
        self._connection.send(fault)
        self._connection.recv()


async def time_good_hosts(hosts: Hosts, fault: str | None, ranges: int) -> float:
    """Seconds that so many ranges of each of the first three take, while the last is asked for as many and is bad."""
    good, bad = hosts.urls[:-1], hosts.urls[-1]
    hosts.let_last(None)
    async with af.Fetcher(hosts.config) as fetcher, anyio.create_task_group() as group:

        async def ask_in_vain() -> None:
            with suppress(af.FetchError):
                await fetcher.fetch_many(ranges_of([bad], ranges))

        # Connections are opened by all alike.
        await fetcher.fetch_many(ranges_of(hosts.urls, hosts.config.max_requests_per_host))
        if fault is not None:
            hosts.let_last(fault)
            group.start_soon(ask_in_vain)
        started = time.perf_counter()
        await fetcher.fetch_many(ranges_of(good, ranges))
        seconds = time.perf_counter() - started
        group.cancel_scope.cancel()
    return seconds


def ranges_of(urls: Sequence[str], count: int) -> list[af.ByteRange]:
    """So many distinct ranges of each object, of all in turns."""
    return [af.ByteRange(url, at, at + RANGE_BYTES) for at in range(count) for url in urls]


def measure_isolation(hosts: Hosts, ranges: int, repeats: int) -> dict[str, list[float]]:
    """Times with a bad host over those without, by what is bad about it."""
    ratios: dict[str, list[float]] = {name: [] for name in BAD}
    for _ in track(range(repeats), "hosts", console=Console(stderr=True), transient=True):
        for name in random.sample(list(BAD), len(BAD)):
            pair = [name, None]
            random.shuffle(pair)  # neither always comes first
            times = {fault: anyio.run(time_good_hosts, hosts, fault, ranges) for fault in pair}
            ratios[name].append(times[name] / times[None])
    return ratios


async def measure_loop_lag(setting: Setting, hosts: Hosts | None = None) -> list[float]:
    """Milliseconds that callbacks came late on the loop, during a pass over clips in memory.

    With hosts, while all that these may be asked for at a time is in flight.
    """
    lags: list[float] = []
    async with AsyncExitStack() as stack:
        dataset = await stack.enter_async_context(af.open_dataset(setting.url, config=setting.config))
        await preload(dataset, set(range(len(dataset.episodes))))

        async def ask(fetcher: af.Fetcher, urls: Sequence[str], at_once: int) -> None:
            while True:
                await fetcher.fetch_many(ranges_of(urls, 4 * at_once))

        async def watch() -> None:
            loop = asyncio.get_running_loop()
            while True:
                due = loop.time() + 0.002
                await anyio.sleep_until(due)
                lags.append(1e3 * (loop.time() - due))

        async with anyio.create_task_group() as group:
            if hosts is not None:
                fetcher = await stack.enter_async_context(af.Fetcher(hosts.config))
                at_once = hosts.config.max_requests_per_host
                hosts.let_last(None)
                await fetcher.fetch_many(ranges_of(hosts.urls, at_once))  # opens the connections
                group.start_soon(ask, fetcher, hosts.urls, at_once)
            group.start_soon(watch)
            await time_samples(dataset, LAG_SAMPLES)
            group.cancel_scope.cancel()
    return sorted(lags)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="requests of each host (default: 4)")
    parser.add_argument("--waves", type=int, default=10, help="of requests of each run (default: 10)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    setting = Setting(str(bench_dataset()), None, 0.0, af.StreamConfig(pool_segments=16))
    with Hosts(arguments.at_once) as hosts:
        isolation = measure_isolation(hosts, arguments.waves * arguments.at_once, arguments.repeats)
        in_flight = len(HOSTS) * arguments.at_once
        lags = {
            "alone": anyio.run(measure_loop_lag, setting),
            f"beside {in_flight} ranges in flight": anyio.run(measure_loop_lag, setting, hosts),
        }
    rows = [
        Row.of(f"three hosts while the fourth {name}: time / alone", "x", ratios, "<= 1.05")
        for name, ratios in isolation.items()
    ]
    rows += [
        Row.of(f"lateness of the loop while all decode threads are busy, {name}: p{share}", "ms", [value])
        for name, each in lags.items()
        for share, value in ((share, each[share * (len(each) - 1) // 100]) for share in (50, 99))
    ]
    show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()

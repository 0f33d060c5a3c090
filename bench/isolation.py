"""What one bad host costs the others, and how late the event loop is while all decode threads are busy.

    python -m bench.isolation

Four HTTPS servers; the time of 120 ranges from three of them while the fourth stalls, or says 503, over the time right
before or behind that while nobody asks the fourth anything. The ranges are small and few at a time, so that hardly
anything but the servers' first bytes takes time: a quarter of a core. Medians of the ratios. Then the delay of a
callback on the loop during a pass over clips in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import track

import asyncfetch as af
from asyncfetch.testing import Fault, RangeServer
from bench.data import bench_dataset
from bench.throughput import Setting, preload, time_samples

RANGES, RANGE_BYTES = 40, 4 * 1024
AT_ONCE = 4
"""Of a host."""
FIRST_BYTE_SECONDS = 0.05
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
BAD = {"stalls": Fault.stall(after_bytes=0), "says 503": Fault.status(503)}
LAG_SAMPLES = 1_500


async def time_good_hosts(config: af.FetchConfig, good: list[str], bad: str | None) -> float:
    """Seconds that the good hosts' ranges take, while the bad host is asked for as many."""
    async with af.Fetcher(config) as fetcher, anyio.create_task_group() as group:

        async def ask_in_vain(url: str) -> None:
            with suppress(af.FetchError):
                await fetcher.fetch_many(ranges_of(url))

        for url in good:  # connections are opened by all alike
            await fetcher.fetch(url, 0, 1)
        if bad is not None:
            group.start_soon(ask_in_vain, bad)
        started = time.perf_counter()
        await fetcher.fetch_many([one for ranges in zip(*map(ranges_of, good), strict=True) for one in ranges])
        seconds = time.perf_counter() - started
        group.cancel_scope.cancel()
    return seconds


def ranges_of(url: str) -> list[af.ByteRange]:
    """Distinct ranges of one object."""
    return [af.ByteRange(url, at, at + RANGE_BYTES) for at in range(RANGES)]


def measure_isolation(repeats: int) -> dict[str, list[float]]:
    """Times with a bad host over those without, in ascending order, by what is bad about it."""
    faults: dict[str, Fault | None] = {"fault": None}
    content = {"/x": bytes(RANGES + RANGE_BYTES)}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            stack.enter_context(RangeServer(content, host=host, first_byte_seconds=FIRST_BYTE_SECONDS))
            for host in HOSTS[:-1]
        ]
        bad = stack.enter_context(RangeServer(content, host=HOSTS[-1], fault=lambda _: faults["fault"]))
        authorities = directory / "all.pem"
        authorities.write_text("".join(Path(server.ca_file or "").read_text() for server in [*servers, bad]))
        config = af.FetchConfig(
            ca_file=str(authorities), max_requests_per_host=AT_ONCE, learn_limit=False, max_span_bytes=0
        )
        good = [f"{server.url}/x" for server in servers]

        def seconds(url: str | None) -> float:
            return anyio.run(time_good_hosts, config, good, url)

        ratios: dict[str, list[float]] = {name: [] for name in BAD}
        for _ in track(range(repeats), "hosts", console=Console(stderr=True), transient=True):
            for name in random.sample(list(BAD), len(BAD)):
                faults["fault"] = BAD[name]
                pair = [f"{bad.url}/x", None]
                random.shuffle(pair)  # neither always comes first
                times = {url: seconds(url) for url in pair}
                ratios[name].append(times[f"{bad.url}/x"] / times[None])
    return {name: sorted(values) for name, values in ratios.items()}


async def measure_loop_lag(setting: Setting) -> list[float]:
    """Milliseconds that callbacks came late on the loop, during a pass over clips in memory."""
    lags: list[float] = []
    async with af.open_dataset(setting.url, config=setting.config) as dataset:
        await preload(dataset, set(range(len(dataset.episodes))))

        async def watch() -> None:
            loop = asyncio.get_running_loop()
            while True:
                due = loop.time() + 0.002
                await anyio.sleep_until(due)
                lags.append(1e3 * (loop.time() - due))

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await time_samples(dataset, LAG_SAMPLES)
            group.cancel_scope.cancel()
    return sorted(lags)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    arguments = parser.parse_args()
    isolation = measure_isolation(arguments.repeats)
    config = af.StreamConfig(lanes=16, pool_episodes=16)
    lags = anyio.run(measure_loop_lag, Setting(str(bench_dataset()), None, 0.0, config))
    p50, p99 = (lags[int(share * (len(lags) - 1))] for share in (0.5, 0.99))
    if arguments.json:
        print(json.dumps({"isolation": isolation, "loop_lag_milliseconds": {"p50": p50, "p99": p99}}))
        return
    for name, ratios in isolation.items():
        median, low, high = statistics.median(ratios), ratios[0], ratios[-1]
        print(f"three hosts while the fourth {name}: {median:.3f} x their time alone ({low:.3f}-{high:.3f})")
    print(f"loop lag while all decode threads are busy: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


if __name__ == "__main__":
    main()

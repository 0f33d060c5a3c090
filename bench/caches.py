"""What the caches cost: a hit in memory, a range from the disk cache, tiny objects, the staging pool, locks.

    python -m bench.caches

The reading back is `read_back`'s, which says how, as `tiny_objects` does; the staging pool is `cache_pool`'s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import anyio
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import asyncfetch as af
from asyncfetch.cache.disk import DiskStore, DiskTier
from asyncfetch.cache.disk.folder import SharedCounter
from asyncfetch.cache.disk.layout import VersionFile
from asyncfetch.ranges import ObjectInfo
from asyncfetch.testing import RangeServer
from bench import cache_pool, read_back, tiny_objects
from bench.rows import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KIB, MIB = 1024, 1024 * 1024
HITS = 20_000
HIT_BYTES = 1 * MIB
WRITERS, WRITES = 4, 100
EVICTED_FILES = 5_000
STAGED_FILES = 400
STAGING_GOALS = {"reads a file": "1"}
VERSION = VersionFile.of(ObjectInfo("https://data.example.org/a", 128 * MIB, '"tag"'))


# Hits in memory.


def measure_hits(repeats: int) -> list[Row]:
    """Microseconds for a hit, and bytes that it copies."""
    with RangeServer({"a": bytes(HIT_BYTES)}, tls=False) as server:
        fetches, leases, copied = anyio.run(_measure_hits, f"{server.url}/a", repeats)
    return [
        Row.of("fetch of a range that is held", "us", fetches),
        Row.of("lease of a range that is held, and its release", "us", leases),
        Row.of(f"bytes copied by a hit on {HIT_BYTES // MIB} MiB", "bytes", copied, "0"),
    ]


async def _measure_hits(url: str, repeats: int) -> tuple[list[float], list[float], list[float]]:
    fetches, leases, copied = [], [], []
    async with af.Fetcher() as fetcher, af.ByteCache(fetcher, max_bytes=2 * HIT_BYTES) as cache:
        first = np.frombuffer(await cache.fetch(url, 0, HIT_BYTES), np.uint8)
        for _ in range(repeats):
            started = time.perf_counter()
            for _ in range(HITS):
                await cache.fetch(url, 0, HIT_BYTES)
            fetches.append((time.perf_counter() - started) / HITS * 1e6)
            started = time.perf_counter()
            for _ in range(HITS):
                lease = cache.try_lease(url, 0, HIT_BYTES)
                assert lease is not None
                lease.release()
            leases.append((time.perf_counter() - started) / HITS * 1e6)
            again = np.frombuffer(await cache.fetch(url, 0, HIT_BYTES), np.uint8)
            copied.append(0.0 if again.ctypes.data == first.ctypes.data else float(HIT_BYTES))
    return fetches, leases, copied


# Locks.


def measure_locks(directory: Path, repeats: int) -> list[Row]:
    """How long the account's lock is held while several write, and what an eviction of many files takes."""
    longest, typical, evictions = [], [], []
    for repeat in range(repeats):
        held: list[float] = []
        store = DiskStore(DiskTier(directory / f"locks-{repeat}", 256 * MIB, min_free_bytes=0))
        with _timed(held):
            _write_side_by_side(store)
        longest.append(max(held) * 1e6)
        typical.append(statistics.median(held) * 1e6)
        for number in range(EVICTED_FILES):
            store.write(VERSION, number * 10, memoryview(bytes(10)))
        evictions.append(_seconds(lambda: store.folder.prune(0)) * 1e6 / EVICTED_FILES)  # noqa: B023  called here
        store.close()
    return [
        Row.of(f"lock of the account, {WRITERS} writing at once: held, median", "us", typical),
        Row.of(f"lock of the account, {WRITERS} writing at once: held, longest", "us", longest),
        Row.of("eviction, during which nobody waits, per file", "us", evictions),
    ]


def _write_side_by_side(store: DiskStore) -> None:
    content = memoryview(bytes(64 * KIB))

    def write(writer: int) -> None:
        for number in range(WRITES):
            store.write(VERSION, (writer * WRITES + number) * len(content), content)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def _timed(held: list[float]) -> Iterator[None]:
    """Note in ``held`` the seconds between getting the account's lock and giving it back."""
    locked = SharedCounter._locked

    @contextmanager
    def timed(account: SharedCounter) -> Iterator[None]:
        with locked(account):
            begun = time.perf_counter()
            try:
                yield
            finally:
                held.append(time.perf_counter() - begun)

    with mock.patch.object(SharedCounter, "_locked", timed):
        yield


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where the files go; the system's temporary one by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    asked = parser.parse_args(argv)
    console = Console(stderr=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=asked.directory) as temporary:
        directory = Path(temporary)
        parts: list[Callable[[], list[Row]]] = [
            lambda: measure_hits(asked.repeats),
            lambda: read_back.measure_store(directory, asked.repeats),
            lambda: read_back.measure_reader(directory, asked.repeats),
            lambda: measure_locks(directory, asked.repeats),
            lambda: tiny_objects.measure(directory),
        ]
        for part in track(parts, "measuring", console=console, transient=True):
            rows += part()
    staging = cache_pool.run(STAGED_FILES, asked.repeats)
    if asked.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "staging": staging}))
        return
    table = Table(
        title=f"caches: medians of {asked.repeats} repeats, of tiny objects over their number; lowest-highest"
    )
    for column in ("question", "figure", "goal"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.question, f"{row.median:.2f} {row.unit} ({row.lowest:.2f}-{row.highest:.2f})", row.goal)
    for name, value in staging.items():
        table.add_row(f"staging: {name}", f"{value:,.2f}", STAGING_GOALS.get(name, ""))
    Console().print(table)


if __name__ == "__main__":
    main()

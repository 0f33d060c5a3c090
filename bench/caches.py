"""What the caches cost: a hit in memory, a range from the disk tier, the staging pool, how long anybody holds a lock.

    python -m bench.caches

Ranges of a clip's length are read back, in a shuffled order, from the disk tier and from a plain file that is open
already, in turns, into the same memory, of the kind that fetched bytes land in. First from files that the system has in
its page cache since they were written: the worst case for the ratio, because no disk is waited for, and a file written
in one go lies there in larger pieces than one that was read. Then from the disk, and from the page cache again. There
are block sizes other than the tier's own for comparison, and what a checksum alone adds to a plain file: no reader that
never returns a wrong byte can do with less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import anyio
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import asyncfetch as af
from asyncfetch.cache.disk import DiskReader, DiskStore, DiskTier
from asyncfetch.cache.disk import layout as disk_layout
from asyncfetch.cache.disk.account import Account
from asyncfetch.cache.disk.layout import Version
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.testing import RangeServer
from bench import cache_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KIB, MIB = 1024, 1024 * 1024
OBJECT_BYTES = 128 * MIB
RANGE_BYTES = 1_300 * KIB
RANGES = 64
HITS = 20_000
HIT_BYTES = 1 * MIB
BLOCKS = {"256 KiB": 256 * KIB, "1 MiB": MIB, "4 MiB": 4 * MIB}
WRITERS, WRITES = 4, 100
EVICTED_FILES = 5_000
STAGED_FILES = 400
STAGING_GOALS = {"reads a file": "1"}
VERSION = Version.of(ObjectInfo("https://data.example.org/a", OBJECT_BYTES, '"tag"'))


@dataclass(frozen=True)
class Row:
    """One figure over the repeats."""

    question: str
    unit: str
    median: float
    lowest: float
    highest: float
    goal: str = ""

    @classmethod
    def of(cls, question: str, unit: str, values: list[float], goal: str = "") -> Row:
        """The row of these repeats."""
        return cls(question, unit, statistics.median(values), min(values), max(values), goal)


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


# Reading back.


def clip_ranges() -> list[tuple[int, int]]:
    """Ranges of about a clip's length that begin and end anywhere within blocks; together one, but shuffled."""
    generator = random.Random(0)
    cuts = [0]
    for _ in range(RANGES):
        cuts.append(cuts[-1] + generator.randrange(RANGE_BYTES // 2, RANGE_BYTES * 3 // 2))
    ranges = list(pairwise(cuts))
    generator.shuffle(ranges)
    return ranges


def measure_read_back(directory: Path, repeats: int) -> list[Row]:
    """Seconds to read ranges back over those that a plain file takes, by block size."""
    content = np.random.default_rng(0).bytes(OBJECT_BYTES)
    ranges = clip_ranges()
    (directory / "plain").write_bytes(content)
    place = reused_memory()
    what = f"ranges of {RANGE_BYTES // KIB} KiB"
    rows = []
    plain = os.open(directory / "plain", os.O_RDONLY)
    checksum = disk_layout.load_checksum()

    def read_plain(start: int, view: memoryview) -> None:
        _require(os.preadv(plain, [view], start) == len(view))

    def read_and_check(start: int, view: memoryview) -> None:
        read_plain(start, view)
        checksum(view)

    def read_back(start: int, view: memoryview) -> None:
        _require(not store.read(VERSION, start, view))

    floor = [_ratio(read_and_check, read_plain, ranges, place) for _ in range(repeats + 1)][1:]
    rows.append(Row.of(f"{what} from a plain file, and their checksum / without it", "x", floor))
    for name, block_bytes in BLOCKS.items():
        with (
            mock.patch.object(disk_layout, "BLOCK_BYTES", block_bytes),
            _filled(directory / name, ranges, content) as store,
        ):
            warm = [_ratio(read_back, read_plain, ranges, place) for _ in range(repeats + 1)][1:]
        rows.append(Row.of(f"{what} from files of up to {name} / a plain file", "x", warm, "1.2"))
    cold, warm = [], []
    with _filled(directory / "cold", ranges, content) as store:
        for _ in range(repeats):
            _drop_from_page_cache(directory)
            cold.append(_ratio(read_back, read_plain, ranges, place))
            warm.append(_ratio(read_back, read_plain, ranges, place))
    os.close(plain)
    rows.append(Row.of(f"{what} from the tier / a plain file, both from the disk", "x", cold, "1.2"))
    rows.append(Row.of("the same a second time, from the page cache", "x", warm, "1.2"))
    return rows


def reused_memory() -> memoryview:
    """Long enough for any of the ranges; its pages are there."""
    place = MemoryPool(0).take(2 * RANGE_BYTES)
    place[:] = 0
    return place.data


@contextmanager
def _filled(directory: Path, ranges: list[tuple[int, int]], content: bytes) -> Iterator[DiskStore]:
    """A tier that holds the ranges."""
    store = DiskStore(DiskTier(directory, 2 * OBJECT_BYTES, min_free_bytes=0))
    try:
        for start, stop in ranges:
            store.write(VERSION, start, memoryview(content)[start:stop])
        os.sync()
        yield store
    finally:
        store.close()


def _drop_from_page_cache(directory: Path) -> None:
    """All files below. A file system in memory keeps them."""
    os.sync()  # what isn't written yet can't be dropped
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _ratio(
    work: Callable[[int, memoryview], None],
    reference: Callable[[int, memoryview], None],
    ranges: list[tuple[int, int]],
    place: memoryview,
) -> float:
    """Seconds of one over those of the other, in turns, so that both meet the same machine."""
    seconds = {work: 0.0, reference: 0.0}
    for number, (start, stop) in enumerate(ranges):
        turns = (work, reference) if number % 2 else (reference, work)
        for read in turns:  # the second one finds the place in the processor's caches
            begun = time.perf_counter()
            read(start, place[: stop - start])
            seconds[read] += time.perf_counter() - begun
    return seconds[work] / seconds[reference]


def measure_reader(directory: Path, repeats: int) -> list[Row]:
    """The same on a loop, since they were written, over reading a plain file in a thread."""
    return [
        Row.of(
            "ranges read back on an event loop / a plain file in a thread",
            "x",
            anyio.run(_reader, directory, repeats),
            "1.2",
        )
    ]


async def _reader(directory: Path, repeats: int) -> list[float]:
    content = np.random.default_rng(0).bytes(OBJECT_BYTES)
    ratios = []
    with RangeServer({"a": content}, tls=False) as server:
        url, ranges, place = f"{server.url}/a", clip_ranges(), reused_memory()
        tier = DiskTier(directory / "reader", 2 * OBJECT_BYTES, min_free_bytes=0)
        (directory / "written").write_bytes(content)  # as the tier's files will be
        plain = os.open(directory / "written", os.O_RDONLY)
        async with af.Fetcher() as fetcher, DiskReader(fetcher, tier) as reader:
            for repeat in range(repeats + 1):
                seconds = [0.0, 0.0]
                for start, stop in ranges:
                    view = place[: stop - start]
                    begun = time.perf_counter()
                    await reader.fetch_into(url, start, stop, view)
                    between = time.perf_counter()
                    await anyio.to_thread.run_sync(os.preadv, plain, [view], start)
                    seconds[0] += between - begun
                    seconds[1] += time.perf_counter() - between
                if repeat:  # the first one fetched
                    ratios.append(seconds[0] / seconds[1])
        os.close(plain)
    return ratios


# Locks.


def measure_locks(directory: Path, repeats: int) -> list[Row]:
    """How long the account's lock is held while several write, and what an eviction of many files takes."""
    longest, typical, evictions = [], [], []
    for repeat in range(repeats):
        held: list[float] = []
        store = DiskStore(DiskTier(directory / f"locks-{repeat}", 2 * OBJECT_BYTES, min_free_bytes=0))
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
    locked = Account._locked

    @contextmanager
    def timed(account: Account) -> Iterator[None]:
        with locked(account):
            begun = time.perf_counter()
            try:
                yield
            finally:
                held.append(time.perf_counter() - begun)

    with mock.patch.object(Account, "_locked", timed):
        yield


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _require(done: bool) -> None:
    if not done:
        raise RuntimeError("a range that was written isn't there")


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
            lambda: measure_read_back(directory, asked.repeats),
            lambda: measure_reader(directory, asked.repeats),
            lambda: measure_locks(directory, asked.repeats),
        ]
        for part in track(parts, "measuring", console=console, transient=True):
            rows += part()
    staging = cache_pool.run(STAGED_FILES, asked.repeats)
    if asked.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "staging": staging}))
        return
    table = Table(title=f"caches: medians of {asked.repeats} repeats, lowest-highest")
    for column in ("question", "figure", "goal"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.question, f"{row.median:.2f} {row.unit} ({row.lowest:.2f}-{row.highest:.2f})", row.goal)
    for name, value in staging.items():
        table.add_row(f"staging: {name}", f"{value:,.2f}", STAGING_GOALS.get(name, ""))
    Console().print(table)


if __name__ == "__main__":
    main()

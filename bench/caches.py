"""What the caches cost: a hit in memory, a range from the disk cache, tiny objects, the staging pool, locks.

    python -m bench.caches

The reading back is `read_back`'s, which says how.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
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
from asyncfetch.cache.staging import CachePool, NoCachePool, SourceInfo, SplitStore
from asyncfetch.ranges import ObjectInfo
from asyncfetch.testing import RangeServer
from bench import read_back
from bench.rows import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from asyncfetch.cache.staging import Lazy, StagingPool

T = TypeVar("T")

KIB, MIB = 1024, 1024 * 1024
HITS = 20_000
HIT_BYTES = 1 * MIB
WRITERS, WRITES = 4, 100
EVICTED_FILES = 5_000
STAGED_FILES = 400
FILE_BYTES = 256 * KIB
HANDLES_PER_FILE = 2
READ_SECONDS = 0.01
WINDOW = 64
"""Handles between asking and picking up: what a shuffle buffer holds."""
OBJECTS = 50_000
OBJECT_BYTES = 100
STEPS = 10
"""Parts of the tiny objects, each of which gives a figure."""
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


# The staging pool.


class SlowStore(SplitStore[bytes]):
    """Files of one content, each of which takes a while. Counts reads."""

    path = "slow"

    def __init__(self, file_bytes: int, read_seconds: float) -> None:
        self.reads = 0
        self._content = random.Random(0).randbytes(file_bytes)
        self._read_seconds = read_seconds

    def read_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        """The content, after a while."""
        self.reads += 1
        time.sleep(self._read_seconds)
        return self._content, SourceInfo(self.path, name)

    def decode(self, raw: bytes, name: str) -> bytes:
        """The bytes themselves."""
        return raw

    def size(self, name: str) -> int:
        """All alike."""
        return len(self._content)


class TimedLock:
    """A lock that notes how long it was held each time; a Condition can be made of it."""

    def __init__(self) -> None:
        self.held_seconds: list[float] = []
        self._lock = threading.Lock()
        self._since = 0.0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As threading.Lock has it."""
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._since = time.perf_counter()
        return taken

    def release(self) -> None:
        """As threading.Lock has it."""
        self.held_seconds.append(time.perf_counter() - self._since)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def consume(pool: StagingPool, store: SlowStore, files: int) -> float:
    """Files a second with a window between asking and picking up."""
    names = [str(number % files) for number in range(files * HANDLES_PER_FILE)]
    # The handles of a file are asked for near each other, as those of a video's samples are.
    names.sort(key=lambda name: int(name) // 16)
    held: deque[Any] = deque()
    started = time.perf_counter()
    for name in names:
        held.append(pool.get_lazy(store, name))
        if len(held) > WINDOW:
            held.popleft().get()
    while held:
        held.popleft().get()
    return files / (time.perf_counter() - started)


def measure_staging(files: int, repeats: int, workers: int = 8) -> dict[str, float]:
    """All figures, medians over interleaved repeats.

    Handles are asked for in a shuffled order, several for each file, over a store that takes a while for a read.
    Beside it each handle reads for itself when it is picked up.
    """
    staged, direct, reads, held = [], [], [], []
    for _ in range(repeats):
        store = SlowStore(FILE_BYTES, READ_SECONDS)
        with tempfile.TemporaryDirectory() as parent, CachePool(parent, workers=workers) as pool:
            lock: Any = TimedLock()
            engine = pool._engine()
            engine._lock, engine._changed = lock, threading.Condition(lock)
            staged.append(consume(pool, store, files))
            reads.append(store.reads / files)
            held += lock.held_seconds
        direct.append(consume(NoCachePool(), SlowStore(FILE_BYTES, READ_SECONDS), files // 8))
    held.sort()
    return {
        "staged files/s": statistics.median(staged),
        "each handle by itself, files/s": statistics.median(direct),
        "staged / by itself": statistics.median(one / other for one, other in zip(staged, direct, strict=True)),
        "reads a file": statistics.median(reads),
        "lock held, p50 us": 1e6 * held[len(held) // 2],
        "lock held, p99 us": 1e6 * held[len(held) * 99 // 100],
        "lock held, p99.9 us": 1e6 * held[len(held) * 999 // 1000],
    }


# Many tiny objects, on disk and staged.


def measure_tiny_objects(directory: Path) -> list[Row]:
    """Microseconds an object: over and over while their number grows, so that the range tells what growing does."""
    return [*_measure_tier(directory), *_measure_pool(directory)]


def _measure_tier(directory: Path) -> list[Row]:
    store = DiskStore(DiskTier(directory / "tiny", 1024 * OBJECTS * OBJECT_BYTES, min_free_bytes=0))
    versions = [_version(number) for number in range(OBJECTS)]
    content, place = memoryview(bytes(OBJECT_BYTES)), memoryview(bytearray(OBJECT_BYTES))
    unknown = [_version(-number) for number in range(1, 101)]
    writes, reads, misses, looks = [], [], [], []
    for low in range(0, OBJECTS, OBJECTS // STEPS):
        part = versions[low : low + OBJECTS // STEPS]
        writes.append(_us_each(lambda version: store.write(version, 0, content), part))
        reads.append(_us_each(lambda version: store.read(version, 0, place), part))
        misses.append(_us_each(lambda version: store.read(version, 0, place), unknown))
        looks.append(_us_each(lambda _: store.folder.survey(), [None]) / (low + len(part)))
    deletion = _us_each(lambda _: store.folder.prune(0), [None]) / OBJECTS
    store.close()
    among = f"objects of {OBJECT_BYTES} bytes on disk, up to {OBJECTS:,} of them:"
    return [
        Row.of(f"{among} a write", "us", writes),
        Row.of(f"{among} a read", "us", reads),
        Row.of(f"{among} a miss", "us", misses),
        Row.of(f"{among} looking at all, for each", "us", looks),
        Row.of(f"{among} deleting all, for each", "us", [deletion]),
    ]


def _measure_pool(directory: Path) -> list[Row]:
    store = SlowStore(OBJECT_BYTES, 0.0)
    asked, taken = [], []
    handles: deque[Lazy[bytes]] = deque()
    with tempfile.TemporaryDirectory(dir=directory) as parent, CachePool(parent) as pool:
        for low in range(0, OBJECTS, OBJECTS // STEPS):
            part = [str(number) for number in range(low, low + OBJECTS // STEPS)]
            asked.append(_us_each(lambda name: handles.append(pool.get_lazy(store, name)), part))
            taken.append(
                _us_each(lambda _: handles.popleft().get(), part[::2])
            )  # the oldest; as many stay until the end
    what = f"files of {OBJECT_BYTES} bytes staged, up to {OBJECTS // 2:,} at a time:"
    return [Row.of(f"{what} asking for one", "us", asked), Row.of(f"{what} picking one up", "us", taken)]


def _version(number: int) -> VersionFile:
    return VersionFile.of(ObjectInfo(f"https://data.example.org/{number}", OBJECT_BYTES, '"tag"'))


def _us_each(work: Callable[[T], object], items: Sequence[T]) -> float:
    begun = time.perf_counter()
    for item in items:
        work(item)
    return (time.perf_counter() - begun) / len(items) * 1e6


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
            lambda: measure_tiny_objects(directory),
        ]
        for part in track(parts, "measuring", console=console, transient=True):
            rows += part()
    staging = measure_staging(STAGED_FILES, asked.repeats)
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

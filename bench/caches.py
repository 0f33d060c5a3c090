"""What the caches cost: a hit in memory, a range from the disk cache, the staging pool and its lock.

    python -m bench.caches

The reading back is `read_back`'s, which says how.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from rich.console import Console
from rich.progress import track

import asyncfetch as af
from asyncfetch.cache.staging import CachePool, NoCachePool, SourceInfo, SplitStore
from asyncfetch.testing import RangeServer
from bench import read_back
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from asyncfetch.cache.staging import StagingPool

KIB, MIB = 1024, 1024 * 1024
HITS = 20_000
HIT_BYTES = 1 * MIB
STAGED_FILES = 400
FILE_BYTES = 256 * KIB
HANDLES_PER_FILE = 2
READ_SECONDS = 0.01
WINDOW = 64
"""Handles between asking and picking up: what a shuffle buffer holds."""


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


def measure_staging(files: int, repeats: int, workers: int = 8) -> list[Row]:
    """The pool's figures over interleaved repeats; the lock's over all times that it was held.

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
    ratios = [one / other for one, other in zip(staged, direct, strict=True)]
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    return [
        Row.of("staging: files/s / those of handles that read for themselves", "x", ratios),
        Row.of("staging: reads a file", "", reads, "1"),
        *(
            Row.of(f"staging: its lock held, {name}", "us", [1e6 * held[int(len(held) * share)]])
            for name, share in shares.items()
        ),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where the files go; the system's temporary one by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    asked = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=asked.directory) as temporary:
        directory = Path(temporary)
        parts: list[Callable[[], list[Row]]] = [
            lambda: measure_hits(asked.repeats),
            lambda: read_back.measure_store(directory, asked.repeats),
            lambda: read_back.measure_reader(directory, asked.repeats),
            lambda: measure_staging(STAGED_FILES, asked.repeats),
        ]
        for part in track(parts, "measuring", console=Console(stderr=True), transient=True):
            rows += part()
    show(rows, as_json=asked.json)


if __name__ == "__main__":
    main()

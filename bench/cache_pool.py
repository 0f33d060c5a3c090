"""The staging pool: files a second, reads a file, and how long its lock is held.

    python -m bench.cache_pool

Handles are asked for in a shuffled order with a window between asking and picking up, several for each file, over a
store in memory that takes a while for a read. Beside it the reference: each handle reads for itself when it is picked
up (NoCachePool). ``run`` is for bench.caches.
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
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from asyncfetch.cache.staging import CachePool, NoCachePool, SourceInfo, SplitStore

if TYPE_CHECKING:
    from types import TracebackType

    from asyncfetch.cache.staging import StagingPool

__all__ = ["run"]

KIB = 1024
FILE_BYTES = 256 * KIB
HANDLES_PER_FILE = 2
READ_SECONDS = 0.01
WINDOW = 64
"""Handles between asking and picking up: what a shuffle buffer holds."""


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


def run(files: int = 400, repeats: int = 5, workers: int = 8) -> dict[str, float]:
    """All figures, medians over interleaved repeats."""
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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    arguments = parser.parse_args()
    figures = run(arguments.files, arguments.repeats, arguments.workers)
    if arguments.json:
        print(json.dumps(figures))
        return
    table = Table("figure", "value", title=f"{FILE_BYTES // KIB} KiB files, {1e3 * READ_SECONDS:g} ms a read")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

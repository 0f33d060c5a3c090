"""What many tiny objects cost a disk cache and a staging pool: whether the last of them cost more than the first.

Each figure is taken over and over while their number grows, so its range tells what growing does. ``measure`` is for
bench.caches.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from asyncfetch.cache.disk import DiskStore, DiskTier
from asyncfetch.cache.disk.layout import VersionFile
from asyncfetch.cache.staging import CachePool
from asyncfetch.ranges import ObjectInfo
from bench.cache_pool import SlowStore
from bench.rows import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncfetch.cache.staging import Lazy

__all__ = ["measure"]

T = TypeVar("T")

OBJECTS = 50_000
OBJECT_BYTES = 100
STEPS = 10
"""Parts of them, each of which gives a figure."""


def measure(directory: Path) -> list[Row]:
    """Microseconds an object."""
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

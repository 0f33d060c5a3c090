"""Ranges read back from the disk cache, beside those of a plain file.

Ranges of a clip's length are read back, in a shuffled order, from the disk cache and from plain files, in turns.

The goal is about a plain file read as a program without a tier does it: the file is opened, read into memory of its own
that is kept for a while, and closed. There are two such programs. One keeps each range in a file and calls
``Path.read_bytes``; the other has the whole object as one file and reads the range out of it. Both are measured from
the page cache, where all lies since it was written, and from the disk; and on an event loop, where a plain file is read
in a thread.

The rest is what the tier itself takes, which no program has to compare: all goes into the same few warm pages. The page
cache is the worst case for such a ratio, because no disk is waited for. A checksum alone is added to a plain file: no
reader of files that never returns a wrong byte can do with less.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import anyio
import numpy as np

import asyncfetch as af
from asyncfetch.cache.disk import DiskReader, DiskStore, DiskTier
from asyncfetch.cache.disk import layout as disk_layout
from asyncfetch.cache.disk.layout import VersionFile
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.memory_pool import MemoryPool, allocate
from asyncfetch.testing import RangeServer
from bench.rows import Row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

__all__ = ["measure_reader", "measure_store"]

KIB, MIB = 1024, 1024 * 1024
OBJECT_BYTES = 128 * MIB
RANGE_BYTES = 1_300 * KIB
RANGES = 64
KEPT = 16
"""Results that a program holds at a time, so that the next one goes into memory of its own: about what a ByteCache, or
a pool of samples, has in it between the reading of a clip and its end."""
VERSION = VersionFile.of(ObjectInfo("https://data.example.org/a", OBJECT_BYTES, '"tag"'))


def clip_ranges() -> list[tuple[int, int]]:
    """Ranges of about a clip's length that begin and end anywhere within blocks; together one, but shuffled."""
    generator = random.Random(0)
    cuts = [0]
    for _ in range(RANGES):
        cuts.append(cuts[-1] + generator.randrange(RANGE_BYTES // 2, RANGE_BYTES * 3 // 2))
    ranges = list(pairwise(cuts))
    generator.shuffle(ranges)
    return ranges


def measure_store(directory: Path, repeats: int) -> list[Row]:
    """Seconds to read ranges back over those that a plain file takes."""
    content = np.random.default_rng(0).bytes(OBJECT_BYTES)
    ranges = clip_ranges()
    rows = _measure_as_programs_do(directory / "own", ranges, content, repeats)
    path = directory / "plain"
    path.write_bytes(content)
    place = reused_memory()
    plain = os.open(path, os.O_RDONLY)
    checksum = disk_layout.load_checksum()

    def read_plain(start: int, stop: int) -> memoryview:
        view = place[: stop - start]
        _require(os.preadv(plain, [view], start) == len(view))
        return view

    def read_and_check(start: int, stop: int) -> None:
        checksum(read_plain(start, stop))

    def open_and_read(start: int, stop: int) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        _require(os.preadv(descriptor, [place[: stop - start]], start) == stop - start)
        os.close(descriptor)

    def read_back(start: int, stop: int) -> None:
        _require(not store.read(VERSION, start, place[: stop - start]))

    checking = [_ratio(read_and_check, read_plain, ranges) for _ in range(repeats + 1)][1:]
    cold = []
    with _filled(directory / "opened", ranges, content) as store:
        opened = [_ratio(read_back, open_and_read, ranges) for _ in range(repeats + 1)][1:]
        for _ in range(repeats):
            _drop_from_page_cache(directory)
            cold.append(_ratio(read_back, open_and_read, ranges))
    os.close(plain)
    return [
        *rows,
        Row.of("into the same memory: the tier / a plain file opened for each range", "x", opened),
        Row.of("into the same memory: a plain file and a checksum / the plain file alone", "x", checking),
        Row.of("into the same memory: the tier / a plain file, both from the disk", "x", cold),
    ]


def _measure_as_programs_do(directory: Path, ranges: list[tuple[int, int]], content: bytes, repeats: int) -> list[Row]:
    """What the goal is about."""
    files, whole = directory / "files", directory / "whole"
    files.mkdir(parents=True)
    whole.write_bytes(content)
    for start, stop in ranges:
        (files / str(start)).write_bytes(content[start:stop])

    def read_back(start: int, stop: int) -> memoryview:
        view = allocate(stop - start)
        _require(not store.read(VERSION, start, view))
        return view

    def read_file(start: int, stop: int) -> bytes:
        found = (files / str(start)).read_bytes()
        _require(len(found) == stop - start)
        return found

    plain: dict[str, Callable[[int, int], bytes]] = {
        "Path.read_bytes of a file with just them": read_file,
        "open, seek and read of a file with all": partial(read_own, whole),
    }
    rows = []
    with _filled(directory / "tier", ranges, content) as store:
        for name, read in plain.items():
            warm = [_ratio(read_back, read, ranges, kept=KEPT) for _ in range(repeats + 1)][1:]
            rows.append(Row.of(f"{RANGE_BYTES // KIB} KiB read back / {name}: page cache", "x", warm, "1.2"))
        for name, read in plain.items():
            cold = []
            for _ in range(repeats):
                _drop_from_page_cache(directory)
                cold.append(_ratio(read_back, read, ranges, kept=KEPT))
            rows.append(Row.of(f"{RANGE_BYTES // KIB} KiB read back / {name}: disk", "x", cold, "1.2"))
    return rows


def read_own(path: Path, start: int, stop: int) -> bytes:
    """A range of a plain file, in memory of its own, as whoever has no tier reads it."""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        content = file.read(stop - start)
    _require(len(content) == stop - start)
    return content


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
    work: Callable[[int, int], object],
    reference: Callable[[int, int], object],
    ranges: list[tuple[int, int]],
    *,
    kept: int = 0,
) -> float:
    """Seconds of one over those of the other, in turns, so that both meet the same machine.

    Args:
        work: Reads a range, and returns what it read it into.
        reference: Likewise.
        ranges: What to read.
        kept: How many of the last results of each to hold on to.
    """
    seconds = {work: 0.0, reference: 0.0}
    results: dict[object, deque[object]] = {work: deque(maxlen=kept), reference: deque(maxlen=kept)}
    for number, (start, stop) in enumerate(ranges):
        turns = (work, reference) if number % 2 else (reference, work)
        for read in turns:  # the second one finds the same memory in the processor's caches
            begun = time.perf_counter()
            result = read(start, stop)
            seconds[read] += time.perf_counter() - begun
            results[read].append(result)
    return seconds[work] / seconds[reference]


def measure_reader(directory: Path, repeats: int) -> list[Row]:
    """The same on a loop, since they were written, over reading a plain file in a thread."""
    own, warm = anyio.run(_reader, directory, repeats)
    return [
        Row.of("ByteCache.fetch of them / open, seek and read in a thread: page cache", "x", own, "1.2"),
        Row.of("into the same memory, on an event loop: the tier / a plain file in a thread", "x", warm),
    ]


async def _reader(directory: Path, repeats: int) -> tuple[list[float], list[float]]:
    content = np.random.default_rng(0).bytes(OBJECT_BYTES)
    own, warm = [], []
    with RangeServer({"a": content}, tls=False) as server:
        url, ranges, place = f"{server.url}/a", clip_ranges(), reused_memory()
        tier = DiskTier(directory / "reader", 2 * OBJECT_BYTES, min_free_bytes=0)
        path = directory / "written"
        path.write_bytes(content)  # as the tier's files will be
        plain = os.open(path, os.O_RDONLY)
        async with (
            af.Fetcher() as fetcher,
            DiskReader(fetcher, tier) as reader,
            af.ByteCache(fetcher, max_bytes=KEPT * RANGE_BYTES, disk=tier) as cache,  # the ranges are 4 times as much
        ):

            async def read_plain(start: int, stop: int) -> None:
                await anyio.to_thread.run_sync(os.preadv, plain, [place[: stop - start]], start)

            async def read_back(start: int, stop: int) -> None:
                await reader.fetch_into(url, start, stop, place[: stop - start])

            async def read_plain_as_own(start: int, stop: int) -> bytes:
                return await anyio.to_thread.run_sync(read_own, path, start, stop)

            async def read_back_as_own(start: int, stop: int) -> None:
                await cache.fetch(url, start, stop)  # it keeps as many itself

            for repeat in range(repeats + 1):
                into_own = await _async_ratio(read_back_as_own, read_plain_as_own, ranges, kept=KEPT)
                into_same = await _async_ratio(read_back, read_plain, ranges)
                if repeat:  # the first one fetched
                    own.append(into_own)
                    warm.append(into_same)
        os.close(plain)
    return own, warm


async def _async_ratio(
    work: Callable[[int, int], Awaitable[object]],
    reference: Callable[[int, int], Awaitable[object]],
    ranges: list[tuple[int, int]],
    *,
    kept: int = 0,
) -> float:
    """As ``_ratio``."""
    seconds = {work: 0.0, reference: 0.0}
    results: dict[object, deque[object]] = {work: deque(maxlen=kept), reference: deque(maxlen=kept)}
    for number, (start, stop) in enumerate(ranges):
        turns = (work, reference) if number % 2 else (reference, work)
        for read in turns:
            begun = time.perf_counter()
            result = await read(start, stop)
            seconds[read] += time.perf_counter() - begun
            results[read].append(result)
    return seconds[work] / seconds[reference]


def _require(done: bool) -> None:
    if not done:
        raise RuntimeError("a range that was written isn't there")

"""Byte ranges of your own, without any dataset: fetched once, cached, and worked on in threads.

python examples/own_ranges.py https://host/file.bin       or a path
python examples/own_ranges.py                             a file made and served here

The file is taken as records of equal size. Two passes in different orders compute the checksum of each; the second one
finds all records in the cache. Needs nothing but the bare package, and `asyncfetch[testing]` to serve its own file.
"""

from __future__ import annotations

import argparse
import random
import zlib
from typing import TYPE_CHECKING

import anyio

import asyncfetch as af
from asyncfetch.decode import DecodePool

if TYPE_CHECKING:
    from collections.abc import Sequence

KIB, MIB = 1024, 1024 * 1024


async def checksums(cache: af.ByteCache, pool: DecodePool, ranges: Sequence[af.ByteRange]) -> list[int]:
    """The CRC-32 of each range, in their order; computed as they arrive, by as many threads as there are cores."""
    sums = [0] * len(ranges)

    async def compute(index: int, record: memoryview) -> None:
        sums[index] = await pool.run(zlib.crc32, record)

    async with cache.fetch_stream(ranges) as records, anyio.create_task_group() as group:
        async for index, record in records:
            group.start_soon(compute, index, record)
    return sums


async def two_passes(url: str, ca_file: str | None, record_bytes: int) -> None:
    """Read every record twice, in random orders."""
    config = af.FetchConfig(ca_file=ca_file)
    async with af.Fetcher(config) as fetcher, af.ByteCache(fetcher, max_bytes=256 * MIB) as cache:
        size = (await fetcher.stat(url)).size
        starts = range(0, size, record_bytes)
        ranges = [af.ByteRange(url, start, min(start + record_bytes, size)) for start in starts]
        pool = DecodePool()
        for number in (1, 2):
            random.shuffle(ranges)
            sums = await checksums(cache, pool, ranges)
            held, fetched = cache.statistics(), fetcher.statistics()
            print(
                f"pass {number}: {len(sums)} records, checksum of all {sum(sums) % 2**32:08x}, so far "
                f"{fetched.requests} requests, {fetched.bytes / MIB:.1f} MiB, {held.hits} hits, {held.misses} misses"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a file where none is named, and read it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="URL or path of any file")
    parser.add_argument("--ca-file", help="PEM file of the authorities to trust instead of the system's")
    parser.add_argument("--record-bytes", type=int, default=256 * KIB)
    options = parser.parse_args(arguments)
    if options.record_bytes < 1:
        parser.error(f"--record-bytes must be at least 1, not {options.record_bytes}")
    if options.url is not None:
        anyio.run(two_passes, options.url, options.ca_file, options.record_bytes)
        return
    with af.testing.RangeServer({"/records.bin": random.Random(0).randbytes(32 * MIB)}) as server:
        anyio.run(two_passes, f"{server.url}/records.bin", server.ca_file, options.record_bytes)


if __name__ == "__main__":
    main()

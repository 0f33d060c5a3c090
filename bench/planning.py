"""How a batch is planned: which gaps ranges are joined over, up to which span, and in which parts a long one comes.

    python -m bench.planning                over 50 ms and 4 MiB/s per stream; 100 seconds
    python -m bench.planning --mib-per-second 32

*Gaps*: 500 ranges of 4 KiB that lie so far apart, each by itself and joined over the gaps. Joined, there are fewer
requests, and the gaps' bytes come along; it was worth it where that takes less time. *Spans*: 4,096 ranges of 16 KiB
without gaps, joined up to each length. *Parts*: one range of 16 MiB in parts of each size, and in those that the engine
chooses once it has seen what a stream brings. All ways take turns at one nginx, over connections that are there before.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

import asyncfetch as af
from bench.nginx import NginxServer
from bench.rows import Row, show

if TYPE_CHECKING:
    from collections.abc import Sequence

KIB, MIB = 1024, 1024**2
GAPS = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
SPANS = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
PARTS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
SHORT_BYTES = 4 * KIB
NEIGHBOUR_BYTES = 16 * KIB
AT_ONCE = 64
"""Requests, the config's default."""


@dataclass(frozen=True)
class _Way:
    name: str
    against: str
    """Name of the way that it is compared with."""
    ranges: Sequence[af.ByteRange]
    config: af.FetchConfig


def measure_planning(
    directory: Path,
    *,
    repeats: int,
    short_ranges: int = 500,
    neighbours: int = 4096,
    long_bytes: int = 16 * MIB,
    first_byte_seconds: float = 0.05,
    bytes_per_second: float = 4 * MIB,
) -> list[Row]:
    """All gaps, then all spans, then all sizes of parts.

    "time / first" is over the first way of its kind: apart, the shortest spans, as chosen.

    Args:
        directory: The object is written there; it has holes only.
        repeats: Of each way.
        short_ranges: How many with gaps between them.
        neighbours: How many without.
        long_bytes: Of the range that comes in parts.
        first_byte_seconds: From a request's arrival to its answer.
        bytes_per_second: Of each answer.
    """
    with (directory / "object").open("wb") as file:
        lengths = AT_ONCE * MIB, long_bytes, neighbours * NEIGHBOUR_BYTES, short_ranges * (SHORT_BYTES + max(GAPS))
        file.truncate(max(lengths))
    with NginxServer(
        directory, tls=True, first_byte_seconds=first_byte_seconds, bytes_per_second=bytes_per_second
    ) as server:
        url = f"{server.url}/object"
        gaps, spans = _gaps(url, short_ranges, server.ca_file), _spans(url, neighbours, server.ca_file)
        return anyio.run(_measure, [*gaps, *spans, *_parts(url, long_bytes, server.ca_file)], repeats)


def _gaps(url: str, count: int, ca_file: str | None) -> list[_Way]:
    ways = []
    for gap in GAPS:
        step = SHORT_BYTES + gap
        ranges = [af.ByteRange(url, start, start + SHORT_BYTES) for start in range(0, count * step, step)]
        apart = f"gaps of {gap // KIB} KiB, apart"
        for name, max_gap_bytes in ((apart, 0), (f"gaps of {gap // KIB} KiB, joined", gap)):
            config = af.FetchConfig(ca_file=ca_file, hedge=None, max_gap_bytes=max_gap_bytes)
            ways.append(_Way(name, apart, ranges, config))
    return ways


def _spans(url: str, count: int, ca_file: str | None) -> list[_Way]:
    stop = count * NEIGHBOUR_BYTES
    ranges = [af.ByteRange(url, start, start + NEIGHBOUR_BYTES) for start in range(0, stop, NEIGHBOUR_BYTES)]
    names = [f"spans of {span // KIB} KiB" for span in SPANS]
    return [
        _Way(name, names[0], ranges, af.FetchConfig(ca_file=ca_file, hedge=None, max_span_bytes=span))
        for name, span in zip(names, SPANS, strict=True)
    ]


def _parts(url: str, length: int, ca_file: str | None) -> list[_Way]:
    ranges = [af.ByteRange(url, 0, length)]
    chosen = "parts as chosen"
    ways = [_Way(chosen, chosen, ranges, af.FetchConfig(ca_file=ca_file, hedge=None))]
    for part in PARTS:
        config = af.FetchConfig(ca_file=ca_file, hedge=None, part_bytes=part, min_part_bytes=part)
        ways.append(_Way(f"parts of {part // KIB} KiB", chosen, ranges, config))
    return ways


async def _measure(ways: Sequence[_Way], repeats: int) -> list[Row]:
    runs: dict[str, list[tuple[float, float, int, int]]] = {way.name: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            runs[way.name].append(await _run(way))
    rows = []
    for way in ways:
        own, first = runs[way.name], runs[way.against]
        rows += [
            Row.of(f"{way.name}: time", "s", [seconds for seconds, *_ in own]),
            Row.of(
                f"{way.name}: time / first", "x", [one[0] / other[0] for one, other in zip(own, first, strict=True)]
            ),
            Row.of(f"{way.name}: CPU", "s", [cpu for _, cpu, *_ in own]),
            Row.of(f"{way.name}: requests", "", [requests for *_, requests, _ in own]),
            Row.of(f"{way.name}: fetched", "KiB", [nbytes / KIB for *_, nbytes in own]),
        ]
    return rows


async def _run(way: _Way) -> tuple[float, float, int, int]:
    """Seconds, those of the client's CPU, requests and bytes."""
    async with af.Fetcher(way.config) as fetcher:
        url = way.ranges[0].url
        apart = [af.ByteRange(url, start, start + SHORT_BYTES) for start in range(0, AT_ONCE * MIB, MIB)]
        await fetcher.fetch_many(apart)  # makes connections
        await fetcher.fetch_many(way.ranges)  # tells what a stream brings
        before = fetcher.statistics()
        started, cpu_started = time.perf_counter(), time.process_time()
        fetched = await fetcher.fetch_many(way.ranges)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        del fetched
        now = fetcher.statistics()
        return seconds, cpu_seconds, now.requests - before.requests, now.bytes - before.bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first-byte-seconds", type=float, default=0.05)
    parser.add_argument("--mib-per-second", type=float, default=4.0, help="of each answer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    asked = parser.parse_args(arguments)
    shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="asyncfetch-bench-", dir=shared_memory) as directory:
        rows = measure_planning(
            Path(directory),
            repeats=asked.repeats,
            first_byte_seconds=asked.first_byte_seconds,
            bytes_per_second=asked.mib_per_second * MIB,
        )
    show(rows, as_json=asked.json)


if __name__ == "__main__":
    main()

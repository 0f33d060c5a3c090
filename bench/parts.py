"""What a sample's way is made of, each part timed alone."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Self

from asyncfetch.lerobot.video_index import fetch_moov
from asyncfetch.media import parse_moov
from asyncfetch.runtime import LoopThread, iterate
from asyncfetch.stream.passes import HANDED_OVER_PARCELS

if TYPE_CHECKING:
    from types import TracebackType

    import asyncfetch as af

__all__ = ["hand_over_microseconds", "header_milliseconds"]

REPEATS = 200
BATCH, BATCHES = 8, 2_000
"""As many samples of two 640x480 cameras are decoded by one call, and so cross together."""


async def header_milliseconds(dataset: af.LeRobotDataset, fetcher: af.Fetcher) -> float:
    """Median time from a file's index to a written header, for the first episode's first camera."""
    span = next(iter(dataset.episodes[0].videos.values()))
    _, moov = await fetch_moov(fetcher, span.url)
    index = parse_moov(moov, url=span.url)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        plan = index.clip(span.first_frame, span.num_frames, fps=dataset.fps)
        plan.write_header(memoryview(bytearray(plan.header_bytes)))
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


class _Batches:
    """Batches of nothing, as fast as they are taken."""

    def __init__(self) -> None:
        self._left = iter(range(BATCHES))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[int]:
        if next(self._left, None) is None:
            raise StopAsyncIteration
        return [0] * BATCH


def hand_over_microseconds() -> float:
    """Mean time an item takes from a loop to a consumer in another thread that does nothing else, in batches."""
    with LoopThread() as thread:
        items = iterate(thread, _Batches, max_batches=HANDED_OVER_PARCELS - 1)
        next(items)
        started = time.perf_counter()
        count = sum(1 for _ in items)
        return 1e6 * (time.perf_counter() - started) / count

"""What a sample's way is made of, each part timed alone."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Self

from asyncfetch.formats.clips import fetch_moov
from asyncfetch.lerobot.frame_times import find_frames
from asyncfetch.media import parse_moov
from asyncfetch.media.clip import ClipTables, build_header, clip_timing
from asyncfetch.runtime import LoopThread, iterate
from asyncfetch.stream.passes import HANDED_OVER_MICRO_BATCHES

if TYPE_CHECKING:
    from types import TracebackType

    import asyncfetch as af

__all__ = ["clip_milliseconds", "hand_over_microseconds"]

REPEATS = 200
BATCH, BATCHES = 8, 2_000
"""As many samples of two 640x480 cameras are decoded by one call, and so cross together."""


async def clip_milliseconds(dataset: af.LeRobotDataset, fetcher: af.Fetcher) -> tuple[float, float]:
    """Median times for the first episode's first camera: its header, and all of its plan.

    The header is made of its tables and written; the plan begins with the file's index, and has the header in it.
    """
    span = next(iter(dataset.episodes[0].videos.values()))
    _, _, moov = await fetch_moov(fetcher, span.url)
    index = parse_moov(moov, url=span.url)
    find = partial(find_frames, index, span, None, episode=0, fps=dataset.fps, tolerance_seconds=1e-4)
    plan = index.clip(find().samples)
    samples = index.samples
    stop = int(find().samples.max()) + 1
    first = stop - plan.num_samples
    times = samples.presentation_times(first, stop)
    sync = samples.sync_between(first, stop)
    timing = clip_timing(
        samples.decode_times(first, stop), times - int(times[0]), sync, last_duration=int(samples.durations[stop - 1])
    )
    tables = ClipTables(samples.sizes[first:stop], timing, sync, samples.byte_runs(first, stop))
    buffer = memoryview(bytearray(len(plan.header)))
    headers, plans = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        buffer[:] = build_header(index.track, tables, start=plan.start, stop=plan.stop)
        headers.append(time.perf_counter() - started)
        started = time.perf_counter()
        plan = index.clip(find().samples)
        buffer[:] = plan.header
        plans.append(time.perf_counter() - started)
    return 1e3 * statistics.median(headers), 1e3 * statistics.median(plans)


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
        items = iterate(thread, _Batches, max_batches=HANDED_OVER_MICRO_BATCHES - 1)
        next(items)
        started = time.perf_counter()
        count = sum(1 for _ in items)
        return 1e6 * (time.perf_counter() - started) / count

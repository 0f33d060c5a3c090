"""The number of segments that a rank draws from at a time: as many as were asked for, or as memory has room for.

That is known before the first sample, from the sizes of the dataset's files as its metadata say them or, where those
don't rule out that it is too many, of clips. It depends on nothing that differs between the ranks and workers of a run,
since all of them must know each other's order.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.config import MemoryShares
from asyncfetch.errors import AsyncFetchError, CacheError, redact_url
from asyncfetch.formats import Stretch
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncfetch.formats import OpenFormat, Reach
    from asyncfetch.order.line import Line

_log = logging.getLogger("asyncfetch")

_WEIGHED_FILES = 64
"""Files of each camera, whose indexes are fetched before the first sample where the pool may not fit."""
_WEIGHED_EPISODES = 1024
NO_BOUND_BYTES = 2.0**62
"""More than any memory has."""
_MARGIN = 1.25
"""The factor by which a segment that wasn't weighed may be larger than its frames say."""


class PoolSegments:
    """The segments of an open dataset that a pool draws from."""

    def __init__(self, dataset: OpenFormat, chosen: Sequence[int] | None, line: Line, reach: Reach) -> None:
        files = dataset.files(chosen)
        self.dataset, self.line, self.reach = dataset, line, reach
        self.asked_for: int = asked_for(dataset, line)
        """Segments that it is to have."""
        self.episodes: NDArray[np.int64] = np.array(dataset.episodes(chosen), np.int64)
        self.segments: NDArray[np.int64] = line.counts()
        """The number of segments of each episode."""
        self.frames: NDArray[np.int64] = line.segment_sizes()
        """Frames of the longest segment of each."""
        self.files: list[NDArray[np.int64]] = list(files.values())
        """The file of each, for each camera."""
        size = line.coded_frames
        further = {camera: -(-(greatest - least + size - 1) // size) * size for camera, least, greatest in reach}
        self.clips: list[NDArray[np.int64]] = [
            np.minimum(self.frames + further.get(camera, 0), line.lengths) for camera in files
        ]
        """Frames of the longest segment of each with what windows reach beside it, for each camera."""

    def stretch(self, place: int) -> Stretch:
        """Return as many frames as an episode's longest segment has, from where windows reach most of it."""
        frames, size = int(self.frames[place]), self.line.coded_frames
        most = int(self.line.lengths[place]) - frames
        least = min((least for _, least, _ in self.reach), default=0)
        greatest = max((greatest for _, _, greatest in self.reach), default=0)
        start = min(max(0, (most - least - greatest) // 2), most) // size * size
        return Stretch(int(self.episodes[place]), start, start + frames, self.reach)

    def most_bytes(self) -> NDArray[np.float64]:
        """Bytes of the clips of each one's segments at most.

        A file isn't larger than the metadata says, but for one episode that is. Where it says nothing, there is no
        bound.
        """
        file_bytes = self.dataset.file_bytes
        if file_bytes is None:
            return np.full(len(self.frames), NO_BOUND_BYTES)
        sizes = np.zeros(len(self.frames))
        for each, frames in zip(self.files, self.clips, strict=True):
            _, numbers = np.unique(each, return_inverse=True)
            in_file = np.bincount(numbers, weights=self.line.lengths)
            sizes += frames / np.maximum(1, in_file[numbers]) * file_bytes
        return sizes

    def largest(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what none, one, two ... of its largest segments take, by those of each episode."""
        most = min(self.asked_for + 1, self.line.segments)  # also of a pool that is larger than any array
        order = np.argsort(sizes, kind="stable")[::-1][:most]
        found = np.repeat(sizes[order], np.minimum(self.segments[order], most))[:most]
        return np.concatenate([[0.0], np.cumsum(found)])


def asked_for(dataset: OpenFormat, line: Line) -> int:
    """Return the segments that a pool is to have.

    It is one where frames are given as they lie on the line: unshuffled, or where a segment is a single frame, so that
    the line is shuffled to the frame.
    """
    return dataset.config.pool_segments if line.shuffle and line.segment_frames > 1 else 1


async def fit(datasets: Sequence[tuple[OpenFormat, Sequence[int] | None, Line, Reach]]) -> tuple[int, ...]:
    """Return how many segments each pool has: as asked for, or as many as memory lets them have, with one warning.

    The pools are read by one engine. They shrink alike, each to one segment at least.

    Args:
        datasets: Each with the episodes that are chosen of it, if not all, their line, and the reach of windows.

    Raises:
        CacheError: Not even one segment of each has room, whichever it is.
    """
    if all(asked_for(dataset, line) == 1 for dataset, _, line, _ in datasets):
        return (1,) * len(datasets)
    drawn = [PoolSegments(*each) for each in datasets]
    memory = MemoryShares.of(drawn[0].dataset.config)
    max_bytes = memory.pool_bytes
    pools = [one.asked_for for one in drawn]
    sums = [one.largest(one.most_bytes()) for one in drawn]
    fits = pools_that_fit(sums, pools, max_bytes)
    if fits != pools:
        most_files = max(1, _WEIGHED_FILES // len(drawn))
        weighed = await gather(*(partial(_weigh, one, most_files) for one in drawn))
        _check_one_of_each(drawn, weighed, memory)
        sums = [one.largest(its.sizes) for one, its in zip(drawn, weighed, strict=True)]
        fits = pools_that_fit(sums, pools, max_bytes)
    if fits != pools and any(one.dataset.reader.fetches for one in drawn):
        enough, words = memory.max_bytes_for_pool(_needed_bytes(sums, pools)), drawn[0].dataset.reader.words
        _log.warning(
            "max_bytes=%d has room for the %s of %d segments of %s at a time, not for pool_segments=%d: %s "
            "are drawn from %d, so no more are mixed in a batch. With max_bytes=%d it is as asked for",
            memory.max_bytes,
            words.ranges,
            sum(fits),
            redact_url(drawn[0].dataset.url) if len(drawn) == 1 else f"a mixture's {len(drawn)} datasets",
            sum(pools),
            words.samples,
            sum(fits),
            enough,
        )
    return tuple(fits)


def pools_that_fit(sums: Sequence[NDArray[np.float64]], pools: Sequence[int], max_bytes: int) -> list[int]:
    """Return how many segments of each pool fit at a time, whichever they are, beside one that is needed next.

    The pools where those fit; else the same part of each, at least 1. ``sums`` are what the largest segments take.
    """
    if _needed_bytes(sums, pools) <= max_bytes:
        return list(pools)
    largest = max(pools)

    def part(of_largest: int) -> list[int]:
        return [max(1, pool * of_largest // largest) for pool in pools]

    parts = range(1, largest + 1)
    fitting = bisect_left(parts, True, key=lambda some: _needed_bytes(sums, part(some)) > max_bytes)
    return part(max(1, fitting))


def _needed_bytes(sums: Sequence[NDArray[np.float64]], pools: Sequence[int]) -> int:
    """Return the bytes of the largest segments of each pool, and of one that is needed next."""
    held = [float(each[min(pool, len(each) - 1)]) for each, pool in zip(sums, pools, strict=True)]
    following = [float(each[min(pool + 1, len(each) - 1)]) for each, pool in zip(sums, pools, strict=True)]
    return int(sum(held) + max(more - these for more, these in zip(following, held, strict=True)))


class _SegmentSizes(NamedTuple):
    sizes: NDArray[np.float64]
    """Bytes of the clips of each episode's segments; where there are many files, of most by their frames."""
    largest_bytes: int
    """The largest of those that were weighed."""
    largest: int
    """Its episode."""


def _check_one_of_each(drawn: Sequence[PoolSegments], weighed: Sequence[_SegmentSizes], memory: MemoryShares) -> None:
    most_bytes = max(memory.clips_bytes, memory.pool_bytes)
    needed_bytes = sum(one.largest_bytes for one in weighed)
    if needed_bytes <= most_bytes:
        return
    words = drawn[0].dataset.reader.words
    if len(drawn) == 1:
        place = f"{words.entry} {weighed[0].largest} of {redact_url(drawn[0].dataset.url)}"
        subject = f"the {words.ranges} of a segment of {place} take"
    else:
        subject = (
            f"a mixture draws from each of its {len(drawn)} datasets, and the {words.ranges} of their largest segments "
            "take"
        )
    enough = min(memory.max_bytes_for_clips(needed_bytes), memory.max_bytes_for_pool(needed_bytes))
    raise CacheError(
        f"{subject} {needed_bytes} bytes, but max_bytes={memory.max_bytes} leaves {most_bytes} for {words.ranges}: set "
        f"StreamConfig(max_bytes=...) to at least {enough}"
    )


async def _weigh(drawn: PoolSegments, most_files: int) -> _SegmentSizes:
    frames = sum(drawn.clips, np.zeros_like(drawn.frames))
    chosen = frames > 0
    for each in drawn.files:
        distinct = np.unique(each[frames > 0])
        chosen &= np.isin(each, distinct[:: -(-len(distinct) // most_files) or 1])
    there = np.flatnonzero(chosen if chosen.any() else frames > 0)
    # Where metadata says nothing, each has an index of its own to be fetched.
    most = most_files if drawn.dataset.file_bytes is None else _WEIGHED_EPISODES
    there = there[np.unique(np.linspace(0, len(there) - 1, min(len(there), most)).astype(np.int64))]
    found: dict[int, int] = {}

    async def weigh(place: int) -> None:
        with suppress(AsyncFetchError):  # raised, or left out, at the episode's place in the order
            found[place] = await drawn.dataset.reader.clip_bytes(drawn.stretch(place))

    await gather(*(partial(weigh, int(place)) for place in there))
    places, bytes_there = list(found), np.array(list(found.values()), np.float64)
    sizes: NDArray[np.float64] = frames * (_MARGIN * bytes_there.sum() / max(1, frames[places].sum()))
    sizes[places] = bytes_there
    largest_bytes, place = max(((nbytes, place) for place, nbytes in found.items()), default=(0, 0))
    return _SegmentSizes(sizes, largest_bytes, int(drawn.episodes[place]) if found else 0)

"""One video file out of many segments: the same coded pictures, with new tables in front of them.

Times stay whole ticks. Segment after segment begins at a whole frame, whatever the rounding of the ones before, and is
shown there: its composition offsets are shifted so that all segments lag alike behind their decoding, and the edit list
takes off that lag. The layout is moov in front, then one mdat with one chunk a segment; it depends on the segments'
pictures only, not on the files that they lay in.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.media.clip import ClipTables, Timing, build_header
from asyncfetch.media.samples import ByteRuns
from asyncfetch.merge.codecs import plain_description

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from asyncfetch.merge.segments import Segment

__all__ = ["VideoFile", "build_video"]


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video to be written: its first bytes, then ranges of other files."""

    header: bytes
    ranges: tuple[tuple[str, int, int], ...]
    """(url, start, stop) in the order in which they are written."""

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return len(self.header) + sum(stop - start for _, start, stop in self.ranges)


def build_video(segments: Sequence[Segment], *, fps: float) -> VideoFile:
    """The file with these segments, at least one and all of one configuration and time scale."""
    track = segments[0].index.track
    track = dataclasses.replace(track, stsd=plain_description(track.stsd))
    sizes = np.concatenate([segment.index.samples.sizes[segment.first : segment.stop] for segment in segments])
    tables = ClipTables(sizes=sizes, timing=_timing(segments, fps), sync=_sync(segments), runs=_runs(segments))
    header = build_header(track, tables, start=0, stop=int(sizes.sum(dtype=np.int64)))
    return VideoFile(header, tuple(_source_ranges(segments)))


def _timing(segments: Sequence[Segment], fps: float) -> Timing:
    ticks = segments[0].index.timescale / Fraction(fps).limit_denominator(1001)
    composition = [segment.index.samples.composition[segment.first : segment.stop] for segment in segments]
    composition = [offsets.astype(np.int64) - int(offsets[0]) for offsets in composition]
    lag = -min(int(offsets.min()) for offsets in composition)
    durations, start = [], 0
    for segment in segments:
        own = segment.index.samples.durations[segment.first : segment.stop].astype(np.int64)
        # The last one reaches to the frame at which the next segment begins.
        own[-1] = round((start + segment.num_frames) * ticks) - round(start * ticks) - int(own[:-1].sum())
        durations.append(own)
        start += segment.num_frames
    return Timing(np.concatenate(durations), np.concatenate(composition) + lag, lag, hides=False)


def _sync(segments: Sequence[Segment]) -> NDArray[np.int64] | None:
    parts, count = [], 0
    for segment in segments:
        length = segment.stop - segment.first
        own = segment.index.samples.sync_between(segment.first, segment.stop)
        parts.append((np.arange(length) if own is None else own) + count)
        count += length
    sync = np.concatenate(parts).astype(np.int64)
    return None if len(sync) == count else sync


def _runs(segments: Sequence[Segment]) -> ByteRuns:
    num_bytes = np.array([segment.nbytes for segment in segments], np.int64)
    return ByteRuns(
        offset=np.cumsum(num_bytes) - num_bytes,
        num_bytes=num_bytes,
        num_samples=np.array([segment.stop - segment.first for segment in segments], np.int64),
        description=np.ones(len(segments), np.int64),
    )


def _source_ranges(segments: Sequence[Segment]) -> Iterator[tuple[str, int, int]]:
    """Where the samples lie, those that follow each other as one."""
    url, start, stop = segments[0].index.url, 0, 0
    for segment in segments:
        runs = segment.index.samples.byte_runs(segment.first, segment.stop)
        for offset, length in zip(runs.offset.tolist(), runs.num_bytes.tolist(), strict=True):
            if (segment.index.url, offset) != (url, stop):
                if start < stop:
                    yield url, start, stop
                url, start, stop = segment.index.url, offset, offset
            stop += length
    if start < stop:
        yield url, start, stop

"""Cutting a video file where it can be cut: into segments that decode without anything around them. Pure.

LeRobot begins each episode with a fresh key frame, so a segment is an episode. Where others wrote the file, an episode
may begin between two key frames: it then stays together with what it needs, and those frames are copied along.
Samples that no episode needs are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.errors import FormatError, redact_url
from asyncfetch.merge.codecs import plain_description

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from asyncfetch.media import Mp4Index

__all__ = ["EpisodeSpan", "Segment", "cut_file"]


class EpisodeSpan(NamedTuple):
    """Frames [first_frame, first_frame + num_frames) of a video file, which are an episode's."""

    episode: int
    """Its index in its dataset."""
    first_frame: int
    num_frames: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Samples [first, stop) of a file in decode order: a closed stretch, which begins with its earliest picture."""

    index: Mp4Index
    first: int
    stop: int
    num_frames: int
    """How many frames long it is on the screen, at the dataset's rate."""
    offsets: tuple[tuple[int, int], ...]
    """(episode, number of its frame 0 in the segment), ascending by episode."""
    nbytes: int
    """Length of its samples."""
    configuration: tuple[bytes, bytes]
    """What two segments must have in common to lie in one file."""


def cut_file(index: Mp4Index, spans: Iterable[EpisodeSpan], *, fps: float) -> list[Segment]:
    """The segments with all these episodes, none of them empty, in the order of their first episode.

    Raises:
        FormatError: The file lacks frames of an episode.
    """
    edges, configuration = _closed_edges(index), (plain_description(index.track.stsd), index.track.geometry)
    groups: list[tuple[int, int, list[EpisodeSpan]]] = []
    for low, high, span in sorted(_extents(index, spans, fps)):
        first = int(edges[np.searchsorted(edges, low, "right") - 1])
        stop = int(edges[np.searchsorted(edges, high)])
        if groups and first < groups[-1][1]:
            before_first, before_stop, members = groups[-1]
            groups[-1] = before_first, max(before_stop, stop), [*members, span]
        else:
            groups.append((first, stop, [span]))
    segments = [_segment(index, configuration, first, stop, members, fps) for first, stop, members in groups]
    return sorted(segments, key=lambda segment: segment.offsets[0])


def _closed_edges(index: Mp4Index) -> NDArray[np.int64]:
    """Samples at which the file can be cut, and its end: key frames shown before all that follows, after all before."""
    count = index.num_samples
    times = index.samples.presentation_times(0, count)
    sync = np.arange(count) if index.samples.sync is None else index.samples.sync
    latest_before = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(times)[:-1]))
    earliest_from = np.minimum.accumulate(times[::-1])[::-1]
    closed = sync[(latest_before[sync] < times[sync]) & (earliest_from[sync] == times[sync])]
    return np.concatenate(([0], closed[closed > 0], [count]))


def _extents(index: Mp4Index, spans: Iterable[EpisodeSpan], fps: float) -> Iterable[tuple[int, int, EpisodeSpan]]:
    for span in spans:
        samples = index.samples_of(span.first_frame, span.num_frames, fps=fps)
        if missing := int(np.count_nonzero(samples < 0)):
            raise FormatError(
                f"{redact_url(index.url)} lacks {missing} of the {span.num_frames} frames of episode {span.episode}, "
                f"which meta/episodes places at frame {span.first_frame} of its {index.num_samples}"
            )
        yield int(samples.min()), int(samples.max()) + 1, span


def _segment(
    index: Mp4Index,
    configuration: tuple[bytes, bytes],
    first: int,
    stop: int,
    members: list[EpisodeSpan],
    fps: float,
) -> Segment:
    decode = index.samples.decode_times(first, stop)
    shown = index.samples.presentation_times(first, stop)
    ticks = index.timescale / fps
    origin = round((int(shown.min()) - index.edit.shift) / ticks)
    # By the pictures, and by the times of decoding: the next segment's must come after both.
    last = max(round(int(shown.max() - shown.min()) / ticks), int((decode[-1] - decode[0]) // ticks))
    offsets = tuple(sorted((span.episode, span.first_frame - origin) for span in members))
    nbytes = int(index.samples.sizes[first:stop].sum(dtype=np.int64))
    return Segment(index, first, stop, last + 1, offsets, nbytes, configuration)

"""The clips of a video that some windows need: few, and no more of the video than their groups of pictures. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.formats.clips import PlannedClip, PlannedRange
from asyncfetch.ranges import join_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from asyncfetch.media import AudioIndex, Mp4Index
    from asyncfetch.media.samples import SampleTable
    from asyncfetch.videos.entry_table import Place

MAX_GAP_BYTES = 64 * 1024
"""Bytes between two clips that are fetched along rather than asking twice: FetchConfig's ``max_gap_bytes``."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowClip(PlannedClip):
    """A clip that has some frames of the windows of a stretch."""

    places: NDArray[np.int64] | None = None
    """The place of each of its frames among those of all windows, one window after the other, ascending."""


def plan_clips(
    index: Mp4Index, samples: NDArray[np.int64], place: Place, *, earlier: int | None = None
) -> list[WindowClip]:
    """Return clips that hold these samples of a video; see Mp4Index.clip for ``earlier``."""
    wanted = np.unique(samples)
    edges = [0, *_cuts(index, wanted), len(wanted)]
    found = []
    for first, stop in pairwise(edges):
        if first == stop:
            continue
        low, high = wanted[first], wanted[stop - 1]
        places = np.flatnonzero((samples >= low) & (samples <= high))
        plan = index.clip(samples[places], earlier=earlier)
        found.append(WindowClip(place.url, plan, earlier=earlier, offset=place.offset, places=places))
    return found


def _cuts(index: Mp4Index, wanted: NDArray[np.int64]) -> list[int]:
    """Places among the samples wanted, ascending, at which it pays to begin another clip."""
    table = index.samples
    first, last = _groups(table, wanted)
    jumps = np.flatnonzero(first[1:] - last[:-1] > (table.sync is None)) + 1
    cuts = []
    for jump in jumps.tolist():
        begin = int(first[jump]) if table.sync is None else int(table.sync[first[jump]])
        before = table.byte_runs(int(wanted[jump - 1]), int(wanted[jump - 1]) + 1)
        gap = int(table.byte_runs(begin, begin + 1).offset[0]) - int(before.offset[0] + before.num_bytes[0])
        if gap > MAX_GAP_BYTES:
            cuts.append(jump)
    return cuts


def _groups(table: SampleTable, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first group of pictures that each of these samples or a later one needs, and its own; (N,) each.

    Each is a group by itself where all are key frames.
    """
    if table.sync is None:
        return wanted, wanted
    groups = np.searchsorted(table.sync, wanted, "right") - 1
    keys = table.sync[np.maximum(groups, 0)]
    low = min(int(wanted[0]), int(keys[0]))
    times = table.presentation_times(low, int(wanted[-1]) + 1)
    leans = times[wanted - low] < times[keys - low]  # on the group before, for it is shown before its key frame
    return np.minimum.accumulate((groups - leans)[::-1])[::-1], groups


@dataclass(frozen=True, slots=True)
class AudioPart:
    """The place of some bytes of an audio clip among the bytes that a stretch has."""

    name: str
    start: int
    """Position in the bytes of that name, counted behind their header."""
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class AudioPlan:
    """The audio of a window: a header and parts make an MP4 of it."""

    header: bytes
    parts: tuple[AudioPart, ...]
    start_seconds: float
    stop_seconds: float
    """Seconds [start_seconds, stop_seconds) of that MP4 are wanted."""


def plan_audio(
    audio: AudioIndex, spans: Sequence[tuple[float, float]], clips: dict[str, WindowClip], place: Place
) -> tuple[list[AudioPlan], dict[str, PlannedRange]]:
    """Return the audio of each span of seconds, and the ranges that it needs beside the clips' bytes."""
    sounds = [audio.clip(start, stop, max_gap_bytes=0) for start, stop in spans]
    pieces = [tuple(piece) for sound in sounds for piece in (sound.ranges + place.offset).tolist()]
    outside = [piece for piece in pieces if _holder(clips, piece) is None]
    joined = join_spans(outside, MAX_GAP_BYTES)
    ranges = {f"audio {n}": PlannedRange(place.url, *span) for n, span in enumerate(joined)}
    plans = []
    for sound, (start, stop) in zip(sounds, spans, strict=True):
        parts = []
        for first, last in (sound.ranges + place.offset).tolist():
            name = _holder(clips, (first, last)) or _holder(ranges, (first, last))
            assert name is not None
            begin = (clips.get(name) or ranges[name]).start
            parts.append(AudioPart(name, first - begin, last - begin))
        plans.append(AudioPlan(sound.header, tuple(parts), start - sound.start_seconds, stop - sound.start_seconds))
    return plans, ranges


def _holder(planned: Mapping[str, PlannedRange | WindowClip], piece: tuple[int, int]) -> str | None:
    """The name of what holds these bytes [start, stop)."""
    return next((name for name, each in planned.items() if each.start <= piece[0] and piece[1] <= each.stop), None)


@dataclass(frozen=True, slots=True, eq=False)
class WindowTimes:
    """The windows of a stretch, as its video's index says: W windows of T frames."""

    seconds: NDArray[np.float64]
    """Shape (W, T): when each frame is shown."""
    audio: tuple[AudioPlan, ...] | None
    """Plans of the audio of each window; None where none is asked for, or the video has none."""

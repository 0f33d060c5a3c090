"""The clips of a video that some windows need: few, and no more of the video than their groups of pictures. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.formats.clips import PlannedClip, PlannedRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncfetch.media import AudioIndex, Mp4Index
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
    if len(wanted) < 2 or (table.sync is None and int(wanted[-1] - wanted[0]) < len(wanted)):
        return []
    groups = wanted if table.sync is None else np.searchsorted(table.sync, wanted, "right") - 1
    # A picture may lean on the group before its own, so that one counts as needed.
    jumps = np.flatnonzero(np.diff(groups) > (1 if table.sync is None else 2)) + 1
    cuts = []
    for jump in jumps.tolist():
        begin = int(wanted[jump]) if table.sync is None else int(table.sync[groups[jump] - 1])
        last = table.byte_runs(int(wanted[jump - 1]), int(wanted[jump - 1]) + 1)
        gap = int(table.byte_runs(begin, begin + 1).offset[0]) - int(last.offset[0] + last.num_bytes[0])
        if gap > MAX_GAP_BYTES:
            cuts.append(jump)
    return cuts


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
    clip_seconds: float
    """Time at which the file plays what the clip plays at 0."""
    start_seconds: float
    stop_seconds: float
    """Seconds [start_seconds, stop_seconds) of the file are wanted."""


def plan_audio(
    audio: AudioIndex, spans: Sequence[tuple[float, float]], clips: dict[str, WindowClip], place: Place
) -> tuple[list[AudioPlan], dict[str, PlannedRange]]:
    """Return the audio of each span of seconds, and the ranges that it needs beside the clips' bytes."""
    plans, ranges = [], dict[str, PlannedRange]()
    for start, stop in spans:
        clip = audio.clip(start, stop)
        parts = []
        for first, last in (clip.ranges + place.offset).tolist():
            held = next((name for name, each in clips.items() if each.start <= first and last <= each.stop), None)
            if held is None:
                held = next((name for name, each in ranges.items() if (each.start, each.stop) == (first, last)), None)
            if held is None:
                held = f"audio {len(ranges)}"
                ranges[held] = PlannedRange(place.url, first, last)
            begin = (clips.get(held) or ranges[held]).start
            parts.append(AudioPart(held, first - begin, last - begin))
        plans.append(AudioPlan(clip.header, tuple(parts), clip.start_seconds, start, stop))
    return plans, ranges


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The windows of a stretch, as its video's index says: W windows of T frames."""

    seconds: NDArray[np.float64]
    """Shape (W, T): when each frame is shown."""
    audio: tuple[AudioPlan, ...] | None
    """Of each window; None where none is asked for, or the video has none."""


@dataclass(frozen=True, slots=True)
class WholeVideo:
    """A stretch of a video that can't be cut: its windows are found once all of it is in memory."""

    reason: str


class Plan(dict[str, "PlannedRange | WindowClip"]):
    """The bytes of a stretch, by name: clips of the video, audio beside them, files beside the video."""

    def __init__(self, windows: Windows | WholeVideo) -> None:
        super().__init__()
        self.windows = windows

"""Stretches of an episode, and the segments that a long one is read by at random. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Reach", "Stretch", "reach_of", "segment_at"]

Reach: TypeAlias = "tuple[tuple[str, int, int], ...]"
"""(camera, least offset, greatest offset) of each whose window reaches further than a sample's own frame."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring frames of an episode that are fetched, held and let go of as one."""

    episode: int
    """Its episode_index."""
    start: int
    """First frame, counted in the episode."""
    stop: int
    """One past the last frame."""
    reach: Reach = ()
    """The same for all stretches of a pass."""

    def span(self, camera: str, length: int) -> tuple[int, int]:
        """Frames [start, stop) of a camera, in videos or in the table, that samples of the stretch need.

        Windows reach over the stretch's edges, but not over those of the episode, of ``length`` frames: there they
        repeat its first or last frame.
        """
        if self.start == self.stop:
            return self.start, self.stop
        offsets = {key: (least, greatest) for key, least, greatest in self.reach}
        least, greatest = offsets.get(camera, (0, 0))
        first, last = (min(max(frame, 0), length - 1) for frame in (self.start + least, self.stop - 1 + greatest))
        return first, last + 1

    def name(self, length: int) -> str:
        """Return its name in messages: that of the episode, whose length this is, where it is all of that."""
        frames = "" if (self.start, self.stop) == (0, length) else f", frames [{self.start}, {self.stop})"
        return f"episode {self.episode}{frames}"


def reach_of(windows: Mapping[str, NDArray[np.int64]], cameras: Iterable[str]) -> Reach:
    """Return how far windows, as ``resolve_windows`` makes them, reach at these cameras."""
    reaches = ((key, int(windows[key].min()), int(windows[key].max())) for key in cameras if key in windows)
    return tuple(reach for reach in reaches if reach[1:] != (0, 0))


def segment_at(frame: int, length: int, *, segment_frames: int, group_frames: int) -> tuple[int, int]:
    """Return the segment [start, stop) that has a frame of an episode.

    An episode is cut between groups of pictures into as few segments as are no longer than that, but for a group: of
    about the same length, so a short one is a segment of its own.

    Args:
        frame: Counted in the episode.
        length: Of the episode, in frames.
        segment_frames: Length of a segment.
        group_frames: Length of a group of pictures.
    """
    groups = -(-length // group_frames)
    segments = min(groups, -(-length // segment_frames))
    segment = ((frame // group_frames + 1) * segments - 1) // groups
    first, last = (number * groups // segments for number in (segment, segment + 1))
    return first * group_frames, min(last * group_frames, length)

"""Stretches of an episode: what is fetched, held and let go of as one. Pure.

An episode is one entry of a dataset, whatever its format calls it, and its frames are what samples are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

Reach: TypeAlias = "tuple[tuple[str, int, int], ...]"
"""(camera, least offset, greatest offset) of each camera with a window beyond a sample's own frame."""


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
    epoch: int = 0
    """The epoch of samples that are drawn anew in each; 0 of all others."""

    def span(self, camera: str, length: int) -> tuple[int, int]:
        """Frames [start, stop) of a camera, in videos or in the table, that samples of the stretch need.

        Windows reach over the stretch's edges, but not over those of the episode, of ``length`` frames: there they
        repeat its first or last frame.
        """
        if self.start == self.stop:
            return self.start, self.stop
        least, greatest = next((reach[1:] for reach in self.reach if reach[0] == camera), (0, 0))
        return _inside(self.start + least, length), _inside(self.stop - 1 + greatest, length) + 1

    def name(self, length: int) -> str:
        """Return its name in messages: the episode's, of this length, where it is all of that."""
        frames = "" if (self.start, self.stop) == (0, length) else f", frames [{self.start}, {self.stop})"
        return f"episode {self.episode}{frames}"


def _inside(frame: int, length: int) -> int:
    return min(max(frame, 0), length - 1)


def reach_of(windows: Mapping[str, NDArray[np.int64]], cameras: Iterable[str]) -> Reach:
    """Return how far windows, as ``resolve_windows`` makes them, reach at these cameras."""
    reaches = ((key, int(windows[key].min()), int(windows[key].max())) for key in cameras if key in windows)
    return tuple(reach for reach in reaches if reach[1:] != (0, 0))

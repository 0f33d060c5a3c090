"""Windows: which frames around the asked one a key is read at, with LeRobot's meaning. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FrameOffsets", "Window", "Windows", "check_windows", "frames", "resolve_windows"]

TOLERANCE_SECONDS = 1e-4
"""Seconds that a window may lie off the grid of frames: LeRobot's default ``tolerance_s``."""

MAX_OFFSET = 2**31
"""Frames; no episode is longer, and sums of such numbers stay within 64 bits."""


@dataclass(frozen=True, slots=True)
class FrameOffsets:
    """A window as whole frames relative to the asked one; made by ``frames``."""

    offsets: tuple[int, ...]


Window = Sequence[float] | FrameOffsets
"""Seconds relative to the asked frame, or ``frames(...)``; in the order in which they are delivered."""
Windows = Mapping[str, Window]
"""Window by feature key. A key without one is read at the asked frame alone, without a time axis."""


def frames(*offsets: int) -> FrameOffsets:
    """A window of frame offsets: ``frames(-1, 0)`` is the frame before the asked one, then the asked one."""
    for offset in offsets:
        if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
            raise ConfigError(f"frames() takes whole numbers of frames, not {offset!r}; seconds go in a plain list")
    return FrameOffsets(tuple(int(offset) for offset in offsets))


def check_windows(windows: Any) -> None:  # noqa: ANN401 - what a user gave
    """Check what can be said without a dataset: ConfigError where they are no mapping, or one of them is no list."""
    if windows is not None and not isinstance(windows, Mapping):
        raise ConfigError(f"windows must be a mapping of a window to each key, or None, not {windows!r}")
    for key, window in (windows or {}).items():
        if isinstance(window, str | bytes | Iterator):  # an iterator would be empty at its second use
            raise ConfigError(f"windows: {key!r} needs a list of seconds or frames(...), not {window!r}")


def resolve_windows(windows: Windows | None, *, fps: float, keys: Collection[str]) -> dict[str, NDArray[np.int64]]:
    """The frame offsets of each window.

    Args:
        windows: As the user gave them.
        fps: Frames a second of the dataset.
        keys: The keys that may have a window.

    Raises:
        ConfigError: An unknown key, one whose mask is another feature's name, an empty window, or seconds that aren't
            on the grid of frames within 0.1 ms.
    """
    check_windows(windows)
    resolved = {}
    for key, window in (windows or {}).items():
        if key not in keys:
            raise ConfigError(f"windows: no feature {key!r} to put one on; there are {', '.join(sorted(keys))}")
        if f"{key}_is_pad" in keys:
            message = f"windows: what tells the padding of {key!r} would take the place of the feature '{key}_is_pad'"
            raise ConfigError(f"{message}: leave that out by features=")
        offsets = window.offsets if isinstance(window, FrameOffsets) else _from_seconds(key, window, fps)
        if not len(offsets):
            raise ConfigError(f"windows: the one of {key!r} is empty; leave the key out for the asked frame alone")
        if max(map(abs, offsets)) > MAX_OFFSET:
            raise ConfigError(f"windows: {max(offsets, key=abs)} frames of {key!r} are no offset in any episode")
        resolved[key] = np.asarray(offsets, dtype=np.int64)
    return resolved


def _from_seconds(key: str, seconds: Sequence[float], fps: float) -> list[int]:
    try:
        grid = [float(second) for second in seconds]
    except (TypeError, ValueError) as error:
        message = f"windows: {key!r} needs a list of seconds or frames(...), not {seconds!r}"
        raise ConfigError(message) from error
    offsets = []
    for second in grid:
        if not math.isfinite(second * fps):
            raise ConfigError(f"windows: {second} of {key!r} isn't a time")
        offset = round(second * fps)
        if abs(second * fps - offset) / fps > TOLERANCE_SECONDS:
            message = (
                f"windows: {second} s of {key!r} is no multiple of a frame at {fps} fps "
                f"(nearest: {offset / fps:.6f} s); give multiples of 1/{fps:g}, or frames({offset})"
            )
            raise ConfigError(message)
        offsets.append(offset)
    return offsets


def clamp(frame: int, offsets: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(frames to read, which of them are padding) of a window in an episode of ``length`` frames.

    A place before the first frame repeats the first one, one after the last repeats the last, as LeRobot's
    random-access reader does.
    """
    wanted = frame + offsets
    inside = np.clip(wanted, 0, length - 1)
    return inside, inside != wanted

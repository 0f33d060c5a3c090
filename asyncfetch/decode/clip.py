"""Input of a decoder: the bytes of a small MP4, and where in it each frame should be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncfetch.decode.backends import import_torch
from asyncfetch.errors import ConfigError, FrameMissing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncfetch.media import KeyFrames

__all__ = ["Clip", "DepthScale"]

DEPTH_CODES = 4096
"""Depth is stored in the 12 bits of ``gray12le``."""
MAX_MILLIMETRES = 65535
"""Greatest distance that LeRobot gives."""


@dataclass(frozen=True, slots=True)
class DepthScale:
    """The scale by which the 12-bit codes of a depth video become distances.

    LeRobot's quantisation: with ``use_log`` the codes divide ``ln(distance + shift)`` evenly, else the distance.
    """

    minimum: float = 0.01
    """Metres of code 0; LeRobot's ``video.depth_min``."""
    maximum: float = 10.0
    """Metres of code 4095; LeRobot's ``video.depth_max``."""
    shift: float = 3.5
    """Metres added before the logarithm; LeRobot's ``video.shift``. Unused without ``use_log``."""
    use_log: bool = True
    """LeRobot's ``video.use_log``."""
    unit: Literal["m", "mm"] = "mm"
    """Unit of the decoded frames. Millimetres are whole."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minimum) and math.isfinite(self.maximum) and self.minimum < self.maximum):
            raise ConfigError(f"depth minimum={self.minimum} must be below maximum={self.maximum}, both finite")
        if self.use_log and not (math.isfinite(self.shift) and self.minimum + self.shift > 0):
            raise ConfigError(f"depth minimum={self.minimum} + shift={self.shift} must be positive to have a logarithm")
        if self.unit not in {"m", "mm"}:
            raise ConfigError(f"depth unit must be 'm' or 'mm', not {self.unit!r}")

    def distances(self) -> NDArray[np.float32]:
        """Distance of every code, shape (4096,), in ``unit``, within [minimum, maximum].

        By torch in float32, step by step as LeRobot does it: its rounding is in the numbers that policies are trained
        on.
        """
        torch = import_torch()
        low, high = self.minimum, self.maximum
        if self.use_log:
            low, high = math.log(low + self.shift), math.log(high + self.shift)
        codes = torch.arange(DEPTH_CODES, dtype=torch.float32, device="cpu")
        metres = codes.mul_((high - low) / (DEPTH_CODES - 1)).add_(low)
        if self.use_log:
            metres.exp_().sub_(self.shift)
        metres.clamp_(self.minimum, self.maximum)
        if self.unit == "mm":
            metres.mul_(1000).round_().clamp_(0, MAX_MILLIMETRES)
        distances: NDArray[np.float32] = metres.numpy()
        return distances


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """A video of one camera, whole in memory.

    Frames are named by their position in ``frame_index`` and ``pts``, which are as long as the episode. The clip may
    hold more frames than those: the key frame in front, and what lies between.
    """

    data: memoryview = field(repr=False)
    """A self-contained MP4, one byte an item, contiguous. Nobody writes to it while the clip lives."""
    frame_index: NDArray[np.int32] = field(repr=False)
    """Rank of each frame among the clip's frames in the order of presentation; -1 where the video has none."""
    pts: NDArray[np.int64] = field(repr=False)
    """Presentation time of each frame, in ticks. Of no meaning where ``frame_index`` is -1."""
    timescale: int
    """Ticks a second."""
    codec: str
    """Sample entry: "av01", "avc1", "hev1" ..."""
    width: int
    height: int
    name: str
    """Name for messages: url and episode."""
    depth: DepthScale | None = None
    """Set for a depth camera."""
    key_frames: KeyFrames | None = field(default=None, repr=False)
    """Frames that a decoder may start at; None where it finds out by itself."""
    misplaced: NDArray[np.float64] | None = field(default=None, repr=False)
    """Shape (N, 2), where the metadata and the video put some frame too far apart: when each frame is shown by the one
    and by the other, in seconds of the file, and NaN for the frames that have no such trouble."""

    def __post_init__(self) -> None:
        if len(self.frame_index) != len(self.pts):
            raise ConfigError(f"{self.name}: {len(self.frame_index)} ranks, but {len(self.pts)} times")
        if self.timescale <= 0:
            raise ConfigError(f"{self.name}: timescale must be positive, not {self.timescale}")

    def __len__(self) -> int:
        return len(self.frame_index)

    @property
    def nbytes(self) -> int:
        """Memory of the clip's bytes."""
        return self.data.nbytes

    def ranks(self, frames: Sequence[int]) -> list[int]:
        """Rank in the clip of each of ``frames``, in their order.

        Raises:
            FrameMissing: The video has no such frame.
        """
        ranks = [int(self.frame_index[frame]) if 0 <= frame < len(self) else -1 for frame in frames]
        if -1 in ranks:
            frame = frames[ranks.index(-1)]
            if self.misplaced is not None and 0 <= frame < len(self) and not np.isnan(self.misplaced[frame, 0]):
                due, shown = self.misplaced[frame].tolist()
                raise FrameMissing(
                    f"{self.name}: frame {frame} is due at {due:.6f} s of the video by its metadata, but the nearest "
                    f"frame is shown at {shown:.6f} s, which is {abs(shown - due):.6f} s off and may be its neighbour: "
                    "write from_timestamp anew, or allow more by StreamConfig(tolerance_seconds=...), up to a quarter "
                    "of a frame"
                )
            held = int(np.count_nonzero(self.frame_index >= 0))
            raise FrameMissing(
                f"{self.name}: the video has no frame {frame}; it has {held} of {len(self)} frames. "
                "The video is shorter than its metadata says, shows two frames at one time, or the frame number is off."
            )
        return ranks

    def seconds(self, frame: int) -> float:
        """Presentation time of a frame."""
        return int(self.pts[frame]) / self.timescale

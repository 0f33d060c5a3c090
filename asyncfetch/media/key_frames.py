"""Whether a video can be decoded from where its file says so. Of HEVC that has to be looked at.

FFmpeg's decoders of H.264 and AV1 give out no picture in front of one that leans on no other. HEVC's, begun in the
middle of a group, puts a grey one in the place of each that it lacks, and torchcodec doesn't tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["KeyFrames"]

SLICES = range(32)
"""Types of NAL units that hold a part of a picture (ITU-T H.265, table 7-1)."""
RANDOM_ACCESS = range(16, 24)
"""Those of pictures that decoding can start at; ISO/IEC 14496-15 asks for them in a sync sample."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyFrames:
    """Samples of a clip of HEVC that a decoder may be started at, in the order of presentation."""

    ranks: NDArray[np.int32]
    """Rank of each among the frames that the clip shows; at least one."""
    extents: NDArray[np.int64] = field(repr=False)
    """Shape (N, 2): bytes [start, stop) of the clip that each lies in."""
    length_bytes: int
    """Of the length in front of each NAL unit."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays hold."""
        return self.ranks.nbytes + self.extents.nbytes

    def in_front_of(self, rank: int) -> int:
        """The number of the one that a decoder is started at for the frame of this rank."""
        return max(0, int(np.searchsorted(self.ranks, rank, "right")) - 1)

    def stands_alone(self, clip: memoryview, number: int) -> bool:
        """Whether key frame ``number`` of these bytes of the clip is one; not where no picture is found in it."""
        start, stop = self.extents[number].tolist()
        stop = min(stop, len(clip))
        while (unit := start + self.length_bytes) < stop:
            kind = clip[unit] >> 1 & 0x3F
            if kind in SLICES:
                return kind in RANDOM_ACCESS
            start = unit + int.from_bytes(clip[start:unit])
        return False

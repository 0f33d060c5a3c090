"""A video that can't be cut by ranges, whole in memory: WebM, AVI, or an MP4 with an index that we don't follow.

FFmpeg's demuxer says when each of its frames is shown. Runs in decode threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.decode import Clip
from asyncfetch.decode.backends import choose_backend
from asyncfetch.decode.decoder import MemoryFile
from asyncfetch.errors import COPY_ANEW, DecodeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

REMEDY = f"{COPY_ANEW}, or leave it out"


@dataclass(frozen=True, slots=True, eq=False)
class WholeFrames:
    """The frames of a whole video, by its packets. Immutable, and without its bytes."""

    ticks: NDArray[np.int64]
    """Shape (N,): when each is shown, ascending, in parts of a second."""
    timescale: int
    """Parts of a second."""
    end_ticks: int
    """When the last one ends."""
    codec: str
    width: int
    height: int
    has_audio: bool

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Shape (N,): when each is shown."""
        return self.ticks / self.timescale

    @property
    def end_seconds(self) -> float:
        """When the last one ends."""
        return self.end_ticks / self.timescale

    def clip(self, data: memoryview, name: str) -> Clip:
        """Return all of the video, whose bytes these are, as a clip: frame i of it is the i-th that is shown."""
        ranks = np.arange(len(self.ticks), dtype=np.int32)
        return Clip(data, ranks, self.ticks, self.timescale, self.codec, self.width, self.height, name)


@dataclass(frozen=True, slots=True, eq=False)
class WholeVideo:
    """A video that can't be cut: its windows are found once all of it is in memory."""

    reason: str
    """Why it can't be."""
    _found: list[WholeFrames] = field(default_factory=list)

    def frames(self, data: memoryview, name: str) -> WholeFrames:
        """Return its frames, by its bytes, once looked for. See ``frames_of_whole``."""
        if not self._found:
            self._found.append(frames_of_whole(data, name=name, reason=self.reason))
        return self._found[0]


def frames_of_whole(data: memoryview, *, name: str, reason: str) -> WholeFrames:
    """Return the frames of a video that can't be cut for a reason, by its own packets.

    Raises:
        DecodeError: FFmpeg can't open it either.
        MissingDependency: PyAV isn't installed.
    """
    choose_backend("pyav")
    import av

    try:
        with av.open(MemoryFile(data), mode="r") as container:
            if not container.streams.video:
                raise DecodeError(f"{name}: it has no video track, and can't be cut: {reason}; {REMEDY}")
            stream = container.streams.video[0]
            base = Fraction(stream.time_base or 1)
            shown = sorted(
                (packet.pts, packet.duration or 0)
                for packet in container.demux(stream)
                if packet.size and packet.pts is not None and not packet.is_discard
            )
            codec, width, height = stream.codec_context.name, stream.codec_context.width, stream.codec_context.height
            has_audio = bool(container.streams.audio)
    except av.FFmpegError as error:
        raise DecodeError(
            f"{name}: it can't be cut ({reason}), and PyAV can't open all of it: {error}; {REMEDY}"
        ) from error
    if not shown:
        raise DecodeError(f"{name}: it shows no frame, and can't be cut: {reason}; {REMEDY}")
    ticks = np.array([pts for pts, _ in shown], np.int64)
    last_ticks = max(shown[-1][1], int(np.median(np.diff(ticks))) if len(ticks) > 1 else 1)
    return WholeFrames(
        ticks=ticks * base.numerator,
        timescale=base.denominator,
        end_ticks=(int(ticks[-1]) + last_ticks) * base.numerator,
        codec=codec,
        width=width,
        height=height,
        has_audio=has_audio,
    )

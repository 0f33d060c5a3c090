"""A video that can't be cut by ranges, whole in memory: WebM, AVI, or an MP4 with an index that we don't follow.

FFmpeg's demuxer says when each of its frames is shown. Runs in decode threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
class OpenVideo:
    """A whole video in memory."""

    clip: Clip
    """All of it: frame i of it is the i-th that is shown."""
    seconds: NDArray[np.float64]
    """Shape (N,): when each is shown."""
    end_seconds: float
    """Time at which the last one ends."""
    has_audio: bool


def open_whole(data: memoryview, *, name: str, reason: str) -> OpenVideo:
    """Return the frames of a video, by its own packets.

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
    seconds = np.asarray(ticks * base.numerator / base.denominator, np.float64)
    last_ticks = max(shown[-1][1], int(np.median(np.diff(ticks))) if len(ticks) > 1 else 1)
    clip = Clip(
        data=data,
        frame_index=np.arange(len(ticks), dtype=np.int32),
        pts=ticks * base.numerator,
        timescale=base.denominator,
        codec=codec,
        width=width,
        height=height,
        name=name,
    )
    end_seconds = float((int(ticks[-1]) + last_ticks) * base)
    return OpenVideo(clip, seconds, end_seconds if math.isfinite(end_seconds) else float(seconds[-1]), has_audio)

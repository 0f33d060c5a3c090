"""A video that can't be cut by ranges, whole in memory: WebM, AVI, or an MP4 with an index that we don't follow.

FFmpeg's demuxer says when each of its frames is shown. MPEG streams, and AVI with frames that aren't shown in the order
they are decoded in, don't say it: of these all frames are decoded, and that for each clip. Runs in decode threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.decode import Clip, open_decoder, stack_frames
from asyncfetch.decode.backends import choose_backend, import_torch, on_this_thread
from asyncfetch.decode.decoder import MemoryFile
from asyncfetch.errors import COPY_ANEW, DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode import PictureSize

REMEDY = f"{COPY_ANEW}, or leave it out"


@dataclass(frozen=True, slots=True, eq=False)
class WholeFrames:
    """The frames of a whole video, by its packets. Immutable, and without its bytes."""

    ticks: NDArray[np.int64]
    """Shape (N,): when each is shown, ascending, in parts of a second."""
    timescale: int
    """Parts of a second."""
    end_ticks: int
    """The end of the last one."""
    codec: str
    width: int
    height: int
    has_audio: bool
    in_turn: bool = False
    """True where FFmpeg can't seek by these times, so that frames have to be decoded one after the other."""

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Shape (N,): when each is shown."""
        return self.ticks / self.timescale

    @property
    def end_seconds(self) -> float:
        """The end of the last one."""
        return self.end_ticks / self.timescale

    def pictures(
        self, data: memoryview, frames: Sequence[int], *, backend: DecoderBackend, size: PictureSize | None, name: str
    ) -> torch.Tensor:
        """Return some frames of the video, whose bytes these are, by their places in the order of presentation.

        Raises:
            DecodeError, FrameMissing: They can't be decoded.
        """
        if not self.in_turn:
            ranks = np.arange(len(self.ticks), dtype=np.int32)
            clip = Clip(data, ranks, self.ticks, self.timescale, self.codec, self.width, self.height, name)
            return open_decoder(clip, backend=backend, size=size).frames(frames)
        import av

        library, found = import_torch(), dict[int, Any]()
        try:
            with av.open(MemoryFile(data), mode="r") as container:
                for place, frame in enumerate(_decoded(container, name)):
                    if place in frames:
                        pixels = frame.to_ndarray(format="rgb24", **on_this_thread())
                        picture = library.from_numpy(pixels).permute(2, 0, 1)
                        found[place] = picture if size is None else size.resize(picture)
                    if place >= max(frames):
                        break
        except av.FFmpegError as error:
            raise DecodeError(f"{name}: PyAV can't decode frames {list(frames)}: {error}; {REMEDY}") from error
        return stack_frames([found[frame] for frame in frames])


def _decoded(container: Any, name: str) -> Iterator[Any]:  # noqa: ANN401 - PyAV's
    """The frames of a container's video, as they are decoded: in the order of presentation. DecodeError at damage."""
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # the threads are ours
    stream.codec_context.options = {"err_detect": "explode"}  # in place of pictures that are mended
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise DecodeError(f"{name}: a part of it is missing or damaged; {REMEDY}")
        for frame in packet.decode():
            if frame.pts is None or frame.is_corrupt:
                raise DecodeError(f"{name}: it has a frame that is damaged, or without a time; {REMEDY}")
            yield frame


class WholeVideo:
    """A video that can't be cut, for a reason: its windows are found once all of it is in memory."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._frames: WholeFrames | None = None

    def frames(self, data: memoryview, name: str) -> WholeFrames:
        """Return its frames, by its own packets; they are looked for once.

        Raises:
            DecodeError: FFmpeg can't open it either.
            MissingDependency: PyAV isn't installed.
        """
        if self._frames is None:
            self._frames = _find_frames(data, name, self.reason)
        return self._frames


def _find_frames(data: memoryview, name: str, reason: str) -> WholeFrames:
    choose_backend("pyav")
    import av

    try:
        with av.open(MemoryFile(data), mode="r") as container:
            if not container.streams.video:
                raise DecodeError(f"{name}: it has no video track, and can't be cut: {reason}; {REMEDY}")
            stream = container.streams.video[0]
            base = Fraction(stream.time_base or 1)
            kind = container.format.name
            in_turn = kind in {"mpeg", "mpegts"} or (kind == "avi" and stream.codec_context.has_b_frames)
            if in_turn:
                shown = [(frame.pts, frame.duration or 0) for frame in _decoded(container, name)]
            else:
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
    if in_turn and any(late <= early for (early, _), (late, _) in pairwise(shown)):
        raise DecodeError(f"{name}: its frames come out of order, and it can't be cut: {reason}; {REMEDY}")
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
        in_turn=in_turn,
    )

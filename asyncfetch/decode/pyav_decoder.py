"""Frames through PyAV: where torchcodec doesn't load, and for depth, of which it would lose 4 bits.

A frame is found by its time alone. Decoding goes on from where it stands if no key frame lies between there and the
frame, and starts at the key frame before it otherwise; after an error too, so that all frames behind the damage, up to
the next key frame, are the same error. Damage shows in H.264 where FFmpeg mended the picture, and in any codec where no
picture comes of a coded frame; HEVC's and AV1's decoders don't tell of all else that they put up with.
"""

from __future__ import annotations

import bisect
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.decode.backends import import_torch
from asyncfetch.decode.decoder import ClipDecoder
from asyncfetch.errors import DecodeError, FrameMissing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.decode.clip import Clip

__all__ = ["MemoryFile", "PyAVDecoder"]

AFTER_ALL = 1 << 63
"""A time past every frame's: whatever comes next has to be sought."""


class MemoryFile:
    """What PyAV needs of a file, over a buffer: only the blocks that it reads are copied."""

    def __init__(self, data: memoryview | bytes) -> None:
        self._data = memoryview(data)
        self._position = 0

    def read(self, size: int) -> bytes:
        """The next bytes, fewer at the end."""
        block = bytes(self._data[self._position : self._position + size])
        self._position += len(block)
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves from the start (0), here (1) or the end (2), and tells the new position."""
        self._position = max(0, offset + (0, self._position, len(self._data))[whence])
        return self._position

    def tell(self) -> int:
        """The position of the next read."""
        return self._position


class PyAVDecoder(ClipDecoder):
    """See FrameDecoder."""

    def __init__(self, clip: Clip) -> None:
        import av

        self._distances = None if clip.depth is None else clip.depth.distances()
        self._next_pts = 0  # the frames still to come are shown at this time or later
        self._errors = av.FFmpegError
        try:
            self._container = av.open(MemoryFile(clip.data), mode="r")
            self._stream = self._single_stream(clip)
            shown = self._shown()
            self._shown_pts = sorted(pts for pts, _ in shown)
            self._key_pts = sorted(pts for pts, is_key in shown if is_key)
            if not self._key_pts:
                raise DecodeError(f"{clip.name}: its {clip.nbytes} bytes hold no key frame")
            self._seek(self._key_pts[0])
        except self._errors as error:
            raise DecodeError(f"{clip.name}: PyAV can't open its {clip.nbytes} bytes: {error}") from error
        wide = (self._stream.codec_context.pix_fmt or "").endswith(("le", "be"))
        super().__init__(clip, num_frames=len(shown), bytes_per_sample=2 if wide else 1)

    def __del__(self) -> None:
        # Container and stream refer to each other: without this they'd wait for the garbage collector.
        if (container := getattr(self, "_container", None)) is not None:
            container.close()

    def _shown(self) -> list[tuple[int, bool]]:
        """Time, and whether it is a key frame, of each frame that the file says it shows."""
        return [
            (packet.pts, packet.is_keyframe)
            for packet in self._container.demux(self._stream)
            if packet.size and not packet.is_discard  # the last one is empty: it flushes the decoder
        ]

    def _single_stream(self, clip: Clip) -> Any:  # noqa: ANN401
        streams = self._container.streams.video
        if not streams:
            raise DecodeError(f"{clip.name}: it has no video track")
        stream = streams[0]
        if stream.time_base != Fraction(1, clip.timescale):
            raise DecodeError(f"{clip.name}: it counts time in {stream.time_base} s, not in 1/{clip.timescale} s")
        stream.codec_context.thread_count = 1  # the threads are ours, one a decoder
        return stream

    def _decode(self, frames: Sequence[int], ranks: list[int]) -> list[torch.Tensor]:
        wanted = [int(self.clip.pts[frame]) for frame in frames]
        try:
            decoded = {pts: self._frame_at(pts) for pts in sorted(set(wanted))}
        except self._errors as error:
            self._next_pts = AFTER_ALL
            raise DecodeError(f"{self.clip.name}: PyAV can't decode frames {list(frames)}: {error}") from error
        return [decoded[pts] for pts in wanted]

    def _frame_at(self, pts: int) -> torch.Tensor:
        """The frame shown at ``pts``."""
        key = self._key_pts[max(0, bisect.bisect_right(self._key_pts, pts) - 1)]
        if not key <= self._next_pts <= pts:
            self._seek(key)
        for frame in self._coming:
            if frame.pts is None:
                raise DecodeError(f"{self.clip.name}: it has a frame without a time, so that none can be told by it")
            if frame.pts < key:
                continue  # may lean on frames in front of the clip
            self._check_whole(frame)
            self._next_pts = frame.pts + 1
            if frame.pts == pts:
                pixels: torch.Tensor = import_torch().from_numpy(self._array(frame))
                return pixels.permute(2, 0, 1)
            if frame.pts > pts:
                break
        raise FrameMissing(
            f"{self.clip.name}: no frame is shown at {pts / self.clip.timescale:.6f} s (tick {pts}); decoding from the "
            f"key frame at {key / self.clip.timescale:.6f} s came past it or to the end: "
            "the video isn't the one that its index was made from"
        )

    def _check_whole(self, frame: Any) -> None:  # noqa: ANN401
        """Raise DecodeError where it is damaged, or one in front of it didn't come: it may lean on that."""
        due = bisect.bisect_left(self._shown_pts, self._next_pts)
        if frame.is_corrupt or due < bisect.bisect_left(self._shown_pts, frame.pts):
            self._next_pts = AFTER_ALL
            seconds = min(self._shown_pts[due], frame.pts) / self.clip.timescale
            raise DecodeError(
                f"{self.clip.name}: the frame at {seconds:.6f} s is damaged, so that it and what leans on it can't be "
                "decoded"
            )

    def _seek(self, key_pts: int) -> None:
        self._container.seek(key_pts, stream=self._stream)
        self._coming: Iterator[Any] = self._container.decode(self._stream)
        self._next_pts = key_pts

    def _array(self, frame: Any) -> NDArray[Any]:  # noqa: ANN401
        """(height, width, channels)."""
        if self._distances is None:
            rgb: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
            # Turned as its track says, by whole quarters: torchcodec does so by itself. No angle is a number below any.
            degrees = frame.rotation if abs(frame.rotation) <= 180 else 0
            return np.ascontiguousarray(np.rot90(rgb, round(degrees / 90)))
        codes = frame.to_ndarray(format="gray12le")
        distances: NDArray[np.float32] = self._distances.take(codes, mode="clip")
        return distances[..., np.newaxis]

"""Frames through torchcodec, by its public API.

Opening a decoder with torchcodec 0.13 on torch 2.13 leaks 1 kB: the JSON of its metadata and the strings among the
arguments, which torch's stable ABI copies and forgets (pytorch/pytorch#191340, mended in later releases). These pieces
lie scattered among what the decoder frees when it goes, and their pages can't be given back: resident memory grows by
2-4 kB a decoder. Nothing in the public API avoids that. PyAV's decoders leave less than 0.4 kB behind.

Nor does it tell that FFmpeg mended a picture, which is what mostly comes of damaged bits in H.264 and HEVC, or that it
passed over a coded frame, as of AV1 where nothing but zeros are left of it: then the frame itself is missing, but those
that lean on it come, and are wrong.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
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

__all__ = ["TorchcodecDecoder", "open_video"]

PLACE_IN_SOURCE = re.compile(r"^\w+, \S+:\d+, ")
"""Function, file and line, as they begin torchcodec's messages."""


def open_video(data: memoryview | bytes, name: str) -> Any:  # noqa: ANN401 - torchcodec is optional
    """A torchcodec VideoDecoder on these bytes, which it reads in place and keeps alive.

    Raises:
        DecodeError: They aren't a video, or not one that FFmpeg here can decode.
    """
    from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

    try:
        # The threads are ours, one a decoder; "cpu", because torch's default device may be another.
        return VideoDecoder(
            _tensor_on(data), num_ffmpeg_threads=1, seek_mode="exact", dimension_order="NCHW", device="cpu"
        )
    except (RuntimeError, ValueError, AssertionError) as error:
        raise DecodeError(f"{name}: torchcodec can't open its {len(data)} bytes: {_reason(error)}") from error


class TorchcodecDecoder(ClipDecoder):
    """See FrameDecoder."""

    def __init__(self, clip: Clip) -> None:
        video = self._video = open_video(clip.data, clip.name)
        super().__init__(clip, num_frames=len(video), bytes_per_sample=_bytes_per_sample(video))

    def _decode(self, frames: Sequence[int], ranks: list[int]) -> list[torch.Tensor]:
        # One by one: what is decoded by one call of torchcodec shares one block of memory.
        with self._opened(frames) as video:
            decoded = {rank: video.get_frame_at(rank) for rank in sorted(set(ranks))}
        for frame, rank in zip(frames, ranks, strict=True):
            self._check_time(frame, decoded[rank].pts_seconds)
        return [decoded[rank].data for rank in ranks]

    def _decode_together(self, frames: Sequence[int], ranks: list[int]) -> torch.Tensor:
        # A window's, mostly. get_frames_at takes any ranks, but copies them to torch's default device.
        start, stop = ranks[0], ranks[0] + len(ranks)
        if ranks != list(range(start, stop)):
            return super()._decode_together(frames, ranks)
        with self._opened(frames) as video:
            decoded = video.get_frames_in_range(start, stop)
        for frame, seconds in zip(frames, decoded.pts_seconds.tolist(), strict=True):
            self._check_time(frame, seconds)
        pictures: torch.Tensor = decoded.data
        self._of_its_size([pictures])  # all of one size, as they are in one tensor
        return pictures

    @contextmanager
    def _opened(self, frames: Sequence[int]) -> Iterator[Any]:
        if self._video is None:
            self._video = open_video(self.clip.data, self.clip.name)
        try:
            yield self._video
        except RuntimeError as error:
            # It would go on behind the damage, with pictures that lean on one it hasn't. A new one begins at the key
            # frame, and so comes to the damage again.
            self._video = None
            raise DecodeError(
                f"{self.clip.name}: torchcodec can't decode frames {list(frames)}: {_reason(error)}"
            ) from error

    def _check_time(self, frame: int, seconds: float) -> None:
        """Raise FrameMissing where the decoder gave another frame than the one of this time.

        torchcodec's times are float64 quotients of the same ticks, so half a tick leaves room for any rounding.
        """
        expected = self.clip.seconds(frame)
        if abs(seconds - expected) > 0.5 / self.clip.timescale:
            raise FrameMissing(
                f"{self.clip.name}: frame {frame} should be shown at {expected:.6f} s, but the one in its place is "
                f"shown at {seconds:.6f} s: the video isn't the one that its index was made from"
            )


class _Aliased:
    """Another array on the same memory, said to be writable.

    torch has no read-only tensors: ``from_numpy`` and ``frombuffer`` warn about such memory, and DLPack takes it from
    numpy 2.1 on only. The tensor goes to the demuxer alone, which reads. numpy keeps this object as the array's base,
    so the memory lives as long as the tensor.
    """

    def __init__(self, source: NDArray[np.uint8]) -> None:
        self._source = source
        address, _ = source.__array_interface__["data"]
        self.__array_interface__ = {**source.__array_interface__, "data": (address, False)}


def _tensor_on(data: memoryview | bytes) -> torch.Tensor:
    array = np.asarray(_Aliased(np.frombuffer(data, dtype=np.uint8)))
    tensor: torch.Tensor = import_torch().from_numpy(array)
    return tensor


def _bytes_per_sample(video: Any) -> int:  # noqa: ANN401
    # "yuv420p", "yuv420p10le" ...; the field is newer than the oldest torchcodec we take.
    return 2 if (getattr(video.metadata, "pixel_format", None) or "").endswith(("le", "be")) else 1


def _reason(error: Exception) -> str:
    """What went wrong, without where in torchcodec's source."""
    return PLACE_IN_SOURCE.sub("", str(error))

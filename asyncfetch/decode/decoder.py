"""The decoder of one clip, whatever library does it."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from asyncfetch.decode.backends import choose_backend, import_torch
from asyncfetch.errors import DecodeError, WrongLoop
from asyncfetch.runtime.fork import forks_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode.clip import Clip

__all__ = ["ClipDecoder", "FrameDecoder", "estimated_nbytes", "open_decoder", "stack_frames"]

KIB = 1024


class FrameDecoder(Protocol):
    """Decodes frames of one video. Threads may share it; it serves one of them at a time.

    It frees what it holds when its last reference goes.
    """

    @property
    def nbytes(self) -> int:
        """Memory it holds beside the clip's bytes; an estimate."""
        ...

    def frames(self, frames: Sequence[int]) -> torch.Tensor:
        """The frames at these positions of the clip, in this order; duplicates are welcome.

        Returns:
            (N, 3, height, width) uint8 RGB, or (N, 1, height, width) float32 distances of a depth camera. Colour lies
            channels-last in memory, the way decoders write it. Nobody else holds the tensor.

        Raises:
            FrameMissing: The video has no such frame, or another one in its place.
            DecodeError: The bytes can't be decoded.
            WrongLoop: The decoder was opened before a fork, in the parent.
        """
        ...

    def each(self, frames: Sequence[int]) -> list[torch.Tensor]:
        """The same, each (channels, height, width) in memory of its own; duplicates are one tensor."""
        ...

    def give(self, frames: Sequence[int], take: Callable[[int, torch.Tensor], None]) -> None:
        """The same, one by one: ``take(place in frames, picture)`` is called while the picture is in the caches."""
        ...


def open_decoder(clip: Clip, *, backend: DecoderBackend = "auto") -> FrameDecoder:
    """A decoder on the clip's own bytes; it copies nothing and keeps the clip alive.

    Args:
        clip: A depth clip goes to PyAV whatever ``backend`` says: torchcodec has 8 bits only.
        backend: "auto" is torchcodec where it loads, else PyAV, with one RuntimeWarning a process that says why. Both
            give the same pixels for video of 8 bits; for 10 bits FFmpeg 5 and 8 place colour differently by a fraction
            of a pixel, so edges of colour may differ. Of interlaced pictures PyAV takes the colours field by field, and
            torchcodec as if they weren't: edges of colour differ by a line.

    Raises:
        DecodeError: The bytes aren't a video that the back end can read.
        MissingDependency: The back end can't be loaded; the message has the commands that help.
    """
    with forks_wait():  # FFmpeg and its codecs fill tables of the process at their first use
        if choose_backend("pyav" if clip.depth is not None else backend) == "torchcodec":
            from asyncfetch.decode.torchcodec_decoder import TorchcodecDecoder

            return TorchcodecDecoder(clip)
        from asyncfetch.decode.pyav_decoder import PyAVDecoder

        return PyAVDecoder(clip)


def estimated_nbytes(codec: str, width: int, height: int, bytes_per_sample: int) -> int:
    """Memory of one open decoder after some random frames.

    In frames of 4:2:0, measured as growth of resident memory a decoder, torchcodec 0.13 with FFmpeg 5.1, 640x480 and
    1280x720, 8 and 10 bits: AV1 0.6-4, HEVC 8-9 (13.5 in 10 bits, counted as 8-bit frames), H.264 8-10 (14 with many
    reference frames; 15 in 10 bits, counted as 8-bit frames).
    """
    frames = 6 if codec == "av01" else 12
    return frames * width * height * 3 // 2 * bytes_per_sample + 256 * KIB


def stack_frames(frames: Sequence[torch.Tensor]) -> torch.Tensor:
    """At least one (channels, height, width) as (N, channels, height, width), channels-last in memory.

    A single one is not copied.
    """
    if len(frames) == 1:
        return frames[0].unsqueeze(0)
    stacked: torch.Tensor = import_torch().stack([frame.permute(1, 2, 0) for frame in frames])
    return stacked.permute(0, 3, 1, 2)


class ClipDecoder(ABC):
    """What both back ends share: which frames may be asked for, by one thread at a time, in one process."""

    def __init__(self, clip: Clip, *, num_frames: int, bytes_per_sample: int) -> None:
        self.clip = clip
        self.num_frames = num_frames  # that the decoder found
        self.nbytes = estimated_nbytes(clip.codec, clip.width, clip.height, bytes_per_sample)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # a decoder's state is one position in one video
        self._sound: set[int] = set()  # key frames of the clip that were looked at

    def frames(self, frames: Sequence[int]) -> torch.Tensor:
        """See FrameDecoder."""
        ranks = self._ranks(frames)
        if not ranks:
            return self._no_frames()
        with self._lock:
            return self._decode_together(frames, ranks)

    def each(self, frames: Sequence[int]) -> list[torch.Tensor]:
        """See FrameDecoder."""
        ranks = self._ranks(frames)
        if not ranks:
            return []
        with self._lock:
            return self._of_its_size(self._decode(frames, ranks))

    def give(self, frames: Sequence[int], take: Callable[[int, torch.Tensor], None]) -> None:
        """See FrameDecoder."""
        ranks = self._ranks(frames)
        with self._lock:
            rank, picture = -1, None
            for place in sorted(range(len(ranks)), key=ranks.__getitem__):
                if picture is None or ranks[place] != rank:
                    picture = None  # its memory, still in the caches, is the next one's
                    rank = ranks[place]
                    [picture] = self._of_its_size(self._decode([frames[place]], [rank]))
                take(place, picture)

    def _ranks(self, frames: Sequence[int]) -> list[int]:
        if os.getpid() != self._pid:  # before the lock: a thread that isn't here may have held it
            raise WrongLoop(
                f"{self.clip.name}: the decoder was opened in process {self._pid} and can't be used in its child "
                f"{os.getpid()}; open one there"
            )
        ranks = self.clip.ranks(frames)
        if ranks and max(ranks) >= self.num_frames:
            raise DecodeError(
                f"{self.clip.name}: its {self.clip.nbytes} bytes hold {self.num_frames} frames, and number "
                f"{max(ranks)} was asked for: they were cut short, or the header isn't theirs"
            )
        self._check_key_frames(ranks)
        return ranks

    def _check_key_frames(self, ranks: list[int]) -> None:
        """Raise DecodeError where one that decoding may have to start at isn't one."""
        if (key_frames := self.clip.key_frames) is None:
            return
        for number in {key_frames.in_front_of(rank) for rank in ranks} - self._sound:
            if not key_frames.stands_alone(self.clip.data, number):
                raise DecodeError(
                    f"{self.clip.name}: frame {key_frames.ranks[number]} of its clip is marked as a key frame and is "
                    "none, so that nothing can be decoded from there: remux the video, or encode it anew"
                )
            self._sound.add(number)

    def _no_frames(self) -> torch.Tensor:
        library = import_torch()
        channels, dtype = (3, library.uint8) if self.clip.depth is None else (1, library.float32)
        none: torch.Tensor = library.empty((0, channels, self.clip.height, self.clip.width), dtype=dtype, device="cpu")
        return none

    @abstractmethod
    def _decode(self, frames: Sequence[int], ranks: list[int]) -> list[torch.Tensor]:
        """The frames, at least one, whose ranks are in the clip. Called under the lock."""

    def _decode_together(self, frames: Sequence[int], ranks: list[int]) -> torch.Tensor:
        """The same as one tensor; for a back end that can write them into one, without a copy."""
        return stack_frames(self._of_its_size(self._decode(frames, ranks)))

    def _of_its_size(self, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same; DecodeError where one isn't as large as the clip, which a turned one may lie across.

        A file has one size in its index, but videos of others may have been joined to it by stream copy.
        """
        height, width = self.clip.height, self.clip.width
        for picture in pictures:
            if (found := tuple(picture.shape[-2:])) not in {(height, width), (width, height)}:
                raise DecodeError(
                    f"{self.clip.name}: a picture is {found[0]} high and {found[1]} wide; the index of its file says "
                    f"{height} and {width}: encode the video anew, in one size"
                )
        return pictures

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.clip.name!r}, {len(self.clip)} frames)"

"""A clip and its decoder: what both libraries share, by PyAV, by torchcodec, and which of them opens it."""

from __future__ import annotations

import bisect
import math
import os
import re
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import override

from asyncfetch.decode.backends import choose_backend, import_torch, on_this_thread
from asyncfetch.errors import ConfigError, DecodeError, FrameMissing, MissingDependency, WrongLoop
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.shared_memory import writable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode.picture_size import PictureSize
    from asyncfetch.media import KeyFrames

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
    """A video of one camera, or a part of one, whole in memory.

    Frames are numbered in the video: those of ``frame_index`` and ``pts`` from ``first_frame`` on. The clip may hold
    more frames than those: the key frame in front, and what lies between.
    """

    data: memoryview = field(repr=False)
    """A self-contained MP4, one byte an item, contiguous. It isn't written to while the clip lives."""
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
    first_frame: int = 0
    misplaced: NDArray[np.float64] | None = field(default=None, repr=False)
    """Shape (N, 2): when each frame is shown by the table and by the video, in seconds of the file, if these are too
    far apart; NaN for other frames."""
    whole_from: int | None = None
    """Time, in ticks, from which on pictures are whole, where the first one may lean on others in front of it."""

    def __len__(self) -> int:
        return len(self.frame_index)

    @property
    def nbytes(self) -> int:
        """Memory of the clip's bytes."""
        return self.data.nbytes

    def ranks(self, frames: Sequence[int]) -> list[int]:
        """Rank in the clip of each frame, in their order; FrameMissing if the video has no such frame."""
        first, count = self.first_frame, len(self)
        ranks = [int(self.frame_index[frame - first]) if 0 <= frame - first < count else -1 for frame in frames]
        if self.whole_from is not None:
            shown = (frame for frame, rank in zip(frames, ranks, strict=True) if rank >= 0)
            self._check_whole(shown, self.whole_from)
        if -1 in ranks:
            frame = frames[ranks.index(-1)]
            place = frame - first
            if self.misplaced is not None and 0 <= place < count and not np.isnan(self.misplaced[place, 0]):
                due, shown = self.misplaced[place].tolist()
                raise FrameMissing(
                    f"{self.name}: frame {frame} is due at {due:.6f} s of the video by from_timestamp and its row's "
                    f"timestamp, but the nearest frame is shown at {shown:.6f} s, which is {abs(shown - due):.6f} s "
                    "off and may be its neighbour: write these times anew, or allow more by "
                    "StreamConfig(tolerance_seconds=...), up to a quarter of a frame"
                )
            held = int(np.count_nonzero(self.frame_index >= 0))
            raise FrameMissing(
                f"{self.name}: the video has no frame {frame}; it has {held} of {count} frames. "
                "The video is shorter than its metadata says, shows no frame near the row's timestamp or two at one "
                "time, or the frame number is off."
            )
        return ranks

    def ticks(self, frame: int) -> int:
        """Presentation time of a frame that is there."""
        return int(self.pts[frame - self.first_frame])

    def _check_whole(self, frames: Iterable[int], whole_from: int) -> None:
        for frame in frames:
            if (late := whole_from - self.ticks(frame)) > 0:
                raise DecodeError(
                    f"{self.name}: frame {frame} can't be decoded: the video has no key frame in front of it but a "
                    "recovery point (intra refresh), from which a decoder has whole pictures only "
                    f"{late / self.timescale:.6f} s after that frame: encode it anew, with x264's intra-refresh=0"
                )


def stack_frames(frames: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack at least one (channels, height, width) as (N, channels, height, width), channels-last in memory.

    A single one is not copied.
    """
    if len(frames) == 1:
        return frames[0].unsqueeze(0)
    stacked: torch.Tensor = import_torch().stack([frame.permute(1, 2, 0) for frame in frames])
    return stacked.permute(0, 3, 1, 2)


class FrameDecoder(ABC):
    """Decodes frames of one video. Threads may share it; it serves one of them at a time.

    It frees what it holds when its last reference goes.

    Args:
        clip: The video.
        size: What pictures are brought to, once they are turned; None leaves them as they are.
    """

    num_frames: int
    """Frames that the library found."""
    nbytes: int
    """Memory it holds beside the clip's bytes; an estimate."""

    def __init__(self, clip: Clip, size: PictureSize | None = None) -> None:
        self.clip = clip
        self.size = size
        self._pid = os.getpid()
        self._lock = threading.Lock()  # a decoder's state is one position in one video
        self._sound: set[int] = set()  # key frames of the clip that were looked at

    def frames(self, frames: Sequence[int]) -> torch.Tensor:
        """The frames of these numbers, in this order; duplicates are welcome.

        Returns:
            (N, 3, height, width) uint8 RGB, or (N, 1, height, width) float32 distances of a depth camera. Colour lies
            channels-last in memory, the way decoders write it. The tensor is the caller's own. Height and width are
            the video's, or those that the decoder was opened with.

        Raises:
            FrameMissing: The video has no such frame, or another one in its place.
            DecodeError: The bytes can't be decoded.
            WrongLoop: The decoder was opened before a fork, in the parent.
        """
        return stack_frames(self.each(frames)) if len(frames) else self._no_frames()

    def each(self, frames: Sequence[int]) -> list[torch.Tensor]:
        """The frames, each (channels, height, width) in memory of its own; duplicates are one tensor."""
        pictures: dict[int, torch.Tensor] = {}
        self.give(frames, pictures.__setitem__)
        return [pictures[place] for place in range(len(frames))]

    def give(self, frames: Sequence[int], take: Callable[[int, torch.Tensor], None]) -> None:
        """Give frames one by one: ``take(place in frames, picture)`` is called while the picture is in the caches."""
        ranks = self._ranks(frames)
        with self._lock:
            rank, picture = -1, None
            for place in sorted(range(len(ranks)), key=ranks.__getitem__):
                if picture is None or ranks[place] != rank:
                    picture = None  # its memory, still in the caches, is the next one's
                    rank = ranks[place]
                    picture = self._decode(frames[place], rank)
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
        """DecodeError if a frame that decoding may have to start at isn't a key frame."""
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
        size = self.size or self.clip
        none: torch.Tensor = library.empty((0, channels, size.height, size.width), dtype=dtype, device="cpu")
        return none

    @abstractmethod
    def _decode(self, frame: int, rank: int) -> torch.Tensor:
        """The frame with this rank in the clip, in its size. Called under the lock."""

    def _estimate_nbytes(self, pixel_format: str) -> int:
        """Memory of one open decoder after some random frames of this format: "yuv420p", "yuv420p10le" ...

        In frames of 4:2:0, measured as growth of resident memory a decoder, torchcodec 0.13 with FFmpeg 5.1, 640x480
        and 1280x720, 8 and 10 bits: AV1 0.6-4, HEVC 8-9 (13.5 in 10 bits, counted as 8-bit frames), H.264 8-10 (14 with
        many reference frames; 15 in 10 bits, counted as 8-bit frames).
        """
        frames = 6 if self.clip.codec == "av01" else 12
        bytes_per_sample = 2 if pixel_format.endswith(("le", "be")) else 1
        return frames * self.clip.width * self.clip.height * 3 // 2 * bytes_per_sample + 256 * 1024

    def _check_size(self, height: int, width: int) -> None:
        """DecodeError if pictures aren't as large as the clip, which turned ones may lie across.

        A file has one size in its index, but videos of others may have been joined to it by stream copy.
        """
        clip = self.clip
        if (height, width) not in {(clip.height, clip.width), (clip.width, clip.height)}:
            raise DecodeError(
                f"{clip.name}: a picture is {height} high and {width} wide; the index of its file says {clip.height} "
                f"and {clip.width}: encode the video anew, in one size"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.clip.name!r}, {len(self.clip)} frames)"


AFTER_ALL = 1 << 63
"""A time past every frame's: whatever comes next has to be sought."""


class MemoryFile:
    """A buffer as a file for PyAV: only the blocks that it reads are copied."""

    def __init__(self, data: memoryview | bytes) -> None:
        self._data = memoryview(data)
        self._position = 0

    def read(self, size: int) -> bytes:
        """The next bytes, fewer at the end."""
        block = bytes(self._data[self._position : self._position + size])
        self._position += len(block)
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move from the start (0), here (1) or the end (2), and return the new position."""
        self._position = max(0, offset + (0, self._position, len(self._data))[whence])
        return self._position

    def tell(self) -> int:
        """The position of the next read."""
        return self._position


class PyAVDecoder(FrameDecoder):
    """Frames through PyAV: where torchcodec doesn't load, and for depth, of which that would lose 4 bits.

    A frame is found by its time alone. Decoding goes on from where it stands if no key frame lies between there and the
    frame, and starts at the key frame before it otherwise; after an error too, so that all frames after the damage, up
    to the next key frame, are the same error. Damage shows in H.264 where FFmpeg mended the picture, and in any codec
    where no picture comes of a coded frame; HEVC's and AV1's decoders don't tell of all else that they put up with.

    Args:
        clip: The video.
        turns: Whether pictures are turned as its track says, as torchcodec turns them by itself.
        size: As in FrameDecoder.
    """

    def __init__(self, clip: Clip, *, turns: bool = True, size: PictureSize | None = None) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        super().__init__(clip, size)
        self._turns = turns
        self._reformatter: Any = VideoReformatter()  # one of a frame's own would be set up anew for each
        self._distances = None if clip.depth is None else clip.depth.distances()
        self._next_pts = 0  # the frames still to come are shown at this time or later
        self._errors = av.FFmpegError
        try:
            self._container = av.open(MemoryFile(clip.data), mode="r")
            self._stream = self._single_stream()
            # What the file says that it shows. The last packet is empty: it flushes the decoder.
            packets = self._container.demux(self._stream)
            shown = [(packet.pts, packet.is_keyframe) for packet in packets if packet.size and not packet.is_discard]
            self._shown_pts = sorted(pts for pts, _ in shown)
            self._key_pts = sorted(pts for pts, is_key in shown if is_key)
            if not self._key_pts:
                raise DecodeError(f"{clip.name}: its {clip.nbytes} bytes hold no key frame")
            self._seek(self._key_pts[0])
        except self._errors as error:
            raise DecodeError(f"{clip.name}: PyAV can't open its {clip.nbytes} bytes: {error}") from error
        self.num_frames = len(shown)
        self.nbytes = self._estimate_nbytes(self._stream.codec_context.pix_fmt or "")

    def __del__(self) -> None:
        # Container and stream refer to each other: without this they'd wait for the garbage collector.
        if (container := getattr(self, "_container", None)) is not None:
            container.close()

    def _single_stream(self) -> Any:  # noqa: ANN401
        clip, streams = self.clip, self._container.streams.video
        if not streams:
            raise DecodeError(f"{clip.name}: it has no video track")
        stream = streams[0]
        if stream.time_base != Fraction(1, clip.timescale):
            raise DecodeError(f"{clip.name}: it counts time in {stream.time_base} s, not in 1/{clip.timescale} s")
        stream.codec_context.thread_count = 1  # the threads are ours, one a decoder
        return stream

    def _decode(self, frame: int, rank: int) -> torch.Tensor:
        try:
            return self._frame_at(self.clip.ticks(frame))
        except self._errors as error:
            self._next_pts = AFTER_ALL
            raise DecodeError(f"{self.clip.name}: PyAV can't decode frames {[frame]}: {error}") from error

    def _frame_at(self, pts: int) -> torch.Tensor:
        key = self._key_pts[max(0, bisect.bisect_right(self._key_pts, pts) - 1)]
        if not key <= self._next_pts <= pts:
            self._seek(key)
        for frame in self._coming:
            if frame.pts is None:
                raise DecodeError(f"{self.clip.name}: it has a frame without a time, so frames can't be found by time")
            if frame.pts < self._begin(key):
                continue  # may lean on frames in front of the clip
            self._check_whole(frame)
            self._next_pts = frame.pts + 1
            if frame.pts == pts:
                return self._picture(frame)
            if frame.pts > pts:
                break
        raise FrameMissing(
            f"{self.clip.name}: no frame is shown at {pts / self.clip.timescale:.6f} s (tick {pts}); decoding from the "
            f"key frame at {key / self.clip.timescale:.6f} s came past it or to the end: "
            "the video isn't the one that its index was made from"
        )

    def _check_whole(self, frame: Any) -> None:  # noqa: ANN401
        """DecodeError if it is damaged, or one before it didn't come: it may lean on that."""
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
        self._next_pts = self._begin(key_pts)

    def _begin(self, key_pts: int) -> int:
        """The time from which on frames are whole that are decoded from that key frame on."""
        return key_pts if self.clip.whole_from is None else max(key_pts, self.clip.whole_from)

    def _picture(self, frame: Any) -> torch.Tensor:  # noqa: ANN401
        pixels: torch.Tensor = import_torch().from_numpy(self._array(frame)).permute(2, 0, 1)
        self._check_size(*pixels.shape[-2:])
        return pixels if self.size is None else self.size.resize(pixels)

    def _array(self, frame: Any) -> NDArray[Any]:  # noqa: ANN401
        """(height, width, channels)."""
        if self._distances is None:
            rgb: NDArray[np.uint8] = self._reformatter.reformat(frame, format="rgb24", **on_this_thread()).to_ndarray()
            # By whole quarters. Without an angle the rotation is below any.
            degrees = frame.rotation if self._turns and abs(frame.rotation) <= 180 else 0
            return np.ascontiguousarray(np.rot90(rgb, round(degrees / 90)))
        codes = self._reformatter.reformat(frame, format="gray12le", **on_this_thread()).to_ndarray()
        distances: NDArray[np.float32] = self._distances.take(codes, mode="clip")
        return distances[..., np.newaxis]


PLACE_IN_SOURCE = re.compile(r"^\w+, \S+:\d+, ")
"""Function, file and line, as they begin torchcodec's messages."""


def open_video(data: memoryview | bytes, name: str, **settings: Any) -> Any:  # noqa: ANN401 - torchcodec is optional
    """A torchcodec VideoDecoder on these bytes, read in place; DecodeError if FFmpeg here can't decode them."""
    from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

    try:
        # The threads are ours, one a decoder; "cpu", because torch's default device may be another.
        return VideoDecoder(
            tensor_on(data), num_ffmpeg_threads=1, seek_mode="exact", dimension_order="NCHW", device="cpu", **settings
        )
    except (RuntimeError, ValueError, AssertionError) as error:
        raise DecodeError(f"{name}: torchcodec can't open its {len(data)} bytes: {_reason(error)}") from error


class TorchcodecDecoder(FrameDecoder):
    """Frames through torchcodec, by its public API.

    It doesn't tell that FFmpeg mended a picture, which is what mostly comes of damaged bits in H.264 and HEVC, or that
    it passed over a coded frame, as of AV1 if only zeros are left of it: the frame itself is missing, but those that
    lean on it come, and are wrong. Nor does it tell, bringing pictures to a size, that one had another size than the
    first. Opening one with torchcodec 0.13 on torch 2.13 leaks 1 kB, and resident memory grows by 2-4 kB
    (pytorch/pytorch#191340, mended in later releases).
    """

    def __init__(self, clip: Clip, *, size: PictureSize | None = None) -> None:
        super().__init__(clip, size)
        video = self._video = self._open()
        self.num_frames = len(video)
        # The field is newer than the oldest torchcodec we take.
        self.nbytes = self._estimate_nbytes(getattr(video.metadata, "pixel_format", None) or "")

    def _open(self) -> Any:  # noqa: ANN401
        clip, size = self.clip, self.size
        if size is None:
            return open_video(clip.data, clip.name)
        upright = clip.height, clip.width
        video = open_video(clip.data, clip.name, transforms=_transforms(size, *upright))
        found = video.metadata.height, video.metadata.width
        self._check_size(*found)
        if found != upright and size.fit != "stretch":  # it is turned, which only torchcodec knows
            video = open_video(clip.data, clip.name, transforms=_transforms(size, *found))
        return video

    def _decode(self, frame: int, rank: int) -> torch.Tensor:
        # By itself: what is decoded by one call of torchcodec shares one block of memory.
        with self._opened([frame]) as video:
            decoded = video.get_frame_at(rank)
        self._check_time(frame, decoded.pts_seconds)
        return self._filled(decoded.data)

    @override
    def frames(self, frames: Sequence[int]) -> torch.Tensor:
        # A window's, mostly. get_frames_at takes any ranks, but copies them to torch's default device.
        ranks = self._ranks(frames)
        if not ranks or ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            return super().frames(frames)
        with self._lock:
            with self._opened(frames) as video:
                decoded = video.get_frames_in_range(ranks[0], ranks[-1] + 1)
            for frame, seconds in zip(frames, decoded.pts_seconds.tolist(), strict=True):
                self._check_time(frame, seconds)
            return self._filled(decoded.data)

    def _filled(self, pictures: torch.Tensor) -> torch.Tensor:
        if self.size is not None:
            return self.size.fill(pictures)
        self._check_size(*pictures.shape[-2:])
        return pictures

    @contextmanager
    def _opened(self, frames: Sequence[int]) -> Iterator[Any]:
        if self._video is None:
            self._video = self._open()
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
        """FrameMissing if the decoder gave another frame than the one of this time.

        torchcodec's times are float64 quotients of the same ticks, so half a tick leaves room for any rounding.
        """
        expected = self.clip.ticks(frame) / self.clip.timescale
        if abs(seconds - expected) > 0.5 / self.clip.timescale:
            raise FrameMissing(
                f"{self.clip.name}: frame {frame} should be shown at {expected:.6f} s, but the one in its place is "
                f"shown at {seconds:.6f} s: the video isn't the one that its index was made from"
            )


def tensor_on(data: memoryview | bytes) -> torch.Tensor:
    """A tensor of uint8 on this memory, for a decoder that reads it."""
    tensor: torch.Tensor = import_torch().from_numpy(writable(np.frombuffer(data, dtype=np.uint8)))
    return tensor


def _transforms(size: PictureSize, height: int, width: int) -> list[Any]:
    """What torchcodec does to pictures of this height and width; MissingDependency before 0.10, which can't."""
    from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]

    if "transforms" not in signature(VideoDecoder).parameters:
        raise MissingDependency(
            'this torchcodec can\'t bring pictures to a size while it decodes: pip install "torchcodec>=0.10", which '
            "needs torch 2.10; or use decoder='pyav'"
        )
    from torchcodec.transforms import CenterCrop, Resize  # type: ignore[attr-defined]

    scaled = Resize(size.scaled(height, width))
    return [scaled, CenterCrop((size.height, size.width))] if size.fit == "crop" else [scaled]


def _reason(error: Exception) -> str:
    """The message, without the place in torchcodec's source."""
    return PLACE_IN_SOURCE.sub("", str(error))


def open_decoder(clip: Clip, *, backend: DecoderBackend = "auto", size: PictureSize | None = None) -> FrameDecoder:
    """A decoder on the clip's own bytes; it copies nothing and keeps the clip alive.

    Args:
        clip: A depth clip goes to PyAV whatever ``backend`` says: torchcodec has 8 bits only.
        backend: "auto" is torchcodec where it loads, else PyAV, with one RuntimeWarning a process that says why. Both
            give the same pixels for video of 8 bits; for 10 bits FFmpeg 5 and 8 place colour differently by a fraction
            of a pixel, so edges of colour may differ. Of interlaced pictures PyAV takes the colours field by field, and
            torchcodec as if they weren't: edges of colour differ by a line.
        size: What pictures are brought to, once they are turned as the track says: by torchcodec's own ``Resize`` and
            ``CenterCrop``, which need torchcodec 0.10, or by PyAV, alike (see PictureSize). None leaves them as they
            are.

    Raises:
        DecodeError: The bytes aren't a video that the back end can read.
        MissingDependency: The back end can't be loaded; the message has the commands that help.
    """
    with forks_wait():  # FFmpeg and its codecs fill tables of the process at their first use
        if choose_backend("pyav" if clip.depth is not None else backend) == "torchcodec":
            return TorchcodecDecoder(clip, size=size)
        return PyAVDecoder(clip, turns=backend != "pyav-unturned", size=size)

"""Encodes pictures to MP4 as LeRobot does: each episode on its own, then joined by stream copy."""

from __future__ import annotations

import io
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from asyncfetch.errors import ConfigError, MissingDependency, install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

P = ParamSpec("P")
T = TypeVar("T")
Codec = Literal["av1", "h264", "hevc"]

# Both libraries print to stderr by themselves; SVT-AV1 takes its level from SVT_LOG (1: errors only).
# The x265 of PyAV 18.1 damages pictures that are no wider than a coding tree unit of 64 pixels, differently each time.
_X265 = "log-level=none:ctu=32"


@dataclass(frozen=True, slots=True)
class Encoding:
    """The way in which pictures become a stream."""

    codec: str
    """Name in `info.json`."""
    encoder: str
    """Name in FFmpeg."""
    pixel_format: str
    """Pixel format of the stream."""
    source_format: str
    """Pixel format of the input pictures: rgb24 is (H, W, 3) uint8, gray12le is (H, W) uint16 up to 4095."""
    crf: int
    """Default quality: LeRobot's for AV1, the encoders' usual ones for the others."""
    preset: int | None
    options: tuple[tuple[str, str], ...] = ()
    """Further encoder options."""


ENCODINGS: dict[Codec, Encoding] = {
    # LeRobot uses preset 12. From preset 10 on, SVT-AV1 4.1 leaves cells of our inverting pictures unchanged, at any
    # quality, and some of its streams do not decode; at 8 and 9 every tested picture was right.
    "av1": Encoding("av1", "libsvtav1", "yuv420p", "rgb24", 30, 8),
    "h264": Encoding("h264", "libx264", "yuv420p", "rgb24", 23, None),
    "hevc": Encoding("hevc", "libx265", "yuv420p", "rgb24", 28, None, (("x265-params", _X265),)),
}
DEPTH_ENCODING = Encoding(
    "hevc", "libx265", "gray12le", "gray12le", 28, None, (("x265-params", f"lossless=1:{_X265}"),)
)


def require_encoder(encoding: Encoding) -> None:
    """Checks that PyAV is installed and has the encoder: MissingDependency where it hasn't."""
    try:
        import av
    except ImportError as error:
        raise MissingDependency(f"encoding videos needs PyAV: {install_command('testing')}") from error
    try:
        av.codec.Codec(encoding.encoder, "w")
    except av.codec.codec.UnknownCodecError as error:
        raise MissingDependency(
            f"this PyAV was built without {encoding.encoder}; its wheels have it: pip install --force-reinstall av"
        ) from error


def keeping_priority(encode: Callable[P, T]) -> Callable[P, T]:
    """Run the function in a thread of its own, so that an encoder's priority ends with it.

    As root, SVT-AV1 4.1 raises its calling thread to the highest realtime priority (SCHED_FIFO, 99), and leaves it
    there. Threads and processes that this thread starts later would starve the machine.
    """

    @wraps(encode)
    def apart(*args: P.args, **options: P.kwargs) -> T:
        with ThreadPoolExecutor(1, "encode") as thread:
            return thread.submit(encode, *args, **options).result()

    return apart


@keeping_priority
def encode_clip(
    pictures: Iterable[NDArray[np.uint8] | NDArray[np.uint16]],
    *,
    encoding: Encoding,
    fps: int,
    gop: int,
    crf: int | None = None,
) -> bytes:
    """A whole MP4 of one video track, moov at the tail, its frames exactly 1/fps apart.

    Args:
        pictures: At least one, all of one shape and in the encoding's source format.
        encoding: One of `ENCODINGS`, or `DEPTH_ENCODING`.
        fps: Frames per second.
        gop: Most frames from one key frame to the next.
        crf: Quality; None takes the encoding's. ConfigError where the encoder refuses this, or the pictures.
    """
    import av

    os.environ.setdefault("SVT_LOG", "1")
    options = {"g": str(gop), "crf": str(encoding.crf if crf is None else crf), **dict(encoding.options)}
    if encoding.preset is not None:
        options["preset"] = str(encoding.preset)
    pictures = iter(pictures)
    begun = list(itertools.islice(pictures, 2))
    if len(begun) == 1 and encoding.encoder == "libx265":
        options["bf"] = "0"  # else x265 reads missing pictures for B-frames, and may write garbage
    file = io.BytesIO()
    try:
        with av.open(file, "w", format="mp4") as container:
            stream: Any = None
            for picture in itertools.chain(begun, pictures):
                if stream is None:
                    stream = container.add_stream(encoding.encoder, rate=fps, options=options)
                    stream.height, stream.width = picture.shape[:2]
                    stream.pix_fmt = encoding.pixel_format
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format=encoding.source_format)))
            if stream is None:
                raise ConfigError("a clip needs at least one picture")
            container.mux(stream.encode())
    except av.FFmpegError as error:
        raise ConfigError(
            f"{encoding.encoder} with {options} at {fps} fps can't encode these pictures: {error}"
        ) from error
    return file.getvalue()


def join_clips(clips: Sequence[bytes], path: Path, *, fps: int) -> None:
    """Writes clips of one encoding, at least one, one after the other, without coding them again.

    A single clip is written unchanged, with its moov at the tail. Several are joined with the moov in front; clip n
    starts exactly where clip n - 1 ends, in integer ticks.
    """
    import av

    if not clips:
        raise ConfigError(f"{path} needs at least one clip")
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(clips) == 1:
        path.write_bytes(clips[0])
        return
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as output:
        target: Any = None
        offset_ticks = next_dts = 0
        for clip in clips:
            with av.open(io.BytesIO(clip), "r") as source:
                stream: Any = source.streams.video[0]
                # Opaque: by default PyAV looks for an encoder of the decoder's name, and AV1's has none.
                target = target or output.add_stream_from_template(stream, opaque=True)
                target.time_base = stream.time_base  # which PyAV before 18 leaves to the muxer
                packet: Any
                for packet in source.demux(stream):
                    if packet.dts is None:  # the demuxer's end mark
                        continue
                    packet.pts += offset_ticks
                    # A clip's decoding begins some frames ahead of its first picture, perhaps more than in the clip
                    # before. If times went back, the muxer would shift the pictures, too.
                    packet.dts = max(packet.dts + offset_ticks, next_dts) if offset_ticks else packet.dts
                    next_dts = packet.dts + 1
                    packet.stream = target
                    output.mux(packet)
                offset_ticks += stream.frames * round(1 / (fps * stream.time_base))

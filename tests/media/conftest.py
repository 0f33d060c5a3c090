"""Real videos, and the truth about their frames from PyAV decoding the whole file."""

from __future__ import annotations

import io
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest

from asyncfetch.media import Mp4Index, locate_moov, parse_moov
from asyncfetch.testing.clips import keeping_priority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from asyncfetch.media import ClipPlan

FPS = 30
TICKS = 512  # per frame, in FFmpeg's default time scale for 30 fps


@dataclass(frozen=True)
class Video:
    data: bytes
    truth: dict[int, NDArray[np.uint8]]  # frame number -> RGB pixels

    def index(self) -> Mp4Index:
        start, stop = locate_moov(self.data, size=len(self.data), url="video.mp4")
        return parse_moov(self.data[start:stop], url="video.mp4")


def samples_of(index: Mp4Index, first: int, count: int, *, fps: float) -> NDArray[np.int64]:
    """The sample of each of ``count`` frames at this rate; of half a frame's tolerance."""
    return index.samples_at((first + np.arange(count)) / fps, within_seconds=0.5 / fps)[0]


def clip_of(index: Mp4Index, first: int, count: int, *, fps: float) -> ClipPlan:
    return index.clip(samples_of(index, first, count, fps=fps))


def picture(number: int) -> NDArray[np.uint8]:
    """A picture that differs from its neighbours everywhere: a brightness and a moving bar."""
    pixels = np.full((96, 128, 3), (number * 37) % 200, np.uint8)
    pixels[:, (number * 5) % 108 :][:, :20] = 255 - (number * 11) % 128
    return pixels


@contextmanager
def _mp4_writer(movflags: str) -> Iterator[tuple[Any, Path]]:
    # A file on disk, because FFmpeg opens it again by name to move the index to the front.
    with TemporaryDirectory() as directory:
        path = Path(directory) / "video.mp4"
        with av.open(path, "w", options={"movflags": movflags} if movflags else {}) as container:
            yield container, path


@keeping_priority
def encode(
    codec: str,
    *,
    numbers: Iterable[int] = range(50),
    first_picture: int = 0,
    gop: int = 30,
    audio: bool = False,
    movflags: str = "",
    **options: str,
) -> bytes:
    with _mp4_writer(movflags) as (container, path):
        stream: Any = container.add_stream(
            codec, rate=FPS, options={name.replace("_", "-"): value for name, value in options.items()}
        )
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 128, 96, "yuv420p", gop
        stream.codec_context.thread_count = 1
        sound: Any = container.add_stream("aac", rate=48_000, layout="mono") if audio else None
        for number in numbers:
            frame = av.VideoFrame.from_ndarray(picture(first_picture + number), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
            if sound is not None:
                wave = av.AudioFrame.from_ndarray(np.zeros((1, 1600), np.float32), format="fltp", layout="mono")
                wave.sample_rate, wave.pts, wave.time_base = 48_000, number * 1600, Fraction(1, 48_000)
                container.mux(sound.encode(wave))
        container.mux(stream.encode(None))
        if sound is not None:
            container.mux(sound.encode(None))
        container.close()
        return path.read_bytes()


def remux(files: Iterable[bytes], *, shift_frames: int = 0, movflags: str = "") -> bytes:
    """The files' video one after the other by stream copy, all ``shift_frames`` later."""
    with _mp4_writer(movflags) as (container, path):
        stream: Any = None
        source: Any
        offset = shift_frames * TICKS
        for data in files:
            with av.open(io.BytesIO(data), "r") as source:
                if stream is None:
                    stream = container.add_stream_from_template(source.streams.video[0], opaque=True)
                packets = [packet for packet in source.demux(video=0) if packet.pts is not None]
                for packet in packets:
                    packet.pts, packet.dts = packet.pts + offset, packet.dts + offset
                    packet.stream = stream
                    container.mux(packet)
                offset += len(packets) * TICKS
        container.close()
        return path.read_bytes()


def boxes(data: bytes) -> list[tuple[bytes, bytes]]:
    """(kind, body) of the boxes in a row; 32-bit sizes only."""
    found, offset = [], 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4])
        found.append((data[offset + 4 : offset + 8], data[offset + 8 : offset + size]))
        offset += size
    return found


def box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return (8 + len(body)).to_bytes(4) + kind + body


def u32s(*numbers: int) -> bytes:
    return b"".join((number & 0xFFFFFFFF).to_bytes(4) for number in numbers)


CONTAINERS = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts"}


def rewrite(data: bytes, change: Callable[[bytes, bytes], tuple[bytes, bytes] | None]) -> bytes:
    """The boxes with ``change(kind, body)`` applied to every leaf; None leaves it out."""
    out = b""
    for kind, body in boxes(data):
        if kind in CONTAINERS:
            out += box(kind, rewrite(body, change))
        elif (changed := change(kind, body)) is not None:
            out += box(*changed)
    return out


EDIT_LISTS = [
    [(1600, 0)],
    [(1000, 2 * TICKS)],
    [(1000, 7 * TICKS + 200)],
    [(1000, 7 * TICKS - 100)],
    [(333, 3 * TICKS + 1)],
    [(500, -1), (200, -1), (999, 2 * TICKS)],
    [(300, -1), (1000, 12 * TICKS + 300)],
    [(33, 2 * TICKS)],
]
"""Duration and start of each edit."""


def with_edits(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    """The same file with another edit list."""
    body = struct.pack(">II", 0, len(edits)) + b"".join(struct.pack(">IiI", *edit, 0x10000) for edit in edits)
    return rewrite(data, lambda kind, old: (kind, body if kind == b"elst" else old))


def with_co64(data: bytes) -> bytes:
    """The same file, moov at the tail, with 64-bit chunk offsets."""

    def widen(kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        if kind != b"stco":
            return kind, body
        return b"co64", body[:8] + np.frombuffer(body, ">u4", offset=8).astype(">u8").tobytes()

    return rewrite(data, widen)


def as_quicktime(data: bytes) -> bytes:
    """The same file, moov at the tail, as old cameras write it: an empty box in the place of ftyp."""
    return data[:4] + b"wide" + data[8:]


def decode(data: bytes | bytearray) -> dict[int, NDArray[np.uint8]]:
    """Presentation tick -> RGB pixels of every frame that PyAV shows."""
    container: Any
    with av.open(io.BytesIO(data)) as container:
        return {frame.pts: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}


OPEN_X264 = "open-gop=1:keyint=10:min-keyint=5:bframes=3:b-adapt=0:scenecut=0"
X265 = "log-level=error:scenecut=0:bframes=3:b-adapt=0:keyint=10"  # the last of two equal settings wins
MAKERS: dict[str, Callable[[], bytes]] = {
    "av1-g2": lambda: encode("libsvtav1", gop=2, preset="12"),
    "av1-g30": lambda: encode("libsvtav1", gop=30, preset="12"),
    "h264-g2": lambda: encode("libx264", gop=2),
    "h264-g30": lambda: encode("libx264", gop=30),
    "h264-g250": lambda: encode("libx264", gop=250),
    "h264-all-key": lambda: encode("libx264", gop=1),
    "h264-faststart": lambda: encode("libx264", gop=10, movflags="faststart"),
    "h264-negative-ctts": lambda: encode("libx264", gop=10, movflags="negative_cts_offsets"),
    "h264-co64": lambda: with_co64(encode("libx264", gop=10)),
    "h264-audio": lambda: encode("libx264", gop=10, audio=True),
    "h264-open": lambda: encode("libx264", x264_params=OPEN_X264),
    "h264-open-negative-ctts": lambda: encode("libx264", x264_params=OPEN_X264, movflags="negative_cts_offsets"),
    "h264-open-with-a-gap": lambda: encode(
        "libx264", x264_params=OPEN_X264, numbers=[*range(30), *range(300, 350)], gop=10
    ),
    "hevc-open": lambda: encode("libx265", x265_params=X265),
    "hevc-open-adjacent-keys": lambda: encode("libx265", x265_params=f"{X265}:min-keyint=1:keyint=4:bframes=8"),
    "hevc-g2": lambda: encode("libx265", x265_params=f"{X265}:keyint=2"),
    "episodes-av1": lambda: remux([
        encode("libsvtav1", numbers=range(n), first_picture=100 * n, gop=2, preset="12") for n in (20, 7, 13)
    ]),
    "episodes-h264": lambda: remux(
        [encode("libx264", numbers=range(n), first_picture=100 * n, gop=5) for n in (20, 3, 13)], movflags="faststart"
    ),
    "h264-variable-rate": lambda: encode("libx264", numbers=[n + n * n // 40 for n in range(50)], gop=20),
    "h264-quicktime": lambda: as_quicktime(encode("libx264", gop=10)),
    "vp9": lambda: encode("libvpx-vp9", gop=20, deadline="realtime", cpu_used="8"),
    "one-frame": lambda: encode("libx264", numbers=[0]),
    "dropped-frames": lambda: encode("libx264", numbers=[n for n in range(50) if n not in (7, 8, 30)], gop=5),
    "starts-late": lambda: remux([encode("libx264", gop=10)], shift_frames=10),
    "starts-hidden": lambda: remux([encode("libx264", gop=10)], shift_frames=-15),
}


SPECIAL: dict[str, Callable[[], bytes]] = {
    "fragmented": lambda: encode("libx264", gop=10, movflags="frag_keyframe+empty_moov"),
}


@pytest.fixture(scope="session")
def make_video() -> Callable[[str], Video]:
    """Makes a video by name, once."""
    made: dict[str, Video] = {}

    def make(name: str) -> Video:
        if name not in made:
            data = (MAKERS | SPECIAL)[name]()
            frames = decode(data)
            made[name] = Video(data, {round(pts / TICKS): pixels for pts, pixels in frames.items() if pts >= 0})
        return made[name]

    return make


@pytest.fixture(params=list(MAKERS))
def video(request: pytest.FixtureRequest, make_video: Callable[[str], Video]) -> Video:
    return make_video(request.param)

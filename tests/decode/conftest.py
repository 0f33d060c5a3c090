"""Small real videos, encoded here, and what PyAV's plain decoding says is in them."""

from __future__ import annotations

import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest

from asyncfetch.decode import Clip, DepthScale
from asyncfetch.testing.clips import keeping_priority

if TYPE_CHECKING:
    from numpy.typing import NDArray

FRAMES = 30
WIDTH, HEIGHT = 160, 120

ENCODERS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "av1": ("libsvtav1", "av01", "yuv420p", {"preset": "12", "crf": "30", "g": "2", "svtav1-params": "lp=1"}),
    "h264": ("libx264", "avc1", "yuv420p", {"preset": "veryfast", "g": "10", "bf": "2", "threads": "1"}),
    "hevc": ("libx265", "hev1", "yuv420p", {"preset": "fast", "x265-params": "keyint=6:bframes=2:log-level=none"}),
    "h264-bt709-full": (
        "libx264",
        "avc1",
        "yuv420p",
        {"preset": "veryfast", "g": "10", "x264-params": "fullrange=on:colormatrix=bt709:colorprim=bt709"},
    ),
    "hevc-10bit": ("libx265", "hev1", "yuv420p10le", {"preset": "fast", "x265-params": "keyint=6:log-level=none"}),
}
LOSSLESS = {"preset": "ultrafast", "x265-params": "lossless=1:log-level=none:keyint=2"}


@dataclass(frozen=True)
class Video:
    """An MP4 and its frames, from first to last as PyAV decodes it."""

    data: bytes
    codec: str
    pts: NDArray[np.int64]
    timescale: int
    frames: NDArray[Any]
    """(N, height, width, 3) uint8, or (N, height, width) uint16 depth codes."""

    def clip(self, *, depth: DepthScale | None = None, **changes: Any) -> Clip:  # noqa: ANN401
        count, height, width = self.frames.shape[:3]
        fields: dict[str, Any] = {
            "data": memoryview(self.data),
            "frame_index": np.arange(count, dtype=np.int32),
            "pts": self.pts,
            "timescale": self.timescale,
            "codec": self.codec,
            "width": width,
            "height": height,
            "name": "https://data.example.org/file-000.mp4, episode 7",
            "depth": depth,
        }
        return Clip(**(fields | changes))


@keeping_priority
def encode(
    encoder: str, pix_fmt: str, options: dict[str, str], images: list[NDArray[Any]], image_format: str = "rgb24"
) -> bytes:
    """An MP4 of the images, index in front."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "video.mp4"  # FFmpeg reads the file again to move its index to the front
        with av.open(path, "w", options={"movflags": "faststart"}) as container:
            stream: Any = container.add_stream(encoder, rate=30, options=options)
            stream.height, stream.width = images[0].shape[:2]
            stream.pix_fmt = pix_fmt
            for image in images:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format=image_format)))
            container.mux(stream.encode())
        return path.read_bytes()


def video_of(data: bytes, codec: str, pixel_format: str = "rgb24") -> Video:
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        decoded = [(frame.pts, frame.to_ndarray(format=pixel_format)) for frame in container.decode(stream)]
        assert stream.time_base is not None
        timescale = stream.time_base.denominator
    pts = np.array([time for time, _ in decoded], np.int64)
    return Video(data, codec, pts, timescale, np.stack([image for _, image in decoded]))


@pytest.fixture(scope="session")
def images() -> list[NDArray[np.uint8]]:
    """A moving pattern; no two are alike."""
    blocks = np.random.default_rng(0).integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), np.uint8)
    pattern = blocks.repeat(8, 0).repeat(8, 1)
    return [np.ascontiguousarray(np.roll(pattern, 5 * index, axis=1)) for index in range(FRAMES)]


@pytest.fixture(scope="session")
def videos(images: list[NDArray[np.uint8]]) -> dict[str, Video]:
    return {
        name: video_of(encode(encoder, pix_fmt, options, images), codec)
        for name, (encoder, codec, pix_fmt, options) in ENCODERS.items()
    }


@pytest.fixture(scope="session")
def h264(videos: dict[str, Video]) -> Video:
    return videos["h264"]


@pytest.fixture(scope="session")
def depth_codes() -> list[NDArray[np.uint16]]:
    ramp = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    return [(ramp + 997 * index) % 4096 for index in range(6)]


@pytest.fixture(scope="session")
def depth_video(depth_codes: list[NDArray[np.uint16]]) -> Video:
    return video_of(encode("libx265", "gray12le", LOSSLESS, depth_codes, "gray12le"), "hev1", "gray12le")

"""Short videos with what a test is about."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def movie(
    frames: int = 12,
    *,
    fps: int = 8,
    size: tuple[int, int] = (64, 48),
    group: int = 4,
    audio: bool = False,
    form: str = "mp4",
    codec: str = "libx264",
    movflags: str = "",
) -> bytes:
    """A video of so many frames, each of another brightness; width and height are ``size``."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "made"
        _write(path, frames, fps, size, group, form, codec, movflags, audio=audio)
        return path.read_bytes()


def _write(
    path: Path,
    frames: int,
    fps: int,
    size: tuple[int, int],
    group: int,
    form: str,
    codec: str,
    movflags: str,
    *,
    audio: bool,
) -> None:
    with av.open(path, "w", format=form, options={"movflags": movflags} if movflags else {}) as container:
        stream = container.add_stream(codec, rate=fps, options={"g": str(group)})
        stream.width, stream.height = size  # type: ignore[union-attr]
        stream.pix_fmt = "yuv420p"  # type: ignore[union-attr]
        stream.time_base = Fraction(1, fps)
        sound = container.add_stream("aac", rate=8000) if audio else None
        for number in range(frames):
            picture = np.full((size[1], size[0], 3), 10 + number * 230 // max(frames, 1), np.uint8)
            frame = av.VideoFrame.from_ndarray(picture)
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))  # type: ignore[union-attr, arg-type]
        container.mux(stream.encode())  # type: ignore[union-attr]
        if sound is not None:
            quiet = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * frames // fps), np.float32), "fltp", "mono")
            quiet.sample_rate, quiet.pts = 8000, 0
            container.mux(sound.encode(quiet))
            container.mux(sound.encode())

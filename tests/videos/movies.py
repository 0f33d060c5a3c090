"""Short videos with what a test is about."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

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
        with av.open(path, "w", format=form, options={"movflags": movflags} if movflags else {}) as container:
            stream: Any = container.add_stream(codec, rate=fps, options={"g": str(group)})
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            stream.time_base = Fraction(1, fps)
            sound = container.add_stream("aac", rate=8000) if audio else None
            for number in range(frames):
                picture = np.full((size[1], size[0], 3), 10 + number * 230 // max(frames, 1), np.uint8)
                frame = av.VideoFrame.from_ndarray(picture)
                frame.pts, frame.time_base = number, Fraction(1, fps)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
            if sound is not None:
                quiet = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * frames // fps), np.float32), "fltp", "mono")
                quiet.sample_rate, quiet.pts = 8000, 0
                container.mux(sound.encode(quiet))
                container.mux(sound.encode())
        return path.read_bytes()

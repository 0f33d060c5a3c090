"""The corpus, once, and what torchcodec says of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from torchcodec.decoders import AudioDecoder, VideoDecoder  # type: ignore[attr-defined]

from tests.videos.corpus import make_corpus, make_heavy

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the videos that tests/videos/corpus.py makes."""
    root = tmp_path_factory.mktemp("corpus")
    make_corpus(root)
    return root


@pytest.fixture(scope="session")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two large files, by name: with short and with long groups of pictures."""
    root = tmp_path_factory.mktemp("heavy")
    make_heavy(root)
    return {path.name: path.read_bytes() for path in root.iterdir()}


@dataclass(frozen=True)
class Reference:
    """A file as torchcodec reads it."""

    pictures: torch.Tensor
    """All of them: (N, 3, H, W)."""
    seconds: NDArray[np.float64]
    end_seconds: float


@cache
def reference(path: Path, **options: Any) -> Reference:  # noqa: ANN401
    """All frames of a file, as torchcodec's exact decoder gives them."""
    decoder: Any = VideoDecoder(path, seek_mode="exact", num_ffmpeg_threads=1, **options)
    frames = decoder.get_frames_in_range(0, len(decoder))
    ends = (frames.pts_seconds + frames.duration_seconds).numpy()
    return Reference(frames.data, frames.pts_seconds.numpy(), float(ends.max()))


def audio_between(path: Path, start: float, stop: float, rate: int) -> torch.Tensor:
    """The audio of a file, as torchcodec gives it."""
    decoder: Any = AudioDecoder(path, sample_rate=rate)
    found: torch.Tensor = decoder.get_samples_played_in_range(start, stop).data
    return found

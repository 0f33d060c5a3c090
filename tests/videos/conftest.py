"""The corpus, once, and what torchcodec says of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torchcodec.decoders import AudioDecoder, VideoDecoder

from tests.videos.corpus import make_corpus

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the videos that tests/videos/corpus.py makes."""
    root = tmp_path_factory.mktemp("corpus")
    make_corpus(root)
    return root


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

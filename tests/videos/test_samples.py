"""Samples of a corpus of files, beside torchcodec on the same files."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import asyncfetch as af
from asyncfetch.videos.windows import draw
from tests.videos.conftest import audio_between, reference
from tests.videos.corpus import BROKEN, MAKERS, SILENT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.videos.conftest import Reference

SOUND = [*sorted(MAKERS), "edited.mp4"]
"""All files that can be read."""
SAMPLERS = {
    "random fps": af.ClipSampler(5, fps=7.5, per_video=3),
    "random step": af.ClipSampler(6, step=4, per_video=2),
    "uniform fps": af.ClipSampler(4, fps=4, pick="uniform", per_video=3),
    "uniform step": af.ClipSampler(4, step=9, pick="uniform", per_video=3),
    "sparse": af.ClipSampler(3, fps=0.9),
    "every": af.ClipSampler(8, fps=12, every_seconds=0.9),
    "all": af.ClipSampler(16, pick="all"),
    "all fps": af.ClipSampler(7, fps=11, pick="all", at_end="wrap"),
}


def samples_of(root: Path, names: list[str], clips: af.ClipSampler, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    table = [{"video": str(root / name), "name": name} for name in names]
    with closing(af.Stream(af.Videos.from_table(table), clips=clips, shuffle=False, **options)) as stream:
        return list(stream)


def expected_frames(file: Reference, clips: af.ClipSampler, entry: int, number: int) -> list[int]:
    """The frames of a window, by torchcodec's times."""
    drawn = draw(0, 0, entry, number)
    return clips.window(file.seconds, file.end_seconds, number, draw=drawn).tolist()


@pytest.mark.parametrize("kind", SAMPLERS)
def test_pictures_and_times_are_those_of_torchcodec(corpus: Path, kind: str) -> None:
    clips = SAMPLERS[kind]
    found = samples_of(corpus, SOUND, clips)
    seen = []
    for sample in found:
        entry, number = int(sample["index"]), int(sample["clip_index"])
        seen.append((entry, number))
        name = SOUND[entry]
        file = reference(corpus / name)
        frames = expected_frames(file, clips, entry, number)
        assert sample["name"] == name
        assert sample["seconds"].tolist() == file.seconds[frames].tolist(), (name, number)
        assert sample["seconds"].dtype == torch.float64
        assert sample["video"].shape == (clips.num_frames, *file.pictures.shape[1:]), name
        assert torch.equal(sample["video"], file.pictures[frames]), (name, number)
    counts = [
        int(clips.count(seconds=file.end_seconds - file.seconds[0], frames=len(file.seconds)))
        for file in (reference(corpus / name) for name in SOUND)
    ]
    assert seen == [(entry, number) for entry, count in enumerate(counts) for number in range(count)]

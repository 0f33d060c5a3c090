"""Samples of a corpus of files, beside torchcodec on the same files."""

from __future__ import annotations

from contextlib import closing
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchcodec.transforms import Resize  # type: ignore[attr-defined]

import asyncfetch as af
from asyncfetch.videos.windows import draw
from tests.videos.conftest import audio_between, reference
from tests.videos.corpus import MAKERS, SILENT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.videos.conftest import Reference

GOOD = [*sorted(MAKERS), "edited.mp4"]
"""All files that can be read."""
RESIZED = (Resize(size=(48, 80)),)
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
    found: list[int] = clips.window(file.seconds, file.end_seconds, number, draw=drawn).tolist()
    return found


@pytest.mark.parametrize("kind", SAMPLERS)
def test_pictures_and_times_are_those_of_torchcodec(corpus: Path, kind: str) -> None:
    clips = SAMPLERS[kind]
    found = samples_of(corpus, GOOD, clips)
    seen = []
    for sample in found:
        entry, number = int(sample["index"]), int(sample["clip_index"])
        seen.append((entry, number))
        name = GOOD[entry]
        file = reference(corpus / name)
        frames = expected_frames(file, clips, entry, number)
        assert sample["name"] == name
        assert sample["seconds"].tolist() == file.seconds[frames].tolist(), (name, number)
        assert sample["seconds"].dtype == torch.float64
        assert sample["video"].shape == (clips.num_frames, *file.pictures.shape[1:]), name
        assert torch.equal(sample["video"], file.pictures[frames]), (name, number)
    counts = [
        int(clips.count(seconds=file.end_seconds - file.seconds[0], frames=len(file.seconds)))
        for file in (reference(corpus / name) for name in GOOD)
    ]
    assert seen == [(entry, number) for entry, count in enumerate(counts) for number in range(count)]


def end_of(file: Reference, frames: list[int]) -> float:
    """When the latest of these frames ends."""
    return float(np.append(file.seconds, file.end_seconds)[max(frames) + 1])


def differs_by(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of audio, of which one may be a sample off."""
    length = min(found.shape[1], expected.shape[1]) - 2
    inner = found[:, 1 : 1 + length]
    return min(float((inner - expected[:, shift : shift + length]).abs().max()) for shift in range(3))


@pytest.mark.parametrize(("kind", "rate"), [("random fps", 44_100), ("sparse", 22_050), ("all", 16_000)])
def test_audio_is_that_of_torchcodec(corpus: Path, kind: str, rate: int) -> None:
    """Where samples are made anew, the first one lies up to one of them off if frames of audio are cut otherwise.

    FFmpeg cuts PCM, which has no frames of its own, at places of its choice, and the first frame at an edit's start.
    """
    clips = SAMPLERS[kind]
    for sample in samples_of(corpus, GOOD, clips, audio_rate=rate):
        entry, number = int(sample["index"]), int(sample["clip_index"])
        name, found = GOOD[entry], sample["audio"]
        assert found.dtype == torch.float32
        if name in SILENT:
            assert found.shape == (0, 0)
            continue
        file = reference(corpus / name)
        frames = expected_frames(file, clips, entry, number)
        expected = audio_between(corpus / name, file.seconds[min(frames)], end_of(file, frames), rate)
        is_cut_otherwise = name == "movie.mov" or (name == "edited.mp4" and number == 0)
        if rate != 44_100 and is_cut_otherwise:
            assert abs(found.shape[1] - expected.shape[1]) <= 1
            assert differs_by(found, expected) < 0.1, (name, number)
        else:
            assert found.shape == expected.shape, (name, number)
            assert (found - expected).abs().max() < 2e-6, (name, number)


@pytest.mark.parametrize("kind", ["random fps", "all"])
def test_pictures_of_a_size_are_those_of_torchcodec(corpus: Path, kind: str) -> None:
    clips = SAMPLERS[kind]
    for sample in samples_of(corpus, GOOD, clips, size=(48, 80)):
        entry, number = int(sample["index"]), int(sample["clip_index"])
        file = reference(corpus / GOOD[entry], transforms=RESIZED)
        frames = expected_frames(file, clips, entry, number)
        assert torch.equal(sample["video"], file.pictures[frames]), (GOOD[entry], number)


# What comes beside.


@pytest.mark.parametrize("size", [None, (16, 16)], ids=["own size", "one size"])
def test_columns_come_as_they_are_in_samples_and_batches(corpus: Path, size: tuple[int, int] | None) -> None:
    """Also where some have nothing, and where batches are written in place."""
    columns: dict[str, pa.Array[Any]] = {
        "whole": pa.array([7, 8], pa.int16()),
        "exact": pa.array([1.6e9 + 0.25, None]),
        "single": pa.array([0.5, 0.25], pa.float32()),
        "some": pa.array([None, 3]),
        "flag": pa.array([True, None]),
        "large": pa.array([2**63, 1], pa.uint64()),
        "text": pa.array(["a", None]),
        "data": pa.array([b"a", b"b"]),
        "list": pa.array([[1, 2], None]),
        "day": pa.array([date(2020, 1, 2), date(2020, 1, 3)]),
    }
    table = pa.table({"video": [str(corpus / name) for name in ("front.mp4", "large.mp4")]} | columns)
    clips = af.ClipSampler(2)
    with closing(af.Stream(af.Videos.from_table(table), clips=clips, shuffle=False, size=size)) as stream:
        samples = list(stream)
        stream.set_epoch(0)
        [batch] = af.torch.StreamDataset(stream, batch_size=2)
    dtypes = {"whole": torch.int64, "exact": torch.float64, "single": torch.float32}
    for name, dtype in dtypes.items():
        assert batch[name].dtype == samples[0][name].dtype == dtype
        assert torch.stack([sample[name] for sample in samples]).equal(batch[name]) or name == "exact"
    assert batch["exact"][0].item() == 1.6e9 + 0.25
    assert batch["exact"][1].isnan()
    assert samples[1]["exact"].isnan()
    for name in columns.keys() - dtypes.keys():
        assert batch[name] == [sample[name] for sample in samples] == columns[name].to_pylist()


def test_a_batch_of_several_sizes_is_a_list_of_its_pictures(corpus: Path) -> None:
    table = [{"video": str(corpus / name)} for name in ("front.mp4", "large.mp4", "open.mp4")]
    stream = af.Stream(af.Videos.from_table(table), clips=af.ClipSampler(2), shuffle=False, audio_rate=8000)
    with closing(stream):
        [batch] = af.torch.StreamDataset(stream, batch_size=3)
        assert [tuple(video.shape) for video in batch["video"]] == [
            (2, 3, 120, 160),
            (2, 3, 112, 208),
            (2, 3, 120, 160),
        ]
        assert [len(audio) for audio in batch["audio"]] == [2, 2, 0]
        assert batch["seconds"].shape == (3, 2)
        stream.set_epoch(0)
        batches = list(af.torch.StreamDataset(stream, batch_size=3, bucket_by="shape"))
    assert sorted(tuple(batch["video"].shape) for batch in batches) == [(1, 2, 3, 112, 208), (2, 2, 3, 120, 160)]

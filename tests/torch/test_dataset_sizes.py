"""Pictures that are brought to a size where they are decoded, in samples, batches and single frames."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch
from torch.utils.data import DataLoader

from asyncfetch import Stream, StreamConfig, open_dataset
from asyncfetch.decode import PictureSize
from asyncfetch.errors import ConfigError
from asyncfetch.lerobot import frames
from asyncfetch.torch import FrameDataset, StreamDataset

if TYPE_CHECKING:
    from asyncfetch.decode.picture_size import Fit

DATA = Path(__file__).parents[1] / "data"
TOP = "observation.images.top"


def check_like(found: torch.Tensor, whole: torch.Tensor, size: PictureSize) -> None:
    """Versions of FFmpeg round differently; see ``decode.picture_size``."""
    flat = whole.reshape(-1, *whole.shape[-3:])
    expected = torch.stack([size.resize(picture) for picture in flat]).reshape(*whole.shape[:-2], *found.shape[-2:])
    assert found.shape == expected.shape
    assert float((found.float() - expected.float()).abs().max()) <= 2


@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("name", ["h264", "depth_img_m", "depth_video_m"])
def test_samples_have_pictures_of_the_size(name: str, fit: Fit) -> None:
    """Depth in videos and in tables, too."""
    size = PictureSize(40, 56, fit)
    whole = list(Stream(DATA / name, shuffle=False))
    sized = list(Stream(DATA / name, shuffle=False, size=(40, 56), fit=fit))
    pictures = [key for key in whole[0] if "image" in key]
    assert pictures
    for before, after in zip(whole, sized, strict=True):
        assert after.keys() == before.keys()
        for key in pictures:
            assert after[key].dtype == before[key].dtype
            check_like(after[key], before[key], size)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_and_windows_have_the_size(workers: int) -> None:
    options: dict[str, Any] = {"shuffle": False, "windows": {TOP: frames(-1, 0)}}
    whole = list(Stream(DATA / "h264", **options))[:8]
    dataset = StreamDataset(Stream(DATA / "h264", size=(32, 24), **options), batch_size=8)
    batch = next(iter(DataLoader(dataset, batch_size=None, num_workers=workers)))
    assert batch[TOP].shape == (8, 2, 3, 32, 24)
    check_like(batch[TOP], torch.stack([sample[TOP] for sample in whole]), PictureSize(32, 24))


def test_pictures_of_floats_have_the_size() -> None:
    whole = next(iter(Stream(DATA / "h264", shuffle=False)))
    sample = next(iter(Stream(DATA / "h264", shuffle=False, size=(32, 24), image_dtype="float32")))
    check_like(sample[TOP] * 255, whole[TOP], PictureSize(32, 24))


def test_single_frames_have_the_size() -> None:
    whole, sized = FrameDataset(DATA / "h264"), FrameDataset(DATA / "h264", size=(32, 24), fit="crop")
    check_like(sized[3][TOP], whole[3][TOP], PictureSize(32, 24, "crop"))

    async def sample() -> Any:  # noqa: ANN401
        async with open_dataset(DATA / "h264", size=(32, 24), fit="crop") as dataset:
            return (await dataset.sample(0, 3))[TOP]

    assert torch.equal(anyio.run(sample), sized[3][TOP])


def test_decoders_give_pictures_of_one_size() -> None:
    streams = [
        Stream(DATA / "h264", size=(33, 47), config=StreamConfig(decoder=name)) for name in ("torchcodec", "pyav")
    ]
    for one, other in zip(*streams, strict=True):
        assert int((one[TOP].int() - other[TOP].int()).abs().max()) <= 2


def test_smaller_samples_count_less_of_the_bounds() -> None:
    sizes = [Stream(DATA / "h264", size=size)._source.sample_bytes() for size in (None, (8, 8))]
    assert sizes[1] < sizes[0] / 10


@pytest.mark.parametrize("make", [Stream, FrameDataset, open_dataset])
def test_sizes_that_are_none_are_refused(make: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="size must be two whole numbers"):
        make(DATA / "h264", size=224)
    with pytest.raises(ConfigError, match="fit must be"):
        make(DATA / "h264", size=(224, 224), fit="zoom")


def test_open_datasets_have_their_size() -> None:
    with pytest.raises(ConfigError, match="size, fit and config of an open dataset were given"):
        Stream(open_dataset(DATA / "h264"), size=(8, 8))

"""Every frame of a dataset, right by its pixels: whatever the codec, wherever its key frames and its index are."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from asyncfetch.errors import FormatError
from asyncfetch.lerobot import open_dataset
from tests.lerobot.serving import TOP, WRIST, check_all, content_of, serve
from tests.recorded import CAMERAS, DATA, read_code

if TYPE_CHECKING:
    from asyncfetch.config import DecoderBackend
    from tests.lerobot.serving import Library

VIDEOS: dict[str, dict[str, Any]] = {
    "AV1, one episode a file": {"codec": "av1", "episodes_per_video_file": 1},
    "AV1, two episodes a file": {"codec": "av1", "episodes_per_video_file": 2},
    "AV1, one key frame an episode": {"codec": "av1", "gop": 100},
    "H.264 with B-frames": {"codec": "h264", "gop": 12, "episodes_per_video_file": 3},
    "HEVC, open GOPs": {"codec": "hevc", "gop": 6, "episodes_per_video_file": 3},
    "cameras in files of different lengths": {"codec": "h264", "episodes_per_video_file": {TOP: 1, WRIST: 3}},
}


@pytest.mark.parametrize("options", VIDEOS.values(), ids=list(VIDEOS))
@pytest.mark.parametrize("decoder", ["torchcodec", "pyav"])
async def test_every_frame(library: Library, options: dict[str, Any], decoder: DecoderBackend) -> None:
    truth = library(episodes=(9, 4, 14), **options)
    async with serve(truth, decoder=decoder) as served:
        await check_all(served.dataset, truth)


@pytest.mark.parametrize("scheme", ["", "file://"])
async def test_a_dataset_on_a_local_disk(library: Library, scheme: str) -> None:
    truth = library(episodes=(9, 4, 14))
    async with open_dataset(f"{scheme}{truth.root}") as dataset:
        await check_all(dataset, truth)


@pytest.mark.parametrize("name", ["h264", "one-episode-files"])
async def test_recorded_dataset(name: str) -> None:
    """Written by LeRobot itself; the rows are compared with pyarrow reading the same file."""
    async with serve(DATA / name) as served:
        dataset = served.dataset
        rows = [row for path in sorted((DATA / name).glob("data/*/*")) for row in pq.read_table(path).to_pylist()]
        assert dataset.num_frames == len(rows)
        for row in rows:
            episode, frame = row["episode_index"], row["frame_index"]
            sample = await dataset.sample(episode, frame)
            for number, camera in enumerate(CAMERAS):
                assert read_code(sample[camera].numpy()) == (episode, frame, number)
            for key, value in row.items():
                np.testing.assert_allclose(sample[key].numpy(), value, rtol=1e-6, err_msg=key)
            assert sample["task"] == dataset.tasks[row["task_index"]]


@pytest.mark.parametrize(
    ("name", "unit", "mean", "digest"),
    [
        ("depth_img_m", "m", 1.8877500265836715, "d346e4cab8721ed91c64ef0d32db6ecfac730e41f9b2c27f95fba9e9b6305f97"),
        ("depth_img_m", "mm", 1887.7500265836716, "0e380582ca7c052b3dafcac81cab9bc9f59ca073e7cf0905e4af884072c45925"),
        ("depth_img_mm", "m", 1.88775, "d346e4cab8721ed91c64ef0d32db6ecfac730e41f9b2c27f95fba9e9b6305f97"),
        ("depth_img_mm", "mm", 1887.75, "bb6854bf609d86a243f608d6dc1d358f562b65abd53d0d78b5fbeaadaf65c347"),
        ("depth_video_m", "mm", 1878.1818449497223, "feb1a2a11878e305b54e84202958d318aef2914b8a434b63b612999a6356ecc7"),
    ],
)
async def test_recorded_depth_is_lerobots_to_the_last_bit(name: str, unit: str, mean: float, digest: str) -> None:
    """The digests are of what LeRobot 0.6.1 gives, frame after frame; the means, of its statistics."""
    depth = "observation.images.depth"
    async with serve(DATA / name, depth_unit=unit) as served:
        dataset, found = served.dataset, hashlib.sha256()
        for episode in dataset.episodes:
            for frame in range(episode.length):
                picture = (await dataset.sample(episode.index, frame))[depth]
                assert (picture.dtype, picture.shape) == (torch.float32, (1, 64, 96))
                found.update(picture.contiguous().numpy().tobytes())
        assert found.hexdigest() == digest
        assert dataset.stats is not None
        assert dataset.stats[depth]["mean"] == [[[mean]]]
        assert dataset.stats[depth]["count"] == [dataset.num_frames]
        assert dataset.stats["observation.images.top"]["mean"][0][0][0] < 1


async def test_depth_of_a_unit_that_nobody_knows_is_refused_by_name() -> None:
    content = content_of(DATA / "depth_img_m")
    content["meta/info.json"] = content["meta/info.json"].replace(b'"depth_unit": "m"', b'"depth_unit": "cm"')
    async with serve(content) as served:
        with pytest.raises(FormatError, match=r"observation\.images\.depth is in depth_unit 'cm'"):
            await served.dataset.sample(0, 0)


async def test_depth_whose_unit_is_not_said_comes_as_it_is_stored() -> None:
    content = content_of(DATA / "depth_img_m")
    info = json.loads(content["meta/info.json"])
    del info["features"]["observation.images.depth"]["info"]["depth_unit"]
    content["meta/info.json"] = json.dumps(info).encode()
    async with serve(content) as served:
        assert (await served.dataset.sample(0, 0))["observation.images.depth"].max() < 10
        assert served.dataset.stats is not None
        assert served.dataset.stats["observation.images.depth"]["mean"] == [[[1.8877500265836715]]]

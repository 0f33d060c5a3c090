"""Every frame of a dataset, right by its pixels: whatever the codec, wherever its key frames and its index are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncfetch.lerobot import open_dataset
from tests.lerobot.serving import TOP, WRIST, check_all, serve
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

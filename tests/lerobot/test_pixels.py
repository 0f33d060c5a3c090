"""Every frame of a dataset, right by its pixels: whatever the codec, wherever its key frames and its index are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncfetch.lerobot import open_dataset
from tests.lerobot.serving import TOP, WRIST, check_all, serve

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.config import DecoderBackend
    from tests.lerobot.serving import Library

DATA = Path(__file__).parents[1] / "data"

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


def read_code(picture: NDArray[np.uint8]) -> tuple[int, int, int]:
    """(episode, frame, camera) painted into a picture (3, H, W) of the recorded datasets.

    16 bits, each in three blocks of 28 x 28 pixels, 11 blocks a row, copy k of bit i in block 16 k + i: the parity of
    the frame, 6 bits of the episode, 8 of the frame, 1 of the camera; all but the first inverted on odd frames.
    """
    blocks = picture.mean(axis=0)[: 28 * 5, : 28 * 11].reshape(5, 28, 11, 28)[:, 7:21, :, 7:21].mean(axis=(1, 3))
    copies = blocks.ravel()[: 3 * 16].reshape(3, 16) > 128
    bits = np.count_nonzero(copies, axis=0) >= 2
    number = int("".join(str(int(bit)) for bit in bits[1:] ^ bits[0]), 2)
    episode, frame, camera = number >> 9, number >> 1 & 0xFF, number & 1
    assert frame % 2 == bits[0]
    return episode, frame, camera


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
            for number, camera in enumerate((TOP, WRIST)):
                assert read_code(sample[camera].numpy()) == (episode, frame, number)
            for key, value in row.items():
                np.testing.assert_allclose(sample[key].numpy(), value, rtol=1e-6, err_msg=key)
            assert sample["task"] == dataset.tasks[row["task_index"]]

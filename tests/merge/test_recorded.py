"""Datasets that LeRobot itself has written, joined: frames by their pixels, through our reader and through FFmpeg."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest
from anyio import to_thread

from asyncfetch.errors import MergeError
from asyncfetch.lerobot import open_dataset
from asyncfetch.merge import merge_datasets
from tests.lerobot.serving import TOP, WRIST
from tests.merge.test_merge import read_json, read_table
from tests.recorded import DATA, read_code

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROOTS = [DATA / name for name in ("merge-a", "pick-place", "one-episode-files", "merge-b")]
WIDTH, HEIGHT = 320, 240

Code = tuple[int, int, int]


def videos_of(root: Path, camera: str) -> list[Path]:
    return sorted((root / "videos" / camera).rglob("*.mp4"))


def codes_by_ffmpeg(paths: Sequence[Path]) -> list[Code]:
    """What is painted into each picture of these videos, which says where it comes from."""
    codes = []
    for path in paths:
        command = ["ffmpeg", "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "gray", "-"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as decoding:
            assert decoding.stdout is not None
            while picture := decoding.stdout.read(WIDTH * HEIGHT):
                codes.append(read_code(np.frombuffer(picture, np.uint8).reshape(1, HEIGHT, WIDTH)))
        assert decoding.returncode == 0
    return codes


@pytest.mark.timeout(60)  # 3,900 pictures, each decoded twice
async def test_recorded_datasets(tmp_path: Path) -> None:
    """Every frame through FFmpeg and through our reader."""
    out = tmp_path / "out"
    await merge_datasets(ROOTS, out, video_file_max_bytes=2_000_000)
    expected = []
    for root in ROOTS:
        tasks = read_table(root, "meta/episodes")["tasks"].to_pylist()
        rows = read_table(root, "data").sort_by("index").to_pylist()
        expected += [(row, tasks[row["episode_index"]]) for row in rows]
    async with open_dataset(str(out)) as dataset:
        assert dataset.num_frames == len(expected)
        episode = -1
        for index, (row, tasks) in enumerate(expected):
            own, frame = row["episode_index"], row["frame_index"]
            episode += frame == 0
            sample = await dataset.sample(episode, frame)
            codes = [read_code(sample[camera].numpy()) for camera in (TOP, WRIST)]
            assert codes == [(own, frame, 0), (own, frame, 1)]
            for key in ("observation.state", "action", "next.reward", "timestamp"):
                np.testing.assert_array_equal(sample[key], np.array(row[key], np.float32), err_msg=key)
            assert (sample["index"], sample["episode_index"]) == (index, episode)
            assert sample["task"] in tasks
    for number, camera in enumerate((TOP, WRIST)):
        paths = videos_of(out, camera)
        painted = await to_thread.run_sync(codes_by_ffmpeg, paths)
        assert painted == [(row["episode_index"], row["frame_index"], number) for row, _ in expected]
        assert 1 < len(paths) < sum(len(videos_of(root, camera)) for root in ROOTS)
    assert read_json(out, "info.json")["total_tasks"] == len({task for _, tasks in expected for task in tasks})


async def test_another_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=f"codec of {TOP} is 'av1' in .*merge-a.*, but 'h264' in .*h264"):
        await merge_datasets([*ROOTS, DATA / "h264"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240

"""Datasets that LeRobot itself has written, joined: frames by their pixels, through our reader and through FFmpeg."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncfetch.errors import MergeError
from asyncfetch.lerobot import open_dataset
from asyncfetch.merge import merge_datasets
from tests.lerobot.serving import TOP, WRIST
from tests.merge.test_merge import frame_hashes, read_json, read_table
from tests.recorded import DATA, read_code

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("merge-a", "one-episode-files", "merge-b")


def videos_of(root: Path, camera: str) -> list[Path]:
    return sorted((root / "videos" / camera).rglob("*.mp4"))


@pytest.mark.timeout(60)  # it decodes 1,144 pictures
async def test_recorded_datasets(tmp_path: Path) -> None:
    """Every frame through FFmpeg, every fifth through our reader."""
    roots, out = [DATA / name for name in NAMES], tmp_path / "out"
    await merge_datasets(roots, out, video_file_max_bytes=1_000_000)
    expected = []
    for root in roots:
        tasks = read_table(root, "meta/episodes")["tasks"].to_pylist()
        rows = read_table(root, "data").sort_by("index").to_pylist()
        expected += [(row, tasks[row["episode_index"]]) for row in rows]
    async with open_dataset(str(out)) as dataset:
        assert dataset.num_frames == len(expected)
        episode = -1
        for index, (row, tasks) in enumerate(expected):
            own, frame = row["episode_index"], row["frame_index"]
            episode += frame == 0
            if index % 5:
                continue
            sample = await dataset.sample(episode, frame)
            codes = [read_code(sample[camera].numpy()) for camera in (TOP, WRIST)]
            assert codes == [(own, frame, 0), (own, frame, 1)]
            for key in ("observation.state", "action", "next.reward", "timestamp"):
                np.testing.assert_array_equal(sample[key], np.array(row[key], np.float32), err_msg=key)
            assert (sample["index"], sample["episode_index"]) == (index, episode)
            assert sample["task"] in tasks
    for camera in (TOP, WRIST):
        merged = [pixels for path in videos_of(out, camera) for pixels in frame_hashes(path)]
        sources = [path for root in roots for path in videos_of(root, camera)]
        assert merged == [pixels for path in sources for pixels in frame_hashes(path)]
        assert 1 < len(videos_of(out, camera)) < len(sources)
    assert read_json(out, "info.json")["total_tasks"] == len({task for _, tasks in expected for task in tasks})


async def test_another_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=f"codec of {TOP} is 'av1' in .*merge-a.*, but 'h264' in .*h264"):
        await merge_datasets([DATA / "merge-a", DATA / "merge-b", DATA / "h264"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240

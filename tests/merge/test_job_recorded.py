"""Datasets that LeRobot itself has written, joined: frames by their pixels, through our reader and through FFmpeg."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pyarrow.parquet as pq
import pytest
from anyio import to_thread

from asyncfetch.errors import MergeError
from asyncfetch.lerobot import open_dataset
from asyncfetch.merge import merge_datasets, select_episodes, split_dataset
from asyncfetch.streams import Stream
from tests.lerobot.serving import TOP, WRIST
from tests.merge.test_job import read_json, read_table
from tests.merge.test_plan import names
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


@pytest.mark.slow  # 3,900 pictures, each decoded twice
def test_recorded_datasets(tmp_path: Path) -> None:
    """Every frame through FFmpeg and through our reader."""
    out = tmp_path / "out"
    anyio.run(partial(merge_datasets, ROOTS, out, video_file_max_bytes=2_000_000))
    expected = []
    for root in ROOTS:
        tasks = read_table(root, "meta/episodes")["tasks"].to_pylist()
        rows = read_table(root, "data").sort_by("index").to_pylist()
        expected += [(row, tasks[row["episode_index"]]) for row in rows]
    with closing(Stream(out, shuffle=False)) as stream:
        episode = -1
        for index, (sample, (row, tasks)) in enumerate(zip(stream, expected, strict=True)):
            own, frame = row["episode_index"], row["frame_index"]
            episode += frame == 0
            codes = [read_code(sample[camera].numpy()) for camera in (TOP, WRIST)]
            assert codes == [(own, frame, 0), (own, frame, 1)]
            for key in ("observation.state", "action", "next.reward", "timestamp"):
                np.testing.assert_array_equal(sample[key], np.array(row[key], np.float32), err_msg=key)
            assert (sample["index"], sample["episode_index"]) == (index, episode)
            assert sample["task"] in tasks
    for number, camera in enumerate((TOP, WRIST)):
        paths = videos_of(out, camera)
        painted = codes_by_ffmpeg(paths)
        assert painted == [(row["episode_index"], row["frame_index"], number) for row, _ in expected]
        assert 1 < len(paths) < sum(len(videos_of(root, camera)) for root in ROOTS)
    assert read_json(out, "info.json")["total_tasks"] == len({task for _, tasks in expected for task in tasks})


async def test_statistics_of_merged_merges_are_those_of_one_merge(tmp_path: Path) -> None:
    """To the last bit, those of pictures too."""
    await merge_datasets(ROOTS, tmp_path / "flat")
    await merge_datasets(ROOTS[:3], tmp_path / "left")
    await merge_datasets(ROOTS[1:3], tmp_path / "middle")
    await merge_datasets([tmp_path / "left", ROOTS[3]], tmp_path / "one")
    await merge_datasets([ROOTS[0], tmp_path / "middle", ROOTS[3]], tmp_path / "other")
    stats = [(tmp_path / name / "meta/stats.json").read_bytes() for name in ("flat", "one", "other")]
    assert stats[0] == stats[1] == stats[2]


async def test_another_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=f"codec of {TOP} is 'av1' in .*merge-a.*, but 'h264' in .*h264"):
        await merge_datasets([*ROOTS, DATA / "h264"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_a_dataset_with_annotations_is_selected_split_and_merged(tmp_path: Path) -> None:
    """Where a field of the annotations is always null, and merged with one that says what a camera saw."""
    root, answered = DATA / "language", tmp_path / "answered"
    await to_thread.run_sync(shutil.copytree, root, answered)
    (path,) = (answered / "data").rglob("*.parquet")
    rows = pq.read_table(path)
    place = rows.column_names.index("language_events")
    said = [[{"role": "assistant", "content": "2", "style": "vqa", "camera": TOP, "tool_calls": None}]] * len(rows)
    pq.write_table(rows.set_column(place, "language_events", [said]), path)
    await select_episodes(root, tmp_path / "part", [2, 0])
    await split_dataset(root, {"a": 0.5, "b": 0.5}, tmp_path / "split")
    await merge_datasets([root, answered, tmp_path / "part"], tmp_path / "all")
    stored = pq.read_table(root / "data/chunk-000/file-000.parquet").to_pylist()
    parts = [[row for row in stored if row["episode_index"] in own] for own in ((0, 2), (0, 1), (2, 3))]
    for name, expected in (("part", parts[0]), ("split/a", parts[1]), ("split/b", parts[2])):
        got = read_table(tmp_path / name, "data")
        assert got.schema.equals(pq.read_schema(root / "data/chunk-000/file-000.parquet"))
        for key in ("language_persistent", "language_events", "observation.state"):
            assert got[key].to_pylist() == [row[key] for row in expected]
    everything = read_table(tmp_path / "all", "data")
    events = [row["language_events"] for row in stored]
    assert everything["language_events"].to_pylist() == events + said + [row["language_events"] for row in parts[0]]
    async with open_dataset(str(tmp_path / "all")) as dataset:
        sample = await dataset.sample(4, 0)
        assert sample["language_events"] == said[0]
    assert names(tmp_path) == {"answered", "part", "split", "all"}

"""A dataset in one value."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import asyncfetch as af
from asyncfetch.lerobot import summary
from asyncfetch.testing import RangeServer, write_dataset
from tests.merge.version2 import EPISODE_FILE, as_version2

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth

LENGTHS = (5, 7, 3, 0, 4)


def write(root: Path) -> DatasetTruth:
    return write_dataset(root, episodes=LENGTHS, codec="h264", width=96, height=64)


def bytes_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def test_dataset_info_gives_the_content_and_file_sizes(tmp_path: Path) -> None:
    truth = write(tmp_path / "one")
    with RangeServer(truth.root) as server:
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=str(server.ca_file)))
        told = af.dataset_info(server.url, config=config)
        # No video is read, only asked for its size.
        assert all((request.stop or 0) <= 1 for request in server.requests if request.path.endswith(".mp4"))
    assert (told.version, told.fps, told.num_episodes, told.num_frames) == ("v3.0", 30, 5, 19)
    assert told.seconds == pytest.approx(19 / 30)
    assert told.tasks == truth.tasks
    assert told.has_stats
    assert list(told.features) == list(json.loads((truth.root / "meta/info.json").read_text())["features"])
    assert [(one.key, one.width, one.height, one.codec, one.is_depth) for one in told.cameras] == [
        (camera, 96, 64, "h264", False) for camera in truth.cameras
    ]
    for camera in told.cameras:
        videos = truth.root / "videos" / camera.key
        assert (camera.videos.files, camera.videos.missing) == (len(list(videos.rglob("*.mp4"))), 0)
        assert camera.videos.bytes == bytes_of(videos)
    assert told.rows == summary.FileSizes(1, bytes_of(truth.root / "data"), 0)
    assert told.bytes == bytes_of(truth.root / "data") + bytes_of(truth.root / "videos")
    assert pickle.loads(pickle.dumps(told)) == told
    stream = af.Stream(truth.root, features=["action"])
    assert stream.dataset_info().rows == told.rows
    assert stream.dataset_info().cameras == ()
    stream.close()


def test_of_many_files_some_are_weighed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {"length": 4, "codec": "h264", "width": 96, "height": 64, **EPISODE_FILE}
    truth = write_dataset(tmp_path / "one", episodes=9, **shape)
    old = as_version2(truth, tmp_path / "old")
    monkeypatch.setattr(summary, "WEIGHED_FILES", 3)
    told = af.dataset_info(old)
    assert (told.version, told.rows.files, told.rows.missing) == ("v2.1", 9, 0)
    assert told.rows.bytes == pytest.approx(bytes_of(old / "data"), rel=0.2)


def test_files_that_are_not_there_are_counted(tmp_path: Path) -> None:
    truth = write(tmp_path / "one")
    gone = min((truth.root / "videos" / truth.cameras[0]).rglob("*.mp4"))
    gone.unlink()
    top, wrist = af.dataset_info(truth.root).cameras
    assert (top.videos.missing, wrist.videos.missing) == (1, 0)


def test_no_dataset_is_the_error_that_opening_raises(tmp_path: Path) -> None:
    with pytest.raises(af.NotFound, match=r"has no meta/info\.json: is it the root of a LeRobot dataset\?"):
        af.dataset_info(tmp_path)

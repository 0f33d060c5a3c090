"""``asyncfetch info`` as a shell sees it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from asyncfetch.cli.app import app
from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from pathlib import Path


def test_info_shows_a_dataset_and_the_traffic_of_its_ranks(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5, 6), codec="h264", width=96, height=64)
    done = CliRunner().invoke(app, ["info", str(truth.root)])
    assert done.exit_code == 0, done.output
    assert "LeRobot v3.0: 3 episodes, 15 frames at 30 fps" in done.stdout
    assert "observation.images.top: 96x64 h264, " in done.stdout
    assert " KiB in 2 files\n" in done.stdout
    assert "1.00 x" in done.stdout
    assert "a run with a disk cache on each machine: " in done.stdout
    on_a_node = CliRunner().invoke(app, ["info", str(truth.root)], env={"LOCAL_WORLD_SIZE": "1"})
    assert on_a_node.stdout == done.stdout  # what runs elsewhere doesn't depend on this shell
    told = json.loads(CliRunner().invoke(app, ["info", str(truth.root), "--json", "--batch-size", "2"]).stdout)
    assert [(plan["world_size"], plan["batch_size"]) for plan in told["traffic"]] == [(1, 2), (8, 2), (64, 2)]
    assert told["frames"] == truth.num_frames
    assert told["traffic"][0]["fetched_bytes"] == told["traffic"][0]["least_bytes"] > 0
    assert [(plan["run_bytes"], plan["distinct_segments"]) for plan in told["traffic"]][:1] == [
        (told["traffic"][0]["least_bytes"], 2)
    ]
    cameras = {camera["key"]: camera["videos"] for camera in told["cameras"]}
    videos = sum(video.stat().st_size for video in (truth.root / "videos").rglob("*.mp4"))
    assert sum(camera["bytes"] for camera in cameras.values()) == videos
    assert told["bytes"] == videos + told["rows"]["bytes"]

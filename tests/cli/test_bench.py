"""``asyncfetch bench`` as a shell sees it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from asyncfetch.cli import bench
from asyncfetch.cli.app import app
from asyncfetch.testing import RangeServer, write_dataset

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LINK_SECONDS", 0.2)
    monkeypatch.setattr(bench, "RESIDENT_SECONDS", 0.2)


@pytest.mark.parametrize("workers", [0, 1])
def test_how_fast_a_dataset_streams_and_why(tmp_path: Path, workers: int) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(14, 15, 16), codec="h264", width=96, height=64)
    picture = tmp_path / "out.png"
    with RangeServer(truth.root) as server:
        options = ["--ca-file", str(server.ca_file), "--seconds", "30", "--num-workers", str(workers)]
        done = CliRunner().invoke(app, ["bench", server.url, *options, "--plot", str(picture), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["report"]["samples"] == truth.num_frames
    assert told["binds"]
    assert [link["streams"] for link in told["link"]] == list(bench.STREAMS)
    assert all(0 < link["first_byte_p50_seconds"] <= link["first_byte_p99_seconds"] for link in told["link"])
    assert told["resident_frames_per_second"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_ends_with_settings_to_use(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5), codec="h264", width=96, height=64)
    done = CliRunner().invoke(app, ["bench", str(truth.root), "--seconds", "1"])
    assert done.exit_code == 0, done.output
    assert "samples/s" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1].startswith("settings: ")

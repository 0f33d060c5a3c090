"""bench/throughput.py, tiny: a row and the parts beside it are measured."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import asyncfetch as af
from asyncfetch.testing import RangeServer, write_dataset
from bench.throughput import Setting, curves_of, look, main, measure, plot_keep_up, rows_of, traffic

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("programs_are_warm")

EPISODES, LENGTH = 3, 40


def test_a_row_is_measured(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path, episodes=EPISODES, length=LENGTH, width=64, height=64, codec="h264")
    with RangeServer(truth.root) as server:
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file), pool_segments=2)
        setting = Setting(server.url, server.ca_file, 60.0, config)  # the epoch ends long before
        cameras, (header_milliseconds, plan_milliseconds), by_file = anyio.run(look, setting, 0.0)
        assert (cameras, by_file) == (len(truth.cameras), 0.0)
        assert 0 < header_milliseconds < plan_milliseconds
        pairs = measure(setting, 4, cameras, 1)
        assert server.statistics().peak_in_flight <= 4
    found = {row.question.partition(": ")[2]: row.median for row in rows_of(4, pairs)}
    assert 0 < found["keep-up, cold start included"] <= found["keep-up from the first sample on"]
    assert found["streamed"] == pytest.approx(found["keep-up, cold start included"] * found["in memory"])
    plot_keep_up(curves_of(pairs, cameras, 1.0, "tiny"), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert 0 < found["first sample"] < EPISODES * LENGTH * cameras / found["streamed"]


@pytest.mark.parametrize("options", [{"cameras": ()}, {"episodes": 0}], ids=["no cameras", "no episodes"])
def test_a_dataset_without_pictures_is_refused_in_words(tmp_path: Path, options: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"episodes": 1, "length": 2, "width": 64, "height": 64, "codec": "h264"}
    truth = write_dataset(tmp_path, **chosen | options)
    with pytest.raises(SystemExit, match="nothing to decode"):
        anyio.run(look, Setting(str(truth.root), None, 1.0, af.StreamConfig()), 0.0)


def test_the_bytes_of_an_epoch_are_counted(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path, episodes=EPISODES, length=LENGTH, width=64, height=64, codec="h264")
    with RangeServer(truth.root) as server:
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file))
        share = anyio.run(traffic, Setting(server.url, server.ca_file, 60.0, config), truth.root)
        needed = sum(file.stat().st_size for file in truth.root.rglob("*.*") if "meta" not in file.parts)
        assert share == server.statistics().bytes_sent / needed
    assert share >= 1


def test_the_command_prints_rows_parts_and_workers_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = write_dataset(tmp_path, episodes=EPISODES, length=LENGTH, width=64, height=64, codec="h264")
    with RangeServer(truth.root) as server:
        options = ["--concurrency", "2,4", "--num-workers", "1", "--json"]
        options += ["--seconds", "0.3", "--repeats", "1", "--pool-segments", "2"]
        monkeypatch.setattr(sys, "argv", ["throughput", server.url, "--ca-file", str(server.ca_file), *options])
        main()
    found = {row["question"]: row["median"] for row in json.loads(capsys.readouterr().out)}
    for concurrency in (2, 4):
        for figure in ("streamed", "first sample", "in memory", "a thread's decoding of a frame"):
            assert found[f"{concurrency} requests at a time: {figure}"] > 0
    for question in ("header of a clip", "hand-over of a sample", "one frame at a time over an fsspec file"):
        assert found[question] > 0
    assert found["with 1 workers"] > 0

"""``asyncfetch bench`` as a shell sees it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import anyio
import pytest
from typer.testing import CliRunner

from asyncfetch.cli import bench
from asyncfetch.cli.app import app
from asyncfetch.config import StreamConfig
from asyncfetch.errors import ConfigError, NotFound
from asyncfetch.testing import Fault, RangeServer, write_dataset
from tests.videos.movies import movie

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing import ServedRequest


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs_are_warm")]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LINK_SECONDS", 0.2)
    monkeypatch.setattr(bench, "RESIDENT_SECONDS", 0.2)


@pytest.mark.parametrize("workers", [0, 1])
def test_bench_measures_how_fast_a_dataset_streams_and_why(tmp_path: Path, workers: int) -> None:
    # An epoch takes a while: the ms from one's last sample to the next one's first question are no pass's.
    truth = write_dataset(tmp_path / "one", episodes=(54, 55, 56), codec="h264", width=96, height=64)
    picture = tmp_path / "out.png"
    with RangeServer(truth.root) as server:
        options = ["--ca-file", str(server.ca_file), "--seconds", "3", "--num-workers", str(workers)]
        done = CliRunner().invoke(app, ["bench", server.url, *options, "--plot", str(picture), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["report"]["samples"] >= 2 * truth.num_frames  # an epoch takes less
    assert told["report"]["seconds"] == pytest.approx(3, abs=1.8 if workers else 0.3)  # a worker starts meanwhile
    assert told["report"]["fetched_bytes"] >= sum(len(path.read_bytes()) for path in truth.root.rglob("*.mp4")) / 2
    assert told["binds"]
    videos = list(truth.root.rglob("*.mp4"))  # each of less than a MiB
    assert [link["streams"] for link in told["link"]] == sorted({min(len(videos), each) for each in bench.STREAMS})
    assert all(0 < link["first_byte_p50_seconds"] <= link["first_byte_p99_seconds"] for link in told["link"])
    assert told["resident_frames_per_second"] > 0
    assert told["trouble"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_is_narrow_and_ends_with_settings_to_use(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5), codec="h264", width=96, height=64)
    with RangeServer(truth.root, tls=False) as server:
        done = CliRunner().invoke(app, ["bench", server.url, "--seconds", "1"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "samples/s" in lines[0]
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("link,  1 at a time: ") and "MiB/s, a stream " in line]
    assert lines[-1].startswith("settings: ")


def test_dataset_without_cameras_has_a_link_and_no_decoding(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5), cameras=[])
    with RangeServer(truth.root, tls=False) as server:
        done = CliRunner().invoke(app, ["bench", server.url, "--seconds", "1"])
    assert done.exit_code == 0, done.output
    assert "link,  1 at a time" in done.stdout
    assert "decoding from memory: the dataset has no cameras" in done.stdout
    assert "frames/s" not in done.stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_a_host_that_never_answers_ends_in_time_and_is_reported(tmp_path: Path, workers: int) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5), codec="h264", width=96, height=64)
    with RangeServer(truth.root, tls=False, fault=lambda _: Fault.slow(first_byte_seconds=60)) as server:
        began = time.perf_counter()
        options = ["--seconds", "3", "--num-workers", str(workers), "--json"]
        done = CliRunner().invoke(app, ["bench", server.url, *options])
        seconds = time.perf_counter() - began
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["report"]["samples"] == 0
    assert told["binds"] == "opening"
    assert told["report"]["seconds"] > 0
    assert told["trouble"] == "no sample came"
    assert seconds < 10  # the start of this process and its worker included


def test_a_host_that_fails_after_the_stream_loses_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5), codec="h264", width=96, height=64)
    has_ended = threading.Event()

    def fault(_: ServedRequest) -> Fault | None:
        return Fault.status(404) if has_ended.is_set() else None

    stream = bench._stream

    def stream_then_fail(*arguments: object) -> object:
        told = stream(*arguments)  # type: ignore[arg-type]
        has_ended.set()
        return told

    monkeypatch.setattr(bench, "_stream", stream_then_fail)
    with RangeServer(truth.root, tls=False, fault=fault) as server:
        done = CliRunner().invoke(app, ["bench", server.url, "--seconds", "2"])
    assert done.exit_code == 0, done.output
    assert " samples in " in done.stdout
    assert "the rest isn't measured: " in done.stdout
    assert "404" in done.stdout


def test_a_plot_has_no_secret_and_any_title(tmp_path: Path) -> None:
    from matplotlib import rc_context

    truth = write_dataset(tmp_path / "a$b_{$c", episodes=(4, 5), codec="h264", width=96, height=64)
    picture = tmp_path / "out.svg"
    with RangeServer(truth.root, tls=False) as server, rc_context({"svg.fonttype": "none"}):
        url = server.url.replace("://", "://me:SECRET@") + "?X-Amz-Signature=SECRET"
        done = CliRunner().invoke(app, ["bench", url, "--seconds", "1", "--plot", str(picture)])
        assert done.exit_code == 0, done.output
        drawn = picture.read_text()
        local = CliRunner().invoke(app, ["bench", str(truth.root), "--seconds", "1", "--plot", str(picture)])
    assert local.exit_code == 0, local.output
    assert "samples given" in drawn
    assert "SECRET" not in drawn
    gone = CliRunner().invoke(app, ["bench", str(truth.root), "--plot", str(tmp_path / "gone" / "out.png")])
    assert gone.exit_code != 0
    assert "no directory" in gone.output or "no directory" in str(gone.exception)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_ends_the_stream_and_not_the_report(tmp_path: Path, workers: int) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(14, 15), codec="h264", width=96, height=64)
    interrupts = threading.Event()

    def progress(*_: object) -> None:
        if not interrupts.is_set():
            interrupts.set()
            os.kill(os.getpid(), signal.SIGINT)

    report, times, is_interrupted = bench._stream(str(truth.root), StreamConfig(), 60.0, workers, progress)
    assert is_interrupted
    assert report.waits.samples > 0
    assert times


def test_an_interrupt_while_the_link_is_measured_loses_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5), codec="h264", width=96, height=64)

    async def measure(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep(20)

    monkeypatch.setattr(bench, "_measure_dataset", measure)
    done = CliRunner().invoke(app, ["bench", str(truth.root), "--seconds", "1"])
    assert done.exit_code == 130, done.output
    assert " samples in " in done.stdout
    assert "the rest isn't measured: it was interrupted" in done.stdout


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e12", "0", "-3", "soon"])
def test_a_time_that_cannot_be_is_refused(tmp_path: Path, seconds: str) -> None:
    done = CliRunner().invoke(app, ["bench", str(tmp_path), "--seconds", seconds])
    assert done.exit_code == 2
    assert "Invalid value for" in done.output
    assert "--seconds" in done.output


def test_plot_of_an_unknown_format_is_refused_at_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", str(tmp_path), "--plot", str(tmp_path / "out.xyz")])
    assert isinstance(done.exception, ConfigError)
    assert "no format .xyz" in str(done.exception)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_dataset_that_is_not_there_is_an_error_of_one_line(tmp_path: Path, workers: str) -> None:
    done = CliRunner().invoke(app, ["bench", str(tmp_path / "nowhere"), "--num-workers", workers])
    assert isinstance(done.exception, NotFound)
    assert "\n" not in str(done.exception)
    assert "nowhere" in str(done.exception)


def test_clips_of_videos(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.mp4").write_bytes(movie(12))
    options = ["--num-frames", "4", "--step", "2", "--pick", "uniform", "--per-video", "2", "--size", "32x40"]
    done = CliRunner().invoke(app, ["bench", str(tmp_path), "--seconds", "2", *options, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["report"]["samples"] >= 1
    assert [link["streams"] for link in told["link"]] == [1, 2]
    assert (told["resident_frames_per_second"], told["trouble"]) == (None, None)


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_format_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    (tmp_path / "records.bin").write_bytes(bytes(1000))
    (tmp_path / "own_records.py").write_text(OWN_RECORDS)
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(
        app, ["bench", "own_records:records", "--seconds", "2", "--num-workers", workers, "--json"]
    )
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["report"]["samples"] > 0
    assert found["link"]
    assert found["trouble"] is None
    for name, message in (("own_records:url", "must be a RangeFormat"), ("own_records:none", "is no format")):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, ["bench", name], catch_exceptions=False)


OWN_RECORDS = """
import asyncfetch as af
import torch


class Records(af.RangeFormat):
    async def open(self, reader, fetcher):
        return {url: 10}

    def ranges(self, entry, number):
        return {"record": af.ByteRange(entry, 100 * number, 100 * number + 100)}

    def sample(self, entry, number, data):
        return {"record": torch.frombuffer(data["record"], dtype=torch.uint8)}


url = "records.bin"
records = Records()
"""


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4,), codec="h264", width=96, height=64)
    refused = CliRunner().invoke(app, ["bench", str(truth.root), "--num-frames", "4"])
    assert "clips is for Videos" in str(refused.exception)
    refused = CliRunner().invoke(app, ["bench", str(truth.root), "--size", "32"])
    assert isinstance(refused.exception, ConfigError)
    assert "480x832" in str(refused.exception)

"""``asyncfetch check``, ``frames``, ``ls``, ``cp`` and ``env`` as a shell sees them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import av
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from asyncfetch.cli.app import app
from asyncfetch.testing import Keys, RangeServer, S3Server, write_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from asyncfetch.testing import DatasetTruth


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def truth(tmp_path: Path) -> DatasetTruth:
    return write_dataset(tmp_path / "one", episodes=(4, 5, 6), codec="h264", width=96, height=64)


@pytest.mark.parametrize("command", ["info", "check", "frames", "ls", "cp", "env", "merge", "select", "cache"])
def test_every_command_has_short_help(command: str) -> None:
    assert "Usage:" in run(command, "-h").output


def test_the_version() -> None:
    assert run("--version").output.startswith("asyncfetch ")


def test_a_whole_dataset_passes(truth: DatasetTruth) -> None:
    for options in ([], ["--deep"]):
        done = run("check", truth.root, *options)
        assert (done.exit_code, done.stdout) == (0, "nothing found\n"), done.output


def test_what_is_missing_or_off_is_found_by_episode(truth: DatasetTruth) -> None:
    (truth.root / "meta" / "stats.json").unlink()
    [rows] = (truth.root / "data").rglob("*.parquet")
    table = pq.read_table(rows)
    place = table.schema.get_field_index("timestamp")
    seconds = table["timestamp"].to_numpy().copy()
    seconds[5] += 0.01
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(seconds)), rows)
    done = run("check", truth.root, "--deep", "--json")
    assert done.exit_code == 1
    found = {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "action" in found["missing statistics"]["details"]
    assert found["timestamps off the grid"]["episode"] == 1


def test_a_video_that_lacks_frames_is_found_without_decoding(truth: DatasetTruth) -> None:
    for video in (truth.root / "videos").rglob("*.mp4"):
        os.truncate(video, video.stat().st_size // 2)
    done = run("check", truth.root)
    assert done.exit_code == 1
    assert "episode 0: " in done.stdout


def test_a_contact_sheet(truth: DatasetTruth, tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    done = run("frames", truth.root, "--episode", 2, "--count", 3, "--out", out)
    assert done.exit_code == 0, done.output
    with av.open(out) as picture:
        pixels = next(picture.decode(video=0)).to_ndarray(format="rgb24")
    assert pixels.shape == (2 * 64, 3 * 96, 3)
    assert abs(pixels[:64, :96].astype(int) - truth.picture(2, 0, truth.cameras[0]).astype(int)).mean() < 12


def test_files_are_listed_and_copied_and_gone_on_with(truth: DatasetTruth, tmp_path: Path) -> None:
    files = {path.relative_to(truth.root) for path in truth.root.rglob("*") if path.is_file()}
    assert len(run("ls", truth.root).stdout.splitlines()) == 3
    told = json.loads(run("ls", "-r", "--json", truth.root).stdout)["entries"]
    assert len(told) == len(files)
    copied = run("cp", "-r", truth.root, tmp_path / "two")
    assert copied.exit_code == 0, copied.output
    assert f"{len(files)} files" in copied.stdout
    assert "copied: 100 %" in copied.stderr
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (truth.root / file).read_bytes()
    (tmp_path / "two" / "meta" / "info.json").unlink()
    again = run("cp", "-r", truth.root, tmp_path / "two")
    assert again.stdout.startswith(f"{tmp_path / 'two'}: 1 files, ")
    assert f", {len(files) - 1} were there" in again.stdout


def test_a_file_of_a_server_and_a_bucket(truth: DatasetTruth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RangeServer(truth.root) as server:
        done = run("cp", f"{server.url}/meta/info.json", f"{tmp_path}/", "--ca-file", server.ca_file)
        assert done.exit_code == 0, done.output
        refused = run("cp", f"{server.url}/none", f"{tmp_path}/", "--ca-file", server.ca_file)
    assert (tmp_path / "info.json").read_bytes() == (truth.root / "meta" / "info.json").read_bytes()
    assert refused.exit_code != 0
    with S3Server({}) as s3:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        done = run("cp", tmp_path / "info.json", "s3://robots/info.json", "--ca-file", s3.ca_file)
        assert done.exit_code == 0, done.output
        assert "s3://robots/info.json" in run("ls", "s3://robots/", "--ca-file", s3.ca_file).stdout


def test_what_is_installed() -> None:
    done = run("env", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["decoders"]["pyav"]
    assert told["packages"]["asyncfetch"]
    assert "pyav decodes" in run("env").stdout

"""``asyncfetch merge`` as a shell sees it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from asyncfetch.cli.app import app
from asyncfetch.errors import ConfigError
from asyncfetch.testing import DatasetTruth, RangeServer, write_dataset
from tests.merge.test_plan import changed

if TYPE_CHECKING:
    from pathlib import Path

runner = CliRunner()


def make(root: Path) -> DatasetTruth:
    return write_dataset(root, episodes=(4, 5), codec="h264", width=96, height=64)


def test_merge_says_what_it_wrote(tmp_path: Path) -> None:
    truth = make(tmp_path / "one")
    done = runner.invoke(app, ["merge", str(truth.root), str(truth.root), str(tmp_path / "out"), "--workers", "1"])
    assert done.exit_code == 0
    said = [re.fullmatch(r"written: (\d+) %(?:, [0-3]/3 files)?", line) for line in done.stderr.splitlines()]
    shares = [int(line[1]) for line in said if line]  # no terminal, so a line for each tenth of the way
    assert shares
    assert len(shares) == len(said)
    assert shares == sorted(set(shares) & {*range(0, 101, 10)})
    assert (shares[0], shares[-1]) == (0, 100)
    assert "4 episodes, 18 frames, 2 tasks" in done.stdout
    assert (tmp_path / "out/meta/info.json").is_file()


def test_datasets_of_a_server_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    truth = make(tmp_path / "one")
    with RangeServer(truth.root) as server:
        trust = ["--ca-file", str(server.ca_file)]
        for command in (
            ["merge", server.url, server.url, str(tmp_path / "both")],
            ["select", server.url, str(tmp_path / "some"), "--episodes", "0"],
            ["split", server.url, str(tmp_path / "parts"), "a=1", "b=1"],
        ):
            done = runner.invoke(app, [*command, *trust])
            assert done.exit_code == 0, done.output
        done = runner.invoke(app, ["convert", server.url, str(tmp_path / "new"), *trust])
        assert "needs no conversion" in str(done.exception)
        done = runner.invoke(app, ["merge", server.url, str(tmp_path / "none")])
        assert "isn't trusted" in str(done.exception)


def test_a_dry_run_says_that_nothing_was_written(tmp_path: Path) -> None:
    truth = make(tmp_path / "one")
    (truth.root / "meta/lineage.json").touch()
    other = changed(truth.root, tmp_path / "other", lambda info: info.update(note=1))
    done = runner.invoke(app, ["merge", str(truth.root), str(other), str(tmp_path / "out"), "--dry-run"])
    assert done.exit_code == 0
    assert "nothing written" in done.stdout
    assert "data/chunk-000/file-000.parquet: 4 episodes, about" in done.stdout
    assert f"not carried over: {truth.root}/meta/lineage.json" in done.stdout
    assert f"not carried over: note is 1 in {other}, but missing in {truth.root}" in done.stdout
    assert not (tmp_path / "out").exists()


def test_fewer_than_one_worker_is_refused(tmp_path: Path) -> None:
    done = runner.invoke(app, ["merge", str(tmp_path), str(tmp_path / "out"), "--workers", "0"])
    assert isinstance(done.exception, ConfigError)


def test_merge_needs_more_than_one_path(tmp_path: Path) -> None:
    done = runner.invoke(app, ["merge", str(tmp_path)])
    assert done.exit_code == 2
    assert "at least one dataset" in done.output

"""``asyncfetch select``, ``split`` and ``convert`` as a shell sees them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from asyncfetch.cli.app import app
from asyncfetch.cli.merge import parse_episodes, parse_share
from asyncfetch.errors import ConfigError
from asyncfetch.testing import write_dataset
from tests.lerobot.serving import renumbered
from tests.merge.version2 import EPISODE_FILE, as_version2

if TYPE_CHECKING:
    from pathlib import Path

runner = CliRunner()


def test_parts_of_a_dataset_and_an_old_one(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"episodes": (4, 5, 6), "codec": "h264", "width": 96, "height": 64}
    truth = write_dataset(tmp_path / "one", **{**shape, **EPISODE_FILE})
    old, out = as_version2(truth, tmp_path / "old"), tmp_path / "out"
    for command, said in [
        (["select", str(truth.root), str(out / "some"), "--episodes", "0-1"], ["2 episodes, 9 frames"]),
        (["split", str(truth.root), str(out), "a=2", "b=1"], ["2 episodes, 9 frames", "1 episodes, 6 frames"]),
        (["convert", str(old), str(out / "new"), "--workers", "1"], ["3 episodes, 15 frames"]),
        (["convert", str(old), str(out / "none"), "--dry-run"], ["nothing written"]),
    ]:
        done = runner.invoke(app, command)
        assert (done.exit_code, [words for words in said if words not in done.stdout]) == (0, []), done.output
    assert {path.name for path in out.iterdir()} == {"some", "a", "b", "new"}
    assert json.loads((out / "new/meta/info.json").read_text())["codebase_version"] == "v3.0"


def test_episodes_between_whose_numbers_are_gaps(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4, 5, 6), codec="h264", width=96, height=64)
    root, out = str(renumbered(truth, tmp_path / "gaps", (0, None, 10**12))), tmp_path / "out"
    for command, said in [
        (["select", root, str(out / "some"), "--episodes", "1000000000000"], "1 episodes, 6 frames"),
        (["merge", root, root, str(out / "both")], "4 episodes, 20 frames"),
        (["split", root, str(out), "a=0.5", "b=0.5"], "1 episodes, 4 frames"),
    ]:
        done = runner.invoke(app, command)
        assert (done.exit_code, said in done.stdout) == (0, True), done.output
    done = runner.invoke(app, ["select", root, str(out / "none"), "--episodes", "0-1"])
    assert "no episode 1; it has 0 to 1000000000000, but only 2 of these numbers" in str(done.exception)


def test_episodes_and_shares_as_people_write_them() -> None:
    assert parse_episodes("0-3, 7,9 - 9") == [0, 1, 2, 3, 7, 9]
    assert [parse_share(text) for text in ("a=0.5", "b=3", "c=3-3", "d=.5", "e=0,4")] == [
        ("a", 0.5),
        ("b", 3),
        ("c", [3]),
        ("d", 0.5),
        ("e", [0, 4]),
    ]
    for text in ("", "x", "1-", "-1", "0..3"):
        with pytest.raises(ConfigError, match="such as 0-9,12"):
            parse_episodes(text)
    with pytest.raises(ConfigError, match="'2-1' names no episodes: write the lower number first"):
        parse_episodes("0, 2-1")
    for text in ("0-999999999", "0-9999999,0"):
        with pytest.raises(ConfigError, match="more than 10,000,000 episodes"):
            parse_episodes(text)
    with pytest.raises(ConfigError, match=r"train=0\.9"):
        parse_share("train")
    with pytest.raises(ConfigError, match="such as 0-9,12"):
        parse_share("train=" + "1" * 5000)


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    done = runner.invoke(app, ["split", str(tmp_path), str(tmp_path / "out"), "a=1", "a=2"])
    assert isinstance(done.exception, ConfigError)

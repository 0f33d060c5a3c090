"""``asyncfetch cache`` as a shell sees it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from asyncfetch.__main__ import main
from asyncfetch.cache.disk import DiskStore, DiskTier
from asyncfetch.cache.disk.layout import VersionFile
from asyncfetch.cli.app import app
from asyncfetch.cli.terminal import LineProgress, format_bytes, parse_bytes
from asyncfetch.errors import ConfigError
from asyncfetch.ranges import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1024 * 1024
BLOCK = MIB + 4096
VERSION = VersionFile.of(ObjectInfo("https://data.example.org/a", 9 * MIB, '"tag"'))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """In use by this process all the while."""
    store = DiskStore(DiskTier(tmp_path / "tier", 64 * MIB, min_free_bytes=0))
    store.write(VERSION, 0, memoryview(bytes(3 * MIB)))
    yield store
    store.close()


SHARES_SAID = re.compile(r"^[\w ]+: \d+ %\n", re.MULTILINE)
"""A line each tenth of the way, where there is no terminal."""


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert (result.exit_code, SHARES_SAID.sub("", result.stderr)) == (code, "")
    return result.stdout


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json", code=code)))


def test_path_is_the_option_else_the_environments_else_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASYNCFETCH_DISK_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("path") == f"{tmp_path}/.cache/asyncfetch/disk\n"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert run("path") == f"{tmp_path}/xdg/asyncfetch/disk\n"
    monkeypatch.setenv("ASYNCFETCH_DISK_CACHE_DIR", "~/mine")
    assert run_json("path") == {"directory": f"{tmp_path}/mine", "exists": False}
    assert run("path", "--directory", "/else/where") == "/else/where\n"


def test_a_directory_of_nobody_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCFETCH_DISK_CACHE_DIR", "~nobody-of-this-name/cache")
    ended = shell("cache", "path")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "begins with a user who has no home here" in ended.stderr


def test_stats_are_for_people_or_machines(store: DiskStore) -> None:
    shown = run("stats", "-d", store.tier.path)
    assert "3.01 MiB" in shown
    told = run_json("stats", "-d", store.tier.path)
    assert (told["objects"], told["files"], told["cost_bytes"], told["unfinished_bytes"]) == (1, 3, 3 * BLOCK, 0)
    assert told["oldest_use_ns"] <= told["newest_use_ns"]
    assert told["free_bytes"] > 0


@pytest.mark.parametrize("name", ["[red]tier", "tier[/x]"])
def test_stats_show_a_directory_of_any_name_as_it_is(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    directory = tmp_path / name
    directory.parent.mkdir(exist_ok=True)
    store.tier.path.rename(directory)
    assert str(directory) in run("stats", "-d", directory)


def test_verify_deletes_what_is_damaged_and_exits_with_1(store: DiskStore) -> None:
    assert "3 files, 3.00 MiB: 0 damaged" in run("verify", "-d", store.tier.path)
    damaged = next((store.tier.path / "v1/objects").glob("*/*"))
    with damaged.open("r+b") as file:
        file.seek(1000)
        file.write(b"!")
    told = run_json("verify", "-d", store.tier.path, code=1)
    assert (told["files"], told["damaged"]) == (3, 1)
    assert run_json("verify", "-d", store.tier.path)["files"] == 2
    assert len(store.read(VERSION, 0, memoryview(bytearray(3 * MIB)))) == 1
    assert store.folder.used_bytes() == 2 * BLOCK


def test_prune_leaves_what_was_used_last(store: DiskStore) -> None:
    store.read(VERSION, 0, memoryview(bytearray(MIB)))
    assert run("prune", "--max-bytes", "2 MiB", "-d", store.tier.path).startswith("2 files deleted, 2.01 MiB: 1.00 MiB")
    assert store.read(VERSION, 0, memoryview(bytearray(MIB))) == []
    assert run_json("prune", "--max-bytes", "1GB", "-d", store.tier.path)["files"] == 0


def test_clear_leaves_nothing_and_the_tier_goes_on(store: DiskStore) -> None:
    assert run_json("clear", "-d", store.tier.path) == {
        "directory": str(store.tier.path), "files": 3, "cost_bytes": 3 * BLOCK, "used_bytes": 0,
    }  # fmt: skip
    store.write(VERSION, 0, memoryview(bytes(MIB)))
    assert store.read(VERSION, 0, memoryview(bytearray(MIB))) == []
    assert run_json("stats", "-d", store.tier.path)["files"] == 1


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncfetch", *arguments]
    environment = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_name_that_stdout_can_not_encode_is_shown() -> None:
    ended = shell("cache", "path", "-d", "/l\xe0", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "/l\\xe0\n", "")


def test_a_name_that_stdout_can_hold_is_told_to_the_byte() -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    command = [sys.executable, "-m", "asyncfetch", "cache", "path", "-d", os.fsdecode(b"/l\xff")]
    assert subprocess.run(command, capture_output=True, check=True, env=environment).stdout == b"/l\xff\n"


def test_shares_are_said_to_nobody_where_there_is_no_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    LineProgress().say("written", 0.5)
    assert capsys.readouterr().out == ""


def test_an_interrupt_while_it_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "asyncfetch.cli.app", Interrupted("app"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "-d", "{tmp_path}/nothing"], "asyncfetch: there is no disk cache at {tmp_path}/nothing"),
        (["prune", "--max-bytes", "much", "-d", "{tmp_path}"], "asyncfetch: 'much' is no size: write a number of"),
        (["stats", "-d", "{tmp_path}/file/under"], "asyncfetch: there is no disk cache at {tmp_path}/file/under"),
        (["clear", "-d", ""], "asyncfetch: '' doesn't name a directory"),  # of a variable that isn't set, say
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "file").touch()
    shown = [argument.format(tmp_path=tmp_path) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["asyncfetch", "cache", *shown])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(message.format(tmp_path=tmp_path))
    assert told.count("\n") == 1


def test_prune_shows_its_progress(store: DiskStore) -> None:
    shown: list[tuple[str, float]] = []
    store.folder.prune(0, lambda doing, share: shown.append((doing, share)))
    shelves = len(list((store.tier.path / "v1/objects").iterdir()))
    assert shown == [(doing, number / shelves) for doing in ("looking", "deleting") for number in range(shelves)]


@given(st.integers(0, 2**62))
@example(10_235)
@example(102_395)
def test_a_size_shown_is_the_size_within_a_percent(number: int) -> None:
    shown = format_bytes(number)
    assert len(shown) <= 8
    assert abs(parse_bytes(shown) - number) <= number / 100


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("1000", 1000), ("10GiB", 10 * 2**30), ("1.5 TB", 1_500_000_000_000), ("64k", 64_000), (" .5KiB ", 512)],
)
def test_sizes_are_read(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "-1", "1.2.3", "GiB", "1 XB", "ten", "1e9", "1_000", "9" * 5000, "9" * 400 + "k"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_bytes(text)

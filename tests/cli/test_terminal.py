"""The commands' screens: within their columns, without colour where that is asked for, quiet when interrupted."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from asyncfetch.__main__ import main
from asyncfetch.cli.app import app
from asyncfetch.testing import Fault, RangeServer, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth, ServedRequest

pytestmark = pytest.mark.usefixtures("programs_are_warm")

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*[34][0-9][0-9;]*m")
PROGRAM = (sys.executable, "-W", "error", "-m", "asyncfetch")


class Screen:
    """A command on a terminal of so many columns."""

    def __init__(self, *arguments: object, columns: int, **environment: str) -> None:
        self._master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
        self._process = subprocess.Popen(
            [*PROGRAM, *map(str, arguments)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**inherited, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        os.close(terminal)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Its exit code and all that it wrote."""
        written = b""
        while True:
            try:
                some = os.read(self._master, 65536)
            except OSError:  # the terminal's other end is closed
                break
            if not some:
                break
            written += some
        os.close(self._master)
        return self._process.wait(), written.decode()


def lines_of(written: str) -> list[str]:
    return [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", written))]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    root = tmp_path_factory.mktemp("screens") / "pick"
    return write_dataset(root, episodes=(4, 5, 6), codec="h264", width=96, height=64)


COMMANDS = "info check frames index bench ls cp merge select split convert env run cache"
CACHE_COMMANDS = "path stats verify prune clear"


@pytest.mark.parametrize("columns", [80, 60])
def test_help_fits_and_cuts_no_word(columns: int) -> None:
    runner = CliRunner()
    pages: list[list[str]] = [
        [],
        *([name] for name in COMMANDS.split()),
        *(["cache", name] for name in CACHE_COMMANDS.split()),
    ]
    for page in pages:
        shown = runner.invoke(app, [*page, "-h"], terminal_width=columns).output
        assert "Usage:" in shown
        assert max(map(len, shown.splitlines())) <= columns, shown
        assert "\N{HORIZONTAL ELLIPSIS}" not in shown
        cut = [word for word in re.findall(r"\S+\.\.\.", shown) if not re.search(r"[}\]]|paths|parts", word)]
        assert cut == [], shown
    listed = re.findall(r"^  (\w+)  ", runner.invoke(app, ["-h"], terminal_width=columns).output, re.MULTILINE)
    assert listed == COMMANDS.split()


def test_screen_fits_its_terminal_and_ends_with_100_percent(truth: DatasetTruth, tmp_path: Path) -> None:
    commands: list[tuple[int, list[object], bool]] = [
        (80, ["info", "."], False),
        (60, ["info", "."], False),
        (60, ["check", ".", "--deep"], True),
        (60, ["cp", "-r", ".", tmp_path / "copy"], True),
        (60, ["merge", ".", ".", tmp_path / "both", "--workers", "1"], True),
        (60, ["-h"], False),
    ]
    for columns, arguments, shows_progress in commands:
        code, written = Screen(*[truth.root if each == "." else each for each in arguments], columns=columns).end()
        lines = lines_of(written)
        assert code == 0, written
        bars = [line for line in lines if "%" in line]
        assert max(map(len, bars), default=0) <= columns
        if shows_progress:
            assert "  0%" in bars[0]
            assert "100%" in bars[-1]
        told = [line for line in lines if str(tmp_path) not in line and str(truth.root) not in line]
        assert max(map(len, told)) <= columns, told


def test_no_colour_where_the_environment_says_so(truth: DatasetTruth, tmp_path: Path) -> None:
    for arguments in (["info", truth.root], ["cp", "-r", truth.root, tmp_path / "copy"], ["-h"]):
        code, written = Screen(*arguments, columns=80, NO_COLOR="1").end()
        assert code == 0
        assert not COLOUR.search(written)


def piped(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False, env=inherited | environment
    )


def test_piped_output_is_results_without_control_characters(truth: DatasetTruth, tmp_path: Path) -> None:
    for arguments in (["info", truth.root], ["check", truth.root], ["cp", "-r", truth.root, tmp_path / "copy"]):
        done = piped(*arguments)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "%" not in done.stdout
    assert "100 %" in done.stderr
    assert piped("info", truth.root, LC_ALL="C", PYTHONIOENCODING="ascii").stdout.isascii()


def test_a_reader_that_goes_away_is_no_error(truth: DatasetTruth) -> None:
    command = [*PROGRAM, "ls", "-r", str(truth.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        assert listing.stdout is not None
        listing.stdout.close()
        assert listing.stderr is not None
        assert listing.stderr.read() == b""


def test_error_is_one_line_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["info", "/nowhere"], ["check", "/nowhere"], ["ls", "/nowhere"], ["cp", "/nowhere", "/tmp/x"]):
        monkeypatch.setattr(sys, "argv", ["asyncfetch", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        assert (ended.value.code, written.out) == (2, "")
        *progress, said = written.err.splitlines()
        assert said.startswith("asyncfetch: ")
        assert all(line.endswith(" %") for line in progress)


STALLING = {
    "info": ["info", "URL"],
    "check": ["check", "URL"],
    "frames": ["frames", "URL", "--out", "OUT/grid.png"],
    "bench": ["bench", "URL"],
    "cp": ["cp", "URL/videos/observation.images.top/chunk-000/file-000.mp4", "OUT/"],
    "merge": ["merge", "URL", "OUT/both", "--workers", "1"],
}


@pytest.fixture
def stalling(truth: DatasetTruth) -> Iterator[tuple[RangeServer, threading.Event]]:
    """A server whose videos never come, and an event that says that one was asked for."""
    asked = threading.Event()

    def fault(request: ServedRequest) -> Fault | None:
        if not request.path.endswith(".mp4"):
            return None
        asked.set()
        return Fault.stall()

    with RangeServer(truth.root, fault=fault) as server:
        yield server, asked


@pytest.mark.parametrize("name", STALLING)
def test_interrupt_ends_a_command_without_a_traceback(
    name: str, stalling: tuple[RangeServer, threading.Event], tmp_path: Path
) -> None:
    server, asked = stalling
    arguments = [each.replace("URL", server.url).replace("OUT", str(tmp_path)) for each in STALLING[name]]
    screen = Screen(*arguments, "--ca-file", server.ca_file, columns=80)
    assert asked.wait(60)
    screen.interrupt()
    code, written = screen.end()
    assert code == 130, written
    assert "Traceback" not in written
    if "\x1b[?25l" in written:  # the cursor was hidden
        assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    left = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert [path.name for path in left if path.suffix in {".mp4", ".png"}] == []

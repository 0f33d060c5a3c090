""".ci/setup in worlds where something is missing, and .ci/test. Python and pip are stand-ins that note their calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "cat", "cksum", "cp", "dirname", "env", "grep", "ln", "mkdir", "rm", "uname")
"""All that it uses of the system, but for apt-get, id and sudo."""
PYTHON = """#!/usr/bin/env bash
case "$*" in
*version_info*) [ ! -e "$LACKS/python" ] ;;
*"import ensurepip"*) [ ! -e "$LACKS/venv" ] ;;
*"import torchcodec"*) [ ! -e "$LACKS/ffmpeg" ] ;;
*tomllib*) printf '%s\\n' anyio==4.16 torch==2.9 torchcodec==0.8 ;;
*"pip --version"*) [ ! -e "$LACKS/pip" ] ;;
*--version*) echo "Python 3.11.9" ;;
"-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" && ln -s python "${@: -1}/bin/pip" ;;
*install*) printf '%s\\n' "$*" >>"$LACKS/installed" ;;
*) [ "$(basename "$0") $*" = "pip --version" ] ;;
esac
"""


@dataclass
class World:
    """A machine of a user who isn't root, with a checkout in a directory whose name has a space."""

    checkout: Path
    tools: Path
    lacks: Path

    def lack(self, *names: str) -> None:
        for name in names:
            (self.lacks / name).touch()

    def setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.checkout / ".ci/setup", *arguments, cwd=self.lacks)

    def run(
        self, script: str | os.PathLike[str], *arguments: str, cwd: Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", script, *arguments],
            cwd=cwd,
            env={
                "PATH": os.fspath(self.tools),
                "LACKS": os.fspath(self.lacks),
                "VIRTUAL_ENV": "/elsewhere",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

    def installed(self) -> list[str]:
        """What pip was asked to install since the last call."""
        log = self.lacks / "installed"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path / "my work" / "asyncfetch", tmp_path / "bin", tmp_path / "lacks")
    world.tools.mkdir()
    world.lacks.mkdir()
    shutil.copytree(ROOT / ".ci", world.checkout / ".ci")
    shutil.copy(ROOT / "pyproject.toml", world.checkout)
    for tool in TOOLS:
        (world.tools / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool} here"))
    for name, text in {"python3": PYTHON, "id": "#!/usr/bin/env bash\necho 1000\n"}.items():
        (world.tools / name).write_text(text)
        (world.tools / name).chmod(0o755)
    return world


def test_setup_does_only_what_is_missing(world: World) -> None:
    first = world.setup()
    assert (first.returncode, first.stdout) == (0, "")
    assert f"making {world.checkout}/.venv with Python 3.11.9" in first.stderr
    assert any("--editable .[lerobot,pyav,cli,testing]" in line for line in world.installed())
    again = world.setup()
    assert (again.returncode, again.stdout, again.stderr, world.installed()) == (0, "", "", [])
    assert world.setup("--dev").returncode == 0
    assert any("--group dev" in line for line in world.installed())
    assert world.setup().returncode == 0
    assert world.installed() == []  # the tests need all that the quick start needs
    with (world.checkout / ".ci/constraints.txt").open("a") as constraints:
        constraints.write("another==1\n")
    assert world.setup().returncode == 0
    assert world.installed()


def test_other_versions_have_an_environment_of_their_own(world: World) -> None:
    pinned = (world.checkout / ".ci/constraints.txt").read_text().splitlines()
    for versions, chosen in [
        ("oldest", ["anyio==4.16", "torch==2.9", "torchcodec==0.8"]),
        ("newest", [line for line in pinned if line.startswith("torch") and not line.startswith("torchdata")]),
    ]:
        ended = world.setup(f"--{versions}")
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
        assert (world.checkout / f".venv-{versions}/constraints.txt").read_text().splitlines() == chosen
        torch = next(line for line in chosen if line.startswith("torch=="))
        build, packages = [line for line in world.installed() if "--constraint" in line]
        assert build.endswith(f"--constraint {world.checkout}/.venv-{versions}/constraints.txt {torch}+cpu")
        assert packages.endswith("--editable .[all] --group test")
    assert not (world.checkout / ".venv").exists()


@pytest.mark.parametrize("script", ["quickstart", "run", "setup", "test"])
def test_scripts_set_up_their_checkout_whatever_cdpath_says(world: World, tmp_path: Path, script: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(world.checkout, elsewhere)
    ended = world.run(f".ci/{script}", cwd=world.checkout, CDPATH=str(elsewhere))
    assert ended.stdout == ""
    assert (world.checkout / ".venv").is_dir(), ended.stderr
    assert not (elsewhere / ".venv").exists()


@pytest.mark.parametrize(
    ("lacks", "arguments", "code", "advice"),
    [
        (("python",), (), 1, "needs Python 3.11 or newer; python3 is Python 3.11.9. Install it"),
        (
            ("venv", "pip"),
            (),
            1,
            "python3 can't make virtual environments. Install what it lacks: sudo apt-get install python3.11-venv",
        ),
        (
            ("ffmpeg",),
            (),
            0,
            "PyAV, which brings its own, decodes instead: everything works, more slowly. To use torchcodec: ",
        ),
        ((), ("--all",), 2, "usage: bash .ci/setup [--dev | --oldest | --newest]"),
    ],
    ids=["python", "venv", "ffmpeg", "usage"],
)
def test_setup_without_root_says_what_to_install(
    world: World, lacks: tuple[str, ...], arguments: tuple[str, ...], code: int, advice: str
) -> None:
    world.lack(*lacks)
    ended = world.setup(*arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert advice in ended.stderr


def test_package_asked_for_is_that_of_the_python_in_use(world: World) -> None:
    (world.tools / "python3").write_text("#!/usr/bin/env bash\nexit 1\n")  # too old
    (world.tools / "python3.12").write_text(PYTHON.replace("3.11.9", "3.12.3"))
    (world.tools / "python3.12").chmod(0o755)
    world.lack("venv", "pip")
    ended = world.setup()
    assert ended.returncode == 1
    assert "python3.12 can't make virtual" in ended.stderr
    assert ended.stderr.endswith("sudo apt-get install python3.12-venv\n")


@pytest.mark.parametrize(
    ("together", "alone", "code"), [(0, 0, 0), (5, 0, 0), (0, 5, 0), (5, 5, 5), (1, 0, 1), (0, 1, 1), (5, 1, 1)]
)
def test_the_tests_asked_for_may_all_be_of_one_kind(tmp_path: Path, together: int, alone: int, code: int) -> None:
    commands = dict.fromkeys(("ruff", "mypy", "lint-imports"), "exit 0")
    commands["python"] = f'case "$*" in *"not alone"*) exit {together} ;; *) exit {alone} ;; esac'
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/test", tmp_path / ".ci")
    (tmp_path / ".ci/setup").touch()
    for name, body in commands.items():
        (tmp_path / ".venv/bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    assert subprocess.run(["bash", tmp_path / ".ci/test", "tests/some"], check=False, timeout=60).returncode == code


def test_a_python_without_ensurepip_serves_where_pip_is_there(world: World) -> None:
    """Debian's without python3-venv, with pip from elsewhere."""
    world.lack("venv")
    ended = world.setup()
    assert ended.returncode == 0, ended.stderr
    assert any("--python" in line and line.endswith("install --quiet pip") for line in world.installed())


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://robots/pick-place", ["aiobotocore>=3.9"]),
        ("gs://robots/pick-place", ["fsspec gcsfs"]),
        ("sftp://host/pick-place", ["fsspec paramiko"]),
        ("hf://datasets/org/name", []),
        ("https://host/pick-place", []),
        ("/data/pick-place", []),
    ],
)
def test_the_quick_start_has_what_a_url_needs(world: World, url: str, wanted: list[str]) -> None:
    world.setup()
    world.installed()
    world.run(".ci/quickstart", url, cwd=world.checkout)
    assert [line.rpartition("constraints.txt ")[2] for line in world.installed()] == wanted

"""The package as a whole: what it exports, what importing it costs, what it says where an extra is missing."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncfetch as af
from asyncfetch import errors
from asyncfetch.errors import AsyncFetchError, FetchError, redact_text, redact_url

ROOT = Path(__file__).parents[1]
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(ROOT / "asyncfetch")], prefix="asyncfetch."))
EXTRAS = (
    *("torch", "torchcodec", "pyarrow", "av", "trustme", "rich", "typer", "fsspec", "aiobotocore"),
    *("prometheus_client", "ray", "xxhash"),
)
HEAVY = (*EXTRAS, "botocore")

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def python(program: str, *options: str, blocked: tuple[str, ...] = ()) -> str:
    """What a fresh interpreter prints; it is started in the root, so that the working copy is what it imports."""
    program = (BLOCKER.format(blocked=set(blocked)) if blocked else "") + program
    ended = subprocess.run(
        [sys.executable, *options, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# What it exports.


@pytest.mark.parametrize("name", af.__all__)
def test_every_name_is_importable(name: str) -> None:
    assert getattr(af, name) is not None
    assert name in dir(af)


def test_every_public_name_is_in_all() -> None:
    imported = {name for names in af._HOMES.values() for name in names} | set(af._ROOMS)
    assert imported == set(af.__all__)
    assert sorted(af.__all__) == af.__all__


def test_names_say_their_home_and_are_in_its_all() -> None:
    for room, names in af._HOMES.items():
        home = importlib.import_module(f"asyncfetch.{room}")
        assert set(names) <= set(home.__all__), room


def test_every_error_is_exported() -> None:
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    functions = {"about_range", "anew", "install_command", "is_redacted", "redact_text", "redact_url"}
    assert classes == set(errors.__all__) - functions
    assert classes <= set(af.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Steam'"):
        af.Steam  # noqa: B018


@pytest.mark.parametrize("module", ["asyncfetch", *MODULES])
def test_names_in_all_are_there(module: str) -> None:
    there = importlib.import_module(module)
    exported = getattr(there, "__all__", [])
    assert len(set(exported)) == len(exported)
    for name in exported:
        assert hasattr(there, name), name


# What importing it costs.


@pytest.mark.slow  # a module takes 0.1 s, and more on a busy machine
def test_modules_import_alone() -> None:
    """Each in a fork that has nothing of asyncfetch but the packages around it, which are imported first in any case.

    A module that its package imports needs no fork: it was imported alone when the package was.
    """
    program = f"""
import os, sys, traceback
import aiohttp, aiohttp.web, anyio, anyio.from_thread, numpy, torch.utils.data
modules = {MODULES!r}
packages = {{name.rpartition(".")[0] for name in modules}}

def import_alone(name):
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(import_those_in(name))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def import_those_in(package):
    for name in (name for name in modules if name.rpartition(".")[0] == package):
        if (name not in sys.modules or name in packages) and import_alone(name):
            print(f"{{name}} doesn't import alone", file=sys.stderr)
            return 1
    return 0

sys.exit(import_alone("asyncfetch"))
"""
    python(program, "-W", "error")


def test_importing_it_loads_nothing_heavy() -> None:
    program = "import sys, asyncfetch; print(*sys.modules)"
    assert not set(python(program).split()) & {*HEAVY, "numpy", "aiohttp", "anyio"}


def test_parts_of_the_package_load_nothing_heavy() -> None:
    """Only the torch room may import torch."""
    program = (
        "import sys, asyncfetch\nfor name in asyncfetch.__all__:\n    if name != 'torch': getattr(asyncfetch, name)\n"
    )
    assert not set(python(program + "print(*sys.modules)").split()) & set(HEAVY)


def test_importing_it_costs_next_to_nothing() -> None:
    """Its root, and what an interpreter has at hand; what it stands on would be 350 modules."""
    program = "import sys; before = set(sys.modules); import asyncfetch; print(*(set(sys.modules) - before))"
    loaded = python(program).split()
    assert [name for name in loaded if name.startswith("asyncfetch")] == ["asyncfetch"]
    assert len(loaded) < 60


# Where an extra is missing.


def test_the_bare_package_imports_and_fetches() -> None:
    program = """
import anyio, asyncfetch as af
async def read():
    async with af.Fetcher() as fetcher, af.ByteCache(fetcher, max_bytes=1000) as cache:
        print(bytes(await cache.fetch("README.md", 0, 12)))
anyio.run(read)
"""
    assert python(program, blocked=EXTRAS).strip() == repr(b"# asyncfetch")


@pytest.mark.parametrize(
    ("use", "extra"),
    [
        ("next(iter(af.Stream('tests/data/h264')))", "lerobot"),
        ("anyio.run(af.open_dataset('tests/data/h264').__aenter__)", "lerobot"),
        ("af.torch", "lerobot"),
        ("from asyncfetch.torch import StreamDataset", "lerobot"),
        ("af.testing.write_dataset('/nowhere/at/all')", "testing"),
        ("af.testing.RangeServer({}).__enter__()", "testing"),
        ("from asyncfetch.prometheus import Collector; Collector(lambda: None)", "metrics"),
        ("from asyncfetch.cache.disk import DiskStore; DiskStore(af.DiskTier('nowhere', 1))", "disk"),
        ("import asyncfetch.cli.app", "cli"),
        ("from asyncfetch.tensors.remote import import_torch; import_torch()", "tensors"),
        ("from asyncfetch.tensors.ray_store import RayStore; RayStore(None)", "ray"),
        ("anyio.run(af.distributed.RayExecutor().open(af.FetchConfig(), 1, print).__aenter__)", "ray"),
        ("with af.tensors.TensorClient() as client: client.remotize(1, 'http://localhost')", "tensors"),
    ],
)
def test_a_missing_extra_is_named(use: str, extra: str) -> None:
    program = f"""
import anyio, asyncfetch as af
try:
    {use}
except af.MissingDependency as error:
    print(error)
"""
    assert errors.install_command(extra) in python(program, blocked=EXTRAS)


# Errors.


def error_classes() -> list[type[AsyncFetchError]]:
    named = [getattr(errors, name) for name in errors.__all__]
    return [each for each in named if isinstance(each, type)]


@pytest.mark.parametrize("kind", error_classes())
def test_an_error_pickles_with_its_message_and_every_field(kind: type[AsyncFetchError]) -> None:
    fields: dict[str, Any] = {"url": "https://host/a", "start": 0, "stop": 9, "host": "host", "status": 503}
    error = kind("it broke", **fields) if issubclass(kind, FetchError) else kind("it broke")
    error.note = "put there later"  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert again.args == error.args


@pytest.mark.parametrize("kind", error_classes())
def test_an_error_is_the_builtin_that_its_docs_name(kind: type[AsyncFetchError]) -> None:
    line = next(line for line in str(errors.__doc__).splitlines() if kind.__name__ in line.split("(")[0].split())
    builtin = line.partition("(")[2].partition(")")[0] if f"{kind.__name__} (" in line else "Exception"
    assert issubclass(kind, getattr(importlib.import_module("builtins"), builtin))
    assert issubclass(kind, AsyncFetchError)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a?b=c", "https://host/a?b=c"),
        ("https://user:secret@host/a", "https://***@host/a"),
        ("https://host/a?X-Amz-Signature=secret&part=1", "https://host/a?X-Amz-Signature=***&part=1"),
        ("https://host/a?part=1&token=secret#top", "https://host/a?part=1&token=***#top"),
        ("https://host/a?tokens=many", "https://host/a?tokens=many"),
        ("https://host/user:name@home", "https://host/user:name@home"),
        ("/a/path?token=secret", "/a/path?token=***"),
        ("https://me:p@ss@host/a@b", "https://***@host/a@b"),
        ("https://host/a?sv=1&sig=secret%3D;se=2", "https://host/a?sv=1&sig=***;se=2"),
        (
            "https://host/a?x-oss-signature=secret&OSSAccessKeyId=secret",
            "https://host/a?x-oss-signature=***&OSSAccessKeyId=***",
        ),
        (
            "https://host/a?api_key=secret&monkey=no&page-token=secret",
            "https://host/a?api_key=***&monkey=no&page-token=***",
        ),
        ("https://me:pass word@host/a b@c", "https://***@host/a b@c"),
        ("https://host/a?token=secret word&my token=a b&d=e f", "https://host/a?token=***&my token=***&d=e f"),
        *(
            (f"https://host/a?x=1&{name}=secret", f"https://host/a?x=1&{name}=***")
            for name in ("accessToken", "sasToken", "client_secret", "x-api-key", "secret_access_key", "credential")
        ),
        *(
            (f"https://host/a?{name}=secret&x=1", f"https://host/a?{name}=***&x=1")
            for name in ("passwd", "sessionid", "md5", "verify", "X%2DAmz%2DSignature")
        ),
        ("https://host/a?u=https%3A%2F%2Fb%2Fc%3Fx=1", "https://host/a?u=https%3A%2F%2Fb%2Fc%3Fx=1"),
        ("https://host/a?u=https%3A%2F%2Fb%2Fc%3FX-Amz-Signature%3Dsecret&v=2", "https://host/a?u=***&v=2"),
        ("https://host/a?u=https%253A%252F%252Fb%253Fsig%253Dsecret", "https://host/a?u=***"),
        ("https://host/a?u=https://b/c?sig=secret", "https://host/a?u=***"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://host/a?hdnts=secret (status 403)", "at https://host/a?hdnts=*** (status 403)"),
        ("no https://me:secret@host/a: ask me@host", "no https://***@host/a: ask me@host"),
        ("no https://host: ask me@host, or set token=", "no https://host: ask me@host, or set token="),
    ],
)
def test_text_is_shown_without_the_secrets_of_its_urls(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_a_long_text_is_redacted_in_no_time() -> None:
    text = f"at https://host/a?b={'c' * 1_000_000}"
    assert redact_text(text) == redact_url(text) == text


def test_an_error_shows_no_secrets() -> None:
    error = errors.NotFound("it isn't there", url="https://me:secret@host/a?sig=secret", start=3, stop=None)
    assert str(error) == "it isn't there [https://***@host/a?sig=***, bytes [3, end)]"
    assert "secret" not in str(vars(error))


# Its words.

CLAUSE = re.compile(
    r"(what|whether|where|of|those|whose|which|when|how|who|why|in|with|for|by|from|to|at|on|as|under|without|beside"
    r"|behind|until|while|if|since|than|not|only|also|so|and|or|but)(?![\w'-])",
    re.IGNORECASE,
)
"""Begins a docstring that hangs on the name above it instead of saying what that is."""
MOST_CLAUSES = 0.02
ROOMS = {path.relative_to(ROOT / "asyncfetch").parts[0] for path in (ROOT / "asyncfetch").rglob("*.py")}


def docstrings_of(path: Path) -> list[tuple[int, str]]:
    """Return those of the module, its classes and functions, and the strings under constants and fields; by line."""
    return [
        (statement.lineno, statement.value.value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_docstrings_begin_with_the_thing(room: str) -> None:
    place = ROOT / "asyncfetch" / room
    docstrings = [
        (f"{path.relative_to(ROOT)}:{line}", text.strip().splitlines()[0])
        for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
        for line, text in docstrings_of(path)
    ]
    clauses = [f"{where}: {first_line}" for where, first_line in docstrings if CLAUSE.match(first_line)]
    assert len(clauses) <= MOST_CLAUSES * len(docstrings), "\n".join(clauses)


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "asyncfetch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    places.pop("LeRobotDataset")  # ours, and the one that stands in for LeRobot's own
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# Its tests.

FREE = {"end_to_end", "examples", "peers"}
"""Directories whose tests go through all rooms."""
OF_THE_PROJECT = {"failings", "mistakes", "package", "pages", "setup"}
"""What the tests beside the rooms' directories are about, besides modules."""
LONGEST_NAME = 60


def modules_of(directory: Path) -> set[str]:
    """Return what a file of tests in this directory may be named after: files and rooms, without their suffix."""
    if directory == Path():
        return OF_THE_PROJECT | {path.stem for path in (ROOT / "asyncfetch").iterdir()}
    place = ROOT / directory if directory == Path("bench") else ROOT / "asyncfetch" / directory
    return {directory.name, *(path.stem for path in place.rglob("*"))}


def test_tests_are_named_after_the_module_they_test() -> None:
    """As tests/ROOM/test_MODULE.py, or test_MODULE_aspect.py."""
    nameless = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        directory = path.relative_to(ROOT / "tests").parent
        name = path.stem.removeprefix("test_") + "_"
        modules = modules_of(directory)
        if directory.name not in FREE and not any(name.startswith(f"{module}_") for module in modules):
            nameless.append(str(path.relative_to(ROOT)))
    assert nameless == []


def test_names_of_tests_are_short() -> None:
    """They are to be found, and typed behind ``-k``; a test that needs more words has a docstring."""
    longer = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
        if len(node.name) > LONGEST_NAME
    ]
    assert longer == []


# The tools.


def test_scripts_can_be_run() -> None:
    for script in ("setup", "quickstart", "test", "run", "peers", "package"):
        path = ROOT / ".ci" / script
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", path], check=True)


def test_no_task_is_made_but_in_a_task_group() -> None:
    """Ruff bans asyncio's functions; this, what a loop has for it."""
    names = ("create_task", "ensure_future", "run_coroutine_threadsafe")
    calls = [
        f"{path}:{node.lineno}"
        for path in Path("asyncfetch").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
    ]
    assert calls == []

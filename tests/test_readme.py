"""The README's programs do what it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch import errors
from asyncfetch.config import FetchConfig, HedgeConfig, RetryConfig, S3Config, StreamConfig, TimeoutConfig
from asyncfetch.testing import HubServer, Keys, RangeServer, S3Server, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
HOST = "https://data.example.org"
RUN = """
import ast, anyio, inspect, sys
code = compile(sys.stdin.read(), "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
names = {"__name__": "__main__"}
async def run(): await eval(code, names)
anyio.run(run) if code.co_flags & inspect.CO_COROUTINE else exec(code, names)
"""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[Any]:
    """The Python blocks, named by the line that each begins at."""
    found = BLOCK.finditer(README)
    return [pytest.param(block[1], id=f"line {README.count(chr(10), 0, block.start()) + 1}") for block in found]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README's programs read."""
    root = tmp_path_factory.mktemp("host")
    write_dataset(root / "pick-place", episodes=(20, 31, 17))
    write_dataset(root / "pour", episodes=(11, 14), cameras=["observation.images.front"])
    (root / "records.bin").write_bytes(bytes(65536))
    return root


@pytest.fixture(scope="module")
def host(root: Path) -> Iterator[RangeServer]:
    """What it calls data.example.org."""
    with RangeServer(root) as server:
        yield server


@pytest.fixture(scope="module")
def stores(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of somebody with a bucket at s3.example.org, a token for the Hub and a disk at /scratch."""
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    objects = {f"robots/{path}": data for path, data in files.items()}
    with S3Server(objects, region="eu-west-1") as s3, HubServer(token="t") as hub:
        hub.push("datasets/lerobot/pusht", {path.removeprefix("pick-place/"): data for path, data in files.items()})
        yield {
            "S3": s3.url,
            "SCRATCH": str(tmp_path_factory.mktemp("scratch")),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "t",
            "AWS_ACCESS_KEY_ID": Keys().access_key,
            "AWS_SECRET_ACCESS_KEY": Keys().secret_key,
        }


def run(block: str, host: RangeServer, stores: dict[str, str]) -> str:
    """What the block prints, as a program of its own that trusts the hosts' certificate."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        input=block
        .replace(HOST, host.url)
        .replace("https://s3.example.org", stores["S3"])
        .replace("/scratch", stores["SCRATCH"]),
        env=os.environ | stores | {"SSL_CERT_FILE": str(host.ca_file)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.replace(host.url, HOST)


@pytest.mark.parametrize("block", blocks())
def test_a_block_runs(block: str, host: RangeServer, stores: dict[str, str]) -> None:
    printed = run(block, host, stores)
    for shown in re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE):
        assert shown in printed.splitlines()


LINKS = re.findall(r"\]\(([^)]+)\)", README)


def test_every_file_that_it_links_is_there() -> None:
    links = [link for link in LINKS if "://" not in link and link[0] != "#"]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_section_that_it_links_is_there_and_all_main_ones_are_linked() -> None:
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^(##+) (.*)$", text, re.MULTILINE)
    # As GitHub makes them: letters, digits, hyphens, and a hyphen for each space.
    anchors = {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): level for level, title in headings}
    assert len(anchors) == len(headings)
    linked = {link for link in LINKS if link[0] == "#"}
    assert linked <= anchors.keys()
    assert {anchor for anchor, level in anchors.items() if level == "##"} <= linked


def test_every_example_is_mentioned() -> None:
    for example in (ROOT / "examples").glob("*.py"):
        assert f"`{example.name}`" in README


def test_every_extra_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [table] = re.findall(r"^\| extra \|.*?\n\n", README, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(project["optional-dependencies"])


def test_every_error_is_listed() -> None:
    [table] = re.findall(r"^\| error \|.*?\n\n", README, re.MULTILINE | re.DOTALL)
    public = {name for name in errors.__all__ if name[0].isupper()}
    roots = {"AsyncFetchError", "FetchError", "DatasetError"}
    assert public & set(re.findall(r"`(\w+)`", table)) == public - roots


@pytest.mark.parametrize("kind", [StreamConfig, FetchConfig, TimeoutConfig, RetryConfig, HedgeConfig, S3Config])
def test_every_setting_is_shown_with_its_default(kind: type[Any]) -> None:
    """That the values are the defaults is what the block itself asserts."""
    [block] = [block[1] for block in BLOCK.finditer(README) if "assert af.StreamConfig() ==" in block[1]]
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call) and node.keywords]
    [shown] = [call for call in calls if ast.unparse(call.func) == f"af.{kind.__name__}"]
    assert {field.name for field in fields(kind)} == {keyword.arg for keyword in shown.keywords}

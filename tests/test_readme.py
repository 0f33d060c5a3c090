"""The README's programs do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.testing import RangeServer, write_dataset

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
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RangeServer]:
    """What the README calls data.example.org."""
    root = tmp_path_factory.mktemp("host")
    write_dataset(root / "pick-place", episodes=(20, 31, 17))
    (root / "records.bin").write_bytes(bytes(65536))
    with RangeServer(root) as server:
        yield server


def run(block: str, host: RangeServer) -> str:
    """What the block prints, as a program of its own that trusts the host's certificate."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        input=block.replace(HOST, host.url),
        env=os.environ | {"SSL_CERT_FILE": str(host.ca_file)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.replace(host.url, HOST)


@pytest.mark.parametrize("block", blocks())
def test_a_block_runs(block: str, host: RangeServer) -> None:
    printed = run(block, host)
    for shown in re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE):
        assert shown in printed.splitlines()


def test_every_file_that_it_links_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_example_is_mentioned() -> None:
    for example in (ROOT / "examples").glob("*.py"):
        assert f"`{example.name}`" in README

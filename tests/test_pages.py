"""The pages' programs do what they say: README, the guides, and those beside the code."""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from asyncfetch import errors
from asyncfetch.config import FetchConfig, HedgeConfig, RetryConfig, S3Config, StreamConfig, TimeoutConfig
from asyncfetch.testing import HubServer, Keys, RangeServer, S3Server, write_dataset
from asyncfetch.testing.clips import ENCODINGS, encode_clip
from tests.reference import attributes, members, modules, render

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "examples" / "guides"
README = ROOT / "README.md"
CONFIG = ROOT / "asyncfetch" / "config" / "README.md"
TROUBLES = GUIDES / "troubleshooting.md"
PAGES = [
    README,
    *sorted(GUIDES.glob("*.md")),
    *sorted((ROOT / "asyncfetch").rglob("README.md")),
    ROOT / "bench" / "README.md",
    *sorted((ROOT / ".github").glob("*.md")),
]
README_MAX_BYTES = 8_000
FIRST_SCREEN_LINES = 24

HOST = "https://data.example.org"
BLOCK = re.compile(r"^```python\n(.*?)^```$\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
RUNS_MAIN = "asyncio.run(main())"

# A notebook runs a cell in the main thread, within a loop that is running, and waits for what it awaits.
NOTEBOOK = """
import ast, asyncio, inspect, json, sys
names = {"__name__": "__main__"}
async def run(cells):
    for cell in cells:
        code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.isawaitable(done): await done
asyncio.run(run(json.load(sys.stdin)))
"""


@dataclass(frozen=True)
class Block:
    """A Python block of a page."""

    page: Path
    line: int
    code: str
    printed: str | None
    """All that the page says it prints; None where it says that, if at all, by comments."""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in BLOCK.finditer(text)]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


BLOCKS = [pytest.param(block, id=f"{named(page)} line {block.line}") for page in PAGES for block in blocks_of(page)]
PAGES_WITH_BLOCKS = [pytest.param(page, id=named(page)) for page in PAGES if blocks_of(page)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' programs read."""
    root = tmp_path_factory.mktemp("host")
    write_dataset(root / "pick-place", episodes=(20, 31, 17))
    write_dataset(root / "pour", episodes=(11, 14), cameras=["observation.images.front"])
    (root / "records.bin").write_bytes(bytes(65536))
    write_tar(root / "shards" / "000.tar", {"a.txt": b"one", "b.txt": b"the other"})
    write_videos(root)
    (root / "images").mkdir()
    for number in range(20):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(root / "images" / f"{number:02d}.png")
    return root


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def write_videos(root: Path) -> None:
    """Six videos of three seconds, 96 x 64: in tar shards, below a directory with a table, and in Parquet."""
    clips = [
        encode_clip(
            (np.full((64, 96, 3), 8 * number + frame, np.uint8) for frame in range(30)),
            encoding=ENCODINGS["h264"],
            fps=10,
            gop=10,
        )
        for number in range(6)
    ]
    for shard in range(2):
        files: dict[str, bytes] = {}
        for number in range(3 * shard, 3 * shard + 3):
            files |= {f"{number:06d}.mp4": clips[number], f"{number:06d}.txt": f"pours cup {number}".encode()}
            files[f"{number:06d}.json"] = json.dumps({"factory": shard}).encode()
        write_tar(root / "ego" / f"{shard:06d}.tar", files)
    (root / "talks").mkdir()
    for number in range(2):
        (root / "talks" / f"{number}.mp4").write_bytes(clips[number])
        (root / "talks" / f"{number}.txt").write_text(f"talk {number}")
    rows = ["video,t0,t1,caption", "0.mp4,0,00:00:01.5,opens", "0.mp4,1.5,,goes on", "1.mp4,0.5,2,another"]
    (root / "talks" / "spans.csv").write_text("\n".join(rows))
    column = pa.array([{"bytes": clip, "path": f"{number}.mp4"} for number, clip in enumerate(clips)])
    table = pa.table({"video": column, "label": [*range(6)]})
    pq.write_table(table, root / "talks.parquet", use_dictionary=False, compression="none")


@pytest.fixture(scope="module")
def host(root: Path) -> Iterator[RangeServer]:
    """What they call data.example.org."""
    with RangeServer(root) as server:
        yield server


@pytest.fixture(scope="module")
def stores(root: Path) -> Iterator[dict[str, str]]:
    """The environment of somebody with a bucket at s3.example.org and a token for the Hub."""
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    objects = {f"robots/{path}": data for path, data in files.items()}
    with S3Server(objects, region="eu-west-1") as s3, HubServer(token="t") as hub:
        hub.push("datasets/lerobot/pusht", {path.removeprefix("pick-place/"): data for path, data in files.items()})
        yield {
            "S3": s3.url,
            "AWS_ENDPOINT_URL_S3": s3.url,
            "AWS_REGION": "eu-west-1",
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "t",
            "AWS_ACCESS_KEY_ID": Keys().access_key,
            "AWS_SECRET_ACCESS_KEY": Keys().secret_key,
        }


@pytest.fixture
def world(host: RangeServer, stores: dict[str, str], tmp_path: Path) -> World:
    """Where a program of the pages runs."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return World(host, stores, scratch)


@dataclass(frozen=True)
class World:
    """What the pages' names stand for."""

    host: RangeServer
    stores: dict[str, str]
    scratch: Path

    def local(self, code: str) -> str:
        """The code with the addresses of this machine."""
        there = {HOST: self.host.url, "https://s3.example.org": self.stores["S3"], "/scratch": str(self.scratch)}
        for name, address in there.items():
            code = code.replace(name, address)
        return code

    def run(self, *command: str, told: str | None = None) -> str:
        """What the program prints, which trusts the host's certificate and is to warn of nothing."""
        ended = subprocess.run(
            [sys.executable, "-W", "error", *command],
            input=told,
            env=os.environ | self.stores | {"SSL_CERT_FILE": str(self.host.ca_file)},
            cwd=self.scratch,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.replace(self.host.url, HOST)


def check(printed: str, blocks: list[Block]) -> None:
    lines = printed.splitlines()
    for block in blocks:
        for shown in re.findall(r"^ *print\(.*\)  # (.*)$", block.code, re.MULTILINE):
            assert shown in lines


@pytest.mark.usefixtures("nested_programs_are_warm")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_is_a_program(block: Block, world: World, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(world.local(block.code))
    printed = world.run(str(program))
    check(printed, [block])
    if block.printed is not None:
        assert printed == block.printed


@pytest.mark.usefixtures("nested_programs_are_warm")
@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS)
def test_blocks_of_a_page_run_in_a_notebook_in_order(page: Path, world: World) -> None:
    blocks = blocks_of(page)
    cells = [world.local(block.code.replace(RUNS_MAIN, "await main()")) for block in blocks]
    check(world.run("-c", NOTEBOOK, told=json.dumps(cells)), blocks)


def test_readme_is_short_with_code_on_the_first_screen() -> None:
    text = README.read_text()
    assert len(text.encode()) <= README_MAX_BYTES
    assert "```python\n" in "\n".join(text.splitlines()[:FIRST_SCREEN_LINES])


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: letters, digits, hyphens, and a hyphen for each space."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [pytest.param(page, id=named(page)) for page in PAGES])
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked), link


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda form: form.name
)
def test_an_issue_form_asks_what_it_means_to_ask(form: Path) -> None:
    """In YAML's braces a comma ends a sentence that isn't quoted."""
    asked = yaml.safe_load(form.read_text())
    assert set(asked) == {"name", "description", "body"}
    for question in asked["body"]:
        assert question["attributes"]["label"]
        assert set(question["attributes"]) <= {"label", "description", "render"}


def test_every_guide_is_in_the_list_of_guides() -> None:
    listed = (GUIDES / "README.md").read_text()
    for guide in GUIDES.glob("*.md"):
        assert guide.name == "README.md" or f"]({guide.name})" in listed


def test_public_classes_have_no_other_names_than_the_reference() -> None:
    """What ``dir`` shows is what a user may call, set or read."""
    for module, names in modules():
        for kind in (getattr(module, name) for name in names):
            if not inspect.isclass(kind):
                continue
            ours = [base for base in kind.__mro__ if base.__module__.startswith("asyncfetch")]
            there = {name for base in ours for name in vars(base) if name[0] != "_"}
            shown = {name for name, _ in members(kind)} | {*getattr(kind, "__dataclass_fields__", ())}
            shown |= {*getattr(kind, "_fields", ())}
            assert there <= shown | attributes(kind), kind


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert (ROOT / "asyncfetch" / "REFERENCE.md").read_text() == render(), "python -m tests.reference writes it"


def test_the_map_names_files_and_rooms_that_are_there() -> None:
    package = ROOT / "asyncfetch"
    text = (package / "README.md").read_text()
    named_files = set(re.findall(r"`([a-z0-9_/]+\.py)`", text))
    assert len(named_files) > 30
    assert [name for name in sorted(named_files) if not (package / name).is_file()] == []
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert [room for room in sorted(rooms) if not re.search(rf"^- .*`{room}`", text, re.MULTILINE)] == ["cli"]


def test_rooms_name_their_files_and_no_others() -> None:
    for init in sorted((ROOT / "asyncfetch").rglob("*/__init__.py")):
        words = ast.get_docstring(ast.parse(init.read_text())) or ""
        files = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        rooms = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        named = re.findall(r"^ {0,4}(\w+(?:\.py|/)?(?:, \w+(?:\.py)?)*) {2,}\S", words, re.MULTILINE)
        begins = {re.sub(r"\.py|/", "", name) for line in named for name in line.split(", ")}
        assert begins <= files | rooms, init
        assert files <= set(re.findall(r"\w+", words)), init


def test_every_example_is_mentioned() -> None:
    listed = (GUIDES / "README.md").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        assert f"`{example.name}`" in listed


def test_every_extra_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [table] = re.findall(r"^\| extra \|.*?\n\n", README.read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(project["optional-dependencies"])


def test_every_error_is_listed() -> None:
    [table] = re.findall(r"^\| error \|.*?\n\n", TROUBLES.read_text(), re.MULTILINE | re.DOTALL)
    public = {name for name in errors.__all__ if name[0].isupper()}
    roots = {"AsyncFetchError", "FetchError", "DatasetError"}
    assert public & set(re.findall(r"`(\w+)`", table)) == public - roots


@pytest.mark.parametrize("kind", [StreamConfig, FetchConfig, TimeoutConfig, RetryConfig, HedgeConfig, S3Config])
def test_every_setting_is_shown_with_its_default(kind: type[Any]) -> None:
    """That the values are the defaults is what the block itself asserts."""
    [block] = [block.code for block in blocks_of(CONFIG)]
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call) and node.keywords]
    [shown] = [call for call in calls if ast.unparse(call.func) == f"af.{kind.__name__}"]
    assert {field.name for field in fields(kind)} == {keyword.arg for keyword in shown.keywords}

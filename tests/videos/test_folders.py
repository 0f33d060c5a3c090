"""Folders of videos, with files beside them and with VideoFolder's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, DatasetError, FormatError, NotFound
from asyncfetch.fetch import Fetcher
from asyncfetch.testing import HubServer, RangeServer, S3Server
from asyncfetch.videos.folders import folder_entries
from tests.merge.on_s3 import config as s3_config
from tests.merge.on_s3 import set_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILES = {
    "b.mp4": b"b", "a/1.MP4": b"1", "a/1.txt": b"one", "a/2.b.webm": b"2", "a/2.b.json": b"{}", "a/2.json": b"",
    "a/readme.md": b"", ".git/x.mp4": b"", "a/._1.mp4": b"", "c/sub dir/3%.mov": b"3", "c/sub dir/3%.txt": b"three",
}  # fmt: skip
NAMES = ["a/1.MP4", "a/2.b.webm", "b.mp4", "c/sub dir/3%.mov"]
SIDECARS = {"a/1.MP4": "a/1.txt", "c/sub dir/3%.mov": "c/sub dir/3%.txt"}
MEMBER = pa.struct([("offset", pa.int64()), ("size", pa.int64()), ("url", pa.string())])


def laid(root: Path, content: Mapping[str, bytes]) -> Path:
    for name, data in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


async def entries_of(root: str | Path, config: FetchConfig | None = None) -> pa.Table:
    async with Fetcher(config) as fetcher:
        return await folder_entries(fetcher, fetcher, root)


def check(table: pa.Table, base: str) -> None:
    """The table of FILES below ``base``."""
    assert table.column_names == ["video", "offset", "size", "start", "stop", "file_name", "json", "txt"]
    assert table["video"].to_pylist() == [f"{base}{name}" for name in NAMES]
    assert table["file_name"].to_pylist() == NAMES
    rows = table.to_pylist()
    assert [row["txt"] for row in rows] == [
        {"offset": None, "size": len(FILES[SIDECARS[name]]), "url": f"{base}{SIDECARS[name]}"}
        if name in SIDECARS
        else None
        for name in NAMES
    ]
    assert [row["json"] and row["json"]["url"] for row in rows] == [None, f"{base}a/2.b.json", None, None]
    for name in ("json", "txt"):
        assert table.schema.field(name).type == MEMBER
        assert table.schema.field(name).metadata == {b"asyncfetch": b"member"}
    for name in ("offset", "size", "start", "stop"):
        assert table[name].null_count == len(NAMES)


# Without metadata.


async def test_videos_below_a_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = laid(tmp_path / "set", FILES)
    check(await entries_of(root), f"{root}/")
    check(await entries_of(f"{root}/"), f"{root}/")
    monkeypatch.chdir(tmp_path)
    check(await entries_of("set"), f"{root}/")


async def test_urls_of_files_are_quoted(tmp_path: Path) -> None:
    root = laid(tmp_path, FILES)
    table = await entries_of(root.as_uri())
    assert table["video"].to_pylist()[-1] == f"{root.as_uri()}/c/sub%20dir/3%25.mov"
    assert table["file_name"].to_pylist() == NAMES
    assert table.to_pylist()[-1]["txt"]["url"] == f"{root.as_uri()}/c/sub%20dir/3%25.txt"


async def test_videos_below_a_prefix_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    set_keys(monkeypatch)
    async with S3Server({f"bucket/set/{name}": data for name, data in FILES.items()}) as server:
        check(await entries_of("s3://bucket/set", s3_config(server)), "s3://bucket/set/")
    async with HubServer() as hub:
        hub.push("datasets/o/n", FILES)
        config = FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url)
        check(await entries_of("hf://datasets/o/n", config), "hf://datasets/o/n/")


async def test_a_folder_without_videos_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no video among 1 files below it: none ends in 3gp, avi"):
        await entries_of(laid(tmp_path, {"a.txt": b""}))
    with pytest.raises(NotFound):
        await entries_of(tmp_path / "nowhere")


# With metadata.

ROWS = {"file_name": ["c/sub dir/3%.mov", "./b.mp4"], "caption": ["three", "b"]}


def written(kind: str, rows: Mapping[str, Any]) -> dict[str, bytes]:
    table = pa.table(dict(rows))
    target = pa.BufferOutputStream()
    if kind == "jsonl":
        lines = table.to_pandas().to_json(orient="records", lines=True)
        return {"metadata.jsonl": lines.encode()}
    (pyarrow.csv.write_csv if kind == "csv" else pq.write_table)(table, target)
    return {f"metadata.{kind}": target.getvalue().to_pybytes()}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
async def test_metadata_says_which_videos_there_are(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = laid(tmp_path, FILES | written(kind, ROWS))
    table = await entries_of(root)
    assert table.column_names == ["video", "offset", "size", "start", "stop", "file_name", "caption"]
    assert table["video"].to_pylist() == [f"{root}/c/sub dir/3%.mov", f"{root}/b.mp4"]
    assert table["caption"].to_pylist() == ["three", "b"]
    (record,) = caplog.records
    assert "2 videos below" in record.getMessage()
    assert record.getMessage().endswith("are left out, such as " + f"{root}/a/1.MP4")


async def test_metadata_of_json_lines_is_read(tmp_path: Path) -> None:
    root = laid(tmp_path, {"b.mp4": b"", "metadata.jsonl": b'{"file_name": "b.mp4", "text": "b"}\n'})
    table = await entries_of(root)
    assert table.select(["video", "text"]).to_pylist() == [{"video": f"{root}/b.mp4", "text": "b"}]


async def test_metadata_of_several_folders_is_joined(tmp_path: Path) -> None:
    root = laid(
        tmp_path,
        FILES
        | {
            "a/metadata.csv": b"file_name,n\n1.MP4,1\n2.b.webm,2\n",
            "c/metadata.csv": b"file_name,m\nsub dir/3%.mov,x\n",
        },
    )
    table = await entries_of(root)
    assert table["video"].to_pylist() == [f"{root}/{name}" for name in NAMES if name != "b.mp4"]
    assert table["n"].to_pylist() == [1, 2, None]
    assert table["m"].to_pylist() == [None, None, "x"]


async def test_metadata_is_read_from_a_web_server() -> None:
    content = FILES | written("csv", ROWS)
    async with RangeServer(content) as server:
        config = FetchConfig(ca_file=server.ca_file)
        table = await entries_of(server.url, config)
        assert table["video"].to_pylist() == [f"{server.url}/c/sub%20dir/3%25.mov", f"{server.url}/b.mp4"]
        with pytest.raises(ConfigError, match="a/' can't be listed: the web server has no index page"):
            await entries_of(f"{server.url}/a", config)


async def test_other_columns_of_paths_come_with_the_video(tmp_path: Path) -> None:
    rows = b"left_file_name,right_file_name\nb.mp4,a/1.txt\na/1.MP4,b.mp4\n"
    root = laid(tmp_path, FILES | {"metadata.csv": rows})
    with pytest.raises(FormatError, match=r"several columns of paths: left_file_name, .*; call that of the videos"):
        await entries_of(root)
    table = await entries_of(laid(tmp_path, {"metadata.csv": rows.removeprefix(b"left_")}))
    assert [row["right"]["url"] for row in table.to_pylist()] == [f"{root}/a/1.txt", f"{root}/b.mp4"]
    assert table.schema.field("right").type == MEMBER


async def test_absolute_paths_of_metadata_stay(tmp_path: Path) -> None:
    root = laid(tmp_path, {"metadata.csv": b"file_name\nhttps://h/x.mp4\n/y.mp4\n"})
    assert (await entries_of(root))["video"].to_pylist() == ["https://h/x.mp4", "/y.mp4"]


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (b"name\nb.mp4\n", FormatError, "no column 'file_name' or .* among its columns name"),
        (b"file_name,size\nb.mp4,1\n", ConfigError, "has a column 'size', a name that asyncfetch uses itself"),
        (
            b"file_name\nz.mp4\n",
            DatasetError,
            "the column 'file_name' of .*metadata.csv names 'z.mp4', which isn't there: no /.*/z.mp4",
        ),
        (b"file_name,n\n,3\n", DatasetError, "row 0 of .*has '' as its 'file_name', which must be the url or path"),
        (b"file_name\n", DatasetError, "no video among"),
    ],
)
async def test_bad_metadata_is_named(tmp_path: Path, rows: bytes, kind: type[Exception], message: str) -> None:
    root = laid(tmp_path, FILES | {"metadata.csv": rows})
    with pytest.raises(kind, match=message):
        await entries_of(root)

"""Tables of spans as files of their own libraries, served by a web server, and in memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, DatasetError, FormatError, NotFound
from asyncfetch.fetch import Fetcher
from asyncfetch.tables import whole
from asyncfetch.testing import RangeServer
from asyncfetch.videos.tables import read_file, table_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

ROWS: list[dict[str, Any]] = [
    {"url": "v/a.mp4", "t0": 0.5, "t1": 2.25, "caption": "a cup", "rating": 3},
    {"url": "v/b c.mp4", "t0": None, "t1": 61.5, "caption": 'two lines,\n"quoted"', "rating": None},
    {"url": "s3://bucket/c.mp4", "t0": 3600.0, "t1": None, "caption": "größer", "rating": 5},
]
SPANS = {"video": "url", "start": "t0", "stop": "t1"}


def expected(base: str, *, b_c: str = "b c") -> list[dict[str, Any]]:
    urls = [f"{base}/v/a.mp4", f"{base}/v/{b_c}.mp4", "s3://bucket/c.mp4"]
    return [
        {"video": url, "offset": None, "size": None, "start": row["t0"], "stop": row["t1"]}
        | {key: row[key] for key in ("caption", "rating")}
        for url, row in zip(urls, ROWS, strict=True)
    ]


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    async with Fetcher() as opened:
        yield opened


def by_pandas(path: Path) -> None:
    frame = pd.DataFrame(ROWS)
    frame["rating"] = frame["rating"].astype("Int64")
    match path.suffix:
        case ".parquet":
            frame[frame["caption"] != ""].set_index(np.array([5, 2, 9])).to_parquet(path)
        case ".jsonl" | ".ndjson":
            frame.to_json(path, orient="records", lines=True)
        case suffix:
            frame.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")


def by_polars(path: Path) -> None:
    frame = pl.DataFrame(ROWS)
    match path.suffix:
        case ".parquet":
            frame.write_parquet(path)
        case ".jsonl" | ".ndjson":
            frame.write_ndjson(path)
        case suffix:
            frame.write_csv(path, separator="\t" if suffix == ".tsv" else ",")


def by_pyarrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path, row_group_size=2)
        case ".jsonl" | ".ndjson":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case suffix:
            csv.write_csv(table, path, csv.WriteOptions(delimiter="\t" if suffix == ".tsv" else ","))


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".jsonl", ".ndjson"])
@pytest.mark.parametrize("write", [by_pandas, by_polars, by_pyarrow], ids=lambda write: write.__name__)
async def test_file_of_each_library(
    fetcher: Fetcher, tmp_path: Path, write: Callable[[Path], None], suffix: str
) -> None:
    write(path := tmp_path / f"spans{suffix}")
    for source in (path, str(path)):
        entries = await table_entries(fetcher, fetcher, source, **SPANS)
        assert entries.to_pylist() == expected(str(tmp_path))
    async with RangeServer(tmp_path) as server, Fetcher(FetchConfig(ca_file=server.ca_file)) as web:
        entries = await table_entries(web, web, f"{server.url}/{path.name}?token=x", **SPANS)
    urls = [row["video"] for row in expected(server.url, b_c="b%20c")]
    assert entries["video"].to_pylist() == [f"{urls[0]}?token=x", f"{urls[1]}?token=x", urls[2]]


async def test_table_in_memory(fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(ROWS)
    frame["rating"] = frame["rating"].astype("Int64")
    arrow = pa.Table.from_pylist(ROWS)
    for source in (arrow, frame, frame[[True] * 3].set_index("url"), pl.DataFrame(ROWS), ROWS, arrow.to_reader()):
        entries = await table_entries(fetcher, fetcher, source, **SPANS)
        assert entries.to_pylist() == expected(str(tmp_path)), type(source)


async def test_a_key_may_be_missing_in_dicts(fetcher: Fetcher) -> None:
    rows: list[dict[str, Any]] = [{"video": "/a.mp4"}, {"video": "/b.mp4", "caption": "b", "until": "00:02"}]
    entries = await table_entries(fetcher, fetcher, rows, stop="until")
    assert entries.select(["video", "stop", "caption"]).to_pydict() == {
        "video": ["/a.mp4", "/b.mp4"],
        "stop": [None, 2.0],
        "caption": [None, "b"],
    }


async def test_times_of_csv_are_no_times_of_day(fetcher: Fetcher, tmp_path: Path) -> None:
    (path := tmp_path / "t.csv").write_text("video,from,to\na.mp4,00:10,00:00:12.5\nb.mp4,,01:02:03\n")
    entries = await table_entries(fetcher, fetcher, path, start="from", stop="to")
    assert entries["start"].to_pylist() == [10.0, None]
    assert entries["stop"].to_pylist() == [12.5, 3723.0]


@pytest.mark.parametrize("group_rows", [100, 1000, 100_000])
async def test_long_parquet_is_read_in_parts(
    fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    rng = np.random.default_rng(0)
    table = pa.table({
        "video": [f"v{row}.mp4" for row in range(20_000)],
        "score": rng.random(20_000),
        "tags": pa.array([["a"] * (row % 3) for row in range(20_000)]),
        "box": pa.array([{"x": row, "y": str(row)} for row in range(20_000)]),
        "kind": pa.array([f"k{row % 7}" for row in range(20_000)]).dictionary_encode(),
    })
    pq.write_table(table, path := tmp_path / "t.parquet", row_group_size=group_rows)
    monkeypatch.setattr(whole, "PART_BYTES", 20_000)
    found = await read_file(fetcher, str(path))
    assert found.equals(table)
    entries = await table_entries(fetcher, fetcher, path)
    assert entries["kind"].to_pylist() == table["kind"].to_pylist()


@pytest.mark.parametrize("names", [["a.parquet", "b/c.parquet"], ["b.csv", "a.csv"]], ids=["directory", "pattern"])
async def test_files_of_a_directory_or_a_pattern(fetcher: Fetcher, tmp_path: Path, names: list[str]) -> None:
    tables = [pa.table({"video": ["x.mp4"], "n": [1]}), pa.table({"video": ["y.mp4", "/z.mp4"], "s": ["s", "t"]})]
    for name, table in zip(names, tables, strict=True):
        (path := tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table, path) if path.suffix == ".parquet" else csv.write_csv(table, path)
    source = tmp_path if names[0] == "a.parquet" else f"{tmp_path}/*.csv"
    entries = await table_entries(fetcher, fetcher, source)
    first, second = [(f"{tmp_path}/x.mp4", 1, None)], [("y.mp4", None, "s"), ("/z.mp4", None, "t")]
    second[0] = (f"{(tmp_path / names[1]).parent}/y.mp4", None, "s")
    found = list(zip(*(entries[name].to_pylist() for name in ("video", "n", "s")), strict=True))
    assert found == (first + second if source == tmp_path else second + first)


async def test_tables_that_contradict_each_other(fetcher: Fetcher, tmp_path: Path) -> None:
    for name, value in (("a", "text"), ("b", [1])):
        pq.write_table(pa.table({"video": ["x.mp4"], "n": [value]}), tmp_path / f"{name}.parquet")
    with pytest.raises(FormatError, match=r"tables from .*a.parquet to .*b.parquet can't be joined: .*n"):
        await table_entries(fetcher, fetcher, tmp_path)


async def test_an_index_is_taken_as_it_is(fetcher: Fetcher, tmp_path: Path) -> None:
    rows = [{"video": "s3://b/x.tar", "offset": 512, "size": 99, "start": None, "stop": None, "frames": 30}]
    index = pa.Table.from_pylist(rows).replace_schema_metadata({b"asyncfetch.index": b"1"})
    pq.write_table(index, path := tmp_path / "videos.parquet")
    for source in (path, index):
        entries = await table_entries(fetcher, fetcher, source)
        assert (entries.to_pylist(), entries.schema.metadata) == (rows, {b"asyncfetch.index": b"1"})
    with pytest.raises(ConfigError, match=r"videos.parquet is an index, which has its own columns: leave out video="):
        await table_entries(fetcher, fetcher, path, start="t0")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.parquet", b"PAR0" * 9, "isn't a whole parquet file"),
        ("t.csv", b"video,a\nx.mp4\n", "can't be read as csv: .*Expected 2 columns, got 1"),
        ("t.csv", b"", "can't be read as csv: Empty CSV file"),
        ("t.jsonl", b'{"video": "a.mp4"}\n{"video"\n', "can't be read as json lines: JSON parse error"),
        ("t.jsonl", b'{"video": "a.mp4", "n": 1}\n{"video": "b.mp4", "n": "x"}\n', "n.* changed from number to string"),
    ],
)
async def test_a_damaged_file_is_named(
    fetcher: Fetcher, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=rf"{name} .*{message}|{message}"):
        await table_entries(fetcher, fetcher, tmp_path / name)


async def test_sources_that_are_no_table(fetcher: Fetcher, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await table_entries(fetcher, fetcher, tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=r"must be a table's: its name must end in .parquet, .csv, .tsv"):
        await table_entries(fetcher, fetcher, "https://h/spans.xlsx?x=.csv")
    with pytest.raises(ConfigError, match=r"a table must be a url or path, .*, not of type dict"):
        await table_entries(fetcher, fetcher, {"video": ["a.mp4"]})
    with pytest.raises(ConfigError, match="a list must be of dicts, a row each; row 1 is of type str"):
        await table_entries(fetcher, fetcher, [{"video": "a.mp4"}, "b.mp4"])
    with pytest.raises(ConfigError, match="the list can't be made an Arrow table"):
        await table_entries(fetcher, fetcher, [{"video": "a.mp4"}, {"video": 7}])


async def test_bytes_are_refused_before_they_are_read(fetcher: Fetcher, tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3_000_000)
    for name, column in (("struct", [{"bytes": data, "path": "a.mp4"}]), ("bytes", [data])):
        pq.write_table(pa.table({"video": column}), path := tmp_path / f"{name}.parquet")
        with pytest.raises(
            ConfigError, match=rf"'video' of .*{name}.parquet holds bytes, .*: Videos.from_parquet reads"
        ):
            await table_entries(fetcher, fetcher, path)
    assert fetcher.statistics().bytes < 1_000_000


async def test_a_wrong_row_is_named(fetcher: Fetcher, tmp_path: Path) -> None:
    (path := tmp_path / "t.csv").write_text("video,t0\na.mp4,1\nb.mp4,-3\n")
    with pytest.raises(DatasetError, match=r"row 1 of .*t.csv, counted from 0, has '-3' as its 't0', which is no time"):
        await table_entries(fetcher, fetcher, path, start="t0")
    with pytest.raises(ConfigError, match=r"video='url': .*t.csv has no such column; it has video, t0"):
        await table_entries(fetcher, fetcher, path, video="url")

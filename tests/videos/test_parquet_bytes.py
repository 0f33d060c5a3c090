"""Videos in a Parquet column: as ``datasets`` writes them, and as others do. See also tests/peers/test_datasets.py."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, DatasetError, FormatError
from asyncfetch.fetch import Fetcher
from asyncfetch.tables.unpacked import UnpackedReader
from asyncfetch.testing import HubServer, RangeServer
from asyncfetch.videos import parquet_bytes
from asyncfetch.videos.parquet_bytes import parquet_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

AS_DATASETS: dict[str, Any] = {
    "use_content_defined_chunking": {"min_chunk_size": 256 * 1024, "max_chunk_size": 1024 * 1024, "norm_level": 0},
    "write_page_index": True,
    "compression": {"video.bytes": "none", "video.path": "none", "caption": "snappy"},
    "use_dictionary": ["caption"],
    "column_encoding": {"video.bytes": "PLAIN", "video.path": "PLAIN"},
}
"""Options of the Parquet writer in datasets 4.8.5, for these columns."""
ROWS_OF_A_GROUP = 10
"""As datasets writes rows with videos."""


def videos(count: int, *, size: int = 300_000) -> list[bytes]:
    rng = np.random.default_rng(count)
    return [rng.bytes(int(rng.integers(size // 2, size))) for _ in range(count)]


def write_as_datasets(path: Path, data: Sequence[bytes | None], paths: Sequence[str | None]) -> None:
    struct = pa.StructArray.from_arrays([pa.array(data, pa.binary()), pa.array(paths, pa.string())], ["bytes", "path"])
    features = {"video": {"_type": "Video"}, "caption": {"dtype": "string", "_type": "Value"}}
    table = pa.table({"video": struct, "caption": [f"row {row}" for row in range(len(data))]})
    table = table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}}).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=ROWS_OF_A_GROUP, **AS_DATASETS)


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    async with Fetcher() as opened:
        yield opened


async def content(fetcher: Fetcher, entries: pa.Table) -> list[bytes]:
    """The bytes that the entries say."""
    return [
        bytes(await fetcher.fetch(row["video"], row["offset"], row["offset"] + row["size"]))
        for row in entries.to_pylist()
    ]


async def test_bytes_as_datasets_writes_them(fetcher: Fetcher, tmp_path: Path) -> None:
    data = videos(25)
    write_as_datasets(path := tmp_path / "train.parquet", data, [f"{row}.mp4" for row in range(25)])
    entries = await parquet_entries(fetcher, fetcher, path)
    assert entries.column_names == ["video", "offset", "size", "start", "stop", "caption"]
    assert entries["caption"].to_pylist() == [f"row {row}" for row in range(25)]
    assert set(entries["video"].to_pylist()) == {str(path)}
    assert await content(fetcher, entries) == data


async def test_places_of_videos_cost_few_bytes_and_requests(tmp_path: Path) -> None:
    data = videos(25)
    write_as_datasets(tmp_path / "train.parquet", data, [None] * 25)
    async with RangeServer(tmp_path) as server, Fetcher(FetchConfig(ca_file=server.ca_file)) as fetcher:
        entries = await parquet_entries(fetcher, fetcher, f"{server.url}/train.parquet")
        told = server.statistics()
        assert await content(fetcher, entries) == data
    assert told.requests <= len(data) + 10
    assert told.bytes_sent < sum(map(len, data)) / 40


async def test_files_of_a_repository_by_name(fetcher: Fetcher, tmp_path: Path) -> None:
    data = videos(6, size=2000)
    names = [f"data/{name}.parquet" for name in ("test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002")]
    for file, name in enumerate(names):
        write_as_datasets(tmp_path / name, data[2 * file : 2 * file + 2], [None, None])
    (tmp_path / "README.md").write_text("nothing")
    for source in (tmp_path, f"{tmp_path}/", f"{tmp_path}/data/*.parquet"):
        assert await content(fetcher, await parquet_entries(fetcher, fetcher, source)) == data
    train = await parquet_entries(fetcher, fetcher, f"{tmp_path}/data/train-*")
    assert await content(fetcher, train) == data[2:]
    files = {name: (tmp_path / name).read_bytes() for name in (*names, "README.md")}
    async with HubServer() as hub:
        hub.push("datasets/o/n", files)
        async with Fetcher(FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url)) as web:
            assert await content(web, await parquet_entries(web, web, "hf://datasets/o/n")) == data


async def test_paths_stand_in_for_bytes(fetcher: Fetcher, tmp_path: Path) -> None:
    data = videos(4, size=2000)
    mixed = [data[0], None, data[2], None]
    write_as_datasets(path := tmp_path / "t.parquet", mixed, ["0.mp4", "clips/1.mp4", None, "s3://b/3.mp4"])
    entries = await parquet_entries(fetcher, fetcher, path)
    assert entries["video"].to_pylist() == [str(path), f"{tmp_path}/clips/1.mp4", str(path), "s3://b/3.mp4"]
    assert entries["size"].to_pylist() == [len(data[0]), None, len(data[2]), None]
    assert entries["offset"].null_count == 2
    write_as_datasets(path := tmp_path / "paths.parquet", [None, None], ["a.mp4", "b.mp4"])
    entries = await parquet_entries(fetcher, fetcher, path)
    assert entries["video"].to_pylist() == [f"{tmp_path}/a.mp4", f"{tmp_path}/b.mp4"]
    write_as_datasets(path := tmp_path / "neither.parquet", [data[0], None], [None, None])
    with pytest.raises(DatasetError, match=r"row 1 of .*neither.parquet, counted from 0, has None as its 'video'"):
        await parquet_entries(fetcher, fetcher, path)


async def test_columns_of_bytes_and_of_texts(fetcher: Fetcher, tmp_path: Path) -> None:
    data = videos(7, size=2000)
    names = [f"{row}.mp4" for row in range(7)]
    table = pa.table({"mp4": pa.array(data, pa.large_binary()), "n": range(7), "file": names})
    pq.write_table(table, path := tmp_path / "t.parquet", use_dictionary=False, compression="none", row_group_size=3)
    entries = await parquet_entries(fetcher, fetcher, path, video="mp4")
    assert await content(fetcher, entries) == data
    assert entries.column_names[5:] == ["n", "file"]
    pq.write_table(table.select(["n", "file"]), path := tmp_path / "texts.parquet")
    entries = await parquet_entries(fetcher, fetcher, path, video="file")
    assert entries["video"].to_pylist() == [f"{tmp_path}/{row}.mp4" for row in range(7)]
    assert (entries["offset"].null_count, entries["n"].to_pylist()) == (7, list(range(7)))


@pytest.mark.parametrize("options", [{}, {"compression": "none"}, {"compression": "zstd", "row_group_size": 3}])
async def test_bytes_without_places_are_unpacked(fetcher: Fetcher, tmp_path: Path, options: dict[str, Any]) -> None:
    data = videos(8, size=2000)
    struct = pa.array([{"bytes": one, "path": None} for one in data])
    pq.write_table(pa.table({"video": struct, "n": range(8)}), path := tmp_path / "t.parquet", **options)
    reader = UnpackedReader(fetcher)
    entries = await parquet_entries(reader, fetcher, path)
    assert entries["n"].to_pylist() == list(range(8))
    assert entries["size"].null_count == entries["offset"].null_count == 8
    urls: list[Any] = entries["video"].to_pylist()
    assert [bytes(await reader.fetch(url)) for url in urls] == data


@pytest.mark.parametrize("statistics", [True, False])
async def test_paths_stand_in_for_bytes_that_are_compressed(fetcher: Fetcher, tmp_path: Path, statistics: bool) -> None:
    data = videos(6, size=2000)
    rows: list[dict[str, Any]] = [{"bytes": one, "path": f"{row}.mp4"} for row, one in enumerate(data)]
    rows[1]["bytes"] = rows[4]["bytes"] = rows[5]["bytes"] = None
    table = pa.table({"video": rows})
    pq.write_table(table, path := tmp_path / "t.parquet", row_group_size=2, write_statistics=statistics)
    reader = UnpackedReader(fetcher)
    urls: list[Any] = (await parquet_entries(reader, fetcher, path))["video"].to_pylist()
    assert [urls[row] for row in (1, 4, 5)] == [f"{tmp_path}/{row}.mp4" for row in (1, 4, 5)]
    assert [bytes(await reader.fetch(urls[row])) for row in (0, 2, 3)] == [data[row] for row in (0, 2, 3)]


async def test_bytes_that_cannot_be_unpacked_are_refused(fetcher: Fetcher, tmp_path: Path) -> None:
    struct = pa.array([{"bytes": one, "path": None} for one in videos(3, size=2000)])
    pq.write_table(pa.table({"video": struct}), path := tmp_path / "t.parquet", compression="lz4")
    reason = r"is compressed \(LZ4\)"
    remedy = r"write it anew, plain and uncompressed: .*use_dictionary=False, compression={'video.bytes': 'none'}"
    with pytest.raises(FormatError, match=rf"column 'video.bytes' of .*t.parquet {reason}, so no video .*{remedy}"):
        await parquet_entries(fetcher, fetcher, path)


async def test_long_row_groups_are_a_warning(
    fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parquet_bytes, "LONG_ROWS", ROWS_OF_A_GROUP)
    data = videos(25, size=2000)
    write_as_datasets(path := tmp_path / "t.parquet", data, [None] * 25)
    assert (await parquet_entries(fetcher, fetcher, path)).num_rows == 25
    assert caplog.messages == []
    table = pa.table({"video": data})
    pq.write_table(table, path := tmp_path / "long.parquet", use_dictionary=False, compression="none")
    assert await content(fetcher, await parquet_entries(fetcher, fetcher, path)) == data
    (message,) = caplog.messages
    assert "long.parquet has up to 25 videos in a row group: they are found one after the other" in message


async def test_columns_that_hold_no_videos(fetcher: Fetcher, tmp_path: Path) -> None:
    table = pa.table({"video": [1, 2], "size": [3, 4], "list": [[b"a"], [b"b"]], "box": [{"x": 1}, {"x": 2}]})
    pq.write_table(table, path := tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"video='clip': .*t.parquet has no such column; it has video, size"):
        await parquet_entries(fetcher, fetcher, path, video="clip")
    with pytest.raises(ConfigError, match=r"a column 'size', a name that asyncfetch uses itself"):
        await parquet_entries(fetcher, fetcher, path)
    for name in ("video", "list", "box"):
        pq.write_table(table.select([name]), path := tmp_path / f"{name}.parquet")
        with pytest.raises(ConfigError, match=rf"video='{name}': the column of .* must hold bytes, texts, or a struct"):
            await parquet_entries(fetcher, fetcher, path, video=name)
    with pytest.raises(ConfigError, match="no file matches"):
        await parquet_entries(fetcher, fetcher, f"{tmp_path}/x*.parquet")

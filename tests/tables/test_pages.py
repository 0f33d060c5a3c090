"""Rows of a column by its pages, however a writer lays them out: right, and nothing else fetched."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncfetch.errors import FormatError
from asyncfetch.tables import pages
from asyncfetch.tables.pages import find_pages, has_pages, read_pages
from asyncfetch.tables.parquet import open_table

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.tables.parquet import TableFile
    from tests.local_reader import LocalReader

ROWS = 300
run = anyio.to_thread.run_sync

LAYOUTS: dict[str, dict[str, Any]] = {
    "as recorded": {"compression": "snappy"},
    "no dictionary": {"use_dictionary": False},
    "an offset index": {"write_page_index": True},
    "an offset index, pages of version 2": {"write_page_index": True, "data_page_version": "2.0"},
    "pages of version 2": {"data_page_version": "2.0", "compression": "zstd"},
    "nothing compressed": {"compression": "none"},
    "gzip and checksums": {"compression": "gzip", "write_page_checksum": True},
    "brotli, no dictionary": {"compression": "brotli", "use_dictionary": False},
    "lengths apart": {"use_dictionary": False, "column_encoding": "DELTA_LENGTH_BYTE_ARRAY"},
    "prefixes apart": {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LEAST_CHUNK_BYTES", 1)


def pictures(rows: int = ROWS, *, seed: int = 0) -> list[bytes]:
    """Some are alike, as those of a dictionary are."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(int(size)) for size in rng.integers(500, 3000, rows)]


def write(path: Path, content: list[bytes], *, structs: bool = True, groups: int = 1, **options: Any) -> None:  # noqa: ANN401
    """Pages of few rows, as pictures larger than these have."""
    column: Any = pa.array(content, pa.binary())
    if structs:
        paths = pa.array([f"frame-{row:06d}.png" for row in range(len(content))])
        column = pa.StructArray.from_arrays([column, paths], ["bytes", "path"])
    table = pa.table({"index": pa.array(range(len(content))), "picture": column})
    if "column_encoding" in options:
        leaves = {"picture.bytes": options["column_encoding"]} if structs else {"picture": options["column_encoding"]}
        options["column_encoding"] = leaves
    settings = {"data_page_size": 4000, "dictionary_pagesize_limit": 30_000, "write_batch_size": 7, **options}
    pq.write_table(table, path, row_group_size=-(-len(content) // groups), **settings)


async def open_pictures(reader: LocalReader, path: Path) -> tuple[TableFile, int]:
    file = await open_table(reader, str(path), run=run, tail_bytes=1024)
    return file, file.leaves["picture"].start


@pytest.mark.parametrize("structs", [True, False], ids=["struct", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_rows_of_every_layout(tmp_path: Path, reader: LocalReader, layout: str, structs: bool) -> None:
    content, path = pictures(), tmp_path / "rows.parquet"
    write(path, content, structs=structs, groups=2, **LAYOUTS[layout])
    file, leaf = await open_pictures(reader, path)
    for group in range(2):
        assert has_pages(file, group, leaf)
        own = content[group * ROWS // 2 : (group + 1) * ROWS // 2]
        table = await find_pages(reader, file, group, leaf, run=run)
        assert len(table.starts) > 10
        edges = sorted({0, 1, *table.rows[1:5].tolist(), *(table.rows[3:6] + 1).tolist(), 149, 150})
        for start, stop in itertools.combinations(edges, 2):
            reader.log.clear()
            found = await read_pages(reader, file, group, leaf, table, range(start, stop), run=run)
            assert found.to_pylist() == own[start:stop]
            touched = (table.rows[:-1] < stop) & (table.rows[1:] > start)
            least = int((table.stops - table.starts)[touched].sum())
            dictionary = 0 if table.dictionary is None else table.dictionary[1] - table.dictionary[0]
            assert least <= reader.bytes_read <= least + dictionary


async def test_a_dictionary_is_fetched_for_pages_that_refer_to_it(tmp_path: Path, reader: LocalReader) -> None:
    """A writer begins with one, and gives it up as soon as it is too long: for pictures, after the first page."""
    content, path = pictures(), tmp_path / "rows.parquet"
    write(path, content)
    file, leaf = await open_pictures(reader, path)
    table = await find_pages(reader, file, 0, leaf, run=run)
    assert table.dictionary is not None
    for rows, dictionary in ((range(1), True), (range(ROWS - 1, ROWS), False)):
        reader.log.clear()
        await read_pages(reader, file, 0, leaf, table, rows, run=run)
        assert (table.dictionary in reader.of("rows")) == dictionary


async def test_the_headers_alone_are_fetched_to_find_pages(tmp_path: Path, reader: LocalReader) -> None:
    content, path = (
        [bytes([row % 251]) * 50_000 + pictures(1, seed=row)[0] for row in range(64)],
        tmp_path / "rows.parquet",
    )
    write(path, content, compression="none", use_dictionary=False)
    file, leaf = await open_pictures(reader, path)
    reader.log.clear()
    table = await find_pages(reader, file, 0, leaf, run=run)
    assert len(reader.log) == len(table.starts)
    assert reader.bytes_read <= len(table.starts) * pages.HEADER_BYTES < path.stat().st_size / 4


async def test_a_header_longer_than_usual_is_asked_for_again(
    tmp_path: Path, reader: LocalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "HEADER_BYTES", 12)
    content, path = pictures(), tmp_path / "rows.parquet"
    write(path, content)
    file, leaf = await open_pictures(reader, path)
    table = await find_pages(reader, file, 0, leaf, run=run)
    assert (await read_pages(reader, file, 0, leaf, table, range(40, 50), run=run)).to_pylist() == content[40:50]


async def test_rows_without_a_value_have_none(tmp_path: Path, reader: LocalReader) -> None:
    path = tmp_path / "rows.parquet"
    rows = [None, {"bytes": None}, {"bytes": b"a picture"}] * 20
    pq.write_table(pa.table({"picture": pa.array(rows, pa.struct([("bytes", pa.binary())]))}), path)
    file, leaf = await open_pictures(reader, path)
    table = await find_pages(reader, file, 0, leaf, run=run)
    found = await read_pages(reader, file, 0, leaf, table, range(3, 7), run=run)
    assert found.to_pylist() == [None, None, b"a picture", None]


@pytest.mark.parametrize("layout", ["as recorded", "an offset index"])
async def test_damaged_headers_are_refused_and_never_wrong(tmp_path: Path, layout: str, reader: LocalReader) -> None:
    content, path = pictures(60), tmp_path / "rows.parquet"
    write(path, content, **LAYOUTS[layout])
    whole = path.read_bytes()
    file, leaf = await open_pictures(reader, path)
    table = await find_pages(reader, file, 0, leaf, run=run)
    rng, outcomes = np.random.default_rng(1), set()
    places = [start + byte for start in table.starts[:6].tolist() for byte in range(20)]
    places += rng.integers(int(table.stops[-1]), len(whole) - 8, 60 if layout == "an offset index" else 0).tolist()
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << int(rng.integers(8))]) + whole[place + 1 :])
        try:
            again = await find_pages(reader, file, 0, leaf, run=run)
            found = await read_pages(reader, file, 0, leaf, again, range(2, 30), run=run)
        except FormatError:
            outcomes.add("refused")
            continue
        outcomes.add("right" if found.to_pylist() == content[2:30] else "wrong")
    assert outcomes == {"refused", "right"}


async def test_a_damaged_page_is_refused_by_its_checksum(tmp_path: Path, reader: LocalReader) -> None:
    content, path = pictures(), tmp_path / "rows.parquet"
    write(path, content, compression="none", use_dictionary=False, write_page_checksum=True)
    file, leaf = await open_pictures(reader, path)
    table = await find_pages(reader, file, 0, leaf, run=run)
    whole, place = bytearray(path.read_bytes()), int(table.stops[5]) - 100
    whole[place] ^= 4
    path.write_bytes(whole)
    for rows, fails in ((range(int(table.rows[5]), int(table.rows[6])), True), (range(3), False)):
        if fails:
            with pytest.raises(FormatError, match="can't be read as parquet"):
                await read_pages(reader, file, 0, leaf, table, rows, run=run)
        else:
            assert (await read_pages(reader, file, 0, leaf, table, rows, run=run)).to_pylist() == content[:3]


async def test_numbers_and_lists_have_no_pages_of_their_own(tmp_path: Path, reader: LocalReader) -> None:
    path = tmp_path / "rows.parquet"
    rows = {"index": range(9), "lists": [[b"a"]] * 9, "picture": [b"a"] * 9}
    pq.write_table(
        pa.table(rows), path, compression={"index": "snappy", "lists.list.element": "snappy", "picture": "lz4"}
    )
    file, _ = await open_pictures(reader, path)
    assert [has_pages(file, 0, file.leaves[name].start) for name in ("index", "lists", "picture")] == [False] * 3

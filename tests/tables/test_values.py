"""Places of byte strings, however pyarrow lays a column out; and that the strings themselves aren't read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio.to_thread
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.errors import FormatError
from asyncfetch.tables import pages
from asyncfetch.tables.pages import indexed_pages
from asyncfetch.tables.parquet import open_table
from asyncfetch.tables.values import HEAD_BYTES, find_values, read_levels, why_no_places
from tests.local_reader import LocalReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncfetch.tables.values import ValuePlaces

run = anyio.to_thread.run_sync

PLAIN: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "as pyarrow does": {},
    "an offset index": {"write_page_index": True},
    "small pages": {"data_page_size": 2000, "write_batch_size": 3},
    "small pages with an offset index": {"data_page_size": 2000, "write_batch_size": 3, "write_page_index": True},
    "pages of version 2": {"data_page_version": "2.0", "data_page_size": 2000, "write_batch_size": 3},
    "checksums": {"write_page_checksum": True},
}


def write(path: Path, values: Sequence[bytes | None], *, kind: str = "struct", rows: int = 100, **options: Any) -> None:  # noqa: ANN401
    """A column in one of three types: a struct with nulls of its own, bytes, or bytes of which all are there."""
    column: Any = pa.array(values, pa.binary())
    field = pa.field("video", pa.binary(), nullable=kind != "required")
    if kind == "struct":
        no_struct = pa.array([value is None and row % 2 == 0 for row, value in enumerate(values)], pa.bool_())
        column = pa.StructArray.from_arrays(
            [column, pa.nulls(len(values), pa.string())], ["bytes", "path"], mask=no_struct
        )
        field = pa.field("video", column.type)
    table = pa.Table.from_arrays([column], schema=pa.schema([field]))
    pq.write_table(table, path, row_group_size=rows, **{**PLAIN, **options})


async def places_of(reader: LocalReader, path: Path, *, tail_bytes: int = 1024) -> ValuePlaces:
    file = await open_table(reader, str(path), run=run, tail_bytes=tail_bytes)
    groups = [group for group in range(file.metadata.num_row_groups) if file.metadata.row_group(group).num_rows]
    reader.log.clear()
    assert why_no_places(file, groups, 0) is None
    return await find_values(reader, file, groups, 0, run=run)


def values_at(path: Path, places: ValuePlaces) -> list[bytes | None]:
    data = path.read_bytes()
    pairs = zip(places.starts.tolist(), places.sizes.tolist(), strict=True)
    return [None if size < 0 else data[start : start + size] for start, size in pairs]


def videos(count: int, *, nulls: float = 0.0, size: int = 5000) -> list[bytes | None]:
    rng = np.random.default_rng(count)
    return [None if rng.random() < nulls else rng.bytes(int(rng.integers(0, size))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["struct", "bytes", "required"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_values_of_every_layout(tmp_path: Path, reader: LocalReader, layout: str, kind: str) -> None:
    content, path = videos(120, nulls=0.0 if kind == "required" else 0.3), tmp_path / "v.parquet"
    write(path, content, kind=kind, rows=50, **LAYOUTS[layout])
    assert values_at(path, await places_of(reader, path)) == content


@given(
    st.lists(st.none() | st.binary(max_size=40), max_size=60),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 70),
    st.sampled_from([16, 1000, 100_000]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
async def test_any_values(tmp_path: Path, content: list[bytes | None], layout: str, rows: int, tail_bytes: int) -> None:
    path = tmp_path / "v.parquet"
    write(path, content, rows=rows, **LAYOUTS[layout])
    assert values_at(path, await places_of(LocalReader(), path, tail_bytes=tail_bytes)) == content


async def test_the_strings_are_not_read(tmp_path: Path, reader: LocalReader) -> None:
    content, path = [*videos(30, size=400_000), None], tmp_path / "v.parquet"
    write(path, content, rows=8)
    assert values_at(path, await places_of(reader, path)) == content
    assert len(reader.log) <= len(content)
    assert reader.bytes_read <= 4 * HEAD_BYTES + 4 * len(content) < path.stat().st_size / 100


async def test_a_long_header_is_asked_for_again(tmp_path: Path, reader: LocalReader) -> None:
    """Least and greatest value are in it where they have less than 4 kB."""
    content: list[bytes | None] = [bytes([row]) * 3000 for row in range(20)]
    write(path := tmp_path / "v.parquet", content)
    assert values_at(path, await places_of(reader, path)) == content


async def test_nulls_alone_are_not_read(tmp_path: Path, reader: LocalReader) -> None:
    write(path := tmp_path / "v.parquet", [None] * 9, compression="snappy", use_dictionary=True)
    assert values_at(path, await places_of(reader, path)) == [None] * 9
    assert reader.log == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": "snappy"}, r"is compressed \(SNAPPY\)"),
        ({"use_dictionary": True}, "is encoded as RLE_DICTIONARY"),
        ({"column_encoding": {"video.bytes": "DELTA_LENGTH_BYTE_ARRAY"}}, "is encoded as DELTA_LENGTH_BYTE_ARRAY"),
    ],
)
async def test_column_without_places_says_why(
    tmp_path: Path, reader: LocalReader, options: dict[str, Any], reason: str
) -> None:
    write(path := tmp_path / "v.parquet", videos(5), **options)
    file = await open_table(reader, str(path), run=run)
    said = why_no_places(file, [0], 0)
    assert said is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(said)


async def test_damage_is_found(tmp_path: Path, reader: LocalReader) -> None:
    """A wrong length leads elsewhere than to the page's end, and so does a wrong level."""
    content, path = [b"a" * 5000, None, b"b" * 7000, b"c" * 6000, None], tmp_path / "v.parquet"
    write(path, content)
    good = path.read_bytes()
    places = await places_of(reader, path)
    inside = np.zeros(len(good), np.bool_)
    for start, size in zip(places.starts.tolist(), places.sizes.tolist(), strict=True):
        inside[start : start + size] = size > 0
    end = max((places.starts + places.sizes).tolist())
    refused = 0
    for at in np.flatnonzero(~inside[4:end]) + 4:
        for bit in range(8):
            damaged = bytearray(good)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                found = values_at(path, await places_of(reader, path))
            except FormatError as error:
                assert "can't be read as parquet" in str(error)  # noqa: PT017
                refused += 1
            else:
                assert [value is None or len(value) for value in found] == [
                    value is None or len(value) for value in content
                ]
    assert refused > 100


async def test_an_offset_index_of_other_pages_is_refused(
    tmp_path: Path, reader: LocalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path := tmp_path / "v.parquet", videos(60), **LAYOUTS["small pages with an offset index"])

    def swapped(url: str, index: memoryview) -> list[tuple[int, int, int]]:
        pages = indexed_pages(url, index)
        places = [page[:2] for page in pages]
        places[0], places[1] = places[1], places[0]
        return [(*place, page[2]) for place, page in zip(places, pages, strict=True)]

    for change in (swapped, lambda url, index: indexed_pages(url, index)[1:], lambda _url, _index: []):
        monkeypatch.setattr(pages, "indexed_pages", change)
        with pytest.raises(FormatError, match=r"pages of row group 0 lie beside its bytes .*, or lack rows"):
            await places_of(reader, path)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(1, 3))
def test_levels_of_packed_bits_and_runs(levels: list[int], largest: int) -> None:
    levels = [min(level, largest) for level in levels]
    width = largest.bit_length()
    padded = levels + [0] * (-len(levels) % 8)
    bits = [level >> bit & 1 for level in padded for bit in range(width)]
    packed = bytes([len(padded) // 8 << 1 | 1]) + np.packbits(bits, bitorder="little").tobytes()
    runs = b"".join(bytes([2, level]) for level in levels)
    for data in (packed, runs):
        assert read_levels(memoryview(data), len(levels), largest).tolist() == levels

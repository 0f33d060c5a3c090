"""Packed parts of files, and their urls. How they are unpacked is in test_unpacked.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from anyio import to_thread

from asyncfetch.errors import ConfigError
from asyncfetch.tables.packed import Packed, can_unpack, packed_part
from asyncfetch.tables.parquet import open_table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.local_reader import LocalReader


async def test_lists_and_old_lz4_cannot_be_unpacked(reader: LocalReader, tmp_path: Path) -> None:
    table = pa.table({"list": [[b"a"], [b"b"]], "bytes": [b"a", b"b"]})
    pq.write_table(table, tmp_path / "t.parquet", compression={"list": "snappy", "bytes": "lz4"})
    file = await open_table(reader, str(tmp_path / "t.parquet"), run=to_thread.run_sync)
    assert not can_unpack(file, [0], 0)
    assert not can_unpack(file, [0], 1)


def test_urls_of_packed_parts_are_parsed_as_they_are_written() -> None:
    for part in (Packed("https://h/a?b=c", "zstd", 0, 9), Packed("/a", "SNAPPY", 4, 99, 10, 3, 0, 2, 500)):
        assert packed_part(str(part)) == part
    assert packed_part("https://h/a#b") is None


@pytest.mark.parametrize("how", ["", "gzip", "gzip:0", "gzip:5:5", "gzip:0:x", "rar:0:9", "SNAPPY:0:9:2:2:0:0:9"])
def test_odd_urls_are_refused(how: str) -> None:
    with pytest.raises(ConfigError, match="nothing that asyncfetch wrote"):
        packed_part(f"/a#unpacked={how}")

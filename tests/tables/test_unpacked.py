"""Compressed files and columns, read as if they weren't."""

from __future__ import annotations

import bz2
import gc
import gzip
import lzma
import os
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from anyio import to_thread

from asyncfetch.errors import CacheError, FormatError, NotFound, ObjectChanged, RangeNotSatisfiable
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.reader import VersionedReader
from asyncfetch.ranges import ByteRange
from asyncfetch.tables import packed as packing
from asyncfetch.tables import unpacked
from asyncfetch.tables.packed import Packed, can_unpack, packed_values
from asyncfetch.tables.parquet import open_table
from asyncfetch.tables.unpacked import UnpackedReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


def by_pyarrow(data: bytes, codec: Any) -> bytes:  # noqa: ANN401
    target = pa.BufferOutputStream()
    with pa.CompressedOutputStream(target, codec) as stream:
        stream.write(data)
    return bytes(target.getvalue())


CODECS: dict[str, Any] = {
    "gzip": gzip.compress,
    "bzip2": partial(bz2.compress, compresslevel=1),
    "xz": partial(lzma.compress, preset=0),
    "zstd": partial(by_pyarrow, codec="zstd"),
    "lz4": partial(by_pyarrow, codec="lz4"),
}
DATA = np.random.default_rng(0).bytes(700_000) + bytes(3_000_000) + b"the end"


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "PIECE_BYTES", 256 * 1024)
    monkeypatch.setattr(packing, "AHEAD_BYTES", 192 * 1024)
    monkeypatch.setattr(packing, "STEP_BYTES", 64 * 1024)


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    async with Fetcher() as opened:
        yield opened


def packed(path: Path, data: bytes, codec: str = "gzip") -> str:
    """The url of what a file unpacks to, which is written with these bytes."""
    path.write_bytes(data)
    return str(Packed(str(path), codec, 0, len(data)))


@pytest.mark.parametrize("codec", CODECS)
async def test_a_file_is_read_as_what_it_unpacks_to(fetcher: Fetcher, tmp_path: Path, codec: str) -> None:
    compress, cut = CODECS[codec], 1_000_001  # in two members, as parallel programs write them
    url = packed(tmp_path / "a", compress(DATA[:cut]) + compress(DATA[cut:]), codec)
    reader = UnpackedReader(fetcher)
    assert await reader.fetch(url) == DATA
    assert await reader.fetch(url, 5, 900_000) == DATA[5:900_000]
    assert bytes(await reader.fetch(url, -7)) == b"the end"
    info, head = await reader.fetch_head(url, 10)
    assert (info.size, bytes(head), info.url) == (len(DATA), DATA[:10], url)
    assert bytes((await reader.fetch_tail(url, 4))[1]) == b" end"
    assert await reader.stat(url) == reader.known(url) == info
    assert await reader.fetch_many([ByteRange(url, 1, 3), ByteRange(str(tmp_path / "a"), 0, 2)]) == [
        DATA[1:3],
        (tmp_path / "a").read_bytes()[:2],
    ]
    async with reader.fetch_stream([ByteRange(url, 1, 3)]) as stream:
        assert [(place, bytes(view)) async for place, view in stream] == [(0, DATA[1:3])]
    await reader.fetch_into(url, 2, 6, buffer := bytearray(4))
    assert buffer == DATA[2:6]
    for start, stop in ((0, len(DATA) + 1), (len(DATA) + 1, None)):
        with pytest.raises(RangeNotSatisfiable):
            await reader.fetch(url, start, stop)


async def test_other_urls_are_read_as_before(fetcher: Fetcher, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"plain")
    reader, url = UnpackedReader(fetcher), str(tmp_path / "a")
    assert isinstance(reader, VersionedReader)
    assert bytes((await reader.fetch_head(url, 2))[1]) == b"pl"
    assert bytes((await reader.fetch_tail(url, 2))[1]) == b"in"
    assert await reader.stat(url) == reader.known(url) == await fetcher.stat(url)
    assert await reader.fetch_many([ByteRange(url, 1, 3)]) == [b"la"]
    async with reader.fetch_stream([ByteRange(url, 1, 3)]) as stream:
        assert [bytes(view) async for _, view in stream] == [b"la"]
    await reader.fetch_into(url, 2, 4, buffer := bytearray(2))
    assert buffer == bytes(await reader.fetch(url, 2, 4)) == b"ai"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("harm", ["truncated", "damaged", "another"])
async def test_damage_is_an_error(fetcher: Fetcher, tmp_path: Path, codec: str, harm: str) -> None:
    data = bytearray(CODECS[codec](DATA))
    if harm == "truncated":
        del data[len(data) * 2 // 3 :]
    elif harm == "damaged":
        data[8:60] = bytes(52)  # pyarrow writes no checksum of what is behind
    else:
        data[:] = DATA
    with pytest.raises(FormatError, match=rf"a can't be unpacked as {codec}: .*copy the file anew"):
        await UnpackedReader(fetcher).fetch(packed(tmp_path / "a", bytes(data), codec), 0, 10)


async def test_unpacked_files_go_with_the_reader(fetcher: Fetcher, tmp_path: Path) -> None:
    def files() -> int:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == packing.CLOSER_NAME:
                thread.join()
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in os.readlink(link) for link in links if os.path.lexists(link))

    async def read(data: bytes) -> UnpackedReader:
        reader = UnpackedReader(fetcher, directory=tmp_path)
        with suppress(FormatError):
            await reader.fetch(packed(tmp_path / str(len(data)), data))
        return reader

    data = gzip.compress(DATA)
    reader = await read(data)
    assert await to_thread.run_sync(files) == 1
    await read(data[:-100])
    del reader
    assert await to_thread.run_sync(files) == 0


async def test_a_file_of_zeros_fills_no_disk(fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "RATIO_FREE_BYTES", 1024 * 1024)
    url = packed(tmp_path / "a", gzip.compress(bytes(5_000_000)))
    with pytest.raises(FormatError, match="unpacks to more than 100 times its bytes"):
        await UnpackedReader(fetcher).fetch(url)
    with pytest.raises(CacheError, match=r"unpacks to more than 1000 bytes.*disk_cache_max_bytes"):
        await UnpackedReader(fetcher, max_bytes=1000).fetch(url)
    with pytest.raises(CacheError, match=r"can't be unpacked in .*nowhere: No such file"):
        await UnpackedReader(fetcher, directory=tmp_path / "nowhere").fetch(url)


async def test_unpacked_file_is_kept(fetcher: Fetcher, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    urls = [packed(tmp_path / name, gzip.compress(name.encode() * 1000)) for name in "ab"]
    reader = UnpackedReader(fetcher, max_bytes=1500, directory=tmp_path)
    async with anyio.create_task_group() as group:
        for start in range(20):
            group.start_soon(reader.fetch, urls[0], start, start + 5)
    os.unlink(tmp_path / "a")
    assert bytes(await reader.fetch(urls[0], 0, 3)) == b"aaa"
    assert os.listdir(tmp_path) == ["b"]
    assert bytes(await reader.fetch(urls[1], 0, 3)) == b"bbb"  # and the other one goes
    packed(tmp_path / "a", gzip.compress(b"a" * 1000))
    with pytest.raises(ObjectChanged):
        await reader.fetch(urls[0], 0, 3)
    assert bytes(await reader.fetch(urls[0], 0, 3)) == b"aaa"
    [message] = caplog.messages
    assert "is read whole and unpacked anew: of what was unpacked, 1500 bytes are kept" in message


async def test_a_full_disk_keeps_less(fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {name: np.random.default_rng(place).bytes(1000) for place, name in enumerate("abc")}
    urls = {name: packed(tmp_path / name, gzip.compress(data)) for name, data in content.items()}
    reader = UnpackedReader(fetcher, directory=tmp_path)
    await reader.fetch(urls["a"])
    await reader.fetch(urls["b"])
    assert await reader.fetch(urls["a"]) == content["a"]
    monkeypatch.setattr(unpacked, "MIN_FREE_BYTES", 1024**6)
    assert await reader.fetch(urls["c"]) == content["c"]
    for name in "abc":
        os.unlink(tmp_path / name)
    assert await reader.fetch(urls["c"]) == content["c"]
    assert await reader.fetch(urls["a"]) == content["a"]
    with pytest.raises(NotFound):  # it went first
        await reader.fetch(urls["b"])


async def test_a_file_that_was_replaced_is_unpacked_anew(fetcher: Fetcher, tmp_path: Path) -> None:
    url = packed(tmp_path / "a", gzip.compress(b"one" * 99, mtime=0))
    reader = UnpackedReader(fetcher)
    first = (await reader.fetch_head(url, 3))[0]
    os.unlink(tmp_path / "a")
    assert packed(tmp_path / "a", gzip.compress(b"two" * 99, mtime=0)) == url
    with pytest.raises(ObjectChanged):
        await reader.fetch(str(tmp_path / "a"))
    await reader.fetch(str(tmp_path / "a"))
    assert reader.known(url) is None
    assert bytes(await reader.fetch(url, 0, 3)) == b"two"
    with pytest.raises(ObjectChanged, match="was replaced"):
        await reader.read_into(url, 0, 3, bytearray(3), version=first)
    longer = gzip.compress(b"three" * 999)
    (tmp_path / "b").write_bytes(longer)
    with pytest.raises(FormatError, match=rf"b has {len(longer)} bytes, but 7 when its places were written"):
        await reader.fetch(str(Packed(str(tmp_path / "b"), "gzip", 0, 7)))


LAYOUTS: dict[str, dict[str, Any]] = {
    "as pyarrow does": {},
    "a dictionary alone": {"compression": "none"},
    "zstd": {"compression": "zstd", "use_dictionary": False},
    "pages of version 2": {"data_page_version": "2.0", "compression": "gzip", "data_page_size": 2000},
    "small pages": {"data_page_size": 2000, "write_batch_size": 3, "dictionary_pagesize_limit": 3000},
    "an index and checksums": {"write_page_index": True, "write_page_checksum": True},
    "deltas": {"use_dictionary": False, "column_encoding": {"video.bytes": "DELTA_LENGTH_BYTE_ARRAY"}},
}


def values(count: int) -> list[bytes | None]:
    rng = np.random.default_rng(count)
    found: list[bytes | None] = [rng.bytes(int(rng.integers(0, 900))) for _ in range(count)]
    found[3::7] = [None] * len(found[3::7])
    found[5::6] = [found[5]] * len(found[5::6])
    return found


async def read_values(fetcher: Fetcher, path: Path, data: Sequence[bytes | None], **options: Any) -> list[bytes]:  # noqa: ANN401
    """All strings of a column that is written with these options."""
    struct = pa.array([None if row % 5 == 4 else {"bytes": one, "path": "p"} for row, one in enumerate(data)])
    pq.write_table(pa.table({"n": range(len(data)), "video": struct}), path, row_group_size=50, **options)
    file = await open_table(fetcher, str(path), run=to_thread.run_sync)
    groups = range(file.metadata.num_row_groups)
    assert can_unpack(file, groups, 1)
    reader = UnpackedReader(fetcher)
    return [bytes(await reader.fetch(str(one))) for group in groups for one in packed_values(file, group, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_strings_of_a_column_are_those_that_pyarrow_reads(fetcher: Fetcher, tmp_path: Path, layout: str) -> None:
    found = await read_values(fetcher, tmp_path / "t.parquet", values(120), **LAYOUTS[layout])
    expected: list[Any] = pq.read_table(tmp_path / "t.parquet")["video"].to_pylist()
    assert found == [(row and row["bytes"]) or b"" for row in expected]
    assert sum(map(len, found)) > 10_000


async def test_a_damaged_or_too_long_column_is_an_error(fetcher: Fetcher, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"video": values(40)}), path)
    file = await open_table(fetcher, str(path), run=to_thread.run_sync)
    first = packed_values(file, 0, 0)[0]
    with pytest.raises(CacheError, match=rf"take {first.unpacked_bytes} bytes unpacked, and at most 1000 .*max_bytes"):
        await UnpackedReader(fetcher, max_page_bytes=1000).fetch(str(first))
    with pytest.raises(FormatError, match=r"pages of 41 rows have 40|can't be read as parquet"):
        await UnpackedReader(fetcher).fetch(str(first._replace(rows=41)))
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    (tmp_path / "b.parquet").write_bytes(data)
    with pytest.raises(FormatError, match=r"b.parquet can't be read as parquet"):
        await UnpackedReader(fetcher).fetch(str(first._replace(url=str(tmp_path / "b.parquet"))))

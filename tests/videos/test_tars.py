"""Tables of tar shards, beside webdataset reading the same."""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from anyio import run_process
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from asyncfetch.cache import ByteCache
from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, DatasetError, FormatError, NotFound
from asyncfetch.fetch import Fetcher
from asyncfetch.media.tar import LOOK_BYTES, TarredFile
from asyncfetch.tables.unpacked import UnpackedReader
from asyncfetch.testing import RangeServer
from asyncfetch.videos.tars import SHARDS_AT_ONCE, group_samples, tar_entries
from tests.media.test_tar import write
from tests.videos.shards import Sample, dali_index, energon_index, samples, shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

OWN = ["video", "offset", "size", "start", "stop", "__key__"]
MEMBER = pa.struct([("offset", pa.int64()), ("size", pa.int64())])


def config_for(server: RangeServer) -> FetchConfig:
    return FetchConfig(ca_file=server.ca_file, hedge=None)  # requests are counted, and a busy machine answers late


async def entries_of(content: Mapping[str, bytes], names: str | list[str] = "a.tar", **options: Any) -> pa.Table:  # noqa: ANN401
    """The table of shards that a web server has."""
    async with RangeServer(content) as server, Fetcher(config_for(server)) as fetcher:
        urls = [f"{server.url}/{name}" for name in ([names] if isinstance(names, str) else names)]
        return await tar_entries(UnpackedReader(fetcher), fetcher, urls, **options)


def read_all(table: pa.Table, content: Mapping[str, bytes]) -> list[Sample]:
    """The samples of a table, their bytes cut out of the shards."""
    found = []
    for row in table.to_pylist():
        data = content[row.pop("video").rpartition("/")[2]]
        offset, size, _, _ = (row.pop(name) for name in OWN[1:5])
        sample = {"__key__": row.pop("__key__"), "mp4": data[offset : offset + size]}
        places = {name: place for name, place in row.items() if place is not None}
        found.append(sample | {name: data[each["offset"] :][: each["size"]] for name, each in places.items()})
    return found


def by_webdataset(content: Mapping[str, bytes]) -> list[Sample]:
    sources = [{"url": name, "stream": io.BytesIO(data)} for name, data in content.items()]
    grouped = group_by_keys(tar_file_expander(sources))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in grouped]


# What is in the table.


async def test_samples_are_those_of_webdataset() -> None:
    content = {f"{place:03d}.tar": shard(samples(7, first=7 * place)) for place in range(3)}
    table = await entries_of(content, "{000..002}.tar")
    assert read_all(table, content) == by_webdataset(content)
    assert table.num_rows == 21
    assert table.schema.names == [*OWN, "json", "txt"]
    assert table.schema.types[:6] == [pa.string(), pa.int64(), pa.int64(), pa.float64(), pa.float64(), pa.string()]
    assert table["start"].null_count == table["stop"].null_count == 21
    for name in ("json", "txt"):
        assert table.schema.field(name).type == MEMBER
        assert table.schema.field(name).metadata == {b"asyncfetch": b"member"}
    assert all(column.num_chunks == 1 for column in table.columns)


async def test_keys_and_extensions_are_those_of_webdataset() -> None:
    files = [
        ("./a.MP4", b"1"), ("./a.seg.json", b"2"),
        ("dir.x/b.mov", b"3"), ("dir.x/b.TXT", b""),
        ("__meta__/c.mp4", b"4"), ("noextension", b"5"), (".hidden", b"6"),
        ("ü" * 80 + ".webm", b"7"), ("d.txt", b"8"), ("d.mkv", b"9"),
    ]  # fmt: skip
    content = {"a.tar": write(files)}
    table = await entries_of(content)
    expected = by_webdataset(content)
    assert table["__key__"].to_pylist() == [one["__key__"] for one in expected]
    assert set(table.column_names[6:]) == {"seg.json", "txt"}
    videos = {"mp4", "mov", "webm", "mkv"}
    for mine, theirs in zip(read_all(table, content), expected, strict=True):
        assert mine == {("mp4" if name in videos else name): value for name, value in theirs.items()}


@given(st.lists(st.text("aB._/é", min_size=1, max_size=8), max_size=8))
def test_any_names_are_grouped_as_webdataset_does(names: list[str]) -> None:
    files = [TarredFile(name, 512 * place, place) for place, name in enumerate(names)]
    read = [
        {"fname": file.name, "data": file, "__url__": "a"}
        for file in files
        if not re.match("__[^/]*__($|/)", file.name)
    ]
    try:
        expected = list(group_by_keys(read))
    except ValueError:
        with pytest.raises(FormatError, match="two files with the extension"):
            group_samples(files, url="a")
        return
    grouped = group_samples(files, url="a")
    assert [{"__key__": sample.key, "__url__": "a"} | sample.files for sample in grouped] == expected


async def test_a_shard_without_an_extension_has_nulls_there() -> None:
    with_text, without = samples(2), [{"__key__": "z", "mp4": b"z"}]
    content = {"a.tar": shard(without), "b.tar": shard(with_text)}
    table = await entries_of(content, ["a.tar", "b.tar", "a.tar"])
    assert table["txt"].is_null().to_pylist() == [True, False, False, True]
    assert table["__key__"].to_pylist() == ["z", "000000", "000001", "z"]
    assert table.schema.field("txt").metadata == {b"asyncfetch": b"member"}


async def test_samples_without_a_video_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    content = {"a.tar": shard([*samples(2), {"__key__": "x", "txt": "1"}, {"__key__": "y", "txt": "2"}])}
    table = await entries_of(content)
    assert table.num_rows == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("2 of 4 samples have no video and are left out, such as 'x' in https://")


async def test_shards_without_a_video_are_an_error() -> None:
    with pytest.raises(DatasetError, match=r"no sample with a video, of 1, such as 'x' in .*a\.tar \(txt\); name"):
        await entries_of({"a.tar": shard([{"__key__": "x", "txt": "1"}])})
    with pytest.raises(DatasetError, match="1 shards have no sample with a video, of 0;"):
        await entries_of({"a.tar": shard([])})


async def test_video_is_chosen_from_several_in_a_sample() -> None:
    content = {"a.tar": shard([{"__key__": "x", "left.mp4": b"left", "right.mp4": b"r"}])}
    with pytest.raises(FormatError, match=r"sample 'x' has several videos: left.mp4, right.mp4; choose one with video"):
        await entries_of(content)
    table = await entries_of(content, video="left.mp4")
    assert table["size"].to_pylist() == [4]
    assert table.column_names[6:] == ["right.mp4"]
    table = await entries_of({"a.tar": shard([{"__key__": "x", "bin": b"left"}])}, video="bin")
    assert table.column_names == OWN


async def test_an_extension_twice_in_a_sample_is_refused() -> None:
    content = {"a.tar": write([("x.mp4", b"1"), ("x.MP4", b"2")])}
    with pytest.raises(FormatError, match=r"a\.tar: sample 'x' has two files with the extension 'mp4'"):
        await entries_of(content)
    with pytest.raises(ValueError, match="duplicate file name"):
        by_webdataset(content)


async def test_a_key_that_comes_again_is_another_sample() -> None:
    content = {"a.tar": write([("x.mp4", b"1"), ("y.mp4", b"2"), ("x.mp4", b"3")])}
    assert read_all(await entries_of(content), content) == by_webdataset(content)


async def test_an_extension_that_names_a_column_is_refused() -> None:
    with pytest.raises(FormatError, match="sample 'x' has a file with the extension 'start', which is the name of"):
        await entries_of({"a.tar": write([("x.mp4", b"1"), ("x.start", b"2")])})


async def test_a_sparse_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "x.mp4").open("wb") as file:
        file.truncate(1_000_000)
        file.write(b"1")
    await run_process(["tar", "--sparse", "-cf", "a.tar", "x.mp4"], cwd=tmp_path)
    with pytest.raises(FormatError, match=r"a\.tar: 'x.mp4' is a sparse file.*without --sparse"):
        await entries_of({"a.tar": (tmp_path / "a.tar").read_bytes()})


async def test_compressed_shards_have_places_of_unpacked_bytes() -> None:
    tar = shard(samples(5))
    content = {"a.tar": tar, "b.tar.gz": shard(samples(5, first=5), compress=True), "c.tar": gzip.compress(tar)}
    async with RangeServer(content) as server, Fetcher(config_for(server)) as fetcher:
        table = await tar_entries(UnpackedReader(fetcher), fetcher, [f"{server.url}/{name}" for name in content])
        reader = UnpackedReader(fetcher)
        for row, sample in zip(table.to_pylist(), [*samples(10), *samples(5)], strict=True):
            offset, size = row["offset"], row["size"]
            assert await reader.fetch(row["video"], offset, offset + size) == sample["mp4"]
            assert row["__key__"] == sample["__key__"]
            text = row["txt"]["offset"]
            assert await reader.fetch(row["video"], text, text + row["txt"]["size"]) == sample["txt"].encode()
    urls: list[Any] = table["video"].to_pylist()
    assert [url.partition("#")[2] for url in urls[::5]] == [
        "",
        f"unpacked=gzip:0:{len(content['b.tar.gz'])}",
        f"unpacked=gzip:0:{len(content['c.tar'])}",
    ]


@pytest.mark.parametrize("compress", [True, False])
async def test_a_bad_shard_among_good_ones_is_named(compress: bool) -> None:
    bad = shard(samples(2), compress=compress)[: -100 if compress else -11_000]
    content = {"a.tar": shard(samples(2)), "b.tar": bad, "c.tar": shard(samples(2, first=2))}
    message = r"b\.tar: truncated tar archive|b\.tar can't be unpacked as gzip: Compressed file ended"
    with pytest.raises(FormatError, match=message):
        await entries_of(content, "{a,b,c}.tar")
    left_out: dict[str, FormatError] = {}
    progress: list[tuple[int, int]] = []
    table = await entries_of(
        content,
        "{a,b,c}.tar",
        on_bad_shard=left_out.__setitem__,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert table["__key__"].to_pylist() == [sample["__key__"] for sample in samples(4)]
    [(url, error)] = left_out.items()
    assert url.endswith("/b.tar")
    assert re.search(message, str(error))
    assert progress == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(DatasetError, match="0 shards have no sample"):
        await entries_of({"b.tar": bad}, "b.tar", on_bad_shard=left_out.__setitem__)


async def test_a_shard_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound, match=r"b\.tar"):
        await entries_of({"a.tar": shard(samples(2))}, ["a.tar", "b.tar"])


async def test_no_urls_are_refused() -> None:
    async with Fetcher() as fetcher:
        with pytest.raises(ConfigError, match="there are no shards: give at least one url"):
            await tar_entries(fetcher, fetcher, [])


# What is asked for.


def ranges_of(server: RangeServer, name: str) -> list[tuple[int | None, int | None]]:
    return [(request.start, request.stop) for request in server.requests if request.path == f"/{name}"]


@pytest.mark.parametrize("count", [1, 5, 40])
async def test_a_shard_costs_a_request_a_sample_and_one(count: int) -> None:
    """A header, and then for each sample the bytes behind its video. Two more look for indexes, once in all."""
    content = {name: shard(samples(count)) for name in ("a.tar", "b.tar")}
    async with RangeServer(content) as server, Fetcher(config_for(server)) as fetcher:
        await tar_entries(fetcher, fetcher, f"{server.url}/{{a,b}}.tar")
        for name in content:
            ranges = ranges_of(server, name)
            assert len(ranges) == count + 1
            assert ranges[0] == (0, LOOK_BYTES)
            assert len(set(ranges)) == len(ranges)
        assert len(server.requests) == 2 * (count + 1) + 2
        assert server.statistics().bytes_sent <= 2 * (count + 1) * LOOK_BYTES + 100


async def test_ranges_of_a_reader_are_kept_by_it() -> None:
    content = {"a.tar": shard(samples(5))}
    async with (
        RangeServer(content) as server,
        Fetcher(config_for(server)) as fetcher,
        ByteCache(fetcher, max_bytes=1_000_000) as cache,
    ):
        first = await tar_entries(cache, fetcher, f"{server.url}/a.tar")
        asked = len(ranges_of(server, "a.tar"))
        second = await tar_entries(cache, fetcher, f"{server.url}/a.tar")
        assert second == first
        assert len(ranges_of(server, "a.tar")) <= asked + 1  # the head, which tells the size


async def test_shards_are_read_side_by_side() -> None:
    content = {f"{place:03d}.tar": shard(samples(1)) for place in range(2 * SHARDS_AT_ONCE)}
    async with RangeServer(content, first_byte_seconds=0.05) as server, Fetcher(config_for(server)) as fetcher:
        table = await tar_entries(fetcher, fetcher, f"{server.url}/{{000..{2 * SHARDS_AT_ONCE - 1}}}.tar")
        assert table.num_rows == 2 * SHARDS_AT_ONCE
        assert SHARDS_AT_ONCE / 2 <= server.statistics().peak_in_flight <= SHARDS_AT_ONCE


async def test_progress_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    content = {f"{place:02d}.tar": shard(samples(1)) for place in range(30)}
    seen: list[tuple[int, int]] = []
    await entries_of(content, "{00..29}.tar", on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 30) for done in range(1, 31)]
    with caplog.at_level(logging.INFO, "asyncfetch.videos"):
        await entries_of(content, "{00..29}.tar")
    assert [record.getMessage() for record in caplog.records] == [
        f"headers of {done} of 30 shards were read" for done in range(3, 31, 3)
    ]


# Indexes.

LONG = samples(5, video_bytes=100_000)
MOVED = LONG[1:] + LONG[:1]
RENAMED = [sample | {"__key__": f"other/{sample['__key__']}"} for sample in LONG]


@pytest.mark.parametrize("name", ["a.tar.idx", "a.idx"])
async def test_dali_s_index_saves_the_hops(name: str) -> None:
    content = {"a.tar": shard(samples(20))}
    expected = await entries_of(content)
    content[name] = dali_index(content["a.tar"])
    async with RangeServer(content) as server, Fetcher(config_for(server)) as fetcher:
        table = await tar_entries(fetcher, fetcher, f"{server.url}/a.tar")
        assert len(ranges_of(server, "a.tar")) == 4  # its first bytes, and three headers
        assert len(ranges_of(server, name)) == 1
    assert table.drop_columns("video") == expected.drop_columns("video")


async def test_energon_s_index_lets_samples_be_read_side_by_side() -> None:
    content = {"a.tar": shard(LONG)}
    expected = await entries_of(content)
    content["a.tar.idx"] = energon_index(content["a.tar"])
    async with RangeServer(content, first_byte_seconds=0.05) as server, Fetcher(config_for(server)) as fetcher:
        table = await tar_entries(fetcher, fetcher, f"{server.url}/a.tar")
        assert server.statistics().peak_in_flight == len(LONG)
    assert table.drop_columns("video") == expected.drop_columns("video")


async def test_a_listing_says_which_shards_have_an_index(tmp_path: Path) -> None:
    content = {"a.tar": shard(LONG), "b.tar": shard(samples(3)), "c.tar": shard(samples(2))}
    content |= {"a.tar.idx": energon_index(content["a.tar"]), "b.idx": dali_index(content["b.tar"])}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    async with Fetcher() as fetcher:
        table = await tar_entries(fetcher, fetcher, f"{tmp_path}/*.tar")
    without_indexes = await entries_of({name: content[name] for name in ("a.tar", "b.tar", "c.tar")}, "{a,b,c}.tar")
    assert table.drop_columns("video") == without_indexes.drop_columns("video")


@pytest.mark.parametrize(
    ("make", "other"),
    [
        *((dali_index, other) for other in (LONG[:4], LONG + samples(1), MOVED, RENAMED, samples(40))),
        *((energon_index, other) for other in (LONG[:4], LONG + samples(1), samples(40))),
    ],
)
async def test_an_index_that_contradicts_is_left_aside(
    make: Callable[[bytes], bytes], other: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    content = {"a.tar": shard(LONG)}
    expected = await entries_of(content)
    table = await entries_of(content | {"a.tar.idx": make(shard(other))})
    assert table.drop_columns("video") == expected.drop_columns("video")
    (record,) = caplog.records
    assert "1 of 1 shards have an index that isn't theirs, and are read without it: https://" in record.getMessage()


async def test_wds2idx_is_off_where_a_shard_has_pax_headers(caplog: pytest.LogCaptureFixture) -> None:
    """It takes the place of the next header for the end of a file, though a PAX extension lies between."""
    content = {"a.tar": shard(LONG)}
    expected = await entries_of(content)
    first, *lines = dali_index(content["a.tar"]).decode().splitlines()
    off = [re.sub(r"(\S+) (\d+) (\d+)", lambda one: f"{one[1]} {int(one[2]) + 1024} {one[3]}", line) for line in lines]
    table = await entries_of(content | {"a.idx": "\n".join([first, *off, ""]).encode()})
    assert table.drop_columns("video") == expected.drop_columns("video")
    assert "1 of 1 shards have an index that isn't theirs" in caplog.text


async def test_a_damaged_shard_with_an_index_is_an_error() -> None:
    data = bytearray(shard(LONG))
    index = energon_index(bytes(data))
    place = int.from_bytes(index[16:24], "little")
    data[place + 10] ^= 1
    with pytest.raises(FormatError, match=f"at byte {place} there is no header"):
        await entries_of({"a.tar": bytes(data), "a.tar.idx": index})


async def test_wids_names_the_shards(caplog: pytest.LogCaptureFixture) -> None:
    content = {name: shard(samples(count)) for name, count in (("a.tar", 3), ("b.tar", 2))}
    for count, warnings in ((2, 0), (5, 1)):
        shards = [{"url": "a.tar", "nsamples": 3}, {"url": "b.tar", "nsamples": count}]
        index = json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}).encode()
        table = await entries_of(content | {"index.json": index}, "index.json")
        assert table.num_rows == 5
        assert len(caplog.records) == warnings
    assert "1 of 2 shards have other numbers of samples than their index says" in caplog.text
    assert "has 2, not 5" in caplog.text

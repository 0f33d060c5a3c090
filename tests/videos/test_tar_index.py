"""Indexes of shards that other programs write."""

from __future__ import annotations

import json
import struct
from array import array

import pytest

from asyncfetch.errors import FormatError
from asyncfetch.media.tar import TarredFile
from asyncfetch.videos.tar_index import CountedShard, index_names, parse_index, parse_wids
from tests.videos.shards import dali_index, energon_index, samples, shard

URL = "https://host/shard.tar.idx"
DATA = shard(samples(3, video_bytes=1000), mtime=0)


def test_an_index_is_called_after_its_shard() -> None:
    assert index_names("s3://b/00.tar") == ["s3://b/00.tar.idx", "s3://b/00.idx"]
    assert index_names("s3://b/00") == ["s3://b/00.idx"]


def test_energon_says_where_samples_are() -> None:
    places = parse_index(energon_index(DATA), url=URL, size=len(DATA))
    assert isinstance(places, array)
    assert [DATA[place : place + 6] for place in places[:-1]] == [b"000000", b"000001", b"000002"]
    assert not any(DATA[places[-1] :])


def test_dali_says_where_files_are() -> None:
    files = parse_index(dali_index(DATA), url=URL, size=len(DATA))
    assert isinstance(files, list)
    assert [file.name for file in files[:4]] == ["000000.json", "000000.mp4", "000000.txt", "000001.json"]
    assert DATA[files[2].offset :][: files[2].size] == b"caption 0"


LINE = b"mp4 512 100 a.mp4"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "0 bytes are no offsets"),
        (b"123456789", "9 bytes are no offsets"),
        (struct.pack("<2Q", 0, 2**40), "no places of headers"),
        (struct.pack("<2Q", 512, 0), "no places of headers"),
        (struct.pack("<2Q", 0, 513), "no places of headers"),
        (b"v1.1 1\nmp4 512 100\n", "only v1.2 has names"),
        (b"v1.2 2\n" + LINE + b"\n", "it says '2' samples, but has 1"),
        (b"v1.2 0\n", "it has no samples"),
        (b"v1.2 1\nmp4 512 100\n", "isn't extension, offset, size and name"),
        (b"v1.2 1\nmp4 512 100 a b.mp4\n", "isn't extension, offset, size and name"),
        (b"v1.2 1\nmp4 512 100 a\\303.mp4\n", "isn't extension, offset, size and name"),
        (b"v1.2 1\nmp4 500 100 a.mp4\n", "can't lie at byte 500"),
        (b"v1.2 1\nmp4 512 1000000 a.mp4\n", "can't lie at byte 512"),
        (b"v1.2 1\n" + LINE + b" txt 1024 10 a.txt\n", "can't lie at byte 1024"),
    ],
)
def test_index_that_does_not_fit_the_shard_is_refused(index: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=f"no index of the shard.*{message}") as error:
        parse_index(index, url=URL + "?sig=secret", size=len(DATA))
    assert "secret" not in str(error.value)


def test_files_of_a_dali_index_lie_one_after_the_other() -> None:
    index = b"v1.2 1\n" + LINE + b" txt 1536 10 a.txt\n"
    assert parse_index(index, url=URL, size=4096) == [TarredFile("a.mp4", 512, 100), TarredFile("a.txt", 1536, 10)]


def wids(*shards: object, **more: object) -> bytes:
    return json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards, **more}).encode()


def test_wids_says_which_shards_there_are() -> None:
    content = wids({"url": "a b.tar", "nsamples": 3, "filesize": 9}, {"url": "s3://b/c.tar"}, {"url": "/d.tar"})
    assert parse_wids(content, url="https://h/set/index.json") == [
        CountedShard("https://h/set/a%20b.tar", 3),
        CountedShard("s3://b/c.tar", None),
        CountedShard("/d.tar", None),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "isn't the JSON of wids"),
        (b"[]", "isn't the JSON of wids"),
        (b"{}", "isn't the JSON of wids"),
        (wids({"nsamples": 3}), "isn't the JSON of wids"),
        (wids({"url": 3}), "isn't the JSON of wids"),
        (wids(), "it has no shards"),
        (wids({"url": "a.tar", "nsamples": "3"}), "it says that a shard has '3' samples"),
    ],
)
def test_file_that_is_no_wids_index_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_wids(content, url="https://h/index.json")

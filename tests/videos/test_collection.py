"""Collections wherever they lie: the same samples from each store."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import pickle
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader
from webdataset import ShardWriter

import asyncfetch as af
from asyncfetch.errors import ConfigError, DatasetError
from asyncfetch.testing import HubServer, Keys, RangeServer, S3Server
from tests.videos.conftest import reference
from tests.videos.test_tars import by_webdataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Sample = dict[str, Any]

NAMES = ["fragments.mp4", "front.mp4", "hevc-open.mp4", "old.avi", "rotated.mp4", "tail.mp4", "web.webm"]
CLIPS = af.ClipSampler(4, fps=6, per_video=2)
CAPTIONS = [{"video": name, "caption": f"about {name}", "place": place} for place, name in enumerate(NAMES)]


def read(videos: af.Videos, fetch: af.FetchConfig = af.FetchConfig(), **given: Any) -> list[Sample]:  # noqa: ANN401, B008
    config = af.StreamConfig(fetch=fetch, **given.pop("config", {}))
    options: dict[str, Any] = {"clips": CLIPS, "audio_rate": 16_000, "shuffle": False} | given
    with closing(af.Stream(videos, config=config, **options)) as stream:
        return list(stream)


def assert_equal(found: list[Sample], expected: list[Sample], *, but: tuple[str, ...] = ()) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() - set(but) == other.keys() - set(but)
        for key in one.keys() - set(but):
            same = torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key]
            assert same, (int(one["index"]), key)


@pytest.fixture(scope="module")
def expected(corpus: Path) -> list[Sample]:
    """The samples of a table in memory of local files."""
    return read(af.Videos.from_table([row | {"video": str(corpus / str(row["video"]))} for row in CAPTIONS]))


@pytest.fixture(scope="module")
def files(corpus: Path) -> dict[str, bytes]:
    """The videos, and a table of them."""
    table = "".join(json.dumps(row) + "\n" for row in CAPTIONS).encode()
    return {name: (corpus / name).read_bytes() for name in NAMES} | {"spans.jsonl": table}


@pytest.fixture(params=["path", "https", "s3", "hf", "memory"])
def store(
    request: pytest.FixtureRequest, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[str, af.FetchConfig]]:
    """The url of the files there, and how to reach it."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "HF_"))]:
        monkeypatch.delenv(name)
    with ExitStack() as stack:
        if request.param == "path":
            for name, data in files.items():
                (tmp_path / name).write_bytes(data)
            yield str(tmp_path), af.FetchConfig()
        elif request.param == "https":
            web = stack.enter_context(RangeServer({f"set/{name}": data for name, data in files.items()}))
            yield f"{web.url}/set", af.FetchConfig(ca_file=web.ca_file)
        elif request.param == "s3":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)
            server = stack.enter_context(S3Server({f"bucket/set/{name}": data for name, data in files.items()}))
            yield "s3://bucket/set", af.FetchConfig(s3=af.S3Config(endpoint_url=server.url), ca_file=server.ca_file)
        elif request.param == "hf":
            hub = stack.enter_context(HubServer(token="t", lfs_bytes=1000))
            hub.push("datasets/org/name", files)
            monkeypatch.setenv("HF_TOKEN", "t")
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            yield "hf://datasets/org/name", af.FetchConfig(ca_file=hub.ca_file)
        else:
            memory = MemoryFileSystem()
            memory.pipe({f"/corpus/{name}": data for name, data in files.items()})
            stack.callback(memory.rm, "/corpus", recursive=True)
            yield "memory://corpus", af.FetchConfig()


def test_samples_of_a_table_are_the_same_everywhere(
    store: tuple[str, af.FetchConfig], expected: list[Sample], tmp_path: Path
) -> None:
    url, fetch = store
    videos = af.Videos.from_table(f"{url}/spans.jsonl")
    assert_equal(read(videos, fetch), expected)
    disk = {"config": {"disk_cache_dir": str(tmp_path / "disk")}}
    for _ in range(2):
        assert_equal(read(videos, fetch, **disk), expected)


# Tars, beside webdataset.


@pytest.fixture(scope="module")
def shards(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards as webdataset's ShardWriter writes them; not each sample has each of the other files."""
    root = tmp_path_factory.mktemp("shards")
    with ShardWriter(str(root / "%06d.tar"), maxcount=3, verbose=0) as writer:
        for place, name in enumerate(NAMES):
            beside: Sample = {"txt": CAPTIONS[place]["caption"], "json": CAPTIONS[place], "meta.pyd": b"\x80" * place}
            beside["cls"] = place
            if place == 2:
                del beside["txt"]
            writer.write({"__key__": f"{place:04d}", name.rpartition(".")[2]: files[name], **beside})
    return root


@pytest.mark.parametrize("served", [False, True])
def test_samples_of_shards_are_those_of_webdataset(shards: Path, expected: list[Sample], served: bool) -> None:
    with ExitStack() as stack:
        url, fetch = str(shards), af.FetchConfig()
        if served:
            server = stack.enter_context(RangeServer(shards))
            url, fetch = server.url, af.FetchConfig(ca_file=server.ca_file)
        found = read(af.Videos.from_tars(f"{url}/{{000000..000002}}.tar"), fetch)
    theirs = by_webdataset({path.name: path.read_bytes() for path in sorted(shards.iterdir())})
    assert len(found) == 2 * len(theirs) == 2 * len(NAMES)
    for sample in found:
        one = theirs[int(sample["index"])]
        assert sample["__key__"] == one["__key__"]
        assert sample["txt"] == (one["txt"].decode() if "txt" in one else None)
        assert sample["json"] == json.loads(one["json"])
        assert sample["cls"] == one["cls"].decode()
        assert sample["meta.pyd"] == one["meta.pyd"]
    beside = {"txt", "json", "cls", "meta.pyd", "__key__", "caption", "place"}
    assert_equal(found, expected, but=tuple(beside))


def test_features_choose_what_comes_along(shards: Path) -> None:
    bare = {"video", "seconds", "index", "clip_index"}
    for features in ([], ["txt"], ["cls", "__key__"]):
        found = read(af.Videos.from_tars(f"{shards}/*.tar"), features=features, audio_rate=None)
        assert found[0].keys() == bare | set(features)
    with pytest.raises(ConfigError, match="has no feature 'text'; it has __key__"):
        read(af.Videos.from_tars(f"{shards}/*.tar"), features=["text"])


# What is compressed.


@pytest.fixture(scope="module")
def packed(shards: Path, tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> dict[str, bytes]:
    """Shards that webdataset and other programs compress, and Parquet as pyarrow writes it by default."""
    root = tmp_path_factory.mktemp("packed")
    tar = (shards / "000000.tar").read_bytes()
    samples = [sample for sample in by_webdataset({"a": tar}) if "__url__" not in sample]
    with ShardWriter(str(root / "%d.tar.gz"), compress=True, verbose=0) as writer:
        for sample in samples:
            writer.write(sample)
    zstd = pa.BufferOutputStream()
    with pa.CompressedOutputStream(zstd, "zstd") as stream:
        stream.write(tar)
    rows = [{"bytes": files[name], "path": name} for name in NAMES[:3]]
    layouts: dict[str, dict[str, Any]] = {"a": {}, "b": {"row_group_size": 2, "compression": "zstd"}}
    for name, options in layouts.items():
        pq.write_table(pa.table({"video": rows, "caption": NAMES[:3]}), root / f"{name}.parquet", **options)
    made = {path.name: path.read_bytes() for path in root.iterdir()}
    return made | {"0.tar.xz": lzma.compress(tar), "0.tar.bz2": bz2.compress(tar), "0.tar.zst": bytes(zstd.getvalue())}


@pytest.mark.parametrize("name", ["0.tar.gz", "0.tar.xz", "0.tar.bz2", "0.tar.zst", "a.parquet", "b.parquet"])
def test_compressed_collections_give_the_same_samples(
    packed: dict[str, bytes],
    shards: Path,
    expected: list[Sample],
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = af.Videos.from_tars if "tar" in name else af.Videos.from_parquet
    with RangeServer(packed) as server:
        videos, fetch = kind(f"{server.url}/{name}"), af.FetchConfig(ca_file=server.ca_file, hedge=None)
        found = read(videos, fetch)
        if "tar" in name:
            assert_equal(found, read(af.Videos.from_tars(shards / "000000.tar")))
        else:
            assert_equal(found, expected[:6], but=("caption", "place"))
        parts = 2 if name == "b.parquet" else 1
        messages = [message for message in caplog.messages if "are read whole and unpacked for a clip" in message]
        assert len(messages) == parts
        assert messages[0].startswith(f"{server.url}/{name} is compressed (")
        assert server.statistics().bytes_sent < len(packed[name]) + 2 * 64 * 1024
        disk = {"config": {"disk_cache_dir": str(tmp_path / "disk")}}
        assert_equal(read(videos, fetch, **disk), found)
        sent = server.statistics().bytes_sent
        assert_equal(read(videos, fetch, **disk), found)
        assert server.statistics().bytes_sent < sent + 100


def test_the_report_says_what_compressed_shards_cost(packed: dict[str, bytes]) -> None:
    with RangeServer(packed) as server:
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=server.ca_file))
        with closing(af.Stream(af.Videos.from_tars(f"{server.url}/0.tar.gz"), clips=CLIPS, config=config)) as stream:
            assert len(list(stream)) == 6
            assert "1 clips needed all of a file that can't be cut" in str(stream.report())
            statistics = stream.statistics()
    assert statistics is not None
    episodes = statistics.episodes
    assert (episodes.whole, episodes.whole_bytes) == (1, len(packed["0.tar.gz"]))


def test_workers_read_compressed_shards_as_others(packed: dict[str, bytes], shards: Path) -> None:
    def batches(url: str | Path, ca_file: str | None = None) -> list[tuple[list[int], torch.Tensor]]:
        config = af.StreamConfig(fetch=af.FetchConfig(ca_file=ca_file, hedge=None))
        stream = af.Stream(af.Videos.from_tars(url), clips=CLIPS, size=(32, 48), config=config)
        with closing(stream):
            loader = DataLoader(af.torch.StreamDataset(stream, batch_size=2), batch_size=None, num_workers=2)
            return [(batch["index"].tolist(), batch["video"].clone()) for batch in loader]

    with RangeServer(packed) as server:
        found = batches(f"{server.url}/0.tar.gz", server.ca_file)
    for one, other in zip(found, batches(shards / "000000.tar"), strict=True):
        assert one[0] == other[0]
        assert one[1].equal(other[1])


# Folders.


def test_samples_of_a_folder_are_those_of_its_files(corpus: Path, expected: list[Sample], tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).symlink_to(corpus / name)
    (tmp_path / "tail.txt").write_text("the last one\n")
    found = read(af.Videos.from_folder(tmp_path))
    assert_equal(found, expected, but=("caption", "place", "txt", "file_name"))
    assert [sample["txt"] for sample in found if sample["txt"] is not None] == ["the last one\n"] * 2


# The collection as a value.


def test_a_collection_pickles_and_reads_the_same(corpus: Path, expected: list[Sample]) -> None:
    rows = [row | {"video": str(corpus / str(row["video"]))} for row in CAPTIONS]
    stream = af.Stream(af.Videos.from_table(rows), clips=CLIPS, audio_rate=16_000, shuffle=False)
    with closing(pickle.loads(pickle.dumps(stream))) as again:
        assert_equal(list(again), expected)


def test_a_collection_without_videos_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no video")
    for videos in (
        af.Videos.from_table(pa.table({"video": pa.array([], pa.string())})),
        af.Videos.from_folder(tmp_path),
    ):
        with pytest.raises((ConfigError, DatasetError), match="no video"):
            read(videos)
    tables: list[Any] = [[], pa.table({"url": pa.array([], pa.string())}), pd.DataFrame()]
    for table in tables:
        message = rf"from_table\(<{type(table).__name__}>\): the collection has no video: the table has no rows"
        with pytest.raises(ConfigError, match=message):
            read(af.Videos.from_table(table))


def test_spans_are_read_as_files_cut_there(corpus: Path) -> None:
    """Windows lie within them, by the frames that are shown there."""
    table = [
        {"video": str(corpus / "front.mp4"), "begin": begin, "end": end}
        for begin, end in (("00:00:01.5", "00:00:03"), (None, "1"), ("4.5", None))
    ]
    videos = af.Videos.from_table(table, start="begin", stop="end")
    clips = af.ClipSampler(10, pick="all")
    found = read(videos, clips=clips, audio_rate=None)
    file = reference(corpus / "front.mp4")
    for entry, (begin, end) in enumerate(((1.5, 3.0), (0.0, 1.0), (4.5, 9.0))):
        inside = (file.seconds >= begin) & (file.seconds < end)
        seconds = torch.cat([sample["seconds"] for sample in found if sample["index"] == entry])
        assert sorted(set(seconds.tolist())) == file.seconds[inside].tolist()
    assert "begin" not in found[0]

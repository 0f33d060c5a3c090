"""Indexes of collections: what is measured, how they are written, and how they are opened again."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from asyncfetch.config import FetchConfig, RetryConfig, StreamConfig
from asyncfetch.errors import ConfigError, FetchError
from asyncfetch.streams import Stream
from asyncfetch.testing import Fault, RangeServer
from asyncfetch.videos import ClipSampler, Videos
from asyncfetch.videos.index_file import IndexReport, write_index
from tests.videos.movies import movie

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing import ServedRequest

ALL = ClipSampler(2, pick="all")


@pytest.fixture(scope="module")
def movies() -> dict[str, bytes]:
    return {
        "a.mp4": movie(12),
        "b.mp4": movie(8, fps=4, size=(96, 64), group=2, audio=True, movflags="faststart"),
        "c.mp4": movie(6, movflags="frag_keyframe+empty_moov"),
        "d.webm": movie(5, form="webm", codec="libvpx-vp9"),
        "e.mp4": b"no video at all" * 100,
    }


@pytest.fixture
def folder(tmp_path: Path, movies: dict[str, bytes]) -> Path:
    (tmp_path / "folder").mkdir()
    for name, data in movies.items():
        (tmp_path / "folder" / name).write_bytes(data)
    (tmp_path / "folder" / "a.txt").write_text("the first")
    return tmp_path / "folder"


def rows(path: Path) -> dict[str, list[Any]]:
    return pq.read_table(path).to_pydict()


def samples(videos: Videos, clips: ClipSampler = ALL, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    with closing(Stream(videos, clips=clips, shuffle=False, **options)) as stream:
        return list(stream)


def written(videos: Videos, path: Path, **options: Any) -> IndexReport:  # noqa: ANN401
    return anyio.run(partial(write_index, videos, path, **options))


def of_index(tmp_path: Path, videos: Videos, server: RangeServer | None = None) -> tuple[Videos, IndexReport]:
    config = FetchConfig() if server is None else FetchConfig(ca_file=server.ca_file)
    report = written(videos, tmp_path / "videos.parquet", config=config)
    return Videos.from_table(tmp_path / "videos.parquet"), report


def test_index_measures_every_video(folder: Path) -> None:
    report = written(Videos.from_folder(folder), folder / "videos.parquet")
    found = rows(folder / "videos.parquet")
    assert found["video"] == ["a.mp4", "b.mp4", "c.mp4", "d.webm", "e.mp4"]
    assert found["frames"] == [12, 8, 6, 5, None]
    assert found["seconds"] == [1.5, 2.0, 0.75, pytest.approx(0.625, abs=2e-3), None]
    assert found["fps"][:3] == [8, 4, 8]
    assert found["width"] == [64, 96, 64, 64, None]
    assert found["height"] == [48, 64, 48, 48, None]
    assert found["codec"] == ["h264", "h264", "h264", "vp9", None]
    assert found["groups"] == [3, 4, 2, None, None]
    assert found["has_audio"] == [False, True, False, False, None]
    assert found["size"] == [*(os.path.getsize(folder / name) for name in found["video"][:4]), None]
    assert found["error"][:4] == [None] * 4
    assert "e.mp4" in found["error"][4]
    for name, start, size in zip(found["video"][:3], found["moov_start"], found["moov_bytes"], strict=False):
        box = (folder / name).read_bytes()[start : start + size]
        assert (int.from_bytes(box[:4], "big"), box[4:8]) == (size, b"moov")
    assert (report.entries, report.videos, report.resumed) == (5, 5, 0)
    assert report.bytes == sum(found["size"][:4])
    [(entry, url, reason)] = report.broken
    assert (entry, url, reason) == (4, str(folder / "e.mp4"), found["error"][4])
    assert sorted(path.name for path in folder.iterdir()) == [
        *("a.mp4", "a.txt", "b.mp4", "c.mp4", "d.webm", "e.mp4", "videos.parquet")
    ]


def test_an_index_moves_with_its_videos(folder: Path, tmp_path: Path) -> None:
    (folder / "e.mp4").unlink()
    (folder / "b.mp4").rename(folder / "b 1%.mp4")
    written(Videos.from_folder(folder), folder / "videos.parquet")
    there = tmp_path / "there"
    shutil.move(folder, there)
    moved = anyio.run(Videos.from_table(there / "videos.parquet").entries)
    assert moved["video"].to_pylist() == [str(there / name) for name in ("a.mp4", "b 1%.mp4", "c.mp4", "d.webm")]
    assert moved["txt"][0].as_py()["url"] == str(there / "a.txt")
    with RangeServer(there) as server:
        read = Videos.from_table(f"{server.url}/videos.parquet").entries
        served = anyio.run(read, FetchConfig(ca_file=server.ca_file))
    assert served["video"].to_pylist()[1] == f"{server.url}/b%201%25.mp4"
    written(Videos.from_folder(there), tmp_path / "videos.parquet")
    assert rows(tmp_path / "videos.parquet")["video"][0] == "there/a.mp4"
    (tmp_path / "elsewhere").mkdir()
    written(Videos.from_folder(there), tmp_path / "elsewhere" / "videos.parquet")
    assert rows(tmp_path / "elsewhere" / "videos.parquet")["video"][0] == str(there / "a.mp4")


def test_samples_of_an_index_are_those_of_the_collection(folder: Path, tmp_path: Path) -> None:
    (folder / "e.mp4").unlink()
    videos = Videos.from_folder(folder)
    index, _ = of_index(tmp_path, videos)
    clips = ClipSampler(2, per_video=2)  # of whole videos, too
    for one, other in zip(samples(videos, clips), samples(index, clips), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert (value == other[key]).all() if hasattr(value, "all") else value == other[key], key
    state = Stream(videos, clips=clips).state_dict()
    Stream(index, clips=clips).load_state_dict(state)


def test_rows_of_an_index_are_an_index(folder: Path) -> None:
    written(Videos.from_folder(folder), folder / "videos.parquet")
    table = pq.read_table(folder / "videos.parquet")
    pq.write_table(table.filter(pc.field("height") >= 64), folder / "high.parquet")
    found = samples(Videos.from_table(folder / "high.parquet"))
    assert {each["file_name"] for each in found} == {"b.mp4"}
    assert len(found) == 4
    assert "height" not in found[0]


def test_an_index_says_how_many_clips_and_where_moov_lies(tmp_path: Path) -> None:
    long = movie(64)
    content = {"/a.mp4": long, "/b.mp4": long, "/c.mp4": long}
    with RangeServer(content) as server:
        table = pa.table({"video": [f"{server.url}{name}" for name in content]})
        index, _ = of_index(tmp_path, Videos.from_table(table), server)
        asked = len(server.requests)
        config = StreamConfig(fetch=FetchConfig(ca_file=server.ca_file))
        with closing(Stream(index, clips=ALL, shuffle=False, episodes=[1], config=config)) as stream:
            first = next(iter(stream))
        requests = server.requests[asked:]
    assert first["index"] == 1
    assert {request.path for request in requests} == {"/b.mp4"}  # no other is read to count clips
    start = rows(tmp_path / "videos.parquet")["moov_start"][1]
    assert (requests[0].start, requests[0].stop) == (start, len(long))


def test_spans_of_a_video_are_measured_with_it_at_once(tmp_path: Path) -> None:
    data = movie(16)
    content = {"/a.mp4": data}
    spans = [(None, None), (0.0, 1.0), (0.5, None), (1.0, 9.0), (5.0, 6.0)]
    with RangeServer(content) as server:
        table = pa.table({
            "video": [f"{server.url}/a.mp4"] * len(spans),
            "t0": [start for start, _ in spans],
            "t1": [stop for _, stop in spans],
            "frames": ["mine"] * len(spans),
        })
        videos = Videos.from_table(table, start="t0", stop="t1")
        index, report = of_index(tmp_path, videos, server)
        assert (report.entries, report.videos) == (5, 1)
        assert len(server.requests) <= 2
        found = rows(tmp_path / "videos.parquet")
        assert found["frames"] == ["mine"] * 5
        assert found["measured_frames"] == [16] * 5
        assert found["span_frames"] == [16, 8, 12, 8, 0]
        assert found["span_seconds"] == [2.0, 1.0, 1.5, 1.0, 0.0]
        config = StreamConfig(fetch=FetchConfig(ca_file=server.ca_file))
        of_table, of_file = (samples(each, config=config) for each in (videos, index))
    assert [(each["index"], each["clip_index"]) for each in of_file] == [
        (each["index"], each["clip_index"]) for each in of_table
    ]
    assert {each["frames"] for each in of_file} == {"mine"}
    assert "measured_frames" not in of_file[0]


def test_a_broken_video_of_an_index_fails_where_it_is_read(folder: Path, tmp_path: Path) -> None:
    index, _ = of_index(tmp_path, Videos.from_folder(folder))
    with pytest.raises(Exception, match=r"e\.mp4"):
        samples(index, features=[])
    whole = samples(index, features=[], config=StreamConfig(on_error="skip"))
    assert {int(each["index"]) for each in whole} == {0, 1, 2, 3}


def test_a_video_that_changed_since_is_read_right(folder: Path, tmp_path: Path) -> None:
    for name in ("c.mp4", "d.webm", "e.mp4"):
        (folder / name).unlink()
    index, _ = of_index(tmp_path, Videos.from_folder(folder))
    (folder / "a.mp4").write_bytes(movie(40, size=(128, 96)))
    (folder / "b.mp4").write_bytes(movie(4))
    found = samples(index, ClipSampler(2, per_video=1), features=[])
    assert [each["video"].shape[2:] for each in found] == [(96, 128), (48, 64)]


def test_videos_in_a_tar_have_their_places(tmp_path: Path, movies: dict[str, bytes]) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for name in ("a.mp4", "b.mp4", "d.webm"):
            for file, data in ((name, movies[name]), (f"{name[0]}.json", json.dumps({"of": name}).encode())):
                info = tarfile.TarInfo(file)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    videos = Videos.from_tars(tmp_path / "shard.tar")
    index, report = of_index(tmp_path, videos)
    assert report.videos == 3
    found = rows(tmp_path / "videos.parquet")
    assert found["video"] == ["shard.tar"] * 3
    assert found["frames"] == [12, 8, 5]
    assert all(found["offset"])
    clips = ClipSampler(2)
    assert [each["json"] for each in samples(index, clips)] == [each["json"] for each in samples(videos, clips)]


def test_an_index_spares_opening_compressed_files(tmp_path: Path, movies: dict[str, bytes]) -> None:
    with tarfile.open(tmp_path / "shard.tar.gz", "w:gz") as archive:
        for name in ("a.mp4", "b.mp4", "d.webm"):
            info = tarfile.TarInfo(name)
            info.size = len(movies[name])
            archive.addfile(info, io.BytesIO(movies[name]))
    rows_of = [{"bytes": movies[name], "path": name} for name in ("a.mp4", "d.webm")]
    pq.write_table(pa.table({"video": rows_of}), tmp_path / "t.parquet")
    for videos in (Videos.from_tars(tmp_path / "shard.tar.gz"), Videos.from_parquet(tmp_path / "t.parquet")):
        index, report = of_index(tmp_path, videos)
        assert not report.broken
        assert rows(tmp_path / "videos.parquet")["frames"] in ([12, 8, 5], [12, 5])
        for served in (False, True):
            with RangeServer(tmp_path) as server:
                config = StreamConfig(fetch=FetchConfig(ca_file=server.ca_file))
                found = Videos.from_table(f"{server.url}/videos.parquet") if served else index
                for one, other in zip(samples(found, config=config), samples(videos), strict=True):
                    assert one["video"].equal(other["video"])


def test_a_failing_host_ends_it_and_the_next_run_goes_on(tmp_path: Path) -> None:
    content = {f"/{number:02}.mp4": movie(2 + number) for number in range(10)}
    is_down = True

    def fault(request: ServedRequest) -> Fault | None:
        return Fault.status(503) if is_down and request.path >= "/07.mp4" else None

    with RangeServer(content, fault=fault) as server:
        table = pa.table({"video": [f"{server.url}{name}" for name in content]})
        config = FetchConfig(ca_file=server.ca_file, retry=RetryConfig(attempts=1), max_requests_per_host=1)
        seen: list[tuple[str, int, int]] = []
        with pytest.raises(FetchError, match="503"):
            written(
                Videos.from_table(table),
                tmp_path / "videos.parquet",
                config=config,
                on_progress=lambda *now: seen.append(now),
            )
        kept = (tmp_path / "videos.parquet.part").read_bytes().splitlines()
        measured = {json.loads(line)[0] for line in kept[1:]}
        assert len(measured) >= max(seen)[1]
        with open(tmp_path / "videos.parquet.part", "ab") as file:
            file.write(b'[9, 100, "cut o')
        is_down = False
        asked = len(server.requests)
        report = written(Videos.from_table(table), tmp_path / "videos.parquet", config=config)
        read = {request.path for request in server.requests[asked:]}
    assert report.resumed == len(measured)
    assert read == {name for number, name in enumerate(content) if number not in measured}
    assert rows(tmp_path / "videos.parquet")["frames"] == list(range(2, 12))
    assert os.listdir(tmp_path) == ["videos.parquet"]


def test_shards_that_were_read_are_not_read_again(tmp_path: Path, movies: dict[str, bytes]) -> None:
    content = {}
    for name in ("0.tar", "1.tar"):
        with tarfile.open(tmp_path / name, "w") as archive:
            info = tarfile.TarInfo("a.mp4")
            info.size = len(movies["a.mp4"])
            archive.addfile(info, io.BytesIO(movies["a.mp4"]))
        content[f"/{name}"] = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()

    def end(what: str, done: int, total: int) -> None:
        if (what, done, total) == ("shards", 1, 2):
            raise KeyError("ended")

    with RangeServer(
        content, fault=lambda request: Fault.stall() if is_first and "1.tar" in request.path else None
    ) as server:
        videos = Videos.from_tars([f"{server.url}{name}" for name in content])
        config = FetchConfig(ca_file=server.ca_file)
        is_first = True
        with pytest.raises(KeyError, match="ended"):
            written(videos, tmp_path / "videos.parquet", config=config, on_progress=end)
        assert os.listdir(tmp_path) == ["videos.parquet.part.headers"]
        is_first = False
        asked = len(server.requests)
        assert written(videos, tmp_path / "videos.parquet", config=config).videos == 2
        read = {request.path for request in server.requests[asked:] if request.start == 0 and request.stop != 1}
    assert read == {"/1.tar"}  # of the other, only whether it is the same
    assert os.listdir(tmp_path) == ["videos.parquet"]


def test_urls_with_secrets_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RangeServer({"/a.mp4": movie(4)}) as server:
        table = pa.table({"video": [f"{server.url}/a.mp4?X-Amz-Signature=0123abcd"]})
        of_index(tmp_path, Videos.from_table(table), server)
    assert "passwords or signatures" in caplog.text
    assert "0123abcd" not in caplog.text


def test_a_changed_collection_is_measured_anew(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = pa.table({"video": [str(folder / "a.mp4")]})
    written(Videos.from_table(table), tmp_path / "videos.parquet")
    head = {"asyncfetch.index": 1, "of": "another", "fingerprint": ""}
    (tmp_path / "videos.parquet.part").write_text(json.dumps(head) + "\n" + json.dumps([0, *[1] * 11, []]) + "\n")
    report = written(Videos.from_table(table), tmp_path / "videos.parquet")
    assert report.resumed == 0
    assert "measured anew" in caplog.text
    assert rows(tmp_path / "videos.parquet")["frames"] == [12]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("s3://bucket/videos.parquet", "local path"),
        ("nowhere/videos.parquet", "no directory"),
        ("videos.csv", r"\.parquet"),
        ("taken.parquet", "no index"),
    ],
)
def test_index_path_that_cannot_be_written_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, match: str
) -> None:
    monkeypatch.chdir(folder)
    pq.write_table(pa.table({"video": ["a.mp4"]}), "taken.parquet")
    with pytest.raises(ConfigError, match=match):
        written(Videos.from_folder(folder), name)  # type: ignore[arg-type]

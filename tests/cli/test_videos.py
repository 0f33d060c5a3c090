"""Commands on collections of videos, as a shell sees them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import av
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from asyncfetch.cli.app import app
from asyncfetch.errors import ConfigError, DatasetError, NotFound
from asyncfetch.testing import Fault, HubServer, Keys, RangeServer, S3Server, write_dataset
from tests.videos.movies import movie

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from asyncfetch.testing import ServedRequest


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def told(*arguments: object, code: int = 0) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def movies() -> dict[str, bytes]:
    return {"a.mp4": movie(12), "b.mp4": movie(8, fps=4, size=(96, 64), audio=True)}


@pytest.fixture
def folder(tmp_path: Path, movies: dict[str, bytes]) -> Path:
    (tmp_path / "folder").mkdir()
    for name, data in movies.items():
        (tmp_path / "folder" / name).write_bytes(data)
    return tmp_path / "folder"


@pytest.fixture
def shard(tmp_path: Path, movies: dict[str, bytes]) -> Path:
    path = tmp_path / "shards" / "0.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as archive:
        for name, data in movies.items():
            for file, content in ((name, data), (f"{name[0]}.txt", b"caption")):
                info = tarfile.TarInfo(file)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def spans(folder: Path) -> Path:
    path = folder.parent / "spans.csv"
    path.write_text("url,t0,t1,caption\nfolder/a.mp4,0,1,first\nfolder/a.mp4,1,,second\nfolder/b.mp4,,,third\n")
    return path


SPANS = ("--video", "url", "--start", "t0", "--stop", "t1")


def test_an_index_is_written_of_every_kind(folder: Path, shard: Path, spans: Path, tmp_path: Path) -> None:
    for source, options, entries in ((folder, (), 2), (shard, (), 2), (shard.parent, (), 2), (spans, SPANS, 3)):
        out = tmp_path / "videos.parquet"
        done = run("index", source, "-o", out, *options)
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith(f"{out}: {entries} entries of 2 videos, ")
        assert done.stderr.splitlines()[0] == "videos: 0 %"
        assert done.stderr.splitlines()[-1] == "videos: 100 %, 2/2"
        assert pq.read_table(out)["frames"].to_pylist()[-1] == 8
        assert told("info", out)["looked_at"] == 2


def test_broken_videos_are_named_once_it_is_written(folder: Path, tmp_path: Path) -> None:
    (folder / "c.mp4").write_bytes(b"nothing" * 9)
    done = run("index", folder, "-o", tmp_path / "videos.parquet")
    assert done.exit_code == 0, done.output
    assert "\n1 video can't be read:\nentry 2: " in done.stdout
    assert "c.mp4" in done.stdout.splitlines()[-1]


def test_info_shows_what_a_collection_holds(
    folder: Path, shard: Path, spans: Path, movies: dict[str, bytes], tmp_path: Path
) -> None:
    of_folder = told("info", folder)
    assert (of_folder["entries"], of_folder["videos"], of_folder["files"]) == (2, 2, 2)
    assert of_folder["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert of_folder["hours"] == pytest.approx(3.5 / 3600)
    assert sorted((form["width"], form["fps"], form["with_audio"]) for form in of_folder["forms"]) == [
        (64, 8, 0),
        (96, 4, 1),
    ]
    of_shard = told("info", shard)
    assert (of_shard["files"], of_shard["members"]) == (1, ["txt"])
    pq.write_table(pa.table({"video": list(movies.values())}), tmp_path / "t.parquet")  # compressed
    of_rows = told("info", tmp_path / "t.parquet")
    assert (of_rows["entries"], of_rows["videos"], of_rows["files"]) == (2, 2, 1)
    of_spans = told("info", spans, *SPANS)
    assert (of_spans["entries"], of_spans["videos"], of_spans["columns"]) == (3, 2, {"caption": "string"})
    text = run("info", spans, *SPANS).stdout
    assert "3 entries of 2 videos in 2 files" in text
    assert "  64x48 h264, 8 fps: 1 video, 1.5 s\n" in text
    assert "  96x64 h264, 4 fps: 1 video, 2.0 s, 1 with audio\n" in text
    assert "  caption: string\n" in text


def test_check_finds_broken_videos(folder: Path, spans: Path) -> None:
    for options in ([], ["--decode"]):
        done = run("check", folder, *options)
        assert (done.exit_code, done.stdout) == (0, "nothing found\n"), done.output
    with spans.open("a") as file:
        file.write("folder/a.mp4,70,80,late\nfolder/none.mp4,,,missing\nfolder/c.mp4,,,bad\n")
    data = bytearray(movie(6))
    start = data.index(b"mdat") + 4
    length = int.from_bytes(data[start - 8 : start - 4], "big") - 8
    data[start : start + length] = bytes(length)
    (folder / "c.mp4").write_bytes(data)
    found = told("check", spans, *SPANS, "--decode", code=1)["findings"]
    assert [(one["what"], one["entry"]) for one in found] == [("empty span", 3), ("NotFound", 4), ("bad data", 5)]
    assert "[70, 80)" in found[0]["details"]
    assert "c.mp4" in found[2]["details"]
    text = run("check", spans, *SPANS)
    assert text.exit_code == 1
    assert text.stdout.startswith("empty span: entry 3: no frame of 1.5 s")
    assert text.stdout.endswith("2 findings\n")


def test_a_damaged_shard_is_named_and_left_out(shard: Path, tmp_path: Path) -> None:
    (shard.parent / "1.tar").write_bytes(b"no tar" * 300)
    [found] = told("check", shard.parent, code=1)["findings"]
    assert (found["what"], found["entry"]) == ("FormatError", None)
    assert "1.tar" in found["details"]
    done = run("index", shard.parent, "-o", tmp_path / "videos.parquet")
    assert done.exit_code == 0, done.output
    assert "a shard is left out: " in done.stdout
    assert "shards: 100 %, 2/2" in done.stderr
    assert pq.read_table(tmp_path / "videos.parquet").num_rows == 2


def test_a_contact_sheet_of_an_entry(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    done = run("frames", folder, "--episode", 1, "--count", 3, "--out", out)
    assert done.exit_code == 0, done.output
    with av.open(out) as picture:
        pixels = next(picture.decode(video=0)).to_ndarray(format="rgb24")
    assert pixels.shape == (64, 3 * 96, 3)
    levels = [int(pixels[:, 96 * place : 96 * (place + 1)].mean()) for place in range(3)]
    assert levels == sorted(levels)
    assert levels[2] - levels[0] > 150  # from the first to the last


def test_entries_are_listed(shard: Path, spans: Path, movies: dict[str, bytes]) -> None:
    lines = run("ls", shard).stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(f"{shard} at 512 with txt")
    [first, _] = told("ls", shard)["entries"]
    assert (first["offset"], first["bytes"], first["beside"]["txt"]["bytes"]) == (512, len(movies["a.mp4"]), 7)
    listed = [(one["start"], one["stop"]) for one in told("ls", spans, *SPANS)["entries"]]
    assert listed == [(0, 1), (1, None), (None, None)]
    assert run("ls", spans, *SPANS).stdout.splitlines()[1].endswith("a.mp4 [1, its end) s")
    assert len(run("ls", shard.parent).stdout.splitlines()) == 1  # a directory is one
    assert len(run("ls", shard.parent, "--kind", "tars").stdout.splitlines()) == 2


def test_folder_without_dataset_or_videos_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"a")
    for command in ("info", "check"):
        done = run(command, tmp_path)
        assert isinstance(done.exception, DatasetError)
        assert "neither a LeRobot dataset nor a collection of videos" in str(done.exception)
        assert "--kind" in str(done.exception)
        assert isinstance(run(command, tmp_path / "nowhere").exception, NotFound)
    with RangeServer(tmp_path) as server:
        done = run("info", server.url, "--ca-file", server.ca_file)
    assert isinstance(done.exception, DatasetError)
    assert "can't be listed" in str(done.exception)


def test_stores_are_looked_at(
    shard: Path, movies: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server({f"robots/clips/{name}": data for name, data in movies.items()}) as s3, HubServer() as hub:
        hub.push("datasets/org/name", {"train/0.tar": shard.read_bytes()})
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for source, ca_file, members in (
            ("s3://robots/clips", s3.ca_file, []),
            ("hf://datasets/org/name", hub.ca_file, ["txt"]),
            ("hf://datasets/org/name/**/*.tar", hub.ca_file, ["txt"]),
        ):
            found = told("info", source, "--ca-file", ca_file)
            assert (found["videos"], found["members"]) == (2, members)
            done = run("index", source, "-o", tmp_path / "videos.parquet", "--ca-file", ca_file)
            assert done.exit_code == 0, done.output
            urls = pq.read_table(tmp_path / "videos.parquet")["video"].to_pylist()
            assert all(str(url).startswith(source.partition("/**")[0]) for url in urls)


def test_the_kind_can_be_said(folder: Path, tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "one", episodes=(4,), codec="h264", width=96, height=64)
    assert told("info", truth.root)["version"].startswith("v3")
    assert told("info", truth.root, "--kind", "folder")["entries"] == len(truth.cameras)
    assert isinstance(run("info", folder, "--kind", "lerobot").exception, NotFound)
    for options in (["--start", "t0"], ["--video", "mp4"]):
        done = run("info", folder, *options)
        assert isinstance(done.exception, ConfigError)
        assert "folder" in str(done.exception)
    done = run("index", truth.root, "-o", tmp_path / "videos.parquet")
    assert "LeRobot dataset" in str(done.exception)


@pytest.mark.usefixtures("programs_are_warm")
def test_an_index_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A file that never comes keeps the first run from its end; what it has said to be done is not read again."""
    content = {f"/{number}.mp4": movie(2 + number) for number in range(10)}
    stuck = True

    def fault(request: ServedRequest) -> Fault | None:
        return Fault.stall() if stuck and request.path == "/3.mp4" else None

    out = tmp_path / "videos.parquet"
    with RangeServer(content, fault=fault) as server:
        pq.write_table(pa.table({"video": [f"{server.url}{name}" for name in content]}), tmp_path / "urls.parquet")
        command = ["index", tmp_path / "urls.parquet", "-o", out, "--ca-file", server.ca_file]
        program = [sys.executable, "-m", "asyncfetch", *map(str, command)]
        first = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
        assert first.stderr is not None
        with first, first.stderr:
            try:
                assert any(line.startswith("videos: 90 %") for line in first.stderr)
            finally:
                first.kill()
        assert not out.exists()
        stuck = False
        asked = len(server.requests)
        done = run(*command)
        read = {request.path for request in server.requests[asked:]}
    assert done.exit_code == 0, done.output
    assert ", 9 measured earlier\n" in done.stdout
    assert read == {"/3.mp4"}
    assert pq.read_table(out)["frames"].to_pylist() == list(range(2, 12))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["urls.parquet", "videos.parquet"]


def test_parquet_is_a_table_of_urls_or_has_videos_in_it(folder: Path, tmp_path: Path, movies: dict[str, bytes]) -> None:
    pq.write_table(pa.table({"video": ["folder/a.mp4"]}), tmp_path / "t.parquet")
    assert told("info", tmp_path / "t.parquet")["bytes"] == len(movies["a.mp4"])
    (tmp_path / "data").mkdir()
    table = pa.table({"clip": list(movies.values()), "label": [1, 2]})
    pq.write_table(table, tmp_path / "data" / "0.parquet", use_dictionary=False, compression="none")
    for source in (tmp_path / "data", tmp_path / "data" / "0.parquet", tmp_path / "data" / "*.parquet"):
        found = told("info", source, "--video", "clip")
        assert (found["videos"], found["files"], found["columns"]) == (2, 1, {"label": "int64"})
        assert found["bytes"] == sum(map(len, movies.values()))
    done = run("info", tmp_path / "data")
    assert isinstance(done.exception, ConfigError)
    assert "clip" in str(done.exception)

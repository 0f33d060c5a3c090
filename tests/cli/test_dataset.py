"""``asyncfetch check``, ``frames``, ``ls``, ``cp`` and ``env`` as a shell sees them."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from asyncfetch.cli.app import app
from asyncfetch.errors import FetchError
from asyncfetch.testing import Fault, HubServer, Keys, Quirks, RangeServer, S3Server, write_dataset
from tests.lerobot.serving import retimed, variable, write_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray
    from typer.testing import Result

    from asyncfetch.testing import DatasetTruth, ServedRequest


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def truth(tmp_path: Path) -> DatasetTruth:
    return write_dataset(tmp_path / "one", episodes=(4, 5, 6), codec="h264", width=96, height=64)


def test_the_version() -> None:
    assert run("--version").output.startswith("asyncfetch ")


def test_a_whole_dataset_passes(truth: DatasetTruth) -> None:
    for options in ([], ["--deep"]):
        done = run("check", truth.root, *options)
        assert (done.exit_code, done.stdout) == (0, "nothing found\n"), done.output


def rewrite(truth: DatasetTruth, change: Callable[[pa.Table], pa.Table]) -> None:
    [rows] = (truth.root / "data").rglob("*.parquet")
    pq.write_table(change(pq.read_table(rows)), rows)


def with_column(table: pa.Table, name: str, values: NDArray[Any]) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


def findings(truth: DatasetTruth, *options: str) -> dict[tuple[str, int | None], str]:
    done = run("check", truth.root, "--json", *options)
    assert done.exit_code == 1, done.output
    return {(one["what"], one["episode"]): one["details"] for one in json.loads(done.stdout)["findings"]}


def test_check_finds_missing_frames_and_wrong_times_by_episode(truth: DatasetTruth) -> None:
    (truth.root / "meta" / "stats.json").unlink()

    def late(table: pa.Table) -> pa.Table:
        seconds = table["timestamp"].to_numpy().copy()
        seconds[5] += 0.01
        return with_column(table, "timestamp", seconds)

    rewrite(truth, late)
    found = findings(truth)
    off, missing = ("timestamps off the grid", 1), ("missing frames", 1)
    assert set(found) == {("missing statistics", None), off, missing}
    assert "action" in found["missing statistics", None]
    assert re.match(r"frame 1 is at 0\.043\d* s, not 0\.033\d* s; 1 of 5 rows are off, and each has", found[off])
    assert found[missing] == ", ".join(f"1 of {camera}" for camera in truth.cameras)


def test_rows_at_times_of_their_own_are_counted(tmp_path: Path) -> None:
    """Each of them has its frame."""
    truth = write_dataset(
        tmp_path / "one", episodes=(4, 5, 6), codec="h264", width=96, height=64, episodes_per_video_file=3
    )
    shown, rows, starts = variable(truth)
    stops = [start + length / 30 for start, length in zip(starts, truth.lengths, strict=True)]
    for name, ends in (("recorded", ()), ("rate", stops)):
        root = write_files(retimed(truth, shown, rows, starts, stops=ends), tmp_path / name)
        told = json.loads(run("check", root, "--json").stdout)
        found = told["findings"]
        assert {(one["what"], one["episode"]) for one in found} == {("timestamps off the grid", e) for e in range(3)}
        for one, length in zip(found, truth.lengths, strict=True):
            own = np.array(rows[one["episode"]]) - np.arange(length) / 30
            assert one["rows"] == np.count_nonzero(np.abs(own) > 1e-4)
            assert f"; {one['rows']} of {length} rows are off" in one["details"]
        assert told["rows_off_the_grid"] == sum(one["rows"] for one in found) > 5
        last = run("check", root).stdout.splitlines()[-1]
        assert last == f"3 findings; rows off the grid: {told['rows_off_the_grid']}"


def test_rows_and_episodes_that_are_there_twice_are_found(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path / "two", episodes=(4, 4, 6), codec="h264", width=96, height=64)

    def doubled(table: pa.Table) -> pa.Table:
        columns = table.to_pydict()
        for key in ("observation.state", "action", "next.reward", "task_index"):
            columns[key][4:8] = columns[key][0:4]
        table = pa.table(columns, table.schema)
        return pa.concat_tables([table, table.slice(12, 1)])

    rewrite(truth, doubled)
    found = findings(truth)
    assert found.pop(("duplicate episode", 1)) == "its 4 rows equal those of episode 0"
    assert "2 rows have its episode_index and index 12; it should be one" in found.pop(("DatasetError", 2))
    assert not found


def test_a_camera_that_hung_is_found_by_decoding(tmp_path: Path) -> None:
    truth = write_dataset(
        tmp_path / "two", episodes=(4, 6), codec="h264", width=96, height=64, episodes_per_video_file=1
    )
    video = truth.root / "videos" / truth.cameras[0] / "chunk-000" / "file-001.mp4"
    with av.open(video, "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"g": "100", "bf": "0"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for _ in range(6):
            picture = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 99, np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    assert run("check", truth.root).exit_code == 0
    [(what, details)] = findings(truth, "--deep").items()
    assert what == ("duplicate frames", 1)
    assert details == f"5 of 6 pictures of {truth.cameras[0]} repeat the last one"


def test_a_video_that_lacks_frames_is_found_without_decoding(truth: DatasetTruth) -> None:
    for video in (truth.root / "videos").rglob("*.mp4"):
        os.truncate(video, video.stat().st_size // 2)
    done = run("check", truth.root)
    assert done.exit_code == 1
    assert "episode 0: " in done.stdout


def test_a_video_shorter_than_its_rows_is_found_without_decoding(tmp_path: Path) -> None:
    quirks = Quirks(short_video_frames=2)
    truth = write_dataset(tmp_path / "one", episodes=(4, 5, 6), codec="h264", width=96, height=64, quirks=quirks)
    lacking = ", ".join(f"2 of {camera}" for camera in truth.cameras)
    assert findings(truth) == {("missing frames", 1): lacking, ("missing frames", 2): lacking}


def test_check_finds_files_that_differ_from_info_json(truth: DatasetTruth) -> None:
    path = truth.root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"][truth.cameras[0]]["shape"] = [60, 96, 3]
    path.write_text(json.dumps(info | {"total_frames": 99}))
    (truth.root / "data/chunk-000/file-000.parquet").rename(truth.root / "data/chunk-000/file-007.parquet")
    found = findings(truth)
    assert set(found) == {("picture size", None), ("totals", None), ("file of rows", None)}
    assert "64 high and 96 wide; info.json says (60, 96, 3)" in found["picture size", None]
    assert "counts 99 frames where there are 15" in found["totals", None]


def test_check_finds_rows_and_info_that_cannot_be_read(truth: DatasetTruth) -> None:
    path = truth.root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"]["action"]["dtype"] = "uint8"
    path.write_text(json.dumps(info))
    for episode in range(3):
        assert "action" in findings(truth)["FormatError", episode]
    path.write_text(json.dumps(info | {"fps": "fast"}))
    assert "fps of" in findings(truth)["FormatError", None]


@pytest.mark.parametrize("part", ["/data/", "/videos/"])
def test_a_host_that_fails_is_no_finding(truth: DatasetTruth, part: str) -> None:
    """It ends the command, instead of one finding for each episode, after all repeats for each."""

    def fault(request: ServedRequest) -> Fault | None:
        return Fault.status(500) if part in request.path else None

    with RangeServer(truth.root, fault=fault) as server:
        done = run("check", server.url, "--ca-file", server.ca_file)
    assert type(done.exception) is FetchError
    assert done.exception.status == 500
    assert done.stdout == ""


@pytest.mark.parametrize(("status", "kind"), [(403, "AccessDenied"), (404, "NotFound")])
def test_a_file_that_is_refused_is_a_finding(truth: DatasetTruth, status: int, kind: str) -> None:
    def fault(request: ServedRequest) -> Fault | None:
        return Fault.status(status) if request.path.endswith("file-001.mp4") else None

    with RangeServer(truth.root, fault=fault) as server:
        done = run("check", server.url, "--ca-file", server.ca_file)
    assert done.stdout.startswith(f"{kind}: episode 2: ")
    assert done.stdout.endswith("1 finding\n")


def test_a_contact_sheet(truth: DatasetTruth, tmp_path: Path) -> None:
    out = tmp_path / "grid.png"
    done = run("frames", truth.root, "--episode", 2, "--count", 3, "--out", out)
    assert done.exit_code == 0, done.output
    with av.open(out) as picture:
        pixels = next(picture.decode(video=0)).to_ndarray(format="rgb24")
    assert pixels.shape == (2 * 64, 3 * 96, 3)
    assert abs(pixels[:64, :96].astype(int) - truth.picture(2, 0, truth.cameras[0]).astype(int)).mean() < 12


def test_files_are_listed_and_copied_and_gone_on_with(truth: DatasetTruth, tmp_path: Path) -> None:
    files = {path.relative_to(truth.root) for path in truth.root.rglob("*") if path.is_file()}
    assert len(run("ls", truth.root).stdout.splitlines()) == 3
    told = json.loads(run("ls", "-r", "--json", truth.root).stdout)["entries"]
    assert len(told) == len(files)
    copied = run("cp", "-r", truth.root, tmp_path / "two")
    assert copied.exit_code == 0, copied.output
    assert f"{len(files)} files copied" in copied.stdout
    assert copied.stderr.splitlines()[0] == "copied: 0 %"
    assert copied.stderr.splitlines()[-1] == f"copied: 100 %, {len(files)}/{len(files)} files"
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (truth.root / file).read_bytes()
    (tmp_path / "two" / "meta" / "info.json").unlink()
    again = run("cp", "-r", truth.root, tmp_path / "two")
    assert again.stdout.startswith(f"{tmp_path / 'two'}: 1 file copied, ")
    assert f", {len(files) - 1} already there" in again.stdout


def test_cp_compares_existing_files_by_size_or_by_content(truth: DatasetTruth, tmp_path: Path) -> None:
    place, info = tmp_path / "two", truth.root / "meta" / "info.json"
    run("cp", "-r", truth.root, place)
    changed = place / "meta" / "info.json"
    changed.write_bytes(bytes(info.stat().st_size))
    by_size = run("cp", "-r", truth.root, place)
    assert by_size.stdout.startswith(f"{place}: 0 files copied, 0 B")
    assert "compared 0 by content" in by_size.stdout
    by_content = run("cp", "-r", truth.root, place, "--verify")
    assert by_content.stdout.startswith(f"{place}: 1 file copied")
    assert "by size" not in by_content.stdout
    assert changed.read_bytes() == info.read_bytes()


def test_the_checksum_that_a_store_tells_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3's MD5; the Hub's SHA-256 of large files and Git's name of small ones."""
    with S3Server({"robots/a": b"one", "robots/b": b"two"}) as s3, HubServer() as hub:
        hub.push("datasets/org/name", {"a": b"one", "b": b"two"})
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for number, (source, ca_file) in enumerate([
            ("s3://robots", s3.ca_file),
            ("hf://datasets/org/name", hub.ca_file),
        ]):
            place = tmp_path / str(number)
            done = run("cp", "-r", source, place, "--ca-file", ca_file)
            assert done.stdout == f"{place}: 2 files copied, 6 B; compared 2 by content\n", done.output
            (place / "a").write_bytes(b"won")
            again = run("cp", "-r", source, place, "--ca-file", ca_file)
            assert again.stdout == f"{place}: 1 file copied, 3 B, 1 already there; compared 2 by content\n", (
                again.output
            )
            assert (place / "a").read_bytes() == b"one"


def test_a_file_of_a_server_and_a_bucket(truth: DatasetTruth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RangeServer(truth.root) as server:
        done = run("cp", f"{server.url}/meta/info.json", f"{tmp_path}/", "--ca-file", server.ca_file)
        assert done.exit_code == 0, done.output
        refused = run("cp", f"{server.url}/none", f"{tmp_path}/", "--ca-file", server.ca_file)
    assert (tmp_path / "info.json").read_bytes() == (truth.root / "meta" / "info.json").read_bytes()
    assert refused.exit_code != 0
    with S3Server({}) as s3:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        done = run("cp", tmp_path / "info.json", "s3://robots/info.json", "--ca-file", s3.ca_file)
        assert done.exit_code == 0, done.output
        assert "s3://robots/info.json" in run("ls", "s3://robots/", "--ca-file", s3.ca_file).stdout


def test_env_lists_decoders_and_packages() -> None:
    done = run("env", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["decoders"]["pyav"]
    assert told["packages"]["asyncfetch"]
    assert "pyav decodes" in run("env").stdout

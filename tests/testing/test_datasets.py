"""The writer against pyarrow, PyAV and a walk over the MP4 boxes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncfetch.errors import ConfigError, EpisodeNotFound, FrameMissing, MissingDependency, install_command
from asyncfetch.testing.datasets import write_dataset
from asyncfetch.testing.identity import read_identity
from asyncfetch.testing.recorder import Quirks
from asyncfetch.testing.truth import EXTRAS, DatasetTruth

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa
    import pyarrow.parquet as pq

    from asyncfetch.testing.clips import Codec

TOP, WRIST = "observation.images.top", "observation.images.wrist"
DEPTH, SNAPSHOT = "observation.images.depth", "observation.images.snapshot"
LENGTHS = (9, 12, 7, 0, 5)
SMALL: dict[str, Any] = {"width": 64, "height": 64, "codec": "h264"}


@pytest.fixture(scope="session", params=["av1", "h264", "hevc"])
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Files of one, two and three episodes, one of them empty, in each codec."""
    codec: Codec = request.param
    root = tmp_path_factory.mktemp(codec)
    return write_dataset(root, episodes=LENGTHS, codec=codec, episodes_per_video_file={TOP: 2, WRIST: 3})


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> DatasetTruth:
    """Twelve episodes with all extras, in several data files."""
    extras = {TOP: 4, WRIST: 5, DEPTH: 3}
    root = tmp_path_factory.mktemp("recorded")
    return write_dataset(
        root, episodes=[3 + n % 4 for n in range(12)], extras=EXTRAS, episodes_per_video_file=extras,
        episodes_per_data_file=7, chunks_size=2, **SMALL,
    )  # fmt: skip


def parquet(truth: DatasetTruth, path: str) -> pq.ParquetFile:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(truth.root / path)


def episodes_table(truth: DatasetTruth) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(truth.root / "meta/episodes")


def info(truth: DatasetTruth) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((truth.root / "meta/info.json").read_text())
    return content


def decode(path: Path, pixel_format: str = "rgb24") -> list[np.ndarray[Any, Any]]:
    import av

    with av.open(str(path), "r") as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        assert [frame.pts for frame in frames] == [n * frames[0].duration for n in range(len(frames))]
        return [frame.to_ndarray(format=pixel_format) for frame in frames]


def video_rows(truth: DatasetTruth, video: str) -> Iterator[tuple[int, Path, int]]:
    """(episode, file, position of its frame 0 in the file) as the metadata say."""
    template = info(truth)["video_path"]
    for row in episodes_table(truth).to_pylist():
        place = {key: int(row[f"videos/{video}/{key}"]) for key in ("chunk_index", "file_index")}
        start = row[f"videos/{video}/from_timestamp"]
        yield row["episode_index"], truth.root / template.format(video_key=video, **place), round(start * truth.fps)


def boxes(data: bytes) -> dict[str, bytes]:
    """Content of every box of an MP4 with one track, by path, in the order of the file."""
    found: dict[str, bytes] = {}

    def walk(content: bytes, prefix: str) -> None:
        at = 0
        while at < len(content):
            size, kind = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8].decode("latin1")
            found[prefix + kind] = content[at + 8 : at + size]
            if kind in {"moov", "trak", "edts", "mdia", "minf", "stbl"}:
                walk(content[at + 8 : at + size], f"{prefix}{kind}.")
            at += size

    walk(data, "")
    return found


def table(box: bytes, columns: int) -> list[tuple[int, ...]]:
    """The rows of a full box that holds a count and then 32-bit numbers."""
    count = int.from_bytes(box[4:8], "big")
    return [tuple(row) for row in np.frombuffer(box, ">u4", count * columns, offset=8).reshape(count, columns).tolist()]


STBL = "moov.trak.mdia.minf.stbl."


# Videos


@pytest.mark.parametrize("camera", [TOP, WRIST])
def test_every_frame_says_which_one_it_is(coded: DatasetTruth, camera: str) -> None:
    rows = [row for row in video_rows(coded, camera) if coded.lengths[row[0]]]
    files = {path: decode(path) for _, path, _ in rows}
    read = [
        read_identity(files[path][start + frame])
        for episode, path, start in rows
        for frame in range(coded.lengths[episode])
    ]

    assert read == [
        coded.identity(episode, frame, camera) for episode, _, _ in rows for frame in range(coded.lengths[episode])
    ]
    assert sum(map(len, files.values())) == coded.num_frames


def test_moov_is_behind_one_episode_and_in_front_of_several(coded: DatasetTruth) -> None:
    orders = {
        path.relative_to(coded.root / "videos").as_posix(): [
            name for name in boxes(path.read_bytes()) if "." not in name
        ]
        for path in sorted(coded.root.glob("videos/*/*/*.mp4"))
    }

    front, tail = ["ftyp", "moov", "free", "mdat"], ["ftyp", "free", "mdat", "moov"]
    assert orders == {
        f"{TOP}/chunk-000/file-000.mp4": front,  # episodes 0 and 1
        f"{TOP}/chunk-000/file-001.mp4": tail,  # 2, and 3 without frames
        f"{TOP}/chunk-000/file-002.mp4": tail,  # 4
        f"{WRIST}/chunk-000/file-000.mp4": front,  # 0, 1 and 2
        f"{WRIST}/chunk-000/file-001.mp4": tail,  # 4
    }


def test_samples_are_evenly_spaced_behind_one_edit(coded: DatasetTruth) -> None:
    for path in coded.root.glob("videos/*/*/*.mp4"):
        found = boxes(path.read_bytes())

        ((frames, ticks),) = table(found[STBL + "stts"], 2)
        assert (ticks, int.from_bytes(found["moov.trak.mdia.mdhd"][12:16], "big")) == (512, 15360)
        assert frames == len(decode(path))
        assert len(table(found["moov.trak.edts.elst"], 3)) == 1


def test_key_frames_restart_with_each_episode(coded: DatasetTruth) -> None:
    path = coded.root / f"videos/{TOP}/chunk-000/file-000.mp4"
    found = boxes(path.read_bytes())
    syncs = [sample - 1 for (sample,) in table(found[STBL + "stss"], 1)]

    assert {0, LENGTHS[0]} <= set(syncs)
    if info(coded)["features"][TOP]["info"]["video.codec"] == "av1":
        assert syncs == [*range(0, 9, 2), *range(9, 21, 2)]
        assert STBL + "ctts" not in found


def test_presentation_order_is_that_of_lerobots_encoders(coded: DatasetTruth) -> None:
    found = boxes((coded.root / f"videos/{TOP}/chunk-000/file-000.mp4").read_bytes())
    codec = info(coded)["features"][TOP]["info"]["video.codec"]
    ((_, media_time, _),) = table(found["moov.trak.edts.elst"], 3)
    offsets = {offset for _, offset in table(found[STBL + "ctts"], 2)} if STBL + "ctts" in found else None

    assert (found[STBL + "stsd"][12:16], media_time) == {
        "av1": (b"av01", 0),
        "h264": (b"avc1", 512),
        "hevc": (b"hev1", 1024),
    }[codec]
    assert offsets == {"av1": None, "h264": {512}, "hevc": {512, 1024, 1536}}[codec]


def test_timestamps_add_up_within_a_file(coded: DatasetTruth) -> None:
    columns = episodes_table(coded).to_pydict()

    assert columns[f"videos/{TOP}/from_timestamp"] == [0.0, 9 / 30, 0.0, 7 / 30, 0.0]
    assert columns[f"videos/{WRIST}/to_timestamp"] == [9 / 30, 9 / 30 + 12 / 30, 9 / 30 + 12 / 30 + 7 / 30, 0.0, 5 / 30]


def test_depth_is_stored_without_loss(recorded: DatasetTruth) -> None:
    for episode, path, start in video_rows(recorded, DEPTH):
        frames = decode(path, "gray12le")
        for frame in range(recorded.lengths[episode]):
            assert np.array_equal(frames[start + frame], recorded.depth_codes(episode, frame))


def test_depth_in_metres_follows_the_codes(recorded: DatasetTruth) -> None:
    codes, metres = recorded.depth_codes(1, 2), recorded.depth_metres(1, 2)
    a, b = np.log(3.51), np.log(13.5)

    assert np.allclose(metres, np.exp(a + codes * (b - a) / 4095) - 3.5)
    assert 0.01 <= metres.min() < metres.max() <= 10


# Tables


def test_data_columns_have_lerobots_types(recorded: DatasetTruth) -> None:
    import pyarrow as pa

    schema = parquet(recorded, "data/chunk-000/file-000.parquet").schema_arrow

    six = pa.list_(pa.field("element", pa.float32()), 6)
    assert dict(zip(schema.names, schema.types, strict=True)) == {
        "observation.state": six,
        "action": six,
        "next.reward": pa.float32(),
        "next.done": pa.bool_(),
        "observation.note": pa.string(),
        "observation.grid": pa.list_(pa.field("element", pa.list_(pa.field("element", pa.float32())))),
        SNAPSHOT: pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        "timestamp": pa.float32(),
        "frame_index": pa.int64(),
        "episode_index": pa.int64(),
        "index": pa.int64(),
        "task_index": pa.int64(),
    }
    described = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert list(described) == schema.names


def test_data_has_one_row_group_an_episode(recorded: DatasetTruth) -> None:
    files = [parquet(recorded, f"data/chunk-000/file-{n:03d}.parquet") for n in range(2)]
    rows = [file.metadata.row_group(n).num_rows for file in files for n in range(file.num_row_groups)]

    assert rows == list(recorded.lengths)
    assert [file.num_row_groups for file in files] == [7, 5]
    assert files[0].metadata.row_group(0).column(0).compression == "SNAPPY"
    assert files[0].metadata.row_group(0).column(0).is_stats_set


def test_rows_follow_the_formulas(recorded: DatasetTruth) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(recorded.root / "data").to_pylist()
    assert [row["index"] for row in rows] == list(range(recorded.num_frames))
    for row in rows:
        episode, frame = row["episode_index"], row["frame_index"]
        expected = [episode, frame, np.sin(frame / 10), np.cos(frame / 10), episode + frame / 1000, 1]
        after = [episode, frame + 1, np.sin((frame + 1) / 10), np.cos((frame + 1) / 10), 0, -1]
        last = frame == recorded.lengths[episode] - 1
        assert np.allclose(row["observation.state"], expected)
        assert np.array_equal(row["observation.state"], recorded.state(episode, frame))
        assert np.allclose(row["action"], after)
        assert np.array_equal(row["action"], recorded.action(episode, frame))
        assert (row["next.reward"], row["next.done"]) == (float(last), last)
        assert row["timestamp"] == np.float32(frame / 30)
        assert recorded.tasks[row["task_index"]] == recorded.task(episode)
        assert row["observation.note"] == f"episode {episode}, frame {frame}"


def test_images_are_png_that_read_back(recorded: DatasetTruth) -> None:
    import av
    import pyarrow.parquet as pq

    row = pq.read_table(recorded.root / "data").to_pylist()[-1]
    with av.open(io.BytesIO(row[SNAPSHOT]["bytes"]), "r") as container:
        (picture,) = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]

    where = (row["episode_index"], row["frame_index"])
    assert read_identity(picture) == recorded.identity(*where, SNAPSHOT)
    assert np.array_equal(picture, recorded.picture(*where, SNAPSHOT))


def test_episode_rows_tell_where_everything_lies(recorded: DatasetTruth) -> None:
    rows = episodes_table(recorded).to_pylist()

    assert [row["length"] for row in rows] == list(recorded.lengths)
    assert [row["tasks"] for row in rows] == [["pick"], ["place"]] * 6
    assert [row["dataset_from_index"] for row in rows] == [recorded.first_index(n) for n in range(12)]
    assert [row["dataset_to_index"] - row["dataset_from_index"] for row in rows] == list(recorded.lengths)
    assert [(row["data/chunk_index"], row["data/file_index"]) for row in rows] == [(0, 0)] * 7 + [(0, 1)] * 5
    assert [(row[f"videos/{TOP}/chunk_index"], row[f"videos/{TOP}/file_index"]) for row in rows] == [
        *[(0, 0)] * 4, *[(0, 1)] * 4, *[(1, 0)] * 4,
    ]  # fmt: skip
    assert {(row["meta/episodes/chunk_index"], row["meta/episodes/file_index"]) for row in rows} == {(0, 0)}


def test_episode_columns_have_lerobots_types_and_order(coded: DatasetTruth) -> None:
    file = parquet(coded, "meta/episodes/chunk-000/file-000.parquet")
    types = {field.name: str(field.type) for field in file.schema_arrow}

    assert list(types)[:5] == ["episode_index", "tasks", "length", "data/chunk_index", "data/file_index"]
    assert list(types)[5:7] == ["dataset_from_index", "dataset_to_index"]
    assert types["tasks"] == "list<element: string>"
    assert types[f"videos/{TOP}/to_timestamp"] == "double"
    assert types["stats/action/q99"] == "list<element: double>"
    assert types[f"stats/{TOP}/mean"] == "list<element: list<element: list<element: double>>>"
    assert types["stats/index/count"] == "list<element: int64>"
    assert list(types)[-2:] == ["meta/episodes/chunk_index", "meta/episodes/file_index"]
    assert file.schema_arrow.metadata is None


def test_episode_rows_are_flushed_in_tens(recorded: DatasetTruth) -> None:
    file = parquet(recorded, "meta/episodes/chunk-000/file-000.parquet")

    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [10, 2]


def test_tasks_are_the_index_of_a_pandas_frame(coded: DatasetTruth) -> None:
    tasks = parquet(coded, "meta/tasks.parquet").read()

    assert tasks.to_pydict() == {"task_index": [0, 1], "task": ["pick", "place"]}
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_info_says_everything_in_lerobots_order(coded: DatasetTruth) -> None:
    content = info(coded)

    assert list(content) == [
        "codebase_version", "fps", "features", "total_episodes", "total_frames", "total_tasks", "chunks_size",
        "data_files_size_in_mb", "video_files_size_in_mb", "data_path", "video_path", "robot_type", "splits",
    ]  # fmt: skip
    assert (content["total_episodes"], content["total_frames"]) == (5, 33)
    assert list(content["features"])[-5:] == ["timestamp", "frame_index", "episode_index", "index", "task_index"]
    video = content["features"][TOP]
    assert (video["dtype"], video["shape"], video["info"]["video.fps"]) == ("video", [128, 160, 3], 30)


def test_statistics_are_those_of_the_rows(recorded: DatasetTruth) -> None:
    import pyarrow.parquet as pq

    stats = json.loads((recorded.root / "meta/stats.json").read_text())
    states = np.array(pq.read_table(recorded.root / "data")["observation.state"].to_pylist())

    assert "observation.note" not in stats
    for name in ("min", "max", "mean", "std"):
        assert np.allclose(stats["observation.state"][name], getattr(states, name)(axis=0), atol=1e-6)
    assert stats["index"]["count"] == [recorded.num_frames]
    assert np.shape(stats[TOP]["q50"]) == (3, 1, 1)
    assert 0 <= np.min(stats[TOP]["min"]) < np.max(stats[TOP]["max"]) <= 1
    assert np.shape(stats["observation.grid"]["mean"]) == (3, 4)


# The call


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (write_dataset(tmp_path / name, episodes=2, length=5, texture=3.0) for name in "ab")

    def contents(truth: DatasetTruth) -> dict[Path, bytes]:
        return {p.relative_to(truth.root): p.read_bytes() for p in truth.root.rglob("*") if p.is_file()}

    assert contents(first) == contents(second)


def test_repeated_videos_carry_the_identity_of_the_first(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path, episodes=5, length=4, distinct_videos=2, episodes_per_video_file=3, **SMALL)

    rows = [(episode, decode(path)[start]) for episode, path, start in video_rows(truth, WRIST)]

    assert [read_identity(picture) for _, picture in rows] == [(n % 2, 0, 1) for n in range(5)]
    assert [truth.identity(episode, 0, WRIST) for episode, _ in rows] == [(n % 2, 0, 1) for n in range(5)]
    assert truth.state(4, 0)[0] == 4


def test_progress_counts_videos(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    write_dataset(tmp_path, episodes=(2, 0, 3), progress=lambda *counts: seen.append(counts), **SMALL)

    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_no_episodes_leave_the_descriptions_alone(tmp_path: Path) -> None:
    write_dataset(tmp_path, episodes=0, **SMALL)

    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"info.json", "stats.json", "tasks.parquet"}


@pytest.mark.parametrize("episodes", [(0,), (1,), (0, 1)])
def test_the_smallest_datasets(tmp_path: Path, episodes: tuple[int, ...]) -> None:
    truth = write_dataset(tmp_path, episodes=episodes, **SMALL)

    assert info(truth)["total_frames"] == truth.num_frames
    assert episodes_table(truth).num_rows == truth.num_episodes


def test_a_dataset_without_cameras_has_no_videos(tmp_path: Path) -> None:
    truth = write_dataset(tmp_path, cameras=(), episodes=1)

    assert info(truth)["video_path"] is None
    assert not (tmp_path / "videos").exists()


def test_the_truth_is_a_path_and_refuses_what_is_not_there(coded: DatasetTruth) -> None:
    assert os.fspath(coded) == str(coded.root)
    with pytest.raises(EpisodeNotFound):
        coded.task(5)
    with pytest.raises(FrameMissing):
        coded.state(0, 9)
    with pytest.raises(ConfigError, match="no colour camera"):
        coded.identity(0, 0, DEPTH)


@pytest.mark.parametrize(
    "arguments",
    [
        {"codec": "vp9"}, {"width": 161}, {"height": 32}, {"fps": 0}, {"fps": 241}, {"gop": 0}, {"tasks": ()},
        {"episodes": (5, -1)}, {"texture": 99}, {"extras": ("odour",)}, {"cameras": ("a", "a")},
        {"cameras": ("action",)}, {"episodes_per_video_file": 0},
        {"episodes_per_video_file": {"a": 1}}, {"episodes_per_data_file": 0}, {"chunks_size": 0}, {"length": 2**16 + 1},
        {"distinct_videos": 0}, {"distinct_videos": 1, "episodes": (3, 4)}, {"quirks": Quirks(short_video_frames=20)},
        {"quirks": Quirks(null_index_episodes=(4,))}, {"quirks": Quirks(without_default_feature="action")},
        {"quirks": Quirks(episodes_per_meta_file=0)}, {"quirks": Quirks(orphan_rows=-1)},
        {"quirks": Quirks(empty_video_file=2)}, {"fps": 29.97}, {"seed": -1}, {"episodes": -1}, {"tasks": "pick"},
        {"tasks": (1,)}, {"cameras": "top"}, {"cameras": ("",)}, {"cameras": ("../../../x",)}, {"length": 1.5},
    ],
    ids=" ".join,
)  # fmt: skip
def test_invalid_arguments_are_refused_before_writing(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        write_dataset(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_whole_numbers_of_numpy_are_as_good(tmp_path: Path) -> None:
    numbers = {"episodes": 3, "length": 2, "fps": 10, "width": 96, "height": 64, "gop": 1, "crf": 20, "seed": 1}
    numbers |= {"episodes_per_video_file": 2, "episodes_per_data_file": 2, "chunks_size": 1, "distinct_videos": 1}
    of_numpy: dict[str, Any] = {name: np.uint8(number) for name, number in numbers.items()}
    given: Any = numbers
    plain = write_dataset(tmp_path / "plain", cameras=(TOP,), **given)
    same = write_dataset(tmp_path / "same", cameras=(TOP,), **of_numpy)

    def contents(truth: DatasetTruth) -> dict[Path, bytes]:
        return {path.relative_to(truth.root): path.read_bytes() for path in truth.root.rglob("*") if path.is_file()}

    assert contents(plain) == contents(same)


def test_options_that_the_encoder_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="libsvtav1"):
        write_dataset(tmp_path, crf=99)


@pytest.mark.parametrize("module", ["av", "pyarrow"])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(MissingDependency, match=re.escape(install_command("testing"))):
        write_dataset(tmp_path)


def test_encoders_keep_quiet_and_imports_light(tmp_path: Path) -> None:
    program = f"""
import sys
from asyncfetch.testing.datasets import EXTRAS, write_dataset
assert not {{"av", "pyarrow", "torch"}} & set(sys.modules)
for codec in ("av1", "h264", "hevc"):
    write_dataset({str(tmp_path)!r} + "/" + codec, episodes=2, length=3, extras=EXTRAS, codec=codec)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, check=True)

    assert (done.stdout, done.stderr) == (b"", b"")


def test_encoding_leaves_the_priority_alone(coded: DatasetTruth) -> None:
    """SVT-AV1 would raise root's."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_other_rates_keep_every_frame_on_its_tick(tmp_path: Path) -> None:
    for fps in (1, 7, 25, 240):
        truth = write_dataset(tmp_path / str(fps), episodes=(3, 4), fps=fps, **SMALL)

        (_, path, _), (_, _, start) = video_rows(truth, TOP)
        assert [read_identity(frame).frame for frame in decode(path)] == [0, 1, 2, 0, 1, 2, 3]
        assert start == 3


def test_behind_an_episode_of_one_frame_the_next_is_in_its_place(tmp_path: Path) -> None:
    """It begins to decode two frames ahead of its first picture, where that of one frame has no lag at all."""
    import av

    truth = write_dataset(tmp_path / "data", episodes=(1, 12), gop=30, **SMALL)
    with av.open(next(path for _, path, _ in video_rows(truth, TOP))) as container:
        stream: Any = container.streams.video[0]
        times = sorted(packet.pts for packet in container.demux(stream) if packet.pts is not None)
        ticks = round(1 / (truth.fps * stream.time_base))
    assert times == list(range(0, 13 * ticks, ticks))


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="empty directory"):
        write_dataset(tmp_path)

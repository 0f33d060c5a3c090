"""Datasets joined to one: every frame by its pixels, every row by its value, every number by what is really there."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncfetch.lerobot import open_dataset
from asyncfetch.media import parse_moov
from asyncfetch.merge import convert_dataset, merge_datasets, summaries, tasks
from asyncfetch.testing import Quirks, read_identity
from tests.lerobot.serving import TOP, WRIST, retimed, shown_after, variable, with_times, write_files
from tests.merge.version2 import CHUNKS_SIZE, EPISODE_FILE, as_version2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from asyncfetch.testing import DatasetTruth
    from tests.lerobot.serving import Library


async def check_merged(root: Path, truths: Sequence[DatasetTruth]) -> None:
    """Every frame of every source, in order, through our reader."""
    async with open_dataset(str(root)) as dataset:
        assert dataset.num_episodes == sum(truth.num_episodes for truth in truths)
        episode = index = 0
        for truth in truths:
            for own, length in enumerate(truth.lengths):
                for frame in range(length):
                    sample = await dataset.sample(episode, frame)
                    for camera in truth.cameras:
                        assert read_identity(sample[camera]) == truth.identity(own, frame, camera)
                    for key in ("observation.state", "action", "next.reward", "timestamp", "frame_index"):
                        np.testing.assert_array_equal(sample[key], truth.column(key, own)[frame], err_msg=key)
                    assert (sample["episode_index"], sample["index"]) == (episode, index)
                    assert sample["task"] == truth.task(own)
                    index += 1
                episode += 1
        assert dataset.num_frames == index


def read_table(root: Path, part: str) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(root.glob(f"{part}/*/*.parquet"))])


def frame_hashes(path: Path) -> list[str]:
    """Of the pixels of each frame, by FFmpeg."""
    lines = run_tool("ffmpeg", "-i", str(path), "-map", "0:v", "-f", "framemd5", "-")
    return [line.rpartition(",")[-1].strip() for line in lines if not line.startswith("#")]


def frame_times(path: Path) -> NDArray[np.int64]:
    """When each frame is shown, in ticks, by FFmpeg."""
    lines = run_tool("ffprobe", "-select_streams", "v", "-show_entries", "frame=pts", "-of", "csv=p=0", str(path))
    return np.array([int(line.rstrip(",")) for line in lines if line])  # side data leaves empty ones


def run_tool(name: str, *arguments: str) -> list[str]:
    done = subprocess.run([name, "-v", "error", *arguments], check=True, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.splitlines()


def read_json(root: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "meta" / name).read_text())
    return content


def all_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


VIDEOS: dict[str, dict[str, Any]] = {
    "AV1, one episode a file": {"codec": "av1", "episodes_per_video_file": 1},
    "AV1, one key frame an episode": {"codec": "av1", "gop": 100},
    "H.264 with B-frames": {"codec": "h264", "gop": 12, "episodes_per_video_file": 3},
    "HEVC, open GOPs": {"codec": "hevc", "gop": 6, "episodes_per_video_file": 3},
    "cameras in files of different lengths": {"codec": "h264", "episodes_per_video_file": {TOP: 1, WRIST: 3}},
}


@pytest.mark.parametrize("options", VIDEOS.values(), ids=list(VIDEOS))
@pytest.mark.parametrize("video_file_max_bytes", [1, 200_000_000])
async def test_every_frame(
    library: Library, tmp_path: Path, options: dict[str, Any], video_file_max_bytes: int
) -> None:
    truths = [
        library(episodes=(9, 4, 14), **options),
        library(episodes=(5, 0, 7), tasks=("place", "stack"), **options),
    ]
    out = tmp_path / "out"
    await merge_datasets([truth.root for truth in truths], out, video_file_max_bytes=video_file_max_bytes)
    await check_merged(out, truths)


@pytest.mark.parametrize("codec", ["av1", "h264", "hevc"])
async def test_ffmpeg_decodes_the_same_pictures_at_whole_frames(library: Library, tmp_path: Path, codec: str) -> None:
    truths = [library(episodes=(9, 4), codec=codec, gop=6), library(episodes=(5, 7, 6), codec=codec, gop=6)]
    await merge_datasets([truth.root for truth in truths], tmp_path / "out")
    (merged,) = (tmp_path / "out/videos" / TOP).rglob("*.mp4")
    sources = [path for truth in truths for path in sorted((truth.root / "videos" / TOP).rglob("*.mp4"))]
    assert frame_hashes(merged) == [pixels for path in sources for pixels in frame_hashes(path)]
    np.testing.assert_array_equal(frame_times(merged), np.arange(9 + 4 + 5 + 7 + 6) * 512)
    episodes = read_table(tmp_path / "out", "meta/episodes").to_pydict()
    ends = np.cumsum([9, 4, 5, 7, 6])
    assert episodes[f"videos/{TOP}/to_timestamp"] == (ends / 30).tolist()
    assert episodes[f"videos/{TOP}/from_timestamp"] == [0, *(ends[:-1] / 30).tolist()]


async def test_times_do_not_drift_where_frames_are_not_whole_ticks(library: Library, tmp_path: Path) -> None:
    """At 1000 ticks a second a frame has 33 or 34; each episode begins at the tick nearest to its frame."""
    lengths = (5, 7, 4, 8, 5, 7) * 2
    truth = library(episodes=lengths[:6], cameras=(TOP,), episodes_per_video_file=6)
    root = tmp_path / "source"
    shutil.copytree(truth.root, root)
    path, made = root / f"videos/{TOP}/chunk-000/file-000.mp4", tmp_path / "made.mp4"
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-c", "copy", "-video_track_timescale", "1000", str(made)]
    await anyio.run_process(command)
    made.rename(path)
    await merge_datasets([root, root], tmp_path / "out")
    await check_merged(tmp_path / "out", [truth, truth])
    (merged,) = (tmp_path / "out").rglob("*.mp4")
    times = frame_times(merged)
    frames = np.arange(sum(lengths))
    starts = np.cumsum((0, *lengths[:-1]))
    np.testing.assert_array_equal(times[starts], np.round(starts * 1000 / 30))
    assert np.abs(times - frames * 1000 / 30).max() <= 1


@pytest.mark.parametrize("codec", ["av1", "h264"])
@pytest.mark.parametrize("ends", ["as recorded", "by the rate of frames"])
async def test_rows_at_times_of_their_own_keep_their_frames(
    library: Library, tmp_path: Path, codec: str, ends: str
) -> None:
    """Beside a dataset at the rate of frames, and merged once more with that."""
    off = library(episodes=(9, 4, 14), episodes_per_video_file=3, codec=codec, gop=6)
    on = library(episodes=(5, 7), codec=codec, gop=6)
    shown, rows, starts = variable(off)
    starts = [start + 1e-5 for start in starts]
    stops = [start + length / 30 for start, length in zip(starts, off.lengths, strict=True)]
    content = retimed(off, shown, rows, starts, stops=() if ends == "as recorded" else stops)
    source, once, twice = write_files(content, tmp_path / "variable"), tmp_path / "once", tmp_path / "twice"
    await merge_datasets([on.root, source, on.root], once)
    await merge_datasets([source, once], twice)
    for root, truths in ((once, [on, off, on]), (twice, [off, on, off, on])):
        places = [(truth, own) for truth in truths for own in range(truth.num_episodes)]
        table = read_table(root, "meta/episodes").to_pydict()
        async with open_dataset(str(root)) as dataset:
            assert dataset.num_episodes == len(places)
            for episode, (truth, own) in enumerate(places):
                for frame in range(truth.lengths[own]):
                    sample = await dataset.sample(episode, frame)
                    for camera in truth.cameras:
                        assert read_identity(sample[camera]) == truth.identity(own, frame, camera)
                    wanted = rows[own][frame] if truth is off else frame / 30
                    assert sample["timestamp"] == np.float32(wanted)
                length = max(rows[own]) + 1 / 30 if truth is off else truth.lengths[own] / 30
                start, stop = (table[f"videos/{TOP}/{name}_timestamp"][episode] for name in ("from", "to"))
                assert stop - start == pytest.approx(length)


@pytest.mark.parametrize("stats", [True, False])
async def test_version_2_with_times_of_its_own_is_read_and_converted(
    library: Library, tmp_path: Path, stats: bool
) -> None:
    truth = library(episodes=(9, 4, 14), codec="h264", gop=6, **EPISODE_FILE)
    root, gaps = as_version2(truth, tmp_path / "old", stats=stats), [512, 1024, 512, 300]
    for episode, length in enumerate(truth.lengths):
        shown = shown_after((gaps * length)[: length - 1])
        name, chunk = f"episode_{episode:06d}", f"chunk-{episode // CHUNKS_SIZE:03d}"
        for camera in truth.cameras:
            path = root / f"videos/{chunk}/{camera}/{name}.mp4"
            path.write_bytes(with_times(path.read_bytes(), shown))
        path = root / f"data/{chunk}/{name}.parquet"
        table = pq.read_table(path)
        column = table.schema.get_field_index("timestamp")
        seconds = pa.array(np.array(shown) / 15360, pa.float32())
        pq.write_table(table.set_column(column, table.schema.field(column), seconds), path)
    await convert_dataset(root, tmp_path / "new")
    for place in (root, tmp_path / "new"):
        async with open_dataset(str(place)) as dataset:
            for episode, length in enumerate(truth.lengths):
                for frame in range(length):
                    sample = await dataset.sample(episode, frame)
                    for camera in truth.cameras:
                        assert read_identity(sample[camera]) == truth.identity(episode, frame, camera)


async def test_a_video_has_one_configuration_of_the_decoder(library: Library, tmp_path: Path) -> None:
    """Where the next source was encoded otherwise a new file begins, and each is decoded as it was made."""
    truths = [library(episodes=(5, 4), cameras=(TOP,), gop=gop) for gop in (6, 1, 6)]
    await merge_datasets([truth.root for truth in truths], tmp_path / "out")
    files = sorted((tmp_path / "out/videos").rglob("*.mp4"))
    assert len({parse_moov(path.read_bytes(), url=path.name).track.stsd for path in files}) == 2
    assert [frame_hashes(path) for path in files] == [frame_hashes(video_of(truth)) for truth in truths]
    await check_merged(tmp_path / "out", truths)


async def test_the_index_of_a_video_is_in_front(library: Library, tmp_path: Path) -> None:
    await merge_datasets([library(episodes=(9,)).root], tmp_path / "out")
    for path in (tmp_path / "out").rglob("*.mp4"):
        data = path.read_bytes()
        assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("count", [1, 7, 64])
async def test_any_number_of_sources(library: Library, tmp_path: Path, count: int) -> None:
    truths = [library(episodes=(4,), seed=number % 3, cameras=(TOP,)) for number in range(count)]
    report = await merge_datasets([truth.root for truth in truths], tmp_path / "out")
    await check_merged(tmp_path / "out", truths)
    assert (report.episodes, report.frames) == (count, 4 * count)
    (merged,) = sorted((tmp_path / "out/videos").rglob("*.mp4"))
    pixels = {truth.root: frame_hashes(video_of(truth)) for truth in truths[:3]}
    assert frame_hashes(merged) == [own for truth in truths for own in pixels[truth.root]]


def video_of(truth: DatasetTruth) -> Path:
    (path,) = (truth.root / "videos").rglob("*.mp4")
    return path


async def test_a_merge_of_merges_is_the_merge_of_all(library: Library, tmp_path: Path) -> None:
    tasks = [("pick",), ("place", "pick"), ("stack",), ("pick", "sort"), ("place",)]
    truths = [library(episodes=(9, 4, 5), tasks=words, gop=6) for words in tasks]
    roots = [truth.root for truth in truths]
    await merge_datasets(roots, tmp_path / "flat", video_file_max_bytes=3_000)
    await merge_datasets(roots[:2], tmp_path / "left", video_file_max_bytes=3_000)
    await merge_datasets(roots[2:], tmp_path / "right", video_file_max_bytes=3_000)
    await merge_datasets([tmp_path / "left", tmp_path / "right"], tmp_path / "nested", video_file_max_bytes=3_000)

    flat, nested = all_files(tmp_path / "flat"), all_files(tmp_path / "nested")
    assert flat.keys() == nested.keys()
    videos = [name for name in flat if name.endswith(".mp4")]
    assert len(videos) > 2
    assert all(flat[name] == nested[name] for name in videos)
    assert flat["meta/info.json"] == nested["meta/info.json"]
    assert read_table(tmp_path / "flat", "data").equals(read_table(tmp_path / "nested", "data"))
    assert pq.read_table(tmp_path / "flat/meta/tasks.parquet") == pq.read_table(tmp_path / "nested/meta/tasks.parquet")
    assert read_table(tmp_path / "flat", "meta/episodes").equals(read_table(tmp_path / "nested", "meta/episodes"))
    assert flat["meta/stats.json"] == nested["meta/stats.json"]


def check_close(one: Any, other: Any) -> None:  # noqa: ANN401
    """Equal, numbers to 1e-9."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_close(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            check_close(left, right)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-9, rel=1e-9)
    else:
        assert one == other


async def test_the_result_does_not_depend_on_the_workers(library: Library, tmp_path: Path) -> None:
    roots = [library(episodes=(9, 4, 5)).root, library(episodes=(5, 6)).root]
    reports = []
    for workers in (None, 1, 3):
        out = tmp_path / f"with-{workers}"
        reports.append(await merge_datasets(roots, out, workers=workers, video_file_max_bytes=1))
    files = [all_files(tmp_path / f"with-{workers}") for workers in (None, 1, 3)]
    assert files[0] == files[1] == files[2]
    assert len({(one.episodes, one.frames, one.files, one.bytes, one.tasks) for one in reports}) == 1
    assert reports[0].bytes == sum(map(len, files[0].values()))


async def test_rows_keep_their_form(library: Library, tmp_path: Path) -> None:
    """One row group an episode, vectors of fixed size, and the metadata of `datasets`, whatever one source lost."""
    quirks = Quirks(plain_lists=True, no_huggingface_metadata=True, collapsed_row_groups=True)
    plain = library(episodes=(4, 5), quirks=quirks)
    truths = [plain, library(episodes=(6, 3))]
    await merge_datasets([truth.root for truth in truths], tmp_path / "out")
    file = pq.ParquetFile(next((tmp_path / "out/data").rglob("*.parquet")))
    assert [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)] == [4, 5, 6, 3]
    source = pq.read_schema(next((truths[1].root / "data").rglob("*.parquet")))
    assert file.schema_arrow.equals(source, check_metadata=True)
    await check_merged(tmp_path / "out", truths)


async def test_tasks_are_joined_by_their_strings(library: Library, tmp_path: Path) -> None:
    truths = [
        library(episodes=(3, 3), tasks=("a", "b"), quirks=Quirks(permuted_tasks=True)),
        library(episodes=(3, 3), tasks=("c", "a"), quirks=Quirks(unnamed_tasks_index=True)),
    ]
    await merge_datasets([truth.root for truth in truths], tmp_path / "out")
    tasks = pq.read_table(tmp_path / "out/meta/tasks.parquet").to_pydict()
    assert tasks == {"task_index": [0, 1, 2], "task": ["a", "b", "c"]}
    episodes = read_table(tmp_path / "out", "meta/episodes").to_pydict()
    assert episodes["tasks"] == [["a"], ["b"], ["c"], ["a"]]
    await check_merged(tmp_path / "out", truths)


async def test_statistics_are_those_of_the_merged_rows(library: Library, tmp_path: Path) -> None:
    """Those of index, episode_index and task_index too, which other mergers leave as they were."""
    truths = [library(episodes=(4, 6), tasks=("a", "b")), library(episodes=(5,), tasks=("c",))]
    await merge_datasets([truth.root for truth in truths], tmp_path / "out")
    rows = read_table(tmp_path / "out", "data").to_pydict()
    stats = read_json(tmp_path / "out", "stats.json")
    for key, values in rows.items():
        column = np.array(values, np.float64).reshape(len(values), -1)
        for name in ("min", "max", "mean", "std"):
            np.testing.assert_allclose(stats[key][name], getattr(column, name)(axis=0), atol=1e-9, err_msg=key)
        np.testing.assert_allclose(stats[key]["q90"], np.quantile(column, 0.9, axis=0), atol=1e-9)
        assert stats[key]["count"] == [15]
    episodes = read_table(tmp_path / "out", "meta/episodes").to_pydict()
    assert episodes["stats/index/min"] == [[0], [4], [10]]
    assert episodes["stats/index/max"] == [[3], [9], [14]]
    assert episodes["stats/episode_index/mean"] == [[0], [1], [2]]
    assert episodes["stats/task_index/q99"] == [[0], [1], [2]]


async def test_statistics_of_many_rows_are_found_in_rounds(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are the same bytes as those that are found at once."""
    monkeypatch.setattr(tasks, "_PART_ROWS", 7)
    roots = [library(episodes=(9, 4, 5)).root, library(episodes=(5, 6), tasks=("place", "stack")).root]
    await merge_datasets(roots, tmp_path / "at-once", workers=2)
    monkeypatch.setattr(summaries, "_FEW_ROWS", 0)
    await merge_datasets(roots, tmp_path / "in-rounds", workers=2)
    assert all_files(tmp_path / "in-rounds") == all_files(tmp_path / "at-once")


async def test_picture_statistics_are_combined_by_their_counts(library: Library, tmp_path: Path) -> None:
    roots = [library(episodes=(4, 6)).root, library(episodes=(5, 8), seed=1, texture=0.5).root]
    await merge_datasets(roots, tmp_path / "out")
    one, other, both = (read_json(root, "stats.json")[TOP] for root in (*roots, tmp_path / "out"))
    n, m = one["count"][0], other["count"][0]
    mean = (n * np.array(one["mean"]) + m * np.array(other["mean"])) / (n + m)
    square = sum(c * (np.array(s["std"]) ** 2 + np.array(s["mean"]) ** 2) for c, s in ((n, one), (m, other))) / (n + m)
    np.testing.assert_allclose(both["mean"], mean)
    np.testing.assert_allclose(both["std"], np.sqrt(square - mean**2))
    for name in ("min", "q01", "q10", "q50"):
        np.testing.assert_array_equal(both[name], np.minimum(one[name], other[name]))
    for name in ("max", "q90", "q99"):
        np.testing.assert_array_equal(both[name], np.maximum(one[name], other[name]))
    assert both["count"] == [n + m]

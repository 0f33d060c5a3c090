"""What is refused, what is left out, and what stays as it was."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, DatasetError, MergeError
from asyncfetch.merge import merge_datasets
from asyncfetch.merge.tables import write_episodes
from asyncfetch.testing import Quirks, RangeServer
from tests.lerobot.serving import TOP, WRIST
from tests.merge.test_merge import all_files, check_merged, read_json, read_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncfetch.merge import MergeProgress
    from tests.lerobot.serving import Library


def changed(root: Path, copy: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the dataset with another info.json."""
    shutil.copytree(root, copy)
    info = read_json(copy, "info.json")
    change(info)
    (copy / "meta/info.json").write_text(json.dumps(info))
    return copy


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


async def test_every_disagreement_is_listed_before_anything_is_written(library: Library, tmp_path: Path) -> None:
    def change(info: dict[str, Any]) -> None:
        info["robot_type"] = "other"
        info["features"]["action"]["names"] = ["a"] * 6

    root = library(episodes=(4,)).root
    other = library(episodes=(4,), codec="av1", fps=10, width=128).root
    with pytest.raises(MergeError) as caught:
        await merge_datasets([root, changed(other, tmp_path / "other", change)], tmp_path / "out")
    for word in ("fps is 30", "robot_type", "names of feature action", f"codec of {TOP}", f"width of {WRIST}", "'av1'"):
        assert word in str(caught.value)
    assert names(tmp_path) == {"other"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-c:v libx264 -pix_fmt yuv444p", "pixel_format of .* is 'yuv420p' .*, but 'yuv444p' in .*file-001.mp4"),
        ("-c:v copy -video_track_timescale 90000", "timescale of .* is 15360 .*, but 90000 in .*file-001.mp4"),
        ("-c:v libx264 -vf scale=128:64", "width of .* is 96 .*, but 128 in .*file-001.mp4"),
        ("-c:v libx264 -r 15", "lacks 3 of the 6 frames of episode 1"),
    ],
    ids=["pixel format", "time base", "width", "frame rate"],
)
async def test_every_video_file_is_looked_at(library: Library, tmp_path: Path, options: str, message: str) -> None:
    """info.json describes the first one only."""
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 6), episodes_per_video_file=1).root, root)
    path = root / f"videos/{TOP}/chunk-000/file-001.mp4"
    made = tmp_path / "made.mp4"
    command = ["ffmpeg", "-v", "error", "-i", str(path), *options.split(), "-g", "2", "-bf", "0", str(made)]
    await anyio.run_process(command)
    made.rename(path)
    with pytest.raises(MergeError, match=message):
        await merge_datasets([root], tmp_path / "out")
    assert names(tmp_path) == {"source"}


async def test_depth_is_described_by_its_files(library: Library, tmp_path: Path) -> None:
    root = library(episodes=(4,), extras=("observation.images.depth",)).root
    await merge_datasets([root, root], tmp_path / "out")
    info = read_json(tmp_path / "out", "info.json")["features"]["observation.images.depth"]["info"]
    assert (info["video.pix_fmt"], info["video.codec"], info["is_depth_map"]) == ("gray12le", "hevc", True)


async def test_what_describes_the_encoder_may_differ(library: Library, tmp_path: Path) -> None:
    """And what was probed by another version: per-feature fps, numbers of the video as floats."""

    def change(info: dict[str, Any]) -> None:
        info["features"][TOP]["info"] |= {
            "video.fps": 30.0,
            "video.height": 1,
            "video.crf": 1,
            "video.extra_options": {"x": 1},
        }
        info["features"]["action"]["fps"] = 30.0

    truth = library(episodes=(4,))
    roots = [truth.root, changed(truth.root, tmp_path / "other", change)]
    for number, sources in enumerate((roots, roots[::-1])):
        await merge_datasets(sources, tmp_path / f"out-{number}")
        features = read_json(tmp_path / f"out-{number}", "info.json")["features"]
        video = features[TOP]["info"]
        assert (video["video.crf"], video["video.extra_options"], video["video.height"]) == (None, {}, 64)
        assert video["video.g"] == read_json(truth.root, "info.json")["features"][TOP]["info"]["video.g"]
        assert "fps" not in features["action"]


def with_episodes(root: Path, copy: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """A copy of the dataset with another table of episodes."""
    shutil.copytree(root, copy)
    (path,) = (copy / "meta/episodes").rglob("*.parquet")
    pq.write_table(change(pq.read_table(path)), path)
    return copy


async def test_picture_statistics_of_another_shape_are_refused(library: Library, tmp_path: Path) -> None:
    name = f"stats/{TOP}/mean"

    def flatten(table: pa.Table) -> pa.Table:
        flat = [np.array(value).ravel().tolist() for value in table[name].to_pylist()]
        return table.set_column(table.column_names.index(name), name, [flat])

    root = library(episodes=(4, 5)).root
    with pytest.raises(MergeError, match=rf"shape of {name} is \(3, 1, 1\) in .*, but \(3,\) in .*other"):
        await merge_datasets([root, with_episodes(root, tmp_path / "other", flatten)], tmp_path / "out")


async def test_what_one_source_does_not_know_of_its_pictures_stays_unknown(library: Library, tmp_path: Path) -> None:
    """Older recorders took no quantiles. A merge of such a merge keeps the rest."""

    def drop(table: pa.Table) -> pa.Table:
        return table.drop_columns([name for name in table.column_names if name.startswith(f"stats/{TOP}/q")])

    root = library(episodes=(4, 5)).root
    other = with_episodes(root, tmp_path / "other", drop)
    await merge_datasets([root, other], tmp_path / "once")
    await merge_datasets([tmp_path / "once"], tmp_path / "twice")
    for out in ("once", "twice"):
        columns = read_table(tmp_path / out, "meta/episodes").to_pydict()
        assert columns[f"stats/{TOP}/mean"] == 2 * read_table(root, "meta/episodes")[f"stats/{TOP}/mean"].to_pylist()
        assert [one is None for one in columns[f"stats/{TOP}/q50"]] == [False, False, True, True]
        assert all(columns[f"stats/{WRIST}/q50"])


async def test_pictures_of_which_one_source_knows_nothing_get_no_overall_statistics(
    library: Library, tmp_path: Path
) -> None:
    def drop(table: pa.Table) -> pa.Table:
        return table.drop_columns([name for name in table.column_names if name.startswith(f"stats/{TOP}/")])

    other = with_episodes(library(episodes=(4, 5)).root, tmp_path / "other", drop)
    (other / "meta/stats.json").unlink()
    await merge_datasets([library(episodes=(4, 5)).root, other], tmp_path / "out")
    stats = read_json(tmp_path / "out", "stats.json")
    assert TOP not in stats
    assert stats.keys() >= {WRIST, "action", "index"}


async def test_rows_are_found_by_their_numbers_wherever_they_lie(library: Library, tmp_path: Path) -> None:
    """Also beside rows of a dead episode, which have the same indices."""
    truth = library(episodes=(4, 5))
    shutil.copytree(truth.root, tmp_path / "source")
    (path,) = (tmp_path / "source/data").rglob("*.parquet")
    rows = pq.read_table(path)
    dead = rows.set_column(rows.column_names.index("episode_index"), "episode_index", [[7] * len(rows)])
    mixed = pa.concat_tables([dead, rows]).take(np.random.default_rng(0).permutation(2 * len(rows)))
    pq.write_table(mixed, path, row_group_size=5)
    await merge_datasets([tmp_path / "source", truth.root], tmp_path / "out")
    await check_merged(tmp_path / "out", [truth, truth])


async def test_a_source_without_a_default_feature_is_refused(library: Library, tmp_path: Path) -> None:
    root = library(episodes=(4,), quirks=Quirks(without_default_feature="task_index")).root
    with pytest.raises(MergeError, match=r"lack task_index.*present are observation\.state"):
        await merge_datasets([library(episodes=(4,)).root, root], tmp_path / "out")


async def test_a_video_shorter_than_its_metadata_is_refused(library: Library, tmp_path: Path) -> None:
    root = library(episodes=(4, 6), quirks=Quirks(short_video_frames=2)).root
    with pytest.raises(MergeError, match="lacks 2 of the 6 frames of episode 1"):
        await merge_datasets([root], tmp_path / "out")
    assert not names(tmp_path)


IRREGULAR = {
    "orphan rows": Quirks(orphan_rows=3, collapsed_row_groups=True),
    "orphan files": Quirks(orphan_files=True),
    "no statistics": Quirks(no_stats=True),
    "several episode files": Quirks(episodes_per_meta_file=1),
    "self-references to files that aren't there": Quirks(stale_self_references=True),
    "columns through pandas": Quirks(float_index_columns=True, sorted_episode_columns=True),
    "older info": Quirks(unknown_info_keys=True, legacy_video_info=True),
}


@pytest.mark.parametrize("quirks", IRREGULAR.values(), ids=list(IRREGULAR))
async def test_irregular_sources_become_a_regular_dataset_that_merges_again(
    library: Library, tmp_path: Path, quirks: Quirks
) -> None:
    truths = [library(episodes=(4, 3), quirks=quirks), library(episodes=(5,))]
    once, twice = tmp_path / "once", tmp_path / "twice"
    await merge_datasets([truth.root for truth in truths], once)
    await merge_datasets([once, truths[1].root], twice)
    await check_merged(twice, [*truths, truths[1]])
    assert read_table(twice, "data")["index"].to_pylist() == list(range(17))
    assert sum(1 for _ in (twice / "data").rglob("*.parquet")) == 1
    assert "total_videos" not in read_json(twice, "info.json")


async def test_every_episode_names_the_file_that_holds_its_row(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(3,) * 7, cameras=(), tasks=("a",))
    await merge_datasets([truth.root] * 3, tmp_path / "out", data_file_max_bytes=30_000, files_per_chunk=2)
    files = sorted((tmp_path / "out/meta/episodes").rglob("*.parquet"))
    assert len(files) > 2
    for path in files:
        rows = pq.read_table(path).to_pydict()
        chunks, numbers = rows["meta/episodes/chunk_index"], rows["meta/episodes/file_index"]
        assert {f"chunk-{c:03d}/file-{f:03d}.parquet" for c, f in zip(chunks, numbers, strict=True)} == {
            f"{path.parent.name}/{path.name}"
        }
    await merge_datasets([tmp_path / "out"], tmp_path / "again", files_per_chunk=3)
    await check_merged(tmp_path / "again", [truth] * 3)


def test_a_hundred_episodes_share_a_row_group(tmp_path: Path) -> None:
    """A reader that wants one of many thousands reads little more, and a footer stays short."""
    numbers = {"episode_index": list(range(250)), "length": [1] * 250}
    write_episodes(tmp_path / "file.parquet", numbers, 10, 240)
    file = pq.ParquetFile(tmp_path / "file.parquet")
    groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert groups == [100, 100, 30]
    assert file.read()["episode_index"].to_pylist() == list(range(10, 240))


async def test_info_counts_and_carries(library: Library, tmp_path: Path) -> None:
    truths = [library(episodes=(4, 3), tasks=("a", "b")), library(episodes=(5,), tasks=("b",))]
    roots = [
        changed(truths[0].root, tmp_path / "one", lambda info: info.update(tools=[{"name": "grip"}], note=1)),
        changed(truths[1].root, tmp_path / "two", lambda info: info.update(tools=[{"name": "push"}], note=2)),
    ]
    await merge_datasets(roots, tmp_path / "out", files_per_chunk=5)
    info = read_json(tmp_path / "out", "info.json")
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 12, 2)
    assert (info["splits"], info["chunks_size"]) == ({"train": "0:3"}, 5)
    assert info["tools"] == [{"name": "grip"}, {"name": "push"}]
    assert "note" not in info


async def test_paths_of_the_sources_own_making(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(4, 3))

    def change(info: dict[str, Any]) -> None:
        info["data_path"] = "rows/{chunk_index}/{file_index}.parquet"
        info["video_path"] = "films/{video_key}/{file_index:02d}.mp4"

    root = changed(truth.root, tmp_path / "own", change)
    (root / "rows").mkdir()
    (root / "data/chunk-000").rename(root / "rows/0")
    (root / "rows/0/file-000.parquet").rename(root / "rows/0/0.parquet")
    for camera in truth.cameras:
        (root / "films" / camera).mkdir(parents=True)
        (root / f"videos/{camera}/chunk-000/file-000.mp4").rename(root / f"films/{camera}/00.mp4")
    await merge_datasets([root, truth.root], tmp_path / "out")
    await check_merged(tmp_path / "out", [truth, truth])


async def test_sources_behind_https(library: Library, tmp_path: Path) -> None:
    truths = [library(episodes=(4, 3)), library(episodes=(5,))]
    async with RangeServer(truths[0]) as server:
        fetch = FetchConfig(ca_file=server.ca_file, trust_env=False)
        await merge_datasets([server.url, truths[1].root], tmp_path / "out", fetch=fetch)
    await check_merged(tmp_path / "out", truths)


async def test_a_destination_with_files_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    with pytest.raises(MergeError, match="overwrite=True"):
        await merge_datasets(["/nowhere"], tmp_path / "out")


async def test_overwriting_replaces_all_that_was_there(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(4,))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    await merge_datasets([truth.root], tmp_path / "out", overwrite=True)
    await check_merged(tmp_path / "out", [truth])
    assert names(tmp_path) == {"out"}
    assert not (tmp_path / "out/file").exists()


@pytest.mark.parametrize("place", ["", "meta", ".."])
async def test_sources_are_never_changed(library: Library, tmp_path: Path, place: str) -> None:
    root = tmp_path / "all/source"
    shutil.copytree(library(episodes=(4,)).root, root)
    before = all_files(tmp_path)
    with pytest.raises(MergeError, match="never changed"):
        await merge_datasets([root], root / place, overwrite=True)
    assert all_files(tmp_path) == before


async def test_a_failure_halfway_leaves_the_destination_as_it_was(library: Library, tmp_path: Path) -> None:
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 5)).root, root)
    path = next((root / "data").rglob("*.parquet"))
    rows = pq.read_table(path)
    pq.write_table(rows.slice(0, 6), path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    with pytest.raises(DatasetError, match="has 2 rows with index in"):
        await merge_datasets([root], tmp_path / "out", overwrite=True)
    assert names(tmp_path) == {"source", "out"}
    assert (tmp_path / "out/file").exists()


async def test_a_cancelled_merge_is_gone_on_with(library: Library, tmp_path: Path) -> None:
    """At the first byte written, at the last, and again and again."""
    roots = [library(episodes=(4, 5)).root] * 2
    calls = 0

    def count(_now: MergeProgress) -> None:
        nonlocal calls
        calls += 1

    await merge_datasets(roots, tmp_path / "whole", workers=1, progress=count)
    cancelled = 0
    for last in range(1, calls + 1):
        left = last
        with anyio.CancelScope() as scope:

            def cancel(_now: MergeProgress, scope: anyio.CancelScope = scope) -> None:
                nonlocal left
                left -= 1
                if not left:
                    scope.cancel()

            await merge_datasets(roots, tmp_path / "out", workers=1, progress=cancel)
        if not scope.cancelled_caught:  # what was finished before is told with fewer calls
            break
        cancelled += 1
        assert not (tmp_path / "out").exists()
    assert cancelled > 2
    assert names(tmp_path) == {"whole", "out"}
    assert all_files(tmp_path / "out") == all_files(tmp_path / "whole")


async def test_a_dry_run_writes_nothing(library: Library, tmp_path: Path) -> None:
    roots = [library(episodes=(4, 5)).root, library(episodes=(6,)).root]
    planned = await merge_datasets(roots, tmp_path / "out", dry_run=True)
    assert not names(tmp_path)
    done = await merge_datasets(roots, tmp_path / "out")
    assert (planned.episodes, planned.frames, planned.tasks) == (done.episodes, done.frames, done.tasks) == (3, 15, 2)
    assert planned.is_dry_run
    assert not done.is_dry_run
    assert planned.planned == done.planned
    assert [file.episodes for file in planned.planned] == [3, 3, 3]
    for file in planned.planned:
        assert 0.4 < file.bytes / (tmp_path / "out" / file.path).stat().st_size < 2


async def test_what_is_not_carried_over_is_named(library: Library, tmp_path: Path) -> None:
    """By what can be listed; a web server can't."""
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 5)).root, root)
    (root / "meta/byte_index").mkdir()
    (root / "meta/lineage.json").touch()
    expected = (f"{root}/meta/byte_index/", f"{root}/meta/lineage.json")
    async with RangeServer(root) as server:
        fetch = FetchConfig(ca_file=server.ca_file, trust_env=False)
        for dry_run in (True, False):
            report = await merge_datasets([root, server.url, root], tmp_path / "out", dry_run=dry_run, fetch=fetch)
            assert report.dropped == expected


async def test_progress_ends_with_every_file_and_byte(library: Library, tmp_path: Path) -> None:
    told: list[MergeProgress] = []
    report = await merge_datasets(
        [library(episodes=(9, 4, 5), gop=6).root] * 2, tmp_path / "out", progress=told.append, video_file_max_bytes=1
    )
    parts = [tmp_path / "out" / file.path for file in report.planned]
    last = told[-1]
    assert (last.files_done, last.bytes_done) == (len(parts), sum(path.stat().st_size for path in parts))
    assert all(now.files_total == len(parts) and now.bytes_done <= now.bytes_total for now in told)
    assert [now.files_done for now in told] == sorted(now.files_done for now in told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be"),
        ({"workers": -1}, "workers must be"),
        ({"data_file_max_bytes": 0}, "data_file_max_bytes"),
        ({"video_file_max_bytes": 0}, "video_file_max_bytes"),
        ({"files_per_chunk": 0}, "files_per_chunk"),
        ({"sources": []}, "at least one"),
        ({"sources": "one"}, "must be a list"),
        ({"destination": "https://host/out"}, "local directory"),
    ],
)
async def test_arguments_that_cannot_be_meant(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"sources": ["/nowhere"], "destination": tmp_path / "out", **options}
    with pytest.raises(ConfigError, match=message):
        await merge_datasets(**arguments)


async def test_every_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=r"(?s)2 reasons.*nowhere.*neither"):
        await merge_datasets([tmp_path / "nowhere", tmp_path / "neither"], tmp_path / "out")

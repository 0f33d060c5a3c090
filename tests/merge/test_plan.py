"""What is refused, what is left out, and what stays as it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, DatasetError, MergeError
from asyncfetch.fetch import Fetcher
from asyncfetch.lerobot import open_dataset
from asyncfetch.merge import Selection, merge_datasets, select_episodes
from asyncfetch.merge.plan import Limits, plan_merge
from asyncfetch.merge.sources import load_source
from asyncfetch.testing import RangeServer
from tests.lerobot.serving import TOP, WRIST, refreshed
from tests.merge.test_job import all_files, check_merged, read_json

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
    sources = [tmp_path / "nowhere", root, changed(other, tmp_path / "other", change)]
    with pytest.raises(MergeError) as caught:
        await merge_datasets(sources, tmp_path / "out")
    for word in (
        "nowhere/meta/info.json",
        "fps is 30",
        "robot_type",
        "names of feature action",
        f"codec of {TOP}",
        f"width of {WRIST}",
        "'av1'",
    ):
        assert word in str(caught.value)
    assert names(tmp_path) == {"other"}


async def test_every_file_of_rows_is_looked_at(library: Library, tmp_path: Path) -> None:
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 6), cameras=(), episodes_per_data_file=1).root, root)
    path = root / "data/chunk-000/file-001.parquet"
    rows = pq.read_table(path)
    place = rows.column_names.index("next.reward")
    spoilt = rows.set_column(place, "next.reward", rows["next.reward"].cast("double")).drop_columns(["action"])
    pq.write_table(spoilt, path)
    with pytest.raises(MergeError, match=r"(?s)2 reasons.*file-001.parquet has no column action.*double in .*file-001"):
        await merge_datasets([root], tmp_path / "out")
    assert names(tmp_path) == {"source"}


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


async def test_a_recovery_point_is_no_place_to_cut(library: Library, tmp_path: Path) -> None:
    """What is before it comes along, wherever the episode goes."""
    truth = library(episodes=(15, 15, 15), cameras=(TOP,), episodes_per_video_file=3)
    root = await refreshed(truth, tmp_path / "source", "-g 15 -bf 0 -x264-params intra-refresh=1")
    await merge_datasets([root, root], tmp_path / "all")
    await select_episodes(root, tmp_path / "some", [2])
    places = [("all", 0, 0, 3), ("all", 1, 1, 0), ("all", 4, 1, 9), ("all", 5, 2, 14)]
    async with open_dataset(root) as source:
        for name, episode, of, frame in [*places, *(("some", 0, 2, frame) for frame in range(15))]:
            async with open_dataset(tmp_path / name) as dataset:
                picture = (await dataset.sample(episode, frame))[TOP]
            assert torch.equal(picture, (await source.sample(of, frame))[TOP]), (name, episode, frame)


async def test_depth_is_described_by_its_files(library: Library, tmp_path: Path) -> None:
    root = library(episodes=(4,), extras=("observation.images.depth",)).root
    await merge_datasets([root, root], tmp_path / "out")
    info = read_json(tmp_path / "out", "info.json")["features"]["observation.images.depth"]["info"]
    assert (info["video.pix_fmt"], info["video.codec"], info["is_depth_map"]) == ("gray12le", "hevc", True)


async def test_encoder_details_may_differ(library: Library, tmp_path: Path) -> None:
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


PICTURE = {"dtype": "image", "shape": [2, 2, 1], "names": ["height", "width", "channels"]}


@pytest.mark.parametrize(
    "info",
    [
        {"is_depth_map": True, "depth_unit": "m"},
        {"is_depth_map": True, "depth_unit": "mm", "own": {"deep": [1]}},
        {"video.is_depth_map": True},
        {"is_depth_map": False},
        {},
    ],
)
async def test_info_of_a_picture_in_the_table_stays(library: Library, tmp_path: Path, info: dict[str, Any]) -> None:
    """Also of numbers. What comes of it can be merged with what it is made of."""

    def change(said: dict[str, Any]) -> None:
        said["features"] |= {"depth": {**PICTURE, "info": info, "maker": "x"}}
        said["features"]["action"] |= {"info": {"unit": "rad"}, "fps": 30.0}
        said["note"] = {"by": "us"}

    root = changed(library(episodes=(4, 5)).root, tmp_path / "source", change)
    (path,) = (root / "data").rglob("*.parquet")
    picture = pa.array(
        [{"bytes": b"png", "path": None}] * 9, pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    pq.write_table(pq.read_table(path).append_column("depth", picture), path)
    one = await merge_datasets([root], tmp_path / "one")
    await select_episodes(root, tmp_path / "part", [1])
    two = await merge_datasets([tmp_path / "one", root, tmp_path / "part"], tmp_path / "two")
    said = {"is_depth_map": True} if "video.is_depth_map" in info else info
    for name in ("one", "part", "two"):
        merged = read_json(tmp_path / name, "info.json")
        assert merged["features"]["depth"] == {**PICTURE, "info": said, "maker": "x"}
        assert merged["features"]["action"]["info"] == {"unit": "rad"}
        assert merged["features"]["action"]["fps"] == 30.0
        assert merged["note"] == {"by": "us"}
    assert one.differences == two.differences == ()


async def test_differences_between_sources_are_listed(library: Library, tmp_path: Path) -> None:
    """Of a feature, of its info, and of the whole; in one source only, too."""

    def change(said: dict[str, Any]) -> None:
        said["features"]["action"] |= {"info": {"unit": "deg"}, "fps": 30.0}
        said["features"][TOP]["info"] |= {"video.crf": 99, "lens": "wide", "video.height": 1, "audio.codec": "aac"}
        said |= {"note": 2, "splits": {"train": "0:2", "test": "2:3"}, "total_videos": 7, "tools": [{"name": "a"}]}

    root = library(episodes=(4, 5, 3)).root
    one = changed(root, tmp_path / "one", lambda said: said["features"]["action"].update(info={"unit": "rad"}))
    other = changed(root, tmp_path / "other", change)
    report = await merge_datasets([one, other], tmp_path / "out")
    crf = read_json(root, "info.json")["features"][TOP]["info"]["video.crf"]
    assert set(report.differences) == {
        f"note is 2 in {other}, but missing in {one}",
        f"splits is {{'train': '0:2', 'test': '2:3'}} in {other}",
        f"unit of action is 'rad' in {one}, but 'deg' in {other}",
        f"fps of action is 30.0 in {other}, but missing in {one}",
        f"video.crf of {TOP} is {crf} in {one}, but 99 in {other}",
        f"lens of {TOP} is 'wide' in {other}, but missing in {one}",
    }
    assert read_json(tmp_path / "out", "info.json")["features"]["action"]["info"] == {}


async def test_units_of_depth_that_differ_are_refused(library: Library, tmp_path: Path) -> None:
    """In the table too, and depth beside what is none."""
    root = library(episodes=(4,), cameras=()).root
    roots: list[Path] = []
    for info in ({"is_depth_map": True, "depth_unit": "m"}, {"is_depth_map": True, "depth_unit": "mm"}, {}):
        own = {"p": {**PICTURE, "info": info}}
        roots.append(changed(root, tmp_path / str(len(roots)), lambda said, own=own: said["features"].update(own)))  # type: ignore[misc]
    with pytest.raises(MergeError, match=r"(?s)depth_unit of feature p is 'm' .* 'mm' .*is_depth_map .* True .* False"):
        await merge_datasets(roots, tmp_path / "out")


async def test_destination_with_files_is_refused_before_any_read(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "spelled", ["file://{quoted}", "file://localhost{quoted}", "FILE://{quoted}", "local://{plain}", "{link}"]
)
async def test_a_source_is_known_however_it_is_spelled(library: Library, tmp_path: Path, spelled: str) -> None:
    """By what the engine reads there."""
    root, link = tmp_path / "my 100%25 data", tmp_path / "link"
    shutil.copytree(library(episodes=(4,)).root, root)
    link.symlink_to(root)
    source = spelled.format(quoted=root.as_uri().removeprefix("file://"), plain=root, link=link)
    before = all_files(tmp_path)
    with pytest.raises(MergeError, match="never changed"):
        await merge_datasets([source], root, overwrite=True)
    assert all_files(tmp_path) == before


@pytest.mark.parametrize("spelled", ["file://{}", "file://localhost{}", "File://{}"])
async def test_a_destination_is_where_its_url_says(library: Library, tmp_path: Path, spelled: str) -> None:
    named = spelled.format((tmp_path / "to here").as_uri().removeprefix("file://"))
    report = await merge_datasets([library(episodes=(4,)).root], named)
    assert report.destination == tmp_path / "to here"
    assert names(tmp_path) == {"to here"}


async def test_a_source_that_is_read_twice_is_the_same_both_times(library: Library, tmp_path: Path) -> None:
    """Two selections of it, by two workers."""
    root, loaded = tmp_path / "source", []
    shutil.copytree(library(episodes=(4, 5)).root, root)
    for episode in (0, 1):
        async with Fetcher() as fetcher:
            loaded.append(await load_source(fetcher, Selection(root, [episode])))
        path = min(root.rglob("*.mp4"))
        path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(MergeError, match=f"1 reason:\n- {path} was changed while the sources were read, its size was"):
        plan_merge(loaded, Limits(100, 100, 100))


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


async def test_files_that_are_not_carried_over_are_named(library: Library, tmp_path: Path) -> None:
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
        ({"workers": 0}, "workers, which may be None"),
        ({"workers": -1}, "workers, which may be None"),
        ({"data_file_max_bytes": 0}, "data_file_max_bytes"),
        ({"video_file_max_bytes": 0}, "video_file_max_bytes"),
        ({"files_per_chunk": 0}, "files_per_chunk"),
        ({"files_per_chunk": 1001}, "at most 1000"),
        ({"sources": []}, "at least one"),
        ({"sources": "one"}, "must be a list"),
        ({"destination": "https://host/out"}, "local directory"),
        ({"destination": "file://host/out"}, "of the host 'host'"),
        ({"destination": ""}, "destination is empty"),
        ({"destination": "/tmp/out-\udcff"}, "isn't UTF-8"),
        ({"destination": "file:///tmp/out-%ff"}, "isn't UTF-8"),
        ({"destination": "s3://bucket/out-\udcff"}, "isn't UTF-8"),
    ],
)
async def test_arguments_that_cannot_be_meant(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"sources": ["/nowhere"], "destination": tmp_path / "out", **options}
    with pytest.raises(ConfigError, match=message):
        await merge_datasets(**arguments)


async def test_numbers_of_numpy_are_as_good(library: Library, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"workers": 1, "data_file_max_bytes": 2, "video_file_max_bytes": 3, "files_per_chunk": 4}
    of_numpy: dict[str, Any] = {name: np.int8(number) for name, number in numbers.items()}
    merge = partial(merge_datasets, [library(episodes=(4, 5)).root], tmp_path / "out", dry_run=True)
    plain, given = await merge(**numbers), await merge(**of_numpy)
    assert repr(replace(given, seconds=0)) == repr(replace(plain, seconds=0))


async def test_every_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=r"(?s)2 reasons.*nowhere.*neither"):
        await merge_datasets([tmp_path / "nowhere", tmp_path / "neither"], tmp_path / "out")

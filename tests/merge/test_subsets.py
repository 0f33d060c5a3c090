"""Some episodes of a dataset, its splits, and old datasets as new ones: every frame by its pixels."""

from __future__ import annotations

import json
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, DatasetError, EpisodeNotFound, FetchError, FormatError, MergeError
from asyncfetch.lerobot import open_dataset
from asyncfetch.merge import Selection, convert_dataset, merge_datasets, select_episodes, split_dataset
from asyncfetch.merge.subsets import split_episodes
from asyncfetch.tables.parquet import TAIL_BYTES
from asyncfetch.testing import RangeServer, read_identity
from tests.lerobot.serving import TOP, renumbered
from tests.merge.test_job import all_files, check_close, check_merged, read_json, read_table
from tests.merge.version2 import EPISODE_FILE, as_version2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncfetch.merge import MergeProgress
    from asyncfetch.testing import DatasetTruth
    from tests.lerobot.serving import Library

LENGTHS = (9, 4, 14, 5, 7)


async def check_selected(root: Path, wanted: Sequence[tuple[DatasetTruth, int]]) -> None:
    """Every frame of these episodes, in this order, through our reader."""
    async with open_dataset(str(root)) as dataset:
        assert (dataset.num_episodes, len(read_table(root, "data"))) == (len(wanted), dataset.num_frames)
        index = 0
        for episode, (truth, own) in enumerate(wanted):
            for frame in range(truth.lengths[own]):
                sample = await dataset.sample(episode, frame)
                for camera in truth.cameras:
                    assert read_identity(sample[camera]) == truth.identity(own, frame, camera)
                np.testing.assert_array_equal(
                    sample["observation.state"], truth.column("observation.state", own)[frame]
                )
                assert (sample["episode_index"], sample["frame_index"], sample["index"]) == (episode, frame, index)
                assert sample["task"] == truth.task(own)
                index += 1
        assert dataset.num_frames == index


@pytest.mark.parametrize("options", [{"codec": "h264", "gop": 12}, {"codec": "hevc", "gop": 6}], ids=["h264", "hevc"])
@pytest.mark.parametrize("episodes", [[0], [4, 1], range(1, 5)], ids=str)
async def test_selected_episodes(
    library: Library, tmp_path: Path, options: dict[str, Any], episodes: Sequence[int]
) -> None:
    truth = library(episodes=LENGTHS, episodes_per_video_file=3, **options)
    report = await select_episodes(truth.root, tmp_path / "out", episodes)
    await check_selected(tmp_path / "out", [(truth, episode) for episode in sorted(episodes)])
    assert report.frames == sum(LENGTHS[episode] for episode in episodes)
    videos = sum(path.stat().st_size for path in (tmp_path / "out/videos").rglob("*.mp4"))
    assert videos < 0.9 * sum(path.stat().st_size for path in (truth.root / "videos").rglob("*.mp4"))


async def test_selection_of_all_episodes_is_a_merge_of_one_dataset(library: Library, tmp_path: Path) -> None:
    """File for file. And parts of it, merged, are the whole again."""
    root = library(episodes=LENGTHS).root
    await merge_datasets([root], tmp_path / "merged")
    await select_episodes(root, tmp_path / "selected", range(len(LENGTHS)))
    whole = all_files(tmp_path / "merged")
    assert all_files(tmp_path / "selected") == whole
    await merge_datasets([Selection(root, [0, 1, 2]), Selection(root, (4, 3))], tmp_path / "joined")
    joined = all_files(tmp_path / "joined")
    assert {name for name in whole if whole[name] != joined[name]} <= {"meta/stats.json"}
    check_close(read_json(tmp_path / "joined", "stats.json")["action"], json.loads(whole["meta/stats.json"])["action"])


async def test_statistics_are_those_of_the_selected(library: Library, tmp_path: Path) -> None:
    root = library(episodes=LENGTHS, texture=0.5).root
    await select_episodes(root, tmp_path / "out", [1, 3])
    stats = read_json(tmp_path / "out", "stats.json")
    action = np.array(read_table(tmp_path / "out", "data")["action"].to_pylist())
    np.testing.assert_allclose(stats["action"]["mean"], action.mean(axis=0))
    own = read_table(root, "meta/episodes")
    counts = [own[f"stats/{TOP}/count"][episode].as_py()[0] for episode in (1, 3)]
    means = [np.array(own[f"stats/{TOP}/mean"][episode].as_py()) for episode in (1, 3)]
    np.testing.assert_allclose(stats[TOP]["mean"], np.average(means, axis=0, weights=counts))
    assert stats[TOP]["count"] == [sum(counts)]


async def test_files_of_other_episodes_are_not_read(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=LENGTHS, **EPISODE_FILE)
    async with RangeServer(truth.root) as server:
        fetch = FetchConfig(ca_file=server.ca_file, trust_env=False)
        await select_episodes(server.url, tmp_path / "out", [2], fetch=fetch)
        paths = {request.path for request in server.requests if not request.path.startswith("/meta")}
    assert len(paths) == 3
    assert all("file-002" in path for path in paths)


async def test_row_groups_without_selected_rows_are_not_read(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(2000,) * 4, cameras=())
    (path,) = (truth.root / "data").rglob("*.parquet")
    group = pq.ParquetFile(path).metadata.row_group(2)
    columns = [group.column(number) for number in range(group.num_columns)]
    own = min(column.dictionary_page_offset or column.data_page_offset for column in columns)
    async with RangeServer(truth.root) as server:
        fetch = FetchConfig(ca_file=server.ca_file, trust_env=False)
        await select_episodes(server.url, tmp_path / "out", [2], fetch=fetch)
        starts = [request.start for request in server.requests if request.path.startswith("/data")]
    size = path.stat().st_size
    assert min(start % size for start in starts if start is not None) == own < size - TAIL_BYTES
    await check_selected(tmp_path / "out", [(truth, 2)])


@pytest.mark.parametrize("episodes", [[], [0, 0], [-1], ["a"], [0.5], [True, False], 3], ids=str)
async def test_selections_that_can_not_be_meant(library: Library, tmp_path: Path, episodes: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="episodes must be"):
        await select_episodes(library(episodes=(4,)).root, tmp_path / "out", episodes)


async def test_an_episode_that_is_not_there(library: Library, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="no episode 7; it has 0 to 4") as caught:
        await select_episodes(library(episodes=LENGTHS).root, tmp_path / "out", [1, 7])
    assert isinstance(caught.value.__cause__, EpisodeNotFound)
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


@pytest.mark.parametrize("numbers", [(0, None, 2, 3), (None, 4, 10**6, None), (8, 2, 2**63 - 2, 5)], ids=str)
@pytest.mark.parametrize("counts_all", [False, True], ids=["rows", "numbers"])
async def test_unlisted_episode_is_left_out(
    library: Library, tmp_path: Path, numbers: tuple[int | None, ...], counts_all: bool
) -> None:
    """Its rows, its videos and what stats.json says of its pictures; the others are numbered anew, in their order."""
    truth = library(episodes=(9, 4, 14, 5), episodes_per_video_file=3, texture=0.5)
    root = renumbered(truth, tmp_path / "gaps", numbers, per_file=2, counts_all=counts_all)
    named = sorted((number, own) for own, number in enumerate(numbers) if number is not None)
    report = await merge_datasets([root, truth.root, root], tmp_path / "out")
    owns = [own for _, own in named]
    assert (report.episodes, report.frames) == (2 * len(owns) + 4, 2 * sum(truth.lengths[own] for own in owns) + 32)
    await check_selected(tmp_path / "out", [(truth, own) for own in [*owns, 0, 1, 2, 3, *owns]])
    await merge_datasets([root], tmp_path / "alone")
    await select_episodes(root, tmp_path / "selected", [number for number, _ in named][::-1])
    assert all_files(tmp_path / "alone") == all_files(tmp_path / "selected")
    if owns == sorted(owns):
        await select_episodes(truth.root, tmp_path / "same", owns)
        assert all_files(tmp_path / "alone") == all_files(tmp_path / "same")


async def test_episodes_are_selected_by_their_own_numbers(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=LENGTHS)
    root = renumbered(truth, tmp_path / "gaps", (7, None, 4, 10**6, 5))
    await select_episodes(root, tmp_path / "out", [10**6, 4])
    await check_selected(tmp_path / "out", [(truth, 2), (truth, 3)])
    with pytest.raises(MergeError, match="no episode 6; it has 4 to 1000000, but only 4 of") as caught:
        await select_episodes(root, tmp_path / "none", [4, 6, 10**6])
    assert isinstance(caught.value.__cause__, EpisodeNotFound)
    expected: list[tuple[dict[str, Any], list[list[int]]]] = [
        ({"a": 0.5, "b": 0.5}, [[2, 4], [0, 3]]),
        ({"a": 1, "b": 2}, [[2], [4, 0]]),
        ({"b": [7, 4]}, [[2, 0]]),
    ]
    for number, (splits, parts) in enumerate(expected):
        out = tmp_path / f"splits-{number}"
        await split_dataset(root, splits, out)
        for name, owns in zip(splits, parts, strict=True):
            await check_selected(out / name, [(truth, own) for own in owns])


async def test_splits(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=LENGTHS)
    reports = await split_dataset(truth.root, {"train": 0.8, "val": 0.2}, tmp_path)
    assert {name: report.episodes for name, report in reports.items()} == {"train": 4, "val": 1}
    await check_selected(tmp_path / "train", [(truth, episode) for episode in range(4)])
    await check_selected(tmp_path / "val", [(truth, 4)])
    tasks = [pq.read_table(tmp_path / name / "meta/tasks.parquet") for name in ("train", "val")]
    assert tasks[0].equals(tasks[1])
    with pytest.raises(MergeError, match="val isn't empty"):
        await split_dataset(truth.root, {"test": [0], "val": [1]}, tmp_path)
    with pytest.raises(ConfigError, match="destination is empty"):
        await split_dataset(truth.root, {"test": [0], "val": [1]}, "")
    assert {path.name for path in tmp_path.iterdir()} == {"train", "val"}  # noqa: ASYNC240


async def test_a_split_below_a_url(library: Library, tmp_path: Path) -> None:
    """Its names are quoted as the url is."""
    await split_dataset(library(episodes=LENGTHS).root, {"50% #1": [0], "b": [1]}, (tmp_path / "my splits").as_uri())
    assert {path.name for path in (tmp_path / "my splits").iterdir()} == {"50% #1", "b"}


async def test_a_split_that_is_interrupted_is_gone_on_with(library: Library, tmp_path: Path) -> None:
    """Until all parts are written none is there; what is finished of each isn't written again."""
    root = library(episodes=LENGTHS).root
    split = partial(split_dataset, root, {"a": 2, "b": 3}, video_file_max_bytes=1, workers=1)
    await split(destination=tmp_path / "whole")
    told: list[MergeProgress] = []

    def stop(now: MergeProgress) -> None:
        told.append(now)
        if now.files_done == 8:  # of 5 and 7
            raise FetchError("the network is gone")

    out = tmp_path / "out"
    with pytest.raises(FetchError, match="network"):
        await split(destination=out, progress=stop)
    assert (told[-1].files_total, told[-1].bytes_done <= told[-1].bytes_total) == (12, True)
    assert all(path.name.startswith(".") for path in out.iterdir())
    before = {path.stat().st_ino for path in out.rglob("*.mp4")}
    reports = await split(destination=out)
    assert all_files(out) == all_files(tmp_path / "whole")
    assert len(before & {path.stat().st_ino for path in out.rglob("*.mp4")}) > 5
    assert [report.episodes for report in reports.values()] == [2, 3]


async def test_a_split_of_a_broken_dataset_leaves_nothing(library: Library, tmp_path: Path) -> None:
    root = tmp_path / "source"
    shutil.copytree(library(episodes=LENGTHS).root, root)
    path = next((root / "data").rglob("*.parquet"))
    pq.write_table(pq.read_table(path).slice(0, 30), path)
    with pytest.raises(DatasetError, match="episode 3 has 3 rows"):
        await split_dataset(root, {"a": 2, "b": 3}, tmp_path / "out")
    assert all_files(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("splits", "count", "expected"),
    [
        ({"a": 0.9, "b": 0.1}, 10, {"a": [*range(9)], "b": [9]}),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 10, {"a": [0, 1, 2], "b": [3, 4, 5, 6], "c": [7, 8, 9]}),
        ({"a": 0.5}, 3, {"a": [0, 1]}),
        ({"a": 1, "b": 2}, 4, {"a": [0], "b": [1, 2]}),
        ({"a": [3, 1], "b": range(2, 3)}, 4, {"a": [3, 1], "b": [2]}),
        ({"a": np.int64(1), "b": 2}, 4, {"a": [0], "b": [1, 2]}),
        ({"a": np.float32(0.5)}, 4, {"a": [0, 1]}),
    ],
)
def test_split_episodes_by_shares_counts_and_lists(
    splits: dict[str, Any], count: int, expected: dict[str, list[int]]
) -> None:
    assert split_episodes(range(count), splits) == expected


def test_drawn_splits_are_the_same_each_time_and_share_nothing() -> None:
    drawn = [split_episodes(100, {"a": 0.7, "b": 0.3}, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    for one in drawn:
        assert sorted(one["a"] + one["b"]) == list(range(100))
        assert (len(one["a"]), one["a"] == sorted(one["a"])) == (70, True)


@pytest.mark.parametrize(
    "splits",
    [
        {},
        {"a": 0.9, "b": 0.2},
        {"a": 0.0},
        {"a": -0.5},
        {"a": float("nan")},
        {"a": 11},
        {"a": -1},
        {"a": 0},
        {"a": 0.01},
        {"a": 0.5, "b": 1},
        {"a": [0, 1], "b": [1]},
        {"a": []},
        {"a": True},
        {"a": "0-9"},
        {"a/b": 0.5},
        {"..": 0.5},
        {"": 0.5},
        {1: 0.5},
        ["a"],
        None,
    ],
    ids=str,
)
def test_splits_that_can_not_be_meant(splits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        split_episodes(range(10), splits)


@pytest.mark.parametrize("seed", [-1, 1.5, "x", True])
def test_a_seed_that_is_none(seed: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="seed, which may be None, must be a whole number, at least 0"):
        split_episodes(range(10), {"a": 0.5}, seed=seed)


@pytest.mark.parametrize("stats", [True, False], ids=["v2.1", "v2.0"])
async def test_an_old_dataset_becomes_the_new_one(library: Library, tmp_path: Path, stats: bool) -> None:
    """The very files that a merge of the new one gives, so it is right by every test of those."""
    truth = library(episodes=(9, 4, 0, 14, 5), **EPISODE_FILE)
    old = as_version2(truth, tmp_path / "old", stats=stats)
    before = all_files(old)
    await convert_dataset(old, tmp_path / "new")
    await check_merged(tmp_path / "new", [truth])
    await merge_datasets([truth.root], tmp_path / "merged")
    new, merged = all_files(tmp_path / "new"), all_files(tmp_path / "merged")
    different = {name for name in merged if new[name] != merged[name]}
    assert different <= ({"meta/stats.json"} if stats else {"meta/episodes/chunk-000/file-000.parquet"})
    assert all_files(old) == before
    await merge_datasets([old, Selection(old, [3])], tmp_path / "both")
    await check_selected(tmp_path / "both", [(truth, episode) for episode in (0, 1, 2, 3, 4, 3)])


@pytest.mark.parametrize("stats", [True, False], ids=["v2.1", "v2.0"])
@pytest.mark.parametrize(("gone", "total"), [((1,), 4), ((1,), 5), ((0, 2), 3), ((0, 3), 5), ((4,), 4)], ids=str)
async def test_an_old_dataset_of_which_episodes_were_taken_out(
    library: Library, tmp_path: Path, stats: bool, gone: tuple[int, ...], total: int
) -> None:
    """Where the rows of those behind them begin only their files say. Their statistics are still there."""
    truth = library(episodes=(9, 4, 6, 14, 5), **EPISODE_FILE)
    old = as_version2(truth, tmp_path / "old", stats=stats)
    left = [own for own in range(5) if own not in gone]
    path = old / "meta/episodes.jsonl"
    path.write_text("".join(f"{line}\n" for own, line in enumerate(path.read_text().splitlines()) if own in left))
    info = read_json(old, "info.json")
    info |= {"total_episodes": total, "total_frames": sum(truth.lengths[own] for own in left)}
    (old / "meta/info.json").write_text(json.dumps(info))
    await convert_dataset(old, tmp_path / "new")
    await check_selected(tmp_path / "new", [(truth, own) for own in left])
    await select_episodes(old, tmp_path / "some", left[-1:])
    await check_selected(tmp_path / "some", [(truth, left[-1])])


def _break_line(root: Path) -> None:
    (root / "meta/tasks.jsonl").write_text('{"task_index": 0\n')


def _drop_number(root: Path) -> None:
    path = root / "meta/episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[1]["length"]
    path.write_text("\n".join(map(json.dumps, lines)))


def _number_beyond(root: Path) -> None:
    path = root / "meta/episodes.jsonl"
    path.write_text(path.read_text().replace('"episode_index": 2', f'"episode_index": {2**64}'))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_break_line, "tasks.jsonl isn't JSON"),
        (_drop_number, "length in .*episodes.jsonl is None"),
        (_number_beyond, r"episode_index in .*episodes.jsonl is 18446744073709551616; .* below 2\*\*31"),
    ],
)
async def test_a_damaged_old_dataset(
    library: Library, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    old = as_version2(library(episodes=(9, 4, 5), **EPISODE_FILE), tmp_path / "old")
    change(old)
    with pytest.raises(MergeError, match=words) as caught:
        await convert_dataset(old, tmp_path / "new")
    assert isinstance(caught.value.__cause__, FormatError)


async def test_an_old_datasets_episodes_are_those_of_its_table(library: Library, tmp_path: Path) -> None:
    """Whatever info.json counts."""
    truth = library(episodes=(9, 4, 5), **EPISODE_FILE)
    old = as_version2(truth, tmp_path / "old")
    path = old / "meta/episodes.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.warns(RuntimeWarning, match="3 episodes where there are 2 and 18 frames where there are 13"):
        await convert_dataset(old, tmp_path / "new")
    async with open_dataset(tmp_path / "new") as dataset:
        assert dataset.episodes.lengths.tolist() == [9, 4]
        assert dataset.metadata.info.total_frames == 13
        assert read_identity((await dataset.sample(1, 3))[TOP]) == truth.identity(1, 3, TOP)


async def test_dataset_that_needs_no_conversion_is_not_copied(library: Library, tmp_path: Path) -> None:
    root = library(episodes=(4,)).root
    with pytest.raises(MergeError, match=rf"{root} is a LeRobot v3\.0 dataset already.*merge it alone"):
        await convert_dataset(root, tmp_path / "out")
    with pytest.raises(MergeError, match="nowhere"):
        await convert_dataset(tmp_path / "nowhere", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_still_older_ones_are_refused_with_the_way_out(library: Library, tmp_path: Path) -> None:
    old = as_version2(library(episodes=(9, 4, 5), **EPISODE_FILE), tmp_path / "old")
    (old / "meta/info.json").write_text((old / "meta/info.json").read_text().replace("v2.1", "v1.6"))
    with pytest.raises(MergeError, match="LeRobot's own converters") as caught:
        await convert_dataset(old, tmp_path / "new")
    assert isinstance(caught.value.__cause__, DatasetError)

from __future__ import annotations

import gc
import json
import pickle
import re
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncfetch.errors import (
    AsyncFetchError,
    ConfigError,
    DatasetError,
    EpisodeNotFound,
    FormatError,
    NotFound,
    anew,
)
from asyncfetch.fetch import Fetcher
from asyncfetch.lerobot.listing import list_tables
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.tables.parquet import open_table
from asyncfetch.testing import Quirks
from tests.lerobot.conftest import RoundReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lerobot.conftest import Tables, WriteTable
    from tests.lerobot.serving import Library
    from tests.local_reader import LocalReader


DATA = Path(__file__).parents[1] / "data"
TOP = "observation.images.top"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


@pytest.mark.parametrize("name", ["h264", "merge-a"])
async def test_recorded_dataset(reader: LocalReader, name: str) -> None:
    """Everything that the table says, compared with pyarrow and json reading the same files."""
    root = DATA / name
    metadata = await load_metadata(reader, str(root))

    info = json.loads((root / "meta/info.json").read_text())
    assert list(metadata.features) == list(info["features"])
    assert metadata.cameras == (TOP, "observation.images.wrist")
    assert metadata.info.fps == info["fps"]
    assert metadata.stats == json.loads((root / "meta/stats.json").read_text())
    assert metadata.tasks == {
        row["task_index"]: row["task"] for row in pq.read_table(root / "meta/tasks.parquet").to_pylist()
    }
    rows = pq.read_table(root / EPISODES).to_pylist()
    assert len(metadata.episodes) == len(rows)
    for episode, row in zip(metadata.episodes, rows, strict=True):
        assert (episode.index, episode.length, list(episode.tasks)) == (
            row["episode_index"],
            row["length"],
            row["tasks"],
        )
        assert (episode.from_index, episode.to_index) == (row["dataset_from_index"], row["dataset_to_index"])
        assert episode.data_url == str(root / "data/chunk-000/file-000.parquet")
        for camera, span in episode.videos.items():
            assert span.url == str(root / f"videos/{camera}/chunk-000/file-000.mp4")
            assert span.first_frame == round(row[f"videos/{camera}/from_timestamp"] * info["fps"])
            assert span.num_frames == episode.length


async def test_small_files_cost_one_request_each(reader: LocalReader) -> None:
    await load_metadata(reader, str(DATA / "h264"))
    assert sorted(Path(path).name for path, _, _ in reader.log) == [
        "file-000.parquet",
        "info.json",
        "stats.json",
        "tasks.parquet",
    ]


async def test_statistics_are_not_fetched(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    tables.lengths = (1,) * 400
    tables.__post_init__()
    tables.episodes["stats/action/mean"] = list(np.random.default_rng(0).random((400, 400)))
    root = tables.write(tmp_path)
    await load_metadata(reader, root)

    size = (tmp_path / EPISODES).stat().st_size
    assert size > 1_000_000
    assert sum(stop - start for start, stop in reader.of("meta/episodes")) < 64 * 1024 + 20_000


async def test_chosen_features_and_the_default_ones(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    root = tables.write(tmp_path)
    metadata = await load_metadata(reader, root, features=["reward"])
    assert list(metadata.features) == ["reward", "timestamp", "frame_index", "episode_index", "index", "task_index"]
    assert metadata.cameras == ()
    assert metadata.episodes[0].videos == {}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (["reward", "nope"], f"no feature 'nope'; it has action, reward, {TOP}, timestamp"),
        ("reward", "a collection of keys"),
    ],
)
async def test_unknown_features_are_refused_with_the_known(
    reader: LocalReader,
    tables: Tables,
    tmp_path: Path,
    features: Any,  # noqa: ANN401
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        await load_metadata(reader, tables.write(tmp_path), features=features)


async def test_no_stats(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    assert (await load_metadata(reader, tables.write(tmp_path))).stats is None


async def test_small_files_are_parsed_in_one_call_in_a_thread(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    calls: list[Callable[[], Any]] = []
    metadata = await load_metadata(reader, tables.write(tmp_path), run=partial(_counted, calls))
    assert len(calls) == 1
    assert len(metadata.episodes) == len(tables.episodes["episode_index"])


async def test_a_members_small_local_files_are_read_in_one_call(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    """And it says what it says when they are read by the reader."""
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/stats.json").write_text('{"reward": {"max": [1.0]}}')
    root = tables.write(tmp_path)
    reads: list[Callable[[], Any]] = []
    parses: list[Callable[[], Any]] = []
    usual = await load_metadata(reader, root)
    reader.log.clear()
    metadata = await load_metadata(reader, root, run=partial(_counted, parses), read_files=partial(_counted, reads))
    assert (len(reads), len(parses), reader.log) == (1, 1, [])
    assert metadata.fingerprint == usual.fingerprint
    assert metadata.stats == usual.stats == {"reward": {"max": [1.0]}}
    assert (metadata.info, metadata.tasks, metadata.cameras) == (usual.info, usual.tasks, usual.cameras)
    assert list(metadata.episodes) == list(usual.episodes)


@pytest.mark.parametrize("name", ["info.json", "tasks.parquet", "stats.json", "episodes/chunk-000/file-000.parquet"])
@pytest.mark.parametrize("damage", ["gone", "empty", "directory", "long"])
async def test_errors_of_a_members_local_file_are_any_datasets(
    reader: LocalReader, tables: Tables, tmp_path: Path, name: str, damage: str
) -> None:
    root = tables.write(tmp_path)
    path = tmp_path / "meta" / name
    path.unlink(missing_ok=True)
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "directory":
        path.mkdir()
    elif damage == "long":
        path.write_bytes(b" " * (2**20 + 1))
    outcomes: list[Any] = []
    for read_files in (None, anyio.to_thread.run_sync):
        try:
            outcomes.append((await load_metadata(reader, root, read_files=read_files)).stats)
        except (AsyncFetchError, OSError) as error:
            outcomes.append(repr(error))
    assert outcomes[0] == outcomes[1]


async def _counted(calls: list[Callable[[], Any]], call: Callable[[], Any]) -> Any:  # noqa: ANN401
    calls.append(call)
    return call()


async def test_wrong_root(reader: LocalReader, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is it the root of a LeRobot dataset") as caught:
        await load_metadata(reader, str(tmp_path))
    assert caught.value.url == str(tmp_path / "meta/info.json")


async def test_an_older_version_is_named_before_what_it_lacks(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    tables.info = {"codebase_version": "v2.1"}
    root = tables.write(tmp_path)
    (tmp_path / "meta/tasks.parquet").unlink()
    (tmp_path / EPISODES).unlink()
    with pytest.raises(DatasetError, match=r"v2\.1"):
        await load_metadata(reader, root)


@pytest.mark.parametrize(
    "tasks",
    [
        {"task_index": [0, 1], "__index_level_0__": ["pick", "place"]},
        {"task": ["place", "pick"], "task_index": [1, 0]},
        {"task_index": pa.array([0, 1], pa.int16()), "task": pa.array(["pick", "place"]).dictionary_encode()},
        {"task_index": [1.0, 0.0], "task": ["place", "pick"]},
    ],
)
async def test_tasks_go_by_their_index(
    reader: LocalReader, tables: Tables, tmp_path: Path, tasks: dict[str, Any]
) -> None:
    tables.tasks = tasks
    metadata = await load_metadata(reader, tables.write(tmp_path))
    assert metadata.tasks == {0: "pick", 1: "place"}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            {"task_index": [0, 0], "task": ["pick", "place"]},
            "has 2 tasks of task_index 0; each needs a number of its own; write",
        ),
        ({"task_index": [0, None], "task": ["pick", "place"]}, "has no value in 1 of 2 rows, first in row 1; write"),
        (
            {"task_index": [0, 1], "task": ["pick", None]},
            "must hold the text of each task; row 1 is None; write the dataset anew",
        ),
        ({"task_index": [0, 1], "name": ["pick", "place"]}, "has no column task; present are task_index, name; write"),
        (
            {"task_index": [0, 1], "task": pa.array([b"pick", b"pl\xffce"]).view(pa.string())},
            "holds a string that Python can't: 'utf-8' codec .*; copy",
        ),
        (
            {"task_index": [0, 1], "task": pa.array([2**62] * 2, pa.timestamp("us"))},
            r"holds a timestamp\[us\] that Python can't: .*; copy",
        ),
        ({"task_index": ["a", "b"], "task": ["pick", "place"]}, "must hold numbers, not string; write"),
    ],
)
async def test_tasks_that_cannot_be_told_apart(
    reader: LocalReader, tables: Tables, tmp_path: Path, tasks: dict[str, Any], message: str
) -> None:
    tables.tasks = tasks
    with pytest.raises(FormatError, match=rf"tasks\.parquet {message}"):
        await load_metadata(reader, tables.write(tmp_path))


def reorder(tables: Tables) -> None:
    tables.episodes = dict(sorted(tables.episodes.items()))


def permute_rows(tables: Tables) -> None:
    tables.episodes = pa.table(tables.episodes).take([2, 0, 1]).to_pydict()


def float_numbers(tables: Tables) -> None:
    for name, values in tables.episodes.items():
        if name.endswith("index") or name == "length":
            tables.episodes[name] = np.asarray(values, np.float64)


def narrow_numbers(tables: Tables) -> None:
    for name in ("episode_index", "length", "data/file_index"):
        tables.episodes[name] = np.asarray(tables.episodes[name], np.uint8)


def numbers_in_dictionaries(tables: Tables) -> None:
    for name, values in tables.episodes.items():
        if "index" in name or "timestamp" in name or name == "length":
            tables.episodes[name] = pa.array(values).dictionary_encode()


def tasks_in(kind: pa.DataType) -> Callable[[Tables], None]:
    def change(tables: Tables) -> None:
        tables.episodes["tasks"] = pa.array(tables.episodes["tasks"], kind)
        tables.tasks["task"] = pa.array(tables.tasks["task"], kind.field(0).type)

    return change


TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
LISTS = [list_of(text) for list_of in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view) for text in TEXTS]


@pytest.mark.parametrize(
    "change",
    [reorder, permute_rows, float_numbers, narrow_numbers, numbers_in_dictionaries, *map(tasks_in, LISTS)],
    ids=lambda change: change.__name__,
)
async def test_irregular_episode_tables_read_the_same(
    reader: LocalReader,
    tables: Tables,
    tmp_path: Path,
    change: Callable[[Tables], object],
) -> None:
    regular = await load_metadata(reader, tables.write(tmp_path))
    change(tables)
    irregular = await load_metadata(reader, tables.write(tmp_path))
    assert list(irregular.episodes) == list(regular.episodes)
    assert irregular.fingerprint == regular.fingerprint


@pytest.mark.parametrize("tasks", [[[], [], []], [None, None, None], None])
async def test_episodes_without_tasks(reader: LocalReader, tables: Tables, tmp_path: Path, tasks: Any) -> None:  # noqa: ANN401
    del tables.episodes["tasks"]
    if tasks is not None:
        tables.episodes["tasks"] = pa.array(tasks, pa.list_(pa.null()))
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    assert [episode.tasks for episode in episodes] == [(), (), ()]


async def test_an_episode_file_without_rows(
    reader: LocalReader, tables: Tables, tmp_path: Path, write_table: WriteTable
) -> None:
    root = tables.write(tmp_path)
    write_table(
        tmp_path / EPISODES, pa.table(tables.episodes).slice(0, 0).to_pydict() | {"tasks": pa.array([], pa.null())}
    )
    with pytest.raises(FormatError, match=r"file-000.parquet has no episode, but info.json counts 3"):
        await load_metadata(reader, root)


async def test_fingerprint_knows_places_but_not_the_url(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    first = await load_metadata(reader, tables.write(tmp_path / "a"))
    copied = await load_metadata(reader, tables.write(tmp_path / "b"))
    tables.episodes[f"videos/{TOP}/file_index"] = np.array([0, 1, 1])
    moved = await load_metadata(reader, tables.write(tmp_path / "c"))
    assert first.fingerprint == copied.fingerprint != moved.fingerprint


def set_value(name: str, row: int, value: object) -> Callable[[Tables], None]:
    def change(tables: Tables) -> None:
        values = np.asarray(tables.episodes[name]).tolist()
        values[row] = value
        tables.episodes[name] = values

    return change


async def test_the_fingerprint_knows_the_episodes_numbers(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    """Also from frames that are numbered as the episodes of another dataset are."""
    tables.lengths = (1, 1, 1)
    tables.__post_init__()
    fingerprints = []
    for number, (episodes, starts) in enumerate([
        ([0, 1, 2], [0, 1, 2]),
        ([0, 2, 5], [0, 1, 2]),
        ([0, 1, 2], [0, 2, 5]),
    ]):
        stops = [start + 1 for start in starts]
        tables.episodes |= {"episode_index": episodes, "dataset_from_index": starts, "dataset_to_index": stops}
        metadata = await load_metadata(reader, tables.write(tmp_path / str(number)))
        assert [*metadata.episodes.indices] == episodes
        fingerprints.append(metadata.fingerprint)
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_value("length", 2, 4), r"episode 9 has frames \[7, 12\), which isn't its length 4"),
        (set_value("length", 1, -1), r"episode 5 has length -1"),
        (set_value("dataset_from_index", 1, 2), r"episode 5 has frames \[2, 7\), which isn't its length 4"),
    ],
)
async def test_contradictions_name_an_episode_by_its_own_number(
    reader: LocalReader, tables: Tables, tmp_path: Path, change: Callable[[Tables], object], message: str
) -> None:
    tables.episodes["episode_index"] = [0, 5, 9]
    change(tables)
    with pytest.raises(FormatError, match=message):
        await load_metadata(reader, tables.write(tmp_path))


async def test_impossible_place_fails_the_episode_of_its_number(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    tables.episodes["episode_index"] = [0, 5, 9]
    set_value(f"videos/{TOP}/from_timestamp", 1, -1.0)(tables)
    set_value("data/file_index", 2, None)(tables)
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    with pytest.raises(DatasetError, match=r"episode 5 begins at -1.0 s"):
        episodes[5]
    with pytest.raises(DatasetError, match=r"no value in data/file_index for episode 9, which has 5 frames"):
        episodes[9]
    assert episodes[0].index == 0


@pytest.mark.parametrize("files", [2, 5, 13])
async def test_several_episode_files(
    reader: LocalReader, tables: Tables, tmp_path: Path, write_table: WriteTable, files: int
) -> None:
    """Two files a chunk directory; ten and more tell numeric from lexicographic order."""
    tables.lengths = (2,) * (files + 4)
    tables.info = {"chunks_size": 2}
    tables.__post_init__()
    root = tables.write(tmp_path)
    whole = pa.table(tables.episodes)
    for number in range(files):
        rows = whole.slice(number, 1) if number < files - 1 else whole.slice(number)
        path = tmp_path / f"meta/episodes/chunk-{number // 2:03d}/file-{number % 2:03d}.parquet"
        write_table(path, dict(zip(rows.column_names, rows.columns, strict=True)))
    metadata = await load_metadata(reader, root)
    assert metadata.episodes.lengths.tolist() == [2] * (files + 4)
    assert len(reader.of("meta/episodes")) <= files + 8


TOTALS: dict[str, tuple[dict[str, int], str]] = {
    "too many episodes": ({"total_episodes": 9}, "9 episodes where there are 3 in"),
    "too few episodes": ({"total_episodes": 2}, "2 episodes where there are 3 in"),
    "too many frames": ({"total_frames": 13}, "13 frames where there are 12 in"),
    "too few frames": ({"total_frames": 0}, "0 frames where there are 12 in"),
    "another number of tasks": ({"total_tasks": 7}, "7 tasks where there are 2 in"),
    "none at all": (
        {"total_episodes": 0, "total_frames": 0, "total_tasks": 0},
        "0 episodes where there are 3 and 0 frames where there are 12 and 0 tasks where there are 2 in",
    ),
}


@pytest.mark.parametrize(("totals", "message"), TOTALS.values(), ids=list(TOTALS))
@pytest.mark.parametrize("numbers", [[0, 1, 2], [0, 5, 9]], ids=str)
async def test_the_tables_totals_count_with_one_warning(
    reader: LocalReader, tables: Tables, tmp_path: Path, totals: dict[str, int], message: str, numbers: list[int]
) -> None:
    tables.episodes["episode_index"] = numbers
    regular = await load_metadata(reader, tables.write(tmp_path / "regular"))
    tables.info = {**totals}
    root = tables.write(tmp_path / "other")
    with pytest.warns(RuntimeWarning, match=message) as warned:
        metadata = await load_metadata(reader, root)
    assert len(warned) == 1
    assert list(metadata.oddities) == [("totals", str(warned[0].message))]
    assert metadata.fingerprint == regular.fingerprint
    assert (len(metadata.episodes), metadata.episodes.num_frames) == (3, 12)


async def test_no_episode_where_some_are_counted_is_refused(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    root = tables.write(tmp_path)
    (tmp_path / EPISODES).unlink()
    with pytest.raises(FormatError, match=r"file-000.parquet is not there, but info.json counts 3"):
        await load_metadata(reader, root)


NAMES: dict[str, tuple[int, list[str], bool]] = {
    "a chunk of one file by now": (1, ["000/file-000", "000/file-001", "000/file-002"], True),
    "chunks of one file before": (1000, ["000/file-000", "001/file-000", "002/file-000"], True),
    "both": (2, ["000/file-000", "001/file-000", "001/file-001", "001/file-002"], True),
    "begun with another": (1000, ["000/file-001", "000/file-002"], True),
    "a file lost between": (1000, ["000/file-000", "000/file-002"], False),
    "names of another program": (1000, ["a/part-9", "a/part-10", "b/part-2"], False),
}


@pytest.mark.parametrize(("size", "names", "without_listing"), NAMES.values(), ids=list(NAMES))
@pytest.mark.parametrize("lists", [True, False], ids=["listed", "by names"])
async def test_tables_are_found_where_names_on_record_do_not_hold(
    reader: LocalReader,
    tables: Tables,
    tmp_path: Path,
    write_table: WriteTable,
    size: int,
    names: list[str],
    without_listing: bool,
    lists: bool,
) -> None:
    tables.lengths = (2,) * 7
    tables.info = {"chunks_size": size}
    tables.__post_init__()
    regular = await load_metadata(reader, tables.write(tmp_path / "regular"))
    root, whole = tables.write(tmp_path / "other"), pa.table(tables.episodes)
    (tmp_path / "other" / EPISODES).unlink()
    for number, name in enumerate(names):
        rows = whole.slice(number, 1) if number < len(names) - 1 else whole.slice(number)
        path = tmp_path / f"other/meta/episodes/chunk-{name}.parquet"
        write_table(path, dict(zip(rows.column_names, rows.columns, strict=True)))
    async with Fetcher() as fetcher:
        listing = partial(list_tables, fetcher) if lists else None
        if lists or without_listing:
            metadata = await load_metadata(reader, root, list_tables=listing)
            assert metadata.fingerprint == regular.fingerprint
            assert len(metadata.episodes.urls) == len(names)
        else:
            with (
                pytest.raises(FormatError, match="is not there")
                if "000/file-000" not in names
                else pytest.warns(RuntimeWarning, match="7 episodes where there are 1")
            ):
                await load_metadata(reader, root, list_tables=listing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_value("episode_index", 1, 0),
            r"file-000.parquet: episode_index 0 is that of a row in .*file-000.parquet,",
        ),
        (set_value("episode_index", 1, -1), r"file-000.parquet: episode_index -1 is below 0"),
        (set_value("length", 1, 3), r"file-000.parquet: episode 1 has frames \[3, 7\), which isn't its length 3"),
        (set_value("length", 0, -3), r"episode 0 has length -3"),
        (set_value("length", 2, None), r"column length .* has no value in 1 of 3 rows, first in row 2"),
        (set_value("length", 2, 4.5), r"column length .* whole numbers; row 2 is 4.5"),
        (set_value("length", 2, 1e300), r"column length .* whole numbers; row 2 is 1e\+300"),
        (lambda tables: tables.episodes.pop("length"), r"file-000.parquet has no column length; present are"),
        (
            lambda tables: tables.episodes.update(length=["a", "b", "c"]),
            r"column length .* must hold numbers, not string",
        ),
        (
            lambda tables: tables.episodes.update(length=pa.array([b"\xff"] * 3).view(pa.string())),
            r"column length .* must hold numbers, not string; write",
        ),
        (
            lambda tables: tables.episodes.update(tasks=[1, 2, 3]),
            r"column tasks .* must hold lists of strings, not int64",
        ),
        (
            lambda tables: tables.episodes.update(
                tasks=pa.ListArray.from_arrays(
                    [0, 1, 2, 3], pa.array([b"pick", b"pl\xffce", b"pick"]).view(pa.string())
                )
            ),
            r"column tasks .*file-000.parquet holds a string that Python can't: 'utf-8' codec .*; copy",
        ),
    ],
)
async def test_contradictions_name_file_and_numbers(
    reader: LocalReader,
    tables: Tables,
    tmp_path: Path,
    change: Callable[[Tables], object],
    message: str,
) -> None:
    change(tables)
    with pytest.raises(FormatError, match=message):
        await load_metadata(reader, tables.write(tmp_path))


def shifted(tables: Tables, frames: int) -> None:
    """The last episode, in the table of episodes."""
    for name in ("dataset_from_index", "dataset_to_index"):
        set_value(name, 2, int(tables.episodes[name][2]) + frames)(tables)


@pytest.mark.parametrize(
    ("frames", "message"),
    [(-1, r"episode 2 has frames \[6, 11\), and episode 1 \[3, 7\)"), (-8, "episode 2 begins at frame -1")],
)
async def test_frame_ranges_must_not_overlap(
    reader: LocalReader, tables: Tables, tmp_path: Path, frames: int, message: str
) -> None:
    shifted(tables, frames)
    with pytest.raises(FormatError, match=rf"{EPISODES}: {message}"):
        await load_metadata(reader, tables.write(tmp_path))


@pytest.mark.parametrize("total_frames", [12, 112])
async def test_there_may_be_frames_between_episodes(
    reader: LocalReader, tables: Tables, tmp_path: Path, total_frames: int
) -> None:
    regular = await load_metadata(reader, tables.write(tmp_path))
    shifted(tables, 100)
    tables.info["total_frames"] = total_frames  # with or without those between
    metadata = await load_metadata(reader, tables.write(tmp_path))
    episodes = metadata.episodes
    assert (episodes.num_frames, episodes.starts.tolist()) == (12, [0, 3, 107])
    assert (episodes[2].from_index, episodes[2].to_index) == (107, 112)
    assert metadata.fingerprint != regular.fingerprint


@pytest.mark.parametrize("name", ["data/chunk_index", "data/file_index", f"videos/{TOP}/from_timestamp"])
async def test_an_episode_without_a_place_fails_when_it_is_used(
    reader: LocalReader, tables: Tables, tmp_path: Path, name: str
) -> None:
    set_value(name, 1, None)(tables)
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    assert [episodes[0].length, episodes[2].length] == [3, 5]
    with pytest.raises(
        DatasetError, match=f"no value in {name} for episode 1, which has 4 frames; leave the episode out"
    ):
        episodes[1]


FROM, TO, FILE = (f"videos/{TOP}/{name}" for name in ("from_timestamp", "to_timestamp", "file_index"))


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ([(TO, 0.8)], {1: rf"{EPISODES}: episode 1 has 4 frames, but from 0.3 s to 0.8 s of {TOP} are 5 at 10 fps"}),
        ([(TO, 0.64)], {1: r"from 0.3 s to 0.64 s of .* are 3.4 at"}),
        ([(TO, float("inf"))], {1: r"from 0.3 s to inf s of .* are inf at"}),
        ([(FROM, 0.0)], {1: r"from 0.0 s to 0.7 s of .* are 7 at"}),
        ([(FROM, -0.3)], {1: rf"{EPISODES}: episode 1 begins at -0.3 s of {TOP}"}),
        ([(FROM, float("inf"))], {1: r"episode 1 begins at inf s"}),
        (
            [(FROM, 0.2), (TO, 0.6)],
            {
                0: rf"episode 0 has frames \[0, 3\) of {TOP} file 0 in chunk 0, and episode 1 \[2, 6\)",
                1: rf"episode 1 has frames \[2, 6\) of {TOP} file 0 in chunk 0, and episode 0 \[0, 3\)",
            },
        ),
        ([(FROM, 0.8), (TO, None)], {1: r"\[8, 12\) .* episode 2 \[7, 12\)", 2: r"\[7, 12\) .* episode 1 \[8, 12\)"}),
        # Where nothing contradicts anything.
        ([(TO, 0.66), (FROM, 0.3)], {}),
        ([(TO, None)], {}),
        ([(FROM, 0.2), (TO, 0.6), (FILE, 1)], {}),
        ([(FROM, 8.0), (TO, 8.4)], {}),
    ],
)
async def test_episodes_whose_times_contradict_each_other_are_known(
    reader: LocalReader, tables: Tables, tmp_path: Path, changes: list[tuple[str, Any]], messages: dict[int, str]
) -> None:
    """Read on, they would be frames of another episode; but not where rows are at times of their own."""
    tables.episodes[FILE] = [0, 0, 0]
    for name, value in changes:
        set_value(name, 1, value)(tables)
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    for index in episodes.indices:
        if "begins at" in messages.get(index, ""):
            with pytest.raises(DatasetError, match=messages[index]):
                episodes[index]
        else:
            span = episodes[index].videos[TOP]
            assert span.num_frames == tables.lengths[index]
            assert re.search(messages.get(index, "^$"), span.contradiction)


async def test_a_file_that_no_name_tells_from_another_has_one_episode(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    """Two that begin at one time can't both be right, at whatever times their rows are."""
    tables.episodes |= {FILE: [0, 0, 0], FROM: [0.0, 0.0, 0.7]}
    del tables.episodes[TO]
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    for index in (0, 1):
        with pytest.raises(DatasetError, match=rf"episode {index} has frames \[0, \d\) .* and episode {1 - index} "):
            episodes[index]
    assert not episodes[2].videos[TOP].contradiction


async def test_a_table_need_not_say_where_episodes_end(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    del tables.episodes[TO]
    tables.episodes[FILE] = [0, 0, 0]
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    assert [episode.videos[TOP].first_frame for episode in episodes] == [0, 3, 7]


async def test_episode_within_another_is_known_from_those_behind_both(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    tables.lengths = (9, 1, 2, 3)
    tables.__post_init__()
    tables.episodes |= {FILE: [0] * 4, FROM: [0.0, 0.2, 0.5, 0.9], TO: [0.9, 0.3, 0.7, 1.2]}
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    for index in (0, 1, 2):
        said = episodes[index].videos[TOP].contradiction
        assert re.search(rf"episode {index} has frames .* and episode {0 if index else 2} ", said)
    assert episodes[3].videos[TOP].first_frame == 9


async def test_an_episode_without_frames_may_lack_its_place(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    tables.lengths = (3, 0, 5)
    tables.__post_init__()
    set_value("data/file_index", 1, None)(tables)
    set_value(f"videos/{TOP}/from_timestamp", 1, None)(tables)
    episode = (await load_metadata(reader, tables.write(tmp_path))).episodes[1]
    assert (episode.length, episode.from_index, episode.to_index, episode.videos[TOP].num_frames) == (0, 3, 3, 0)


@pytest.mark.parametrize("has_file", [True, False])
async def test_an_empty_dataset(reader: LocalReader, tables: Tables, tmp_path: Path, has_file: bool) -> None:
    tables.lengths = ()
    tables.__post_init__()
    root = tables.write(tmp_path)
    if not has_file:
        (tmp_path / EPISODES).unlink()
    episodes = (await load_metadata(reader, root)).episodes
    assert (len(episodes), episodes.num_frames, 0 in episodes) == (0, 0, False)


@pytest.mark.parametrize("index", [3, -1, 10**30])
async def test_unknown_episodes(reader: LocalReader, tables: Tables, tmp_path: Path, index: int) -> None:
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    assert index not in episodes
    with pytest.raises(EpisodeNotFound, match=f"no episode {index}; it has 0 to 2"):
        episodes[index]


async def test_templates_are_honoured(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    tables.info = {"data_path": "t/{chunk_index}-{file_index}.pq", "video_path": "v/{file_index:05d}/{video_key}.mp4"}
    root = tables.write(tmp_path)
    episode = (await load_metadata(reader, root)).episodes[1]
    assert episode.data_url == f"{root}/t/0-0.pq"
    assert episode.videos[TOP].url == f"{root}/v/00001/{TOP}.mp4"


async def test_files_that_the_template_gives_one_path_are_one_file(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    """Each file begins anew: read from one file, two episodes would have the same pictures."""
    tables.episodes |= {FILE: [0, 1, 2], FROM: [0.0, 0.0, 0.3], TO: [0.3, 0.4, 0.8]}
    tables.info = {"video_path": "v/{chunk_index}/{video_key}.mp4"}
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    for index in episodes.indices:
        with pytest.raises(
            DatasetError, match=rf"episode {index} has frames .*; video_path .* has no file_index; leave"
        ):
            episodes[index]
    tables.episodes |= {FROM: [0.0, 0.3, 0.7], TO: [0.3, 0.7, 1.2]}
    episodes = (await load_metadata(reader, tables.write(tmp_path))).episodes
    assert {episode.videos[TOP].url for episode in episodes} == {f"{tmp_path}/v/0/{TOP}.mp4"}


@pytest.mark.parametrize("file", ["info.json", "tasks.parquet", "episodes/chunk-000/file-000.parquet"])
@pytest.mark.parametrize("content", [b"", b"<html>not found</html>" * 9, b"PAR1\x00\x00\x00\x00PAR1", None])
async def test_broken_files_are_errors_of_ours_that_name_them(
    reader: LocalReader, tables: Tables, tmp_path: Path, file: str, content: bytes | None
) -> None:
    root = tables.write(tmp_path)
    path = tmp_path / "meta" / file
    path.write_bytes(content if content is not None else path.read_bytes()[:-9])
    with pytest.raises(AsyncFetchError, match=rf"{file}.*; copy the file anew"):
        await load_metadata(reader, root)


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b'{"a": ', b"[1]"])
async def test_broken_statistics_fail_only_when_asked_for(
    reader: LocalReader, tables: Tables, tmp_path: Path, content: bytes
) -> None:
    root = tables.write(tmp_path)
    (tmp_path / "meta/stats.json").write_bytes(content)
    metadata = await load_metadata(reader, root)
    assert metadata.episodes.num_frames == 12
    for _ in range(2):
        with pytest.raises(FormatError, match=r"meta/stats\.json"):
            _ = metadata.stats


@pytest.mark.parametrize("episodes_per_file", [500, 250])
async def test_metadata_in_full_files_takes_three_rounds_of_requests(library: Library, episodes_per_file: int) -> None:
    """The ends of the files, the rest of their footers, and columns; that there is more than one costs none more."""
    quirks = Quirks(episodes_per_meta_file=episodes_per_file)
    truth = library(episodes=500, length=1, cameras=(), quirks=quirks)
    info = json.loads((truth.root / "meta/info.json").read_text())
    (truth.root / "meta/info.json").write_text(json.dumps(info | {"data_files_size_in_mb": 1}))
    reader = RoundReader()
    metadata = await load_metadata(reader, str(truth.root), run=reader.run_here)
    assert metadata.episodes.num_frames == 500
    assert reader.rounds == 3


async def test_a_footer_goes_with_its_table(reader: LocalReader) -> None:
    """At once: the collector knows nothing of the megabytes that hang on a small Python object."""
    gc.collect()
    gc.disable()
    try:
        table = await open_table(reader, str(DATA / "h264" / EPISODES), run=anyio.to_thread.run_sync)
        assert table.metadata in footers()
        del table
        await anyio.to_thread.run_sync(bool)  # the thread refers to its last result until it has a new one
        await anyio.lowlevel.checkpoint()  # and the loop to what it delivered last
        assert not footers()
    finally:
        gc.enable()


def footers() -> list[pq.FileMetaData]:
    return [thing for thing in gc.get_objects() if type(thing) is pq.FileMetaData]  # isinstance would wake lazy proxies


def test_an_error_ends_with_its_remedy_once_wherever_it_goes() -> None:
    error = FormatError("x.parquet is cut off", remedy="copy the file anew")
    for same in (error, copy(error), pickle.loads(pickle.dumps(error)), anew(error)):
        assert isinstance(same, FormatError)
        assert (str(same), same.remedy) == ("x.parquet is cut off; copy the file anew", "copy the file anew")
    assert (str(EpisodeNotFound("no episode 3")), EpisodeNotFound("no episode 3").remedy) == ("no episode 3", "")

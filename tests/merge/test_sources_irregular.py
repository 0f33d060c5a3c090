"""Sources that aren't as they should be, or as one another: what is refused, and what comes of the rest."""

from __future__ import annotations

import json
import shutil
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

from asyncfetch.config import FetchConfig
from asyncfetch.errors import FormatError, MergeError
from asyncfetch.fetch import Fetcher
from asyncfetch.merge import Selection, merge_datasets, select_episodes
from asyncfetch.merge.plan import write_episodes
from asyncfetch.merge.sources import load_source
from asyncfetch.tables.columns import is_list
from asyncfetch.testing import Quirks, RangeServer
from tests.lerobot.serving import TOP, WRIST, restarting, shifted
from tests.merge.test_job import all_files, check_merged, read_json, read_table
from tests.merge.test_plan import changed, names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.lerobot.serving import Library


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


async def test_facts_that_one_source_lacks_of_pictures_stay_unknown(library: Library, tmp_path: Path) -> None:
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


async def test_pictures_unknown_to_one_source_get_no_statistics(library: Library, tmp_path: Path) -> None:
    def drop(table: pa.Table) -> pa.Table:
        return table.drop_columns([name for name in table.column_names if name.startswith(f"stats/{TOP}/")])

    other = with_episodes(library(episodes=(4, 5)).root, tmp_path / "other", drop)
    (other / "meta/stats.json").unlink()
    await merge_datasets([library(episodes=(4, 5)).root, other], tmp_path / "out")
    stats = read_json(tmp_path / "out", "stats.json")
    assert TOP not in stats
    assert stats.keys() >= {WRIST, "action", "index"}


async def test_statistics_without_a_count_are_made_of_the_episodes_own(library: Library, tmp_path: Path) -> None:
    """As where there are none."""
    root = library(episodes=(4, 5)).root
    stats = read_json(root, "stats.json")
    without = {name: value for name, value in stats[TOP].items() if name != "count"}
    written = []
    for number, own in enumerate([{TOP: without}, {}]):
        shutil.copytree(root, other := tmp_path / f"other-{number}")
        others = {key: value for key, value in stats.items() if key != TOP}
        (other / "meta/stats.json").write_text(json.dumps(others | own))
        await merge_datasets([other], out := tmp_path / f"out-{number}")
        written.append(read_json(out, "stats.json"))
    assert written[0] == written[1]
    assert written[0].keys() == stats.keys()


async def test_statistics_of_no_picture_tell_nothing(library: Library, tmp_path: Path) -> None:
    """Neither a source's own nor its episodes'. One with some stays as it is."""
    name = f"stats/{TOP}/count"

    def empty(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, [[[0]] * len(table)])

    root = library(episodes=(4, 5)).root
    others = [with_episodes(root, tmp_path / "own", empty), with_episodes(root, tmp_path / "episodes", empty)]
    stats = read_json(root, "stats.json")
    (others[0] / "meta/stats.json").write_text(json.dumps({**stats, TOP: {**stats[TOP], "count": [0]}}))
    (others[1] / "meta/stats.json").unlink()
    for number, other in enumerate(others):
        out = tmp_path / f"out-{number}"
        await merge_datasets([other], out)
        assert read_json(out, "stats.json").keys() == stats.keys() - {TOP}
        await merge_datasets([out, root], tmp_path / f"twice-{number}")
        await merge_datasets([other, root], tmp_path / f"once-{number}")
        assert all_files(tmp_path / f"twice-{number}") == all_files(tmp_path / f"once-{number}")


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


@pytest.mark.parametrize("group_rows", [None, 4, 1000], ids=["recorded", "mixed", "one"])
@pytest.mark.parametrize("of", ["episode", "file"])
async def test_rows_are_found_where_index_begins_anew(
    library: Library, tmp_path: Path, of: str, group_rows: int | None
) -> None:
    truth = library(episodes=(6, 0, 9, 3, 5, 4), episodes_per_data_file=3)
    await merge_datasets([restarting(truth, tmp_path / "source", of, group_rows), truth.root], tmp_path / "out")
    await check_merged(tmp_path / "out", [truth, truth])


async def test_wrong_info_json_is_put_right(library: Library, tmp_path: Path) -> None:
    """Sizes of pictures, and totals; then it is as another source, and is told of once."""
    truth = library(episodes=(4, 5))

    def change(info: dict[str, Any]) -> None:
        info["features"][TOP]["shape"] = [60, 96, 3]
        info |= {"total_episodes": 99, "total_frames": 1}

    source = changed(truth.root, tmp_path / "source", change)
    with pytest.warns(RuntimeWarning) as warned:
        await merge_datasets([source, truth.root], tmp_path / "out")
    assert {str(one.message).partition(" ")[0] for one in warned} == {
        "info.json",
        f"{source}/videos/{TOP}/chunk-000/file-000.mp4:",
    }
    await check_merged(tmp_path / "out", [truth, truth])
    assert read_json(tmp_path / "out", "info.json")["features"][TOP]["shape"] == [64, 96, 3]


async def test_numbers_that_no_episode_has_are_closed_up(library: Library, tmp_path: Path) -> None:
    truth = library(episodes=(4, 5))

    def shift(table: pa.Table, *names: str) -> pa.Table:
        for name in names:
            shifted = pa.compute.add(table[name], pa.compute.multiply(table["episode_index"], 100))
            table = table.set_column(table.column_names.index(name), name, shifted)
        return table

    source = with_episodes(
        truth.root, tmp_path / "source", lambda table: shift(table, "dataset_from_index", "dataset_to_index")
    )
    (path,) = (source / "data").rglob("*.parquet")
    pq.write_table(shift(pq.read_table(path), "index"), path)
    await merge_datasets([source, truth.root], tmp_path / "out")
    await check_merged(tmp_path / "out", [truth, truth])


async def test_source_with_broken_statistics_is_refused_before_writes(library: Library, tmp_path: Path) -> None:
    source = with_episodes(library(episodes=(4,)).root, tmp_path / "source", lambda table: table)
    (source / "meta/stats.json").write_text("{")
    with pytest.raises(MergeError, match=r"source/meta/stats\.json isn't JSON"):
        await merge_datasets([source], tmp_path / "out")
    assert names(tmp_path) == {"source"}


async def test_a_source_without_a_default_feature_is_refused(library: Library, tmp_path: Path) -> None:
    root = library(episodes=(4,), quirks=Quirks(without_default_feature="task_index")).root
    with pytest.raises(MergeError, match=r"lack task_index.*present are observation\.state"):
        await merge_datasets([library(episodes=(4,)).root, root], tmp_path / "out")


async def test_a_video_shorter_than_its_metadata_is_refused(library: Library, tmp_path: Path) -> None:
    root = library(episodes=(4, 6), quirks=Quirks(short_video_frames=2)).root
    with pytest.raises(MergeError, match="lacks 2 of the 6 frames of episode 1"):
        await merge_datasets([root], tmp_path / "out")
    assert not names(tmp_path)


async def test_frames_at_other_times_than_in_metadata_are_refused(library: Library, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path, data in shifted(library(episodes=(4, 6)), 0.6).items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(data)
    with pytest.raises(MergeError, match=r"frame 0 of episode 0 is due at 0.02\d* s .* shown at 0.033333 s"):
        await merge_datasets([source], tmp_path / "out")
    assert names(tmp_path) == {"source"}


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
async def test_irregular_sources_become_a_dataset_that_merges_again(
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


async def test_files_of_a_source_are_looked_at_side_by_side(library: Library) -> None:
    truth = library(episodes=(3,) * 6, episodes_per_video_file=2, episodes_per_data_file=2)
    async with (
        RangeServer(truth.root, first_byte_seconds=0.05) as server,
        Fetcher(FetchConfig(ca_file=server.ca_file, trust_env=False)) as fetcher,
    ):
        source = await load_source(fetcher, Selection(server.url))
        [host] = fetcher.statistics().hosts.values()
    assert host.peak_in_flight >= len(source.data_files) + sum(map(len, source.pictures.values())) == 9


N = 9
"""Rows of the two episodes below."""
NUMBERS = range(N)
WORDS = pa.array(["yes" if i % 2 else "no" for i in NUMBERS])
OFFSETS = pa.array(range(N + 1), pa.int32())
CALL = {"name": "say", "camera": None}
HELD_TYPES: dict[str, pa.Array[Any]] = {
    "null": pa.nulls(N),
    "list of nulls": pa.array([[None] * (i % 3) for i in NUMBERS]),
    "language, a field always null": pa.array([[CALL | {"at": i}] * (i % 3) for i in NUMBERS]),
    "nulls three levels down": pa.array([
        {"a": {"b": None, "c": [{"d": None}] * i}} if i % 2 else None for i in NUMBERS
    ]),
    "large list of structs of nulls": pa.array(
        [[CALL] * i for i in NUMBERS], pa.large_list(pa.struct([("name", pa.string()), ("camera", pa.null())]))
    ),
    "list of two structs of nulls": pa.array(
        [[CALL] * 2 for _ in NUMBERS], pa.list_(pa.struct([("name", pa.string()), ("camera", pa.null())]), 2)
    ),
    "map to nulls": pa.array([[(str(i), None)] for i in NUMBERS], pa.map_(pa.string(), pa.null())),
    "map": pa.array([[("a", i)] for i in NUMBERS], pa.map_(pa.string(), pa.int16())),
    "dictionary": WORDS.dictionary_encode(),
    "narrow dictionary": WORDS.cast(pa.dictionary(pa.int8(), pa.string())),
    "list of dictionaries": pa.ListArray.from_arrays(OFFSETS, WORDS.dictionary_encode()),
    "struct of dictionaries": pa.StructArray.from_arrays([WORDS.dictionary_encode()], ["word"]),
    "large string": WORDS.cast(pa.large_string()),
    "large binary": WORDS.cast(pa.large_binary()),
    "string view": WORDS.cast(pa.string_view()),
    "list view": pa.array([[i] * (i % 4) for i in NUMBERS], pa.list_view(pa.int16())),
    "large list view": pa.array([["a"] * (i % 4) for i in NUMBERS], pa.large_list_view(pa.string())),
    "fixed binary": pa.array([bytes(3)] * N, pa.binary(3)),
    "large list": pa.array([[i] * i for i in NUMBERS], pa.large_list(pa.int16())),
    "fixed lists of fixed lists": pa.array([[[i, i]] * 3 for i in NUMBERS], pa.list_(pa.list_(pa.int8(), 2), 3)),
    "time in a zone": pa.array(list(NUMBERS), pa.timestamp("us", "Europe/Berlin")),
    "nanoseconds": pa.array([i * 1000 for i in NUMBERS], pa.timestamp("ns")),
    "time of day": pa.array(list(NUMBERS), pa.time64("us")),
    "duration": pa.array(list(NUMBERS), pa.duration("ms")),
    "decimal": pa.array([Decimal(i) / 8 for i in NUMBERS], pa.decimal128(20, 3)),
    "long decimal": pa.array([Decimal(i) / 8 for i in NUMBERS], pa.decimal256(50, 3)),
    "half floats": pa.array(np.arange(N, dtype=np.float16)),
    "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(N * 6).reshape(N, 2, 3)),
}
if hasattr(pa, "json_"):  # pyarrow 19
    JSON = pa.ExtensionArray.from_storage(pa.json_(), pa.array([f'{{"n": {i}}}' for i in NUMBERS]))
    HELD_TYPES |= {"JSON": JSON, "list of JSON": pa.ListArray.from_arrays(OFFSETS, JSON)}


def with_column(
    root: Path, copy: Path, column: pa.Array[Any], *, nullable: bool = True, order: Sequence[int] | None = None
) -> Path:
    """A copy of a dataset of one file of rows with one feature more, of a kind that nobody knows."""
    changed(root, copy, lambda info: info["features"].update(extra={"dtype": "own", "shape": [1], "names": None}))
    (path,) = (copy / "data").rglob("*.parquet")
    rows = pq.read_table(path).append_column(pa.field("extra", column.type, nullable), column)
    one_by_one = pa.concat_tables([rows.slice(place, 1) for place in order or NUMBERS])
    pq.write_table(one_by_one, path, row_group_size=4)
    return copy


@pytest.mark.parametrize("column", HELD_TYPES.values(), ids=list(HELD_TYPES))
async def test_every_type_passes_unchanged(library: Library, tmp_path: Path, column: pa.Array[Any]) -> None:
    """Through a merge and a selection, from rows in their order and in another, in row groups cut anyhow."""
    root = library(episodes=(4, 5), cameras=()).root
    order = [3, 2, 0, 1, 8, 7, 6, 5, 4]
    sources = [
        with_column(root, tmp_path / "one", column),
        with_column(root, tmp_path / "two", column, order=order),
    ]
    await merge_datasets(sources, tmp_path / "out")
    await select_episodes(tmp_path / "out", tmp_path / "part", [1, 2])
    stored = pq.read_table(next((tmp_path / "one/data").rglob("*.parquet")))["extra"]
    for name, pieces in (("out", [stored, stored]), ("part", [stored[4:], stored[:4]])):
        got = read_table(tmp_path / name, "data")["extra"]
        got.validate(full=True)
        assert got.type == stored.type
        assert got.to_pylist() == [value for piece in pieces for value in piece.to_pylist()]


ENTRY = pa.struct([("role", pa.string()), ("camera", pa.null())])
FULL_ENTRY = pa.struct([pa.field("role", pa.string(), nullable=False), pa.field("camera", pa.string())])
UNITED_ENTRY = pa.struct([("role", pa.string()), ("camera", pa.string())])
UNITED: dict[str, tuple[pa.DataType, pa.DataType, pa.DataType]] = {
    "null and text": (pa.null(), pa.string(), pa.string()),
    "null and dictionary": (pa.null(), pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int8(), pa.string())),
    "fields of structs in lists": (pa.list_(ENTRY), pa.list_(FULL_ENTRY), pa.list_(UNITED_ENTRY)),
    "in large lists": (pa.large_list(ENTRY), pa.large_list(FULL_ENTRY), pa.large_list(UNITED_ENTRY)),
    "in lists of two": (pa.list_(ENTRY, 2), pa.list_(FULL_ENTRY, 2), pa.list_(UNITED_ENTRY, 2)),
    "in maps": (pa.map_(pa.string(), ENTRY), pa.map_(pa.string(), FULL_ENTRY), pa.map_(pa.string(), UNITED_ENTRY)),
    "lists of nothing": (pa.list_(pa.null()), pa.list_(pa.list_(pa.int8())), pa.list_(pa.list_(pa.int8()))),
    "large text": (pa.string(), pa.large_string(), pa.string()),
    "a view of text": (pa.string_view(), pa.large_string(), pa.string()),
    "a dictionary and its texts": (pa.dictionary(pa.int8(), pa.string()), pa.string_view(), pa.string()),
    "wide and narrow dictionaries": (
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.string()),
        pa.string(),
    ),
    "lists and views of them": (
        pa.list_view(pa.string_view()),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        pa.list_(pa.string()),
    ),
    "large lists of lists": (
        pa.large_list(pa.list_view(pa.int8())),
        pa.list_(pa.large_list(pa.int8())),
        pa.list_(pa.list_(pa.int8())),
    ),
    "lists of two and of any number": (
        pa.list_(pa.large_string(), 2),
        pa.large_list(pa.string()),
        pa.list_(pa.string()),
    ),
    "names of elements": (
        pa.list_(pa.field("item", pa.list_(pa.field("item", pa.int8())))),
        pa.list_(pa.field("x", pa.list_(pa.field("y", pa.int8(), nullable=False)))),
        pa.list_(pa.list_(pa.int8())),
    ),
}


def filled(arrow_type: Any, number: int) -> Any:  # noqa: ANN401
    """A value of the type, as Python has it; at number 3 a null where one may be."""
    types = pa.types
    if types.is_null(arrow_type):
        return None
    if types.is_struct(arrow_type):
        return {"role": str(number), "camera": filled(arrow_type.field("camera").type, number)}
    if types.is_map(arrow_type):
        return [(str(number), filled(arrow_type.item_type, number))] * (number % 3)
    if types.is_dictionary(arrow_type):
        return filled(arrow_type.value_type, number)
    if is_list(arrow_type) and not types.is_fixed_size_list(arrow_type):
        return None if number == 3 else [filled(arrow_type.value_type, number)] * (number % 3)
    if types.is_fixed_size_list(arrow_type):
        return None if number == 3 else [filled(arrow_type.value_type, number)] * 2
    return number if types.is_integer(arrow_type) else str(number)


@pytest.mark.parametrize(("one", "other", "united"), UNITED.values(), ids=list(UNITED))
@pytest.mark.parametrize("is_turned", [False, True], ids=["null first", "null last"])
async def test_types_of_the_same_values_become_one(
    library: Library,
    tmp_path: Path,
    one: pa.DataType,
    other: pa.DataType,
    united: pa.DataType,
    is_turned: bool,
) -> None:
    root = library(episodes=(4, 5), cameras=()).root
    columns: list[Any] = [
        pa.array([filled(own, i) for i in NUMBERS], own) for own in ((other, one) if is_turned else (one, other))
    ]
    sources = [with_column(root, tmp_path / str(at), column) for at, column in enumerate(columns)]
    await merge_datasets(sources, tmp_path / "out")
    got = read_table(tmp_path / "out", "data")["extra"]
    got.validate(full=True)
    assert got.type == united
    assert got.to_pylist() == columns[0].to_pylist() + columns[1].to_pylist()
    await merge_datasets([tmp_path / "out", sources[0]], tmp_path / "again")


async def test_a_column_may_be_null_where_one_source_may(library: Library, tmp_path: Path) -> None:
    root = library(episodes=(4, 5), cameras=()).root
    words = pa.array([None, *"abcdefgh"])
    sources = [
        with_column(root, tmp_path / "never", words.fill_null("x"), nullable=False),
        with_column(root, tmp_path / "some", words),
    ]
    await merge_datasets(sources, tmp_path / "out")
    assert read_table(tmp_path / "out", "data")["extra"].to_pylist() == [
        "x",
        *words.to_pylist()[1:],
        *words.to_pylist(),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.list_(pa.struct([("a", pa.int8())])), pa.list_(pa.struct([("b", pa.int8())]))),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3)),
        (pa.timestamp("us", "UTC"), pa.timestamp("us")),
        (pa.struct([("a", pa.null())]), pa.struct([("a", pa.null()), ("b", pa.null())])),
    ],
)
async def test_types_that_differ_otherwise_are_listed(
    library: Library, tmp_path: Path, one: pa.DataType, other: pa.DataType
) -> None:
    root = library(episodes=(4, 5), cameras=()).root
    sources = [with_column(root, tmp_path / str(at), pa.array([None] * N, own)) for at, own in enumerate((one, other))]
    with pytest.raises(MergeError, match=r"the stored type of feature extra is .* in .*0/data.*, but .* in .*1/data"):
        await merge_datasets(sources, tmp_path / "out")
    assert names(tmp_path) == {"0", "1"}


async def test_renumbered_columns_have_room_for_larger_numbers(library: Library, tmp_path: Path) -> None:
    """Numbers that were stored as narrow as one source needs them."""
    truth = library(episodes=(4, 5) * 8)
    shutil.copytree(truth.root, tmp_path / "source")
    (path,) = (tmp_path / "source/data").rglob("*.parquet")
    rows = pq.read_table(path)
    for name in ("index", "episode_index", "task_index"):
        rows = rows.set_column(rows.column_names.index(name), name, rows[name].cast(pa.int8()))
    pq.write_table(rows, path)
    await merge_datasets([tmp_path / "source"] * 9, tmp_path / "out")
    out = read_table(tmp_path / "out", "data")
    assert out["index"].to_pylist() == list(range(9 * 72))
    assert out["episode_index"][-1].as_py() == 143


async def test_rows_that_cannot_be_written_leave_nothing(library: Library, tmp_path: Path) -> None:
    """A vector of another length in one row, though files are finished by then."""
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 5)).root, root)
    (path,) = (root / "data").rglob("*.parquet")
    rows = pq.read_table(path)
    state: list[Any] = rows["observation.state"].to_pylist()
    state[-1] = state[-1][:-1]
    place = rows.column_names.index("observation.state")
    pq.write_table(rows.set_column(place, "observation.state", [state]), path)
    with pytest.raises(FormatError, match=r"source/data/.*: episode 1 can't be written anew: .*"):
        await merge_datasets([root, root], tmp_path / "out", workers=1)
    assert names(tmp_path) == {"source"}

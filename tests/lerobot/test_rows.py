from __future__ import annotations

import ctypes
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncfetch.errors import DatasetError, FormatError, NotFound
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.lerobot.rows import EpisodeRows, RowCache, RowReader
from asyncfetch.tables.parquet import open_table
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lerobot.conftest import Tables, WriteTable
    from tests.local_reader import LocalReader

    Change = Callable[[Tables], object]

DATA = Path(__file__).parents[1] / "data"
DATA_FILE = "data/chunk-000/file-000.parquet"
DEFAULTS = {"timestamp", "frame_index", "episode_index", "index", "task_index"}
MIB = 1024 * 1024
NOT_UTF_8 = pa.array([b"\xff"] * 12).view(pa.string())
NO_DATE = pa.array([2**62] * 12, pa.timestamp("us"))


async def open_rows(reader: LocalReader, root: str, *, max_bytes: int = MIB, **options: Any) -> RowReader:  # noqa: ANN401
    metadata = await load_metadata(reader, root)
    reader.log.clear()
    return RowReader(reader, metadata, kept=RowCache(max_bytes), **options)


async def all_rows(rows: RowReader, episodes: int = 3) -> list[EpisodeRows]:
    return [await rows.rows(rows.metadata.episodes[index]) for index in range(episodes)]


def assert_same(left: EpisodeRows, right: EpisodeRows) -> None:
    assert set(left) == set(right)
    for key in left:
        if isinstance(left[key], np.ndarray):
            assert left[key].dtype == right[key].dtype, key
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


@pytest.mark.parametrize("name", ["h264", "merge-a"])
async def test_recorded_dataset(reader: LocalReader, name: str) -> None:
    """Every value, compared with pyarrow reading the same file; the files are recorded and merged ones."""
    root = DATA / name
    rows = await open_rows(reader, str(root))
    table = pq.read_table(root / DATA_FILE).to_pydict()
    episode_index = np.array(table["episode_index"])
    for episode in rows.metadata.episodes:
        read = await rows.rows(episode)
        assert set(read) == set(table)
        for key, column in read.items():
            expected = np.array([
                value for value, of in zip(table[key], episode_index, strict=True) if of == episode.index
            ])
            np.testing.assert_array_equal(column, expected.astype(column.dtype), err_msg=key)
        assert read["action"].dtype == np.float32
        assert read["action"].shape == (episode.length, 6)
        assert read["timestamp"].shape == (episode.length,)
    assert reader.bytes_read == (root / DATA_FILE).stat().st_size


async def test_arrays_are_owned_and_writable(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    rows = await open_rows(reader, tables.write(tmp_path, group_rows=12))
    first = await rows.rows(rows.metadata.episodes[0])
    for column in first.values():
        column[:] = 0
    again = await rows.rows(rows.metadata.episodes[0])
    assert again["index"].tolist() == [0, 1, 2]
    assert first.nbytes == sum(column.nbytes for column in first.values())


def lists(tables: Tables) -> None:
    tables.rows["action"] = pa.array(tables.rows["action"].to_pylist(), pa.list_(pa.float32()))


def float_indices(tables: Tables) -> None:
    for key in ("index", "frame_index", "episode_index", "task_index"):
        tables.rows[key] = np.asarray(tables.rows[key], np.float64)


def permuted_rows(tables: Tables) -> None:
    table = pa.table(tables.rows).take(np.random.default_rng(1).permutation(12))
    tables.rows = dict(zip(table.column_names, table.columns, strict=True))


def permuted_columns(tables: Tables) -> None:
    tables.rows = dict(sorted(tables.rows.items(), reverse=True))


def orphan_rows(tables: Tables) -> None:
    """In front and behind, of deleted episodes, some with an index that a living episode has."""
    table = pa.table(tables.rows)
    orphans = table.set_column(table.column_names.index("episode_index"), "episode_index", pa.array([77] * 12))
    table = pa.concat_tables([orphans.slice(5), table, orphans.slice(0, 4)])
    tables.rows = dict(zip(table.column_names, table.columns, strict=True))


def unknown_column(tables: Tables) -> None:
    tables.rows["action.extra"] = np.arange(12)


IRREGULAR = [lists, float_indices, permuted_rows, permuted_columns, orphan_rows, unknown_column]


@pytest.mark.parametrize("group_rows", [None, 1, 5, 100])
@pytest.mark.parametrize("change", IRREGULAR)
@pytest.mark.parametrize("write_statistics", [True, False])
async def test_irregular_files_read_the_same(
    reader: LocalReader, tables: Tables, tmp_path: Path, change: Change, group_rows: int | None, write_statistics: bool
) -> None:
    regular = await all_rows(await open_rows(reader, tables.write(tmp_path)))
    change(tables)
    root = tables.write(tmp_path, group_rows=group_rows or 4, write_statistics=write_statistics)
    for left, right in zip(await all_rows(await open_rows(reader, root)), regular, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("group_rows", [None, 5, 100])
async def test_rows_of_no_episode_between_episodes(
    reader: LocalReader, tables: Tables, tmp_path: Path, group_rows: int | None
) -> None:
    """Whose numbers count: episode 1 was deleted, and the one behind it left where it was."""
    full = await all_rows(await open_rows(reader, tables.write(tmp_path, group_rows=group_rows or 4)))
    kept = [0, 2]
    rows = np.asarray(tables.rows["episode_index"])
    tables.rows["episode_index"] = np.select([rows == 1, rows == 2], [77, 1], rows)
    tables.episodes = {name: [values[row] for row in kept] for name, values in tables.episodes.items()}
    tables.episodes["episode_index"] = [0, 1]
    tables.info |= {"total_episodes": 2, "total_frames": 8}
    rows_left = await open_rows(reader, tables.write(tmp_path, group_rows=group_rows or 4))
    for left, right in zip(await all_rows(rows_left, 2), (full[0], full[2]), strict=True):
        np.testing.assert_array_equal(left["index"], right["index"])
        np.testing.assert_array_equal(left["action"], right["action"])


@pytest.mark.parametrize("of", ["table", "rows"])
async def test_a_gap_that_only_one_of_them_knows_of_is_refused(
    reader: LocalReader, tables: Tables, tmp_path: Path, of: str
) -> None:
    if of == "table":
        for name in ("dataset_from_index", "dataset_to_index"):
            tables.episodes[name] = np.add(tables.episodes[name], [0, 0, 100])
    else:
        tables.rows["index"] = np.asarray(tables.rows["index"]) + 100 * (np.asarray(tables.rows["episode_index"]) == 2)
    rows = await open_rows(reader, tables.write(tmp_path))
    await rows.rows(rows.metadata.episodes[1])
    with pytest.raises(DatasetError, match=r"episode 2: 0 rows have its episode_index and an index in"):
        await rows.rows(rows.metadata.episodes[2])


VALUES: dict[str, tuple[str, list[int], Any]] = {
    "int8": ("int8", [1], np.arange(12, dtype=np.int8)),
    "float64": ("float64", [1], np.arange(12) / 3),
    "float16": ("float16", [1], np.arange(12, dtype=np.float16)),
    "bool": ("bool", [1], np.arange(12) % 3 == 0),
    "one in a list": ("float32", [1], pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 1)),
    "matrix": ("int16", [2, 3], pa.array(np.arange(72).reshape(12, 2, 3).tolist(), pa.list_(pa.list_(pa.int16())))),
}


STORED_OTHERWISE: dict[str, tuple[str, list[int], Any]] = {
    "double": ("float32", [1], np.arange(12) / 3),
    "half": ("float64", [1], np.arange(12, dtype=np.float16) / 4),
    "whole doubles": ("int64", [1], np.arange(12.0)),
    "narrow": ("int64", [1], np.arange(12, dtype=np.int8)),
    "wide": ("uint8", [1], np.arange(12)),
    "integers": ("float32", [1], np.arange(12)),
    "numbers": ("bool", [1], np.arange(12) % 2),
    "infinities and NaN": ("float32", [1], np.array([np.inf, -np.inf, np.nan] * 4)),
    "flat": ("float32", [2, 3], np.arange(72).reshape(12, 6).tolist()),
    "nested": ("float32", [3], np.arange(36).reshape(12, 3, 1).tolist()),
}


@pytest.mark.parametrize("name", [*VALUES, *STORED_OTHERWISE])
async def test_values_are_of_the_declared_type(reader: LocalReader, tables: Tables, tmp_path: Path, name: str) -> None:
    dtype, shape, values = (VALUES | STORED_OTHERWISE)[name]
    tables.features["x"] = {"dtype": dtype, "shape": shape, "names": None}
    tables.rows["x"] = values
    parts = [part["x"] for part in await all_rows(await open_rows(reader, tables.write(tmp_path)))]
    assert {part.dtype for part in parts} == {np.dtype(dtype)}
    stored = np.array(values.to_pylist()) if isinstance(values, pa.Array) else np.asarray(values)
    expected = stored.astype(dtype).reshape(12, *([] if shape == [1] else shape))
    np.testing.assert_array_equal(np.concatenate(parts), expected)


async def test_an_index_is_an_int64_whatever_is_declared(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    tables.lengths = (3, 0, 5)
    tables.__post_init__()
    tables.features["frame_index"] = {"dtype": "int32", "shape": [1], "names": None}
    info = tables.describe()["features"]
    tables.info["features"] = {**info, "frame_index": tables.features["frame_index"]}
    rows = await open_rows(reader, tables.write(tmp_path))
    assert {part["frame_index"].dtype for part in await all_rows(rows)} == {np.dtype(np.int64)}


async def test_strings_pictures_and_language(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(12)]
    pictures = [{"bytes": b"\x89PNG" + bytes([i]), "path": None} for i in range(12)]
    remarks: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"{k}"} for k in range(i % 3)] for i in range(12)
    ]
    for key, dtype, values in (("s", "string", words), ("p", "image", pictures), ("l", "language", remarks)):
        tables.features[key] = {"dtype": dtype, "shape": [1], "names": None}
        tables.rows[key] = (
            pa.array(values, pa.struct([("bytes", pa.binary()), ("path", pa.string())])) if key == "p" else values
        )
    second = (await all_rows(await open_rows(reader, tables.write(tmp_path, group_rows=5))))[1]
    assert second["s"] == words[3:7]
    assert second["p"] == [picture["bytes"] for picture in pictures[3:7]]
    assert second["l"] == remarks[3:7]
    assert second.nbytes > sum(column.nbytes for column in second.values() if isinstance(column, np.ndarray))


TEXTS: list[pa.DataType] = [
    *(pa.large_string(), pa.string_view()),
    *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string())),
]
BYTES: list[pa.DataType] = [pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]


def list_types(of: Any) -> list[pa.DataType]:  # noqa: ANN401
    return [pa.list_(of), pa.large_list(of), pa.list_view(of), pa.large_list_view(of)]


@pytest.mark.parametrize("group_rows", [5, 100])
@pytest.mark.parametrize("kind", TEXTS, ids=str)
async def test_texts_of_every_type(
    reader: LocalReader, tables: Tables, tmp_path: Path, kind: pa.DataType, group_rows: int
) -> None:
    words = [f"w{i % 5}" for i in range(12)]
    tables.features["s"] = {"dtype": "string", "shape": [1], "names": None}
    tables.rows["s"] = pa.array(words, kind)
    rows = await all_rows(await open_rows(reader, tables.write(tmp_path, group_rows=group_rows)))
    assert [word for part in rows for word in part["s"]] == words


@pytest.mark.parametrize("kind", BYTES, ids=str)
@pytest.mark.parametrize("is_struct", [True, False], ids=["struct", "bytes"])
async def test_pictures_of_every_type(
    reader: LocalReader, tables: Tables, tmp_path: Path, kind: pa.DataType, is_struct: bool
) -> None:
    pictures = [b"\x89PNG" + bytes([i]) * (1 + i) for i in range(12)]
    stored: Any = pa.array(pictures, kind)
    if is_struct:
        stored = pa.StructArray.from_arrays([pa.nulls(12, pa.string_view()), stored], ["path", "bytes"])
    tables.features["p"] = {"dtype": "image", "shape": [8, 8, 3], "names": None}
    tables.rows["p"] = stored
    rows = await all_rows(await open_rows(reader, tables.write(tmp_path, group_rows=100)))
    assert [picture for part in rows for picture in part["p"]] == pictures


# pyarrow (26) doesn't write views in structs in lists.
@pytest.mark.parametrize("text", [pa.string(), *(text for text in TEXTS if text != pa.string_view())], ids=str)
async def test_annotations_of_every_type(
    reader: LocalReader, tables: Tables, tmp_path: Path, text: pa.DataType
) -> None:
    remarks = [
        [{"role": "user", "content": f"{i}.{k}", "timestamp": 0.5, "tool_calls": ["1"]} for k in range(i % 3)]
        for i in range(12)
    ]
    for number, calls in enumerate(list_types(text)):
        entry = pa.struct([("role", text), ("content", text), ("timestamp", pa.float64()), ("tool_calls", calls)])
        for place, kind in enumerate(list_types(entry)):
            key = f"language_{number}_{place}"
            tables.features[key] = {"dtype": "language", "shape": [1], "names": None}
            tables.rows[key] = pa.array(remarks, kind)
    rows = await all_rows(await open_rows(reader, tables.write(tmp_path, group_rows=100)))
    for row in remarks:
        for said in row:
            said["tool_calls"] = [1]
    for key in tables.features:
        assert [said for part in rows for said in part[key]] == remarks


@pytest.mark.parametrize("number", [pa.float32(), pa.float64(), pa.dictionary(pa.int8(), pa.float32())], ids=str)
async def test_lists_of_every_type(reader: LocalReader, tables: Tables, tmp_path: Path, number: pa.DataType) -> None:
    values = np.arange(12 * 6, dtype=np.float32).reshape(12, 2, 3)
    kinds = [*list_types(number), pa.list_(number, 3)]
    for place, kind in enumerate(outer for inner in kinds for outer in [*list_types(inner), pa.list_(inner, 2)]):
        key = f"x{place}"
        tables.features[key] = {"dtype": "float32", "shape": [2, 3], "names": None}
        tables.rows[key] = pa.array(values.tolist(), kind)
    rows = await all_rows(await open_rows(reader, tables.write(tmp_path, group_rows=100)))
    for key in tables.features:
        np.testing.assert_array_equal(np.concatenate([part[key] for part in rows]), values, err_msg=key)


async def test_numbers_as_decimals(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    regular = await all_rows(await open_rows(reader, tables.write(tmp_path / "regular")))
    for key in ("index", "episode_index", "frame_index", "task_index"):
        tables.rows[key] = pa.array(tables.rows[key]).cast(pa.decimal128(20, 0))
    tables.features["x"] = {"dtype": "float32", "shape": [1], "names": None}
    tables.rows["x"] = pa.array([Decimal(i) / 8 for i in range(12)], pa.decimal128(20, 3))
    read = await all_rows(await open_rows(reader, tables.write(tmp_path)))
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in read]), np.arange(12, dtype=np.float32) / 8)
    for one, other in zip(read, regular, strict=True):
        assert_same(EpisodeRows({key: one[key] for key in other}, 0), other)


async def test_numbers_of_rows_as_a_dictionary(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    regular = await all_rows(await open_rows(reader, tables.write(tmp_path / "regular")))
    for key in ("index", "episode_index", "frame_index", "task_index", "reward", "timestamp"):
        tables.rows[key] = pa.array(tables.rows[key]).dictionary_encode()
    for one, other in zip(await all_rows(await open_rows(reader, tables.write(tmp_path))), regular, strict=True):
        assert_same(one, other)


async def test_annotations_are_as_lerobot_gives_them(reader: LocalReader) -> None:
    """Times as float32, though they are stored as doubles; what is always null is None."""
    root = DATA / "language"
    rows = await open_rows(reader, str(root))
    stored = pq.read_table(root / DATA_FILE).to_pylist()
    assert {said["timestamp"] for row in stored for said in row["language_persistent"]} == {0.0, 0.1}
    for row in stored:
        for said in row["language_persistent"]:
            said["timestamp"] = float(np.float32(said["timestamp"]))
    for episode in rows.metadata.episodes:
        own = await rows.rows(episode)
        for key in ("language_persistent", "language_events"):
            assert own[key] == [row[key] for row in stored if row["episode_index"] == episode.index]


@pytest.mark.parametrize("kind", ["json", "text"])
async def test_calls_of_tools_come_out_of_their_json(
    reader: LocalReader, tables: Tables, tmp_path: Path, kind: str
) -> None:
    """As LeRobot writes them by its own types, where pyarrow has a type for JSON and where it has none."""
    if kind == "json" and not hasattr(pa, "json_"):
        pytest.skip("pyarrow 19 is the first with a type for JSON")

    def annotate(call: str) -> pa.Array[Any]:
        calls: Any = pa.array([call] * 24)
        if kind == "json":
            calls = pa.ExtensionArray.from_storage(pa.json_(), calls)
        of_entries = pa.ListArray.from_arrays(pa.array([0, 0, *range(2, 24, 2)], pa.int32()), calls)
        entries = pa.StructArray.from_arrays([pa.array(["user"] * 12), of_entries], ["role", "tool_calls"])
        return pa.ListArray.from_arrays(pa.array(range(13), pa.int32()), entries)

    said = {"type": "function", "function": {"name": "say", "arguments": {"text": "ü"}}}
    tables.features["language_events"] = {"dtype": "language", "shape": [1], "names": None}
    tables.rows["language_events"] = annotate(json.dumps(said))
    rows = await all_rows(await open_rows(reader, tables.write(tmp_path)))
    entries = [entry for part in rows for row in part["language_events"] for entry in row]
    assert entries == [{"role": "user", "tool_calls": [said] * count} for count in (0, *(2,) * 11)]
    tables.rows["language_events"] = annotate("say(x)")
    with pytest.raises(FormatError, match=r"language_events of .* has a call of a tool that isn't JSON, \['say"):
        await all_rows(await open_rows(reader, tables.write(tmp_path / "other")))


@pytest.mark.parametrize("kind", ["dictionary", "view"])
async def test_types_that_pyarrow_does_not_read_in_one_go(
    reader: LocalReader, tables: Tables, tmp_path: Path, kind: str
) -> None:
    """Dictionaries in lists from several row groups, views from rows in another order."""
    words = pa.array([f"w{i % 5}" for i in range(12)])
    order = list(range(12))
    if kind == "dictionary":
        stored: Any = pa.ListArray.from_arrays(pa.array(range(13), pa.int32()), words.dictionary_encode())
    else:
        stored = words.cast(pa.string_view())
        order = [2, 1, 0, 6, 5, 3, 4, 8, 7, 9, 11, 10]
    tables.features["x"] = {"dtype": "own", "shape": [1], "names": None}
    tables.rows = {key: np.asarray(values)[order] if key != "x" else values for key, values in tables.rows.items()}
    tables.rows["x"] = pa.concat_arrays([stored[place : place + 1] for place in order])
    rows = await all_rows(await open_rows(reader, tables.write(tmp_path, group_rows=2)))
    assert [value for part in rows for value in part["x"]] == stored.to_pylist()


class Matrix(pa.ExtensionType):
    """What the datasets library registers for two dimensions, in short."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.list_(pa.float32())), "test.matrix")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Matrix:
        return cls()


async def test_extension_columns(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    values = np.arange(72, dtype=np.float32).reshape(12, 2, 3)
    tables.features["x"] = {"dtype": "float32", "shape": [2, 3], "names": None}
    pa.register_extension_type(Matrix())  # type: ignore[arg-type]  # a stub that is behind
    try:
        tables.rows["x"] = pa.ExtensionArray.from_storage(Matrix(), pa.array(values.tolist(), Matrix().storage_type))
        rows = await all_rows(await open_rows(reader, tables.write(tmp_path)))
    finally:
        pa.unregister_extension_type("test.matrix")
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in rows]), values)


async def test_episode_without_frames_costs_nothing(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    tables.lengths = (3, 0, 5)
    tables.__post_init__()
    rows = await open_rows(reader, tables.write(tmp_path))
    empty = await rows.rows(rows.metadata.episodes[1])
    assert reader.log == []
    full = await rows.rows(rows.metadata.episodes[2])
    assert {key: (column.dtype, column.shape[1:]) for key, column in empty.items()} == {
        key: (column.dtype, column.shape[1:]) for key, column in full.items()
    }


async def test_row_groups_without_rows(
    reader: LocalReader, tables: Tables, tmp_path: Path, write_table: WriteTable
) -> None:
    root = tables.write(tmp_path)
    write_table(tmp_path / DATA_FILE, tables.rows, [0, 3, 0, 9], write_statistics=False)
    assert pq.read_metadata(tmp_path / DATA_FILE).num_row_groups == 4
    rows = await all_rows(await open_rows(reader, root))
    assert [part["index"].tolist() for part in rows] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11]]


@pytest.mark.parametrize("columns", [[], ["reward"], ["reward", "observation.images.top"]])
async def test_projection(reader: LocalReader, tables: Tables, tmp_path: Path, columns: list[str]) -> None:
    rows = await open_rows(reader, tables.write(tmp_path), columns=columns)
    assert set(await rows.rows(rows.metadata.episodes[0])) == DEFAULTS | {*columns} - {"observation.images.top"}


def large(tables: Tables, episodes: int = 40, length: int = 500) -> None:
    """With a wide column that nobody wants, and a name that begins like that of a wanted one."""
    tables.lengths = (length,) * episodes
    tables.__post_init__()
    random = np.random.default_rng(0)
    total = episodes * length
    tables.rows = {
        "reward.wide": pa.FixedSizeListArray.from_arrays(pa.array(random.random(16 * total)), 16),
        **tables.rows,
        "reward": random.random(total).astype(np.float32),
    }


async def test_only_wanted_columns_of_the_episode_are_fetched(
    reader: LocalReader, tables: Tables, tmp_path: Path
) -> None:
    large(tables)
    root = tables.write(tmp_path)
    wanted = {"reward", *DEFAULTS}
    rows = await open_rows(reader, root, columns=["reward"])
    for episode in (7, 3, 30):
        await rows.rows(rows.metadata.episodes[episode])

    footer = pq.read_metadata(tmp_path / DATA_FILE)
    chunks = [footer.row_group(group).column(i) for group in (7, 3, 30) for i in range(footer.num_columns)]
    needed = sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in wanted)
    assert reader.bytes_read - 64 * 1024 <= 1.05 * needed
    assert len(reader.log) <= 1 + 3 * 2


async def test_every_byte_of_a_file_is_fetched_once(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    """In shuffled order; also with a footer that is longer than the first request."""
    large(tables, episodes=120, length=50)
    tables.features["reward.wide"] = {"dtype": "float64", "shape": [16], "names": None}
    rows = await open_rows(reader, tables.write(tmp_path), max_bytes=2 * MIB)
    assert pq.read_metadata(tmp_path / DATA_FILE).serialized_size > 64 * 1024
    for index in np.random.default_rng(0).permutation(120):
        await rows.rows(rows.metadata.episodes[int(index)])
    assert reader.bytes_read <= 1.05 * (tmp_path / DATA_FILE).stat().st_size
    assert len(reader.log) <= 2 + 120


async def test_a_shared_row_group_is_read_once(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    large(tables)
    rows = await open_rows(reader, tables.write(tmp_path, group_rows=20_000), columns=["reward"], max_bytes=4 * MIB)
    async with anyio.create_task_group() as tasks:
        for episode in rows.metadata.episodes:
            tasks.start_soon(rows.rows, episode)
    assert len(reader.log) == len(set(reader.log)) <= 1 + 2
    assert 0 < rows._kept.nbytes <= 4 * MIB


class Mallinfo(ctypes.Structure):
    """See ``man mallinfo2``: [4] is what was taken by mmap, [7] what is in use of the rest."""

    _fields_ = (("bytes", ctypes.c_size_t * 10),)


def allocated_bytes() -> int:
    """What the C library has given out and not got back."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("only glibc tells")
    library.mallinfo2.restype = Mallinfo
    figures = library.mallinfo2().bytes
    return int(figures[4] + figures[7])


async def test_an_open_file_weighs_what_it_takes(reader: LocalReader, tmp_path: Path) -> None:
    path = tmp_path / "many-groups.parquet"
    columns = pa.table({f"observation.state.{number}": [number, number + 1] for number in range(8)})
    with pq.ParquetWriter(path, columns.schema) as writer:
        for _ in range(200):
            writer.write_table(columns)
    await open_table(reader, str(path), run=anyio.to_thread.run_sync, tail_bytes=MIB)  # what the first one alone takes
    before = allocated_bytes()
    files = [
        await open_table(reader, str(path), run=anyio.to_thread.run_sync, tail_bytes=size)
        for size in [MIB, 8 * 1024] * 10
    ]
    assert 1 < sum(file.nbytes for file in files) / (allocated_bytes() - before) < 1.25


async def test_kept_rows_are_bounded_in_bytes(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    large(tables)
    rows = await open_rows(reader, tables.write(tmp_path, group_rows=750), max_bytes=300_000)
    peak = 0
    for episode in rows.metadata.episodes:
        await rows.rows(episode)
        peak = max(peak, rows._kept.nbytes)
    assert 100_000 < peak <= 300_000


async def test_a_cancelled_reader_hands_over(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    rows = await open_rows(reader, tables.write(tmp_path, group_rows=12))
    reader.limiter = anyio.Event()
    results: list[EpisodeRows] = []

    async def read(index: int) -> None:
        results.append(await rows.rows(rows.metadata.episodes[index]))

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as leader:
            async with anyio.create_task_group() as first:
                first.start_soon(read, 0)
                await all_others_wait()
                tasks.start_soon(read, 1)
                await all_others_wait()
                leader.cancel()
        reader.limiter.set()
    assert [result["episode_index"].tolist() for result in results] == [[1] * 4]


async def test_a_failure_is_not_kept(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    rows = await open_rows(reader, tables.write(tmp_path))
    path = tmp_path / DATA_FILE
    path.rename(path.with_suffix(".away"))
    with pytest.raises(NotFound):
        await rows.rows(rows.metadata.episodes[0])
    path.with_suffix(".away").rename(path)
    assert len((await rows.rows(rows.metadata.episodes[0]))["index"]) == 3


def drop_last_row(tables: Tables) -> None:
    table = pa.table(tables.rows).slice(0, 11)
    tables.rows = dict(zip(table.column_names, table.columns, strict=True))


def set_row(key: str, row: int, value: Any) -> Change:  # noqa: ANN401
    def change(tables: Tables) -> None:
        column = tables.rows[key]
        values = column.tolist() if isinstance(column, np.ndarray) else column.to_pylist()
        values[row] = value
        tables.rows[key] = values

    return change


def set_column(key: str, values: Any) -> Change:  # noqa: ANN401
    def change(tables: Tables) -> None:
        tables.rows[key] = values

    return change


def add(key: str, dtype: str, shape: list[int], values: Any) -> Change:  # noqa: ANN401
    def change(tables: Tables) -> None:
        tables.features[key] = {"dtype": dtype, "shape": shape, "names": None}
        tables.rows[key] = values

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_last_row, r"episode 2: 4 rows .* index in \[7, 12\), but its length is 5"),
        (set_row("episode_index", 8, 1), r"episode 2: 4 rows .* but its length is 5"),
        (set_row("frame_index", 8, 3), r"episode 2: frame_index of row 1 is 2, it should be 1"),
        (set_row("index", 8, 9), r"episode 2: index of row 1 is 9, it should be 8"),
        (set_row("task_index", 8, 5), r"task_index 5, meta/tasks.parquet has 0, 1"),
        (set_column("index", NOT_UTF_8), r"column index .* must hold numbers, not string; write"),
        (set_column("index", NO_DATE), r"column index .* must hold numbers, not timestamp\[us\]; write"),
        (
            set_column("index", np.array([*range(11), 2**64 - 1], np.uint64)),
            r"column index .* row 11 is 18446744073709551615, stored as uint64",
        ),
        (set_row("index", 8, None), r"column index .* no value in 1 of 12 rows"),
        (set_row("action", 8, [1.0, 2.0]), r"feature action .* rows of 2 to 6 values"),
        (set_row("action", 8, None), r"feature action .* 1 nulls among its 5 rows"),
        (add("x", "int64", [1], [1, None] * 6), r"feature x .* nulls among its 5 values of type int64"),
        (add("x", "float32", [3], [[1.0, 2.0]] * 12), r"feature x .* shape \(2,\) a row; info.json says \(3,\)"),
        (add("x", "float32", [1], ["a"] * 12), r"feature x .* must hold float32, not string"),
        *(
            (
                add("x", dtype, [1], [*[1] * 8, wrong, *[1] * 3]),
                rf"x of .*{DATA_FILE} is {dtype} by info.json, but stored as {stored}, .* {re.escape(str(wrong))},",
            )
            for dtype, stored, wrong in [
                ("int64", "double", 0.5),
                ("int64", "double", float("inf")),
                ("bool", "int64", 2),
                ("uint8", "int64", 256),
                ("uint64", "int64", -1),
                ("float32", "int64", 2**24 + 1),
                ("float32", "double", 1e300),
            ]
        ),
        (add("x", "int64", [1], [1.0, float("nan")] * 6), r"stored as double, among others nan"),
        (
            add("x", "float32", [3, 2], [[[1.0, 2.0, 3.0]] * 2] * 12),
            r"feature x .* has shape \(2, 3\) a row; info.json says \(3, 2\)",
        ),
        (add("x", "string", [1], NOT_UTF_8), r"feature x .* holds a string that Python can't: 'utf-8'.*; leave"),
        (add("x", "a time", [1], NO_DATE), r"feature x .* holds a timestamp\[us\] that Python can't"),
        (add("x", "string", [1], [1] * 12), r"feature x .* must hold strings, not int64"),
        (add("x", "image", [1], [1] * 12), r"feature x .* must hold pictures .* not int64"),
        (add("x", "image", [1], [{"bytes": None, "path": "a.png"}] * 12), r"feature x .* pictures must be embedded"),
        (lambda tables: tables.rows.pop("action"), r"has no column action; present are reward"),
    ],
)
async def test_contradictions_name_file_and_numbers(
    reader: LocalReader, tables: Tables, tmp_path: Path, change: Change, message: str
) -> None:
    change(tables)
    rows = await open_rows(reader, tables.write(tmp_path, group_rows=12))
    with pytest.raises(DatasetError, match=message) as caught:
        await rows.rows(rows.metadata.episodes[2])
    assert DATA_FILE in str(caught.value)


async def test_a_null_float_is_nan(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    set_row("reward", 1, None)(tables)
    tables.rows["reward"] = pa.array(tables.rows["reward"], pa.float32())
    first = (await all_rows(await open_rows(reader, tables.write(tmp_path))))[0]["reward"]
    assert first.dtype == np.float32
    assert np.isnan(first).tolist() == [False, True, False]


async def assert_read_or_refused(rows: RowReader, regular: list[EpisodeRows]) -> bool:
    """Whether it was refused."""
    try:
        read = await all_rows(rows)
    except DatasetError as error:
        assert DATA_FILE in str(error)  # noqa: PT017  (reading well is fine too)
        return True
    for left, right in zip(read, regular, strict=True):
        assert_same(left, right)
    return False


async def test_damaged_pages(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    """A bit flipped anywhere in front of the footer: the right values (page statistics aren't used), or our error."""
    root = tables.write(tmp_path, write_page_checksum=True)
    metadata = await load_metadata(reader, root)
    path = tmp_path / DATA_FILE
    whole = path.read_bytes()
    regular = await all_rows(RowReader(reader, metadata, kept=RowCache(MIB)))
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[random.integers(4, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"))] ^= 1 << random.integers(8)
        path.write_bytes(damaged)
        refused += await assert_read_or_refused(RowReader(reader, metadata, kept=RowCache(MIB)), regular)
    assert refused > 50


@pytest.mark.parametrize("missing", [1, 8, 9, 100, 2000])
async def test_truncated_file(reader: LocalReader, tables: Tables, tmp_path: Path, missing: int) -> None:
    rows = await open_rows(reader, tables.write(tmp_path))
    path = tmp_path / DATA_FILE
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(FormatError, match=f"{DATA_FILE} isn't a whole parquet file"):
        await all_rows(rows)


async def test_the_footer_of_another_file(reader: LocalReader, tables: Tables, tmp_path: Path) -> None:
    """It speaks of bytes that aren't there, or that hold something else."""
    rows = await open_rows(reader, tables.write(tmp_path))
    path = tmp_path / DATA_FILE
    small = path.read_bytes()
    large(tables)
    tables.write(tmp_path / "other")
    other = (tmp_path / "other" / DATA_FILE).read_bytes()
    path.write_bytes(small + other[-8 - int.from_bytes(other[-8:-4], "little") :])
    with pytest.raises(FormatError, match=f"{DATA_FILE}.* damaged"):
        await all_rows(rows)


@pytest.mark.parametrize("footer_bytes", [0, 1_000_000, 2**32 - 1])
async def test_a_wrong_footer_length(reader: LocalReader, tables: Tables, tmp_path: Path, footer_bytes: int) -> None:
    rows = await open_rows(reader, tables.write(tmp_path))
    path = tmp_path / DATA_FILE
    path.write_bytes(path.read_bytes()[:-8] + footer_bytes.to_bytes(4, "little") + b"PAR1")
    with pytest.raises(FormatError, match=DATA_FILE):
        await all_rows(rows)

"""Every piece of a small dataset's metadata and rows, one at a time, replaced by what it can't or may be.

Either the dataset reads as it did, or an error of ours names a file of it. Nothing else: no exception of Python's or
pyarrow's, no warning but of a data file that is named wrong, and never rows or frames of another place.

Bytes of footers aren't flipped here: some of those end the process (see ``asyncfetch.tables.parquet``).
"""

from __future__ import annotations

import copy
import io
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncfetch.errors import DatasetError, FetchError
from asyncfetch.lerobot.info import parse_info
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.lerobot.rows import RowCache, RowReader
from tests.local_reader import LocalReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.lerobot.conftest import Tables

INFO, TASKS = "meta/info.json", "meta/tasks.parquet"
EPISODES, ROWS = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"
PLACE = "videos/observation.images.top"
ALIKE = {"frame_index", "episode_index", "task_index"}
"""Features that say the same as "index"."""

OTHERS: list[Any] = [
    None,
    True,
    0,
    -1,
    2,
    1.5,
    1e308,
    2**63,
    "",
    "v3.0",
    "../x",
    "{chunk_index}",
    [],
    {},
    [[]],
    [2**62],
]
"""In place of something in info.json."""
RAW = {"@nan": "NaN", "@inf": "1e999", "@long": "9" * 5000, "@deep": "[" * 100_000 + "]" * 100_000}
"""The same, of what ``json.dumps`` doesn't write."""
NUMBERS = (-1, 1, 2, 2**31, 2**63 - 1, -(2**63))
FLOATS = (math.nan, -math.inf, 0.5, 1e308)
TYPES = (
    *(pa.string(), pa.large_string(), pa.binary(), pa.bool_(), pa.float16(), pa.float32(), pa.float64(), pa.uint8()),
    *(pa.int16(), pa.uint64(), pa.decimal128(20, 3), pa.timestamp("us"), pa.duration("s"), pa.time64("us")),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401
    """The way to every value in a JSON document, containers included."""
    yield at
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*at, key))


def replaced(document: Any, at: tuple[Any, ...], value: Any) -> Any:  # noqa: ANN401
    """A copy with the value there; without it where that is ``...``."""
    if not at:
        return value
    changed = holder = copy.deepcopy(document)
    for key in at[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[at[-1]]
    else:
        holder[at[-1]] = value
    return changed


def columns_like(column: pa.ChunkedArray[Any]) -> Iterator[tuple[str, Any]]:
    """Arrays of the column's length that may stand in its place, named."""
    values: list[Any] = column.to_pylist()
    length = len(column)
    yield "nulls", pa.nulls(length, column.type)
    yield "nulls of no type", pa.nulls(length)
    yield "one null", pa.array([None, *values[1:]], column.type)
    yield "backwards", pa.array(values[::-1], column.type)
    yield "structs", pa.StructArray.from_arrays([column.combine_chunks()], ["bytes"])
    yield "lists", pa.array([[value] for value in values])
    yield "empty lists", pa.array([[]] * length, pa.list_(pa.int64()))
    yield "maps", pa.array([[("a", 1)]] * length, pa.map_(pa.string(), pa.int64()))
    yield "no UTF-8", pa.array([b"\xff"] * length).view(pa.string())
    yield "lists of no UTF-8", pa.array([[b"\xff"]] * length, pa.list_(pa.binary())).view(pa.list_(pa.string()))
    yield "no dates", pa.array([2**62] * length, pa.timestamp("us"))
    if not pa.types.is_list(column.type) and not pa.types.is_fixed_size_list(column.type):
        yield "a dictionary", column.combine_chunks().dictionary_encode()
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return
    for stored in TYPES:
        try:
            yield str(stored), pa.array(values).cast(stored)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue  # it holds no such values
    yield "the greatest uint64", pa.array([2**64 - 1, *map(int, values[1:])], pa.uint64())
    for row in (0, length - 1):
        for number in NUMBERS:
            yield f"{number} in row {row}", pa.array([number if at == row else int(x) for at, x in enumerate(values)])
        for real in FLOATS:
            yield f"{real} in row {row}", pa.array([real if at == row else float(x) for at, x in enumerate(values)])


def in_row_groups(table: pa.Table) -> Iterator[tuple[str, pa.Table, int]]:
    """The rows in other orders and numbers, with the rows of a row group."""
    yield from (("rows in groups", table, rows) for rows in (1, 2, 5, 1000))
    yield "no rows", table.slice(0, 0), 5
    yield "backwards", table.take(list(range(len(table)))[::-1]), 2
    yield "the first row missing", table.slice(1), 2
    yield "the last row twice", pa.concat_tables([table, table.slice(len(table) - 1)]), 2
    yield "all rows twice", pa.concat_tables([table, table]), len(table)


def as_parquet(table: pa.Table, **options: Any) -> bytes:  # noqa: ANN401
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


class Outcomes:
    """Reads a dataset after each change of one of its files."""

    def __init__(self, root: Path, tables: Tables) -> None:
        self.root = root
        self.tables = tables
        tables.write(root)
        self.read = self.refused = 0
        self.nameless: list[str] = []
        """Refusals that don't say which file."""

    async def check(
        self, file: str, content: bytes, *, what: str, free: str = "", episodes: Sequence[int] = (0, 1, 2)
    ) -> None:
        """Read everything with this as the file's content, and put its own back.

        ``free`` may have another value then, for nothing contradicts it: a column of rows, "task" or "place".
        ``episodes`` are those that are there.
        """
        path = self.root / file
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            await self._read(free, episodes)
            self.read += 1
        except (DatasetError, FetchError) as error:
            self.refused += 1
            if str(self.root) not in str(error) and "of info.json" not in str(error):
                self.nameless.append(f"{what}: {error}")
        except BaseException as error:
            error.add_note(f"{file}, {what}")
            raise
        finally:
            path.write_bytes(before)

    async def _read(self, free: str, episodes: Sequence[int]) -> None:
        reader, tables = LocalReader(), self.tables
        metadata = await load_metadata(reader, str(self.root))
        rows = RowReader(reader, metadata, kept=RowCache(2**20))
        assert len(metadata.episodes) == len(episodes)
        for index in episodes:
            start, length = sum(tables.lengths[:index]), tables.lengths[index]
            episode = metadata.episodes[index]
            read = await rows.rows(episode)
            for key in read.keys() & tables.rows.keys() - {free}:
                wanted = pa.array(tables.rows[key]).slice(start, length).to_pylist()
                assert np.array(read[key]).reshape(length, -1).tolist() == np.reshape(wanted, (length, -1)).tolist()
            for camera, span in episode.videos.items():
                if read.own_seconds is not None:  # as of another rate of frames: they say where frames are
                    assert span.start_seconds == start / tables.fps, camera
                    continue
                if span.contradiction:
                    raise DatasetError(f"{self.root}: {span.contradiction}")
                assert free == "place" or (span.first_frame, span.num_frames) == (start, length), camera
            assert free == "task" or metadata.tasks == {0: "pick", 1: "place"}


@pytest.fixture
def outcomes(tables: Tables, tmp_path: Path) -> Outcomes:
    tables.episodes[f"{PLACE}/file_index"] = np.zeros(len(tables.lengths), np.int64)  # all in one: places differ
    return Outcomes(tmp_path, tables)


@pytest.mark.filterwarnings("ignore:info.json of .* counts")
async def test_info(outcomes: Outcomes) -> None:
    info = json.loads((outcomes.root / INFO).read_text())
    seen = set()
    for at in places(info):
        if "names" in at[:-1] or not ALIKE.isdisjoint(at):
            continue  # nothing looks into names
        for value in [*OTHERS, *RAW, *([...] if at else [])]:
            text = json.dumps(replaced(info, at, value))
            for sign, raw in RAW.items():
                text = text.replace(f'"{sign}"', raw)
            try:
                parsed = repr(parse_info(text.encode(), INFO))
            except DatasetError:
                outcomes.refused += 1
                continue
            if parsed in seen:
                continue
            seen.add(parsed)
            await outcomes.check(INFO, text.encode(), what=f"{at} is {value!r:.20}")
    assert outcomes.nameless == []
    assert min(outcomes.read, outcomes.refused) > 100


FREE = {
    (TASKS, "task"): "task",
    (TASKS, "task_index"): "task",
    **{(ROWS, key): key for key in ("action", "reward", "timestamp", "task_index")},
    **{(EPISODES, f"{PLACE}/{name}"): "place" for name in ("chunk_index", "file_index", "from_timestamp")},
}


@pytest.mark.parametrize("file", [TASKS, EPISODES, ROWS])
@pytest.mark.filterwarnings("ignore:meta/episodes names")
async def test_columns(outcomes: Outcomes, file: str) -> None:
    table = pq.read_table(outcomes.root / file)
    for number, name in enumerate(table.column_names):
        free = FREE.get((file, name), "")
        changed = [
            ("missing", table.drop_columns([name])),
            ("twice", table.append_column(name, table[name])),
            *((label, table.set_column(number, name, column)) for label, column in columns_like(table[name])),
        ]
        for label, other in changed:
            await outcomes.check(file, as_parquet(other), what=f"{name}: {label}", free=free)
    assert outcomes.nameless == []
    assert min(outcomes.read, outcomes.refused) > 10


@pytest.mark.parametrize("file", [TASKS, EPISODES, ROWS])
@pytest.mark.filterwarnings("ignore:info.json of .* counts")
async def test_rows(outcomes: Outcomes, file: str) -> None:
    for label, rows, group_rows in in_row_groups(pq.read_table(outcomes.root / file)):
        content = as_parquet(rows, row_group_size=group_rows)
        named: list[Any] = rows["episode_index"].to_pylist() if file == EPISODES else [0, 1, 2]  # may lack the first
        await outcomes.check(file, content, what=f"{label}, {group_rows} a group", episodes=sorted(named))
    assert outcomes.nameless == []
    assert min(outcomes.read, outcomes.refused) > 2

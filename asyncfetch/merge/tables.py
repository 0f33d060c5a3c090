"""The tables of a merged dataset: rows with their new numbers, tasks and episodes. Blocks: for use in a thread."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import FormatError, redact_url
from asyncfetch.lerobot.columns import is_list, take_rows, to_integers
from asyncfetch.lerobot.parquet import require_pyarrow
from asyncfetch.merge.arrow_types import common_type, converted
from asyncfetch.merge.statistics import EpisodeColumn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from pyarrow import Schema, Table

    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.plan import MergePlan, PlannedEpisode

__all__ = ["RowsByIndex", "column_type", "open_writer", "rows_schema", "write_episodes", "write_rows", "write_tasks"]

_COMPRESSION = "snappy"
"""LeRobot's."""
_EPISODES_PER_GROUP = 100
"""Rows of meta/episodes that share a row group; LeRobot's recorder has 10, which its flushes ask for."""
_NUMBERED_ANEW = ("episode_index", "index", "task_index")


def column_type(feature: Feature, stored: Any) -> Any:  # noqa: ANN401  (pyarrow's types know no lists)
    """The type that the feature's column gets: the stored one, but a vector as a list of fixed size.

    What is numbered anew is an int64, as LeRobot has it: a narrower type may have no room for all sources' numbers.
    """
    pa = require_pyarrow()
    if feature.key in _NUMBERED_ANEW:
        return pa.int64()
    if feature.kind == "value" and len(feature.shape) == 1 and feature.shape != (1,) and is_list(stored):
        return pa.list_(pa.field("element", stored.value_type), feature.shape[0])
    return stored


def rows_schema(plan: MergePlan) -> pa.Schema:
    """The schema of the data files, in which the values of all have room.

    It has the ``huggingface`` metadata of the first that has some and stores just these types.
    """
    pa = require_pyarrow()
    schemas = [file.schema for source in plan.sources for file in source.data_files.values()]
    if not schemas:
        empty: Schema = pa.schema([])
        return empty
    features = {key: one for key, one in plan.sources[0].metadata.features.items() if one.has_column}
    types = {key: column_type(one, schemas[0].field(key).type) for key, one in features.items()}
    is_nullable = dict.fromkeys(features, False)
    for schema in schemas:
        for key, feature in features.items():
            field = schema.field(key)
            types[key] = common_type(types[key], column_type(feature, field.type))
            is_nullable[key] |= field.nullable
    described = (
        one.metadata
        for one in schemas
        if b"huggingface" in (one.metadata or {})
        and all(column_type(feature, one.field(key).type) == types[key] for key, feature in features.items())
    )
    metadata = next(described, None)
    kept = {b"huggingface": metadata[b"huggingface"]} if metadata else None
    fields = [schemas[0].field(key).with_type(types[key]).with_nullable(is_nullable[key]) for key in features]
    united: Schema = pa.schema(fields, metadata=kept)
    return united


class RowsByIndex:
    """A source's file of rows, whose episodes are looked up by ``index``, wherever they lie in it.

    Raises:
        FormatError: ``index`` or ``episode_index`` aren't whole numbers.
    """

    def __init__(self, table: pa.Table, url: str) -> None:
        self._table = table
        self._episodes = to_integers(table["episode_index"], "episode_index", url)
        indices = to_integers(table["index"], "index", url)
        self._order = np.argsort(indices, kind="stable")
        self._indices = indices[self._order]

    def find(self, planned: PlannedEpisode, task_map: Mapping[int, int], schema: pa.Schema) -> pa.Table:
        """The episode's rows, in order, with their new numbers.

        Raises:
            FormatError: They aren't there, name a task that isn't, or have no room in the schema.
        """
        pa = require_pyarrow()
        episode = planned.episode
        where = f"{redact_url(episode.data_url)}: episode {episode.index}"
        first, stop = np.searchsorted(self._indices, (episode.from_index, episode.to_index))
        places = np.arange(first, stop)[self._episodes[self._order[first:stop]] == episode.index]
        if not np.array_equal(self._indices[places], np.arange(episode.from_index, episode.to_index)):
            raise FormatError(
                f"{where} has {len(places)} rows with index in [{episode.from_index}, {episode.to_index}); "
                f"there must be one for each of its {episode.length} frames"
            )
        own = take_rows(self._table, self._order[places])
        tasks = to_integers(own["task_index"], "task_index", episode.data_url)
        if unknown := sorted(set(tasks.tolist()) - task_map.keys()):
            raise FormatError(f"{where} has task_index {unknown}, which meta/tasks.parquet doesn't number")
        numbers = {
            "episode_index": np.full(len(places), planned.index),
            "index": np.arange(len(places)) + planned.from_index,
            "task_index": np.array([task_map[task] for task in tasks.tolist()], np.int64),
        }
        with _arrow_errors(where):
            columns = [
                pa.array(numbers[field.name]) if field.name in numbers else converted(own[field.name], field.type)
                for field in schema
            ]
            renumbered: Table = pa.table(columns, schema=schema)
        return renumbered


def write_rows(writer: Any, rows: pa.Table, where: str) -> None:  # noqa: ANN401  (pyarrow has no types)
    """Write them as a row group.

    Raises:
        FormatError: Parquet can't hold them; the message begins with ``where``.
    """
    with _arrow_errors(where):
        writer.write_table(rows, row_group_size=len(rows))


@contextmanager
def _arrow_errors(where: str) -> Iterator[None]:
    pa = require_pyarrow()
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise FormatError(f"{where} can't be written anew: {str(error).strip()}") from error


def open_writer(path: Path, schema: pa.Schema) -> Any:  # noqa: ANN401  (pyarrow has no types)
    """A parquet writer; its ``write_table`` writes row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return require_pyarrow().parquet.ParquetWriter(path, schema, compression=_COMPRESSION)


def write_tasks(path: Path, tasks: Sequence[str]) -> None:
    """tasks.parquet: the task is the index of a pandas frame, hence the second column."""
    pa = require_pyarrow()
    index = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    column = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    header = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [{**header, "metadata": {"encoding": "UTF-8"}}],
        "columns": [{**column, "metadata": None}, index],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    columns = {"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())}
    table = pa.table(columns).replace_schema_metadata({"pandas": json.dumps(pandas)})
    with open_writer(path, table.schema) as writer:
        writer.write_table(table)


def write_episodes(path: Path, columns: Mapping[str, Sequence[Any] | EpisodeColumn], first: int, stop: int) -> None:
    """Rows [first, stop) of meta/episodes. ``columns`` has all episodes' values; what isn't known becomes null."""
    pa = require_pyarrow()
    arrays = {
        name: _nested(pa, values.take(np.arange(first, stop)))
        if isinstance(values, EpisodeColumn)
        else pa.array(values[first:stop], _episode_type(pa, name))
        for name, values in columns.items()
    }
    table = pa.table(arrays)
    with open_writer(path, table.schema) as writer:
        writer.write_table(table, row_group_size=_EPISODES_PER_GROUP)


def _nested(pa: Any, column: EpisodeColumn) -> Any:  # noqa: ANN401
    """Lists in lists, as many as an episode's value has axes."""
    values = column.values[column.is_known]  # pyarrow to 23 writes no null that has values
    array = pa.array(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        is_outer = axis == 1
        has_values = column.is_known if is_outer else np.ones(int(np.prod(values.shape[:axis])), bool)
        offsets = pa.array(np.append(0, np.cumsum(has_values * values.shape[axis])).astype(np.int32))
        mask = pa.array(~column.is_known) if is_outer else None
        array = pa.ListArray.from_arrays(offsets, array, type=pa.list_(pa.field("element", array.type)), mask=mask)
    return array


def _episode_type(pa: Any, name: str) -> Any:  # noqa: ANN401
    """The type LeRobot gives the column."""
    if name == "tasks":
        return pa.list_(pa.field("element", pa.string()))
    return pa.float64() if name.endswith("_timestamp") else pa.int64()

"""The parquet files of a LeRobot dataset: data, episodes, tasks; columns, types and row groups as LeRobot's."""

from __future__ import annotations

import json
import struct
import zlib
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.testing.info import Features
    from asyncfetch.testing.quirks import Quirks
    from asyncfetch.testing.truth import DatasetTruth

__all__ = ["data_schema", "png", "write_data", "write_episodes", "write_tasks"]

EPISODES_PER_FLUSH = 10
"""Rows of meta/episodes that LeRobot writes at a time, each time as one row group."""
UNNAMED_INDEX = "__index_level_0__"


def data_schema(features: Features, quirks: Quirks) -> pa.Schema:
    """The schema of the data files: every feature but the videos, in order."""
    import pyarrow as pa

    stored = {name: feature for name, feature in features.items() if feature["dtype"] != "video"}
    fields = [_field(name, feature, quirks) for name, feature in stored.items()]
    if quirks.no_huggingface_metadata:
        return pa.schema(fields)
    described = {name: _huggingface_feature(feature) for name, feature in stored.items()}
    fingerprint = sha256(json.dumps(described).encode()).hexdigest()[:16]
    info = {"info": {"features": described}, "fingerprint": fingerprint}
    return pa.schema(fields, metadata={"huggingface": json.dumps(info)})


def write_data(
    path: Path, truth: DatasetTruth, schema: pa.Schema, episodes: Sequence[int], quirks: Quirks, *, orphan_rows: int = 0
) -> None:
    """Writes the rows of some episodes, behind orphan rows where asked for; episodes without frames leave nothing."""
    import pyarrow as pa

    tables = [_episode_table(truth, schema, episode) for episode in episodes if truth.lengths[episode]]
    if orphan_rows:
        tables.insert(0, _orphans(tables[0], truth, orphan_rows))
    if quirks.collapsed_row_groups:
        tables = [pa.concat_tables(tables)]
    _write_row_groups(path, tables)


def write_episodes(path: Path, columns: Mapping[str, Sequence[Any]], rows: slice, quirks: Quirks) -> None:
    """Writes some rows of meta/episodes. ``columns`` has the values of all episodes, None for null."""
    import pyarrow as pa

    names = sorted(columns) if quirks.sorted_episode_columns else list(columns)
    table = pa.table({name: _episode_column(name, columns[name][rows], quirks) for name in names})
    starts = range(0, table.num_rows, EPISODES_PER_FLUSH)
    _write_row_groups(path, [table.slice(start, EPISODES_PER_FLUSH) for start in starts])


def write_tasks(path: Path, tasks: Sequence[str], quirks: Quirks) -> None:
    """Writes tasks.parquet: the task is the index of a pandas frame, hence the second column."""
    import pyarrow as pa

    rows = list(enumerate(tasks))
    if quirks.permuted_tasks:
        rows.reverse()
    index = UNNAMED_INDEX if quirks.unnamed_tasks_index else "task"
    table = pa.table({"task_index": pa.array([row[0] for row in rows], pa.int64()), index: [row[1] for row in rows]})
    index_name = None if quirks.unnamed_tasks_index else "task"
    pandas = {
        "index_columns": [index],
        "column_indexes": [_pandas_column(None, None, "object") | {"metadata": {"encoding": "UTF-8"}}],
        "columns": [_pandas_column("task_index", "task_index", "int64"), _pandas_column(index_name, index, "object")],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    _write_row_groups(path, [table.replace_schema_metadata({"pandas": json.dumps(pandas)})])


def png(picture: NDArray[np.uint8]) -> bytes:
    """An RGB picture (H, W, 3) as a PNG file."""
    height, width = picture.shape[:2]
    # Every row starts with the number of its filter: 0, none.
    rows = np.pad(picture.reshape(height, width * 3), ((0, 0), (1, 0)))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def _write_row_groups(path: Path, tables: Sequence[pa.Table]) -> None:
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, tables[0].schema, compression="snappy") as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))


def _field(name: str, feature: Mapping[str, Any], quirks: Quirks) -> pa.Field[Any]:
    import pyarrow as pa

    if feature["dtype"] == "image":
        return pa.field(name, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    scalar = pa.bool_() if feature["dtype"] == "bool" else getattr(pa, feature["dtype"])()
    shape = feature["shape"]
    if shape == [1]:
        return pa.field(name, scalar)
    element = pa.field("element", scalar)
    if len(shape) == 1:
        return pa.field(name, pa.list_(element) if quirks.plain_lists else pa.list_(element, shape[0]))
    nested = scalar
    for _ in shape:
        nested = pa.list_(pa.field("element", nested))
    extension = {
        "ARROW:extension:name": f"datasets.features.features.Array{len(shape)}DExtensionType",
        "ARROW:extension:metadata": json.dumps([shape, feature["dtype"]]),
    }
    return pa.field(name, nested, metadata=extension)


def _huggingface_feature(feature: Mapping[str, Any]) -> dict[str, Any]:
    if feature["dtype"] == "image":
        return {"_type": "Image"}
    value = {"dtype": feature["dtype"], "_type": "Value"}
    shape = feature["shape"]
    if shape == [1]:
        return value
    if len(shape) == 1:
        return {"feature": value, "length": shape[0], "_type": "List"}
    return {"shape": shape, "dtype": feature["dtype"], "_type": f"Array{len(shape)}D"}


def _episode_table(truth: DatasetTruth, schema: pa.Schema, episode: int) -> pa.Table:
    import pyarrow as pa

    def values(field: pa.Field[Any]) -> list[Any]:
        if pa.types.is_struct(field.type):
            pictures = (truth.picture(episode, frame, field.name) for frame in range(truth.lengths[episode]))
            return [{"bytes": png(picture), "path": f"frame-{n:06d}.png"} for n, picture in enumerate(pictures)]
        rows: list[Any] = truth.column(field.name, episode).tolist()
        return rows

    return pa.Table.from_arrays([pa.array(values(field), field.type) for field in schema], schema=schema)


def _orphans(table: pa.Table, truth: DatasetTruth, count: int) -> pa.Table:
    """``count`` rows like the first of ``table``, of an episode and with indices that no metadata mention."""
    import pyarrow as pa

    orphans = table.take(np.zeros(count, np.int64))
    beyond = {
        "episode_index": np.full(count, truth.num_episodes),
        "index": truth.num_frames + np.arange(count),
        "frame_index": np.arange(count),
    }
    for name in beyond.keys() & set(orphans.column_names):
        position = orphans.column_names.index(name)
        orphans = orphans.set_column(position, orphans.schema.field(position), pa.array(beyond[name]))
    return orphans


def _episode_column(name: str, values: Sequence[Any], quirks: Quirks) -> pa.Array[Any]:
    import pyarrow as pa

    if name.startswith("stats/"):
        column: pa.Array[Any] = pa.array(values)  # nested as deep as the values are
        return column
    if name == "tasks":
        return pa.array(values, pa.list_(pa.string()))
    is_double = name.endswith("_timestamp") or quirks.float_index_columns
    return pa.array(values, pa.float64() if is_double else pa.int64())


def _pandas_column(name: str | None, field_name: str | None, numpy_type: str) -> dict[str, Any]:
    return {
        "name": name,
        "field_name": field_name,
        "pandas_type": "int64" if numpy_type == "int64" else "unicode",
        "numpy_type": numpy_type,
        "metadata": None,
    }

"""A whole table, read and decoded part by part: beside the table, memory holds a few parts as they lie in the file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asyncfetch.errors import COPY_ANEW, FormatError, redact_url
from asyncfetch.fetch.batch import for_each
from asyncfetch.tables.parquet import border, fetch_groups, require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.tables.parquet import FetchedGroups, TableFile

PART_BYTES = 4 * 1024 * 1024
"""Bytes of a file that are read as one. A column of a row group of a million rows may have more."""
PARTS_AT_ONCE = 4
"""Parts that are read and decoded side by side: one stream may be slow."""


async def read_all(reader: RangeReader, file: TableFile, columns: Sequence[str], *, run: RunSync) -> pa.Table:
    """These columns of all rows, in file order.

    Raises:
        FetchError: A range could not be fetched.
        FormatError: A column isn't there, or the file is damaged.
    """
    file.require(columns)
    asked = _parts(file, list(columns))
    decoding = anyio.Lock()  # one after another: each takes several times its bytes meanwhile
    nulls: dict[pa.DataType, Any] = {}

    async def read_part(part: tuple[list[int], list[str]]) -> tuple[list[str], list[pa.RecordBatch]]:
        groups, names = part
        fetched = [await fetch_groups(reader, file, groups, names, together=False)]
        async with decoding:
            return names, await run(partial(_decode, fetched, nulls))

    parts = await for_each(asked, read_part, workers=PARTS_AT_ONCE)
    return await run(partial(_join, file, list(columns), parts))


def _decode(held: list[FetchedGroups], nulls: dict[pa.DataType, Any]) -> list[pa.RecordBatch]:
    """The batches of the one part that is held, which goes; the memory that decoding took beside them goes, too."""
    arrow, fetched = require_pyarrow(), held.pop()
    batches: list[pa.RecordBatch] = []
    for group in fetched.groups:
        of_group = replace(fetched, groups=[group]).decode()
        if of_group:
            batches += _compact(arrow.Table.from_batches(of_group), nulls).to_batches()
        del of_group
        arrow.default_memory_pool().release_unused()
    return batches


def _compact(table: pa.Table, nulls: dict[pa.DataType, Any]) -> pa.Table:
    """A copy of a row group: its columns have up to as much room beside them, in which they grew.

    Columns that are null throughout have their memory in common, by their types.
    """
    arrow = require_pyarrow()
    for place, field in enumerate(table.schema):
        if table.column(place).null_count == table.num_rows:
            if len(nulls.get(field.type, ())) < table.num_rows:
                nulls[field.type] = arrow.nulls(table.num_rows, field.type)
            table = table.set_column(place, field, nulls[field.type].slice(0, table.num_rows))
    # Of the default pool a thread would keep what lies between columns that stay.
    return table.combine_chunks(memory_pool=arrow.system_memory_pool())


def _parts(file: TableFile, columns: list[str]) -> list[tuple[list[int], list[str]]]:
    """The row groups and columns that are read at once: up to PART_BYTES of them, or one column of one group."""
    leaves = [leaf for column in columns for leaf in file.leaves[column]]
    parts: list[tuple[list[int], list[str]]] = []
    nbytes = PART_BYTES
    for group in range(file.metadata.num_row_groups):
        about = file.metadata.row_group(group)
        if not about.num_rows or not columns:
            continue
        group_bytes = sum(about.column(leaf).total_compressed_size for leaf in leaves)
        if group_bytes > PART_BYTES:
            parts += [([group], [column]) for column in columns]
            nbytes = PART_BYTES
        elif nbytes + group_bytes > PART_BYTES:
            parts.append(([group], columns))
            nbytes = group_bytes
        else:
            parts[-1][0].append(group)
            nbytes += group_bytes
    return parts


def _join(file: TableFile, columns: list[str], parts: list[tuple[list[str], list[pa.RecordBatch]]]) -> pa.Table:
    """The table of all parts, which this empties."""
    arrow = require_pyarrow()
    with border(file.url):
        schema = file.metadata.schema.to_arrow_schema()
        schema = arrow.schema([schema.field(name) for name in columns], metadata=schema.metadata)
        chunks: dict[str, list[Any]] = {name: [] for name in columns}
        for names, batches in parts:
            for name in names:
                chunks[name] += [batch.column(name) for batch in batches]
        parts.clear()
        arrays = [arrow.chunked_array(chunks.pop(field.name), field.type) for field in schema]
        table: pa.Table = arrow.Table.from_arrays(arrays, schema=schema)
    if columns and table.num_rows != file.metadata.num_rows:
        message = f"{redact_url(file.url)} says it has {file.metadata.num_rows} rows, but holds {table.num_rows}"
        raise FormatError(message, remedy=COPY_ANEW)
    return table

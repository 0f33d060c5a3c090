"""Tables of videos and spans, a row each: Parquet, CSV and JSON lines by their urls, and tables in memory."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncfetch.errors import COPY_ANEW, ConfigError, FormatError, redact_url
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.parquet import border, fetch_end, fetch_groups, open_end, read_whole, require_pyarrow
from asyncfetch.videos.entries import (
    absolute_index,
    absolute_urls,
    check_names,
    check_spans,
    entry_table,
    is_index,
    plain_column,
    to_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    import pyarrow as pa

    from asyncfetch.fetch import Fetcher
    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.tables.parquet import TableFile

SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""What a file is, by the end of its name."""
PART_BYTES = 16 * 1024 * 1024
"""Bytes of a Parquet file that are read at once. A column of a row group of a million rows has about as many."""
BLOCK_BYTES = 16 * 1024 * 1024
"""Longest line of JSON that is read: pyarrow goes through a file in blocks, and no line may be in three of them."""
IN_MEMORY = "the table"

TableSource = Any
"""A url or path; or a pyarrow.Table, a DataFrame of pandas or polars, or a list of dicts."""


async def read_table(
    reader: RangeReader, fetcher: Fetcher, source: TableSource, *, texts: Collection[str] = ()
) -> pa.Table:
    """The whole table.

    Args:
        reader: Reads its file.
        fetcher: Lists directories.
        source: See TableSource.
        texts: Columns of a CSV file that are text whatever they look like: pyarrow takes 01:30 for a time of day.

    Raises:
        FetchError: A file could not be read.
        FormatError: It isn't what its name says, or is damaged.
        ConfigError: The source is none of these.
    """
    if not isinstance(source, str | os.PathLike):
        return await run_sync(_from_memory, source)
    return await _read_file(reader, await run_sync(_absolute, source), texts)


async def table_entries(
    reader: RangeReader,
    fetcher: Fetcher,
    source: TableSource,
    *,
    video: str = "video",
    start: str | None = None,
    stop: str | None = None,
) -> pa.Table:
    """The table's rows as entries, or an index as it is.

    Args:
        reader: Reads its file.
        fetcher: Lists directories.
        source: See TableSource.
        video: Column of urls and paths; relative ones are relative to the table's own, in memory to the working
            directory.
        start: Column of times at which spans begin: seconds, or text as HH:MM:SS.mmm, MM:SS or SS.s; null for the
            beginning of the video.
        stop: Column of times at which they end; null for the end of the video.

    Raises:
        FetchError: A file could not be read.
        FormatError: It isn't what its name says, or is damaged.
        ConfigError: A column isn't there, or has a name that is reserved.
        DatasetError: A row isn't an entry; the message has its number and value.
    """
    asked = {"video": video, "start": start, "stop": stop}
    texts = {name for name in asked.values() if name is not None}
    table = await read_table(reader, fetcher, source, texts=texts)
    is_file = isinstance(source, str | os.PathLike)
    base = await run_sync(_absolute, source if is_file else "table")
    shown = redact_url(base) if is_file else IN_MEMORY
    held = [table]
    del table
    return await run_sync(partial(_entries, held, asked, base, shown))


def _entries(held: list[pa.Table], asked: dict[str, str | None], base: str, shown: str) -> pa.Table:
    """The entries of the one table that is held; each of its columns is let go of as soon as it isn't needed."""
    table = held.pop()
    if is_index(table, shown):
        if asked != {"video": "video", "start": None, "stop": None}:
            raise ConfigError(f"{shown} is an index, which has its own columns: leave out video=, start= and stop=")
        table = absolute_index(table, base)
        require_pyarrow().default_memory_pool().release_unused()
        return table
    check_names(table.column_names, asked, shown)
    columns = dict(zip(table.column_names, table.columns, strict=True))
    del table
    taken = {name: columns[given] for name, given in asked.items() if given is not None}
    for given in {given for given in asked.values() if given is not None}:
        del columns[given]
    urls = absolute_urls(taken.pop("video"), base, asked["video"] or "", shown)
    times = {name: to_seconds(taken.pop(name), asked[name] or "", shown) for name in tuple(taken)}
    if len(times) == 2:
        check_spans(times["start"], times["stop"], shown)
    users = {name: plain_column(columns.pop(name)) for name in tuple(columns)}
    require_pyarrow().default_memory_pool().release_unused()
    return entry_table(urls, times, users)


def _absolute(source: str | os.PathLike[str]) -> str:
    text = os.fspath(source)
    return text if "://" in text else os.path.abspath(text)


def _from_memory(source: TableSource) -> pa.Table:
    arrow = require_pyarrow()
    try:
        if isinstance(source, arrow.Table):
            made: pa.Table = source
        elif isinstance(source, list | tuple):
            made = _from_dicts(source)
        elif type(source).__module__.partition(".")[0] == "pandas":
            made = _without_numbers(arrow.Table.from_pandas(source))
        elif hasattr(source, "__arrow_c_stream__"):
            made = arrow.table(source)
        else:
            kinds = "a pyarrow.Table, a DataFrame of pandas or polars, or a list of dicts"
            raise ConfigError(f"a table must be a url or path, {kinds}, not of type {type(source).__name__}")
    except (arrow.ArrowException, ValueError, TypeError, OverflowError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the {type(source).__name__} can't be made an Arrow table: {error}") from error
    return made


def _without_numbers(table: pa.Table) -> pa.Table:
    """The table without the columns that pandas makes of an index that has no name."""
    return table.select([name for name in table.column_names if not name.startswith("__index_level_")])


def _from_dicts(rows: list[Any] | tuple[Any, ...]) -> pa.Table:
    names: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            message = f"a list must be of dicts, a row each; row {number} is of type {type(row).__name__}"
            raise ConfigError(message)
        names.update(dict.fromkeys(row))
    table: pa.Table = require_pyarrow().table({name: [row.get(name) for row in rows] for name in names})
    return table


async def _read_file(reader: RangeReader, url: str, texts: Collection[str]) -> pa.Table:
    match _kind(url):
        case "parquet":
            return await _read_parquet(reader, url)
        case "jsonl":
            return await run_sync(_read_json, url, await reader.fetch(url))
        case kind:
            delimiter = "\t" if kind == "tsv" else ","
            return await run_sync(_read_csv, url, await reader.fetch(url), delimiter, texts)


def _kind(url: str) -> str:
    path = url.partition("?")[0] if "://" in url else url
    for suffix, kind in SUFFIXES.items():
        if path.lower().endswith(suffix):
            return kind
    raise ConfigError(f"{redact_url(url)!r} must be a table's: its name must end in {', '.join(SUFFIXES)}")


async def _read_parquet(reader: RangeReader, url: str) -> pa.Table:
    end = await fetch_end(reader, url)
    if end.is_whole:
        return _without_numbers(await run_sync(read_whole, end, lambda columns: columns))
    file = await open_end(reader, end, run=run_sync)
    parts = []
    for groups, columns in _parts(file):
        fetched = await fetch_groups(reader, file, groups, columns, together=False)
        batches = await run_sync(fetched.decode)
        del fetched
        parts.append((columns, batches))
    return _without_numbers(await run_sync(_join_parts, file, parts))


def _parts(file: TableFile) -> list[tuple[list[int], list[str]]]:
    """The row groups and columns that are read at once: up to PART_BYTES of them, or one column of one group."""
    parts: list[tuple[list[int], list[str]]] = []
    columns, nbytes = list(file.columns), PART_BYTES
    for group in range(file.metadata.num_row_groups):
        about = file.metadata.row_group(group)
        if not about.num_rows:
            continue
        group_bytes = sum(about.column(leaf).total_compressed_size for leaf in range(file.metadata.num_columns))
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


def _join_parts(file: TableFile, parts: list[tuple[list[str], list[pa.RecordBatch]]]) -> pa.Table:
    """The table of all parts, which this empties."""
    arrow = require_pyarrow()
    with border(file.url):
        schema = file.metadata.schema.to_arrow_schema()
        chunks: dict[str, list[Any]] = {name: [] for name in file.columns}
        for columns, batches in parts:
            for name in columns:
                chunks[name] += [batch.column(name) for batch in batches]
        parts.clear()
        arrays = [arrow.chunked_array(chunks.pop(field.name), field.type) for field in schema]
        table: pa.Table = arrow.Table.from_arrays(arrays, schema=schema)
    if table.num_rows != file.metadata.num_rows:
        message = f"{redact_url(file.url)} says it has {file.metadata.num_rows} rows, but holds {table.num_rows}"
        raise FormatError(message, remedy=COPY_ANEW)
    arrow.default_memory_pool().release_unused()  # as much as a half of the table
    return table


def _read_csv(url: str, data: memoryview, delimiter: str, texts: Collection[str]) -> pa.Table:
    arrow = require_pyarrow()
    with forks_wait():
        from pyarrow import csv
    with border(url, "csv"):
        table: pa.Table = csv.read_csv(
            arrow.BufferReader(data),
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, arrow.string())),
        )
    return table


def _read_json(url: str, data: memoryview) -> pa.Table:
    arrow = require_pyarrow()
    with forks_wait():
        from pyarrow import json
    with border(url, "json lines"):
        options = json.ReadOptions(block_size=BLOCK_BYTES)
        table: pa.Table = json.read_json(arrow.BufferReader(data), read_options=options)
    return table

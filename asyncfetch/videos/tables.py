"""Tables of videos and spans, a row each: Parquet, CSV and JSON lines by their urls, and tables in memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from asyncfetch.errors import ConfigError, FormatError, redact_url
from asyncfetch.fetch.batch import for_each
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.parquet import border, fetch_end, open_end, read_whole, require_pyarrow
from asyncfetch.tables.whole import read_all
from asyncfetch.videos.entries import (
    absolute_index,
    absolute_urls,
    check_names,
    check_spans,
    entry_table,
    is_index,
    to_seconds,
)
from asyncfetch.videos.listing import WEB_SCHEMES, absolute_url, find_files, split_wildcards

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    import pyarrow as pa

    from asyncfetch.fetch import Fetcher
    from asyncfetch.fetch.reader import RangeReader

SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""Kinds of files, by the end of their names."""
FILES_AT_ONCE = 8
"""Files that are read side by side."""
BLOCK_BYTES = 16 * 1024 * 1024
"""Longest line of JSON that is read: pyarrow goes through a file in blocks, and no line may be in three of them."""

TableSource = Any
"""A url or path of a file, of a directory of Parquet files, or a pattern; or a pyarrow.Table, a DataFrame of pandas or
polars, or a list of dicts."""


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
        reader: Reads the files.
        fetcher: Lists directories.
        source: See TableSource.
        video: Column of urls and paths; relative ones are relative to the table's own, in memory to the working
            directory.
        start: Column of times at which spans begin: seconds, or text as HH:MM:SS.mmm, MM:SS or SS.s; null for the
            beginning of the video.
        stop: Column of times at which they end; null for the end of the video.

    Raises:
        FetchError: A file could not be read.
        FormatError: It isn't what its name says, or is damaged; or files contradict each other.
        ConfigError: A column isn't there, or has a name that is reserved.
        DatasetError: A row isn't an entry; the message has its number and value.
    """
    asked = {"video": video, "start": start, "stop": stop}
    if not isinstance(source, str | os.PathLike):
        held = [await run_sync(_from_memory, source)]
        base = await run_sync(absolute_url, "table")
        return await run_sync(_entries, held, asked, base, "the table")
    texts = {name for name in asked.values() if name is not None}

    async def read_one(url: str) -> pa.Table:
        held = [await read_file(reader, url, texts)]
        return await run_sync(_entries, held, asked, url, redact_url(url))

    return await each_file(fetcher, source, read_one)


async def each_file(
    fetcher: Fetcher, source: str | os.PathLike[str], read: Callable[[str], Awaitable[pa.Table]]
) -> pa.Table:
    """The tables of a file, of all that match a pattern, or of all in a directory that are Parquet, by name.

    Raises:
        ConfigError: There is none.
        FetchError: A directory could not be listed.
        FormatError: A column is of two types.
    """
    url = await run_sync(absolute_url, source)
    is_directory = _kind(url) is None and not split_wildcards(url)[1]
    if is_directory and url.startswith(WEB_SCHEMES):
        raise ConfigError(f"{redact_url(url)!r} must be a table's: its name must end in {', '.join(SUFFIXES)}")
    urls = (await find_files(f"{url.rstrip('/')}/**/*.parquet" if is_directory else url, fetcher)).urls
    different = list(dict.fromkeys(urls))
    tables = await for_each(different, read, workers=FILES_AT_ONCE)
    return await run_sync(_join, urls, dict(zip(different, tables, strict=True)))


def _join(urls: list[str], tables: dict[str, pa.Table]) -> pa.Table:
    if len(urls) == 1:
        return tables[urls[0]]
    arrow = require_pyarrow()
    try:
        joined: pa.Table = arrow.concat_tables([tables[url] for url in urls], promote_options="permissive")
    except arrow.ArrowException as error:
        message = f"the tables from {redact_url(urls[0])} to {redact_url(urls[-1])} can't be joined: {error}"
        raise FormatError(message, remedy="write them anew with the same columns, or read them one by one") from error
    return joined


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
    taken = {name: table.column(given) for name, given in asked.items() if given is not None}
    users = table.drop_columns(list({given for given in asked.values() if given is not None}))
    del table
    urls = absolute_urls(taken.pop("video"), base, asked["video"] or "", shown)
    times = {name: to_seconds(taken.pop(name), asked[name] or "", shown) for name in tuple(taken)}
    if len(times) == 2:
        check_spans(times["start"], times["stop"], shown)
    entries = entry_table(urls, times, users)
    require_pyarrow().default_memory_pool().release_unused()
    return entries


def _from_memory(source: TableSource) -> pa.Table:
    arrow = require_pyarrow()
    make: Callable[[Any], pa.Table]
    if isinstance(source, list | tuple):
        make, rows = _from_dicts, _checked_rows(source)
    elif type(source).__module__.partition(".")[0] == "pandas":
        make, rows = arrow.Table.from_pandas, source
    elif hasattr(source, "__arrow_c_stream__"):
        make, rows = arrow.table, source
    else:
        kinds = "a pyarrow.Table, a DataFrame of pandas or polars, or a list of dicts"
        raise ConfigError(f"a table must be a url or path, {kinds}, not of type {type(source).__name__}")
    try:
        return _without_numbers(make(rows))
    except (arrow.ArrowException, ValueError, TypeError, OverflowError, AttributeError) as error:
        raise ConfigError(f"the {type(source).__name__} can't be made an Arrow table: {error}") from error


def _without_numbers(table: pa.Table) -> pa.Table:
    """The table without the columns that pandas makes of an index that has no name."""
    return table.select([name for name in table.column_names if not name.startswith("__index_level_")])


def _checked_rows(rows: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            message = f"a list must be of dicts, a row each; row {number} is of type {type(row).__name__}"
            raise ConfigError(message)
    return rows


def _from_dicts(rows: Sequence[dict[str, Any]]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow's from_pylist looks at the first alone
    table: pa.Table = require_pyarrow().table({name: [row.get(name) for row in rows] for name in names})
    return table


async def read_file(reader: RangeReader, url: str, texts: Collection[str] = ()) -> pa.Table:
    """The whole table in a file, by its name.

    Columns of ``texts`` are text in CSV, whatever they look like (pyarrow takes 01:30 for a time of day), and hold no
    bytes in Parquet.

    Raises:
        FetchError, FormatError, ConfigError: It could not be read, isn't what its name says, or has another name.
    """
    match _kind(url):
        case "parquet":
            return await _read_parquet(reader, url, texts)
        case "jsonl":
            return await run_sync(_read_json, url, await reader.fetch(url))
        case "csv" | "tsv" as kind:
            delimiter = "\t" if kind == "tsv" else ","
            return await run_sync(_read_csv, url, await reader.fetch(url), delimiter, texts)
        case _:
            raise ConfigError(f"{redact_url(url)!r} must be a table's: its name must end in {', '.join(SUFFIXES)}")


def _kind(url: str) -> str | None:
    """Return what a file is, by its name; None for a directory."""
    path = url.partition("?")[0] if "://" in url else url
    return next((kind for suffix, kind in SUFFIXES.items() if path.lower().endswith(suffix)), None)


async def _read_parquet(reader: RangeReader, url: str, texts: Collection[str]) -> pa.Table:
    end = await fetch_end(reader, url)
    if end.is_whole:
        return _without_numbers(await run_sync(read_whole, end, lambda columns: columns))
    file = await open_end(reader, end, run=run_sync)
    for name in sorted(file.leaves.keys() & texts):
        columns = [file.metadata.schema.column(leaf) for leaf in file.leaves[name]]
        if any(one.physical_type == "BYTE_ARRAY" and one.logical_type.type == "NONE" for one in columns):
            message = f"column {name!r} of {redact_url(url)} holds bytes, not urls, paths or times"
            raise ConfigError(f"{message}: Videos.from_parquet reads videos out of a column")
    return _without_numbers(await read_all(reader, file, file.columns, run=run_sync))


def _read_csv(url: str, data: memoryview, delimiter: str, texts: Collection[str]) -> pa.Table:
    arrow = require_pyarrow()
    with forks_wait():
        from pyarrow import csv
    with border(url, "csv"):
        table: pa.Table = csv.read_csv(
            arrow.BufferReader(data),
            read_options=csv.ReadOptions(use_threads=False),  # each would keep memory of its own
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, arrow.string())),
        )
    arrow.default_memory_pool().release_unused()  # as much as the file has; a thread releases its own
    return table


def _read_json(url: str, data: memoryview) -> pa.Table:
    arrow = require_pyarrow()
    with forks_wait():
        from pyarrow import json
    with border(url, "json lines"):
        options = json.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)
        table: pa.Table = json.read_json(arrow.BufferReader(data), read_options=options)
    arrow.default_memory_pool().release_unused()
    return table

"""Folders and prefixes of videos, as a table of entries: one a file, with what lies beside it.

A text or a JSON of a video's name (``a.txt`` and ``a.json`` beside ``a.mp4``) comes with it. A ``metadata.csv``,
``.jsonl`` or ``.parquet``, as Hugging Face's VideoFolder reads it, says instead which videos there are, and has columns
of its own.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Awaitable, Callable
from itertools import starmap
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from asyncfetch.errors import ConfigError, DatasetError, FormatError, NotFound, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.parquet import require_pyarrow
from asyncfetch.videos.listing import list_files
from asyncfetch.videos.patterns import absolute_url
from asyncfetch.videos.tars import RESERVED_COLUMNS, VIDEO_EXTENSIONS

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence

    import pyarrow as pa

    from asyncfetch.fetch import Fetcher

METADATA_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Tables that VideoFolder looks for in each directory."""
SIDECAR_EXTENSIONS = ("json", "txt")
"""Extensions of files that come with the video of their name."""
FILE_NAME = "file_name"
"""VideoFolder's column of paths, and the end of the names of others."""

ReadTable = Callable[[str], Awaitable["pa.Table"]]
"""Reads the table at a url."""

_log = logging.getLogger(__name__)


async def folder_entries(
    root: str | os.PathLike[str], *, fetcher: Fetcher, read_table: ReadTable, video: str | None = None
) -> pa.Table:
    """The videos below a directory, by name; or those that its metadata names, in the order of that.

    Columns: ``video`` (string: the file's url), ``offset`` and ``size`` (int64), ``start`` and ``stop`` (float64), all
    null; ``file_name`` (string: the path below the directory). Files that come with a video are columns named by their
    extension: structs of ``offset`` and ``size``, which are null, and ``url`` (string), with the field metadata
    ``asyncfetch: member``; null where a video has no such file. Files and directories with a dot in front are passed
    over.

    With metadata, anywhere below the directory, its rows are the entries, with all of its columns. Paths are relative
    to it. Of several columns of paths (``*_file_name``) one is the video's, and the others are such structs without
    their ``_file_name``. Videos that no row names are left out, and counted in a line of the log.

    Args:
        root: The directory. On a web server it needs index pages, or metadata in it.
        fetcher: Lists directories.
        read_table: Reads metadata.
        video: The column of paths of videos; None for ``file_name``, or the only one that ends so.

    Raises:
        ConfigError: The directory can't be listed and has no metadata; ``video`` is no column of it.
        DatasetError: There are no videos, or metadata names one that isn't there.
        FormatError: Metadata has no column of paths, or one whose name has a meaning of its own.
        FetchError: As for reading.
    """
    await run_sync(require_pyarrow)
    base = (await run_sync(absolute_url, root)).rstrip("/") + "/"
    try:
        listed = await list_files(fetcher, base, recursive=True)
    except ConfigError:  # a web server without index pages
        tables = await _read_unlisted(base, read_table)
        if not tables:
            raise
        return await run_sync(_entries_of_metadata, base, tables, None, video)
    seen = [url for url in listed if not any(part.startswith(".") for part in url[len(base) :].split("/"))]
    metadata = [url for url in seen if url.rpartition("/")[2] in METADATA_NAMES]
    if not metadata:
        return await run_sync(_entries_of_files, base, seen)
    tables = {url: await read_table(url) for url in metadata}
    return await run_sync(_entries_of_metadata, base, tables, seen, video)


async def _read_unlisted(base: str, read_table: ReadTable) -> dict[str, pa.Table]:
    tables = {}
    for name in METADATA_NAMES:
        url = join_url(base, name)
        try:
            tables[url] = await read_table(url)
        except NotFound:
            continue
    return tables


def _extension(url: str) -> str:
    return url.rpartition("/")[2].rpartition(".")[2].lower()


def _entries_of_files(base: str, files: Sequence[str]) -> pa.Table:
    import pyarrow as pa

    videos = [url for url in files if _extension(url) in VIDEO_EXTENSIONS]
    if not videos:
        raise _no_videos(base, len(files))
    there = set(files)
    names = [url[len(base) :] for url in videos]
    columns: dict[str, Any] = {
        FILE_NAME: pa.array([unquote(name) for name in names] if _is_quoted(base) else names, pa.string())
    }
    stems = [url.rpartition(".")[0] for url in videos]
    for extension in SIDECAR_EXTENSIONS:
        beside = [f"{stem}.{extension}" for stem in stems]
        if not there.isdisjoint(beside):
            columns[extension] = [url if url in there else None for url in beside]
    return _entry_table(videos, columns)


def _entries_of_metadata(
    base: str, tables: Mapping[str, pa.Table], files: Collection[str] | None, video: str | None
) -> pa.Table:
    """The rows of tables by their urls; ``files`` are all that there are, None where that isn't known."""
    import pyarrow as pa

    there = None if files is None else set(files)
    parts = [_entries_of_table(url, table, there, video) for url, table in tables.items()]
    entries = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    if not entries.num_rows:
        raise _no_videos(base, len(files or ()))
    if there is not None:
        unnamed = {url for url in there if _extension(url) in VIDEO_EXTENSIONS} - set(entries["video"].to_pylist())
        if unnamed:
            message = "%d videos below %s are in no row of its metadata and are left out, such as %s"
            _log.warning(message, len(unnamed), redact_url(base), redact_url(min(unnamed)))
    return entries


def _entries_of_table(url: str, table: pa.Table, there: Collection[str] | None, video: str | None) -> pa.Table:
    """The entries of one table of metadata."""
    shown = redact_url(url)
    paths = [name for name in table.column_names if name == FILE_NAME or name.endswith(f"_{FILE_NAME}")]
    chosen = video or (FILE_NAME if FILE_NAME in paths else paths[0] if len(paths) == 1 else None)
    if not paths:
        names = ", ".join(table.column_names)
        raise FormatError(f"{shown}: no column {FILE_NAME!r} or '*_{FILE_NAME}' among its columns {names}")
    if chosen not in paths:
        given = f"video={video!r} is none of" if video else "video= must be one of"
        raise ConfigError(f"{given} the columns of paths that {shown} has: {', '.join(paths)}")
    columns: dict[str, Any] = {}
    for name in table.column_names:
        if name in paths and name != chosen:
            columns[name.removesuffix(f"_{FILE_NAME}")] = _joined_urls(url, table, name, there, needed=False)
        else:
            columns[name] = table[name]
    bad = sorted(RESERVED_COLUMNS & columns.keys())
    if bad:
        message = f"{shown}: the column {bad[0]!r} has a name with a meaning of its own"
        raise FormatError(message, remedy="rename it, or read the table by itself, as one of spans")
    return _entry_table(_joined_urls(url, table, chosen, there, needed=True), columns)


def _joined_urls(url: str, table: pa.Table, name: str, there: Collection[str] | None, *, needed: bool) -> list[Any]:
    """The urls of a column of paths, which are relative to the table; None for null, if it isn't ``needed``.

    DatasetError for one that isn't there, or is no path.
    """
    directory = url.rpartition("/")[0]
    urls: list[str | None] = []
    for row, path in enumerate(table[name].to_pylist()):
        if path is None and not needed:
            urls.append(None)
            continue
        if not isinstance(path, str) or not path:
            raise DatasetError(f"row {row} of {redact_url(url)}, counted from 0, has {path!r} as its {name!r}: no path")
        is_absolute = "://" in path or path.startswith("/")
        urls.append(path if is_absolute else join_url(directory, posixpath.normpath(path)))
        if there is not None and not is_absolute and urls[-1] not in there:
            message = f"row {row} of {redact_url(url)}, counted from 0, has {path!r} as its {name!r}, which isn't there"
            raise DatasetError(message, remedy="leave the row out, or put the file there")
    return urls


def _entry_table(videos: Sequence[str], columns: Mapping[str, Any]) -> pa.Table:
    """Entries of whole files. Of the other columns, lists are urls of files that come with each, or None."""
    import pyarrow as pa

    count = len(videos)
    kinds = {"offset": pa.int64(), "size": pa.int64(), "start": pa.float64(), "stop": pa.float64()}
    fields: list[pa.Field[Any]] = [pa.field("video", pa.string()), *starmap(pa.field, kinds.items())]
    values: list[Any] = [pa.array(videos, pa.string()), *(pa.array([None] * count, kind) for kind in kinds.values())]
    for name, column in columns.items():
        if isinstance(column, list):
            place = pa.struct([("offset", pa.int64()), ("size", pa.int64()), ("url", pa.string())])
            fields.append(pa.field(name, place, metadata={b"asyncfetch": b"member"}))
            values.append(pa.array([url and {"url": url} for url in column], place))
        else:
            fields.append(pa.field(name, column.type))
            values.append(column)
    return pa.table(values, schema=pa.schema(fields))


def _is_quoted(url: str) -> bool:
    return url.startswith(("file://", "http://", "https://"))


def _no_videos(base: str, files: int) -> DatasetError:
    extensions = ", ".join(sorted(VIDEO_EXTENSIONS))
    return DatasetError(f"{redact_url(base)}: no video among {files} files below it: none ends in {extensions}")

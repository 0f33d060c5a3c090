"""Folders and prefixes of videos, as a table of entries: one a file, with what lies beside it.

A text or a JSON of a video's name (``a.txt`` and ``a.json`` beside ``a.mp4``) comes with it. A ``metadata.csv``,
``.jsonl`` or ``.parquet``, as Hugging Face's VideoFolder reads it, says instead which videos there are, and has columns
of its own.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from asyncfetch.errors import ConfigError, DatasetError, FormatError, NotFound, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.parquet import require_pyarrow
from asyncfetch.videos.entries import absolute_urls, check_names, entry_table, plain_column
from asyncfetch.videos.listing import QUOTED_SCHEMES, absolute_url, list_files
from asyncfetch.videos.tables import read_file
from asyncfetch.videos.tars import VIDEO_EXTENSIONS, member_field

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from asyncfetch.fetch import Fetcher, RangeReader

METADATA_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Tables that VideoFolder looks for in each directory."""
SIDECAR_EXTENSIONS = ("json", "txt")
"""Extensions of files that come with the video of their name."""
FILE_NAME = "file_name"
"""VideoFolder's column of paths, and the end of the names of others."""

_log = logging.getLogger(__name__)


async def folder_entries(reader: RangeReader, fetcher: Fetcher, root: str | os.PathLike[str]) -> pa.Table:
    """The videos below a directory, by name; or those that its metadata names, in the order of that.

    The user's column is ``file_name``, the path below the directory. Files that come with a video are columns named by
    their extension, see ``tars.member_field``: structs of ``offset`` (null), ``size`` (null where it isn't known) and
    ``url``; null where a video has no such file. Files and directories with a dot in front are passed over.

    With metadata, anywhere below the directory, its rows are the entries, with all of its columns. Paths are relative
    to it. Of several columns of paths (``*_file_name``) ``file_name`` is the video's, and the others are such structs
    without their ``_file_name``. Videos that no row names are left out, and counted in a line of the log.

    Args:
        reader: Reads metadata.
        fetcher: Lists directories.
        root: The directory. On a web server it needs index pages, or metadata in it.

    Raises:
        ConfigError: The directory can't be listed and has no metadata; or a column of that has a name that is reserved.
        DatasetError: There are no videos, or metadata names one that isn't there.
        FormatError: Metadata can't be read, or has no column of videos' paths.
        FetchError: As for reading.
    """
    await run_sync(require_pyarrow)
    base = (await run_sync(absolute_url, root)).rstrip("/") + "/"
    sizes: dict[str, int | None] | None = None
    tables: dict[str, pa.Table] = {}
    try:
        listed = await list_files(fetcher, base, recursive=True)
    except ConfigError:  # a web server without index pages
        for url in (join_url(base, name) for name in METADATA_NAMES):
            with suppress(NotFound):
                tables[url] = await read_file(reader, url, {FILE_NAME})
        if not tables:
            raise
    else:
        sizes = {file.url: file.size for file in listed if "/." not in file.url[len(base) - 1 :]}
        for url in sizes:
            if url.rpartition("/")[2] in METADATA_NAMES:
                tables[url] = await read_file(reader, url, {FILE_NAME})
    if tables:
        return await run_sync(_entries_of_metadata, base, tables, sizes)
    return await run_sync(_entries_of_files, base, sizes or {})


def _extension(url: str) -> str:
    return url.rpartition("/")[2].rpartition(".")[2].lower()


def _entries_of_files(base: str, sizes: Mapping[str, int | None]) -> pa.Table:
    """The entries of the videos among files, which are by their urls."""
    import pyarrow as pa

    videos = [url for url in sizes if _extension(url) in VIDEO_EXTENSIONS]
    if not videos:
        raise _no_videos(base, len(sizes))
    names = [url[len(base) :] for url in videos]
    names = [unquote(name) for name in names] if base.startswith(QUOTED_SCHEMES) else names
    entries = entry_table(pa.chunked_array([videos], pa.string()), {}, pa.table({FILE_NAME: names}))
    stems = [url.rpartition(".")[0] for url in videos]
    for extension in SIDECAR_EXTENSIONS:
        beside = [f"{stem}.{extension}" for stem in stems]
        if not sizes.keys().isdisjoint(beside):
            urls = [url if url in sizes else None for url in beside]
            entries = entries.append_column(*_files_beside(extension, urls, [sizes.get(url) for url in beside]))
    return entries


def _files_beside(
    name: str, urls: Sequence[str | None], sizes: Sequence[int | None]
) -> tuple[pa.Field[Any], pa.Array[Any]]:
    """The column of whole files that come with videos."""
    import pyarrow as pa

    field = member_field(name, [("url", pa.string())])
    values = [None if url is None else {"url": url, "size": size} for url, size in zip(urls, sizes, strict=True)]
    return field, pa.array(values, field.type)


def _entries_of_metadata(base: str, tables: Mapping[str, pa.Table], sizes: Mapping[str, int | None] | None) -> pa.Table:
    """The rows of tables by their urls; ``sizes`` are of all files that there are, None where that isn't known."""
    import pyarrow as pa

    parts = [_entries_of_table(base, url, table, sizes) for url, table in tables.items()]
    try:
        entries = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    except pa.ArrowException as error:
        raise FormatError(f"{redact_url(base)}: tables of metadata below it don't fit together: {error}") from error
    if not entries.num_rows:
        raise _no_videos(base, len(sizes or ()))
    if sizes is not None:
        unnamed = {url for url in sizes if _extension(url) in VIDEO_EXTENSIONS} - set(entries["video"].to_pylist())
        if unnamed:
            message = "%d videos below %s are in no row of its metadata and are left out, such as %s"
            _log.warning(message, len(unnamed), redact_url(base), redact_url(min(unnamed)))
    return entries


def _entries_of_table(base: str, url: str, table: pa.Table, sizes: Mapping[str, int | None] | None) -> pa.Table:
    """The entries of one table of metadata."""
    shown = redact_url(url)
    paths = [name for name in table.column_names if name == FILE_NAME or name.endswith(f"_{FILE_NAME}")]
    if not paths:
        names = ", ".join(table.column_names)
        raise FormatError(f"{shown}: no column {FILE_NAME!r} or '*_{FILE_NAME}' among its columns {names}")
    if len(paths) > 1 and FILE_NAME not in paths:
        message = f"{shown} has several columns of paths: {', '.join(paths)}"
        raise FormatError(message, remedy=f"call that of the videos {FILE_NAME!r}")
    chosen = FILE_NAME if FILE_NAME in paths else paths[0]
    others = {name: name.removesuffix(f"_{FILE_NAME}") for name in paths if name != chosen}
    own = [name for name in table.column_names if name not in others]
    check_names([*own, *others.values()], {}, shown)
    urls = absolute_urls(table[chosen], url, chosen, shown)
    _check_there(urls, table[chosen], f"{chosen!r} of {shown}", base, sizes)
    entries = entry_table(urls, {}, table.select(own))
    for name, shorter in others.items():
        texts = plain_column(table[name]).to_pylist()
        rows = [row for row, text in enumerate(texts) if text]
        found = absolute_urls(table[name].take(rows), url, name, shown)
        _check_there(found, table[name].take(rows), f"{name!r} of {shown}", base, sizes)
        beside: list[str | None] = [None] * len(texts)
        for row, text in zip(rows, found.to_pylist(), strict=True):
            beside[row] = text
        known = {} if sizes is None else sizes
        entries = entries.append_column(*_files_beside(shorter, beside, [known.get(one or "") for one in beside]))
    return entries


def _check_there(
    urls: Any,  # noqa: ANN401 - a column, whose type doesn't say that it has no nulls
    paths: Any,  # noqa: ANN401
    shown: str,
    base: str,
    sizes: Mapping[str, int | None] | None,
) -> None:
    """DatasetError where a file below ``base`` isn't there."""
    if sizes is None:
        return
    for url, path in zip(urls.to_pylist(), paths.to_pylist(), strict=True):
        if url not in sizes and url.startswith(base):
            message = f"the column {shown} names {path!r}, which isn't there: no {redact_url(url)}"
            raise DatasetError(message, remedy="leave the row out, or put the file there")


def _no_videos(base: str, files: int) -> DatasetError:
    extensions = ", ".join(sorted(VIDEO_EXTENSIONS))
    return DatasetError(f"{redact_url(base)}: no video among {files} files below it: none ends in {extensions}")

"""Videos in a column of Parquet files: as bytes, of which each is read by its range, as paths, or as both.

``datasets`` writes its Video() as a struct of bytes and path, the bytes plain and uncompressed, in row groups of ten
rows. The places of the bytes are read from their lengths, a small request a video: see ``tables.values``. Of a column
that is compressed or has a dictionary, as others write it, a row group is read and unpacked whole, when one of its
videos is needed: see ``tables.packed``.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncfetch.errors import ConfigError, FormatError, redact_url
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.columns import is_text, plain
from asyncfetch.tables.packed import can_unpack, packed_values
from asyncfetch.tables.parquet import border, open_table, read_columns, require_pyarrow
from asyncfetch.tables.values import find_values, null_count, why_no_places
from asyncfetch.tables.whole import read_all
from asyncfetch.videos.entries import absolute_urls, check_names, entry_table, plain_column
from asyncfetch.videos.tables import each_file

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from asyncfetch.fetch import Fetcher
    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.tables.parquet import TableFile

LONG_ROWS = 1000
"""Rows of a group that are a warning: their videos are found one after the other, in a minute at 60 ms a request."""

_log = logging.getLogger(__name__)


async def parquet_entries(
    reader: RangeReader, fetcher: Fetcher, url: str | os.PathLike[str], *, video: str = "video"
) -> pa.Table:
    """The rows of Parquet files as entries; their other columns are the user's.

    Args:
        reader: Reads the files, also packed parts of them (``UnpackedReader``).
        fetcher: Lists directories.
        url: A file, a directory or a repository, whose Parquet files are read by name, or a pattern.
        video: Column of videos: bytes, text (urls and paths, relative to the file), or a struct of ``bytes`` and
            ``path``, of which a row has one.

    Raises:
        FetchError, FormatError, ConfigError, DatasetError: As for ``table_entries``; FormatError, too, where bytes
            can't be read by range.
    """
    return await each_file(fetcher, url, lambda one: _file_entries(reader, one, video))


async def _file_entries(reader: RangeReader, url: str, video: str) -> pa.Table:
    file = await open_table(reader, url, run=run_sync)
    shown = redact_url(url)
    check_names(file.columns, {"video": video}, shown)
    plan = await run_sync(_plan, file, video)
    users = [name for name in file.columns if name != video]
    if plan.bytes is None:
        table = await read_all(reader, file, file.columns, run=run_sync)
        return await run_sync(_text_entries, table, video, url)
    arrow, found = require_pyarrow(), dict[str, Any]()
    if plan.is_packed:
        urls = arrow.array(await _packed_urls(reader, file, plan.groups, plan.bytes), arrow.string())
    else:
        places = await find_values(reader, file, plan.groups, plan.bytes, run=run_sync)
        is_missing = places.sizes < 0
        urls = arrow.compute.if_else(is_missing, arrow.scalar(None, arrow.string()), url)
        found = {
            "offset": arrow.array(places.starts, mask=is_missing),
            "size": arrow.array(places.sizes, mask=is_missing),
        }
    paths = None
    if plan.path is not None and urls.null_count:
        name = file.path(plan.path)
        paths = await read_columns(reader, file.with_leaf(plan.path), plan.groups, [name], run=run_sync)
    table = await read_all(reader, file, users, run=run_sync)
    return await run_sync(partial(_entries, table, urls, found, paths, video, url))


async def _packed_urls(reader: RangeReader, file: TableFile, groups: Sequence[int], leaf: int) -> list[str | None]:
    """The urls of the rows of a column that has to be unpacked, None where a row has no bytes."""
    urls: list[str | None] = []
    for group in groups:
        chunk = file.metadata.row_group(group).column(leaf)
        nulls = null_count(chunk)
        if nulls == chunk.num_values:
            urls += [None] * chunk.num_values
            continue
        found = [str(value) for value in await run_sync(packed_values, file, group, leaf)]
        # Which rows are null is in the packed pages.
        urls += found if nulls == 0 else [each if (await reader.stat(each)).size else None for each in found]
    return urls


class _Plan(NamedTuple):
    groups: list[int]
    """Row groups that have rows."""
    bytes: int | None
    """The physical column of the videos; None where the column is text."""
    path: int | None
    """The physical column of their paths."""
    is_packed: bool = False
    """True if the bytes have no places in the file, and are unpacked."""


def _plan(file: TableFile, video: str) -> _Plan:
    arrow, shown = require_pyarrow(), redact_url(file.url)
    with border(file.url):
        kind: Any = plain(arrow.array([], file.metadata.schema.to_arrow_schema().field(video).type)).type
        groups = [group for group in range(file.metadata.num_row_groups) if file.metadata.row_group(group).num_rows]
        leaves = {file.path(leaf): leaf for leaf in file.leaves[video]}
    if is_text(kind):
        return _Plan(groups, None, None)
    data = f"{video}.bytes" if arrow.types.is_struct(kind) else video
    if data not in leaves or file.metadata.schema.column(leaves[data]).physical_type != "BYTE_ARRAY":
        what = "bytes, texts, or a struct of bytes and path"
        raise ConfigError(f"video={video!r}: the column of {shown} must hold {what}, not {kind}: name another one")
    reason = why_no_places(file, groups, leaves[data])
    if reason is not None and not can_unpack(file, groups, leaves[data]):
        message = f"column {data!r} of {shown} {reason}, so no video in it can be read"
        options = f"use_dictionary=False, compression={{{data!r}: 'none'}}, row_group_size=10"
        remedy = f"write it anew, plain and uncompressed: with pyarrow's write_table(..., {options})"
        raise FormatError(message, remedy=f"{remedy}, or with a datasets of 2026, which does so by itself")
    rows = max((file.metadata.row_group(group).num_rows for group in groups), default=0)
    if rows > LONG_ROWS and reason is None:
        advice = "they are found one after the other; row groups of ten rows are gone through side by side"
        _log.warning("%s has up to %d videos in a row group: %s", shown, rows, advice)
    return _Plan(groups, leaves[data], leaves.get(f"{video}.path"), is_packed=reason is not None)


def _text_entries(table: pa.Table, video: str, url: str) -> pa.Table:
    urls = absolute_urls(table.column(video), url, video, redact_url(url))
    return entry_table(urls, {}, table.drop_columns([video]))


def _entries(
    table: pa.Table,
    urls: Any,  # noqa: ANN401
    found: Mapping[str, Any],
    paths: pa.Table | None,
    video: str,
    url: str,
) -> pa.Table:
    """The entries: ``urls`` of the rows' bytes, null where a row has none, and their places in ``found``."""
    arrow = require_pyarrow()
    if paths is not None:
        (path,) = plain_column(paths.column(0)).combine_chunks().flatten()
        urls = arrow.compute.coalesce(urls, path.cast(arrow.string()))
    absolute = absolute_urls(arrow.chunked_array([urls]), url, video, redact_url(url))
    return entry_table(absolute, found, table)

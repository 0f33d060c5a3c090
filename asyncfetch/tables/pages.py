"""Some rows of a column chunk, by the pages that hold them: with pictures in the table, a chunk may have gigabytes.

The file's offset index says where the pages are, or else their headers, of which each tells where the next one is:
pyarrow writes 1,024 pictures to a page, so those are few. pyarrow reads a chunk from its first page to its last. So it
gets a file of the wanted ones alone, with a footer that says that they are all there is.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import COPY_ANEW, FormatError, redact_url
from asyncfetch.fetch.batch import for_each
from asyncfetch.tables.parquet import SparseFile, border, open_parquet, require_pyarrow
from asyncfetch.tables.thrift import Long, read_struct, write_struct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.tables.parquet import TableFile

LEAST_CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes of a chunk from which on it is worth some requests to find its pages."""
HEADER_BYTES = 16 * 1024
"""Bytes asked for of a page to have its header: some 30, and by pyarrow its least and greatest value, up to 4 kB
each."""
MAX_HEADER_BYTES = 1024 * 1024
INDEXES_AT_ONCE = 32
"""Offset indexes of a file that are asked for side by side."""
CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1, "GZIP": 2, "BROTLI": 4, "ZSTD": 6}
"""Numbers of compressions. LZ4 isn't here: there are two, and pyarrow doesn't tell which of them it is."""
BYTE_ARRAY, OPTIONAL, PLAIN = 6, 1, 0
DICTIONARY_PAGE, DICTIONARY_ENCODINGS = 2, {2, 8}
DATA_PAGES = {0: (5, 2), 3: (8, 4)}
"""Types of data pages: the field of a header that describes one, and the field in it that has its encoding."""
MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class PageTable:
    """Places of the data pages of a chunk, and of the dictionary that some of them may refer to."""

    starts: NDArray[np.int64]
    """First byte of each page in the file."""
    stops: NDArray[np.int64]
    """One past the last byte of each."""
    rows: NDArray[np.int64]
    """First row of each page in the row group, and at the end the number of all."""
    dictionary: tuple[int, int] | None

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self.starts.nbytes + self.stops.nbytes + self.rows.nbytes


def has_pages(file: TableFile, group: int, leaf: int) -> bool:
    """Return whether a chunk is of byte strings, one a row, and so large that it is worth reading by pages."""
    column, chunk = file.metadata.schema.column(leaf), file.metadata.row_group(group).column(leaf)
    return (
        column.physical_type == "BYTE_ARRAY"
        and column.max_repetition_level == 0
        and chunk.compression in CODECS
        and chunk.total_compressed_size >= LEAST_CHUNK_BYTES
    )


async def find_pages(reader: RangeReader, file: TableFile, group: int, leaf: int, *, run: RunSync) -> PageTable:
    """Return where the pages of a chunk are, of one that ``has_pages``.

    Raises:
        FetchError: A range could not be fetched.
        FormatError: The file is damaged.
    """
    if file.metadata.row_group(group).column(leaf).has_offset_index:
        return (await offset_indexes(reader, file, [group], leaf, run=run))[group]
    start, stop = file.chunk(group, leaf)
    pages: list[tuple[int, int, int]] = []
    dictionary, rows = None, 0
    while start < stop:
        header = await _fetch_header(reader, file.url, start, stop)
        page = start, start + header.nbytes
        if header.kind == DICTIONARY_PAGE:
            dictionary = page
        elif header.kind in DATA_PAGES:
            pages.append((*page, rows))
            rows += header.rows
        start = page[1]
    return _page_table(file, group, leaf, pages, rows, dictionary)


async def offset_indexes(
    reader: RangeReader, file: TableFile, groups: Sequence[int], leaf: int, *, run: RunSync
) -> dict[int, PageTable]:
    """Return where the pages of a column's chunks are, by group, as offset indexes say; errors as ``find_pages``."""
    footer = await reader.fetch(file.url, file.data_stop)
    places = dict(zip(groups, await run(partial(_index_places, file.url, footer, groups, leaf)), strict=True))

    async def read(group: int) -> PageTable:
        pages = indexed_pages(file.url, await reader.fetch(file.url, *places[group]))
        start, rows = file.chunk(group, leaf)[0], file.metadata.row_group(group).column(leaf).num_values
        dictionary = (start, pages[0][0]) if pages and start < pages[0][0] else None
        return _page_table(file, group, leaf, pages, rows, dictionary)

    return dict(zip(groups, await for_each(groups, read, workers=INDEXES_AT_ONCE), strict=True))


def _page_table(
    file: TableFile,
    group: int,
    leaf: int,
    pages: Sequence[tuple[int, int, int]],
    rows: int,
    dictionary: tuple[int, int] | None,
) -> PageTable:
    """The pages, by start, stop and first row of each; FormatError where they can't be those of the chunk."""
    starts, stops, firsts = np.array(pages, np.int64).reshape(-1, 3).T
    found = PageTable(starts, stops, np.append(firsts, rows), dictionary)
    start, stop = file.chunk(group, leaf)
    edges = np.stack((starts, stops), axis=1).ravel()
    is_one = (
        len(edges) > 0
        and bool((np.diff(edges) >= 0).all())
        and start <= edges[0]
        and edges[-1] <= stop
        and found.rows[0] == 0
        and bool((np.diff(found.rows) >= 0).all())
        and rows == file.metadata.row_group(group).num_rows
    )
    if not is_one:
        raise damaged(file.url, f"pages of row group {group} lie beside its bytes [{start}, {stop}), or lack rows")
    return found


class _Header(NamedTuple):
    kind: int
    nbytes: int
    """Length of the page, this header included."""
    rows: int
    needs_dictionary: bool


def _header(url: str, data: memoryview) -> _Header:
    """The header of the page that begins there."""
    with _structs(url):
        header, length = read_struct(data)
        kind, size = header[1], header[3]
        if size < 0:
            raise ValueError(f"a page has {size} bytes")
        field, encoding = DATA_PAGES.get(kind, (None, None))
        if field is None:
            return _Header(kind, length + size, 0, needs_dictionary=False)
        return _Header(kind, length + size, header[field][1], header[field][encoding] in DICTIONARY_ENCODINGS)


async def _fetch_header(reader: RangeReader, url: str, start: int, stop: int) -> _Header:
    try:
        return _header(url, await reader.fetch(url, start, min(start + HEADER_BYTES, stop)))
    except FormatError:
        return _header(url, await reader.fetch(url, start, min(start + MAX_HEADER_BYTES, stop)))


def _index_places(url: str, footer: memoryview, groups: Sequence[int], leaf: int) -> list[tuple[int, int]]:
    """The places of the offset indexes of a column's chunks, which pyarrow doesn't tell. Blocks for a long footer.

    Raises:
        FormatError: A group has none, or the footer is damaged.
    """
    places = []
    with _structs(url):
        rows = read_struct(footer)[0][4]
        for group in groups:
            chunk = rows[group][1][leaf]
            start, size = int(chunk[4]), int(chunk[5])
            if not 0 < start < start + size:
                raise ValueError(f"an index has {size} bytes from {start} on")
            places.append((start, start + size))
    return places


def indexed_pages(url: str, index: memoryview) -> list[tuple[int, int, int]]:
    """The pages of a chunk as its offset index says: start, stop and first row of each; FormatError if it is none."""
    with _structs(url):
        return [(int(page[1]), int(page[1] + page[2]), int(page[3])) for page in read_struct(index)[0][1]]


@contextmanager
def _structs(url: str) -> Iterator[None]:
    """Turn what comes of structs that aren't those of Parquet into FormatError."""
    try:
        yield
    except (LookupError, ValueError, TypeError) as error:
        raise damaged(url, f"no header, footer or index: {error}") from error


async def read_pages(
    reader: RangeReader, file: TableFile, group: int, leaf: int, pages: PageTable, rows: range, *, run: RunSync
) -> pa.ChunkedArray[Any]:
    """Byte strings of these rows of a group; nothing is fetched but the pages that hold them.

    Raises:
        FetchError: A range could not be fetched.
        FormatError: The file is damaged.
    """
    first = int(np.searchsorted(pages.rows, rows.start, "right")) - 1
    last = int(np.searchsorted(pages.rows, rows.stop)) - 1
    origin, held = int(pages.starts[first]), range(int(pages.rows[first]), int(pages.rows[last + 1]))
    data = await reader.fetch(file.url, origin, int(pages.stops[last]))
    dictionary = memoryview(b"")
    if pages.dictionary is not None and any(
        _header(file.url, data[start - origin :]).needs_dictionary for start in pages.starts[first : last + 1].tolist()
    ):
        dictionary = await reader.fetch(file.url, *pages.dictionary)
    column, chunk = file.metadata.schema.column(leaf), file.metadata.row_group(group).column(leaf)
    footer = lone_footer(
        column.max_definition_level, CODECS[chunk.compression], len(held), len(dictionary), len(dictionary) + len(data)
    )
    found: pa.ChunkedArray[Any] = await run(partial(_decode, file.url, (MAGIC, dictionary, data, footer), len(held)))
    return found.slice(rows.start - held.start, len(rows))


def lone_footer(levels: int, codec: int, rows: int, dictionary_bytes: int, size: int) -> bytes:
    """Return the end of a file of one chunk of so many bytes, with values in so many nested optional columns."""
    start = len(MAGIC)
    schema: list[dict[int, Any]] = [{4: b"rows", 5: 1}, *({3: OPTIONAL, 4: b"rows", 5: 1} for _ in range(levels - 1))]
    schema.append({1: BYTE_ARRAY, 3: min(levels, OPTIONAL), 4: b"rows"})
    chunk = {1: BYTE_ARRAY, 2: [PLAIN], 3: [b"rows"] * (len(schema) - 1), 4: codec}
    chunk |= {5: Long(rows), 6: Long(size), 7: Long(size), 9: Long(start + dictionary_bytes)}
    chunk |= {11: Long(start)} if dictionary_bytes else {}
    groups = [{1: [{2: Long(start), 3: chunk}], 2: Long(size), 3: Long(rows)}]
    footer = write_struct({1: 1, 2: schema, 3: Long(rows), 4: groups})
    return footer + len(footer).to_bytes(4, "little") + MAGIC


def _decode(url: str, parts: Sequence[bytes | memoryview], rows: int) -> pa.ChunkedArray[Any]:
    arrow = require_pyarrow()
    stops = np.cumsum([len(part) for part in parts]).tolist()
    pieces = [(stop - len(part), memoryview(part)) for stop, part in zip(stops, parts, strict=True)]
    with border(url):
        parquet = open_parquet(arrow.PythonFile(SparseFile(url, pieces, stops[-1]), mode="r"))
        column: pa.ChunkedArray[Any] = parquet.read(use_threads=False).column(0)
        while arrow.types.is_struct(column.type):
            (column,) = column.flatten()  # null where the struct is
    if len(column) != rows:
        raise damaged(url, f"pages of {rows} rows have {len(column)}")
    return column


def damaged(url: str, what: str) -> FormatError:
    """The error of a file that isn't what its footer or pages say."""
    return FormatError(f"{redact_url(url)} can't be read as parquet: {what}", remedy=COPY_ANEW)

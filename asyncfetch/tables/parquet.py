"""Parquet by byte ranges: the footer first, then only the column chunks that are wanted.

A file is opened with one request for its last bytes. That holds the footer of most files and the whole of
small ones, and their columns then cost nothing more. A longer footer costs a second round of requests: for just what is
missing of it, or for all the rest of a short file, so its columns don't cost a third one. The chunks go to pyarrow
through a file object that knows only the fetched bytes, so what we did not plan to read can't be read. pyarrow works in
a thread, and no exception of its gets out.

What this can't stop: in a few damaged footers (1 of 140 to 400 single flipped bits, with pyarrow 26) a column chunk
contradicts the schema, and ``RowGroupMetaData.column`` raises a C++ exception that pyarrow doesn't catch, which ends
the process.

Chunks that lie together are asked for as one range. Whether a larger gap is worth reading over, the reader decides.
"""

from __future__ import annotations

import io
import itertools
import sys
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from asyncfetch.errors import COPY_ANEW, WRITE_ANEW, FormatError, MissingDependency, install_command, redact_url
from asyncfetch.ranges import HEADERS_BYTES, ByteRange, join_spans
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.fork import forks_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import pyarrow as pa
    import pyarrow.parquet as pq

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.concurrently import RunSync

TAIL_BYTES = 64 * 1024
"""First request for a file. A footer takes about 130 bytes a column and row group: 60 episodes of 8 columns."""

MAX_TAIL_BYTES = 1024 * 1024
"""Bytes asked for on a guess, in one stream. A longer footer costs one request more, in parts."""

WHOLE_BYTES = 1024 * 1024
"""A file is asked for whole up to this size where its footer is longer than what was asked for first: its columns would
take another round of requests."""

GROUPS_PLANNED_ON_THE_LOOP = 2
"""Row groups: one of ten columns takes 60 us, going to a thread 100 and, beside busy ones, several times that."""

SCAN_GAP_BYTES = 64 * 1024
"""Bytes read over between the columns of a scan, as ``FetchConfig.max_gap_bytes``: a recorded episode's row group has
some 20 kB of them."""

_MAGIC = b"PAR1"
_TRAILER_BYTES = 8
"""Length of the footer (4 bytes, little-endian) and the magic."""
_MAX_FOOTER_BYTES = 256 * 1024 * 1024
"""Three times that of LeRobot's fattest file, a 100 MB episode table with statistics. One of more is damaged."""
_MAX_GROUP_ROWS = 64 * 1024 * 1024
"""Arrow writes no larger row group. pyarrow allocates by this number before it has read a value."""
_FOOTER_WEIGHT = 8
"""Memory that pyarrow takes for a byte of footer; 7.3-7.5 measured by the allocator's own count."""


def require_pyarrow() -> Any:  # noqa: ANN401  (pyarrow has no types)
    """The module pyarrow. Import takes 0.1 s and more: call it in a thread.

    Raises:
        MissingDependency: It isn't installed.
    """
    if _imported and sys.modules.get("pyarrow") is _imported[0]:
        return _imported[0]
    try:
        with forks_wait():
            import pyarrow as pa
            import pyarrow.compute
            import pyarrow.parquet  # noqa: F401  (used as pa.parquet)
    except ImportError as error:
        message = f"Tables need pyarrow: {install_command('lerobot')}"
        raise MissingDependency(message) from error
    _imported[:] = [pa]
    return pa


_imported: list[Any] = []
"""The module, once all of it is there: a file is opened by a dozen calls that need it."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """An open parquet file: its footer, and the bytes in front of that which came along."""

    url: str
    metadata: pq.FileMetaData
    leaves: Mapping[str, range]
    """Physical columns of each top-level column; nested ones have several."""
    tail: memoryview
    """Bytes [tail_start, data_stop) of the file."""
    tail_start: int
    data_stop: int
    """Position at which the footer begins."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the top-level columns, in file order."""
        return tuple(self.leaves)

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        return _FOOTER_WEIGHT * int(self.metadata.serialized_size) + len(self.tail)

    def require(self, columns: Collection[str]) -> None:
        """FormatError if a column isn't there."""
        missing = [column for column in columns if column not in self.leaves]
        if missing:
            present = ", ".join(column for column in self.leaves if not column.startswith("stats/"))
            message = f"{redact_url(self.url)} has no column {', '.join(missing)}; present are {present}"
            raise FormatError(message, remedy=WRITE_ANEW)

    def chunks(
        self, groups: Sequence[int], columns: Collection[str], *, gap_bytes: int = HEADERS_BYTES
    ) -> list[tuple[int, int]]:
        """The byte ranges [start, stop) of these columns in these row groups, ascending, joined over gaps up to that.

        Raises:
            FormatError: A column isn't there, or a range or a row count can't be true.
        """
        self.require(columns)
        spans = []
        for group in groups:
            row_group = self.metadata.row_group(group)
            if not 0 <= row_group.num_rows <= _MAX_GROUP_ROWS:
                message = f"row group {group} of {redact_url(self.url)} says it has {row_group.num_rows} rows"
                raise FormatError(f"{message}; at most {_MAX_GROUP_ROWS} are possible", remedy=COPY_ANEW)
            for column in columns:
                spans += [self._chunk(group, row_group.column(leaf)) for leaf in self.leaves[column]]
        return join_spans(spans, gap_bytes)

    def with_leaf(self, leaf: int) -> TableFile:
        """Return the file with one physical column of a struct among its columns, under its path.

        ``read_columns`` gives it inside of its struct, alone.
        """
        return replace(self, leaves={**self.leaves, self.path(leaf): range(leaf, leaf + 1)})

    def path(self, leaf: int) -> str:
        """The path of a physical column: names of the columns that it lies in, joined by dots."""
        return str(self.metadata.schema.column(leaf).path)

    def chunk(self, group: int, leaf: int) -> tuple[int, int]:
        """The byte range [start, stop) of a physical column in a row group. FormatError where it can't be true."""
        return self._chunk(group, self.metadata.row_group(group).column(leaf))

    def _chunk(self, group: int, chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
        # The dictionary, where there is one, lies in front of the data. Some writers say 0 for "none".
        start = chunk.data_page_offset
        if chunk.dictionary_page_offset:
            start = min(start, chunk.dictionary_page_offset)
        stop = start + chunk.total_compressed_size
        if not len(_MAGIC) <= start <= stop <= self.data_stop or chunk.num_values < 0:
            message = f"{redact_url(self.url)} says column {chunk.path_in_schema!r} of row group {group} is its bytes"
            message += f" [{start}, {stop}), but its data ends at {self.data_stop}: the file is damaged"
            raise FormatError(message, remedy=COPY_ANEW)
        return start, stop


@dataclass(frozen=True, slots=True)
class TableEnd:
    """The last bytes of a parquet file, as they were asked for first."""

    url: str
    file: ObjectInfo
    """Version of the file that they are of."""
    tail: memoryview
    footer_bytes: int
    """Length of the footer, of which the tail may lack some."""

    @property
    def is_whole(self) -> bool:
        """True if the tail is all of the file."""
        return len(self.tail) == self.file.size


async def fetch_end(reader: RangeReader, url: str, tail_bytes: int = TAIL_BYTES) -> TableEnd:
    """The end of a parquet file, so many bytes of it; errors as ``open_table``."""
    info, tail = await reader.fetch_tail(url, tail_bytes)
    return TableEnd(url, info, tail, _footer_bytes(tail, url, info.size))


def whole_end(file: ObjectInfo, data: memoryview) -> TableEnd:
    """Return it of a whole file at hand; FormatError if it isn't a parquet file."""
    return TableEnd(file.url, file, data, _footer_bytes(data, file.url, file.size))


async def open_table(reader: RangeReader, url: str, *, run: RunSync, tail_bytes: int = TAIL_BYTES) -> TableFile:
    """Read a parquet file's footer.

    Args:
        reader: Fetches it.
        url: The file.
        run: Runs the parser.
        tail_bytes: Asked for first. What a longer footer lacks is asked for in parts, at once.

    Raises:
        FetchError: It could not be fetched.
        FormatError: It isn't a parquet file, or is a damaged one.
    """
    return await open_end(reader, await fetch_end(reader, url, tail_bytes), run=run)


async def open_end(reader: RangeReader, end: TableEnd, *, run: RunSync) -> TableFile:
    """Return what ``open_table`` gives, of a file with its end at hand."""
    url, size, tail = end.url, end.file.size, end.tail
    data_stop = size - _TRAILER_BYTES - end.footer_bytes
    start, pieces = size - len(tail), [tail]
    if data_stop < start:
        # In parts: everything else waits for the first footer of a dataset, and a stream has its own rate.
        first = 0 if size <= WHOLE_BYTES else data_stop
        cuts = [*range(first, start, TAIL_BYTES), start]
        pieces[:0] = await reader.fetch_many(ByteRange(url, start, stop) for start, stop in itertools.pairwise(cuts))
        start = first
    return await run(partial(_parse, url, pieces, start, data_stop))


def read_whole(end: TableEnd, choose: Callable[[Collection[str]], Collection[str]]) -> pa.Table:
    """Return what ``open_end`` and ``read_columns`` give of a file that is whole. Blocks: call it in a thread.

    Args:
        end: All of the file.
        choose: The columns to read, by those that are there.

    Raises:
        FormatError: A column isn't there, or the file is damaged.
    """
    file, parquet = _parse_open(end.url, end.tail, 0, end.file.size - _TRAILER_BYTES - end.footer_bytes)
    columns = choose(file.columns)
    groups, _ = _plan(file, range(file.metadata.num_row_groups), columns)
    return _read(file, parquet, groups, columns)


async def read_columns(
    reader: RangeReader, file: TableFile, groups: Sequence[int], columns: Collection[str], *, run: RunSync
) -> pa.Table:
    """These columns of these row groups, as one Arrow table in file order.

    Nothing else is fetched, and nothing at all that came with the footer.

    Raises:
        FetchError: A range could not be fetched.
        FormatError: A column isn't there, or the file is damaged.
    """
    fetched = await fetch_columns(reader, file, groups, columns, run=run)
    return await run(fetched.decode)


async def fetch_columns(
    reader: RangeReader, file: TableFile, groups: Sequence[int], columns: Collection[str], *, run: RunSync
) -> FetchedColumns:
    """Return what ``read_columns`` does, still to be decoded: by the call that goes on with it, at once in a thread."""
    plan = partial(_plan, file, groups, columns)
    filled, chunks = plan() if len(groups) <= GROUPS_PLANNED_ON_THE_LOOP else await run(plan)
    ranges = [
        ByteRange(file.url, start, min(stop, file.tail_start)) for start, stop in chunks if start < file.tail_start
    ]
    views = await reader.fetch_many(ranges) if ranges else []
    pieces = [(piece.start, view) for piece, view in zip(ranges, views, strict=True)]
    return FetchedColumns(file, filled, columns, [*pieces, (file.tail_start, file.tail)])


@dataclass(frozen=True, slots=True)
class FetchedColumns:
    """Columns of some row groups as they lie in the file."""

    file: TableFile
    groups: Sequence[int]
    columns: Collection[str]
    pieces: Sequence[tuple[int, memoryview]]
    """Pieces of the file, each with its start."""

    def decode(self) -> pa.Table:
        """The Arrow table. Blocks: call it in a thread.

        Raises:
            FormatError: The file is damaged.
        """
        file = self.file
        source = SparseFile(file.url, self.pieces, file.data_stop)
        with border(file.url):
            parquet = open_parquet(require_pyarrow().PythonFile(source, mode="r"), file.metadata)
        return _read(file, parquet, self.groups, self.columns)


def _read(file: TableFile, parquet: pq.ParquetFile, groups: Sequence[int], columns: Collection[str]) -> pa.Table:
    arrow, groups = require_pyarrow(), list(groups)
    with border(file.url):
        names = sorted(columns, key=lambda column: file.leaves[column].start)
        read = partial(parquet.read_row_groups, columns=names, use_threads=False)
        try:
            table: pa.Table = read(groups)
        except arrow.ArrowNotImplementedError:  # of several groups: dictionaries in lists, 2 GiB of pictures
            table = arrow.concat_tables([read([group]) for group in groups])
        expected = sum(file.metadata.row_group(group).num_rows for group in groups)
    if table.num_rows != expected:
        message = f"{redact_url(file.url)} says its row groups {groups} have {expected} rows"
        raise FormatError(f"{message}, but they hold {table.num_rows}", remedy=COPY_ANEW)
    return table


async def fetch_groups(
    reader: RangeReader, file: TableFile, groups: Sequence[int], columns: Collection[str], *, together: bool
) -> FetchedGroups:
    """Return what ``fetch_columns`` does, of many row groups that are read through, to be decoded as record batches.

    Gaps are read over as long as they are short against a request, and all lands where it lies in the file: pyarrow
    then reads without calling back for each of thousands of chunks.

    Args:
        reader: Fetches them.
        file: The open file.
        groups: The row groups.
        columns: Columns of them.
        together: Look at the first and the last group alone, and take the others to lie between them. Where that is
            wrong, as in a file with mixed-up groups, decoding is a FormatError.

    Raises:
        FetchError: A range could not be fetched.
        FormatError: A column isn't there, or the file is damaged.
    """
    ends = file.chunks(sorted({groups[0], groups[-1]}), columns)
    if together and ends[-1][1] - ends[0][0] <= SCAN_GAP_BYTES * len(groups):
        places = [(ends[0][0], ends[-1][1])]
    else:
        places = file.chunks(groups, columns, gap_bytes=SCAN_GAP_BYTES)
    content = np.zeros(file.data_stop, np.uint8).data  # pages that nothing lands in take no memory
    reads = []
    for start, stop in places:
        cut = min(stop, max(start, file.tail_start))
        if cut < stop:
            content[cut:stop] = file.tail[cut - file.tail_start : stop - file.tail_start]
        if start < cut:
            reads.append(partial(reader.fetch_into, file.url, start, cut, content[start:cut]))
    if reads:
        await gather(*reads)
    return FetchedGroups(file, groups, columns, content)


@dataclass(frozen=True, slots=True)
class FetchedGroups:
    """Columns of many row groups, where they lie in the file."""

    file: TableFile
    groups: Sequence[int]
    columns: Collection[str]
    content: memoryview

    def decode(self) -> list[pa.RecordBatch]:
        """The record batches, in file order. Blocks: call it in a thread.

        Raises:
            FormatError: The file is damaged, or its groups lie elsewhere.
        """
        arrow, columns = require_pyarrow(), list(self.columns)
        with border(self.file.url):
            parquet = open_parquet(arrow.BufferReader(self.content), self.file.metadata)
            read = partial(parquet.iter_batches, columns=columns, use_threads=False)
            try:
                batches: list[pa.RecordBatch] = list(read(row_groups=list(self.groups)))
            except arrow.ArrowNotImplementedError:  # of several groups: dictionaries in lists, 2 GiB of pictures
                batches = [batch for group in self.groups for batch in read(row_groups=[group])]
        return [batch.select(columns) for batch in batches]


def _plan(file: TableFile, groups: Sequence[int], columns: Collection[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """The groups that have rows, and their chunks. One without rows has no pages: its offsets mean nothing."""
    filled = [group for group in groups if file.metadata.row_group(group).num_rows]
    return filled, file.chunks(filled, columns)


def open_parquet(source: Any, metadata: pq.FileMetaData | None = None) -> Any:  # noqa: ANN401  (pyarrow's files)
    """Pyarrow's reader of a file. It compares checksums, and doesn't buffer ahead: it would read the gaps, too."""
    parquet = require_pyarrow().parquet
    return parquet.ParquetFile(source, metadata=metadata, pre_buffer=False, page_checksum_verification=True)


def _footer_bytes(tail: memoryview, url: str, size: int) -> int:
    """Length of the footer, by the file's last eight bytes."""
    if len(tail) < _TRAILER_BYTES + len(_MAGIC) or tail[-4:] != _MAGIC:
        end = bytes(tail[-16:])
        message = f"{redact_url(url)} isn't a whole parquet file: its {size} bytes end with {end!r}, not {_MAGIC!r}"
        raise FormatError(message, remedy=COPY_ANEW)
    footer_bytes = int.from_bytes(tail[-8:-4], "little")
    if footer_bytes > min(size - _TRAILER_BYTES - len(_MAGIC), _MAX_FOOTER_BYTES):
        message = f"{redact_url(url)} says that {footer_bytes} of its {size} bytes are its footer: the file is damaged"
        raise FormatError(message, remedy=COPY_ANEW)
    return footer_bytes


def _parse(url: str, pieces: Sequence[memoryview], start: int, data_stop: int) -> TableFile:
    end = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    file, _ = _parse_open(url, end[data_stop - start :], data_stop, data_stop)
    tail = memoryview(bytes(end[: data_stop - start]))  # a slice would keep the footer's bytes, too
    return replace(file, tail=tail, tail_start=start)


def _parse_open(url: str, end: memoryview, start: int, data_stop: int) -> tuple[TableFile, pq.ParquetFile]:
    """The end of a file from ``start`` on, and what pyarrow reads it by: its columns, too, if it is the whole file."""
    pa = require_pyarrow()
    leaves: dict[str, range] = {}
    next_leaf = 0
    with border(url):
        parquet = open_parquet(pa.BufferReader(end))
        metadata = parquet.metadata
        # Not metadata.schema: the two refer to each other, and megabytes of a footer would wait for the collector.
        for field in parquet.schema_arrow:
            if field.name in leaves:
                raise FormatError(f"{redact_url(url)} has two columns {field.name!r}")
            leaves[field.name] = range(next_leaf, next_leaf := next_leaf + _count_leaves(field.type))
    if next_leaf != metadata.num_columns:
        message = f"schema of {redact_url(url)} has {next_leaf} columns, its row groups {metadata.num_columns}"
        raise FormatError(message, remedy=COPY_ANEW)
    return TableFile(url, metadata, leaves, end[: data_stop - start], start, data_stop), parquet


def _count_leaves(arrow_type: pa.DataType) -> int:
    if count := arrow_type.num_fields:
        return sum(_count_leaves(arrow_type.field(i).type) for i in range(count))
    storage = getattr(arrow_type, "storage_type", None)  # of an extension, which says that it has no fields
    return 1 if storage is None else _count_leaves(storage)


def _start(piece: tuple[int, memoryview]) -> int:
    return piece[0]


class SparseFile(io.RawIOBase):
    """Pieces of a file, read-only, in the places where they belong. Reading anything else is a FormatError."""

    def __init__(self, url: str, pieces: Sequence[tuple[int, memoryview]], size: int) -> None:
        self._url = url
        self._pieces = sorted(pieces, key=_start)
        self._size = size
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    @override
    def read(self, size: int = -1) -> memoryview | bytes:
        """Bytes from the position on, fewer at the end."""
        start = self._position
        stop = self._size if size < 0 else min(start + size, self._size)
        parts = list(self._cut(start, stop))
        if sum(map(len, parts)) != max(0, stop - start):
            message = f"{redact_url(self._url)} refers to its bytes [{start}, {stop}), outside the columns that its"
            raise FormatError(f"{message} footer places there: the file is damaged", remedy=COPY_ANEW)
        self._position = max(start, stop)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _cut(self, start: int, stop: int) -> Iterator[memoryview]:
        first = max(0, bisect_right(self._pieces, start, key=_start) - 1)
        behind = bisect_left(self._pieces, stop, key=_start)
        for piece_start, piece in self._pieces[first:behind]:
            begin, end = max(start, piece_start), min(stop, piece_start + len(piece))
            if begin < end:
                yield piece[begin - piece_start : end - piece_start]


@contextmanager
def border(url: str, kind: str = "parquet") -> Iterator[None]:
    """Turn what pyarrow raises about a bad file into FormatError."""
    pa = require_pyarrow()
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, IndexError, OverflowError, MemoryError) as error:
        raise FormatError(
            f"{redact_url(url)} can't be read as {kind}: {str(error).strip()}", remedy=COPY_ANEW
        ) from error

"""Parts of files that are compressed, and how they are unpacked: whole files, and columns of row groups of Parquet.

Unpacking runs in threads, by steps, into files without a name: it takes disk, and little memory.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import weakref
import zlib
from collections import deque
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from typing_extensions import override

from asyncfetch.errors import COPY_ANEW, CacheError, ConfigError, FormatError, redact_url
from asyncfetch.tables.pages import CODECS, lone_footer
from asyncfetch.tables.parquet import border, open_parquet, require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from asyncfetch.tables.parquet import TableFile

MARK = "#unpacked="
"""Mark between the url of a file and how a part of it is packed."""
AHEAD_BYTES = 4 * 1024 * 1024
"""Packed bytes that are always there while more follow: a block of LZ4, the longest, takes as many."""
STEP_BYTES = 1024 * 1024
"""Unpacked bytes that are written at once."""
MAX_RATIO, RATIO_FREE_BYTES = 100, 64 * 1024 * 1024
"""A file may unpack to so many bytes, and so many times its own. Videos hardly shrink, so more is damage or malice."""
CLOSER_NAME = "asyncfetch-unpacked"
"""The name of threads that close files."""

_CODECS = frozenset(("gzip", "bzip2", "xz", "zstd", "lz4"))


class Packed(NamedTuple):
    """A whole file that is compressed, or a byte string of a column that is compressed or encoded."""

    url: str
    codec: str
    """The name of the command that made the file, or Parquet's of the compression."""
    start: int
    """Bytes [start, stop) of the file are unpacked as one: all of it, or the column chunk."""
    stop: int
    rows: int = 0
    """Rows of the row group; 0 where it is a whole file."""
    row: int = 0
    dictionary_bytes: int = 0
    """Length of the dictionary that the chunk begins with."""
    levels: int = 0
    """Optional columns that a value lies in, itself included."""
    unpacked_bytes: int = 0
    """Bytes of the chunk's pages when they are unpacked, as the file says."""

    def __str__(self) -> str:
        return f"{self.url}{MARK}{':'.join(map(str, self[1:] if self.rows else self[1:4]))}"

    @property
    def all_rows(self) -> Packed:
        """The part that is unpacked as one."""
        return self._replace(row=0)

    @property
    def remedy(self) -> str:
        """Advice by which it can be read by range."""
        if not self.rows:
            return f"decompress it, with: {self.codec} -d"
        return "write it anew, with pyarrow's write_table(..., use_dictionary=False, compression='none')"


def packed_part(url: str) -> Packed | None:
    """The packed part that a url means; None where it means a file as it is. ConfigError for an odd one."""
    file, mark, how = url.partition(MARK)
    if not mark:
        return None
    codec, *numbers = how.split(":")
    if len(numbers) in {2, len(Packed._fields) - 2} and all(map(str.isdecimal, numbers)):
        packed = Packed(file, codec, *map(int, numbers))
        codecs = CODECS.keys() if packed.rows else _CODECS
        if codec in codecs and packed.start < packed.stop and packed.row < max(1, packed.rows):
            return packed
    raise ConfigError(f"{redact_url(url)}: what follows {MARK} is nothing that asyncfetch wrote")


def can_unpack(file: TableFile, groups: Iterable[int], leaf: int) -> bool:
    """Return whether the strings of a physical column can be had by ``packed_values``."""
    codecs = {file.metadata.row_group(group).column(leaf).compression for group in groups}
    return codecs <= CODECS.keys() and not file.metadata.schema.column(leaf).max_repetition_level


def packed_values(file: TableFile, group: int, leaf: int) -> list[Packed]:
    """The strings of a physical column in a row group, null ones included. A null one is read as empty."""
    chunk = file.metadata.row_group(group).column(leaf)
    start, stop = file.chunk(group, leaf)
    first = Packed(
        file.url,
        chunk.compression,
        start,
        stop,
        rows=chunk.num_values,
        dictionary_bytes=chunk.data_page_offset - start,
        levels=file.metadata.schema.column(leaf).max_definition_level,
        unpacked_bytes=chunk.total_uncompressed_size,
    )
    return [first._replace(row=row) for row in range(first.rows)]


def _close_aside(descriptor: int) -> None:
    """Close it in a thread: to give back a long file's room takes a while, and the loop may call this."""
    try:
        threading.Thread(target=os.close, args=(descriptor,), name=CLOSER_NAME, daemon=True).start()
    except RuntimeError:  # no thread can be started
        os.close(descriptor)


class NamelessFile:
    """A file that goes with this process, however that ends."""

    def __init__(self, directory: str, where: str, max_bytes: int) -> None:
        self._directory, self._where, self._max_bytes = directory, where, max_bytes
        self.size = 0
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                self.descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._error(error) from error
        weakref.finalize(self, _close_aside, self.descriptor).atexit = False

    def _error(self, error: OSError) -> CacheError:
        return CacheError(
            f"{self._where} can't be unpacked in {self._directory}: {error.strerror}: name a directory with room by "
            "StreamConfig(disk_cache_dir=) or TMPDIR"
        )

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes at the end."""
        self.size += len(data)
        if self.size > self._max_bytes:
            raise CacheError(
                f"{self._where} unpacks to more than {self._max_bytes} bytes, which is all that is kept: set "
                "StreamConfig(disk_cache_dir=, disk_cache_max_bytes=) to more, or unpack it yourself"
            )
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self.descriptor, left) :]
        except OSError as error:
            raise self._error(error) from error


class _PieceSource(io.RawIOBase):
    """The packed bytes that have come, as a file."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self.nbytes = self.fed_bytes = 0
        self.is_whole = False

    def feed(self, piece: memoryview) -> None:
        """Add bytes."""
        self._pieces.append(piece)
        self.nbytes += len(piece)
        self.fed_bytes += len(piece)

    @override
    def readable(self) -> bool:
        return True

    @override
    def read(self, size: int = -1) -> bytes:
        """The next bytes: fewer where a piece ends."""
        if not self._pieces:
            if not self.is_whole:
                raise ValueError(f"more than {AHEAD_BYTES} bytes of it unpack to nothing")
            return b""
        piece = self._pieces.popleft()
        size = len(piece) if size < 0 else size
        if size < len(piece):
            self._pieces.appendleft(piece[size:])
        self.nbytes -= len(piece[:size])
        return bytes(piece[:size])


class Unpacking:
    """A file on its way, unpacked by steps."""

    def __init__(self, packed: Packed, target: NamelessFile) -> None:
        self._packed, self._target = packed, target
        self._source = _PieceSource()
        self._stream: Any = None

    def step(self, piece: memoryview, is_last: bool) -> None:
        """Unpack as much as can be for sure, in a thread."""
        source, target = self._source, self._target
        source.feed(piece)
        source.is_whole = is_last
        while is_last or source.nbytes > AHEAD_BYTES:
            data = self._next()
            if not data:
                break
            target.write(data)
            if target.size > RATIO_FREE_BYTES + MAX_RATIO * source.fed_bytes:
                message = f"{redact_url(self._packed.url)} unpacks to more than {MAX_RATIO} times its bytes"
                raise FormatError(message, remedy="unpack it yourself, if that is meant")

    def _next(self) -> bytes:
        try:
            if self._stream is None:
                self._stream = _opened(self._packed.codec, self._source)
            found: bytes = self._stream.read(STEP_BYTES)
        except _damage() as error:
            message = f"{redact_url(self._packed.url)} can't be unpacked as {self._packed.codec}: {error}"
            raise FormatError(message, remedy=COPY_ANEW) from error
        return found


def _damage() -> tuple[type[Exception], ...]:
    """Errors of the libraries about bytes that they can't unpack; pyarrow's are OSError."""
    import lzma

    return EOFError, OSError, ValueError, zlib.error, lzma.LZMAError


def _opened(codec: str, source: _PieceSource) -> Any:  # noqa: ANN401 - their classes have no common one
    """The file that the source is packed from."""
    match codec:
        case "gzip":
            import gzip

            return gzip.GzipFile(fileobj=source, mode="rb")
        case "bzip2":
            import bz2

            return bz2.BZ2File(source)
        case "xz":
            import lzma

            return lzma.LZMAFile(cast("IO[bytes]", source))
        case _:
            arrow: Any = require_pyarrow()
            return arrow.CompressedInputStream(arrow.PythonFile(source, mode="r"), codec)


def write_values(packed: Packed, alone: NamelessFile, target: NamelessFile) -> NDArray[np.int64]:
    """Write the strings of the chunk that is alone in a file, one after the other; returns their edges."""
    arrow: Any = require_pyarrow()
    codec, chunk_bytes = CODECS[packed.codec], packed.stop - packed.start
    alone.write(lone_footer(packed.levels, codec, packed.rows, packed.dictionary_bytes, chunk_bytes))
    sizes = []
    with border(packed.url), arrow.memory_map(f"/proc/self/fd/{alone.descriptor}") as source:
        for batch in open_parquet(source).iter_batches(batch_size=1, use_threads=False):  # rows may share a long string
            column = batch.column(0)
            while arrow.types.is_struct(column.type):
                (column,) = column.flatten()  # null where the struct is
            value = column[0].as_buffer()
            sizes.append(0 if value is None else value.size)
            if value is not None:
                target.write(memoryview(value))
    if len(sizes) != packed.rows:
        message = f"{redact_url(packed.url)} can't be read as parquet: pages of {packed.rows} rows have {len(sizes)}"
        raise FormatError(message, remedy=COPY_ANEW)
    return np.array([0, *accumulate(sizes)], np.int64)

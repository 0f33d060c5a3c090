"""Parts of files that are compressed, read as if they weren't: a whole file, or one column of a row group of Parquet.

A url says so by what follows ``#unpacked=``. Such a part has no places to read from: all of it is fetched, unpacked
piece by piece into a file without a name, and read from there as long as that is kept. So it takes disk, and little
memory; of Parquet that of one page, since a page is unpacked at once.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import tempfile
import weakref
import zlib
from collections import deque
from functools import partial
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import anyio
import numpy as np

from asyncfetch.errors import (
    COPY_ANEW,
    CacheError,
    ConfigError,
    FormatError,
    ObjectChanged,
    RangeNotSatisfiable,
    redact_url,
)
from asyncfetch.fetch.batch import each_on_its_own
from asyncfetch.fetch.objects import ObjectMemory, difference
from asyncfetch.fetch.reader import byte_count, byte_ranges, closed_range
from asyncfetch.ranges import ByteRange, ObjectInfo
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.memory_pool import allocate
from asyncfetch.runtime.single_flight import SharedLRU
from asyncfetch.runtime.threads import run_in_thread, run_sync, run_to_its_end
from asyncfetch.tables.pages import CODECS, MAGIC, lone_footer
from asyncfetch.tables.parquet import border, require_pyarrow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import VersionedReader, WritableBuffer
    from asyncfetch.tables.parquet import TableFile

MARK = "#unpacked="
"""What comes between the url of a file and how a part of it is packed."""
KEPT_BYTES = 16 * 1024**3
"""Bound on the unpacked bytes that are kept without a disk cache, in TMPDIR or /var/tmp."""
MIN_FREE_BYTES = 1024**3
"""Bytes of the disk that are left to others, as by a disk cache: with less, less is kept."""
MAX_PAGE_BYTES = 1024**3
"""Longest column chunk that is unpacked, by the bytes that its pages take then: one may have them all."""
PIECE_BYTES = 8 * 1024 * 1024
"""Bytes that are fetched while those before them are unpacked."""
AHEAD_BYTES = 4 * 1024 * 1024
"""Packed bytes that are always there while more follow: a block of LZ4, the longest, takes as many."""
STEP_BYTES = 1024 * 1024
"""Unpacked bytes that are written at once."""
MAX_RATIO, RATIO_FREE_BYTES = 100, 64 * 1024 * 1024
"""A file may unpack to so many bytes, and so many times its own. Videos hardly shrink, so more is damage or malice."""
UNPACKED_AT_ONCE = 4
"""Parts that are unpacked side by side, each by a thread."""
_log = logging.getLogger("asyncfetch")

MAX_KNOWN = 65_536
"""Parts with sizes that are remembered, as a fetcher does versions."""
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
    """What the chunk's pages take when they are unpacked, as the file says."""

    def __str__(self) -> str:
        return f"{self.url}{MARK}{':'.join(map(str, self[1:] if self.rows else self[1:4]))}"

    @property
    def all_rows(self) -> Packed:
        """What is unpacked as one."""
        return self._replace(row=0)

    @property
    def remedy(self) -> str:
        """How to have it read by range."""
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


class UnpackedReader:
    """A VersionedReader that also reads packed parts, by their urls. Loop-bound.

    Args:
        reader: Reads all other urls, and the packed bytes; entered by the caller.
        directory: Where unpacked files lie; None for TMPDIR, or /var/tmp.
        max_bytes: Bound on those that are kept; less where the disk gets full. A part that takes more is a CacheError.
        max_page_bytes: Bound on what a column chunk may unpack to: so much memory may that take.
    """

    def __init__(
        self,
        reader: VersionedReader,
        *,
        directory: str | os.PathLike[str] | None = None,
        max_bytes: int = KEPT_BYTES,
        max_page_bytes: int = MAX_PAGE_BYTES,
    ) -> None:
        self._reader = reader
        self._directory = os.fspath(directory or os.environ.get("TMPDIR") or "/var/tmp")
        self._max_bytes = max_bytes
        self._max_page_bytes = max_page_bytes
        self._parts: SharedLRU[Packed, _Unpacked] = SharedLRU(max_bytes)
        self._infos = ObjectMemory(MAX_KNOWN)
        self._unpacked_before: set[Packed] = set()
        self._has_warned = False
        self._threads = anyio.CapacityLimiter(UNPACKED_AT_ONCE)
        self._turns = anyio.CapacityLimiter(UNPACKED_AT_ONCE)

    def known(self, url: str) -> ObjectInfo | None:
        """See VersionedReader, as for the other verbs."""
        packed = packed_part(url)
        if packed is None:
            return self._reader.known(url)
        info, now = self._infos.get(url), self._reader.known(packed.url)
        if info is None or now is None or (info.etag, info.last_modified) != (now.etag, now.last_modified):
            return None
        return info

    async def stat(self, url: str) -> ObjectInfo:
        """Size and version."""
        packed = packed_part(url)
        if packed is None:
            return await self._reader.stat(url)
        return self.known(url) or (await self._part(url, packed))[1]

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Bytes [start, stop)."""
        packed = packed_part(url)
        if packed is None:
            return await self._reader.fetch(url, start, stop)
        wanted = ByteRange(url, start, stop)
        part, info = await self._part(url, packed)
        start = max(0, info.size + wanted.start) if wanted.start < 0 else wanted.start
        stop = info.size if wanted.stop is None else wanted.stop
        return await self._read(part, info, packed, start, stop)

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size, version, and first bytes."""
        packed = packed_part(url)
        if packed is None:
            return await self._reader.fetch_head(url, max_bytes)
        part, info = await self._part(url, packed)
        return info, await self._read(part, info, packed, 0, min(byte_count(max_bytes), info.size))

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size, version, and last bytes."""
        packed = packed_part(url)
        if packed is None:
            return await self._reader.fetch_tail(url, max_bytes)
        part, info = await self._part(url, packed)
        return info, await self._read(part, info, packed, max(0, info.size - byte_count(max_bytes)), info.size)

    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        """Bytes [start, stop) into a buffer."""
        if packed_part(url) is None:
            await self._reader.fetch_into(url, start, stop, buffer)
        else:
            await self.read_into(url, start, stop, buffer)

    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo:
        """``fetch_into`` that returns the version, and insists on ``version`` if there is one."""
        packed = packed_part(url)
        if packed is None:
            return await self._reader.read_into(url, start, stop, buffer, version=version)
        wanted, view = closed_range(url, start, stop, buffer)
        part, info = await self._part(url, packed)
        changed = None if version is None else difference(version, info)
        if changed is not None:
            raise ObjectChanged(f"the object was replaced while it was being read: {changed}", url=url)
        await self._fill(part, info, packed, wanted.start, wanted.start + len(view), view)
        return info

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        """All ranges, in input order."""
        ranges = byte_ranges(ranges)
        if not any(MARK in one.url for one in ranges):
            return await self._reader.fetch_many(ranges)
        return await gather(*(partial(self.fetch, one.url, one.start, one.stop) for one in ranges))

    def fetch_stream(
        self, ranges: Iterable[ByteRange]
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[int, memoryview]]]:
        """(index in ``ranges``, whole range) pairs as they arrive."""
        ranges = byte_ranges(ranges)
        if not any(MARK in one.url for one in ranges):
            return self._reader.fetch_stream(ranges)
        return each_on_its_own(ranges, lambda one: self.fetch(one.url, one.start, one.stop))

    async def _part(self, url: str, packed: Packed) -> tuple[_Unpacked, ObjectInfo]:
        """The unpacked part that the url's bytes lie in, and what ``stat`` says of them."""
        key = packed.all_rows
        part = await self._parts.get(key, partial(self._unpack, key))
        now = self._reader.known(packed.url)
        if now is not None and difference(now, part.file) is not None:  # it was replaced since
            self._parts.clear(key.__eq__)
            part = await self._parts.get(key, partial(self._unpack, key))
        size = int(part.edges[packed.row + 1] - part.edges[packed.row])
        info = ObjectInfo(url, size, part.file.etag, part.file.last_modified)
        self._infos.forget(url)
        self._infos.remember(info)
        return part, info

    async def _read(self, part: _Unpacked, info: ObjectInfo, packed: Packed, start: int, stop: int) -> memoryview:
        view = allocate(max(0, min(stop, info.size) - start))
        await self._fill(part, info, packed, start, stop, view)
        return view.toreadonly()

    async def _fill(
        self, part: _Unpacked, info: ObjectInfo, packed: Packed, start: int, stop: int, view: memoryview
    ) -> None:
        if not start <= stop <= info.size:
            message = f"bytes [{start}, {stop}) aren't within its {info.size} unpacked bytes"
            raise RangeNotSatisfiable(message, size=info.size, url=info.url)
        await run_in_thread(len(view), partial(part.read_into, int(part.edges[packed.row]) + start, view), blocks=True)

    async def _unpack(self, packed: Packed) -> _Unpacked:
        async with self._turns:
            if packed in self._unpacked_before and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s, and perhaps others, is read whole and unpacked anew: of what was unpacked, %d bytes are kept: "
                    "set StreamConfig(disk_cache_dir=, disk_cache_max_bytes=) to more, if there is room",
                    redact_url(packed.url),
                    self._parts.max_bytes,
                )
            self._unpacked_before.add(packed)
            await self._leave_room(packed)
            return await (self._unpack_chunk(packed) if packed.rows else self._unpack_file(packed))

    async def _leave_room(self, packed: Packed) -> None:
        """Keep less from now on, but this part, if it would leave too little of the disk to others."""
        try:
            free_bytes = (await run_sync(shutil.disk_usage, self._directory)).free
        except OSError:
            return  # as making a file there says
        part_bytes = 2 * (packed.stop - packed.start)  # more than what videos shrink
        lacking_bytes = MIN_FREE_BYTES + part_bytes - free_bytes
        if lacking_bytes > 0:
            kept_bytes = max(part_bytes, self._parts.nbytes - lacking_bytes)
            self._parts.max_bytes = min(self._parts.max_bytes, kept_bytes)

    async def _unpack_file(self, packed: Packed) -> _Unpacked:
        file = await self._info(packed)
        if file.size != packed.stop:
            message = f"{redact_url(packed.url)} has {file.size} bytes, but {packed.stop} when its places were written"
            raise FormatError(message, remedy="write them anew")
        [target] = await run_sync(self._new_files, packed, 1)
        unpacking = _Unpacking(packed, target)
        await self._each_piece(packed, unpacking.step)
        return _Unpacked(target, file, np.array([0, target.size]))

    async def _unpack_chunk(self, packed: Packed) -> _Unpacked:
        if packed.unpacked_bytes > self._max_page_bytes:
            raise CacheError(
                f"{redact_url(packed.url)}: the videos of a row group take {packed.unpacked_bytes} bytes unpacked, and "
                f"at most {self._max_page_bytes} are unpacked at once: set StreamConfig(max_bytes=) to at least "
                f"{8 * packed.unpacked_bytes}, or write it anew, with row_group_size=10"
            )
        file = await self._info(packed)
        alone, target = await run_sync(self._new_files, packed, 2)
        await self._each_piece(packed, lambda piece, is_last: alone.write(piece if alone.size else MAGIC + piece))
        edges = await run_to_its_end(partial(_write_values, packed, alone, target), self._threads)
        return _Unpacked(target, file, edges)

    async def _info(self, packed: Packed) -> ObjectInfo:
        return self._reader.known(packed.url) or await self._reader.stat(packed.url)

    async def _each_piece(self, packed: Packed, step: Callable[[memoryview, bool], object]) -> None:
        """Call ``step`` with each piece of the packed bytes and whether it is the last, in a thread."""
        starts = [*range(packed.start, packed.stop, PIECE_BYTES)]
        stops = [*starts[1:], packed.stop]
        pieces: deque[memoryview] = deque()

        async def fetch(number: int) -> None:
            pieces.append(await self._reader.fetch(packed.url, starts[number], stops[number]))

        async def work(number: int) -> None:
            is_last = number == len(starts) - 1
            await run_to_its_end(partial(step, pieces.popleft(), is_last), self._threads)

        for number in range(len(starts) + 1):
            calls = [partial(work, number - 1)] if number else []
            calls += [partial(fetch, number)] if number < len(starts) else []
            await gather(*calls)

    def _new_files(self, packed: Packed, count: int) -> list[_NamelessFile]:
        where = redact_url(packed.url)
        return [_NamelessFile(self._directory, where, self._max_bytes) for _ in range(count)]


class _NamelessFile:
    """A file that goes with this process, however that ends."""

    def __init__(self, directory: str, where: str, max_bytes: int) -> None:
        self._directory, self._where, self._max_bytes = directory, where, max_bytes
        self.size = 0
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                self.descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._error(error) from error
        weakref.finalize(self, os.close, self.descriptor)

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


class _Unpacked:
    """An unpacked part.

    Args:
        content: Its bytes.
        file: The packed file's version.
        edges: Shape (N + 1,): where each of its N byte strings begins, and where the last one ends.
    """

    def __init__(self, content: _NamelessFile, file: ObjectInfo, edges: NDArray[np.int64]) -> None:
        self._content, self.file, self.edges = content, file, edges
        self.nbytes = content.size

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on."""
        while view:
            count = os.preadv(self._content.descriptor, [view], start)
            view, start = view[count:], start + count


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

    def readable(self) -> bool:
        """See RawIOBase."""
        return True

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


class _Unpacking:
    """A file on its way, unpacked by steps."""

    def __init__(self, packed: Packed, target: _NamelessFile) -> None:
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


def _write_values(packed: Packed, alone: _NamelessFile, target: _NamelessFile) -> NDArray[np.int64]:
    """Write the strings of the chunk that is alone in a file, one after the other; returns their edges."""
    arrow: Any = require_pyarrow()
    codec, chunk_bytes = CODECS[packed.codec], packed.stop - packed.start
    alone.write(lone_footer(packed.levels, codec, packed.rows, packed.dictionary_bytes, chunk_bytes))
    sizes = []
    with border(packed.url), arrow.memory_map(f"/proc/self/fd/{alone.descriptor}") as source:
        parquet = arrow.parquet.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)
        for batch in parquet.iter_batches(batch_size=1, use_threads=False):  # rows may share a long string
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

"""A reader that reads compressed parts of files as if they weren't.

A url says so by what follows ``#unpacked=``: see ``tables.packed``. Such a part has no places to read from: all of it
is fetched and unpacked, and read from there as long as that is kept.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import anyio
import numpy as np
from typing_extensions import override

from asyncfetch.errors import CacheError, FormatError, ObjectChanged, RangeNotSatisfiable, redact_url
from asyncfetch.fetch.batch import each_on_its_own
from asyncfetch.fetch.objects import ObjectMemory, difference
from asyncfetch.fetch.reader import VersionedReader, byte_count, byte_ranges, closed_range
from asyncfetch.ranges import ByteRange, ObjectInfo
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.memory_pool import allocate
from asyncfetch.runtime.single_flight import SharedLRU
from asyncfetch.runtime.threads import run_in_thread, run_sync, run_to_its_end
from asyncfetch.tables.packed import MARK, NamelessFile, Unpacking, packed_part, write_values
from asyncfetch.tables.pages import MAGIC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from numpy.typing import NDArray

    from asyncfetch.fetch.reader import WritableBuffer
    from asyncfetch.tables.packed import Packed

KEPT_BYTES = 16 * 1024**3
"""Bound on the unpacked bytes that are kept without a disk cache, in TMPDIR or /var/tmp."""
MIN_FREE_BYTES = 1024**3
"""Bytes of the disk that are left to others, as by a disk cache: with less, less is kept."""
MAX_PAGE_BYTES = 1024**3
"""Longest column chunk that is unpacked, by the bytes that its pages take then: one may have them all."""
PIECE_BYTES = 8 * 1024 * 1024
"""Bytes that are fetched while those before them are unpacked."""
UNPACKED_AT_ONCE = 4
"""Parts that are unpacked side by side, each by a thread."""
MAX_KNOWN = 65_536
"""Parts with sizes that are remembered, as a fetcher does versions."""

_log = logging.getLogger("asyncfetch")


class UnpackedReader(VersionedReader):
    """A reader that also reads packed parts, by their urls. Loop-bound.

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

    @override
    def known(self, url: str) -> ObjectInfo | None:
        packed = packed_part(url) if MARK in url else None
        if packed is None:
            return self._reader.known(url)
        info, now = self._infos.get(url), self._reader.known(packed.url)
        if info is None or now is None or (info.etag, info.last_modified) != (now.etag, now.last_modified):
            return None
        return info

    @override
    async def stat(self, url: str) -> ObjectInfo:
        packed = packed_part(url)
        if packed is None:
            return await self._reader.stat(url)
        return self.known(url) or (await self._part(url, packed))[1]

    @override
    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        packed = packed_part(url)
        if packed is None:
            return await self._reader.fetch(url, start, stop)
        wanted = ByteRange(url, start, stop)
        part, info = await self._part(url, packed)
        start = max(0, info.size + wanted.start) if wanted.start < 0 else wanted.start
        stop = info.size if wanted.stop is None else wanted.stop
        return await self._read(part, info, packed, start, stop)

    @override
    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        packed = packed_part(url)
        if packed is None:
            return await self._reader.fetch_head(url, max_bytes)
        part, info = await self._part(url, packed)
        return info, await self._read(part, info, packed, 0, min(byte_count(max_bytes), info.size))

    @override
    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        packed = packed_part(url)
        if packed is None:
            return await self._reader.fetch_tail(url, max_bytes)
        part, info = await self._part(url, packed)
        return info, await self._read(part, info, packed, max(0, info.size - byte_count(max_bytes)), info.size)

    @override
    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        if packed_part(url) is None:
            await self._reader.fetch_into(url, start, stop, buffer)
        else:
            await self.read_into(url, start, stop, buffer)

    @override
    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo:
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

    @override
    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        ranges = byte_ranges(ranges)
        if not any(MARK in one.url for one in ranges):
            return await self._reader.fetch_many(ranges)
        return await gather(*(partial(self.fetch, one.url, one.start, one.stop) for one in ranges))

    @override
    def fetch_stream(
        self, ranges: Iterable[ByteRange]
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[int, memoryview]]]:
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
        unpacking = Unpacking(packed, target)
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
        edges = await run_to_its_end(partial(write_values, packed, alone, target), self._threads)
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

    def _new_files(self, packed: Packed, count: int) -> list[NamelessFile]:
        where = redact_url(packed.url)
        return [NamelessFile(self._directory, where, self._max_bytes) for _ in range(count)]


class _Unpacked:
    """An unpacked part.

    Args:
        content: Its bytes.
        file: The packed file's version.
        edges: Shape (N + 1,): where each of its N byte strings begins, and where the last one ends.
    """

    def __init__(self, content: NamelessFile, file: ObjectInfo, edges: NDArray[np.int64]) -> None:
        self._content, self.file, self.edges = content, file, edges
        self.nbytes = content.size

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on."""
        while view:
            count = os.preadv(self._content.descriptor, [view], start)
            view, start = view[count:], start + count

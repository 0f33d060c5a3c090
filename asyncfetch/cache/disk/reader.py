"""A reader over another one that keeps its ranges on disk.

Only the object's server knows whether bytes on disk are still up to date. So each reader asks for an object's version
once, by a request for its first byte unless another request has said it, and from then on bytes of only this version
come from the disk. If the server refuses, so does this: the disk gives nothing to readers without access.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import anyio

from asyncfetch.cache.disk.layout import VersionFile, object_id
from asyncfetch.cache.disk.store import DiskStore
from asyncfetch.errors import ClosedError, ConfigError
from asyncfetch.fetch.batch import RangeByRange
from asyncfetch.fetch.objects import strong_etag
from asyncfetch.fetch.reader import EndpointReader, VersionedReader, byte_count, closed_range
from asyncfetch.observe.waits import Cause, running_meter
from asyncfetch.ranges import join_spans
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.fork import LoopGuard
from asyncfetch.runtime.memory_pool import allocate
from asyncfetch.runtime.single_flight import SingleFlight
from asyncfetch.runtime.threads import run_to_its_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from asyncfetch.cache.disk.layout import DiskTier
    from asyncfetch.cache.disk.store import DiskStatistics
    from asyncfetch.fetch.reader import RangeReader, WritableBuffer
    from asyncfetch.ranges import ByteRange, ObjectInfo

T = TypeVar("T")
End: TypeAlias = "tuple[ObjectInfo, memoryview]"
"""Version of an object, and its first or last bytes."""

THREADS: Final = 8
"""Threads that read and write files; NVMe disks are saturated by fewer."""
WEB_SCHEMES: Final = frozenset(("http", "https"))
STORE_SCHEMES: Final = frozenset(("s3", "hf"))
"""Schemes whose urls mean another object at another endpoint. These servers make the ETags themselves, too. fsspec's
objects aren't kept, since their versions are made of times and their urls depend on arguments; nor are local files,
which are read as fast where they are."""
STEP_BYTES: Final = 16 * 1024 * 1024
"""Bytes read or written by one call in a thread, a few ms: a cancelled caller waits for no more than that."""


class DiskReader(RangeByRange):
    """A VersionedReader that finds ranges on disk which it, or another process, read before. An async context manager.

    It keeps objects on web servers with a strong ETag and, if the fetcher is an EndpointReader, those in S3 and on the
    Hub; all others bypass it. No caller waits for another one's write, nor for room: while some is made, in the
    background, nothing is written. No failure of the disk reaches a caller. Bound to its loop; only
    ``disk_statistics`` may be called from any thread. The fetcher is entered before this, and left after it.

    Raises:
        ConfigError: The fetcher knows no versions.
        CacheError, MissingDependency: On entering: the tier can't be used; see DiskStore.
    """

    def __init__(self, fetcher: RangeReader, tier: DiskTier) -> None:
        if not isinstance(fetcher, VersionedReader):
            raise ConfigError(
                f"a disk cache needs a reader that tells which version its bytes are of, such as Fetcher: {fetcher!r} "
                "has no known() and read_into()"
            )
        self._fetcher = fetcher
        self._endpoints = fetcher if isinstance(fetcher, EndpointReader) else None
        self._tier = tier
        self._limiter = anyio.CapacityLimiter(THREADS)
        self._store: DiskStore | None = None
        self._makes_room = False
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._store is not None:
            raise ClosedError("a DiskReader can be entered only once: make a new one")
        self._guard = LoopGuard("this DiskReader")
        try:
            await self._in_thread(self._open)
        except BaseException:
            self._close()  # cancelled while the thread opened it
            raise
        self._group = await anyio.create_task_group().__aenter__()
        self._stats: SingleFlight[str, ObjectInfo] = SingleFlight(self._group)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Calls under way in other tasks must have ended, or been cancelled and awaited."""
        self._closed = True
        if self._store is not None:
            self._store.stop()
        try:
            await end_tasks(self._group)
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    await self._in_thread(self._close)
            finally:
                self._close()  # if Task.cancel(), which goes through the shield, came before the thread

    def _open(self) -> None:
        self._store = DiskStore(self._tier)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()

    def disk_statistics(self) -> DiskStatistics | None:
        """A snapshot; None before it was entered."""
        return None if self._store is None else self._store.statistics()

    def known(self, url: str) -> ObjectInfo | None:
        """The version that bytes of the object have; None before the first."""
        return self._fetcher.known(url)

    async def stat(self, url: str) -> ObjectInfo:
        """Size and version of the object, as the fetcher knows them now."""
        self._check()
        return await self._fetcher.stat(url)

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size and version of the object and its first ``min(max_bytes, size)`` bytes."""
        return await self._fetch_end(self._fetcher.fetch_head, url, max_bytes, is_tail=False)

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size and version of the object and its last ``min(max_bytes, size)`` bytes.

        If the size isn't known yet, the disk is searched only if it holds a part of the object's beginning: a request
        for the size takes as long as one for the bytes.
        """
        return await self._fetch_end(self._fetcher.fetch_tail, url, max_bytes, is_tail=True)

    async def _fetch_end(
        self, fetch: Callable[[str, int], Awaitable[End]], url: str, max_bytes: int, *, is_tail: bool
    ) -> End:
        store, max_bytes = self._check(), byte_count(max_bytes)
        info = await self._version_to_look_for(store, url, 0, min(max_bytes, 1))
        if info is not None:
            length = min(max_bytes, info.size)
            start = info.size - length if is_tail else 0
            return info, await self._read(store, info, start, start + length)
        info, view = await fetch(url, max_bytes)
        await self._keep(store, info, info.size - len(view) if is_tail else 0, view)
        return info, view

    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        """Bytes [start, stop) into the caller's buffer of exactly that length."""
        if start == stop:
            await self._fetcher.fetch_into(url, start, stop, buffer)
        else:
            await self.read_into(url, start, stop, buffer)

    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo:
        """``fetch_into`` that returns the version, and insists on ``version`` if there is one."""
        store = self._check()
        wanted, view = closed_range(url, start, stop, buffer)
        start, stop = wanted.start, wanted.start + len(view)
        info = await self._version_to_look_for(store, url, start, stop, version)
        if info is not None and stop <= info.size:
            await self._fill(store, info, start, view)
            return info
        info = await self._fetcher.read_into(url, start, stop, view, version=version)
        await self._keep(store, info, start, view)
        return info

    def _check(self) -> DiskStore:
        if self._store is None or self._closed:
            raise ClosedError("this DiskReader is " + ("closed" if self._closed else "not entered: use async with"))
        self._guard.check()
        return self._store

    async def _fetch_range(self, wanted: ByteRange) -> memoryview:
        store = self._check()
        url, start, stop = wanted.url, wanted.start, wanted.stop
        if start == stop or not self._is_kept(url):
            return await self._fetcher.fetch(url, start, stop)
        if stop is None:
            # A new object takes one request more, for its version.
            info = await self._stat_once(url)
            start, stop = max(0, info.size + start) if start < 0 else start, info.size
            if strong_etag(info) is None or start > stop:
                return await self._fetcher.fetch(url, wanted.start, None)
            return await self._read(store, info, start, stop)
        view = allocate(stop - start)
        await self.read_into(url, start, stop, view)
        return view.toreadonly()

    async def _read(self, store: DiskStore, info: ObjectInfo, start: int, stop: int) -> memoryview:
        view = allocate(stop - start)
        await self._fill(store, info, start, view)
        return view.toreadonly()

    async def _fill(self, store: DiskStore, info: ObjectInfo, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on, from the disk, and from the fetcher if missing there."""
        version = VersionFile.of(info, await self._endpoint(info.url))
        missing = []
        for low in range(0, len(view), STEP_BYTES):
            step = view[low : low + STEP_BYTES]
            missing += await self._in_thread(partial(store.read, version, start + low, step))

        async def fetch(low: int, high: int) -> None:
            place = view[low - start : high - start]
            await self._fetcher.read_into(info.url, low, high, place, version=info)
            await self._keep(store, info, low, place)

        if missing:
            spans = join_spans(((piece.start, piece.stop) for piece in missing), max_gap_bytes=0)
            await gather(*(partial(fetch, low, high) for low, high in spans))

    async def _version_to_look_for(
        self, store: DiskStore, url: str, start: int, stop: int, version: ObjectInfo | None = None
    ) -> ObjectInfo | None:
        """The object's version if these bytes may be on disk; requested if it isn't known yet."""
        if not self._is_kept(url) or start >= stop:
            return None
        info = version or self.known(url)
        if info is None:
            name = object_id(url, await self._endpoint(url))
            if await self._in_thread(partial(store.may_have, name, start, stop)):
                info = await self._stat_once(url)
        return None if strong_etag(info) is None else info

    async def _stat_once(self, url: str) -> ObjectInfo:
        return self.known(url) or await self._stats.run(url, partial(self._fetcher.stat, url))

    async def _keep(self, store: DiskStore, info: ObjectInfo, start: int, view: memoryview) -> None:
        """Write fetched bytes, if they may be kept. Call it before they are returned: their owner might change them."""
        if not self._is_kept(info.url) or strong_etag(info) is None:
            return
        version = VersionFile.of(info, await self._endpoint(info.url))
        for low in range(0, len(view), STEP_BYTES):
            lacking = await self._in_thread(partial(store.write, version, start + low, view[low : low + STEP_BYTES]))
            if lacking and not self._makes_room:
                self._makes_room = True
                self._group.start_soon(self._make_room, store, lacking)

    def _is_kept(self, url: str) -> bool:
        return _scheme(url) in (WEB_SCHEMES if self._endpoints is None else WEB_SCHEMES | STORE_SCHEMES)

    async def _endpoint(self, url: str) -> str:
        """The endpoint that distinguishes an object from others with its url; empty if the url suffices."""
        return "" if self._endpoints is None or _scheme(url) in WEB_SCHEMES else await self._endpoints.endpoint(url)

    async def _make_room(self, store: DiskStore, file_bytes: int) -> None:
        try:
            await self._in_thread(partial(store.make_room, file_bytes))
        finally:
            self._makes_room = False

    async def _in_thread(self, function: Callable[[], T]) -> T:
        meter, since = running_meter(), time.perf_counter()
        if meter is not None:
            meter.begin(Cause.DISK, since)
        try:
            return await run_to_its_end(function, self._limiter)
        finally:
            if meter is not None:
                meter.add(Cause.DISK, time.perf_counter() - since)


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else ""

"""Byte ranges kept in memory, within a bound in bytes.

A range is fetched once for all callers: those that come while it is under way join its flight, later ones hit its
entry. Room is reserved before a fetch begins, so the bound holds while bytes are on their way; the bytes then land in
the buffer that is also the entry.

A range must not be evicted between its landing and the moment its callers run again, or with a small bound two callers
could evict each other's bytes for ever. So a load keeps its entry leased until all its callers have leases.

All entries of an object are of one version: the one that the reader below insists on, if it knows versions. That reader
may forget an object, or may have seen it change in another call. So each hit and each landing checks that the version
is still the same, and entries of another one are dropped.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, TypeVarTuple

import anyio

from asyncfetch.cache.disk.reader import DiskReader
from asyncfetch.config.checks import whole_number
from asyncfetch.errors import CacheError, ClosedError, ConfigError, ObjectChanged
from asyncfetch.fetch.batch import RangeByRange
from asyncfetch.fetch.limiter import SharedCalls
from asyncfetch.fetch.objects import difference, strong_etag
from asyncfetch.fetch.reader import VersionedReader, byte_count, byte_ranges
from asyncfetch.fetch.urls import object_name
from asyncfetch.observe import Figures
from asyncfetch.ranges import ByteRange
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.fork import AsyncOnly, LoopGuard
from asyncfetch.runtime.leased_lru import LeasedLRU
from asyncfetch.runtime.memory_pool import allocate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    from asyncfetch.cache.disk.layout import DiskTier
    from asyncfetch.cache.disk.store import DiskStatistics
    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.leased_lru import EntryLease, RoomReservation


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The key of an entry. All entries of an object are of one version, so the key doesn't have it.

    Equal ranges with different headers are different entries.
    """

    range: ByteRange
    """Its url has no signature: it names the object, and can't be fetched."""
    header: bytes = field(default=b"", repr=False)
    """Bytes in front of the range's."""

    @classmethod
    def of(cls, asked: ByteRange, header: bytes = b"") -> CacheKey:
        """The key of a range, whose url may be signed."""
        name = object_name(asked.url)
        return cls(asked if name == asked.url else replace(asked, url=name), header)

    def __post_init__(self) -> None:
        if type(self.header) is not bytes:  # isinstance takes longer, and each hit checks this
            raise ConfigError(f"header must be bytes, not {self.header!r:.80}")
        if self.header and self.range.stop is None:
            raise ConfigError("stop must be a whole number where there is a header: both are set aside at once")

    @property
    def size_bytes(self) -> int | None:
        """Header and range together; None for an open range."""
        if self.range.stop is None:
            return None
        return len(self.header) + self.range.stop - self.range.start


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheStatistics(Figures):
    """A snapshot. Every request for bytes counts as one of hits, joins and misses."""

    _telling = ("hits", "misses", "used_bytes", "max_bytes", "waiting")
    _of_moment = ("entries", "max_bytes", "used_bytes", "leased_bytes", "reserved_bytes", "waiting")

    hits: int
    """Requests answered at once from an entry."""
    joins: int
    """Requests answered by a fetch that was under way."""
    misses: int
    """Requests that began a fetch, successful or not, or a copy from other entries."""
    bypasses: int
    """Fetches whose bytes were returned and not kept: larger than the cache, or outdated when they came."""
    evictions: int
    """Entries that made room for others."""
    entries: int
    max_bytes: int
    used_bytes: int
    """Bytes of entries, leased ones included. ``used_bytes + reserved_bytes <= max_bytes``."""
    leased_bytes: int
    """Part of ``used_bytes`` that is in use."""
    reserved_bytes: int
    """Reserved for fetches under way."""
    waiting: int
    """Fetches that wait for room."""
    waited: int
    """Fetches that had to wait for room before they began, including those that wait now or gave up."""
    disk: DiskStatistics | None = None
    """Statistics of the disk cache below; None without one."""


class Lease:
    """One range in memory, not to be evicted before ``release``. A context manager, whose exit releases.

    All leases of a key share the same bytes. The views stay valid after the release as long as they are referenced, but
    the cache may then use their room for other bytes. Bound to the cache's loop.

    Attributes:
        key: The entry.
        buffer: Header, then the range. Don't write to it; it is writable only because torch warns of read-only memory.
        view: The range alone, read-only.
    """

    __slots__ = ("_give_back", "buffer", "key", "view")

    def __init__(self, key: CacheKey, buffer: memoryview, give_back: Callable[[], None] | None) -> None:
        self.key = key
        self.buffer = buffer
        self.view = buffer[len(key.header) :].toreadonly()
        self._give_back = give_back

    def release(self) -> None:
        """Allow the eviction. A second release does nothing.

        Raises:
            WrongLoop: Called in another thread, loop or process; nothing is released.
        """
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease {self.key.range!r}, {len(self.buffer)} bytes with {len(self.key.header)} of header>"


class _EntrySpan(NamedTuple):
    start: int
    stop: int
    view: memoryview


@dataclass(slots=True)
class _Held:
    info: ObjectInfo | None
    spans: list[_EntrySpan] = field(default_factory=list)
    """One for each entry, ordered by start and stop."""


class _HeldVersions:
    """The version and ranges of each object's entries."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def agrees(self, name: str, info: ObjectInfo | None) -> bool:
        """Return whether the entries of an object may be of this version; None agrees with all."""
        held = self._held.get(name)
        return held is None or held.info is None or info is None or difference(held.info, info) is None

    def add(self, key: CacheKey, buffer: memoryview, info: ObjectInfo | None) -> None:
        """Note an entry, of a version that ``agrees``."""
        held = self._held.setdefault(key.range.url, _Held(info))
        held.info = held.info or info
        insort(held.spans, _span(key, buffer), key=lambda span: span[:2])

    def remove(self, key: CacheKey, buffer: memoryview) -> None:
        spans = self._held[key.range.url].spans
        del spans[bisect_left(spans, _span(key, buffer)[:2], key=lambda span: span[:2])]
        if not spans:
            del self._held[key.range.url]

    def parts(self, wanted: ByteRange, stop: int) -> tuple[ObjectInfo | None, list[_EntrySpan]]:
        """The version of a range, and the parts of it that entries hold, ascending.

        It may miss parts that only an entry within a longer one has.
        """
        held = self._held.get(object_name(wanted.url))
        if held is None or held.info is None or strong_etag(held.info) is None or stop > held.info.size:
            return None, []
        parts, at = [], wanted.start
        first = bisect_right(held.spans, at, key=lambda span: span.start) - 1
        for span in held.spans[max(0, first) : bisect_left(held.spans, stop, key=lambda span: span.start)]:
            start, end = max(at, span.start), min(span.stop, stop)
            if start < end:
                parts.append(_EntrySpan(start, end, span.view[start - span.start : end - span.start]))
                at = end
        return held.info, parts


def _span(key: CacheKey, buffer: memoryview) -> _EntrySpan:
    view = buffer[len(key.header) :]
    return _EntrySpan(key.range.start, key.range.start + len(view), view)


T = TypeVar("T")
Entries: TypeAlias = "LeasedLRU[CacheKey, memoryview]"
Reservation: TypeAlias = "RoomReservation[CacheKey, memoryview]"


class ReservationQueue:
    """Reservations of room for entries, first come, first served.

    A small request behind a large one waits for it, or a stream of small ones would starve the large one. After room
    is freed (a lease or a reservation given back, entries dropped), call ``grant``.
    """

    def __init__(self, lru: Entries) -> None:
        self._lru = lru
        self._waiters: dict[asyncio.Future[Reservation], int] = {}  # ordered, with removal in O(1); sizes in bytes
        self._granting = False
        self.waited = 0
        """Requests that had to wait so far."""

    def __len__(self) -> int:
        """Requests that are waiting."""
        return len(self._waiters)

    async def reserve(self, size_bytes: int) -> Reservation:
        """Room for ``size_bytes``, after earlier requests. Cancelled, it gives up its turn and its room."""
        reservation = self.reserve_nowait(size_bytes)
        if reservation is not None:
            return reservation
        self.waited += 1
        served: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._waiters[served] = size_bytes
        try:
            return await served
        except BaseException:
            self._waiters.pop(served, None)
            if served.done() and not served.cancelled():
                served.result().release()
            self.grant()  # it may have blocked those behind it
            raise

    def reserve_nowait(self, size_bytes: int) -> Reservation | None:
        """Room if there is some and no request waits, or None."""
        return None if self._waiters else self._lru.reserve(size_bytes)

    def grant(self) -> None:
        """Serve requests at the head of the queue, as far as there is room."""
        if self._granting:
            return  # called back by an eviction of ours; the loop below looks again anyway
        self._granting = True
        try:
            while self._waiters:
                served, size_bytes = next(iter(self._waiters.items()))
                if not served.cancelled():
                    reservation = self._lru.reserve(size_bytes)
                    if reservation is None:
                        return
                    served.set_result(reservation)
                del self._waiters[served]
        finally:
            self._granting = False


def require_room(ranges: Iterable[ByteRange], max_bytes: int) -> None:
    """CacheError if the ranges, without those that bypass the cache, are larger than it is."""
    sizes = [byte_range.stop - byte_range.start for byte_range in set(ranges) if byte_range.stop is not None]
    needed_bytes = sum(size for size in sizes if size <= max_bytes)
    if needed_bytes > max_bytes:
        raise CacheError(
            f"{len(sizes)} ranges asked for at once need {needed_bytes} bytes, the cache has max_bytes={max_bytes}:"
            " ask for fewer at a time, read them with fetch_stream, or raise max_bytes"
        )


Arguments = TypeVarTuple("Arguments")


@dataclass(eq=False, slots=True)
class _RangeLoad:
    """One fetch under way, or landed and not yet handed to all its callers."""

    callers: int = 0
    current: bool = True
    """False once the object was forgotten: then the bytes aren't kept."""
    buffer: memoryview = field(default_factory=lambda: memoryview(b""))
    """Header, then the bytes."""
    reservation: Reservation | None = None
    """The room for them; None if they can't be kept."""
    info: ObjectInfo | None = None
    """Their version; None if the reader knows none."""
    landing: EntryLease[CacheKey, memoryview] | None = None
    """Keeps the entry until its callers have their leases."""


class ByteCache(RangeByRange, AsyncOnly):
    """A RangeReader over another one that keeps ranges in memory. Use it as an async context manager.

    An entry is one range of one version of an object, with its header. Overlapping ranges are different entries; if the
    object has a strong ETag, a later one is copied from earlier ones as far as they go. Urls that differ only in their
    signature name one object. Entries in use are leased and never evicted; of the others the least recently used goes
    first. ``fetch`` returns bytes without a lease: they stay valid as long as the view is referenced, but an eviction
    drops the cache's own reference, so views that are kept for long cost memory beyond ``max_bytes``. Hold a lease if
    that matters.

    A fetch without room waits for its turn, first come, first served, so leases that are never released make it wait
    for ever. Several iterations that hold leases while they request more, such as training and validation at once,
    would wait for each other: let each first reserve the room of all that it is going to hold, as passes over a
    LeRobotDataset do. A range larger than ``max_bytes`` bypasses the cache: it is fetched once for all concurrent
    callers, and not kept. The length of an open range (``stop=None``) isn't known before it came, so its room is
    reserved after that, and if there is none at once, it isn't kept: open ranges are meant for footers, not for large
    objects. When an object changed (ObjectChanged), all its entries are dropped.

    Bound to the loop that entered it, and to the process; only ``statistics`` may be called from any thread. A hit
    never waits, not even for one turn of the loop.

    Args:
        fetcher: The reader below; entered by the caller, and left after the cache.
        max_bytes: Bound on entries and fetches under way. Python's objects, under 1 KiB an entry beside its header,
            aren't counted.
        disk: A disk cache between this one and the fetcher, which outlives this process.
        allocate: Provides the memory for a range of known length.
    """

    def __init__(
        self,
        fetcher: RangeReader,
        *,
        max_bytes: int,
        disk: DiskTier | None = None,
        allocate: Callable[[int], memoryview] = allocate,
    ) -> None:
        max_bytes = whole_number("max_bytes", max_bytes, least=1)
        self._disk = None if disk is None else DiskReader(fetcher, disk)
        self._fetcher: RangeReader = self._disk or fetcher
        self._versioned = self._fetcher if isinstance(self._fetcher, VersionedReader) else None
        self._versions = _HeldVersions()
        self._max_bytes = max_bytes
        self._allocate = allocate
        self._lru: Entries = LeasedLRU(max_bytes, on_evict=self._tell_evicted)
        self._space = ReservationQueue(self._lru)
        self._loads: dict[CacheKey, _RangeLoad] = {}
        """The latest for each key."""
        self._evict_callbacks: list[Callable[[CacheKey], object]] = []
        self._joins = self._misses = self._bypasses = 0
        self._guard: LoopGuard | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._guard is not None:
            raise ClosedError("a ByteCache can be entered only once: make a new one")
        self._guard = LoopGuard("this ByteCache")
        if self._disk is not None:
            await self._disk.__aenter__()
        self._group = await anyio.create_task_group().__aenter__()
        self._flights = SharedCalls(self._group)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Cancel and await the fetches under way, whose callers get ClosedError, and drop every entry."""
        self._closed = True
        try:
            await end_tasks(self._group)
        finally:
            self._lru.drop(lambda _key: True)
            if self._disk is not None:
                await self._disk.__aexit__(*exc_info)

    @property
    def max_bytes(self) -> int:
        """The bound."""
        return self._max_bytes

    async def stat(self, url: str) -> ObjectInfo:
        """Size and version of the object, as the fetcher knows them now."""
        return await self._pass_on(self._fetcher.stat, url)

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size, version and first bytes of the object, as the fetcher reads them now; they are not kept."""
        return await self._pass_on(self._fetcher.fetch_head, url, byte_count(max_bytes))

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size, version and last bytes of the object, as the fetcher reads them now; they are not kept."""
        return await self._pass_on(self._fetcher.fetch_tail, url, byte_count(max_bytes))

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        """All ranges, in input order; equal ones are fetched once. The first error cancels the rest.

        Raises:
            CacheError: Together they are larger than the cache.
        """
        ranges = byte_ranges(ranges)
        require_room(ranges, self._max_bytes)
        return await super().fetch_many(ranges)

    def lease(self, url: str, start: int, stop: int, *, header: bytes = b"") -> AbstractAsyncContextManager[Lease]:
        """Bytes [start, stop) of the object behind a header, kept from eviction in the context."""
        wanted = ByteRange(url, start, stop)
        return self._lease(wanted, CacheKey.of(wanted, header))

    async def acquire(self, url: str, start: int, stop: int, *, header: bytes = b"") -> Lease:
        """A lease like that of ``lease``, but the caller releases it."""
        wanted = ByteRange(url, start, stop)
        return await self._obtain(wanted, CacheKey.of(wanted, header))

    def try_lease(self, url: str, start: int, stop: int, *, header: bytes = b"") -> Lease | None:
        """A lease if the cache holds the bytes now, which counts as a hit, or None. The caller releases it."""
        return self.try_lease_of(CacheKey.of(ByteRange(url, start, stop), header), url)

    def try_lease_of(self, key: CacheKey, url: str) -> Lease | None:
        """A lease like that of ``try_lease``, by the key of the bytes, which are asked for at ``url``."""
        self._check()
        return self._hit(url, key)

    def on_evict(self, callback: Callable[[CacheKey], object]) -> None:
        """Call back with the key of each entry that leaves the cache, at its close too.

        Use it to drop objects built on the bytes. It runs on the loop and must neither wait nor raise.
        """
        self._evict_callbacks.append(callback)

    def statistics(self) -> CacheStatistics:
        """A snapshot; taken off the loop its figures can be one event apart."""
        lru = self._lru
        return CacheStatistics(
            hits=lru.hits,
            joins=self._joins,
            misses=self._misses,
            bypasses=self._bypasses,
            evictions=lru.evictions,
            entries=len(lru),
            max_bytes=lru.max_bytes,
            used_bytes=lru.used_bytes,
            leased_bytes=lru.leased_bytes,
            reserved_bytes=lru.reserved_bytes,
            waiting=len(self._space),
            waited=self._space.waited,
            disk=None if self._disk is None else self._disk.disk_statistics(),
        )

    def __repr__(self) -> str:
        return f"<ByteCache {self._lru!r}, {len(self._loads)} loading, {len(self._space)} waiting>"

    def _check(self) -> None:
        if self._guard is None or self._closed:
            raise ClosedError("this ByteCache is " + ("closed" if self._closed else "not entered: use async with"))
        self._guard.check()

    async def _pass_on(self, verb: Callable[[str, *Arguments], Awaitable[T]], url: str, *arguments: *Arguments) -> T:
        """The fetcher's answer, which isn't kept; one call for all concurrent callers."""
        self._check()
        whole = ByteRange(url, 0, None)  # checks the url

        async def ask() -> T:
            with self._watching(url):
                return await verb(url, *arguments)

        return await self._flights.run((verb, whole, *arguments), ask)

    async def _fetch_range(self, byte_range: ByteRange) -> memoryview:
        with await self._obtain(byte_range, CacheKey.of(byte_range)) as lease:
            return lease.view

    @asynccontextmanager
    async def _lease(self, wanted: ByteRange, key: CacheKey) -> AsyncGenerator[Lease, None]:
        with await self._obtain(wanted, key) as lease:
            yield lease

    def _hit(self, url: str, key: CacheKey) -> Lease | None:
        if key.size_bytes == 0:  # an entry without bytes would never be evicted
            return Lease(key, memoryview(bytearray()), None)
        if key not in self._lru:
            return None
        if not self._versions.agrees(key.range.url, self._known(url)):
            self._forget(key.range.url)
            return None
        held = self._lru.lease(key)
        return None if held is None else Lease(key, held.value, partial(self._give_back, held))

    async def _obtain(self, wanted: ByteRange, key: CacheKey) -> Lease:
        self._check()
        lease = self._hit(wanted.url, key)
        if lease is not None:
            return lease
        if key in self._flights:
            self._joins += 1
            load = self._loads[key]
        else:
            self._misses += 1
            if key in self._loads:  # its callers were cancelled, and it will be
                self._loads[key].current = False
            load = self._loads[key] = _RangeLoad()
        load.callers += 1
        try:
            await self._flights.run(key, partial(self._load, load, wanted, key))
            held = None if load.landing is None else load.landing.share()
            return Lease(key, load.buffer, None if held is None else partial(self._give_back, held))
        finally:
            load.callers -= 1
            if not load.callers:
                self._end(key, load)

    def _end(self, key: CacheKey, load: _RangeLoad) -> None:
        if self._loads.get(key) is load:
            del self._loads[key]
        if load.landing is not None:
            load.landing.release()
            self._space.grant()

    async def _load(self, load: _RangeLoad, wanted: ByteRange, key: CacheKey) -> None:
        """Read the bytes, and keep them if possible."""
        with self._watching(wanted.url):
            await self._read(load, wanted, key)
        if self._may_keep(load, wanted.url, key.range.url) and load.reservation is not None:
            self._versions.add(key, load.buffer, load.info)
            load.landing = load.reservation.commit(key, load.buffer)
            if not load.callers:  # cancelled twice, they didn't wait
                load.landing.release()
        else:
            self._bypasses += 1
            if load.reservation is not None:
                load.reservation.release()
        self._space.grant()

    async def _read(self, load: _RangeLoad, wanted: ByteRange, key: CacheKey) -> None:
        """Read the bytes behind their header, in reserved room if they can be kept."""
        size_bytes = key.size_bytes
        if wanted.stop is None or size_bytes is None:
            load.buffer = await self._fetcher.fetch(wanted.url, wanted.start, None)
            load.info = self._known(wanted.url)
            if load.buffer:
                load.reservation = self._space.reserve_nowait(len(load.buffer))
            return
        known = self._known(wanted.url)
        # Beyond the known end no bytes come: the reader raises, or notices a change. No entry need go for that.
        if size_bytes <= self._max_bytes and (known is None or wanted.stop <= known.size):
            load.reservation = await self._space.reserve(size_bytes)
        try:
            load.buffer = self._allocate(size_bytes)
            load.buffer[: len(key.header)] = key.header
            place = load.buffer[len(key.header) :]
            if self._versioned is None:
                await self._fetcher.fetch_into(wanted.url, wanted.start, wanted.stop, place)
            elif place:
                load.info = await self._fill(self._versioned, wanted, place)
        except BaseException:
            if load.reservation is not None:
                load.reservation.release()
                self._space.grant()
            raise

    async def _fill(self, reader: VersionedReader, wanted: ByteRange, place: memoryview) -> ObjectInfo:
        """Copy the parts that other entries hold, and read the rest."""
        stop = wanted.start + len(place)
        info, parts = self._versions.parts(wanted, stop)
        if info is None or not parts or not self._versions.agrees(object_name(wanted.url), reader.known(wanted.url)):
            return await reader.read_into(wanted.url, wanted.start, stop, place)
        for part in parts:
            place[part.start - wanted.start : part.stop - wanted.start] = part.view
        edges = [wanted.start, *(edge for part in parts for edge in part[:2]), stop]
        gaps = [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]

        async def read(low: int, high: int) -> None:
            view = place[low - wanted.start : high - wanted.start]
            await reader.read_into(wanted.url, low, high, view, version=info)

        await gather(*(partial(read, low, high) for low, high in gaps))
        return info

    def _known(self, url: str) -> ObjectInfo | None:
        return None if self._versioned is None else self._versioned.known(url)

    def _may_keep(self, load: _RangeLoad, url: str, name: str) -> bool:
        """Return whether the bytes are of the latest version seen. If so, entries of an older one are dropped."""
        if not load.current:
            return False
        if self._versions.agrees(name, load.info):
            return True
        known = self._known(url)
        if known is not None and load.info is not None and difference(known, load.info) is not None:
            return False
        self._forget(name)
        return True

    @contextmanager
    def _watching(self, url: str) -> Iterator[None]:
        """Drop the object's entries if it turns out to be replaced, so that old and new bytes never mix."""
        try:
            yield
        except ObjectChanged:
            self._forget(object_name(url))
            raise

    def _forget(self, name: str) -> None:
        """Drop an object's entries, and don't keep its loads."""
        for key, load in self._loads.items():
            if key.range.url == name:
                load.current = False
        self._lru.drop(lambda key: key.range.url == name)
        self._space.grant()

    def _give_back(self, held: EntryLease[CacheKey, memoryview]) -> None:
        if not self._closed:
            self._check()
            held.release()
            self._space.grant()

    def _tell_evicted(self, key: CacheKey, buffer: memoryview) -> None:
        self._versions.remove(key, buffer)
        for callback in self._evict_callbacks:
            callback(key)

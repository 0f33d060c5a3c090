from __future__ import annotations

import weakref
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.cache.disk import DiskTier
from asyncfetch.cache.memory import ByteCache
from asyncfetch.config import FetchConfig
from asyncfetch.errors import (
    CacheError,
    ClosedError,
    ConfigError,
    ConnectionFailed,
    ObjectChanged,
    RangeNotSatisfiable,
    WrongLoop,
)
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.limiter import Caller, calling, current_caller
from asyncfetch.ranges import ByteRange, ObjectInfo
from asyncfetch.testing import Fault, RangeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from asyncfetch.cache.memory import CacheKey, Lease
    from asyncfetch.fetch.reader import RangeReader, WritableBuffer
    from asyncfetch.testing import ServedRequest

URL = "https://data.example.org/a"
OTHER = "https://data.example.org/b"
OBJECTS = {url: np.random.default_rng(index).bytes(1000) for index, url in enumerate([URL, OTHER])}

CALM = [HealthCheck.too_slow]  # a wall-clock check, which a busy machine fails


class FakeReader:
    """Objects in memory. Keeps a log of requests; holds them back while ``gated``; fails as ``errors`` says."""

    def __init__(self, *, gated: bool = False) -> None:
        self.objects = OBJECTS
        self.log: list[tuple[str, int, int | None]] = []
        self.gated = gated
        self.under_way: dict[tuple[str, int, int | None], anyio.Event] = {}
        self.errors: dict[tuple[str, int, int | None], Exception] = {}

    async def _request(self, url: str, start: int, stop: int | None) -> bytes:
        request = (url, start, stop)
        assert request not in self.under_way, "asked twice at a time"
        self.log.append(request)
        self.under_way[request] = anyio.Event()
        try:
            await (self.under_way[request].wait() if self.gated else anyio.lowlevel.checkpoint())
        finally:
            del self.under_way[request]
        if request in self.errors:
            raise self.errors.pop(request)
        if stop is not None and stop > len(self.objects[url]):
            raise RangeNotSatisfiable("past the end", url=url, start=start, stop=stop, size=len(self.objects[url]))
        return self.objects[url][start:stop]

    async def stat(self, url: str) -> ObjectInfo:
        return ObjectInfo(url, len(self.objects[url]))

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        return memoryview(await self._request(url, start, stop))

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        return await self.stat(url), await self.fetch(url, 0, max_bytes)

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        return await self.stat(url), await self.fetch(url, -max_bytes)

    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        buffer[:] = await self._request(url, start, stop)

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        raise NotImplementedError

    def fetch_stream(
        self, ranges: Iterable[ByteRange]
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[int, memoryview]]]:
        raise NotImplementedError


async def settle() -> None:
    """Let every task go as far as it can; nothing here waits for the outside."""
    for _ in range(25):
        await anyio.lowlevel.checkpoint()


def is_a_reader(cache: ByteCache) -> RangeReader:
    return cache  # checked by mypy


async def test_a_second_ask_is_a_hit_without_a_request() -> None:
    reader = FakeReader()
    async with ByteCache(reader, max_bytes=100) as cache:
        first = await cache.fetch(URL, 10, 20)
        assert await cache.fetch(URL, 10, 20) == first == reader.objects[URL][10:20]
        statistics = cache.statistics()
    assert first.readonly
    assert len(reader.log) == 1
    assert (statistics.hits, statistics.misses, statistics.joins, statistics.used_bytes) == (1, 1, 0, 10)


async def test_a_hit_does_not_wait() -> None:
    async with ByteCache(FakeReader(), max_bytes=100) as cache:
        await cache.fetch(URL, 0, 10)
        with pytest.raises(StopIteration):
            cache.fetch(URL, 0, 10).send(None)


async def test_thousand_askers_make_one_request_if_the_first_leaves() -> None:
    reader = FakeReader(gated=True)
    views = []
    first = anyio.CancelScope()

    async def ask(scope: anyio.CancelScope) -> None:
        with scope:
            views.append(await cache.fetch(URL, 0, 50))

    async with ByteCache(reader, max_bytes=100) as cache, anyio.create_task_group() as askers:
        askers.start_soon(ask, first)
        await settle()
        for _ in range(999):
            askers.start_soon(ask, anyio.CancelScope())
        await settle()
        first.cancel()
        await settle()
        reader.under_way[URL, 0, 50].set()
    assert views == [reader.objects[URL][:50]] * 999
    assert len(reader.log) == 1
    assert cache.statistics().joins == 999


async def test_a_failure_reaches_all_and_the_next_ask_tries_again() -> None:
    reader = FakeReader(gated=True)
    reader.errors[URL, 0, 50] = ConnectionFailed("gone", url=URL)
    failures: list[bool] = []

    async def ask() -> None:
        with pytest.raises(ConnectionFailed):
            await cache.fetch(URL, 0, 50)
        failures.append(True)

    async with ByteCache(reader, max_bytes=100) as cache:
        async with anyio.create_task_group() as askers:
            for _ in range(10):
                askers.start_soon(ask)
            await settle()
            reader.under_way[URL, 0, 50].set()
        assert cache.statistics().reserved_bytes == 0
        reader.gated = False
        assert await cache.fetch(URL, 0, 50) == reader.objects[URL][:50]
    assert (len(failures), len(reader.log)) == (10, 2)


class LateReader(FakeReader):
    """Whose first request, once it is cancelled, takes its time and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.unwinds = anyio.Event(), anyio.Event()

    async def _request(self, url: str, start: int, stop: int | None) -> bytes:
        if self.begun.is_set():
            return await super()._request(url, start, stop)
        self.begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self.unwinds.wait()
            raise ConnectionFailed("of the first attempt", url=url)


async def test_failure_of_an_abandoned_request_reaches_no_later_asker() -> None:
    reader, first = LateReader(), anyio.CancelScope()

    async def ask_first() -> None:
        with first:
            await cache.fetch(URL, 0, 50)

    async with ByteCache(reader, max_bytes=100) as cache, anyio.create_task_group() as askers:
        askers.start_soon(ask_first)
        await reader.begun.wait()
        first.cancel()
        await settle()
        assert await cache.fetch(URL, 0, 50) == reader.objects[URL][:50]
        reader.unwinds.set()
        await settle()
        assert await cache.fetch(URL, 0, 50) == reader.objects[URL][:50]
        assert (cache.statistics().hits, cache.statistics().reserved_bytes) == (1, 0)


async def test_last_askers_cancellation_frees_the_requests_room() -> None:
    reader = FakeReader(gated=True)
    async with ByteCache(reader, max_bytes=100) as cache:
        with anyio.move_on_after(0.01):
            await cache.fetch(URL, 0, 50)
        assert (reader.under_way, cache.statistics().reserved_bytes) == ({}, 0)


async def test_a_lease_has_a_header_in_front_of_the_range() -> None:
    reader = FakeReader()
    async with ByteCache(reader, max_bytes=100) as cache:
        async with cache.lease(URL, 10, 20, header=b"moov") as lease:
            assert lease.view == reader.objects[URL][10:20]
            assert lease.view.readonly
            assert bytes(lease.buffer) == b"moov" + reader.objects[URL][10:20]
            assert cache.statistics().leased_bytes == 14
        assert cache.statistics().leased_bytes == 0
        again = cache.try_lease(URL, 10, 20, header=b"moov")
        assert again is not None
        with again:
            assert bytes(again.buffer[:4]) == b"moov"
        again.release()
        for header in (b"", b"free"):
            assert cache.try_lease(URL, 10, 20, header=header) is None
        async with cache.lease(URL, 10, 20, header=b"free") as lease, cache.lease(URL, 10, 20, header=b"moov") as other:
            assert (bytes(lease.buffer[:4]), bytes(other.buffer[:4])) == (b"free", b"moov")
    assert len(reader.log) == 2


async def test_leased_range_is_never_evicted() -> None:
    async with ByteCache(FakeReader(), max_bytes=100) as cache, cache.lease(URL, 0, 60):
        for start in range(0, 900, 30):
            await cache.fetch(OTHER, start, start + 30)
        assert cache.try_lease(URL, 0, 60) is not None
        assert cache.statistics().evictions == 29


async def test_a_view_outlives_its_eviction_and_the_cache() -> None:
    reader = FakeReader()
    async with ByteCache(reader, max_bytes=50) as cache:
        view = await cache.fetch(URL, 0, 50)
        await cache.fetch(OTHER, 0, 50)
    assert view == reader.objects[URL][:50]


async def test_evicted_bytes_are_freed() -> None:
    async with ByteCache(FakeReader(), max_bytes=50) as cache:
        async with cache.lease(URL, 0, 50) as lease:
            alive = weakref.ref(lease.buffer.obj)
        del lease
        assert alive() is not None
        await cache.fetch(OTHER, 0, 50)
        assert alive() is None


async def test_a_range_larger_than_the_cache_is_read_once_and_not_kept() -> None:
    reader = FakeReader()
    views = []

    async def ask() -> None:
        views.append(await cache.fetch(URL, 0, 500))

    async with ByteCache(reader, max_bytes=100) as cache:
        await cache.fetch(OTHER, 0, 100)
        async with anyio.create_task_group() as askers:
            for _ in range(5):
                askers.start_soon(ask)
        statistics = cache.statistics()
    assert views == [reader.objects[URL][:500]] * 5
    assert len(reader.log) == 2
    assert (statistics.bypasses, statistics.entries, statistics.evictions) == (1, 1, 0)


async def test_askers_that_fill_the_cache_end_their_evictions() -> None:
    reader = FakeReader()

    async def ask(url: str) -> None:
        for _ in range(3):
            async with cache.lease(url, 0, 100):
                await anyio.lowlevel.checkpoint()

    async with ByteCache(reader, max_bytes=100) as cache, anyio.create_task_group() as askers:
        for _ in range(4):
            askers.start_soon(ask, URL)
            askers.start_soon(ask, OTHER)
    assert len(reader.log) <= 24


async def test_room_is_given_first_come_first_served() -> None:
    reader = FakeReader()
    served: list[int] = []
    large = anyio.CancelScope()

    async def ask(stop: int, scope: anyio.CancelScope) -> None:
        with scope:
            await cache.fetch(OTHER, 0, stop)
            served.append(stop)

    async with (
        ByteCache(reader, max_bytes=100) as cache,
        anyio.create_task_group() as askers,
        cache.lease(URL, 0, 60),
    ):
        askers.start_soon(ask, 90, large)
        await settle()
        askers.start_soon(ask, 10, anyio.CancelScope())
        await settle()
        assert (served, cache.statistics().waiting) == ([], 2)  # 10 bytes would fit, but it isn't their turn
        large.cancel()
        await settle()
        assert (served, cache.statistics().waiting) == ([10], 0)


async def test_changed_object_is_dropped_whole_and_while_under_way() -> None:
    reader = FakeReader(gated=True)
    async with ByteCache(reader, max_bytes=1000) as cache, anyio.create_task_group() as askers:

        async def fails() -> None:
            with pytest.raises(ObjectChanged):
                await cache.fetch(URL, 30, 40)

        reader.gated = False
        await cache.fetch(URL, 0, 10)
        await cache.fetch(OTHER, 0, 10)
        reader.gated = True
        reader.errors[URL, 30, 40] = ObjectChanged("new version", url=URL)
        askers.start_soon(fails)
        askers.start_soon(cache.fetch, URL, 50, 60)
        await settle()
        reader.under_way[URL, 30, 40].set()
        await settle()
        reader.under_way[URL, 50, 60].set()
        await settle()
        assert cache.statistics().entries == 1
        assert cache.try_lease(OTHER, 0, 10) is not None


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (0, None), (-10, None), (900, None), (1000, None)])
async def test_empty_and_open_ranges(start: int, stop: int | None) -> None:
    reader = FakeReader()
    async with ByteCache(reader, max_bytes=2000) as cache:
        for _ in range(2):
            assert await cache.fetch(URL, start, stop) == reader.objects[URL][start:stop]
        if len(reader.objects[URL][start:stop]):
            assert cache.statistics().hits == 1
        else:
            assert cache.statistics().entries == 0
    assert len(reader.log) <= 2


async def test_an_open_range_that_does_not_fit_is_not_kept() -> None:
    async with ByteCache(FakeReader(), max_bytes=500) as cache:
        assert len(await cache.fetch(URL)) == 1000
        assert (cache.statistics().bypasses, cache.statistics().entries) == (1, 0)


@settings(max_examples=30, deadline=None, suppress_health_check=CALM)
@given(spans=st.lists(st.tuples(st.sampled_from([URL, OTHER]), st.integers(0, 20), st.integers(0, 20)), max_size=30))
async def test_fetch_many_keeps_order_and_fetches_equal_ranges_once(spans: list[tuple[str, int, int]]) -> None:
    reader = FakeReader()
    ranges = [ByteRange(url, start, start + length) for url, start, length in spans]
    async with ByteCache(reader, max_bytes=10_000) as cache:
        views = await cache.fetch_many(ranges)
        async with cache.fetch_stream(ranges) as stream:
            streamed = [pair async for pair in stream]
    assert views == [reader.objects[url][start : start + length] for url, start, length in spans]
    assert sorted(index for index, _ in streamed) == list(range(len(ranges)))
    assert all(view == views[index] for index, view in streamed)
    assert len(reader.log) == len({one for one in ranges if one.start != one.stop})


async def test_ranges_too_large_together_fail_with_both_figures() -> None:
    reader = FakeReader()
    async with ByteCache(reader, max_bytes=100) as cache:
        with pytest.raises(CacheError, match=r"need 120 bytes.*max_bytes=100"):
            await cache.fetch_many(ByteRange(URL, start, start + 40) for start in (0, 40, 80))
        assert len(await cache.fetch_many([ByteRange(URL, 0, 60)] * 5)) == 5
    assert len(reader.log) == 1


async def test_first_error_of_many_comes_alone_and_cancels_the_rest() -> None:
    reader = FakeReader(gated=True)
    reader.errors[URL, 0, 10] = ConnectionFailed("gone", url=URL)

    async def ask() -> None:
        with pytest.raises(ConnectionFailed):
            await cache.fetch_many([ByteRange(URL, start, start + 10) for start in (0, 10, 20)])

    async with ByteCache(reader, max_bytes=100) as cache, anyio.create_task_group() as askers:
        askers.start_soon(ask)
        await settle()
        reader.under_way[URL, 0, 10].set()
        await settle()
        assert (reader.under_way, cache.statistics().reserved_bytes) == ({}, 0)


async def test_leaving_a_stream_cancels_it_and_keeps_the_bodys_error() -> None:
    reader = FakeReader()
    async with ByteCache(reader, max_bytes=1000) as cache:
        stream = cache.fetch_stream([ByteRange(URL, start, start + 10) for start in range(0, 100, 10)])
        with pytest.raises(LookupError):  # noqa: PT012 - the body's raise is the subject
            async with stream as pairs:
                await anext(pairs)
                reader.gated = True
                raise LookupError
        assert reader.under_way == {}
        with pytest.raises(ClosedError):
            await anext(pairs)


async def test_a_stream_is_entered_once() -> None:
    async with ByteCache(FakeReader(), max_bytes=1000) as cache:
        stream = cache.fetch_stream([ByteRange(URL, 0, 10)])
        async with stream as pairs:
            assert len([pair async for pair in pairs]) == 1
            with pytest.raises(ClosedError, match="entered before"):
                await stream.__aenter__()
        with pytest.raises(ClosedError, match="entered before"):
            await stream.__aenter__()


async def test_fetch_into_copies_into_the_callers_buffer() -> None:
    reader = FakeReader()
    buffer = bytearray(10)
    async with ByteCache(reader, max_bytes=100) as cache:
        await cache.fetch_into(URL, 5, 15, buffer)
        with pytest.raises(ConfigError, match="11 bytes"):
            await cache.fetch_into(URL, 5, 16, buffer)
        with pytest.raises(ConfigError, match="read-only"):
            await cache.fetch_into(URL, 5, 15, memoryview(bytes(10)))
        for start, stop, target in ((5, 15, "0123456789"), (0, None, buffer)):
            with pytest.raises(ConfigError):
                await cache.fetch_into(URL, start, stop, target)  # type: ignore[arg-type]
        await cache.fetch_into(URL, 5, 5, np.empty((0, 3)))  # type: ignore[arg-type]
    assert buffer == reader.objects[URL][5:15]


@pytest.mark.parametrize(("start", "stop", "header"), [(5, 4, b""), (-1, 4, b""), (0, 4, "moov"), (0, 4, bytearray(1))])
async def test_a_range_that_cannot_be_meant_is_refused(start: int, stop: int, header: bytes) -> None:
    async with ByteCache(FakeReader(), max_bytes=100) as cache:
        with pytest.raises(ConfigError):
            cache.lease(URL, start, stop, header=header)


async def test_a_header_needs_the_end_of_its_range() -> None:
    reader = FakeReader()
    async with ByteCache(reader, max_bytes=2000) as cache:
        for start in (0, -10):
            with pytest.raises(ConfigError, match="stop must be a whole number"):
                cache.lease(URL, start, cast("int", None), header=b"moov")
            with pytest.raises(ConfigError, match="stop must be a whole number"):
                await cache.acquire(URL, start, cast("int", None), header=b"moov")
            with pytest.raises(ConfigError, match="stop must be a whole number"):
                cache.try_lease(URL, start, cast("int", None), header=b"moov")
    assert reader.log == []


async def test_a_range_is_copied_from_others_that_are_held() -> None:
    """And only what none of them holds is asked for."""
    whole = OBJECTS[URL]
    async with RangeServer({"a": whole}) as server:
        config = FetchConfig(ca_file=server.ca_file, hedge=None)
        async with Fetcher(config) as fetcher, ByteCache(fetcher, max_bytes=10_000) as cache:
            url = f"{server.url}/a"
            for start, stop in ((0, 300), (100, 400), (600, 700)):
                assert await cache.fetch(url, start, stop) == whole[start:stop]
            assert [request.bytes_sent for request in server.requests] == [300, 100, 100]
            server.reset()
            with await cache.acquire(url, 50, 900, header=b"header") as lease:
                assert lease.buffer == b"header" + whole[50:900]
            assert sorted((one.start or 0, one.bytes_sent) for one in server.requests) == [(400, 200), (700, 200)]
            assert await cache.fetch(url, 60, 850) == whole[60:850]
            assert len(server.requests) == 2


async def test_a_range_of_two_versions_is_not_put_together() -> None:
    content = {"a": OBJECTS[URL]}
    async with RangeServer(content) as server:
        config = FetchConfig(ca_file=server.ca_file, hedge=None)
        async with Fetcher(config) as fetcher, ByteCache(fetcher, max_bytes=10_000) as cache:
            url = f"{server.url}/a"
            await cache.fetch(url, 0, 300)
            content["a"] = OBJECTS[OTHER]
            with pytest.raises(ObjectChanged):
                await cache.fetch(url, 200, 500)
            assert await cache.fetch(url, 200, 500) == OBJECTS[OTHER][200:500]


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, True, "1", None])
def test_a_bound_that_cannot_be_meant_is_refused(max_bytes: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="max_bytes must be a whole number, at least 1"):
        ByteCache(FakeReader(), max_bytes=max_bytes)
    with pytest.raises(ConfigError, match="max_bytes must be a whole number, at least 1"):
        DiskTier(directory="/anywhere", max_bytes=max_bytes)


def test_a_bound_of_numpy_is_as_good() -> None:
    tier = DiskTier("/anywhere", np.int32(2**30), min_free_bytes=np.int32(0))  # type: ignore[arg-type]
    assert (type(tier.max_bytes), type(tier.min_free_bytes)) == (int, int)  # none overflows
    assert type(ByteCache(FakeReader(), max_bytes=np.int32(2**30)).max_bytes) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [2**62, 2**80])
async def test_a_range_beyond_all_memory_is_our_error(stop: int) -> None:
    async with ByteCache(FakeReader(), max_bytes=100) as cache:
        with pytest.raises(CacheError, match="ask for a smaller one"):
            await cache.fetch(URL, 0, stop)


async def test_callbacks_hear_of_each_entry_that_goes() -> None:
    gone: list[CacheKey] = []
    async with ByteCache(FakeReader(), max_bytes=20) as cache:
        cache.on_evict(gone.append)
        for start in (0, 10, 20):
            await cache.fetch(URL, start, start + 10)
        assert [key.range.start for key in gone] == [0]
    assert [key.range.start for key in gone] == [0, 10, 20]


@pytest.mark.parametrize("buffer", [bytes(10), bytearray(9), memoryview(bytearray(20))[::2]])
async def test_a_buffer_that_the_range_cannot_go_to_is_refused(buffer: memoryview) -> None:
    async with ByteCache(FakeReader(), max_bytes=100) as cache:
        with pytest.raises(ConfigError, match="writable, contiguous buffer of 10 bytes"):
            await cache.fetch_into(URL, 0, 10, buffer)


async def test_close_cancels_requests_and_tells_their_askers() -> None:
    reader = FakeReader(gated=True)

    async def ask() -> None:
        with pytest.raises(ClosedError):
            await cache.fetch(URL, 0, 10)

    async with anyio.create_task_group() as askers, ByteCache(reader, max_bytes=100) as cache:
        askers.start_soon(ask)
        await settle()
        reader.gated = False
        async with cache.lease(OTHER, 0, 10) as lease:
            pass
        held = cache.try_lease(OTHER, 0, 10)
    assert reader.under_way == {}
    assert held is not None
    held.release()
    assert lease.view == reader.objects[OTHER][:10]
    with pytest.raises(ClosedError, match="closed"):
        await cache.fetch(URL, 0, 10)
    with pytest.raises(ClosedError, match="not entered"):
        await ByteCache(reader, max_bytes=100).fetch(URL, 0, 10)


QUESTIONS = [("stat", ()), ("fetch_head", (10,)), ("fetch_tail", (10,))]


@pytest.mark.parametrize(("verb", "arguments"), QUESTIONS)
async def test_close_cancels_what_is_asked_past_the_cache_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, verb: str, arguments: tuple[int, ...]
) -> None:
    """Its askers hear of the close, and nothing goes to the disk cache behind that."""
    arrived = anyio.Event()

    async def ask() -> None:
        with pytest.raises(ClosedError, match="closed before the answer came"):
            await getattr(cache, verb)(url, *arguments)

    def hold(_: ServedRequest) -> Fault:
        arrived.set()
        return Fault(ending="stall", after_bytes=None)

    async with (
        RangeServer({"a.bin": OBJECTS[URL]}, tls=False, fault=hold) as server,
        Fetcher(FetchConfig(trust_env=False)) as fetcher,
        anyio.create_task_group() as askers,
    ):
        url = f"{server.url}/a.bin"
        async with ByteCache(fetcher, max_bytes=100, disk=DiskTier(tmp_path, 2**20)) as cache:
            askers.start_soon(ask)
            await arrived.wait()
        assert fetcher.statistics().in_flight == 0
    assert not caplog.records


class HeldQuestions(FakeReader):
    """Holds back whatever it is asked, and knows on whose behalf that is."""

    def __init__(self) -> None:
        super().__init__(gated=True)
        self.callers: list[Caller] = []

    async def _request(self, url: str, start: int, stop: int | None) -> bytes:
        self.callers.append(current_caller())
        return await super()._request(url, start, stop)

    async def stat(self, url: str) -> ObjectInfo:
        return ObjectInfo(url, len(await self._request(url, 0, None)))

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        return ObjectInfo(url, 1000), await self.fetch(url, 0, max_bytes)

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        return ObjectInfo(url, 1000), await self.fetch(url, -max_bytes)


@pytest.mark.parametrize(("verb", "arguments"), QUESTIONS)
async def test_equal_questions_are_one_request_while_a_caller_waits(verb: str, arguments: tuple[int, ...]) -> None:
    reader = HeldQuestions()
    scopes = [anyio.CancelScope() for _ in range(3)]
    answers: list[Any] = []

    async def ask(scope: anyio.CancelScope) -> None:
        with scope:
            answers.append(await getattr(cache, verb)(URL, *arguments))

    async with ByteCache(reader, max_bytes=100) as cache, anyio.create_task_group() as askers:
        for scope in scopes:
            askers.start_soon(ask, scope)
            await settle()
        askers.start_soon(getattr(cache, verb), OTHER, *arguments)  # another one
        await settle()
        assert len(reader.log) == 2
        scopes[0].cancel()
        await settle()
        held = [event for request, event in reader.under_way.items() if request[0] == URL]
        assert len(held) == 1
        held[0].set()
        await settle()
        assert len(answers) == 2
        assert answers[0] is answers[1]
        askers.start_soon(ask, alone := anyio.CancelScope())
        await settle()
        assert len(reader.under_way) == 2
        alone.cancel()
        await settle()
        assert [url for url, *_ in reader.under_way] == [OTHER]
        askers.cancel_scope.cancel()


@pytest.mark.parametrize("verb", ["fetch_tail", "fetch", "acquire"])
@pytest.mark.parametrize("raised", [True, False])
async def test_read_ahead_becomes_urgent_when_a_caller_waits_for_it(verb: str, *, raised: bool) -> None:
    arguments = (10,) if verb == "fetch_tail" else (0, 10)
    reader = HeldQuestions()
    ahead, joining = Caller(urgent=False), Caller(urgent=False)

    async def ask(caller: Caller) -> None:
        with calling(caller):
            await getattr(cache, verb)(URL, *arguments)

    async with ByteCache(reader, max_bytes=100) as cache, anyio.create_task_group() as askers:
        for caller in (ahead, joining):
            askers.start_soon(ask, caller)
            await settle()
        assert [caller.urgent for caller in reader.callers] == [False]
        if raised:
            joining.raise_priority()
        else:
            askers.start_soon(ask, Caller())
            await settle()
        assert [caller.urgent for caller in reader.callers] == [True]
        assert not ahead.urgent  # what else it asks for can wait
        askers.cancel_scope.cancel()


async def test_read_ahead_is_not_urgent_for_a_waiter_that_has_left() -> None:
    """Whose caller may still be about, and be seen off."""
    reader = HeldQuestions()

    async def ask(scope: anyio.CancelScope, caller: Caller) -> None:
        with scope, calling(caller):
            await cache.fetch(URL, 0, 10)

    async with ByteCache(reader, max_bytes=100) as cache, anyio.create_task_group() as askers:
        askers.start_soon(ask, waiting := anyio.CancelScope(), Caller())
        await settle()
        waiting.cancel()
        await settle()
        askers.start_soon(ask, ahead := anyio.CancelScope(), Caller(urgent=False))
        await settle()
        assert [caller.urgent for caller in reader.callers] == [True, False]
        ahead.cancel()


@pytest.mark.parametrize(("verb", "arguments"), QUESTIONS)
async def test_a_question_that_cannot_be_meant_is_refused(verb: str, arguments: tuple[int, ...]) -> None:
    async with ByteCache(FakeReader(), max_bytes=100) as cache:
        with pytest.raises(ConfigError, match="a url or path must be a string"):
            await getattr(cache, verb)([URL], *arguments)
        if arguments:
            for wrong in (-1, True, [10]):
                with pytest.raises(ConfigError, match="max_bytes must be a whole number and not negative"):
                    await getattr(cache, verb)(URL, wrong)
            assert await getattr(cache, verb)(URL, np.int64(10)) == await getattr(cache, verb)(URL, 10)


async def test_another_loop_is_refused_and_statistics_are_not() -> None:
    async with ByteCache(FakeReader(), max_bytes=100) as cache:
        await cache.fetch(URL, 0, 10)
        lease = cache.try_lease(URL, 0, 10)
        assert lease is not None

        def elsewhere() -> int:
            with pytest.raises(WrongLoop):
                anyio.run(cache.fetch, URL, 0, 10)
            with pytest.raises(WrongLoop):
                lease.release()
            return cache.statistics().leased_bytes

        assert await anyio.to_thread.run_sync(elsewhere) == 10
        lease.release()
        assert cache.statistics().leased_bytes == 0


MODEL_BYTES = 10
SIZES = [2, 3, 4, 6, 10, 11]  # of the ranges of the model test; the last one bypasses


@dataclass
class Asker:
    """One task of the model test."""

    size: int
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    letting_go: anyio.Event = field(default_factory=anyio.Event)
    lease: Lease | None = None
    failed: bool = False


class Model:
    """What a ByteCache should do, in lists. A range is its size; ``settled`` after each step."""

    def __init__(self) -> None:
        self.idle: list[int] = []  # least recently used first
        self.leases: dict[int, int] = {}
        self.queue: list[int] = []
        self.reading: list[int] = []
        self.requests = 0

    def free(self) -> int:
        held = [*self.leases, *self.reading]
        return MODEL_BYTES - sum(size for size in held if size <= MODEL_BYTES)

    def ask(self, size: int) -> None:
        if size in self.idle:
            self.idle.remove(size)
            self.leases[size] = 1
        elif size in self.leases and size <= MODEL_BYTES:
            self.leases[size] += 1
        elif size not in self.queue + self.reading:
            self.queue.append(size) if size <= MODEL_BYTES else self.read(size)
            self.grant()

    def read(self, size: int) -> None:
        self.reading.append(size)
        self.requests += 1

    def grant(self) -> None:
        while self.queue and self.queue[0] <= self.free():
            size = self.queue.pop(0)
            while self.free() - sum(self.idle) < size:
                self.idle.pop(0)
            self.read(size)

    def end(self, size: int, *, claims: int) -> None:
        """A read or a wait for room is over: with so many who get a lease, or failed or left by all."""
        for stage in (self.queue, self.reading):
            if size in stage:
                stage.remove(size)
        if claims:
            self.leases[size] = self.leases.get(size, 0) + claims
        self.grant()

    def release(self, size: int) -> None:
        self.leases[size] -= 1
        if not self.leases[size]:
            del self.leases[size]
            if size <= MODEL_BYTES:
                self.idle.append(size)
        self.grant()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["ask", "ask", "land", "fail"]), st.sampled_from(SIZES)),
        st.tuples(st.sampled_from(["cancel", "release"]), st.integers(0, 20)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=CALM)
@given(operations=OPERATIONS)
async def test_byte_cache_behaves_as_its_model(operations: list[tuple[str, int]]) -> None:
    reader, model = FakeReader(gated=True), Model()
    askers: list[Asker] = []

    async def ask(asker: Asker) -> None:
        with asker.scope:
            try:
                async with cache.lease(URL, 0, asker.size) as asker.lease:
                    assert asker.lease.view == reader.objects[URL][: asker.size]
                    await asker.letting_go.wait()
            except ConnectionFailed:
                pass
        askers.remove(asker)

    def waiting_for(size: int) -> int:
        return sum(asker.size == size and asker.lease is None for asker in askers)

    async with ByteCache(reader, max_bytes=MODEL_BYTES) as cache, AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for operation, number in operations:
            if operation == "ask":
                asker = Asker(number)
                askers.append(asker)
                tasks.start_soon(ask, asker)
                model.ask(number)
            elif operation in {"land", "fail"} and number in model.reading:
                if operation == "fail":
                    reader.errors[URL, 0, number] = ConnectionFailed("gone", url=URL)
                reader.under_way[URL, 0, number].set()
                model.end(number, claims=waiting_for(number) if operation == "land" else 0)
            elif operation in {"cancel", "release"} and askers:
                asker = askers[number % len(askers)]
                if asker.lease is not None:
                    model.release(asker.size)
                    asker.letting_go.set() if operation == "release" else asker.scope.cancel()
                elif operation == "cancel":
                    if waiting_for(asker.size) == 1:
                        model.end(asker.size, claims=0)
                    asker.scope.cancel()
            await settle()
            statistics = cache.statistics()
            assert {key[2] for key in reader.under_way} == set(model.reading)
            assert len(reader.log) == model.requests
            assert statistics.waiting == len(model.queue)
            leased = [size for size in model.leases if size <= MODEL_BYTES]
            assert statistics.leased_bytes == sum(leased)
            assert statistics.used_bytes == sum(leased) + sum(model.idle)
            assert statistics.used_bytes + statistics.reserved_bytes <= MODEL_BYTES
            assert statistics.entries == len(leased) + len(model.idle)
        tasks.cancel_scope.cancel()
    assert reader.under_way == {}
    assert (cache.statistics().used_bytes, cache.statistics().reserved_bytes) == (0, 0)

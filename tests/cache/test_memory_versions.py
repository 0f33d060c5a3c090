"""Which version of an object a ByteCache serves, and under which name it knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.cache import ByteCache
from asyncfetch.config import FetchConfig
from asyncfetch.errors import ObjectChanged, RangeNotSatisfiable
from asyncfetch.fetch import Fetcher
from asyncfetch.ranges import ByteRange, ObjectInfo
from asyncfetch.testing import RangeServer
from tests.cache.conftest import PinningReader
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from asyncfetch.fetch.reader import WritableBuffer

URL = "https://data.example.org/a"
SIZE = 100


class VersionedObjects(PinningReader):
    """A VersionedReader whose objects hold the number of their version, a hundred times."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.versions: dict[str, int] = {}
        self.log: list[tuple[str, int, int]] = []
        self.limiter: anyio.Event | None = None

    def info(self, url: str) -> ObjectInfo:
        return ObjectInfo(url, SIZE, f'"{self.versions.get(url.partition("?")[0], 0)}"')

    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo:
        self.log.append((url, start, stop))
        info = self.info(url)
        known = version or self.known(url)
        buffer[:] = bytes([self.versions.get(url.partition("?")[0], 0)]) * (stop - start)
        await (self.limiter.wait() if self.limiter is not None else anyio.lowlevel.checkpoint())
        return self.pin(info, known)


async def test_change_met_by_another_user_drops_the_held_bytes() -> None:
    reader = VersionedObjects()
    async with ByteCache(reader, max_bytes=1000) as cache:
        assert set(await cache.fetch(URL, 0, 10)) == {0}
        reader.versions[URL] = 1
        assert set(await cache.fetch(URL, 0, 10)) == {0}  # nobody has noticed
        with pytest.raises(ObjectChanged):
            await reader.stat(URL)
        await reader.stat(URL)
        assert set(await cache.fetch(URL, 0, 10)) == {1}
        assert cache.statistics().entries == 1


@pytest.mark.parametrize("verb", ["stat", "fetch_head", "fetch_tail"])
async def test_a_change_that_another_verb_met_drops_what_is_held(verb: str) -> None:
    reader = VersionedObjects()
    async with ByteCache(reader, max_bytes=1000) as cache:
        await cache.fetch(URL, 0, 10)
        reader.versions[URL] = 1
        with pytest.raises(ObjectChanged):
            await (cache.stat(URL) if verb == "stat" else getattr(cache, verb)(URL, 10))
        assert set(await cache.fetch(URL, 0, 10)) == {1}


async def test_range_beyond_the_known_end_notices_a_grown_object() -> None:
    objects = {"a.bin": bytes(SIZE)}
    async with (
        RangeServer(objects, tls=False) as server,
        Fetcher(FetchConfig(trust_env=False)) as fetcher,
        ByteCache(fetcher, max_bytes=1000) as cache,
    ):
        url = f"{server.url}/a.bin"
        for start in range(0, SIZE, 10):
            await cache.fetch(url, start, start + 10)
        async with cache.lease(url, 0, 10):  # for the room of all nobody waits either
            with pytest.raises(RangeNotSatisfiable, match="the object has 100 bytes") as caught:
                await cache.fetch(url, 0, 1000)
        assert (caught.value.size, caught.value.stop, caught.value.attempts) == (SIZE, 1000, 1)
        statistics = cache.statistics()
        assert (statistics.entries, statistics.evictions, statistics.reserved_bytes) == (10, 0, 0)
        objects["a.bin"] = bytes(1000)
        with pytest.raises(ObjectChanged):
            await cache.fetch(url, 0, 1000)
        assert len(await cache.fetch(url, 0, 1000)) == 1000
        assert cache.statistics().entries == 1


async def test_forgotten_change_is_noticed_when_the_new_version_lands() -> None:
    reader = VersionedObjects()
    async with ByteCache(reader, max_bytes=1000) as cache:
        await cache.fetch(URL, 0, 10)
        reader.pinned.clear()
        reader.versions[URL] = 1
        assert set(await cache.fetch(URL, 10, 20)) == {1}
        reader.pinned.clear()
        assert set(await cache.fetch(URL, 0, 10)) == {1}


@pytest.mark.parametrize("bypassing", [False, True])
async def test_late_older_version_is_handed_out_and_not_kept(*, bypassing: bool) -> None:
    reader = VersionedObjects()
    reader.limiter = anyio.Event()
    late: list[memoryview] = []

    async def read_late() -> None:
        late.append(await cache.fetch(URL, 0, 10))

    async with ByteCache(reader, max_bytes=5 if bypassing else 1000) as cache, anyio.create_task_group() as group:
        group.start_soon(read_late)
        await all_others_wait()
        limiter, reader.limiter = reader.limiter, None
        await cache.fetch(URL, 20, 23)
        reader.pinned.clear()
        reader.versions[URL] = 1
        assert set(await cache.fetch(URL, 30, 33)) == {1}
        limiter.set()
        await all_others_wait()
        assert set(late[0]) == {0}
        assert set(await cache.fetch(URL, 30, 33)) == {1}
        assert cache.try_lease(URL, 0, 10) is None


async def test_equal_ranges_under_two_signatures_are_one_flight() -> None:
    reader = VersionedObjects()
    one, two = f"{URL}?X-Amz-Signature=1", f"{URL}?X-Amz-Signature=2"
    async with ByteCache(reader, max_bytes=1000) as cache:
        async with anyio.create_task_group() as group:
            group.start_soon(cache.fetch, one, 0, 10)
            group.start_soon(cache.fetch, two, 0, 10)
        async with cache.lease(two, 0, 10) as lease:
            assert lease.key.range == ByteRange(URL, 0, 10)
        statistics = cache.statistics()
    assert reader.log == [(one, 0, 10)]
    assert (statistics.misses, statistics.joins, statistics.hits, statistics.entries) == (1, 1, 1, 1)


async def test_callers_that_had_to_wait_for_room_are_counted() -> None:
    async with ByteCache(VersionedObjects(), max_bytes=10) as cache:
        async with cache.lease(URL, 0, 10):
            for _ in range(2):
                with anyio.move_on_after(0):
                    await cache.fetch(URL, 10, 20)
            assert (cache.statistics().waiting, cache.statistics().waited) == (0, 2)
            async with anyio.create_task_group() as group:
                group.start_soon(cache.fetch, URL, 10, 20)
                await all_others_wait()
                assert (cache.statistics().waiting, cache.statistics().waited) == (1, 3)
                group.cancel_scope.cancel()
        await cache.fetch(URL, 10, 20)
        assert (cache.statistics().waiting, cache.statistics().waited) == (0, 3)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "read", "replace", "forget", "notice"]),
        st.sampled_from([URL, "https://data.example.org/b"]),
        st.integers(0, 8),
        st.integers(1, 3),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(operations=OPERATIONS, max_bytes=st.sampled_from([2, 5, 100]))
async def test_no_version_is_served_after_a_newer_one(
    operations: list[tuple[str, str, int, int]], max_bytes: int
) -> None:
    """Once anybody has seen a version through this reader, none before it is served again.

    What others have seen is known as long as the reader remembers it; what was read here, for ever.
    """
    reader, seen = VersionedObjects(), dict.fromkeys([URL, "https://data.example.org/b"], 0)
    read = dict(seen)
    async with ByteCache(reader, max_bytes=max_bytes) as cache:
        for operation, url, start, size in operations:
            if operation == "replace":
                reader.versions[url] = reader.versions.get(url, 0) + 1
            elif operation == "forget":
                reader.pinned.clear()
                seen = dict(read)
            elif operation == "notice":
                try:
                    await reader.stat(url)
                except ObjectChanged:
                    await reader.stat(url)
                seen[url] = reader.versions.get(url, 0)
            else:
                try:
                    view = await cache.fetch(url, start, start + size)
                except ObjectChanged:
                    view = await cache.fetch(url, start, start + size)
                assert len(view) == size
                [version] = set(view)
                assert version >= seen[url]
                seen[url] = read[url] = version

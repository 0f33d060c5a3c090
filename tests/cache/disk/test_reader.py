"""DiskReader over a real fetcher and a real server: who is asked for what, and what comes from the disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.cache import ByteCache
from asyncfetch.cache.disk import DiskReader, DiskTier
from asyncfetch.cache.disk.subdirectories import Subdirectories
from asyncfetch.config import FetchConfig, RetryConfig
from asyncfetch.errors import (
    ClosedError,
    ConfigError,
    InvalidResponse,
    NotFound,
    ObjectChanged,
    RangeNotSatisfiable,
    WrongLoop,
)
from asyncfetch.fetch import Fetcher
from asyncfetch.ranges import ByteRange
from asyncfetch.testing import Fault, RangeServer, conformance
from tests.cache.disk.conftest import CONTENT, MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from asyncfetch.cache.disk.subdirectories import Holdings, Progress, Removal
    from asyncfetch.testing.conformance import Check, Store
    from tests.cache.disk.conftest import Tier

WHOLE = len(CONTENT)
CONFIG = FetchConfig(
    trust_env=False,
    min_part_bytes=8 * MIB,  # a busy machine's server is slow, and would be asked in parts
    retry=RetryConfig(attempts=2, initial_seconds=0),
)


class Site:
    """A server whose objects can be replaced and whose answers can be spoiled."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {"a.bin": CONTENT, "empty.bin": b""}
        self.fault: Fault | None = None
        self.server = RangeServer(self.objects, tls=False, fault=lambda _: self.fault)

    @property
    def url(self) -> str:
        return f"{self.server.url}/a.bin"

    def asked(self) -> list[tuple[int | None, int | None]]:
        """The half-open ranges asked for since the last time."""
        ranges = [(request.start, request.stop) for request in self.server.requests]
        self.server.reset()
        return ranges


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with site.server:
        yield site


@asynccontextmanager
async def job(tier: Tier, max_bytes: int = 64 * MIB) -> AsyncIterator[DiskReader]:
    """What a new process sees."""
    async with (
        Fetcher(CONFIG) as fetcher,
        DiskReader(fetcher, DiskTier(tier.directory, max_bytes, min_free_bytes=0)) as reader,
    ):
        yield reader


async def test_a_second_job_asks_for_the_version_and_nothing_else(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        assert await reader.fetch(site.url, 5, 3 * MIB) == CONTENT[5 : 3 * MIB]
        assert site.asked() == [(5, 3 * MIB)]
        assert await reader.fetch(site.url, 5, 3 * MIB) == CONTENT[5 : 3 * MIB]
        assert site.asked() == []
    async with job(tier) as reader:
        for _ in range(2):
            assert await reader.fetch(site.url, 5, 3 * MIB) == CONTENT[5 : 3 * MIB]
            assert await reader.fetch(site.url, 100, 200) == CONTENT[100:200]
        assert site.asked() == [(0, 1)]


async def test_arguments_are_those_of_the_fetcher(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.stat(site.url)  # whose size the tail is counted from
        _, tail = await reader.fetch_tail(site.url, cast("int", np.uint32(5)))
        assert tail == CONTENT[-5:]
        _, tail = await reader.fetch_tail(site.url, cast("int", np.uint32(2 * WHOLE)))
        assert tail == CONTENT
        buffer = bytearray(50)
        await reader.fetch_into(site.url, cast("int", np.uint8(250)), 300, buffer)
        assert buffer == CONTENT[250:300]
        for number in (-1, 1.5, "1"):
            with pytest.raises(ConfigError, match="max_bytes"):
                await reader.fetch_tail(site.url, cast("int", number))
        with pytest.raises(ConfigError, match="stop"):
            await reader.fetch_into(site.url, 0, cast("int", None), buffer)
        with pytest.raises(ConfigError, match="buffer"):
            await reader.fetch_into(site.url, 0, 5, cast("Any", "12345"))
        async with ByteCache(reader, max_bytes=MIB) as cache:
            for ranges in (5, [("/x", 0, 1)]):
                for one in (reader, cache):
                    with pytest.raises(ConfigError, match="ByteRange"):
                        await one.fetch_many(cast("Any", ranges))
                    with pytest.raises(ConfigError, match="ByteRange"):
                        one.fetch_stream(cast("Any", ranges))


async def test_missing_bytes_are_asked_for_in_one_range_each(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.fetch(site.url, MIB, 2 * MIB)
        await reader.fetch(site.url, 4 * MIB, 5 * MIB)
        site.asked()
        assert await reader.fetch(site.url, 100, WHOLE - 1) == CONTENT[100 : WHOLE - 1]
        assert sorted(site.asked()) == [(100, MIB), (2 * MIB, 4 * MIB), (5 * MIB, WHOLE - 1)]


@pytest.mark.parametrize("verb", ["fetch", "fetch_into", "fetch_head", "fetch_tail", "fetch_many", "open", "last"])
async def test_every_verb_is_right_with_and_without_the_disk(tier: Tier, site: Site, verb: str) -> None:
    for _ in range(2):
        async with job(tier) as reader:
            for _ in range(2):
                if verb == "fetch":
                    assert await reader.fetch(site.url, 3, 1000) == CONTENT[3:1000]
                elif verb == "fetch_into":
                    buffer = bytearray(2 * MIB)
                    await reader.fetch_into(site.url, 7, 7 + 2 * MIB, buffer)
                    assert buffer == CONTENT[7 : 7 + 2 * MIB]
                elif verb == "fetch_head":
                    info, view = await reader.fetch_head(site.url, 50)
                    assert (info.size, bytes(view)) == (WHOLE, CONTENT[:50])
                elif verb == "fetch_tail":
                    info, view = await reader.fetch_tail(site.url, 2 * WHOLE)
                    assert (info.size, bytes(view)) == (WHOLE, CONTENT)
                elif verb == "fetch_many":
                    ranges = [ByteRange(site.url, low, low + 10) for low in (3 * MIB, 5, 3 * MIB, 2 * MIB - 5)]
                    assert await reader.fetch_many(ranges) == [CONTENT[one.start : one.stop] for one in ranges]
                elif verb == "open":
                    assert await reader.fetch(site.url, WHOLE - 70) == CONTENT[-70:]
                else:
                    assert await reader.fetch(site.url, -MIB - 1) == CONTENT[-MIB - 1 :]
    bodies = [one for one in site.asked() if one != (0, 1)]
    assert len(bodies) == (3 if verb == "fetch_many" else 1)


async def test_empty_ranges_empty_objects_and_ranges_past_the_end(tier: Tier, site: Site) -> None:
    empty = f"{site.server.url}/empty.bin"
    for _ in range(2):
        async with job(tier) as reader:
            assert len(await reader.fetch(empty)) == 0
            assert len(await reader.fetch(site.url, 9, 9)) == 0
            assert len((await reader.fetch_head(site.url, 0))[1]) == len((await reader.fetch_tail(empty, 9))[1]) == 0
            await reader.fetch_into(site.url, 3, 3, bytearray())
            with pytest.raises(RangeNotSatisfiable) as caught:
                await reader.fetch(site.url, 5, WHOLE + 1)
            assert caught.value.size == WHOLE
            with pytest.raises(RangeNotSatisfiable):
                await reader.fetch(site.url, WHOLE + 1)
            with pytest.raises(NotFound):
                await reader.fetch(f"{site.server.url}/nothing.bin", 0, 5)
            with pytest.raises(ConfigError):
                await reader.fetch_into(site.url, 0, 5, bytearray(6))
            with pytest.raises(ConfigError):
                await reader.fetch(site.url, 5, 4)
            await reader.fetch(site.url, 0, 100)


# Versions.


async def test_replaced_object_is_never_served_from_its_old_bytes(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.fetch(site.url, 0, MIB)
        site.objects["a.bin"] = CONTENT[::-1]
        with pytest.raises(ObjectChanged):
            await reader.fetch(site.url, MIB, 2 * MIB)
        assert await reader.fetch(site.url, 0, MIB) == CONTENT[::-1][:MIB]
    async with job(tier) as reader:
        site.objects["a.bin"] = CONTENT
        assert await reader.fetch(site.url, 0, MIB) == CONTENT[:MIB]


async def test_half_an_old_and_half_a_new_version_is_an_error(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.fetch(site.url, 0, MIB)
    async with job(tier) as reader:
        await reader.stat(site.url)
        site.objects["a.bin"] = CONTENT[::-1]
        with pytest.raises(ObjectChanged):
            await reader.fetch(site.url, 0, 2 * MIB)
        assert await reader.fetch(site.url, 0, 2 * MIB) == CONTENT[::-1][: 2 * MIB]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
async def test_object_without_a_strong_etag_is_not_kept(tier: Tier, site: Site, etag: str | None) -> None:
    site.fault = Fault(answer_headers={"ETag": etag})
    for _ in range(2):
        async with job(tier) as reader:
            for _ in range(2):
                assert await reader.fetch(site.url, 0, 100) == CONTENT[:100]
                assert await reader.fetch(site.url, -100) == CONTENT[-100:]
                await reader.fetch_head(site.url, 10)
                await reader.fetch_tail(site.url, 10)
    assert tier.files() == []


async def test_bytes_without_an_etag_are_not_kept_under_a_known_one(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.stat(site.url)
        site.fault = Fault(answer_headers={"ETag": None}, corrupt_at=50)
        with pytest.raises(InvalidResponse, match="ETag"):
            await reader.fetch(site.url, 0, 100)
        site.fault = None
        assert await reader.fetch(site.url, 0, 100) == CONTENT[:100]


async def test_disk_serves_no_object_that_the_caller_may_not_read(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.fetch(site.url, 0, 100)
    site.fault = Fault.status(403)
    async with job(tier) as reader:
        with pytest.raises(PermissionError):
            await reader.fetch(site.url, 0, 100)


async def test_two_signatures_of_one_object_share_its_bytes(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.fetch(f"{site.url}?X-Amz-Signature=1", 0, 100)
        site.asked()
        assert await reader.fetch(f"{site.url}?X-Amz-Signature=2", 0, 100) == CONTENT[:100]
        assert site.asked() == [(0, 1)]


async def test_local_files_and_what_fsspec_reads_go_past_it(tier: Tier, tmp_path: Path) -> None:
    path = tmp_path / "local.bin"
    path.write_bytes(CONTENT[:1000])
    async with job(tier) as reader:
        for url in (str(path), f"file://{path}", f"local://{path}"):
            assert await reader.fetch(url, 0, 100) == CONTENT[:100]
            assert await reader.fetch(url) == CONTENT[:1000]
            assert (await reader.fetch_tail(url, 10))[1] == CONTENT[990:1000]
    assert tier.files() == []


# Damage, deletion, a full disk.


async def test_damaged_and_deleted_files_are_fetched_and_kept_again(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.fetch(site.url, 0, 3 * MIB)
        damaged, deleted, _ = tier.files()
        with damaged.open("r+b") as file:
            file.seek(5000)
            file.write(b"\0\0\0")
        deleted.unlink()
        for _ in range(2):
            assert await reader.fetch(site.url, 0, 3 * MIB) == CONTENT[: 3 * MIB]
        statistics = reader.disk_statistics()
        assert statistics is not None
        assert statistics.damaged == 1
        assert site.asked() == [(0, 3 * MIB), (0, 2 * MIB)]
        assert len(tier.files()) == 3


async def test_a_full_disk_costs_nobody_any_bytes(tier: Tier, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwritev", full)
    async with job(tier) as reader:
        for _ in range(2):
            assert await reader.fetch(site.url, 0, 2 * MIB) == CONTENT[: 2 * MIB]
        statistics = reader.disk_statistics()
        assert statistics is not None
        assert (statistics.failures, statistics.written) == (1, 0)
    assert len(site.asked()) == 2


async def test_reads_do_not_wait_for_evictions(tier: Tier, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, goes_on, deleted = threading.Event(), threading.Event(), threading.Event()
    look, delete = Subdirectories.look, Subdirectories.delete_oldest

    def look_slowly(subdirectories: Subdirectories, progress: Progress) -> Holdings:
        looks.set()
        assert goes_on.wait(10)
        return look(subdirectories, progress)

    def tell_deleted(subdirectories: Subdirectories, found: Holdings, excess_bytes: int, progress: Progress) -> Removal:
        try:
            return delete(subdirectories, found, excess_bytes, progress)
        finally:
            deleted.set()

    async with job(tier, 3 * (MIB + 4096)) as reader:
        await reader.fetch(site.url, 0, 3 * MIB)
        monkeypatch.setattr(Subdirectories, "look", look_slowly)
        monkeypatch.setattr(Subdirectories, "delete_oldest", tell_deleted)
        with anyio.fail_after(5):
            assert await reader.fetch(site.url, 3 * MIB, 4 * MIB) == CONTENT[3 * MIB : 4 * MIB]
            assert await anyio.to_thread.run_sync(looks.wait, 5)
            assert await reader.fetch(site.url, 4 * MIB, 5 * MIB) == CONTENT[4 * MIB : 5 * MIB]
        assert len(tier.files()) == 3
        goes_on.set()
        assert await anyio.to_thread.run_sync(deleted.wait, 5)
        assert len(tier.files()) == 2


async def test_leaving_it_ends_the_making_of_room(tier: Tier, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, goes_on = threading.Event(), threading.Event()
    look, stop = Subdirectories.look, Subdirectories.stop

    def look_slowly(subdirectories: Subdirectories, progress: Progress) -> Holdings:
        looks.set()
        assert goes_on.wait(10)
        return look(subdirectories, progress)

    def stop_and_go_on(subdirectories: Subdirectories) -> None:
        stop(subdirectories)
        goes_on.set()

    monkeypatch.setattr(Subdirectories, "look", look_slowly)
    monkeypatch.setattr(Subdirectories, "stop", stop_and_go_on)
    goes_on.set()
    async with job(tier, 3 * (MIB + 4096)) as reader:
        goes_on.clear()
        looks.clear()
        await reader.fetch(site.url, 0, 4 * MIB)
        assert await anyio.to_thread.run_sync(looks.wait, 5)
    assert len(tier.files()) == 3  # nothing was deleted any more
    survivor = await anyio.to_thread.run_sync(tier.open)
    assert await anyio.to_thread.run_sync(survivor.folder.used_bytes) == tier.on_disk_bytes()


# Many at once.


async def test_thousand_readers_ask_for_a_version_on_disk_once(tier: Tier, site: Site) -> None:
    async with job(tier) as reader:
        await reader.fetch(site.url, 0, 1000)
    site.asked()

    async def read(low: int) -> None:
        assert await reader.fetch(site.url, low, low + 1) == CONTENT[low : low + 1]

    async with job(tier) as reader, anyio.create_task_group() as group:
        for low in range(1000):
            group.start_soon(read, low)
    assert site.asked() == [(0, 1)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_read_after_any_cancellation_is_right(tier: Tier, site: Site, data: st.DataObject) -> None:
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, WHOLE - 1), st.integers(1, 2 * MIB)), min_size=1, max_size=4), label="spans"
    )
    turns = data.draw(st.integers(0, 40), label="turns of the loop before the cancellation")
    max_bytes = data.draw(st.sampled_from([2 * MIB, 64 * MIB]))
    shutil.rmtree(tier.directory, ignore_errors=True)
    async with job(tier, max_bytes) as reader:
        buffers = [bytearray(min(low + size, WHOLE) - low) for low, size in spans]
        async with anyio.create_task_group() as group:
            for (low, _), buffer in zip(spans, buffers, strict=True):
                group.start_soon(reader.fetch_into, site.url, low, low + len(buffer), buffer)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))  # nobody writes to it any more
        for (low, _), buffer in zip(spans, buffers, strict=True):
            assert await reader.fetch(site.url, low, low + len(buffer)) == CONTENT[low : low + len(buffer)]
            assert not any(buffer)
    assert tier.unfinished() == []
    assert tier.on_disk_bytes() <= max_bytes


async def test_cancelled_task_waits_for_the_thread_with_its_buffer(
    tier: Tier, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads, goes_on = os.preadv, threading.Event(), threading.Event()

    def read_slowly(*arguments: Any) -> int:  # noqa: ANN401
        reads.set()
        assert goes_on.wait(10)
        return read(*arguments)

    async with job(tier) as reader:
        await reader.fetch(site.url, 0, 100)
        monkeypatch.setattr(os, "preadv", read_slowly)
        reading = asyncio.ensure_future(reader.fetch_into(site.url, 0, 100, bytearray(100)))
        assert await anyio.to_thread.run_sync(reads.wait, 5)
        reading.cancel()  # which goes through anyio's shield
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert not reading.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_an_opening_that_is_cancelled_leaves_no_file_open(tier: Tier) -> None:
    async with Fetcher(CONFIG) as fetcher:
        async with DiskReader(fetcher, DiskTier(tier.directory, MIB, min_free_bytes=0)):
            pass
        before = len(os.listdir("/proc/self/fd"))

        async def open_and_close() -> None:
            async with DiskReader(fetcher, DiskTier(tier.directory, MIB, min_free_bytes=0)):
                pass

        for turn in range(20):
            opening = asyncio.ensure_future(open_and_close())
            await anyio.sleep(turn / 20_000)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await opening
        assert len(os.listdir("/proc/self/fd")) == before


# Its place in the house.


class Wrapped:
    """A Store of the conformance suite whose reader keeps on disk."""

    can_list = False
    can_replace = True

    def __init__(self, site: Site, fetcher: Any) -> None:  # noqa: ANN401
        self.fetcher = fetcher
        self._site = site

    async def put(self, name: str, content: bytes) -> str:
        self._site.objects[name] = content
        return f"{self._site.server.url}/{quote(name)}"


@pytest.mark.parametrize("kind", ["DiskReader", "ByteCache"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conformance(tier: Tier, site: Site, check: Check, kind: str) -> None:
    disk = DiskTier(tier.directory, 64 * MIB, min_free_bytes=0)
    async with Fetcher(CONFIG) as fetcher:
        wrapper = DiskReader(fetcher, disk) if kind == "DiskReader" else ByteCache(fetcher, max_bytes=MIB, disk=disk)
        async with wrapper as reader:
            vars(reader)["statistics"] = fetcher.statistics  # which tells what is in flight
            await check(cast("Store", Wrapped(site, reader)))


async def test_byte_cache_reads_evicted_bytes_from_disk(tier: Tier, site: Site) -> None:
    disk = DiskTier(tier.directory, 64 * MIB, min_free_bytes=0)
    async with Fetcher(CONFIG) as fetcher, ByteCache(fetcher, max_bytes=MIB, disk=disk) as cache:
        for _ in range(3):
            for low in range(0, 4 * MIB, MIB):
                async with cache.lease(site.url, low + 100, low + MIB, header=bytes(100)) as lease:
                    assert lease.view == CONTENT[low + 100 : low + MIB]
        statistics = cache.statistics()
        assert statistics.disk is not None
        assert (statistics.hits, statistics.misses, statistics.disk.hits) == (0, 12, 8)
    assert len(site.asked()) == 4


async def test_disk_reader_refuses_wrong_use(tier: Tier, site: Site) -> None:
    async with Fetcher(CONFIG) as fetcher:
        disk = DiskTier(tier.directory, MIB, min_free_bytes=0)
        with pytest.raises(ConfigError, match="which version its bytes are of"):
            DiskReader(cast("Any", np), disk)
        reader = DiskReader(fetcher, disk)
        with pytest.raises(ClosedError, match="not entered"):
            await reader.fetch(site.url, 0, 5)
        async with reader:
            with pytest.raises(ClosedError, match="only once"):
                await reader.__aenter__()

            def elsewhere() -> None:
                with pytest.raises(WrongLoop):
                    anyio.run(reader.fetch, site.url, 0, 5)

            await anyio.to_thread.run_sync(elsewhere)
        with pytest.raises(ClosedError, match="closed"):
            await reader.fetch(site.url, 0, 5)

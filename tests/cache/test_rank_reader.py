"""Readers of several loader workers that read as one, here on one loop: what crosses between them is the same."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from asyncfetch.cache.rank_reader import RankReader
from asyncfetch.cache.regions import MappedRegions
from asyncfetch.errors import NotFound, ObjectChanged, RangeNotSatisfiable
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.ranges import ByteRange
from asyncfetch.testing import RangeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from asyncfetch.cache.memory import Lease

DATA = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "a").write_bytes(DATA)
    with RangeServer(tmp_path, tls=False) as server:
        yield server


class Slow(Fetcher):
    """A fetcher that says when it is asked for a range, and asks when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_ask = anyio.Event(), anyio.Event()
        self.cancelled = 0

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        self.asked.set()
        try:
            await self.may_ask.wait()
        except BaseException:
            self.cancelled += 1
            raise
        return await super().fetch(url, start, stop)


class Readers:
    """Of one rank."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)

    def one(self, opener: Callable[[], Fetcher] = Fetcher, *, clips_bytes: int = 1 << 20) -> RankReader:
        return RankReader(self._name, opener, clips_bytes=clips_bytes, small_bytes=1 << 20, workers=2)


@pytest.fixture
def readers() -> Readers:
    return Readers()


async def test_bytes_are_asked_for_once_and_lie_in_memory_once(server: RangeServer, readers: Readers) -> None:
    url = f"{server.url}/a"
    async with readers.one() as first, readers.one() as second:
        for reader in (first, second):
            info, head = await reader.fetch_head(url, 10)
            assert (info.size, bytes(head)) == (len(DATA), DATA[:10])
            _, tail = await reader.fetch_tail(url, 10)
            assert bytes(tail) == DATA[-10:]
            assert bytes(await reader.fetch(url, 5, 50)) == DATA[5:50]
            views = await reader.fetch_many([ByteRange(url, 100, 120), ByteRange(url, 60, 70)])
            assert [bytes(view) for view in views] == [DATA[100:120], DATA[60:70]]
            into = bytearray(20)
            await reader.fetch_into(url, 5, 25, into)
            assert into == DATA[5:25]
            assert reader.known(url) == info
        asked = len(server.requests)
        lent = [await reader.lease(url, 1000, 9000, header=b"a header of each") for reader in (first, second)]
        assert len(server.requests) == asked + 1
        one, other = lent
        assert one is not None
        assert other is not None
        assert bytes(one.buffer) == bytes(other.buffer) == b"a header of each" + DATA[1000:9000]
        empty = await first.lease(url, 7, 7)
        assert empty is not None
        assert bytes(empty.view) == b""


async def test_concurrent_callers_share_a_request(server: RangeServer, readers: Readers) -> None:
    lent: list[Lease | None] = []

    async def ask(reader: RankReader) -> None:
        lent.append(await reader.lease(f"{server.url}/a", 1000, 9000))

    async with readers.one() as first, readers.one() as second, anyio.create_task_group() as group:
        for reader in (first, second, first):
            group.start_soon(ask, reader)
    assert [bytes(each.view) for each in lent if each is not None] == 3 * [DATA[1000:9000]]
    assert len(server.requests) == 1


FORKS = """if True:
    import asyncio, os, sys
    from asyncfetch.cache.rank_reader import RankReader
    from asyncfetch.fetch import Fetcher

    async def main(name, url):
        async with RankReader(name, Fetcher, clips_bytes=1 << 20, small_bytes=1 << 20, workers=2) as reader:
            await reader.stat(url)
            if not os.fork():
                sys.stdin.read()
                os._exit(0)
            print("forked", flush=True)
            os._exit(0)

    asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_child_that_outlives_the_one_who_reads_is_no_reader(server: RangeServer) -> None:
    """As a transform may start one by fork."""
    name, url = secrets.token_hex(8), f"{server.url}/a"
    command = [sys.executable, "-W", "ignore", "-c", FORKS, name, url]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdout is not None
        assert (await process.stdout.receive()).strip() == b"forked"
        await process.wait()
        with anyio.fail_after(10):
            async with RankReader(name, Fetcher, clips_bytes=1 << 20, small_bytes=1 << 20, workers=2) as reader:
                assert (await reader.stat(url)).size == len(DATA)


LEASES = """if True:
    import asyncio, sys
    from asyncfetch.cache.rank_reader import RankReader
    from asyncfetch.fetch import Fetcher

    async def main(name, url):
        async with RankReader(name, Fetcher, clips_bytes=1, small_bytes=1, workers=2) as reader:
            lease = await reader.lease(url, 0, 10_000)
        print("left", flush=True)
        sys.stdin.read()
        print(bytes(lease.view[:1]))

    asyncio.run(main(*sys.argv[1:]))
"""


async def test_memory_of_a_worker_is_its_own_until_its_end(server: RangeServer) -> None:
    name, url = secrets.token_hex(8), f"{server.url}/a"
    command = [sys.executable, "-W", "ignore", "-c", LEASES, name, url]
    async with RankReader(name, Fetcher, clips_bytes=10_000, small_bytes=1 << 20, workers=2) as reader:
        await reader.stat(url)
        async with await anyio.open_process(command, stderr=None) as process:
            assert process.stdout is not None
            assert (await process.stdout.receive()).strip() == b"left"
            assert await reader.lease(url, 10_000, 15_000) is None
            process.kill()
            with anyio.fail_after(10), calling(Caller(urgent=False)):
                lease = await reader.lease(url, 10_000, 15_000)
        assert lease is not None
        assert bytes(lease.view) == DATA[10_000:15_000]


async def test_reader_that_ends_is_replaced_by_another(server: RangeServer, readers: Readers) -> None:
    url = f"{server.url}/a"
    slow = Slow()
    reads, may_end = anyio.Event(), anyio.Event()

    async def read_for_both() -> None:
        async with readers.one(lambda: slow) as first:
            mine = await first.lease(url, 0, 5000)
            assert mine is not None
            assert first.clips is not None
            reads.set()
            await may_end.wait()

    answers: list[bytes] = []
    async with anyio.create_task_group() as group, readers.one() as second:
        group.start_soon(read_for_both)
        await reads.wait()
        lent = await second.lease(url, 0, 5000)
        assert not _reads(second)
        assert lent is not None

        async def ask() -> None:
            answers.append(bytes(await second.fetch(url, 100_000, 100_100)))

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            await slow.asked.wait()
            may_end.set()
        assert answers == [DATA[100_000:100_100]]
        assert _reads(second)
        assert bytes(lent.view) == DATA[:5000]  # which its maker has left
        again = await second.lease(url, 200_000, 205_000)
        assert again is not None
        assert bytes(again.view) == DATA[200_000:205_000]


async def test_errors_come_whole_and_a_replaced_object_is_one_for_all(
    server: RangeServer, readers: Readers, tmp_path: Path
) -> None:
    url = f"{server.url}/a"
    async with readers.one() as first, readers.one() as second:
        for reader in (first, second):
            with pytest.raises(NotFound) as missing:
                await reader.fetch(f"{server.url}/b")
            assert (missing.value.url, missing.value.status) == (f"{server.url}/b", 404)
            with pytest.raises(RangeNotSatisfiable) as beyond:
                await reader.lease(url, 0, len(DATA) + 1)
            assert beyond.value.size == len(DATA)
            assert bytes(await reader.fetch(url, 0, 9)) == DATA[:9]
        (tmp_path / "a").write_bytes(DATA[::-1] + b"more")
        changed = 0
        for reader in (first, second):  # one meets it at the server, the other hears of another version
            with pytest.raises(ObjectChanged):
                await reader.fetch(url, 9, 99)
            changed += 1
            assert bytes(await reader.fetch(url, 9, 99)) == DATA[::-1][9:99]
        assert changed == 2


async def test_caller_that_gives_up_costs_the_others_nothing(server: RangeServer, readers: Readers) -> None:
    url = f"{server.url}/a"
    slow = Slow()
    async with readers.one(lambda: slow) as first, readers.one() as second:
        await first.stat(url)  # it reads for both
        answers: list[bytes] = []

        async def ask(reader: RankReader) -> None:
            answers.append(bytes(await reader.fetch(url, 0, 9)))

        async with anyio.create_task_group() as group, anyio.create_task_group() as given_up:
            given_up.start_soon(ask, second)
            await slow.asked.wait()
            group.start_soon(ask, first)
            given_up.cancel_scope.cancel()
            slow.may_ask.set()
        assert answers == [DATA[:9]]


async def test_room_is_for_who_is_waited_for_and_comes_back(server: RangeServer, readers: Readers) -> None:
    url = f"{server.url}/a"
    async with readers.one(clips_bytes=40_000) as first, readers.one() as second:

        async def ahead(reader: RankReader, start: int) -> Lease:
            with calling(Caller(urgent=False)):
                lease = await reader.lease(url, start, start + 10_000)
            assert lease is not None
            return lease

        held = [await ahead(first, 0), await ahead(first, 10_000)]  # its half
        with anyio.move_on_after(0.05) as waited:
            await ahead(first, 20_000)
        assert waited.cancelled_caught
        shared = await ahead(second, 0)  # is no more, and of the first one's half of it another may have the room
        assert bytes(shared.view) == DATA[:10_000]
        now = await second.lease(url, 20_000, 30_000)
        last = await second.lease(url, 30_000, 40_000)
        assert now is not None
        assert last is not None
        assert await second.lease(url, 50_000, 60_000) is None  # it pays for that by itself
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(ahead, first, 60_000)
                await anyio.wait_all_tasks_blocked()
                for lease in (held.pop(), now, last):
                    lease.release()
                del lease, now, last
        assert first.clips is not None
        statistics = first.clips.statistics()
        assert statistics.used_bytes <= statistics.max_bytes == 40_000


async def test_memory_of_what_nobody_uses_goes_back_to_the_system(server: RangeServer, readers: Readers) -> None:
    url = f"{server.url}/a"
    async with readers.one(clips_bytes=100_000) as first, readers.one() as second:
        most = 0
        for start in range(0, 280_000, 20_000):
            for reader in (first, second):
                lease = await reader.lease(url, start, start + 20_000)
                assert lease is not None
                assert bytes(lease.view) == DATA[start : start + 20_000]
                lease.release()
                del lease
            most = max(most, _pages_bytes())
        assert 20_000 < most <= 120_000


def _reads(reader: RankReader) -> bool:
    return reader.clips is not None


def _pages_bytes() -> int:
    """Memory of the files that clips lie in."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "asyncfetch-clips" in os.readlink(f"/proc/self/fd/{name}"):
                status = os.stat(f"/proc/self/fd/{name}")
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


async def test_readers_that_cannot_map_memory_read_for_themselves(
    server: RangeServer, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a sandbox hides what lies below /proc of other processes."""

    def refuse(*_: object) -> memoryview:
        raise PermissionError

    monkeypatch.setattr(MappedRegions, "view", refuse)
    url = f"{server.url}/a"
    async with readers.one() as first, readers.one() as second:
        with anyio.fail_after(5):
            assert await first.lease(url, 0, 5000) is None
            assert await second.lease(url, 0, 5000) is None
            assert bytes(await second.fetch(url, 0, 5000)) == DATA[:5000]

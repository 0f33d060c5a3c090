"""Ranges that share a request, and ranges that take several: right bytes, memory of their own, errors that fit."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from asyncfetch.config import RetryConfig
from asyncfetch.errors import FetchTimeout, InvalidResponse, NotFound, ObjectChanged, RangeNotSatisfiable
from asyncfetch.fetch import Fetcher, engine
from asyncfetch.fetch.batch import RANGES_ON_THE_LOOP, plan_batch
from asyncfetch.fetch.buffers import SplitBuffer
from asyncfetch.fetch.range_reader import PIECES_A_TURN
from asyncfetch.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncfetch.config import FetchConfig
    from asyncfetch.ranges import Request
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = random.Random(0).randbytes(100_000)
PART = 1000


def asked(server: LyingServer) -> list[str]:
    return [request.headers["range"].removeprefix("bytes=") for request in server.requests]


# --- near ranges


async def test_near_ranges_come_by_one_request(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    ranges = [ByteRange(url, start, start + 50) for start in (300, 100, 120, 300)]
    assert await fetcher.fetch_many(ranges) == [CONTENT[one.start : one.stop] for one in ranges]
    assert asked(server) == ["100-349"]


async def test_random_ranges_are_right_however_they_are_joined(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    urls = [server.put(f"/{name}", CONTENT[::-1] if name == "y" else CONTENT) for name in "xy"]
    rng = random.Random(1)
    for _ in range(10):
        sizes = rng.choices([0, 1, 500, 5_000], k=60)
        starts = [rng.randrange(len(CONTENT) - 5_000) for _ in sizes]
        ranges = [ByteRange(rng.choice(urls), at, at + size) for at, size in zip(starts, sizes, strict=True)]
        ranges += [ByteRange(urls[0], -7, None), ByteRange(urls[1], 99_000, None)]
        async with fetcher_with(
            max_requests_per_host=4,
            max_span_bytes=rng.choice([0, 3_000, 1 << 20]),
            part_bytes=rng.choice([900, 1 << 20]),
        ) as fetcher:
            views = await fetcher.fetch_many(ranges)
            async with fetcher.fetch_stream(ranges) as stream:
                streamed = {index: bytes(view) async for index, view in stream}
        expected = [server.objects[one.url[-2:]][one.start : one.stop] for one in ranges]
        assert [bytes(view) for view in views] == expected
        assert streamed == dict(enumerate(expected))


async def test_a_joined_range_keeps_none_of_its_neighbours(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    """The block that both came in goes back to the pool, and is used again."""
    content = bytes(500_000)
    url = server.put("/x", content)
    async with fetcher_with(max_requests_per_host=1) as fetcher:
        kept, _ = await fetcher.fetch_many([ByteRange(url, 0, 10), ByteRange(url, 65_000, 125_000)])
        del _
        gc.collect()
        assert fetcher.statistics().idle_buffer_bytes >= 125_000
        assert kept.readonly


async def test_range_beyond_the_end_fails_apart_from_its_neighbours(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    with pytest.raises(RangeNotSatisfiable, match=re.escape("[99950, 100001)")) as caught:
        await fetcher.fetch_many([ByteRange(url, 99_900, 99_950), ByteRange(url, 99_950, 100_001)])
    assert (caught.value.start, caught.value.stop, caught.value.size) == (99_950, 100_001, 100_000)


async def streamed(fetcher: Fetcher, ranges: list[ByteRange]) -> list[memoryview]:
    async with fetcher.fetch_stream(ranges) as stream:
        return [view async for _, view in stream]


@pytest.mark.parametrize(("limit", "peak"), [(16, 5), (2, 2)])
@pytest.mark.parametrize("verb", ["fetch_many", "fetch_stream"])
async def test_ranges_of_a_refused_request_are_asked_for_side_by_side(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, verb: str, limit: int, peak: int
) -> None:
    url = server.put("/x", CONTENT)
    all_here: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def limiter() -> asyncio.Future[None] | None:
        """Holds up all behind the shared request until as many have come as may."""
        if server.in_flight == peak and not all_here.done():
            all_here.set_result(None)
        return None if len(server.requests) == 1 else asyncio.shield(all_here)

    server.limiter = limiter
    ranges = [ByteRange(url, start, start + 100) for start in range(99_501, 100_000, 100)]
    async with fetcher_with(max_requests_per_host=limit, retry=RetryConfig(attempts=1)) as fetcher:
        read = fetcher.fetch_many if verb == "fetch_many" else partial(streamed, fetcher)
        with pytest.raises(RangeNotSatisfiable, match=re.escape("[99901, 100001)")):
            await read(ranges)
        assert server.peak_in_flight == peak
        assert (fetcher.statistics().in_flight, fetcher.statistics().waiting) == (0, 0)


async def test_error_of_a_joined_request_names_a_range_asked_for(
    hasty: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(silent="stall"))
    with pytest.raises(FetchTimeout, match=re.escape("bytes [300, 350)")):
        await hasty.fetch_many([ByteRange(url, 300, 350), ByteRange(url, 100, 150)])


# --- large ranges


async def read(fetcher: Fetcher, verb: str, url: str, start: int, stop: int) -> memoryview:
    match verb:
        case "fetch":
            return await fetcher.fetch(url, start, stop)
        case "fetch_many":
            return (await fetcher.fetch_many([ByteRange(url, start, stop)]))[0]
        case _:
            buffer = bytearray(stop - start)
            await fetcher.fetch_into(url, start, stop, buffer)
            return memoryview(buffer)


@pytest.mark.parametrize("verb", ["fetch", "fetch_into", "fetch_many"])
@pytest.mark.parametrize("stop", [10 + PART, 10 + PART + 1, 10 + 7 * PART + 1, len(CONTENT)])
async def test_a_large_range_comes_in_parts(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, verb: str, stop: int
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(part_bytes=PART) as fetcher:
        await fetcher.stat(url)
        server.requests.clear()
        assert await read(fetcher, verb, url, 10, stop) == CONTENT[10:stop]
    assert len(server.requests) == -(-(stop - 10) // PART)


@pytest.mark.parametrize("start", [10, -len(CONTENT) + 10])
async def test_a_range_without_a_stop_comes_by_one_request(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, start: int
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(part_bytes=PART) as fetcher:
        await fetcher.stat(url)
        server.requests.clear()
        assert await fetcher.fetch(url, start) == CONTENT[10:]
    assert len(server.requests) == 1


async def test_parts_are_asked_for_side_by_side_and_within_the_limit(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(part_bytes=PART, max_requests_per_host=3) as fetcher:
        await fetcher.stat(url)
        all_are_there = asyncio.get_running_loop().create_future()

        def wait_for_three() -> asyncio.Future[None]:
            if server.in_flight == 3 and not all_are_there.done():
                all_are_there.set_result(None)
            return all_are_there

        server.limiter = wait_for_three
        await fetcher.fetch(url, 0, 20 * PART)
    assert server.peak_in_flight == 3


async def test_a_local_file_comes_in_parts_too(fetcher_with: Callable[..., Fetcher], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(CONTENT)
    async with fetcher_with(part_bytes=PART) as fetcher:
        assert await fetcher.fetch(str(tmp_path / "x"), 5, 50_000) == CONTENT[5:50_000]
        assert fetcher.statistics().requests > 50


async def test_parts_of_two_versions_are_never_put_together(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    """Not even by a server that ignores If-Match, where another call has made the engine forget the version."""
    url = server.put("/x", CONTENT)
    async with fetcher_with(part_bytes=PART, max_requests_per_host=1) as fetcher:
        await fetcher.stat(url)

        def replace_midway(request: object) -> StepType | None:
            if len(server.requests) == 6:
                server.put("/x", CONTENT[::-1])
                fetcher._objects.forget(url)
                server.etags["/x"], new = server.etags["/x"], server.etags["/x"]
                return step(headers={"ETag": new})
            return None

        server.every = replace_midway
        with pytest.raises(ObjectChanged):
            await fetcher.fetch(url, 0, 20 * PART)
        server.every = lambda _: None
        assert await fetcher.fetch(url, 0, 20 * PART) == CONTENT[::-1][: 20 * PART]


async def test_a_part_without_the_tag_of_the_others_is_refused(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(part_bytes=PART) as fetcher:
        await fetcher.stat(url)
        server.every = lambda _: step(headers={"ETag": None})
        with pytest.raises(InvalidResponse, match=r"without the ETag"):
            await fetcher.fetch(url, 0, 3 * PART)


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
async def test_an_object_without_a_strong_version_comes_whole(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, etag: str | None
) -> None:
    url = server.put("/x", CONTENT, etag)
    async with fetcher_with(part_bytes=PART) as fetcher:
        assert await fetcher.fetch(url, 0, 50_000) == CONTENT[:50_000]
    assert asked(server) == ["0-0", "0-49999"]


async def test_the_parts_of_a_range_beyond_the_end_are_not_asked_for(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(part_bytes=PART) as fetcher:
        with pytest.raises(RangeNotSatisfiable, match=r"bytes \[0, 1152921504606846976\)"):
            await fetcher.fetch(url, 0, 1 << 60)
    assert len(server.requests) == 2


@pytest.mark.parametrize("known", [False, True])
async def test_an_error_of_a_part_names_the_whole_range(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, known: bool
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(part_bytes=PART) as fetcher:
        if known:
            await fetcher.stat(url)
        server.objects.clear()
        with pytest.raises(NotFound, match=r"bytes \[10, 5010\)"):
            await fetcher.fetch(url, 10, 10 + 5 * PART)


async def test_cancelled_read_in_parts_writes_nothing_afterwards(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(part_bytes=PART) as fetcher:
        await fetcher.stat(url)
        server.every = lambda request: None if request.headers["range"] == "bytes=0-999" else step(silent="stall")
        buffer = bytearray(5 * PART)
        async with anyio.create_task_group() as group:
            group.start_soon(fetcher.fetch_into, url, 0, 5 * PART, buffer)
            while buffer[:PART] != CONTENT[:PART]:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert fetcher.statistics().in_flight == 0
        assert buffer == CONTENT[:PART] + bytes(4 * PART)
        buffer[:] = bytes(5 * PART)
        server.every = lambda _: None
        assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]
        assert buffer == bytes(5 * PART)


@pytest.mark.parametrize("verb", ["fetch_many", "fetch_stream"])
async def test_many_ranges_are_planned_off_the_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str) -> None:
    content = random.Random(0).randbytes(2 * RANGES_ON_THE_LOOP)
    path = tmp_path / "x"
    path.write_bytes(content)
    threads: set[int] = set()

    def plan(ranges: Sequence[ByteRange], config: FetchConfig) -> list[Request]:
        threads.add(threading.get_ident())
        return plan_batch(ranges, config)

    monkeypatch.setattr(engine, "plan_batch", plan)
    ranges = [ByteRange(str(path), start, start + 2) for start in range(RANGES_ON_THE_LOOP + 1)]
    async with Fetcher() as fetcher:
        if verb == "fetch_many":
            views = dict(enumerate(await fetcher.fetch_many(ranges)))
        else:
            async with fetcher.fetch_stream(ranges) as stream:
                views = {index: view async for index, view in stream}
    assert all(views[index] == content[one.start : one.stop] for index, one in enumerate(ranges))
    assert threads
    assert threading.get_ident() not in threads


async def test_many_ranges_are_cut_out_of_a_request_in_many_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5_000))
    turns = 0
    cut: Counter[int] = Counter()
    piece = SplitBuffer.piece

    def count(self: SplitBuffer, one: ByteRange) -> memoryview:
        cut[turns] += 1
        return piece(self, one)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(SplitBuffer, "piece", count)
    async with Fetcher() as fetcher, anyio.create_task_group() as group:
        group.start_soon(turn)
        views = await fetcher.fetch_many([ByteRange(str(path), start, start + 1) for start in range(5_000)])
        group.cancel_scope.cancel()
    assert len(views) == cut.total() == 5_000
    assert max(cut.values()) <= PIECES_A_TURN

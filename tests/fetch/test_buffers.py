"""Long ranges of a joined request land in memory of their own at once; short ones are copied, and keep no more."""

from __future__ import annotations

import gc
import random
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.config import RetryConfig
from asyncfetch.errors import FetchError
from asyncfetch.fetch import buffers, connector
from asyncfetch.fetch.batch import plan_batch
from asyncfetch.fetch.buffers import ChainedBuffer, apart
from asyncfetch.fetch.range_reader import PartSizes
from asyncfetch.ranges import ByteRange, Request
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.testing import Fault, RangeServer
from tests.fetch.conftest import cancel_after, make_fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.fetch import Fetcher
    from asyncfetch.testing.faults import ServedRequest
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType
    from tests.fetch.odd_files import OddFileSystem

CONTENT = random.Random(3).randbytes(100_000)
LONG = 1000
MIXED = [(0, 3000), (3000, 3010), (3400, 3401), (3500, 9000), (9001, 11_000), (11_400, 11_500)]
"""Long and short ranges, with gaps and without."""
TAKEN = [3000, 500, 5500, 1, 1999, 500, *(10, 1, 100)]
"""Lengths of the memory for these: long ranges and what lies between, and the short ones, once more."""


@pytest.fixture(autouse=True)
def _long_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of some KiB have long ranges in them, and don't come with their heads."""
    monkeypatch.setattr(buffers, "LONG_BYTES", LONG)
    monkeypatch.setattr(connector, "SCRATCH_BYTES", 1024)


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    """See conftest: all of them."""
    way: str = request.param
    return way


def ranges_of(url: str, spans: Sequence[tuple[int, int]]) -> list[ByteRange]:
    return [ByteRange(url, *span) for span in spans]


def in_content(spans: Sequence[tuple[int, int]]) -> list[bytes]:
    return [CONTENT[start:stop] for start, stop in spans]


def asked(server: LyingServer) -> list[str]:
    return [request.headers["range"].removeprefix("bytes=") for request in server.requests]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.uint8]]:
    """All memory that is taken from pools from now on, and kept from being used again."""
    blocks: list[NDArray[np.uint8]] = []
    take = MemoryPool.take

    def take_and_tell(pool: MemoryPool, nbytes: int) -> NDArray[np.uint8]:
        blocks.append(take(pool, nbytes))
        return blocks[-1]

    monkeypatch.setattr(MemoryPool, "take", take_and_tell)
    return blocks


def keeps_only_itself(view: memoryview) -> bool:
    owner: Any = view.obj
    return view.readonly and owner.nbytes == len(view)


# --- what lands where

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=8, unique=True)


@given(SPANS)
def test_long_ranges_without_overlap_have_memory_of_their_own(spans: list[tuple[int, int]]) -> None:
    serves = tuple(ByteRange("x", LONG * start // 4, LONG * (start + length) // 4) for start, length in spans)
    ends = [one.stop for one in serves if one.stop is not None]
    found = apart(Request(ByteRange("x", min(one.start for one in serves), max(ends)), serves))
    places = [set(range(start, start + length)) for start, length in spans]
    expected = [
        one
        for one, place in zip(serves, places, strict=True)
        if len(serves) == 1 or (len(place) >= 4 and sum(bool(place & other) for other in places) == 1)
    ]
    assert found == sorted(expected, key=lambda one: one.start)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_places_are_written_to_as_one_view_is(lengths: list[int], data: st.DataObject) -> None:
    memory = memoryview(bytearray(sum(lengths)))
    cuts = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    places: ChainedBuffer = ChainedBuffer([memory[start:stop] for start, stop in pairwise(cuts)])
    view = memoryview(bytearray(len(memory)))
    assert len(places) == len(view)
    for byte in range(1, 4):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(view))] * 2)))
        inner = slice(*sorted(data.draw(st.tuples(*[st.integers(0, stop - start)] * 2))))
        content = bytes([byte]) * len(view[start:stop][inner])
        places[start:stop][inner] = view[start:stop][inner] = content
        assert len(places[start:stop]) == stop - start
        assert b"".join(places[start:].views) == view[start:]
        with pytest.raises(ValueError, match="place"):
            places[start:stop] = bytes(stop - start + 1)
    assert memory == view


# --- right bytes


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_random_ranges_are_right_whatever_breaks_on_their_way(data: st.DataObject) -> None:
    gaps, lengths = (
        st.integers(-1, 1) | st.integers(-2000, 1500),
        st.sampled_from([1, 300, 999, 1000, 1001, 2500, 7000]),
    )
    spans, stop = [], 0
    for gap, length in data.draw(st.lists(st.tuples(gaps, lengths), min_size=1, max_size=12)):
        start = max(0, stop + gap)
        stop = start + length
        spans.append((start, stop))
    verb = data.draw(st.sampled_from(["fetch", "fetch_many", "fetch_stream"]))
    breaks = data.draw(st.lists(st.none() | st.integers(0, 20_000), max_size=6))
    way = data.draw(st.sampled_from([Fault.truncate, Fault.reset]))
    fetcher = make_fetcher(
        max_requests_per_host=data.draw(st.sampled_from([1, 64])),
        part_bytes=data.draw(st.sampled_from([1500, 1 << 23])),
        direct_bodies=data.draw(st.booleans()),
        retry=RetryConfig(attempts=10),
    )

    def fault(_: ServedRequest) -> Fault | None:
        after_bytes = breaks.pop() if breaks else None
        return None if after_bytes is None else way(after_bytes)

    async def run() -> None:
        async with RangeServer({"x": CONTENT}, tls=False, fault=fault) as server, fetcher:
            url = f"{server.url}/x"
            if verb == "fetch":
                views = await gather(*(partial(fetcher.fetch, url, *span) for span in spans))
            elif verb == "fetch_many":
                views = await fetcher.fetch_many(ranges_of(url, spans))
            else:
                async with fetcher.fetch_stream(ranges_of(url, spans)) as stream:
                    arrived = {index: view async for index, view in stream}
                views = [arrived[index] for index in range(len(spans))]
            assert views == in_content(spans)
            assert all(map(keeps_only_itself, views))

    anyio.run(run)


async def test_a_long_range_is_copied_nowhere(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, taken: list[NDArray[np.uint8]]
) -> None:
    url = any_server.put("/x", CONTENT)
    for part_bytes in (1 << 23, 1700):
        async with fetcher_with(ca_file=ca_file, part_bytes=part_bytes) as fetcher:
            await fetcher.stat(url)
            any_server.requests.clear()
            taken.clear()
            views = await fetcher.fetch_many(ranges_of(url, MIXED))
        assert views == in_content(MIXED)
        assert all(map(keeps_only_itself, views))
        assert len(any_server.requests) == -(-11_500 // part_bytes)
        assert sorted(map(len, taken)) == sorted(TAKEN)


@pytest.mark.parametrize("where", ["file", "fsspec"])
async def test_local_files_and_fsspec_scatter_too(
    fetcher: Fetcher, tmp_path: Path, odd: type[OddFileSystem], taken: list[NDArray[np.uint8]], where: str
) -> None:
    url = "odd://x"
    if where == "file":
        url = str(tmp_path / "x")
        (tmp_path / "x").write_bytes(CONTENT)
    else:
        odd().pipe_file("/x", CONTENT)
    views = await fetcher.fetch_many(ranges_of(url, MIXED))
    assert views == in_content(MIXED)
    assert sorted(map(len, taken)) == sorted(TAKEN)


async def test_ranges_that_overlap_share_no_memory(
    fetcher: Fetcher, server: LyingServer, taken: list[NDArray[np.uint8]]
) -> None:
    url = server.put("/x", CONTENT)
    spans = [(0, 2000), (1999, 4000), (4000, 6000), (4000, 4100), (6000, 8000)]
    views = await fetcher.fetch_many(ranges_of(url, spans))
    assert views == in_content(spans)
    assert asked(server) == ["0-7999"]
    assert len({id(view.obj) for view in views}) == len(spans)
    assert sorted(map(len, taken)) == sorted([6000, 2000, 2000, 2001, 2000, 100])


async def test_equal_batches_of_one_turn_have_memory_of_their_own(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    batches = await gather(*(partial(fetcher.fetch_many, ranges_of(url, MIXED[at:])) for at in (0, 0, 2)))
    assert batches == [in_content(MIXED[at:]) for at in (0, 0, 2)]
    assert asked(server) == ["0-11499"]
    assert all(keeps_only_itself(view) for views in batches for view in views)


async def test_scattered_ranges_come_no_faster_than_allowed(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(max_bytes_per_second=2_000_000) as fetcher:
        assert await fetcher.fetch_many(ranges_of(url, MIXED)) == in_content(MIXED)


async def test_scattered_body_tells_the_speed_of_its_host(
    fetcher: Fetcher, server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(PartSizes, "came_from", lambda _self, _url, _host, length: lengths.append(length))
    url = server.put("/x", CONTENT)
    await fetcher.fetch_many(ranges_of(url, MIXED))
    start, stop = min(start for start, _ in MIXED), max(stop for _, stop in MIXED)
    assert lengths == [stop - start]


# --- what breaks


def lack_memory(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """After so many pieces of it there is none."""
    take, left_now = MemoryPool.take, iter(range(left))

    def take_or_not(pool: MemoryPool, nbytes: int) -> NDArray[np.uint8]:
        if next(left_now, None) is None:
            raise MemoryError
        return take(pool, nbytes)

    monkeypatch.setattr(MemoryPool, "take", take_or_not)


@pytest.mark.parametrize("part_bytes", [1 << 23, 1700])
async def test_ranges_that_memory_cannot_hold_are_refused(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    url = server.put("/x", CONTENT)
    refused = partial(pytest.raises, FetchError, match=r"no memory for its \d+ bytes: ask for fewer ranges at once")
    async with fetcher_with(part_bytes=part_bytes) as fetcher:
        await fetcher.stat(url)
        for left in range(len(TAKEN)):
            with monkeypatch.context() as patch, refused() as caught:
                lack_memory(patch, left)
                await fetcher.fetch_many(ranges_of(url, MIXED))
            assert (caught.value.start, caught.value.stop) == MIXED[0]
        with monkeypatch.context() as patch:
            lack_memory(patch, len(TAKEN) - 1)

            async def ask(start: int, stop: int) -> None:
                if (start, stop) != MIXED[-1]:
                    await fetcher.fetch(url, start, stop)
                    return
                with refused() as caught:
                    await fetcher.fetch(url, start, stop)
                assert (caught.value.start, caught.value.stop) == (start, stop)

            await gather(*(partial(ask, *span) for span in MIXED))
        assert await fetcher.fetch_many(ranges_of(url, MIXED)) == in_content(MIXED)


@pytest.mark.parametrize("cut", [1, 2999, 3000, 3450, 9000, 11_499])
async def test_a_broken_body_goes_on_where_it_broke(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], cut: int
) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(cut=cut, end="close"))
    assert await fetcher.fetch_many(ranges_of(url, MIXED)) == in_content(MIXED)
    assert asked(server) == ["0-11499", f"{cut}-11499"]


async def test_a_broken_body_without_a_strong_etag_is_begun_again(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT, etag=None)
    server.will(step(body=bytes(11_500), cut=8000, end="close"))
    assert await fetcher.fetch_many(ranges_of(url, MIXED)) == in_content(MIXED)
    assert asked(server) == ["0-11499", "0-11499"]


async def test_an_early_end_tells_both_lengths(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], way: str
) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(cut=9500, end="close"))
    async with fetcher_with(retry=RetryConfig(attempts=1)) as fetcher:
        with pytest.raises(FetchError, match="9500 of 11500 bytes" if way != "session" else None):
            await fetcher.fetch_many(ranges_of(url, MIXED))


async def test_buffers_are_not_written_after_a_cancellation(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    ca_file: str,
    step: type[StepType],
    monkeypatch: pytest.MonkeyPatch,
    taken: list[NDArray[np.uint8]],
) -> None:
    url = any_server.put("/x", CONTENT)
    for cut in (3000, 5000, 11_499):
        any_server.will(step(cut=cut, end="stall"))
        taken.clear()
        with monkeypatch.context() as patch:
            async with fetcher_with(ca_file=ca_file) as fetcher:
                with anyio.CancelScope() as scope:
                    cancel_after(patch, cut, scope)
                    await fetcher.fetch_many(ranges_of(url, MIXED))
                assert scope.cancelled_caught
                blocks = taken[:]
                assert b"".join(map(bytes, blocks))[:cut] == CONTENT[:cut]
                for block in blocks:
                    block[:] = 0
                assert await fetcher.fetch_many(ranges_of(url, MIXED)) == in_content(MIXED)
        assert not any(block.any() for block in blocks)


@pytest.mark.parametrize("cancelled", [0, 1, 3])
async def test_a_caller_that_leaves_costs_the_others_no_byte(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], monkeypatch: pytest.MonkeyPatch, cancelled: int
) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(cut=8000, end="close"))
    scope = anyio.CancelScope()
    got: dict[int, memoryview] = {}

    async def read(number: int) -> None:
        if number != cancelled:
            got[number] = await fetcher.fetch(url, *MIXED[number])
            return
        with scope:
            await fetcher.fetch(url, *MIXED[number])

    with monkeypatch.context() as patch:
        cancel_after(patch, 8000, scope)
        await gather(*(partial(read, number) for number in range(len(MIXED))))
    assert got == {number: CONTENT[slice(*span)] for number, span in enumerate(MIXED) if number != cancelled}
    assert asked(server)[0] == "0-11499"


# --- memory, but for that which another loop's thread lets go of when it comes to it


@pytest.mark.parametrize("way", ["direct", "session"])
async def test_range_gives_its_memory_back_by_itself(
    fetcher: Fetcher, server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.runtime.memory_pool.SMALL_BYTES", LONG)
    url = server.put("/x", CONTENT)
    views = await fetcher.fetch_many(ranges_of(url, [(0, 8192), (8192, 8200), (9000, 17_192)]))
    gc.collect()
    assert fetcher.statistics().idle_buffer_bytes == 0  # what came between them is less than the pool keeps
    del views[2]
    assert fetcher.statistics().idle_buffer_bytes == 8192
    del views[0]
    assert fetcher.statistics().idle_buffer_bytes == 2 * 8192
    assert views == [CONTENT[8192:8200]]


@pytest.mark.parametrize("way", ["direct", "session"])
async def test_a_read_that_is_cancelled_gives_all_of_it_back(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.runtime.memory_pool.SMALL_BYTES", LONG)
    url = server.put("/x", CONTENT)
    server.will(step(cut=5000, end="stall"))
    with anyio.CancelScope() as scope, monkeypatch.context() as patch:
        cancel_after(patch, 5000, scope)
        await fetcher.fetch_many(ranges_of(url, [(0, 4096), (4096, 8192), (8192, 12_288)]))
    assert scope.cancelled_caught
    gc.collect()
    assert fetcher.statistics().idle_buffer_bytes == 3 * 4096


def test_short_ranges_come_by_one_read() -> None:
    """Otherwise they would cost more than by copies."""
    (request,) = plan_batch(ranges_of("x", [(0, 500), (500, 999), (999, 1900)]), make_fetcher().config)
    assert apart(request) == []

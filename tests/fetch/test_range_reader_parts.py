"""How long the parts of a range are: what was learned of the host's streams decides."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, InvalidResponse
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.hosts import MIN_TELLING_BYTES, REMEMBERED_BODIES, Host, Hosts, StreamRate
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.fetch.range_reader import AHEAD_FACTOR, ALONE, MAX_SERVERS, SOON_FACTOR, PartSizes, RequestGroup
from asyncfetch.fetch.urls import Route
from asyncfetch.ranges import (
    LOOP_BYTES_PER_SECOND,
    SOON_SECONDS,
    choose_part_bytes,
)
from asyncfetch.testing import RangeServer
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Request as RequestType
    from tests.fetch.conftest import Step as StepType

KIB, MIB = 1024, 1024 * 1024
URL = "http://h/x"
SLOW = {"bytes_per_second": 4 * MIB, "first_byte_seconds": 0.05}
FREE = {"free": 64, "in_flight": 0}
LIMITS = {"part_bytes": 8 * MIB, "min_part_bytes": 256 * KIB, "soon_factor": SOON_FACTOR}


def seconds(length: int, parts: int, bytes_per_second: float, first_byte_seconds: float) -> float:
    """When the last byte of a range in so many parts side by side is there."""
    return first_byte_seconds + length / parts / bytes_per_second


def count_of(length: int, part_bytes: int) -> int:
    """As split_range does it."""
    return -(-length // part_bytes)


@given(
    length=st.integers(1, 1 << 30),
    bytes_per_second=st.floats(1e3, 1e10),
    first_byte_seconds=st.floats(0, 10),
    free=st.integers(0, 300),
    in_flight=st.integers(0, 300),
    part_bytes=st.integers(1000, 1 << 25),
    min_part_bytes=st.integers(1, 1 << 20),
    soon_factor=st.floats(1, 10),
)
@example(16 * MIB, 4.0 * MIB, 0.05, 64, 0, 8 * MIB, 256 * KIB, SOON_FACTOR)
@example(4369, 1000.0, 0.0, 226, 0, 1000, 1, 1.0)
def test_the_last_byte_comes_about_as_soon_as_can_be(
    length: int,
    bytes_per_second: float,
    first_byte_seconds: float,
    free: int,
    in_flight: int,
    part_bytes: int,
    min_part_bytes: int,
    soon_factor: float,
) -> None:
    chosen = choose_part_bytes(
        length,
        bytes_per_second=bytes_per_second,
        first_byte_seconds=first_byte_seconds,
        free=free,
        in_flight=in_flight,
        part_bytes=part_bytes,
        min_part_bytes=min_part_bytes,
        soon_factor=soon_factor,
    )
    fewest = math.ceil(length / part_bytes)
    allowed = [
        parts
        for parts in range(fewest + 1, free + 1)
        if length // parts >= min_part_bytes and (in_flight + parts) * bytes_per_second <= LOOP_BYTES_PER_SECOND
    ]
    parts = count_of(length, chosen)
    assert 1 <= chosen <= part_bytes
    assert parts == fewest or parts <= max(allowed, default=fewest)

    def time_of(count: int) -> float:
        return seconds(length, count, bytes_per_second, first_byte_seconds)

    soonest = min(map(time_of, allowed), default=time_of(fewest))
    soon = max(soon_factor * soonest + SOON_SECONDS, time_of(fewest) if not allowed else 0)
    # Rounding up the length of a part may leave one part less; more than one only where a part is about as many bytes
    # as there are parts: of n parts m are left, and n <= m * length / (length - m).
    most = parts + max(1, parts * parts // max(1, length - parts))
    assert time_of(most) <= soon * (1 + 1e-9) or time_of(parts) <= soon * (1 + 1e-9)
    if parts > fewest + 1:
        assert time_of(parts - 1) > soon * (1 - 1e-9)  # no more than it takes


def parts_of(length: int, **settings: float) -> int:
    return count_of(length, choose_part_bytes(length, **{**SLOW, **FREE, **LIMITS, **settings}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "settings", "parts"),
    [
        pytest.param(16 * MIB, {}, 43, id="a slow stream"),
        pytest.param(16 * MIB, {"free": 5}, 5, id="few free requests"),
        pytest.param(16 * MIB, {"free": 0}, 2, id="no free requests"),
        pytest.param(16 * MIB, {"bytes_per_second": 500 * MIB, "first_byte_seconds": 0.0005}, 2, id="loopback"),
        pytest.param(
            64 * MIB, {"bytes_per_second": 60 * MIB, "first_byte_seconds": 0.001, "in_flight": 8}, 8, id="busy loopback"
        ),
        pytest.param(16 * MIB, {"bytes_per_second": 70 * MIB, "first_byte_seconds": 0.15}, 2, id="S3"),
        pytest.param(500 * KIB, {"bytes_per_second": 1e5}, 1, id="shorter than two shortest parts"),
        pytest.param(512 * KIB, {"bytes_per_second": 1e5}, 2, id="two shortest parts"),
        pytest.param(1 << 40, {}, 1 << 17, id="more parts than requests"),
        pytest.param(16 * MIB, {"soon_factor": AHEAD_FACTOR}, 10, id="read ahead"),
        pytest.param(4 * MIB // 3, {}, 4, id="a clip"),
        pytest.param(4 * MIB // 3, {"soon_factor": AHEAD_FACTOR}, 1, id="a clip that is read ahead"),
    ],
)
def test_typical_choices(length: int, settings: dict[str, float], parts: int) -> None:
    assert parts_of(length, **settings) == parts


# --- what is learned


def test_rate_of_a_stream_is_the_median_of_its_latest_bodies() -> None:
    assert StreamRate().bytes_per_second is None
    rate = StreamRate()
    rate.record(MIN_TELLING_BYTES - 1, 1.0)
    rate.record(MIN_TELLING_BYTES, 0.0)
    for seconds_taken in (1.0, 1.0, 2.0, 0.001, 30.0):
        rate.record(MIB, seconds_taken)
    assert rate.bytes_per_second == MIB
    for _ in range(REMEMBERED_BODIES):
        rate.record(MIB, 4.0)
    assert rate.bytes_per_second == MIB / 4


def make_host(limit: int = 64) -> Host:
    host = Hosts(FetchConfig(max_requests_per_host=limit)).get("http://h:80", Route)
    host.rate.record(4 * MIB, 1.0)
    host.counts.first_byte.record(0.05)
    return host


def test_requests_that_are_about_to_be_made_share_what_is_free() -> None:
    sizes = PartSizes(FetchConfig())
    sizes.came_from(URL, make_host(limit=64), MIB)
    counts = [
        count_of(4 * MIB, sizes.choose("http://h/another", 4 * MIB, RequestGroup(all_of_them)))
        for all_of_them in (1, 16, 64)
    ]
    assert counts == [11, 4, 1]


def test_read_ahead_comes_in_fewer_parts_until_it_is_waited_for() -> None:
    sizes, caller = PartSizes(FetchConfig()), Caller(urgent=False)
    sizes.came_from(URL, make_host(limit=64), MIB)
    with calling(caller):
        ahead = sizes.choose(URL, 4 * MIB, ALONE)
        caller.raise_priority()
        assert [count_of(4 * MIB, size) for size in (ahead, sizes.choose(URL, 4 * MIB, ALONE))] == [3, 11]


def test_read_ahead_is_not_cut_for_reserved_requests() -> None:
    sizes, host = PartSizes(FetchConfig()), make_host(limit=8)
    sizes.came_from(URL, host, MIB)
    with calling(Caller(urgent=False)):
        for _ in range(6):
            assert host.enter_nowait() is not None
        assert sizes.choose(URL, 4 * MIB, ALONE) == 8 * MIB  # one request is free, and one that it can't have
    assert count_of(4 * MIB, sizes.choose(URL, 4 * MIB, ALONE)) == 2


def test_unknown_server_has_parts_of_the_configured_length() -> None:
    sizes = PartSizes(FetchConfig(part_bytes=MIB))
    assert sizes.choose(URL, 16 * MIB, ALONE) == MIB


async def test_far_hosts_first_ranges_come_in_two_while_few_wait() -> None:
    sizes, host = PartSizes(FetchConfig()), Hosts(FetchConfig(max_requests_per_host=8)).get("http://h:80", Route)
    sizes.came_from(URL, host, 100)
    host.counts.first_byte.record(0.01)
    assert sizes.choose(URL, MIB, ALONE) == MIB
    for _ in range(2):
        host.counts.first_byte.record(0.05)
    assert [sizes.choose(URL, length, ALONE) for length in (MIB, MIB // 2, MIB // 2 - 1)] == [
        MIB // 2,
        MIB // 4,
        8 * MIB,
    ]
    assert [sizes.choose(URL, MIB + 1, RequestGroup(9, ahead)) for ahead in (0, 6, 7)] == [
        *[MIB // 2 + 1] * 2,
        MIB + 1,
    ]
    assert sizes.choose(URL, 64 * MIB, ALONE) == 8 * MIB
    for _ in range(8):
        assert host.enter_nowait() is not None
    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(host.permit().__aenter__)
        await all_others_wait()
        assert sizes.choose(URL, MIB, ALONE) == MIB // 2
        tasks.start_soon(host.permit().__aenter__)
        await all_others_wait()
        assert sizes.choose(URL, MIB, ALONE) == MIB
        tasks.cancel_scope.cancel()


def test_short_bodies_elsewhere_leave_the_long_ones_source() -> None:
    sizes, host = PartSizes(FetchConfig()), make_host()
    sizes.came_from(URL, host, MIN_TELLING_BYTES)
    sizes.came_from(URL, Hosts(FetchConfig()).get("http://other:80", Route), MIN_TELLING_BYTES - 1)
    assert count_of(4 * MIB, sizes.choose(URL, 4 * MIB, ALONE)) == 11


def test_servers_are_forgotten_in_the_end() -> None:
    sizes = PartSizes(FetchConfig())
    host = make_host()
    for number in range(MAX_SERVERS + 1):
        sizes.came_from(f"http://h{number}/x", host, MIB)
    assert sizes.choose("http://h0/x", 16 * MIB, ALONE) == 8 * MIB
    assert sizes.choose(f"http://h{MAX_SERVERS}/x", 16 * MIB, ALONE) < 8 * MIB


def test_parts_have_at_least_one_byte() -> None:
    with pytest.raises(ConfigError, match="min_part_bytes"):
        FetchConfig(min_part_bytes=0)


# --- on a real server


async def test_range_on_slow_streams_has_parts_below_half_the_length() -> None:
    """All at once, so that it takes less than half the time."""
    content = random.Random(0).randbytes(4 * MIB)
    async with (
        RangeServer({"x": content}, tls=False, bytes_per_second=2 * MIB, first_byte_seconds=0.02) as server,
        Fetcher(FetchConfig(trust_env=False, part_bytes=2 * MIB)) as fetcher,
    ):
        await fetcher.fetch(f"{server.url}/x", 0, MIB // 2)
        server.reset()
        assert await fetcher.fetch(f"{server.url}/x", 0, len(content)) == content
        lengths = [(request.stop or 0) - (request.start or 0) for request in server.requests]
        assert sum(lengths) == len(content)
        assert max(lengths) < MIB
        assert server.statistics().peak_in_flight == len(lengths)


@pytest.mark.alone
async def test_parts_stay_long_on_fast_streams() -> None:
    content = bytes(16 * MIB)
    async with RangeServer({"x": content}, tls=False) as server, Fetcher(FetchConfig(trust_env=False)) as fetcher:
        await fetcher.stat(f"{server.url}/x")
        for _ in range(3):
            await fetcher.fetch(f"{server.url}/x", 0, len(content))
        assert len(server.requests) == 1 + 3 * 2


# --- servers that ignore ranges


@pytest.mark.parametrize("known", [False, True])
async def test_whole_range_ignoring_server_gets_one_request(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], known: bool
) -> None:
    content = random.Random(0).randbytes(3 * MIB)
    url = server.put("/x", content)
    server.every = lambda _: step(ignore_range=True)
    async with fetcher_with(part_bytes=MIB) as fetcher:
        if known:
            await fetcher.stat(url)
        assert await fetcher.fetch(url, 0, len(content)) == content
        server.requests.clear()
        buffer = bytearray(len(content))
        await fetcher.fetch_into(url, 0, len(content), buffer)
        assert buffer == content
        assert len(server.requests) == 1  # it is known now
        with pytest.raises(InvalidResponse, match="ignores Range"):
            await fetcher.fetch(url, 10, len(content))


async def test_server_that_ignores_ranges_midway_gives_right_bytes(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    content = random.Random(0).randbytes(3 * MIB)
    url = server.put("/x", content)

    def ignore(request: RequestType) -> StepType | None:
        return step(ignore_range=True) if len(server.requests) > 4 else None

    server.every = ignore
    async with fetcher_with(part_bytes=MIB // 2, max_requests_per_host=2) as fetcher:
        assert await fetcher.fetch(url, 0, len(content)) == content

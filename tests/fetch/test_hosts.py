"""Hosts don't disturb each other, and a cancelled request leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncfetch.config import FetchConfig, RetryConfig, TimeoutConfig
from asyncfetch.errors import AsyncFetchError, FetchTimeout
from asyncfetch.fetch.hosts import MAX_IDLE_HOSTS, Host, Hosts
from asyncfetch.ranges import ByteRange
from asyncfetch.runtime.memory_pool import MemoryPool
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = bytes(range(256)) * 256


class Barrier:
    """Holds every request of a server until ``count`` of them are there."""

    def __init__(self, server: LyingServer, count: int) -> None:
        self._server = server
        self._count = count
        self._open: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self) -> asyncio.Future[None]:
        if self._server.in_flight >= self._count and not self._open.done():
            self._open.set_result(None)
        return self._open


async def test_512_ranges_in_flight_over_4_hosts(
    fetcher_with: Callable[..., Fetcher], lying_server: type[LyingServer]
) -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(lying_server(host=f"127.0.0.{n}")) for n in range(1, 5)]
        timeouts = TimeoutConfig(connect_seconds=10, first_byte_seconds=15)
        fetcher = await stack.enter_async_context(
            fetcher_with(max_requests_per_host=128, learn_limit=False, max_span_bytes=0, timeouts=timeouts)
        )
        urls = [server.put("/x", CONTENT) for server in servers]
        for server in servers:
            server.limiter = Barrier(server, 128)
        ranges = [ByteRange(url, start, start + 100) for start in range(200) for url in urls]
        views = await fetcher.fetch_many(ranges)
        assert all(view == CONTENT[one.start : one.stop] for one, view in zip(ranges, views, strict=True))
        assert [server.peak_in_flight for server in servers] == [128] * 4
        assert {host.peak_in_flight for host in fetcher.statistics().hosts.values()} == {128}
        assert fetcher.statistics().in_flight == 0


@pytest.mark.parametrize("kind", [{"silent": "stall"}, {"cut": 5, "end": "stall"}, {"status": 503}], ids=str)
async def test_a_bad_host_does_not_delay_the_others(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    lying_server: type[LyingServer],
    step: type[StepType],
    kind: dict[str, Any],
) -> None:
    async with lying_server(host="127.0.0.2") as bad:
        bad.every = lambda _: step(**kind)
        timeouts = TimeoutConfig(first_byte_seconds=60, stall_seconds=60)
        retry = RetryConfig(attempts=10**6, total_seconds=1e9, budget=10**6)
        async with fetcher_with(max_requests_per_host=4, max_span_bytes=0, timeouts=timeouts, retry=retry) as fetcher:
            url, bad_url = server.put("/x", CONTENT), bad.put("/x", CONTENT)

            ranges = [ByteRange(bad_url, start, start + 100) for start in range(200)]
            ranges += [ByteRange(url, start, start + 100) for start in range(200)]
            arrived = 0
            with anyio.fail_after(5):
                async with fetcher.fetch_stream(ranges) as stream:
                    while arrived < 200:
                        index, _ = await anext(stream)
                        arrived += index >= 200
            assert bad.peak_in_flight <= 4


async def test_the_limiter_is_free_while_a_retry_waits(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], time: FakeTime
) -> None:
    url = server.put("/x", CONTENT)
    held: list[int] = []

    async with fetcher_with(time, max_requests_per_host=1) as fetcher:
        real_sleep = time.sleep

        async def sleep(seconds: float) -> None:
            held.append(fetcher.statistics().in_flight)
            await fetcher.fetch(url, 5, 6)
            await real_sleep(seconds)

        fetcher._clock = type(fetcher._clock)(sleep=sleep)
        server.will(step(status=503))
        assert bytes(await fetcher.fetch(url, 0, 5)) == CONTENT[:5]
    assert held == [0]


async def test_the_wait_at_the_limiter_counts_in_no_timeout(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    timeouts = TimeoutConfig(connect_seconds=0.2, first_byte_seconds=0.2, stall_seconds=0.2)
    async with fetcher_with(max_requests_per_host=1, max_span_bytes=0, timeouts=timeouts) as fetcher:
        server.will(*[step(silent="stall")] * 3)
        assert await fetcher.fetch_many(ByteRange(url, start, start + 1) for start in range(4))
    assert server.peak_in_flight == 1


STUCK: dict[str, dict[str, Any]] = {
    "before the head": {"silent": "stall"},
    "in the head": {"raw": b"HTTP/1.1 206 x\r\nContent-", "end": "stall"},
    "in the body": {"cut": 50, "end": "stall"},
    "before the end of a chunked body": {
        "headers": {"Content-Length": None, "Transfer-Encoding": "chunked"},
        "body": b"64\r\n" + CONTENT[:100] + b"\r\n",
        "end": "stall",
    },
    "in a redirect's body": {
        "status": 302,
        "headers": {"Location": "/x", "Content-Length": "100"},
        "body": b"",
        "end": "stall",
    },
}


@pytest.mark.parametrize("kind", STUCK.values(), ids=STUCK)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_cancelled_where_it_waits(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    tls_server: LyingServer,
    step: type[StepType],
    ca_file: str,
    kind: dict[str, Any],
    tls: bool,
) -> None:
    used = tls_server if tls else server
    url = used.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file, max_requests_per_host=1) as fetcher:
        used.every = lambda _: step(**kind)
        answered = asyncio.Event()
        with anyio.move_on_after(5) as scope:

            def arrived() -> None:
                answered.set()
                scope.deadline = anyio.current_time() + 0.02

            used.limiter = arrived
            await fetcher.fetch(url, 0, 100)
        assert scope.cancelled_caught
        assert answered.is_set()
        used.limiter, used.every = lambda: None, lambda _: None
        assert fetcher.statistics().in_flight == 0
        assert bytes(await fetcher.fetch(url, 0, 100)) == CONTENT[:100]


async def test_cancelled_at_the_limiter(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(silent="stall"))
    async with fetcher_with(max_requests_per_host=1) as fetcher, anyio.create_task_group() as group:
        group.start_soon(fetcher.fetch, url, 0, 1)
        await all_others_wait()
        with anyio.move_on_after(0.01):
            await fetcher.fetch(url, 1, 2)
        assert fetcher.statistics().waiting == 0
        assert fetcher.statistics().in_flight == 1
        group.cancel_scope.cancel()
    assert fetcher.statistics().in_flight == 0


async def test_cancelled_while_it_connects(fetcher_with: Callable[..., Fetcher], server: LyingServer) -> None:
    async with fetcher_with() as fetcher:
        with anyio.move_on_after(0.02) as scope:
            await fetcher.fetch(f"https://127.0.0.1:{server.port}/x", 0, 1)
        assert scope.cancelled_caught
        assert fetcher.statistics().in_flight == 0


async def test_buffer_is_not_written_after_a_timeout(hasty: Fetcher, server: LyingServer, step: type[StepType]) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(cut=50, end="stall"))
    buffer = bytearray(100)
    with pytest.raises(FetchTimeout):
        await hasty.fetch_into(url, 0, 100, buffer)
    buffer[:] = b"mine" * 25
    await hasty.fetch(url, 0, 100)
    assert buffer == b"mine" * 25


async def test_error_of_one_range_cancels_the_rest_of_its_batch(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    server.every = lambda request: step(status=404) if request.headers["range"] == "bytes=7-7" else step(silent="stall")
    async with fetcher_with(max_span_bytes=0) as fetcher:
        with anyio.fail_after(2), pytest.raises(AsyncFetchError):
            await fetcher.fetch_many(ByteRange(url, start, start + 1) for start in range(20))
        assert fetcher.statistics().in_flight == 0


async def test_leaving_a_stream_cancels_what_is_under_way(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    server.every = lambda request: None if request.headers["range"] == "bytes=0-0" else step(silent="stall")
    async with fetcher_with(max_span_bytes=0) as fetcher:
        async with fetcher.fetch_stream(ByteRange(url, start, start + 1) for start in range(20)) as stream:
            index, view = await anext(stream)
            assert (index, bytes(view)) == (0, CONTENT[:1])
        assert fetcher.statistics().in_flight == 0


async def test_idle_hosts_are_forgotten_and_their_sums_kept() -> None:
    hosts = Hosts(FetchConfig(max_requests_per_host=2))
    busy = hosts.get("busy")
    async with busy.permit():
        for number in range(MAX_IDLE_HOSTS * 2):
            host = hosts.get(f"host {number}")
            async with host.permit():
                host.counts.requests += 1
        now = hosts.statistics(MemoryPool(0).statistics())
        assert len(now.hosts) == MAX_IDLE_HOSTS
        assert now.hosts["busy"].in_flight == 1
        assert now.requests == MAX_IDLE_HOSTS * 2
        assert hosts.get("busy") is busy


async def test_statistics_are_safe_in_a_thread_while_hosts_come_and_go() -> None:
    hosts = Hosts(FetchConfig(max_requests_per_host=1))
    snapshots: Future[list[int]] = Future()

    def take() -> None:
        try:
            snapshots.set_result([len(hosts.statistics(MemoryPool(0).statistics()).hosts) for _ in range(10)])
        except RuntimeError as error:
            snapshots.set_exception(error)

    thread = threading.Thread(target=take)
    thread.start()
    number = 0
    while not snapshots.done():
        hosts.get(f"host {number}")
        number += 1
    thread.join()
    assert max(snapshots.result()) <= MAX_IDLE_HOSTS + 1


async def take_turn(host: Host) -> None:
    async with host.permit():
        pass


async def test_the_wait_at_the_limiter_is_timed() -> None:
    now = 0.0
    host = Hosts(FetchConfig(max_requests_per_host=1), now=lambda: now).get("host")
    async with anyio.create_task_group() as group, host.permit():
        group.start_soon(take_turn, host)
        await all_others_wait()
        now = 3.0
    wait = host.statistics().wait
    assert (wait.count, wait.sum_seconds, wait.max_seconds) == (2, 3.0, 3.0)


async def test_a_cancelled_wait_is_not_timed() -> None:
    host = Hosts(FetchConfig(max_requests_per_host=1)).get("host")
    async with host.permit():
        with anyio.move_on_after(0.01):
            await host.permit().__aenter__()
    assert host.statistics().wait.count == 1


async def test_the_times_of_forgotten_hosts_stay_in_the_total() -> None:
    now = 0.0
    hosts = Hosts(FetchConfig(max_requests_per_host=1), now=lambda: now)
    for number in range(MAX_IDLE_HOSTS * 2):
        host = hosts.get(f"host {number}")
        async with host.permit():
            host.counts.first_byte.record(1.0)
            host.counts.body.record(2.0)
    total = hosts.statistics(MemoryPool(0).statistics())
    assert total.wait.count == total.first_byte.count == total.body.count == MAX_IDLE_HOSTS * 2
    assert (total.first_byte.sum_seconds, total.body.max_seconds) == (MAX_IDLE_HOSTS * 2, 2.0)


async def test_every_phase_of_a_request_is_timed(hasty: Fetcher, server: LyingServer, step: type[StepType]) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(), step(status=503), step(cut=5, end="close"), step(silent="close"), step(status=302))
    await hasty.fetch(url, 0, 100)
    for _ in range(4):
        with pytest.raises(AsyncFetchError):
            await hasty.fetch(url, 0, 100)
    now = hasty.statistics()
    (host,) = now.hosts.values()
    assert (now.wait, now.first_byte, now.body) == (host.wait, host.first_byte, host.body)
    assert host.wait.count == 5
    assert host.first_byte.count == 4  # all but the silent one
    assert host.body.count == 1  # that came whole
    assert host.first_byte.sum_seconds > 0

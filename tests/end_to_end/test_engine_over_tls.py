"""The engine and the byte cache against real HTTPS servers, judged by what the servers counted."""

from __future__ import annotations

from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncfetch import ByteCache, ByteRange, FetchConfig, Fetcher
from asyncfetch.testing import Fault, RangeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.may_block  # the servers run in threads of their own, which these tests wait for

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
REQUESTS_PER_HOST = 128
CONTENT = bytes(range(256)) * 64


@pytest.fixture
def servers() -> Iterator[list[RangeServer]]:
    """Four HTTPS servers on hosts of their own, each in a thread of its own."""
    with ExitStack() as stack:
        yield [stack.enter_context(RangeServer({"/x": CONTENT}, host=host, first_byte_seconds=2.0)) for host in HOSTS]


@pytest.fixture
def authorities(servers: list[RangeServer], tmp_path: Path) -> Path:
    """The authorities of all servers in one file."""
    path = tmp_path / "all.pem"
    path.write_text("".join(Path(server.ca_file or "").read_text() for server in servers))
    return path


@asynccontextmanager
async def cache_over(server: RangeServer) -> AsyncIterator[ByteCache]:
    async with (
        Fetcher(FetchConfig(ca_file=server.ca_file)) as fetcher,
        ByteCache(fetcher, max_bytes=1 << 20) as cache,
    ):
        yield cache


@pytest.mark.slow
async def test_512_ranges_reach_and_never_exceed_each_hosts_limit(
    servers: list[RangeServer], authorities: Path
) -> None:
    config = FetchConfig(
        ca_file=str(authorities), max_requests_per_host=REQUESTS_PER_HOST, learn_limit=False, max_span_bytes=0
    )
    ranges = [ByteRange(f"{server.url}/x", at, at + 100) for at in range(REQUESTS_PER_HOST) for server in servers]
    async with Fetcher(config) as fetcher:
        await fetcher.fetch_many(ranges)  # opens the connections, which takes longer on a slow machine than an answer
        views = await fetcher.fetch_many(ranges)
        in_flight = [host.peak_in_flight for host in fetcher.statistics().hosts.values()]
    assert [bytes(view) for view in views] == [CONTENT[one.start : one.stop] for one in ranges]
    assert [server.statistics().peak_in_flight for server in servers] == [REQUESTS_PER_HOST] * 4
    assert in_flight == [REQUESTS_PER_HOST] * 4


async def test_a_thousand_askers_of_one_range_make_one_request() -> None:
    with RangeServer({"/x": CONTENT}, first_byte_seconds=0.2) as server:
        async with (
            Fetcher(FetchConfig(ca_file=server.ca_file)) as fetcher,
            ByteCache(fetcher, max_bytes=1 << 20) as cache,
        ):
            views: list[memoryview] = []

            async def ask() -> None:
                views.append(await cache.fetch(f"{server.url}/x", 10, 5_000))

            async with anyio.create_task_group() as group:
                for _ in range(1_000):
                    group.start_soon(ask)
        assert server.statistics().requests == 1
    assert len(views) == 1_000
    assert all(view == CONTENT[10:5_000] for view in views)


async def test_the_first_askers_cancellation_costs_the_others_nothing() -> None:
    # Time enough for a thousand tasks to ask on a busy machine, before the first of them is cancelled.
    with RangeServer({"/x": CONTENT}, first_byte_seconds=1.5) as server:
        async with (
            Fetcher(FetchConfig(ca_file=server.ca_file)) as fetcher,
            ByteCache(fetcher, max_bytes=1 << 20) as cache,
        ):
            views: list[memoryview] = []
            first = anyio.CancelScope()

            async def ask(scope: anyio.CancelScope) -> None:
                with scope:
                    views.append(await cache.fetch(f"{server.url}/x", 10, 5_000))

            async with anyio.create_task_group() as group:
                group.start_soon(ask, first)
                await anyio.wait_all_tasks_blocked()
                for _ in range(999):
                    group.start_soon(ask, anyio.CancelScope())
                await anyio.wait_all_tasks_blocked()
                first.cancel()
        assert server.statistics().requests == 1
    assert len(views) == 999


@pytest.mark.parametrize("direct_bodies", [True, False], ids=["direct", "session"])
async def test_a_fault_in_the_middle_of_a_body_is_read_over(direct_bodies: bool) -> None:
    content = CONTENT * 64
    faults = {"left": 3}

    def break_three_times(_: object) -> Fault | None:
        faults["left"] -= 1
        return Fault.reset(after_bytes=300_000) if faults["left"] >= 0 else None

    with RangeServer({"/x": content}, fault=break_three_times) as server:
        async with Fetcher(FetchConfig(ca_file=server.ca_file), _by_session=not direct_bodies) as fetcher:
            view = await fetcher.fetch(f"{server.url}/x", 0, len(content))
            retries = fetcher.statistics().retries
        asked = [request.start or 0 for request in server.requests]
    assert view == content
    assert retries == 3
    assert asked == sorted(asked)  # resumed, not begun again
    assert asked[-1] > 0

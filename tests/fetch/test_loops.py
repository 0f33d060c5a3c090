"""Bodies on several loops: where they run, and what is left when one of them ends."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import to_thread

from asyncfetch.config import FetchConfig, TimeoutConfig
from asyncfetch.errors import ClosedError, ConfigError, WrongLoop
from asyncfetch.fetch.transports import exchange
from asyncfetch.fetch.transports.lines import SMALL_BYTES
from asyncfetch.ranges import ByteRange
from asyncfetch.runtime.loop_thread import LoopThread
from tests.fetch.test_gates import Barrier
from tests.fetch.test_lifetime import connections_to

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = random.Random(3).randbytes(SMALL_BYTES + 1000)


@pytest.fixture
def loops() -> int:
    return 2


@pytest.fixture(params=["http", "https"])
def any_server(request: pytest.FixtureRequest) -> LyingServer:
    server: LyingServer = request.getfixturevalue("server" if request.param == "http" else "tls_server")
    return server


@pytest.fixture
def receiving_loops(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.AbstractEventLoop]:
    """The loops that bodies come in on, one for each body from now on."""
    loops: list[asyncio.AbstractEventLoop] = []
    receive_body = exchange.receive_body

    async def receive_and_tell(*args: Any, **settings: Any) -> None:  # noqa: ANN401 - whatever it takes
        loops.append(asyncio.get_running_loop())
        await receive_body(*args, **settings)

    monkeypatch.setattr("asyncfetch.fetch.transports.asking.receive_body", receive_and_tell)
    return loops


def body_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncfetch bodies")]


async def test_large_bodies_are_spread_evenly(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    ca_file: str,
    receiving_loops: list[asyncio.AbstractEventLoop],
) -> None:
    url = any_server.put("/x", CONTENT)
    wanted = [ByteRange(url, start, start + SMALL_BYTES) for start in range(8)]
    any_server.gate = Barrier(any_server, len(wanted))
    async with fetcher_with(ca_file=ca_file, loops=4, max_span_bytes=0) as fetcher:
        views = await fetcher.fetch_many(wanted)
    assert [bytes(view) for view in views] == [CONTENT[one.start : one.stop] for one in wanted]
    assert Counter(receiving_loops).total() == 8
    assert set(Counter(receiving_loops).values()) == {2}


async def test_small_bodies_stay(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, receiving_loops: list[asyncio.AbstractEventLoop]
) -> None:
    url = server.put("/x", CONTENT)
    wanted = [ByteRange(url, start, start + SMALL_BYTES - 1) for start in range(8)]
    async with fetcher_with(max_span_bytes=0) as fetcher:
        await fetcher.fetch_many(wanted)
    assert set(receiving_loops) == {asyncio.get_running_loop()}


async def test_the_statistics_are_those_of_all_loops(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    step: type[StepType],
    receiving_loops: list[asyncio.AbstractEventLoop],
) -> None:
    url = server.put("/x", CONTENT)
    length = SMALL_BYTES
    server.will(step(status=503))
    async with fetcher_with(max_span_bytes=0) as fetcher:
        await fetcher.fetch_many(ByteRange(url, start, start + length) for start in range(4))
        now = fetcher.statistics()
        (host,) = now.hosts.values()
    assert len(set(receiving_loops)) == 2
    for one in (now, host):
        assert (one.requests, one.bytes, one.retries, one.errors, one.in_flight) == (5, 4 * length, 1, 1, 0)
        assert (one.wait.count, one.first_byte.count, one.body.count) == (5, 5, 4)


@pytest.mark.usefixtures("elsewhere")
async def test_a_cancellation_at_any_moment(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for moment in range(60):
            buffer = bytearray(len(CONTENT))
            with anyio.move_on_after(moment * 0.0002) as scope:
                await fetcher.fetch_into(url, 0, len(CONTENT), buffer)
            if scope.cancelled_caught:
                buffer[:] = bytes(len(buffer))
                await anyio.sleep(0.002)  # the other loop isn't this one's to wait for
                assert not any(buffer)
            else:
                assert buffer == CONTENT
        assert await fetcher.fetch(url) == CONTENT
        assert fetcher.statistics().in_flight == 0
    assert connections_to(any_server.port) == 0


@pytest.mark.usefixtures("elsewhere")
async def test_closing_ends_calls_under_way_connections_and_threads(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    url = tls_server.put("/x", CONTENT)
    tls_server.will(step(end="deaf"))
    tls_server.every = lambda _: step(silent="stall")
    fetcher = fetcher_with(ca_file=ca_file, loops=3)
    async with anyio.create_task_group() as group:
        async with fetcher:
            await fetcher.fetch(url, 0, 10)

            async def stalls() -> None:
                with pytest.raises(ClosedError, match="while it read"):
                    await fetcher.fetch(url, 0, 1)

            group.start_soon(stalls)
            await anyio.sleep(0.05)
            assert body_threads() == ["asyncfetch bodies 1", "asyncfetch bodies 2"]
            before = anyio.current_time()
        assert anyio.current_time() - before < 0.5
    assert body_threads() == []
    assert connections_to(tls_server.port) == 0


def die() -> None:
    raise SystemExit


@pytest.mark.usefixtures("elsewhere")
async def test_a_loop_that_dies_costs_a_repeat(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    ca_file: str,
    step: type[StepType],
    receiving_loops: list[asyncio.AbstractEventLoop],
) -> None:
    url = any_server.put("/x", CONTENT)
    any_server.will(step(), step(cut=2_000_000, end="stall"))
    async with fetcher_with(ca_file=ca_file, timeouts=TimeoutConfig(stall_seconds=10)) as fetcher:
        assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]
        buffer = bytearray(len(CONTENT))
        async with anyio.create_task_group() as group:
            group.start_soon(fetcher.fetch_into, url, 0, len(CONTENT), buffer)
            while fetcher.statistics().bytes < 2_000_010:  # noqa: ASYNC110 - counted on the other loop
                await anyio.sleep(0.01)
            receiving_loops[0].call_soon_threadsafe(die)
        assert buffer == CONTENT
        assert await fetcher.fetch(url) == CONTENT
        assert fetcher.statistics().retries == 1
        while body_threads():  # noqa: ASYNC110 - a thread tells nobody that it has ended
            await anyio.sleep(0.01)
    assert receiving_loops.count(asyncio.get_running_loop()) == 2
    assert connections_to(any_server.port) == 0


@pytest.mark.usefixtures("elsewhere")
async def test_a_dead_pooled_connection_costs_no_attempt(
    hasty: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    await hasty.fetch(url, 0, 1)
    server.will(step(silent="reset"))
    assert bytes(await hasty.fetch(url, 1, 2)) == CONTENT[1:2]
    assert [request.connection for request in server.requests] == [1, 1, 2]
    assert hasty.statistics().retries == hasty.statistics().errors == 0


@pytest.mark.usefixtures("elsewhere")
async def test_a_forked_child_is_refused_and_leaves_the_parents_connections_alone(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with() as fetcher:
        await fetcher.fetch(url, 0, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads are running
            child = os.fork()
        if child == 0:
            code = 1
            try:
                fetcher.fetch(url, 0, 1).send(None)
            except WrongLoop as error:
                fetcher.__dict__.clear()
                gc.collect()
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        _, status = await to_thread.run_sync(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert bytes(await fetcher.fetch(url, 1, 2)) == CONTENT[1:2]
        assert server.connections == 1


async def test_what_cannot_be_opened_leaves_no_thread(
    fetcher_with: Callable[..., Fetcher], ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="missing"):
        await fetcher_with(ca_file="missing.pem").__aenter__()
    start = LoopThread.__init__

    def start_two(thread: LoopThread, *, name: str) -> None:
        if name.endswith("3"):
            raise ClosedError("no thread for an event loop could be started")
        start(thread, name=name)

    monkeypatch.setattr(LoopThread, "__init__", start_two)
    with pytest.raises(ClosedError, match="no thread"):
        await fetcher_with(loops=4, ca_file=ca_file).__aenter__()
    assert body_threads() == []


async def test_entering_can_be_cancelled_at_any_moment(fetcher_with: Callable[..., Fetcher], ca_file: str) -> None:
    for moment in range(30):
        with anyio.move_on_after(moment * 0.0005):
            async with fetcher_with(ca_file=ca_file, loops=3):
                pass
        assert body_threads() == []


def test_no_loop_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        FetchConfig(loops=0)

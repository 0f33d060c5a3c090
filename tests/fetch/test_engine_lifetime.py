"""Entering, leaving, other loops, forks, pooled connections."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import weakref
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import anyio.lowlevel
import psutil
import pytest
from aiohttp.client_proto import ResponseHandler

from asyncfetch.config import RetryConfig
from asyncfetch.errors import ClosedError, ConfigError, FetchTimeout, NotFound, WrongLoop
from asyncfetch.fetch import Fetcher, ask_server
from asyncfetch.fetch.connection import Connection
from asyncfetch.fetch.hosts import Permit
from asyncfetch.fetch.request import HttpRequest
from asyncfetch.fetch.transports.session import Exchange
from asyncfetch.ranges import ByteRange
from tests.conftest import all_others_wait
from tests.fetch.conftest import fork

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncfetch.fetch import RangeReader
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = bytes(range(256)) * 256


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


async def test_fetcher_is_a_range_reader(fetcher: Fetcher) -> None:
    reader: RangeReader = fetcher
    assert reader is fetcher


@pytest.mark.parametrize("url", ["/x", "http://127.0.0.1:1/"])
async def test_fetcher_is_closed_before_and_after_its_block(url: str) -> None:
    fetcher = Fetcher()
    with pytest.raises(ClosedError, match="new"):
        await fetcher.fetch(url, 0, 0)
    with pytest.raises(ClosedError, match="new"):
        await ask_server(fetcher, "GET", url)
    async with fetcher:
        pass
    calls = fetcher.fetch(url), fetcher.stat(url), fetcher.fetch_many([]), fetcher.listdir(url)
    for call in (*calls, ask_server(fetcher, "GET", url)):
        with pytest.raises(ClosedError, match="closed"):
            await call
    with pytest.raises(ClosedError):
        fetcher.fetch_stream([])
    with pytest.raises(ClosedError):
        await fetcher.__aenter__()
    assert "closed" in repr(fetcher)


async def test_closing_ends_calls_under_way(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    server.every = lambda _: step(silent="stall")
    fetcher = fetcher_with(max_span_bytes=0)
    ended: list[str] = []

    async def one() -> None:
        with pytest.raises(ClosedError, match="while it read"):
            await fetcher.fetch(url, 0, 1)
        ended.append("one")

    async def many() -> None:
        with pytest.raises(ClosedError, match="while it read"):
            await fetcher.fetch_many([ByteRange(url, 0, 1), ByteRange(url, 1, 2)])
        ended.append("many")

    async with anyio.create_task_group() as group, fetcher:
        group.start_soon(one)
        group.start_soon(many)
        await all_others_wait()
    assert sorted(ended) == ["many", "one"]
    assert fetcher.statistics().in_flight == 0


def connections_to(port: int) -> int:
    """Sockets of this process that are connected to a server there, by the system's own account."""
    return sum(bool(one.raddr) and one.raddr.port == port for one in psutil.Process().net_connections())


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}], ids=["pooled", "closed by the server's wish"])
async def test_closing_waits_for_no_good_bye_of_a_hanging_server(
    fetcher_with: Callable[..., Fetcher],
    tls_server: LyingServer,
    step: type[StepType],
    ca_file: str,
    headers: dict[str, str | None],
) -> None:
    url = tls_server.put("/x", CONTENT)
    tls_server.will(step(headers=headers, end="deaf"))
    async with fetcher_with(ca_file=ca_file) as fetcher:
        await fetcher.fetch(url, 0, 1)
        assert connections_to(tls_server.port) == 1
        with anyio.fail_after(0.5):
            await fetcher.__aexit__()
        assert connections_to(tls_server.port) == 0


async def test_a_connection_that_stalls_is_closed_with_its_request(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, step: type[StepType], ca_file: str
) -> None:
    """And not when the server has said good-bye, which this one never does."""
    url = tls_server.put("/x", CONTENT)
    tls_server.will(step(cut=100, end="deaf"))
    async with fetcher_with(ca_file=ca_file, retry=RetryConfig(attempts=1)) as fetcher:
        with pytest.raises(FetchTimeout):
            await fetcher.fetch(url)
        for _ in range(5):  # rounds of the loop, in which it closes the socket
            await anyio.lowlevel.checkpoint()
        assert connections_to(tls_server.port) == 0


async def test_call_cancelled_as_its_handshake_ends_leaves_nothing(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tls_server.put("/x", CONTENT)
    scope = anyio.CancelScope()
    way = Connection if not fetcher_with()._by_session else ResponseHandler
    made = way.connection_made

    def made_and_cancelled(handler: Any, transport: asyncio.BaseTransport) -> None:  # noqa: ANN401
        made(handler, transport)
        scope.cancel()

    monkeypatch.setattr(way, "connection_made", made_and_cancelled)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        with scope:
            await fetcher.fetch(url, 0, 1)
        assert scope.cancelled_caught
    assert connections_to(tls_server.port) == 0


async def test_a_call_cancelled_in_its_handshake_leaves_no_connection(fetcher_with: Callable[..., Fetcher]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system connects, nobody answers
        port = silent.getsockname()[1]
        async with fetcher_with() as fetcher:
            with anyio.move_on_after(0.1):
                await fetcher.fetch(f"https://127.0.0.1:{port}/x", 0, 1)
        assert connections_to(port) == 0


async def test_closing_ends_an_open_stream(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    server.every = lambda _: step(silent="stall")
    fetcher = fetcher_with()
    await fetcher.__aenter__()
    async with fetcher.fetch_stream([ByteRange(url, 0, 1)]) as stream:
        await all_others_wait()
        await fetcher.__aexit__()
        with pytest.raises(ClosedError):
            await anext(stream)


async def test_another_loop_is_refused(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    await fetcher.fetch(url, 0, 1)

    def elsewhere() -> None:
        with pytest.raises(WrongLoop, match="loop"):
            asyncio.run(fetcher.fetch(url, 0, 1))

    await anyio.to_thread.run_sync(elsewhere)
    assert bytes(await fetcher.fetch(url, 0, 1)) == CONTENT[:1]


def test_two_loops_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(CONTENT)

    async def once() -> bytes:
        async with Fetcher() as fetcher:
            return bytes(await fetcher.fetch(str(path), 5, 10))

    assert asyncio.run(once()) == asyncio.run(once()) == CONTENT[5:10]


async def test_forked_child_leaves_the_parents_connections_alone(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    import gc

    url = server.put("/x", CONTENT)
    async with fetcher_with() as fetcher:
        await fetcher.fetch(url, 0, 1)
        child = fork()
        if child == 0:
            code = 1
            try:
                fetcher.fetch(url, 0, 1).send(None)
            except WrongLoop as error:
                # What a worker does to the objects it inherited: drop and collect them.
                fetcher.__dict__.clear()
                gc.collect()
                code = 0 if "forked" in str(error) else 2
            finally:
                os._exit(code)
        _, status = await anyio.to_thread.run_sync(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert bytes(await fetcher.fetch(url, 1, 2)) == CONTENT[1:2]
        assert server.connections == 1


async def test_connections_are_reused(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    for start in range(10):
        await fetcher.fetch(url, start, start + 1)
    assert server.connections == 1


async def test_a_dead_pooled_connection_costs_no_attempt(
    hasty: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    await hasty.fetch(url, 0, 1)
    server.will(step(silent="reset"))
    assert bytes(await hasty.fetch(url, 1, 2)) == CONTENT[1:2]
    assert [request.connection for request in server.requests] == [1, 1, 2]
    assert hasty.statistics().retries == hasty.statistics().errors == 0


async def test_a_new_connection_that_dies_is_an_attempt(
    hasty: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    server.will(step(silent="reset"))
    with pytest.raises(ConnectionError):
        await hasty.fetch(server.put("/x", CONTENT), 1, 2)
    assert len(server.requests) == 1


async def test_a_half_close_after_the_body_is_no_error(
    hasty: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    big = CONTENT * 64
    server.will(step(end="half-close"))
    assert bytes(await hasty.fetch(server.put("/x", big))) == big


async def test_an_unreadable_ca_file_is_a_config_error(fetcher_with: Callable[..., Fetcher], tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("empty.pem", "missing.pem"):
        with pytest.raises(ConfigError, match=name):
            await fetcher_with(ca_file=str(tmp_path / name)).__aenter__()


async def test_statistics_add_up(fetcher: Fetcher, server: LyingServer, step: type[StepType]) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(status=503))
    await fetcher.fetch(url, 0, 1000)
    now = fetcher.statistics()
    assert (now.requests, now.bytes, now.retries, now.errors, now.redirects) == (2, 1000, 1, 1, 0)
    host = now.hosts[server.url("")]
    assert (host.requests, host.bytes, host.limit, host.in_flight, host.waiting) == (2, 1000, 64, 0, 0)
    assert "2 requests" in repr(fetcher)


async def test_a_request_leaves_nothing_to_the_garbage_collector(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    await fetcher.fetch(url, 0, 100)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await fetcher.fetch(url, 100, len(CONTENT))
        await anyio.lowlevel.checkpoint()
        gc.collect()
        left = [thing for thing in gc.garbage if type(thing) in {Exchange, HttpRequest, Permit, aiohttp.ClientResponse}]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


@pytest.mark.parametrize("verb", ["fetch_many", "fetch_stream"])
async def test_an_error_leaves_nothing_to_the_garbage_collector(
    fetcher: Fetcher, server: LyingServer, verb: str
) -> None:
    """What an error refers to by its traceback, bytes that have come among it, goes with it."""
    ranges = [ByteRange(server.url("/nothing"), start, start + 1) for start in range(3)]
    errors: list[weakref.ref[NotFound]] = []
    gc.disable()
    try:
        try:
            if verb == "fetch_many":
                await fetcher.fetch_many(ranges)
            else:
                async with fetcher.fetch_stream(ranges) as arriving:
                    async for _ in arriving:
                        pass
        except NotFound as error:
            errors.append(weakref.ref(error))
        await anyio.lowlevel.checkpoint()
        assert [error() for error in errors] == [None]
    finally:
        gc.enable()

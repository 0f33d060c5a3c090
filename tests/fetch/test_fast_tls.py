"""TLS that aiofastnet carries, on asyncio's loop and on its own; uvloop carries it itself.

``--carried`` runs all tests of the engine so on asyncio's loop, too; on aiofastnet's own they run so anyway.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import ssl
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import aiofastnet
import anyio
import pytest
import trustme

from asyncfetch import ConnectionFailed, Fetcher, RetryConfig, TimeoutConfig
from asyncfetch.fetch import connector
from asyncfetch.fetch.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fetch.conftest import LyingServer, Step

CONTENT = bytes(range(256)) * 4096


def on_uvloop() -> bool:
    return type(asyncio.get_running_loop()).__module__.startswith("uvloop")


@pytest.fixture
def looked_at_anew() -> Iterator[None]:
    """What is installed is seen again in the test, and behind it."""
    connector._is_known.cache_clear()
    yield
    connector._is_known.cache_clear()


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Transport]:
    """The connections that aiofastnet has made."""
    made: list[asyncio.Transport] = []
    connect = aiofastnet.create_connection

    async def connect_and_note(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - only handed on
        transport, protocol = await connect(*arguments, **options)
        made.append(transport)
        return transport, protocol

    monkeypatch.setattr(aiofastnet, "create_connection", connect_and_note)
    return made


async def test_bodies_come_whole_over_connections_that_are_used_again(
    fetcher_with: Callable[..., Fetcher],
    tls_server: LyingServer,
    ca_file: str,
    carried: list[asyncio.Transport],
) -> None:
    url = tls_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file, aiofastnet=True) as fetcher:
        for start, stop in ((0, 10), (5, 1 << 16), (0, len(CONTENT)), (100, 100_000)):
            assert await fetcher.fetch(url, start, stop) == CONTENT[start:stop]
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(fetcher.fetch, url, 0, 1000)
    assert tls_server.connections <= 20
    assert len(carried) == (0 if on_uvloop() else tls_server.connections)


async def test_plain_http_is_the_loops(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, carried: list[asyncio.Transport]
) -> None:
    async with fetcher_with(aiofastnet=True) as fetcher:
        assert await fetcher.fetch(server.put("/x", CONTENT)) == CONTENT
    assert carried == []


async def test_it_can_be_switched_off(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, carried: list[asyncio.Transport]
) -> None:
    async with fetcher_with(ca_file=ca_file, aiofastnet=False) as fetcher:
        assert await fetcher.fetch(tls_server.put("/x", CONTENT)) == CONTENT
    assert carried == []


async def test_no_certificate_goes_to_a_file(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", no_room)
    async with fetcher_with(ca_file=ca_file, aiofastnet=True) as fetcher:
        assert await fetcher.fetch(tls_server.put("/x", CONTENT)) == CONTENT


@pytest.mark.usefixtures("looked_at_anew")
async def test_where_it_is_not_installed_the_loop_carries_tls(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiofastnet", None)
    async with fetcher_with(ca_file=ca_file, aiofastnet=True) as fetcher:
        assert await fetcher.fetch(tls_server.put("/x", CONTENT)) == CONTENT


async def _connect_anew(self: object, address: tuple[str, int]) -> None:
    """As another aiohttp may."""


@pytest.mark.usefixtures("looked_at_anew")
async def test_where_a_version_is_not_known_the_loop_carries_tls_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aiofastnet, "__version__", "1.3.0")
    assert [connector._is_known() for _ in range(2)] == [False, False]
    assert not await connector.can_be_fast()
    assert ["aiofastnet 1.3.0 is not known" in record.message for record in caplog.records] == [True]


async def test_it_carries_tls_on_every_loop_but_uvloop() -> None:
    assert await connector.can_be_fast() is not on_uvloop()


async def test_certificates_are_checked_as_ever(ca_file: str) -> None:
    context = await connector.tls_context(ca_file, is_fast=True)
    assert context.verify_mode is ssl.CERT_NONE  # what it says
    assert ssl.SSLContext.verify_mode.fget(context) is ssl.CERT_REQUIRED  # type: ignore[attr-defined]
    assert context.check_hostname


@pytest.mark.parametrize("names", [["data.example.org", "127.0.0.2"], None], ids=["another host's", "unknown"])
async def test_a_certificate_that_is_not_good_is_refused(
    fetcher_with: Callable[..., Fetcher],
    lying_server: type[LyingServer],
    ca: trustme.CA,
    ca_file: str,
    names: list[str] | None,
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (ca.issue_cert(*names) if names else trustme.CA().issue_cert("127.0.0.1")).configure_cert(context)
    async with lying_server(context) as server, fetcher_with(ca_file=ca_file, aiofastnet=True) as fetcher:
        with pytest.raises(ConnectionFailed, match=r"certificate.*isn't trusted.*ca_file") as caught:
            await fetcher.fetch(server.put("/x", CONTENT))
        assert caught.value.attempts == 1
        assert server.requests == []
    gc.collect()


async def test_a_server_without_tls_and_none_at_all_are_failures(
    fetcher_with: Callable[..., Fetcher], ca_file: str
) -> None:
    async def answer_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    plain = await asyncio.start_server(answer_plainly, "127.0.0.1")
    async with plain, fetcher_with(ca_file=ca_file, aiofastnet=True) as fetcher:
        with pytest.raises(ConnectionFailed):
            await fetcher.fetch(f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}/x")
        with pytest.raises(ConnectionFailed):
            await fetcher.fetch("https://127.0.0.1:1/x", 0, 1)
    gc.collect()


async def test_one_that_closes_in_the_handshake_is_a_failure_and_nothing_is_logged(
    fetcher_with: Callable[..., Fetcher], ca_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(await reader.read(1 << 16)) == 1 << 16:
            pass
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1")
    retry = RetryConfig(outage_seconds=0)
    async with server, fetcher_with(ca_file=ca_file, aiofastnet=True, retry=retry) as fetcher:
        with pytest.raises(ConnectionFailed, match="closed in the handshake of TLS"):
            await fetcher.fetch(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/x")
    assert caplog.records == []
    gc.collect()


async def test_a_broken_body_is_read_over(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, step: type[Step]
) -> None:
    url = tls_server.put("/x", CONTENT)
    tls_server.steps = [step(cut=1000, end="reset"), step(cut=70_000, end="close")]
    async with fetcher_with(ca_file=ca_file, aiofastnet=True) as fetcher:
        assert await fetcher.fetch(url) == CONTENT
    assert len(tls_server.requests) == 3


async def test_cancelled_in_the_handshake_no_socket_is_left(fetcher_with: Callable[..., Fetcher], ca_file: str) -> None:
    connected, gone = anyio.Event(), anyio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        while await reader.read(1000):
            pass
        writer.close()
        gone.set()

    deaf = await asyncio.start_server(say_nothing, "127.0.0.1")
    url = f"https://127.0.0.1:{deaf.sockets[0].getsockname()[1]}/x"
    async with deaf, fetcher_with(ca_file=ca_file, aiofastnet=True) as fetcher:
        async with anyio.create_task_group() as group:
            group.start_soon(fetcher.fetch, url, 0, 1)
            await connected.wait()
            group.cancel_scope.cancel()
        with anyio.fail_after(5):
            await gone.wait()


async def test_what_is_cancelled_or_closed_is_not_kept_for_long(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str
) -> None:
    loop = asyncio.get_running_loop()
    if on_uvloop() or "create_server" in vars(loop):  # which aiofastnet sets
        pytest.skip("its loop carries TLS, or the server's, too")
    url, timeouts = tls_server.put("/x", CONTENT), TimeoutConfig(connect_seconds=3)
    async with fetcher_with(ca_file=ca_file, aiofastnet=True, timeouts=timeouts) as fetcher:
        for number in range(20):
            with anyio.move_on_after(number / 2000):
                await fetcher.fetch(url, 0, 1 << 16)
        await fetcher.fetch(url, 0, 1)
    timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
    left = [timer.when() - loop.time() for timer in timers if "SSLTransport" in repr(timer)]
    assert 0 < max(left) <= 3


async def test_its_connections_have_our_protocol(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, carried: list[asyncio.Transport]
) -> None:
    async with fetcher_with(ca_file=ca_file, aiofastnet=True, direct_bodies=True) as fetcher:
        await fetcher.fetch(tls_server.put("/x", CONTENT))
        assert [isinstance(transport.get_protocol(), Connection) for transport in carried] == [True] * (not on_uvloop())

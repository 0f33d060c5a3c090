"""Bodies straight from the socket into the caller's memory, plain and over TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import pytest
from aiohttp.client_proto import ResponseHandler

from asyncfetch.config import RetryConfig, TimeoutConfig
from asyncfetch.errors import ConnectionFailed, FetchTimeout
from asyncfetch.fetch.transports import direct

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import End, LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = random.Random(2).randbytes(3_000_000)


@pytest.fixture
def way() -> str:
    """This is about the direct one, whichever the other tests take."""
    return "direct"


SMUGGLED = b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"


def counting_parser(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all pieces of bodies that go through aiohttp's reader from now on."""
    pieces: list[int] = []
    feed_data = aiohttp.StreamReader.feed_data

    def feed_and_count(reader: aiohttp.StreamReader, data: bytes, size: int = 0) -> bool:
        pieces.append(len(data))
        return feed_data(reader, data, size)

    monkeypatch.setattr(aiohttp.StreamReader, "feed_data", feed_and_count)
    return pieces


@pytest.mark.parametrize("direct_bodies", [True, False])
async def test_only_what_comes_with_the_head_goes_through_the_reader(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    ca_file: str,
    monkeypatch: pytest.MonkeyPatch,
    direct_bodies: bool,
) -> None:
    pieces = counting_parser(monkeypatch)
    async with fetcher_with(ca_file=ca_file, direct_bodies=direct_bodies) as fetcher:
        assert await fetcher.fetch(any_server.put("/x", CONTENT)) == CONTENT
    assert (sum(pieces) < len(CONTENT) / 2) == direct_bodies


async def test_the_connection_is_used_again(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for start in range(5):
            assert await fetcher.fetch(url, start) == CONTENT[start:]
    assert any_server.connections == 1


async def test_a_surplus_ends_the_connection(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    url = any_server.put("/x", CONTENT)
    headers = {"Content-Length": str(len(CONTENT))}
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for _ in range(10):
            any_server.will(step(body=CONTENT + SMUGGLED, headers=headers))
            assert await fetcher.fetch(url) == CONTENT
        assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]
        assert fetcher.statistics().retries == 0
    assert any_server.connections == 11


async def test_what_waits_in_the_socket_ends_an_idle_connection(fetcher_with: Callable[..., Fetcher]) -> None:
    """Sent while the loop is busy, so that only the system knows of it."""
    honest = b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-0/1\r\nContent-Length: 1\r\n\r\nx"
    descriptors: list[int] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        descriptors.append(writer.get_extra_info("socket").fileno())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(honest)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(converse, "127.0.0.1") as server, fetcher_with() as fetcher:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for _ in range(3):
            assert bytes(await fetcher.fetch(url)) == b"x"
            os.write(descriptors[-1], SMUGGLED)
    assert len(descriptors) == 3


async def test_nothing_is_written_after_a_cancellation(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    url = any_server.put("/x", CONTENT)
    for cut in (1_000_000, 1_500_000, 2_999_999):
        any_server.will(step(cut=cut, end="stall"))
        buffer = bytearray(len(CONTENT))
        async with fetcher_with(ca_file=ca_file) as fetcher:
            with anyio.move_on_after(0.1):
                await fetcher.fetch_into(url, 0, len(CONTENT), buffer)
            assert buffer[:cut] == CONTENT[:cut]
            buffer[:] = bytes(len(buffer))
            assert await fetcher.fetch(url) == CONTENT
        assert not any(buffer)


async def test_a_cancellation_at_any_moment(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for moment in range(40):
            buffer = bytearray(len(CONTENT))
            with anyio.move_on_after(moment * 0.0002) as scope:
                await fetcher.fetch_into(url, 0, len(CONTENT), buffer)
            if scope.cancelled_caught:
                buffer[:] = bytes(len(buffer))
                await anyio.wait_all_tasks_blocked()
                assert not any(buffer)
        assert await fetcher.fetch(url) == CONTENT
        assert fetcher.statistics().in_flight == 0


@pytest.mark.parametrize("end", ["close", "reset", "half-close", "stall"])
async def test_a_body_that_breaks_off_is_resumed(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType], end: End
) -> None:
    url = any_server.put("/x", CONTENT)
    any_server.will(step(cut=1_000_000, end=end))
    async with fetcher_with(ca_file=ca_file) as fetcher:
        assert await fetcher.fetch(url) == CONTENT
        assert fetcher.statistics().retries == 1
    first, second = (request.headers["range"] for request in any_server.requests)
    assert first == "bytes=0-"
    assert second == "bytes=1000000-2999999" or end == "reset"  # which throws away what is under way


async def test_a_limit_of_less_than_a_millisecond_is_kept(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    """uvloop gives no timer for it, but a plain handle. So little is left of a limit where a check came too early."""
    server.every = lambda _: step(silent="stall")
    timeouts = TimeoutConfig(connect_seconds=0.0003, first_byte_seconds=0.0003)
    async with fetcher_with(timeouts=timeouts, retry=RetryConfig(attempts=1)) as fetcher:
        with pytest.raises(FetchTimeout, match=r"0\.0003 s"):
            await fetcher.fetch(server.put("/x", b"content"))


async def test_an_early_end_tells_both_lengths(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    any_server.every = lambda _: step(cut=1_200_000, end="close")
    url = any_server.put("/x", CONTENT, etag=None)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        with pytest.raises(ConnectionFailed, match="1200000 of 3000000"):
            await fetcher.fetch(url)


async def test_an_honest_body_in_chunks(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    in_chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)
    server.will(step(headers={"Content-Length": None, "Transfer-Encoding": "chunked"}, body=in_chunks))
    async with fetcher_with() as fetcher:
        assert await fetcher.fetch(url) == CONTENT
        assert await fetcher.fetch(url) == CONTENT
    assert server.connections == 1


@pytest.mark.parametrize("status", [206, 503])
async def test_chunks_that_break_while_nobody_reads_are_a_broken_body(
    fetcher_with: Callable[..., Fetcher], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """aiohttp closes the connection then, and its reader raises a RuntimeError."""
    reading = asyncio.Event()
    readany = aiohttp.StreamReader.readany

    async def read_late(reader: aiohttp.StreamReader) -> bytes:
        reading.set()
        while reader._protocol.connected and not reader.is_eof():  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0)
        return await readany(reader)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not reading.is_set():
            head = b"HTTP/1.1 %d x\r\nContent-Range: bytes 0-0/1\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head % status)
            await reading.wait()
            writer.write(b"rubbish\r\n")
        else:
            writer.write(b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-0/1\r\nContent-Length: 1\r\n\r\nx")
        await reader.read()
        writer.close()

    monkeypatch.setattr(aiohttp.StreamReader, "readany", read_late)
    async with await asyncio.start_server(converse, "127.0.0.1") as server, fetcher_with() as fetcher:
        assert bytes(await fetcher.fetch(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")) == b"x"
        assert fetcher.statistics().retries == 1


async def test_another_aiohttp_is_noticed_and_told_once(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await direct.is_possible()
    direct._warn.cache_clear()
    monkeypatch.setattr(ResponseHandler, "should_close", property(lambda _: True))
    pieces = counting_parser(monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with fetcher_with() as fetcher:
                assert await fetcher.fetch(server.put("/x", CONTENT)) == CONTENT
    assert sum(pieces) >= 2 * len(CONTENT)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"aiohttp {aiohttp.__version__} has changed inside"
    ]
    direct._warn.cache_clear()


async def test_a_connection_that_ends_just_before_its_body_is_taken_over_ends_the_body(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's TLS tells a connection's end in the next round of the loop to who was its protocol in this one."""
    receive = direct.receive

    async def receive_from_the_dead(response: aiohttp.ClientResponse, *args: Any) -> None:  # noqa: ANN401
        monkeypatch.setattr(direct, "receive", receive)
        assert response.connection is not None
        tls: Any = response.connection.transport
        if not hasattr(tls, "_ssl_protocol"):
            pytest.skip("it reaches into asyncio's own TLS")
        raw = tls._ssl_protocol._transport
        tls._ssl_protocol.connection_lost(ConnectionResetError())
        raw.abort()
        await receive(response, *args)

    monkeypatch.setattr(direct, "receive", receive_from_the_dead)
    url = tls_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file, timeouts=TimeoutConfig(stall_seconds=30)) as fetcher:
        with anyio.fail_after(5):
            assert await fetcher.fetch(url, 0, 1_000_000) == CONTENT[:1_000_000]
        assert fetcher.statistics().retries == 1

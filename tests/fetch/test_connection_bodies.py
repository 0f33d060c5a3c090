"""Bodies straight from the socket into the caller's memory, plain and over TLS."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import pytest
from aiohttp.client_proto import ResponseHandler
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.config import RetryConfig, TimeoutConfig
from asyncfetch.errors import ConnectionFailed, FetchTimeout
from asyncfetch.fetch import ask_server
from asyncfetch.fetch.answer import parse_head
from asyncfetch.fetch.connection import Connection
from tests.conftest import all_others_wait
from tests.fetch.conftest import cancel_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import End, LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = random.Random(2).randbytes(3_000_000)
CHUNKED: dict[str, str | None] = {"Content-Length": None, "Transfer-Encoding": "chunked"}
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)


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
async def test_direct_bodies_bypass_the_reader(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    ca_file: str,
    monkeypatch: pytest.MonkeyPatch,
    direct_bodies: bool,
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file, direct_bodies=direct_bodies) as fetcher:
        pieces = counting_parser(monkeypatch)
        assert bytes(await fetcher.fetch(url)) == CONTENT
    assert sum(pieces) == (0 if direct_bodies else len(CONTENT))


async def test_the_connection_is_used_again(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for start in range(5):
            assert bytes(await fetcher.fetch(url, start)) == CONTENT[start:]
    assert any_server.connections == 1


async def test_a_surplus_ends_the_connection(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    url = any_server.put("/x", CONTENT)
    headers = {"Content-Length": str(len(CONTENT))}
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for _ in range(10):
            any_server.will(step(body=CONTENT + SMUGGLED, headers=headers))
            assert bytes(await fetcher.fetch(url)) == CONTENT
        assert bytes(await fetcher.fetch(url, 0, 10)) == CONTENT[:10]
        assert fetcher.statistics().retries == 0
    assert any_server.connections == 11


async def test_unread_bytes_in_the_socket_end_an_idle_connection(fetcher_with: Callable[..., Fetcher]) -> None:
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


async def test_buffers_are_not_written_after_a_cancellation(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    ca_file: str,
    step: type[StepType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = any_server.put("/x", CONTENT)
    for cut in (1_000_000, 1_500_000, 2_999_999):
        any_server.will(step(cut=cut, end="stall"))
        buffer = bytearray(len(CONTENT))
        with monkeypatch.context() as patch:
            async with fetcher_with(ca_file=ca_file) as fetcher:
                with anyio.CancelScope() as scope:
                    cancel_after(patch, cut, scope)
                    await fetcher.fetch_into(url, 0, len(CONTENT), buffer)
                assert buffer[:cut] == CONTENT[:cut]
                buffer[:] = bytes(len(buffer))
                assert bytes(await fetcher.fetch(url)) == CONTENT
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
                await all_others_wait()
                assert not any(buffer)
        assert bytes(await fetcher.fetch(url)) == CONTENT
        assert fetcher.statistics().in_flight == 0


@pytest.mark.parametrize("end", ["close", "reset", "half-close", "stall"])
async def test_a_body_that_breaks_off_is_resumed(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType], end: End
) -> None:
    url = any_server.put("/x", CONTENT)
    any_server.will(step(cut=1_000_000, end=end))
    async with fetcher_with(ca_file=ca_file) as fetcher:
        assert bytes(await fetcher.fetch(url)) == CONTENT
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
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for _ in range(3):
            any_server.will(step(headers=CHUNKED, body=IN_CHUNKS), step(headers=CHUNKED, body=IN_CHUNKS))
            assert bytes(await fetcher.fetch(url)) == CONTENT  # asked for again by the session
            assert bytes(await fetcher.fetch(url)) == CONTENT  # so is this at once, then it isn't in chunks any more
        assert fetcher.statistics().retries == 0


async def test_a_surplus_behind_what_was_handed_on_ends_the_connection(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for _ in range(3):
            any_server.will(step(headers=CHUNKED, body=IN_CHUNKS + SMUGGLED))
            assert bytes(await fetcher.fetch(url)) == CONTENT
            assert bytes(await fetcher.fetch(url, 0, 10)) == CONTENT[:10]
        assert fetcher.statistics().retries == 0


async def test_an_empty_body_may_come_with_a_206(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    """RFC 9110 has no such range, but it says all there is to say."""
    url = any_server.put("/x", b"12345")
    place = {"Content-Range": "bytes 5-4/5", "Content-Length": "0"}
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for _ in range(2):
            any_server.will(step(status=206, headers=place, body=b""))
            assert bytes(await fetcher.fetch(url, 5)) == b""
            assert bytes(await fetcher.fetch(url)) == b"12345"
    assert any_server.connections == 1


async def test_chunks_that_break_while_nobody_reads_are_a_broken_body(
    fetcher_with: Callable[..., Fetcher], monkeypatch: pytest.MonkeyPatch
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
            head = b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-0/1\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head)
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


async def test_other_requests_have_connections_of_their_own(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for start in range(3):
            assert bytes(await fetcher.fetch(url, start)) == CONTENT[start:]
            assert (await ask_server(fetcher, "GET", url)).body == CONTENT
            assert (await ask_server(fetcher, "GET", url, headers={"Range": "bytes=1-2"})).body == CONTENT[1:3]
    assert any_server.connections == 2


async def test_connection_ended_behind_the_body_is_not_reused(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, step: type[StepType]
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file) as fetcher:
        for start in range(3):
            any_server.will(step(headers={"Connection": "close"}))
            assert bytes(await fetcher.fetch(url, start)) == CONTENT[start:]
        assert fetcher.statistics().retries == 0
    assert any_server.connections == 3


NAMES = st.sampled_from([
    "Content-Length",
    "Content-Range",
    "ETag",
    "Connection",
    "Vary",
    "X-Own",
    "Transfer-Encoding",
    "Content-Type",
]) | st.text(min_size=1, max_size=8)
VALUES = st.sampled_from(["5", "05", "5, 5", "keep-alive", "Close", "chunked", "bytes 0-4/5", "identity"]) | st.text(
    max_size=12
)
LINES = st.tuples(
    NAMES, st.sampled_from([":", ": ", " : ", ""]), VALUES, st.sampled_from(["\r\n", "\n", "\r", " \r\n"])
)
STATUSES = st.sampled_from([
    "HTTP/1.1 206 Partial Content\r\n",
    "HTTP/1.1 206\r\n",
    "HTTP/1.1 2060 x\r\n",
    "HTTP/1.0 206 x\r\n",
    "HTTP/1.1 206 x\n",
])


@settings(max_examples=500, deadline=None)
@given(STATUSES, st.lists(LINES, max_size=5), st.booleans())
async def test_a_head_that_is_taken_is_what_aiohttp_makes_of_it(first: str, lines: list[Any], has_length: bool) -> None:
    text = first + "".join(map("".join, lines)) + ("Content-Length: 5\r\n" if has_length else "") + "\r\n"
    head = text.encode("utf-8", "surrogatepass")
    taken = parse_head(head)
    if taken is None or taken.length_bytes is None:
        return
    fields = taken.headers
    said = [one for value in fields.getall("Content-Length") for one in value.split(",")]
    if len(said) > 1:  # which aiohttp refuses whatever it says
        assert {int(one) for one in said} == {taken.length_bytes}
        return
    handler = ResponseHandler(asyncio.get_running_loop())
    handler.connection_made(asyncio.Transport())
    handler.set_response_params(read_until_eof=True, auto_decompress=False)
    handler.data_received(head)
    message, body = await handler.read()
    assert (message.code, message.version) == (206, (1, 1))
    assert [(name.lower(), value) for name, value in message.headers.items()] == [
        (name.lower(), value) for name, value in fields.items()
    ]
    assert message.should_close == (fields.get("Connection", "").lower() == "close")
    length = taken.length_bytes
    if length < 100:
        handler.data_received(bytes(length))
        assert body.is_eof()
        assert len(body.read_nowait()) == length


def test_most_heads_are_taken() -> None:
    head = (
        b'HTTP/1.1 206 Partial Content\r\nServer: nginx\r\nDate: Mon, 23 Nov 2026 02:00:00 GMT\r\nETag: "a-1"\r\n'
        b"Content-Type: application/octet-stream\r\nContent-Length: 5\r\nConnection: keep-alive\r\nVary: a\r\n"
        b"Vary: b\r\nx-amz-id-2:Zm9v+/=\r\nContent-Range: bytes 0-4/10\r\n\r\n"
    )
    taken = parse_head(head)
    assert taken is not None
    assert taken.length_bytes == 5
    fields = taken.headers
    assert (fields["etag"], fields["x-amz-id-2"], fields.getall("vary")) == ('"a-1"', "Zm9v+/=", ["a", "b"])


async def test_connection_that_ends_before_its_body_is_taken_ends_it(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's TLS tells a connection's end in the next round of the loop."""
    receive = Connection.receive

    async def receive_from_the_dead(connection: Connection, *args: Any) -> None:  # noqa: ANN401
        monkeypatch.setattr(Connection, "receive", receive)
        tls: Any = connection.transport
        if not hasattr(tls, "_ssl_protocol"):
            pytest.skip("it reaches into asyncio's own TLS")
        raw = tls._ssl_protocol._transport
        tls._ssl_protocol.connection_lost(ConnectionResetError())
        raw.abort()
        await receive(connection, *args)

    monkeypatch.setattr(Connection, "receive", receive_from_the_dead)
    url = tls_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file, timeouts=TimeoutConfig(stall_seconds=30)) as fetcher:
        with anyio.fail_after(5):
            assert bytes(await fetcher.fetch(url, 0, 1_000_000)) == CONTENT[:1_000_000]
        assert fetcher.statistics().retries == 1

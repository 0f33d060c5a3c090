"""Whatever a server does: the right bytes, or an error of ours."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.config import RetryConfig, TimeoutConfig
from asyncfetch.errors import (
    AsyncFetchError,
    ConnectionFailed,
    FetchError,
    FetchTimeout,
    InvalidResponse,
    ObjectChanged,
    Throttled,
)
from asyncfetch.fetch import connection
from asyncfetch.ranges import ByteRange
from tests.conftest import all_others_wait
from tests.fetch.fault_table import CONTENT, WIRE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer, Request
    from tests.fetch.conftest import Step as StepType

Kind = dict[str, Any]


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture
def url(server: LyingServer) -> str:
    return server.put("/x", CONTENT)


@pytest.mark.parametrize(
    ("kind", "phase"), [({"silent": "stall"}, "first byte"), ({"cut": 5, "end": "stall"}, "next bytes")]
)
async def test_a_timeout_names_its_phase(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    step: type[StepType],
    url: str,
    kind: Kind,
    phase: str,
) -> None:
    server.will(step(**kind))
    timeouts = TimeoutConfig(first_byte_seconds=0.2, stall_seconds=0.2)
    async with fetcher_with(timeouts=timeouts, retry=RetryConfig(attempts=1)) as fetcher:
        with pytest.raises(FetchTimeout, match=rf"{phase}.*0\.2 s"):
            await fetcher.fetch(url, 10, 20)


@asynccontextmanager
async def dripping() -> AsyncIterator[str]:
    """The url of ten bytes that come one by one, 33 in a second."""
    drip = await anyio.create_tcp_listener(local_host="127.0.0.1")

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError):
                await stream.receive()
                await stream.send(b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-9/10\r\nContent-Length: 10\r\n\r\n")
                for digit in b"0123456789":
                    await anyio.sleep(0.03)
                    await stream.send(bytes([digit]))

    async with drip, anyio.create_task_group() as group:
        group.start_soon(drip.serve, answer)
        yield f"http://127.0.0.1:{drip.extra(anyio.abc.SocketAttribute.local_port)}/"
        group.cancel_scope.cancel()


async def test_a_slow_but_moving_body_is_left_alone(fetcher_with: Callable[..., Fetcher]) -> None:
    timeouts = TimeoutConfig(first_byte_seconds=5, stall_seconds=0.25, min_bytes_per_second=4)
    async with fetcher_with(timeouts=timeouts) as fetcher, dripping() as url:
        assert bytes(await fetcher.fetch(url)) == b"0123456789"


async def test_a_body_that_drips_has_stalled(fetcher_with: Callable[..., Fetcher]) -> None:
    timeouts = TimeoutConfig(first_byte_seconds=5, stall_seconds=0.15, min_bytes_per_second=200)
    retry = RetryConfig(attempts=1)
    async with fetcher_with(timeouts=timeouts, retry=retry) as fetcher, dripping() as url:
        with pytest.raises(FetchTimeout, match=r"lower min_bytes_per_second: \d of 30 came"):
            await fetcher.fetch(url)


@pytest.mark.parametrize("size", [5 * 10**12, 10**17])
@pytest.mark.parametrize("in_parts", [False, True])
async def test_an_object_that_memory_cannot_hold_is_refused(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str, size: int, in_parts: bool
) -> None:
    def answer(request: Request) -> StepType:
        length = 1 if request.headers["range"] == "bytes=0-0" else size
        head = {"Content-Range": f"bytes 0-{length - 1}/{size}", "Content-Length": str(length)}
        return step(status=206, headers=head, cut=1, end="keep" if length == 1 else "stall")

    server.every = answer
    with pytest.raises(FetchError, match=f"no memory for its {size} bytes: ask for a shorter range") as caught:
        await fetcher.fetch(url, 0, size if in_parts else None)
    assert (caught.value.url, caught.value.start, caught.value.stop) == (url, 0, size if in_parts else None)
    assert len(server.requests) == 1


async def test_a_broken_body_is_resumed_where_it_broke(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str
) -> None:
    server.will(step(cut=1000, end="close"), step(cut=2000, end="close"))
    assert bytes(await fetcher.fetch(url, 0, 10_000)) == CONTENT[:10_000]
    assert [request.headers["range"] for request in server.requests] == [
        "bytes=0-9999",
        "bytes=1000-9999",
        "bytes=3000-9999",
    ]
    assert server.requests[1].headers["if-match"] == server.etags["/x"]


async def test_progress_resets_the_count_of_attempts(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str, time: FakeTime
) -> None:
    server.every = lambda _: step(cut=100, end="close")
    with anyio.fail_after(15):
        assert bytes(await fetcher.fetch(url, 0, 2000)) == CONTENT[:2000]
    assert len(server.requests) == 20
    assert time.sleeps == [0.1] * 19


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
async def test_broken_body_without_a_strong_etag_starts_over(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], etag: str | None
) -> None:
    url = server.put("/x", CONTENT, etag)
    server.will(step(cut=1000, end="close"))
    assert bytes(await fetcher.fetch(url, 0, 10_000)) == CONTENT[:10_000]
    assert [request.headers["range"] for request in server.requests] == ["bytes=0-9999"] * 2


async def test_a_tag_that_cannot_be_sent_back_still_tells_versions(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    """RFC 9110 allows bytes above ASCII in it, of no encoding in particular."""
    url = server.put("/x", CONTENT)

    def answer(first: int, tag: bytes) -> StepType:
        head = f"HTTP/1.1 206 OK\r\nContent-Length: 9\r\nContent-Range: bytes {first}-{first + 8}/{len(CONTENT)}\r\n"
        return step(raw=head.encode() + b'ETag: "' + tag + b'"\r\n\r\n' + CONTENT[first : first + 9])

    # A connection of ours doesn't read such a head: the session asks again.
    again = [answer(0, b"\xe9")] if not fetcher._by_session else []
    server.will(*again, answer(0, b"\xe9"), answer(9, b"\xe9"), answer(18, b"\xe8"))
    assert await fetcher.fetch(url, 0, 9) == CONTENT[:9]
    assert await fetcher.fetch(url, 9, 18) == CONTENT[9:18]
    assert "if-match" not in server.requests[1].headers
    with pytest.raises(ObjectChanged):
        await fetcher.fetch(url, 18, 27)


async def test_no_object_is_joined_from_two_versions(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str
) -> None:
    server.will(step(cut=1000, end="close"), step(headers={"ETag": '"other"'}))
    with pytest.raises(ObjectChanged):
        await fetcher.fetch(url, 0, 10_000)


async def test_a_rest_without_etag_is_not_joined(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str
) -> None:
    server.will(step(cut=1000, end="close"), step(headers={"ETag": None}))
    assert bytes(await fetcher.fetch(url, 0, 10_000)) == CONTENT[:10_000]
    assert server.requests[2].headers["range"] == "bytes=0-9999"


@pytest.mark.parametrize(("start", "stop"), [(500, 1000), (0, 2_000_000), (0, None)])
async def test_a_server_without_ranges_serves_all_or_what_comes_early(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str, start: int, stop: int | None
) -> None:
    server.every = lambda _: step(ignore_range=True)
    assert bytes(await fetcher.fetch(url, start, stop)) == CONTENT[start:stop]
    assert (await fetcher.stat(url)).size == 2_000_000


async def test_chunked_206_is_counted(fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str) -> None:
    body = b"5\r\n" + CONTENT[:5] + b"\r\n5\r\n" + CONTENT[5:10] + b"\r\n0\r\n\r\n"
    server.will(step(headers={"Content-Length": None, "Transfer-Encoding": "chunked"}, body=body))
    assert bytes(await fetcher.fetch(url, 0, 10)) == CONTENT[:10]


def chunks(content: bytes, *, ended: bool = True) -> dict[str, Any]:
    """Of an answer of 200 that doesn't say how long it is."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:1000], content[1000:]) if part)
    headers = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    return {"ignore_range": True, "headers": headers, "body": body + (b"0\r\n\r\n" if ended else b"")}


@pytest.mark.parametrize("size", [0, 1, 300_000, 2_000_000])
async def test_an_object_of_unknown_length_is_read_whole(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], size: int
) -> None:
    content = CONTENT[:size]
    server.every = lambda _: step(**chunks(content))
    url = server.put("/x", content)
    for _ in range(2):  # on the same connection
        assert await fetcher.fetch(url) == content
    assert (await fetcher.fetch_many([ByteRange(url, 0, None)]))[0] == content
    # A connection of ours sees that the answer isn't plain, and the session asks from then on.
    assert server.connections == 1 + (not fetcher._by_session)
    for verb, part in ((fetcher.fetch_head, content[:100]), (fetcher.fetch_tail, content[-100:])):
        info, view = await verb(server.put(f"/{verb.__name__}", content), 100)
        assert (info.size, bytes(view)) == (size, part)
    assert (await fetcher.stat(server.put("/y", content))).size == size
    with pytest.raises(InvalidResponse, match="ignores Range and doesn't say how long"):
        await fetcher.fetch(url, 10, 20)
    assert fetcher.statistics().in_flight == 0


async def test_an_object_of_unknown_length_of_a_real_server(fetcher: Fetcher) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(CONTENT), 100_000):
            await response.write(CONTENT[start : start + 100_000])
        return response

    runner = web.ServerRunner(web.Server(answer))  # type: ignore[arg-type]
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        assert await fetcher.fetch(f"http://127.0.0.1:{port}/x") == CONTENT
    finally:
        await runner.cleanup()


async def test_a_broken_object_of_unknown_length_starts_over(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str
) -> None:
    server.will(step(**chunks(CONTENT[:5000], ended=False), end="close"), step(**chunks(CONTENT), cut=999, end="reset"))
    server.every = lambda _: step(**chunks(CONTENT))
    assert await fetcher.fetch(url) == CONTENT
    assert len(server.requests) == 3


async def test_an_object_of_unknown_length_that_changes_is_told(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT, None)
    again = [step(**chunks(CONTENT))] if not fetcher._by_session else []
    server.will(*again, step(**chunks(CONTENT)), step(**chunks(CONTENT[:-1])))
    await fetcher.fetch(url)
    with pytest.raises(ObjectChanged, match="its size was 2000000 bytes and is 1999999"):
        await fetcher.fetch(url)


async def test_an_end_that_is_the_connections_is_refused(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str
) -> None:
    server.every = lambda _: step(ignore_range=True, headers={"Content-Length": None}, end="close")
    with pytest.raises(InvalidResponse, match="can't be told from a broken connection"):
        await fetcher.fetch(url)


async def test_an_object_of_unknown_length_has_a_bound(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], url: str
) -> None:
    server.every = lambda _: step(**chunks(CONTENT))
    async with fetcher_with(max_unsized_bytes=len(CONTENT)) as fetcher:
        assert await fetcher.fetch(url) == CONTENT
    async with fetcher_with(max_unsized_bytes=len(CONTENT) - 1) as fetcher:
        with pytest.raises(InvalidResponse, match=r"more than 1999999 bytes .* raise max_unsized_bytes"):
            await fetcher.fetch(url)


@pytest.mark.parametrize("header", ["7", "Tue, 14 Nov 2023 22:30:07 GMT"])
async def test_retry_after_is_honoured(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str, time: FakeTime, header: str
) -> None:
    time.wall_offset = 1_700_001_000.0 - time.now  # 22:30:00
    server.will(step(status=503, headers={"Retry-After": header}))
    assert bytes(await fetcher.fetch(url, 0, 10)) == CONTENT[:10]
    assert time.sleeps == pytest.approx([7.1])


async def test_a_misdirected_request_goes_out_on_another_connection(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str
) -> None:
    assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]
    server.will(step(status=421))
    assert await fetcher.fetch(url, 10, 20) == CONTENT[10:20]
    assert (server.connections, len(server.requests)) == (2, 3)


async def test_a_rate_limit_is_waited_out(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str, time: FakeTime
) -> None:
    server.will(step(status=429, headers={"RateLimit": '"pages";r=3;t=50, "files";r=0;t=20'}))
    assert bytes(await fetcher.fetch(url, 0, 10)) == CONTENT[:10]
    assert time.sleeps == pytest.approx([21.1])
    server.will(step(status=429, headers={"RateLimit": '"files";r=0;t=300'}))
    with pytest.raises(Throttled, match="301 s"):
        await fetcher.fetch(url, 0, 10)
    assert len(time.sleeps) == 1


@pytest.mark.parametrize(
    ("header", "asked"),
    [
        ("3600", "3600 s"),
        ("1" + "0" * 30, "100000000000000000 s"),
        ("Fri, 31 Dec 9999 23:59:59 GMT", "251702299799 s"),
    ],
)
async def test_a_long_retry_after_is_throttled_at_once(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str, time: FakeTime, header: str, asked: str
) -> None:
    server.will(step(status=429, headers={"Retry-After": header}))
    with pytest.raises(Throttled, match=asked):
        await fetcher.fetch(url, 0, 10)
    assert time.sleeps == []


async def test_a_surplus_does_not_reach_the_next_request(
    fetcher: Fetcher, server: LyingServer, step: type[StepType], url: str
) -> None:
    smuggled = b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"
    server.will(step(body=CONTENT[:10] + smuggled))
    assert bytes(await fetcher.fetch(url, 0, 10)) == CONTENT[:10]
    assert bytes(await fetcher.fetch(url, 10, 20)) == CONTENT[10:20]
    assert server.connections == 2


async def test_a_late_surplus_does_not_reach_the_next_request_either(fetcher: Fetcher) -> None:
    honest = b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-0/1\r\nContent-Length: 1\r\n\r\nx"
    first_is_done, surplus_is_sent = asyncio.Event(), asyncio.Event()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(honest)
        await first_is_done.wait()
        writer.write(b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n")
        surplus_is_sent.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(converse, "127.0.0.1") as late:
        url = f"http://127.0.0.1:{late.sockets[0].getsockname()[1]}/"
        assert bytes(await fetcher.fetch(url)) == b"x"
        first_is_done.set()
        await surplus_is_sent.wait()
        await all_others_wait()
        assert bytes(await fetcher.fetch(url)) == b"x"


async def test_port_without_a_listener_is_tried_for_outage_seconds(
    fetcher: Fetcher, server: LyingServer, time: FakeTime
) -> None:
    url = server.url("/x")
    await server.__aexit__()
    with pytest.raises(ConnectionFailed, match=r"no connection.*outage_seconds=300") as caught:
        await fetcher.fetch(url, 0, 1)
    assert caught.value.attempts >= 60
    assert 295 <= sum(time.sleeps) <= 300.0


async def test_an_unknown_name_is_asked_twice(fetcher: Fetcher) -> None:
    with pytest.raises(ConnectionFailed, match="resolved") as caught:
        await fetcher.fetch("http://no-such-host.invalid/x", 0, 1)
    assert caught.value.attempts <= 2


async def test_an_untrusted_certificate_is_fatal(fetcher: Fetcher, tls_server: LyingServer) -> None:
    with pytest.raises(ConnectionFailed, match=r"certificate.*ca_file") as caught:
        await fetcher.fetch(tls_server.put("/x", CONTENT), 0, 1)
    assert caught.value.attempts == 1


async def test_https_to_a_plain_port_is_told(fetcher: Fetcher) -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 plain\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1") as plain:
        port = plain.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionFailed, match="https on this port") as caught:
            await fetcher.fetch(f"https://127.0.0.1:{port}/x", 0, 1)
    assert caught.value.attempts == 2


async def test_a_host_that_never_completes_the_handshake(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    timeouts = TimeoutConfig(connect_seconds=0.1)
    async with fetcher_with(timeouts=timeouts, retry=RetryConfig(outage_seconds=0)) as fetcher:
        with pytest.raises(FetchTimeout, match=r"connecting.*0\.1 s") as caught:
            await fetcher.fetch(f"https://127.0.0.1:{server.port}/x", 0, 1)
    assert caught.value.attempts == 2


# Cut within the few bytes that are asked for here. Chunks are always a range's: those of a whole object, whose length
# nobody tells, are all that can be known of it, and these are another one's.
FAULTS = [replace(wire.step, cut=10) if wire.step.cut else wire.step for wire in WIRE if not wire.waits]
FAULTS = [replace(step, status=206) if "Transfer-Encoding" in step.headers else step for step in FAULTS]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 3000),
    ask=st.tuples(st.integers(-3000, 3200), st.none() | st.integers(0, 3200)),
    steps=st.lists(st.sampled_from(FAULTS), max_size=6),
    etag=st.sampled_from(["auto", None, 'W/"w"']),
    changes_at=st.none() | st.integers(1, 3),
)
async def test_right_bytes_or_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch,
    lying_server: type[LyingServer],
    fetcher_with: Callable[..., Fetcher],
    size: int,
    ask: tuple[int, int | None],
    steps: list[StepType],
    etag: str | None,
    changes_at: int | None,
) -> None:
    # An error's body that never comes is waited for so long; some hundred of them would be minutes.
    monkeypatch.setattr(connection, "DRAIN_LIMIT_SECONDS", 0.02)
    old, new = CONTENT[:size], CONTENT[5000 : 5000 + size]
    start, stop = ask
    async with lying_server() as server, fetcher_with(retry=RetryConfig(attempts=4)) as fetcher:
        url = server.put("/x", old, etag)
        server.will(*steps)
        served = 0

        def change() -> None:
            nonlocal served
            served += 1
            if served == changes_at:
                server.put("/x", new, etag)

        server.limiter = change
        try:
            got = bytes(await fetcher.fetch(url, start, stop))
        except AsyncFetchError:
            return
        assert got in {old[start:stop], new[start:stop]}
        assert stop is None or len(got) == stop - start

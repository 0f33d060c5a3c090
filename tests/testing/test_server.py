"""RangeServer seen from outside: http.client, raw sockets and aiohttp against the real server, in both modes."""

from __future__ import annotations

import gzip
import http.client
import math
import os
import pickle
import re
import socket
import ssl
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import aiohttp
import anyio
import psutil
import pytest

from asyncfetch.errors import ClosedError, ConfigError, MissingDependency, install_command
from asyncfetch.testing import Fault, FaultEvery, FaultOnce, RangeServer, ServedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

CONTENT = bytes(range(256)) * 40
SIZE = len(CONTENT)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def connect(server: RangeServer, seconds: float = 10) -> http.client.HTTPConnection:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    context = ssl.create_default_context(cafile=server.ca_file)
    return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=context)


def ask(server: RangeServer, path: str, *, method: str = "GET", **headers: str) -> Reply:
    connection = connect(server)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read())
    finally:
        connection.close()


@contextmanager
def serving(fault: Fault | None = None, **options: object) -> Iterator[RangeServer]:
    rule = (lambda _: fault) if fault else None
    with RangeServer({"a.bin": CONTENT, "empty": b""}, fault=rule, **options) as server:  # type: ignore[arg-type]
        yield server


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)  # workers that have been told to stop
        assert not thread.is_alive(), thread


@pytest.fixture(scope="module")
def server() -> Iterator[RangeServer]:
    with serving() as server:
        yield server


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=10000-", 10000, SIZE),
        ("bytes=-7", SIZE - 7, SIZE),
        ("bytes=-99999", 0, SIZE),
        ("bytes=10000-99999", 10000, SIZE),
    ],
)
def test_a_range_is_answered_with_its_bytes_and_its_place(
    server: RangeServer, asked: str, start: int, stop: int
) -> None:
    reply = ask(server, "/a.bin", Range=asked)
    assert reply.status == 206
    assert reply.body == CONTENT[start:stop]
    assert reply.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{SIZE}"
    assert reply.headers["Content-Length"] == str(stop - start)


@pytest.mark.parametrize("asked", ["bytes=10240-", "bytes=10240-10240", "bytes=-0"])
def test_a_range_outside_is_416_with_the_size(server: RangeServer, asked: str) -> None:
    reply = ask(server, "/a.bin", Range=asked)
    assert (reply.status, reply.headers["Content-Range"]) == (416, f"bytes */{SIZE}")


@pytest.mark.parametrize("asked", ["bytes=0-", "bytes=-5"])
def test_an_empty_object_has_no_range(server: RangeServer, asked: str) -> None:
    assert ask(server, "/empty", Range=asked).status == 416


@pytest.mark.parametrize("asked", ["bytes=5-3", "bytes=0-1,4-5", "lines=0-1", "bytes=-", "bytes=a-b", "bytes=1" * 900])
def test_a_range_to_be_ignored_is_the_whole_object(server: RangeServer, asked: str) -> None:
    reply = ask(server, "/a.bin", Range=asked)
    assert (reply.status, reply.body) == (200, CONTENT)
    assert "Content-Range" not in reply.headers


def test_request_without_a_range_gets_the_whole_object(server: RangeServer) -> None:
    reply = ask(server, "/a.bin")
    assert (reply.status, reply.body, reply.headers["Accept-Ranges"]) == (200, CONTENT, "bytes")
    assert reply.headers["ETag"].startswith('"')
    assert reply.headers["Last-Modified"].endswith("GMT")
    assert ask(server, "/empty").body == b""


def test_head_describes_and_ignores_the_range(server: RangeServer) -> None:
    reply = ask(server, "/a.bin", method="HEAD", Range="bytes=0-9")
    assert (reply.status, reply.headers["Content-Length"], reply.body) == (200, str(SIZE), b"")


def test_missing_object_is_404_and_write_method_is_405(server: RangeServer) -> None:
    assert ask(server, "/b.bin").status == 404
    reply = ask(server, "/a.bin", method="DELETE")
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


def test_request_with_if_match_needs_the_same_version(server: RangeServer) -> None:
    etag = ask(server, "/a.bin").headers["ETag"]
    assert ask(server, "/a.bin", If_Match=etag).status == 200
    assert ask(server, "/a.bin", If_Match=f'"other", {etag}').status == 200
    assert ask(server, "/a.bin", If_Match="*").status == 200
    assert ask(server, "/a.bin", If_Match='"other"').status == 412
    assert ask(server, "/a.bin", If_Match=f"W/{etag}", Range="bytes=0-0").status == 412


def test_request_with_if_range_gets_a_changed_object_whole(server: RangeServer) -> None:
    described = ask(server, "/a.bin").headers
    assert ask(server, "/a.bin", Range="bytes=0-4", If_Range=described["ETag"]).status == 206
    assert ask(server, "/a.bin", Range="bytes=0-4", If_Range=described["Last-Modified"]).status == 206
    assert ask(server, "/a.bin", Range="bytes=0-4", If_Range='"other"').body == CONTENT


def test_changing_a_value_of_the_mapping_replaces_the_object() -> None:
    content = {"/a": b"old"}
    with RangeServer(content, tls=False) as server:
        etag = ask(server, "/a").headers["ETag"]
        content["/a"] = b"new"
        assert ask(server, "/a", If_Match=etag).status == 412
        assert ask(server, "/a").body == b"new"


# Directories


def test_a_file_larger_than_a_block_comes_whole_and_in_ranges(tmp_path: Path) -> None:
    content = os.urandom(600_001)
    (tmp_path / "sub dir").mkdir()
    (tmp_path / "sub dir" / "ä%b.bin").write_bytes(content)
    path = "/" + quote("sub dir/ä%b.bin")
    with RangeServer(tmp_path) as server:
        assert ask(server, path).body == content
        assert ask(server, path, Range="bytes=250000-599999").body == content[250_000:600_000]
        assert server.requests[0].path == "/sub dir/ä%b.bin"


def test_a_rewritten_file_has_another_etag(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    with RangeServer(os.fspath(tmp_path), tls=False) as server:
        etag = ask(server, "/a").headers["ETag"]
        (tmp_path / "a").write_bytes(b"other")
        assert ask(server, "/a", If_Match=etag).status == 412


def raw_status(server: RangeServer, target: bytes) -> int:
    """The status for a request target that no client would send."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as plain:
        plain.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return int(plain.recv(100).split()[1])


@pytest.mark.parametrize(
    "target",
    [
        b"/../secret",
        b"/inside/../../secret",
        b"/%2e%2e/secret",
        b"/..%2fsecret",
        b"/inside%2f..%2f..%2fsecret",
        b"/link",
        b"/linked/secret",
        b"//secret",
        b"/",
        b"/inside",
        b"/fifo",
        b"/a%00b",
        b"/" + b"x" * 5000,
        b"/%ff%fe",
    ],
)
def test_paths_that_are_no_file_below_the_root_are_404(tmp_path: Path, target: bytes) -> None:
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root-secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "linked").symlink_to(tmp_path)
    os.mkfifo(root / "fifo")
    with RangeServer(root, tls=False) as server:
        assert raw_status(server, target) == 404


def test_an_absolute_path_of_the_machine_is_not_served(tmp_path: Path) -> None:
    with RangeServer(tmp_path, tls=False) as server:
        assert raw_status(server, b"//etc/passwd") == 404


# Faults, as they look on the wire


def test_a_status_on_demand_with_retry_after() -> None:
    with serving(Fault.status(503, retry_after=1)) as server:
        reply = ask(server, "/anything")
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert ask(server, "/anything", method="HEAD").body == b""


def test_a_redirect() -> None:
    with serving(Fault.redirect("https://example.org/x", 307)) as server:
        reply = ask(server, "/a.bin")
        assert (reply.status, reply.headers["Location"]) == (307, "https://example.org/x")


def test_a_reset_in_the_body_is_an_rst_behind_its_bytes() -> None:
    with serving(Fault.reset(after_bytes=1000), tls=False) as server:
        connection = connect(server)
        connection.request("GET", "/a.bin")
        response = connection.getresponse()
        assert response.read(1000) == CONTENT[:1000]
        with pytest.raises(ConnectionResetError):
            response.read()
        connection.close()
        assert server.requests[0].bytes_sent == 1000


def test_a_reset_instead_of_an_answer() -> None:
    with serving(Fault.reset(after_bytes=None)) as server, pytest.raises(ConnectionResetError):
        ask(server, "/a.bin")


async def test_a_reset_reaches_a_client_over_tls() -> None:
    # Not by http.client: Python's blocking TLS socket reports a reset as an end of file.
    rule = FaultOnce("/a", Fault.reset(after_bytes=10))
    async with RangeServer({"a": CONTENT}, fault=rule) as server, session_for(server) as session:
        async with session.get(f"{server.url}/a") as response:
            assert await response.content.readexactly(10) == CONTENT[:10]
            with pytest.raises(aiohttp.ClientError) as caught:
                await response.read()
        assert "reset by peer" in repr(caught.value) + repr(caught.value.__cause__)


def test_a_truncated_body_ends_in_good_order_but_short() -> None:
    with serving(Fault.truncate(after_bytes=1000)) as server:
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(server, "/a.bin", Range="bytes=100-5099")
        assert (caught.value.partial, caught.value.expected) == (CONTENT[100:1100], 4000)


def test_a_connection_closed_instead_of_an_answer() -> None:
    with serving(Fault.truncate(after_bytes=None)) as server, pytest.raises(http.client.RemoteDisconnected):
        ask(server, "/a.bin")


@pytest.mark.parametrize("after_bytes", [0, 500])
def test_a_stall_keeps_the_connection_open_without_a_byte(after_bytes: int) -> None:
    with serving(Fault.stall(after_bytes)) as server:
        connection = connect(server, seconds=0.2)
        connection.request("GET", "/a.bin")
        response = connection.getresponse()
        assert response.read(after_bytes) == CONTENT[:after_bytes]
        with pytest.raises(TimeoutError):
            response.read(1)
        assert server.statistics().in_flight == 1
        connection.close()


def test_a_stall_before_the_status_line() -> None:
    with serving(Fault.stall(after_bytes=None)) as server:
        connection = connect(server, seconds=0.2)
        connection.request("GET", "/a.bin")
        with pytest.raises(TimeoutError):
            connection.getresponse()
        connection.close()


def test_an_ignored_range() -> None:
    with serving(Fault.ignore_range()) as server:
        reply = ask(server, "/a.bin", Range="bytes=5-9")
        assert (reply.status, reply.body) == (200, CONTENT)


def test_a_wrong_content_range_with_the_right_body() -> None:
    with serving(Fault.wrong_content_range(shift=2)) as server:
        reply = ask(server, "/a.bin", Range="bytes=5-9")
        assert (reply.status, reply.body) == (206, CONTENT[5:10])
        assert reply.headers["Content-Range"] == f"bytes 7-11/{SIZE}"


def test_a_short_answer_agrees_with_itself() -> None:
    with serving(Fault.short(2)) as server:
        reply = ask(server, "/a.bin", Range="bytes=5-9")
        assert (reply.body, reply.headers["Content-Range"]) == (CONTENT[5:8], f"bytes 5-7/{SIZE}")


def test_surplus_bytes_follow_the_body() -> None:
    with serving(Fault.surplus(3), tls=False) as server:
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname, parts.port), timeout=5) as plain:
            plain.sendall(b"GET /a.bin HTTP/1.1\r\nHost: x\r\nRange: bytes=0-4\r\nConnection: close\r\n\r\n")
            received = b"".join(iter(lambda: plain.recv(65536), b""))
        head, body = received.split(b"\r\n\r\n", 1)
        assert b"Content-Length: 5" in head
        assert body == CONTENT[:5] + b"\xff" * 3


def test_a_changed_etag_fails_the_condition_on_the_old_one() -> None:
    rule = FaultOnce("/a.bin", Fault.change_etag(), times=2)
    with RangeServer({"a.bin": CONTENT}, fault=rule) as server:
        changed = ask(server, "/a.bin").headers["ETag"]
        assert ask(server, "/a.bin", If_Match=changed).status == 200
        assert ask(server, "/a.bin", If_Match=changed).status == 412


def test_a_body_compressed_unasked() -> None:
    with serving(Fault.gzip()) as server:
        reply = ask(server, "/a.bin", Range="bytes=5-999", Accept_Encoding="identity")
        assert (reply.status, reply.headers["Content-Encoding"]) == (206, "gzip")
        assert gzip.decompress(reply.body) == CONTENT[5:1000]
        assert ask(server, "/a.bin", method="HEAD").status == 200


def test_a_corrupt_byte_at_its_place_in_the_object() -> None:
    with serving(Fault.corrupt(at=7)) as server:
        assert ask(server, "/a.bin", Range="bytes=5-9").body == bytes([5, 6, 7 ^ 0xFF, 8, 9])
        assert ask(server, "/a.bin", Range="bytes=8-9").body == bytes([8, 9])


def test_headers_are_overridden_and_removed() -> None:
    with serving(Fault.headers({"etag": 'W/"weak"', "content-range": None, "Content-Length": None})) as server:
        reply = ask(server, "/a.bin", Range="bytes=5-9")
        assert (reply.status, reply.body, reply.headers["ETag"]) == (206, CONTENT[5:10], 'W/"weak"')
        assert "Content-Range" not in reply.headers
        assert reply.headers["Transfer-Encoding"] == "chunked"


def test_faults_combine_by_their_fields() -> None:
    with serving(Fault(corrupt_at=0, ending="close", after_bytes=2)) as server:
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(server, "/a.bin")
        assert caught.value.partial == bytes([0xFF, 1])


def test_every_third_request_fails() -> None:
    with RangeServer({"a": b"x"}, fault=FaultEvery(3, Fault.status(500))) as server:
        assert [ask(server, "/a").status for _ in range(6)] == [200, 200, 500, 200, 200, 500]


def test_fault_once_fails_one_path_once() -> None:
    with RangeServer({"a": b"x", "b": b"y"}, fault=FaultOnce("/a", Fault.status(500))) as server:
        assert [ask(server, path).status for path in ("/b", "/a", "/a")] == [200, 500, 200]


def test_an_error_in_the_rule_is_a_500() -> None:
    def broken(request: ServedRequest) -> Fault | None:
        raise LookupError(request.path)

    with RangeServer({"a": b"x"}, fault=broken) as server:
        assert ask(server, "/a").status == 500
        assert server.requests[0].status == 500


def test_a_fault_pickles() -> None:
    fault = Fault.redirect("https://example.org/")
    assert pickle.loads(pickle.dumps(fault)) == fault


# Time


def test_the_first_byte_waits() -> None:
    with serving(first_byte_seconds=0.1) as server:
        started = time.monotonic()
        ask(server, "/a.bin")
        assert time.monotonic() - started >= 0.1


def test_response_can_be_slower_than_the_others() -> None:
    with RangeServer({"a": b"x"}, fault=FaultOnce("/a", Fault.slow(first_byte_seconds=0.5))) as server:
        ask(server, "/a")
        ask(server, "/a")
        slow, fast = ((request.finished or 0) - request.started for request in server.requests)
        assert slow >= 0.5 > fast


async def test_the_rate_holds_for_each_of_many_streams() -> None:
    content = bytes(200_000)
    async with RangeServer({"a": content}, bytes_per_second=1_000_000) as server, session_for(server) as session:

        async def read() -> None:
            async with session.get(f"{server.url}/a") as response:
                assert await response.read() == content

        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(read)
        seconds = [(request.finished or 0) - request.started for request in server.requests]
        assert len(seconds) == 16
        assert min(seconds) >= 0.19  # never faster, but for the clock's grain
        assert max(seconds) < 16 * 0.2  # what they would take if they shared it


# The log


def test_the_log_says_what_was_asked_and_what_was_sent(server: RangeServer) -> None:
    server.reset()
    ask(server, "/a.bin", Range="bytes=-7", X_Thing="yes")
    ask(server, "/a.bin", Range="bytes=3-4")
    ask(server, "/b.bin", Range="bytes=3-")
    last, middle, missing = server.requests
    assert (last.method, last.path, last.start, last.stop, last.status, last.bytes_sent) == (
        "GET",
        "/a.bin",
        -7,
        None,
        206,
        7,
    )
    assert last.headers["x-thing"] == "yes"
    assert (middle.start, middle.stop, middle.bytes_sent) == (3, 5, 2)
    assert (missing.status, missing.start, missing.stop) == (404, 3, None)
    assert last.finished is not None
    assert last.started <= last.finished <= middle.started
    statistics = server.statistics()
    assert (statistics.requests, statistics.in_flight, statistics.peak_in_flight) == (3, 0, 1)
    assert statistics.bytes_sent == sum(request.bytes_sent for request in server.requests)


def test_the_log_is_bounded_and_forgets() -> None:
    with serving(max_log=2) as server:
        for start in range(4):
            ask(server, "/a.bin", Range=f"bytes={start}-{start}")
        assert [request.start for request in server.requests] == [2, 3]
        assert server.statistics().requests == 4
        server.reset()
        assert server.requests == []
        assert server.statistics().requests == server.statistics().bytes_sent == 0


def session_for(server: RangeServer) -> aiohttp.ClientSession:
    context = ssl.create_default_context(cafile=server.ca_file)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=context))


async def test_the_peak_is_the_clients_limit_and_never_more() -> None:
    limit = anyio.CapacityLimiter(5)
    async with RangeServer({"a.bin": CONTENT}) as server, session_for(server) as session:

        async def read(start: int) -> None:
            async with limit, session.get(f"{server.url}/a.bin", headers={"Range": f"bytes={start}-"}) as response:
                await response.read()

        async with anyio.create_task_group() as group:
            for start in range(200):
                group.start_soon(read, start)
        statistics = server.statistics()
        assert (statistics.requests, statistics.peak_in_flight, statistics.in_flight) == (200, 5, 0)


async def test_requests_over_the_servers_limit_are_refused_at_once() -> None:
    rule = FaultOnce("/a", Fault.stall(), times=2)
    async with RangeServer({"a": b"x"}, max_concurrent=2, fault=rule) as server, session_for(server) as session:
        url = f"{server.url}/a"
        async with session.get(url), session.get(url), session.get(url) as refused:
            assert refused.status == 503
        assert server.statistics().peak_in_flight == 3


def session_without_checks() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False))


# Life


@pytest.mark.alone
@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("after_bytes", [None, 0, 100])
async def test_leaving_ends_stalled_streams_at_once(tls: bool, after_bytes: int | None) -> None:
    arrivals: list[ServedRequest] = []
    all_arrived = anyio.Event()

    def rule(request: ServedRequest) -> Fault:
        arrivals.append(request)
        if len(arrivals) == 5:
            all_arrived.set()
        return Fault.stall(after_bytes)

    server = RangeServer({"a.bin": CONTENT}, tls=tls, fault=rule)
    async with anyio.create_task_group() as group:
        async with server:
            session = session_for(server)

            async def read() -> None:
                with pytest.raises(aiohttp.ClientError):
                    async with session.get(f"{server.url}/a.bin") as response:
                        await response.read()

            for _ in range(5):
                group.start_soon(read)
            await all_arrived.wait()
            started = time.monotonic()
        assert time.monotonic() - started < 1
        assert server.statistics().in_flight == 0
    await session.close()


@pytest.mark.alone
def test_leaving_a_thread_ends_a_client_that_does_not_read() -> None:
    with no_thread_left(), RangeServer({"a": bytes(50_000_000)}) as server:
        connection = connect(server)
        connection.request("GET", "/a")
        response = connection.getresponse()
        started = time.monotonic()
    assert time.monotonic() - started < 1
    with pytest.raises((OSError, http.client.IncompleteRead)):
        response.read()
    connection.close()


async def test_a_stall_ends_when_its_client_goes() -> None:
    async with RangeServer({"a": b"x"}, fault=lambda _: Fault.stall()) as server, session_for(server) as session:
        async with session.get(f"{server.url}/a"):
            assert server.statistics().in_flight == 1
        while server.statistics().in_flight:
            await anyio.lowlevel.checkpoint()
        assert server.requests[0].finished is not None


async def test_a_client_that_goes_is_no_warning_of_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio tells of writes to a connection that has ended ("socket.send() raised exception")."""
    async with RangeServer({"a.bin": bytes(20_000_000)}) as server:
        for _ in range(8):
            async with session_without_checks() as session, session.get(f"{server.url}/a.bin") as response:
                await response.content.readexactly(300_000)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.alone
async def test_leaving_is_quick_with_a_client_that_never_speaks_tls() -> None:
    async with RangeServer({}) as server:
        parts = urlsplit(server.url)
        stream = await anyio.connect_tcp(parts.hostname or "", parts.port or 0)
        started = time.monotonic()
    assert time.monotonic() - started < 1
    await stream.aclose()


async def test_leaving_ends_a_connection_in_its_handshake() -> None:
    async with RangeServer({}) as server:
        port = urlsplit(server.url).port
        with socket.create_connection(("127.0.0.1", port)):
            while not accepted_at(port):
                await anyio.lowlevel.checkpoint()
            await server.__aexit__(None, None, None)
            assert accepted_at(port) == 0


def accepted_at(port: int | None) -> int:
    """Connections of this process that came in there, by the system's own account."""
    connections = psutil.Process().net_connections()
    return sum(bool(one.raddr) and one.laddr.port == port for one in connections)


def test_the_certificate_is_signed_by_ca_file_and_by_no_one_else(server: RangeServer) -> None:
    parts = urlsplit(server.url)
    connection = http.client.HTTPSConnection(parts.hostname or "", parts.port)
    with pytest.raises(ssl.SSLCertVerificationError):
        connection.request("GET", "/a.bin")
    connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "127.0.0.4", "localhost"])
def test_the_certificate_names_several_loopback_hosts(host: str) -> None:
    with serving(host=host) as server:
        assert urlsplit(server.url).hostname == host
        assert ask(server, "/a.bin").body == CONTENT


def test_an_ipv6_host_is_bracketed() -> None:
    try:
        with serving(host="::1") as server:
            assert server.url.startswith("https://[::1]:")
            assert ask(server, "/a.bin").status == 200
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_the_ca_file_lives_as_long_as_the_server() -> None:
    server = RangeServer({})
    with server:
        path = server.ca_file
        assert path is not None
        assert os.path.exists(path)
    assert server.ca_file is None
    assert not os.path.exists(path)


def test_a_server_can_be_entered_again_but_not_twice_at_once() -> None:
    server = RangeServer({"a.bin": CONTENT})
    for _ in range(2):
        with server:
            assert ask(server, "/a.bin").body == CONTENT
            with pytest.raises(ConfigError, match="runs already"):
                server.__enter__()
            assert ask(server, "/a.bin").body == CONTENT
    with pytest.raises(ConnectionRefusedError):
        ask(server, "/a.bin")


def test_a_taken_port_is_named_and_leaves_nothing() -> None:
    with serving() as server:
        port = urlsplit(server.url).port or 0
        other = RangeServer({}, port=port)
        with no_thread_left(), pytest.raises(ConfigError, match=f"127.0.0.1 port {port}"):
            other.__enter__()
        assert other.ca_file is None


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_name_that_no_host_can_have_is_refused(host: str) -> None:
    for server in (RangeServer({}, host=host, tls=False), RangeServer({}, host=host)):
        with no_thread_left(), pytest.raises(ConfigError, match=rf"(can't listen on|host) '?{host}"):
            server.__enter__()


def test_tls_without_trustme_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    server = RangeServer({}, host="127.9.9.9")  # no certificate was made for this one before
    with no_thread_left(), pytest.raises(MissingDependency, match=re.escape(install_command("testing"))):
        server.__enter__()


async def test_server_does_not_block_the_loop(tmp_path: Path) -> None:
    blockbuster = pytest.importorskip("blockbuster")
    (tmp_path / "a").write_bytes(bytes(600_000))
    with blockbuster.blockbuster_ctx("asyncfetch.testing"):
        for content in (tmp_path, {"a": bytes(600_000)}):
            async with (
                RangeServer(content, host="127.0.0.77") as server,
                session_without_checks() as session,
                session.get(f"{server.url}/a") as response,
            ):
                assert len(await response.read()) == 600_000


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("content", (None, 3, b"/tmp", ["a"], {"a": bytearray(1)}, {"a": "text"})),
        ("first_byte_seconds", (-1, math.nan, math.inf, "1")),
        ("bytes_per_second", (0, -1, math.nan, "1")),
        ("max_log", (-1, 1.5, None)),
    ],
)
def test_server_refuses_wrong_arguments(name: str, values: Iterable[object]) -> None:
    for value in values:
        arguments: dict[str, Any] = {"content": {}, name: value}
        with pytest.raises(ConfigError, match=name):
            RangeServer(**arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault(ending="foo"),  # type: ignore[arg-type]
        lambda: Fault.slow(bytes_per_second=0),
        lambda: Fault.slow(first_byte_seconds=math.nan),
        lambda: Fault.status("503"),  # type: ignore[arg-type]
        lambda: FaultEvery(0, Fault.gzip()),
    ],
)
def test_fault_refuses_wrong_arguments(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_arguments_that_cannot_be_meant() -> None:
    for port in (-1, 70_000, "80"):
        with pytest.raises(ConfigError, match=f"port must be from 1 to 65535, or 0 .*, not {port!r}"):
            RangeServer({}, port=port)  # type: ignore[arg-type]
    with no_thread_left(), pytest.raises(ConfigError, match="isn't a directory"):
        RangeServer("/nowhere/at/all").__enter__()
    with pytest.raises(ClosedError, match="entered"):
        _ = RangeServer({}).url

"""A web server that lies on demand, and a clock that nobody waits for."""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import os
import re
import socket
import ssl
import struct
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import unquote

import anyio.lowlevel
import fsspec
import pytest
import pytest_asyncio
import trustme
from botocore.loaders import JSONFileLoader

from asyncfetch.config import FetchConfig, RetryConfig, S3Config, TimeoutConfig
from asyncfetch.fetch import Fetcher, connection
from asyncfetch.fetch.answer import Answer
from asyncfetch.fetch.hosts import Permit
from asyncfetch.fetch.retry import Clock
from asyncfetch.testing import Keys
from tests.conftest import LOOPS
from tests.fetch.odd_files import OddFileSystem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

    from asyncfetch.fetch.buffers import Views
    from asyncfetch.testing import S3Server

End = Literal["keep", "close", "reset", "stall", "half-close", "deaf"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the server got it; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    connection: int


@dataclass(frozen=True, slots=True)
class Step:
    """How one answer differs from an honest one."""

    status: int | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    """Replaced; None takes one out. Names as an honest answer writes them."""
    body: bytes | Callable[[bytes], bytes] | None = None
    """Instead of the honest body, or made of it; the honest Content-Length goes with it unless it is replaced too."""
    cut: int | None = None
    """Bytes of the body that are sent."""
    end: End = "keep"
    """What happens after that."""
    silent: End | None = None
    """No answer at all, but this."""
    head_cut: int | None = None
    """Bytes of the head that are sent, and none of the body; negative ones are counted from its end."""
    drip_seconds: float | None = None
    """Passes between any two bytes of the head."""
    raw: bytes | None = None
    """Instead of head and body."""
    raw_cut: int = 0
    """Bytes of that which are sent first, some turns of the loop before the rest."""
    between: Callable[[], Awaitable[object]] | None = None
    """Awaited between head and body."""
    ignore_range: bool = False
    """As if Range and If-Match had not been sent."""


@functools.lru_cache(maxsize=100)
def _etag_of(content: bytes) -> str:
    """Of megabytes that thousands of tests put."""
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


class LyingServer:
    """Serves ``objects`` by path. Each request takes the next of ``steps``; after the last one it is honest."""

    def __init__(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.port = port
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str | None] = {}
        self.steps: list[Step] = []
        self.every: Callable[[Request], Step | None] = lambda _: None
        self.requests: list[Request] = []
        self.in_flight = 0
        self.peak_in_flight = 0
        self.connections = 0
        self.limiter: Callable[[], asyncio.Future[None] | None] = lambda: None
        self.speaks_tls = tls is not None
        self._tls = tls
        self._host = host
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, self.port, ssl=self._tls, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await self._server.wait_closed()

    def put(self, path: str, content: bytes, etag: str | None = "auto") -> str:
        self.objects[path] = content
        self.etags[path] = _etag_of(content) if etag == "auto" else etag
        return self.url(path)

    def url(self, path: str, host: str | None = None) -> str:
        return f"{'http' if self._tls is None else 'https'}://{host or self._host}:{self.port}{path}"

    def will(self, *steps: Step) -> None:
        self.steps.extend(steps)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        try:
            await self._converse(reader, writer, self.connections)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is gone, or the test is over
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            method, path, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
            request = Request(method, unquote(path), headers, connection)
            self.requests.append(request)
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            try:
                wait = self.limiter()
                if wait is not None:
                    await wait
                step = self.steps.pop(0) if self.steps else self.every(request) or Step()
                end = await self._answer(request, step, writer)
            finally:
                self.in_flight -= 1
            await self._end(end, writer)
            if end != "keep":
                return

    async def _answer(self, request: Request, step: Step, writer: asyncio.StreamWriter) -> End:
        if step.silent is not None:
            return step.silent
        if step.raw is not None:
            writer.write(step.raw[: step.raw_cut])
            for _ in range(5 if step.raw_cut else 0):  # in which the client reads that
                await asyncio.sleep(0)
            writer.write(step.raw[step.raw_cut :])
            await writer.drain()
            return step.end
        status, headers, body = self._honest(request, ignore_range=step.ignore_range)
        headers.update({name: value for name, value in step.headers.items() if value is not None})
        for name in (name for name, value in step.headers.items() if value is None):
            headers.pop(name, None)
        lines = [f"HTTP/1.1 {step.status or status} Whatever", *(f"{name}: {headers[name]}" for name in headers)]
        head = "\r\n".join([*lines, "", ""]).encode()[: step.head_cut]
        for at in range(len(head) if step.drip_seconds is not None else 0):
            writer.write(head[at : at + 1])
            await asyncio.sleep(step.drip_seconds or 0)
        writer.write(head if step.drip_seconds is None else b"")
        if step.between is not None:
            await step.between()
        if step.head_cut is None:
            if step.body is not None:
                body = step.body(body) if callable(step.body) else step.body
            writer.write(body[: step.cut])
        await writer.drain()
        return step.end

    def _honest(self, request: Request, *, ignore_range: bool) -> tuple[int, dict[str, str], bytes]:
        content = self.objects.get(request.path)
        if content is None:
            return 404, {"Content-Length": "4"}, b"none"
        etag = self.etags[request.path]
        headers = {} if etag is None else {"ETag": etag}
        wanted = request.headers.get("if-match")
        if not ignore_range and wanted is not None and wanted != etag:
            return 412, {"Content-Length": "0"}, b""
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if match is None or ignore_range:
            return 200, headers | {"Content-Length": str(len(content))}, content
        start, stop = _span(match[1], match[2], len(content))
        if start >= stop:
            return 416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"}, b""
        headers |= {
            "Content-Length": str(stop - start),
            "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}",
        }
        return 206, headers, content[start:stop]

    async def _end(self, end: End, writer: asyncio.StreamWriter) -> None:
        match end:
            case "keep":
                pass
            case "close":
                writer.close()
            case "reset":
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            case "half-close":
                writer.write_eof()
                await asyncio.Event().wait()
            case "stall":
                await asyncio.Event().wait()
            case "deaf":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.Event().wait()


def _span(first: str, last: str, size: int) -> tuple[int, int]:
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(int(last) + 1 if last else size, size)


@dataclass
class FakeTime:
    """A clock whose sleeps end at once, and add up."""

    now: float = 1000.0
    wall_offset: float = 1_700_000_000.0
    sleeps: list[float] = field(default_factory=list)
    luck: float = 1.0

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await anyio.lowlevel.checkpoint()

    def clock(self) -> Clock:
        return Clock(
            monotonic=lambda: self.now,
            wall=lambda: self.now + self.wall_offset,
            sleep=self.sleep,
            uniform=lambda: self.luck,
        )


ON_ONE_LOOP = "test_http_real_servers.py"
"""A file whose tests are about what servers say, of whom there are many."""
BY_SESSION = "uvloop-session"
"""Stands in the name of a test that aiohttp's session carries, because the loop is uvloop's."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    """Every async test runs on every loop, and on uvloop by the session, unless it has ways of its own: then it
    runs on every loop in each.
    """
    if config.getoption("loop") or item.nodeid.partition("::")[0].endswith(ON_ONE_LOOP):
        return None  # as for the tests of all rooms
    assert isinstance(item, pytest.Function)
    marks = item.iter_markers("parametrize")
    has_ways = hasattr(item.module, "way") or any("direct_bodies" in mark.args for mark in marks)
    return {BY_SESSION if name == "uvloop" and not has_ways else name: LOOPS[name] for name in LOOPS}


FAST = TimeoutConfig(connect_seconds=2.0, first_byte_seconds=0.3, stall_seconds=0.3)
"""For a fetcher on the server's own loop: it knows when that is late, and waits longer; see ``_lateness_is_seen``."""


PATIENT = TimeoutConfig(connect_seconds=15, first_byte_seconds=15, stall_seconds=15)
"""For tests that are about no limit."""


def s3_fetcher(
    server: S3Server,
    time: FakeTime | None = None,
    *,
    attempts: int = 5,
    outage_seconds: float = 300,
    first_byte_seconds: float = 5,
    **s3: object,
) -> Fetcher:
    """A fetcher of the server's objects, with these settings of S3."""
    config = FetchConfig(
        ca_file=server.ca_file,
        trust_env=False,
        retry=RetryConfig(attempts=attempts, outage_seconds=outage_seconds),
        timeouts=TimeoutConfig(first_byte_seconds=first_byte_seconds),
        s3=S3Config(endpoint_url=server.url, **s3),  # type: ignore[arg-type]
    )
    return Fetcher(config, _clock=None if time is None else time.clock())


def cancel_after(monkeypatch: pytest.MonkeyPatch, nbytes: int, scope: anyio.CancelScope) -> None:
    """In the turn behind the one in which so many bytes of bodies have come, on whichever loop."""
    missing = nbytes
    loop = asyncio.get_running_loop()

    def came(count: int) -> None:
        nonlocal missing
        missing -= count
        if missing <= 0:
            loop.call_soon_threadsafe(scope.cancel)

    receive, take, noted = Answer.came, Answer.take, Permit.landed

    def land(self: Answer, count: int) -> bool:
        before = self.received_bytes
        is_news = receive(self, count)
        came(self.received_bytes - before)
        return is_news

    def land_held(self: Answer, view: Views) -> None:
        take(self, view)
        came(self.received_bytes)

    def note(self: Permit, count: int) -> None:
        noted(self, count)
        came(count)

    monkeypatch.setattr(Answer, "came", land)
    monkeypatch.setattr(Answer, "take", land_held)
    monkeypatch.setattr(Permit, "landed", note)


def fork() -> int:
    """os.fork, which warns from Python 3.12 on: other threads may be running."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def make_fetcher(time: FakeTime | None = None, *, direct_bodies: bool = True, **settings: object) -> Fetcher:
    """A fetcher of these settings; without ``direct_bodies`` aiohttp's session asks for all."""
    settings.setdefault("timeouts", FAST)
    settings.setdefault("trust_env", False)
    settings.setdefault("hedge", None)  # tests count requests, and a busy machine answers late
    config = FetchConfig(**settings)  # type: ignore[arg-type]
    return Fetcher(config, _clock=(time or FakeTime()).clock(), _by_session=not direct_bodies)


@pytest.fixture(autouse=True)
def _lateness_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of FAST are shorter than what a busy machine may hold up a loop, and with it the server."""
    monkeypatch.setattr(connection, "LOOP_LAG_SECONDS", 0.02)


@pytest.fixture(scope="session")
def _botocore_reads_its_files_once() -> Iterator[None]:
    """Each signer has a session of its own, which would parse a megabyte of JSON again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", staticmethod(functools.cache(JSONFileLoader().load_file)))
        yield


@pytest.fixture
def aws_keys(_botocore_reads_its_files_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment of somebody whose keys S3Server knows, and who has no other."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", Keys().access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", Keys().secret_key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def signing_clock(time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Signatures of S3 are dated by ``time``: the real clock and what this returns, the seconds that passed in it.

    An S3Server that has them as its ``clock_seconds`` lets signatures expire whatever a busy machine takes.
    """
    began = time.now

    def passed() -> float:
        return time.now - began

    def now(remove_tzinfo: bool = True) -> datetime:
        moment = datetime.now(UTC) + timedelta(seconds=passed())
        return moment.replace(tzinfo=None) if remove_tzinfo else moment

    monkeypatch.setattr("botocore.auth.get_current_datetime", now)
    return passed


@pytest.fixture
def step() -> type[Step]:
    return Step


@pytest.fixture
def lying_server() -> type[LyingServer]:
    return LyingServer


@pytest.fixture
def odd() -> Iterator[type[OddFileSystem]]:
    fsspec.register_implementation("odd", OddFileSystem, clobber=True)
    OddFileSystem.reset()
    yield OddFileSystem
    OddFileSystem.store.clear()


def is_by_session(request: pytest.FixtureRequest) -> bool:
    """Whether aiohttp's session carries bodies, where a test has no other choice."""
    return BY_SESSION in request.node.name


@pytest.fixture(autouse=True)
def _way_of_the_whole_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_by_session(request):  # that of fetchers which tests make themselves, too
        defaults = Fetcher.__init__.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "_by_session", True)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> str:
    """How the fetchers below take bodies: on connections of ours ("direct"), or by aiohttp's session ("session"). A
    module that wants both has a fixture of this name with both values.
    """
    return "session" if is_by_session(request) else "direct"


@pytest.fixture
def direct_bodies(way: str) -> bool:
    return way != "session"


@pytest.fixture
def fetcher_with(direct_bodies: bool) -> Callable[..., Fetcher]:
    return functools.partial(make_fetcher, direct_bodies=direct_bodies)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[LyingServer]:
    async with LyingServer() as server:
        yield server
    # A transport or session that nobody closed warns when it is collected, and warnings are errors.
    gc.collect()


@pytest_asyncio.fixture
async def fetcher(fetcher_with: Callable[..., Fetcher], time: FakeTime) -> AsyncIterator[Fetcher]:
    async with fetcher_with(time) as fetcher:
        yield fetcher


@pytest_asyncio.fixture
async def hasty(fetcher_with: Callable[..., Fetcher], time: FakeTime) -> AsyncIterator[Fetcher]:
    """One attempt, no repeats."""
    async with fetcher_with(time, retry=RetryConfig(attempts=1)) as fetcher:
        yield fetcher


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture
def server_tls(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context


@pytest_asyncio.fixture
async def tls_server(server_tls: ssl.SSLContext) -> AsyncIterator[LyingServer]:
    async with LyingServer(server_tls) as server:
        yield server
    gc.collect()


@pytest.fixture(params=["http", "https"])
def any_server(request: pytest.FixtureRequest) -> LyingServer:
    """A plain server and one with TLS; a test that takes it runs for each."""
    server: LyingServer = request.getfixturevalue("server" if request.param == "http" else "tls_server")
    return server

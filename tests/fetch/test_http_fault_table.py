"""Every fault of the table: the right bytes or the error that it says, and a pool that is fit for the next request."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import socket
import ssl
import traceback
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trustme

from asyncfetch.config import RetryConfig, TimeoutConfig
from asyncfetch.errors import ConnectionFailed, FetchError
from asyncfetch.fetch import connection
from tests.fetch.fault_table import ASKED, ATTEMPTS, CONTENT, ELSEWHERE, START, STOP, WIRE, render

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer, Step
    from tests.fetch.fault_table import Elsewhere, Wire

HERE = Path(__file__).parent
GROUPS = {group: [wire for wire in WIRE if wire.group == group] for group in dict.fromkeys(wire.group for wire in WIRE)}
PAGE = HERE.parents[1] / "asyncfetch" / "fetch" / "README.md"
PATIENT = TimeoutConfig(first_byte_seconds=2.0, stall_seconds=2.0)
HASTY = TimeoutConfig(first_byte_seconds=0.2, stall_seconds=0.2)
RETRY = RetryConfig(attempts=ATTEMPTS, total_seconds=0.95, outage_seconds=0)
"""Some nine attempts where each brings a byte. What an outage changes has tests of its own: test_outage.py."""


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(autouse=True)
def _no_long_wait_for_a_text_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "DRAIN_LIMIT_SECONDS", 0.05)


@pytest.mark.parametrize("group", GROUPS)
async def test_faults_that_happen_once(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, group: str
) -> None:
    if any_server.speaks_tls and group == "connection half-closed":
        pytest.skip("TLS has no half-closed connections")
    faults = {f"/{number}": wire for number, wire in enumerate(GROUPS[group])}
    left = dict(faults)
    any_server.every = lambda request: step_of(left.pop(request.path, None))
    async with anyio.create_task_group() as tasks:
        for path, wire in faults.items():
            tasks.start_soon(_read, partial(fetcher_with, ca_file=ca_file), any_server, path, left, wire, wire.once)


@pytest.mark.parametrize("group", GROUPS)
async def test_faults_that_go_on_for_ever(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, group: str
) -> None:
    faults = {f"/{number}": wire for number, wire in enumerate(GROUPS[group])}
    left = dict(faults)
    server.every = lambda request: step_of(left.get(request.path))
    async with anyio.create_task_group() as tasks:
        for path, wire in faults.items():
            tasks.start_soon(_read, fetcher_with, server, path, left, wire, wire.always, wire.requests)


def step_of(wire: Wire | None) -> Step | None:
    return None if wire is None else wire.step


async def _read(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    path: str,
    faulty: dict[str, Wire],
    wire: Wire,
    kind: type[FetchError] | None,
    requests: int | None = None,
) -> None:
    """Reads the range, then another one from a server that is honest again, with a fetcher of its own."""
    url = server.put(path, CONTENT)
    try:
        async with fetcher_with(timeouts=HASTY if wire.waits else PATIENT, retry=RETRY) as fetcher:
            if kind is None:
                assert await fetcher.fetch(url, START, STOP) == ASKED
            else:
                await _fail(fetcher, server, path, wire, kind)
            assert requests is None or _count(server, path) in _asked(requests, wire, fetcher)
            assert fetcher.statistics().in_flight == fetcher.statistics().waiting == 0
            faulty.pop(path, None)
            assert bytes(await fetcher.fetch(url, 10, 300_000)) == CONTENT[10:300_000]
    except BaseException as error:
        error.add_note(f"the fault: {wire.name}")
        raise


def _asked(attempts: int, wire: Wire, fetcher: Fetcher) -> set[int]:
    """Requests that so many attempts make: what isn't plain is asked for once more, without an attempt lost."""
    once_more = not fetcher._by_session and wire.group in {"heads", "chunks", "lengths"}
    return {attempts, attempts + once_more}


def _count(server: LyingServer, path: str) -> int:
    return sum(request.path == path for request in server.requests)


async def _fail(fetcher: Fetcher, server: LyingServer, path: str, wire: Wire, kind: type[FetchError]) -> None:
    url = server.url(path)
    with pytest.raises(kind) as caught:
        await fetcher.fetch(url, START, STOP)
    error = caught.value
    assert type(error) is kind or wire.requests is None
    assert (error.url, error.start, error.stop) == (url, START, STOP)
    assert _count(server, path) in _asked(error.attempts, wire, fetcher)
    assert error.host == f"127.0.0.1:{server.port}"
    assert wire.step.status in {None, error.status}
    if "of the body" in wire.name or "closed early" in wire.name:
        assert error.status == 206
    if "before the head" in wire.name:
        assert error.status is None


@pytest.mark.parametrize("group", GROUPS)
async def test_no_fault_shows_a_secret(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
) -> None:
    # In debug mode each future has a traceback, for each frame of which this looks whether its file has changed.
    monkeypatch.setattr("linecache.checkcache", lambda *_: None)
    asyncio.get_running_loop().set_debug(True)
    caplog.set_level(logging.DEBUG)
    url = server.put("/x?X-Amz-Signature=hunter2&token=hunter2", CONTENT)
    url = url.replace("://", "://me:hunter2@")
    secrets = {"headers": {"127.0.0.1": {"Cookie": "hunter2"}}, "tokens": {"127.0.0.1": "hunter2"}}
    shown: list[object] = []
    async with fetcher_with(timeouts=HASTY, retry=RetryConfig(attempts=1), **secrets) as fetcher:
        for wire in GROUPS[group]:
            server.will(wire.step)
            try:
                await fetcher.fetch(url, START, STOP)
            except FetchError as error:
                shown += [*traceback.format_exception(error), repr(error), vars(pickle.loads(pickle.dumps(error)))]
            shown += [fetcher, fetcher.statistics(), fetcher.config, vars(fetcher)]
    assert all("hunter2" in request.headers["cookie"] for request in server.requests)
    assert len(shown) > len(GROUPS[group])
    assert "hunter2" not in f"{shown}{[record.getMessage() for record in caplog.records]}"


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: f"{row.group}, {row.name}")
def test_faults_shown_elsewhere_have_their_tests(row: Elsewhere) -> None:
    file, _, function = row.shown_by.partition("::")
    assert re.search(rf"^(async )?def {function}\(", (HERE / file).read_text(), re.MULTILINE)


def test_the_readme_has_the_table() -> None:
    assert render() in PAGE.read_text(), "python -m tests.fetch.fault_table prints what the page is to have"


async def test_a_resolver_that_fails_is_asked_again(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Exception | None] = [socket.gaierror(socket.EAI_AGAIN, "later")] * 2
    resolve = socket.getaddrinfo

    def fail_at_first(host: str, *arguments: Any, **options: Any) -> object:  # noqa: ANN401 - as the socket's
        if host == "localhost" and answers:
            raise answers.pop() or AssertionError
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", fail_at_first)
    server.put("/x", CONTENT)
    url = server.url("/x", "localhost")
    async with fetcher_with(time) as fetcher:
        assert await fetcher.fetch(url, START, STOP) == ASKED
        answers[:] = [socket.gaierror(socket.EAI_AGAIN, "later")] * 9
    async with fetcher_with(time, retry=RetryConfig(outage_seconds=0)) as fetcher:
        with pytest.raises(ConnectionFailed, match="can't be resolved") as caught:
            await fetcher.fetch(url, START, STOP)
    assert caught.value.attempts == 5


def _expired(ca: trustme.CA) -> trustme.LeafCert:
    now = datetime.now(UTC)
    return ca.issue_cert("127.0.0.1", not_before=now - timedelta(days=2), not_after=now - timedelta(days=1))


BAD_CERTIFICATES: dict[str, Callable[[trustme.CA], trustme.LeafCert]] = {
    "expired": _expired,
    "another host's": lambda ca: ca.issue_cert("data.example.org", "127.0.0.2"),
    "of an unknown authority": lambda _: trustme.CA().issue_cert("127.0.0.1"),
    "self-signed": lambda _: _self_signed(),
}


def _self_signed() -> trustme.LeafCert:
    authority = trustme.CA()
    return trustme.LeafCert(authority.private_key_pem.bytes(), authority.cert_pem.bytes(), [])


@pytest.mark.parametrize("certificate", BAD_CERTIFICATES.values(), ids=BAD_CERTIFICATES)
async def test_a_certificate_that_is_not_good_is_fatal(
    fetcher_with: Callable[..., Fetcher],
    lying_server: type[LyingServer],
    ca: trustme.CA,
    ca_file: str,
    certificate: Callable[[trustme.CA], trustme.LeafCert],
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate(ca).configure_cert(context)
    async with lying_server(context) as server, fetcher_with(ca_file=ca_file) as fetcher:
        with pytest.raises(ConnectionFailed, match=r"certificate.*isn't trusted.*ca_file") as caught:
            await fetcher.fetch(server.put("/x", CONTENT), START, STOP)
        assert caught.value.attempts == 1
        assert server.requests == []

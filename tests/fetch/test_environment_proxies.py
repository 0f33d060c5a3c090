"""HTTPS through a proxy: a tunnel, and whose secrets go where. The proxy is a real one that notes what it sees."""

from __future__ import annotations

import asyncio
from traceback import format_exception
from typing import TYPE_CHECKING, Self

import anyio
import pytest
import pytest_asyncio

from asyncfetch.config import RetryConfig, TimeoutConfig
from asyncfetch.errors import AccessDenied, ConfigError, ConnectionFailed, FetchError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer

CONTENT = b"0123456789"
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class ConnectProxy:
    """Opens a tunnel for each CONNECT, to wherever it says; ``answer`` is sent instead where it is set."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        """Of the CONNECT requests."""
        self.seen = b""
        """Every byte that went through, in both directions."""
        self.answer: bytes | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if self.answer is None:
                await self._tunnel(head, reader, writer)
            else:
                writer.write(self.answer)
                await writer.drain()
                await reader.read()
        except (OSError, asyncio.CancelledError):
            pass  # the client is gone, or the test is over
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _tunnel(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split(b" ", 2)
        assert method == b"CONNECT"
        host, port = target.decode().split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(ESTABLISHED)
            async with anyio.create_task_group() as group:
                group.start_soon(self._copy, reader, far_writer)
                await self._copy(far_reader, writer)
                group.cancel_scope.cancel()
        finally:
            far_writer.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(65536):
            self.seen += chunk
            sink.write(chunk)
            await sink.drain()
        sink.transport.abort()


@pytest_asyncio.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ConnectProxy]:
    async with ConnectProxy() as proxy:
        for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("https_proxy", f"http://me:proxy-secret@127.0.0.1:{proxy.port}")
        yield proxy


def names_of(head: bytes) -> set[str]:
    return {line.split(":")[0].lower() for line in head.decode().strip().split("\r\n")[1:]}


async def test_the_bytes_come_through_the_tunnel(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, proxy: ConnectProxy, ca_file: str
) -> None:
    url = tls_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file, trust_env=True) as fetcher:
        assert bytes(await fetcher.fetch(url, 2, 5)) == b"234"
        assert bytes(await fetcher.fetch(url, 3, 6)) == b"345"
    assert [head.split(b"\r\n")[0] for head in proxy.heads] == [
        f"CONNECT 127.0.0.1:{tls_server.port} HTTP/1.1".encode()
    ]
    assert tls_server.connections == 1


async def test_credentials_of_proxy_and_target_are_kept_apart(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, proxy: ConnectProxy, ca_file: str
) -> None:
    url = tls_server.put("/x", CONTENT)
    settings = {"tokens": {"127.0.0.1": "target-secret"}, "headers": {"127.0.0.1": {"X-Key": "target-secret"}}}
    async with fetcher_with(ca_file=ca_file, trust_env=True, **settings) as fetcher:
        await fetcher.fetch(url, 2, 5)
    assert b"Proxy-Authorization: Basic bWU6cHJveHktc2VjcmV0\r\n" in proxy.heads[0]
    assert names_of(proxy.heads[0]).isdisjoint({"authorization", "x-key", "range", "cookie"})
    assert b"target-secret" not in proxy.heads[0] + proxy.seen
    headers = tls_server.requests[0].headers
    assert (headers["authorization"], headers["x-key"]) == ("Bearer target-secret", "target-secret")
    assert not any(name.startswith("proxy-") for name in headers)


async def test_a_proxy_without_credentials_gets_none(
    fetcher_with: Callable[..., Fetcher],
    tls_server: LyingServer,
    proxy: ConnectProxy,
    ca_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
    url = tls_server.put("/x", CONTENT).replace("://", "://user:target-secret@")
    async with fetcher_with(ca_file=ca_file, trust_env=True) as fetcher:
        assert bytes(await fetcher.fetch(url, 2, 5)) == b"234"
    assert names_of(proxy.heads[0]).isdisjoint({"authorization", "proxy-authorization"})
    assert "authorization" in tls_server.requests[0].headers


@pytest.mark.parametrize(
    ("status", "kind", "attempts", "message"),
    [
        (407, AccessDenied, 1, "wants credentials"),
        (502, ConnectionFailed, 2, "gives no tunnel to"),
        (403, ConnectionFailed, 2, "gives no tunnel to"),
    ],
)
async def test_a_refused_tunnel_names_the_proxy(
    fetcher_with: Callable[..., Fetcher],
    tls_server: LyingServer,
    proxy: ConnectProxy,
    ca_file: str,
    status: int,
    kind: type[FetchError],
    attempts: int,
    message: str,
) -> None:
    url = tls_server.put("/x", CONTENT)
    proxy.answer = f"HTTP/1.1 {status} Whatever\r\nContent-Length: 4\r\n\r\nnone".encode()
    async with fetcher_with(
        ca_file=ca_file, trust_env=True, retry=RetryConfig(attempts=2, outage_seconds=0)
    ) as fetcher:
        with pytest.raises(kind, match=message) as caught:
            await fetcher.fetch(url, 2, 5)
    assert f"proxy 127.0.0.1:{proxy.port}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert (caught.value.status, caught.value.attempts, len(proxy.heads)) == (status, attempts, attempts)
    assert tls_server.connections == 0


async def test_a_proxy_that_is_not_there_is_named(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, proxy: ConnectProxy, ca_file: str
) -> None:
    await proxy.__aexit__()
    async with fetcher_with(ca_file=ca_file, trust_env=True, retry=RetryConfig(attempts=1)) as fetcher:
        with pytest.raises(ConnectionFailed, match=rf"no connection to the proxy 127\.0\.0\.1:{proxy.port}") as caught:
            await fetcher.fetch(tls_server.put("/x", CONTENT), 2, 5)
    assert "secret" not in str(caught.value)


async def test_a_proxy_without_an_address_is_named(
    fetcher_with: Callable[..., Fetcher], proxy: ConnectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://me:proxy-secret@proxy.invalid:3128")
    async with fetcher_with(trust_env=True, retry=RetryConfig(attempts=1)) as fetcher:
        with pytest.raises(ConnectionFailed, match=r"the name of proxy\.invalid:3128 can't be resolved") as caught:
            await fetcher.fetch("https://data.invalid/x", 2, 5)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\n\r\nthis is no TLS", b"", b"SSH-2.0-x\r\n\r\n"])
async def test_a_proxy_that_talks_nonsense_is_an_error_of_ours(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, proxy: ConnectProxy, ca_file: str, answer: bytes
) -> None:
    proxy.answer = answer
    settings = {"retry": RetryConfig(attempts=1), "timeouts": TimeoutConfig(connect_seconds=0.3)}
    async with fetcher_with(ca_file=ca_file, trust_env=True, **settings) as fetcher:
        with pytest.raises(FetchError) as caught:
            await fetcher.fetch(tls_server.put("/x", CONTENT), 2, 5)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:hid\u2100den@127.0.0.1:1", "http://me:hidden@[127.0.0.1:1"])
async def test_a_proxy_that_is_no_url_is_told_without_its_password(
    fetcher_with: Callable[..., Fetcher], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("https_proxy", url)
    with pytest.raises(ConfigError, match="holds no url: set it to http://host:port") as caught:
        await fetcher_with(trust_env=True).__aenter__()
    assert "hid" not in "".join(format_exception(caught.value))


async def test_proxy_of_another_protocol_is_refused_where_used(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.put("/x", CONTENT)
    monkeypatch.setenv("all_proxy", "socks5://me:hidden@127.0.0.1:1")
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with fetcher_with(trust_env=True) as fetcher:
        with pytest.raises(ConfigError, match=r"speaks socks5, .* NO_PROXY, or .*trust_env=False") as caught:
            await fetcher.fetch(url)
        assert "hidden" not in str(caught.value)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with fetcher_with(trust_env=True) as fetcher:
        assert bytes(await fetcher.fetch(url)) == CONTENT

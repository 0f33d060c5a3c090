"""Every request but a plain ranged GET, by aiohttp's session: proxies, puts, listings, questions, and odd answers.

The session is set up so that nothing happens in it that we don't decide: it follows no redirect, keeps no cookie,
decompresses nothing, reads no environment, limits no connections and has no timeouts. One thing it does by itself:
a request on a pooled connection that had died it sends once more on another one.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import math
import os
import threading
import warnings
import weakref
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
from typing_extensions import override

from asyncfetch.errors import ConnectionFailed, InvalidResponse
from asyncfetch.fetch import connection
from asyncfetch.fetch.refusals import MAX_FIELDS, MAX_VALUE_BYTES, SESSION_ERRORS, session_failure, too_slow
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict, cause_of
from asyncfetch.fetch.urls import host_name
from asyncfetch.runtime.cancellation import Deadline
from asyncfetch.runtime.sockets import abort

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from types import SimpleNamespace

    from yarl import URL

    from asyncfetch.config import FetchConfig, TimeoutConfig
    from asyncfetch.fetch.bandwidth import Allowance
    from asyncfetch.fetch.buffers import Views
    from asyncfetch.fetch.connection import Peer
    from asyncfetch.fetch.connector import Connector
    from asyncfetch.fetch.hosts import Host
    from asyncfetch.fetch.responses import AcceptedBody
    from asyncfetch.runtime.cancellation import Deadlines

COMMON_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "asyncfetch"}
"""Headers that every request carries."""


class AiohttpSessions:
    """aiohttp's sessions on the running loop: one that pools connections, and one that makes a new one each time.

    ``connector`` is told of their sockets and gives their addresses; it is closed with them.
    """

    def __init__(self, config: FetchConfig, connector: Connector) -> None:
        self._config = config
        self._connector = connector
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._pooled = self._new_session(keepalive_timeout=config.keepalive_seconds)
        self._fresh: aiohttp.ClientSession | None = None
        _open_sessions.add(self)

    @asynccontextmanager
    async def exchange(
        self,
        host: Host,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        *,
        body: Iterable[bytes | memoryview] | None = None,
        needs_new_connection: bool = False,
        allowance: Allowance | None = None,
    ) -> AsyncIterator[Exchange]:
        """Send a request; in the block the head of its answer is there.

        A phase that takes too long ends the block with AttemptFailed. The connection returns to the pool only by way of
        its body's last byte; leaving earlier, however, closes it.
        """
        session = self._pooled
        if needs_new_connection or self._connector.files_run_out:
            session = self._fresh = self._fresh or self._new_session(force_close=True)
        exchange = Exchange(self._config.timeouts, self._connector.deadlines, host, allowance)
        try:
            with exchange.scope:
                await exchange.send(session, method, url, headers, body)
                yield exchange
        except AttemptFailed as failure:
            if failure.status is None:
                failure.address, failure.status = failure.address or exchange.peer, exchange.status or None
            raise
        finally:
            exchange.end()
        if exchange.scope.cancelled_caught:
            raise exchange.time_out()

    async def aclose(self) -> None:
        """Close the sessions, and all connections without waiting for any server. Nothing may be under way."""
        await self._pooled.close()
        if self._fresh is not None:
            await self._fresh.close()
        await self._connector.aclose()
        _open_sessions.discard(self)

    @property
    def is_in_use(self) -> bool:
        """True if another thread runs its loop."""
        return self._loop.is_running() and threading.get_ident() != self._thread

    def let_go(self) -> None:
        """End the connections of a session whose owner is gone, without a word but a ResourceWarning; in any thread.

        Not where another thread runs its loop, which may be using it, nor where it is closed.
        """
        if self not in _open_sessions or self.is_in_use:
            return
        self.detach()
        self._connector.sockets.shut_down()
        warnings.warn("a Fetcher, or what has one, was left open: use `async with`", ResourceWarning, stacklevel=1)

    def detach(self) -> list[aiohttp.BaseConnector | None]:
        """Take the connectors from aiohttp's sessions, which then have nothing to say of their end."""
        _open_sessions.discard(self)
        sessions = [session for session in (self._pooled, self._fresh) if session is not None and not session.closed]
        connectors = [session.connector for session in sessions]
        for session in sessions:
            session.detach()
        return connectors

    def _new_session(self, **options: Any) -> aiohttp.ClientSession:  # noqa: ANN401
        connector = _QuietConnector(
            limit=0,
            ssl=self._connector.own_context or True,
            socket_factory=self._new_socket,
            resolver=self._connector.resolver,
            use_dns_cache=False,
            **options,
        )
        return aiohttp.ClientSession(
            connector=connector,
            request_class=_Request,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=COMMON_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            auto_decompress=False,
            trust_env=False,
            max_line_size=MAX_VALUE_BYTES,
            max_field_size=MAX_VALUE_BYTES,
            max_headers=MAX_FIELDS,
            raise_for_status=False,
            trace_configs=[_trace()],
        )

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        return self._connector.new_socket(family, kind, protocol)


def _trace() -> aiohttp.TraceConfig:
    """Tells an exchange when its connection is made or there, and when some of its body went out."""
    trace = aiohttp.TraceConfig()

    async def connecting(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.connecting()

    async def connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.connected()

    trace.on_connection_create_start.append(connecting)
    trace.on_connection_create_end.append(connected)
    trace.on_connection_reuseconn.append(connected)
    trace.on_request_chunk_sent.append(connected)
    return trace


class _QuietConnector(aiohttp.TCPConnector):
    """One that says nothing where it is collected open: see ``AiohttpSessions.let_go``."""

    def __del__(self, _: object = None, /) -> None:
        """Do nothing, in place of aiohttp's, which logs an error."""


class _Request(aiohttp.ClientRequest):
    """One that isn't sent where something unasked has come, which aiohttp would take for the answer to it."""

    async def send(self, conn: Any) -> aiohttp.ClientResponse:  # noqa: ANN401 - its class has no public name
        """As aiohttp's; ServerDisconnectedError on a connection that is of no use, and the session takes another."""
        if conn.protocol is None or conn.protocol.should_close:
            raise aiohttp.ServerDisconnectedError
        return await super().send(conn)


class Exchange(Deadline):
    """One request of a session and its answer, with a limit on each phase."""

    due = math.inf

    def __init__(self, timeouts: TimeoutConfig, deadlines: Deadlines, host: Host, allowance: Allowance | None) -> None:
        self._timeouts = timeouts
        self._deadlines = deadlines
        self._host = host
        self._allowance = allowance
        self._step_bytes = timeouts.min_bytes_per_second * timeouts.stall_seconds
        self._stepped_bytes = 0
        self._had_new_connection = False
        self._response: aiohttp.ClientResponse | None = None
        self.scope = anyio.CancelScope()
        """Ended where a phase takes too long."""
        self.peer: Peer | None = None
        self.status = 0
        self.headers: Mapping[str, str] = {}
        """Headers of the answer, found by names of any case."""
        self.sent_at = self.first_byte_at = host.now()
        """Times at which the request had its connection, or its last byte went out, and the answer's head was there."""

    async def send(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        body: Iterable[bytes | memoryview] | None,
    ) -> None:
        """Send the request, and wait for the answer's head."""
        self._begin("connecting", self._timeouts.connect_seconds)
        route = self._host.route
        try:
            response = await session.request(
                method,
                url,
                headers=headers,
                data=None if body is None else _pieces(body),
                allow_redirects=False,
                proxy=route.proxy,
                proxy_headers=route.proxy_headers,
                trace_request_ctx=self,
            )
        except SESSION_ERRORS as error:
            proxy = None if route.proxy is None else host_name(route.proxy)
            raise session_failure(error, self._host.name, proxy) from cause_of(error)
        self._response = response
        self.status, self.headers = response.status, response.headers
        transport = None if response.connection is None else response.connection.transport
        peer = None if transport is None else transport.get_extra_info("peername")
        self.peer = (str(peer[0]), int(peer[1])) if peer else None
        self.first_byte_at = self._host.now()
        self._begin("waiting for the next bytes of the body", self._timeouts.stall_seconds)

    def connecting(self) -> None:
        """Note that a connection is being made; ServerDisconnectedError where it would be the second one.

        aiohttp sends a request once more where its connection broke. Where that was a pooled one it never reached the
        server; else it is an attempt, which the retry layer makes.
        """
        if self._had_new_connection:
            raise aiohttp.ServerDisconnectedError
        self._had_new_connection = True

    def connected(self) -> None:
        """Note that the request has its connection, or some of its body went out: now the answer is waited for."""
        self.sent_at = self._host.now()
        self._begin("waiting for the first byte", self._timeouts.first_byte_seconds)

    @property
    def is_plain(self) -> bool:
        """True if our own connections could have read the answer."""
        response = self._response
        assert response is not None
        return (
            response.version == aiohttp.HttpVersion11
            and "Content-Length" in response.headers
            and "Transfer-Encoding" not in response.headers
            and all(map(str.isascii, response.headers.values()))
        )

    async def receive(self, delivery: AcceptedBody, view: Views, landed: Callable[[int], None]) -> None:
        """Bring the body's wanted bytes into ``view``, in order; return when the body has ended as declared.

        ``landed`` is called with the number of bytes that were just added. AttemptFailed where the body broke, ended
        early or went on too long.
        """
        skip_bytes = delivery.skip_bytes
        filled = 0
        while filled < len(view):
            chunk = await self.next_chunk()
            if not chunk:
                raise AttemptFailed(ConnectionFailed, f"the body ended after {filled} of {len(view)} bytes")
            if skip_bytes:
                skipped = min(skip_bytes, len(chunk))
                skip_bytes -= skipped
                chunk = chunk[skipped:]
            count = min(len(chunk), len(view) - filled)
            view[filled : filled + count] = chunk if count == len(chunk) else chunk[:count]
            filled += count
            landed(count)
            if count < len(chunk) and not delivery.cut:
                raise _surplus(view)
        if not delivery.cut and await self.next_chunk():
            raise _surplus(view)

    async def next_chunk(self) -> bytes:
        """Return some bytes of the body, as many as have come; none at its end. AttemptFailed where it broke."""
        if self._allowance is not None and self._allowance.left_bytes <= 0:
            seconds = self._allowance.more()
            self._since = self._deadlines.time() + seconds  # it isn't the server that stalls
            await anyio.sleep(seconds)
        try:
            chunk = await self._read_some()
        except SESSION_ERRORS as error:
            raise session_failure(error, self._host.name) from error
        # A body moves by steps of what it must bring in the time that it may be silent.
        self._stepped_bytes += len(chunk)
        if self._stepped_bytes >= self._step_bytes:
            self._stepped_bytes = 0
            self._since = self._deadlines.time()
        if self._allowance is not None:
            self._allowance.came(len(chunk))
        return chunk

    async def drain(self) -> bytes:
        """Read a body that wasn't asked for where that is cheap; see ``Connection.drain``."""
        assert self._response is not None
        body = b""
        if (self._response.content_length or 0) > connection.DRAIN_LIMIT_BYTES:
            return body
        self._since = self._deadlines.time() + connection.DRAIN_LIMIT_SECONDS
        with (
            anyio.move_on_after(connection.DRAIN_LIMIT_SECONDS),
            suppress(*SESSION_ERRORS),
        ):  # the head has said all that matters
            while len(body) <= connection.DRAIN_LIMIT_BYTES and (chunk := await self._read_some()):
                body += chunk
        return body

    async def read_all(self, max_bytes: int, where: str = "where a page of text was asked for") -> bytes:
        """Return the whole body; AttemptFailed, in words that end in ``where``, if it breaks or is too long."""
        body = bytearray()
        while chunk := await self.next_chunk():
            body += chunk
            if len(body) > max_bytes:
                message = f"{self._host.name} answers with more than {max_bytes} bytes {where}"
                raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE, self.status)
        return bytes(body)

    @override
    def is_due(self, now: float) -> None:
        if now - self.due > connection.LOOP_LAG_SECONDS:
            self._since = now
        if now >= self._since + self._seconds:
            self._deadlines.leave(self)
            self.scope.cancel()
        else:
            self.due = self._since + self._seconds

    async def _read_some(self) -> bytes:
        assert self._response is not None
        try:
            return await self._response.content.readany()
        except RuntimeError as error:
            # aiohttp closes a connection whose chunks can't be parsed, and the reader is told nothing of it.
            raise aiohttp.ClientPayloadError("the connection was closed") from error

    def _begin(self, phase: str, seconds: float) -> None:
        self._phase, self._seconds, self._since = phase, seconds, self._deadlines.time()
        before, self.due = self.due, self._since + seconds
        if self.due < before:
            self._deadlines.watch(self)

    def end(self) -> None:
        """Let go of the connection."""
        self._deadlines.leave(self)
        response, self._response = self._response, None  # whose traces lead here
        if response is not None:
            # At the body's end aiohttp has taken the connection back already. Closing one with TLS gracefully would
            # wait for a server that may never answer.
            if response.connection is not None and response.connection.transport is not None:
                abort(response.connection.transport)
            response.close()

    def time_out(self) -> AttemptFailed:
        """Return the failure that a phase which took too long is."""
        came, step = self._stepped_bytes, self._step_bytes
        failure = too_slow(self._phase, self._seconds, self._host.name, came_bytes=came, step_bytes=step)
        failure.status, failure.address = self.status or None, self.peer
        return failure


async def _pieces(body: Iterable[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for piece in body:
        yield piece


def _surplus(view: Views) -> AttemptFailed:
    return AttemptFailed(InvalidResponse, f"the body goes on after its {len(view)} bytes", RetryVerdict.ONCE)


# A forked child inherits sockets and the epoll descriptor. Were it to collect a connection, closing its transport would
# unregister the parent's socket from the epoll that both share, and the parent would wait for ever. So the child takes
# the connectors away from their sessions and never lets go of them, nor of ours.
_open_sessions: weakref.WeakSet[AiohttpSessions] = weakref.WeakSet()
_inherited: list[object] = []


def _disown_sessions_in_child() -> None:
    _inherited.extend((session._connector, session.detach()) for session in list(_open_sessions))


os.register_at_fork(after_in_child=_disown_sessions_in_child)


@atexit.register
def _let_go_at_exit() -> None:
    """Close what is left open on loops of others here, and not while the interpreter is taken apart.

    There a transport may fail at everything, and says so. A loop that still runs, in a daemon thread, keeps its own:
    nothing of it is taken apart.
    """
    left = [session for session in list(_open_sessions) if not session.is_in_use]
    for session in left:
        if session._loop.is_closed() or session._loop.is_running():
            session.detach()
            session._connector.forget()
        else:
            session._loop.run_until_complete(session.aclose())
    if left:
        del session, left
        gc.collect()

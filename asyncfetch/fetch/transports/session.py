"""aiohttp's session, set up so that nothing happens in it that we don't decide.

It follows no redirect, repeats no request, keeps no cookie, decompresses nothing, reads no environment, limits no
connections and has no timeouts: the engine does what of this there is to do. What is left is the pool of connections,
TLS and the answers that ``direct`` doesn't read, which it does well.

Not done: resuming TLS sessions. Python copies a session by writing and parsing it whenever it is used, 0.2 ms each
time, so the client's CPU of 64 handshakes fell by a tenth only (nginx: 70 to 64 ms, with RSA keys 58 to 51).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import ssl
import weakref
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
import anyio.to_thread

from asyncfetch.errors import ConfigError
from asyncfetch.fetch.transports.direct import Channel
from asyncfetch.fetch.transports.resolver import Connecting, connecting, peer_of
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.sockets import Sockets

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine

    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.transports.hedging import Race
    from asyncfetch.fetch.transports.resolver import Resolver

__all__ = ["ConnectionUser", "current_user", "open_session"]

_log = logging.getLogger(__name__)


class ConnectionUser(Protocol):
    """A request that wants to know on which connection it goes out."""

    needs_new_connection: bool
    """Whether a pooled connection won't do, since one of the host's has failed."""
    is_second: bool
    """Whether it is made beside another request, on a connection of its own; the pooled ones stay for others."""
    race: Race[Any] | None
    """Of which it is the first request; None where there can be no second one."""

    def connected(self, connection: Connection, *, reused: bool) -> None:
        """The connection is there and the request goes out on it now."""
        ...


current_user: ContextVar[ConnectionUser] = ContextVar("current_user")
"""The request that runs in this task; aiohttp has no other way to tell its connector."""


class Response(aiohttp.ClientResponse):
    """An answer whose head may be waited for in a race."""

    def start(self, connection: Connection) -> Coroutine[Any, Any, Any]:
        """Returns itself when its head is there."""
        race, start = current_user.get().race, super().start
        return start(connection) if race is None else race.head(partial(start, connection))


class Connector(aiohttp.TCPConnector):
    """A connector that tells the request which connection it got, and gives none on which unasked bytes lie.

    A server that sends more than it declared leaves the surplus on the pooled connection, where aiohttp 3.14 takes it
    for the answer to the next request. It may also lie in the socket still, where only the system sees it. When the
    connector is closed, no socket that it opened is left.
    """

    def __init__(
        self,
        resolver: Resolver,
        *,
        keepalive_seconds: float,
        tls: ssl.SSLContext | bool,
    ) -> None:
        self.resolver = resolver
        self._sockets = Sockets()
        super().__init__(
            limit=0,
            keepalive_timeout=keepalive_seconds,
            ssl=tls,
            socket_factory=self._new_socket,
            resolver=resolver,
            use_dns_cache=False,
        )
        self._unused: set[ResponseHandler] = set()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """The next usable connection, read by aiohttp's own protocol."""
        connection = await self.take(req, traces, timeout)
        handler = connection.protocol
        if handler is not None and handler.transport is not None and handler.transport.get_protocol() is not handler:
            handler.transport.set_protocol(handler)
        return connection

    async def take(self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        """The next usable connection, whoever reads it: pooled where the request allows it, else new."""
        user = current_user.get()
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            reused = protocol not in self._unused
            # One idle connection of a host that turned out dead speaks for its neighbours: all are dropped in turn.
            if reused and (user.needs_new_connection or protocol is None or _is_spoilt(protocol)):
                connection.close()
                continue
            if protocol is not None and not reused:
                self._unused.discard(protocol)
            user.connected(connection, reused=reused)
            return connection

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        # aiohttp's way to the pool. Were it another one day, a second request would get a pooled connection.
        return None if current_user.get().is_second else await super()._get(key, traces)

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        """A new connection, from whose making the resolver learns which addresses are of use."""
        this = Connecting(self.resolver.now(), is_retry=current_user.get().needs_new_connection)
        token = connecting.set(this)
        try:
            handler = await super()._create_connection(req, traces, timeout)
        except aiohttp.ClientConnectorError:
            self.resolver.failed(this, given_up=False)
            raise
        except asyncio.CancelledError:
            self.resolver.failed(this, given_up=True)
            raise
        finally:
            connecting.reset(token)
        if handler.transport is not None and (peer := peer_of(handler.transport)) is not None:
            self.resolver.succeeded(this, peer)
        self._unused.add(handler)
        return handler

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, place = address
        this = connecting.get()
        if this is not None:
            this.tried.append((str(place[0]), int(place[1])))
        return self._sockets.for_connecting(family, kind, protocol)

    async def close(self, *, abort_ssl: bool = True) -> None:
        """Ends every connection, those included that aiohttp has let go of and that wait for their server."""
        await super().close(abort_ssl=abort_ssl)
        await self._sockets.aclose()
        await self.resolver.close()


async def open_session(config: FetchConfig, resolver: Resolver) -> aiohttp.ClientSession:
    """A session on the running loop, which closes ``resolver``; ConfigError where ``ca_file`` can't be read."""
    tls: ssl.SSLContext | bool = True
    if config.ca_file is not None:
        tls = await anyio.to_thread.run_sync(_tls_context, config.ca_file)
    session = aiohttp.ClientSession(
        connector=Connector(
            resolver,
            keepalive_seconds=config.keepalive_seconds,
            tls=tls,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "asyncfetch"},
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        auto_decompress=False,
        response_class=Response,
        trust_env=False,
        raise_for_status=False,
    )
    _switch_off_silent_retry(session)
    _open_sessions.add(session)
    return session


def _is_spoilt(protocol: ResponseHandler) -> bool:
    """Whether an idle connection is of no use: it has ended, or something unasked has come or waits in its socket."""
    if protocol.transport is None:
        return True
    current = protocol.transport.get_protocol()
    if isinstance(current, Channel):
        return current.is_spoilt()
    if protocol.should_close:
        return True
    poll = select.poll()
    poll.register(protocol.transport.get_extra_info("socket"), select.POLLIN)
    return bool(poll.poll(0))


def _tls_context(ca_file: str | os.PathLike[str]) -> ssl.SSLContext:
    try:
        with forks_wait():
            context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError: no certificate in the file
        raise ConfigError(f"ca_file={os.fspath(ca_file)!r} is no readable PEM file of certificates: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def _switch_off_silent_retry(session: aiohttp.ClientSession) -> None:
    """One retry layer: aiohttp's own repeat on a dead pooled connection would not be counted, paced or seen."""
    if hasattr(session, "_retry_connection"):
        session._retry_connection = False  # there is no public switch
    else:
        _log.warning("aiohttp %s has no _retry_connection: its own repeats are not counted", aiohttp.__version__)


# A forked child inherits sockets and the epoll descriptor. Were it to collect a session, closing the connections would
# unregister the parent's sockets from the epoll that both share, and the parent would wait for ever. So the child
# takes the connectors away from their sessions and never lets go of them.
_open_sessions: weakref.WeakSet[aiohttp.ClientSession] = weakref.WeakSet()
_inherited_connectors: list[aiohttp.BaseConnector | None] = []


def _disown_sessions_in_child() -> None:
    for session in list(_open_sessions):
        _inherited_connectors.append(session.connector)
        session.detach()
    _open_sessions.clear()


os.register_at_fork(after_in_child=_disown_sessions_in_child)

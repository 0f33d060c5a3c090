"""aiohttp's session, set up so that nothing happens in it that we don't decide.

It follows no redirect, repeats no request, keeps no cookie, decompresses nothing, reads no environment, limits no
connections and has no timeouts: the engine does what of this there is to do. What is left is the pool of connections,
TLS and the answers that ``direct`` doesn't read, which it does well.

Not done: resuming TLS sessions. Python copies a session by writing and parsing it whenever it is used, 0.2 ms each
time, so the client's CPU of 64 handshakes fell by a tenth only (nginx: 70 to 64 ms, with RSA keys 58 to 51).
"""

from __future__ import annotations

import asyncio
import os
import select
import ssl
import weakref
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio.to_thread

from asyncfetch.errors import ConfigError
from asyncfetch.fetch.transports.aiohttp_parts import PassablePool, has_leftovers
from asyncfetch.fetch.transports.connecting import current_user, peer_of
from asyncfetch.fetch.transports.direct import Channel
from asyncfetch.fetch.transports.fast_tls import can_be_fast, fast_tls
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.sockets import Sockets

if TYPE_CHECKING:
    import socket

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.transports.aiohttp_parts import Connection
    from asyncfetch.fetch.transports.fast_tls import TlsCarrier
    from asyncfetch.fetch.transports.resolver import Resolver

__all__ = ["Connector", "PassableConnector", "TwinConnector", "open_session", "session_over"]


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
        keepalive_seconds: float | None,
        tls: ssl.SSLContext | bool,
        sockets: Sockets | None = None,
        **options: Any,  # noqa: ANN401 - aiohttp's own
    ) -> None:
        self.resolver = resolver
        self.sockets = sockets or Sockets()
        super().__init__(
            limit=0,
            keepalive_timeout=keepalive_seconds,
            ssl=tls,
            socket_factory=self._new_socket,
            resolver=resolver,
            use_dns_cache=False,
            **options,
        )

    async def connect(self, *arguments: Any, **options: Any) -> Connection:  # noqa: ANN401 - only handed on
        """The next usable connection, read by aiohttp's own protocol.

        Raises:
            aiohttp.ClientError: Also where aiohttp wants to repeat a request on a connection that has died: there is
                one retry layer, and what happens beneath it would not be counted, paced or seen.
        """
        if current_user.get().transport is not None:
            raise aiohttp.ServerDisconnectedError
        connection = await self.take(*arguments, **options)
        if connection.transport is not None:
            Channel.withdraw(connection.transport)
        return connection

    async def take(self, *arguments: Any, **options: Any) -> Connection:  # noqa: ANN401
        """The next usable connection, whoever reads it: pooled where the request allows it, else new."""
        user = current_user.get()
        while True:
            try:
                connection = await super().connect(*arguments, **options)
            except (aiohttp.ClientConnectorError, asyncio.CancelledError) as error:
                if user.connecting is not None:
                    self.resolver.failed(user.connecting, given_up=isinstance(error, asyncio.CancelledError))
                raise
            try:
                transport = connection.transport
                if user.connecting is not None and user.connecting.tried:
                    if transport is not None and (peer := peer_of(transport)) is not None:
                        self.resolver.succeeded(user.connecting, peer)
                    user.connected(transport, reused=False)
                    return connection
                # One idle connection of a host that turned out dead speaks for its neighbours: all are dropped in turn.
                if not (user.needs_new_connection or transport is None or _is_spoilt(transport)):
                    user.connected(transport, reused=True)
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, place = address
        this = self.resolver.connecting()
        if this is not None:
            this.tried.append((str(place[0]), int(place[1])))
        return self.sockets.for_connecting(family, kind, protocol)

    async def close(self, **options: Any) -> None:  # noqa: ANN401
        """Ends every connection, those included that aiohttp has let go of and that wait for their server."""
        await super().close(**options)
        await self.sockets.aclose()
        await self.resolver.close()


class PassableConnector(Connector, PassablePool):
    """One that gives second requests a new connection."""


class TwinConnector(Connector):
    """One that gives second requests a new connection by what aiohttp documents: with a connector that pools none.

    So the connection of a second request is closed behind its answer, where the other connector keeps it.
    """

    def __init__(self, resolver: Resolver, **options: Any) -> None:  # noqa: ANN401
        super().__init__(resolver, **options)
        del options["keepalive_seconds"]
        self._twin = Connector(resolver, keepalive_seconds=None, force_close=True, sockets=self.sockets, **options)

    async def take(self, *arguments: Any, **options: Any) -> Connection:  # noqa: ANN401
        """See Connector."""
        if current_user.get().is_second:
            return await self._twin.take(*arguments, **options)
        return await super().take(*arguments, **options)


async def open_session(
    config: FetchConfig, resolver: Resolver, *, connector: type[Connector] = PassableConnector
) -> aiohttp.ClientSession:
    """A session on the running loop, which closes ``resolver``; ConfigError where ``ca_file`` can't be read."""
    tls: ssl.SSLContext | bool = True
    carrier: TlsCarrier | None = None
    if config.ca_file is not None:
        tls = await anyio.to_thread.run_sync(_tls_context, config.ca_file)
    if config.aiofastnet and issubclass(connector, PassablePool) and await can_be_fast():
        trusted = _system_tls_context if config.ca_file is None else partial(_tls_context, config.ca_file)
        carrier = fast_tls(await anyio.to_thread.run_sync(trusted), config.timeouts.connect_seconds)
    made = connector(resolver, keepalive_seconds=config.keepalive_seconds, tls=tls)
    if isinstance(made, PassablePool):
        made.tls_carrier = carrier
    return session_over(made)


def session_over(connector: Connector) -> aiohttp.ClientSession:
    """A session on the running loop, which closes ``connector``."""
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "asyncfetch"},
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        auto_decompress=False,
        trust_env=False,
        raise_for_status=False,
    )
    _open_sessions.add(session)
    return session


def _is_spoilt(transport: asyncio.Transport) -> bool:
    """Whether an idle connection is of no use: it has ended, or something unasked has come or waits in its socket."""
    current = transport.get_protocol()
    if isinstance(current, Channel):
        return current.is_spoilt()
    if has_leftovers(current):
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket"), select.POLLIN)
    return bool(poll.poll(0))


def _tls_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    try:
        with forks_wait():
            context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError: no certificate in the file
        raise ConfigError(f"ca_file={str(ca_file)!r} is no readable PEM file of certificates: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


@cache
def _system_tls_context() -> ssl.SSLContext:
    """Made once, as aiohttp makes its own: reading 144 authorities takes 20 ms."""
    return _tls_context(None)


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

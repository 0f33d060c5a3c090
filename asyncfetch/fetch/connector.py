"""New connections of ours: names, addresses, TCP and TLS, within one limit.

Not done: resuming TLS sessions. Python copies a session by writing and parsing it whenever it is used, 0.2 ms each
time, so the client's CPU of 64 handshakes fell by a tenth only (nginx: 70 to 64 ms, with RSA keys 58 to 51).
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohappyeyeballs

from asyncfetch.errors import ConfigError, ConnectionFailed, FetchTimeout
from asyncfetch.fetch.connection import SCRATCH_BYTES, Connection
from asyncfetch.fetch.refusals import connect_failure, too_slow
from asyncfetch.fetch.resolver import Resolver
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.fetch.urls import address_in
from asyncfetch.runtime.cancellation import Deadlines
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.sockets import Sockets, is_among_last
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from typing import Self

    from yarl import URL

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.connection import Peer
    from asyncfetch.fetch.hosts import Host

PemFile = str | os.PathLike[str]


def _context(ca_file: PemFile | None, cert_file: PemFile | None, key_file: PemFile | None) -> ssl.SSLContext:
    """A client's context: see FetchConfig, whose names these are. ConfigError where a file can't be read."""
    with forks_wait():
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError: no certificate in the file
            raise ConfigError(f"ca_file={str(ca_file)!r} is no readable PEM file of certificates: {error}") from error
        if cert_file is not None:
            try:
                context.load_cert_chain(cert_file, key_file, password=_no_password)
            except (OSError, ValueError) as error:
                key = "" if key_file is None else f", client_key_file={str(key_file)!r}"
                message = (
                    f"client_cert_file={str(cert_file)!r}{key} must hold a certificate and its key, as PEM and without"
                    f" a password: {error}"
                )
                raise ConfigError(message) from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    """Given in place of a question on the terminal."""
    raise ValueError("the key needs a password")


@functools.cache
def _system_context() -> ssl.SSLContext:
    """Made once: reading 144 authorities takes 20 ms."""
    return _context(None, None, None)


HAPPY_EYEBALLS_SECONDS = 0.25
"""Seconds that each address is given before the next one is tried beside it (RFC 8305)."""


class Connector:
    """Makes connections on one loop, and closes them all. ``resolver`` and ``sockets`` are aiohttp's session's, too.

    ``own_context`` is for TLS; None for the system's.
    """

    def __init__(self, config: FetchConfig, own_context: ssl.SSLContext | None) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self.own_context = self._context = own_context
        self._scratch = bytearray(SCRATCH_BYTES)
        self.deadlines = Deadlines(self._loop)
        self.resolver = Resolver()
        self.sockets = Sockets()
        self.files_run_out = False
        """True if the latest connection says that the process may open few more files: none should stay idle."""

    @classmethod
    async def open(cls, config: FetchConfig) -> Self:
        """Return a connector for the running loop; ConfigError where a file of certificates can't be read."""
        files = config.ca_file, config.client_cert_file, config.client_key_file
        return cls(config, await run_sync(_context, *files) if any(files) else None)

    async def context(self) -> ssl.SSLContext:
        """Return what TLS is spoken by."""
        if self._context is None:
            self._context = await run_sync(_system_context)
        return self._context

    async def connect(self, host: Host, url: URL, *, is_retry: bool) -> Connection:
        """Return a new connection to the host of ``url``; AttemptFailed where there is none in time.

        ``is_retry`` says that an earlier one has failed, so that an old answer to its name won't do.
        """
        seconds = self._config.timeouts.connect_seconds
        began = self.resolver.now()
        tried: list[Peer] = []
        try:
            async with asyncio.timeout(seconds) as limit:
                connection = await self._connect(host, url, tried, began if is_retry else None)
        except TimeoutError as error:
            self.resolver.set_aside(tried)
            if not limit.expired():  # the system's own
                raise AttemptFailed(FetchTimeout, f"{host.name} took too long ({error})") from error
            raise too_slow("connecting", seconds, host.name) from None
        except OSError as error:
            self.resolver.set_aside(tried)
            raise connect_failure(error, host.name) from error
        except asyncio.CancelledError:
            self.resolver.given_up(tried, since=began)
            raise
        self.resolver.connected(tried, connection.peer)
        return connection

    def new_socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        """Return a socket for a connection; where few more files may be opened, half of the idle ones are closed.

        Those that were idle for the longest time. It frees their files in the next turns of the loop.
        """
        try:
            made = self.sockets.for_connecting(family, kind, protocol)
        except OSError:
            self._close_idle()
            raise
        self.files_run_out = is_among_last(made.fileno())
        if self.files_run_out:
            self._close_idle()
        return made

    def _close_idle(self) -> None:
        connections = (one for one in self.deadlines.watched() if isinstance(one, Connection))
        idle = sorted((since, number, one) for number, one in enumerate(connections) if (since := one.idle_since))
        for _, _, one in idle[: -(-len(idle) // 2)]:
            one.forget()
            one.abort()

    async def aclose(self) -> None:
        """End every connection, without waiting for any server, and return when its socket is closed."""
        self.deadlines.close()
        await self.sockets.aclose()

    def forget(self) -> None:
        """End every connection and leave it to be collected, which closes its socket: for a loop that can't."""
        self.sockets.shut_down()
        for one in self.deadlines.forget():
            if isinstance(one, Connection):
                one.forget()

    async def _connect(self, host: Host, url: URL, tried: list[Peer], newer_than: float | None) -> Connection:
        name = url.raw_host
        assert name is not None
        assert url.port is not None
        if address_in(name.partition("%")[0]) is not None:
            addresses = [(name, url.port)]
        else:
            try:
                found = await self.resolver.resolve(name, url.port, newer_than=newer_than)
                addresses = [(one["host"], one["port"]) for one in found]
            except OSError as error:
                raise connect_failure(error, host.name, is_name=True) from error
        protocol = partial(
            Connection,
            host.name,
            host.idle_connections,
            timeouts=self._config.timeouts,
            keepalive_seconds=self._config.keepalive_seconds,
            deadlines=self.deadlines,
            scratch=self._scratch,
        )

        def new_socket(address: Any) -> socket.socket:  # noqa: ANN401 - what getaddrinfo gives
            family, kind, number, _, place = address
            tried.append((str(place[0]), int(place[1])))
            return self.new_socket(family, kind, number)

        is_tls = url.scheme == "https"
        context = await self.context() if is_tls else None
        connected = await aiohappyeyeballs.start_connection(
            [_address_info(*peer) for peer in addresses],
            happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS,
            interleave=1,
            loop=self._loop,
            socket_factory=new_socket,
        )
        server_hostname = name.rstrip(".") if is_tls else None  # certificates have no final dot
        try:
            _, connection = await self._loop.create_connection(
                protocol, sock=connected, ssl=context, server_hostname=server_hostname
            )
        except ConnectionError as error:
            if server_hostname is None:
                raise
            message = f"no connection to {host.name} ({str(error) or 'closed in the handshake of TLS'}): is it up?"
            self.resolver.set_aside(tried)
            raise AttemptFailed(ConnectionFailed, message, RetryVerdict.ONCE) from error
        return connection


def _address_info(address: str, port: int) -> tuple[int, int, int, str, tuple[Any, ...]]:
    """The answer of getaddrinfo that an address and a port are."""
    if ":" not in address:
        return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)
    plain, _, scope = address.partition("%")
    scope_id = 0
    if scope:
        scope_id = int(scope) if scope.isdigit() else socket.if_nametoindex(scope)
    return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (plain, port, 0, scope_id)

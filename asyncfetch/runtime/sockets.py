"""Sockets from their creation to their end, so that closing them all leaves none.

An asyncio TLS transport that is closed waits up to 30 s for its peer's close; one still in its handshake has no owner
yet. A loop that ends meanwhile leaves both open. But a transport that reads can't ignore the end of its socket: shut
down from our side, the socket reads as ended, and the transport closes it within a few rounds of the loop, whatever the
peer does.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import anyio

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

CLOSE_SECONDS = 1.0
"""Longest wait for transports to close their sockets: the loop's own work, some 0.1 ms each."""
BACKLOG = 1024
"""Hundreds of clients may connect to a server at once."""
SPARE_FILES = 64
"""Idle connections are closed when a process may open no more files than this, or a quarter of its limit if less."""
HANDSHAKE_SECONDS = 5.0
"""A client that connects to a server and doesn't speak TLS is dropped after this."""


def abort(transport: asyncio.BaseTransport) -> None:
    """Closes a transport at once, whatever has happened to it before."""
    # A TLS transport that was closed twice has lost its own, and ``abort`` fails before CPython 3.11.5. Its class can't
    # be checked: uvloop's transports aren't asyncio's.
    if getattr(transport, "_ssl_protocol", transport) is not None:
        cast("asyncio.WriteTransport", transport).abort()


def is_among_last(descriptor: int) -> bool:
    """Return whether a new descriptor, the lowest free one, shows that the process may open few more."""
    if sys.platform == "win32":  # which has no such limit
        return False
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(limit // 4, SPARE_FILES)


class SocketsClosed(ConnectionAbortedError):
    """A connection was requested after its owner's end: no fault of the host, and no use trying again."""

    def __init__(self) -> None:
        super().__init__(errno.ECONNABORTED, "the client of this connection is closed")


class Sockets:
    """The open connections of a client or a server, both ends of their life seen. Belongs to one loop."""

    def __init__(self) -> None:
        self._open: set[_Socket] = set()
        self._all_closed: asyncio.Event | None = None

    def for_connecting(self, family: int, kind: int, protocol: int) -> socket.socket:
        """A new socket, counted as open from now on; SocketsClosed after ``aclose``."""
        if self._all_closed is not None:
            raise SocketsClosed
        return self._keep(_Socket(family, kind, protocol))

    def for_listening(self, address: Sequence[object], *, family: int) -> socket.socket:
        """A bound socket whose accepted sockets are counted. OSError if the address isn't available."""
        listening = _ListeningSocket(family, socket.SOCK_STREAM)
        listening.owner = self
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(tuple(address))
        except BaseException:
            listening.close()
            raise
        return listening

    async def serve(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, tls: ssl.SSLContext | None
    ) -> asyncio.Server:
        """A listener whose connections are counted; OSError or UnicodeError if the address isn't there or possible."""
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        return await loop.create_server(
            protocol_factory,
            sock=self.for_listening(address, family=family),
            ssl=tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if tls else None,
        )

    def shut_down(self) -> None:
        """Ends every connection; its transport closes the socket when its loop runs. From any thread."""
        for one in list(self._open):
            with suppress(OSError):  # the peer has ended it
                one.shutdown(socket.SHUT_RDWR)

    async def aclose(self) -> None:
        """Ends every connection and returns when its socket is closed.

        From now on none may be made, and none is accepted. Close a listener after that: closing it makes asyncio forget
        connections that it has accepted and not begun to serve.
        """
        self._all_closed = asyncio.Event()
        if not self._open:
            return
        self.shut_down()
        with anyio.move_on_after(CLOSE_SECONDS):
            await self._all_closed.wait()

    def _keep(self, one: _Socket) -> _Socket:
        one.owner = self
        self._open.add(one)
        return one

    def _forget(self, one: _Socket) -> None:
        self._open.discard(one)
        if self._all_closed is not None and not self._open:
            self._all_closed.set()


class _Socket(socket.socket):
    """A socket that leaves its owner when it ends: asyncio closes the socket of a transport, uvloop detaches it."""

    owner: Sockets | None = None

    def close(self) -> None:
        super().close()
        self._ended()

    def detach(self) -> int:
        descriptor = super().detach()
        self._ended()
        return descriptor

    def _ended(self) -> None:
        if self.owner is not None:
            self.owner._forget(self)


class _ListeningSocket(socket.socket):
    """A socket that registers accepted sockets with its owner, on asyncio's own loop; uvloop bypasses it."""

    owner: Sockets

    def accept(self) -> tuple[socket.socket, object]:
        connection, address = super().accept()
        if self.owner._all_closed is not None:
            connection.close()
            raise ConnectionAbortedError
        return self.owner._keep(_Socket(fileno=connection.detach())), address

"""The sockets of a session's connections, from their making to their end.

An asyncio TLS transport that is closed says good-bye and waits for the server's, up to 30 s, when aiohttp has long
forgotten it: a connection that the server wanted closed, or one whose handshake ended just as its task was cancelled. A
loop that ends meanwhile leaves it open. What such a transport can't put off is the end of its socket: shut down from
our side, the socket reads as ended, and the transport closes it within a few rounds of the loop, whatever the server
does.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from aiohttp import AddrInfoType

__all__ = ["Sockets"]

CLOSE_SECONDS = 1.0
"""Longest wait for transports to close their sockets: the loop's own work, some 0.1 ms each."""


class Sockets:
    """Makes sockets for connections, and knows which of them are open. Belongs to one loop."""

    def __init__(self) -> None:
        self._open: set[_Socket] = set()
        self._all_closed: anyio.Event | None = None

    def make(self, address: AddrInfoType) -> socket.socket:
        """A socket for a connection to ``address``; aiohttp's ``socket_factory``."""
        family, kind, protocol, _, _ = address
        one = _Socket(family, kind, protocol)
        one.owner = self
        self._open.add(one)
        return one

    async def aclose(self) -> None:
        """Ends every connection and returns when its socket is closed. None may be made from now on."""
        if not self._open:
            return
        self._all_closed = anyio.Event()
        for one in self._open:
            with suppress(OSError):  # the server has ended it
                one.shutdown(socket.SHUT_RDWR)
        with anyio.move_on_after(CLOSE_SECONDS):
            await self._all_closed.wait()

    def forget(self, one: _Socket) -> None:
        """Notes that ``one`` is closed."""
        self._open.discard(one)
        if self._all_closed is not None and not self._open:
            self._all_closed.set()


class _Socket(socket.socket):
    """A socket that tells its owner when it ends: asyncio closes the socket of a transport, uvloop detaches it."""

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
            self.owner.forget(self)

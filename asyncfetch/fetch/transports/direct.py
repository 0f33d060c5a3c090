"""Bodies straight from the socket into the memory they are meant for.

aiohttp hands a body out in pieces: the transport makes bytes of what it read, the parser copies them, the reader queues
them, and we copy them where they belong. From a mebibyte on, that is most of what a fetch costs. So once a head is
parsed and the body's length known, the connection's transport gets another protocol, which lets it write into the
caller's memory; with the last byte, aiohttp's own protocol is put back and told that its body has ended. Connections,
pool, TLS, proxies and heads stay aiohttp's. What came together with the head has to be copied still.

Not done: a protocol of our own in aiohttp's place from the start. It was no cheaper, leans on more inner parts, and
uvloop doesn't take it for one that reads into buffers. Nor does the engine choose aiofastnet's transports for TLS by
itself: with bodies of 1-16 MiB they took 7-15 % less CPU here (medians of 5 and 11 repeats, whose spreads overlap),
with 64 KiB as much, without TLS up to a fifth more, and aiohttp before 3.15 has no way to be given them. A loop made by
aiofastnet has them, and everything here works on it.

One inner part of aiohttp is written to, the handler's parser; ``is_possible`` tries that before it is relied on.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import TYPE_CHECKING

import aiohttp

from asyncfetch.runtime.sockets import abort

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.client_proto import ResponseHandler

__all__ = ["Rest", "is_direct", "is_possible", "receive"]

_log = logging.getLogger(__name__)

_SCRATCH = memoryview(bytearray(4096))
"""Takes what comes after a body's end; nobody looks at it."""


async def is_possible() -> bool:
    """Whether the aiohttp at hand works inside as ``receive`` needs it; one warning a process where it doesn't."""
    try:
        works = await _rehearse()
    except Exception:  # noqa: BLE001 - whatever has changed in there
        works = False
    if not works:
        _warn()
    return works


async def _rehearse() -> bool:
    """Plays a body without a socket: its first byte with the head, the rest past the parser, unasked bytes after it."""
    from aiohttp.client_proto import ResponseHandler  # here, so that its absence is an answer as well

    handler = ResponseHandler(asyncio.get_running_loop())
    handler.connection_made(asyncio.Transport())
    handler.set_response_params(read_until_eof=True, auto_decompress=False)
    handler.data_received(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 2\r\n\r\n1")
    _, content = await handler.read()
    begun = content.read_nowait() == b"1" and not content.is_eof() and handler.should_close
    _end_body(handler, content)
    ended = content.is_eof() and not handler.should_close
    handler.data_received(b"unasked")
    return begun and ended and handler.should_close


@cache
def _warn() -> None:
    _log.warning("aiohttp %s has changed inside: bodies are copied, which costs more CPU", aiohttp.__version__)


def is_direct(response: aiohttp.ClientResponse, length: int) -> bool:
    """Whether ``receive`` can take this body: one of just ``length`` bytes, as they are, not in chunks."""
    headers = response.headers
    if headers.get("Content-Length") != str(length) or "Transfer-Encoding" in headers:
        return False
    handler = response.connection.protocol if response.connection is not None else None
    return handler is None or not handler.writing_paused  # else it has to be told when it may go on


async def receive(
    response: aiohttp.ClientResponse,
    view: memoryview,
    landed: Callable[[int], None],
    rest_of: Callable[[ResponseHandler, memoryview, asyncio.Transport], Rest] | None = None,
) -> None:
    """Fills ``view`` with a body that ``is_direct``, in order; its connection goes back to the pool.

    After a failure or a cancellation nothing writes to ``view``, and the connection is of no use: close it.

    Args:
        response: Its head was read, of its body nothing.
        view: Writable, of the body's length.
        landed: Called with the number of bytes that were just added to ``view``.
        rest_of: Makes the protocol for what hasn't come with the head; None means Rest.

    Raises:
        aiohttp.ClientError: The body broke or ended early.
    """
    content, connection = response.content, response.connection
    filled = 0
    while chunk := content.read_nowait():  # came with the head
        view[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
        landed(len(chunk))
    if content.is_eof():
        return
    if connection is None or connection.protocol is None or connection.transport is None:
        raise aiohttp.ClientPayloadError(f"it ended after {filled} of {len(view)} bytes")
    handler, transport = connection.protocol, connection.transport
    if transport.is_closing():
        # Over TLS the loop may have bound the connection's end to the handler already: the rest would never hear of it.
        raise aiohttp.ClientPayloadError(f"the connection ended after {filled} of {len(view)} bytes")
    rest = rest_of(handler, view[filled:], transport) if rest_of else Rest(handler, view[filled:], landed)
    transport.set_protocol(rest)
    try:
        rest.begin()
        await rest.ended
    finally:
        rest.close()
        transport.set_protocol(handler)
    if rest.missing_bytes:
        cause = f" ({rest.error})" if rest.error else ""
        raise aiohttp.ClientPayloadError(f"it ended after {len(view) - rest.missing_bytes} of {len(view)} bytes{cause}")
    if rest.has_surplus:
        abort(transport)
        response.close()
    else:
        _end_body(handler, content)


def _end_body(handler: ResponseHandler, content: aiohttp.StreamReader) -> None:
    """What aiohttp's parser does at a body's end: the connection goes back to the pool."""
    # The parser still waits for the body. Without one, unasked bytes are kept, and those make the handler should_close.
    handler._parser = None
    content.feed_eof()


class Rest(asyncio.BufferedProtocol):
    """The transport's protocol while the rest of a body comes in.

    ``ended`` is done with the last byte, with the connection's end, or when it is cancelled. From then on nothing is
    written to ``view``. What lies decrypted behind the last byte is read before the waiting task runs.
    """

    def __init__(self, handler: ResponseHandler, view: memoryview, landed: Callable[[int], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.missing_bytes = len(view)
        self.has_surplus = False
        self.error: Exception | None = None
        self._handler = handler
        self._view = view
        self._landed = landed

    def begin(self) -> None:
        """The transport has this protocol now."""

    def close(self) -> None:
        """The transport gets its own back."""
        del self._view, self._landed  # uvloop's keeps this one all the same, and so it would keep the body

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes belong."""
        return _SCRATCH if self.ended.done() else self._view[-self.missing_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        if self.ended.done():
            self.has_surplus = True
            return
        self.missing_bytes -= nbytes
        self._landed(nbytes)
        if not self.missing_bytes:
            self._end()

    def eof_received(self) -> None:
        """There will be no more."""
        self._handler.eof_received()
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Neither will there be another body."""
        self.error = exc
        self._handler.connection_lost(exc)
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

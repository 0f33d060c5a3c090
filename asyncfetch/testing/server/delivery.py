"""A response's way onto the wire: its pace, and how it ends."""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING

import anyio.lowlevel
from aiohttp import web

from asyncfetch.runtime.sockets import abort

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from asyncfetch.testing.server.answers import Answer
    from asyncfetch.testing.server.faults import Fault, RequestLog, ServedRequest

__all__ = ["Delivery", "Pace", "sleep_until"]

BLOCK_BYTES = 256 * 1024
"""Read and written at once where there is no rate: some syscalls and thread hops a megabyte, little memory."""
PIECE_SECONDS = 0.02
"""Written at once at a rate. 50 writes a second and stream: 64 streams at 4 MiB/s cost half a core."""
CATCH_UP_SECONDS = 0.1
"""What a stream may make up for after a pause, such as a busy loop. A link doesn't save what it didn't carry."""


class Pace:
    """A stream of ``bytes_per_second``, as a clock of when its bytes are due. Pure: ``now`` is passed in."""

    def __init__(self, bytes_per_second: float, *, now: float) -> None:
        self._bytes_per_second, self._clock = bytes_per_second, now

    @property
    def piece_bytes(self) -> int:
        """Bytes to write at once."""
        return min(BLOCK_BYTES, max(1, int(self._bytes_per_second * PIECE_SECONDS)))

    def due(self, byte_count: int, *, now: float) -> float:
        """When the next ``byte_count`` bytes have had the time they take."""
        self._clock = max(self._clock, now - CATCH_UP_SECONDS) + byte_count / self._bytes_per_second
        return self._clock


async def sleep_until(monotonic_seconds: float) -> None:
    """Sleep until then; a time that has passed gives way to other tasks once."""
    await anyio.sleep(max(0.0, monotonic_seconds - time.monotonic()))


class Delivery:
    """Sends one answer. ``read(start, stop)`` gives the object's bytes."""

    def __init__(
        self,
        request: web.BaseRequest,
        record: ServedRequest,
        log: RequestLog,
        *,
        read: Callable[[int, int], Awaitable[bytes | memoryview]],
        bytes_per_second: float | None,
    ) -> None:
        self._request, self._record, self._log, self._read = request, record, log, read
        self._bytes_per_second = bytes_per_second

    async def send(self, answer: Answer, fault: Fault) -> web.StreamResponse:
        """Send ``answer`` as far as ``fault`` lets it; cancelled when the client goes."""
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        length = len(answer.text) or answer.stop - answer.start
        if fault.ending == "complete":
            await self._send_body(response, answer, length, whole=True)
            self._send_surplus(fault.surplus_bytes)
            return response
        if fault.after_bytes is None:
            self._record.status = None
        else:
            await self._send_body(response, answer, min(length, fault.after_bytes), whole=False)
        if fault.ending == "stall":
            await anyio.sleep_forever()
        self._log.end(self._record)
        self._break(reset=fault.ending == "reset")
        return response

    async def _send_body(self, response: web.StreamResponse, answer: Answer, length: int, *, whole: bool) -> None:
        if whole and length == 0:
            self._log.end(self._record)
        await response.prepare(self._request)
        pace = Pace(self._bytes_per_second, now=time.monotonic()) if self._bytes_per_second else None
        piece_bytes = pace.piece_bytes if pace else BLOCK_BYTES
        for block_start in range(0, length, BLOCK_BYTES):
            # Neither reading from memory nor writing need wait for anything: an end of the connection, which cancels
            # this, could not be noticed before the last block, and other streams would get no turn.
            await anyio.lowlevel.checkpoint()
            block_stop = min(length, block_start + BLOCK_BYTES)
            block = memoryview(await self._block(answer, block_start, block_stop))
            for offset in range(0, len(block), piece_bytes):
                piece = block[offset : offset + piece_bytes]
                if pace:
                    await sleep_until(pace.due(len(piece), now=time.monotonic()))
                self._log.sent(self._record, len(piece))
                if whole and self._record.bytes_sent == length:
                    self._log.end(self._record)
                await response.write(piece)

    async def _block(self, answer: Answer, start: int, stop: int) -> bytes | memoryview:
        if answer.text:
            return answer.text[start:stop]
        return await self._read(answer.start + start, answer.start + stop)

    def _send_surplus(self, byte_count: int) -> None:
        # Past aiohttp, which keeps a body to its declared length.
        if byte_count and (transport := self._transport()):
            transport.write(b"\xff" * byte_count)

    def _break(self, *, reset: bool) -> None:
        transport = self._transport()
        if transport is None:
            return
        if reset:
            # Lingering for 0 s makes close() send RST instead of FIN (socket(7)).
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            abort(transport)
        else:
            transport.close()

    def _transport(self) -> asyncio.Transport | None:
        transport = self._request.transport
        return None if transport is None or transport.is_closing() else transport

"""The rest of a body that comes no faster than it is paid for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfetch.fetch.transports.direct import Rest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiohttp.client_proto import ResponseHandler

    from asyncfetch.fetch.bandwidth import Allowance

__all__ = ["PacedRest"]


class PacedRest(Rest):
    """Reads what the allowance has left, and pauses the transport until there is more."""

    def __init__(
        self,
        handler: ResponseHandler,
        view: memoryview,
        landed: Callable[[int], None],
        transport: asyncio.Transport,
        allowance: Allowance,
        pausing: Callable[[float], None],
    ) -> None:
        """As Rest does it.

        Args:
            handler: aiohttp's.
            view: Where the rest belongs.
            landed: Told of all that comes; it is for it to tell the allowance.
            transport: The connection's.
            allowance: The body's.
            pausing: Told for how many seconds nothing is read from now on.
        """
        super().__init__(handler, view, landed)
        self._transport = transport
        self._allowance = allowance
        self._pausing = pausing
        self._timer: asyncio.Handle | None = None

    def begin(self) -> None:
        """To be called when the transport has this protocol."""
        self._pay()

    def get_buffer(self, sizehint: int) -> memoryview:
        """As much of the rest as is paid for; all of it for what has left the socket already."""
        buffer, left_bytes = super().get_buffer(sizehint), self._allowance.left_bytes
        return buffer if self.ended.done() or not left_bytes else buffer[:left_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """They are there, and what comes next is paid for."""
        super().buffer_updated(nbytes)
        if not self._allowance.left_bytes and self._timer is None:
            # Not at once: what a TLS transport has read by now it would keep, and aiofastnet's gives it out only when
            # more comes behind it, which may be never.
            self._timer = self.ended.get_loop().call_soon(self._pay)

    def close(self) -> None:
        """Nothing is paused or resumed any more."""
        super().close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pay(self) -> None:
        self._timer = None
        if self._allowance.left_bytes > 0 or self.ended.done():
            return
        seconds = self._allowance.more()
        if seconds:
            self._pausing(seconds)
            self._transport.pause_reading()
            self._timer = self.ended.get_loop().call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._timer = None
        if not self.ended.done():
            self._transport.resume_reading()

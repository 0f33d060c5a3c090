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
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """To be called when the transport has this protocol."""
        self._pay()

    def get_buffer(self, sizehint: int) -> memoryview:
        """As much of the rest as is paid for."""
        buffer = super().get_buffer(sizehint)
        return buffer if self.ended.done() else buffer[: self._allowance.left_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """They are there, and what comes next is paid for."""
        super().buffer_updated(nbytes)
        self._pay()

    def close(self) -> None:
        """Nothing is paused or resumed any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pay(self) -> None:
        if self._allowance.left_bytes > 0 or self.ended.done():
            return
        seconds = self._allowance.more()
        if seconds:
            self._pausing(seconds)
            self._transport.pause_reading()
            self._timer = self.ended.get_loop().call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self.ended.done():
            self._transport.resume_reading()

"""A body that comes no faster than it is paid for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch.bandwidth import Allowance

__all__ = ["AllowedPace"]


class AllowedPace:
    """Lets a channel read what an allowance has left, and pauses its transport until there is more. See Pace."""

    def __init__(self, allowance: Allowance, pausing: Callable[[float], None]) -> None:
        """As an exchange has it.

        Args:
            allowance: The body's. Who is told of what landed tells it.
            pausing: Told for how many seconds nothing is read from now on.
        """
        self._allowance = allowance
        self._pausing = pausing
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.Handle | None = None
        self._is_paused = False

    def begin(self, transport: asyncio.Transport) -> None:
        """Nothing more is read than is left by what came with the head."""
        self._transport = transport
        self._pay()

    def room(self, buffer: memoryview) -> memoryview:
        """As much of it as is paid for; all of it for what has left the socket already."""
        left_bytes = self._allowance.left_bytes
        return buffer[:left_bytes] if left_bytes else buffer

    def came(self) -> None:
        """What comes next is paid for."""
        if not self._allowance.left_bytes and self._timer is None:
            # Not at once: what a TLS transport has read by now it would keep, and aiofastnet's gives it out only when
            # more comes behind it, which may be never.
            self._timer = self._loop.call_soon(self._pay)

    def end(self) -> None:
        """Nothing is paused any more, nor will be."""
        transport, self._transport = self._transport, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_paused and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def _pay(self) -> None:
        self._timer = None
        if self._allowance.left_bytes > 0 or self._transport is None:
            return
        seconds = self._allowance.more()
        if seconds:
            self._pausing(seconds)
            self._transport.pause_reading()
            self._is_paused = True
            self._timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._is_paused = False
        if self._transport is not None:
            self._transport.resume_reading()

"""One timer for many deadlines.

A timer of asyncio's takes its place among all others when it is made and when it ends, and most never go off. So those
who wait for something are noted, and one timer stands at the earliest of their deadlines. It goes off once for all that
have come and gone since it was set, and looks at those that are left.
"""

from __future__ import annotations

import contextvars
import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["Deadlines", "Watched"]


class Watched(Protocol):
    """Something that has a deadline. Compared by identity."""

    due: float
    """Time that it is due, by the loop's clock. To be moved back as one likes; whoever moves it forward must say so by
    ``watch``."""

    def is_due(self, now: float) -> None:
        """Told when the deadline has come; it must then have a later one, or have left."""
        ...


class Deadlines:
    """Tells things when they are due. Belongs to one loop."""

    __slots__ = ("_context", "_due", "_loop", "_timer", "_watched", "time")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.time = loop.time
        """The loop's clock, in seconds."""
        self._context = contextvars.Context()  # not that of whoever happens to set it, which would live on with it
        self._watched: dict[Watched, None] = {}
        self._timer: asyncio.Handle | None = None
        self._due = math.inf

    def watch(self, one: Watched) -> None:
        """Tells it when it is due, from now until ``leave``."""
        self._watched[one] = None
        if one.due < self._due:
            self._set(one.due)

    def leave(self, one: Watched) -> None:
        """It isn't told any more. May be called again."""
        self._watched.pop(one, None)

    def forget(self) -> list[Watched]:
        """Let go of all, whose loop does nothing more, and return them."""
        watched = list(self._watched)
        self._watched.clear()
        return watched

    def close(self) -> None:
        """Nobody is told any more."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        # Kept beside the timer: below a millisecond uvloop's is a plain handle, which doesn't know.
        if self._timer is not None:
            self._timer.cancel()
        self._due, self._timer = due, self._loop.call_at(due, self._look, context=self._context)

    def _look(self) -> None:
        self._due, self._timer = math.inf, None
        now = self.time()
        for one in list(self._watched):
            if one.due <= now and one in self._watched:  # it may have left just now
                one.is_due(now)
        if self._watched:
            self._set(min(one.due for one in self._watched))

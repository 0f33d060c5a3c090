"""The memory for clips, taken for each stretch in use before it is fetched.

Passes hold many stretches for long, and need more while they hold those. If they waited for each other here, each could
wait for what the other holds. So a pass takes what fits, is called when something came back, and finds out by itself
that it is stuck. All others, such as single samples, hold one stretch for a moment. They wait in turn, behind passes,
and fail once what passes hold leaves too little: the waiter may be iterating such a pass, which then gives nothing
back.

What a pass takes fits beside all that is taken, so a fetch waits in the byte cache only for stretches that were found
in memory and are used for a moment.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable


class PassShare:
    """The part that one pass holds, at first nothing. Close it.

    ``on_freed`` is called at each change while it wants some.
    """

    def __init__(self, room: ClipRoom, on_freed: Callable[[], object]) -> None:
        self.room = room
        self.on_freed = on_freed
        room.shares.append(self)
        self.used_bytes = 0
        """Memory of what it holds, alone or with others."""
        self.wanted_bytes = 0
        """Memory that it needs next, and waits for."""

    def want(self, size_bytes: int) -> None:
        """Wait for so much, or for nothing: it is called back when bytes came back."""
        self.wanted_bytes = size_bytes
        if not size_bytes:
            self.room.serve()

    def close(self) -> None:
        """Leave. Once, when it holds nothing."""
        self.wanted_bytes = 0
        self.room.shares.remove(self)
        self.room.serve()


class _BriefWaiter:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.decided = anyio.Event()
        self.is_granted = False


class ClipRoom:
    """A bound in bytes on the clips of all stretches in use. Belongs to one loop.

    Args:
        max_bytes: Most that all of them take; only what was found in memory may exceed it, for a moment.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.pass_bytes = 0
        """Memory of stretches that at least one pass holds."""
        self.brief_bytes = 0
        """Memory of all other stretches in use."""
        self.shares: list[PassShare] = []
        self._waiters: deque[_BriefWaiter] = deque()
        self._is_serving = self._is_changed = False

    def fits(self, size_bytes: int) -> bool:
        """Return whether so much more can be taken now."""
        return self.pass_bytes + self.brief_bytes + size_bytes <= self.max_bytes

    def fits_beside_passes(self, size_bytes: int) -> bool:
        """Return whether so much can be taken once all stretches that are held for a moment were given back."""
        return self.pass_bytes + size_bytes <= self.max_bytes

    def change(self, *, pass_bytes: int = 0, brief_bytes: int = 0) -> None:
        """Account for what was taken or given back."""
        self.pass_bytes += pass_bytes
        self.brief_bytes += brief_bytes
        self.serve()

    async def take_briefly(self, size_bytes: int) -> bool:
        """Take so much for a moment, after earlier callers; False as soon as it doesn't fit beside passes."""
        waiter = _BriefWaiter(size_bytes)
        self._waiters.append(waiter)
        self.serve()
        try:
            await waiter.decided.wait()
        except BaseException:
            if waiter.is_granted:
                self.change(brief_bytes=-size_bytes)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
                self.serve()  # it may have stood in the way of those behind
            raise
        return waiter.is_granted

    def serve(self) -> None:
        """Let all waiters look again: passes first, that with least before the others, so that none is starved."""
        self._is_changed = True
        if self._is_serving:
            return  # called back by one of those below; the loop looks again
        self._is_serving = True
        try:
            while self._is_changed:
                self._is_changed = False
                for share in sorted(self.shares, key=lambda share: share.used_bytes):
                    if share.wanted_bytes:
                        share.on_freed()
                self._serve_brief()
        finally:
            self._is_serving = False

    def _serve_brief(self) -> None:
        for waiter in [one for one in self._waiters if not self.fits_beside_passes(one.size_bytes)]:
            self._waiters.remove(waiter)
            waiter.decided.set()
        # A pass that waits for nothing but these would wait for ever, if new ones came again and again.
        if any(share.wanted_bytes and self.fits_beside_passes(share.wanted_bytes) for share in self.shares):
            return
        while self._waiters and self.fits(self._waiters[0].size_bytes):
            waiter = self._waiters.popleft()
            self.brief_bytes += waiter.size_bytes
            waiter.is_granted = True
            waiter.decided.set()

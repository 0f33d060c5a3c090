"""A cap on the bytes per second that a process receives.

A server sends as fast as it can until its peer's buffers are full. So bytes are paid for before they are read, a few
at a time: a request waits for what may come with the head of its answer, and what comes after that isn't read from
the socket before its turn. Once the system's buffers are full (64-128 KiB a connection), TCP holds the server back.

All bodies draw on one bucket, in the order in which they ask. It needs no timers, and no list of who waits: a
reservation moves the time up to which the cap is spent, and tells by how much that lies ahead.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BURST_SECONDS = 0.05
"""Seconds for which what isn't used can still be used. Timers and loops are late by some milliseconds; over 2 s, it is
2.5 %."""
STEP_SECONDS = 0.02
"""Seconds of the cap that are paid for at once within a body: 1 % of 2 s."""
MAX_STEP_BYTES = 256 * 1024
"""Most bytes paid for at once: as much as asyncio reads from a socket."""
MIN_STEP_BYTES = 1024
HEAD_BYTES = 256 * 1024
"""Most that comes with an answer's head, unasked: asyncio reads that much at once."""


class Bandwidth:
    """One cap for the whole process: it says how long to wait for so many bytes. Safe to use from any thread.

    Over any time, no more is granted than the rate allows in it and in BURST_SECONDS.

    ``of`` gives the same one to everybody who asks for the same rate, as long as one of them keeps it: so the fetchers
    and loops of a process share it, while different rates are caps of their own. A forked child has its own.
    """

    def __init__(self, bytes_per_second: int, now: Callable[[], float] = time.monotonic) -> None:
        """Use ``of``, but in tests; ``now`` gives seconds since some point, never backwards."""
        self.step_bytes = max(MIN_STEP_BYTES, min(int(bytes_per_second * STEP_SECONDS), MAX_STEP_BYTES))
        self._bytes_per_second = bytes_per_second
        self._spent_until = -math.inf
        self._lock = threading.Lock()
        self._now = now

    @classmethod
    def of(cls, bytes_per_second: int | None) -> Bandwidth | None:
        """The cap of this process at that rate; None where there is none."""
        if bytes_per_second is None:
            return None
        with _lock:
            bandwidth = _caps.get(bytes_per_second)
            if bandwidth is None:
                bandwidth = _caps[bytes_per_second] = cls(bytes_per_second)
            return bandwidth

    def reserve(self, nbytes: int) -> float:
        """Seconds until ``nbytes`` may come: after all that was reserved before."""
        with self._lock:
            now = self._now()
            self._spent_until = max(self._spent_until, now - BURST_SECONDS) + nbytes / self._bytes_per_second
            return max(0.0, self._spent_until - now)

    def give_back(self, nbytes: int) -> None:
        """``nbytes`` that were reserved won't come. Who waits already goes on waiting, who comes next gains."""
        with self._lock:
            self._spent_until -= nbytes / self._bytes_per_second


class Allowance:
    """The bytes that one body may bring. For one thread at a time."""

    __slots__ = ("_bandwidth", "left_bytes")

    def __init__(self, bandwidth: Bandwidth) -> None:
        self._bandwidth = bandwidth
        self.left_bytes = 0
        """Paid for, and not come yet. Where it is 0, nothing may be read."""

    def begin(self, body_bytes: int) -> float:
        """Pays for what may come unasked of so long a body, 0 for one of unknown length.

        Returns the seconds to wait before the request.
        """
        return self._pay(min(body_bytes or HEAD_BYTES, HEAD_BYTES))

    def more(self) -> float:
        """Pays for the next step; returns the seconds to wait before it is read."""
        return self._pay(self._bandwidth.step_bytes)

    def came(self, nbytes: int) -> None:
        """``nbytes`` have come; such as weren't paid for are paid for now, at the cost of all that come next."""
        unpaid = nbytes - self.left_bytes
        if unpaid > 0:
            self._pay(unpaid)
        self.left_bytes -= nbytes

    def close(self) -> None:
        """Gives back what didn't come."""
        self._bandwidth.give_back(self.left_bytes)
        self.left_bytes = 0

    def _pay(self, nbytes: int) -> float:
        self.left_bytes += nbytes
        return self._bandwidth.reserve(nbytes)


_caps: weakref.WeakValueDictionary[int, Bandwidth] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _start_afresh_in_child() -> None:
    """A child's bytes are its own, and a lock may have been held by a thread that it doesn't have."""
    global _caps, _lock
    _caps = weakref.WeakValueDictionary()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_start_afresh_in_child)

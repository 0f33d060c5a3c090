"""A guard for objects that belong to one event loop."""

from __future__ import annotations

import asyncio

from asyncfetch.errors import WrongLoop
from asyncfetch.runtime.fork import ForkGuard

__all__ = ["LoopGuard"]


class LoopGuard:
    """Remembers the running loop that it was made on, and the process.

    Args:
        subject: What the owner is called in the message, e.g. "this ByteCache".

    Raises:
        RuntimeError: If no loop is running.
    """

    __slots__ = ("_fork", "_loop", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._loop = asyncio.get_running_loop()
        self._fork = ForkGuard(subject)

    def check(self) -> None:
        """Raise WrongLoop anywhere but on the guard's own running loop."""
        # asyncio's own getter, because anyio has none that is both synchronous and silent off the loop.
        if asyncio._get_running_loop() is self._loop:  # it is None in a forked child, whatever ran in the parent
            return
        self._fork.check()
        raise WrongLoop(
            f"{self._subject} belongs to another event loop or thread: use it where it was entered, or make one for "
            "each loop"
        )

"""A guard for objects that must not be used on the other side of a fork."""

from __future__ import annotations

import os

from asyncfetch.errors import WrongLoop

__all__ = ["ForkGuard"]


class ForkGuard:
    """Remembers the process that it was made in.

    A child gets copies of loops, threads and locks, but not the threads that make them work; what it does to a copied
    epoll or socket reaches the parent's. So the owner asks here first, and leaves all of it alone in a child. Nothing
    runs at the time of the fork itself: no hook that could wait, no registry.

    Args:
        subject: What the owner is called in the message, e.g. "this LoopThread".
    """

    __slots__ = ("_pid", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._pid = os.getpid()

    @property
    def in_child(self) -> bool:
        """Whether this process isn't the one that the guard was made in."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise WrongLoop in any process but the guard's own."""
        if os.getpid() != self._pid:
            raise WrongLoop(
                f"{self._subject} was made in process {self._pid} and can't be used in process {os.getpid()}, forked "
                "from it: its threads and loop didn't come along. Make a new one in this process."
            )

"""A guard for objects that must not be used on the other side of a fork, and loops that stand still during one."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Final

from asyncfetch.errors import WrongLoop

__all__ = ["ForkGuard", "stand_still_at_forks"]

PAUSE_SECONDS: Final = 1.0
"""How long a fork waits for loops to stand still, and they for the fork."""


class ForkGuard:
    """Remembers the process that it was made in.

    A child gets copies of loops, threads and locks, but not the threads that make them work; what it does to a copied
    epoll or socket reaches the parent's. So the owner asks here first, and leaves all of it alone in a child.

    Args:
        subject: What the owner is called in the message, e.g. "this LoopThread".
    """

    __slots__ = ("_pid", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._pid = _pid

    @property
    def in_child(self) -> bool:
        """Whether this process isn't the one that the guard was made in."""
        return self._pid != _pid

    def check(self) -> None:
        """Raise WrongLoop in any process but the guard's own."""
        if self._pid != _pid:
            raise WrongLoop(
                f"{self._subject} was made in process {self._pid} and can't be used in process {_pid}, forked "
                "from it: its threads and loop didn't come along. Make a new one in this process."
            )


_pid = os.getpid()
"""This process. Every sample asks for it, and the system would take longer to say so than the sample takes."""
_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, int] = weakref.WeakKeyDictionary()
"""Of loops that stand still."""
_forked: dict[int, threading.Event] = {}
"""Of the forks under way, by the thread that forks."""


def stand_still_at_forks() -> None:
    """Have the running loop, which is a thread's of its own, wait while another thread forks the process.

    OpenSSL's locks are copied as they are. One that this thread holds just then, in the middle of a handshake, stays
    taken in the child for ever, and the child's first handshake hangs.
    """
    _threads[asyncio.get_running_loop()] = threading.get_ident()


def _stop_loops() -> None:
    forker = threading.get_ident()
    forked = _forked[forker] = threading.Event()
    standing = []
    for reference in _threads.keyrefs():  # a list at once: a thread may add its loop meanwhile
        loop, stands = reference(), threading.Event()
        if loop is not None and _threads.get(loop) != forker:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(_stand, stands, forked)
                standing.append(stands)
    deadline = time.monotonic() + PAUSE_SECONDS
    for stands in standing:  # one that is blocked doesn't keep the fork from coming
        stands.wait(max(0.0, deadline - time.monotonic()))


def _stand(stands: threading.Event, forked: threading.Event) -> None:
    stands.set()
    forked.wait(PAUSE_SECONDS)


def _go_on() -> None:
    forked = _forked.pop(threading.get_ident(), None)
    if forked is not None:  # else an interrupt came in front of it
        forked.set()


def _forget() -> None:
    global _pid
    _pid = os.getpid()
    _threads.clear()
    _forked.clear()


os.register_at_fork(before=_stop_loops, after_in_parent=_go_on, after_in_child=_forget)

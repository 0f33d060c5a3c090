"""The event loop of the caller, and a guard for objects that belong to one."""

from __future__ import annotations

import asyncio

from asyncfetch.errors import ConfigError, WrongLoop
from asyncfetch.runtime.fork import ForkGuard

__all__ = ["LoopGuard", "running_loop"]


def running_loop(subject: str) -> asyncio.AbstractEventLoop:
    """Return the event loop that runs the caller's task.

    Args:
        subject: What needs it, for the message, e.g. "this ByteCache".

    Raises:
        ConfigError: The caller is in no task of asyncio's: trio runs it, or nothing does.
    """
    loop = asyncio._get_running_loop()
    if loop is None or asyncio.current_task(loop) is None:  # trio can run as asyncio's guest, in its callbacks
        raise ConfigError(
            f"{subject} needs asyncio, which doesn't run here: run the coroutine by asyncio.run(...), or by "
            "anyio.run(...) with its default backend; from trio, in a thread, by "
            "await trio.to_thread.run_sync(asyncio.run, ...)"
        )
    return loop


class LoopGuard:
    """Remembers the running loop that it was made on, and the process.

    Args:
        subject: What the owner is called in the message, e.g. "this ByteCache".

    Raises:
        ConfigError: As ``running_loop``.
    """

    __slots__ = ("_fork", "_loop", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._loop = running_loop(subject)
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

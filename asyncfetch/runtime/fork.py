"""A guard for objects that must not be used across a fork, and blocks that a fork waits for.

A fork copies the locks of C libraries and of Python's imports as they are. A lock that another thread holds then stays
taken in the child for ever, and hangs its next user there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - it and logging lock at forks as well: see the end
import logging  # noqa: F401
import os
import sys
import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

from asyncfetch.errors import ConfigError, UsageError, WrongLoop
from asyncfetch.runtime.threads import call_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Never

PAUSE_SECONDS: Final = 1.0
"""Seconds that a fork waits for loops to stand still, and they for the fork."""
IMPORT_SECONDS: Final = 10.0
"""Seconds that a fork waits for blocks of ``forks_wait``: the import of torch takes seconds."""


class ForkGuard:
    """Remembers the process that it was made in; ``subject`` names its owner in messages.

    A child gets copies of loops and locks, but not the threads that make them work, and its operations on a copied
    epoll or socket affect the parent's. So the owner checks here first, and leaves all of it alone in a child.
    """

    __slots__ = ("_pid", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._pid = _pid

    @property
    def in_child(self) -> bool:
        """True if this process isn't the one that the guard was made in."""
        return self._pid != _pid

    def check(self) -> None:
        """Raise WrongLoop in any process but the guard's own."""
        if self._pid != _pid:
            raise WrongLoop(
                f"{self._subject} was made in process {self._pid} and can't be used in process {_pid}, forked "
                "from it: its threads and loop didn't come along. Make a new one in this process."
            )


_pid = os.getpid()
"""This process. Every sample checks it, and a system call would take longer than the sample."""
_fork_count = 0
_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, int] = weakref.WeakKeyDictionary()
"""Threads of the loops that stand still at forks."""
_forked: dict[int, threading.Event] = {}
"""Events of the forks under way, by the thread that forks."""


def fork_count() -> int:
    """A count that grows as each fork of this process begins and ends; see ``was_forked_since``."""
    return _fork_count


def was_forked_since(count: int) -> bool:
    """True if a child may share memory of the time of this ``fork_count``: a fork has begun since, or is under way."""
    return count != _fork_count or bool(_block.forking)


def stand_still_at_forks() -> None:
    """Have the running loop, which has a thread of its own, wait while another thread forks the process.

    In the middle of a handshake it would hold one of OpenSSL's locks, and the child's first handshake would hang.
    """
    _threads[asyncio.get_running_loop()] = threading.get_ident()


class _ForkBlock:
    """State of ``forks_wait``, by thread, since no thread waits for itself."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside: Counter[int] = Counter()
        self.forking: set[int] = set()


_block = _ForkBlock()


@contextmanager
def forks_wait() -> Iterator[None]:
    """A block that holds locks which no child must copy taken: an import, a first use of a C library.

    A fork by another thread waits for its end, IMPORT_SECONDS at most, and it waits for a fork under way, PAUSE_SECONDS
    at most. Reentrant. Not for blocks that wait for other threads, or call a user's functions. At its end OpenSSL
    forgets the thread; see ``leave_openssl``.
    """
    block, thread = _block, threading.get_ident()
    with block.changed:
        if not block.inside[thread]:
            block.changed.wait_for(lambda: not block.forking, PAUSE_SECONDS)
        block.inside[thread] += 1
    try:
        yield
    finally:
        if block.inside[thread] == 1:
            _forget_thread()
        with block.changed:
            block.inside[thread] -= 1
            block.inside = +block.inside  # without those that are in no block
            block.changed.notify_all()


def leave_openssl() -> None:
    """Have OpenSSL forget the thread, while forks wait: the last call of a thread that may have used OpenSSL.

    Else OpenSSL does so when the system's thread ends, holding one of its locks. Python's ``join`` has returned by
    then, and a fork right after it would copy the lock taken. Another use of OpenSSL brings the thread back.
    """
    with forks_wait():
        pass


def _forget_thread() -> None:
    if "_ssl" in sys.modules and (forget := _thread_stop()) is not None:
        forget()


@cache
def _thread_stop() -> Callable[[], None] | None:
    """OPENSSL_thread_stop of the library that Python's ssl uses; None if it isn't accessible."""
    import ctypes

    try:
        # PyDLL keeps the GIL: getting it back may take 5 ms, and the call takes less than a microsecond.
        return ctypes.PyDLL(getattr(sys.modules["_ssl"], "__file__", None)).OPENSSL_thread_stop
    except (OSError, AttributeError):  # linked into Python with its names hidden; LibreSSL
        return None


def _wait_for_blocks(block: _ForkBlock) -> None:
    forker = threading.get_ident()
    with block.changed:
        block.forking.add(forker)
        block.changed.notify_all()  # two threads that fork inside of blocks don't wait for each other
        block.changed.wait_for(lambda: not block.inside.keys() - block.forking, IMPORT_SECONDS)


def _stop() -> None:
    global _fork_count
    _fork_count += 1
    _wait_for_blocks(_block)
    _stop_loops()


def _stop_loops() -> None:
    forker = threading.get_ident()
    forked = _forked[forker] = threading.Event()
    standing = []
    for reference in _threads.keyrefs():  # a list at once: a thread may add its loop meanwhile
        loop, stands = reference(), threading.Event()
        if loop is not None and _threads.get(loop) != forker and call_on(loop, _stand_still, stands, forked):
            standing.append(stands)
    deadline = time.monotonic() + PAUSE_SECONDS
    for stands in standing:  # a blocked loop doesn't prevent the fork
        stands.wait(max(0.0, deadline - time.monotonic()))


def _stand_still(stands: threading.Event, forked: threading.Event) -> None:
    stands.set()
    forked.wait(PAUSE_SECONDS)


def _go_on() -> None:
    global _fork_count
    _fork_count += 1  # memory made since it began may be in the child, too
    forked = _forked.pop(threading.get_ident(), None)
    if forked is not None:  # else an interrupt came first
        forked.set()
    with _block.changed:
        _block.forking.discard(threading.get_ident())
        _block.changed.notify_all()


def _forget() -> None:
    global _pid
    _pid = os.getpid()
    thread = threading.get_ident()
    _block.changed = threading.Condition()  # a thread that didn't come along may have held the other one
    _block.inside = +Counter({thread: _block.inside[thread]})  # empty if the thread is in no block
    _block.forking.clear()
    _threads.clear()
    _forked.clear()


# Hooks run last in, first out: the blocks that forks wait for may log and hand calls to threads until they are over.
os.register_at_fork(before=_stop, after_in_parent=_go_on, after_in_child=_forget)


class AsyncOnly:
    """An object that is entered by ``async with`` only, and stays in its process; other uses raise UsageError."""

    __slots__ = ()

    def __enter__(self) -> Never:
        raise self._refusal("is entered by `async with`, not by `with`")

    def __exit__(self, *_: object) -> None: ...

    def __await__(self) -> Never:
        raise self._refusal("isn't awaited: write `async with ... as name:`, and use it in that block")

    def __reduce_ex__(self, protocol: object) -> Never:
        raise self._refusal("can't be pickled: give another process the url and the configuration, to open its own")

    def _refusal(self, what: str) -> UsageError:
        return UsageError(f"a {type(self).__name__} {what}")


def running_loop(subject: str) -> asyncio.AbstractEventLoop:
    """Return the event loop that runs the caller's task; ``subject`` names what needs it in the message.

    Raises:
        ConfigError: The caller isn't in a task of asyncio: trio runs it, or nothing does.
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
    """Remembers the running loop that it was made on, and the process. Raises as ``running_loop``."""

    __slots__ = ("_fork", "_loop", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._loop = running_loop(subject)
        self._fork = ForkGuard(subject)

    def check(self) -> None:
        """Raise WrongLoop anywhere but on the guard's own running loop."""
        # asyncio's own getter: anyio has no synchronous one that doesn't raise off the loop.
        if asyncio._get_running_loop() is self._loop:  # it is None in a forked child, whatever ran in the parent
            return
        self._fork.check()
        raise WrongLoop(
            f"{self._subject} belongs to another event loop or thread: use it where it was entered, or make one for "
            "each loop"
        )

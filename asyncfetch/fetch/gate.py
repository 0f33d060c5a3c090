"""Gates say whose turn it is: so many at a time, callers in turn, what somebody waits for before what is read ahead.

One queue for all would make a single read wait behind the hundred thousand ranges of a batch. So each caller has a
line of its own, first come, first served; the lines take turns; and there are two rounds of lines: urgent ones go
before those of read-ahead. Read-ahead can't starve: where both wait, one turn of EVERY is its. And it can't fill a gate
that reserves places, for what is urgent would then wait for the end of something long.

A caller is known by a context variable, which tasks inherit: everything that a verb starts is its own caller's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Caller", "Gate", "Place", "calling", "current_caller", "one_caller", "running_caller"]

EVERY = 8
"""Read-ahead gets one turn of so many, and leaves one place of so many free where places are reserved."""


class Caller:
    """Somebody on whose behalf something waits at gates.

    Not thread-safe: used on the loop of the gates that it waits at.

    Args:
        urgent: Whether somebody waits for it. False for read-ahead.
        behind: Another caller whose line it stands in until it is promoted. None gives it a line of its own.
    """

    __slots__ = ("__weakref__", "_carriers", "_line", "_waiting", "urgent")

    def __init__(self, *, urgent: bool = True, behind: Caller | None = None) -> None:
        self.urgent = urgent
        self._line: object = object() if behind is None else behind._line
        self._waiting: dict[_Waiter, None] = {}
        self._carriers: WeakSet[Caller] | None = None

    def promote(self) -> None:
        """Somebody waits for it now. What of it waits already moves to an urgent line of its own, in its order."""
        if not self.urgent:
            self.urgent, self._line = True, object()
            for waiter in list(self._waiting):
                waiter.gate._promote(waiter)
            for carrier in list(self._carriers or ()):
                carrier.promote()

    def carried_by(self, carrier: Caller) -> None:
        """Take what ``carrier`` asks for as on this one's behalf, too: it is promoted with this one."""
        if not self.urgent:
            self._carriers = self._carriers or WeakSet()
            self._carriers.add(carrier)


_current: ContextVar[Caller] = ContextVar("_current")


def current_caller() -> Caller:
    """The caller that this task runs for; an urgent one of its own where nobody said."""
    return _current.get(None) or Caller()


running_caller: Callable[[], Caller | None] = partial(_current.get, None)
"""Gives the caller that this task runs for; None where nobody said."""


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Let ``caller`` ask for what is asked for in this block, and in tasks that it starts."""
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def one_caller() -> Iterator[None]:
    """Count what is asked for in this block as one caller's, that of what it is part of where there is one."""
    with calling(current_caller()):
        yield


class _Waiter:
    """One that waits for its turn."""

    __slots__ = ("caller", "gate", "granted", "line", "urgent")

    def __init__(self, gate: Gate, caller: Caller) -> None:
        self.gate = gate
        self.caller = caller
        self.line = caller._line
        self.urgent = caller.urgent
        self.granted = asyncio.Event()  # set by what has landed, too, where no task runs


class _Lines:
    """The waiters, in lines that take turns. Each call takes constant time, however many they are."""

    __slots__ = ("_lines", "count")

    def __init__(self) -> None:
        self._lines: OrderedDict[object, OrderedDict[_Waiter, None]] = OrderedDict()
        self.count = 0

    def add(self, waiter: _Waiter) -> None:
        """Put it after the others of its line; a line that is new has the last turn."""
        self._lines.setdefault(waiter.line, OrderedDict())[waiter] = None
        self.count += 1

    def remove(self, waiter: _Waiter) -> None:
        """It no longer waits."""
        line = self._lines[waiter.line]
        del line[waiter]
        if not line:
            del self._lines[waiter.line]
        self.count -= 1

    def take(self) -> _Waiter:
        """The first of the line whose turn it is."""
        key, line = self._lines.popitem(last=False)
        waiter, _ = line.popitem(last=False)
        if line:
            self._lines[key] = line
        self.count -= 1
        return waiter


class Place:
    """One place in a gate, from its turn on; see ``Gate.place``."""

    __slots__ = ("_gate", "_urgent")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def __aenter__(self) -> None:
        self._urgent = await self._gate.enter()

    async def __aexit__(self, *exc_info: object) -> None:
        self._gate.leave(urgent=self._urgent)


class Gate:
    """Lets ``limit`` in at a time. Belongs to one loop.

    ``waiting`` and ``in_use`` may be read in any thread.

    Args:
        limit: How many may be in.
        reserves: Whether one place of EVERY is for what is urgent alone.
    """

    __slots__ = ("_ahead", "_ahead_in_use", "_limit", "_reserves", "_urgent", "_urgent_turns", "in_use")

    def __init__(self, limit: int, *, reserves: bool = False) -> None:
        self._limit = limit
        self._reserves = reserves
        self._urgent = _Lines()
        self._ahead = _Lines()
        self._urgent_turns = 0  # in a row, while read-ahead waited for one
        self.in_use = 0
        self._ahead_in_use = 0

    def __repr__(self) -> str:
        return f"<Gate {self.in_use} of {self._limit} in, {self._urgent.count} urgent and {self._ahead.count} wait>"

    @property
    def limit(self) -> int:
        """Number of those who may be in. Lowered, it throws nobody out."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._grant()

    @property
    def waiting(self) -> int:
        """Number of those who wait for their turn."""
        return self._urgent.count + self._ahead.count

    @property
    def free(self) -> int:
        """Number of places the current caller could have now."""
        caller = _current.get(None)
        return max(0, self._room(urgent=caller is None or caller.urgent))

    async def enter(self) -> bool:
        """Waits for the current caller's turn; at once, without a checkpoint, where there is room.

        Cancelled at any moment, it gives up its turn, and nobody else's changes.

        Returns:
            Whether it counts as urgent, for ``leave``: once for each ``enter`` that returned.
        """
        caller = _current.get(None)
        urgent = caller is None or caller.urgent
        if self.enter_nowait() is not None:  # then nobody waits whom this would overtake
            return urgent
        waiter = _Waiter(self, caller or Caller())
        (self._urgent if urgent else self._ahead).add(waiter)
        waiter.caller._waiting[waiter] = None
        try:
            await waiter.granted.wait()
        except BaseException:
            if waiter.granted.is_set():
                self.leave(urgent=waiter.urgent)
            else:
                (self._urgent if waiter.urgent else self._ahead).remove(waiter)
            raise
        finally:
            waiter.caller._waiting.pop(waiter, None)
        return waiter.urgent

    def enter_nowait(self) -> bool | None:
        """Lets the current caller in where there is room. What ``enter`` returns, or None where it would wait."""
        caller = _current.get(None)
        urgent = caller is None or caller.urgent
        if self._room(urgent=urgent) <= 0:
            return None
        self.in_use += 1
        self._ahead_in_use += not urgent
        return urgent

    def leave(self, *, urgent: bool) -> None:
        """Gives the place to the next one."""
        self.in_use -= 1
        self._ahead_in_use -= not urgent
        if self._urgent.count or self._ahead.count:
            self._grant()

    def place(self) -> Place:
        """A turn for a block: ``async with gate.place():``."""
        return Place(self)

    def _room(self, *, urgent: bool) -> int:
        """Places for one as urgent; none, or less than none where the limit was lowered."""
        room = self._limit - self.in_use
        if urgent:
            return room
        reserved = self._limit // EVERY if self._reserves else 0
        return min(room, self._limit - reserved - self._ahead_in_use)

    def _grant(self) -> None:
        while (lines := self._next_lines()) is not None:
            waiter = lines.take()
            del waiter.caller._waiting[waiter]
            self.in_use += 1
            self._ahead_in_use += not waiter.urgent
            waiter.granted.set()

    def _next_lines(self) -> _Lines | None:
        """The lines that the next turn belongs to; None where nobody may enter."""
        ahead_may = self._ahead.count > 0 and self._room(urgent=False) > 0
        if self._urgent.count and self._room(urgent=True) > 0 and not (ahead_may and self._urgent_turns >= EVERY - 1):
            self._urgent_turns = self._urgent_turns + 1 if ahead_may else 0
            return self._urgent
        if ahead_may:
            self._urgent_turns = 0
            return self._ahead
        return None

    def _promote(self, waiter: _Waiter) -> None:
        self._ahead.remove(waiter)
        waiter.urgent, waiter.line = True, waiter.caller._line
        self._urgent.add(waiter)
        self._grant()

"""Limiters bound how many do something at a time, fair to callers: urgent calls go before read-ahead.

One queue for all would make a single read wait behind the hundred thousand ranges of a batch. So each caller has a
queue of its own, first come, first served; the queues take turns; and there are two rounds of them: urgent ones go
before those of read-ahead. Read-ahead can't starve: where both wait, one turn of EVERY is its. And it can't fill a
limiter that reserves permits, for what is urgent would then wait for the end of something long.

A caller is known by a context variable, which tasks inherit: everything that a verb starts is its own caller's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

from asyncfetch.runtime.single_flight import SingleFlight

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator

    from anyio.abc import TaskGroup

T = TypeVar("T")

EVERY = 8
"""Read-ahead gets one turn of so many, and leaves one permit of so many free where some are reserved."""


class Caller:
    """A party for whom calls wait at limiters. It is ``urgent`` where a consumer waits for it, unlike read-ahead.

    Until its priority is raised it stands in the queue of the caller ``behind``; None gives it one of its own. Not
    thread-safe: used on the loop of the limiters that it waits at.
    """

    __slots__ = ("__weakref__", "_carriers", "_queue", "_waiting", "urgent")

    def __init__(self, *, urgent: bool = True, behind: Caller | None = None) -> None:
        self.urgent = urgent
        self._queue: object = object() if behind is None else behind._queue
        self._waiting: dict[_Waiter, None] = {}
        self._carriers: WeakSet[Caller] | None = None

    def raise_priority(self) -> None:
        """A consumer waits for it now. What of it waits already moves to an urgent queue of its own, in its order."""
        if not self.urgent:
            self.urgent, self._queue = True, object()
            for waiter in list(self._waiting):
                waiter.limiter._raise_priority(waiter)
            for carrier in list(self._carriers or ()):
                carrier.raise_priority()

    def carried_by(self, carrier: Caller) -> None:
        """Take what ``carrier`` asks for as on this one's behalf, too: its priority is raised with this one's."""
        if not self.urgent:
            self._carriers = self._carriers or WeakSet()
            self._carriers.add(carrier)


_current: ContextVar[Caller] = ContextVar("_current")


def current_caller() -> Caller:
    """The caller that this task runs for; an urgent one of its own where none is set."""
    return _current.get(None) or Caller()


running_caller: Callable[[], Caller | None] = partial(_current.get, None)
"""Gives the caller that this task runs for; None where none is set."""


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

    __slots__ = ("caller", "granted", "limiter", "queue", "urgent")

    def __init__(self, limiter: Limiter, caller: Caller) -> None:
        self.limiter = limiter
        self.caller = caller
        self.queue = caller._queue
        self.urgent = caller.urgent
        self.granted = asyncio.Event()  # set by what has landed, too, where no task runs


class _Queues:
    """The waiters, in queues that take turns. Each call takes constant time, however many they are."""

    def __init__(self) -> None:
        self._queues: OrderedDict[object, OrderedDict[_Waiter, None]] = OrderedDict()
        self.count = 0

    def add(self, waiter: _Waiter) -> None:
        """Put it after the others of its queue; a queue that is new has the last turn."""
        self._queues.setdefault(waiter.queue, OrderedDict())[waiter] = None
        self.count += 1

    def remove(self, waiter: _Waiter) -> None:
        """It no longer waits."""
        queue = self._queues[waiter.queue]
        del queue[waiter]
        if not queue:
            del self._queues[waiter.queue]
        self.count -= 1

    def take(self) -> _Waiter:
        """The first of the queue whose turn it is."""
        key, queue = self._queues.popitem(last=False)
        waiter, _ = queue.popitem(last=False)
        if queue:
            self._queues[key] = queue
        self.count -= 1
        return waiter


class Limiter:
    """Lets ``limit`` in at a time, one of EVERY only where it is urgent if it ``reserves`` that. Belongs to one loop.

    ``waiting`` and ``in_use`` may be read in any thread.
    """

    def __init__(self, limit: int, *, reserves: bool = False) -> None:
        self._limit = limit
        self._reserves = reserves
        self._urgent = _Queues()
        self._ahead = _Queues()
        self._urgent_turns = 0  # in a row, while read-ahead waited for one
        self.in_use = 0
        self._ahead_in_use = 0

    def __repr__(self) -> str:
        return f"<Limiter {self.in_use} of {self._limit} in, {self._urgent.count} urgent and {self._ahead.count} wait>"

    @property
    def limit(self) -> int:
        """Number of those who may be in. Lowered, it throws none out."""
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
        """Number of permits the current caller could have now."""
        caller = _current.get(None)
        return max(0, self._room(urgent=caller is None or caller.urgent))

    async def enter(self) -> bool:
        """Waits for the current caller's turn; at once, without a checkpoint, where there is room.

        Returns whether it counts as urgent, for ``leave``: once for each ``enter`` that returned. Cancelled at any
        moment, it gives up its turn, and no other turn changes.
        """
        caller = _current.get(None)
        urgent = caller is None or caller.urgent
        if self.enter_nowait() is not None:  # then there is no one to overtake
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
        if (self._limit - self.in_use if urgent else self._room(urgent=False)) <= 0:
            return None
        self.in_use += 1
        self._ahead_in_use += not urgent
        return urgent

    def leave(self, *, urgent: bool) -> None:
        """Gives the permit to the next one."""
        self.in_use -= 1
        self._ahead_in_use -= not urgent
        if self._urgent.count or self._ahead.count:
            self._grant()

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        """A turn for a block: ``async with limiter.permit():``."""
        urgent = await self.enter()
        try:
            yield
        finally:
            self.leave(urgent=urgent)

    def _room(self, *, urgent: bool) -> int:
        """Permits for one as urgent; none, or less than none where the limit was lowered."""
        room = self._limit - self.in_use
        if urgent:
            return room
        reserved = self._limit // EVERY if self._reserves else 0
        return min(room, self._limit - reserved - self._ahead_in_use)

    def _grant(self) -> None:
        while (queues := self._next_queues()) is not None:
            waiter = queues.take()
            del waiter.caller._waiting[waiter]
            self.in_use += 1
            self._ahead_in_use += not waiter.urgent
            waiter.granted.set()

    def _next_queues(self) -> _Queues | None:
        """The queues that the next turn belongs to; None where no one may enter."""
        ahead_may = self._ahead.count > 0 and self._room(urgent=False) > 0
        if self._urgent.count and self._room(urgent=True) > 0 and not (ahead_may and self._urgent_turns >= EVERY - 1):
            self._urgent_turns = self._urgent_turns + 1 if ahead_may else 0
            return self._urgent
        if ahead_may:
            self._urgent_turns = 0
            return self._ahead
        return None

    def _raise_priority(self, waiter: _Waiter) -> None:
        self._ahead.remove(waiter)
        waiter.urgent, waiter.queue = True, waiter.caller._queue
        self._urgent.add(waiter)
        self._grant()


class SharedCalls(SingleFlight["Hashable", Any]):
    """A SingleFlight; calls wait at limiters in the line of the first caller, and are urgent once one of them is."""

    def __init__(self, task_group: TaskGroup) -> None:
        super().__init__(task_group)
        self._carriers: WeakValueDictionary[Hashable, Caller] = WeakValueDictionary()

    async def run(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """The value of ``work()``, or of the call for ``key`` that is already under way."""
        asking = current_caller()
        carrier = self._carriers.get(key) if key in self else None  # that of a call that is over may be about
        if carrier is None:
            carrier = self._carriers[key] = Caller(urgent=asking.urgent, behind=asking)
        elif asking.urgent:
            carrier.raise_priority()
        asking.carried_by(carrier)
        with calling(carrier):
            result: T = await super().run(key, work)
        return result

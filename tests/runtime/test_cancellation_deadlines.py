"""One timer for many deadlines: who is told, when, and who isn't any more."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, cast

import pytest

from asyncfetch.runtime.cancellation import Deadlines

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from contextvars import Context


class Clock:
    """As much of a loop as sets timers, whose time goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None], *, context: Context) -> Timer:
        timer = when, lambda: context.run(callback)
        self.timers.append(timer)
        return Timer(lambda: self.timers.remove(timer) if timer in self.timers else None)

    def go_to(self, now: float) -> None:
        """Every timer goes off at its time."""
        while self.timers and min(self.timers, key=itemgetter(0))[0] <= now:
            self.now, callback = self.timers.pop(self.timers.index(min(self.timers, key=itemgetter(0))))
            callback()
        self.now = now


@dataclass
class Timer:
    cancel: Callable[[], None]


class Waiting:
    def __init__(self, deadlines: Deadlines, due: float, again: float | None = None) -> None:
        self.deadlines, self.due, self.again, self.told = deadlines, due, again, list[float]()
        deadlines.watch(self)

    def is_due(self, now: float) -> None:
        self.told.append(now)
        if self.again is None:
            self.deadlines.leave(self)
        else:
            self.due = now + self.again


@pytest.fixture
def loop() -> Clock:
    return Clock()


@pytest.fixture
def deadlines(loop: Clock) -> Deadlines:
    return Deadlines(cast("asyncio.AbstractEventLoop", loop))


def test_deadlines_are_met_by_one_timer(loop: Clock, deadlines: Deadlines) -> None:
    ones = [Waiting(deadlines, due) for due in (5.0, 3.0, 4.0, 3.0)]
    assert len(loop.timers) == 1
    loop.go_to(10)
    assert [one.told for one in ones] == [[5.0], [3.0], [4.0], [3.0]]
    assert loop.timers == []


def test_a_thousand_that_come_and_go_set_one_timer(loop: Clock, deadlines: Deadlines) -> None:
    for _ in range(1000):
        one = Waiting(deadlines, loop.now + 60)
        loop.go_to(loop.now + 0.01)
        deadlines.leave(one)
    assert one.told == []
    assert len(loop.timers) == 1
    loop.go_to(200)
    assert loop.timers == []


def test_deadline_moved_back_is_met_at_its_new_time(loop: Clock, deadlines: Deadlines) -> None:
    one = Waiting(deadlines, 1.0)
    one.due = 7.0
    loop.go_to(6)
    assert one.told == []
    loop.go_to(8)
    assert one.told == [7.0]


def test_deadline_moved_forward_is_met_at_its_new_time(loop: Clock, deadlines: Deadlines) -> None:
    one = Waiting(deadlines, 7.0)
    one.due = 2.0
    deadlines.watch(one)
    loop.go_to(3)
    assert one.told == [2.0]


def test_deadline_followed_by_a_later_one_is_met_again(loop: Clock, deadlines: Deadlines) -> None:
    one = Waiting(deadlines, 1.0, again=2.0)
    loop.go_to(6)
    assert one.told == [1.0, 3.0, 5.0]


def test_deadlines_may_leave_and_come_while_others_are_met(loop: Clock, deadlines: Deadlines) -> None:
    second = Waiting(deadlines, 1.0)

    class First(Waiting):
        def is_due(self, now: float) -> None:
            deadlines.leave(second)
            self.other = Waiting(deadlines, 1.5)
            super().is_due(now)

    deadlines.leave(second)
    first = First(deadlines, 1.0)
    deadlines.watch(second)
    loop.go_to(2)
    assert (first.told, first.other.told, second.told) == ([1.0], [1.5], [])


def test_deadlines_call_nothing_after_the_end(loop: Clock, deadlines: Deadlines) -> None:
    one = Waiting(deadlines, 1.0)
    deadlines.close()
    loop.go_to(2)
    assert one.told == []
    assert loop.timers == []

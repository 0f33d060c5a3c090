"""Whose turn it is at a limiter."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncfetch.fetch.limiter import EVERY, Caller, Limiter, calling, current_caller, one_caller
from asyncfetch.ranges import ByteRange
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer


class Visits:
    """Tasks that enter a limiter and stay until they are told to leave."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.entered: list[str] = []
        self._inside: list[bool] = []

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)

    async def visit(self, name: str, caller: Caller | None = None) -> anyio.CancelScope:
        """Comes to the limiter, and waits there or is let in; cancelling the scope sends it away."""
        scope = anyio.CancelScope()

        async def enter() -> None:
            with scope, calling(caller or Caller()):
                self._inside.append(await self.limiter.enter())
                self.entered.append(name)

        self._group.start_soon(enter)
        await all_others_wait()
        return scope

    async def leave(self, count: int = 1) -> None:
        """So many leave, first in, first out."""
        for _ in range(count):
            self.limiter.leave(urgent=self._inside.pop(0))
            await all_others_wait()


async def test_a_caller_s_own_come_in_their_order() -> None:
    async with Visits(Limiter(1)) as visits:
        caller = Caller()
        for number in range(5):
            await visits.visit(str(number), caller)
        await visits.leave(4)
        assert visits.entered == ["0", "1", "2", "3", "4"]


async def test_callers_take_turns() -> None:
    async with Visits(Limiter(1)) as visits:
        a, b, c = Caller(), Caller(), Caller()
        for name, caller in [("a0", a), ("a1", a), ("a2", a), ("a3", a), ("b0", b), ("b1", b), ("c0", c)]:
            await visits.visit(name, caller)
        await visits.leave(6)
        assert visits.entered == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_callers_behind_another_share_its_line() -> None:
    async with Visits(Limiter(1)) as visits:
        a, b = Caller(), Caller()
        for name, caller in [("in", b), ("a0", a), ("a1", Caller(behind=a)), ("b0", b), ("a2", Caller(behind=a))]:
            await visits.visit(name, caller)
        await visits.leave(4)
        assert visits.entered == ["in", "a0", "b0", "a1", "a2"]


async def test_urgent_requests_go_before_read_ahead() -> None:
    async with Visits(Limiter(1)) as visits:
        for name, urgent in [("in", True), ("ahead 0", False), ("ahead 1", False), ("urgent", True)]:
            await visits.visit(name, Caller(urgent=urgent))
        await visits.leave(3)
        assert visits.entered == ["in", "urgent", "ahead 0", "ahead 1"]


async def test_read_ahead_gets_one_turn_of_eight() -> None:
    async with Visits(Limiter(1)) as visits:
        urgent, ahead = Caller(), Caller(urgent=False)
        for number in range(40):
            await visits.visit("urgent", urgent)
            if number < 10:
                await visits.visit("ahead", ahead)
        await visits.leave(32)
        assert Counter(visits.entered[1:]) == {"urgent": 28, "ahead": 4}
        assert [place for place, name in enumerate(visits.entered[1:]) if name == "ahead"] == [7, 15, 23, 31]


async def test_an_eighth_is_reserved_for_what_is_waited_for() -> None:
    limiter = Limiter(16, reserves=True)
    async with Visits(limiter) as visits:
        for _ in range(20):
            await visits.visit("ahead", Caller(urgent=False))
        assert limiter.in_use == 14
        assert limiter.waiting == 6
        await visits.visit("urgent")
        assert visits.entered[-1] == "urgent"
        await visits.leave(15)
        assert limiter.in_use == 6


async def test_a_caller_that_is_raised_overtakes_read_ahead() -> None:
    async with Visits(Limiter(1)) as visits:
        others, late = Caller(urgent=False), Caller(urgent=False)
        for name, caller in [("in", Caller()), ("other", others), ("other", others), ("0", late), ("1", late)]:
            await visits.visit(name, caller)
        late.raise_priority()
        await visits.visit("2", late)
        await visits.leave(5)
        assert visits.entered == ["in", "0", "1", "2", "other", "other"]


async def test_a_promotion_opens_what_was_reserved() -> None:
    limiter = Limiter(8, reserves=True)
    async with Visits(limiter) as visits:
        ahead = Caller(urgent=False)
        for number in range(8):
            await visits.visit(str(number), ahead)
        assert limiter.in_use == 7
        ahead.raise_priority()
        await all_others_wait()
        assert limiter.in_use == 8


async def test_reserved_places_are_free_for_urgent_callers_alone() -> None:
    limiter = Limiter(16, reserves=True)
    ahead = Caller(urgent=False)
    async with Visits(limiter) as visits:
        for entered, free_ahead, free_urgent in [(0, 14, 16), (10, 4, 6), (14, 0, 2), (16, 0, 2)]:
            while len(visits.entered) + limiter.waiting < entered:
                await visits.visit("ahead", ahead)
            with calling(ahead):
                assert limiter.free == free_ahead
            assert limiter.free == free_urgent
        limiter.limit = 8
        assert limiter.free == 0


async def test_raised_limit_lets_more_in_and_lowered_one_stops_nothing() -> None:
    limiter = Limiter(2)
    async with Visits(limiter) as visits:
        for _ in range(6):
            await visits.visit("x")
        limiter.limit = 4
        assert limiter.in_use == 4
        limiter.limit = 1
        assert limiter.in_use == 4
        await visits.leave(3)
        assert (limiter.in_use, limiter.waiting) == (1, 2)
        await visits.leave()
        assert (limiter.in_use, limiter.waiting) == (1, 1)


async def test_caller_that_goes_away_changes_no_other_turn() -> None:
    async with Visits(Limiter(1)) as visits:
        a, b = Caller(), Caller()
        await visits.visit("in")
        await visits.visit("a0", a)
        gone = [await visits.visit("gone", caller) for caller in (a, b, Caller(urgent=False), Caller())]
        await visits.visit("b0", b)
        await visits.visit("a1", a)
        for scope in gone:
            scope.cancel()
        await all_others_wait()
        assert visits.limiter.waiting == 3
        await visits.leave(3)
        assert visits.entered == ["in", "a0", "b0", "a1"]


async def test_place_of_a_caller_cancelled_as_it_enters_is_passed_on() -> None:
    async with Visits(Limiter(1)) as visits:
        await visits.visit("in")
        cancelled = asyncio.create_task(visits.limiter.enter())
        await all_others_wait()
        await visits.visit("next")
        visits.limiter.leave(urgent=True)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await all_others_wait()
        assert cancelled.cancelled()
        assert visits.entered == ["in", "next"]
        assert visits.limiter.in_use == 1


async def test_turn_of_another_caller_is_next_however_many_wait() -> None:
    limiter = Limiter(4)
    order: list[str] = []

    async def pass_through(name: str) -> None:
        async with limiter.permit():
            order.append(name)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        with one_caller():
            for _ in range(20_000):
                group.start_soon(pass_through, "one of many")
        group.start_soon(pass_through, "single")
    assert order.index("single") <= 8
    assert len(order) == 20_001
    assert (limiter.in_use, limiter.waiting) == (0, 0)


async def test_waiters_that_give_up_leave_nothing_behind() -> None:
    limiter = Limiter(1)
    async with limiter.permit():
        for _ in range(100):
            with anyio.move_on_after(0):
                await limiter.enter()
    assert not limiter._urgent._queues
    assert limiter.waiting == limiter.in_use == 0


async def test_a_task_inherits_its_caller() -> None:
    seen: list[Caller] = []

    async def look() -> None:
        seen.append(current_caller())

    with one_caller():
        caller = current_caller()
        async with anyio.create_task_group() as group:
            group.start_soon(look)
        with one_caller():
            assert current_caller() is caller
    assert seen == [caller]
    assert current_caller() is not current_caller()


async def test_batch_delays_a_single_fetch_by_its_flights_alone(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    url = server.put("/x", bytes(10_000))
    held: list[asyncio.Future[None]] = []
    all_busy, single_came = anyio.Event(), anyio.Event()

    def hold() -> asyncio.Future[None]:
        held.append(asyncio.get_running_loop().create_future())
        if server.in_flight == 4:
            all_busy.set()
        if server.requests[-1].headers["range"] == "bytes=9000-9000":
            single_came.set()
        return held[-1]

    server.limiter = hold
    async with fetcher_with(max_requests_per_host=4, max_span_bytes=0) as fetcher, anyio.create_task_group() as group:
        group.start_soon(fetcher.fetch_many, [ByteRange(url, at, at + 1) for at in range(5_000)])
        await all_busy.wait()
        group.start_soon(fetcher.fetch, url, 9_000, 9_001)
        await all_others_wait()
        for future in held:
            future.set_result(None)
        with anyio.fail_after(5):
            await single_came.wait()
        assert len(server.requests) <= 8
        group.cancel_scope.cancel()


class GateMachine(RuleBasedStateMachine):
    """Any order of entering, leaving, giving up, being raised and moving the limit: no place is lost or invented."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.limiter = Limiter(2, reserves=True)
        self.callers = [Caller(), Caller(), Caller(urgent=False), Caller(urgent=False)]
        self.inside: list[bool] = []
        self.waiting: dict[int, asyncio.Task[None]] = {}
        self.order: dict[int, list[int]] = {}
        self.number = 0

    def teardown(self) -> None:
        for task in self.waiting.values():
            task.cancel()
        self.settle()
        while self.inside:
            self.limiter.leave(urgent=self.inside.pop())
        assert (self.limiter.in_use, self.limiter._ahead_in_use, self.limiter.waiting) == (0, 0, 0)
        assert not any(caller._waiting for caller in self.callers)
        self.runner.close()

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.runner.run(turns())

    @rule(caller=st.integers(0, 3))
    def enter(self, caller: int) -> None:
        self.number += 1
        number = self.number

        async def visit() -> None:
            try:
                with calling(self.callers[caller]):
                    self.inside.append(await self.limiter.enter())
                line = self.order[caller]
                assert line.pop(0) == number
            finally:
                del self.waiting[number]
                if number in self.order[caller]:
                    self.order[caller].remove(number)

        async def start() -> None:
            self.order.setdefault(caller, []).append(number)
            self.waiting[number] = asyncio.create_task(visit())

        self.runner.run(start())
        self.settle()

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), at_once=st.booleans())
    def leave(self, data: st.DataObject, at_once: bool) -> None:
        place = data.draw(st.integers(0, len(self.inside) - 1))
        self.limiter.leave(urgent=self.inside.pop(place))
        if not at_once:
            self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))].cancel()
        self.settle()

    @rule(limit=st.integers(1, 20))
    def move_limit(self, limit: int) -> None:
        self.limiter.limit = limit
        self.settle()

    @rule(caller=st.integers(0, 3))
    def raise_priority(self, caller: int) -> None:
        self.callers[caller].raise_priority()
        self.settle()

    @invariant()
    def nobody_waits_beside_a_free_place(self) -> None:
        self.settle()
        limiter = self.limiter
        assert limiter.in_use == len(self.inside)
        assert limiter.waiting == len(self.waiting)
        assert limiter._ahead_in_use == self.inside.count(False)
        if limiter.in_use < limiter.limit:
            assert not limiter._urgent.count
            assert not limiter._ahead.count or limiter._ahead_in_use >= limiter.limit - limiter.limit // EVERY


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

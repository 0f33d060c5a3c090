"""One call for several tasks, in the task of one of them."""

from __future__ import annotations

import gc
import weakref

import anyio
import anyio.lowlevel
import pytest

from asyncfetch.runtime.single_flight import SharedCall


class Work:
    """Work that stands still until told to go, and counts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = anyio.Event()
        self.error = error
        self.starts = self.under_way = 0

    async def __call__(self) -> int:
        self.starts += 1
        self.under_way += 1
        try:
            await self.go.wait()
        finally:
            self.under_way -= 1
        if self.error is not None:
            raise self.error
        return 7


async def settle() -> None:
    for _ in range(20):  # nothing here waits for the outside
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_callers_all_have_the_outcome_of_one_call(error: Exception | None) -> None:
    work, outcomes = Work(error), []
    relay = SharedCall(work)

    async def ask() -> None:
        outcomes.append(await relay.outcome())

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await settle()
        work.go.set()
    outcomes.append(await relay.outcome())
    assert ([repr(one) for one in outcomes], work.starts) == ([repr(error or 7)] * 101, 1)
    assert error is None or len({id(one) for one in outcomes}) == 101


async def test_a_cancelled_runner_hands_over_to_one_of_the_others() -> None:
    work, outcomes = Work(), []
    relay = SharedCall(work)
    scopes = [anyio.CancelScope() for _ in range(4)]

    async def ask(scope: anyio.CancelScope) -> None:
        with scope:
            outcomes.append(await relay.outcome())

    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(ask, scope)
        await settle()
        for cancelled in range(3):
            assert (work.starts, work.under_way) == (cancelled + 1, 1)
            scopes[cancelled].cancel()
            await settle()
        work.go.set()
    assert (outcomes, work.starts) == ([7], 4)


async def test_a_cancelled_bystander_changes_nothing() -> None:
    work, outcomes = Work(), []
    relay = SharedCall(work)
    bystander = anyio.CancelScope()

    async def ask() -> None:
        outcomes.append(await relay.outcome())

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await settle()
        with bystander:
            bystander.cancel()
            await relay.outcome()
        work.go.set()
    assert (outcomes, work.starts) == ([7], 1)


async def test_call_ends_with_its_last_caller() -> None:
    work = Work()
    relay = SharedCall(work)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(relay.outcome)
            await settle()
            scope.cancel()
    assert work.under_way == 0


async def test_an_error_keeps_nothing_alive() -> None:
    class Told(Exception):
        pass

    relay = SharedCall(Work(Told()))
    relay._work.go.set()  # type: ignore[attr-defined]
    error = weakref.ref(await relay.outcome())
    gc.disable()
    try:
        del relay
        assert error() is None
    finally:
        gc.enable()

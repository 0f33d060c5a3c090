from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from asyncfetch.errors import ClosedError
from asyncfetch.runtime.single_flight import SharedFuture, SingleFlight


class Work:
    """Work that stands still until told to go, and keeps a log."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = anyio.Event()
        self.error = error
        self.log: list[str] = []

    async def __call__(self) -> int:
        self.log.append("start")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            await anyio.lowlevel.cancel_shielded_checkpoint()  # cleaning up takes a moment
            self.log.append("cancelled")
            raise
        if self.error is not None:
            raise self.error
        self.log.append("done")
        return 7


async def settle() -> None:
    for _ in range(20):  # nothing here waits for the outside
        await anyio.lowlevel.checkpoint()


async def test_concurrent_callers_share_one_execution() -> None:
    async with anyio.create_task_group() as owner:
        flights: SingleFlight[str, int] = SingleFlight(owner)
        work, answers = Work(), []

        async def ask() -> None:
            answers.append(await flights.run("a", work))

        async with anyio.create_task_group() as askers:
            for _ in range(1000):
                askers.start_soon(ask)
            await settle()
            assert "a" in flights
            work.go.set()
        assert (answers, work.log, len(flights)) == ([7] * 1000, ["start", "done"], 0)


async def test_a_cancelled_first_caller_costs_the_others_nothing() -> None:
    async with anyio.create_task_group() as owner:
        flights: SingleFlight[str, int] = SingleFlight(owner)
        work, answers = Work(), []
        first = anyio.CancelScope()

        async def ask(scope: anyio.CancelScope) -> None:
            with scope:
                answers.append(await flights.run("a", work))

        async with anyio.create_task_group() as askers:
            askers.start_soon(ask, first)
            await settle()
            askers.start_soon(ask, anyio.CancelScope())
            await settle()
            first.cancel()
            await settle()
            work.go.set()
        assert (answers, work.log) == ([7], ["start", "done"])


async def test_last_callers_cancellation_cancels_and_awaits_the_work() -> None:
    async with anyio.create_task_group() as owner:
        flights: SingleFlight[str, int] = SingleFlight(owner)
        work = Work()
        with anyio.move_on_after(0.01):
            await flights.run("a", work)
        assert (work.log, len(flights)) == (["start", "cancelled"], 0)


async def test_call_while_the_old_work_is_cancelled_starts_anew() -> None:
    async with anyio.create_task_group() as owner, anyio.create_task_group() as askers:
        flights: SingleFlight[str, int] = SingleFlight(owner)
        old, new = Work(), Work()
        old_scope = anyio.CancelScope()
        answers = []

        async def ask_old() -> None:
            with old_scope:
                await flights.run("a", old)

        async def ask_new() -> None:
            answers.append(await flights.run("a", new))

        askers.start_soon(ask_old)
        await settle()
        old_scope.cancel()
        await anyio.lowlevel.checkpoint()
        assert old.log == ["start"]
        askers.start_soon(ask_new)
        await settle()
        assert old.log == ["start", "cancelled"]
        askers.start_soon(ask_new)  # joins the newer one, which the old one's end must leave alone
        await settle()
        new.go.set()
    assert (answers, new.log) == ([7, 7], ["start", "done"])


async def test_error_reaches_every_caller_and_the_next_tries_again() -> None:
    async with anyio.create_task_group() as owner:
        flights: SingleFlight[str, int] = SingleFlight(owner)
        work, errors = Work(ValueError("broken")), []

        async def ask() -> None:
            with pytest.raises(ValueError, match="broken") as caught:
                await flights.run("a", work)
            errors.append(caught.value)

        async with anyio.create_task_group() as askers:
            for _ in range(50):
                askers.start_soon(ask)
            await settle()
            work.go.set()
        assert (len(errors), work.log) == (50, ["start"])
        assert not owner.cancel_scope.cancel_called
        work.error = None
        assert await flights.run("a", work) == 7


async def test_traceback_of_a_shared_error_does_not_grow_with_callers() -> None:
    async with anyio.create_task_group() as owner:
        flights: SingleFlight[str, int] = SingleFlight(owner)
        work, lengths = Work(ValueError("broken")), []

        async def ask() -> None:
            try:
                await flights.run("a", work)
            except ValueError as error:
                traceback, length = error.__traceback__, 0
                while traceback is not None:
                    traceback, length = traceback.tb_next, length + 1
                lengths.append(length)

        async with anyio.create_task_group() as askers:
            for _ in range(20):
                askers.start_soon(ask)
            await settle()
            work.go.set()
        assert len(set(lengths)) == 1


async def test_stray_cancelled_error_of_the_work_spares_the_owner() -> None:
    async with anyio.create_task_group() as owner:
        flights: SingleFlight[str, int] = SingleFlight(owner)

        async def awaits_a_cancelled_future() -> int:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
            return 0

        with pytest.raises(ClosedError):
            await flights.run("a", awaits_a_cancelled_future)
        assert not owner.cancel_scope.cancel_called


async def test_flights_end_with_their_owner() -> None:
    work = Work()

    async def ask() -> None:
        with pytest.raises(ClosedError):
            await flights.run("a", work)

    async with anyio.create_task_group() as askers, anyio.create_task_group() as owner:
        flights: SingleFlight[str, int] = SingleFlight(owner)
        askers.start_soon(ask)
        await settle()
        owner.cancel_scope.cancel()
    assert (work.log, len(flights)) == (["start", "cancelled"], 0)
    with pytest.raises(ClosedError):
        await flights.run("a", work)
    assert len(flights) == 0


async def test_failure_of_an_abandoned_flight_leaves_the_next_alone() -> None:
    unwinds = anyio.Event()

    async def fails_late() -> int:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await unwinds.wait()
            raise ValueError("of the first attempt")

    async with anyio.create_task_group() as owner:
        flights: SingleFlight[str, int] = SingleFlight(owner)
        second = Work()

        async with anyio.create_task_group() as askers:
            first = anyio.CancelScope()

            async def ask_first() -> None:
                with first:
                    await flights.run("a", fails_late)

            askers.start_soon(ask_first)
            await settle()
            first.cancel()
            await settle()
            second.go.set()
            assert await flights.run("a", second) == 7
            unwinds.set()
            await settle()
            assert await flights.run("a", second) == 7


def test_threads_that_wait_for_a_future_get_errors_of_their_own() -> None:
    future: SharedFuture[int] = SharedFuture()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(future.result) for _ in range(2)]
        with pytest.raises(OSError, match="it broke") as raised:
            raise OSError(5, "it broke")
        future.fail(raised.value)
        first, second = (each.exception() for each in waiting)
    assert first is not second
    assert repr(first) == repr(second) == repr(OSError(5, "it broke"))
    assert future.exception().__traceback__ is None  # type: ignore[union-attr]  # no frame hangs on what is kept

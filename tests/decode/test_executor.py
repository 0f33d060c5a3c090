from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.lowlevel import checkpoint

from asyncfetch.config import usable_cpus
from asyncfetch.decode import DecodePool
from asyncfetch.errors import ClosedError, ConfigError
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Callable


class HeldCall:
    """A call that tells when it has begun and ends when it may."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(10)
        self.ended = True
        return "done"

    async def has_begun(self) -> None:
        await anyio.to_thread.run_sync(self.begun.wait)

    def open_soon(self) -> None:
        threading.Timer(0.05, self.may_end.set).start()


async def test_a_call_runs_in_a_thread_with_its_arguments() -> None:
    pool = DecodePool(1)
    assert await pool.run(divmod, 17, 5) == (3, 2)
    assert await pool.run(threading.get_ident) != threading.get_ident()


async def test_an_error_comes_back_and_frees_the_thread() -> None:
    pool = DecodePool(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)
    now = pool.statistics()
    assert (now.busy, now.waiting, now.finished) == (0, 0, 2)


async def test_statistics_stand_that_calls_end_meanwhile() -> None:
    """As they do where another thread takes them."""
    pool = DecodePool(1)

    class Ending:
        @property
        def runs(self) -> bool:
            pool._calls.clear()
            return True

    pool._calls.update([Ending(), Ending()])  # type: ignore[list-item]
    assert (pool.statistics().busy, pool.statistics().busy) == (2, 0)


async def test_calls_are_timed() -> None:
    pool = DecodePool(1)
    before = pool.statistics().call
    await pool.run(time.sleep, 0.02)
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)
    now = pool.statistics()
    assert (before.count, now.call.count) == (0, 2)
    assert 0.02 <= now.call.max_seconds <= now.call.sum_seconds == now.busy_seconds


async def test_pool_runs_all_its_threads_at_a_time_and_no_more() -> None:
    pool = DecodePool(3)
    together = threading.Barrier(3, timeout=10)
    running = peak = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        together.wait()
        with lock:
            running -= 1

    async with anyio.create_task_group() as group:
        for _ in range(30):
            group.start_soon(pool.run, work)
    assert peak == 3
    assert pool.statistics().finished == 30


async def test_a_thread_takes_the_next_calls_whatever_the_loop_does() -> None:
    pool, held, called = DecodePool(1), HeldCall(), threading.Semaphore(0)
    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, held)
        await held.has_begun()
        for _ in range(5):
            group.start_soon(pool.run, called.release, 1)
        await all_others_wait()
        held.may_end.set()
        assert all(called.acquire(timeout=10) for _ in range(5))  # here, where the loop waits for it


async def test_the_lowest_turn_is_next_and_of_one_turn_the_first() -> None:
    pool, first, order = DecodePool(1), HeldCall(), list[str]()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(pool.run, first, turn=10))
        await first.has_begun()
        for turn, name in ((14, "14"), (12, "12"), (None, "the pool's own"), (12, "12 again"), (11, "11")):
            group.start_soon(partial(pool.run, order.append, name, turn=turn))
            await all_others_wait()
        first.may_end.set()
    assert order == ["the pool's own", "11", "12", "12 again", "14"]
    assert pool.turn == 14


async def test_call_without_a_thread_takes_no_other_calls_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython leaves in its queue what it then raises for: a thread comes later for a call that isn't there."""
    pool, held = DecodePool(1), HeldCall()
    submit = pool._executor.submit

    def fail(run_next: Callable[[], None]) -> None:
        submit(run_next)
        raise RuntimeError("can't start new thread")

    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, held)
        await held.has_begun()
        monkeypatch.setattr(pool._executor, "submit", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            await pool.run(int)
        monkeypatch.undo()
        held.may_end.set()
        with anyio.fail_after(10):
            assert await pool.run(divmod, 17, 5) == (3, 2)
            assert await pool.run(divmod, 17, 5) == (3, 2)


async def test_a_closed_pool_ends_its_threads_and_refuses() -> None:
    pool = DecodePool(1)
    thread = await pool.run(threading.current_thread)
    pool.close()
    pool.close()
    await anyio.to_thread.run_sync(thread.join, 10)
    assert not thread.is_alive()
    with pytest.raises(ClosedError):
        await pool.run(len, "abc")
    assert (pool.statistics().waiting, pool.statistics().finished) == (0, 1)


async def test_a_pool_that_nobody_refers_to_ends_its_threads() -> None:
    thread = await DecodePool(1).run(threading.current_thread)
    await anyio.to_thread.run_sync(thread.join, 10)
    assert not thread.is_alive()


async def test_stop_iteration_of_a_call_comes_back_as_an_error() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await DecodePool(1).run(next, iter(()))


async def test_statistics_tell_what_is_going_on() -> None:
    pool, held = DecodePool(1), HeldCall()
    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, held)
        await held.has_begun()
        group.start_soon(pool.run, len, "abc")
        group.start_soon(pool.run, len, "abc")
        await all_others_wait()
        assert repr(pool) == "<DecodePool 1/1 threads busy, 2 waiting>"
        held.open_soon()
    now = pool.statistics()
    assert (now.threads, now.busy, now.waiting, now.finished) == (1, 0, 0, 3)
    assert 0.02 < now.busy_seconds < 5


async def test_a_cancelled_scope_waits_for_its_thread() -> None:
    pool, held = DecodePool(1), HeldCall()
    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, held)
        await held.has_begun()
        group.cancel_scope.cancel()
        held.open_soon()
    assert held.ended
    assert pool.statistics().busy == 0


async def test_a_cancelled_task_waits_for_its_thread() -> None:
    pool, held = DecodePool(1), HeldCall()
    task = asyncio.create_task(pool.run(held))
    await held.has_begun()
    task.cancel()
    for _ in range(5):
        await checkpoint()
    assert not task.done()
    assert pool.statistics().busy == 1
    held.open_soon()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.ended
    assert pool.statistics().busy == 0


@pytest.mark.parametrize("steps", range(8))
async def test_a_task_cancelled_at_any_step_leaves_the_pool_whole(steps: int) -> None:
    pool, called = DecodePool(1), threading.Event()
    task = asyncio.create_task(pool.run(called.set))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    now = pool.statistics()
    assert (now.busy, now.waiting, now.finished) == (0, 0, int(called.is_set()))
    assert await pool.run(len, "abc") == 3


async def test_call_cancelled_while_it_waits_is_never_made() -> None:
    pool, held, called = DecodePool(1), HeldCall(), threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, held)
        await held.has_begun()
        with anyio.move_on_after(0.01):
            await pool.run(called.set)
        assert pool.statistics().waiting == 0
        held.open_soon()
    assert await pool.run(len, "abc") == 3
    assert not called.is_set()


async def test_more_threads_than_anyio_allows_by_default() -> None:
    pool = DecodePool(45)
    together = threading.Barrier(45)
    async with anyio.create_task_group() as group:
        for _ in range(45):
            group.start_soon(pool.run, together.wait, 10)
    assert pool.statistics().finished == 45


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        DecodePool(0)


async def test_a_pool_may_be_made_before_its_loop() -> None:
    pool = await anyio.to_thread.run_sync(DecodePool)  # in that thread no loop runs
    assert await pool.run(len, "abc") == 3


def test_calls_go_on_in_a_thread_that_outlives_the_main_one() -> None:
    """Python ends its executors with the main thread, and waits for all others behind that."""
    code = """
import threading, anyio
from asyncfetch.decode import DecodePool

main_thread = threading.main_thread()

async def work():
    pool = DecodePool(2)
    assert await pool.run(abs, -1) == 1
    main_thread.join()
    results = []
    async with anyio.create_task_group() as group:
        async def call(number):
            results.append(await pool.run(abs, -number))
        for number in range(20):
            group.start_soon(call, number)
    pool.close()
    print(sorted(results) == list(range(20)), pool.statistics().finished)

threading.Thread(target=anyio.run, args=(work,)).start()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.stdout, ended.stderr) == ("True 21\n", "")


def test_default_is_as_many_threads_as_cores() -> None:
    pool = DecodePool()
    assert pool.threads == usable_cpus()
    pool.close()

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import threading
import time
import weakref
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncfetch.errors import ClosedError, WorkerError, WrongLoop
from asyncfetch.runtime.channel import iterate
from asyncfetch.runtime.loop_thread import BackgroundContext, LoopThread
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import FrameType


async def double(number: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * number


def wait_for_thread_end(ident: int) -> None:
    for thread in threading.enumerate():
        if thread.ident == ident:
            thread.join(5)
            assert not thread.is_alive()


def test_calls_from_several_threads_return_their_own_values() -> None:
    with LoopThread() as loop_thread:
        results: dict[int, int] = {}

        def call(number: int) -> None:
            results[number] = loop_thread.run(double, number)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: 2 * number for number in range(20)}


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(2), asyncio.CancelledError()])
def test_exceptions_reach_the_caller_and_the_loop_goes_on(error: BaseException) -> None:
    async def fail() -> None:
        raise error

    with LoopThread() as loop_thread:
        with pytest.raises(type(error)) as caught:
            loop_thread.run(fail)
        assert caught.value is error
        assert loop_thread.run(double, 2) == 4


def test_an_error_leaves_no_cycle_behind() -> None:
    class Canary:
        pass

    async def fail() -> None:
        local = Canary()
        refs.append(weakref.ref(local))
        raise ValueError("x")

    refs: list[weakref.ref[Canary]] = []
    with LoopThread() as loop_thread:
        gc.disable()
        try:
            with pytest.raises(ValueError, match="x"):
                loop_thread.run(fail)
            loop_thread.run(double, 1)  # the loop's own last references go with its next turn
            assert refs[0]() is None
        finally:
            gc.enable()


class Interruption:
    """A Ctrl-C at the nth line that this thread runs of the modules that start and await calls."""

    def __init__(self, line: int) -> None:
        self.lines_left = line

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:  # noqa: ANN401
        if Path(frame.f_code.co_filename).name not in ("loop_thread.py", "channel.py"):
            return None
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == 0:
                raise KeyboardInterrupt
        return self.trace


class Numbers:
    """Counts for ever, and whether it is entered."""

    def __init__(self) -> None:
        self.entered = 0

    async def __aenter__(self) -> AsyncIterator[list[int]]:
        self.entered += 1
        return self.batches()

    async def __aexit__(self, *exc_info: object) -> None:
        self.entered -= 1

    async def batches(self) -> AsyncIterator[list[int]]:
        for number in itertools.count():
            await anyio.lowlevel.checkpoint()
            yield [number]


@pytest.mark.parametrize("way", ["run", "iterate"])
def test_an_interrupt_at_any_line_of_it_leaves_nothing_running(way: str) -> None:
    def work() -> None:
        if way == "run":
            loop_thread.run(forever)
        else:
            items = iterate(loop_thread, lambda: numbers)
            stack.callback(items.close)
            next(items)

    async def forever() -> None:
        try:
            numbers.entered += 1
            await anyio.sleep(0.2 if interruption.lines_left > 0 else 30)
        finally:
            numbers.entered -= 1

    with LoopThread() as loop_thread:
        for line in itertools.count(1):
            numbers, interruption = Numbers(), Interruption(line)
            with ExitStack() as stack, suppress(KeyboardInterrupt):
                try:
                    sys.settrace(interruption.trace)
                    work()
                finally:
                    sys.settrace(None)  # what the stack does isn't interrupted
            assert repr(loop_thread) == "<LoopThread 0 calls>"
            assert numbers.entered == 0
            if interruption.lines_left > 0:  # it was done before
                break
        assert line > 15


def test_an_interrupt_at_any_line_of_its_making_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    for line in itertools.count(1):
        interruption = Interruption(line)
        with ExitStack() as stack, suppress(KeyboardInterrupt):
            try:
                sys.settrace(interruption.trace)
                stack.push(LoopThread())
            finally:
                sys.settrace(None)
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
            assert not thread.is_alive(), line
        if interruption.lines_left > 0:  # it was done before
            break
    assert line > 15


def test_loop_thread_refuses_calls_from_itself() -> None:
    with LoopThread() as loop_thread:

        async def call_back() -> None:
            loop_thread.run(double, 1)

        with pytest.raises(WrongLoop, match="await instead"):
            loop_thread.run(call_back)


def test_thread_with_the_number_of_an_ended_one_finds_it_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_thread = LoopThread()
    loop_thread.close()
    monkeypatch.setattr(loop_thread._engine._thread, "_ident", threading.get_ident())  # as the system may give it
    with pytest.raises(ClosedError, match="make a new one"):
        loop_thread.run(double, 1)


def test_close_cancels_what_runs_and_tells_its_caller() -> None:
    loop_thread = LoopThread()
    cleaned_up = threading.Event()

    async def forever() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned_up.set()

    call = loop_thread.start(forever)
    loop_thread.run(double, 1)
    loop_thread.close()
    loop_thread.close()
    assert cleaned_up.is_set()
    with pytest.raises(ClosedError, match="closed"):
        call.result()
    with pytest.raises(ClosedError, match="make a new one"):
        loop_thread.run(double, 1)


def test_a_cancelled_call_ends_and_says_so() -> None:
    with LoopThread() as loop_thread:
        call = loop_thread.start(anyio.sleep_forever)
        call.cancel()
        assert call.wait(5)
        with pytest.raises(ClosedError, match="cancelled"):
            call.result()


def test_every_call_is_answered_however_close_the_end_is() -> None:
    for _ in range(30):
        loop_thread = LoopThread()
        answered: list[bool] = []

        def caller(loop_thread: LoopThread = loop_thread, answered: list[bool] = answered) -> None:
            try:
                while True:
                    loop_thread.run(double, 1)
            except ClosedError:
                answered.append(True)

        threads = [threading.Thread(target=caller) for _ in range(3)]
        for thread in threads:
            thread.start()
        loop_thread.close()
        for thread in threads:
            thread.join(5)
        assert answered == [True] * 3


@pytest.mark.alone
def test_a_coroutine_that_blocks_bounds_the_close(caplog: pytest.LogCaptureFixture) -> None:
    loop_thread = LoopThread()
    release = threading.Event()

    async def block() -> None:  # the fault under test
        release.wait()

    call = loop_thread.start(block)
    began = time.monotonic()
    loop_thread.close()
    assert time.monotonic() - began < 1.0
    assert "a coroutine on it blocks" in caplog.text
    release.set()
    assert call.wait(5)


@pytest.mark.alone
@pytest.mark.parametrize("late", [False, True], ids=["never", "late"])
def test_call_waited_for_in_vain_is_not_waited_for_again(late: bool) -> None:
    loop_thread = LoopThread()
    ident = loop_thread.run(_thread_ident)
    release = threading.Event()

    async def block() -> None:  # the fault under test
        release.wait()

    call = loop_thread.start(block)
    call.end()
    if late:
        release.set()
        assert call.wait(5)
    began = time.monotonic()
    loop_thread.close()
    assert time.monotonic() - began < 0.2
    if late:  # it has ended after all, so the close waited for the thread
        assert ident not in {thread.ident for thread in threading.enumerate()}
    release.set()


def test_collection_ends_the_thread() -> None:
    loop_thread = LoopThread()
    ident = loop_thread.run(_thread_ident)
    del loop_thread
    wait_for_thread_end(ident)


async def _thread_ident() -> int:
    return threading.get_ident()


def test_a_forked_child_is_refused_and_leaves_the_parent_alone() -> None:
    with LoopThread() as loop_thread:
        call = loop_thread.start(anyio.sleep_forever)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with pytest.raises(WrongLoop, match="forked"):
                    loop_thread.run(double, 1)
                loop_thread.close()
                call.cancel()
                assert not call.wait(60)
                del loop_thread, call
                gc.collect()
                with LoopThread() as own:
                    assert own.run(double, 4) == 8
                status = 0
            finally:
                os._exit(status)
        _, wait_status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(wait_status) == 0
        assert not call.wait(0)
        assert loop_thread.run(double, 5) == 10


# From another loop.


@pytest.mark.may_block  # starting and ending the thread
async def test_another_loop_gets_values_and_errors() -> None:
    async def fail() -> None:
        raise ValueError("x")

    with LoopThread() as loop_thread:
        assert await loop_thread.acall(double, 4) == 8
        with pytest.raises(ValueError, match="x"):
            await loop_thread.acall(fail)
    with pytest.raises(ClosedError):
        await loop_thread.acall(double, 4)


@pytest.mark.may_block
async def test_cancelled_caller_on_another_loop_awaits_the_coroutine() -> None:
    began, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            ended.set()

    with LoopThread() as loop_thread:
        async with anyio.create_task_group() as group:
            group.start_soon(loop_thread.acall, wait)
            await anyio.to_thread.run_sync(began.wait)
            group.cancel_scope.cancel()
        assert ended.is_set()
        assert await loop_thread.acall(double, 4) == 8


@pytest.mark.may_block
async def test_caller_cancelled_twice_awaits_the_coroutine() -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(may_end.wait)
            ended.set()

    with LoopThread() as loop_thread:
        task = asyncio.ensure_future(loop_thread.acall(wait))
        await anyio.to_thread.run_sync(began.wait)
        for _ in range(3):
            task.cancel()
            await anyio.sleep(0.01)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()


@pytest.mark.may_block
async def test_closing_ends_a_call_of_another_loop() -> None:
    loop_thread = LoopThread()
    async with anyio.create_task_group() as group:

        async def call() -> None:
            with pytest.raises(ClosedError):
                await loop_thread.acall(anyio.sleep_forever)

        group.start_soon(call)
        await all_others_wait()
        await anyio.to_thread.run_sync(loop_thread.close)


def test_caller_on_trio_is_answered_by_a_loop_of_asyncio() -> None:
    async def call(loop_thread: LoopThread) -> int:
        return loop_thread.run(double, 21)

    with LoopThread() as loop_thread:
        assert anyio.run(call, loop_thread, backend="trio") == 42


def test_coroutine_sees_its_starters_context_variables() -> None:
    async def look() -> str:
        return variable.get()

    variable = ContextVar("variable", default="none")
    with LoopThread() as loop_thread:
        token = variable.set("the caller's")
        try:
            assert loop_thread.run(look) == "the caller's"
        finally:
            variable.reset(token)
        assert loop_thread.run(look) == "none"


class _Foreign(asyncio.SelectorEventLoop):
    """A loop of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = 0


class _StartsNothing(_Foreign):
    """Starts its main task, and those of anyio.run, but none of ours."""

    def create_task(self, coro: Any, **options: Any) -> Any:  # noqa: ANN401
        self.tasks += 1
        if self.tasks > 1:
            coro.close()
            raise RuntimeError("no task can be started here")
        return super().create_task(coro, **options)


class _StartsOne(_Foreign):
    """Starts one call, and refuses the second one."""

    def create_task(self, coro: Any, **options: Any) -> Any:  # noqa: ANN401
        self.tasks += 1
        if self.tasks > 2:
            coro.close()
            raise RuntimeError("no other task can be started here")
        return super().create_task(coro, **options)


class _RunsNothing(_Foreign):
    """Says that it is through with what it never ran."""

    def run_until_complete(self, future: Any) -> Any:  # noqa: ANN401
        if asyncio.iscoroutine(future):
            return super().run_until_complete(future)
        future.cancel()
        return None


class _Refused:
    """No loop at all, as where the process has too many files open."""

    def __init__(self) -> None:
        raise OSError(24, "Too many open files")


@contextmanager
def loops_made_by(make: Callable[[], Any]) -> Iterator[None]:
    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> Any:  # noqa: ANN401
            return make()

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


@pytest.mark.parametrize("make", [_Refused, _RunsNothing])
def test_loop_that_never_runs_is_a_closed_error(make: Callable[[], Any]) -> None:
    with loops_made_by(make), pytest.raises(ClosedError):
        LoopThread()


def test_thread_that_cannot_be_started_is_a_worker_error() -> None:
    before = threading.stack_size(2**46)  # more than there is of addresses
    try:
        with pytest.raises(WorkerError, match=r"can't start new thread.*ulimit -u"):
            LoopThread()
    finally:
        threading.stack_size(before)


def test_a_call_that_the_loop_refuses_to_start_raises_why() -> None:
    with loops_made_by(_StartsNothing), LoopThread() as loop_thread:
        with pytest.raises(ClosedError, match="no task can be started here"):
            loop_thread.run(double, 1)
        with pytest.raises(ClosedError):
            loop_thread.run(double, 1)


def test_waiting_callers_get_the_reason_why_the_loop_died() -> None:
    """Of a call, an iterator, a context manager that is kept open, and from another loop."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[AsyncIterator[list[int]]]:
        async def batches() -> AsyncIterator[list[int]]:
            await anyio.sleep_forever()
            yield []

        yield batches()

    async def stop() -> None:
        asyncio.get_running_loop().stop()
        await anyio.sleep_forever()

    ways: list[Callable[[LoopThread], object]] = [
        lambda loop_thread: loop_thread.run(stop),
        lambda loop_thread: (loop_thread.start(stop), next(iterate(loop_thread, opened))),
        lambda loop_thread: asyncio.run(loop_thread.acall(stop)),
        lambda loop_thread: BackgroundContext(loop_thread, partial(_NeverOpen, stop), name="it").value(),
    ]
    for way in ways:
        with LoopThread() as loop_thread, pytest.raises(ClosedError, match="stopped it"):
            way(loop_thread)


def test_a_call_under_way_is_told_why_the_loop_dies_of_another() -> None:
    with loops_made_by(_StartsOne), LoopThread() as loop_thread:
        call = loop_thread.start(anyio.sleep_forever)
        with pytest.raises(ClosedError, match="no other task can be started here"):
            loop_thread.run(double, 1)
        with pytest.raises(ClosedError, match="no other task can be started here"):
            call.result()


class _NeverOpen:
    def __init__(self, enter: Callable[[], Awaitable[None]]) -> None:
        self._enter = enter

    async def __aenter__(self) -> None:
        await self._enter()

    async def __aexit__(self, *exc_info: object) -> None: ...

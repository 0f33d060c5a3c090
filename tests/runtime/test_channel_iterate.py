from __future__ import annotations

import itertools
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncfetch.errors import ClosedError, WrongLoop
from asyncfetch.runtime.channel import iterate
from asyncfetch.runtime.loop_thread import LoopThread
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
    from typing import Self


class Batches:
    """An async iterator over batches, entered and left, that notes what happens to it."""

    def __init__(self, batches: Iterable[list[int]], *, at_end: BaseException | None = None) -> None:
        self.batches = iter(batches)
        self.at_end = at_end
        self.made = 0
        self.left = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.left = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[int]:
        await anyio.lowlevel.checkpoint()
        for batch in self.batches:
            self.made += 1
            return batch
        if self.at_end is not None:
            raise self.at_end
        raise StopAsyncIteration


@pytest.fixture
def loop_thread() -> Generator[LoopThread, None, None]:
    with LoopThread() as thread:
        yield thread


def endless() -> Batches:
    return Batches([number] for number in itertools.count())


def test_items_of_all_batches_in_order(loop_thread: LoopThread) -> None:
    source = Batches([[0, 1], [], [2], [3, 4, 5]])
    assert list(iterate(loop_thread, lambda: source)) == list(range(6))
    assert source.left


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_comes_after_the_items_before_it(loop_thread: LoopThread, error: BaseException) -> None:
    items = iterate(loop_thread, lambda: Batches([[1], [2]], at_end=error))
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(type(error)) as caught:
        next(items)
    assert caught.value is error
    assert loop_thread.run(_answer) == 42


async def _answer() -> int:
    return 42


def test_an_error_of_entering_or_leaving_is_raised(loop_thread: LoopThread) -> None:
    @asynccontextmanager
    async def bad_end() -> AsyncGenerator[AsyncIterator[list[int]], None]:
        yield Batches([[1]])
        raise LookupError("at the end")

    items = iterate(loop_thread, bad_end)
    assert next(items) == 1
    with pytest.raises(LookupError, match="at the end"):
        next(items)


@pytest.mark.alone
def test_an_early_break_leaves_the_context_at_once(loop_thread: LoopThread) -> None:
    source = endless()
    began = time.monotonic()
    for item in iterate(loop_thread, lambda: source):
        if item == 3:
            break
    assert source.left
    assert time.monotonic() - began < 1.0


def test_collection_leaves_the_context(loop_thread: LoopThread) -> None:
    source = endless()
    items = iterate(loop_thread, lambda: source)
    assert next(items) == 0
    del items
    assert source.left


def test_the_source_runs_ahead_by_no_more_than_allowed(loop_thread: LoopThread) -> None:
    source = endless()
    items = iterate(loop_thread, lambda: source, max_batches=3)
    for number in range(10):
        assert next(items) == number
        loop_thread.run(all_others_wait)
        assert source.made <= number + 1 + 3 + 1  # handed over, allowed, and the one that waits in put
    items.close()


def test_a_source_that_waits_ends_when_its_consumer_does(loop_thread: LoopThread) -> None:
    class Stuck(Batches):
        async def __anext__(self) -> list[int]:
            if self.made:
                await anyio.sleep_forever()
            return await super().__anext__()

    source = Stuck([[1]])
    items = iterate(loop_thread, lambda: source)
    assert next(items) == 1
    items.close()
    assert source.left
    assert list(items) == []


def test_closing_the_loop_thread_is_an_error_and_not_an_end(loop_thread: LoopThread) -> None:
    items = iterate(loop_thread, endless)
    next(items)
    loop_thread.close()
    with pytest.raises(ClosedError):
        list(items)


def test_the_loops_own_thread_is_refused(loop_thread: LoopThread) -> None:
    async def inside() -> None:
        next(iterate(loop_thread, endless))

    with pytest.raises(WrongLoop):
        loop_thread.run(inside)

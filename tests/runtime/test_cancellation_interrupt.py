"""Blocks that are ended from outside, and what else may end them at the same time."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from itertools import permutations
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from asyncfetch.runtime.cancellation import Interrupt

if TYPE_CHECKING:
    from collections.abc import Callable


async def settle() -> None:
    for _ in range(20):  # nothing here waits for the outside
        await anyio.lowlevel.checkpoint()


async def test_interrupt_ends_its_block_and_nothing_else() -> None:
    after: list[bool] = []

    async def run() -> None:
        with block:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        after.append(block.cancelled_caught)

    block = Interrupt()
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await settle()
        block.cancel()
    assert after == [True]


async def test_a_block_that_has_been_left_is_not_ended() -> None:
    block = Interrupt()
    block.cancel()
    with block:
        await anyio.lowlevel.checkpoint()
    block.cancel()
    await settle()
    assert not block.cancelled_caught


async def test_error_of_the_block_comes_out() -> None:
    block = Interrupt()

    async def fail_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise KeyError

    async def run() -> None:
        with pytest.raises(KeyError), block:
            await fail_when_cancelled()
        await anyio.sleep(0.01)  # and no cancellation is left over

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await settle()
        block.cancel()
    assert not block.cancelled_caught


async def test_tasks_that_the_block_started_end_with_it() -> None:
    ended = []

    async def wait(number: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(number)

    async def run() -> None:
        with block:
            async with anyio.create_task_group() as children:
                for number in range(3):
                    children.start_soon(wait, number)

    block = Interrupt()
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await settle()
        block.cancel()
    assert sorted(ended) == [0, 1, 2]
    assert block.cancelled_caught


@pytest.mark.parametrize("order", list(permutations(["inner", "outer", "scope", "task"], 2)), ids="-then-".join)
@pytest.mark.parametrize("at_a_bare_yield", [False, True])
async def test_two_cancellations_at_once_both_count(order: tuple[str, str], at_a_bare_yield: bool) -> None:
    """In one turn of the loop: the one that reaches furthest decides how far."""
    reached: list[str] = []
    outer, inner, scope = Interrupt(), Interrupt(), anyio.CancelScope()

    async def run() -> None:
        with ExitStack() as stack:
            for name, block in (("scope", scope), ("outer", outer), ("inner", inner)):
                stack.callback(reached.append, name)
                stack.enter_context(block)
            while at_a_bare_yield:
                await anyio.lowlevel.checkpoint()
            await anyio.sleep_forever()
        await anyio.sleep(0.01)
        reached.append("end")

    task = asyncio.get_running_loop().create_task(run())
    await settle()
    cancels: dict[str, Callable[[], object]] = {
        "inner": inner.cancel,
        "outer": outer.cancel,
        "scope": scope.cancel,
        "task": task.cancel,
    }
    for name in order:
        cancels[name]()
    await asyncio.wait([task])
    assert reached[:3] == ["inner", "outer", "scope"]
    assert task.cancelled() == ("task" in order)
    assert (reached[3:] == ["end"]) == ("task" not in order)
    if "task" in order or "scope" in order:
        assert not (outer.cancelled_caught and inner.cancelled_caught)

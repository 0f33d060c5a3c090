"""A call that goes on for a while when its caller is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import anyio
import pytest

from asyncfetch.runtime.cancellation import outlast
from tests.conftest import all_others_wait


class Call:
    """Waits until it is let go on; knows how it ended."""

    def __init__(self) -> None:
        self.began, self.go_on = anyio.Event(), anyio.Event()
        self.ended = ""

    async def __call__(self) -> None:
        self.began.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        self.ended = "done"


@pytest.mark.parametrize("way", ["scope", "task"])
@pytest.mark.parametrize("seconds", [60.0, 0.0])
async def test_a_cancelled_caller_waits_for_its_end_so_long(way: str, seconds: float) -> None:
    call, after, scope = Call(), [], anyio.CancelScope()

    async def caller() -> None:
        with scope:
            await outlast(call, seconds=seconds)
            after.append("goes on")

    async with anyio.create_task_group() as tasks:
        task = asyncio.ensure_future(caller())
        await call.began.wait()
        cancel = scope.cancel if way == "scope" else task.cancel
        cancel()
        if seconds:
            tasks.start_soon(_let_go_on, call)
        with suppress(asyncio.CancelledError):
            await task
    assert (call.ended, after) == ("done" if seconds else "cancelled", [])


async def _let_go_on(call: Call) -> None:
    await all_others_wait()
    assert call.ended == ""
    call.go_on.set()


async def test_call_within_a_cancelled_scope_still_runs() -> None:
    """As undoing does, which begins when its caller is cancelled already."""
    done = []

    async def undo() -> None:
        await anyio.lowlevel.checkpoint()
        done.append(True)

    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            await outlast(undo, seconds=60)
    assert done == [True]


async def test_error_of_the_call_comes_out_by_itself() -> None:
    async def fail() -> None:
        raise LookupError("of the call")

    with pytest.raises(LookupError, match="of the call"):
        await outlast(fail, seconds=1)
    call = Call()
    call.go_on.set()
    await outlast(call, seconds=0)
    assert call.ended == "done"

"""Blocks that are ended from outside, telling cancellations apart; one timer for many deadlines.

A timer of asyncio's takes its place among all others when it is made and when it ends, and most never go off. So those
who wait for something are noted, and one timer stands at the earliest of their deadlines. It goes off once for all that
have come and gone since it was set, and looks at those that are left.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from typing import TYPE_CHECKING, Protocol, Self

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from anyio.abc import TaskGroup


class Interrupt:
    """A block of one task that can be ended from outside: ``with Interrupt() as block: ...``, and ``block.cancel()``.

    It is to anyio's CancelScope what asyncio.timeout() is to fail_after(): the cancellation comes once, through
    shields, to this task and by it to the task groups in it. It counts as anyio's and asyncio's own ones do, so each of
    several at a time ends just its own block. Entering and leaving costs 1 us instead of 6; a request does it twice.

    Not thread-safe: ``cancel`` is for the block's loop.
    """

    __slots__ = ("_called", "_cancelling_before", "_task", "cancelled_caught")

    def __init__(self) -> None:
        self.cancelled_caught = False
        """True if the block has ended by ``cancel``."""
        self._called = False
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        task = self._task = asyncio.current_task()
        assert task is not None
        self._cancelling_before = task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        if self._called:
            assert task is not None
            only_ours = task.uncancel() <= self._cancelling_before
            self.cancelled_caught = only_ours and kind is not None and issubclass(kind, asyncio.CancelledError)
        return self.cancelled_caught

    def cancel(self) -> None:
        """Ends the block; does nothing outside of it, or a second time."""
        if self._task is not None and not self._called:
            self._called = True
            # If another cancellation hasn't arrived yet, both come as one, and by this message anyio knows its own.
            self._task.cancel(getattr(self._task, "_cancel_message", None))


def was_cancelled() -> bool:
    """Return whether somebody cancelled the running task and that isn't over.

    Asked where a CancelledError was caught. False means that it came out of a future which somebody else cancelled: an
    error like any other, but a task group takes it for a failure of its child and cancels all others.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def end_tasks(group: TaskGroup) -> None:
    """Cancel the children of an entered task group, await them and leave it, in the task that entered it.

    For the ``__aexit__`` of a class that owns its tasks: passing the body's exception to the group would make a group
    of it.
    """
    group.cancel_scope.cancel()
    await group.__aexit__(None, None, None)


async def outlast(call: Callable[[], Awaitable[None]], *, seconds: float) -> None:
    """Awaits ``call()``, which a cancellation of the caller, of whichever kind, lets go on for ``seconds`` more.

    For what can only be undone when it is known what came of it, and for undoing it. A caller that was cancelled gets
    its cancellation after that, whatever came of the call: its effects have to tell.
    """
    scope, ended = anyio.CancelScope(shield=True), anyio.Event()
    error: Exception | None = None

    async def run() -> None:
        nonlocal error
        try:
            with scope:
                await call()
        except Exception as failure:  # noqa: BLE001 - raised below, by itself
            error = failure
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks:  # Task.cancel() goes through a shield, but not to another task
        tasks.start_soon(run)
        try:
            await ended.wait()
        except BaseException:
            scope.deadline = anyio.current_time() + seconds
            raise
    if error is not None:
        try:
            raise error
        finally:
            error = None  # else error -> traceback -> this frame -> error is a cycle


class Deadline(Protocol):
    """Something that has a deadline. Compared by identity."""

    due: float
    """Time that it is due, by the loop's clock. To be moved back as one likes; whoever moves it forward must say so by
    ``watch``."""

    def is_due(self, now: float) -> None:
        """Told when the deadline has come; it must then have a later one, or have left."""
        ...


class Deadlines:
    """Tells things when they are due. Belongs to one loop."""

    __slots__ = ("_context", "_due", "_loop", "_timer", "_watched", "time")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        is_asyncios = getattr(loop.time, "__func__", None) is asyncio.BaseEventLoop.time
        self.time = time.monotonic if is_asyncios else loop.time  # which is the same for asyncio's, in one call more
        """The loop's clock, in seconds."""
        self._context = contextvars.Context()  # not that of whoever happens to set it, which would live on with it
        self._watched: dict[Deadline, None] = {}
        self._timer: asyncio.Handle | None = None
        self._due = math.inf

    def watch(self, one: Deadline) -> None:
        """Tells it when it is due, from now until ``leave``."""
        self._watched[one] = None
        if one.due < self._due:
            self._set(one.due)

    def leave(self, one: Deadline) -> None:
        """It isn't told any more. May be called again."""
        self._watched.pop(one, None)

    def watched(self) -> list[Deadline]:
        """Return all that are told."""
        return list(self._watched)

    def forget(self) -> list[Deadline]:
        """Let go of all, whose loop does nothing more, and return them."""
        watched = self.watched()
        self._watched.clear()
        return watched

    def close(self) -> None:
        """Nobody is told any more."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        # Kept beside the timer: below a millisecond uvloop's is a plain handle, which doesn't know.
        if self._timer is not None:
            self._timer.cancel()
        self._due, self._timer = due, self._loop.call_at(due, self._look, context=self._context)

    def _look(self) -> None:
        self._due, self._timer = math.inf, None
        now = self.time()
        for one in list(self._watched):
            if one.due <= now and one in self._watched:  # it may have left just now
                one.is_due(now)
        if self._watched:
            self._set(min(one.due for one in self._watched))

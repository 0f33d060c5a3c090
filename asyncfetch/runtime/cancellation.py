"""Telling cancellations apart, ending tasks, calls that outlast a cancellation; one timer for many deadlines.

Each asyncio timer costs a place in the loop's heap, and most never go off. So waits are noted, and one timer stands at
the earliest of their deadlines. When it goes off, it looks at the waits that are left.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from typing import TYPE_CHECKING, Protocol

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup


def was_cancelled() -> bool:
    """Return whether the running task is being cancelled; for use where a CancelledError was caught.

    Else it came from a cancelled future: an error like any other, for which a task group would cancel all its children.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def end_tasks(group: TaskGroup) -> None:
    """Cancel the children of an entered task group, await them and leave it, in the task that entered it.

    For the ``__aexit__`` of a class that owns its tasks: the body's exception isn't passed on, which would group it.
    """
    group.cancel_scope.cancel()
    await group.__aexit__(None, None, None)


async def outlast(call: Callable[[], Awaitable[None]], *, seconds: float) -> None:
    """Awaits ``call()``, which may go on for ``seconds`` more after any kind of cancellation of the caller.

    For a call that can only be undone once its result is known, and for undoing it. A cancelled caller gets its
    cancellation after that, and never the call's error, so only the call's effects show how it ended.
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

    __slots__ = ()

    due: float
    """Time by the loop's clock. It may be put off freely; bringing it forward needs a call of ``watch``."""

    def is_due(self, now: float) -> None:
        """Called at the deadline. Must set a later one, or leave."""


class Deadlines:
    """Calls ``is_due`` of what is watched. Belongs to one loop."""

    __slots__ = ("_context", "_due", "_loop", "_timer", "_watched", "time")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        is_asyncios = getattr(loop.time, "__func__", None) is asyncio.BaseEventLoop.time
        self.time = time.monotonic if is_asyncios else loop.time  # which is the same for asyncio's, in one call more
        """The loop's clock, in seconds."""
        self._context = contextvars.Context()  # the current one would be kept alive
        self._watched: dict[Deadline, None] = {}
        self._timer: asyncio.Handle | None = None
        self._due = math.inf

    def watch(self, one: Deadline) -> None:
        """Watches it until ``leave``."""
        self._watched[one] = None
        if one.due < self._due:
            self._set(one.due)

    def leave(self, one: Deadline) -> None:
        """Watches it no longer. Idempotent."""
        self._watched.pop(one, None)

    def watched(self) -> list[Deadline]:
        """All that are watched."""
        return list(self._watched)

    def forget(self) -> list[Deadline]:
        """Let go of all and return them, for a loop that doesn't run any more."""
        watched = self.watched()
        self._watched.clear()
        return watched

    def close(self) -> None:
        """Watch nothing any more."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due: float) -> None:
        # Kept beside the timer: below a millisecond uvloop's is a plain handle without a time.
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

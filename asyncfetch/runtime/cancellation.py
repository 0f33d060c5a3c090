"""Small helps around cancellation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["end_tasks", "was_cancelled"]


def was_cancelled() -> bool:
    """Whether somebody cancelled the running task and that isn't over.

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

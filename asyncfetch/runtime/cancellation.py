"""Telling a cancellation from a CancelledError that only looks like one."""

from __future__ import annotations

import asyncio

__all__ = ["was_cancelled"]


def was_cancelled() -> bool:
    """Whether somebody cancelled the running task and that isn't over.

    Asked where a CancelledError was caught. False means that it came out of a future which somebody else cancelled: an
    error like any other, but a task group takes it for a failure of its child and cancels all others.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

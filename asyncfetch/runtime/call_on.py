"""A callback for a loop that may have ended, from any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["call_on"]

ArgsT = TypeVarTuple("ArgsT")


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[*ArgsT], object], *args: *ArgsT) -> bool:
    """Have the loop call it soon, and tell whether the loop takes it: one that has ended, and is closed, doesn't.

    The callback runs where no task does, so it is none of anyio's: beside sniffio those find no loop there.
    """
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True

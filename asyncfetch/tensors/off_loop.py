"""Where work on bytes is done: here, or in a thread where it is much."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from anyio import to_thread

from asyncfetch.runtime.thread_call import run_to_its_end

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["off_loop"]

T = TypeVar("T")

OFF_LOOP_BYTES = 2 * 1024 * 1024
"""Checksums and copies of more than this go to a thread. Going there takes as long as a checksum of them, 0.1 ms."""


async def off_loop(nbytes: int, work: Callable[[], T], *, blocks: bool = False) -> T:
    """What ``work()`` returns, which reads or writes so many bytes, or may block; a cancelled caller waits for it."""
    if not blocks and nbytes <= OFF_LOOP_BYTES:
        return work()
    return await run_to_its_end(work, to_thread.current_default_thread_limiter())

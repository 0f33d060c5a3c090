"""Where work on bytes is done: here, or in a thread where it is much."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["off_loop"]

T = TypeVar("T")

OFF_LOOP_BYTES = 2 * 1024 * 1024
"""Checksums and copies of more than this go to a thread. Going there takes as long as a checksum of them, 0.1 ms."""


async def off_loop(nbytes: int, work: Callable[[], T], *, blocks: bool = False) -> T:
    """What ``work()`` returns, which reads or writes so many bytes, or may block; a cancelled caller waits for it."""
    return await anyio.to_thread.run_sync(work) if blocks or nbytes > OFF_LOOP_BYTES else work()

"""A merge's pieces in this process: coroutines on its loop, what blocks in threads.

Not in processes of its own, which were measured: to start one takes 1.1 s of CPU for imports. For that the metadata of
25 sources of 10 episodes are read (44 ms each), or 800 episodes of 60 frames written and summarised (1.3 ms each); the
header of a video of 38,400 frames takes 43 ms, and the pictures are copied without the interpreter. Where many more
episodes and processors are at hand, a local Ray does the same pieces in processes.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncfetch.fetch import Fetcher
from asyncfetch.merge.kernel import Workplace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.kernel import Piece

__all__ = ["InProcess"]


class InProcess:
    """An Executor."""

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_Loop]:
        """One fetcher for all pieces."""
        async with Fetcher(fetch) as fetcher:
            yield _Loop(Workplace(fetcher, wrote), workers or os.cpu_count() or 1)


class _Loop:
    def __init__(self, place: Workplace, workers: int) -> None:
        self.workers = workers
        self.fetcher = place.fetcher
        self._place = place

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        return await piece(self._place, *arguments)

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        return value

"""The places where pieces of a merge run: in this process, in others, or on a cluster.

A piece is a coroutine function at the top of a module, called with a ``WorkerSetup`` and arguments that pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch import Fetcher

Piece = Any
"""``async def piece(setup: WorkerSetup, *arguments)``, at the top of a module."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The things that a piece finds where it runs."""

    fetcher: Fetcher
    """Reads the sources, and writes where the destination isn't local."""
    wrote: Callable[[str, int], object]
    """Called with the place of a file that is being written, and its bytes so far."""


class WorkerPool(Protocol):
    """Workers that are there. What ``run`` returns may be a reference; ``get`` brings the value here."""

    workers: int
    """Pieces that run at a time."""
    fetcher: Fetcher
    """The fetcher of this process, for the work around the pieces."""

    def expect(self, seconds: float) -> None:
        """Expect so much work now: what one processor takes for it, about; 0 where it must stay in this process."""
        ...

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        """Return the piece's value, or raise its error. Arguments may be what earlier calls returned."""
        ...

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        """Return what ``run`` returned, in this process."""
        ...


class Executor(Protocol):
    """The place where a merge's pieces run."""

    def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AbstractAsyncContextManager[WorkerPool]:
        """Open the workers for one merge. They are gone when the block is left.

        Args:
            fetch: How the sources are read.
            workers: How many; None: as many as there are processors.
            wrote: Called with what the pieces write, as far as the executor learns of it.
        """
        ...

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
    """The surroundings of a piece in its process."""

    fetcher: Fetcher
    """Reads the sources, and writes to a destination that isn't local."""
    wrote: Callable[[str, int], object]
    """Called with the place of a file that is being written, and its bytes so far."""


class WorkerPool(Protocol):
    """Open workers. ``run`` may return a reference, of which ``get`` gives the value."""

    workers: int
    """Pieces that run at a time."""
    fetcher: Fetcher
    """The fetcher of this process, for the work around the pieces."""

    def expect(self, seconds: float) -> None:
        """Expect about so many seconds of one processor's work now; 0 for work that must stay in this process."""
        ...

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        """The piece's value, or a reference to it. Arguments may be results of earlier calls."""
        ...

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        """The value of a result of ``run``, in this process."""
        ...


class Executor(Protocol):
    """The place where a merge's pieces run."""

    def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AbstractAsyncContextManager[WorkerPool]:
        """Open the workers for one merge. They are gone when the block is left.

        Args:
            fetch: Configuration for reading the sources.
            workers: Number of workers; None for the number of processors.
            wrote: ``WorkerSetup.wrote``, called as far as the executor hears of the pieces' writes.
        """
        ...

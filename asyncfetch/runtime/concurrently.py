"""Calls side by side, whose first error comes out alone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio

from asyncfetch.errors import AsyncFetchError
from asyncfetch.runtime.failures import copied, kept

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from anyio.abc import TaskGroup

__all__ = ["Eventual", "RunSync", "gather", "ungrouped"]

T = TypeVar("T")


class RunSync(Protocol):
    """Runs a blocking call off the loop, as ``anyio.to_thread.run_sync`` does."""

    def __call__(self, func: Callable[[], T], /) -> Awaitable[T]:
        """Its result or its error, once it has ended; a cancelled caller waits for that too."""
        ...


@contextmanager
def ungrouped() -> Iterator[None]:
    """Around a task group: what comes out is the first error alone, not a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


async def gather(*calls: Callable[[], Awaitable[T]]) -> list[T]:
    """The results of all calls, run side by side, in the order of the arguments. The first error cancels the rest."""
    if len(calls) == 1:
        return [await calls[0]()]
    results: dict[int, T] = {}

    async def run(position: int, call: Callable[[], Awaitable[T]]) -> None:
        results[position] = await call()

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for position, call in enumerate(calls):
                tasks.start_soon(run, position, call)
    return [results[position] for position in range(len(calls))]


class Eventual(Generic[T]):
    """A call under way in somebody's task group. An error of ours is kept for those who ask for the result."""

    def __init__(self, tasks: TaskGroup, call: Callable[[], Awaitable[T]]) -> None:
        self._done = anyio.Event()
        self._results: list[T] = []
        self._error: AsyncFetchError | None = None
        tasks.start_soon(self._run, call)

    async def _run(self, call: Callable[[], Awaitable[T]]) -> None:
        try:
            self._results.append(await call())
        except AsyncFetchError as error:
            self._error = kept(error)
        self._done.set()

    async def get(self) -> T:
        """The result, as soon as it is there; or the call's error."""
        await self._done.wait()
        if self._error is not None:
            raise copied(self._error)
        return self._results[0]

"""Many ranges at once: bounded workers over one iterator, the first error ends all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self, TypeVar

import anyio

from asyncfetch.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from types import TracebackType

    from anyio.abc import TaskGroup

    from asyncfetch.ranges import ByteRange

__all__ = ["RangeStream", "for_each"]

T = TypeVar("T")


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, workers: int) -> None:
    """Awaits ``work(item)`` for every item, at most ``workers`` at a time, started in the items' order.

    Items are drawn one by one as workers get free, so the iterable may be long. The first exception, of ``work`` or of
    the iterable, cancels the rest and is raised by itself, not in a group.
    """
    iterator = iter(items)
    failure: Exception | None = None
    started = 1

    async def worker(group: TaskGroup) -> None:
        nonlocal failure, started
        try:
            for item in iterator:
                if started < workers:
                    started += 1
                    group.start_soon(worker, group)
                await work(item)
        except Exception as error:  # noqa: BLE001 - raised below, after the others have ended
            failure = failure or error
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(worker, group)
    if failure is not None:
        raise failure


class RangeStream:
    """Ranges as they arrive. Enter it, then iterate once; leaving it cancels and awaits what is under way.

    A finished range waits in its worker until it is taken, so at most ``workers`` of them are held.
    """

    def __init__(
        self, ranges: Iterable[ByteRange], fetch: Callable[[ByteRange], Awaitable[memoryview]], *, workers: int
    ) -> None:
        self._ranges = ranges
        self._fetch = fetch
        self._workers = workers
        self._failure: Exception | None = None
        self._entered = False

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ClosedError("this stream of ranges was entered before: ask fetch_stream for another one")
        self._entered = True
        self._send, self._receive = anyio.create_memory_object_stream[tuple[int, memoryview]](0)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._supply)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._group.cancel_scope.cancel()
        self._receive.close()
        # The group is told of a cancellation, which is its business, but not of the consumer's own error: it would
        # wrap that in a group of one.
        if isinstance(exc, asyncio.CancelledError):
            return await self._group.__aexit__(exc_type, exc, traceback)
        await self._group.__aexit__(None, None, None)
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, memoryview]:
        """The next range that has arrived; the first error ends the stream and is raised here."""
        if not self._entered:
            raise ClosedError("enter the stream of ranges first: async with fetcher.fetch_stream(...) as stream")
        try:
            return await self._receive.receive()
        except anyio.EndOfStream:
            if self._failure is not None:
                raise self._failure from None
            raise StopAsyncIteration from None
        except anyio.ClosedResourceError:
            raise ClosedError("the stream of ranges was left") from None

    async def _supply(self) -> None:
        async def work(item: tuple[int, ByteRange]) -> None:
            index, wanted = item
            await self._send.send((index, await self._fetch(wanted)))

        # An error must not leave this task: it would cancel the consumer wherever it awaits, and not tell it why.
        with self._send:
            try:
                await for_each(enumerate(self._ranges), work, workers=self._workers)
            except Exception as error:  # noqa: BLE001 - raised where the consumer asks for the next range
                self._failure = error

"""Many ranges at once, in the order of their arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

from asyncfetch.errors import ClosedError
from asyncfetch.fetch.arguments import byte_ranges
from asyncfetch.fetch.limiter import one_caller
from asyncfetch.ranges import ByteRange
from asyncfetch.runtime.cancellation import end_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from typing import Self

    from anyio.streams.memory import MemoryObjectSendStream

__all__ = ["CachedRangeStream"]

MAX_CONCURRENT: Final = 256
"""Ranges of one call under way at a time: four hosts at their default limit of 64 requests. It bounds tasks, and the
bytes that wait for a slow consumer."""


class CachedRangeStream:
    """(index, view) pairs as they arrive, each range read once however often it is listed.

    Entered once, and left by the same task; leaving cancels what is under way and awaits it. The first error is raised
    where the pairs are, as it was raised; then iteration is over.

    Args:
        ranges: What to read; the indices count in it.
        fetch: Reads one range.
    """

    def __init__(self, ranges: Iterable[ByteRange], fetch: Callable[[ByteRange], Awaitable[memoryview]]) -> None:
        self._indices: dict[ByteRange, list[int]] = {}
        for index, byte_range in enumerate(byte_ranges(ranges)):
            self._indices.setdefault(byte_range, []).append(index)
        self._fetch = fetch
        self._left = len(self._indices)
        self._ready: list[tuple[int, memoryview]] = []
        self._entered = False
        self._is_open = False

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ClosedError("this stream of ranges was entered before: ask fetch_stream for another one")
        self._entered = True
        self._send, self._receive = anyio.create_memory_object_stream[tuple[ByteRange, memoryview] | Exception]()
        self._group = await anyio.create_task_group().__aenter__()
        self._is_open = True
        todo = iter(self._indices)
        with one_caller():
            for _ in range(min(self._left, MAX_CONCURRENT)):
                self._group.start_soon(self._work, todo, self._send)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_open = False
        try:
            await end_tasks(self._group)
        finally:
            self._send.close()
            self._receive.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, memoryview]:
        if not self._is_open:
            raise ClosedError("this stream of ranges is read outside of its async with block")
        if not self._ready:
            if not self._left:
                raise StopAsyncIteration
            arrived = await self._receive.receive()
            if isinstance(arrived, Exception):
                self._left = 0
                try:
                    raise arrived
                finally:
                    del arrived  # else error -> traceback -> this frame -> error is a cycle
            byte_range, view = arrived
            self._left -= 1
            self._ready = [(index, view) for index in reversed(self._indices[byte_range])]
        return self._ready.pop()

    async def _work(
        self,
        todo: Iterator[ByteRange],  # shared by all workers: each takes the next
        send: MemoryObjectSendStream[tuple[ByteRange, memoryview] | Exception],
    ) -> None:
        for byte_range in todo:
            try:
                view = await self._fetch(byte_range)
            except Exception as error:  # noqa: BLE001 - it is the consumer's, and alone, not in a group
                await send.send(error)
                return
            await send.send((byte_range, view))

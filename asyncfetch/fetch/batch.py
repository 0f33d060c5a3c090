"""Many ranges at once: bounded workers, the first error ends all."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self, TypeVar

import anyio

from asyncfetch.errors import ClosedError
from asyncfetch.fetch.limiter import one_caller
from asyncfetch.fetch.reader import byte_ranges, closed_range
from asyncfetch.ranges import ByteRange, Request, lie_apart, own_request, plan_requests
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.reader import WritableBuffer

WORKERS_PER_REQUEST = 2
"""Workers of a batch per request in flight: so that a limiter that opens always finds one waiting."""
MAX_CONCURRENT = 256
"""Ranges of one call that are each read on their own, under way at a time: four hosts at their default limit of 64
requests. It bounds tasks, and the bytes that wait for a slow consumer."""
RANGES_ON_THE_LOOP = 1000
"""Most ranges gone through on the loop, more in a thread. One takes about 2 us to plan, going to a thread 100."""

T = TypeVar("T")
R = TypeVar("R")


def server_of(url: str) -> str:
    """Return what keeps ranges apart, so that one server's don't wait for another's: the url before its path."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if separator else ""


def server_asked(request: Request) -> str:
    """Return the ``server_of`` a request."""
    return server_of(request.range.url)


async def through(count: int, work: Callable[[], T]) -> T:
    """Return what ``work()`` does, which goes through so many ranges: here, or in a thread so that the loop goes on."""
    return work() if count <= RANGES_ON_THE_LOOP else await run_sync(work)


def plan_batch(ranges: Iterable[ByteRange], config: FetchConfig) -> list[Request]:
    """The requests that bring all ranges, for each server in the order in which they are first needed."""
    ranges = list(ranges)
    if lie_apart(ranges, config.max_gap_bytes):
        return [own_request(one) for one in ranges]
    by_server: dict[str, list[ByteRange]] = {}
    by_url: dict[str, list[ByteRange]] = {}
    for one in ranges:
        of_its_server = by_url.get(one.url)
        if of_its_server is None:
            of_its_server = by_url[one.url] = by_server.setdefault(server_of(one.url), [])
        of_its_server.append(one)
    return [
        request
        for of_one_server in by_server.values()
        for request in plan_requests(
            of_one_server,
            max_gap_bytes=config.max_gap_bytes,
            max_span_bytes=config.max_span_bytes,
            streams=config.max_requests_per_host,
        )
    ]


async def for_each(
    items: Iterable[T], work: Callable[[T], Awaitable[R]], *, workers: int, key: Callable[[T], str] = lambda _: ""
) -> list[R]:
    """The results of ``work(item)`` for every item, in their order; at most ``workers`` run at a time of one key.

    They begin in the items' order; those of different keys don't wait for each other. At limiters all are one caller's.
    The first exception cancels the rest and is raised by itself, not in a group.
    """
    queues: dict[str, list[tuple[int, T]]] = {}
    for number, item in enumerate(items):
        queues.setdefault(key(item), []).append((number, item))
    results: dict[int, R] = {}
    failure: Exception | None = None

    async def worker(queue: Iterator[tuple[int, T]]) -> None:
        nonlocal failure
        try:
            for number, item in queue:
                results[number] = await work(item)
        except Exception as error:  # noqa: BLE001 - raised below, after the others have ended
            failure = failure or error
            group.cancel_scope.cancel()

    with one_caller():
        async with anyio.create_task_group() as group:
            for queue in queues.values():
                shared = iter(queue)
                for _ in range(min(workers, len(queue))):
                    group.start_soon(worker, shared)
    try:
        if failure is not None:
            raise failure
        return [results[number] for number in range(len(results))]
    finally:
        failure = None  # else error -> traceback -> a worker's frame -> error is a cycle, and what it holds stays


class RangeStream:
    """Ranges as they arrive. Enter it, then iterate once; leaving it cancels and awaits what is under way.

    What a request brought waits in its worker until it is taken, so at most ``workers`` of them are held for each key.
    """

    def __init__(
        self,
        ranges: Sequence[ByteRange],
        plan: Callable[[Sequence[ByteRange]], Awaitable[list[Request]]],
        fetch: Callable[[Request], Awaitable[Mapping[ByteRange, memoryview]]],
        *,
        key: Callable[[Request], str],
        workers: int,
    ) -> None:
        """``plan`` gives the requests that bring all of ``ranges``; ``fetch`` gives what one of them serves.

        ``key`` and ``workers`` are those of ``for_each``.
        """
        self._ranges = ranges
        self._indices: dict[ByteRange, list[int]] = {}
        for index, one in enumerate(ranges):
            self._indices.setdefault(one, []).append(index)
        self._plan = plan
        self._fetch = fetch
        self._key = key
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
        self._send.close()
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
            failure, self._failure = self._failure, None
        except anyio.ClosedResourceError:
            raise ClosedError("the stream of ranges was left") from None
        try:
            raise failure or StopAsyncIteration
        finally:
            del failure  # see ``for_each``

    async def _supply(self) -> None:
        async def work(request: Request) -> None:
            for one, view in (await self._fetch(request)).items():
                for index in self._indices[one]:
                    await self._send.send((index, view))

        # An error must not leave this task: it would cancel the consumer wherever it awaits, and not tell it why.
        with self._send:
            try:
                requests = await self._plan(self._ranges)
                await for_each(requests, work, key=self._key, workers=self._workers)
            except Exception as error:  # noqa: BLE001 - raised where the consumer asks for the next range
                self._failure = error


def each_on_its_own(ranges: Iterable[ByteRange], fetch: Callable[[ByteRange], Awaitable[memoryview]]) -> RangeStream:
    """The stream of ranges of which ``fetch`` reads one at a time, each once however often it is listed."""

    async def plan(wanted: Sequence[ByteRange]) -> list[Request]:
        return [own_request(one) for one in dict.fromkeys(wanted)]

    async def answer(request: Request) -> dict[ByteRange, memoryview]:
        return {request.range: await fetch(request.range)}

    return RangeStream(byte_ranges(ranges), plan, answer, key=lambda _: "", workers=MAX_CONCURRENT)


class RangeByRange(ABC):
    """The verbs of a reader that reads each range on its own."""

    @abstractmethod
    def _check(self) -> object:
        """Raise ClosedError unless it is open."""

    @abstractmethod
    async def _fetch_range(self, wanted: ByteRange) -> memoryview:
        """The bytes of a range, read-only."""

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Bytes [start, stop) of the object, read-only."""
        return await self._fetch_range(ByteRange(url, start, stop))

    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        """Bytes [start, stop), copied into the caller's buffer of exactly that length."""
        wanted, target = closed_range(url, start, stop, buffer)
        view = await self._fetch_range(wanted)
        if view:
            target[:] = view

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        """All ranges, in input order; equal ones are fetched once. The first error cancels the rest."""
        wanted = byte_ranges(ranges)
        async with self.fetch_stream(wanted) as stream:
            views = {index: view async for index, view in stream}
        return [views[index] for index in range(len(wanted))]

    def fetch_stream(self, ranges: Iterable[ByteRange]) -> RangeStream:
        """(index in ``ranges``, whole range) pairs as they arrive. Leaving the context cancels what is under way."""
        self._check()
        return each_on_its_own(ranges, self._fetch_range)

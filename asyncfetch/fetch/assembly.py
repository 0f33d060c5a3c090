"""How the bytes of a range come together: by a request of its own, one shared with other ranges, or several at once."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio.lowlevel

from asyncfetch.errors import FetchError, InvalidResponse, RangeNotSatisfiable
from asyncfetch.fetch.batch import WORKERS_PER_REQUEST, for_each, plan_batch
from asyncfetch.fetch.download import memory_for
from asyncfetch.fetch.joining import MAX_SHARED_BYTES, Joining
from asyncfetch.fetch.objects import strong_etag
from asyncfetch.fetch.parts import ALONE, Company, PartSizes
from asyncfetch.fetch.responses import Wanted
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.fetch.scatter import Scatter
from asyncfetch.ranges import ObjectInfo, split_range

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.hosts import Host
    from asyncfetch.fetch.objects import ObjectMemory
    from asyncfetch.fetch.scatter import Target
    from asyncfetch.ranges import ByteRange, Request
    from asyncfetch.runtime.memory_pool import MemoryPool

__all__ = ["Assembly", "concerns_some"]

PIECES_A_TURN = 100
"""Ranges that are cut out of a request's bytes in one turn of the loop: 0.4 ms."""


class Read(Protocol):
    """Reads one range of an object by one request and its repeats."""

    def __call__(
        self,
        url: str,
        wanted: Wanted,
        buffer: Target | None = None,
        *,
        asked: Wanted | None = None,
        part_of: ObjectInfo | None = None,
    ) -> Awaitable[tuple[ObjectInfo, memoryview]]:
        """The object and the bytes, where those are in one view; the arguments are Download's."""
        ...


class Assembly:
    """Brings ranges that aren't empty, by as few requests as bring them about as soon as can be."""

    def __init__(self, config: FetchConfig, objects: ObjectMemory, memory: MemoryPool, read: Read) -> None:
        self._config = config
        self._objects = objects
        self._memory = memory
        self._read = read
        self._parts = PartSizes(config)
        self._undivided_bytes = min(2 * config.min_part_bytes, config.part_bytes + 1)
        self._workers = WORKERS_PER_REQUEST * config.max_requests_per_host
        self._apart = 0
        shared = replace(config, max_span_bytes=min(config.max_span_bytes, MAX_SHARED_BYTES))
        self._joining = Joining(partial(plan_batch, config=shared), self._fetch_shared)

    def came_from(self, url: str, host: Host, length: int) -> None:
        """Takes notice of the host that ``length`` bytes of ``url`` came from by one request."""
        self._parts.came_from(url, host, length)

    async def fetch(self, wanted: ByteRange, buffer: Target | None = None) -> tuple[ObjectInfo, memoryview]:
        """A range that isn't empty, by one request with others that are asked for just now where that saves one.

        The bytes are not among what is returned where they land in several places.
        """
        if wanted.stop is None or not self._config.max_span_bytes:
            return await self.fetch_alone(wanted, buffer)
        shared, company = await self._joining.ask(wanted)
        if shared is None:
            if wanted.stop - wanted.start < self._undivided_bytes:
                return await self._read(wanted.url, Wanted(wanted.start, wanted.stop), buffer)
            return await self.fetch_alone(wanted, buffer, company=company)
        request, outcome = shared.request, await shared.body.outcome()
        if isinstance(outcome, tuple):
            info, scatter = outcome
            if buffer is None:
                return info, scatter.piece(wanted)
            buffer[:] = scatter.cut(wanted)
            return info, buffer.toreadonly()
        if not isinstance(outcome, FetchError):
            raise copy(outcome)  # the traceback of each is its own
        if len(request.serves) == 1 or not concerns_some(outcome):
            raise outcome.about(wanted.start, wanted.stop) from outcome.__cause__
        return await self.fetch_alone(wanted, buffer, company=company)

    async def fetch_all(self, request: Request) -> dict[ByteRange, memoryview]:
        """All ranges that a request serves, which are several, each in memory of its own."""
        scatter = Scatter(request, self._memory)
        await self.fetch(request.range, scatter)
        pieces: dict[ByteRange, memoryview] = {}
        for one in request.serves:
            pieces[one] = scatter.piece(one)
            if len(pieces) % PIECES_A_TURN == 0:  # threads for this, of several requests, would keep the loop waiting
                await anyio.lowlevel.checkpoint()
        return pieces

    async def fetch_apart(self, request: Request) -> dict[ByteRange, memoryview]:
        """The same by requests of their own, side by side: an error is then about one range."""
        views: dict[ByteRange, memoryview] = {}
        requests = len(request.serves)

        async def work(item: tuple[int, ByteRange]) -> None:
            ahead, one = item
            _, views[one] = await self.fetch_alone(one, company=Company(requests, ahead))

        self._apart += 1
        try:
            # A batch has as many workers, each of which may get here: all together they have about as many again.
            workers = max(1, self._workers // self._apart)
            await for_each(enumerate(request.serves), work, key=lambda item: item[1].url, workers=workers)
        finally:
            self._apart -= 1
        return views

    async def _fetch_shared(self, request: Request, company: Company) -> tuple[ObjectInfo, Scatter]:
        """What a request for several calls brings."""
        scatter = Scatter(request, self._memory)
        info, _ = await self.fetch_alone(request.range, scatter, company=company)
        return info, scatter

    async def fetch_alone(
        self, wanted: ByteRange, buffer: Target | None = None, *, company: Company = ALONE
    ) -> tuple[ObjectInfo, memoryview]:
        """A range that isn't empty, by requests of its own: several where that is sooner."""
        if wanted.stop is not None:
            length = wanted.stop - wanted.start
            part_bytes = self._parts.choose(wanted.url, length, company)
            info = await self._divisible(wanted) if length > part_bytes else None
            if info is not None:
                try:
                    return info, await self._fetch_parts(wanted, info, buffer, part_bytes)
                except InvalidResponse as error:
                    if not error.ignores_range:
                        raise
                    self._objects.note_whole(wanted.url)
        return await self._read(wanted.url, Wanted(wanted.start, wanted.stop), buffer)

    async def fetch_version(self, wanted: ByteRange, version: ObjectInfo, buffer: memoryview) -> None:
        """A closed range of just this version of its object into ``buffer``."""
        length = len(buffer)
        whole = self._objects.comes_whole(wanted.url)
        part_bytes = length if whole else self._parts.choose(wanted.url, length, ALONE)
        await self._fetch_parts(wanted, version, buffer, part_bytes)

    async def _divisible(self, wanted: ByteRange) -> ObjectInfo | None:
        """The version of the object that a range's parts can be taken from; None where it must come in one piece."""
        assert wanted.stop is not None
        info = self._objects.get(wanted.url)
        if info is None and wanted.stop - wanted.start > self._config.part_bytes:
            asked = Wanted(wanted.start, wanted.stop)
            info, _ = await self._read(wanted.url, Wanted(0, 1, clamp=True), asked=asked)
        if info is None or strong_etag(info) is None or wanted.stop > info.size:
            return None
        if self._objects.comes_whole(wanted.url):
            return None
        return info

    async def _fetch_parts(
        self, wanted: ByteRange, info: ObjectInfo, buffer: Target | None, part_bytes: int
    ) -> memoryview:
        """A range that lies within this version of its object, by several requests at once."""
        assert wanted.stop is not None
        asked = Wanted(wanted.start, wanted.stop)
        view = self._take(wanted) if buffer is None else buffer

        async def work(part: tuple[int, int]) -> None:
            start, stop = part
            place = view[start - wanted.start : stop - wanted.start]
            await self._read(wanted.url, Wanted(start, stop), place, asked=asked, part_of=info)

        parts = split_range(wanted, part_bytes)
        await for_each(parts, work, key=lambda _: wanted.url, workers=self._workers)
        return view.toreadonly()

    def _take(self, wanted: ByteRange) -> memoryview:
        assert wanted.stop is not None
        nbytes = wanted.stop - wanted.start
        try:
            return memory_for(nbytes, self._memory)
        except AttemptFailed as failure:
            raise failure.error(url=wanted.url, start=wanted.start, stop=wanted.stop, attempts=0) from failure.__cause__


def concerns_some(error: FetchError) -> bool:
    """Whether an error of a request for several ranges may not be one for each of them."""
    return isinstance(error, RangeNotSatisfiable) or (isinstance(error, InvalidResponse) and error.ignores_range)

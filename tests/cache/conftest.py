"""What the readers that the caches' tests are built on have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from asyncfetch.errors import ObjectChanged

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.fetch.reader import WritableBuffer
    from asyncfetch.ranges import ByteRange, ObjectInfo


class PinningReader(ABC):
    """A VersionedReader made of its ``read_into``, whose objects are all of one size.

    The first version that was seen of an object is pinned; another one is an error once. Verbs that nobody calls here
    aren't there.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.pinned: dict[str, ObjectInfo] = {}

    @abstractmethod
    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo: ...

    def pin(self, found: ObjectInfo, known: ObjectInfo | None) -> ObjectInfo:
        """What was found, which is pinned; ObjectChanged where the version that was known is another one."""
        if known is not None and known.etag != found.etag:
            self.pinned.pop(found.url, None)
            raise ObjectChanged("replaced", url=found.url)
        return self.pinned.setdefault(found.url, found)

    def known(self, url: str) -> ObjectInfo | None:
        return self.pinned.get(url)

    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        await self.read_into(url, start, stop, buffer)

    async def stat(self, url: str) -> ObjectInfo:
        return await self.read_into(url, 0, 1, bytearray(1))

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        buffer = bytearray((self.size_bytes if stop is None else stop) - start)
        await self.read_into(url, start, start + len(buffer), buffer)
        return memoryview(buffer)

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        buffer = bytearray(max_bytes)
        return await self.read_into(url, 0, max_bytes, buffer), memoryview(buffer)

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        buffer = bytearray(max_bytes)
        return await self.read_into(url, self.size_bytes - max_bytes, self.size_bytes, buffer), memoryview(buffer)

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        raise NotImplementedError

    def fetch_stream(
        self, ranges: Iterable[ByteRange]
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[int, memoryview]]]:
        raise NotImplementedError

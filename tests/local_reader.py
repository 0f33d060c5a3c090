"""A reader of local files that writes down what it is asked."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from asyncfetch.errors import NotFound, RangeNotSatisfiable
from asyncfetch.ranges import ByteRange, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from asyncfetch.fetch.reader import WritableBuffer


@dataclass
class LocalReader:
    """A RangeReader over paths."""

    log: list[tuple[str, int, int]] = field(default_factory=list)
    """(path, start, stop) of every range that was read, and of every file that wasn't there (path, 0, 0)."""
    limiter: anyio.Event | None = None
    """Where set, every read waits for it."""

    @property
    def bytes_read(self) -> int:
        return sum(stop - start for _, start, stop in self.log)

    def of(self, part: str) -> list[tuple[int, int]]:
        """The ranges read of files with this in their path."""
        return [(start, stop) for path, start, stop in self.log if part in path]

    async def stat(self, url: str) -> ObjectInfo:
        return ObjectInfo(url, self._path(url).stat().st_size)

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        await anyio.lowlevel.checkpoint()
        if self.limiter is not None:
            await self.limiter.wait()
        data = self._path(url).read_bytes()
        size = len(data)
        begin, end = (max(0, size + start) if start < 0 else start), (size if stop is None else stop)
        if end > size or begin > size:
            raise RangeNotSatisfiable("no such range", size=size, url=url, start=start, stop=stop)
        self.log.append((url, begin, end))
        return memoryview(data)[begin:end].toreadonly()

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        return [await self.fetch(wanted.url, wanted.start, wanted.stop) for wanted in ranges]

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        info = await self.stat(url)
        return info, await self.fetch(url, 0, min(max_bytes, info.size))

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        return await self.stat(url), await self.fetch(url, -max_bytes)

    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        buffer[:] = await self.fetch(url, start, stop)

    @asynccontextmanager
    async def fetch_stream(self, ranges: Iterable[ByteRange]) -> AsyncIterator[AsyncIterator[tuple[int, memoryview]]]:
        async def items() -> AsyncIterator[tuple[int, memoryview]]:
            for index, view in enumerate(await self.fetch_many(ranges)):
                yield index, view

        yield items()

    def _path(self, url: str) -> Path:
        path = Path(url)
        if not path.is_file():
            self.log.append((url, 0, 0))
            raise NotFound("no such file", url=url)
        return path

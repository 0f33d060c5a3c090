"""Contents to be put somewhere: bytes, a local file, or what an async iterator brings. Read once, start to end."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncfetch.errors import AccessDenied, ConfigError, FetchError, NotFound, ObjectChanged
from asyncfetch.fetch.reader import has_objects
from asyncfetch.runtime.threads import run_to_its_end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import anyio

    from asyncfetch.runtime.memory_pool import MemoryPool

BytesLike: TypeAlias = "bytes | bytearray | memoryview"
Content: TypeAlias = "BytesLike | str | os.PathLike[str] | AsyncIterable[BytesLike]"
"""All that ``put`` takes: bytes, the path of a local file, or an async iterator of bytes. Whatever else has a buffer of
bytes, such as a NumPy array, goes, too."""


class UploadSource(ABC):
    """Gives its bytes in order, once."""

    size: int | None = None
    """Bytes in all; None where that isn't known before the end."""
    at_end = False
    """True if all of it was read."""

    @abstractmethod
    async def read(self, max_bytes: int) -> memoryview:
        """The next bytes: ``max_bytes`` of them, fewer only at the end. They stay what they are as long as needed.

        FetchError where there is no memory for them.
        """


@asynccontextmanager
async def open_source(
    content: Content, memory: MemoryPool, limiter: anyio.CapacityLimiter
) -> AsyncIterator[UploadSource]:
    """The source that ``content`` is; ConfigError for what is none.

    What isn't in memory already is read to ``memory``, files in threads within ``limiter``.
    """
    if isinstance(content, str | os.PathLike):
        file = _FileSource(os.fsdecode(content), memory, limiter)
        try:
            await run_to_its_end(file.open, limiter)
            yield file
        finally:
            file.close()
    elif isinstance(content, AsyncIterable):
        items = _IteratedSource(content, memory)
        await items.advance()
        yield items
    else:
        yield _BytesSource(_bytes_of(content, "the source"))


def _memory_for(nbytes: int, memory: MemoryPool) -> memoryview:
    try:
        return memory.take(nbytes).data
    except MemoryError as error:
        message = f"there is no memory for the next {nbytes} bytes of the source"
        raise FetchError(f"{message}: free some, or lower S3Config.upload_part_bytes") from error


def _bytes_of(content: Any, what: str) -> memoryview:  # noqa: ANN401 - what it is turns out
    try:
        view = memoryview(content)
    except (TypeError, ValueError) as error:
        message = f"{what} must be bytes, a path or an async iterator of bytes, not {type(content).__name__}"
        raise ConfigError(message) from error
    if not view.c_contiguous:
        raise ConfigError(f"{what} must be contiguous in memory: copy it first, by bytes(...)")
    if has_objects(view):
        raise ConfigError(f"{what} holds Python objects, whose bytes are addresses: give it a type of numbers or text")
    # A view with a zero in its shape can't be cast.
    return view.cast("B").toreadonly() if view.nbytes else memoryview(b"")


class _BytesSource(UploadSource):
    """Bytes of the caller, who leaves them as they are until the end."""

    def __init__(self, view: memoryview) -> None:
        self._rest = view
        self.size = len(view)
        self.at_end = not view

    async def read(self, max_bytes: int) -> memoryview:
        some, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        self.at_end = not self._rest
        return some


class _FileSource(UploadSource):
    """A local file, which must stay the same meanwhile. Read in threads."""

    def __init__(self, path: str, memory: MemoryPool, limiter: anyio.CapacityLimiter) -> None:
        self._path = path
        self._memory = memory
        self._limiter = limiter
        self._descriptor = -1
        self._position = 0

    def close(self) -> None:
        """Close the file, where it is open."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    async def read(self, max_bytes: int) -> memoryview:
        return await run_to_its_end(partial(self._read, max_bytes), self._limiter)

    def open(self) -> None:
        """Open the file. Runs in a thread."""
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for its writer.
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._status = os.fstat(self._descriptor)
        except (OSError, ValueError) as error:
            raise self._failure(error) from error
        if not stat.S_ISREG(self._status.st_mode):
            raise NotFound("the source is there, but it is no regular file", url=self._path)
        self.size = self._status.st_size
        self._look_for_end()

    def _read(self, max_bytes: int) -> memoryview:
        wanted = min(max_bytes, self._status.st_size - self._position)
        view, filled = _memory_for(wanted, self._memory), 0
        try:
            while filled < wanted:
                count = os.preadv(self._descriptor, [view[filled:]], self._position + filled)
                if count == 0:
                    raise self._changed()
                filled += count
            now = os.fstat(self._descriptor)
        except OSError as error:
            raise self._failure(error) from error
        if (now.st_mtime_ns, now.st_size) != (self._status.st_mtime_ns, self._status.st_size):
            raise self._changed()
        self._position += filled
        self._look_for_end()
        return view.toreadonly()

    def _look_for_end(self) -> None:
        """Look whether all of it was read; FetchError where there is more of it than the system says."""
        self.at_end = self._position == self.size
        if not self.at_end:
            return
        try:
            more = os.pread(self._descriptor, 1, self._position)
            now = os.fstat(self._descriptor)
        except OSError as error:
            raise self._failure(error) from error
        if more and now.st_size > self._position:
            raise self._changed()
        if more:
            message = "the source is longer than the system says, as files of /proc are: read it and put its bytes"
            raise FetchError(message, url=self._path)

    def _changed(self) -> ObjectChanged:
        return ObjectChanged("the source was written to while it was being read: put it again", url=self._path)

    def _failure(self, error: OSError | ValueError) -> FetchError:
        match error:
            case FileNotFoundError() | NotADirectoryError():
                return NotFound("there is no such file to put: check the path of the source", url=self._path)
            case PermissionError():
                return AccessDenied("this user may not read the source", url=self._path)
            case _:
                return FetchError(f"reading the source failed: {error}", url=self._path)


class _IteratedSource(UploadSource):
    """All that an async iterator brings, put together. It is asked for more in the task that reads."""

    def __init__(self, items: AsyncIterable[BytesLike], memory: MemoryPool) -> None:
        self._items: AsyncIterator[BytesLike] = aiter(items)
        self._memory = memory
        self._item = memoryview(b"")

    async def read(self, max_bytes: int) -> memoryview:
        if self.at_end:
            return self._item
        view, filled = _memory_for(max_bytes, self._memory), 0
        while filled < max_bytes and not self.at_end:
            count = min(max_bytes - filled, len(self._item))
            view[filled : filled + count] = self._item[:count]  # copied: its owner may use the memory again
            filled += count
            self._item = self._item[count:]
            if not self._item:
                await self.advance()
        return view[:filled].toreadonly()

    async def advance(self) -> None:
        """Go to the next item that isn't empty: then it is known whether there is one."""
        async for item in self._items:
            self._item = _bytes_of(item, "what the source brings")
            if self._item:
                return
        self.at_end = True

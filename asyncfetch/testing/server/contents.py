"""Where a range server's bytes are: a mapping in memory, or a directory."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Protocol

import anyio.to_thread

from asyncfetch.testing.server.answers import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Contents", "Directory", "InMemory", "StoredObject"]


class StoredObject(Protocol):
    """One object in the state it had when it was looked up."""

    version: Version
    """Its size, ETag and date."""

    async def read(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes [start, stop), which lie within its size.

        Raises:
            OSError: It was changed or removed since it was looked up.
        """
        ...


class Contents(Protocol):
    """Objects by path."""

    async def find(self, path: str) -> StoredObject | None:
        """The object at ``path`` ("/a/b.bin", decoded), or None.

        Raises:
            PermissionError: It is there, but may not be read.
        """
        ...


class _BytesObject:
    def __init__(self, content: bytes, version: Version) -> None:
        self._content, self.version = content, version

    async def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self._content)[start:stop]


class InMemory:
    """The values of a mapping; keys with or without a leading slash.

    The mapping is read at each request: change a value, and the next request finds another version.
    """

    def __init__(self, objects: Mapping[str, bytes], etag: Callable[[bytes], str] | None = None) -> None:
        """``etag`` gives the tag of a content, where it isn't a hash; it may be slow."""
        self._objects = objects
        self._last_modified = formatdate(time.time(), usegmt=True)
        self._etag = etag or functools.lru_cache(maxsize=1024)(_content_etag)

    async def find(self, path: str) -> StoredObject | None:
        """The value of ``path``, or None."""
        content = self._objects.get(path.lstrip("/"), self._objects.get(path))
        if content is None:
            return None
        etag = await anyio.to_thread.run_sync(self._etag, content)
        return _BytesObject(content, Version(len(content), etag, self._last_modified))


def _content_etag(content: bytes) -> str:
    return f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"'


class _FileObject:
    def __init__(self, path: str, version: Version) -> None:
        self._path, self.version = path, version

    async def read(self, start: int, stop: int) -> bytes:
        return await anyio.to_thread.run_sync(_read_file, self._path, self.version, start, stop)


class Directory:
    """The regular files below ``root``; nothing outside is served, neither by ``..`` nor through a symbolic link."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.realpath(root)

    async def find(self, path: str) -> StoredObject | None:
        """The file at ``path`` below the root, or None."""
        return await anyio.to_thread.run_sync(self._find, path)

    def _find(self, path: str) -> StoredObject | None:
        try:
            real = os.path.realpath(os.path.join(self._root, path.lstrip("/")), strict=True)
            if os.path.commonpath([self._root, real]) != self._root:
                return None
            descriptor = _open(real)
        except PermissionError:
            raise
        except (OSError, ValueError):  # not there, a name too long, a NUL within it
            return None
        try:
            status = os.fstat(descriptor)
            return _FileObject(real, _file_version(status)) if stat.S_ISREG(status.st_mode) else None
        finally:
            os.close(descriptor)


def _read_file(path: str, version: Version, start: int, stop: int) -> bytes:
    # Opened anew for each piece: a request that is cancelled while a thread works can then leave no file open.
    descriptor = _open(path)
    try:
        content = os.pread(descriptor, stop - start, start)
        if len(content) != stop - start or _file_version(os.fstat(descriptor)) != version:
            raise OSError(f"{path} was changed while it was being served")
        return content
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not wait for a writer


def _file_version(status: os.stat_result) -> Version:
    etag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    return Version(status.st_size, etag, formatdate(status.st_mtime, usegmt=True))

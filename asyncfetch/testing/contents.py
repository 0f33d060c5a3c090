"""A range server's bytes, from a mapping in memory or a directory, and its answers to range requests."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
import time
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias

import anyio.to_thread

from asyncfetch.testing.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """The version for conditional requests."""

    size: int
    """Bytes."""
    etag: str
    """Strong, quotes included."""
    last_modified: str
    """HTTP date."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object, in the state of its lookup."""

    version: ObjectVersion
    read: Callable[[int, int], Awaitable[bytes | memoryview]]
    """Returns bytes [start, stop), within its size. OSError: it was changed or removed since its lookup."""


class InMemory:
    """The values of a mapping; keys with or without a leading slash.

    The mapping is read at each request: change a value, and the next request finds another version.
    """

    def __init__(self, objects: Mapping[str, bytes], etag: Callable[[bytes], str] | None = None) -> None:
        """``etag`` returns the tag of a content, which may take time; None means a hash."""
        self._objects = objects
        self._last_modified = formatdate(time.time(), usegmt=True)
        self._etag = etag or functools.lru_cache(maxsize=1024)(
            lambda content: f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"'
        )

    async def find(self, path: str) -> StoredObject | None:
        """The value of ``path``, or None."""
        content = self._objects.get(path.lstrip("/"), self._objects.get(path))
        if content is None:
            return None
        etag = await anyio.to_thread.run_sync(self._etag, content)

        async def read(start: int, stop: int) -> memoryview:
            return memoryview(content)[start:stop]

        return StoredObject(ObjectVersion(len(content), etag, self._last_modified), read)


class DirectoryContents:
    """The regular files below ``root``; nothing outside is served, neither by ``..`` nor through a symbolic link."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.realpath(root)

    async def find(self, path: str) -> StoredObject | None:
        """The file at ``path`` ("/a/b.bin", decoded) below the root, or None; PermissionError if it may not be read."""
        return await anyio.to_thread.run_sync(self._find, path)

    def _find(self, path: str) -> StoredObject | None:
        try:
            real = os.path.realpath(os.path.join(self._root, path.lstrip("/")), strict=True)
            if os.path.commonpath([self._root, real]) != self._root:
                return None
            descriptor = _open(real)
        except PermissionError:
            raise
        except (OSError, ValueError):  # missing, a name too long, a NUL within it
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            version = _file_version(status)
            return StoredObject(version, partial(anyio.to_thread.run_sync, partial(_read_file, real, version)))
        finally:
            os.close(descriptor)


Contents: TypeAlias = InMemory | DirectoryContents
"""Objects by path."""


def _read_file(path: str, version: ObjectVersion, start: int, stop: int) -> bytes:
    # Opened for each piece, so that a request cancelled while a thread works leaves no file open.
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


def _file_version(status: os.stat_result) -> ObjectVersion:
    etag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    return ObjectVersion(status.st_size, etag, formatdate(status.st_mtime, usegmt=True))


# One range only: a server may ignore several. 18 digits are an exabyte; int() of thousands of digits would be slow.
_RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]{0,18})\s*-\s*([0-9]{0,18})\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ContentAnswer:
    """A response before it is sent."""

    status: int
    """HTTP status."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """All relevant headers; Content-Length if the length is known."""
    start: int = 0
    """First byte of the object to send."""
    stop: int = 0
    """One past the last."""
    text: bytes = b""
    """Another body than the object's."""
    stored: StoredObject | None = None
    """The object, if there is one at the path."""


def asked_range(header: str | None) -> tuple[int, int | None] | None:
    """Half-open (start, stop) of a Range header, as ByteRange has them; None for "the whole object".

    ``a-b`` is (a, b + 1), ``a-`` is (a, None), ``-n`` is (-n, None), ``-0`` is empty. Headers that a server may ignore
    by the RFC mean the whole object: none, another unit, several ranges, malformed ones.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None:
        return None
    first, last = match.groups()
    if first:
        start, stop = int(first), int(last) + 1 if last else None
        return None if stop is not None and stop <= start else (start, stop)
    if last:
        return (-int(last), None) if int(last) else (0, 0)
    return None


def answer_status(status: int, method: str, headers: Mapping[str, str] | None = None) -> ContentAnswer:
    """An answer without the object: the status, and a line of text."""
    known = status in HTTPStatus._value2member_map_
    text = f"{status} {HTTPStatus(status).phrase if known else 'Status'}\n".encode()
    bodiless = status < 200 or status in {204, 304}
    length = {} if bodiless else {"Content-Length": str(len(text)), "Content-Type": "text/plain; charset=utf-8"}
    return ContentAnswer(status, {**length, **(headers or {})}, text=b"" if bodiless or method == "HEAD" else text)


def answer_object(
    method: str, headers: Mapping[str, str], version: ObjectVersion, fault: Fault | None = None
) -> ContentAnswer:
    """The answer to GET or HEAD for an object that exists.

    200, 206, 412 (If-Match) or 416, changed by ``fault``. ``headers`` are the request's, looked up as written here.
    """
    fault = fault or Fault()
    if fault.new_etag:
        version = replace(version, etag='"replaced-' + version.etag.lstrip('"'))
    # The strong comparison: a weak tag (W/"...") never equals a strong one.
    wanted = [tag.strip() for tag in headers.get("If-Match", "*").split(",")]
    if wanted != ["*"] and version.etag not in wanted:
        return answer_status(412, method)
    described = {"ETag": version.etag, "Last-Modified": version.last_modified, "Accept-Ranges": "bytes"}
    # The RFC defines Range only for GET.
    asked = asked_range(headers.get("Range")) if method == "GET" and not fault.drop_range else None
    condition = headers.get("If-Range")
    if asked is None or (condition is not None and condition.strip() not in {version.etag, version.last_modified}):
        stop = 0 if method == "HEAD" else version.size
        return ContentAnswer(200, {**described, "Content-Length": str(version.size)}, stop=stop)
    start = asked[0] if asked[0] >= 0 else max(0, version.size + asked[0])
    stop = version.size if asked[1] is None else min(asked[1], version.size)
    if start >= stop:
        return answer_status(416, method, {"Content-Range": f"bytes */{version.size}"})
    stop = max(start + 1, stop - fault.missing_bytes)
    shift = fault.shift_bytes
    described["Content-Range"] = f"bytes {start + shift}-{stop - 1 + shift}/{version.size}"
    return ContentAnswer(206, {**described, "Content-Length": str(stop - start)}, start, stop)

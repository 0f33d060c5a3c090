"""The reading verbs that the engine, the byte cache and every wrapper offer, and the arguments that they take."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from asyncfetch.config.checks import is_whole_number
from asyncfetch.errors import AccessDenied, ConfigError, NotFound
from asyncfetch.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.ranges import ObjectInfo

WritableBuffer = memoryview | bytearray
"""Writable, contiguous, one byte an item."""


class RangeReader(Protocol):
    """Reads byte ranges. Whatever the server does: the right bytes, or an error of ours.

    Ranges are half-open. An empty range (``start == stop``) is empty and costs no request. A ``stop`` past the end is
    RangeNotSatisfiable, never fewer bytes; ``stop=None`` reads to the end, of an empty object nothing. A negative
    ``start`` with ``stop=None`` asks for the last bytes, all of them where the object is shorter.

    Views are read-only and stay valid as long as they are referenced. Every verb can be cancelled; then its requests
    are cancelled and awaited before it returns. Errors: FetchError and its children, ConfigError for an argument that
    can't be meant, ClosedError, WrongLoop.
    """

    async def stat(self, url: str) -> ObjectInfo:
        """Size and version of the object."""
        ...

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Bytes [start, stop) of the object, read-only."""
        ...

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size and version of the object and its first ``min(max_bytes, size)`` bytes, in one request."""
        ...

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size and version of the object and its last ``min(max_bytes, size)`` bytes, in one request."""
        ...

    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        """Bytes [start, stop) into the caller's buffer of just that length.

        On an error or a cancellation the buffer's content is undefined, and nothing writes to it afterwards.
        """
        ...

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        """All ranges, in input order; equal ranges are fetched once. The first error cancels the rest."""
        ...

    def fetch_stream(
        self, ranges: Iterable[ByteRange]
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[int, memoryview]]]:
        """(index in ``ranges``, whole range) pairs as they arrive. Leaving the context cancels what is under way."""
        ...


@runtime_checkable
class VersionedReader(RangeReader, Protocol):
    """A RangeReader that tells which version of an object its bytes are of; what keeps bytes for long needs to know."""

    def known(self, url: str) -> ObjectInfo | None:
        """Return what was seen of the object and is insisted on from now on; None if nothing was. Sends no request."""
        ...

    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo:
        """Return what ``fetch_into`` does, for a range that isn't empty, and the version that all of the bytes are of.

        Args:
            url: The object.
            start: First byte.
            stop: One past the last byte.
            buffer: Writable, of just the range's length.
            version: With a strong ETag, and ``stop`` within its size: bytes of another one are ObjectChanged, and of
                one that isn't told InvalidResponse.
        """
        ...


@runtime_checkable
class EndpointReader(Protocol):
    """A reader that tells which store it asks; what keeps bytes for other readers, too, needs to know."""

    async def endpoint(self, url: str) -> str:
        """The store that the object lies in, as far as the reader's configuration says that and not the url.

        Empty where the url names its server, and for the stores that its scheme means by itself, AWS and
        huggingface.co: two readers' objects are the same where url and endpoint are. Costs no request.
        """
        ...


_FIELD_NAME = re.compile(":[^:]*:")


def byte_ranges(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """All of them; ConfigError where one is something else."""
    try:
        wanted = list(ranges)
    except TypeError as error:
        raise ConfigError(f"ranges must be an iterable of ByteRange: {error}") from error
    for position, one in enumerate(wanted):
        if not isinstance(one, ByteRange):
            raise ConfigError(f"ranges[{position}] must be a ByteRange, not of type {type(one).__name__}")
    return wanted


def closed_range(url: str, start: int, stop: int, buffer: WritableBuffer) -> tuple[ByteRange, memoryview]:
    """The range, and the buffer as bytes to write to.

    ConfigError where the range has no end, or where the buffer can't be written to so, or isn't of its length.
    """
    wanted = ByteRange(url, start, stop)
    if wanted.stop is None:
        raise ConfigError("stop must be a whole number where there is a buffer: its length is stop - start")
    length = wanted.stop - wanted.start
    try:
        view = memoryview(buffer)
        usable = view.c_contiguous and not view.readonly and view.nbytes == length
        # A view with a zero in its shape can't be cast, and has nothing to write to.
        target = view.cast("B") if usable and length else view
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the buffer can't be written to as bytes: {error}") from error
    if has_objects(view):
        raise ConfigError("the buffer holds Python objects, and bytes can't be written over them: give it numbers")
    if not usable:
        kind = f"{'read-only' if view.readonly else 'writable'}{'' if view.c_contiguous else ' with gaps'}"
        message = f"{wanted!r} needs a writable, contiguous buffer of {length} bytes, not one of {view.nbytes}, {kind}"
        raise ConfigError(message)
    return wanted, target


def has_objects(view: memoryview) -> bool:
    """Return whether it has Python objects, alone or as fields: its bytes are their addresses, good here and now."""
    return "O" in _FIELD_NAME.sub("", view.format)


def byte_count(max_bytes: int) -> int:
    """It as Python's, where it is a whole number and not negative; else ConfigError."""
    if not is_whole_number(max_bytes) or max_bytes < 0:
        raise ConfigError(f"max_bytes must be a whole number and not negative, not {max_bytes!r}")
    return int(max_bytes)


async def fetch_if_there(reader: RangeReader, url: str) -> memoryview | None:
    """The whole object; None where there is none, or where S3 denies access to one that isn't, as it may."""
    try:
        return await reader.fetch(url)
    except (AccessDenied, NotFound):
        return None

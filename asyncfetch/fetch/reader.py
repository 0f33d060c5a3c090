"""The reading verbs that the engine, the byte cache and every wrapper offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.ranges import ByteRange, ObjectInfo

__all__ = ["EndpointReader", "RangeReader", "VersionedReader", "WritableBuffer"]

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
        """Return what was seen of the object and is insisted on from now on; None where nothing was. Asks nobody."""
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

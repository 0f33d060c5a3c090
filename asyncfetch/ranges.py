"""Half-open byte ranges and the objects they are cut from. Pure: no clock, no loop, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from asyncfetch.errors import ConfigError, redact_url

__all__ = ["ByteRange", "ObjectInfo"]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, stop) of one object.

    A negative start with stop None means the last ``-start`` bytes (the whole object where it is shorter).
    """

    url: str
    """http(s)://, s3://, hf:// or file:// URL, a path, or what fsspec reads."""
    start: int
    """First byte, inclusive."""
    stop: int | None
    """One past the last byte; None means to the end of the object."""

    def __post_init__(self) -> None:
        if self.stop is not None and not 0 <= self.start <= self.stop:
            message = (
                f"byte range [{self.start}, {self.stop}) of {redact_url(self.url)} must satisfy 0 <= start <= stop"
            )
            raise ConfigError(message)

    def __repr__(self) -> str:
        return f"ByteRange({redact_url(self.url)!r}, {self.start}, {self.stop})"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a server says of one object."""

    url: str
    """As the caller wrote it, before redirects."""
    size: int
    """Length in bytes."""
    etag: str | None = None
    """Entity tag as sent, quotes included; None where the server sends none. A weak one starts with ``W/``."""
    last_modified: str | None = None
    """HTTP date as sent; None where the server sends none."""

    @property
    def version(self) -> str | None:
        """What tells this content from another one under the same name; None where nothing does."""
        return self.etag or self.last_modified

    def __repr__(self) -> str:
        return f"ObjectInfo({redact_url(self.url)!r}, size={self.size}, etag={self.etag!r})"

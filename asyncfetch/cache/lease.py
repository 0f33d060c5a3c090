"""Cached bytes as callers see them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asyncfetch.cache.names import object_name
from asyncfetch.errors import ConfigError
from asyncfetch.observe import Figures
from asyncfetch.ranges import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from asyncfetch.cache.disk.store import DiskStatistics
    from asyncfetch.ranges import ByteRange

__all__ = ["CacheKey", "CacheStatistics", "Lease"]


@dataclass(frozen=True, slots=True)
class CacheKey:
    """All that tells one entry from another, beside the version of the object, of which all its entries are.

    Equal ranges with different headroom are different entries.
    """

    range: ByteRange
    """Its url has no signature: it is the object's name, not what to ask for."""
    headroom_bytes: int = 0

    @classmethod
    def of(cls, asked: ByteRange, headroom_bytes: int = 0) -> CacheKey:
        """The key of a range as it was asked for."""
        name = object_name(asked.url)
        return cls(asked if name == asked.url else replace(asked, url=name), headroom_bytes)

    def __post_init__(self) -> None:
        if type(self.headroom_bytes) is not int or self.headroom_bytes < 0:  # each hit comes by here
            object.__setattr__(self, "headroom_bytes", whole_number("headroom_bytes", self.headroom_bytes, least=0))
        if self.headroom_bytes and self.range.stop is None:
            raise ConfigError("stop must be a whole number where there is headroom: both are set aside at once")

    @property
    def size_bytes(self) -> int | None:
        """Headroom and range together; None where the range's end isn't known before it is read."""
        if self.range.stop is None:
            return None
        return self.headroom_bytes + self.range.stop - self.range.start


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheStatistics(Figures):
    """A snapshot. Every ask that needs bytes counts as one of hits, joins and misses."""

    telling = ("hits", "misses", "used_bytes", "max_bytes", "waiting")

    hits: int
    """Answered at once from what is held."""
    joins: int
    """Answered by a fetch that was under way."""
    misses: int
    """Began a fetch, successful or not."""
    bypasses: int
    """Fetches whose bytes were handed out and not kept: larger than the cache, or outdated when they came."""
    evictions: int
    """Entries that made room for others."""
    entries: int
    max_bytes: int
    used_bytes: int
    """Held in entries, leased ones included. ``used_bytes + reserved_bytes <= max_bytes``."""
    leased_bytes: int
    """Part of ``used_bytes`` that somebody uses."""
    reserved_bytes: int
    """Set aside for fetches under way."""
    waiting: int
    """Fetches that wait for room."""
    waited: int
    """Fetches that had to wait for room before they began, those that wait now and those that gave up included."""
    disk: DiskStatistics | None = None
    """Statistics of the disk tier below; None where there is none."""


class Lease:
    """One range in memory, not to be evicted before ``release``. A context manager, whose exit releases.

    Everybody who leases the same key shares the same bytes. The views stay valid after the release as long as they are
    referenced, but the cache may then hold other bytes in the room they are counted in. Bound to the cache's loop.

    Attributes:
        key: The entry.
        buffer: Headroom, then the range; writable. Only the headroom is for writing, and everybody writes the same.
        view: The range alone, read-only.
    """

    __slots__ = ("_give_back", "buffer", "key", "view")

    def __init__(self, key: CacheKey, buffer: memoryview, give_back: Callable[[], None] | None) -> None:
        self.key = key
        self.buffer = buffer
        self.view = buffer[key.headroom_bytes :].toreadonly()
        self._give_back = give_back

    def release(self) -> None:
        """Allow the eviction. A second release does nothing.

        Raises:
            WrongLoop: Called in another thread, loop or process; then nothing is released.
        """
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease {self.key.range!r}, {len(self.buffer)} bytes with {self.key.headroom_bytes} of headroom>"

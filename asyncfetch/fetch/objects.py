"""All that is known of the objects read so far, so that no two bytes come from different versions of one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncfetch.ranges import ObjectInfo


MAX_KNOWN_OBJECTS = 65_536
"""Objects whose version and size a fetcher remembers, about 200 bytes each: 13 MB."""


def strong_etag(info: ObjectInfo | None) -> str | None:
    """The entity tag that promises equal bytes; None where there is none, or only a weak one.

    Nor is one that can't be sent back: RFC 9110 allows bytes in it that are no UTF-8.
    """
    if info is None or info.etag is None or info.etag.startswith("W/") or not info.etag.isprintable():
        return None
    return info.etag


def difference(known: ObjectInfo, seen: ObjectInfo) -> str | None:
    """Return in words what tells ``seen`` from ``known``; None where they may be the same content.

    Tags are compared without their weakness mark: a proxy that compresses weakens the tag of unchanged content. A tag
    or date that one answer lacks proves nothing.
    """
    if known.size != seen.size:
        return f"its size was {known.size} bytes and is {seen.size} now"
    if known.etag is not None and seen.etag is not None:
        if known.etag.removeprefix("W/") != seen.etag.removeprefix("W/"):
            return f"its ETag was {known.etag} and is {seen.etag} now"
        return None
    if known.last_modified is not None and seen.last_modified is not None and known.last_modified != seen.last_modified:
        return f"its Last-Modified was {known.last_modified} and is {seen.last_modified} now"
    return None


class ObjectMemory:
    """The first thing seen of each object, by url. Bounded: the least recently used is forgotten.

    Safe to use from any thread: answers come on several loops.
    """

    __slots__ = ("_infos", "_lock", "_maximum", "_whole")

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._infos: OrderedDict[str, ObjectInfo] = OrderedDict()
        self._whole: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._infos)

    def get(self, url: str) -> ObjectInfo | None:
        """Return what was seen first of the object, None where nothing was."""
        with self._lock:
            info = self._infos.get(url)
            if info is not None:
                self._infos.move_to_end(url)
            return info

    def remember(self, info: ObjectInfo) -> None:
        """Keeps ``info`` unless its url is known already with a version."""
        with self._lock:
            known = self._infos.get(info.url)
            if known is None or known.version is None:
                self._infos[info.url] = info
            self._infos.move_to_end(info.url)
            if len(self._infos) > self._maximum:
                url, _ = self._infos.popitem(last=False)
                self._whole.discard(url)

    def comes_whole(self, url: str) -> bool:
        """Return whether the object's server was seen to send all of it for a part."""
        return url in self._whole

    def note_whole(self, url: str) -> None:
        """Remembers that the server of a known object sends all of it for a part."""
        with self._lock:
            if url in self._infos:
                self._whole.add(url)

    def forget(self, url: str) -> None:
        """Makes the next answer for ``url`` the first one."""
        with self._lock:
            self._infos.pop(url, None)
            self._whole.discard(url)

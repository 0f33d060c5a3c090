"""All that is known of the objects read so far, so that no two bytes come from different versions of one."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncfetch.ranges import ObjectInfo


MAX_KNOWN_OBJECTS = 65_536
"""Objects whose version and size a fetcher remembers, about 200 bytes each: 13 MB."""


def strong_etag(info: ObjectInfo | None) -> str | None:
    """The entity tag that promises equal bytes; None where there is none, or only a weak one.

    Nor is one that can't be sent back: RFC 9110 allows bytes in it that are no UTF-8.
    """
    return None if info is None else strong_tag(info.etag)


@lru_cache(maxsize=1024)
def strong_tag(etag: str | None) -> str | None:
    """The tag itself where it is a strong one, see ``strong_etag``. Cached: each range asks for its object's."""
    return None if etag is None or etag.startswith("W/") or not etag.isprintable() else etag


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
    """The first thing seen of each object, by url. Bounded: the least recently used is forgotten. For one loop."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._whole: set[str] = set()
        self.infos: OrderedDict[str, ObjectInfo] = OrderedDict()
        """Versions by url, the one used last at the end; ``get`` keeps them so."""

    def __len__(self) -> int:
        return len(self.infos)

    def get(self, url: str) -> ObjectInfo | None:
        """Return what was seen first of the object, None where nothing was."""
        info = self.infos.get(url)
        if info is not None:
            self.infos.move_to_end(url)
        return info

    def remember(self, info: ObjectInfo) -> None:
        """Keeps ``info`` unless its url is known already with a version."""
        known = self.infos.get(info.url)
        if known is None or known.version is None:
            self.infos[info.url] = info
        self.infos.move_to_end(info.url)
        if len(self.infos) > self._maximum:
            url, _ = self.infos.popitem(last=False)
            self._whole.discard(url)

    def comes_whole(self, url: str) -> bool:
        """Return whether the object's server was seen to send all of it for a part."""
        return url in self._whole

    def note_whole(self, url: str) -> None:
        """Remembers that the server of a known object sends all of it for a part."""
        if url in self.infos:
            self._whole.add(url)

    def forget(self, url: str) -> None:
        """Makes the next answer for ``url`` the first one."""
        self.infos.pop(url, None)
        self._whole.discard(url)

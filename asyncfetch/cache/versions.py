"""Of which version of each object a cache's entries are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfetch.fetch.objects import difference

if TYPE_CHECKING:
    from asyncfetch.ranges import ObjectInfo

__all__ = ["HeldVersions"]


class _Held:
    __slots__ = ("entries", "info")

    def __init__(self, info: ObjectInfo | None) -> None:
        self.info = info
        self.entries = 0


class HeldVersions:
    """One version for all entries of an object, as long as there are any. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def agrees(self, name: str, info: ObjectInfo | None) -> bool:
        """Whether the entries of an object may be of this version; None says nothing against it."""
        held = self._held.get(name)
        return held is None or held.info is None or info is None or difference(held.info, info) is None

    def add(self, name: str, info: ObjectInfo | None) -> None:
        """An entry more, of a version that ``agrees``."""
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _Held(info)
        elif held.info is None:
            held.info = info
        held.entries += 1

    def remove(self, name: str) -> None:
        """An entry less."""
        held = self._held[name]
        held.entries -= 1
        if not held.entries:
            del self._held[name]

"""What may lie on disk, in bytes and files."""

from __future__ import annotations

__all__ = ["Quota", "Reservation"]


class Quota:
    """Two bounds, taken from before anything is written. Nobody waits in it. Guarded by the engine's lock.

    Args:
        max_bytes: Most bytes that all reservations together hold.
        max_count: Most reservations; an empty file takes one, too.
    """

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self.max_bytes = max_bytes
        self.max_count = max_count
        self.bytes = 0
        self.count = 0

    @property
    def free_bytes(self) -> int:
        """What a reservation can have now."""
        return self.max_bytes - self.bytes

    def fits(self, size_bytes: int) -> bool:
        """Whether a reservation of so much can be made now."""
        return self.count < self.max_count and size_bytes <= self.free_bytes

    def reserve(self, size_bytes: int) -> Reservation | None:
        """So much for one file, or None where it doesn't fit."""
        return Reservation(self, size_bytes) if self.fits(size_bytes) else None


class Reservation:
    """Room for one file. Made by ``Quota.reserve``; comes back once, however often it is released."""

    __slots__ = ("_held", "_quota", "size_bytes")

    def __init__(self, quota: Quota, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._quota = quota
        self._held = True
        quota.bytes += size_bytes
        quota.count += 1

    def resize(self, size_bytes: int) -> bool:
        """Make it so large, if that fits."""
        if size_bytes - self.size_bytes > self._quota.free_bytes:
            return False
        self._quota.bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes
        return True

    def release(self) -> None:
        """Give it back. Once."""
        if self._held:
            self._held = False
            self._quota.bytes -= self.size_bytes
            self._quota.count -= 1

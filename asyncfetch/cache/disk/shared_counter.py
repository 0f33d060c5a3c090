"""The number of bytes that all processes together hold in a directory: one, in a file that they lock.

The number may be too high, never too low, so the bound holds whatever is killed when. Whoever wants to write takes the
bytes first and makes the file then; whoever deletes gives them back after that. What gets lost between the two by a
kill, or by files that somebody else deletes, comes back at the next count of what is really there.

A file without a number, or with one that isn't what was written, means that nobody has counted yet; until then
everything is taken for full.

Counting takes long, and nobody waits for it. So beside the bytes in use stands the sum of all that was ever taken: what
was taken while somebody counted may have been missed by the count, and is added to it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["SharedCounter"]

T = TypeVar("T")

_NUMBERS: Final = struct.Struct("<QQ")
_CHECKSUM: Final = struct.Struct("<I")
"""CRC-32 of the numbers: with a bit less in the first one the bound would be broken, and nobody would know."""
_UNKNOWN: Final = 2**62


class SharedCounter:
    """The bytes in use, shared by all that opened the same file. Thread-safe; every method blocks for a moment.

    The system gives the lock of a killed process back. A forked child must not use it.

    Args:
        path: The file; made where it isn't there.

    Raises:
        OSError: It can't be opened for reading and writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _open(path)
        self._threads = threading.Lock()  # a lock of the file excludes other openings of it, not other threads
        self._closed = False

    def close(self) -> None:
        """Once nobody is at it. Twice is once."""
        with self._threads:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)

    def used_bytes(self) -> int | None:
        """Return the bytes in use, at most; None before the first count."""
        with self._locked():
            used, _ = self._read()
        return None if used >= _UNKNOWN else used

    def taken_bytes(self) -> int:
        """Sum of all that was ever taken, to be read before a count."""
        with self._locked():
            return self._read()[1]

    def take(self, size_bytes: int, limit_bytes: Callable[[int], int], make: Callable[[], T]) -> T | None:
        """Return what ``make`` gives, with ``size_bytes`` taken for it; None where that is more than may be in use.

        Args:
            size_bytes: To take.
            limit_bytes: From the bytes in use now, how many may be.
            make: Makes the file, with its full length, while nobody else can take or delete anything.
        """
        with self._locked():
            used, taken = self._read()
            if used + size_bytes > limit_bytes(used):
                return None
            self._write(used + size_bytes, taken + size_bytes)
            try:
                return make()
            except BaseException:
                self._write(used, taken)
                raise

    def give_back(self, delete: Callable[[], int]) -> int:
        """SharedCounter for what ``delete`` deletes, and return how many bytes it says that was.

        It runs while nobody else can take or put in a count: a count that missed the files would be reduced by them.
        """
        with self._locked():
            size_bytes = delete()
            used, taken = self._read()
            if size_bytes and used < _UNKNOWN:
                self._write(max(0, used - size_bytes), taken)
            return size_bytes

    def recount(self, counted_bytes: int, taken_before: int) -> int:
        """Put in what a count found that began when ``taken_before`` was read; returns what is in use now."""
        with self._locked():
            _, taken = self._read()
            used = counted_bytes + max(0, taken - taken_before)
            self._write(used, taken)
            return used

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            if self._closed:
                raise OSError(f"{self._path} was closed")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                if os.fstat(self._descriptor).st_nlink == 0:
                    self._reopen()
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _reopen(self) -> None:
        """Somebody deleted the file; those who come now make a new one, and all must use the same."""
        descriptor = _open(self._path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def _read(self) -> tuple[int, int]:
        content = os.pread(self._descriptor, _NUMBERS.size + _CHECKSUM.size, 0)
        numbers, checksum = content[: _NUMBERS.size], content[_NUMBERS.size :]
        if checksum != _CHECKSUM.pack(zlib.crc32(numbers)):
            return _UNKNOWN, 0
        used, taken = _NUMBERS.unpack(numbers)
        return used, taken

    def _write(self, used: int, taken: int) -> None:
        numbers = _NUMBERS.pack(used, taken)
        os.pwrite(self._descriptor, numbers + _CHECKSUM.pack(zlib.crc32(numbers)), 0)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

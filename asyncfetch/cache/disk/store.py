"""Ranges of objects in a disk cache: read if present, written if not."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncfetch.cache.disk.folder import Folder
from asyncfetch.cache.disk.layout import HEADER_BYTES, BlockSpan, VersionFile, cost_bytes, load_checksum, split
from asyncfetch.errors import ClosedError
from asyncfetch.observe import Figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncfetch.cache.disk.folder import NewFile
    from asyncfetch.cache.disk.layout import DiskTier
    from asyncfetch.cache.disk.subdirectories import BlockFile

PAUSE_SECONDS: Final = 60.0
"""Seconds without writing after a failed write, mostly of a full disk: space comes back in minutes, and each try delays
a caller."""
NO_ROOM_SECONDS: Final = 1.0
"""Seconds without writing when there is no room, unless some is made: that may take long, or be impossible."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiskStatistics(Figures):
    """A snapshot. Counters are this process's, of files, since the tier was opened."""

    _telling = ("hits", "misses", "written", "skipped", "failures")
    _of_moment = ("max_bytes", "refusal")

    hits: int
    """Files read, with the right content."""
    hit_bytes: int
    """Bytes read from them."""
    misses: int
    """Reads of missing pieces. An object's first range, requested before its version is known, isn't counted."""
    written: int
    written_bytes: int
    skipped: int
    """Files that were not written: without room, or while writing is paused."""
    damaged: int
    """Files deleted because of wrong content."""
    failures: int
    """Errors of the system at reading or writing."""
    max_bytes: int
    refusal: str = ""
    """Why the latest file was not kept, in words; empty if it was."""

    def _plus(self, other: DiskStatistics) -> DiskStatistics:
        together = Figures._plus(self, other)  # the directory is one, and so is its bound
        return replace(together, max_bytes=self.max_bytes, refusal=self.refusal or other.refusal)


_COUNTED = ("hits", "hit_bytes", "misses", "written", "written_bytes", "skipped", "damaged", "failures")


class DiskStore:
    """An open disk cache. Thread-safe; every method but ``statistics`` blocks, and none of them is for a forked child.

    Reading and writing never raise an OSError: an unreadable file counts as missing, and one that can't be written
    isn't kept. The first such failure is logged as a warning, as is the first lack of room that no deletion ends.

    Raises:
        CacheError: The directory can't be used.
        MissingDependency: xxhash isn't installed.
    """

    def __init__(
        self,
        tier: DiskTier,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.tier = tier
        self._clock = clock
        self._checksum = load_checksum()
        self.folder = Folder(tier.path, create=True, wall_ns=wall_ns)
        self._counts: Counter[str] = Counter()
        self._refusal = ""
        self._lock = threading.Lock()
        self._paused_until = -math.inf
        self._warned = False

    def close(self) -> None:
        """Close it. Idempotent."""
        self.folder.close()

    def statistics(self) -> DiskStatistics:
        """A snapshot, in any thread and after closing."""
        with self._lock:
            counts = {name: self._counts[name] for name in _COUNTED}
            return DiskStatistics(**counts, max_bytes=self.tier.max_bytes, refusal=self._refusal)

    def may_have(self, object_id: str, start: int, stop: int) -> bool:
        """Return whether there may be bytes of an object within [start, stop), or near."""
        found = False
        with self._failing("read"):
            found = self.folder.subdirectories.may_have(object_id, start, stop)
        return found  # noqa: RET504 - False after a failure

    def read(self, version: VersionFile, start: int, view: memoryview) -> list[BlockSpan]:
        """Fill ``view`` with the bytes from ``start`` on; returns the missing pieces, ascending.

        The content of ``view`` at missing pieces is undefined.
        """
        missing: list[BlockSpan] = []
        misses, pieces = 0, split(start, start + len(view))
        descriptors = [self._open(version, piece) for piece in pieces]
        try:
            for number, piece in enumerate(pieces):
                place = view[piece.start - start : piece.stop - start]
                if self._read_file(version, piece, place, descriptors[number:]):
                    continue
                lacking = self._read_parts(version, piece, place)
                missing += lacking
                misses += bool(lacking)
        finally:
            for descriptor in descriptors:
                if descriptor is not None:
                    os.close(descriptor)
        hit_bytes = len(view) - sum(piece.size_bytes for piece in missing)
        self._count(hits=len(pieces) - misses, hit_bytes=hit_bytes, misses=misses)
        return missing

    def write(self, version: VersionFile, start: int, view: memoryview) -> int:
        """Keep the bytes from ``start`` on; returns the length of the longest file without room, or 0."""
        lacking = 0
        for piece in split(start, start + len(view)):
            if self._clock() < self._paused_until:
                self._count(skipped=1)
                continue
            with self._failing("written to"):
                if not self._write_file(version, piece, view[piece.start - start : piece.stop - start]):
                    lacking = max(lacking, piece.file_bytes)
        return lacking

    def make_room(self, file_bytes: int) -> None:
        """Delete the least recently used files, about a twentieth of the bound, unless another process does.

        It looks at all files, which takes 20 s of a processor for a million. ``stop`` ends it.
        """
        with self._failing("written to"), suppress(ClosedError):
            if self.folder.make_room(file_bytes, self._limit_bytes):
                self._paused_until = -math.inf
            elif self._limit_bytes(self.folder.used_bytes()) < cost_bytes(file_bytes):
                self._refuse(self._why_no_room(file_bytes), "takes no more")

    def stop(self) -> None:
        """End a ``make_room`` in another thread soon."""
        self.folder.subdirectories.stop()

    def _read_parts(self, version: VersionFile, piece: BlockSpan, place: memoryview) -> list[BlockSpan]:
        """Read the parts of a piece from files of other ranges; returns the missing parts."""
        missing, at = [], piece.start
        parts: list[tuple[BlockSpan, BlockSpan]] = []
        with self._failing("read"):
            parts = self.folder.subdirectories.parts(version, piece)
        for file, part in parts:
            whole = np.empty(file.size_bytes, np.uint8).data  # the checksum is of the whole
            descriptor = self._open(version, file)
            try:
                if not self._read_file(version, file, whole, [descriptor]):
                    continue
            finally:
                if descriptor is not None:
                    os.close(descriptor)
            place[part.start - piece.start : part.stop - piece.start] = whole[
                part.start - file.start : part.stop - file.start
            ]
            if at < part.start:
                missing.append(BlockSpan(at, part.start))
            at = part.stop
        if at < piece.stop:
            missing.append(BlockSpan(at, piece.stop))
        return missing

    def _open(self, version: VersionFile, piece: BlockSpan) -> int | None:
        with self._failing("read"), suppress(FileNotFoundError, NotADirectoryError):
            return os.open(self.folder.subdirectories.path(version, piece), os.O_RDONLY | os.O_CLOEXEC)
        return None

    def _read_file(
        self, version: VersionFile, piece: BlockSpan, place: memoryview, descriptors: list[int | None]
    ) -> bool:
        """Read a piece from the first descriptor; the others are read next."""
        descriptor, *following = descriptors
        if descriptor is None:
            return False
        with self._failing("read"):
            if _is_right(descriptor, version, piece, place, self._checksum, following):
                self.folder.subdirectories.touch(descriptor)
                return True
            self._count(damaged=1)
            self.folder.remove(version, piece)
        return False

    def _write_file(self, version: VersionFile, piece: BlockSpan, content: memoryview) -> bool:
        """Write a piece; returns False without room."""
        if os.path.exists(self.folder.subdirectories.path(version, piece)):
            return True  # another process was faster
        new = self.folder.new_file(piece.file_bytes, self._limit_bytes)
        if new is None:
            self._count(skipped=1)
            self._paused_until = self._clock() + NO_ROOM_SECONDS
            return False
        try:
            _write_all(new, [piece.header(version, self._checksum(content)), content])
            self.folder.subdirectories.touch(new.descriptor)
            self.folder.subdirectories.put(new.path, version, piece)
        except BaseException:
            self.folder.discard(new)
            raise
        finally:
            os.close(new.descriptor)
        self._count(written=1, written_bytes=len(content))
        self._refusal = ""
        return True

    @contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        """Count an OSError; a failed write ends writing for a while."""
        try:
            yield
        except OSError as error:
            self._count(failures=1)
            self._refuse(error.strerror or str(error), f"can't be {verb}")
            if verb == "written to":
                self._paused_until = self._clock() + PAUSE_SECONDS

    def _limit_bytes(self, used_bytes: int) -> int:
        return min(self.tier.max_bytes, used_bytes + self.folder.free_bytes() - self.tier.min_free_bytes)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def _why_no_room(self, file_bytes: int) -> str:
        tier, cost = self.tier, cost_bytes(file_bytes)
        if tier.max_bytes < cost:
            return f"a file of it takes {cost:,} bytes, and max_bytes is {tier.max_bytes:,}: raise that"
        return (
            f"{self.folder.free_bytes():,} bytes of its disk are free, and min_free_bytes={tier.min_free_bytes:,} are "
            "left to others: free some, or choose a directory on another disk"
        )

    def _refuse(self, why: str, what: str) -> None:
        with self._lock:
            self._refusal = why
            warned, self._warned = self._warned, True
        if not warned:
            _log.warning(
                "the disk cache at %s %s (%s): what it lacks is fetched again. This is said once; "
                "statistics() has the latest refusal",
                self.tier.path, what, why,
            )  # fmt: skip


def verify(folder: Folder) -> Iterator[tuple[BlockFile, bool]]:
    """Read every file, and delete those with wrong content. Blocks; last uses stay unchanged.

    Yields:
        Each readable file, and whether its content is right.
    """
    checksum = load_checksum()
    for file in folder.subdirectories.files():
        version, piece = file.version, file.piece
        try:
            with open(file.path, "rb", buffering=0) as opened:
                is_right = os.fstat(opened.fileno()).st_size == piece.file_bytes
                if is_right:
                    place = np.empty(piece.size_bytes, np.uint8).data
                    is_right = _is_right(opened.fileno(), version, piece, place, checksum)
        except OSError:  # another user's, or evicted meanwhile
            continue
        if not is_right:
            with suppress(PermissionError):  # another user's, who will find it
                folder.remove(version, piece)
        yield file, is_right


def _is_right(
    descriptor: int,
    version: VersionFile,
    piece: BlockSpan,
    place: memoryview,
    checksum: Callable[[memoryview], int],
    following: Sequence[int | None] = (),
) -> bool:
    """Read a file's content into ``place``; returns whether it agrees with the header."""
    header = bytearray(HEADER_BYTES)
    if _read_whole(descriptor, [header, place], piece.file_bytes, following) != piece.file_bytes:
        return False
    return bytes(header) == piece.header(version, checksum(place))


def _read_whole(
    descriptor: int, buffers: list[bytearray | memoryview], file_bytes: int, following: Sequence[int | None]
) -> int:
    """Read a file from its beginning; returns the number of bytes.

    If it isn't in the page cache, all of it and of ``following``, the files that are read next, is requested at once:
    by itself the system reads 128 KiB ahead, and nothing of the next file while this one is hashed. This brought ranges
    of 1,300 KiB from a disk in 0.7 of the time. For files in the page cache it would cost a tenth more.
    """
    try:
        if os.preadv(descriptor, buffers, 0, os.RWF_NOWAIT) == file_bytes:
            return file_bytes
        waits = True
    except OSError as error:
        waits = isinstance(error, BlockingIOError)  # other errors: the file system doesn't support the flag
    if waits:
        for each in (descriptor, *following):
            if each is not None:
                os.posix_fadvise(each, 0, 0, os.POSIX_FADV_WILLNEED)
    return os.preadv(descriptor, buffers, 0)


def _write_all(new: NewFile, buffers: list[bytes | memoryview]) -> None:
    total = sum(len(buffer) for buffer in buffers)
    written = os.pwritev(new.descriptor, buffers, 0)
    if written != total:  # the disk became full in the middle
        joined = b"".join(buffers)
        while written < total:
            written += os.pwrite(new.descriptor, joined[written:], written)

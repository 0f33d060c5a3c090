"""The complete files of a disk cache: their paths, the parts of an object that they hold, and their last uses.

Nothing here takes a lock or counts: locks and bounds are `folder`'s.

The files' modification times are the order of their last use: each read sets it. A clock can go back: a machine starts
with the wrong year, say, and gets the right one later. Files used before would then seem to be used last for all that
time, and be kept, while all new ones go. So a file with a time in the future counts as used now, and gets that time.
"""

from __future__ import annotations

import os
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from asyncfetch.cache.disk.layout import (
    BlockSpan,
    VersionFile,
    cost_bytes,
    file_path,
    find_parts,
    is_file_name,
    parse_file_name,
    subdirectories,
)
from asyncfetch.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Progress: TypeAlias = Callable[[str, float], object]
    """Called with an action and the finished share of it, some thousand times in all."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file as found on disk, and the bytes of the disk that it takes."""

    path: str
    version: VersionFile
    piece: BlockSpan
    cost_bytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """The deleted files."""

    files: int
    cost_bytes: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """All files, in no order, as three parallel arrays, because there may be millions."""

    object_ids: NDArray[np.uint64]
    """The first half of each."""
    used_at_ns: NDArray[np.int64]
    cost_bytes: NDArray[np.int64]


class Subdirectories:
    """The folder with all subdirectories. Thread-safe, and shared with other processes; every method blocks."""

    def __init__(self, directory: Path, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._directory = directory
        self._wall_ns = wall_ns
        self._stopped = False

    def stop(self) -> None:
        """Have calls of ``look`` and ``delete_oldest`` end soon. From any thread; nothing else is affected."""
        self._stopped = True

    def path(self, version: VersionFile, piece: BlockSpan) -> str:
        """The path of a file that may not exist."""
        return f"{self._directory}/{file_path(version, piece)}"

    def put(self, path: str, version: VersionFile, piece: BlockSpan) -> None:
        """Move a complete file to the place where others find it. It replaces an equal one."""
        target = self.path(version, piece)
        try:
            os.rename(path, target)
        except FileNotFoundError:  # the first file of its subdirectory
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.rename(path, target)

    def touch(self, descriptor: int) -> None:
        """Set its last use to now. Another user's file keeps its time, and goes as if it had not been read."""
        now = self._wall_ns()
        with suppress(PermissionError):
            os.utime(descriptor, ns=(now, now))

    def may_have(self, object_id: str, start: int, stop: int) -> bool:
        """Return whether there may be files of the object's blocks that bytes [start, stop) are in."""
        return any(name.startswith(f"{object_id}-") for name in self._names(object_id, start, stop))

    def parts(self, version: VersionFile, piece: BlockSpan) -> list[tuple[BlockSpan, BlockSpan]]:
        """Files that hold a part of a piece, each with the part to take from it."""
        return find_parts(self._names(version.object, piece.start, piece.stop), version, piece)

    def files(self) -> Iterator[BlockFile]:
        """All files, in no order. It may miss files that come or go meanwhile."""
        for entry, status in self._found("reading", unwatched):
            yield BlockFile(entry.path, *parse_file_name(entry.name), cost_bytes(status.st_size))

    def look(self, progress: Progress) -> Holdings:
        """Look at all files, and correct times in the future; ClosedError once stopped."""
        object_ids, times, costs = array("Q"), array("q"), array("q")
        for entry, status in self._found("looking", progress):
            if self._stopped:
                raise ClosedError("the disk cache is closed: its files are no longer scanned")
            used_at_ns, now = status.st_mtime_ns, self._wall_ns()
            if used_at_ns > now:
                used_at_ns = now
                with suppress(PermissionError, FileNotFoundError):  # it is another user's, or gone
                    os.utime(entry.path, ns=(now, now))
            object_ids.append(int(entry.name[:16], 16))
            times.append(used_at_ns)
            costs.append(cost_bytes(status.st_size))
        return Holdings(*(np.frombuffer(column, column.typecode) for column in (object_ids, times, costs)))

    def delete_oldest(self, found: Holdings, excess_bytes: int, progress: Progress) -> Removal:
        """Delete the oldest ``excess_bytes``, but no file that was used since ``found``."""
        if excess_bytes <= 0 or not len(found.used_at_ns):
            return Removal(0, 0)
        order = np.argsort(found.used_at_ns, kind="stable")
        position = int(np.searchsorted(np.cumsum(found.cost_bytes[order]), excess_bytes))
        newest = int(found.used_at_ns[order[min(position, len(order) - 1)]])
        files = gone = 0
        for entry, status in self._found("deleting", progress):
            if gone >= excess_bytes or self._stopped:
                break
            if status.st_mtime_ns > newest:
                continue
            with suppress(FileNotFoundError, PermissionError):  # another process was faster, or it is another user's
                os.unlink(entry.path)
                files, gone = files + 1, gone + cost_bytes(status.st_size)
        return Removal(files, gone)

    def _found(self, doing: str, progress: Progress) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        found = list(entries(self._directory))
        for number, subdirectory in enumerate(found):
            progress(doing, number / len(found))
            for entry in entries(subdirectory.path):
                if is_file_name(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        yield entry, entry.stat(follow_symlinks=False)

    def _names(self, object_id: str, start: int, stop: int) -> Iterator[str]:
        for subdirectory in subdirectories(object_id, start, stop):
            with suppress(FileNotFoundError, NotADirectoryError):
                yield from os.listdir(f"{self._directory}/{subdirectory}")


def unwatched(_doing: str, _share: float) -> None:
    """A Progress that does nothing."""


def entries(path: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; nothing if it doesn't exist."""
    try:
        with os.scandir(path) as found:
            yield from found
    except (FileNotFoundError, NotADirectoryError):
        pass

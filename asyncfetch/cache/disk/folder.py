"""The directory of a disk tier: its files, how many bytes they are, and which of them have to go.

Readers take no lock. What they opened stays readable when it is deleted, and what they find is whole, because a file is
written elsewhere and renamed into its place. So only those who make files have to agree, on how many bytes there may be
(`account`), and those who delete some, of whom there is one at a time.

The files' own times of modification are the order of their last use: whoever reads one sets it. Choosing the oldest
means to look at all, so a twentieth of the bound goes at a time. Who wants to write meanwhile goes without.
"""

from __future__ import annotations

import fcntl
import os
import pwd
from array import array
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncfetch.cache.disk.account import Account
from asyncfetch.cache.disk.layout import (
    Piece,
    Version,
    cost_bytes,
    file_path,
    find_larger,
    is_file_name,
    parse_file_name,
    shelves,
)
from asyncfetch.cache.disk.mounts import require_locks
from asyncfetch.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["BlockFile", "Folder", "NewFile", "Removed", "Survey"]

SLACK: Final = 20
"""A twentieth of the bound is freed at a time: so about 20 files are looked at for each that is written. Looking at one
and deleting it took 32 us."""
_TAG: Final = b"Signature: 8a477f597d28d172789f06886806bc55\n# Fetched bytes, kept by asyncfetch.\n"
"""What https://bford.info/cachedir asks for."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file as it is found."""

    path: str
    version: Version
    piece: Piece
    used_at_ns: int
    """Its last use, or its writing."""
    cost_bytes: int
    """What it takes of the disk."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What went."""

    files: int
    cost_bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is, as found by looking at all files."""

    objects: int
    files: int
    cost_bytes: int
    """What the files take of the disk."""
    unfinished_bytes: int
    """What those take that are being written."""
    oldest_use_ns: int | None
    """Since the epoch; None where there is no file."""
    newest_use_ns: int | None


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is being written; its bytes are taken, and nobody else finds it."""

    descriptor: int
    path: str
    cost_bytes: int


class Folder:
    """An open directory. Thread-safe, and shared with other processes; every method blocks. Not for a forked child.

    Args:
        directory: Absolute.
        create: Whether to make it where it isn't there.

    Raises:
        CacheError: It isn't there, can't be used by this user, or lies on a file system without proper locks.
    """

    def __init__(self, directory: Path, *, create: bool) -> None:
        self.directory = directory
        self._root = directory / "v1"
        self._objects, self._new, self._evicting = self._root / "objects", self._root / "new", self._root / "evicting"
        try:
            if not create and not (self._objects.is_dir() and (self._root / "used").is_file()):
                raise CacheError(
                    f"there is no disk tier at {directory}: it has no {self._root.name}/used beside objects"
                )
            self._prepare()
            self._account = Account(self._root / "used")
            try:
                if self._account.used_bytes() is None:
                    self.count()
                else:
                    self.sweep()
            except BaseException:
                self._account.close()
                raise
        except OSError as error:
            raise _unusable(directory, error) from error

    def _prepare(self) -> None:
        if not self.directory.exists():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # what others may read is theirs to decide
        self._objects.mkdir(parents=True, exist_ok=True)
        self._new.mkdir(exist_ok=True)
        require_locks(self.directory, self._root / "used")
        tag = self.directory / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_bytes(_TAG)

    def close(self) -> None:
        """Once nobody is at it; the files stay. Twice is once."""
        self._account.close()

    def used_bytes(self) -> int:
        """What all files together take of the disk, at most."""
        return self._account.used_bytes() or 0

    def free_bytes(self) -> int:
        """Of the disk, for this user."""
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def may_have(self, object_id: str, start: int, stop: int) -> bool:
        """Whether there may be something of the blocks of an object that bytes [start, stop) are in."""
        return any(name.startswith(f"{object_id}-") for name in self._names(object_id, start, stop))

    def path(self, version: Version, piece: Piece) -> str:
        """Where a file is if it is there."""
        return f"{self._objects}/{file_path(version, piece)}"

    def larger(self, version: Version, piece: Piece) -> Piece | None:
        """A piece that is there and holds this one among others."""
        return find_larger(self._names(version.object, piece.start, piece.stop), version, piece)

    def _names(self, object_id: str, start: int, stop: int) -> Iterator[str]:
        """Of all files on the shelves that these bytes belong to."""
        for shelf in shelves(object_id, start, stop):
            with suppress(FileNotFoundError, NotADirectoryError):
                yield from os.listdir(f"{self._objects}/{shelf}")

    # Writing.

    def new_file(self, file_bytes: int, limit_bytes: Callable[[int], int]) -> NewFile | None:
        """A file of this length to write, or None where there is no room for it.

        Args:
            file_bytes: Its length.
            limit_bytes: From the bytes in use, how many may be.
        """
        cost = cost_bytes(file_bytes)
        make = partial(self._make_file, file_bytes, cost)
        new = self._account.take(cost, limit_bytes, make)
        if new is None and self._evict(lambda used: _goal(limit_bytes(used), cost, used), wait=False) is not None:
            new = self._account.take(cost, limit_bytes, make)
        return new

    def _make_file(self, file_bytes: int, cost: int) -> NewFile:
        path = f"{self._new}/{os.urandom(12).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:  # somebody deleted the folder
            self._new.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, whatever ends the writer
            os.truncate(descriptor, file_bytes)  # so that whoever counts sees all of it
        except BaseException:
            os.close(descriptor)
            os.unlink(path)
            raise
        return NewFile(descriptor, path, cost)

    def publish(self, new: NewFile, version: Version, piece: Piece) -> None:
        """Let others find what was written. It takes the place of an equal one. Close the descriptor afterwards."""
        target = self.path(version, piece)
        try:
            os.rename(new.path, target)
        except FileNotFoundError:  # it is the shelf's first
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.rename(new.path, target)

    def discard(self, new: NewFile) -> None:
        """Give up a file that isn't published. Close the descriptor afterwards."""
        self._account.give_back(partial(_delete, new.path, new.cost_bytes))

    def remove(self, path: str, piece: Piece) -> None:
        """Delete the file of a piece, which may have gone already."""
        self._account.give_back(partial(_delete, path, cost_bytes(piece.file_bytes)))

    # Keeping house.

    def files(self) -> Iterator[BlockFile]:
        """All files, in no order. What comes and goes meanwhile may be among them or not."""
        for entry, status in self._found():
            yield BlockFile(entry.path, *parse_file_name(entry.name), status.st_mtime_ns, cost_bytes(status.st_size))

    def _found(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        for each in _entries(self._objects):
            for entry in _entries(each.path):
                if is_file_name(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        yield entry, entry.stat(follow_symlinks=False)

    def survey(self) -> Survey:
        """Look at everything."""
        objects, times, costs = array("Q"), array("q"), array("q")  # 24 bytes a file: there may be millions
        for entry, status in self._found():
            objects.append(int(entry.name[:16], 16))
            times.append(status.st_mtime_ns)
            costs.append(cost_bytes(status.st_size))
        return Survey(
            objects=len(np.unique(np.frombuffer(objects, np.uint64))),
            files=len(times),
            cost_bytes=sum(costs),
            unfinished_bytes=self._unfinished_bytes(),
            oldest_use_ns=min(times, default=None),
            newest_use_ns=max(times, default=None),
        )

    def count(self) -> int:
        """What there is, counted; sets the account right. Waits for those who evict."""
        self._evict(lambda used: used, wait=True)
        return self.used_bytes()

    def prune(self, max_bytes: int) -> Removed:
        """Delete what was used longest ago until at most ``max_bytes`` are left. Waits for others who do."""
        removed = self._evict(lambda _used: max_bytes, wait=True)
        assert removed is not None
        return removed

    def sweep(self) -> int:
        """Delete what dead writers left, and return how many bytes that was."""
        return self._account.give_back(lambda: sum(_delete_if_abandoned(entry.path) for entry in _entries(self._new)))

    def _evict(self, goal_bytes: Callable[[int], int], *, wait: bool) -> Removed | None:
        """Delete the longest unused until ``goal_bytes`` of what there is are left; None while another does that."""
        with self._sole_evictor(wait=wait) as sole:
            if not sole:
                return None
            taken_before = self._account.taken_bytes()
            self.sweep()
            # First those that are being written: they may be published meanwhile, and then count twice, not never.
            unfinished_bytes = self._unfinished_bytes()
            times, costs = self._times_and_costs()
            total = unfinished_bytes + int(costs.sum())
            removed = self._delete_oldest(times, costs, total - goal_bytes(total))
            self._account.recount(total - removed.cost_bytes, taken_before)
            return removed

    def _unfinished_bytes(self) -> int:
        return sum(_cost_of(entry) for entry in _entries(self._new))

    def _times_and_costs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of all files: 16 bytes for each, because there may be millions."""
        times, costs = array("q"), array("q")
        for _, status in self._found():
            times.append(status.st_mtime_ns)
            costs.append(cost_bytes(status.st_size))
        return np.frombuffer(times, np.int64), np.frombuffer(costs, np.int64)

    def _delete_oldest(
        self,
        times: NDArray[np.int64],
        costs: NDArray[np.int64],
        excess_bytes: int,
    ) -> Removed:
        """Delete what makes up ``excess_bytes``, but nothing that was used since it was looked at."""
        if excess_bytes <= 0 or not len(times):
            return Removed(0, 0)
        order = np.argsort(times, kind="stable")
        position = int(np.searchsorted(np.cumsum(costs[order]), excess_bytes))
        newest = int(times[order[min(position, len(order) - 1)]])
        files = gone = 0
        for entry, status in self._found():
            if gone >= excess_bytes:
                break
            if status.st_mtime_ns > newest:
                continue
            with suppress(OSError):  # another was faster, or it is another user's
                os.unlink(entry.path)
                files, gone = files + 1, gone + cost_bytes(status.st_size)
        return Removed(files, gone)

    @contextmanager
    def _sole_evictor(self, *, wait: bool) -> Iterator[bool]:
        descriptor = os.open(self._evicting, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                try:
                    yield True
                finally:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has it open, for hours perhaps
        finally:
            os.close(descriptor)


def _goal(limit_bytes: int, needed_bytes: int, used_bytes: int) -> int:
    """Down to where, so that ``needed_bytes`` and a few more files fit; nowhere if they can't anyhow."""
    return used_bytes if limit_bytes < needed_bytes else limit_bytes - max(needed_bytes, limit_bytes // SLACK)


def _entries(path: str | Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        pass


def _cost_of(entry: os.DirEntry[str]) -> int:
    try:
        return cost_bytes(entry.stat(follow_symlinks=False).st_size)
    except FileNotFoundError:
        return 0


def _delete(path: str, most_bytes: int) -> int:
    """Delete a file and return what it took, at most what it was counted as."""
    try:
        cost = cost_bytes(os.stat(path).st_size)
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return min(cost, most_bytes)


def _delete_if_abandoned(path: str) -> int:
    """Delete an unfinished file whose writer is no more, and return what it took."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return cost_bytes(os.fstat(descriptor).st_size)
    except (BlockingIOError, FileNotFoundError, PermissionError):  # it is being written, was published, or isn't ours
        return 0
    finally:
        os.close(descriptor)


def _unusable(directory: Path, error: OSError) -> CacheError:
    message = f"the disk tier's directory {directory} can't be used: {error.strerror or error}"
    if not isinstance(error, PermissionError):
        return CacheError(f"{message} ({error.filename or directory}). Choose another one, or see to it")
    try:
        owner = directory.stat().st_uid
    except OSError:
        return CacheError(f"{message}. Choose one below a folder that user {_user(os.geteuid())} may write to")
    return CacheError(
        f"{message}. It belongs to user {_user(owner)}, and this is user {_user(os.geteuid())}: choose a directory of "
        "your own, or share it (a common group, chmod -R g+rwX and g+s on its folders, and umask 002 for both)"
    )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)

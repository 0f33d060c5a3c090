"""The directory of a disk cache: room, eviction and locks.

Readers take no lock. An open file stays readable when it is deleted, and every file is complete, because it is written
elsewhere and renamed into its place. So only writers have to agree, on the number of bytes (`SharedCounter`), and
deleters, of which there is one at a time.

Finding the least recently used files means looking at all of them, which takes 10 us of a processor for each, and
longer if the disk is read. So a twentieth of the bound is deleted at a time. Meanwhile nothing is written.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import struct
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from asyncfetch.cache.disk.layout import cost_bytes
from asyncfetch.cache.disk.subdirectories import Removal, Subdirectories, entries, unwatched
from asyncfetch.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from asyncfetch.cache.disk.layout import BlockSpan, VersionFile
    from asyncfetch.cache.disk.subdirectories import Progress

T = TypeVar("T")

_NUMBERS: Final = struct.Struct("<QQ")
_CHECKSUM: Final = struct.Struct("<I")
"""CRC-32 of the numbers: a flipped bit in the first one could break the bound unnoticed."""
_UNKNOWN: Final = 2**62


class SharedCounter:
    """The bytes in use, one number in a file that all processes lock. Thread-safe; not for a forked child.

    The number may be too high, never too low, so the bound holds whenever a process is killed. A writer takes the bytes
    before it makes a file; a deleter gives them back after it deleted one. Bytes lost by a kill between the two, or by
    files that were deleted by hand, come back at the next count of the files. Without a number, or with a wrong
    checksum, nothing was counted yet, and the cache counts as full.

    Counting takes long, and writers don't wait for it. So the file also has the sum of all bytes ever taken: the count
    may have missed those taken meanwhile, so they are added to it. ``prepare`` makes the file's folder if it is gone.
    """

    def __init__(self, path: Path, prepare: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._prepare = prepare
        self._descriptor = _open(path)
        self._threads = threading.Lock()  # the file's lock excludes other openings of it, not other threads
        self._closed = False

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._threads:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)

    def used_bytes(self) -> int | None:
        """An upper bound of the bytes in use; None before the first count."""
        with self._locked():
            used, _ = self._read()
        return None if used >= _UNKNOWN else used

    def taken_bytes(self) -> int:
        """The sum of all bytes ever taken, to be read before a count."""
        with self._locked():
            return self._read()[1]

    def take(self, size_bytes: int, limit_bytes: Callable[[int], int], make: Callable[[], T]) -> T | None:
        """Take the bytes and return ``make()``; None if that is more than ``limit_bytes(bytes in use now)``.

        ``make`` makes the file, with its full length, under the lock.
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
        """Give back the bytes that ``delete()`` returns, the size of what it deleted; returns them.

        It runs under the lock: a count that has missed the files must not be reduced by them.
        """
        with self._locked():
            size_bytes = delete()
            used, taken = self._read()
            if size_bytes and used < _UNKNOWN:
                self._write(max(0, used - size_bytes), taken)
            return size_bytes

    def recount(self, counted_bytes: int, taken_before: int) -> None:
        """Set the result of a count that began when ``taken_before`` was read."""
        with self._locked():
            _, taken = self._read()
            self._write(counted_bytes + max(0, taken - taken_before), taken)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            if self._closed:
                raise OSError(f"{self._path} was closed")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                while not self._is_there():
                    self._reopen()
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _is_there(self) -> bool:
        """Return whether the open file is still the one at the path; the folder may have been moved or deleted."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        return False

    def _reopen(self) -> None:
        self._prepare()
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
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


_MOUNTS: Final = Path("/proc/self/mountinfo")
_REMEDY: Final = "Choose a directory on a local disk (ext4, xfs, btrfs, tmpfs, ...), on each machine its own"
_UNFIT: Final = frozenset(("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "vboxsf", "drvfs"))
"""File systems shared over a network or with a host. Some have unreliable locks; none keeps a deleted file readable for
its readers as a local disk does. Ceph, GPFS and Lustre with ``flock`` do."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo."""

    point: str
    file_system: str
    """Its type, such as "ext4" or "fuse.sshfs"."""
    options: frozenset[str]


def mount_of(path: str, lines: Iterable[str]) -> Mount | None:
    """The mount of an absolute path, the last of several that cover it; None if no line names one."""
    found: Mount | None = None
    for line in lines:
        left, separator, right = line.partition(" - ")
        front, back = left.split(), right.split()
        if not separator or len(front) < 6 or len(back) < 1:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), front[4])
        if not (path + "/").startswith(point.rstrip("/") + "/"):
            continue
        if found is None or len(point) >= len(found.point):
            options = frozenset(front[5].split(",")) | frozenset(back[2].split(",") if len(back) > 2 else ())
            found = Mount(point, back[0], options)
    return found


def why_unfit(mount: Mount) -> str | None:
    """Why a mount is unfit for a disk cache; None if no reason is known."""
    kind = mount.file_system
    if kind == "lustre" and not mount.options & {"flock", "localflock"}:
        return "Lustre is mounted without its option flock or localflock"
    if kind == "fuse" or kind.startswith("fuse."):
        return "a file system in user space promises neither locks nor whole renames"
    return "its locks, renames and deletions aren't those of a local disk" if kind in _UNFIT else None


def require_locks(directory: Path, lock_file: Path) -> None:
    """CacheError, which names the file system, if locks don't work in a directory or aren't reliable.

    ``lock_file`` in it is made if it doesn't exist, and locked for a moment; OSError if that can't be.
    """
    mount = None
    if _MOUNTS.exists():
        lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
        mount = mount_of(os.path.realpath(directory), lines)
    unfit = why_unfit(mount) if mount is not None else None
    if unfit is None and not _locks_work(lock_file):
        unfit = "a lock that one has, another gets too"
    if unfit is not None:
        where = f"{mount.file_system} (mounted at {mount.point})" if mount is not None else "its file system"
        raise CacheError(f"the disk cache's directory {directory} is on {where}: {unfit}. {_REMEDY}")


def _locks_work(lock_file: Path) -> bool:
    with open(lock_file, "ab") as one, open(lock_file, "ab") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # another one: no locks at all
            return isinstance(error, BlockingIOError)
        else:
            return False
        finally:
            with suppress(OSError):
                fcntl.flock(one, fcntl.LOCK_UN)  # a child forked meanwhile has it open


SLACK: Final = 20
"""A twentieth of the bound is freed at a time, so about 20 files are looked at for each that is written."""
_TAG: Final = b"Signature: 8a477f597d28d172789f06886806bc55\n# Fetched bytes, kept by asyncfetch.\n"
"""The tag specified at https://bford.info/cachedir."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Figures of the whole cache, from a look at all files."""

    objects: int
    files: int
    cost_bytes: int
    """Bytes of the disk that the files take."""
    unfinished_bytes: int
    """Bytes of files that are being written."""
    oldest_use_ns: int | None
    """Time of the oldest use since the epoch, and not after now; None without any file."""
    newest_use_ns: int | None


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is being written. Its bytes are taken, and readers don't find it yet."""

    descriptor: int
    path: str
    file_bytes: int


class Folder:
    """An open directory. Thread-safe, and shared with other processes; every method blocks. Not for a forked child.

    Raises:
        CacheError: It doesn't exist, can't be used by this user, or is on a file system without proper locks.
    """

    def __init__(self, directory: Path, *, create: bool, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.directory = directory
        self._root = directory / "v1"
        self._objects, self._new, self._evicting = self._root / "objects", self._root / "new", self._root / "evicting"
        self.subdirectories = Subdirectories(self._objects, wall_ns=wall_ns)
        used = self._root / "used"
        try:
            if not create and not (self._objects.is_dir() and used.is_file()):
                raise CacheError(f"there is no disk cache at {directory}: it has no v1/used beside objects")
            self._prepare()
            require_locks(directory, used)
            self._counter = SharedCounter(used, self._prepare)
            try:
                if self._counter.used_bytes() is None:
                    self.count()
                else:
                    self.sweep()
            except BaseException:
                self._counter.close()
                raise
        except OSError as error:
            raise _unusable(directory, error) from error

    def _prepare(self) -> None:
        if not self.directory.exists():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # opening it to others is the user's choice
        self._objects.mkdir(parents=True, exist_ok=True)
        self._new.mkdir(exist_ok=True)
        tag = self.directory / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_bytes(_TAG)

    def close(self) -> None:
        """Close it; the files stay. Idempotent."""
        self._counter.close()

    def used_bytes(self) -> int:
        """An upper bound of the bytes that all files take on disk."""
        return self._counter.used_bytes() or 0

    def free_bytes(self) -> int:
        """Free bytes of the disk, for this user."""
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def new_file(self, file_bytes: int, limit_bytes: Callable[[int], int]) -> NewFile | None:
        """A file of this length to write, or None without room for it; ``limit_bytes`` is SharedCounter.take's."""
        return self._counter.take(cost_bytes(file_bytes), limit_bytes, partial(self._make_file, file_bytes))

    def make_room(self, file_bytes: int, limit_bytes: Callable[[int], int]) -> bool:
        """Delete the least recently used files, so that one of this length and a few more fit; returns whether it does.

        It does nothing while another process evicts, or if deleting all files wouldn't be enough.
        """
        cost = cost_bytes(file_bytes)
        if limit_bytes(self.used_bytes()) < cost:
            return False
        if self._evict(lambda used: _goal(limit_bytes(used), cost, used), wait=False) is None:
            return False
        used = self.used_bytes()
        return used + cost <= limit_bytes(used)

    def _make_file(self, file_bytes: int) -> NewFile:
        path = f"{self._new}/{os.urandom(12).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:  # the folder was deleted
            self._new.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, whatever ends the writer
            os.truncate(descriptor, file_bytes)  # so that a count sees all of it
        except BaseException:
            os.close(descriptor)
            os.unlink(path)
            raise
        return NewFile(descriptor, path, file_bytes)

    def discard(self, new: NewFile) -> None:
        """Give up a file that isn't published. Close the descriptor after that."""
        self._counter.give_back(partial(_delete, new.path, new.file_bytes))

    def remove(self, version: VersionFile, piece: BlockSpan) -> None:
        """Delete the file of a piece, if it still exists."""
        self._counter.give_back(partial(_delete, self.subdirectories.path(version, piece), piece.file_bytes))

    def survey(self, progress: Progress = unwatched) -> Survey:
        """A look at all files."""
        found = self.subdirectories.look(progress)
        times = found.used_at_ns
        return Survey(
            objects=len(np.unique(found.object_ids)),
            files=len(times),
            cost_bytes=int(found.cost_bytes.sum()),
            unfinished_bytes=self._unfinished_bytes(),
            oldest_use_ns=int(times.min()) if len(times) else None,
            newest_use_ns=int(times.max()) if len(times) else None,
        )

    def count(self) -> int:
        """Count all bytes, and correct the counter. Waits for evictions."""
        self._evict(lambda used: used, wait=True)
        return self.used_bytes()

    def prune(self, max_bytes: int, progress: Progress = unwatched) -> Removal:
        """Delete the least recently used files until at most ``max_bytes`` are left. Waits for evictions.

        If it is interrupted, the deleted files count as present until the next count.
        """
        return self._evict(lambda _used: max_bytes, wait=True, progress=progress) or Removal(0, 0)

    def sweep(self) -> int:
        """Delete the unfinished files of dead writers; returns their bytes."""
        return self._counter.give_back(lambda: sum(_delete_if_abandoned(entry.path) for entry in entries(self._new)))

    def _evict(self, goal_bytes: Callable[[int], int], *, wait: bool, progress: Progress = unwatched) -> Removal | None:
        """Delete the least recently used until ``goal_bytes(total)`` are left; None while another process does."""
        with open(self._evicting, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return None
            try:
                taken_before = self._counter.taken_bytes()
                self.sweep()
                # Unfinished files first: one that is published meanwhile counts twice, else it might be missed.
                unfinished_bytes = self._unfinished_bytes()
                found = self.subdirectories.look(progress)
                total = unfinished_bytes + int(found.cost_bytes.sum())
                removed = self.subdirectories.delete_oldest(found, total - goal_bytes(total), progress)
                self._counter.recount(total - removed.cost_bytes, taken_before)
                return removed
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked meanwhile may keep it open for hours

    def _unfinished_bytes(self) -> int:
        total = 0
        for entry in entries(self._new):
            with suppress(FileNotFoundError):
                total += cost_bytes(entry.stat(follow_symlinks=False).st_size)
        return total


def _goal(limit_bytes: int, needed_bytes: int, used_bytes: int) -> int:
    """The bytes to keep, so that ``needed_bytes`` and a few more files fit; all if they can't fit."""
    return used_bytes if limit_bytes < needed_bytes else limit_bytes - max(needed_bytes, limit_bytes // SLACK)


def _delete(path: str, file_bytes: int) -> int:
    """Delete a file and return the bytes that it takes, at most those of the length that it was counted with."""
    try:
        size_bytes = os.stat(path).st_size
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return cost_bytes(min(size_bytes, file_bytes))


def _delete_if_abandoned(path: str) -> int:
    """Delete an unfinished file of a dead writer; returns the bytes that it takes."""
    try:
        with open(path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            return cost_bytes(os.fstat(file.fileno()).st_size)
    except (BlockingIOError, FileNotFoundError, PermissionError, IsADirectoryError):
        return 0  # it is being written, was published, or isn't ours


def _unusable(directory: Path, error: OSError) -> CacheError:
    message = f"the disk cache's directory {directory} can't be used: {error.strerror or error}"
    if not isinstance(error, PermissionError):
        return CacheError(f"{message} ({error.filename or directory}). Choose another one, or see to it")
    user = _user(os.geteuid())
    try:
        owner = _user(directory.stat().st_uid)
    except OSError:
        return CacheError(f"{message}. Choose one below a folder that user {user} may write to")
    return CacheError(
        f"{message}. It belongs to user {owner}, and this is user {user}: choose a directory of your own, or share it "
        "(a common group, chmod -R g+rwX and g+s on its folders, and umask 002 for both)"
    )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)

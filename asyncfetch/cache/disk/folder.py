"""The directory of a disk cache: who may write how much to it, and when something has to go.

Readers take no lock. What they opened stays readable when it is deleted, and what they find is whole, because a file is
written elsewhere and renamed into its place. So only those who make files have to agree, on how many bytes there may be
(`SharedCounter`), and those who delete some, of whom there is one at a time.

Choosing the longest unused means to look at all files, which takes 10 us of a processor for each, and longer where the
disk is asked. So a twentieth of the bound goes at a time. Who wants to write meanwhile goes without.
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
from asyncfetch.cache.disk.subdirectories import Subdirectories, entries, unwatched
from asyncfetch.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from asyncfetch.cache.disk.layout import BlockSpan, VersionFile
    from asyncfetch.cache.disk.subdirectories import Progress, Removal

T = TypeVar("T")

_NUMBERS: Final = struct.Struct("<QQ")
_CHECKSUM: Final = struct.Struct("<I")
"""CRC-32 of the numbers: with a bit less in the first one the bound would be broken, and nobody would know."""
_UNKNOWN: Final = 2**62


class SharedCounter:
    """The bytes in use, one number in a file that all processes lock. Thread-safe; every method blocks for a moment.

    The number may be too high, never too low, so the bound holds whatever is killed when. Whoever wants to write takes
    the bytes first and makes the file then; whoever deletes gives them back after that. What gets lost between the two
    by a kill, or by files that somebody else deletes, comes back at the next count of what is really there.

    A file without a number, or with one that isn't what was written, means that nobody has counted yet; until then
    everything is taken for full.

    Counting takes long, and nobody waits for it. So beside the bytes in use stands the sum of all that was ever taken:
    what was taken while somebody counted may have been missed by the count, and is added to it.

    The system gives the lock of a killed process back. A forked child must not use it.

    Args:
        path: The file; made where it isn't there.
        prepare: Makes its folder, where that has gone.

    Raises:
        OSError: It can't be opened for reading and writing.
    """

    def __init__(self, path: Path, prepare: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._prepare = prepare
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
                while not self._is_there():
                    self._reopen()
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _is_there(self) -> bool:
        """Return whether the open file is the one that all find; the folder may have been moved or deleted."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _reopen(self) -> None:
        """Somebody took the file away; those who come now make a new one, and all must use the same."""
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
"""Shared over a network or with a host. Some have locks, on good days; none deletes a file that another reads as a
local disk does. Ceph, GPFS and Lustre with ``flock`` do."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo."""

    point: str
    file_system: str
    """Its type, such as "ext4" or "fuse.sshfs"."""
    options: frozenset[str]
    """Options of the mount and of the file system."""


def mount_of(path: str, lines: Iterable[str]) -> Mount | None:
    """The mount that an absolute path lies on, the last one where several cover it; None where no line names one."""
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
    """Return what keeps a disk cache from living there; None where nothing is known to."""
    kind = mount.file_system
    if kind == "lustre" and not mount.options & {"flock", "localflock"}:
        return "Lustre is mounted without its option flock or localflock"
    if kind == "fuse" or kind.startswith("fuse."):
        return "a file system in user space promises neither locks nor whole renames"
    return "its locks, renames and deletions aren't those of a local disk" if kind in _UNFIT else None


def require_locks(directory: Path, lock_file: Path) -> None:
    """CacheError, which names the file system, where locks don't work in a directory or can't be relied on.

    Args:
        directory: What the error speaks of.
        lock_file: In it; made where it isn't there, and locked for a moment.

    Raises:
        OSError: The file can't be opened for writing.
    """
    mount = None
    if _MOUNTS.exists():
        # Names of mounts needn't be UTF-8.
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        mount = mount_of(os.path.realpath(directory), lines)
    unfit = why_unfit(mount) if mount is not None else None
    if unfit is None and not _locks_work(lock_file):
        unfit = "a lock that one has, another gets too"
    if unfit is not None:
        where = f"{mount.file_system} (mounted at {mount.point})" if mount is not None else "its file system"
        raise CacheError(f"the disk cache's directory {directory} is on {where}: {unfit}. {_REMEDY}")


def _locks_work(lock_file: Path) -> bool:
    one = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    other = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no locks at all
    else:
        return False
    finally:
        with suppress(OSError):
            fcntl.flock(one, fcntl.LOCK_UN)  # a child forked meanwhile has it open
        os.close(other)
        os.close(one)


SLACK: Final = 20
"""A twentieth of the bound is freed at a time: so about 20 files are looked at for each that is written."""
_TAG: Final = b"Signature: 8a477f597d28d172789f06886806bc55\n# Fetched bytes, kept by asyncfetch.\n"
"""The tag that https://bford.info/cachedir asks for."""


@dataclass(frozen=True, slots=True)
class Survey:
    """All that there is, as found by looking at all files."""

    objects: int
    files: int
    cost_bytes: int
    """Bytes of the disk that the files take."""
    unfinished_bytes: int
    """Bytes that those take that are being written."""
    oldest_use_ns: int | None
    """Time of the oldest use since the epoch, and not after now; None where there is no file."""
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
        wall_ns: Nanoseconds since the epoch.

    Attributes:
        directory: As given.
        subdirectories: The files that are whole.

    Raises:
        CacheError: It isn't there, can't be used by this user, or lies on a file system without proper locks.
    """

    def __init__(self, directory: Path, *, create: bool, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.directory = directory
        self._root = directory / "v1"
        self._objects, self._new, self._evicting = self._root / "objects", self._root / "new", self._root / "evicting"
        self.subdirectories = Subdirectories(self._objects, wall_ns=wall_ns)
        try:
            if not create and not (self._objects.is_dir() and (self._root / "used").is_file()):
                raise CacheError(
                    f"there is no disk cache at {directory}: it has no {self._root.name}/used beside objects"
                )
            self._prepare()
            require_locks(directory, self._root / "used")
            self._counter = SharedCounter(self._root / "used", self._prepare)
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
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # what others may read is theirs to decide
        self._objects.mkdir(parents=True, exist_ok=True)
        self._new.mkdir(exist_ok=True)
        tag = self.directory / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_bytes(_TAG)

    def close(self) -> None:
        """Once nobody is at it; the files stay. Twice is once."""
        self._counter.close()

    def used_bytes(self) -> int:
        """Return what all files together take of the disk, at most."""
        return self._counter.used_bytes() or 0

    def free_bytes(self) -> int:
        """Return the free bytes of the disk, for this user."""
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def new_file(self, file_bytes: int, limit_bytes: Callable[[int], int]) -> NewFile | None:
        """A file of this length to write, or None where there is no room for it.

        Args:
            file_bytes: Its length.
            limit_bytes: From the bytes in use, how many may be.
        """
        cost = cost_bytes(file_bytes)
        return self._counter.take(cost, limit_bytes, partial(self._make_file, file_bytes, cost))

    def make_room(self, file_bytes: int, limit_bytes: Callable[[int], int]) -> bool:
        """Delete the longest unused, so that a file of this length and a few more fit; whether it does now.

        Looks at no file while another does that, nor where all that could go wouldn't be enough.
        """
        cost = cost_bytes(file_bytes)
        if limit_bytes(self.used_bytes()) < cost:
            return False
        removed = self._evict(lambda used: _goal(limit_bytes(used), cost, used), wait=False, progress=unwatched)
        if removed is None:
            return False
        used = self.used_bytes()
        return used + cost <= limit_bytes(used)

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

    def publish(self, new: NewFile, version: VersionFile, piece: BlockSpan) -> None:
        """Let others find what was written. It takes the place of an equal one. Close the descriptor afterwards."""
        self.subdirectories.put(new.path, version, piece)

    def discard(self, new: NewFile) -> None:
        """Give up a file that isn't published. Close the descriptor afterwards."""
        self._counter.give_back(partial(_delete, new.path, new.cost_bytes))

    def remove(self, version: VersionFile, piece: BlockSpan) -> None:
        """Delete the file of a piece, which may have gone already."""
        self._counter.give_back(
            partial(_delete, self.subdirectories.path(version, piece), cost_bytes(piece.file_bytes))
        )

    def survey(self, progress: Progress = unwatched) -> Survey:
        """Look at everything; see Subdirectories.look."""
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
        """Return what there is, counted; sets the counter right. Waits for those who evict."""
        self._evict(lambda used: used, wait=True, progress=unwatched)
        return self.used_bytes()

    def prune(self, max_bytes: int, progress: Progress = unwatched) -> Removal:
        """Delete what was used longest ago until at most ``max_bytes`` are left. Waits for others who do.

        What is interrupted has deleted a part, and counts as there until the next count.
        """
        removed = self._evict(lambda _used: max_bytes, wait=True, progress=progress)
        assert removed is not None
        return removed

    def sweep(self) -> int:
        """Delete what dead writers left, and return how many bytes that was."""
        return self._counter.give_back(lambda: sum(_delete_if_abandoned(entry.path) for entry in entries(self._new)))

    def _evict(self, goal_bytes: Callable[[int], int], *, wait: bool, progress: Progress) -> Removal | None:
        """Delete the longest unused until ``goal_bytes`` of what there is are left; None while another does that."""
        with self._sole_evictor(wait=wait) as sole:
            if not sole:
                return None
            taken_before = self._counter.taken_bytes()
            self.sweep()
            # First those that are being written: they may be published meanwhile, and then count twice, not never.
            unfinished_bytes = self._unfinished_bytes()
            found = self.subdirectories.look(progress)
            total = unfinished_bytes + int(found.cost_bytes.sum())
            removed = self.subdirectories.delete_oldest(found, total - goal_bytes(total), progress)
            self._counter.recount(total - removed.cost_bytes, taken_before)
            return removed

    def _unfinished_bytes(self) -> int:
        return sum(_cost_of(entry) for entry in entries(self._new))

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
    message = f"the disk cache's directory {directory} can't be used: {error.strerror or error}"
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

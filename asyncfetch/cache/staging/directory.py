"""The directory of one pool in one process: made at the first file, gone with its owner.

Its name is random. Beside it is a lock file of the same name, locked (flock) as long as the owner lives, so a killed
owner leaves a lock that any process can take, in whatever container it ran. Making or closing a directory removes those
of dead owners in the same parent. On a file system without locks nothing is swept.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import secrets
import shutil
import sys
import tempfile
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from asyncfetch.cache.staging.stores import StoredFile
from asyncfetch.runtime.fork import ForkGuard

if TYPE_CHECKING:
    from asyncfetch.cache.staging.stores import SourceInfo

PREFIX = "asyncfetch-staging-"
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One staged file, under a path of its own."""

    path: str
    size_bytes: int
    crc: int
    """zlib.crc32 of the content: a short, overwritten or rotten file is read again rather than handed out."""
    source: SourceInfo | None

    def read(self) -> StoredFile | None:
        """The content; None if the file is gone or damaged. OSError if no file can be opened."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                data = file.readall()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
                raise  # the file is fine, and another call can read it
            return None
        is_right = len(data) == self.size_bytes and zlib.crc32(data) == self.crc
        return StoredFile(data, self.source) if is_right else None


class StagingDirectory:
    """Writes and removes staged files. Thread-safe; every method does file I/O. In a forked child, does nothing."""

    def __init__(self, parent: str | None) -> None:
        self._parent = parent
        self._guard = ForkGuard("this staging directory")
        self._lock = threading.Lock()
        self._owned: _OwnedDirectory | None = None
        self.is_closed = False
        """True if nothing is written any more."""
        self._names = count()
        self._finalizer: Any = None

    @property
    def parent(self) -> str:
        """The directory that this one is made in: as given, or the system's for temporary files."""
        return os.path.abspath(self._parent or tempfile.gettempdir())

    @property
    def path(self) -> str | None:
        """The directory of the files; None before the first one and after the end."""
        return None if self._owned is None else self._owned.path

    def close_at_exit(self) -> None:
        """Close it when the process ends, unless it is closed by then. To be called once, before the first file."""
        atexit.register(self.close)
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            self._finalizer = util.Finalize(None, self.close, exitpriority=10)  # its children leave without atexit

    def write(self, stored: StoredFile) -> StagedFile:
        """A new file, whole or not at all, under a name that is never used again; OSError if it can't be written."""
        owned = self._open()
        path = f"{owned.path}/{next(self._names):x}"
        part = f"{path}.part"
        try:
            with open(part, "xb") as file:
                file.write(stored.data)
            os.rename(part, path)
        except FileNotFoundError:
            self._lose(owned)
            raise
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
        return StagedFile(path, len(stored.data), zlib.crc32(stored.data), stored.source)

    def remove(self, file: StagedFile) -> None:
        """Remove a file if it exists; OSError if it stays."""
        if not self._guard.in_child:
            with suppress(FileNotFoundError):
                os.unlink(file.path)

    def close(self) -> None:
        """Remove the directory, even during a write, and those of dead owners beside it."""
        if self._guard.in_child:
            return
        with self._lock:
            self.is_closed = True
            owned, self._owned = self._owned, None
        atexit.unregister(self.close)
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None
        if owned is not None:
            owned.remove()
        _sweep(self.parent)

    def _open(self) -> _OwnedDirectory:
        if (owned := self._owned) is not None:
            return owned
        parent = self.parent
        os.makedirs(parent, exist_ok=True)
        _sweep(parent)
        with self._lock:  # held while it is made: an exit in between would leave it behind
            if self.is_closed:
                raise FileNotFoundError(f"the staging directory in {parent} was removed")
            if self._owned is None:
                self._owned = _OwnedDirectory(parent)
            return self._owned

    def _lose(self, owned: _OwnedDirectory) -> None:
        """Forget a directory that was deleted: the next write makes another one."""
        with self._lock:
            if self._owned is not owned:
                return
            self._owned = None
        owned.remove()


class _OwnedDirectory:
    """A new directory and its lock, which shows that its owner lives."""

    def __init__(self, parent: str) -> None:
        self._lock_file = -1
        while self._lock_file < 0:
            self.path = os.path.join(parent, PREFIX + secrets.token_hex(8))
            self._lock_file = _new_lock(self.path + LOCK)
        try:
            os.mkdir(self.path, 0o700)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove both. Writes of other threads fail and leave nothing, because the directory is renamed first."""
        gone = f"{self.path}.gone"
        with suppress(OSError):
            os.rename(self.path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(self.path + LOCK)
        os.close(self._lock_file)


def _new_lock(path: str) -> int:
    """The descriptor of a new locked file; -1 if a sweep removed it before it was locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        swept = True
    except OSError:  # no locks here: without the file no sweep can take us for dead
        swept = False
        os.unlink(path)
    else:
        swept = os.fstat(descriptor).st_nlink == 0
    if swept:
        os.close(descriptor)
        return -1
    return descriptor


def _sweep(parent: str) -> None:
    """Remove the directories in ``parent`` whose owners are dead."""
    try:
        with os.scandir(parent) as entries:
            locks = [each.path for each in entries if each.name.startswith(PREFIX) and each.name.endswith(LOCK)]
    except OSError:
        return
    for lock in locks:
        with suppress(OSError):  # another user's, or gone
            _sweep_one(lock)


def _sweep_one(lock: str) -> None:
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            path = lock.removesuffix(LOCK)
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(f"{path}.gone", ignore_errors=True)
            os.unlink(lock)
    finally:
        os.close(descriptor)

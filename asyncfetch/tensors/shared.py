"""Shards in memory that processes of one machine share: files in /dev/shm, read without any request.

A server that shares keeps its larger shards in files of a directory that only its user can read, beside a file with a
secret drawn by chance. It tells who asks the directory's name and the secret's SHA-256. Who finds that very secret
there is on the same machine, in the same namespace, as the same user; who doesn't goes on over HTTP. The directory's
name has a fixed form, so a server can't make its clients open anything else.

The secret's file is locked as long as its server lives. A process beside the server waits for the lock and removes what
a killed one leaves, however it was killed. Where both were, the next server of the same user removes what it finds
unlocked.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from asyncfetch.runtime.fork import ForkGuard

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SHARED_FROM_BYTES", "SharedDirectory", "find_shared", "read_shared"]

SHARED_FROM_BYTES = 64 * 1024
"""Frames from this size on are shared. Opening and mapping a file costs as much as sending a smaller one in a batch."""
ROOT = Path("/dev/shm")
SECRET = "secret"
_NAME = re.compile("asyncfetch-tensors-[0-9a-f]{32}")
_DEADLY = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
_REMOVE = """
import fcntl, shutil, sys
path, secret = sys.argv[1:]
with open(secret, "rb") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    shutil.rmtree(path, ignore_errors=True)
"""


class SharedDirectory:
    """A server's side. All of it may block for as long as it takes to clear memory: keep it off the loop."""

    def __init__(self) -> None:
        """Makes it; OSError where there is no /dev/shm to write to, or no process to be had that removes it."""
        _sweep()
        self._guard = ForkGuard("this SharedDirectory")
        self.path = ROOT / f"asyncfetch-tensors-{secrets.token_hex(16)}"
        self.path.mkdir(mode=0o700)
        secret = secrets.token_bytes(32)
        self.proof = hashlib.sha256(secret).hexdigest()
        descriptor = os.open(self._part(SECRET), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._lock = os.fdopen(descriptor, "r+b", buffering=0)
        self._lock.write(secret)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.publish(SECRET)  # locked already, or another server's sweep would take it for a dead one's
        try:
            self._remover = _start_remover(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            raise
        _open_directories.add(self)

    def create(self, name: str, nbytes: int) -> NDArray[np.uint8] | None:
        """Writable memory (nbytes,) of a new file that nobody finds before ``publish``; None where it doesn't fit."""
        descriptor = -1
        try:
            descriptor = os.open(self._part(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(descriptor, 0, nbytes)  # a page that isn't there at its first touch kills the process
            return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        except FileExistsError:
            return None  # somebody else's, under way
        except OSError:
            self.discard_unpublished(name)
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def publish(self, name: str) -> None:
        """Let others find the file."""
        os.rename(self._part(name), self.path / name)

    def discard(self, name: str) -> None:
        """Remove a file. Its memory is free when the last mapping of it is gone."""
        (self.path / name).unlink(missing_ok=True)

    def discard_unpublished(self, name: str) -> None:
        """Remove a file that was created and not published."""
        self._part(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything. Does nothing in a forked child."""
        if not self._guard.in_child:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self._remover.kill()
            self._remover.wait()

    def _disown(self) -> None:
        """In a forked child: let go of the lock, which else outlived the server that it speaks for."""
        self._lock.close()

    def _part(self, name: str) -> Path:
        return self.path / f"{name}.part"


_open_directories: weakref.WeakSet[SharedDirectory] = weakref.WeakSet()


def _disown_in_child() -> None:
    for directory in list(_open_directories):
        directory._disown()
    _open_directories.clear()


os.register_at_fork(after_in_child=_disown_in_child)


def _start_remover(path: Path) -> subprocess.Popen[bytes]:
    """A process that removes the directory when nobody holds its lock any more.

    What ends its server mustn't end it. So it is in a session of its own, without a terminal or the server's files, and
    born with the signals blocked that clusters send to every process of a job.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEADLY)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVE, path, path / SECRET],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def find_shared(name: str, proof: str) -> Path | None:
    """The directory of that name, where it is another's on this machine that proves itself; else None."""
    path = ROOT / name
    if _NAME.fullmatch(name) is None:
        return None
    secret = _read(path / SECRET)
    return path if secret is not None and hashlib.sha256(secret).hexdigest() == proof else None


def read_shared(path: Path, name: str, nbytes: int) -> NDArray[np.uint8] | None:
    """The file's bytes, mapped; None where it isn't there, or isn't of that size.

    Written to, the mapping gets pages of its own, and nobody else sees it. It lasts longer than the file.
    """
    with suppress(OSError), _open(path / name) as file:
        if os.fstat(file.fileno()).st_size == nbytes:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes, mmap.MAP_PRIVATE, protection), np.uint8)
    return None


def _open(path: Path) -> BinaryIO:
    """A file of this user's own, no link; OSError where it is none."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)
    if os.fstat(file.fileno()).st_uid == os.geteuid():
        return file
    file.close()
    raise PermissionError(path)


def _read(path: Path) -> bytes | None:
    with suppress(OSError), _open(path) as file:
        return file.read(4096)
    return None


def _sweep() -> None:
    """Remove the directories of this user's servers that were killed."""
    for path in ROOT.glob("asyncfetch-tensors-*"):
        with suppress(OSError), _open(path / SECRET) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)

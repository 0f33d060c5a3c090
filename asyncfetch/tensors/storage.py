"""A server's shards in memory, within a bound, each for a limited time. No loop, no HTTP; safe to use from any thread.

Processes of one machine share memory: files in /dev/shm, read without any request. A server that shares keeps its
larger shards in files of a directory that only its user can read, beside a file with a random secret. Clients get the
directory's name and the secret's SHA-256 from the server. A client that finds that secret there is on the same machine,
in the same namespace, as the same user; others go on over HTTP. The directory's name has a fixed form, so a server
can't make its clients open anything else.

The secret's file is locked as long as its server lives. A process beside the server waits for the lock and removes the
directory, however the server ended. If both were killed, the next server of the same user removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from asyncfetch.errors import TensorError
from asyncfetch.observe import Figures
from asyncfetch.runtime.fork import ForkGuard
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.tensors.wire import Header, check_payload

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

SHARED_FROM_BYTES = 64 * 1024
"""Frames from this size on are shared. Mapping a file costs as much as sending a smaller frame in a batch."""
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
    """A server's side. Every method may block while the system clears memory: keep it off the loop."""

    def __init__(self) -> None:
        """OSError if /dev/shm can't be written, or no process can be started to remove it."""
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
        self.publish(SECRET)  # once locked, or another server's sweep would take it for a dead server's
        try:
            self._remover = _start_remover(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            raise
        _open_directories.add(self)

    def create(self, name: str, nbytes: int) -> NDArray[np.uint8] | None:
        """Writable memory (nbytes,) of a new file, hidden before ``publish``; None if it doesn't fit."""
        descriptor = -1
        try:
            descriptor = os.open(self._part(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(descriptor, 0, nbytes)  # a page missing at its first touch kills the process
            return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        except FileExistsError:
            return None  # another upload's, under way
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
        """Remove a file. Its memory is freed with the last mapping of it."""
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

    def _part(self, name: str) -> Path:
        return self.path / f"{name}.part"


_open_directories: weakref.WeakSet[SharedDirectory] = weakref.WeakSet()


def _disown_in_child() -> None:
    for directory in list(_open_directories):
        directory._lock.close()  # it would outlive the server there
    _open_directories.clear()


os.register_at_fork(after_in_child=_disown_in_child)


def _start_remover(path: Path) -> subprocess.Popen[bytes]:
    """A process that removes the directory when its lock is free.

    It must outlive its server. So it has a session of its own, without a terminal or the server's files, and starts
    with the signals blocked that clusters send to every process of a job.
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
    """The directory of that name, if it is on this machine and the proof is right; else None."""
    path = ROOT / name
    if _NAME.fullmatch(name) is not None:
        with suppress(OSError), _open(path / SECRET) as file:
            return path if hashlib.sha256(file.read(4096)).hexdigest() == proof else None
    return None


def read_shared(path: Path, name: str, nbytes: int) -> NDArray[np.uint8] | None:
    """The file's bytes, mapped; None if it doesn't exist, or has another size.

    Writes to the mapping go to private pages. It outlives the file.
    """
    with suppress(OSError), _open(path / name) as file:
        if os.fstat(file.fileno()).st_size == nbytes:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes, mmap.MAP_PRIVATE, protection), np.uint8)
    return None


def _open(path: Path) -> BinaryIO:
    """A file of this user's own; OSError if it isn't, or is a link."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)
    if os.fstat(file.fileno()).st_uid == os.geteuid():
        return file
    file.close()
    raise PermissionError(path)


def _sweep() -> None:
    """Remove the directories of this user's killed servers."""
    for path in ROOT.glob("asyncfetch-tensors-*"):
        with suppress(OSError), _open(path / SECRET) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


MAX_IDLE_BYTES = 128 * 1024 * 1024
"""Memory of deleted shards kept for the next ones; not shared memory, which clients may still have mapped."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StorageStatistics(Figures):
    """A snapshot. Counters are since the start."""

    _telling = ("shards", "bytes", "max_bytes", "stored", "read", "refused")
    _of_moment = ("shards", "bytes", "reserved_bytes", "max_bytes", "shared_shards")

    shards: int
    """Shards held now."""
    bytes: int
    """Bytes of the shards' frames. ``bytes + reserved_bytes <= max_bytes`` always."""
    reserved_bytes: int
    """Bytes of uploads under way."""
    max_bytes: int
    shared_shards: int
    """Number of ``shards`` in shared memory."""
    stored: int
    """Shards stored."""
    read: int
    """Shards read, except through shared memory, which the server doesn't see."""
    deleted: int
    """Shards deleted by clients."""
    expired: int
    """Shards that expired."""
    refused: int
    """Uploads refused for lack of room."""


@dataclass(eq=False, slots=True)
class StoredShard:
    """A shard."""

    header: Header
    frame: memoryview
    """Header and tensor, read-only."""
    shared: bool = False
    expires_at: float = math.inf

    @property
    def payload(self) -> memoryview:
        """The tensor's bytes."""
        return self.frame[self.header.header_bytes :]


@dataclass(eq=False, slots=True)
class ShardUpload:
    """Room for one frame, to be filled and committed."""

    shard_id: str
    nbytes: int
    shared: bool = False
    """True once its memory is shared."""
    void: bool = False
    """True if the shard was deleted since, perhaps by a client that missed the answer to its upload."""
    memory: NDArray[np.uint8] | None = None


class ShardStorage:
    """Frames by id, each forgotten ``ttl_seconds`` after it was last stored or read.

    No LeasedLRU, because nothing is evicted to make room: a frame that doesn't fit is refused.

    Args:
        max_bytes: Bound on all frames, uploads included.
        ttl_seconds: Lifetime of a shard after it was last stored or read; None for ever. Reads through shared memory
            don't count, because the server doesn't see them.
        shared: The directory of larger frames, for processes of this machine; None shares nothing.
    """

    def __init__(
        self, max_bytes: int, *, ttl_seconds: float | None = None, shared: SharedDirectory | None = None
    ) -> None:
        self.max_bytes = max_bytes
        self.ttl_seconds = ttl_seconds
        self._shared_directory = shared
        self._pool = MemoryPool(min(MAX_IDLE_BYTES, max_bytes))
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, StoredShard] = OrderedDict()  # in the order of expiry
        self.uploads: set[ShardUpload] = set()
        """Rooms that are neither committed nor given back."""
        self._bytes = self._reserved_bytes = 0
        self._stored = self._read = self._deleted = self._expired = self._refused = 0

    def reserve(self, shard_id: str, nbytes: int) -> ShardUpload:
        """Room for a frame of this size, to commit or give back; TensorError if there is none now."""
        with self._lock:
            if self._bytes + self._reserved_bytes + nbytes > self.max_bytes:
                self._refused += 1
                held = self._bytes + self._reserved_bytes
                raise TensorError(f"max_bytes={self.max_bytes} are full: {held} held, {nbytes} asked")
            self._reserved_bytes += nbytes
            upload = ShardUpload(shard_id, nbytes)
            self.uploads.add(upload)
            return upload

    def shares(self, nbytes: int) -> bool:
        """Return whether a frame of this size goes to shared memory, by calls that may block."""
        return self._shared_directory is not None and nbytes >= SHARED_FROM_BYTES

    def take_memory(self, upload: ShardUpload) -> memoryview:
        """Writable memory for the frame; slow for a large one, and may block if it ``shares`` that."""
        if self._shared_directory is not None and self.shares(upload.nbytes):
            upload.memory = self._shared_directory.create(upload.shard_id, upload.nbytes)
            upload.shared = upload.memory is not None
        if upload.memory is None:
            upload.memory = self._pool.take(upload.nbytes)
        return upload.memory.data

    def commit(self, upload: ShardUpload, header: Header) -> bool:
        """Check the bytes and keep them; False if the same shard is stored already. May block if it is shared.

        TensorError if the bytes aren't the header's, another tensor has this id, or it was deleted meanwhile.
        """
        assert upload.memory is not None
        check_payload(header, upload.memory[header.header_bytes :])
        shard_id, now = header.shard_id, time.monotonic()
        with self._lock:
            if upload not in self.uploads:
                raise TensorError(f"the room for {shard_id} was given back", shard_ids=[shard_id])
            if upload.void:
                raise TensorError(f"{shard_id} was deleted while it came", shard_ids=[shard_id])
            there = self._entries.get(shard_id)
            if there is not None:
                if there.header != header:
                    raise TensorError(f"another tensor is stored as {shard_id}", shard_ids=[shard_id])
                self._renew(shard_id, there, now)
                return False
            entry = StoredShard(header, upload.memory.data.toreadonly(), upload.shared)
            self._entries[shard_id] = entry
            self._renew(shard_id, entry, now)
            self.uploads.discard(upload)
            self._reserved_bytes -= upload.nbytes
            self._bytes += upload.nbytes
            self._stored += 1
        if upload.shared and self._shared_directory is not None:
            self._shared_directory.publish(shard_id)
            if shard_id not in self._entries:  # deleted meanwhile, before there was a file
                self._shared_directory.discard(shard_id)
        return True

    def give_back(self, upload: ShardUpload) -> None:
        """Give the room back unless it was committed. May block if it is shared."""
        with self._lock:
            if upload not in self.uploads:
                return
            self.uploads.discard(upload)
            self._reserved_bytes -= upload.nbytes
        if upload.shared and self._shared_directory is not None:
            self._shared_directory.discard_unpublished(upload.shard_id)

    def get(self, shard_id: str) -> StoredShard | None:
        """The shard, if it exists; its lifetime restarts."""
        now = time.monotonic()
        with self._lock:
            entry = self._entries.get(shard_id)
            if entry is None or entry.expires_at <= now:
                return None
            self._read += 1
            self._renew(shard_id, entry, now)
            return entry

    def delete(self, shard_ids: Collection[str]) -> int:
        """Forget these shards; returns how many there were. Uploads of them under way won't be kept."""
        with self._lock:
            coming = set(shard_ids)
            for upload in self.uploads:
                upload.void = upload.void or upload.shard_id in coming
            gone = [shard_id for shard_id in dict.fromkeys(shard_ids) if shard_id in self._entries]
            self._deleted += len(gone)
            files = self._forget(gone)
        self._unlink(files)
        return len(gone)

    def expire(self) -> float | None:
        """Forget expired shards; returns the seconds until the next expires, None if none will."""
        now = time.monotonic()
        with self._lock:
            gone = []
            for shard_id, entry in self._entries.items():
                if entry.expires_at > now:
                    break
                gone.append(shard_id)
            self._expired += len(gone)
            files = self._forget(gone)
            first = next(iter(self._entries.values()), None)
        self._unlink(files)
        return None if first is None or self.ttl_seconds is None else first.expires_at - now

    def close(self) -> None:
        """Forget everything, shared memory too."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0
        self._pool.close()
        if self._shared_directory is not None:
            self._shared_directory.close()

    def statistics(self) -> StorageStatistics:
        """A snapshot."""
        with self._lock:
            return StorageStatistics(
                shards=len(self._entries),
                bytes=self._bytes,
                reserved_bytes=self._reserved_bytes,
                max_bytes=self.max_bytes,
                shared_shards=sum(entry.shared for entry in self._entries.values()),
                stored=self._stored,
                read=self._read,
                deleted=self._deleted,
                expired=self._expired,
                refused=self._refused,
            )

    def _renew(self, shard_id: str, entry: StoredShard, now: float) -> None:
        entry.expires_at = math.inf if self.ttl_seconds is None else now + self.ttl_seconds
        self._entries.move_to_end(shard_id)

    def _forget(self, shard_ids: list[str]) -> list[str]:
        """Take entries off the table; returns those with a file to remove."""
        files = []
        for shard_id in shard_ids:
            entry = self._entries.pop(shard_id)
            self._bytes -= len(entry.frame)
            if entry.shared:
                files.append(shard_id)
        return files

    def _unlink(self, shard_ids: list[str]) -> None:
        for shard_id in shard_ids:
            self._shared_directory.discard(shard_id)  # type: ignore[union-attr]

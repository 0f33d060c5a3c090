"""A server's shards in memory, within a bound, each for its time. No loop, no HTTP; safe to use from any thread."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from asyncfetch.errors import TensorError
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.tensors.shared import SHARED_FROM_BYTES
from asyncfetch.tensors.wire import Header, check_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.tensors.shared import SharedDirectory

__all__ = ["ShardStorage", "StorageStatistics", "Stored", "Upload"]

MAX_IDLE_BYTES = 128 * 1024 * 1024
"""Memory of deleted shards kept for the next ones; shared memory isn't, which somebody may still have mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStatistics:
    """A snapshot. Counters are since the start."""

    shards: int
    """Held now."""
    bytes: int
    """Of their frames. ``bytes + reserved_bytes <= max_bytes`` always."""
    reserved_bytes: int
    """Of uploads under way."""
    max_bytes: int
    shared_shards: int
    """Of ``shards``, such as are in shared memory."""
    stored: int
    """Shards that came."""
    read: int
    """Shards that went, by this process's hands; those read from shared memory don't pass them."""
    deleted: int
    """Shards that clients deleted."""
    expired: int
    """Shards whose time was over."""
    refused: int
    """Uploads that found no room."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A shard."""

    header: Header
    frame: memoryview
    """Header and tensor, read-only."""

    @property
    def payload(self) -> memoryview:
        """The tensor's bytes."""
        return self.frame[self.header.header_bytes :]


@dataclass(slots=True)
class _Entry:
    stored: Stored
    shared: bool
    expires_at: float


class Upload:
    """Room for one frame, to be written to and committed; closing it, as leaving its context does, gives back the rest.

    All of it may block where ``shared``, or where the storage will share it.
    """

    def __init__(self, storage: ShardStorage, shard_id: str, nbytes: int) -> None:
        self.shard_id = shard_id
        self.shared = False
        self.void = False
        """Whether the shard was deleted since: who did that may never have heard that it was stored."""
        self._storage = storage
        self.nbytes = nbytes
        self.is_open = True
        """Whether its room is neither an entry's nor given back."""
        self._memory: NDArray[np.uint8] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what wasn't committed."""
        if self.is_open:
            self.is_open = False
            self._storage._give_back(self)

    def take_memory(self) -> memoryview:
        """Writable memory for the frame; takes its time where that is much."""
        array = self._storage._memory_for(self)
        self._memory = array
        return array.data

    def commit(self, header: Header) -> bool:
        """Check the bytes and keep them; False where the very same shard is there already.

        Raises:
            TensorError: The bytes aren't the header's, another tensor has this id, or it was deleted meanwhile.
        """
        assert self._memory is not None
        check_payload(header, self._memory[header.header_bytes :])
        kept = self._storage._keep(self, Stored(header, self._memory.data.toreadonly()))
        self.is_open = not kept
        if kept and self.shared:
            self._storage._publish(self.shard_id)
        return kept


class ShardStorage:
    """Frames by id. What is asked for or stored gets its full time again; what isn't in ``ttl_seconds`` is forgotten.

    Args:
        max_bytes: Bound on all frames, those under way included.
        ttl_seconds: How long a shard lives after it was last stored or read; None for ever. Reads through shared memory
            don't count, because nobody sees them.
        shared: Where larger frames are put, so that processes of this machine can read them there.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        ttl_seconds: float | None = None,
        shared: SharedDirectory | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self.ttl_seconds = ttl_seconds
        self._shared_directory = shared
        self._now = now
        self._pool = MemoryPool(min(MAX_IDLE_BYTES, max_bytes))
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one that expires first comes first
        self._uploads: set[Upload] = set()
        self._bytes = self._reserved_bytes = 0
        self._stored = self._read = self._deleted = self._expired = self._refused = 0

    def reserve(self, shard_id: str, nbytes: int) -> Upload:
        """Room for a frame of this size; TensorError where there is none now."""
        with self._lock:
            if self._bytes + self._reserved_bytes + nbytes > self.max_bytes:
                self._refused += 1
                held = self._bytes + self._reserved_bytes
                raise TensorError(f"max_bytes={self.max_bytes} are full: {held} held, {nbytes} asked")
            self._reserved_bytes += nbytes
            upload = Upload(self, shard_id, nbytes)
            self._uploads.add(upload)
            return upload

    def shares(self, nbytes: int) -> bool:
        """Whether a frame of this size goes to shared memory, which takes calls that may block."""
        return self._shared_directory is not None and nbytes >= SHARED_FROM_BYTES

    def get(self, shard_id: str) -> Stored | None:
        """The shard, if it is there; its time begins afresh."""
        now = self._now()
        with self._lock:
            entry = self._entries.get(shard_id)
            if entry is None or entry.expires_at <= now:
                return None
            self._read += 1
            self._renew(shard_id, entry, now)
            return entry.stored

    def delete(self, shard_ids: Collection[str]) -> int:
        """Forget these, and return how many of them were there. Those that are just coming won't be kept."""
        with self._lock:
            coming = set(shard_ids)
            for upload in self._uploads:
                upload.void = upload.void or upload.shard_id in coming
            gone = [shard_id for shard_id in dict.fromkeys(shard_ids) if shard_id in self._entries]
            self._deleted += len(gone)
            files = self._forget(gone)
        self._unlink(files)
        return len(gone)

    def expire(self) -> float | None:
        """Forget what has had its time; seconds until the next one has, or None where none ever will."""
        now = self._now()
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

    def _memory_for(self, upload: Upload) -> NDArray[np.uint8]:
        if self._shared_directory is not None and self.shares(upload.nbytes):
            array = self._shared_directory.create(upload.shard_id, upload.nbytes)
            if array is not None:
                upload.shared = True
                return array
        return self._pool.take(upload.nbytes)

    def _keep(self, upload: Upload, stored: Stored) -> bool:
        """Make the reserved room an entry, unless the shard is there."""
        header, now = stored.header, self._now()
        with self._lock:
            if upload not in self._uploads:
                raise TensorError(f"the room for {header.shard_id} was given back", shard_ids=[header.shard_id])
            if upload.void:
                raise TensorError(f"{header.shard_id} was deleted while it came", shard_ids=[header.shard_id])
            there = self._entries.get(header.shard_id)
            if there is not None:
                if there.stored.header != header:
                    raise TensorError(f"another tensor is stored as {header.shard_id}", shard_ids=[header.shard_id])
                self._renew(header.shard_id, there, now)
                return False
            entry = self._entries[header.shard_id] = _Entry(stored, upload.shared, 0.0)
            self._renew(header.shard_id, entry, now)
            self._uploads.discard(upload)
            self._reserved_bytes -= len(stored.frame)
            self._bytes += len(stored.frame)
            self._stored += 1
            return True

    def _publish(self, shard_id: str) -> None:
        assert self._shared_directory is not None
        self._shared_directory.publish(shard_id)
        if shard_id not in self._entries:  # deleted meanwhile, when there was no file yet
            self._unlink([shard_id])

    def _give_back(self, upload: Upload) -> None:
        with self._lock:
            self._uploads.discard(upload)
            self._reserved_bytes -= upload.nbytes
        if upload.shared and self._shared_directory is not None:
            self._shared_directory.discard_unpublished(upload.shard_id)

    def _renew(self, shard_id: str, entry: _Entry, now: float) -> None:
        entry.expires_at = math.inf if self.ttl_seconds is None else now + self.ttl_seconds
        self._entries.move_to_end(shard_id)

    def _forget(self, shard_ids: list[str]) -> list[str]:
        """Take entries off the table; those that have a file to be removed."""
        files = []
        for shard_id in shard_ids:
            entry = self._entries.pop(shard_id)
            self._bytes -= len(entry.stored.frame)
            if entry.shared:
                files.append(shard_id)
        return files

    def _unlink(self, shard_ids: list[str]) -> None:
        for shard_id in shard_ids:
            self._shared_directory.discard(shard_id)  # type: ignore[union-attr]

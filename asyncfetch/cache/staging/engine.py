"""The files of one pool in one process on their way to the disk, and the threads that read them.

    requested -> queued -> read -> written -> staged -> gone with its last handle
                   ^        |  |
                   |        |  +-> failed: its handles get the error
                   +--------+   no room for it

An entry is one generation of a file: a future for the handles that wait for its bytes, and a count of those that don't
yet. A handle refers to the entry, never to its key, so a late handle can't touch a newer one.

Room is taken before a read. But when a handle asks for bytes whose read hasn't begun, it begins at once, with or
without room; handles that ask meanwhile join it. So no handle waits for room, nor for another file that does. A file
larger than all room isn't queued, but read each time that a handle asks.

No file is read while its bytes are on disk, on their way, or still being decoded by a handle of the last read. Bytes
are given up only if there is no room or the disk can't be written; the entry then queues again, at the tail. No bounded
pool can promise more: two files of its size, picked up by turns, are each read for every handle.

One lock guards all of this. No file, store, decoder or callback is used under it. A handle may be collected anywhere,
under this very lock too, so its finaliser only puts its claim into ``dropped``, from which a thread of its own, the
janitor, takes it.

All threads are daemons that hold the engine and never the pool: a forgotten pool is collected, which ends them, and
none keeps an interpreter from exiting. Those of a ThreadPoolExecutor would, and it has none extra for waiting handles.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING
from weakref import ref

from asyncfetch.errors import CacheError
from asyncfetch.runtime.single_flight import SharedFuture
from asyncfetch.runtime.threads import no_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from asyncfetch.cache.staging.directory import StagedFile, StagingDirectory
    from asyncfetch.cache.staging.stores import Binding, StoredFile, ValueStore

    Step = Callable[[], "Step | None"]

_LOGGER = logging.getLogger(__name__)

DIRECT_THREADS = 64
"""Threads beyond the pool's workers, for reads that handles wait for: as many as requests to one host at a time."""
PAUSE_SECONDS = 10.0
"""Seconds without staging after a write failed: a full disk is seldom empty in less, and each try costs the bytes of a
read."""


@dataclass(slots=True)
class StagingRoom:
    """A semaphore of bytes and files, without waiting: what doesn't fit stays in the queue."""

    max_bytes: int
    max_count: int
    """Most files; an empty one counts, too."""
    bytes: int = 0
    count: int = 0

    def fits(self, size_bytes: int) -> bool:
        """Return whether so many bytes can be taken now."""
        return self.count < self.max_count and size_bytes <= self.max_bytes - self.bytes

    def take(self, size_bytes: int) -> bool:
        """Take so much for one file, if it fits."""
        if not self.fits(size_bytes):
            return False
        self.bytes += size_bytes
        self.count += 1
        return True

    def give_back(self, size_bytes: int) -> None:
        """Give back the room of one file."""
        self.bytes -= size_bytes
        self.count -= 1


@dataclass(eq=False, slots=True)
class StagedEntry:
    """One generation of one file. At rest while it isn't queued and no thread works on it."""

    binding: Binding
    """The way that it is read: the first handle's."""
    references: int = 0
    """Handles that haven't asked for their value yet."""
    waiters: int = 0
    """Handles that wait for the read."""
    future: SharedFuture[StoredFile] | None = None
    """The read's bytes for the waiters; of a failed entry, the error for all its handles."""
    in_hand: Callable[[], StoredFile | None] = lambda: None
    """Returns the bytes of the last read, as long as a handle holds them."""
    queue: dict[StagedEntry, None] | None = None
    """The queue that it is in, if any."""
    is_taken: bool = False
    """True while a thread works on it."""
    has_failed: bool = False
    size_bytes: int | None = None
    """Its size, if known."""
    room_bytes: int | None = None
    """Its room on disk, if any."""
    file: StagedFile | None = None
    """Its file, once staged."""


@dataclass(eq=False, slots=True)
class StagingClaim:
    """A handle's reference to an entry. A second release does nothing."""

    entry: StagedEntry
    is_held: bool = True
    """True if it is one of the entry's references."""
    future: SharedFuture[StoredFile] | None = None
    """The read that serves it."""
    has_failed: bool = False
    """True if its handle got the error of that read; then the next ``join`` requests the file again."""

    @property
    def is_counted(self) -> bool:
        """True if its entry is kept or read for it. May be read without the lock."""
        future = self.future
        return self.is_held or (future is not None and not future.done())


class StagingEngine:
    """Entries, directory and threads: so many workers that stage, and helpers for reads that handles wait for.

    Made closed, it only serves handles that outlive their pool.
    """

    def __init__(
        self,
        directory: StagingDirectory,
        room: StagingRoom,
        workers: int,
        *,
        is_closed: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.dropped: SimpleQueue[StagingClaim | None] = SimpleQueue()
        """Claims of collected handles; None has the janitor ``close``. A ``put`` is safe anywhere."""
        self.is_closed = is_closed
        """True if requests are refused."""
        self._room = room
        self._entries: dict[Hashable, StagedEntry] = {}
        self._urgent: dict[StagedEntry, None] = {}
        """Queue of those that handles wait for; like the other ones first come, first served."""
        self._next: dict[StagedEntry, None] = {}
        """Queue of those that wait for room, which come next."""
        self._later: dict[StagedEntry, None] = {}
        """Queue of all others."""
        self._usual_bytes: int | None = None
        self._reads = self._direct_reads = self._write_failures = self._damaged = 0
        self._max_workers = workers
        self._now = now
        self._resume_at = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._threads = Counter[bool]()
        """Workers (False) and helpers (True)."""
        self._idle = 0
        self._has_janitor = False
        self._leftovers: list[StagedFile] = []
        """Files of ended entries, which still have their room."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The lock; after it, leftovers are removed, and work that the change made possible begins."""
        with self._lock:
            yield
            helps = self._hire()
            leftovers, self._leftovers = self._leftovers, []
        for leftover in leftovers:
            self._discard(leftover)
        self._start(helps)

    def figures(self) -> dict[str, int]:
        """The fields of StagingStatistics, but for the bounds."""
        if asyncio._get_running_loop() is None:  # on one, the janitor does it
            self.drain()
        with self._lock:
            return {
                "bytes": self._room.bytes,
                "count": self._room.count,
                "entries": len(self._entries),
                "queued": len(self._later),
                "waiting": len(self._next),
                "reads": self._reads,
                "direct_reads": self._direct_reads,
                "write_failures": self._write_failures,
                "damaged": self._damaged,
            }

    # Called by handles.

    def request(self, binding: Binding) -> StagingClaim:
        """A reference to the binding's file, which is staged in the background."""
        self._open()
        with self._lock:
            claim = StagingClaim(self._entry(binding))
            helps = self._hire()
        try:
            self._start(helps)
        except CacheError:
            with self._lock:
                self._release(claim)
            raise
        return claim

    def adopt(self, binding: Binding, store: ValueStore) -> StagingClaim:
        """Write a user's value now; without room, its store keeps it."""
        self._open()
        entry, stored = StagedEntry(binding), binding.read()
        with self._changing():
            has_room = not self._is_paused and self._take_room(entry, len(stored.data))
        try:
            if has_room:
                entry.file = self._written(stored)
        finally:
            with self._changing():
                if entry.file is None:
                    self._give_back(entry)
        if entry.file is not None:
            store.data = None
        claim = StagingClaim(entry)
        with self._changing():
            entry.references = 1
            self._entries[binding.key] = entry
            if self.is_closed:  # meanwhile
                self._release(claim)
        return claim

    def join(self, claim: StagingClaim) -> SharedFuture[StoredFile] | StagedFile | None:
        """The claim's staged file, or a read to wait for, which is begun if need be.

        None if the claim was released or the engine closed.
        """
        with self._changing():
            if claim.has_failed and not self.is_closed:
                claim.entry, claim.is_held, claim.has_failed = self._entry(claim.entry.binding), True, False
            entry = claim.entry
            if claim.future is not None or not claim.is_held:
                return claim.future
            if entry.file is not None:
                return entry.file
            if self.is_closed and not entry.is_taken and entry.queue is not self._urgent:
                return None
            self._serve(claim)
            return claim.future

    def count_direct_read(self) -> None:
        """Count a read past the cache."""
        with self._lock:
            self._reads += 1
            self._direct_reads += 1

    def ask_anew(self, claim: StagingClaim, future: SharedFuture[StoredFile]) -> None:
        """Make the claim's next ``join`` a new request, since its handle got the error of this read."""
        with self._lock:
            if claim.future is future:
                claim.future, claim.has_failed = None, True

    def distrust(self, claim: StagingClaim, file: StagedFile) -> SharedFuture[StoredFile] | StagedFile | None:
        """``join`` for a claim whose file is missing or damaged: it is read again, once for all its handles."""
        with self._changing():
            self._damaged += 1
            if claim.entry.file is file:
                self._give_up_file(claim.entry)
        return self.join(claim)

    def release(self, claim: StagingClaim) -> None:
        """End the claim. The entry ends with its last one, or with the read or write under way."""
        with self._changing():
            self._release(claim)

    def drain(self) -> None:
        """Release all claims dropped until now."""
        with suppress(Empty):
            while (claim := self.dropped.get_nowait()) is not None:
                self.release(claim)
            self.dropped.put(None)  # the janitor's

    def close(self, wait_seconds: float | None) -> None:
        """Cancel queued reads, wait for those under way, at most so long, and remove the directory."""
        with self._changing():
            self.is_closed = True
            for entry in [*self._entries.values()]:
                if not entry.is_taken and entry.queue is not self._urgent:
                    self._end(entry)
            self._changed.notify_all()
        self.drain()
        with self._lock:
            ended = self._changed.wait_for(lambda: not self._threads.total(), wait_seconds)
        if not ended:
            _LOGGER.warning("a read is still under way %g s after the pool's close; it goes on alone", wait_seconds)
        self.directory.close()
        self.dropped.put(None)

    def _open(self) -> None:
        with self._lock:
            if self.is_closed:
                raise CacheError("the cache pool was closed: make a new one")
            is_first, self._has_janitor = not self._has_janitor, True
        if not is_first:
            return
        self.directory.close_at_exit()
        try:
            _start_thread(self._tidy, "asyncfetch staging janitor")
        except CacheError:
            self._has_janitor = False
            raise

    def _tidy(self) -> None:
        while (claim := self.dropped.get()) is not None:
            self.release(claim)
            del claim
        if not self.is_closed:
            self.close(None)

    # The way of an entry: each step does its I/O, then decides on the next one under the lock. What other threads do
    # happens between two steps, so tests can take them one by one, in every order, in one thread.

    def _size(self, entry: StagedEntry) -> Step | None:
        """Find out its size, and take that room; not if handles wait."""
        size_bytes = entry.size_bytes
        if size_bytes is None and not entry.waiters:  # checked again under the lock
            try:
                size_bytes = entry.binding.size()
            except BaseException as error:  # noqa: BLE001 - it is for the handles
                self._fail(entry, error)
                return None
        with self._changing():
            entry.size_bytes = size_bytes
            if not entry.waiters:  # else it is read with or without room
                if not entry.references or self.is_closed:
                    self._end(entry)
                    return None
                if entry.room_bytes is None and not self._take_room(entry, self._needed_bytes(entry)):
                    self._put_back(entry, self._next)
                    return None
            stored = entry.in_hand()
            if stored is None:
                self._reads += 1
                self._direct_reads += entry.room_bytes is None
        return partial(self._read, entry, stored)

    def _read(self, entry: StagedEntry, stored: StoredFile | None) -> Step | None:
        """Read, unless a handle has the bytes already, and serve the waiters."""
        try:
            stored = stored or entry.binding.read()
        except BaseException as error:  # noqa: BLE001 - likewise
            self._fail(entry, error)
            return None
        size_bytes, writes = len(stored.data), False
        with self._changing():
            future, entry.future, entry.waiters = entry.future, None, 0
            if entry.size_bytes is None:
                self._learn(size_bytes)
            entry.size_bytes = size_bytes
            entry.in_hand = ref(stored)
            if not entry.references or self.is_closed:
                self._end(entry)
            elif not self._is_paused and self._take_room(entry, size_bytes):
                writes = True
            else:
                self._put_back(entry, self._later)
        if future is not None:
            future.set_result(stored)
        return partial(self._write, entry, stored) if writes else None

    def _write(self, entry: StagedEntry, stored: StoredFile) -> None:
        file = self._written(stored)
        with self._changing():
            entry.file = file
            entry.is_taken = False
            if not entry.references or self.is_closed:
                self._end(entry)
            elif file is None:
                self._put_back(entry, self._later)

    def _fail(self, entry: StagedEntry, error: BaseException) -> None:
        """End the entry by an error for all its handles. Later requests read again."""
        with self._changing():
            self._end(entry)
            entry.has_failed = True
            future = entry.future = entry.future or SharedFuture()
        future.fail(error)

    def _written(self, stored: StoredFile) -> StagedFile | None:
        """A new file, or None if it can't be written; then nothing is staged for a while."""
        try:
            return self.directory.write(stored)
        except (OSError, MemoryError) as error:
            with self._changing():
                self._resume_at = self._now() + PAUSE_SECONDS  # else it would be read again and again
                self._write_failures += not self.directory.is_closed
                is_first = self._write_failures == 1 and not self.directory.is_closed
                self._changed.notify_all()
            if is_first:
                _LOGGER.warning(
                    "can't stage in %s: %s. Data is served without staging, and staging tried again every %g s; said "
                    "once, statistics() counts on.",
                    self.directory.parent,
                    error,
                    PAUSE_SECONDS,
                )
            return None

    def _discard(self, leftover: StagedFile) -> None:
        """Remove a file, then give its room back; a file that can't be removed keeps its room."""
        try:
            self.directory.remove(leftover)
        except OSError as error:
            _LOGGER.warning("can't remove a staged file, whose room stays taken until close: %s", error)
            return
        with self._changing():
            self._room.give_back(leftover.size_bytes)

    # Under the lock.

    def _entry(self, binding: Binding) -> StagedEntry:
        entry = self._entries.get(binding.key)
        if entry is None:
            entry = self._entries[binding.key] = StagedEntry(binding)
            self._put(entry, self._later)
        entry.references += 1
        return entry

    def _serve(self, claim: StagingClaim) -> None:
        """Turn a reference to bytes that are in no file into a future."""
        entry = claim.entry
        claim.is_held = False
        entry.references -= 1
        if (stored := entry.in_hand()) is not None:
            claim.future = SharedFuture()
            claim.future.set_result(stored)
            if not entry.references and not entry.is_taken and entry.queue is None:
                self._put(entry, self._later)  # a worker will end it
            return
        claim.future = entry.future = entry.future or SharedFuture()
        entry.waiters += 1
        if not entry.is_taken and not entry.has_failed:
            self._put(entry, self._urgent)

    def _release(self, claim: StagingClaim) -> None:
        entry = claim.entry
        if claim.is_held:
            claim.is_held = False
            entry.references -= 1
        elif claim.future is not None and claim.future is entry.future:
            claim.future = None
            entry.waiters -= 1
        if not (entry.references or entry.waiters or entry.is_taken):
            self._end(entry)

    def _put(self, entry: StagedEntry, queue: dict[StagedEntry, None] | None) -> None:
        """Put it last in a queue, unless it is in that already; None takes it out of any."""
        if entry.queue is not queue:
            if entry.queue is not None:
                del entry.queue[entry]
            entry.queue = queue
            if queue is not None:
                queue[entry] = None

    def _put_back(self, entry: StagedEntry, queue: dict[StagedEntry, None]) -> None:
        """Queue it again, unless it is too large for any room."""
        self._give_back(entry)
        entry.is_taken = False
        if entry.size_bytes is None or entry.size_bytes <= self._room.max_bytes:
            self._put(entry, queue)

    def _end(self, entry: StagedEntry) -> None:
        self._put(entry, None)
        if self._entries.get(entry.binding.key) is entry:
            del self._entries[entry.binding.key]
        entry.is_taken = False
        self._give_up_file(entry)
        self._give_back(entry)

    def _give_up_file(self, entry: StagedEntry) -> None:
        if entry.file is not None:
            self._leftovers.append(entry.file)
            entry.file = entry.room_bytes = None

    def _take_room(self, entry: StagedEntry, size_bytes: int) -> bool:
        """Take exactly so much room in place of its own; if that fails, it has none."""
        self._give_back(entry)
        if self._room.take(size_bytes):
            entry.room_bytes = size_bytes
        return entry.room_bytes is not None

    def _give_back(self, entry: StagedEntry) -> None:
        if entry.room_bytes is not None:
            self._room.give_back(entry.room_bytes)
            entry.room_bytes = None

    def _needed_bytes(self, entry: StagedEntry) -> int:
        """Its size; if unknown, the usual one; before the first read, all free room."""
        if entry.size_bytes is not None:
            return entry.size_bytes
        if self._usual_bytes is None:
            return max(1, self._room.max_bytes - self._room.bytes)
        return min(self._usual_bytes, self._room.max_bytes)

    def _learn(self, size_bytes: int) -> None:
        """Note a size. The usual size is a decaying maximum, so one large file doesn't hold up small ones for ever."""
        usual = self._usual_bytes or 0
        self._usual_bytes = max(size_bytes, usual - (usual - size_bytes) // 8)

    # Threads.

    def _work(self, *, helps: bool) -> None:
        while (entry := self._next_entry(helps=helps)) is not None:
            step: Step | None = partial(self._size, entry)
            del entry
            while step is not None:
                step = step()

    def _start(self, helps: bool | None) -> None:
        if helps is None:
            return
        try:
            _start_thread(partial(self._work, helps=helps), "asyncfetch staging")
        except CacheError:
            with self._lock:
                self._leave(helps=helps)
                is_served = self._threads.total() > 0
            if not is_served:
                raise

    def _next_entry(self, *, helps: bool) -> StagedEntry | None:
        """The entry that this thread reads next, a helper only one that handles wait for; None for its end."""
        with self._lock:
            while (entry := self._take(urgent_only=helps)) is None:
                if helps or self.is_closed:
                    self._leave(helps=helps)
                    return None
                self._idle += 1
                try:
                    self._changed.wait(self._resume_at - self._now() if self._is_paused else None)
                finally:
                    self._idle -= 1
            more = self._hire()
        self._start(more)
        return entry

    @property
    def _is_paused(self) -> bool:
        """True while nothing is staged after a failed write."""
        return self._now() < self._resume_at

    def _first(self, *, urgent_only: bool = False) -> StagedEntry | None:
        """The entry to read now: one that handles wait for, else one that waited for room and fits, else the oldest."""
        entry = next(iter(self._urgent), None)
        if entry is not None or urgent_only or self.is_closed or self._is_paused:
            return entry
        entry = next(iter(self._next), None)
        if entry is not None:
            return entry if self._room.fits(self._needed_bytes(entry)) else None
        return next(iter(self._later), None) if self._room.fits(0) else None

    def _take(self, *, urgent_only: bool) -> StagedEntry | None:
        entry = self._first(urgent_only=urgent_only)
        if entry is not None:
            if entry.queue is self._next:
                self._take_room(entry, self._needed_bytes(entry))
            self._put(entry, None)
            entry.is_taken = True
        return entry

    def _hire(self) -> bool | None:
        """Wake an idle thread if there is work. Without one, returns whether to start a helper or a worker, or None."""
        entry = self._first()
        # True if a worker is needed to wait for the end of a pause.
        waits = entry is None and self._is_paused and bool(self._later) and not self._threads[False]
        if entry is None and not waits:
            return None
        if self._idle:
            self._changed.notify()
            return None
        if self._threads[False] < self._max_workers and not self.is_closed:
            helps = False
        elif self._urgent and self._threads[True] < DIRECT_THREADS:
            helps = True
        else:
            return None
        self._threads[helps] += 1
        return helps

    def _leave(self, *, helps: bool) -> None:
        self._threads[helps] -= 1
        self._changed.notify_all()


def _start_thread(target: Callable[[], object], name: str) -> None:
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        raise CacheError(f"files can't be staged: {no_thread(error) or error}") from error

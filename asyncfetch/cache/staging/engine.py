"""The threads of one pool in one process, and the lock between them.

The lock guards the table, and is held for no more than its methods: no file, no store, no decoder, no callback under
it. A handle that is collected may be collected anywhere, under this very lock too, so its finaliser only puts its claim
into ``dropped``, whose ``put`` may be called from anywhere; a thread of its own takes it from there.

All threads are daemons that hold the engine and never the pool: a forgotten pool is collected, which ends them, and
none of them can keep an interpreter from exiting. Those of a ThreadPoolExecutor would, and it has no thread more for
who waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from asyncfetch.cache.staging.table import Table
from asyncfetch.errors import CacheError
from asyncfetch.runtime.threads import no_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.cache.staging.directory import StagedFile, StagingDirectory
    from asyncfetch.cache.staging.stores import Binding, StoredFile, ValueBinding
    from asyncfetch.cache.staging.table import Leftover, Quota, StagedEntry, StagingClaim, StagingFlight

    Step = Callable[[], "Step | None"]


class StagingRead:
    """Size, read, write. Each step does its I/O and then tells the table, which decides on the next.

    Everything that another thread can do happens between two steps. So tests can take the steps one by one, in every
    order, in one thread.
    """

    def __init__(self, engine: StagingEngine, entry: StagedEntry) -> None:
        self._engine = engine
        self._entry = entry
        assert entry.flight is not None
        self._flight = entry.flight
        self._stored: StoredFile | None = None

    def run(self) -> None:
        """All steps."""
        step: Step | None = self.size
        while step is not None:
            step = step()

    def size(self) -> Step | None:
        """Find out how much room it takes, where that must be known."""
        entry = self._entry
        size_bytes = None
        if entry.size_bytes is None and not entry.joined:  # a glance; the table looks again
            try:
                size_bytes = entry.binding.size()
            except BaseException as error:  # noqa: BLE001 - it is for those who ask for the file
                self._fail(error)
                return None
        with self._engine.table() as table:
            reads = table.sized(entry, size_bytes)
        return self.read if reads else None

    def read(self) -> Step | None:
        """Read, unless somebody has the bytes already, and serve those who wait."""
        try:
            stored = self._flight.result() if self._flight.done() else self._entry.binding.read()
        except BaseException as error:  # noqa: BLE001 - likewise
            self._fail(error)
            return None
        with self._engine.table() as table:
            writes = table.landed(self._entry, stored)
        if not self._flight.done():
            self._flight.set_result(stored)
        if not writes:
            return None
        self._stored = stored
        return self.write

    def write(self) -> None:
        """Put the bytes on disk for those who will ask later."""
        assert self._stored is not None
        file = self._engine.write(self._stored)
        with self._engine.table() as table:
            leftover = table.written(self._entry, file)
        self._engine.discard(leftover)

    def _fail(self, error: BaseException) -> None:
        with self._engine.table() as table:
            table.failed(self._entry)
        self._flight.fail(error)


_LOGGER = logging.getLogger(__name__)

DIRECT_THREADS = 64
"""Threads beyond the pool's workers that read for those who wait: as many as requests go to one host at a time."""
PAUSE_SECONDS = 10.0
"""Seconds without staging after a write failed: a full disk is seldom empty in less, and each try costs the bytes of a
read."""


class StagingEngine:
    """Table, directory and threads.

    Args:
        directory: Where files are staged.
        quota: Bounds on them.
        workers: Threads that stage.
        is_closed: Whether it is only there for handles that outlive their pool.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        directory: StagingDirectory,
        quota: Quota,
        workers: int,
        *,
        is_closed: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.dropped: SimpleQueue[StagingClaim | None] = SimpleQueue()
        self.write_failures = 0
        self.damaged = 0
        self._table = Table(quota)
        self._table.closed = is_closed
        self._max_workers = workers
        self._now = now
        self._resume_at = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._workers = self._idle = self._helpers = 0
        self._has_janitor = False

    @contextmanager
    def table(self) -> Iterator[Table]:
        """The table, under the lock. What became possible by the change is begun after it."""
        with self._lock:
            yield self._table
            hire = self._hire()
        self._start(hire)

    @property
    def is_closed(self) -> bool:
        """True if nothing is requested any more."""
        return self._table.closed

    # What handles do.

    def request(self, binding: Binding) -> StagingClaim:
        """A reference to the binding's file, which is staged in the background."""
        self._open()
        with self.table() as table:
            return table.request(binding)

    def adopt(self, binding: ValueBinding, stored: StoredFile) -> StagingClaim:
        """Write a user's value, here and now; where there is no room for it, the binding keeps it."""
        self._open()
        with self.table() as table:
            reservation = None if table.paused else table.quota.reserve(len(stored.data))
        file = None
        try:
            file = None if reservation is None else self.write(stored)
        finally:
            with self.table() as table:
                if file is None and reservation is not None:
                    reservation.release()
                    reservation = None
        if file is not None:
            binding.data = None
        with self.table() as table:
            claim = table.adopt(binding, file, reservation)
            leftover = table.release(claim) if table.closed else None
        self.discard(leftover)  # closed meanwhile
        return claim

    def join(self, claim: StagingClaim) -> StagingFlight | StagedFile | None:
        """Do as Table.join; a read that is begun has a thread at once."""
        with self.table() as table:
            return table.join(claim)

    def told(self, claim: StagingClaim, flight: StagingFlight) -> None:
        """Do as Table.told."""
        with self.table() as table:
            table.told(claim, flight)

    def distrust(self, claim: StagingClaim, file: StagedFile) -> StagingFlight | StagedFile | None:
        """Do as Table.distrust."""
        with self.table() as table:
            self.damaged += 1
            found, leftover = table.distrust(claim, file)
        self.discard(leftover)
        return found

    def release(self, claim: StagingClaim) -> None:
        """The claim's end; a file without references is removed here and now."""
        with self.table() as table:
            leftover = table.release(claim)
        self.discard(leftover)

    def _open(self) -> None:
        with self._lock:
            if self._table.closed:
                raise CacheError("the cache pool was closed: make a new one")
            is_first, self._has_janitor = not self._has_janitor, True
        if not is_first:
            return
        self.directory.close_at_exit()
        try:
            threading.Thread(target=self._tidy, name="asyncfetch staging janitor", daemon=True).start()
        except RuntimeError as error:
            self._has_janitor = False
            raise CacheError(f"files can't be staged: {no_thread(error) or error}") from error

    # What threads do.

    def write(self, stored: StoredFile) -> StagedFile | None:
        """A new file, or None where it can't be written; then nothing is staged for a while."""
        try:
            return self.directory.write(stored)
        except (OSError, MemoryError) as error:
            if self.directory.is_closed:
                return None
            with self.table() as table:
                first = not self.write_failures
                self.write_failures += 1
                table.paused = True
                self._resume_at = self._now() + PAUSE_SECONDS
            if first:
                _LOGGER.warning(
                    "can't stage in %s: %s. Data is served without staging, and staging tried again every %g s; said "
                    "once, statistics() counts on.",
                    self.directory.parent,
                    error,
                    PAUSE_SECONDS,
                )
            return None

    def discard(self, leftover: Leftover | None) -> None:
        """Remove a file, then give its room back; a file that can't be removed keeps its room."""
        if leftover is None:
            return
        try:
            self.directory.remove(leftover.file)
        except OSError as error:
            _LOGGER.warning("can't remove a staged file, whose room stays taken until close: %s", error)
            return
        with self.table():
            leftover.reservation.release()

    def drain(self) -> None:
        """Release what was dropped until now."""
        with suppress(Empty):
            while (claim := self.dropped.get_nowait()) is not None:
                self.release(claim)
            self.dropped.put(None)  # the janitor's

    def settle(self) -> None:
        """``drain`` where that may be done: on an event loop, the janitor will."""
        if asyncio._get_running_loop() is None:
            self.drain()

    def close(self, wait_seconds: float | None) -> None:
        """Cancel what is queued, wait for what runs, at most so long, and remove the directory."""
        with self.table() as table:
            leftovers = table.close()
            self._changed.notify_all()
        self.drain()
        for leftover in leftovers:
            self.discard(leftover)
        with self._lock:
            ended = self._changed.wait_for(lambda: not self._workers + self._helpers, wait_seconds)
        if not ended:
            _LOGGER.warning("a read is still under way %g s after the pool's close; it goes on alone", wait_seconds)
        self.directory.close()
        self.dropped.put(None)

    def abandon(self) -> None:
        """``close``, asked for by the collection of the pool: it may run anywhere, so it is the janitor's to do."""
        self.dropped.put(None)

    def _tidy(self) -> None:
        """The janitor: releases what is dropped, and closes what is abandoned."""
        while (claim := self.dropped.get()) is not None:
            self.release(claim)
            del claim
        if not self._table.closed:
            self.close(None)

    def _work(self) -> None:
        while (entry := self._next(helps=False)) is not None:
            StagingRead(self, entry).run()
            del entry

    def _help(self) -> None:
        """Reads what somebody waits for, as long as there is any."""
        while (entry := self._next(helps=True)) is not None:
            StagingRead(self, entry).run()
            del entry

    def _next(self, *, helps: bool) -> StagedEntry | None:
        """Return what this thread is to read next, or None for its end."""
        with self._lock:
            while (entry := self._take(urgent_only=helps)) is None:
                if helps or self._table.closed:
                    self._leave(helps=helps)
                    return None
                self._idle += 1
                try:
                    self._changed.wait(self._resume_at - self._now() if self._table.paused else None)
                finally:
                    self._idle -= 1
            hire = self._hire()
        self._start(hire)
        return entry

    def _resume(self) -> None:
        if self._table.paused and self._now() >= self._resume_at:
            self._table.paused = False

    def _take(self, *, urgent_only: bool) -> StagedEntry | None:
        self._resume()
        return None if urgent_only and not self._table.has_urgent else self._table.take()

    def _hire(self) -> Callable[[], None] | None:
        """Wake a thread for the work there is; where none is idle, what a new one is to do. Under the lock."""
        self._resume()
        table = self._table
        has_work = table.has_work or (table.paused and table.queued > 0 and not self._workers)
        if not has_work:
            return None
        if self._idle:
            self._changed.notify()
        elif self._workers < self._max_workers and not table.closed:
            self._workers += 1
            return self._work
        elif table.has_urgent and self._helpers < DIRECT_THREADS:
            self._helpers += 1
            return self._help
        return None

    def _start(self, target: Callable[[], None] | None) -> None:
        if target is None:
            return
        try:
            threading.Thread(target=target, name="asyncfetch staging", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._leave(helps=target == self._help)
                is_served = self._workers + self._helpers > 0
            if not is_served:
                raise CacheError(f"files can't be staged: {no_thread(error) or error}") from error

    def _leave(self, *, helps: bool) -> None:
        if helps:
            self._helpers -= 1
        else:
            self._workers -= 1
        self._changed.notify_all()

"""The table of which files are queued, being read, staged; who refers to them; what comes next. No thread, no I/O.

    request -> QUEUED -> READING -> WRITING -> STAGED -> ENDED
                 |  ^       |
                 |  |       +-> FAILED -> ENDED   when all who asked before have its error
                 |  +-------+   no room after a direct read: queued again, at the tail
                 +-> WAITING    its size is known and doesn't fit now: read when it does
                 +-> BYPASSED   it never will: read whenever somebody asks

An entry that nobody refers to any more ends wherever it is; one that is being read or written, after that.

Whoever asks for the value of what isn't begun (QUEUED, WAITING, BYPASSED) has it read at once, with or without room for
it; whoever asks meanwhile joins, and a read serves all who joined it. So nobody waits for room, and nobody waits for
what waits for room.

Nothing is read whose bytes are somewhere: on disk, on their way, or in the hands of those whom the last read served,
until they have decoded them. Bytes are given up only where they can be kept nowhere, because there is no room or the
disk can't be written; then those who are left queue again. No bounded pool can promise more: two files of its size,
picked up by turns, are each read for every handle.

An entry is one generation of a file: a handle refers to the entry, never to its key, so a late handle can't touch a
newer one.

Every method is called under the pool's lock and returns at once; what it returns says which I/O to do next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING
from weakref import ref

from asyncfetch.runtime.single_flight import SharedFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from asyncfetch.cache.staging.directory import StagedFile
    from asyncfetch.cache.staging.stores import Binding, StoredFile


class Quota:
    """Two bounds, taken from before anything is written. Nobody waits in it. Guarded by the engine's lock.

    No LeasedLRU: a staged file is never evicted, but removed with its last reference.

    Args:
        max_bytes: Most bytes that all reservations together hold.
        max_count: Most reservations; an empty file takes one, too.
    """

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self.max_bytes = max_bytes
        self.max_count = max_count
        self.bytes = 0
        self.count = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that a reservation can have now."""
        return self.max_bytes - self.bytes

    def fits(self, size_bytes: int) -> bool:
        """Return whether a reservation of so much can be made now."""
        return self.count < self.max_count and size_bytes <= self.free_bytes

    def reserve(self, size_bytes: int) -> StagingReservation | None:
        """Reserve so much for one file, or return None where it doesn't fit."""
        return StagingReservation(self, size_bytes) if self.fits(size_bytes) else None


class StagingReservation:
    """Room for one file. Made by ``Quota.reserve``; comes back once, however often it is released."""

    __slots__ = ("_held", "_quota", "size_bytes")

    def __init__(self, quota: Quota, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._quota = quota
        self._held = True
        quota.bytes += size_bytes
        quota.count += 1

    def resize(self, size_bytes: int) -> bool:
        """Make it so large, if that fits."""
        if size_bytes - self.size_bytes > self._quota.free_bytes:
            return False
        self._quota.bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes
        return True

    def release(self) -> None:
        """Give it back. Once."""
        if self._held:
            self._held = False
            self._quota.bytes -= self.size_bytes
            self._quota.count -= 1


class StagingPhase(Enum):
    """The place of an entry on its way."""

    QUEUED = "queued"
    WAITING = "waiting"
    READING = "reading"
    """A thread reads it, or is about to."""
    WRITING = "writing"
    """Its bytes are in hand and on their way to the disk."""
    STAGED = "staged"
    BYPASSED = "bypassed"
    FAILED = "failed"
    ENDED = "ended"


class StagingFlight(SharedFuture["StoredFile"]):
    """A read under way, and then what it brought, for as long as a handle may ask for it again."""


class StagedEntry:
    """One generation of one file.

    Attributes:
        binding: How it is read: that of the first handle.
        phase: Where it is on its way.
        references: Handles that are not served yet.
        joined: Those of them that wait for the read under way.
        flight: What the read under way will bring; a failed one's error.
        in_hand: The bytes of the last read, as long as somebody else holds on to them.
        size_bytes: Where it is known.
        reservation: Its room on disk.
        file: Where it lies, when it is STAGED.
    """

    __slots__ = ("binding", "file", "flight", "in_hand", "joined", "phase", "references", "reservation", "size_bytes")

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.phase = StagingPhase.QUEUED
        self.references = 0
        self.joined: set[StagingClaim] = set()
        self.flight: StagingFlight | None = None
        self.in_hand: Callable[[], StoredFile | None] = _nothing
        self.size_bytes: int | None = None
        self.reservation: StagingReservation | None = None
        self.file: StagedFile | None = None


class StagingClaim:
    """A handle's reference to an entry. It counts once, however often it is released.

    Attributes:
        entry: What it refers to.
        held: Whether the entry counts it: until it is served or released.
        flight: The read that serves it.
        failed: Whether its handle has had the error of such a read: it asks for the file anew then.
    """

    __slots__ = ("entry", "failed", "flight", "held")

    def __init__(self, entry: StagedEntry) -> None:
        self.entry = entry
        self.held = True
        self.flight: StagingFlight | None = None
        self.failed = False


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that nobody refers to: to be removed, and its room released after that."""

    file: StagedFile
    reservation: StagingReservation


def _nothing() -> None:
    """Return None: it is in nobody's hands."""


class Table:
    """All entries of one pool in one process.

    Args:
        quota: Its room on disk.
    """

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.closed = False
        self.paused = False
        """True if nothing is to be staged for now, because the disk can't be written."""
        self.reads = 0
        self.direct_reads = 0
        """Number of those that went ahead without room on disk, because somebody waited."""
        self._entries: dict[Hashable, StagedEntry] = {}
        # Dictionaries for the sake of their order, and because an entry must be taken out of their middle.
        self._urgent: dict[StagedEntry, None] = {}
        self._waiting: dict[StagedEntry, None] = {}
        self._queue: dict[StagedEntry, None] = {}
        self._usual_bytes: int | None = None

    @property
    def queued(self) -> int:
        """Entries that nobody reads yet."""
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """Entries that wait for room."""
        return len(self._waiting)

    def __len__(self) -> int:
        return len(self._entries)

    # What handles do.

    def request(self, binding: Binding) -> StagingClaim:
        """A new reference to the file, which is queued if it isn't there."""
        entry = self._entries.get(binding.key)
        if entry is None:
            entry = self._entries[binding.key] = StagedEntry(binding)
            self._queue[entry] = None
        entry.references += 1
        return StagingClaim(entry)

    def adopt(self, binding: Binding, file: StagedFile | None, reservation: StagingReservation | None) -> StagingClaim:
        """A reference to a value that came from the user: it lies in ``file``, or the binding holds it."""
        entry = self._entries[binding.key] = StagedEntry(binding)
        entry.references = 1
        entry.file, entry.reservation = file, reservation
        entry.phase = StagingPhase.BYPASSED if file is None else StagingPhase.STAGED
        return StagingClaim(entry)

    def join(self, claim: StagingClaim) -> StagingFlight | StagedFile | None:
        """Return where the claim's bytes are: in a file, or in a read to wait for, which is begun where there is none.

        None: nowhere any more, because the claim was released or the table closed.
        """
        if claim.failed and not self.closed:
            claim.entry, claim.held, claim.failed = self.request(claim.entry.binding).entry, True, False
        entry = claim.entry
        if claim.flight is not None or not claim.held:
            return claim.flight
        match entry.phase:
            case StagingPhase.STAGED:
                return entry.file
            case StagingPhase.FAILED if not self.closed:
                claim.flight = entry.flight
                self.release(claim)
            case StagingPhase.READING:
                claim.flight = entry.flight
                entry.joined.add(claim)
            case StagingPhase.WRITING:
                claim.flight = entry.flight
                self._serve(claim)
            case StagingPhase.QUEUED | StagingPhase.WAITING | StagingPhase.BYPASSED:
                self._queue.pop(entry, None)
                self._waiting.pop(entry, None)
                self._urgent[entry] = None
                claim.flight = self._begin(entry)
                entry.joined.add(claim)
        return claim.flight

    def told(self, claim: StagingClaim, flight: StagingFlight) -> None:
        """Let the claim's next ``join`` be a new request: its handle has had the error of this read."""
        if claim.flight is flight:
            claim.flight, claim.failed = None, True

    def distrust(
        self, claim: StagingClaim, file: StagedFile
    ) -> tuple[StagingFlight | StagedFile | None, Leftover | None]:
        """``join`` for a claim whose file is gone or damaged: it is read again, once for all who find that out."""
        entry, leftover = claim.entry, None
        if entry.phase is StagingPhase.STAGED and entry.file is file:
            leftover = self._leftover(entry)
            entry.phase = StagingPhase.BYPASSED
        return self.join(claim), leftover

    def release(self, claim: StagingClaim) -> Leftover | None:
        """The claim's end, served or not. With the last one the entry ends, or as soon as its read or write does."""
        if not claim.held:
            return None
        entry = claim.entry
        self._serve(claim)
        if entry.references or entry.phase in {StagingPhase.WRITING, StagingPhase.ENDED}:
            return None
        if entry.phase is StagingPhase.READING and entry not in self._urgent:
            return None
        return self._end(entry)

    # What threads do.

    @property
    def has_urgent(self) -> bool:
        """True if somebody waits for a read that no thread has taken."""
        return bool(self._urgent)

    @property
    def has_work(self) -> bool:
        """True if ``take`` has something."""
        if self._urgent:
            return True
        if self.closed or self.paused:
            return False
        if self._waiting:
            return self.quota.fits(self._needed_bytes(next(iter(self._waiting))))
        return bool(self._queue) and self.quota.fits(0)

    def take(self) -> StagedEntry | None:
        """Return what to read next: what somebody waits for, then what waits for room and fits, then the oldest."""
        if not self.has_work:
            return None
        if self._urgent:
            return _pop_first(self._urgent)
        if self._waiting:
            entry = _pop_first(self._waiting)
            entry.reservation = self.quota.reserve(self._needed_bytes(entry))
        else:
            entry = _pop_first(self._queue)
        self._begin(entry)
        return entry

    def sized(self, entry: StagedEntry, size_bytes: int | None) -> bool:
        """Room is asked for before the read. Returns whether to read now; if not, the entry has gone elsewhere.

        Where the size isn't known, the usual one is set aside, and as long as none was seen, all that is free.
        """
        if size_bytes is not None:
            entry.size_bytes = size_bytes
        if not entry.joined:  # else it is read with or without room
            if not entry.references or self.closed:
                self._end(entry)
                return False
            entry.reservation = entry.reservation or self.quota.reserve(self._needed_bytes(entry))
            if entry.reservation is None:
                self._set_aside(entry)
                return False
        if entry.flight is not None and not entry.flight.done():
            self.reads += 1
            self.direct_reads += entry.reservation is None
        return True

    def landed(self, entry: StagedEntry, stored: StoredFile) -> bool:
        """The bytes are in hand, and those who joined have them. Returns whether to write them for the others."""
        size_bytes = len(stored.data)
        if entry.size_bytes is None:
            self._learn(size_bytes)
        entry.size_bytes = size_bytes
        entry.in_hand = ref(stored)
        for claim in tuple(entry.joined):
            self._serve(claim)
        if not entry.references or self.closed:
            self._end(entry)
            return False
        if not self.paused and self._reserve(entry, size_bytes):
            entry.phase = StagingPhase.WRITING
            return True
        self._put_back(entry)
        return False

    def failed(self, entry: StagedEntry) -> None:
        """The read raised: all who refer to the entry get its error. A request from now on reads anew."""
        for claim in tuple(entry.joined):
            self._serve(claim)
        self._give_back(entry)
        if not entry.references or self.closed:
            self._end(entry)
        else:
            entry.phase = StagingPhase.FAILED
            del self._entries[entry.binding.key]

    def written(self, entry: StagedEntry, file: StagedFile | None) -> Leftover | None:
        """The file is whole; or it couldn't be written, and who still wants the bytes has them read again."""
        entry.file = file
        if not entry.references or self.closed:
            return self._end(entry)
        if file is None:
            self._put_back(entry)
        else:
            entry.flight = None
            entry.phase = StagingPhase.STAGED
        return None

    def close(self) -> list[Leftover]:
        """Forget what is queued and what is staged; reads under way serve those who joined them."""
        self.closed = True
        at_rest = [
            each for each in self._entries.values() if each.phase not in {StagingPhase.READING, StagingPhase.WRITING}
        ]
        return [leftover for leftover in map(self._end, at_rest) if leftover is not None]

    # The steps.

    def _begin(self, entry: StagedEntry) -> StagingFlight:
        """A read; one that has ended already where the bytes are in somebody's hands."""
        entry.phase = StagingPhase.READING
        entry.flight = StagingFlight()
        if (stored := entry.in_hand()) is not None:
            entry.flight.set_result(stored)
        return entry.flight

    def _serve(self, claim: StagingClaim) -> None:
        if claim.held:
            claim.held = False
            claim.entry.references -= 1
            claim.entry.joined.discard(claim)

    def _reserve(self, entry: StagedEntry, size_bytes: int) -> bool:
        """Room for exactly so much; where there is none, what was set aside comes back."""
        if entry.reservation is None:
            entry.reservation = self.quota.reserve(size_bytes)
            return entry.reservation is not None
        if entry.reservation.resize(size_bytes):
            return True
        self._give_back(entry)
        return False

    def _give_back(self, entry: StagedEntry) -> None:
        if entry.reservation is not None:
            entry.reservation.release()
            entry.reservation = None

    def _put_back(self, entry: StagedEntry) -> None:
        """Move it to the tail of the queue, or aside where it is too large for any."""
        self._give_back(entry)
        entry.flight = None
        if self._is_too_large(entry):
            entry.phase = StagingPhase.BYPASSED
        else:
            entry.phase = StagingPhase.QUEUED
            self._queue[entry] = None

    def _set_aside(self, entry: StagedEntry) -> None:
        """Set it aside until there is room for it, which may be never."""
        entry.flight = None
        if self._is_too_large(entry):
            entry.phase = StagingPhase.BYPASSED
        else:
            entry.phase = StagingPhase.WAITING
            self._waiting[entry] = None

    def _end(self, entry: StagedEntry) -> Leftover | None:
        """Forget the entry; what it leaves on disk is returned, with its room."""
        for order in (self._queue, self._waiting, self._urgent):
            order.pop(entry, None)
        if self._entries.get(entry.binding.key) is entry:
            del self._entries[entry.binding.key]
        entry.phase = StagingPhase.ENDED
        entry.flight = None
        leftover = self._leftover(entry)
        self._give_back(entry)
        return leftover

    def _leftover(self, entry: StagedEntry) -> Leftover | None:
        if entry.file is None or entry.reservation is None:
            return None
        leftover = Leftover(entry.file, entry.reservation)
        entry.file = entry.reservation = None
        return leftover

    def _is_too_large(self, entry: StagedEntry) -> bool:
        return entry.size_bytes is not None and entry.size_bytes > self.quota.max_bytes

    def _needed_bytes(self, entry: StagedEntry) -> int:
        if entry.size_bytes is not None:
            return entry.size_bytes
        if self._usual_bytes is None:
            return max(1, self.quota.free_bytes)
        return min(self._usual_bytes, self.quota.max_bytes)

    def _learn(self, size_bytes: int) -> None:
        """A maximum that falls off, so that one large file doesn't hold up small ones for ever."""
        usual = self._usual_bytes or 0
        self._usual_bytes = max(size_bytes, usual - (usual - size_bytes) // 8)


def _pop_first(order: dict[StagedEntry, None]) -> StagedEntry:
    entry = next(iter(order))
    del order[entry]
    return entry

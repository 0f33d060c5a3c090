"""What a table is made of: files on their way to the disk, handles' references to them, what they leave there.

An entry is one generation of a file: a handle refers to the entry, never to its key, so a late handle can't touch a
newer one. Plain data, which the table alone changes, under the pool's lock; what the phases mean is told there.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from asyncfetch.runtime.failures import copied, kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.cache.staging.binding import Binding, Stored
    from asyncfetch.cache.staging.directory import StagedFile
    from asyncfetch.cache.staging.quota import Reservation

__all__ = ["Claim", "Entry", "Flight", "Leftover", "Phase"]


class Phase(Enum):
    """Where an entry is on its way."""

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


class Flight(Future["Stored"]):
    """A read under way, and then what it brought, for as long as a handle may ask for it again."""

    def fail(self, error: BaseException) -> None:
        """End it by an error, which is kept as long as a handle may ask for it: so no frame may hang on it."""
        self.set_exception(kept(error))

    def stored(self) -> Stored:
        """What it brought, or raises its error, to each one of its own; once it is done."""
        error = self.exception()
        if error is not None:
            raise copied(error)
        return self.result()


class Entry:
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
        self.phase = Phase.QUEUED
        self.references = 0
        self.joined: set[Claim] = set()
        self.flight: Flight | None = None
        self.in_hand: Callable[[], Stored | None] = _nothing
        self.size_bytes: int | None = None
        self.reservation: Reservation | None = None
        self.file: StagedFile | None = None


class Claim:
    """A handle's reference to an entry. It counts once, however often it is released.

    Attributes:
        entry: What it refers to.
        held: Whether the entry counts it: until it is served or released.
        flight: The read that serves it.
    """

    __slots__ = ("entry", "flight", "held")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.held = True
        self.flight: Flight | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that nobody refers to: to be removed, and its room released after that."""

    file: StagedFile
    reservation: Reservation


def _nothing() -> None:
    """In nobody's hands."""

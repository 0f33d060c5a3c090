"""Memory that two processes share, in slots that go round, without a name that anybody could leave behind.

A slot is a file without a name: memfd, where the system has it, which /dev/shm's size doesn't bound. The side that
fills it makes it, and sends its descriptor along with the first batch in it. When neither process is left, however it
ended, so is the memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.errors import WorkerError
from asyncfetch.runtime.memory_pool import block_bytes
from asyncfetch.stream.batch import Room

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["ALIGNMENT_BYTES", "TOKEN_AT", "MemorySlot", "MemorySlots", "Returned", "SlotMemory", "lease"]

ALIGNMENT_BYTES = 64
"""The alignment of each tensor: a cache line, and what vector instructions of any processor ask for."""
TOKEN_BYTES = 16
TOKEN_AT = slice(16, 16 + TOKEN_BYTES)
"""The token's place in a slot that is given back by a flag; batches begin after it, aligned."""


class MemorySlot:
    """Memory that is mapped into this process; unmapped when the last view of it is gone.

    Args:
        number: Its name in messages.
        descriptor: Of the file, which becomes the slot's.
        nbytes: Of the file.
    """

    __slots__ = ("descriptor", "memory", "number", "returned")

    def __init__(self, number: int, descriptor: int, nbytes: int) -> None:
        self.number = number
        self.descriptor = descriptor
        """-1 where it is closed; the mapping doesn't need it."""
        # Pages that aren't there at their first touch cost more than what is written to them.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, nbytes, flags=flags), np.uint8)
        self.returned: Returned | None = None
        """A reference that tells the end of its last lease."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes

    def close_descriptor(self) -> None:
        """Once it has been sent, or received and mapped. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class MemorySlots:
    """The side that fills them: which ones are free. Safe to use from any thread."""

    def __init__(self) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        """Tells these slots from those of another process that had or will have this one's id."""
        self._lock = threading.Lock()
        self._slots: dict[int, MemorySlot] = {}
        self._free: list[MemorySlot] = []
        self._made = 0
        self._lent: set[int] = set()
        """MemorySlots of which this process has views."""
        self._ended: deque[Returned] = deque()
        """The last of these is gone."""
        self._away: set[int] = set()
        """Handed over."""
        self._flagged: set[int] = set()
        """MemorySlots among these that are given back by their first byte."""

    def take(self, nbytes: int) -> tuple[MemorySlot, list[int]]:
        """A slot of at least so many bytes, and the numbers of those that are gone because they were smaller.

        A new one has its descriptor. Bigger batches than before replace free slots instead of adding to them.

        Raises:
            WorkerError: The system has no memory for it.
        """
        with self._lock:
            self._collect()
            for place in reversed(range(len(self._free))):  # the one used last may still be in the processor's caches
                if self._free[place].nbytes >= nbytes:
                    return self._free.pop(place), []
            dropped, self._free = [slot.number for slot in self._free], []
            for number in dropped:
                self._slots.pop(number).close_descriptor()
            self._made += 1
            slot = self._slots[self._made] = _make(self._made, block_bytes(max(nbytes, mmap.PAGESIZE)))
        return slot, dropped

    def lend(self, slot: MemorySlot) -> NDArray[np.uint8]:
        """A taken slot's memory for this process: it isn't free while any view of it is left."""
        with self._lock:
            self._lent.add(slot.number)
        return lease(slot, self._ended)

    def hand_over(self, slot: MemorySlot, *, is_flagged: bool = False) -> bool:
        """A taken slot becomes the consumer's, until that gives it back; False where it is that already.

        Args:
            slot: Whose.
            is_flagged: It does so by setting the first byte to 0, and finds the token behind it; else ``give_back`` is
                called.
        """
        with self._lock:
            if slot.number in self._away:
                return False
            self._away.add(slot.number)
            if is_flagged:
                slot.memory[0] = 1
                slot.memory[TOKEN_AT] = np.frombuffer(self.token, np.uint8)
                self._flagged.add(slot.number)
        return True

    def give_back(self, numbers: Iterable[int]) -> None:
        """The consumer's last views of these are gone."""
        with self._lock:
            for number in numbers:
                self._away.discard(number)
                self._free_unless_in_use(number)

    def _collect(self) -> None:
        while self._ended:
            number = self._ended.popleft().number
            self._lent.discard(number)
            self._free_unless_in_use(number)
        for number in [number for number in self._flagged if self._slots[number].memory[0] == 0]:
            self._flagged.discard(number)
            self._away.discard(number)
            self._free_unless_in_use(number)

    def _free_unless_in_use(self, number: int) -> None:
        if number not in self._lent and number not in self._away:
            self._free.append(self._slots[number])


class SlotMemory:
    """Batches in slots, to be handed to another process as they are. See ``BatchMemory``."""

    def __init__(self, slots: MemorySlots) -> None:
        self.slots = slots
        self.dropped: list[int] = []
        """Numbers of slots that are gone."""

    def take(self, nbytes: Sequence[int]) -> Room:
        """See BatchMemory: all of a batch in one slot."""
        starts, stop = [], ALIGNMENT_BYTES
        for each in nbytes:
            starts.append(stop)
            stop += -(-each // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        slot, dropped = self.slots.take(stop)
        self.dropped += dropped
        memory = self.slots.lend(slot)
        return Room([memory[start : start + each] for start, each in zip(starts, nbytes, strict=True)], slot)


def _make(number: int, nbytes: int) -> MemorySlot:
    descriptor = _anonymous_file()
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)  # what isn't there at its first touch kills the process
        else:
            os.ftruncate(descriptor, nbytes)
        return MemorySlot(number, descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise WorkerError(
            f"the system has no {nbytes:,} bytes of shared memory for a batch ({error}): lower batch_size or max_ahead"
        ) from error


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("asyncfetch-batch", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _SlotLease:
    """The object that every view of a batch's memory refers to in the end."""

    __slots__ = ("__array_interface__", "__weakref__", "_slot")

    def __init__(self, slot: MemorySlot) -> None:
        self._slot = slot
        self.__array_interface__ = slot.memory.__array_interface__


class Returned(weakref.ref[_SlotLease]):
    """Says which slot's last view is gone."""

    __slots__ = ("number",)
    number: int


def lease(slot: MemorySlot, returned: deque[Returned]) -> NDArray[np.uint8]:
    """The consumer's side: the slot's memory, of which ``returned`` is told when its last view is gone.

    That may be anywhere, in any thread. No line of Python runs then: an interrupt that met a finalizer would be lost.
    """
    lease = _SlotLease(slot)
    slot.returned = Returned(lease, returned.append)
    slot.returned.number = slot.number
    return np.asarray(lease)

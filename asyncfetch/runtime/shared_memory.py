"""Memory that processes share, without names that a killed process would leave behind.

``SharedBytes`` is one piece for a process and its children. ``MemorySlots`` go round between a process that fills them
and one that reads: the first makes files without names, by memfd, which isn't bounded by the size of /dev/shm, and the
other opens its descriptors through /proc. The memory ends with the last of these processes, however that ends. When the
reader's last view of a slot is gone, it says so in the slot's first byte, and the slot is filled again.

A child that is forked while a view is held may read that memory for ever. So such a slot isn't filled again: both sides
forget it, and another one takes its place.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import deque
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from asyncfetch.errors import WorkerError
from asyncfetch.runtime.fork import fork_count, was_forked_since

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

HEAD_BYTES: Final = 64
"""The head of a slot: a state byte and a token. The content after it is aligned to cache lines."""
FREE, HELD, ABANDONED = 0, 1, 2
"""Values of a slot's state byte. An abandoned slot isn't filled again: it was too small, or a child may see it."""
TOKEN_AT = slice(16, 32)
MAX_VIEWS = 8
"""Slots of one process that a reader may hold as views; of further ones it gets copies. That bounds the memory of a
reader that keeps its batches, and suffices for one that queues a few batches for its device."""


class SharedBytes:
    """Zeros that a process shares with the children that it forks, or that multiprocessing starts with this object."""

    def __init__(self, nbytes: int) -> None:
        descriptor = os.memfd_create("asyncfetch-shared", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        self._map(descriptor, nbytes)

    def _map(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.memory = memoryview(mmap.mmap(descriptor, nbytes))

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (reduction.DupFd(self._descriptor), self.memory.nbytes)


def _shared(descriptor: Any, nbytes: int) -> SharedBytes:  # noqa: ANN401 - multiprocessing's own
    shared = SharedBytes.__new__(SharedBytes)
    shared._map(descriptor.detach(), nbytes)
    return shared


class _View:
    """The object that every view of some memory refers to in the end."""

    __slots__ = ("__array_interface__", "__weakref__", "_owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = interface


class ViewEnd(weakref.ref[_View]):
    """Names the memory of a last view that is gone."""

    __slots__ = ("name",)
    name: Any


def lend(
    memory: NDArray[np.uint8], owner: object, name: object, ended: deque[ViewEnd]
) -> tuple[NDArray[np.uint8], ViewEnd]:
    """A view that keeps ``owner`` alive, and the reference that goes to ``ended`` when the last view of it is gone.

    That may be at any point, in any thread. No line of Python runs then: an interrupt within a finalizer would be lost.
    """
    view = _View(memory.__array_interface__, owner)
    end = ViewEnd(view, ended.append)
    end.name = name
    return np.asarray(view), end


def writable(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An array on the same memory, marked as writable: torch has no read-only tensors, and warns of such memory."""
    interface = array.__array_interface__
    address, is_read_only = interface["data"]
    return np.asarray(_View({**interface, "data": (address, False)}, array)) if is_read_only else array


class SlotName(NamedTuple):
    """The name of a slot in all processes."""

    pid: int
    """Process that fills it."""
    number: int
    descriptor: int
    nbytes: int
    token: bytes
    """Distinguishes that process's slots from those of another process with the same id."""


class MemorySlot:
    """Memory in a file of its own, unmapped when the last view of it is gone."""

    __slots__ = ("descriptor", "memory", "number")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.descriptor = os.memfd_create("asyncfetch-batch", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, nbytes)  # a page missing at its first touch kills the process
            self.memory = _mapped(self.descriptor, nbytes)
        except OSError as error:
            os.close(self.descriptor)
            raise WorkerError(
                f"the system has no {nbytes:,} bytes of shared memory for a batch ({error}): lower batch_size or "
                "max_ahead"
            ) from error


def _mapped(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    # A fault at each page's first touch costs more than writing to it.
    return np.frombuffer(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)


class MemorySlots:
    """The slots that this process fills. Safe to use from any thread."""

    def __init__(self) -> None:
        self._token = os.urandom(16)
        self._lock = threading.Lock()
        self._slots: dict[int, MemorySlot] = {}
        self._free: list[MemorySlot] = []
        self._made = 0
        self._viewed: dict[int, ViewEnd] = {}
        """Slots of which this process has views."""
        self._ended: deque[ViewEnd] = deque()
        self._away: set[int] = set()
        """Slots that were handed over."""

    def take(self, nbytes: int) -> tuple[MemorySlot, NDArray[np.uint8]]:
        """A slot of at least so many bytes, and a view of it. The slot is in use as long as any part of the view.

        A slot larger than any before replaces all free ones.

        Raises:
            WorkerError: The system has no memory for it.
        """
        with self._lock:
            self._collect()
            fitting = [slot for slot in self._free if slot.memory.nbytes >= nbytes]
            if fitting:
                slot = fitting[-1]  # the one used last may still be in the processor's caches
                self._free.remove(slot)
            else:
                for small in self._free:
                    small.memory[0] = ABANDONED
                    self._forget(small.number)
                self._free.clear()
                self._made += 1
                slot = self._slots[self._made] = MemorySlot(self._made, max(nbytes, mmap.PAGESIZE))
            view, self._viewed[slot.number] = lend(slot.memory, slot, slot.number, self._ended)
        return slot, view

    def hand_over(self, slot: MemorySlot) -> SlotName | None:
        """Make a taken slot the reader's until that has no view of it; returns its name, None for a second time.

        The reader opens it by ``view_of``, once.
        """
        with self._lock:
            if slot.number in self._away or slot.number not in self._slots:  # on its way, or forgotten meanwhile
                return None
            self._away.add(slot.number)
            slot.memory[0] = HELD
            slot.memory[TOKEN_AT] = np.frombuffer(self._token, np.uint8)
        return SlotName(os.getpid(), slot.number, slot.descriptor, slot.memory.nbytes, self._token)

    def _collect(self) -> None:
        while self._ended:
            number = self._ended.popleft().name
            del self._viewed[number]
            self._free_unless_in_use(number)
        for number in list(self._away):
            state = self._slots[number].memory[0]
            if state != HELD:
                self._away.discard(number)
            if state == ABANDONED:
                self._forget(number)
            elif state == FREE:
                self._free_unless_in_use(number)

    def _free_unless_in_use(self, number: int) -> None:
        if number in self._slots and number not in self._viewed and number not in self._away:
            self._free.append(self._slots[number])

    def _forget(self, number: int) -> None:
        os.close(self._slots.pop(number).descriptor)


def can_hand_over() -> bool:
    """Return whether this process and its parent may open each other's descriptors."""
    return os.access(f"/proc/{os.getppid()}/fd", os.R_OK | os.X_OK)


class SlotReader:
    """The slots of other processes of which this one has views. They stay mapped as long as this, or a view, exists.

    Mapping and unmapping 56 MiB for each batch took 2 ms, a copy 3.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._memory: dict[SlotName, NDArray[np.uint8]] = {}
        self._held: dict[SlotName, tuple[ViewEnd, int]] = {}
        """The end of each view, and the count of forks when it was lent."""
        self._ended: deque[ViewEnd] = deque()

    def view(self, name: SlotName) -> NDArray[np.uint8]:
        """``view_of``, but OSError if the slot's process has ended."""
        self.give_back()
        memory = self._map(name)
        if sum(held.token == name.token for held in self._held) >= MAX_VIEWS:
            copied = memory.copy()
            memory[0] = FREE
            return copied
        view, end = lend(memory, self, name, self._ended)
        self._held[name] = end, fork_count()
        return view

    def _map(self, name: SlotName) -> NDArray[np.uint8]:
        found = self._memory.get(name)
        if found is None:
            descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = _mapped(descriptor, name.nbytes)
            finally:
                os.close(descriptor)
            if found[TOKEN_AT].tobytes() != name.token:
                raise ProcessLookupError(f"process {name.pid} is another one by now")
            self._memory[name] = found
        return found

    def give_back(self) -> None:
        """Give back slots without a view, and forget those that aren't filled again."""
        while self._ended:
            name = self._ended.popleft().name
            _, forks = self._held.pop(name)
            self._memory[name][0] = ABANDONED if was_forked_since(forks) else FREE
        ended = {pid for pid in {name.pid for name in self._memory} if not os.path.exists(f"/proc/{pid}")}
        for name, memory in list(self._memory.items()):
            if name not in self._held and (name.pid in ended or memory[0] == ABANDONED):
                del self._memory[name]

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Not at the interpreter's exit, where modules may be gone, and the memory goes; not in a forked child.
        if not _is_finalizing() and self.pid == os.getpid():
            self.give_back()

    def forget_in_child(self) -> None:
        """Unmap slots of which the child has no view: the parent gives them back."""
        while self._ended:
            self._held.pop(self._ended.popleft().name, None)
        for name in self._memory.keys() - self._held.keys():
            del self._memory[name]


def _no_reader() -> SlotReader | None:
    return None


_lock = threading.Lock()
_latest: Callable[[], SlotReader | None] = _no_reader


def slot_reader() -> SlotReader:
    """This process's reader, never that of a process that it was forked from."""
    global _latest
    with _lock:
        reader = _latest()
        if reader is None or reader.pid != os.getpid():
            reader = SlotReader()
            _latest = weakref.ref(reader)
    return reader


def give_back_slots() -> None:
    """Give back slots of which this process has no view, when no next ``view_of`` will do it."""
    if (reader := _latest()) is not None and reader.pid == os.getpid():
        with _lock:
            reader.give_back()


def _before_fork() -> None:
    # A slot without a view now isn't the child's. A thread that holds the lock does this itself.
    if (reader := _latest()) is not None and reader.pid == os.getpid() and _lock.acquire(blocking=False):
        try:
            reader.give_back()
        finally:
            _lock.release()


def _in_child() -> None:
    global _lock, _latest
    _lock = threading.Lock()  # a thread that didn't come along may hold the other one
    reader, _latest = _latest(), _no_reader
    if reader is not None:
        reader.forget_in_child()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def view_of(name: SlotName) -> NDArray[np.uint8]:
    """The memory of a slot that was handed over to this process; a copy if MAX_VIEWS of its process are held.

    Once its last view is gone, the next ``view_of`` or ``give_back_slots`` gives the slot back.

    Raises:
        WorkerError: The process that fills it has ended.
    """
    reader = slot_reader()
    try:
        with _lock:
            return reader.view(name)
    except OSError as error:
        raise WorkerError(
            f"the worker (pid {name.pid}) has ended, and with it the memory of a batch that it had made: {error}. What "
            "it printed may say why"
        ) from error

"""Batches on their way from a loader's worker to the trainer, in memory that both have mapped.

Torch's way copies each tensor into shared memory of its own and sends a descriptor of it. Here the worker's decode
threads have written into a slot already, and what crosses the loader's queue says where. The trainer opens the worker's
own descriptor, by /proc, so no name is left behind by whoever is killed. When the last tensor of the batch is gone, it
says so in the slot's first byte, and the worker fills the slot again; see ``stream/serving/memory.py``.

Only multiprocessing's queues and pipes are told where: any other pickle of a batch is a copy, as it is of a dict.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncfetch.errors import WorkerError
from asyncfetch.runtime.fork import fork_count, was_forked_since
from asyncfetch.stream.serving.memory import ABANDONED, FREE, TOKEN_AT, TensorPlace, place_of, tensor_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.stream.batch import RowBatch
    from asyncfetch.stream.serving.memory import MemorySlot, MemorySlots, SlotMemory

MAX_VIEWS = 8
"""Batches of a worker that the trainer may hold as views of its memory; of those beyond it gets copies."""
MAX_COPIED_BYTES = 64 * 1024
"""Tensors up to this size are copied out, so that who keeps actions keeps no pictures."""


class HandedOver(dict[str, Any]):
    """A batch in a slot: a dict in the worker, and a plain one in the trainer."""

    slots: MemorySlots
    slot: MemorySlot

    def __copy__(self) -> HandedOver:
        twin = HandedOver(self)
        twin.slots, twin.slot = self.slots, self.slot
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def can_hand_over() -> bool:
    """Return whether this process, a loader's worker, and its parent may open each other's descriptors."""
    return hasattr(os, "memfd_create") and os.access(f"/proc/{os.getppid()}/fd", os.R_OK | os.X_OK)


def handed_over(batch: RowBatch, rows: slice, memory: SlotMemory) -> dict[str, Any]:
    """The batch, as what a loader's queue takes."""
    given = HandedOver(batch.rows(rows))
    given.slots, given.slot = memory.slots, batch.slot
    return given


class _Name(NamedTuple):
    """The name of a slot in all processes."""

    pid: int
    """The worker's."""
    number: int
    descriptor: int
    nbytes: int
    token: bytes
    """The token of the worker's slots."""

    @property
    def key(self) -> tuple[int, bytes, int]:
        """A key that no other slot has."""
        return self.pid, self.token, self.number


def _reduce(batch: HandedOver) -> tuple[Any, ...]:
    slot = batch.slot
    if not batch.slots.hand_over(slot, is_flagged=True):  # it is on its way by another queue
        return dict, (dict(batch),)
    values: dict[str, Any] = {}
    for key, value in batch.items():
        place = place_of(value, slot.memory) if isinstance(value, torch.Tensor) else None
        values[key] = value if place is None else tuple(place)
    places = [key for key, value in values.items() if value is not batch[key]]
    name = _Name(os.getpid(), slot.number, slot.descriptor, slot.nbytes, batch.slots.token)
    return _take, (name, values, places)


ForkingPickler.register(HandedOver, _reduce)

_Key = tuple[int, bytes, int]
"""See ``_Name.key``."""


class _Mappings:
    """MemorySlots that this process has mapped. They stay mapped as long as it has a batch in any of them.

    To map and unmap 56 MiB for each batch took 2 ms where a copy of it took 3.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.memory: dict[_Key, NDArray[np.uint8]] = {}
        self.held: set[_Key] = set()
        """Keys of the memory in which there is a batch."""

    def map(self, name: _Name) -> NDArray[np.uint8]:
        """The slot's memory; OSError where its worker has ended."""
        found = self.memory.get(name.key)
        if found is None:
            self.drop_ended()
            descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                found = np.frombuffer(mmap.mmap(descriptor, name.nbytes, flags=flags), np.uint8)
            finally:
                os.close(descriptor)
            if found[TOKEN_AT].tobytes() != name.token:
                raise ProcessLookupError(f"process {name.pid} is another one by now")
            self.memory[name.key] = found
        return found

    def drop_ended(self) -> None:
        """Forget slots of workers that have ended, and those that they fill no more."""
        for key, memory in list(self.memory.items()):
            if memory[0] == ABANDONED and key not in self.held:
                self.memory.pop(key, None)
        for pid in {pid for pid, _, _ in list(self.memory)}:
            if not os.path.exists(f"/proc/{pid}"):
                for key in [key for key in list(self.memory) if key[0] == pid]:
                    self.memory.pop(key, None)


_lock = threading.Lock()
_latest: weakref.ref[_Mappings] | None = None


def _mappings() -> _Mappings:
    """Return the mappings of this process, and not of one that it was forked from."""
    global _latest
    found = None if _latest is None else _latest()
    if found is None or found.pid != os.getpid():
        found = _Mappings()
        _latest = weakref.ref(found)
    return found


class _BlockLease:
    """The owner of a batch's memory in the trainer, which every view refers to in the end."""

    __slots__ = ("__array_interface__", "_fork_count", "_key", "_mappings", "_memory")

    def __init__(self, name: _Name) -> None:
        with _lock:
            self._mappings = _mappings()
            self._memory = self._mappings.map(name)
        self._key = name.key
        self._fork_count = fork_count()
        self._mappings.held.add(self._key)
        self.__array_interface__ = self._memory.__array_interface__

    @property
    def is_one_too_many(self) -> bool:
        """True where too many of the worker's slots are held with this one."""
        return sum(pid == self._key[0] for pid, _, _ in list(self._mappings.held)) > MAX_VIEWS

    def __del__(self) -> None:
        if hasattr(self, "__array_interface__") and self._mappings.pid == os.getpid():  # not in a forked child
            self._mappings.held.discard(self._key)
            if was_forked_since(self._fork_count):
                self._mappings.memory.pop(self._key, None)
                self._memory[0] = ABANDONED
            else:
                self._memory[0] = FREE
            self._mappings.drop_ended()


def _take(name: _Name, values: dict[str, Any], places: list[str]) -> dict[str, Any]:
    """The batch in the trainer."""
    try:
        lease = _BlockLease(name)
    except OSError as error:
        raise WorkerError(
            f"the loader's worker (pid {name.pid}) has ended, and with it the memory of a batch that it had made: "
            f"{error}. What it printed may say why"
        ) from error
    memory: NDArray[np.uint8] = np.asarray(lease)
    if lease.is_one_too_many:
        memory = memory.copy()
    for key in places:
        tensor = tensor_at(memory, TensorPlace(*values[key]))
        values[key] = tensor.clone() if tensor.nbytes <= MAX_COPIED_BYTES else tensor
    return values

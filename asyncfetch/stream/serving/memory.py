"""Memory that two processes share, in slots that go round, without a name that anybody could leave behind.

A slot is a file without a name: memfd, where the system has it, which /dev/shm's size doesn't bound. The side that
fills it makes it, and sends its descriptor along with the first batch in it. When neither process is left, however it
ended, so is the memory. Samples become a batch in a slot: tensors as they are, the rest pickled behind them.

A child that is forked while a batch is held sees that memory, too, as long as it likes. So such a slot isn't filled
again: both sides forget it, another one takes its place, and the child's is the last mapping of it.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError, WorkerError
from asyncfetch.runtime.fork import fork_count
from asyncfetch.stream.batch import Room

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from numpy.typing import NDArray

ALIGNMENT_BYTES = 64
"""The alignment of each tensor: a cache line, and what vector instructions of any processor ask for."""
FREE, HELD, ABANDONED = 0, 1, 2
"""The first byte of a slot that is given back by it. Abandoned is one that nobody fills any more: it was too small, or
a child may see it."""
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
            for slot in self._free:
                slot.memory[0] = ABANDONED
            dropped, self._free = [slot.number for slot in self._free], []
            for number in dropped:
                self._slots.pop(number).close_descriptor()
            self._made += 1
            slot = self._slots[self._made] = _make(self._made, max(nbytes, mmap.PAGESIZE))
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
            is_flagged: It does so by setting the first byte, and finds the token behind it; else ``give_back`` is
                called, or ``forget``.
        """
        with self._lock:
            if slot.number in self._away:
                return False
            self._away.add(slot.number)
            if is_flagged:
                slot.memory[0] = HELD
                slot.memory[TOKEN_AT] = np.frombuffer(self.token, np.uint8)
                self._flagged.add(slot.number)
        return True

    def give_back(self, numbers: Iterable[int]) -> None:
        """The consumer's last views of these are gone."""
        with self._lock:
            for number in numbers:
                self._away.discard(number)
                self._free_unless_in_use(number)

    def forget(self, numbers: Iterable[int]) -> None:
        """The consumer's last views of these are gone, but a child forked from it may have some."""
        with self._lock:
            for number in numbers:
                self._away.discard(number)
                self._slots.pop(number).close_descriptor()

    def _collect(self) -> None:
        while self._ended:
            number = self._ended.popleft().number
            self._lent.discard(number)
            self._free_unless_in_use(number)
        for number in [number for number in self._flagged if self._slots[number].memory[0] != HELD]:
            self._flagged.discard(number)
            self._away.discard(number)
            if self._slots[number].memory[0] == ABANDONED:
                self._slots.pop(number).close_descriptor()
            else:
                self._free_unless_in_use(number)

    def _free_unless_in_use(self, number: int) -> None:
        if number in self._slots and number not in self._lent and number not in self._away:
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

    __slots__ = ("fork_count", "number")
    number: int
    fork_count: int
    """The count when it was made."""


def lease(slot: MemorySlot, returned: deque[Returned]) -> NDArray[np.uint8]:
    """The consumer's side: the slot's memory, of which ``returned`` is told when its last view is gone.

    That may be anywhere, in any thread. No line of Python runs then: an interrupt that met a finalizer would be lost.
    """
    lease = _SlotLease(slot)
    slot.returned = Returned(lease, returned.append)
    slot.returned.number, slot.returned.fork_count = slot.number, fork_count()
    return np.asarray(lease)


class TensorPlace(NamedTuple):
    """A tensor's place in shared memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    """Strides in elements; None where these lie one after the other."""


class Stack:
    """Tensors of one shape and dtype, to be written one after the other."""

    __slots__ = ("dtype", "nbytes", "shape", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], shape: tuple[int, ...]) -> None:
        self.tensors = tensors
        self.shape = shape
        """Shape of what the reader gets."""
        self.dtype = tensors[0].dtype
        self.nbytes = math.prod(shape) * self.dtype.itemsize

    def write(self, memory: NDArray[np.uint8], start: int) -> None:
        """Into the memory at ``start``."""
        import torch

        if self.nbytes:
            out = tensor_at(memory, TensorPlace(start, (len(self.tensors), *self.tensors[0].shape), self.dtype))
            torch.stack([tensor.detach() for tensor in self.tensors], out=out)


def collate(samples: Sequence[Any]) -> Any:  # noqa: ANN401
    """A batch as ``asyncfetch.torch.dataset`` makes it, with a ``Stack`` where that stacks.

    By the first sample's keys: tensors of one shape and dtype together, other values in a list, with None for a sample
    that lacks the key. Samples of a transform that aren't mappings become a list.
    """
    if not all(isinstance(sample, Mapping) for sample in samples):
        return list(samples)
    return {key: _together([sample.get(key) for sample in samples]) for key in samples[0]}


def _together(values: list[Any]) -> Stack | list[Any]:
    import torch

    first = values[0]
    if not all(isinstance(value, torch.Tensor) and _is_plain(value) for value in values):
        return values
    if any((value.shape, value.dtype) != (first.shape, first.dtype) for value in values):
        return values
    return Stack(values, (len(values), *first.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its values are bytes in this process's memory."""
    import torch

    return tensor.device.type == "cpu" and tensor.layout == torch.strided


class Packed:
    """A batch that is measured and not yet written. Laying it out costs no copy of a tensor.

    Args:
        batch: Anything that pickles, in which ``Stack`` and tensors may stand anywhere.
        memory: Where some of its tensors lie already.

    Raises:
        ConfigError: It doesn't pickle, or has tensors that aren't in the CPU's memory.
    """

    def __init__(self, batch: object, memory: NDArray[np.uint8] | None = None) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file, memory)
        try:
            pickler.dump(batch)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"a sample can't be handed to another process: {error}. Let the transform return tensors, numbers, "
                "strings, and dicts and lists of them"
            ) from error
        self._rest = file.getbuffer()
        self._pieces = pickler.pieces
        self._rest_start = pickler.stop
        self.nbytes = self._rest_start + len(self._rest)

    @property
    def rest(self) -> bytes:
        """The rest of the batch, which stands around the tensors, pickled."""
        return bytes(self._rest)

    def write(self, memory: NDArray[np.uint8]) -> tuple[int, int]:
        """Into the memory, of at least ``nbytes``; where the reader begins: the pickled rest, [start, stop)."""
        for start, stack in self._pieces:
            stack.write(memory, start)
        memory[self._rest_start : self.nbytes] = np.frombuffer(self._rest, np.uint8)
        return self._rest_start, self.nbytes


class _Pickler(pickle.Pickler):
    """Pickles what stands around the tensors and finds each of them a place."""

    def __init__(self, file: io.BytesIO, memory: NDArray[np.uint8] | None) -> None:
        import torch

        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._memory = memory
        self._tensor = torch.Tensor
        self.pieces: list[tuple[int, Stack]] = []
        self.stop = 0

    def persistent_id(self, value: object) -> TensorPlace | None:
        if isinstance(value, self._tensor):
            if not _is_plain(value):
                raise ConfigError(
                    f"a sample has a {value.layout} tensor on {value.device}, which shared memory can't hold: let the "
                    "transform return dense tensors on the CPU, and move batches to their device in the trainer"
                )
            if self._memory is not None and (place := place_of(value, self._memory)) is not None:
                return place
            value = Stack([value], tuple(value.shape))
        if not isinstance(value, Stack):
            return None
        start = -(-self.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.pieces.append((start, value))
        self.stop = start + value.nbytes
        return TensorPlace(start, value.shape, value.dtype)


class _Unpickler(pickle.Unpickler):
    def __init__(self, memory: NDArray[np.uint8], rest: bytes) -> None:
        super().__init__(io.BytesIO(rest))
        self._memory = memory

    def persistent_load(self, place: tuple[Any, ...]) -> torch.Tensor:
        return tensor_at(self._memory, TensorPlace(*place))


def unpack(memory: NDArray[np.uint8], start: int, stop: int, rest: bytes = b"") -> Any:  # noqa: ANN401
    """The batch whose pickled rest is at [start, stop), or given. Its tensors are views of the memory: they keep it."""
    return _Unpickler(memory, rest or memory[start:stop].tobytes()).load()


def place_of(tensor: torch.Tensor, memory: NDArray[np.uint8]) -> TensorPlace | None:
    """Return where in the memory it is; None where it isn't there."""
    if not _is_plain(tensor):
        return None
    start = tensor.data_ptr() - memory.ctypes.data
    if not 0 <= start < memory.nbytes:
        return None
    strides = None if tensor.is_contiguous() else tensor.stride()
    return TensorPlace(start, tuple(tensor.shape), tensor.dtype, strides)


def tensor_at(memory: NDArray[np.uint8], place: TensorPlace) -> torch.Tensor:
    """The tensor there, a view that keeps the memory."""
    import torch

    start, shape, dtype, strides = place
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    if strides is None:
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(shape)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).as_strided(shape, strides)

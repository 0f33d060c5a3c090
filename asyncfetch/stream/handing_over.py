"""Batches on their way to the trainer from a process that makes them: a loader's worker, or that of ``serve_samples``.

Decode threads have written a batch's pictures into a slot of shared memory already, and what crosses the pipe says
where. Samples that lie elsewhere, because a transform made them, are stacked into a slot. All else is pickled.

Only multiprocessing's queues and pipes are given places: any other pickle of a batch is a copy, as it is of a dict.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from asyncfetch.errors import ConfigError
from asyncfetch.runtime.memory_pool import block_bytes
from asyncfetch.runtime.shared_memory import HEAD_BYTES, view_of
from asyncfetch.stream.batch import BatchMemory, Room

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from asyncfetch.runtime.shared_memory import MemorySlot, MemorySlots, SlotName
    from asyncfetch.stream.batch import RowBatch

ALIGNMENT_BYTES = 64
"""The alignment of each tensor: a cache line, and what vector instructions of any processor ask for."""
MAX_COPIED_BYTES = 64 * 1024
"""Tensors up to this size are copied out, so that actions that are kept keep no pictures."""


class TensorPlace(NamedTuple):
    """A tensor's place in shared memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    """Strides in elements; None where these lie one after the other."""


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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its values are bytes in this process's memory."""
    import torch

    return tensor.device.type == "cpu" and tensor.layout == torch.strided


class SlotMemory(BatchMemory):
    """Batches in slots, to be handed to another process as they are."""

    def __init__(self, slots: MemorySlots) -> None:
        self.slots = slots

    @override
    def take(self, nbytes: Sequence[int]) -> Room:
        """All of a batch in one slot."""
        starts, stop = [], HEAD_BYTES
        for each in nbytes:
            starts.append(stop)
            stop += -(-each // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        slot, memory = self.slots.take(stop)
        return Room([memory[start : start + each] for start, each in zip(starts, nbytes, strict=True)], slot)


class HandedOver(dict[str, Any]):
    """A batch of rows in a slot: a dict in the process that makes it, and a plain one in the trainer."""

    slots: MemorySlots
    slot: MemorySlot

    @classmethod
    def of(cls, batch: RowBatch, rows: slice, memory: SlotMemory) -> HandedOver:
        """The batch, as what a queue takes."""
        given = cls(batch.rows(rows))
        given.slots, given.slot = memory.slots, batch.slot
        return given

    def __copy__(self) -> HandedOver:
        twin = HandedOver(self)
        twin.slots, twin.slot = self.slots, self.slot
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _reduce(batch: HandedOver) -> tuple[Any, ...]:
    rest = _pickled(dict(batch), batch.slot.memory)[0]  # first: where it fails, nothing was handed over
    name = batch.slots.hand_over(batch.slot)
    if name is None:  # it is on its way by another queue
        return dict, (dict(batch),)
    return _unpacked, (name, rest)


ForkingPickler.register(HandedOver, _reduce)


class Stack:
    """Tensors of one shape and dtype, to be stacked along a new first dimension."""

    __slots__ = ("dtype", "nbytes", "shape", "tensors")

    def __init__(self, tensors: list[torch.Tensor], shape: tuple[int, ...]) -> None:
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


def stacks(samples: Sequence[Any]) -> Any:  # noqa: ANN401
    """A batch of samples, by the first one's keys: tensors of one shape and dtype as a ``Stack``, others in a list.

    Where a sample lacks a key its value is None. Samples of a transform that aren't mappings become a list.
    """
    if not all(isinstance(sample, Mapping) for sample in samples):
        return list(samples)
    return {key: _stacked([sample.get(key) for sample in samples]) for key in samples[0]}


def _stacked(values: list[Any]) -> Stack | list[Any]:
    import torch

    first = values[0]
    are_alike = isinstance(first, torch.Tensor) and all(
        isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (first.shape, first.dtype) for value in values
    )
    return Stack(values, (len(values), *first.shape)) if are_alike else values


class PackedBatch:
    """A batch of any samples, measured and not yet written: what pickles, with ``Stack`` and tensors anywhere in it.

    Raises:
        ConfigError: It doesn't pickle, or has tensors that aren't in the CPU's memory.
    """

    def __init__(self, batch: object) -> None:
        self._rest, pickler = _pickled(batch)
        self._stacks = pickler.stacks
        self._rest_start = pickler.stop
        self.nbytes = self._rest_start + len(self._rest)

    def written(self, slots: MemorySlots | None) -> WrittenBatch:
        """The batch in a slot, or in memory of this process that is sent by value."""
        if slots is None:
            memory = np.empty(self.nbytes, np.uint8)
        else:
            slot, memory = slots.take(block_bytes(self.nbytes))  # one that is a little longer will fit, too
        for start, stack in self._stacks:
            stack.write(memory, start)
        memory[self._rest_start : self.nbytes] = np.frombuffer(self._rest, np.uint8)
        source = memory if slots is None else slots.hand_over(slot)
        assert source is not None
        return WrittenBatch(source, slice(self._rest_start, self.nbytes))


class WrittenBatch(NamedTuple):
    """A batch in the trainer's reach, which is the batch itself there."""

    source: SlotName | NDArray[np.uint8]
    rest: slice
    """The place of what stands around the tensors, pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, tuple(self)


class _Pickler(ForkingPickler):
    """Pickles a batch without its tensors in ``memory``; without memory, finds a place for each tensor."""

    def __init__(self, file: io.BytesIO, memory: NDArray[np.uint8] | None) -> None:
        import torch

        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._memory = memory
        self._tensor = torch.Tensor
        self.stacks: list[tuple[int, Stack]] = []
        self.stop = HEAD_BYTES

    def persistent_id(self, value: object) -> TensorPlace | None:
        if isinstance(value, self._tensor):
            if self._memory is not None:
                return place_of(value, self._memory)
            value = Stack([value], tuple(value.shape))
        if not isinstance(value, Stack):
            return None
        for tensor in value.tensors:
            if not _is_plain(tensor):
                raise ConfigError(
                    f"a sample has a {tensor.layout} tensor on {tensor.device}, which shared memory can't hold: let "
                    "the transform return dense tensors on the CPU, and move batches to their device in the trainer"
                )
        start = -(-self.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.stacks.append((start, value))
        self.stop = start + value.nbytes
        return TensorPlace(start, value.shape, value.dtype)


def _pickled(batch: object, memory: NDArray[np.uint8] | None = None) -> tuple[bytes, _Pickler]:
    file = io.BytesIO()
    pickler = _Pickler(file, memory)
    try:
        pickler.dump(batch)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"a sample can't be handed to another process: {error}. Let the transform return tensors, numbers, "
            "strings, and dicts and lists of them"
        ) from error
    return file.getvalue(), pickler


class _Unpickler(pickle.Unpickler):
    def __init__(self, memory: NDArray[np.uint8], rest: bytes) -> None:
        super().__init__(io.BytesIO(rest))
        self._memory = memory

    def persistent_load(self, place: TensorPlace) -> torch.Tensor:
        tensor = tensor_at(self._memory, place)
        return tensor.clone() if tensor.nbytes <= MAX_COPIED_BYTES else tensor


def _unpacked(source: SlotName | NDArray[np.uint8], rest: bytes | slice) -> Any:  # noqa: ANN401
    """The batch in the trainer. Its tensors are views of the memory, but for small ones: they keep it."""
    memory = source if isinstance(source, np.ndarray) else view_of(source)
    return _Unpickler(memory, memory[rest].tobytes() if isinstance(rest, slice) else rest).load()

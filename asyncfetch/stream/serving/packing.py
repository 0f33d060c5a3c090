"""Samples to a batch in shared memory, and back: tensors as they are, the rest pickled behind them."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError
from asyncfetch.stream.serving.memory import ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["Packed", "Stack", "TensorPlace", "collate", "place_of", "tensor_at", "unpack"]


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
    """A batch as ``asyncfetch.torch.collate`` makes it, with a ``Stack`` where that stacks.

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

"""Samples to a batch in shared memory, and back: tensors as they are, the rest pickled behind them."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from types import UnionType

    import torch
    from numpy.typing import NDArray

__all__ = ["Packed", "Stack", "collate", "unpack"]

ALIGNMENT_BYTES = 64
"""Of each tensor: a cache line, and what vector instructions of any processor ask for."""


class Stack:
    """Tensors of one shape and dtype, to be written one behind the other."""

    __slots__ = ("dtype", "nbytes", "shape", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], shape: tuple[int, ...]) -> None:
        self.tensors = tensors
        self.shape = shape
        """Of what the reader gets."""
        self.dtype = tensors[0].dtype
        self.nbytes = math.prod(shape) * self.dtype.itemsize

    def write(self, memory: NDArray[np.uint8], start: int) -> None:
        """Into the memory at ``start``."""
        import torch

        if self.nbytes:
            out = _tensor_at(memory, start, (len(self.tensors), *self.tensors[0].shape), self.dtype)
            torch.stack([tensor.detach() for tensor in self.tensors], out=out)


def collate(samples: Sequence[Any], where: str = "samples") -> Any:  # noqa: ANN401
    """A batch as torch's ``default_collate`` makes it, but tensors are left as ``Stack``, and other leaves as lists.

    Tensors, arrays and numbers are stacked along a new first dimension; mappings, lists and tuples are gone into;
    strings, bytes, None and whatever else there is become a list with one item for each sample.

    Raises:
        ConfigError: Samples differ in type, keys, length, shape or dtype; the message says where.
    """
    import torch

    first = samples[0]
    if isinstance(first, str | bytes) or first is None:
        return list(samples)
    if isinstance(first, torch.Tensor | np.ndarray | np.generic):
        _require_kind(samples, torch.Tensor | np.ndarray | np.generic, where)
        return _stack([_as_tensor(value, where) for value in samples], where)
    if isinstance(first, int | float):
        _require_kind(samples, int | float, where)
        return torch.tensor(samples, dtype=torch.float64 if isinstance(first, float) else None)
    if isinstance(first, Mapping):
        _require_kind(samples, Mapping, where)
        _require_same([set(sample) for sample in samples], "keys", where)
        return {key: collate([sample[key] for sample in samples], f"{where}[{key!r}]") for key in first}
    if isinstance(first, tuple | list):
        _require_kind(samples, tuple | list, where)
        _require_same([len(sample) for sample in samples], "lengths", where)
        parts = [collate(part, f"{where}[{place}]") for place, part in enumerate(zip(*samples, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else parts
    return list(samples)


def _stack(tensors: Sequence[torch.Tensor], where: str) -> Stack:
    _require_same([tuple(tensor.shape) for tensor in tensors], "shapes", where)
    _require_same([tensor.dtype for tensor in tensors], "dtypes", where)
    return Stack(tensors, (len(tensors), *tensors[0].shape))


def _require_kind(samples: Sequence[Any], kind: UnionType | type, where: str) -> None:
    _require_same([type(samples[0] if isinstance(sample, kind) else sample) for sample in samples], "types", where)


def _require_same(values: Sequence[Any], what: str, where: str) -> None:
    for place, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"{where} can't be stacked: sample 0 of the batch and sample {place} have {what} {values[0]} and"
                f" {value}. Make them equal in the stream's transform, or take single samples with batch_size=None"
            )


def _as_tensor(value: Any, where: str) -> torch.Tensor:  # noqa: ANN401
    import torch

    if not isinstance(value, torch.Tensor):
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    if value.device.type != "cpu" or value.layout != torch.strided:
        raise ConfigError(
            f"{where} is a {value.layout} tensor on {value.device}, which shared memory can't hold: let the transform "
            "return dense tensors on the CPU, and move batches to their device in the training process"
        )
    return value


class Packed:
    """A batch that is measured and not yet written. Laying it out costs no copy of a tensor.

    Args:
        batch: Anything that pickles, in which ``Stack`` and tensors may stand anywhere.

    Raises:
        ConfigError: It doesn't pickle, or has tensors that aren't in the CPU's memory.
    """

    def __init__(self, batch: object) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
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

    def write(self, memory: NDArray[np.uint8]) -> tuple[int, int]:
        """Into the memory, of at least ``nbytes``; where the reader begins: the pickled rest, [start, stop)."""
        for start, stack in self._pieces:
            stack.write(memory, start)
        memory[self._rest_start : self.nbytes] = np.frombuffer(self._rest, np.uint8)
        return self._rest_start, self.nbytes


class _Pickler(pickle.Pickler):
    """Pickles what stands around the tensors and finds each of them a place."""

    def __init__(self, file: io.BytesIO) -> None:
        import torch

        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensor = torch.Tensor
        self.pieces: list[tuple[int, Stack]] = []
        self.stop = 0

    def persistent_id(self, value: object) -> tuple[int, tuple[int, ...], torch.dtype] | None:
        if isinstance(value, self._tensor):
            value = Stack([_as_tensor(value, "a value of a sample")], tuple(value.shape))
        if not isinstance(value, Stack):
            return None
        start = -(-self.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.pieces.append((start, value))
        self.stop = start + value.nbytes
        return start, value.shape, value.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, memory: NDArray[np.uint8], start: int, stop: int) -> None:
        super().__init__(io.BytesIO(memory[start:stop].tobytes()))
        self._memory = memory

    def persistent_load(self, place: tuple[int, tuple[int, ...], torch.dtype]) -> torch.Tensor:
        return _tensor_at(self._memory, *place)


def unpack(memory: NDArray[np.uint8], start: int, stop: int) -> Any:  # noqa: ANN401
    """The batch whose pickled rest is at [start, stop). Its tensors are views of the memory and keep it alive."""
    return _Unpickler(memory, start, stop).load()


def _tensor_at(memory: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch

    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)

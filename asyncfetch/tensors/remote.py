"""References to tensors elsewhere, the walk through structures of tensors, and the bytes of torch's tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from asyncfetch.errors import MissingDependency, TensorError, install_command
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.runtime.shared_memory import writable
from asyncfetch.tensors.wire import header_bytes, is_shard_id, item_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import torch
    from numpy.typing import NDArray

MASK = "attention_mask"
T = TypeVar("T")


def replace_leaves(obj: Any, replace: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - any structure
    """``obj`` with every leaf replaced by ``replace(leaf)``.

    Everything but dicts, lists, tuples and dataclass instances is a leaf, and so is a RemoteTensor. Containers with a
    replaced leaf are copied, with the same type; the others are the same objects.

    Raises:
        TensorError: The structure holds itself, is nested too deeply for Python's stack, or has a container of a type
            that can't be copied with other items.
    """
    with _bounded():
        return _replaced(obj, replace)


def leaves_in(obj: Any, kind: type[T]) -> list[T]:  # noqa: ANN401 - any structure
    """Every leaf of this type in ``obj``, in the order of the walk, repeated ones included."""
    with _bounded():
        return list(_leaves(obj, kind))


def unpadded(obj: Any) -> Any:  # noqa: ANN401 - any structure
    """``obj`` without the columns at the end of batches that no row attends to.

    In each dict with a tensor or array "attention_mask" (rows, columns, ...), tensors and arrays of as many rows and
    columns are cut after the last column with a nonzero mask, as views. Columns in front stay, so positions don't
    change.
    """
    with _bounded():
        return _unpadded(obj)


@contextmanager
def _bounded() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise TensorError("the structure holds itself, or is nested too deeply: flatten it") from error


def _parts(obj: Any) -> list[Any] | None:  # noqa: ANN401
    """The items of a container; None for a leaf."""
    if isinstance(obj, RemoteTensor):
        return None
    if isinstance(obj, dict):
        return list(obj.values())
    if isinstance(obj, list | tuple):
        return list(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [getattr(obj, name) for name in _names(obj)]
    return None


def _names(obj: Any) -> list[str]:  # noqa: ANN401
    return [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]


def _with_parts(obj: Any, parts: list[Any]) -> Any:  # noqa: ANN401
    """A container like ``obj`` with these items; ``obj`` itself if it has them."""
    if all(one is other for one, other in zip(_parts(obj) or (), parts, strict=True)):
        return obj
    try:
        if isinstance(obj, tuple):
            return obj._make(parts) if hasattr(obj, "_make") else type(obj)(parts)
        new = copy.copy(obj)  # for whatever a subclass keeps beside its items
        if isinstance(new, list):
            new[:] = parts
        elif isinstance(new, dict):
            for key, part in zip(obj, parts, strict=True):
                new[key] = part
        else:
            for name, part in zip(_names(obj), parts, strict=True):
                object.__setattr__(new, name, part)  # frozen ones, too
    except RecursionError:
        raise
    except Exception as error:  # a type with its own constructor or setters may raise anything
        what = f"a {type(obj).__name__} can't be made anew with other items"
        raise TensorError(f"{what}: put them into a plain dict, list, tuple or dataclass ({error})") from error
    return new


def _replaced(obj: Any, replace: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    parts = _parts(obj)
    if parts is None:
        return replace(obj)
    return _with_parts(obj, [_replaced(part, replace) for part in parts])


def _leaves(obj: Any, kind: type[T]) -> Iterator[T]:  # noqa: ANN401
    parts = _parts(obj)
    if parts is not None:
        for part in parts:
            yield from _leaves(part, kind)
    elif isinstance(obj, kind):
        yield obj


def _unpadded(obj: Any) -> Any:  # noqa: ANN401
    parts = _parts(obj)
    if parts is None:
        return obj
    mask: Any = obj.get(MASK) if isinstance(obj, dict) else None
    if _is_batch(mask):
        columns = _columns_used(mask)
        parts = [_cut(part, mask, columns) for part in parts]
    return _with_parts(obj, [_unpadded(part) for part in parts])


def _is_batch(value: Any) -> bool:  # noqa: ANN401
    return hasattr(value, "nonzero") and getattr(value, "ndim", 0) >= 2


def _columns_used(mask: torch.Tensor) -> int:
    """One more than the last column with a nonzero mask in any row; works with NumPy's arrays, too."""
    used: Any = mask != 0
    while used.ndim > 2:
        used = used.any(-1)
    return max((column + 1 for column, is_used in enumerate(used.any(0).tolist()) if is_used), default=0)


def _cut(part: Any, mask: torch.Tensor, columns: int) -> Any:  # noqa: ANN401
    if _is_batch(part) and part.shape[:2] == mask.shape[:2] and columns < part.shape[1]:
        return part[:, :columns]
    return part


@dataclass(frozen=True, slots=True)
class RemoteTensor:
    """A reference to a tensor on a server, with its shape and dtype. Small, hashable; pickles anywhere.

    ``TensorClient.remotize`` makes it and ``localize`` gives the tensor. It has no bytes, and dropping it frees none.
    """

    server: str
    """Url of the server, or "ray"."""
    shard_id: str
    """32 hexadecimal digits, random for each stored tensor."""
    shape: tuple[int, ...]
    dtype_name: str
    """torch's name, "bfloat16"."""
    device_name: str = "cpu"
    """Name of the tensor's device when it was stored; ``localize`` gives it on the CPU."""

    def check(self) -> None:
        """Raise TensorError unless ``remotize`` could have made it; it may come from anywhere."""
        texts: list[Any] = [self.server, self.shard_id, self.dtype_name]
        shape: Any = self.shape
        is_one = all(isinstance(text, str) for text in texts) and is_shard_id(self.shard_id)
        if not is_one or not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise TensorError(f"no remotize made this, or it was changed since: {self!r:.300}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(import_torch(), self.dtype_name)
        return dtype

    @property
    def device(self) -> torch.device:
        """The tensor's device when it was stored."""
        device: torch.device = import_torch().device(self.device_name)
        return device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * item_bytes(self.dtype_name)

    @property
    def frame_bytes(self) -> int:
        """Bytes of the tensor and its header."""
        return header_bytes(self.ndim) + self.nbytes


@functools.cache
def import_torch() -> Any:  # noqa: ANN401 - a module
    """The torch module, at first use."""
    try:
        with forks_wait():
            import torch
    except ImportError as error:
        raise MissingDependency(f"remote tensors need torch: {install_command('tensors')}") from error
    return torch


def bytes_of(tensor: torch.Tensor) -> tuple[str, NDArray[np.uint8]]:
    """Name of the dtype and bytes of a tensor, row by row.

    The array is on the tensor's own memory if that is contiguous and on the CPU, else on a copy.

    Raises:
        TensorError: It is more than its bytes, or has none: sparse, nested, quantised, on the meta device, freed,
            masked.
    """
    torch = import_torch()
    name = str(tensor.dtype).removeprefix("torch.")
    item_bytes(name)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        raise TensorError(f"only dense tensors with data can be stored, not {tensor.layout} on {tensor.device}")
    # As whole numbers of the same size: torch can't copy all of its dtypes.
    number = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, tensor.dtype)
    try:
        if _bytes_spanned(tensor) > tensor.untyped_storage().nbytes():  # torch would read beyond it
            raise TensorError("only tensors with data can be stored: this one's storage was freed, or made smaller")
        plain = tensor.detach().resolve_conj().resolve_neg()
        octets: NDArray[np.uint8] = plain.view(number).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, ValueError) as error:  # subclasses raise any of these
        what = f"torch doesn't give the bytes of a {type(tensor).__name__}"
        raise TensorError(f"{what}, so it can't be stored: {error}") from error
    return name, octets


def _bytes_spanned(tensor: torch.Tensor) -> int:
    """The bytes of its storage, from the beginning to the tensor's last item."""
    if not tensor.numel():
        return 0
    steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + steps + 1) * tensor.itemsize


def tensor_on(array: NDArray[np.uint8], remote: RemoteTensor) -> torch.Tensor:
    """The tensor on an array's memory, which it keeps alive; TensorError if this torch has no such dtype.

    torch has no read-only tensors, so a user can write to one on shared memory.
    """
    library = import_torch()
    dtype = getattr(library, remote.dtype_name, None)
    if dtype is None:
        raise TensorError(f"this torch has no dtype {remote.dtype_name!r}: install a newer one")
    if not len(array):  # torch can't view numpy's strides of an empty array
        return library.empty(remote.shape, dtype=dtype)  # type: ignore[no-any-return]
    tensor: torch.Tensor = library.from_numpy(writable(array)).view(dtype).reshape(remote.shape)
    return tensor

"""The value that stands for a tensor elsewhere, and the border between torch's tensors and their bytes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import MissingDependency, TensorError
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.tensors.wire import header_bytes, is_shard_id, item_bytes

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["RemoteTensor", "bytes_of", "import_torch", "tensor_on"]

INSTALL_TORCH = 'pip install "asyncfetch[tensors]"'


@dataclass(frozen=True, slots=True)
class RemoteTensor:
    """A tensor whose bytes are on a server: what it looks like and where to ask. Small, hashable; pickles anywhere.

    ``TensorClient.remotize`` makes it and ``localize`` gives the tensor. It has no bytes, and dropping it frees none.
    """

    server: str
    """Url of the server, or "ray"."""
    shard_id: str
    """32 hexadecimal digits, drawn by chance for each tensor that is stored."""
    shape: tuple[int, ...]
    dtype_name: str
    """torch's name, "bfloat16"."""
    device_name: str = "cpu"
    """Where it was when it was stored; ``localize`` gives it on the CPU."""

    def check(self) -> None:
        """Raise TensorError unless it can be one that ``remotize`` made; it may have come from anywhere."""
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
        """Where it was when it was stored."""
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
        raise MissingDependency(f"remote tensors need torch: {INSTALL_TORCH}") from error
    return torch


def bytes_of(tensor: torch.Tensor) -> tuple[str, NDArray[np.uint8]]:
    """Name of the dtype and bytes of a tensor, row by row.

    The array is on the tensor's own memory where that is on the CPU and contiguous, else on a copy.

    Raises:
        TensorError: It has no bytes of its own, or more than them: sparse, nested, quantised, on the meta device,
            freed, masked.
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
        what = f"a {type(tensor).__name__} whose bytes torch doesn't give"
        raise TensorError(f"{what} can't be stored: {error}") from error
    return name, octets


def _bytes_spanned(tensor: torch.Tensor) -> int:
    """Of its storage, from there to its last item."""
    if not tensor.numel():
        return 0
    steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + steps + 1) * tensor.itemsize


def tensor_on(array: NDArray[np.uint8], remote: RemoteTensor) -> torch.Tensor:
    """The tensor on an array's memory, which it keeps alive; TensorError where this torch has no such dtype.

    torch has no read-only tensors, so nothing stops who has one on memory of others from writing to it.
    """
    library = import_torch()
    dtype = getattr(library, remote.dtype_name, None)
    if dtype is None:
        raise TensorError(f"this torch has no dtype {remote.dtype_name!r}: install a newer one")
    if not len(array):  # numpy's strides of nothing are none that torch can view
        return library.empty(remote.shape, dtype=dtype)  # type: ignore[no-any-return]
    writable = array if array.flags.writeable else np.asarray(_Writable(array))
    tensor: torch.Tensor = library.from_numpy(writable).view(dtype).reshape(remote.shape)
    return tensor


class _Writable:
    """Another array on the same memory, said to be writable: ``from_numpy`` warns about any other.

    numpy keeps this object as the array's base, so the memory lives as long as the tensor.
    """

    def __init__(self, source: NDArray[np.uint8]) -> None:
        self._source = source
        address, _ = source.__array_interface__["data"]
        self.__array_interface__ = {**source.__array_interface__, "data": (address, False)}

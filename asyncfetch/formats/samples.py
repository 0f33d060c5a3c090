"""Samples: dicts of tensors, their layout, and the rows of a batch that they are written into."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.formats.held import HeldStretch

ImageDtype = Literal["uint8", "float32"]
"""uint8 in [0, 255], or float32 in [0, 1]. Depth is float32 in its unit either way, from videos and from the table;
depth maps of which info.json has no ``depth_unit`` keep the one they are stored in. Pictures of 16 bits in a feature
that isn't marked as depth need float32."""

Sample = dict[str, Any]
"""Feature key to tensor (or str), beside ``<key>_is_pad`` for windows and ``task``. It is the receiver's own: no value
shares memory with one of another sample or with a cache, so it may be changed, and a sample that is kept keeps nothing
else alive."""

Asked: TypeAlias = "tuple[HeldStretch[Any], int, int]"
"""A stretch, one of its frames, and the number of the reader that goes through them: see HeldStretch.frames."""

H = TypeVar("H", bound="HeldStretch[Any]")


class DoesNotFit(Exception):
    """A picture isn't of the size or dtype that the metadata says."""


class Row(Protocol):
    """A sample's place in a batch."""

    def put(self, key: str, value: object) -> None:
        """Write a value."""

    def at(self, key: str) -> NDArray[Any]:
        """Return where a feature's picture goes, (H, W, C), or those of its window, (T, H, W, C)."""


class Field(NamedTuple):
    """The metadata of one value of a sample."""

    dtype: str
    """torch's name of a tensor's; "string", or what info.json says of anything else."""
    shape: tuple[int, ...] = ()
    """A tensor's, or the length of a window of other values."""
    varies: bool = False
    """True where another sample's may have another shape."""

    @property
    def is_tensor(self) -> bool:
        """True if the value is a tensor."""
        return self.dtype in _TORCH_DTYPES

    @property
    def nbytes(self) -> int:
        """A tensor's; 0 of anything else."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.is_tensor else 0


_TORCH_DTYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
_TORCH_DTYPES |= {"float16", "float32", "float64"}


def by_reader(asked: Sequence[tuple[H, int, int]]) -> Iterator[tuple[H, int, list[int]]]:
    """A stretch, a reader of it, and the places of what it is asked for."""
    found: dict[tuple[H, int], list[int]] = {}
    for place, (held, _, reader) in enumerate(asked):
        found.setdefault((held, reader), []).append(place)
    for (held, reader), places in found.items():
        yield held, reader, places


def write_picture(picture: torch.Tensor, room: NDArray[Any]) -> None:
    """Write it by numpy: torch would wake threads of its own for it, and read and write float32 twice."""
    pixels = picture.permute(1, 2, 0).numpy()
    if pixels.shape != room.shape:
        raise DoesNotFit
    if pixels.dtype == room.dtype:
        np.copyto(room, pixels)
    elif room.dtype == np.float32 and pixels.dtype in {np.dtype(np.uint8), np.dtype(np.uint16)}:
        np.divide(pixels, np.float32(np.iinfo(pixels.dtype).max), out=room, dtype=np.float32)
    else:
        raise DoesNotFit

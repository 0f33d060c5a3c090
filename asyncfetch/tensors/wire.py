"""Frames, the wire format of a tensor: a header of 64 bytes or a few more, and then its bytes. Pure.

    offset  bytes
    0       4      b"AFT1"
    4       2      bytes of the header: a multiple of 64, so that the tensor's bytes begin aligned
    6       1      order of the tensor's bytes: 0 little-endian, 1 big-endian
    7       1      number of dimensions
    8       8      number of the tensor's bytes
    16      8      their checksum, XXH3 of 64 bits
    24      4      CRC-32 of the header, with zeros in place of these four bytes
    28      1      dtype: its place in DTYPES, from 1
    29      1      1 if the server has no such shard; then nothing follows
    30      2      0
    32      16     the shard's id
    48      8 each the shape; then zeros

All numbers are little-endian. Nothing in a frame names code, and no byte of it is executed or unpickled. A header is
accepted if it is consistent, and its lengths are checked against a limit before memory is allocated.
"""

from __future__ import annotations

import math
import re
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncfetch.errors import MissingDependency, TensorError, install_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAGIC = b"AFT1"
ALIGNMENT = 64
"""The alignment of torch's own allocator, a cache line."""
MAX_DIMENSIONS = 64
"""Most that torch's operators take."""
_FIXED = struct.Struct("<4sHBBQQIBB2x16s")
_CRC = slice(24, 28)
MIN_HEADER_BYTES = ALIGNMENT

DTYPES: tuple[tuple[str, int], ...] = (
    *(("bool", 1), ("uint8", 1), ("int8", 1), ("int16", 2), ("int32", 4), ("int64", 8)),
    *(("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)),
    *(("complex32", 4), ("complex64", 8), ("complex128", 16)),
    *(("uint16", 2), ("uint32", 4), ("uint64", 8)),
    *(("float8_e4m3fn", 1), ("float8_e4m3fnuz", 1), ("float8_e5m2", 1), ("float8_e5m2fnuz", 1)),
    *(("float8_e8m0fnu", 1), ("float4_e2m1fn_x2", 1)),
    *((f"int{bits}", 1) for bits in range(1, 8)),
    *((f"uint{bits}", 1) for bits in range(1, 8)),
    *(("bits8", 1), ("bits16", 2), ("bits1x8", 1), ("bits2x4", 1), ("bits4x2", 1)),
)
"""torch's names and the bytes of an item. Places are part of the format: append only. Without quantised dtypes, whose
tensors are more than their bytes."""
_CODES = {name: code for code, (name, _) in enumerate(DTYPES, 1)}
_ITEM_BYTES = dict(DTYPES)
_SHARD_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's description of its tensor."""

    shard_id: str
    """32 hexadecimal digits."""
    dtype: str
    """torch's name, "bfloat16"; empty for a missing shard."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the tensor."""
    checksum: int
    """Checksum of its bytes, in their order in the frame."""
    byte_order: Literal["little", "big"]
    missing: bool = False
    """True if the server has no such shard."""

    @property
    def header_bytes(self) -> int:
        """Bytes in front of the tensor's."""
        return header_bytes(len(self.shape))

    @property
    def frame_bytes(self) -> int:
        """Bytes in all."""
        return self.header_bytes + self.nbytes

    def encode(self) -> bytes:
        """The header's bytes."""
        code = 0 if self.missing else _CODES[self.dtype]
        order = int(self.byte_order == "big")
        fixed = _FIXED.pack(
            *(MAGIC, self.header_bytes, order, len(self.shape), self.nbytes, self.checksum),
            *(0, code, int(self.missing), bytes.fromhex(self.shard_id)),
        )
        shape = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        encoded = bytearray((fixed + shape).ljust(self.header_bytes, b"\0"))
        encoded[_CRC] = zlib.crc32(encoded).to_bytes(4, "little")
        return bytes(encoded)


def header_bytes(dimensions: int) -> int:
    """Bytes of the header of a tensor with so many dimensions."""
    return -(-(_FIXED.size + 8 * dimensions) // ALIGNMENT) * ALIGNMENT


MAX_HEADER_BYTES = header_bytes(MAX_DIMENSIONS)


def is_shard_id(value: object) -> bool:
    """Return whether it looks like a shard's id."""
    return isinstance(value, str) and _SHARD_ID.fullmatch(value) is not None


def item_bytes(dtype: str) -> int:
    """Bytes of one item; TensorError if such tensors can't be stored."""
    if dtype not in _ITEM_BYTES:
        raise TensorError(
            f"tensors of dtype {dtype!r} can't be stored: they are more than their bytes, or newer than this version;"
            " convert them first"
        )
    return _ITEM_BYTES[dtype]


def checksum(data: memoryview | NDArray[np.uint8]) -> int:
    """XXH3 of the bytes, 64 bits: measured, 1 us for 64 KiB; zlib's CRC-32 takes 18.

    TCP or TLS guards the bytes already; this finds bugs at either end. It isn't a signature.
    """
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise MissingDependency(f"remote tensors need xxhash: {install_command('tensors')}") from error
    return xxh3_64_intdigest(data)  # type: ignore[arg-type]  # below 3.12 no type says that arrays are buffers


def describe(shard_id: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> Header:
    """The header for a tensor's bytes, which are read once for their checksum; TensorError if they can't be stored."""
    if len(shape) > MAX_DIMENSIONS:
        raise TensorError(f"a tensor of {len(shape)} dimensions can't be stored: {MAX_DIMENSIONS} are the most")
    if len(data) != math.prod(shape) * item_bytes(dtype):
        raise TensorError(f"{len(data)} bytes aren't a tensor of shape {shape} and dtype {dtype}")
    return Header(shard_id, dtype, shape, len(data), checksum(data), sys.byteorder)


def missing(shard_id: str) -> bytes:
    """The header in place of a missing shard in a response."""
    return Header(shard_id, "", (), 0, 0, "little", missing=True).encode()


def parse_header(data: bytes | memoryview, *, max_bytes: int) -> Header:
    """The header that ``data`` begins with.

    Args:
        data: The first MAX_HEADER_BYTES of a frame, or a shorter frame as a whole.
        max_bytes: Most bytes that the tensor may have.

    Raises:
        TensorError: It isn't one, is inconsistent, or exceeds the limit; the message says which number is off.
    """
    if len(data) < MIN_HEADER_BYTES:
        raise TensorError(f"a frame's header has at least {MIN_HEADER_BYTES} bytes, here are {len(data)}")
    magic, length, order, dimensions, nbytes, sum_, crc, code, is_missing, raw_id = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise TensorError(f"a frame begins with {MAGIC!r}, not {magic!r}: is it from another version, or no frame?")
    if dimensions > MAX_DIMENSIONS or length != header_bytes(dimensions) or length > len(data):
        raise TensorError(f"a header of {length} bytes for {dimensions} dimensions, of which {len(data)} are here")
    head = bytearray(data[:length])
    head[_CRC] = bytes(4)
    if zlib.crc32(head) != crc:
        raise TensorError("the frame's header was damaged on its way: its CRC-32 is another one")
    if order > 1 or is_missing > 1 or (code == 0) != (is_missing == 1) or code > len(DTYPES):
        raise TensorError(f"unknown tags in a frame: dtype {code}, byte order {order}, state {is_missing}")
    shape = struct.unpack_from(f"<{dimensions}Q", data, _FIXED.size)
    dtype, size = DTYPES[code - 1] if code else ("", 0)
    if nbytes != (math.prod(shape) * size if code else 0):
        raise TensorError(f"the frame says {nbytes} bytes, which no tensor of shape {shape} and dtype {dtype} has")
    if nbytes > max_bytes:
        raise TensorError(f"the frame says {nbytes} bytes, more than the {max_bytes} that may come")
    return Header(raw_id.hex(), dtype, shape, nbytes, sum_, "big" if order else "little", bool(is_missing))


def split_frames(body: memoryview, shard_ids: Sequence[str]) -> list[tuple[Header, memoryview]]:
    """The frames of a response to a request for these shards: headers and tensors' bytes; TensorError for others."""
    frames: list[tuple[Header, memoryview]] = []
    at = 0
    while at < len(body) and len(frames) < len(shard_ids):
        header = parse_header(body[at : at + MAX_HEADER_BYTES], max_bytes=len(body) - at)
        if header.shard_id != shard_ids[len(frames)]:
            raise TensorError(f"shard {header.shard_id} came in the place of {shard_ids[len(frames)]}")
        if at + header.frame_bytes > len(body):
            raise TensorError(f"the response ends within shard {header.shard_id}")
        frames.append((header, body[at + header.header_bytes : at + header.frame_bytes]))
        at += header.frame_bytes
    if len(frames) < len(shard_ids) or at < len(body):
        surplus = f" and {len(body) - at} bytes more" if at < len(body) else ""
        raise TensorError(f"{len(shard_ids)} shards were asked for, the response holds {len(frames)}{surplus}")
    return frames


def check_payload(header: Header, data: memoryview | NDArray[np.uint8]) -> None:
    """Raise TensorError unless these are the bytes that the header was made for."""
    if len(data) != header.nbytes or checksum(data) != header.checksum:
        raise TensorError(
            f"shard {header.shard_id}: its {header.nbytes} bytes were changed on their way, or in their sender's"
            " memory: the checksum is another one",
            shard_ids=[header.shard_id],
        )


def to_native(header: Header, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The tensor's bytes in this machine's order: the same array, or a new one."""
    if header.byte_order == sys.byteorder:
        return data
    width = item_bytes(header.dtype) // (2 if header.dtype.startswith("complex") else 1)
    return data if width == 1 else data.view(f"u{width}").byteswap().view(np.uint8)

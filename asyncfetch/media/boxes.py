"""The box structure of MP4 (ISO/IEC 14496-12): a box is a length, four letters and a body, often of more boxes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import FormatError, redact_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["Box", "Buffer", "find", "locate_moov"]

Buffer = bytes | bytearray | memoryview
"""Contiguous, one byte an item."""

LEADING_KINDS = frozenset(b"ftyp styp moov mdat free skip wide pnot pdin sidx moof uuid".split())
"""Boxes that an MP4 or QuickTime file may begin with."""

HEADER = struct.Struct(">I4s")
LARGE_SIZE = struct.Struct(">Q")


class _Extent(NamedTuple):
    """Where a box lies: [start, stop), its body [body, stop)."""

    kind: bytes
    start: int
    body: int
    stop: int


def _read_extent(view: memoryview, start: int, limit: int) -> _Extent | None:
    """The box at ``start``, inside a file or a parent that ends at ``limit``; None where ``view`` ends in its header.

    A size of 0 means up to ``limit``. A ``stop`` past ``limit`` or before ``body`` is left to the caller to refuse.
    """
    if start + HEADER.size > len(view):
        return None
    size, kind = HEADER.unpack_from(view, start)
    body = start + HEADER.size
    if size == 1:
        if body + LARGE_SIZE.size > len(view):
            return None
        (size,) = LARGE_SIZE.unpack_from(view, body)
        body += LARGE_SIZE.size
    return _Extent(kind, start, body, start + size if size else limit)


def _check_extent(box: _Extent, limit: int, where: str) -> None:
    if box.stop < box.body:
        raise FormatError(
            f"{where}: box {_name(box.kind)} at byte {box.start} says that it is {box.stop - box.start} bytes long"
        )
    if box.stop > limit:
        raise FormatError(
            f"{where}: truncated, or not an MP4: box {_name(box.kind)} at byte {box.start} runs to byte {box.stop}, "
            f"but there are only {limit}"
        )


def _name(kind: bytes) -> str:
    return repr(kind.decode("latin-1"))


@dataclass(frozen=True, slots=True)
class Box:
    """One box and where it came from. Every read is checked: a short body is a FormatError, never another exception."""

    kind: str
    """Four letters."""
    body: memoryview
    where: str
    """The file and the boxes around this one, for messages."""

    def error(self, problem: str) -> FormatError:
        """An error about this box, to raise."""
        return FormatError(f"{self.where}: box {self.kind!r}: {problem}")

    def children(self, offset: int = 0) -> Iterator[Box]:
        """The boxes in the body from ``offset`` on, in file order. Fewer than 8 bytes behind the last are padding."""
        limit = len(self.body)
        while (extent := _read_extent(self.body, offset, limit)) is not None:
            _check_extent(extent, limit, f"{self.where}: in box {self.kind!r}")
            kind = extent.kind.decode("latin-1")
            yield Box(kind, self.body[extent.body : extent.stop], self.where)
            offset = extent.stop

    def child(self, *path: str) -> Box | None:
        """The first box at the end of ``path``, following the first box of each kind; None where there is none."""
        box: Box | None = self
        for kind in path:
            box = next((child for child in box.children() if child.kind == kind), None) if box is not None else None
        return box

    def require(self, *path: str) -> Box:
        """Like ``child``, but it has to be there."""
        box = self.child(*path)
        if box is None:
            raise self.error(f"has no {'/'.join(path)} box")
        return box

    def unpack(self, layout: str, offset: int) -> tuple[Any, ...]:
        """Values of the struct format ``layout`` (big-endian) at ``offset`` of the body."""
        layout = ">" + layout
        self._check_length(offset + struct.calcsize(layout))
        return struct.unpack_from(layout, self.body, offset)

    def u32(self, offset: int) -> int:
        """The unsigned 32-bit number at ``offset`` of the body."""
        return int(self.unpack("I", offset)[0])

    @property
    def version(self) -> int:
        """Version of a full box: the body's first byte."""
        return int(self.unpack("B", 0)[0])

    def table(self, dtype: str | np.dtype[Any], count: int, offset: int) -> NDArray[Any]:
        """``count`` entries at ``offset`` of the body, as a view. The body's length bounds them first."""
        entry = np.dtype(dtype)
        self._check_length(offset + count * entry.itemsize, f" for the {count} entries it declares")
        return np.frombuffer(self.body, entry, count, offset)

    def _check_length(self, needed: int, reason: str = "") -> None:
        if needed > len(self.body):
            raise self.error(f"its body of {len(self.body)} bytes is too short{reason}: {needed} needed")


def find(data: Buffer, kind: str, *, url: str) -> Box:
    """The first top-level box of this kind in ``data``, which starts at a box of the file ``url``.

    Raises:
        FormatError: There is none, or it doesn't lie in ``data`` whole.
    """
    where = redact_url(url)
    seen = []
    for box in Box("file", memoryview(data).cast("B"), where).children():
        if box.kind == kind:
            return box
        seen.append(repr(box.kind))
    found = ", ".join(seen[:8]) or "nothing"
    raise FormatError(f"{where}: no {kind!r} box in the {len(data)} bytes where it has to be; found {found}")


def locate_moov(head: Buffer, *, size: int, url: str) -> tuple[int, int]:
    """Where the index (moov box) of an MP4 lies: bytes [start, stop) of the file.

    Where another box ends at or beyond the end of ``head``, moov can only lie behind it, and the answer is
    (end of that box, size): ``parse_moov`` finds moov among the boxes in there. In a file with moov at the tail these
    are moov and at most a few bytes more, so head and tail cost one request each.

    Args:
        head: The first bytes of the file, 16 at least, or all of it; usually some 10-100 kB.
        size: Length of the whole file in bytes.
        url: Names the file in errors.

    Raises:
        FormatError: Empty file, not an MP4, cut off, or without moov.
    """
    where = redact_url(url)
    if size == 0:
        raise FormatError(f"{where}: the file is empty (0 bytes), not an MP4")
    view = memoryview(head).cast("B")[:size]
    start = 0
    while start < size:
        box = _read_extent(view, start, size)
        if box is None:
            if start + HEADER.size > size or len(view) == size:
                raise FormatError(
                    f"{where}: truncated: the file of {size} bytes ends in the box header at byte {start}"
                )
            return start, size
        if start == 0 and box.kind not in LEADING_KINDS:
            raise FormatError(f"{where}: not an MP4: the file of {size} bytes starts with {bytes(view[:8])!r}")
        _check_extent(box, size, where)
        if box.kind == b"moov":
            return box.start, box.stop
        start = box.stop
    raise FormatError(
        f"{where}: no 'moov' box in the file of {size} bytes: it wasn't finished; remux or record it again"
    )

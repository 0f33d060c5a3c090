"""The box structure of MP4 (ISO/IEC 14496-12): a box is a length, four letters and a body, often of more boxes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import COPY_ANEW, FormatError, redact_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
"""Contiguous, one byte an item."""

LEADING_KINDS = frozenset(b"ftyp styp moov mdat free skip wide pnot pdin sidx moof uuid".split())
"""Boxes that an MP4 or QuickTime file may begin with."""

PROBE_BYTES = 16 * 1024
"""Bytes read to learn what comes next. They hold the index of 2,500 AV1 frames, too, where that is what comes."""
TAIL_BYTES = 8 * 1024 * 1024
"""Longest tail taken for an index without a look: that of 350,000 frames at 24 bytes a frame."""
MAX_MOOV_BYTES = 256 * 1024 * 1024
"""Longest index that is read: four days of video at 30 frames/s and 24 bytes a frame."""

HEAD_BYTES = 4096
"""Bytes read where a fragment begins, until a longer ``moof`` was seen: that of 10 s of video with audio has fewer."""
MAX_HEAD_BYTES = 1 << 16
"""Most bytes read there at once, however long the last one was."""
BEHIND_BYTES = 16
"""Bytes read behind a moof: the header of its media data, which says where the next one begins."""
MAX_BOXES = 1 << 17
"""Most boxes that are looked at: 36 hours of fragments of a second with one box of media data each."""

MAX_CHILDREN = 1024
"""Boxes in one box. Writers have some ten; the millions that an index has room for would be walked for minutes."""

HEADER = struct.Struct(">I4s")
LARGE_SIZE = struct.Struct(">Q")


class Extent(NamedTuple):
    """The place where a box lies: [start, stop), its body [body, stop)."""

    kind: bytes
    start: int
    body: int
    stop: int

    def moved(self, by: int) -> Extent:
        """Return the box with positions counted from ``by`` bytes further to the front."""
        return Extent(self.kind, self.start + by, self.body + by, self.stop + by)


def read_extent(view: memoryview, start: int, limit: int) -> Extent | None:
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
    return Extent(kind, start, body, start + size if size else limit)


def check_extent(box: Extent, limit: int, where: str) -> None:
    """Raise FormatError where a box ends before its body begins, or behind ``limit``."""
    if box.stop < box.body:
        raise FormatError(
            f"{where}: box {_name(box.kind)} at byte {box.start} says that it is {box.stop - box.start} bytes long",
            remedy=COPY_ANEW,
        )
    if box.stop > limit:
        raise FormatError(
            f"{where}: truncated, or not an MP4: box {_name(box.kind)} at byte {box.start} runs to byte {box.stop}, "
            f"but there are only {limit}",
            remedy=COPY_ANEW,
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
        return FormatError(f"{self.where}: box {self.kind!r}: {problem}", remedy=COPY_ANEW)

    def children(self, offset: int = 0) -> Iterator[Box]:
        """The boxes in the body from ``offset`` on, in file order. Fewer than 8 bytes behind the last are padding."""
        limit, count = len(self.body), 0
        while (extent := read_extent(self.body, offset, limit)) is not None:
            if (count := count + 1) > MAX_CHILDREN:
                raise self.error(f"holds more than {MAX_CHILDREN} boxes, which can't be meant")
            check_extent(extent, limit, f"{self.where}: in box {self.kind!r}")
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
    message = f"{where}: no {kind!r} box in the {len(data)} bytes where it has to be; found {found}"
    raise FormatError(message, remedy=COPY_ANEW)


def locate_moov(piece: Buffer, *, size: int, url: str, start: int = 0) -> tuple[int, int]:
    """Return where the index (moov box) of an MP4 lies, or what to read to find out: bytes [start, stop) of the file.

    Where they lie within ``piece``, they are moov. Otherwise read them, and call again with them as ``piece`` and their
    start: they are moov, or the tail of the file that has it, or PROBE_BYTES at the next box. Each answer lies further
    back in the file than the last one, so a walk ends.

    Behind media data comes the index, and hardly anything else: a tail of up to TAIL_BYTES is read in one go, so a file
    with moov at the tail costs two requests. Behind any other box (free space as long as an index that was to be put
    there, a vendor's uuid box) may lie all of the media data, and only a probe tells.

    Args:
        piece: Bytes of the file from ``start`` on: its first 16 at least or all of it, usually some 10-100 kB; then
            what the last answer asked for.
        size: Length of the whole file in bytes.
        url: Names the file in errors.
        start: Where ``piece`` lies in the file. A box begins there.

    Raises:
        FormatError: Empty file, not an MP4, cut off, without moov, or with one longer than MAX_MOOV_BYTES.
    """
    where = redact_url(url)
    if size == 0:
        raise FormatError(f"{where}: the file is empty (0 bytes), not an MP4", remedy=COPY_ANEW)
    view = memoryview(piece).cast("B")[: size - start]
    behind_media_data = False
    offset = 0
    while start + offset < size:
        box = read_extent(view, offset, size - start)
        if box is None:
            if start + offset + HEADER.size > size or start + len(view) == size:
                raise FormatError(
                    f"{where}: truncated: the file of {size} bytes ends in the box header at byte {start + offset}",
                    remedy=COPY_ANEW,
                )
            is_tail = behind_media_data and size - start - offset <= TAIL_BYTES
            return start + offset, size if is_tail else min(size, start + offset + PROBE_BYTES)
        if start + offset == 0 and box.kind not in LEADING_KINDS:
            message = f"{where}: not an MP4: the file of {size} bytes starts with {bytes(view[:8])!r}"
            raise FormatError(message, remedy=COPY_ANEW)
        box = box.moved(start)
        check_extent(box, size, where)
        if box.kind == b"moov":
            _check_moov_length(box, where)
            return box.start, box.stop
        behind_media_data = behind_media_data or box.kind == b"mdat"
        offset = box.stop - start
    raise FormatError(
        f"{where}: no 'moov' box in the file of {size} bytes: it wasn't finished; remux or record it again"
    )


def _check_moov_length(moov: Extent, where: str) -> None:
    length = moov.stop - moov.start
    if length > MAX_MOOV_BYTES:
        raise FormatError(
            f"{where}: box 'moov' at byte {moov.start} is {length} bytes long, more than the {MAX_MOOV_BYTES} that an "
            "index may have: split the video, or copy it again if it is damaged"
        )


@dataclass(slots=True)
class Walk:
    """A walk from box to box of bytes [position, stop) of the file."""

    position: int
    stop: int
    held: memoryview
    """Bytes of the file from ``held_from`` on."""
    held_from: int
    read: tuple[int, int] = (0, 0)
    """The bytes of the file that it waits for."""

    def view(self) -> memoryview:
        """The bytes held from the position on."""
        place = self.position - self.held_from
        return self.held[place:] if 0 <= place <= len(self.held) else self.held[:0]

    def take(self, piece: Buffer) -> None:
        """Hold the bytes that it waited for."""
        self.held, self.held_from = memoryview(piece).cast("B"), self.read[0]

    def cut(self, begin: int, positions: Iterable[int]) -> list[Walk]:
        """Walks of what lies between these positions from ``begin`` on, up to the end of this one."""
        inside = {position for position in positions if begin < position < self.stop}
        edges = [begin, *sorted(inside), self.stop]
        return [Walk(first, last, self.held, self.held_from) for first, last in pairwise(edges) if first < last]


class FragmentFinder:
    """The moof boxes of a file as they are found."""

    def __init__(self, size: int, where: str) -> None:
        self.size = size
        self.where = where
        self.moofs: dict[int, bytes] = {}
        self.head_bytes = HEAD_BYTES
        self.bytes_left = MAX_MOOV_BYTES
        self.boxes_left = MAX_BOXES

    def advance(self, walks: list[Walk]) -> list[Walk]:
        """Let each walk go on as far as bytes are there. Return those that wait for more, and those they became."""
        waiting, ahead = [], walks[::-1]
        while ahead:
            walk = ahead.pop()
            parts = self._step(walk)
            waiting += [walk] if parts is None else []
            ahead.extend((parts or [])[::-1])
        return waiting

    def _step(self, walk: Walk) -> list[Walk] | None:
        """Go on to the end of the walk, or to a list that divides it. Return its parts; None if it waits for bytes."""
        while walk.position < walk.stop:
            view = walk.view()
            box = read_extent(view, 0, self.size - walk.position)
            if box is None:
                if walk.position + len(view) >= self.size:
                    break  # cut off in a header
                length = max(BEHIND_BYTES, min(self.head_bytes, walk.stop - walk.position))
                walk.read = walk.position, min(self.size, walk.position + length)
                return None
            if box.stop < box.body:
                check_extent(box.moved(walk.position), self.size, self.where)
            is_list = box.kind in {b"moof", b"sidx"}
            self._count(box.stop if is_list else 0, walk.position)
            if is_list and walk.position + box.stop > self.size:
                break  # cut off in the head of the last fragment
            if is_list and len(view) < box.stop:
                walk.read = walk.position, min(self.size, walk.position + box.stop + BEHIND_BYTES)
                return None
            if box.kind == b"sidx":
                begin, sizes = _segments(Box("sidx", view[box.body : box.stop], self.where))
                begin += walk.position + box.stop
                if begin > walk.stop:
                    raise FormatError(
                        f"{self.where}: box 'sidx' begins its list at byte {begin}, behind byte {walk.stop}, up to "
                        "which it may list fragments",
                        remedy=COPY_ANEW,
                    )
                return walk.cut(begin, accumulate(sizes, initial=begin))
            if box.kind == b"moof":
                self.moofs[walk.position] = bytes(view[: box.stop])
                self.head_bytes = min(max(HEAD_BYTES, box.stop + BEHIND_BYTES), MAX_HEAD_BYTES)
            walk.position += box.stop
        if walk.position > walk.stop < self.size:
            raise FormatError(
                f"{self.where}: a box runs to byte {walk.position}, but the file's list of fragments (sidx, mfra) has "
                f"one begin at byte {walk.stop}",
                remedy=COPY_ANEW,
            )
        return []

    def _count(self, nbytes: int, position: int) -> None:
        self.boxes_left -= 1
        self.bytes_left -= nbytes
        if self.boxes_left < 0 or self.bytes_left < 0:
            raise FormatError(
                f"{self.where}: up to byte {position} there are more than {MAX_BOXES} boxes, or {MAX_MOOV_BYTES} bytes "
                "of them list samples: remux with: ffmpeg -i IN.mp4 -c copy -movflags faststart OUT.mp4"
            )


def _segments(sidx: Box) -> tuple[int, list[int]]:
    """The segments that a segment index lists: where the first one begins, from the end of the box; their lengths."""
    wide = sidx.version > 0
    (first,) = sidx.unpack("Q" if wide else "I", 20 if wide else 16)
    place = 28 if wide else 20
    (count,) = sidx.unpack("H", place + 2)
    rows = sidx.table(">u4", 3 * count, place + 4).reshape(-1, 3)
    return int(first), (rows[:, 0] & 0x7FFFFFFF).tolist()  # the first bit: a list of segments itself


def listed_fragments(data: Buffer, where: str) -> list[int]:
    """Positions of fragments in the list of them (mfra) that a file ends with; none where ``data`` isn't one."""
    mfra = next(Box("file", memoryview(data).cast("B"), where).children(), None)
    positions: list[int] = []
    for tfra in mfra.children() if mfra is not None and mfra.kind == "mfra" else ():
        if tfra.kind == "tfra":
            lengths, count = tfra.unpack("II", 8)
            wide = ">u8" if tfra.version else ">u4"
            numbers = [(name, f"V{1 + (lengths >> shift & 3)}") for name, shift in (("a", 4), ("b", 2), ("c", 0))]
            entry = np.dtype([("time", wide), ("moof", wide), *numbers])
            positions += tfra.table(entry, count, 16)["moof"].tolist()
    return positions

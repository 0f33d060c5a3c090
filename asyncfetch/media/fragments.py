"""Fragmented MP4: the index of its frames lies in pieces (moof boxes) between the media data.

``moov`` has the formats of the tracks and hardly any sample; each fragment is a ``moof``, which says where its samples
lie and when they are shown, and the media data behind it. ``fragment_reads`` finds them with few small requests. Both
together are the same index as that of any other MP4.

Times are those that FFmpeg gives: it takes a fragment's own decode time (tfdt), shifts it as the edit list says, and
hides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.errors import COPY_ANEW, FormatError, redact_url
from asyncfetch.media.audio import Tracks, parse_tracks, read_tracks
from asyncfetch.media.boxes import MAX_MOOV_BYTES, Box, Buffer, check_extent, find, locate_moov, read_extent
from asyncfetch.media.index import first_track, track_number
from asyncfetch.media.samples import (
    MAX_CONSTANT_SAMPLES,
    MAX_DURATION,
    MAX_OFFSET,
    MAX_POSITION,
    Columns,
    count_samples,
    joined,
    read_columns,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from numpy.typing import NDArray

HEAD_BYTES = 4096
"""Bytes read where a fragment begins, until a longer ``moof`` was seen: that of 10 s of video with audio has fewer."""
MAX_HEAD_BYTES = 1 << 20
"""Most bytes read there at once, however long the last one was."""
BEHIND_BYTES = 16
"""Bytes read behind a moof: the header of its media data, which says where the next one begins."""
MAX_BOXES = 1 << 17
"""Most boxes that are looked at: 36 hours of fragments of a second with one box of media data each."""
MFRO_BYTES = 16
"""Length of the box at the end of a file that says how long the one around it is, which tells where fragments begin."""

MAX_TIME = MAX_POSITION >> 1
"""No decode time is this late; differences of times fit 64 bits."""
BASE_OFFSET, DESCRIPTION, DURATION, SIZE, FLAGS, BASE_IS_MOOF = 0x1, 0x2, 0x8, 0x10, 0x20, 0x20000
"""Flags of a track fragment's header (tfhd): which fields it has; ISO/IEC 14496-12, 8.8.7."""
DATA_OFFSET, FIRST_FLAGS = 0x1, 0x4
"""Flags of a run (trun): which fields it has; ISO/IEC 14496-12, 8.8.8."""
RUN_FIELDS = {0x100: "duration", 0x200: "size", 0x400: "flags", 0x800: "composition"}
"""Flags of a run that has such a field for each sample, in this order."""
NOT_SYNC = 0x10000 | 0x1000000
"""Flags of a sample that is no key frame, or depends on another one."""


class Defaults(NamedTuple):
    """Values of each sample of a track that has none of its own."""

    description: int = 1
    duration: int = 0
    size: int = 0
    flags: int = 0


@dataclass(slots=True)
class FragmentTable:
    """The samples of a fragmented file by track, fragment by fragment."""

    defaults: dict[int, Defaults]
    """Those of each track."""
    parts: dict[int, list[Columns]]
    """The samples in moov and in each fragment, of the tracks that are wanted, in the order of decoding."""
    data_stop: int = 0
    """One past the last byte of the file that belongs to a sample."""
    samples_left: int = MAX_CONSTANT_SAMPLES
    """Samples that may still come without a byte of their own in a run."""

    def add(self, moof: Box, position: int) -> None:
        """Take in the fragment whose ``moof`` lies at ``position`` of the file.

        Raises:
            FormatError: It is damaged, contradicts the fragments before it, or is of a kind that can't be meant.
        """
        end = position
        for traf in moof.children():
            if traf.kind == "traf":
                end = self._add_track(traf, position, end)

    def _add_track(self, traf: Box, position: int, implicit: int) -> int:
        """The end of the track fragment's data, where that of the next one begins if it says nothing."""
        tfhd = traf.require("tfhd")
        has, track = tfhd.unpack("II", 0)
        base, defaults = self._header(tfhd, has & 0xFFFFFF, track, position, implicit)
        parts = self.parts.get(track)
        time, end, runs = self._start(traf, parts or ()), base, []
        for trun in traf.children():
            if trun.kind == "trun" and (run := self._run(trun, defaults, base, end, time)) is not None:
                runs.append(run)
                end = int(run.offsets[0]) + int(run.sizes.sum(dtype=np.int64))
                time += int(run.durations.sum(dtype=np.int64))
                self.data_stop = max(self.data_stop, end)
        if runs and parts is not None:
            _follow(parts, joined(runs), traf)
        return end

    def _header(self, tfhd: Box, has: int, track: int, position: int, implicit: int) -> tuple[int, Defaults]:
        """(where the data begins, defaults)."""
        base = position if has & BASE_IS_MOOF else implicit
        place = 8
        if has & BASE_OFFSET:
            (base,) = tfhd.unpack("Q", place)
            place += 8
        values = list(self.defaults.get(track, Defaults()))
        for number, flag in enumerate((DESCRIPTION, DURATION, SIZE, FLAGS)):
            if has & flag:
                values[number] = tfhd.u32(place)
                place += 4
        if base >= MAX_POSITION:
            raise tfhd.error(f"its data begins at byte {base}, which can't be meant")
        return base, Defaults(*values)

    @staticmethod
    def _start(traf: Box, parts: Sequence[Columns]) -> int:
        """Decode time of the track fragment's first sample."""
        tfdt = traf.child("tfdt")
        if tfdt is not None:
            (time,) = tfdt.unpack("Q" if tfdt.version else "I", 4)
            if time >= MAX_TIME:
                raise tfdt.error(f"begins at tick {time}, which can't be meant")
            return int(time)
        return parts[-1].start + int(parts[-1].durations.sum(dtype=np.int64)) if parts else 0

    def _run(self, trun: Box, defaults: Defaults, base: int, end: int, time: int) -> Columns | None:
        """The samples of a run, whose data begins at ``end`` unless it says where after ``base``; None if empty."""
        has, count = trun.unpack("II", 0)
        if not count:
            return None
        place, offset, first_flags = 8, end, None
        if has & DATA_OFFSET:
            offset = base + int(trun.unpack("i", place)[0])
            place += 4
        if has & FIRST_FLAGS:
            first_flags = trun.u32(place)
            place += 4
        fields = [name for bit, name in RUN_FIELDS.items() if has & bit]
        if not fields:
            self.samples_left -= count
            if self.samples_left < 0:
                raise trun.error(f"with {count} more samples of equal size there are too many to be meant")
        table = trun.table(
            np.dtype([(name, ">i4" if name == "composition" else ">u4") for name in fields]), count, place
        )

        def column(name: str, default: int) -> NDArray[np.int64]:
            return table[name].astype(np.int64) if name in fields else np.full(count, default, np.int64)

        flags = column("flags", defaults.flags)
        if first_flags is not None and "flags" not in fields:
            flags[0] = first_flags
        sizes, durations = column("size", defaults.size), column("duration", defaults.duration)
        composition = column("composition", 0)
        _check_numbers(trun, sizes, durations, composition, offset)
        sync = np.flatnonzero(flags & NOT_SYNC == 0)
        return Columns(
            sizes=sizes,
            durations=durations,
            composition=composition,
            sync=None if len(sync) == count else sync,
            firsts=np.zeros(1, np.int64),
            offsets=np.array([offset]),
            description=np.array([defaults.description]),
            start=time,
        )


def _check_numbers(
    trun: Box, sizes: NDArray[np.int64], durations: NDArray[np.int64], composition: NDArray[np.int64], offset: int
) -> None:
    if offset < 0 or offset >= MAX_POSITION:
        raise trun.error(f"its data begins at byte {offset}, which can't be meant")
    if not sizes.all():
        raise trun.error("a sample has no bytes, at which FFmpeg stops")
    if (longest := int(durations.max())) >= MAX_DURATION:
        raise trun.error(f"a sample lasts {longest} ticks, which is {MAX_DURATION} or more and can't be meant")
    if (greatest := int(np.abs(composition).max())) >= MAX_OFFSET:
        raise trun.error(f"a composition offset is {greatest} ticks, which is {MAX_OFFSET} or more and can't be meant")


def _follow(parts: list[Columns], part: Columns, traf: Box) -> None:
    """Append a part; the sample in front of it lasts until it begins."""
    if parts:
        last = parts[-1]
        before = last.start + int(last.durations[:-1].sum(dtype=np.int64))
        if not 0 < part.start - before < MAX_DURATION:
            raise traf.error(
                f"begins at tick {part.start}, but the sample in front of it at {before}: fragments that overlap in "
                "time, or lie too far apart"
            )
        durations = last.durations.copy()
        durations[-1] = part.start - before
        parts[-1] = last._replace(durations=durations)
    parts.append(part)


def parse_fragments(
    data: Buffer, moofs: Iterable[tuple[int, Buffer]], *, url: str, audio: bool = False
) -> tuple[Tracks, int]:
    """The tracks of a fragmented MP4, and one past the last byte of the file that belongs to a sample of any track.

    Args:
        data: Bytes of the file from the start of a box on, with the whole moov box in them.
        moofs: Position in the file and bytes of each moof box, in the order of the file.
        url: Names the file in errors, and in the indexes.
        audio: Whether to index the first audio track, too.

    Raises:
        FormatError: No video, no fragment with a frame of it, or boxes that are damaged or contradict each other.
    """
    moov = find(data, "moov", url=url)
    defaults = {}
    for trex in moov.require("mvex").children():
        if trex.kind == "trex":
            track, *values = trex.unpack("5I", 4)
            defaults[track] = Defaults(*values)
    parts = {}
    for handler in (b"vide", b"soun") if audio else (b"vide",):
        if (trak := first_track(moov, handler)) is not None:
            stbl = trak.require("mdia", "minf", "stbl")
            parts[track_number(trak)] = [read_columns(stbl)] if count_samples(stbl) else []
    table = FragmentTable(defaults, parts)
    for position, moof in moofs:
        table.add(find(moof, "moof", url=url), position)
    return read_tracks(moov, parts, url=url, audio=audio), table.data_stop


@dataclass(slots=True)
class _Walk:
    """A walk from box to box of bytes [position, stop) of the file."""

    position: int
    stop: int
    held: memoryview
    """Bytes of the file from ``held_from`` on."""
    held_from: int

    def view(self) -> memoryview:
        """The bytes held from the position on."""
        place = self.position - self.held_from
        return self.held[place:] if 0 <= place <= len(self.held) else self.held[:0]


class _Finder:
    """The moof boxes of a file as they are found."""

    def __init__(self, size: int, where: str) -> None:
        self.size = size
        self.where = where
        self.moofs: dict[int, memoryview] = {}
        self.head_bytes = HEAD_BYTES
        self.bytes_left = MAX_MOOV_BYTES
        self.boxes_left = MAX_BOXES

    def step(self, walk: _Walk) -> tuple[list[_Walk], tuple[int, int] | None]:
        """Go on as far as bytes are there.

        Return the walks that go on from here, and the bytes that the first of them needs; none where all is seen.
        """
        while walk.position < walk.stop:
            view = walk.view()
            box = read_extent(view, 0, self.size - walk.position)
            if box is None:
                if walk.position + len(view) >= self.size or walk.position + 8 > self.size:
                    break  # cut off in a header
                length = max(BEHIND_BYTES, min(self.head_bytes, walk.stop - walk.position))
                return [walk], (walk.position, min(self.size, walk.position + length))
            self._count(box.stop - box.start if box.kind in {b"moof", b"sidx"} else 0, walk.position)
            if box.stop < box.body:
                check_extent(box.moved(walk.position), self.size, self.where)
            if box.kind in {b"moof", b"sidx"}:
                if walk.position + box.stop > self.size:
                    break  # cut off in the head of the last fragment
                if len(view) < box.stop:
                    return [walk], (walk.position, min(self.size, walk.position + box.stop + BEHIND_BYTES))
                if box.kind == b"sidx":
                    return self._split(walk, Box("sidx", view[box.body : box.stop], self.where), box.stop), None
                self.moofs[walk.position] = view[: box.stop]
                self.head_bytes = min(max(self.head_bytes, box.stop + BEHIND_BYTES), MAX_HEAD_BYTES)
            walk.position += box.stop
        if walk.position > walk.stop < self.size:
            raise FormatError(
                f"{self.where}: a box runs to byte {walk.position}, but the file's list of fragments (sidx, mfra) has "
                f"one begin at byte {walk.stop}",
                remedy=COPY_ANEW,
            )
        return [], None

    def _count(self, nbytes: int, position: int) -> None:
        self.boxes_left -= 1
        self.bytes_left -= nbytes
        if self.boxes_left < 0 or self.bytes_left < 0:
            raise FormatError(
                f"{self.where}: up to byte {position} there are more than {MAX_BOXES} boxes, or {MAX_MOOV_BYTES} bytes "
                "of them list samples: remux with: ffmpeg -i IN.mp4 -c copy -movflags faststart OUT.mp4"
            )

    def _split(self, walk: _Walk, sidx: Box, length: int) -> list[_Walk]:
        """Walks of the parts that a segment index lists, and of what is behind them."""
        wide = sidx.version > 0
        place = 12 + (16 if wide else 8)
        (first,) = sidx.unpack("Q" if wide else "I", 20 if wide else 16)
        (count,) = sidx.unpack("H", place + 2)
        sizes = sidx.table(">u4", 3 * count, place + 4).reshape(-1, 3)[:, 0].astype(np.int64) & 0x7FFFFFFF
        begin = walk.position + length + first
        if begin > walk.stop:
            raise sidx.error(f"begins its list at byte {begin}, behind what it may list, which ends at {walk.stop}")
        return self.cut(walk, begin, [begin + end for end in np.cumsum(sizes).tolist()])

    @staticmethod
    def cut(walk: _Walk, begin: int, positions: Sequence[int]) -> list[_Walk]:
        """Walks of what lies between these positions from ``begin`` on, up to the end of the walk."""
        inside = {position for position in positions if begin < position < walk.stop}
        edges = [begin, *sorted(inside), walk.stop]
        return [_Walk(first, last, walk.held, walk.held_from) for first, last in pairwise(edges) if first < last]


def fragment_reads(
    piece: Buffer, *, start: int, size: int, url: str, audio: bool = False
) -> Generator[list[tuple[int, int]], Sequence[Buffer], Tracks]:
    """Find the fragments of a file and return its tracks: a generator that yields what to read, and is sent the bytes.

    It yields ranges [start, stop) of the file, to be read side by side, and takes a buffer for each. What it asks for
    is small: the head of each fragment, of HEAD_BYTES or as long as the longest so far. Where the file lists its
    fragments (sidx in front of them, mfra at its end) all heads are one list; else each tells where the next one lies,
    and a file of n fragments takes n requests one after the other. A file that isn't fragmented asks for nothing.

    A file that ends in the head of a fragment loses that fragment.

    Args:
        piece: Bytes of the file from ``start`` on, with the whole moov box in them, as ``locate_moov`` finds it. What
            lies behind it isn't read again.
        start: Where ``piece`` lies in the file. A box begins there.
        size: Length of the file in bytes.
        url: Names the file in errors, and in the indexes.
        audio: Whether to index the first audio track, too.

    Raises:
        FormatError: As ``parse_fragments``; a list that leads between two boxes; samples that lie behind the end of the
            file, which was cut off; more than MAX_BOXES boxes, or more than MAX_MOOV_BYTES of heads.
    """
    where = redact_url(url)
    view = memoryview(piece).cast("B")
    first, last = locate_moov(view, start=start, size=size, url=url)
    moov = view[first - start : last - start]
    if find(moov, "moov", url=url).child("mvex") is None:
        return parse_tracks(moov, url=url, audio=audio)
    finder = _Finder(size, where)
    walk = _Walk(last, size, view, start)
    walks, reads = _advance(finder, [walk])
    if len(walks) == 1 and size - MFRO_BYTES >= last:  # no list so far: the last bytes may lead to one
        *pieces, tail = yield [*reads, (size - MFRO_BYTES, size)]
        _hold(walks, reads, pieces)
        length = _length_of_list(tail)
        if 0 < length <= min(size - last, MAX_MOOV_BYTES):
            (listed,) = yield [(size - length, size)]
            walks[0].stop = max(size - length, walks[0].position)
            walks = finder.cut(walks[0], walks[0].position, _listed(listed, where))
        walks, reads = _advance(finder, walks)
    while walks:
        _hold(walks, reads, (yield reads))
        walks, reads = _advance(finder, walks)
    moofs = sorted(finder.moofs.items())
    tracks, data_stop = parse_fragments(moov, moofs, url=url, audio=audio)
    if data_stop > size:
        raise FormatError(
            f"{where}: truncated: its fragments have samples up to byte {data_stop}, but there are only {size}",
            remedy=COPY_ANEW,
        )
    return tracks


def _advance(finder: _Finder, walks: list[_Walk]) -> tuple[list[_Walk], list[tuple[int, int]]]:
    """The walks that need bytes, and which; each goes on as far as it can."""
    waiting, reads, ahead = [], [], walks[::-1]
    while ahead:
        left, read = finder.step(ahead.pop())
        if read is None:
            ahead.extend(left[::-1])
        else:
            waiting += left
            reads.append(read)
    return waiting, reads


def _hold(walks: list[_Walk], reads: list[tuple[int, int]], pieces: Sequence[Buffer]) -> None:
    for walk, (start, _), piece in zip(walks, reads, pieces, strict=True):
        walk.held, walk.held_from = memoryview(piece).cast("B"), start


def _length_of_list(tail: Buffer) -> int:
    """Length of the list of fragments (mfra) that a file ends with, by its last bytes; 0 where there is none."""
    view = memoryview(tail).cast("B")
    return int.from_bytes(view[12:16]) if bytes(view[4:8]) == b"mfro" else 0


def _listed(data: Buffer, where: str) -> list[int]:
    """Positions of fragments in a list of them (mfra), ascending; none where it isn't one."""
    mfra = next(Box("file", memoryview(data).cast("B"), where).children(), None)
    if mfra is None or mfra.kind != "mfra":
        return []
    positions: set[int] = set()
    for tfra in mfra.children():
        if tfra.kind != "tfra":
            continue
        lengths, count = tfra.unpack("II", 8)
        wide = ">u8" if tfra.version else ">u4"
        numbers = [
            (name, f"V{1 + (lengths >> shift & 3)}") for name, shift in (("traf", 4), ("trun", 2), ("sample", 0))
        ]
        entries = tfra.table(np.dtype([("time", wide), ("moof", wide), *numbers]), count, 16)
        positions.update(entries["moof"].astype(np.int64).tolist())
    return sorted(position for position in positions if position >= 0)

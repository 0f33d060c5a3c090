"""Fragmented MP4: the index of its frames lies in pieces (moof boxes) between the media data.

``moov`` has the formats of the tracks and hardly any sample; each fragment is a ``moof``, which says where its samples
lie and when they are shown, and the media data behind it. ``fragment_reads`` finds them with few small requests. Both
together are the same index as that of any other MP4.

Times are those that FFmpeg gives: it takes a fragment's own decode time (tfdt), shifts it as the edit list says, and
hides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.errors import COPY_ANEW, FormatError, redact_url
from asyncfetch.media.audio import Tracks, parse_tracks, read_tracks
from asyncfetch.media.boxes import (
    TAIL_BYTES,
    Box,
    Buffer,
    FragmentFinder,
    Walk,
    find,
    listed_fragments,
    locate_moov,
)
from asyncfetch.media.index import first_track, track_number
from asyncfetch.media.samples import (
    MAX_CONSTANT_SAMPLES,
    MAX_DURATION,
    MAX_POSITION,
    Columns,
    count_samples,
    joined,
    read_columns,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from numpy.typing import NDArray

MAX_READS = 128
"""Most heads that are read side by side: 8 MiB at most."""
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
        sizes = column("size", defaults.size)
        if not 0 <= offset < MAX_POSITION or not sizes.all():
            raise trun.error(f"its data begins at byte {offset}, or a sample of it has no bytes, which can't be meant")
        sync = np.flatnonzero(flags & NOT_SYNC == 0)
        return Columns(
            sizes=sizes,
            durations=column("duration", defaults.duration),
            composition=column("composition", 0),
            sync=None if len(sync) == count else sync,
            firsts=np.zeros(1, np.int64),
            offsets=np.array([offset]),
            description=np.array([defaults.description]),
            start=time,
        )


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


def fragment_reads(
    piece: Buffer, *, start: int, size: int, url: str, audio: bool = False
) -> Generator[list[tuple[int, int]], Sequence[Buffer], Tracks]:
    """Find the fragments of a file and return its tracks: a generator that yields what to read, and is sent the bytes.

    It yields ranges [start, stop) of the file, up to MAX_READS to be read side by side, and takes the bytes of each.
    What it asks for is small: the head of each fragment, of HEAD_BYTES or as long as the last one. Where the file lists
    its fragments (sidx in front of them, mfra at its end) their heads are asked for together; else each tells where the
    next one lies, and a file of n fragments takes n requests one after the other. A file that isn't fragmented asks for
    nothing. The last step parses all of it, at 0.2 ms a fragment: no work for an event loop.

    A file that ends in the head of a fragment loses that fragment. Of an MP4 within a larger file all positions are its
    own.

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
    finder = FragmentFinder(size, where)
    walks = finder.advance([Walk(last, size, view, start)])
    if len(walks) == 1 and size - MFRO_BYTES >= last:  # no list so far: the last bytes may lead to one
        (walk,) = walks
        piece, tail = yield [walk.read, (size - MFRO_BYTES, size)]
        walk.take(piece)
        length = int.from_bytes(tail[12:16]) if bytes(tail[4:8]) == b"mfro" else 0
        if 0 < length <= min(size - last, TAIL_BYTES):
            (listed,) = yield [(size - length, size)]
            walk.stop = max(size - length, walk.position)
            walks = walk.cut(walk.position, listed_fragments(listed, where))
        walks = finder.advance(walks)
    while walks:
        side_by_side, others = walks[:MAX_READS], walks[MAX_READS:]
        for walk, piece in zip(side_by_side, (yield [walk.read for walk in side_by_side]), strict=True):
            walk.take(piece)
        walks = finder.advance(side_by_side) + others
    tracks, data_stop = parse_fragments(moov, sorted(finder.moofs.items()), url=url, audio=audio)
    if data_stop > size:
        raise FormatError(
            f"{where}: truncated: its fragments have samples up to byte {data_stop}, but there are only {size}",
            remedy=COPY_ANEW,
        )
    return tracks

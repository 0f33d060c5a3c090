"""A clip: a stretch of a video file's samples, and the header that makes a whole MP4 of their bytes.

The samples' bytes are fetched as they lie in the source file; in front of them go ``ftyp``, ``moov`` and the header of
``mdat``. The new sample tables describe only the samples needed; what else lies between them (audio, free space) stays
in the media data, and nothing refers to it.

The clip's clock starts at its first key frame. Where frames aren't shown in the order they are decoded in, four things
need care, because a decoder finds a frame by seeking to the last key frame shown at or before it:

- FFmpeg seeks by *decode* time, less the lag of presentation behind it, and knows the lag only from an edit list. So
  there is one; it starts at the first key frame.
- That finds the right key frame only if all lag alike. In open GOPs they don't: the seek lands a key frame too far, and
  the decoder hands out a neighbour of the frame asked for. Decode times are free as long as they ascend, so
  ``clip_timing`` chooses them to make the lags equal.
- Pictures that follow the first key frame and precede it on the screen may refer to frames before the clip. The
  edit list hides them; leaving them out could disturb the decoder's count of reference frames.
- H.264 begins an open GOP with a recovery point. A decoder started there trusts no picture but this one until it has
  given it out, and at the end of the stream FFmpeg 5 drops what it holds and took in untrusted. So a key frame near the
  end isn't marked as one in the clip, and the clip starts a key frame earlier where it would have none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.media.samples import changes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncfetch.media.samples import ByteRuns

H264 = frozenset({"avc1", "avc3"})
"""Sample entries of codecs with open GOPs that can't be entered near the end of a clip."""
HEVC = frozenset({"hev1", "hvc1", "dvhe", "dvh1"})
SLICES = range(32)
"""Types of NAL units that hold a part of a picture (ITU-T H.265, table 7-1)."""
RANDOM_ACCESS = range(16, 24)
"""Types of pictures that decoding can start at; ISO/IEC 14496-15 asks for them in a sync sample."""
H264_SLICES, H264_IDR, H264_SEI = range(1, 6), 5, 6
"""Types of NAL units of H.264 (ITU-T H.264, table 7-1): parts of a picture, of one that decoding can start at, and what
is said beside pictures."""
RECOVERY_POINT = 6
"""Type of what an SEI says."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyFrames:
    """Samples of a clip of HEVC, or of H.264, that a decoder may be started at, in the order of presentation.

    FFmpeg's decoders of H.264 and AV1 give out no picture before one that leans on no other. HEVC's, begun in the
    middle of a group, puts a grey one in the place of each that it lacks, and torchcodec doesn't tell. So of HEVC
    it has to be looked at whether a video can be decoded from where its file says so. Of H.264 some are recovery
    points, and what comes out begins later: see Refresh.
    """

    ranks: NDArray[np.int32]
    """Rank of each among the frames that the clip shows; at least one."""
    extents: NDArray[np.int64] = field(repr=False)
    """Shape (N, 2): bytes [start, stop) of the clip that each lies in."""
    length_bytes: int
    """Bytes of the length before each NAL unit."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays hold."""
        return self.ranks.nbytes + self.extents.nbytes

    def have_recovery_points(self, clip: memoryview) -> bool:
        """Return whether some of them, of H.264, are points from which pictures are refreshed bit by bit."""
        units = self.extents[:, 0] + self.length_bytes
        kinds = np.frombuffer(clip, np.uint8)[units[units < len(clip)]] & 0x1F
        others = self.extents[: len(kinds)][kinds != H264_IDR]
        return any(recovery_pictures(clip, start, stop, self.length_bytes) for start, stop in others.tolist())

    def in_front_of(self, rank: int) -> int:
        """The number of the one that a decoder is started at for the frame of this rank."""
        return max(0, int(np.searchsorted(self.ranks, rank, "right")) - 1)

    def stands_alone(self, clip: memoryview, number: int) -> bool:
        """Return whether key frame ``number`` of these bytes of the clip is one; not if no picture is found in it."""
        start, stop = self.extents[number].tolist()
        kinds = (clip[unit] >> 1 & 0x3F for unit, _ in _units(clip, start, stop, self.length_bytes))
        return next((kind in RANDOM_ACCESS for kind in kinds if kind in SLICES), False)


@dataclass(frozen=True, slots=True, eq=False)
class Refresh:
    """The samples of a clip of H.264 that starts at a recovery point, in decode order.

    With intra refresh an encoder writes no picture that leans on none, but refreshes a part of each, and says so in its
    file as of key frames. A decoder that starts there has whole pictures only when all parts were refreshed: FFmpeg
    gives out none before that.
    """

    extents: NDArray[np.int64] = field(repr=False)
    """Shape (N, 2): bytes [start, stop) of the clip that each lies in."""
    times: NDArray[np.int64] = field(repr=False)
    """Presentation times, in ticks."""
    length_bytes: int
    """Bytes of the length before each NAL unit."""
    delay: int
    """Ticks that presentation may lag behind decoding."""
    is_all: bool
    """True if the file has no sample in front of them."""

    def whole_from(self, clip: memoryview) -> int:
        """The time from which on pictures are whole and come out; one past all times where they never do.

        FFmpeg trusts those alone that go in when the first whole one has come out. That is shown at most ``delay``
        after it went in, and so are they.
        """
        start, stop = self.extents[0].tolist()
        left = recovery_pictures(clip, start, stop, self.length_bytes)
        for place, (start, stop) in enumerate(self.extents.tolist()):
            if not left:
                return int(self.times[place]) + 2 * self.delay if place else int(self.times.min())
            left -= place + 1 < len(self.extents) and _is_reference(clip, start, stop, self.length_bytes)
        return int(self.times.max()) + 1


def recovery_pictures(clip: memoryview, start: int, stop: int, length_bytes: int) -> int:
    """Reference pictures of H.264 after the one in bytes [start, stop) until pictures are whole, by what it says.

    0 where they are from there on.
    """
    for unit, end in _units(clip, start, stop, length_bytes):
        kind = clip[unit] & 0x1F
        if kind in H264_SLICES:
            return 0
        if kind == H264_SEI and (count := _recovery_count(bytes(clip[unit + 1 : end]).replace(b"\0\0\3", b"\0\0"))):
            return count
    return 0


def _is_reference(clip: memoryview, start: int, stop: int, length_bytes: int) -> bool:
    units = (unit for unit, _ in _units(clip, start, stop, length_bytes) if clip[unit] & 0x1F in H264_SLICES)
    return any(clip[unit] & 0x60 for unit in units)


def _units(clip: memoryview, start: int, stop: int, length_bytes: int) -> Iterator[tuple[int, int]]:
    """NAL units of a sample: where each begins and ends."""
    stop = min(stop, len(clip))
    while (unit := start + length_bytes) < stop:
        start = unit + int.from_bytes(clip[start:unit])
        yield unit, min(start, stop)


def _recovery_count(messages: bytes) -> int:
    """The count of a recovery point among the messages of an SEI; 0 where there is none (ITU-T H.264, D.1.8)."""
    place = 0

    def number() -> int:
        nonlocal place
        total = 0
        while place < len(messages):
            total, place = total + messages[place], place + 1
            if messages[place - 1] != 0xFF:
                break
        return total

    while place + 2 < len(messages):
        kind, size = number(), number()
        if kind == RECOVERY_POINT:
            bits = "".join(f"{byte:08b}" for byte in messages[place : place + size])
            zeros = bits.find("1")
            return int(bits[zeros : 2 * zeros + 1], 2) - 1 if 0 <= zeros <= 16 else 0
        place += size
    return 0


UINT32_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True, eq=False)
class ClipPlan:
    """The bytes of a video file to fetch for some frames, and how to find the frames in them.

    The header, followed by the file's bytes [start, stop), is an MP4 of one video track. It may hold more frames than
    asked for: the key frame in front, and what lies between. With no frame to show, all is empty: ``start == stop``, no
    header.
    """

    start: int
    """First byte of the source file to fetch."""
    stop: int
    """One past the last byte to fetch."""
    frame_index: NDArray[np.int32]
    """Rank of each asked frame among those the clip shows, by time; -1 where the file has no such frame."""
    pts: NDArray[np.int64]
    """Presentation time of each asked frame in the clip, in ticks; -1 where the file has no such frame."""
    timescale: int
    """Ticks per second; the source track's."""
    num_samples: int
    """Coded frames that the clip holds."""
    codec: str
    """Sample entry: "av01", "avc1", "hev1" ..."""
    width: int
    height: int
    header: bytes = field(repr=False)
    """``ftyp``, ``moov`` and the header of ``mdat``."""
    key_frames: KeyFrames | None = None
    """Frames that a decoder may start at; None where it finds out by itself, which is all but HEVC."""
    entries: KeyFrames | None = None
    """The same of H.264, where a decoder finds out, but may give nothing out for a while."""
    start_seconds: float = 0.0
    """Time at which the file shows what the clip shows at tick 0."""
    refresh: Refresh | None = None
    """Its samples where it was cut for a decoder that starts at a recovery point."""


@dataclass(frozen=True, slots=True)
class TrackFormat:
    """The properties that a clip takes over from its source track unchanged."""

    codec: str
    width: int
    height: int
    timescale: int
    stsd: bytes = field(repr=False)
    """Body of a sample description box of one entry, with the decoder's configuration and the colour description."""
    geometry: bytes = field(repr=False)
    """The end of the track header, from ``layer`` on: volume, matrix (rotation, with the movie's), width and height."""
    length_bytes: int = 0
    """Bytes of the length before each NAL unit of HEVC or H.264; 0 of other codecs."""
    is_audio: bool = False
    """True of an audio track; its width and height are 0."""


class Timing(NamedTuple):
    """Times of a clip's samples, in decode order."""

    durations: NDArray[np.int64]
    """Time from each decode time to the next; the first decode time is 0."""
    composition: NDArray[np.int64]
    """Time from decode to presentation, before the edit list; none negative."""
    edit_start: int
    """Presentation time at which the clip's clock starts."""
    hides: bool
    """True if samples are presented before that, and so never shown."""


class ClipTables(NamedTuple):
    """The samples of a clip, in decode order, in the numbers of the new file."""

    sizes: NDArray[Any]
    timing: Timing
    sync: NDArray[Any] | None
    """Key frames, from 0; None means all."""
    runs: ByteRuns

    def extents(self) -> NDArray[np.int64]:
        """Shape (N, 2): bytes [start, stop) of the source file that each sample lies in."""
        ends = np.cumsum(self.sizes, dtype=np.int64)
        first = np.cumsum(self.runs.num_samples) - self.runs.num_samples
        shifts = self.runs.offset - (ends[first] - self.sizes[first])
        ends += np.repeat(shifts, self.runs.num_samples)
        return np.stack((ends - self.sizes, ends), axis=1)


def clip_timing(
    decode: NDArray[np.int64], presentation: NDArray[np.int64], sync: NDArray[Any] | None, *, last_duration: int
) -> Timing:
    """Times for samples that the clip is to show at ``presentation`` on its clock.

    The decode times are kept but for a shift, unless the key frames' composition offsets differ: then all get the same,
    and the samples between two key frames share the time between them evenly.
    """
    composition = presentation - decode
    if sync is not None and len(sync) and (composition[sync] != composition[0]).any():
        decode = _aligned_decode_times(presentation, sync, last_duration)
        composition = presentation - decode
    durations = np.empty(len(decode), np.int64)
    np.subtract(decode[1:], decode[:-1], out=durations[:-1])
    durations[-1] = max(1, last_duration)  # torchcodec can't open a clip of one frame that lasts no time
    least = int(composition.min())
    return Timing(durations, composition - least, -least - int(decode[0]), bool(presentation.min() < 0))


def _aligned_decode_times(presentation: NDArray[np.int64], sync: NDArray[Any], last_duration: int) -> NDArray[np.int64]:
    """Ascending times that are the presentation time for every key frame."""
    count = len(presentation)
    # The last frame may be said to last for hours: that must not be shared out to those before it.
    end = presentation.max() + min(last_duration, int(np.ptp(presentation)) + 1)
    samples, times = np.append(sync, count), np.append(presentation[sync], end)
    even = np.interp(np.arange(count), samples, times).astype(np.int64)
    return np.maximum.accumulate(even)


def build_header(track: TrackFormat, tables: ClipTables, *, start: int, stop: int) -> bytes:
    """The bytes to put in front of bytes [start, stop) of the source file; all runs lie within them."""
    header = _build_header(track, tables, start, stop, wide=stop - start >= UINT32_LIMIT)
    if len(header) + stop - start >= UINT32_LIMIT:  # an offset, or the size of mdat, may not fit 32 bits
        header = _build_header(track, tables, start, stop, wide=True)
    return header


def _build_header(track: TrackFormat, tables: ClipTables, start: int, stop: int, *, wide: bool) -> bytes:
    size = stop - start
    mdat = struct.pack(">I4sQ", 1, b"mdat", 16 + size) if wide else struct.pack(">I4s", 8 + size, b"mdat")
    offsets = np.zeros(len(tables.runs.offset), ">u8" if wide else ">u4")
    header = bytearray().join((FTYP, _moov(track, tables, offsets), mdat))
    # The offsets are the last bytes of moov, and depend on its length: they are filled in now that it is known.
    offsets[:] = tables.runs.offset + (len(header) - start)
    header[-len(mdat) - offsets.nbytes : -len(mdat)] = offsets.tobytes()
    return bytes(header)


def _box(kind: bytes, *parts: bytes) -> bytes:
    return b"".join((struct.pack(">I4s", 8 + sum(map(len, parts)), kind), *parts))


UNITY_MATRIX = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
FTYP = _box(b"ftyp", b"isom", struct.pack(">I", 512), b"isomiso2mp41")
HDLR = _box(b"hdlr", struct.pack(">II4s12x", 0, 0, b"vide"), b"video\0")
VMHD = _box(b"vmhd", struct.pack(">I8x", 1))
AUDIO_HDLR = _box(b"hdlr", struct.pack(">II4s12x", 0, 0, b"soun"), b"audio\0")
SMHD = _box(b"smhd", bytes(8))
SELF_CONTAINED = _box(b"dinf", _box(b"dref", struct.pack(">II", 0, 1), _box(b"url ", struct.pack(">I", 1))))
# Normal rate and volume, no rotation; the next track would be number 2.
MVHD_END = struct.pack(">IH10x", 0x10000, 0x100) + UNITY_MATRIX + struct.pack(">24xI", 2)
VERSION_1 = 1 << 24  # 64-bit durations
TRACK_ENABLED = 3  # and part of the movie
UNDETERMINED = 0x55C4  # the language "und"


def _moov(track: TrackFormat, tables: ClipTables, offsets: NDArray[Any]) -> bytes:
    duration = int(tables.timing.durations.sum())
    mvhd = _box(b"mvhd", struct.pack(">I16xIQ", VERSION_1, track.timescale, duration), MVHD_END)
    tkhd = _box(b"tkhd", struct.pack(">I16xI4xQ8x", VERSION_1 | TRACK_ENABLED, 1, duration), track.geometry)
    mdhd = _box(b"mdhd", struct.pack(">I16xIQHH", VERSION_1, track.timescale, duration, UNDETERMINED, 0))
    hdlr, media_header = (AUDIO_HDLR, SMHD) if track.is_audio else (HDLR, VMHD)
    minf = _box(b"minf", media_header, SELF_CONTAINED, _stbl(track, tables, offsets))
    trak = _box(b"trak", tkhd, _edts(tables.timing, duration), _box(b"mdia", mdhd, hdlr, minf))
    return _box(b"moov", mvhd, trak)


def _edts(timing: Timing, duration: int) -> bytes:
    if not timing.edit_start and not timing.hides:
        return b""
    # Longer than what there is to show: near the end of an edit FFmpeg drops frames that follow a key frame.
    duration += int(timing.composition.max())
    return _box(b"edts", _box(b"elst", struct.pack(">IIQqI", VERSION_1, 1, duration, timing.edit_start, 0x10000)))


def _stbl(track: TrackFormat, tables: ClipTables, offsets: NDArray[Any]) -> bytes:
    boxes = [_box(b"stsd", track.stsd), _run_length(b"stts", tables.timing.durations)]
    if tables.timing.composition.any():
        boxes.append(_run_length(b"ctts", tables.timing.composition))
    if tables.sync is not None:
        boxes.append(_table(b"stss", len(tables.sync), (tables.sync + 1).astype(">u4")))
    chunks = np.ones((len(offsets), 3), ">u4")  # each of the first description, which is the only one
    chunks[:, 0] = np.arange(1, len(offsets) + 1)
    chunks[:, 1] = tables.runs.num_samples
    boxes.append(_table(b"stsc", len(offsets), chunks))
    boxes.append(_box(b"stsz", struct.pack(">III", 0, 0, len(tables.sizes)), tables.sizes.astype(">u4").tobytes()))
    boxes.append(_table(b"stco" if offsets.itemsize == 4 else b"co64", len(offsets), offsets))
    return _box(b"stbl", *boxes)


def _table(kind: bytes, count: int, entries: NDArray[Any]) -> bytes:
    return _box(kind, struct.pack(">II", 0, count), entries.tobytes())


def _run_length(kind: bytes, values: NDArray[Any]) -> bytes:
    starts = np.flatnonzero(changes(values))
    entries = np.empty((len(starts), 2), ">u4")
    entries[:-1, 0] = starts[1:] - starts[:-1]
    entries[-1, 0] = len(values) - starts[-1]
    entries[:, 1] = values[starts]
    return _table(kind, len(entries), entries)

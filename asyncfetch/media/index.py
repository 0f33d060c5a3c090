"""The index of an MP4 file (its moov box), and the clips that can be cut with it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.errors import FormatError, redact_url
from asyncfetch.media.boxes import Box, Buffer, find
from asyncfetch.media.clip import (
    H264,
    HEVC,
    ClipPlan,
    ClipTables,
    KeyFrames,
    Refresh,
    Timing,
    TrackFormat,
    build_header,
    clip_timing,
)
from asyncfetch.media.samples import MAX_DURATION, MAX_OFFSET, MAX_POSITION, ByteRuns, SampleTable, parse_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TIMESCALE = (1 << 31) - 1
"""FFmpeg takes time scales above this for broken."""
VISUAL_ENTRY_BYTES = 78
"""Length of the fixed part of a visual sample entry."""
LENGTH_SIZES = {"hvcC": 21, "avcC": 4}
"""Position at which a decoder's configuration says how long the lengths of NAL units are, less 1, in 2 bits."""
MATRIX_SHIFTS = np.array([16, 16, 30]).reshape(1, 3, 1)
"""Digits behind the point in the rows of a movie's matrix."""


@dataclass(frozen=True, slots=True)
class Edit:
    """The part of the track that is shown, and when. Other samples are decoded, but never shown."""

    start: int = -MAX_POSITION
    """First presentation time shown, in ticks, before the edit."""
    stop: int = MAX_POSITION
    """One past the last presentation time shown."""
    shift: int = 0
    """Time to subtract from a presentation time to have the time on the movie's clock. As FFmpeg reads it: the clock
    starts with the first frame shown, and not between two, where the edit may."""


@dataclass(frozen=True, slots=True, eq=False)
class Mp4Index:
    """The first video track of an MP4 file: where each of its frames lies and when it is shown.

    Immutable, so any number of threads may share it. It takes 4 to 8 bytes a frame (``nbytes``) and refers to nothing
    that it was parsed from.
    """

    url: str
    """The file, as the caller wrote it."""
    formats: tuple[TrackFormat, ...]
    """One for each sample description of the track, at least one. A clip has one of them."""
    samples: SampleTable
    edit: Edit

    @property
    def track(self) -> TrackFormat:
        """The first format; mostly the only one."""
        return self.formats[0]

    @property
    def codec(self) -> str:
        """Sample entry: "av01", "avc1", "avc3", "hev1", "hvc1" ..."""
        return self.track.codec

    @property
    def width(self) -> int:
        """Pixels a row."""
        return self.track.width

    @property
    def height(self) -> int:
        """Pixels a column."""
        return self.track.height

    @property
    def timescale(self) -> int:
        """Ticks per second."""
        return self.track.timescale

    @property
    def num_samples(self) -> int:
        """Frames in the file, those not shown included."""
        return self.samples.num_samples

    @property
    def data_stop(self) -> int:
        """One past the last byte of the file that holds a frame; a file shorter than this was cut off."""
        return self.samples.data_stop

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index holds, but for a few hundred of the objects themselves."""
        return self.samples.nbytes + sum(len(track.stsd) + len(track.geometry) for track in self.formats)

    def __repr__(self) -> str:
        size = f"{self.width}x{self.height}"
        return f"Mp4Index({redact_url(self.url)!r}, {self.codec!r}, {size}, num_samples={self.num_samples})"

    def clip(self, samples: NDArray[np.int64], *, earlier: int | None = None) -> ClipPlan:
        """Return what to fetch for these samples of the file, in any order; -1 stands for a frame that isn't there.

        The clip starts at the key frame that decoding needs, and ends with the last sample needed, in decode order.
        With ``earlier`` it starts so many key frames before that and marks no other: the ones that the file marks are
        none, but recovery points of H.264, from which pictures are refreshed bit by bit (see Refresh).

        Raises:
            FormatError: The encoding changes between these frames, or they lie too far apart in time.
        """
        frame_index = np.full(len(samples), -1, np.int32)
        pts = np.full(len(samples), -1, np.int64)
        present = np.flatnonzero(samples >= 0)
        if not len(present):
            return ClipPlan(0, 0, frame_index, pts, self.timescale, 0, self.codec, self.width, self.height, b"")

        wanted = samples[present]
        lowest, stop = int(wanted.min()), int(wanted.max()) + 1
        times = self.samples.presentation_times(lowest, stop)
        earliest = int(times[wanted - lowest].min())
        first = self.samples.decodable_from(lowest, earliest, earlier or 0)
        last_entry = self.samples.last_entry_before(stop) if self.codec in H264 else stop - 1
        first = min(first, last_entry)
        if first < lowest:
            times = self.samples.presentation_times(first, stop)
        clip_start = min(int(times[0]), earliest)
        times -= clip_start
        rank = np.empty(stop - first, np.int32)
        rank[np.argsort(times, kind="stable")] = np.arange(stop - first) - np.count_nonzero(times < 0)
        frame_index[present] = rank[wanted - first]
        pts[present] = times[wanted - first]

        sync = self.samples.sync_between(first, last_entry + 1) if earlier is None else np.zeros(1, np.int32)
        tables = self._cut(first, stop, times, sync)
        begin = int(tables.runs.offset.min())
        end = int((tables.runs.offset + tables.runs.num_bytes).max())
        self._check_timing(tables.timing)
        track = self._format_of(tables.runs)
        header = build_header(track, tables, start=begin, stop=end)
        shift = len(header) - begin
        key_frames = _key_frames(track, tables, rank, shift) if track.length_bytes else None
        return ClipPlan(
            start=begin,
            stop=end,
            frame_index=frame_index,
            pts=pts,
            timescale=self.timescale,
            num_samples=stop - first,
            codec=track.codec,
            width=track.width,
            height=track.height,
            header=header,
            key_frames=key_frames if track.codec in HEVC else None,
            entries=key_frames if track.codec in H264 else None,
            start_seconds=(clip_start - self.edit.shift) / self.timescale,
            refresh=None if earlier is None else self._refresh(tables, times, shift, first),
        )

    def _refresh(self, tables: ClipTables, times: NDArray[np.int64], shift: int, first: int) -> Refresh:
        """Return it for a clip of samples from ``first`` on, its bytes ``shift`` after their place in the file."""
        least, greatest = self.samples.composition_limits
        return Refresh(
            tables.extents() + shift,
            times,
            self.track.length_bytes,
            delay=greatest - min(least, 0),
            is_all=first == 0,
        )

    def _check_timing(self, timing: Timing) -> None:
        """Raise FormatError where FFmpeg would take the clip's times for others."""
        offset, duration = int(timing.composition.max()), int(timing.durations.max())
        if offset >= MAX_OFFSET or duration >= MAX_DURATION:
            raise FormatError(
                f"{redact_url(self.url)}: frames that have to lie in one clip are too far apart in time: by up to "
                f"{max(offset, duration)} ticks of 1/{self.timescale} s; encode the video anew, at a steady rate"
            )

    def _format_of(self, runs: ByteRuns) -> TrackFormat:
        """The one that all these samples have: FFmpeg loses track of a second one when it seeks."""
        numbers: set[int] = set(runs.description.tolist())
        track, *others = {self.formats[number - 1] for number in numbers}
        if others:
            raise FormatError(
                f"{redact_url(self.url)}: its encoding changes in the middle of what one clip has to hold, the frames "
                f"in bytes [{runs.offset.min()}, {int((runs.offset + runs.num_bytes).max())}) (several sample "
                "descriptions, stsd): encode the video anew"
            )
        return track

    def samples_at(
        self, seconds: NDArray[np.float64], *, within_seconds: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the sample shown nearest to each of these times of the file, and when it is; -1 and NaN for none.

        The earlier of two as near. None is there where no sample is shown within so many seconds, and where another one
        is shown at just the same time: decoders know a sample by that.
        """
        sample_of, shown_at = np.full(len(seconds), -1, np.int64), np.full(len(seconds), np.nan)
        with np.errstate(over="ignore"):
            ticks = seconds * self.timescale + self.edit.shift
        reach = within_seconds * self.timescale
        asked = np.flatnonzero(np.abs(ticks) < MAX_POSITION)  # NaN isn't
        if not len(asked):
            return sample_of, shown_at
        ticks = ticks[asked]
        low = max(floor(ticks.min() - reach), self.edit.start)
        high = min(ceil(ticks.max() + reach) + 1, self.edit.stop)
        first, stop = self.samples.presented_between(low, high)
        if first >= stop:
            return sample_of, shown_at
        times = self.samples.presentation_times(first, stop)
        shown = np.flatnonzero((times >= low) & (times < high))
        if not len(shown):
            return sample_of, shown_at
        shown = shown[np.argsort(times[shown], kind="stable")]
        times = times[shown]
        behind = np.searchsorted(times, ticks)
        before, behind = np.maximum(behind - 1, 0), np.minimum(behind, len(times) - 1)
        nearest = np.where(ticks - times[before] <= times[behind] - ticks, before, behind)
        is_alone = np.concatenate(([True], times[1:] != times[:-1], [True]))  # in front of each, and behind the last
        found = (np.abs(times[nearest] - ticks) <= reach) & is_alone[nearest] & is_alone[nearest + 1]
        asked, nearest = asked[found], nearest[found]
        sample_of[asked] = shown[nearest] + first
        shown_at[asked] = (times[nearest] - self.edit.shift) / self.timescale
        return sample_of, shown_at

    def _cut(self, first: int, stop: int, times: NDArray[np.int64], sync: NDArray[np.int32] | None) -> ClipTables:
        """The tables of a clip of samples [first, stop), its key frames ``sync``, which it presents at ``times``."""
        samples = self.samples
        timing = clip_timing(
            samples.decode_times(first, stop), times, sync, last_duration=int(samples.durations[stop - 1])
        )
        return ClipTables(
            sizes=samples.sizes[first:stop], timing=timing, sync=sync, runs=samples.byte_runs(first, stop)
        )


def _key_frames(track: TrackFormat, tables: ClipTables, rank: NDArray[np.int32], shift: int) -> KeyFrames:
    """Return a clip's key frames: their samples have these ranks, and bytes ``shift`` after their place in the file."""
    # Where the first one is none, a decoder starts there all the same for what is in front of the first.
    samples = np.arange(len(rank)) if tables.sync is None else np.union1d(tables.sync, [0])
    samples = samples[np.argsort(rank[samples], kind="stable")]
    return KeyFrames(rank[samples], tables.extents()[samples] + shift, track.length_bytes)


def parse_moov(data: Buffer, *, url: str) -> Mp4Index:
    """The index of the file's first video track. Audio and other tracks are skipped.

    Args:
        data: Bytes of the file from the start of a box on, with the whole moov box in them; other boxes may lie in
            front of it and behind. ``locate_moov`` finds it.
        url: Names the file in errors, and in the index.

    Raises:
        FormatError: No index, no video, a fragmented file, or tables that are cut off or contradict each other.
    """
    moov = find(data, "moov", url=url)
    if moov.child("mvex") is not None:
        raise FormatError(
            f"{redact_url(url)}: a fragmented MP4 (mvex box), which has no index of its frames; "
            "remux it with: ffmpeg -i IN.mp4 -c copy -movflags faststart OUT.mp4"
        )
    trak = _first_video(moov)
    mdhd, stbl = trak.require("mdia", "mdhd"), trak.require("mdia", "minf", "stbl")
    timescale, samples = _timescale(mdhd), parse_samples(stbl)
    return Mp4Index(
        url=url,
        formats=_formats(_geometry(moov, trak), stbl.require("stsd"), samples, timescale),
        samples=samples,
        edit=_edit(moov, trak, samples, timescale),
    )


def _first_video(moov: Box) -> Box:
    if moov.child("cmov") is not None:
        raise moov.error("is compressed (cmov), which isn't supported; remux with: ffmpeg -i IN -c copy OUT.mp4")
    handlers = []
    for trak in moov.children():
        if trak.kind == "trak":
            (handler,) = trak.require("mdia", "hdlr").unpack("4s", 8)
            if handler == b"vide":
                return trak
            handlers.append(repr(handler.decode("latin-1")))
    raise moov.error(f"no video track ('vide') among its {len(handlers)} tracks: {', '.join(handlers[:8]) or 'none'}")


def _timescale(header: Box) -> int:
    """Ticks per second of a movie or media header."""
    timescale = header.u32(20 if header.version == 1 else 12)
    if not 1 <= timescale <= MAX_TIMESCALE:
        raise header.error(f"time scale {timescale} isn't within 1..{MAX_TIMESCALE}")
    return timescale


def _geometry(moov: Box, trak: Box) -> bytes:
    """The end of the track header, its matrix followed by the movie's: either may turn the pictures."""
    tkhd, mvhd = trak.require("tkhd"), moov.require("mvhd")
    layer, own, size = tkhd.unpack("8s36s8s", 44 if tkhd.version == 1 else 32)
    movie = mvhd.table(">i4", 9, 48 if mvhd.version == 1 else 36).reshape(3, 3).astype(np.int64)
    products = np.frombuffer(own, ">i4").reshape(3, 3, 1) * movie >> MATRIX_SHIFTS
    return b"".join((layer, products.sum(axis=1).astype(">i4").tobytes(), size))


def _formats(geometry: bytes, stsd: Box, samples: SampleTable, timescale: int) -> tuple[TrackFormat, ...]:
    formats = tuple(_track_format(stsd, entry, timescale, geometry) for entry in stsd.children(8))
    used = samples.run_description
    if not len(formats) or int(used.min()) < 1 or int(used.max()) > len(formats):
        raise stsd.error(f"holds {len(formats)} sample descriptions, but samples use {used.min()} to {used.max()}")
    return formats


def _track_format(stsd: Box, entry: Box, timescale: int, geometry: bytes) -> TrackFormat:
    if len(entry.body) < VISUAL_ENTRY_BYTES:
        raise stsd.error(f"{entry.kind!r} is no visual sample entry")
    width, height = entry.unpack("HH", 24)
    if not width or not height:
        raise stsd.error(f"the frames are {width}x{height} pixels")
    only = struct.pack(">III4s", 0, 1, 8 + len(entry.body), entry.kind.encode("latin-1")) + entry.body
    return TrackFormat(entry.kind, width, height, timescale, only, geometry, _length_bytes(entry))


def _length_bytes(entry: Box) -> int:
    """See TrackFormat."""
    if entry.kind in HEVC | H264:
        for box in entry.children(VISUAL_ENTRY_BYTES):
            if (place := LENGTH_SIZES.get(box.kind)) is not None:
                return 1 + (int(box.unpack("B", place)[0]) & 3)
    return 0


def _edit(moov: Box, trak: Box, samples: SampleTable, timescale: int) -> Edit:
    """The one stretch of the track that its edit list shows; empty edits in front of it delay it."""
    elst = trak.child("edts", "elst")
    if elst is None:
        return Edit()
    wide = elst.version == 1
    dtype = np.dtype([("duration", ">u8" if wide else ">u4"), ("time", ">i8" if wide else ">i4"), ("rate", ">i4")])
    table = elst.table(dtype, elst.u32(4), 8)
    if not len(table):
        return Edit()
    _, start, rate = table[-1].item()
    if (table["time"][:-1] != -1).any() or start < 0 or rate != 0x10000:
        raise elst.error(
            "shows other than one stretch of the track at normal speed; remux with: ffmpeg -i IN.mp4 -c copy OUT.mp4"
        )
    movie = _timescale(moov.require("mvhd"))
    # Durations are in the movie's ticks, often milliseconds. FFmpeg rounds each to the nearest of the track's.
    *delays, length = ((2 * duration * timescale + movie) // (2 * movie) for duration in table["duration"].tolist())
    delay = sum(delays)
    if max(start, delay) >= MAX_POSITION:
        raise elst.error(f"starts at tick {start} after a delay of {delay} ticks, which can't be meant")
    stop = min(start + length, MAX_POSITION) if table["duration"][-1] else MAX_POSITION
    return Edit(start, stop, _first_shown(samples, start, stop) - delay)


def _first_shown(samples: SampleTable, start: int, stop: int) -> int:
    """The earliest presentation time within [start, stop); ``start`` where there is none."""
    first, last = samples.presented_between(start, stop)
    if first >= last:
        return start
    times = samples.presentation_times(first, last)
    shown = times[(times >= start) & (times < stop)]
    return int(shown.min()) if len(shown) else start

"""The index of an MP4 file (its moov box), and the clips that can be cut with it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, floor
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

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
from asyncfetch.media.samples import (
    MAX_DURATION,
    MAX_OFFSET,
    MAX_POSITION,
    ByteRuns,
    Columns,
    SampleTable,
    count_samples,
    joined,
    read_columns,
    sample_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

MAX_TIMESCALE = (1 << 31) - 1
"""FFmpeg takes time scales above this for broken."""
VISUAL_ENTRY_BYTES = 78
"""Length of the fixed part of a visual sample entry."""
AUDIO_ENTRY_BYTES = 28
"""Length of the fixed part of an audio sample entry."""
LENGTH_SIZES = {"hvcC": 21, "avcC": 4}
"""Position at which a decoder's configuration says how long the lengths of NAL units are, less 1, in 2 bits."""
CODEC_NAMES = {"av01": "av1", "avc1": "h264", "avc3": "h264", "hev1": "hevc", "hvc1": "hevc", "vp09": "vp9"}
MAX_EDITS = 256
"""Most entries of an edit list that are looked at; those of cameras have up to three."""
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
class TrackIndex:
    """A track of an MP4 file: where each of its coded frames lies, and when it is shown or played.

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
    def codec(self) -> str:
        """Sample entry: "av01", "avc1", "hev1", "mp4a", "Opus" ..."""
        return self.formats[0].codec

    @property
    def timescale(self) -> int:
        """Ticks per second."""
        return self.formats[0].timescale

    @property
    def data_stop(self) -> int:
        """One past the last byte of the file that holds a frame of the track; a file shorter than this was cut off."""
        return self.samples.data_stop

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index holds, but for a few hundred of the objects themselves."""
        return self.samples.nbytes + sum(len(track.stsd) + len(track.geometry) for track in self.formats)


@dataclass(frozen=True, slots=True, eq=False)
class Mp4Index(TrackIndex):
    """The first video track of an MP4 file."""

    _shown: list[tuple[NDArray[np.int64], NDArray[np.float64], float]] = field(default_factory=list, repr=False)
    """The result of ``shown``, once it was asked for."""

    @property
    def track(self) -> TrackFormat:
        """The first format; mostly the only one."""
        return self.formats[0]

    @property
    def codec_name(self) -> str:
        """FFmpeg's name of the codec, as "h264"; the sample entry's of others than these."""
        return CODEC_NAMES.get(self.codec, self.codec)

    @property
    def width(self) -> int:
        """Pixels a row."""
        return self.track.width

    @property
    def height(self) -> int:
        """Pixels a column."""
        return self.track.height

    @property
    def num_samples(self) -> int:
        """Frames in the file, those not shown included."""
        return self.samples.num_samples

    @property
    @override
    def nbytes(self) -> int:
        """16 bytes a frame more when ``shown`` was asked for."""
        made = sum(samples.nbytes + seconds.nbytes for samples, seconds, _ in self._shown)
        return made + super(Mp4Index, self).nbytes  # dataclass makes the class anew, for its slots

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
        table, stop = self.samples, int(wanted.max()) + 1
        last_entry = table.last_entry_before(stop) if self.codec in H264 else stop - 1
        first = min(table.decodable_from(wanted, earlier or 0), last_entry)
        decode = table.decode_times(first, stop)
        times = decode + table.composition[first:stop]
        places = wanted - first
        clip_start = min(int(times[0]), int(times[places].min()))
        times -= clip_start
        rank = np.empty(stop - first, np.int32)
        rank[np.argsort(times, kind="stable")] = np.arange(stop - first) - np.count_nonzero(times < 0)
        frame_index[present] = rank[places]
        pts[present] = times[places]

        sync = table.sync_between(first, last_entry + 1) if earlier is None else np.zeros(1, np.int32)
        timing = clip_timing(decode, times, sync, last_duration=int(table.durations[stop - 1]))
        tables = ClipTables(table.sizes[first:stop], timing, sync, table.byte_runs(first, stop))
        begin = int(tables.runs.offset.min())
        end = int((tables.runs.offset + tables.runs.num_bytes).max())
        self._check_timing(tables.timing)
        track = common_format(self.formats, tables.runs, self.url)
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
            refresh=None
            if earlier is None
            else Refresh(tables.extents() + shift, times, track.length_bytes, table.most_delay, is_all=first == 0),
        )

    def _check_timing(self, timing: Timing) -> None:
        """Raise FormatError where FFmpeg would take the clip's times for others."""
        offset, duration = int(timing.composition.max()), int(timing.durations.max())
        if offset >= MAX_OFFSET or duration >= MAX_DURATION:
            raise FormatError(
                f"{redact_url(self.url)}: frames that have to lie in one clip are too far apart in time: by up to "
                f"{max(offset, duration)} ticks of 1/{self.timescale} s; encode the video anew, at a steady rate"
            )

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
        samples, times = self.samples.presented(low, high)
        if not len(samples):
            return sample_of, shown_at
        nearest = np.searchsorted(times[:-1] + times[1:], 2 * ticks)
        found = np.abs(times[nearest] - ticks) <= reach
        same = np.flatnonzero(times[1:] == times[:-1])
        if len(same):
            found &= ~np.isin(nearest, (same, same + 1))
        asked, nearest = asked[found], nearest[found]
        sample_of[asked] = samples[nearest]
        shown_at[asked] = (times[nearest] - self.edit.shift) / self.timescale
        return sample_of, shown_at

    def shown(self) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
        """All frames shown, in the order of presentation: their samples, their times, and the time when all has ended.

        Shape (N,) each; times and end are seconds of the file. They are made once, and not to be written to. A sample
        is -1 where another frame is shown at just the same time: decoders know a frame by that. The times are those of
        torchcodec's ``get_frame_at(i).pts_seconds`` in exact mode, and i the place in the arrays; where an edit list
        hides the beginning of a group of pictures, torchcodec 0.13 fails or gives another frame's.
        """
        if not self._shown:
            order, times = self.samples.presented(self.edit.start, self.edit.stop)
            end = int(times[-1]) + int(self.samples.durations[order[-1]]) if len(order) else self.edit.shift
            same = times[1:] == times[:-1]
            order[:-1][same] = order[1:][same] = -1
            seconds = (times - self.edit.shift) / self.timescale
            order.flags.writeable = seconds.flags.writeable = False
            self._shown.append((order, seconds, (end - self.edit.shift) / self.timescale))
        return self._shown[0]

    def group_bytes(self, samples: NDArray[np.int64]) -> int:
        """Bytes of the groups of pictures that these samples need, each taken whole and once; -1 is no sample."""
        table, present = self.samples, np.unique(samples[samples >= 0])
        if not len(present):
            return 0
        if table.sync is None:
            return int(table.sizes[present].sum(dtype=np.int64))
        times = table.presentation_times(0, self.num_samples)
        groups = np.searchsorted(table.sync, present, "right") - 1
        leads = times[present] < times[table.sync[np.maximum(groups, 0)]]
        groups = np.union1d(groups, groups[leads] - 1)
        edges = np.concatenate(([0], table.sync, [self.num_samples]))
        ends = np.concatenate(([0], np.cumsum(table.sizes, dtype=np.int64)))
        groups = groups[groups >= -1] + 1
        return int((ends[edges[groups + 1]] - ends[edges[groups]]).sum())


def common_format(formats: Sequence[TrackFormat], runs: ByteRuns, url: str) -> TrackFormat:
    """The one that all these samples have: FFmpeg loses track of a second one when it seeks.

    Raises:
        FormatError: They have several.
    """
    numbers: set[int] = set(runs.description.tolist())
    track, *others = {formats[number - 1] for number in numbers}
    if others:
        raise FormatError(
            f"{redact_url(url)}: its encoding changes in the middle of what one clip has to hold, the frames "
            f"in bytes [{runs.offset.min()}, {int((runs.offset + runs.num_bytes).max())}) (several sample "
            "descriptions, stsd): encode the video anew"
        )
    return track


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
    refuse_fragments(moov, url)
    return video_index(moov, {}, url=url)


def refuse_fragments(moov: Box, url: str) -> None:
    """Raise FormatError where samples lie in fragments."""
    if moov.child("mvex") is not None:
        raise FormatError(
            f"{redact_url(url)}: a fragmented MP4 (mvex box), the index of its frames lies in its fragments: read them "
            "as asyncfetch.media.fragment_reads says, or remux it with: "
            "ffmpeg -i IN.mp4 -c copy -movflags faststart OUT.mp4"
        )


def video_index(moov: Box, fragments: Mapping[int, Sequence[Columns]], *, url: str) -> Mp4Index:
    """The index of the first video track, of what ``moov`` says and its samples in fragments, by number of the track.

    Raises:
        FormatError: No video, or tables that are cut off or contradict each other.
    """
    trak = first_track(moov, b"vide")
    if trak is None:
        raise moov.error(f"no video track ('vide') among its {tracks_of(moov)}")
    timescale = read_timescale(trak.require("mdia", "mdhd"))
    samples = track_samples(trak, fragments)
    stsd, geometry = trak.require("mdia", "minf", "stbl", "stsd"), _geometry(moov, trak)
    return Mp4Index(
        url=url,
        formats=read_formats(stsd, samples, lambda entry: _track_format(stsd, entry, timescale, geometry)),
        samples=samples,
        edit=_video_edit(moov, trak, samples, timescale, fragments.get(track_number(trak), ())),
    )


def first_track(moov: Box, handler: bytes) -> Box | None:
    """The first track of a kind, such as ``vide`` or ``soun``; None where there is none."""
    if moov.child("cmov") is not None:
        raise moov.error("is compressed (cmov), which isn't supported; remux with: ffmpeg -i IN -c copy OUT.mp4")
    return next((trak for trak in moov.children() if trak.kind == "trak" and _handler(trak) == handler), None)


def _handler(trak: Box) -> bytes:
    handler: bytes = trak.require("mdia", "hdlr").unpack("4s", 8)[0]
    return handler


def track_number(trak: Box) -> int:
    """The number by which fragments refer to a track."""
    tkhd = trak.require("tkhd")
    return tkhd.u32(20 if tkhd.version == 1 else 12)


def tracks_of(moov: Box) -> str:
    """The number of tracks and the kinds of the first ones, for messages."""
    kinds = [repr(_handler(trak).decode("latin-1")) for trak in moov.children() if trak.kind == "trak"]
    return f"{len(kinds)} tracks: {', '.join(kinds[:8]) or 'none'}"


def track_samples(trak: Box, fragments: Mapping[int, Sequence[Columns]], *, group: int = 1) -> SampleTable:
    """The samples of a track, which lie in fragments, or else in its own tables, ``group`` of them as one."""
    stbl = trak.require("mdia", "minf", "stbl")
    parts = fragments.get(track_number(trak)) or [read_columns(stbl, group=group)]
    return sample_table(joined(parts), stbl)


def read_timescale(header: Box) -> int:
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


def read_formats(stsd: Box, samples: SampleTable, read: Callable[[Box], TrackFormat]) -> tuple[TrackFormat, ...]:
    """The formats of a track's sample descriptions, each read by ``read``; samples use no others."""
    formats = tuple(read(entry) for entry in stsd.children(8))
    used = samples.run_description
    if not len(formats) or int(used.min()) < 1 or int(used.max()) > len(formats):
        raise stsd.error(f"holds {len(formats)} sample descriptions, but samples use {used.min()} to {used.max()}")
    return formats


def audio_format(stsd: Box, entry: Box, timescale: int, trak: Box) -> TrackFormat:
    """The format of an audio track."""
    if len(entry.body) < AUDIO_ENTRY_BYTES:
        raise stsd.error(f"{entry.kind!r} is no audio sample entry")
    tkhd = trak.require("tkhd")
    (geometry,) = tkhd.unpack("52s", 44 if tkhd.version == 1 else 32)
    return TrackFormat(entry.kind, 0, 0, timescale, _only(entry), geometry, is_audio=True)


def _only(entry: Box) -> bytes:
    """The body of a sample description box that has this entry alone."""
    return struct.pack(">III4s", 0, 1, 8 + len(entry.body), entry.kind.encode("latin-1")) + entry.body


def _track_format(stsd: Box, entry: Box, timescale: int, geometry: bytes) -> TrackFormat:
    if len(entry.body) < VISUAL_ENTRY_BYTES:
        raise stsd.error(f"{entry.kind!r} is no visual sample entry")
    width, height = entry.unpack("HH", 24)
    if not width or not height:
        raise stsd.error(f"the frames are {width}x{height} pixels")
    return TrackFormat(entry.kind, width, height, timescale, _only(entry), geometry, _length_bytes(entry))


def _length_bytes(entry: Box) -> int:
    """Bytes of the length before each NAL unit of HEVC or H.264; 0 of other codecs."""
    if entry.kind in HEVC | H264:
        for box in entry.children(VISUAL_ENTRY_BYTES):
            if (place := LENGTH_SIZES.get(box.kind)) is not None:
                return 1 + (int(box.unpack("B", place)[0]) & 3)
    return 0


def read_edit(moov: Box, trak: Box, timescale: int, samples: SampleTable | None = None) -> tuple[int, int, int] | None:
    """The one stretch of the track that its edit list shows: (start, stop, delay) in ticks; None for all of it.

    Empty edits in front of it delay it. Several edits are one stretch where FFmpeg shows the same for them, for which
    it takes ``samples``: see ``_are_one``.
    """
    elst = trak.child("edts", "elst")
    if elst is None:
        return None
    wide = elst.version == 1
    dtype = np.dtype([("duration", ">u8" if wide else ">u4"), ("time", ">i8" if wide else ">i4"), ("rate", ">i4")])
    count = elst.u32(4)
    if count > MAX_EDITS:
        raise elst.error(f"holds {count} edits, more than {MAX_EDITS}; remux with: ffmpeg -i IN.mp4 -c copy OUT.mp4")
    durations, starts, rates = (elst.table(dtype, count, 8)[name].tolist() for name in ("duration", "time", "rate"))
    if not count:
        return None
    movie = read_timescale(moov.require("mvhd"))
    # Durations are in the movie's ticks, often milliseconds. FFmpeg rounds each to the nearest of the track's.
    lengths = [(2 * duration * timescale + movie) // (2 * movie) for duration in durations]
    empty = next((number for number, start in enumerate(starts) if start != -1), count - 1)
    delay, start, stop = sum(lengths[:empty]), starts[empty], starts[empty] + sum(lengths[empty:])
    edges = [starts[empty] + length for length in accumulate(lengths[empty:-1])]
    if start < 0 or rates[empty:] != [0x10000] * (count - empty) or edges != starts[empty + 1 :]:
        edges = [-1]
    if max(start, delay) >= MAX_POSITION:
        raise elst.error(f"starts at tick {start} after a delay of {delay} ticks, which can't be meant")
    if edges and not (samples is not None and _are_one(edges, samples)):
        raise elst.error(
            "shows other than one stretch of the track at normal speed; remux with: ffmpeg -i IN.mp4 -c copy OUT.mp4"
        )
    return start, min(stop, MAX_POSITION) if durations[-1] else MAX_POSITION, delay


def _are_one(edges: Sequence[int], samples: SampleTable) -> bool:
    """Return whether FFmpeg shows edits that follow each other at these ticks as one.

    It does where a frame is shown at each, and frames are shown in the order they are decoded in: else it moves and
    drops some around each edge.
    """
    least, greatest = samples.composition_limits
    if least != greatest:
        return False
    numbers = [samples.count_before(edge - least) for edge in edges]
    return all(
        number < samples.num_samples and int(samples.presentation_times(number, number + 1)[0]) == edge
        for number, edge in zip(numbers, edges, strict=True)
    )


def _video_edit(moov: Box, trak: Box, samples: SampleTable, timescale: int, fragments: Sequence[Columns]) -> Edit:
    start, stop, delay = read_edit(moov, trak, timescale, samples) or (-MAX_POSITION, MAX_POSITION, 0)
    shift = 0
    if start >= 0:
        _, times = samples.presented(start, stop)
        shift = (int(times[0]) if len(times) else start) - delay
    if not fragments:
        return Edit(start, stop, shift)
    # Of fragments FFmpeg hides nothing. It shifts the clock by the edit list, and by the least composition offset that
    # it has come upon, if negative.
    own = count_samples(trak.require("mdia", "minf", "stbl"))
    least = min(samples.composition_limits[0], 0)
    if (least and own) or least < fragments[0].composition.min(initial=0):
        raise trak.error(
            f"a composition offset of {least} ticks comes up behind the first fragment, where it moves the times of "
            "what follows; remux with: ffmpeg -i IN.mp4 -c copy -movflags faststart OUT.mp4"
        )
    of_fragments = max(start, 0) - delay + least
    if own and start >= 0:
        times = samples.presentation_times(0, own)
        if shift != of_fragments or times.min() < start or times.max() >= stop:
            raise trak.error(
                "has samples of its own, of which its edit list hides some, and others in fragments; remux with: "
                "ffmpeg -i IN.mp4 -c copy -movflags faststart OUT.mp4"
            )
    return Edit(shift=of_fragments)

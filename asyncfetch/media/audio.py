"""The audio track of an MP4: its index, and clips that decode to the same samples as the whole file.

A decoder of audio carries state from frame to frame, so a clip begins some frames early: see EARLIER_FRAMES. It needs
no edit list to skip them, as they play before what is asked for. Only the audio's bytes are fetched, which mostly lie
between those of the video, a few frames at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.errors import redact_url
from asyncfetch.media.boxes import Box, Buffer, find
from asyncfetch.media.clip import ClipTables, build_header, clip_timing
from asyncfetch.media.index import (
    Edit,
    Mp4Index,
    TrackIndex,
    audio_format,
    common_format,
    first_track,
    read_edit,
    read_formats,
    read_timescale,
    refuse_fragments,
    track_number,
    track_samples,
    video_index,
)
from asyncfetch.media.samples import MAX_POSITION, count_samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from asyncfetch.media.samples import Columns

PCM = {"in24": 24, "in32": 32, "fl32": 32, "fl64": 64, "ulaw": 8, "alaw": 8}
PCM |= dict.fromkeys(("sowt", "twos", "lpcm", "ipcm", "fpcm", "raw "), 0)
"""Sample entries whose frames are one value a channel, and its bits; 0 where the entry says how many."""
PCM_GROUP = 1024
"""Frames of PCM that count as one: what FFmpeg reads at once."""
STATELESS = frozenset({*PCM, "fLaC", "alac"})
"""Sample entries whose frames each decode by themselves."""
EARLIER_FRAMES = 12
"""Frames of other codecs that are decoded in front of those asked for. AAC-LC needs one, for its overlapping windows.
MP3 takes bytes from up to nine frames before (its bit reservoir), and then needs one. Opus filters what it has decoded,
and forgets by and by."""
EARLIER_SECONDS = 0.08
"""Least time that they take; what Opus asks for (RFC 7845, 4.6)."""
MAX_GAP_BYTES = 64 * 1024
"""Bytes of other tracks that are fetched along rather than asking twice: 13 ms at 5 MB/s."""
MAX_SECONDS = float(1 << 31)
"""No file plays this long."""


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """The bytes to fetch for a stretch of audio. The header, followed by all of them, is an MP4 of one audio track.

    Where there is no audio in the stretch, all is empty: no range, no header.
    """

    ranges: NDArray[np.int64]
    """Shape (N, 2): bytes [start, stop) of the source file to fetch, ascending, apart."""
    start_seconds: float
    """Time at which the file plays what the clip plays at 0. It may be below that asked for, and below 0."""
    num_samples: int
    """Coded frames that the clip holds."""
    codec: str
    header: bytes = field(repr=False)
    """``ftyp``, ``moov`` and the header of ``mdat``."""

    @property
    def nbytes(self) -> int:
        """Length of the clip."""
        return len(self.header) + int((self.ranges[:, 1] - self.ranges[:, 0]).sum())


class AudioIndex(TrackIndex):
    """The first audio track of an MP4 file. The frame at the end of its edit is played to its own end."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"AudioIndex({redact_url(self.url)!r}, {self.codec!r}, num_samples={self.samples.num_samples})"

    def clip(self, start_seconds: float, stop_seconds: float, *, max_gap_bytes: int = MAX_GAP_BYTES) -> AudioClip:
        """Return what to fetch for the audio of [start_seconds, stop_seconds) of the file.

        Ask a decoder of the clip for these times less the clip's ``start_seconds``. It gives the same samples as one of
        the whole file, at another rate, too, and bit for bit of FLAC, PCM, MP3 and AAC without perceptual noise
        substitution. That draws noise from a generator that runs through the file: its bands differ, as they do if one
        decoder reads a range twice. Opus differs by what its filters haven't forgotten, less than 1e-3 of full scale.
        A range that begins halfway between two samples may begin with either, in the file and in the clip.

        Raises:
            FormatError: The encoding changes in it.
        """
        first, stop = self._between(start_seconds, stop_seconds)
        if first >= stop:
            return AudioClip(np.empty((0, 2), np.int64), start_seconds, 0, self.codec, b"")
        first = self._entry(first)
        times = self.samples.decode_times(first, stop)
        runs = self.samples.byte_runs(first, stop)
        ranges, moved = _ranges(runs.offset, runs.num_bytes, max_gap_bytes)
        runs = replace(runs, offset=moved)
        # At the start of the file a decoder skips what the edit list says, as it would there: what comes out at another
        # rate depends on where it begins.
        zero = max(self.edit.start, int(times[0])) if first == 0 else int(times[0])
        timing = clip_timing(times, times - zero, None, last_duration=int(self.samples.durations[stop - 1]))
        tables = ClipTables(sizes=self.samples.sizes[first:stop], timing=timing, sync=None, runs=runs)
        track = common_format(self.formats, runs, self.url)
        total = int((ranges[:, 1] - ranges[:, 0]).sum())
        return AudioClip(
            ranges=ranges,
            start_seconds=(zero - self.edit.shift) / self.timescale,
            num_samples=stop - first,
            codec=track.codec,
            header=build_header(track, tables, start=0, stop=total),
        )

    def _between(self, start_seconds: float, stop_seconds: float) -> tuple[int, int]:
        """The samples [first, stop) that play then."""
        low, high = (
            min(max(seconds, -MAX_SECONDS), MAX_SECONDS) * self.timescale + self.edit.shift
            for seconds in (start_seconds, stop_seconds)
        )
        low, high = max(floor(low), self.edit.start), min(ceil(high), self.edit.stop)
        if low >= high:
            return 0, 0
        first, stop = self.samples.count_before(low + 1) - 1, self.samples.count_before(high)
        if first == self.samples.num_samples - 1:
            (time,) = self.samples.decode_times(first, first + 1).tolist()
            if low >= time + int(self.samples.durations[first]):
                return 0, 0
        return max(first, 0), stop

    def _entry(self, sample: int) -> int:
        """The sample to begin with, so that a decoder has the state it would have at this one."""
        if self.codec not in STATELESS:
            (time,) = self.samples.decode_times(sample, sample + 1).tolist()
            early = self.samples.count_before(time - ceil(EARLIER_SECONDS * self.timescale))
            sample = max(0, min(sample - EARLIER_FRAMES, early))
        return self.samples.decodable_from(np.array([sample]))


def _ranges(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], max_gap_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(ranges that hold all these runs, ascending; place of each run in the ranges' bytes end to end)."""
    order = np.argsort(offsets, kind="stable")
    starts, stops = offsets[order], np.maximum.accumulate((offsets + lengths)[order])
    apart = np.flatnonzero(starts[1:] - stops[:-1] > max_gap_bytes) + 1
    first = np.append(0, apart)
    ranges = np.stack((starts[first], stops[np.append(apart, len(stops)) - 1]), axis=1)
    lengths = ranges[:, 1] - ranges[:, 0]
    shift = np.cumsum(lengths) - lengths - ranges[:, 0]
    place = np.searchsorted(ranges[:, 0], offsets, "right") - 1
    return ranges, offsets + shift[place]


class Tracks(NamedTuple):
    """The tracks of a file that samples are made of."""

    video: Mp4Index
    audio: AudioIndex | None
    """None where it wasn't asked for, and where the file has none."""


def parse_tracks(data: Buffer, *, url: str, audio: bool = True) -> Tracks:
    """The index of the file's first video track and, with ``audio``, that of its first audio track.

    Args and errors are those of ``parse_moov``.
    """
    moov = find(data, "moov", url=url)
    refuse_fragments(moov, url)
    return read_tracks(moov, {}, url=url, audio=audio)


def read_tracks(moov: Box, fragments: Mapping[int, Sequence[Columns]], *, url: str, audio: bool) -> Tracks:
    """The tracks that ``moov`` describes; ``fragments`` has the samples of fragmented ones by the track's number."""
    return Tracks(video_index(moov, fragments, url=url), _audio_index(moov, fragments, url) if audio else None)


def _audio_index(moov: Box, fragments: Mapping[int, Sequence[Columns]], url: str) -> AudioIndex | None:
    trak = first_track(moov, b"soun")
    if trak is None:
        return None
    timescale, stbl = read_timescale(trak.require("mdia", "mdhd")), trak.require("mdia", "minf", "stbl")
    if not fragments.get(track_number(trak)) and not count_samples(stbl):
        return None
    stsd = stbl.require("stsd")
    pcm = [entry for entry in stsd.children(8) if entry.kind in PCM]
    for entry in pcm:
        _check_pcm(trak, entry)
    samples = track_samples(trak, fragments, group=PCM_GROUP if pcm else 1)
    if samples.composition.any():
        raise stbl.error("its audio is played in another order than decoded; remux with: ffmpeg -i IN -c copy OUT.mp4")
    start, stop, delay = read_edit(moov, trak, timescale) or (-MAX_POSITION, MAX_POSITION, 0)
    shift = max(start, 0) - delay
    return AudioIndex(
        url=url,
        formats=read_formats(stsd, samples, lambda entry: audio_format(stsd, entry, timescale, trak)),
        samples=samples,
        edit=Edit(shift=shift) if fragments else Edit(start, stop, shift),
    )


def _check_pcm(trak: Box, entry: Box) -> None:
    """FormatError where a frame isn't as long as its description says: FFmpeg reads by that."""
    version, channels, bits = entry.unpack("H6xHH", 8)
    nbytes = channels * (PCM[entry.kind] or bits) // 8
    if version == 2:
        (nbytes,) = entry.unpack("I", 56)
    (size,) = trak.require("mdia", "minf", "stbl", "stsz").unpack("I", 4)
    if size not in {0, nbytes}:
        raise entry.error(f"frames have {nbytes} bytes, but {size} by stsz; remux with: ffmpeg -i IN -c copy OUT.mov")

"""One video file out of many segments: the same coded pictures, with new tables in front of them.

A video file is cut into segments that decode by themselves. LeRobot begins each episode with a key frame, so a segment
is an episode. In files of other writers an episode may begin between two key frames: then the frames that it needs are
copied along. Samples that no episode needs are left out.

Times stay whole ticks. Each segment begins at a whole frame, whatever the rounding of earlier ones, and is shown there:
its composition offsets are shifted so that all segments have the same lag between decoding and presentation, and the
edit list removes that lag. The layout is moov in front, then one mdat with one chunk a segment; it depends only on the
segments' pictures, not on their source files.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.errors import FormatError, redact_url
from asyncfetch.lerobot.frame_times import find_frames
from asyncfetch.media.boxes import Box
from asyncfetch.media.clip import ClipTables, Timing, build_header
from asyncfetch.media.index import VISUAL_ENTRY_BYTES
from asyncfetch.media.samples import ByteRuns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from asyncfetch.lerobot.episode_table import VideoSpan
    from asyncfetch.media import Mp4Index


class EpisodeSpan(NamedTuple):
    """An episode's frames in a video file."""

    episode: int
    """Its index in its dataset."""
    span: VideoSpan
    seconds: NDArray[np.float64] | None = None
    """Times of its rows, if they don't follow the frame rate: see ``own_seconds``."""


class EpisodePlace(NamedTuple):
    """The place of an episode in a segment's time, in frames at the dataset's rate; whole if its rows follow that."""

    episode: int
    """Its index in its dataset."""
    first: float
    """The origin of its rows' times."""
    length: float
    """Time from there to the end of its last row."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Samples [first, stop) of a file in decode order, which decode by themselves and begin with the earliest one."""

    index: Mp4Index
    first: int
    stop: int
    num_frames: int
    """Its duration on the screen in frames at the dataset's rate, rounded up."""
    places: tuple[EpisodePlace, ...]
    """Ascending by episode."""
    nbytes: int
    """Length of its samples."""
    configuration: tuple[bytes, bytes]
    """The configuration, which all segments of a file have in common."""


def cut_file(
    index: Mp4Index, spans: Iterable[EpisodeSpan], *, fps: float, no_edges: Collection[int] = ()
) -> list[Segment]:
    """The segments with all these episodes, none of them empty, in the order of their first episode.

    The file isn't cut at the samples ``no_edges``, even if it marks them as key frames.

    Raises:
        FormatError: The file lacks frames of an episode, or has others in their place.
        DatasetError: The metadata gives an episode an impossible place.
    """
    edges = np.setdiff1d(_closed_edges(index), list(no_edges))
    configuration = plain_description(index.track.stsd), index.track.geometry
    groups: list[tuple[int, int, list[EpisodeSpan]]] = []
    for low, high, span in sorted(_extents(index, spans, fps), key=lambda extent: extent[:2]):
        first = int(edges[np.searchsorted(edges, low, "right") - 1])
        stop = int(edges[np.searchsorted(edges, high)])
        if groups and first < groups[-1][1]:
            before_first, before_stop, members = groups[-1]
            groups[-1] = before_first, max(before_stop, stop), [*members, span]
        else:
            groups.append((first, stop, [span]))
    segments = [_segment(index, configuration, first, stop, members, fps) for first, stop, members in groups]
    return sorted(segments, key=lambda segment: segment.places[0])


def _closed_edges(index: Mp4Index) -> NDArray[np.int64]:
    """Samples at which the file can be cut, and its end: key frames shown after all earlier and before all later."""
    count = index.num_samples
    times = index.samples.presentation_times(0, count)
    sync = np.arange(count) if index.samples.sync is None else index.samples.sync
    latest_before = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(times)[:-1]))
    earliest_from = np.minimum.accumulate(times[::-1])[::-1]
    closed = sync[(latest_before[sync] < times[sync]) & (earliest_from[sync] == times[sync])]
    return np.concatenate(([0], closed[closed > 0], [count]))


def _extents(index: Mp4Index, spans: Iterable[EpisodeSpan], fps: float) -> Iterable[tuple[int, int, EpisodeSpan]]:
    for episode, span, seconds in spans:
        samples, misplaced = find_frames(index, span, seconds, episode=episode, fps=fps, tolerance_seconds=np.inf)
        if misplaced is not None:
            frame = int(np.flatnonzero(~np.isnan(misplaced[:, 0]))[0])
            due, shown = misplaced[frame].tolist()
            raise FormatError(
                f"{redact_url(index.url)}: frame {frame} of episode {episode} is due at {due:.6f} s by "
                f"meta/episodes and its row's timestamp, but the nearest one is shown at {shown:.6f} s, more than a "
                "quarter of a frame off, and may be its neighbour: write these times anew"
            )
        if missing := int(np.count_nonzero(samples < 0)):
            raise FormatError(
                f"{redact_url(index.url)} lacks {missing} of the {span.num_frames} frames of episode {episode}, "
                f"which meta/episodes places at frame {span.first_frame} of its {index.num_samples}"
            )
        yield int(samples.min()), int(samples.max()) + 1, EpisodeSpan(episode, span, seconds)


def _segment(
    index: Mp4Index,
    configuration: tuple[bytes, bytes],
    first: int,
    stop: int,
    members: list[EpisodeSpan],
    fps: float,
) -> Segment:
    decode = index.samples.decode_times(first, stop)
    shown = index.samples.presentation_times(first, stop)
    ticks, earliest = index.timescale / fps, int(shown.min()) - index.edit.shift
    # By presentation and by decoding times: the next segment's must come after both.
    last = max(round(int(shown.max() - shown.min()) / ticks), int((decode[-1] - decode[0]) // ticks))
    origin = round(earliest / ticks), earliest / index.timescale
    places = tuple(sorted(_place(member, *origin, fps) for member in members))
    nbytes = int(index.samples.sizes[first:stop].sum(dtype=np.int64))
    return Segment(index, first, stop, last + 1, places, nbytes, configuration)


def _place(member: EpisodeSpan, origin: int, origin_seconds: float, fps: float) -> EpisodePlace:
    """The place of an episode in a segment that begins at this frame, and this time, of its file."""
    episode, span, seconds = member
    if seconds is None:
        return EpisodePlace(episode, span.first_frame - origin, span.num_frames)
    return EpisodePlace(episode, (span.start_seconds - origin_seconds) * fps, float(seconds.max()) * fps + 1)


_STSD_BYTES = 8
"""Version, flags and the number of entries, in front of the entries."""
_CHROMA = {0: "gray", 1: "yuv420p", 2: "yuv422p", 3: "yuv444p"}
_PLAIN_PROFILES = frozenset({66, 77, 88})
"""H.264 profiles that are 8 bit 4:2:0; the configuration of the others ends with the chroma format and bit depths."""


class Pictures(NamedTuple):
    """The properties that all videos of a camera must have in common."""

    codec: str
    """Codec as info.json names it: "av1", "h264", "hevc"."""
    width: int
    height: int
    pixel_format: str
    """Pixel format as FFmpeg names it: "yuv420p", "gray12le"; empty if the configuration doesn't have it."""
    timescale: int
    """Ticks per second."""


def describe_pictures(index: Mp4Index) -> Pictures:
    """The pictures' properties, from the file's index; FormatError unless it has one whole sample description."""
    if len(index.formats) != 1:
        raise FormatError(
            f"{redact_url(index.url)}: {len(index.formats)} sample descriptions; a merge takes videos of one encoding "
            "each"
        )
    (entry,) = _entries(index.track.stsd, index.url)
    boxes = {box.kind: box for box in entry.children(VISUAL_ENTRY_BYTES)}
    return Pictures(index.codec_name, index.width, index.height, _pixel_format(boxes), index.timescale)


def plain_description(stsd: bytes) -> bytes:
    """A sample description's body without the bit rate (``btrt``), true of one file only, and the default ``pasp``."""
    pieces = [stsd[:_STSD_BYTES]]
    for entry in _entries(stsd, "stsd"):
        body = [bytes(entry.body[:VISUAL_ENTRY_BYTES])]
        body += [_pack(box.kind, bytes(box.body)) for box in entry.children(VISUAL_ENTRY_BYTES) if not _is_idle(box)]
        pieces.append(_pack(entry.kind, b"".join(body)))
    return b"".join(pieces)


def _entries(stsd: bytes, where: str) -> Iterator[Box]:
    return Box("stsd", memoryview(stsd), where).children(_STSD_BYTES)


def _is_idle(box: Box) -> bool:
    return box.kind == "btrt" or (box.kind == "pasp" and box.body[:4] == box.body[4:8])


def _pack(kind: str, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind.encode("latin-1")) + body


def _pixel_format(boxes: dict[str, Box]) -> str:
    if box := boxes.get("av1C"):
        (flags,) = box.unpack("B", 2)
        depth = (12 if flags & 0x20 else 10) if flags & 0x40 else 8
        chroma = 0 if flags & 0x10 else {0b11: 1, 0b10: 2, 0b00: 3}.get(flags >> 2 & 0b11, 1)
    elif box := boxes.get("hvcC"):
        chroma, luma = (value & mask for value, mask in zip(box.unpack("BB", 16), (3, 7), strict=True))
        depth = luma + 8
    elif box := boxes.get("avcC"):
        chroma, depth = _h264_format(box)
    else:
        return ""
    return _CHROMA[chroma] + (f"{depth}le" if depth > 8 else "")


def _h264_format(box: Box) -> tuple[int, int]:
    """(chroma format, bit depth), from the fields after the parameter sets."""
    data = bytes(box.body)
    if len(data) < 7:
        raise box.error(f"is {len(data)} bytes long, too short for a decoder configuration")
    position = 5
    if data[1] in _PLAIN_PROFILES:
        return 1, 8
    for mask in (0x1F, 0xFF):
        count = data[position] & mask if position < len(data) else 0
        position += 1
        for _ in range(count):
            position += 2 + int.from_bytes(data[position : position + 2], "big")
    if position + 2 > len(data):  # older writers omit these fields
        return 1, 8
    return data[position] & 3, (data[position + 1] & 7) + 8


def build_video(segments: Sequence[Segment], fps: float) -> tuple[bytes, list[tuple[str, int, int]]]:
    """A video of these segments, at least one and all of one configuration and time scale.

    It is its first bytes, then those of other files: (url, start, stop) in the order in which they are written.
    """
    track = segments[0].index.track
    track = dataclasses.replace(track, stsd=plain_description(track.stsd))
    sizes = np.concatenate([segment.index.samples.sizes[segment.first : segment.stop] for segment in segments])
    tables = ClipTables(sizes=sizes, timing=_timing(segments, fps), sync=_sync(segments), runs=_runs(segments))
    header = build_header(track, tables, start=0, stop=int(sizes.sum(dtype=np.int64)))
    return header, list(_source_ranges(segments))


def _timing(segments: Sequence[Segment], fps: float) -> Timing:
    ticks = segments[0].index.timescale / Fraction(fps).limit_denominator(1001)
    composition = [segment.index.samples.composition[segment.first : segment.stop] for segment in segments]
    composition = [offsets.astype(np.int64) - int(offsets[0]) for offsets in composition]
    lag = -min(int(offsets.min()) for offsets in composition)
    durations, start = [], 0
    for segment in segments:
        own = segment.index.samples.durations[segment.first : segment.stop].astype(np.int64)
        # The last sample reaches to the frame at which the next segment begins.
        own[-1] = round((start + segment.num_frames) * ticks) - round(start * ticks) - int(own[:-1].sum())
        durations.append(own)
        start += segment.num_frames
    return Timing(np.concatenate(durations), np.concatenate(composition) + lag, lag, hides=False)


def _sync(segments: Sequence[Segment]) -> NDArray[np.int64] | None:
    parts, count = [], 0
    for segment in segments:
        length = segment.stop - segment.first
        own = segment.index.samples.sync_between(segment.first, segment.stop)
        parts.append((np.arange(length) if own is None else own) + count)
        count += length
    sync = np.concatenate(parts).astype(np.int64)
    return None if len(sync) == count else sync


def _runs(segments: Sequence[Segment]) -> ByteRuns:
    num_bytes = np.array([segment.nbytes for segment in segments], np.int64)
    return ByteRuns(
        offset=np.cumsum(num_bytes) - num_bytes,
        num_bytes=num_bytes,
        num_samples=np.array([segment.stop - segment.first for segment in segments], np.int64),
        description=np.ones(len(segments), np.int64),
    )


def _source_ranges(segments: Sequence[Segment]) -> Iterator[tuple[str, int, int]]:
    """Yield the ranges of the samples, adjacent ones joined."""
    url, start, stop = segments[0].index.url, 0, 0
    for segment in segments:
        runs = segment.index.samples.byte_runs(segment.first, segment.stop)
        for offset, length in zip(runs.offset.tolist(), runs.num_bytes.tolist(), strict=True):
            if (segment.index.url, offset) != (url, stop):
                if start < stop:
                    yield url, start, stop
                url, start, stop = segment.index.url, offset, offset
            stop += length
    if start < stop:
        yield url, start, stop

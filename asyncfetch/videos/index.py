"""The index of a video, read from wherever the video lies, and what it says of the video, without a frame.

What can't be cut by one is read whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from asyncfetch.errors import (
    COPY_ANEW,
    AccessDenied,
    DatasetError,
    DecodeError,
    FormatError,
    MissingDependency,
    NotFound,
    RangeNotSatisfiable,
    redact_url,
)
from asyncfetch.formats.clips import PARSED_ON_THE_LOOP_BYTES, fetch_moov
from asyncfetch.media import fragment_reads, locate_moov
from asyncfetch.media.boxes import find
from asyncfetch.media.index import first_track
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.threads import run_sync
from asyncfetch.videos.whole import WholeVideo
from asyncfetch.videos.windows import span_lengths

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.fetch import RangeReader
    from asyncfetch.media import Tracks
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.tables.unpacked import UnpackedReader
    from asyncfetch.videos.entry_table import Entries, Place

FRAME_NBYTES = 16
"""Bytes of a frame's sample number and time, in the order of presentation."""
WHOLE_NBYTES = 64 * 1024
"""About what the times of the frames of a video that is read whole take, which are known later: of two minutes."""


@dataclass(frozen=True, slots=True)
class IndexedVideo:
    """A video and its index."""

    size_bytes: int
    tracks: Tracks | None
    """None where it can't be cut by ranges, and is read whole."""
    whole: WholeVideo | None = None
    """It then."""
    moov: tuple[int, int] | None = None
    """Bytes [start, stop) of the video that are its index."""
    has_audio: bool = False
    """True if its index has an audio track."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        if self.tracks is None:
            return WHOLE_NBYTES
        video, audio = self.tracks
        return video.nbytes + video.num_samples * FRAME_NBYTES + (0 if audio is None else audio.nbytes)

    def check_complete(self, url: str) -> None:
        """FormatError where the file ends before the frames that its index has."""
        stop = 0 if self.tracks is None else self.tracks.video.data_stop
        if stop > self.size_bytes:
            message = f"{redact_url(url)}: truncated: it has {self.size_bytes} bytes, but by its index frames lie in"
            raise FormatError(f"{message} bytes up to {stop}", remedy=COPY_ANEW)


class PartReader:
    """A part of a file, read as if it were one."""

    def __init__(self, reader: RangeReader, place: Place) -> None:
        self._reader = reader
        self._place = place

    async def fetch(self, url: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the part."""
        return await self._reader.fetch(url, self._place.offset + start, self._place.offset + stop)

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """The part's size, and its first bytes."""
        if self._place.size is None:
            return await self._reader.fetch_head(url, max_bytes)
        size = self._place.size
        return ObjectInfo(url, size), await self.fetch(url, 0, min(size, max_bytes))

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """The part's size, and its last bytes."""
        if self._place.size is None:
            return await self._reader.fetch_tail(url, max_bytes)
        size = self._place.size
        return ObjectInfo(url, size), await self.fetch(url, max(0, size - max_bytes), size)


async def read_video(reader: RangeReader, place: Place, run: RunSync, *, audio: bool) -> IndexedVideo:
    """Read the index of a video, with that of its audio or not: by one exact request where its place is on record.

    A video that can't be cut has none, and a reason for that. FetchError where it could not be fetched.
    """
    part = PartReader(reader, place)
    try:
        info, first, moov = await _moov_on_record(part, place) or await fetch_moov(
            PartReader(reader, place.as_found()), place.url
        )
        tracks = await _tracks(part, info, first, moov, run, audio=audio)
        has_audio = first_track(find(moov, "moov", url=place.url), b"soun") is not None
    except FormatError as error:
        size = place.as_found().size
        size = (await reader.stat(place.url)).size if size is None else size
        return IndexedVideo(size, None, WholeVideo(_bare(error, place.url)))
    return IndexedVideo(info.size, tracks, moov=(first, first + len(moov)), has_audio=has_audio)


async def _moov_on_record(part: PartReader, place: Place) -> tuple[ObjectInfo, int, memoryview] | None:
    """Return what ``fetch_moov`` does; None where it isn't known, or isn't there: the file is another one by now."""
    if place.moov is None or place.size is None:
        return None
    start, stop = place.moov
    try:
        moov = await part.fetch(place.url, start, stop)
        if locate_moov(moov, start=start, size=place.size, url=place.url) != (start, stop):
            return None
    except (FormatError, RangeNotSatisfiable):
        return None
    return ObjectInfo(place.url, place.size), start, moov


async def _tracks(
    reader: PartReader, info: ObjectInfo, first: int, moov: memoryview, run: RunSync, *, audio: bool
) -> Tracks:
    reads = fragment_reads(moov, start=first, size=info.size, url=info.url, audio=audio)
    is_short = len(moov) <= PARSED_ON_THE_LOOP_BYTES
    pieces: Sequence[memoryview] | None = None
    while True:
        wanted = _next(reads, pieces) if is_short else await run(partial(_next, reads, pieces))
        if not isinstance(wanted, list):
            return wanted
        pieces = list(await gather(*(partial(reader.fetch, info.url, start, stop) for start, stop in wanted)))


def _bare(error: FormatError, url: str) -> str:
    """Return its message without the url in front and the remedy, for there is none to need."""
    return str(error).removeprefix(f"{redact_url(url)}: ").removesuffix(f"; {error.remedy}")


def _next(
    reads: Generator[list[tuple[int, int]], Sequence[memoryview], Tracks], pieces: Sequence[memoryview] | None
) -> list[tuple[int, int]] | Tracks:
    """Return what is to be read next, or the tracks."""
    try:
        return next(reads) if pieces is None else reads.send(pieces)
    except StopIteration as end:
        found: Tracks = end.value
        return found


BROKEN = (DatasetError, DecodeError, AccessDenied, NotFound, RangeNotSatisfiable, MissingDependency)
"""Errors that say that one video can't be read. A host that is down or slow is no fault of the video."""
MEASURED_AT_ONCE = 64
"""Videos that are measured side by side, each by a request or two: the default limit of requests to a host."""
WHOLE_AT_ONCE = 2
"""Videos that are read whole at a time, since they can't be cut: each is in memory meanwhile."""

Span = tuple[float | None, float | None]
"""Seconds [start, stop) of a video; None for its begin, or its end."""


class Measured(NamedTuple):
    """The measures of a video. Journals have them in this order."""

    size: int
    """Bytes that it takes."""
    frames: int
    """Frames that are shown."""
    seconds: float
    """Time from its first frame to the end of its last one."""
    fps: float
    """Frames a second, in the mean."""
    width: int
    height: int
    codec: str
    groups: int | None
    """Groups of pictures; None where it was read whole."""
    has_audio: bool
    moov_start: int | None
    """First byte of its index, within the video; None where it can't be cut, and is read whole."""
    moov_bytes: int | None
    spans: tuple[tuple[int, float], ...] = ()
    """Frames and seconds of the spans that were asked for."""


class Measuring:
    """Measures videos, whatever their kind, over a reader. Loop-bound."""

    def __init__(self, reader: UnpackedReader) -> None:
        self._reader = reader
        self._whole = anyio.CapacityLimiter(WHOLE_AT_ONCE)

    async def measure(self, place: Place, spans: Sequence[Span] = ()) -> Measured:
        """The measures of a video, and of some spans of it.

        Raises:
            One of BROKEN: It can't be read.
            FetchError: It could not be fetched.
        """
        file = await read_video(self._reader, place, run_sync, audio=False)
        if file.tracks is not None:
            work = partial(_of_index, file, place.url, spans)
            return work() if file.nbytes <= PARSED_ON_THE_LOOP_BYTES else await run_sync(work)
        assert file.whole is not None
        async with self._whole:
            data = await self._reader.fetch(place.url, place.offset, place.offset + file.size_bytes)
            return await run_sync(_of_whole, data, place.url, file.whole, spans)


def videos_of(entries: Entries) -> list[list[int]]:
    """The entries of each video, ascending, in the order of their first ones: several may be spans of one."""
    videos: dict[tuple[int, float], list[int]] = {}
    places = zip(entries.files.tolist(), entries.numbers("offset").tolist(), strict=True)
    for entry, (file, offset) in enumerate(places):
        videos.setdefault((file, -1 if offset != offset else offset), []).append(entry)
    return list(videos.values())


def _of_index(file: IndexedVideo, url: str, spans: Sequence[Span]) -> Measured:
    assert file.tracks is not None
    assert file.moov is not None
    file.check_complete(url)
    index, (start, stop) = file.tracks.video, file.moov
    _, times, end_seconds = index.shown()
    if not len(times):
        raise FormatError(f"{redact_url(url)}: by its index it shows no frame", remedy="leave it out")
    sync = index.samples.sync
    return _measured(
        file.size_bytes,
        times,
        end_seconds,
        spans,
        width=index.width,
        height=index.height,
        codec=index.codec_name,
        groups=index.num_samples if sync is None else len(sync),
        has_audio=file.has_audio,
        moov_start=start,
        moov_bytes=stop - start,
    )


def _of_whole(data: memoryview, url: str, whole: WholeVideo, spans: Sequence[Span]) -> Measured:
    video = whole.frames(data, redact_url(url))
    return _measured(
        len(data),
        video.seconds,
        video.end_seconds,
        spans,
        width=video.width,
        height=video.height,
        codec=video.codec,
        groups=None,
        has_audio=video.has_audio,
        moov_start=None,
        moov_bytes=None,
    )


def _measured(
    size: int,
    times: NDArray[np.float64],
    end_seconds: float,
    spans: Sequence[Span],
    **known: Any,  # noqa: ANN401
) -> Measured:
    """The measures of a video with these times of frames, of which those by its kind are known."""
    seconds = end_seconds - float(times[0])
    fps = len(times) / seconds if seconds > 0 else 0.0
    of_spans = tuple(span_lengths(times, end_seconds, *span) for span in spans)
    return Measured(size=size, frames=len(times), seconds=seconds, fps=fps, spans=of_spans, **known)

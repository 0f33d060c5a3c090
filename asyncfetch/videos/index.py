"""The index of a video, read from wherever the video lies; what can't be cut by one is read whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from asyncfetch.errors import COPY_ANEW, FormatError, RangeNotSatisfiable, redact_url
from asyncfetch.formats.clips import PARSED_ON_THE_LOOP_BYTES, fetch_moov
from asyncfetch.media import fragment_reads, locate_moov
from asyncfetch.media.boxes import find
from asyncfetch.media.index import first_track
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.concurrently import gather
from asyncfetch.videos.whole import WholeVideo

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from asyncfetch.fetch import RangeReader
    from asyncfetch.media import Tracks
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.videos.entry_table import Place

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

"""Measures of videos: length, size, codec, where the index lies. Read from the index, without a frame."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from asyncfetch.errors import (
    AccessDenied,
    DatasetError,
    DecodeError,
    FormatError,
    MissingDependency,
    NotFound,
    RangeNotSatisfiable,
    redact_url,
)
from asyncfetch.formats.clips import PARSED_ON_THE_LOOP_BYTES
from asyncfetch.runtime.threads import run_sync
from asyncfetch.videos.index import read_video
from asyncfetch.videos.windows import span_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.tables.unpacked import UnpackedReader
    from asyncfetch.videos.entry_table import Entries, Place
    from asyncfetch.videos.index import IndexedVideo
    from asyncfetch.videos.whole import WholeVideo

BROKEN = (DatasetError, DecodeError, AccessDenied, NotFound, RangeNotSatisfiable, MissingDependency)
"""Errors that say that one video can't be read. A host that is down or slow is no fault of the video."""
MEASURED_AT_ONCE = 64
"""Videos that are measured side by side, each by a request or two: the default limit of requests to a host."""
WHOLE_AT_ONCE = 2
"""Videos that are read whole at a time, since they can't be cut: each is in memory meanwhile."""
_CODECS = {"avc1": "h264", "avc3": "h264", "hvc1": "hevc", "hev1": "hevc", "vp09": "vp9", "av01": "av1"}
"""FFmpeg's names of codecs by the names of sample entries."""

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
        codec=_CODECS.get(index.codec, index.codec),
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

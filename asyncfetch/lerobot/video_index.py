"""The places of an episode's frames in its video files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.decode import Clip
from asyncfetch.errors import ConfigError, DatasetError, FormatError, redact_url
from asyncfetch.media import locate_moov, parse_moov
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from asyncfetch.decode import DepthScale
    from asyncfetch.fetch import RangeReader
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.stretch import Stretch
    from asyncfetch.media import ClipPlan, Mp4Index
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.runtime.single_flight import SharedLRU

__all__ = ["PlannedClip", "VideoFile", "VideoIndexes", "are_misplaced", "fetch_moov"]

HEAD_BYTES = 16 * 1024
"""Bytes asked for first. They hold the whole index of a short file, and tell where another one lies."""
FRAME_INDEX_BYTES = 8
"""Bytes of an index for a frame, asked for beside that: AV1 has 6 at two frames a key frame, H.264 and HEVC up to 14,
but rarely. What is asked for in vain is a thousandth of a frame; what is missing costs one request more."""
LEAST_FRAME_BYTES = 256
"""Least bytes of a frame of a video. A file that may be shorter than what is asked for of its head is asked for that
alone."""
MAX_INDEX_BYTES = 512 * 1024
"""Bytes asked for on a guess, in one stream; a longer index costs one request more."""
MAX_READS = 32
"""Requests for one index after the first. One is usual, and one for each long box in front that isn't media data."""
QUARTER = 0.25
"""A quarter of a frame; more than this a frame is never taken to be misplaced by its metadata."""
ROUNDING_SECONDS = 1e-9
"""Error of sums of times in float64."""
PARSED_ON_THE_LOOP_BYTES = 64 * 1024
"""Index that is parsed on the loop, in 0.3-0.5 ms. A thread takes 3-5 ms for one where a stream begins, for the loop is
busy there, and each waits for the end of the other's turn with the interpreter first, 5 ms by default."""


@dataclass(frozen=True, slots=True)
class PlannedClip:
    """One camera's clip of a stretch: what to fetch, and how to make an MP4 of it."""

    url: str
    plan: ClipPlan
    first_frame: int
    """Number of its first frame in the episode."""
    misplaced: NDArray[np.float64] | None = None
    """See Clip."""

    @property
    def nbytes(self) -> int:
        """Memory the clip takes: its header and its range."""
        return self.plan.header_bytes + self.plan.stop - self.plan.start

    @property
    def plan_nbytes(self) -> int:
        """Memory the plan takes, without the clip."""
        plan = self.plan
        key_bytes = plan.key_frames.nbytes if plan.key_frames is not None else 0
        misplaced_bytes = self.misplaced.nbytes if self.misplaced is not None else 0
        return plan.header_bytes + plan.frame_index.nbytes + plan.pts.nbytes + key_bytes + misplaced_bytes

    def over(self, buffer: memoryview, *, name: str, depth: DepthScale | None) -> Clip:
        """The clip whose bytes, header and range, are in ``buffer``."""
        plan = self.plan
        return Clip(
            data=buffer,
            frame_index=plan.frame_index,
            pts=plan.pts,
            timescale=plan.timescale,
            codec=plan.codec,
            width=plan.width,
            height=plan.height,
            name=name,
            depth=depth,
            key_frames=plan.key_frames,
            first_frame=self.first_frame,
            misplaced=self.misplaced,
        )


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video's index."""

    index: Mp4Index
    size_bytes: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.index.nbytes

    def clip(
        self, episode: Episode, stretch: Stretch, camera: str, *, fps: float, tolerance_seconds: float
    ) -> PlannedClip:
        """The part of it that the stretch needs, without the frames that the metadata says are shown at another time.

        From the key frame in front of it on, to its last frame.
        """
        span = episode.videos[camera]
        start, stop = stretch.span(camera, span.num_frames)
        try:
            plan = self.index.clip(span.first_frame + start, stop - start, fps=fps)
        except ConfigError as error:
            message = f"meta/episodes gives episode {episode.index} a place that {redact_url(span.url)} can't have"
            raise DatasetError(f"{message}: {error}") from error
        if plan.stop > self.size_bytes:
            raise FormatError(
                f"{redact_url(span.url)}: truncated: it has {self.size_bytes} bytes, but by its index the frames of "
                f"{stretch.name(episode.length)} lie in bytes [{plan.start}, {plan.stop}); copy or record it again"
            )
        due = span.start_seconds + np.arange(start, stop) / fps
        shown = plan.start_seconds + plan.pts / plan.timescale
        off = are_misplaced(due, shown, fps, max(tolerance_seconds, 1 / plan.timescale)) & (plan.frame_index >= 0)
        if not off.any():
            return PlannedClip(span.url, plan, start)
        frame_index = np.where(off, np.int32(-1), plan.frame_index)
        return PlannedClip(
            span.url,
            replace(plan, frame_index=frame_index),
            start,
            np.where(off[:, np.newaxis], np.stack((due, shown), axis=1), np.nan),
        )


def are_misplaced(
    due: NDArray[np.float64], shown: NDArray[np.float64], fps: float, tolerance_seconds: float = np.inf
) -> NDArray[np.bool_]:
    """Return which frames the metadata and the video put further apart than that, or than a quarter of a frame.

    Beyond that it could as well be the neighbour that is meant.
    """
    return np.abs(shown - due) > min(tolerance_seconds, QUARTER / fps) + ROUNDING_SECONDS


class VideoIndexes:
    """The sample tables of video files, each fetched and parsed once while it is kept. Loop-bound.

    Args:
        reader: Fetches them.
        kept: Keeps them, by url; one that is dropped is fetched again when it is needed.
        run: Runs the parser off the loop.
        tolerance_seconds: By which a frame may be shown at another time than the metadata says; a tick of the file's
            clock at least, a quarter of a frame at most.
        sharing: How many episodes, and frames, of a camera are in the file that has this episode, 0 where unknown: an
            index is asked for in one go where its length can be told.
    """

    def __init__(
        self,
        reader: RangeReader,
        *,
        kept: SharedLRU[str, VideoFile],
        run: RunSync,
        tolerance_seconds: float,
        sharing: Callable[[int, str], tuple[int, int]] = lambda _index, _camera: (0, 0),
    ) -> None:
        self._reader = reader
        self._tolerance_seconds = tolerance_seconds
        self._sharing = sharing
        self._run = run
        self._kept = kept

    async def plan(self, episode: Episode, stretch: Stretch, camera: str, *, fps: float) -> PlannedClip:
        """One camera's clip of a stretch of an episode.

        Raises:
            FetchError: The file could not be fetched.
            FormatError: The file isn't an MP4 that can be read, or is cut off.
            DatasetError: The metadata gives a place that no file has.
        """
        file = await self._kept.get(episode.videos[camera].url, partial(self._fetch, episode, camera))
        return file.clip(episode, stretch, camera, fps=fps, tolerance_seconds=self._tolerance_seconds)

    def clear(self) -> None:
        """Forget all of them, those on their way included."""
        self._kept.clear()

    async def _fetch(self, episode: Episode, camera: str) -> VideoFile:
        url = episode.videos[camera].url
        info, moov = await fetch_moov(self._reader, url, *self._sharing(episode.index, camera))
        if len(moov) <= PARSED_ON_THE_LOOP_BYTES:
            return VideoFile(parse_moov(moov, url=url), info.size)
        return VideoFile(await self._run(partial(parse_moov, moov, url=url)), info.size)


async def fetch_moov(
    reader: RangeReader, url: str, episodes: int = 0, frames: int = 0
) -> tuple[ObjectInfo, memoryview]:
    """The file, and its index as ``parse_moov`` takes it. FormatError where it isn't an MP4 with an index.

    With as many ``episodes`` and ``frames`` in it as are said, where it is known, one round of requests mostly brings
    it: LeRobot puts the index in front, but in files of a single episode, where it comes last.
    """
    guess_bytes = min(HEAD_BYTES + frames * FRAME_INDEX_BYTES, MAX_INDEX_BYTES)
    tail = memoryview(b"")
    if episodes == 1 and frames * LEAST_FRAME_BYTES > HEAD_BYTES:
        (info, piece), (_, tail) = await gather(
            partial(reader.fetch_head, url, HEAD_BYTES), partial(reader.fetch_tail, url, guess_bytes)
        )
    else:
        info, piece = await reader.fetch_head(url, guess_bytes)
    start = 0
    for _ in range(MAX_READS):
        first, stop = locate_moov(piece, start=start, size=info.size, url=url)
        if stop <= start + len(piece):
            return info, piece[first - start : stop - start]
        tail_start = info.size - len(tail)
        start, piece = (
            first,
            tail[first - tail_start :] if first >= tail_start else await reader.fetch(url, first, stop),
        )
    raise FormatError(f"{redact_url(url)}: no 'moov' box among the first boxes, up to byte {start}: remux the video")

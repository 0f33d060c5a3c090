"""The places of an episode's frames in its video files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from asyncfetch.decode import Clip
from asyncfetch.errors import DatasetError, FormatError, redact_url
from asyncfetch.lerobot.frame_times import find_frames
from asyncfetch.media import locate_moov, parse_moov
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.decode import DepthScale
    from asyncfetch.fetch import RangeReader
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.rows import EpisodeRows
    from asyncfetch.lerobot.stretch import Stretch
    from asyncfetch.media import ClipPlan, Mp4Index
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.runtime.single_flight import SharedLRU

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
    is_by_rows: bool
    """True where the rows' own times said which frames are the episode's, False where the rate of frames did."""
    misplaced: NDArray[np.float64] | None
    """See Clip."""
    earlier: int | None = None
    """See Mp4Index.clip."""

    @property
    def nbytes(self) -> int:
        """Memory the clip takes: its header and its range."""
        return self.plan.header_bytes + self.plan.stop - self.plan.start

    @property
    def plan_nbytes(self) -> int:
        """Memory the plan takes, without the clip."""
        plan = self.plan
        key_bytes = sum(frames.nbytes for frames in (plan.key_frames, plan.entries) if frames is not None)
        if plan.refresh is not None:
            key_bytes += plan.refresh.extents.nbytes + plan.refresh.times.nbytes
        misplaced_bytes = self.misplaced.nbytes if self.misplaced is not None else 0
        return plan.header_bytes + plan.frame_index.nbytes + plan.pts.nbytes + key_bytes + misplaced_bytes

    def over(self, buffer: memoryview, *, name: str, depth: DepthScale | None) -> Clip:
        """Return the clip with its bytes, header and range, in ``buffer``."""
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
            whole_from=None if plan.refresh is None else plan.refresh.whole_from(buffer),
        )

    def starts_too_late(self, buffer: memoryview) -> bool:
        """Return whether a decoder has whole pictures only after the clip's first: it is to start at an earlier one."""
        plan = self.plan
        if plan.refresh is not None:
            wanted = plan.pts[plan.frame_index >= 0].min()
            return not plan.refresh.is_all and plan.refresh.whole_from(buffer) > wanted
        return plan.entries is not None and plan.entries.have_recovery_points(buffer)


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
        self,
        episode: Episode,
        stretch: Stretch,
        camera: str,
        rows: EpisodeRows | None,
        *,
        fps: float,
        tolerance_seconds: float,
        earlier: int | None = None,
    ) -> PlannedClip:
        """The part of it that the stretch needs; see ``VideoIndexes.plan``."""
        span = episode.videos[camera]
        start, stop = stretch.span(camera, span.num_frames)
        frames = find_frames(
            self.index,
            span,
            None if rows is None else rows.own_seconds,
            episode=episode.index,
            fps=fps,
            tolerance_seconds=tolerance_seconds,
            start=start,
            stop=stop,
        )
        plan = self.index.clip(frames.samples, earlier=earlier)
        if plan.stop > self.size_bytes:
            raise FormatError(
                f"{redact_url(span.url)}: truncated: it has {self.size_bytes} bytes, but by its index the frames of "
                f"{stretch.name(episode.length)} lie in bytes [{plan.start}, {plan.stop}); copy or record it again"
            )
        return PlannedClip(span.url, plan, start, rows is not None, frames.misplaced, earlier)


class VideoIndexes:
    """The sample tables of video files, each fetched and parsed once while it is kept. Loop-bound.

    Args:
        reader: Fetches them.
        kept: Keeps them, by url; one that is dropped is fetched again when it is needed.
        run: Runs the parser off the loop.
        tolerance_seconds: See ``find_frames``.
        sharing: How many episodes, and frames, of a camera are in the file that has this episode, 0 where unknown: an
            index is asked for in one go where its length is known.
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
        self._earlier: dict[str, int] = {}  # by camera: see Mp4Index.clip

    def start_earlier(self, camera: str, clip: PlannedClip) -> None:
        """Let a camera's clips start at an earlier key frame than this one, which ``starts_too_late``.

        Where they do so already, for others that were under way with it did, they stay as they are.
        """
        if self._earlier.get(camera) == clip.earlier:
            self._earlier[camera] = 0 if clip.earlier is None else clip.earlier + 1

    async def plan(
        self, episode: Episode, stretch: Stretch, camera: str, *, fps: float, rows: EpisodeRows | None = None
    ) -> PlannedClip:
        """One camera's clip of a stretch: by its rows, or, as long as they haven't come, as if they were at that rate.

        Raises:
            FetchError: The file could not be fetched.
            FormatError: The file isn't an MP4 that can be read, or is cut off.
            DatasetError: The metadata gives a place that no file has, or that another episode has, too.
        """
        url = episode.videos[camera].url
        file = await self._kept.get(url, partial(self._fetch, episode, camera))
        try:
            return file.clip(
                episode,
                stretch,
                camera,
                rows,
                fps=fps,
                tolerance_seconds=self._tolerance_seconds,
                earlier=self._earlier.get(camera),
            )
        except DatasetError:
            self.forget(url)
            raise

    def forget(self, url: str) -> None:
        """Forget an index that was wrong: the next caller reads the file as it is then."""
        self._kept.clear(lambda kept: kept == url)

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

"""The places of an episode's frames in its video files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from asyncfetch.errors import DatasetError, FormatError, redact_url
from asyncfetch.formats.clips import PlannedClip, fetch_moov, parsed_moov
from asyncfetch.lerobot.frame_times import find_frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import RangeReader
    from asyncfetch.formats.stretch import Stretch
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.rows import EpisodeRows
    from asyncfetch.media import Mp4Index
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.runtime.single_flight import SharedLRU


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeClip(PlannedClip):
    """The clip of an episode's frames."""

    is_by_rows: bool = False
    """True where the rows' own times said which frames are the episode's, False where the rate of frames did."""


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video's index."""

    index: Mp4Index
    size_bytes: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.index.nbytes


class VideoIndexes:
    """The sample tables of video files, each fetched and parsed once while it is kept. Loop-bound.

    ``sharing`` says how many episodes, and frames, of a camera are in the file that has this episode, 0 where unknown:
    an index is asked for in one go where its length is known.
    """

    def __init__(
        self,
        reader: RangeReader,
        *,
        kept: SharedLRU[str, VideoFile],
        run: RunSync,
        tolerance_seconds: float,
        sharing: Callable[[int, str], tuple[int, int]],
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
    ) -> EpisodeClip:
        """One camera's clip of a stretch: by its rows, or, as long as they haven't come, as if they were at that rate.

        Raises:
            FormatError: The file isn't an MP4 that can be read, or is cut off.
            DatasetError: The metadata gives a place that no file has, or that another episode has, too.
        """
        span = episode.videos[camera]
        file = await self._kept.get(span.url, partial(self._fetch, episode, camera))
        start, stop = stretch.span(camera, span.num_frames)
        earlier = self._earlier.get(camera)
        try:
            frames = find_frames(
                file.index,
                span,
                None if rows is None else rows.own_seconds,
                episode=episode.index,
                fps=fps,
                tolerance_seconds=self._tolerance_seconds,
                start=start,
                stop=stop,
            )
            plan = file.index.clip(frames.samples, earlier=earlier)
            if plan.stop > file.size_bytes:
                message = f"{redact_url(span.url)}: truncated: it has {file.size_bytes} bytes, but by its index the "
                message += f"frames of {stretch.name(episode.length)} lie in bytes [{plan.start}, {plan.stop})"
                raise FormatError(f"{message}; copy or record it again")
        except DatasetError:
            self.forget(span.url)
            raise
        return EpisodeClip(span.url, plan, start, frames.misplaced, earlier, is_by_rows=rows is not None)

    def forget(self, url: str) -> None:
        """Forget an index that was wrong: the next caller reads the file as it is then."""
        self._kept.clear(lambda kept: kept == url)

    def clear(self) -> None:
        """Forget all of them, those on their way included."""
        self._kept.clear()

    async def _fetch(self, episode: Episode, camera: str) -> VideoFile:
        url = episode.videos[camera].url
        info, _, moov = await fetch_moov(self._reader, url, *self._sharing(episode.index, camera))
        return VideoFile(await parsed_moov(moov, url, self._run), info.size)

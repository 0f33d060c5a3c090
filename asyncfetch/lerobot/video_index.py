"""The places of an episode's frames in its video files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncfetch.errors import FormatError, redact_url
from asyncfetch.formats.clips import PlannedClip, fetch_moov, parsed_moov
from asyncfetch.lerobot.frame_times import find_frames

if TYPE_CHECKING:
    from asyncfetch.fetch import RangeReader
    from asyncfetch.formats.stretch import Stretch
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.rows import EpisodeRows
    from asyncfetch.media import Mp4Index
    from asyncfetch.runtime.concurrently import RunSync


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeClip(PlannedClip):
    """The clip of an episode's frames."""

    name: str = ""
    """Its name in messages."""
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


async def fetch_index(reader: RangeReader, url: str, episodes: int, frames: int, *, run: RunSync) -> VideoFile:
    """The index of a file that has frames of so many episodes, and so many frames; 0 where that isn't known.

    It is asked for in one go where its length is known. FormatError where the file isn't an MP4 that can be read.
    """
    info, _, moov = await fetch_moov(reader, url, episodes, frames)
    return VideoFile(await parsed_moov(moov, url, run), info.size)


def cut_clip(
    file: VideoFile,
    episode: Episode,
    stretch: Stretch,
    camera: str,
    rows: EpisodeRows | None,
    *,
    fps: float,
    tolerance_seconds: float,
    earlier: int | None = None,
) -> EpisodeClip:
    """One camera's clip of a stretch: by its rows, or, as long as they haven't come, as if they were at that rate.

    ``earlier``: see Mp4Index.clip.

    Raises:
        FormatError: The file is cut off.
        DatasetError: The metadata gives a place that no file has, or that another episode has, too.
    """
    span = episode.videos[camera]
    start, stop = stretch.span(camera, span.num_frames)
    frames = find_frames(
        file.index,
        span,
        None if rows is None else rows.own_seconds,
        episode=episode.index,
        fps=fps,
        tolerance_seconds=tolerance_seconds,
        start=start,
        stop=stop,
    )
    plan = file.index.clip(frames.samples, earlier=earlier)
    if plan.stop > file.size_bytes:
        message = f"{redact_url(span.url)}: truncated: it has {file.size_bytes} bytes, but by its index the frames of "
        message += f"{stretch.name(episode.length)} lie in bytes [{plan.start}, {plan.stop})"
        raise FormatError(f"{message}; copy or record it again")
    name = f"{camera} of {stretch.name(episode.length)} in {redact_url(span.url)}"
    return EpisodeClip(span.url, plan, start, frames.misplaced, earlier, name=name, is_by_rows=rows is not None)

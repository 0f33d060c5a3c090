"""The way from an episode's rows to the frames of its video: each row's is the one shown at the row's own time. Pure.

A row's ``timestamp`` counts from the beginning of its episode, which the video shows at ``from_timestamp``. LeRobot
records rows and frames at an even rate, so that row i is at i / fps, and this is what a video is cut by as long as the
rows haven't come. Where they are at other times, as those of a camera of variable rate are, or of one that dropped a
frame, their times count: by the number alone a row would get its neighbour's picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncfetch.errors import LEAVE_OUT_EPISODE, DatasetError, redact_url

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.lerobot.episode_table import VideoSpan
    from asyncfetch.media import Mp4Index

MAX_FRAMES = 1 << 22
"""Most frames of one episode, 39 hours at 30 fps: a wrong length in some table mustn't take all memory."""
MAX_FIRST_FRAME = 1 << 31
"""Most frames in front of it, two years at 30 fps."""
HALF, QUARTER = 0.5, 0.25
"""Parts of a frame. What is further than a half away is another frame, what is further than a quarter may be one."""
ROUNDING_SECONDS = 1e-9
"""Error of sums of times in float64."""


def own_seconds(timestamps: NDArray[np.floating], fps: float) -> NDArray[np.float64] | None:
    """Return the times of an episode's rows, where any of them isn't at its number / fps; None where all are.

    One is, as long as float32 doesn't tell the two apart: LeRobot stores them so. It then stands here as exactly that.
    """
    grid = np.arange(len(timestamps)) / fps
    is_on_grid = np.abs(timestamps - grid) <= _float32_steps(grid)
    return None if is_on_grid.all() else np.where(is_on_grid, grid, timestamps)


def _float32_steps(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far each of these times, as a float32, is from the next."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.spacing(np.abs(seconds).astype(np.float32)).astype(np.float64)


class RowFrames(NamedTuple):
    """The frames of rows of an episode in a video."""

    samples: NDArray[np.int64]
    """The sample of each row, in the order of ``Mp4Index``; -1 where the video has none. Two rows may have the same."""
    misplaced: NDArray[np.float64] | None
    """Shape (N, 2), as in ``Clip``: when each row's frame is due and when it is shown, if these are too far apart."""


def find_frames(
    index: Mp4Index,
    span: VideoSpan,
    seconds: NDArray[np.float64] | None,
    *,
    episode: int,
    fps: float,
    tolerance_seconds: float,
    start: int = 0,
    stop: int | None = None,
) -> RowFrames:
    """Return the frames that a video shows nearest to the times of rows [start, stop), where within the tolerance.

    Args:
        index: Of the video.
        span: Where the episode is in it. DatasetError where no video has such a place, or another episode has it, too.
        seconds: The times of the episode's rows by ``own_seconds``.
        episode: Its number, for messages.
        fps: Frames a second of the dataset.
        tolerance_seconds: By which a frame may be shown at another time than its row has. It is a tick of the video's
            clock at least, and a quarter of a frame at most: beyond that it could as well be the neighbour that is
            meant.
        start: Counted in the episode.
        stop: None for all that follow.
    """
    if span.contradiction and seconds is None:
        raise DatasetError(span.contradiction, remedy=LEAVE_OUT_EPISODE)
    if span.num_frames > MAX_FRAMES or not 0 <= span.first_frame <= MAX_FIRST_FRAME:
        raise DatasetError(
            f"meta/episodes gives episode {episode} a place that {redact_url(span.url)} can't have: "
            f"{span.num_frames} frames from {span.start_seconds} s on, number {span.first_frame} at {fps:g} fps"
        )
    own = None if seconds is None else seconds[start:stop]
    due = span.start_seconds + (np.arange(span.num_frames)[start:stop] / fps if own is None else own)
    samples, shown = index.samples_at(due, within_seconds=HALF / fps)
    within = min(max(tolerance_seconds, 1 / index.timescale), QUARTER / fps) + ROUNDING_SECONDS
    off = np.abs(shown - due) > within + (0 if own is None else _float32_steps(own) / 2)
    if not off.any():
        return RowFrames(samples, None)
    misplaced = np.where(off[:, np.newaxis], np.stack((due, shown), axis=1), np.nan)
    return RowFrames(np.where(off, -1, samples), misplaced)

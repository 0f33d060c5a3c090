"""The frames of a video that make a clip, and how many clips a video gives.

Words and meanings are those of ``torchcodec.samplers``: where it has a sampler of the kind, the frames are the same
ones. What is drawn comes from outside, as a number, so that the order alone decides it.

Times are seconds of presentation, ascending: frame i is shown in [times[i], times[i + 1]), the last one up to
``end_seconds``. A *step* is the distance between two frames of a clip: ``step`` frames, or 1 / ``fps`` seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncfetch.config.checks import check_types, require, require_least
from asyncfetch.decode.backends import import_torch
from asyncfetch.errors import ConfigError, FrameMissing
from asyncfetch.order.line import draw_key, mixed

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Pick = Literal["random", "uniform", "all"]
AtEnd = Literal["repeat_last", "wrap", "error"]

PRECISION_SECONDS = 1e-9
"""A time that lies less than this before a border is at the border. Sums of float64 seconds are off by some 1e-11 after
a day of video, and neighbouring frames are 1e-7 s apart or more."""


@dataclass(frozen=True)
class ClipSampler:
    """The choice of frames that make a clip, and of the clips that each video gives.

    Raises:
        ConfigError: A value is out of range, or two of them exclude each other.
    """

    num_frames: int
    """Frames of a clip, T."""
    fps: float | None = field(default=None, kw_only=True)
    """Frames a second of a clip: its frame i is the one that is shown i / fps seconds after its start, whatever rate
    the video has, constant or not. Excludes ``step``."""
    step: int | None = field(default=None, kw_only=True)
    """Every so many frames one, in the order of presentation; None is 1 where there is no ``fps``."""
    pick: Pick | None = field(default=None, kw_only=True)
    """The places where clips start.

    "random": drawn evenly among all starts from which a clip ends within the video: frames, or with ``fps`` any time.
    "uniform": at equal distances. Of ``per_video`` clips by frames the first starts at the first of these starts, and
    the last one at the last; with ``fps`` they divide these times into equal parts, and start where a part does. With
    ``every_seconds`` they start so many seconds apart.
    "all": clips end to end, from the first frame to the end: each frame, or step, is in exactly one of them.

    None is "uniform" with ``every_seconds``, else "random".
    """
    per_video: int | None = field(default=None, kw_only=True)
    """Number of clips of each video, drawn or uniform; None is 1."""
    every_seconds: float | None = field(default=None, kw_only=True)
    """Seconds from the start of a clip to that of the next one, while it ends within the video."""
    at_end: AtEnd = field(default="repeat_last", kw_only=True)
    """The end of a clip that is longer than its video, or reaches over it as the last one of "all" may: its last frame
    is repeated, it begins anew ("wrap"), or it is an error (FrameMissing). A clip that is longer than the video starts
    at the first frame."""

    def __post_init__(self) -> None:
        if self.pick is None:
            object.__setattr__(self, "pick", "random" if self.every_seconds is None else "uniform")
        check_types(self)
        require_least(self, 1, "num_frames", "step", "per_video")
        for name in ("fps", "every_seconds"):
            value = getattr(self, name)
            is_positive = value is None or (math.isfinite(value) and value > 0)
            require(is_positive, f"{name} must be a positive number, not {value}")
        if self.fps is not None and self.step is not None:
            raise ConfigError(f"fps={self.fps} and step={self.step} both say which frames a clip has: give one of them")
        if self.every_seconds is not None and (self.pick != "uniform" or self.per_video is not None):
            raise ConfigError(
                f"every_seconds={self.every_seconds} says how many clips a video gives and where: leave out "
                f"per_video=, and take pick='uniform', not {self.pick!r}"
            )
        if self.pick == "all" and self.per_video is not None:
            raise ConfigError(f"pick='all' gives as many clips as a video has, not per_video={self.per_video}")

    @property
    def depends_on(self) -> frozenset[Literal["seconds", "frames"]]:
        """The facts of a video that ``count`` needs."""
        if self.pick == "all":
            return frozenset({"frames" if self.fps is None else "seconds"})
        if self.every_seconds is not None:
            return frozenset({"seconds", "frames"} if self.fps is None else {"seconds"})
        return frozenset()

    def count(self, *, seconds: ArrayLike | None = None, frames: ArrayLike | None = None) -> NDArray[np.int64]:
        """The number of clips that videos, or spans of them, give.

        Args:
            seconds: Of each, from the time of the first frame to the end of the last one.
            frames: Of each. One without frames, or of no length, gives no clip.

        Returns:
            An int64 for each of the videos; of shape () where neither is given.

        Raises:
            ConfigError: What ``depends_on`` says is missing, or isn't finite.
        """
        for name, given in (("seconds", seconds), ("frames", frames)):
            if given is None and name in self.depends_on:
                raise ConfigError(f"{self} needs the {name} of each video to say how many clips it gives")
            if given is not None and not np.isfinite(given).all():
                raise ConfigError(f"{name} must be finite for each video: read the videos' indexes first")
        lengths = np.asarray(0.0 if seconds is None else seconds, np.float64)
        numbers = np.asarray(0 if frames is None else frames, np.int64)
        has_any = np.asarray((seconds is None or lengths > 0) & (frames is None or numbers > 0))
        if self.pick == "all":
            counts = -(-self._steps(lengths, numbers) // self.num_frames)
        elif self.every_seconds is not None:
            distance = 1 / self.fps if self.fps is not None else self._step * lengths / np.maximum(numbers, 1)
            starts = lengths - (self.num_frames - 1) * distance - PRECISION_SECONDS
            counts = np.maximum(np.ceil(starts / self.every_seconds), 1)
        else:
            counts = np.asarray(self.per_video or 1)
        found: NDArray[np.int64] = np.where(has_any, counts, 0).astype(np.int64)
        return found

    @property
    def _step(self) -> int:
        return self.step or 1

    def _steps(self, seconds: NDArray[np.float64], frames: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many steps videos have from their first frame on; at least 1."""
        if self.fps is None:
            return np.maximum(-(-frames // self._step), 1)
        return np.maximum(np.ceil((seconds - PRECISION_SECONDS) * self.fps), 1).astype(np.int64)

    def window(
        self,
        times: NDArray[np.float64],
        end_seconds: float,
        number: int,
        *,
        draw: float = 0.0,
        name: str = "the video",
    ) -> NDArray[np.int64]:
        """The frames of a clip.

        Args:
            times: Of the video's frames, or of those of a span: (N,), ascending.
            end_seconds: End of the last one.
            number: Which of the clips that ``count`` says there are.
            draw: A random clip starts at this part of all starts: in [0, 1).
            name: Of the video, for messages.

        Returns:
            Positions in ``times``: (num_frames,). They ascend, but for what ``at_end`` adds.

        Raises:
            FrameMissing: There are no frames, or no clip of this number; or the clip is longer than the video or
                reaches over its end, and ``at_end`` is "error".
        """
        seconds, length = end_seconds - float(times[0]) if len(times) else 0.0, self.num_frames
        count = int(self.count(seconds=max(seconds, PRECISION_SECONDS), frames=len(times)))
        if number >= count:
            raise FrameMissing(
                f"{name}: it gives {count} clips by its {len(times)} frames in {seconds:.6f} s, and clip {number} was "
                "asked for: its length on record is longer than it is, or no frame is shown in the span"
            )
        steps = int(self._steps(np.array(seconds), np.array(len(times))))
        first = number * length if self.pick == "all" else 0
        there = min(length, steps - first)
        if there < length and self.at_end == "error":
            raise FrameMissing(
                f"{name}: clip {number} of {length} frames reaches over the end: {there} of them are there, and "
                "at_end='error'; take at_end='repeat_last' or 'wrap', or fewer frames"
            )
        if self.pick == "all" or there < length:
            found = self._steps_from(times, first, there)
        elif self.fps is None:
            start = self._start_frame(times, number, draw)
            found = np.arange(start, start + length * self._step, self._step)
        else:
            found = self._frames_at(times, end_seconds, number, draw)
        if there == length:
            return found
        return np.resize(found, length) if self.at_end == "wrap" else np.pad(found, (0, length - there), mode="edge")

    def _steps_from(self, times: NDArray[np.float64], first: int, count: int) -> NDArray[np.int64]:
        """The frames at so many steps of the whole video."""
        numbers = np.arange(first, first + count)
        if self.fps is None:
            return numbers * self._step
        return _shown_at(times, times[0] + numbers / self.fps + PRECISION_SECONDS)

    def _start_frame(self, times: NDArray[np.float64], number: int, draw: float) -> int:
        """The frame that a clip of every so many frames starts at, in a video that is longer."""
        last = len(times) - 1 - (self.num_frames - 1) * self._step
        if self.pick == "random":
            return int(draw * (last + 1))
        if self.every_seconds is not None:
            due = times[0] + number * self.every_seconds + PRECISION_SECONDS
            return min(int(_shown_at(times, due)), last)
        torch = import_torch()
        return int(torch.linspace(0, last, steps=self.per_video or 1, dtype=torch.int)[number])

    def _frames_at(self, times: NDArray[np.float64], end_seconds: float, number: int, draw: float) -> NDArray[np.int64]:
        """The frames of a clip by seconds in a video that is longer."""
        assert self.fps is not None
        distance = 1 / self.fps
        width = end_seconds - (self.num_frames - 1) * distance - times[0]
        if self.pick == "random":
            start = draw * width + times[0]
        else:
            start = times[0] + number * (self.every_seconds or width / (self.per_video or 1))
        return _shown_at(times, start + np.arange(self.num_frames) * distance)  # in torchcodec's order, to the last bit


def _shown_at(times: NDArray[np.float64], moments: NDArray[np.float64]) -> NDArray[np.int64]:
    """The frames that are shown at these times, none of which is before the first one's."""
    return np.searchsorted(times, moments, side="right") - 1


def frames_within(
    times: NDArray[np.float64], end_seconds: float, start: float | None, stop: float | None
) -> tuple[int, int, float]:
    """A span's first frame, the one after its last, and when its last one ends.

    A frame belongs to [start, stop) if ``start <= its time < stop``. None is the begin or the end of the video. The
    last frame ends where the span does, or with the video.
    """
    first = 0 if start is None else int(np.searchsorted(times, start))
    if stop is None:
        return first, len(times), end_seconds
    after = int(np.searchsorted(times, stop))
    return first, max(first, after), min(stop, end_seconds)


def span_lengths(
    times: NDArray[np.float64], end_seconds: float, start: float | None, stop: float | None
) -> tuple[int, float]:
    """The number of frames of a span, and their seconds: see ``frames_within``."""
    first, after, end = frames_within(times, end_seconds, start, stop)
    return after - first, end - float(times[first]) if first < after else 0.0


def draw(seed: int, epoch: int, entry: int, number: int) -> float:
    """Return what a random clip of an entry starts by: in [0, 1), the same on every machine and for ever."""
    drawn = int(mixed(np.array([number + 1]), draw_key("window", seed, epoch, entry))[0])
    return (drawn >> 11) / 2**53  # as many bits as a float64 holds

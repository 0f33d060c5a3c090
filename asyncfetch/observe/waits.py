"""The wait of a pass's consumer: each second exactly once, by its cause. Pure.

A consumer waits for the next sample, and that sample's job or episode was late because of its whole history, not of its
state when the consumer looked: of eight answers side by side, each of which takes 0.5 s to its first byte and 0.05 s to
its last, one ends every 70 ms, and nearly always in its body. So a wait is cut at the moments at which its jobs and
episodes arrived, and each piece is divided by the causes in the history of its job or episode.
"""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncfetch.observe.figures import Figures, sum_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Cause(IntEnum):
    """A reason to wait."""

    OPENING = 0
    """Metadata, indexes of videos, footers of tables."""
    LIMIT = 1
    """The limit of requests to a host, a bound on bandwidth, or a host's quota."""
    FIRST_BYTE = 2
    """Connections, and answers that hadn't begun."""
    BODIES = 3
    """Answers that had begun."""
    RETRIES = 4
    """Attempts that failed, and the pauses after them."""
    ROOM = 5
    """Memory for clips, within ``max_bytes``."""
    DISK = 6
    """The disk cache, and local files."""
    DECODING = 7
    """Decoding samples from clips, or waiting for a thread to do it."""
    TRANSFORM = 8
    """The user's own function, or waiting for a thread to run it."""
    HAND_OVER = 9
    """Assembling batches, and the way from the loop to the consumer."""
    OUTAGE = 10
    """Hosts that are away."""

    @property
    def key(self) -> str:
        """The name in reports and metrics."""
        return self.name.lower()


class Meter:
    """The time of one episode's requests so far, by cause. Requests side by side count each."""

    __slots__ = ("_at", "_since", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[Cause, float] = {}
        self._at: Cause | None = None
        self._since = 0.0

    def add(self, cause: Cause, seconds: float) -> None:
        """Count a stretch that has ended."""
        self._at = None
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds

    def begin(self, cause: Cause, now: float) -> None:
        """Note the current cause of the latest request."""
        self._at, self._since = cause, now

    def share(self, seconds: float, now: float | None, otherwise: Cause) -> dict[Cause, float]:
        """Divide the seconds in proportion to the counted time; with ``now``, including the stretch under way."""
        weights = dict(self.seconds)
        if now is not None and self._at is not None:
            weights[self._at] = weights.get(self._at, 0.0) + max(0.0, now - self._since)
        total = sum(weights.values())
        if total <= 0:
            return {otherwise if self._at is None else self._at: seconds}
        return {cause: seconds * weight / total for cause, weight in weights.items()}


_meter: ContextVar[Meter | None] = ContextVar("_meter", default=None)

running_meter = _meter.get
"""Returns the meter of this task's requests; None if no consumer waits for them."""


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Count the requests of this block, and of tasks that it starts, by ``meter``."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


class WaitStep(NamedTuple):
    """A part of a wait, for one job or episode."""

    until: float
    weights: Mapping[Cause, float]
    """The causes in its history, with the weight of each."""
    episode: int | None = None


_OF_LONGEST = (
    "longest_wait_episode", "longest_wait_seconds", "mean_bytes", "largest_bytes", "largest_episode", "other_bytes",
)  # fmt: skip
"""Figures that a sum takes from the consumer with the longest wait."""


@dataclass(frozen=True, slots=True, repr=False)
class Waits(Figures):
    """A consumer's time, of one pass or of several side by side. All parts together are ``wall_seconds``."""

    _telling = ("samples", "wall_seconds", "busy_seconds", "waited_seconds")
    _of_moment = ("consumers", "least_idle_share", *_OF_LONGEST)

    consumers: int = 0
    """Number of passes: one, or those of a loader's workers."""
    samples: int = 0
    """Samples delivered."""
    wall_seconds: float = 0.0
    """The time from the beginning to the end, or to now; of all consumers together."""
    busy_seconds: float = 0.0
    """The consumer's own time, between a sample and the call for the next."""
    working_seconds: float = 0.0
    """The part of it in which the consumer's thread ran or waited for a core; 0 if that is the loop's thread."""
    loop_busy_seconds: float = 0.0
    """Time in which the loop's thread ran or waited for a core, of all of the time."""
    loop_ran_seconds: float = 0.0
    """The part of it in which it ran."""
    transform_worked_seconds: float = 0.0
    """Time in which decode threads ran, or waited for a core, in the user's own functions; of all threads together."""
    transform_ran_seconds: float = 0.0
    """The part of it in which they ran."""
    least_idle_share: float = 0.0
    """Share of the time after its first sample, or of all of a short run, in which a consumer's thread had no work and
    didn't wait; of several, the least. A loader takes batches from its workers in turn, so they idle while the slowest
    one works."""
    by_cause: Mapping[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    """Seconds of wait, by cause."""
    start_by_cause: Mapping[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    """Seconds of wait until the first sample, by cause."""
    longest_wait_episode: int | None = None
    """The episode with the longest wait."""
    longest_wait_seconds: float = 0.0
    """The wait for it."""
    mean_bytes: float = 0.0
    """Mean memory of a segment's clips."""
    largest_bytes: float = 0.0
    """Memory of the largest segment's clips."""
    largest_episode: int | None = None
    """The episode of that segment."""
    other_bytes: float = 0.0
    """The mean of the others."""

    @property
    def waited_seconds(self) -> float:
        """All causes together."""
        return sum(self.by_cause.values())

    def _plus(self, other: Waits) -> Waits:
        longest = max(self, other, key=lambda one: one.longest_wait_seconds)
        return replace(
            Figures._plus(self, other),
            least_idle_share=min((one.least_idle_share for one in (self, other) if one.consumers), default=0.0),
            **{name: getattr(longest, name) for name in _OF_LONGEST},
        )

    @classmethod
    def together(cls, each: Iterable[Waits]) -> Waits:
        """The sum."""
        first, *others = [*each] or [cls()]
        return sum_of(first, *others)


MAX_EPISODES = 64
"""Episodes whose waits are counted separately at a time."""
_IDLE, _BUSY, _WAITING = 0, 1, 2
_STATE, _SINCE, _AT, _SAMPLES, _BUSY_SECONDS, _WORKING, _LOOP_BUSY, _LOOP_RAN, _EPISODE, _EPISODE_SECONDS = range(10)
_SIZES = _EPISODE_SECONDS + 1
_TRANSFORM = _SIZES + 4
_WORKED_SO_FAR = _TRANSFORM + 2
_CAUSES = _WORKED_SO_FAR + 1
_START = _CAUSES + len(Cause)
FIGURES = _START + len(Cause)
"""Numbers that an account keeps."""


class WaitAccount:
    """Counts a consumer's time. It is always in one of three states: busy, waiting, or at the end.

    Written by one thread at a time, and read by any. ``now`` is by one clock, whose readings other processes share.

    Args:
        figures: Memory for ``FIGURES`` numbers, perhaps shared with another process; None means its own.
    """

    __slots__ = ("_by_episode", "figures")

    def __init__(self, figures: array[float] | memoryview[float] | None = None) -> None:
        self.figures: Any = array("d", bytes(8 * FIGURES)) if figures is None else figures
        for place in range(FIGURES):
            self.figures[place] = 0.0
        self._by_episode: dict[int, float] = {}

    @property
    def waiting_since(self) -> float | None:
        """The time since which the consumer has waited; None if it doesn't wait."""
        return self.figures[_SINCE] if self.figures[_STATE] == _WAITING else None

    def wait(self, now: float, worked: float = 0.0) -> None:
        """Begin a wait. ``worked`` are the seconds of work of the consumer's thread since the last ``give``."""
        figures = self.figures
        if figures[_STATE] == _BUSY:
            # Written first, so that a concurrent reader sees too little time, never the same twice.
            since, figures[_SINCE] = figures[_SINCE], now
            figures[_BUSY_SECONDS] += now - since
            figures[_WORKING] += worked
        figures[_WORKED_SO_FAR] = 0.0
        if figures[_STATE] != _WAITING:
            figures[_AT], figures[_SINCE], figures[_STATE] = -1, now, _WAITING

    def give(self, now: float, path: Iterable[WaitStep] = (), samples: int = 0) -> None:
        """End a wait. ``path`` are its parts, one after the other; the rest was handing over."""
        figures = self.figures
        self.end(now, path)
        if samples and not figures[_SAMPLES]:
            figures[_START:FIGURES] = array("d", figures[_CAUSES:_START])
        figures[_SAMPLES] += samples
        figures[_SINCE], figures[_STATE] = now, _BUSY

    def end(self, now: float, path: Iterable[WaitStep] = ()) -> None:
        """Note that the consumer won't ask any more."""
        figures = self.figures
        since, figures[_SINCE] = figures[_SINCE], now  # first: see wait
        if figures[_STATE] == _WAITING:
            self._charge(since, now, path)
        elif figures[_STATE] == _BUSY:
            figures[_BUSY_SECONDS] += now - since
        figures[_STATE] = _IDLE

    def note(
        self, loop_busy: float, loop_ran: float, sizes: tuple[int, int, int, int], transform: tuple[float, float]
    ) -> None:
        """Note work so far: seconds in which the loop ran or waited for a core, and ran.

        ``sizes`` are number and bytes of all segments, bytes of the largest, and its episode; ``transform`` has both
        kinds of seconds of transforms.
        """
        figures, (episodes, total_bytes, largest_bytes, largest) = self.figures, sizes
        figures[_LOOP_BUSY] += loop_busy
        figures[_LOOP_RAN] += loop_ran
        figures[_SIZES] = total_bytes / episodes if episodes else 0.0
        figures[_SIZES + 1] = largest_bytes
        figures[_SIZES + 2] = (total_bytes - largest_bytes) / (episodes - 1) if episodes > 1 else 0.0
        figures[_SIZES + 3] = largest
        figures[_TRANSFORM], figures[_TRANSFORM + 1] = transform

    def note_worked(self, worked: float) -> None:
        """Note the consumer's seconds of work since the last ``give``, if it hasn't asked again."""
        if self.figures[_STATE] == _BUSY:
            self.figures[_WORKED_SO_FAR] = worked

    def note_cause(self, path: Sequence[WaitStep]) -> None:
        """Note the cause of the wait under way, for readers in other processes."""
        if path and path[-1].weights:
            self.figures[_AT] = max(path[-1].weights, key=path[-1].weights.__getitem__)

    def _charge(self, since: float, now: float, path: Iterable[WaitStep]) -> None:
        figures = self.figures
        for until, weights, episode in path:
            seconds = min(until, now) - since
            total = sum(weights.values())
            if seconds <= 0 or total <= 0:
                continue
            since += seconds
            for cause, weight in weights.items():
                figures[_CAUSES + cause] += seconds * (weight / total)
            if episode is not None:
                self._count(episode, seconds)
        if now > since:
            figures[_CAUSES + Cause.HAND_OVER] += now - since

    def _count(self, episode: int, seconds: float) -> None:
        by_episode = self._by_episode
        total = by_episode[episode] = by_episode.get(episode, 0.0) + seconds
        if total > self.figures[_EPISODE_SECONDS]:
            self.figures[_EPISODE], self.figures[_EPISODE_SECONDS] = episode, total
        if len(by_episode) > MAX_EPISODES:
            del by_episode[min(by_episode, key=by_episode.__getitem__)]

    def settled(self, now: float) -> Waits:
        """A snapshot in which the wait under way has no cause yet, since that may change."""
        return self.snapshot(now, None)

    def snapshot(self, now: float, path: Iterable[WaitStep] | None = ()) -> Waits:
        """A snapshot with the wait under way, of which ``path`` are the parts; None: see ``settled``."""
        copy = WaitAccount()
        copy.figures[:] = array("d", self.figures)
        figures, unsettled_seconds = copy.figures, 0.0
        if figures[_STATE] == _WAITING:
            if path is None:
                unsettled_seconds, figures[_SINCE] = max(0.0, now - figures[_SINCE]), now
            if not path and figures[_AT] >= 0:
                path = [WaitStep(now, {Cause(int(figures[_AT])): 1.0})]
        is_used = figures[_STATE] != _IDLE or any(figures[_SAMPLES:])
        copy.end(max(now, figures[_SINCE]), path or ())
        waited, start = figures[_CAUSES:_START], figures[_START:FIGURES]
        working_seconds = figures[_WORKING] + figures[_WORKED_SO_FAR]
        wall_seconds = figures[_BUSY_SECONDS] + sum(waited) + unsettled_seconds
        idle_seconds = max(0.0, figures[_BUSY_SECONDS] - working_seconds)
        judged_seconds = wall_seconds - sum(start) if wall_seconds > 2 * sum(start) else wall_seconds
        return Waits(
            consumers=int(is_used),
            samples=int(figures[_SAMPLES]),
            wall_seconds=wall_seconds,
            busy_seconds=figures[_BUSY_SECONDS],
            working_seconds=working_seconds,
            loop_busy_seconds=figures[_LOOP_BUSY],
            loop_ran_seconds=figures[_LOOP_RAN],
            transform_worked_seconds=figures[_TRANSFORM],
            transform_ran_seconds=figures[_TRANSFORM + 1],
            least_idle_share=idle_seconds / judged_seconds if judged_seconds > 0 else 0.0,
            by_cause={cause: waited[cause] for cause in Cause},
            start_by_cause={cause: start[cause] for cause in Cause},
            longest_wait_episode=int(figures[_EPISODE]) if figures[_EPISODE_SECONDS] else None,
            longest_wait_seconds=figures[_EPISODE_SECONDS],
            mean_bytes=figures[_SIZES],
            largest_bytes=figures[_SIZES + 1],
            largest_episode=int(figures[_SIZES + 3]) if figures[_SIZES + 1] else None,
            other_bytes=figures[_SIZES + 2],
        )

    @classmethod
    def read(cls, figures: Sequence[float], now: float) -> Waits:
        """The snapshot of an account that another process keeps in this memory."""
        account = cls()
        account.figures = array("d", figures)
        return account.snapshot(now)

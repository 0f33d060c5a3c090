"""What a pass has begun to decode and hasn't delivered yet, and what it delivers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from asyncfetch.observe.waits import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.observe.waits import Cause
    from asyncfetch.stream.batch import BatchRow
    from asyncfetch.stream.jobs import Job, Parcel

__all__ = ["Coming", "Decoding", "Delivery"]


class Decoding:
    """A job under way in a thread, and then what came of it."""

    __slots__ = ("is_ready", "path", "ready", "ready_at", "results", "rows", "steps", "waits_for")

    def __init__(self, job: Job, rows: list[BatchRow] | None) -> None:
        self.steps = job.steps
        self.rows = rows
        """Where it goes, with batches in memory of ours."""
        self.is_ready = False
        """Asked for each sample of a parcel, for which an Event's two calls are too many."""
        self.ready = anyio.Event()
        """Set then, and when nobody wants it any more."""
        self.ready_at = 0.0
        self.results: list[Any] = []
        """For each step; empty ones once they were delivered."""
        self.waits_for: int | None = None
        """The episode whose arrival it waits for."""
        self.path: list[Step] = []
        """What it waited for."""

    def end(self, results: list[Any], weights: Mapping[Cause, float] | None = None) -> None:
        """Called once or, where it was given up before, twice. ``weights`` say what its thread's time was."""
        if not self.is_ready:
            self.results, self.rows = results, None
            self.ready_at = time.perf_counter()
            if weights is not None:
                self.path.append(Step(self.ready_at, weights))
            self.is_ready = True
            self.ready.set()


class Coming:
    """A parcel that the consumer hasn't been given yet."""

    __slots__ = ("decodings", "parcel")

    def __init__(self, parcel: Parcel, decodings: list[Decoding]) -> None:
        self.parcel = parcel
        self.decodings = decodings
        """Of each step."""

    @property
    def is_ready(self) -> bool:
        """Whether all of it is decoded."""
        return all(decoding.is_ready for decoding in self.decodings)


class Delivery(NamedTuple):
    """A sample that a consumer gets."""

    number: int
    """Which one of its part of the epoch."""
    delivered: int
    """How many it has been given with it; one more, but for what is empty."""
    sample: Any
    """Or its row in a batch; or what a transform gave."""

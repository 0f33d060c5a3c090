"""The plan of one pass: the part of an epoch's order that is one consumer's, and how far that has been delivered."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from asyncfetch.order.deal import Deal
from asyncfetch.order.state import spans_left

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncfetch.order.deal import Left, Visit
    from asyncfetch.order.line import Piece
    from asyncfetch.order.state import EpochProgress

STRETCH_STEPS = 500
"""Steps of the order that a look-ahead goes through at a time: about a millisecond."""


class Step(NamedTuple):
    """One sample of a consumer's order."""

    piece: Piece
    frame: int
    """Frame in the episode, from 0."""
    number: int = 0
    """Its number in the consumer's part of the epoch."""
    stop: int = 1
    """The number of the next step: behind this one there may be some that hold nothing."""
    reader: int = 0
    """The number of the piece's decoder, where several jobs in a row decode it."""
    finished: tuple[Piece, ...] = ()
    """Pieces that this consumer used and won't use after this step; each is named once, or never at the very end."""
    is_padding: bool = False
    """True if it repeats a sample only to make ranks even."""


class PassPlan:
    """The steps that are left for one consumer.

    Args:
        whole: The epoch.
        progress: Where the pass begins; counts on from there.
        seed: Of members' turns.
    """

    def __init__(self, whole: Left, progress: EpochProgress, seed: int) -> None:
        left = whole
        for sharing in progress.legs:
            given = [sharing.given[rank].before for rank in range(sharing.leg.world_size)]
            left = Deal(left, sharing.leg, seed).after(given)
        self.deal = Deal(left, progress.leg, seed)
        placement = progress.placement
        self.order = self.deal.rank(placement.rank)
        self.progress = progress
        before = sum(min(stop, self.order.total) - min(start, self.order.total) for start, stop in progress.before)
        progress.share = placement.count_of(self.order.total - before)
        self.begun: int = progress.delivered
        """Samples that the consumer was given before."""
        self._ahead = progress.ahead
        self.is_resumed = progress.is_resumed
        """True if something of the epoch was delivered before."""
        self.parts_batches = progress.leg.batches != "any"
        """True if those samples alone can be stacked that the order means for one batch."""
        self.end: int = max(self.begun, progress.share)
        """The number that has been delivered after the pass's end."""
        self.is_over = False
        """True once the pass came to its end."""
        self._batch_size = placement.batch_size if self.parts_batches else None

    def __len__(self) -> int:
        """Samples that the pass gives, padding included, and what is empty between them."""
        return self.end - self.begun

    @property
    def left(self) -> int:
        """Samples that the pass hasn't given yet, at most."""
        return max(0, self.end - self.progress.delivered)

    @property
    def is_far(self) -> bool:
        """True if its first step takes long to find: call ``find`` in a thread before."""
        return any(runs.line.is_large for runs in self.deal.left.members)

    def find(self) -> None:
        """Draw the order."""
        _ = self.order.lanes

    @property
    def group_frames(self) -> int:
        """Most neighbouring frames that are cheaper to decode together: no more than the longest segment has."""
        lines = [runs.line for runs in self.deal.left.members]
        return max((min(line.group_frames, line.largest) for line in lines if line.total), default=1)

    @property
    def open_pieces(self) -> int:
        """Pieces that the rank draws from at a time, at most."""
        return sum(open_pieces for open_pieces, _ in self._pools())

    @property
    def own_pieces(self) -> int:
        """Pieces that this consumer draws from, of several workers where each has its own."""
        pieces, placement = self.open_pieces, self.progress.placement
        return pieces // placement.workers if pieces % (placement.workers * placement.turn_samples) == 0 else pieces

    def pool(self) -> tuple[int, int]:
        """Return how many pieces the rank draws from at most, and their frames if they are whole segments."""
        pools = self._pools()
        return sum(pieces for pieces, _ in pools), sum(pieces * frames for pieces, frames in pools)

    @property
    def segments(self) -> int:
        """Segments that the rank reads something of, about; parts of one at an end of its share count as one."""
        each = zip(self.deal.left.members, self.order.real, strict=True)
        return sum(-(-real * runs.line.segments // runs.line.total) for runs, real in each if real)

    def _pools(self) -> list[tuple[int, int]]:
        # Where it takes long to find the lanes there are many segments, so they are as many as the pool has.
        pools = self.progress.leg.pools if self.is_far else [len(lanes) for lanes in self.order.lanes]
        each = zip(self.deal.left.members, self.order.real, pools, strict=True)
        return [(min(pool, real), runs.line.largest) for runs, real, pool in each if real]

    def steps(self) -> Iterator[Step]:
        """All of them, in order; it may be called again."""
        visits = self.order.visits()
        latest: tuple[int, Visit] | None = None
        left: list[Piece] = []
        used: set[Piece] = set()
        for number in range(self.begun, self.end):
            visit = visits.at(spans_left(self.progress.before, self.progress.placement.of_rank(number)))
            if visit is None:
                continue
            if self._ahead:  # of what is passed over, pieces may never be used
                left += (piece for piece in visit.left if piece in used)
                if any(start <= number < stop for start, stop in self._ahead):
                    continue
                used.add(visit.piece)
            elif latest is not None:
                left += visit.left
            if latest is not None:
                yield _step(*latest, number, left)
                left.clear()
            latest = number, visit
        if latest is not None:
            yield _step(*latest, self.end, [])

    def deliver(self, number: int, waiting: Iterable[int]) -> None:
        """Note that all before this number was given, but for those that wait for a batch."""
        self.progress.deliver(max(self.begun, number), waiting)

    def finish(self) -> None:
        """Note that the pass came to its end: with what is left out, or empty, behind the last sample."""
        self.is_over, self.progress.delivered = True, self.end

    def batch_of(self, number: int) -> int:
        """Return which batch the consumer's ``number``-th sample is in; 0 for all where any samples make a batch."""
        return 0 if self._batch_size is None else number // self._batch_size

    def batch_start(self, number: int) -> int:
        """Number of the first sample of the batch that this one opens.

        The samples between them were left out, and a pass that resumes there leaves them out again.
        """
        return number if self._batch_size is None else number - number % self._batch_size

    def first_uses(self) -> Iterator[Piece | None]:
        """The pieces in the order of their first use; None now and then where they are far apart."""
        used: set[Piece] = set()
        for number, step in enumerate(self.steps()):
            if number % STRETCH_STEPS == 0:
                yield None
            if step.piece not in used:
                used.add(step.piece)
                yield step.piece
            used.difference_update(step.finished)

    def first_pieces(self) -> Iterator[Piece]:
        """The pieces that the first stretch of steps is of, in the order of their first use."""
        uses = self.first_uses()
        next(uses, None)  # the mark before the first stretch
        for piece in takewhile(lambda piece: piece is not None, uses):
            assert piece is not None
            yield piece


def _step(number: int, visit: Visit, stop: int, finished: list[Piece]) -> Step:
    return Step(visit.piece, visit.frame, number, stop, finished=tuple(finished), is_padding=visit.is_padding)

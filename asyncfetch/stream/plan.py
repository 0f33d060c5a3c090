"""The plan of one pass: the order, the part of it that is this consumer's, and how far that part has been delivered."""

from __future__ import annotations

from collections import deque
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Protocol

from asyncfetch.stream.placement import Placement
from asyncfetch.stream.remaining import Deal, Remaining, SharedOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from asyncfetch.stream.order import Step
    from asyncfetch.stream.state import EpochProgress

__all__ = ["ChosenEpisodes", "EpisodeOrder", "PassPlan"]

STRETCH_STEPS = 500
"""Steps of the order that a look-ahead goes through at a time: about a millisecond."""


class EpisodeOrder(SharedOrder, Protocol):
    """The order of an epoch: see Order, and MixedOrder."""

    def largest_group(self) -> int:
        """Most neighbouring frames that are cheaper to decode together: no more than the longest episode has."""
        ...

    def open_episodes(self, placement: Placement) -> int:
        """Return how many episodes a consumer draws from at a time."""
        ...

    def pool(self, placement: Placement) -> tuple[int, int]:
        """Return how many different episodes those are at most, and their frames if they are the longest."""
        ...

    def is_far(self, position: int) -> bool:
        """Return whether its assignment there takes long to find."""
        ...

    def steps(self, positions: Iterable[int], assignment: Any = None) -> Iterator[Step]:  # noqa: ANN401
        """Yield what comes at these positions, which ascend."""
        ...


class ChosenEpisodes(Protocol):
    """Episode index of each position that an order speaks of."""

    def __getitem__(self, position: int, /) -> int: ...


class PassPlan:
    """The steps that are left for one consumer.

    Args:
        order: Of the epoch.
        selection: What the order speaks of.
        progress: Where the pass begins; counts on from there.
        parts_batches: Whether those samples alone can be stacked that the order means for one batch.
        empty_at: The positions around one that hold nothing, none where that one does hold something; where the order
            is only of what is left of an epoch.
    """

    def __init__(
        self,
        order: EpisodeOrder,
        selection: ChosenEpisodes,
        progress: EpochProgress,
        *,
        parts_batches: bool = False,
        empty_at: Callable[[int], range] | None = None,
    ) -> None:
        self.order = order
        self.selection = selection
        self.progress = progress
        self.parts_batches = parts_batches
        self._batch_size = progress.placement.batch_size if parts_batches else None
        self.begun = progress.delivered
        """Samples that the consumer was given before."""
        self.is_resumed = empty_at is not None or self.begun > 0 or progress.rest != Remaining()
        """True if something of the epoch was delivered before."""
        self._assignment: Any = None
        taken, _ = progress.rest.shared(progress.total, progress.placement, progress.ends)
        self.end = max(self.begun, taken)
        """The number that has been delivered after the pass's end."""
        self._full = self.end
        """The same, without what is empty there."""
        self._empty_at = empty_at
        self._deal = Deal(progress.rest, progress.total, progress.placement, order)
        while empty_at is not None and self._full > self.begun and (empty := empty_at(self._position(self._full - 1))):
            self._full = self._number_from(empty.start, self.begun, self._full)

    def __len__(self) -> int:
        """Samples that the pass gives, padding included, and what is empty between them."""
        return self._full - self.begun

    @property
    def left(self) -> int:
        """Samples that the pass hasn't given yet, at most."""
        return max(0, self._full - self.progress.delivered)

    @property
    def is_far(self) -> bool:
        """True if its first step takes long to find: call ``find`` in a thread before."""
        return self._assignment is None and len(self) > 0 and self.order.is_far(self._first())

    def find(self) -> None:
        """Find the first step, some microseconds for each episode before it."""
        self._assignment = self.order.assignment(self._first())

    def pool(self) -> tuple[int, int]:
        """See EpisodeOrder."""
        return self.order.pool(self.progress.placement)

    def steps(self) -> Iterator[Step]:
        """All of them, in order; it may be called again."""
        last: Step | None = None
        steps = self.order.steps(self._positions(self.begun, self._assignment), self._assignment)
        for step in steps if self._empty_at is None else self._steps_between_empty(self._empty_at):
            last = step
            yield step
        progress = self.progress
        taken, padding = progress.rest.shared(progress.total, progress.placement, progress.ends)
        padding = min(padding, taken - self.begun)
        if padding and last is None:
            last = next(self.order.steps(self._repeated(), self._assignment), None)
        if last is not None:
            for _ in range(padding):
                yield last._replace(finished=(), is_padding=True, empty=0)

    def _steps_between_empty(self, empty_at: Callable[[int], range]) -> Iterator[Step]:
        """Yield what is at the consumer's positions, most of which may hold nothing: a batch may be of any size."""
        progress = self.progress
        taken, padded = progress.rest.shared(progress.total, progress.placement, progress.ends)
        end = taken - padded
        numbers: deque[int] = deque()  # of what was asked for and not given yet

        def filled() -> Iterator[int]:
            number = self.begun
            while number < end:
                position = self._position(number)
                if empty := empty_at(position):
                    number = self._number_from(empty.stop, number, end)
                    continue
                numbers.append(number)
                yield position
                number += 1
            numbers.append(end)

        counted = self.begun
        for step in self.order.steps(filled(), self._assignment):
            numbers.popleft()
            yield step._replace(empty=numbers[0] - counted - 1)
            counted = numbers[0]

    def _number_from(self, position: int, low: int, high: int) -> int:
        """The consumer's first sample from ``low`` and below ``high`` that isn't before the position.

        The position is where something empty begins or ends, and there ranks take turns.
        """
        return min(max(self.progress.placement.count(self.progress.rest.index_from(position)), low), high)

    def batch_of(self, number: int) -> int:
        """Return which batch the consumer's ``number``-th sample is in; 0 for all where any samples make a batch."""
        return 0 if self._batch_size is None else number // self._batch_size

    def batch_start(self, number: int) -> int:
        """Number of the first sample of the batch that this one opens.

        Those between them were left out, and who goes on from there leaves them out again.
        """
        return number if self._batch_size is None else number - number % self._batch_size

    def first_uses(self) -> Iterator[int | None]:
        """The episodes in the order of their first use; None now and then where they are far apart."""
        used: set[int] = set()
        for number, step in enumerate(self.steps()):
            if number % STRETCH_STEPS == 0:
                yield None
            if step.episode not in used:
                used.add(step.episode)
                yield self.selection[step.episode]
            used.difference_update(step.finished)

    def first_episodes(self) -> Iterator[int]:
        """The episodes that the first stretch of steps is of, in the order of their first use."""
        uses = self.first_uses()
        next(uses, None)  # the mark before the first stretch
        yield from takewhile(lambda episode: episode is not None, uses)

    def _position(self, number: int) -> int:
        return self.progress.rest.position_of(self._deal.index(number))

    def _positions(self, skip: int, assignment: Any = None) -> Iterator[int]:  # noqa: ANN401
        progress = self.progress
        return progress.rest.positions(
            progress.total, progress.placement, progress.ends, self.order, assignment=assignment, skip=skip
        )

    def _repeated(self) -> Iterator[int]:
        """Return what padding repeats if nothing is left: the consumer's last sample or, for want of it, another's."""
        progress = self.progress
        taken, padding = progress.rest.shared(progress.total, progress.placement, progress.ends)
        if taken > padding:
            return self._positions(taken - padding - 1)
        return islice(progress.rest.positions(progress.total, Placement(), "uneven"), 1)

    def _first(self) -> int:
        """The position of the first step, or one before it from which on the order has to be known."""
        progress = self.progress
        taken, padding = progress.rest.shared(progress.total, progress.placement, progress.ends)
        if not len(self) or taken == padding:
            return progress.rest.position_of(0) if len(self) else 0
        return progress.rest.position_of(self._deal.begin(min(self.begun, taken - padding - 1)))

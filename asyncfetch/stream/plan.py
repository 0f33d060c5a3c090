"""What one pass reads: the order, the part of it that is this consumer's, and how far that part has been delivered."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

from asyncfetch.stream.cursor import Rest
from asyncfetch.stream.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncfetch.stream.order import Step
    from asyncfetch.stream.state import Progress

__all__ = ["EpisodeOrder", "PassPlan", "Selection"]

STRETCH_STEPS = 500
"""Of the order that a look-ahead goes through at a time: about a millisecond."""


class EpisodeOrder(Protocol):
    """The order of an epoch: see Order, and MixedOrder."""

    @property
    def group_frames(self) -> int:
        """Neighbouring frames that are decoded together."""
        ...

    def open_episodes(self, placement: Placement) -> int:
        """How many episodes a consumer draws from at a time."""
        ...

    def pool(self, placement: Placement) -> tuple[int, int]:
        """How many different episodes those are at most, and how many frames they have if they are the longest."""
        ...

    def is_far(self, position: int) -> bool:
        """Whether its seating there takes long to find."""
        ...

    def seating(self, position: int) -> Any:  # noqa: ANN401
        """Where ``steps`` may begin."""
        ...

    def steps(self, positions: Iterable[int], seating: Any = None) -> Iterator[Step]:  # noqa: ANN401
        """What comes at these positions, which ascend."""
        ...


class Selection(Protocol):
    """Episode index of each position that an order speaks of."""

    def __getitem__(self, position: int, /) -> int: ...


class PassPlan:
    """The steps that are left for one consumer.

    Args:
        order: Of the epoch.
        selection: What the order speaks of.
        progress: Where the pass begins; counts on from there.
        parted_by: Key of what all samples of a batch have in common, if something is: they couldn't be stacked.
        block_samples: Of the order, that have it in common, counted from its beginning.
    """

    def __init__(
        self,
        order: EpisodeOrder,
        selection: Selection,
        progress: Progress,
        *,
        parted_by: str | None = None,
        block_samples: int = 1,
    ) -> None:
        self.order = order
        self.selection = selection
        self.progress = progress
        self.parted_by = parted_by
        self._block_samples = block_samples
        self.begun = progress.delivered
        """Samples that the consumer was given before."""
        self._seating: Any = None

    def __len__(self) -> int:
        """Samples that the pass gives, padding included."""
        progress = self.progress
        return max(0, progress.rest.shared(progress.total, progress.placement, progress.ends)[0] - self.begun)

    @property
    def left(self) -> int:
        """Samples that the pass hasn't given yet, at most."""
        return len(self) - (self.progress.delivered - self.begun)

    @property
    def is_resumed(self) -> bool:
        """Whether something of the epoch was delivered before."""
        return self.begun > 0 or self.progress.rest != Rest()

    @property
    def is_far(self) -> bool:
        """Whether its first step takes long to find: call ``find`` in a thread before."""
        return self._seating is None and len(self) > 0 and self.order.is_far(self._first())

    def find(self) -> None:
        """Find the first step, some microseconds for each episode in front of it."""
        self._seating = self.order.seating(self._first())

    def pool(self) -> tuple[int, int]:
        """See EpisodeOrder."""
        return self.order.pool(self.progress.placement)

    def steps(self) -> Iterator[Step]:
        """All of them, in order; it may be called again."""
        last: Step | None = None
        for step in self.order.steps(self._positions(self.begun), self._seating):
            last = step
            yield step
        progress = self.progress
        taken, padding = progress.rest.shared(progress.total, progress.placement, progress.ends)
        padding = min(padding, taken - self.begun)
        if padding and last is None:
            last = next(self.order.steps(self._repeated(), self._seating), None)
        if last is not None:
            for _ in range(padding):
                yield last._replace(finished=(), is_padding=True)

    def has_even_batches(self, size: int) -> bool:
        """Whether all batches of this size are whole, but for the last."""
        if self.parted_by is None:
            return True
        rest, world_size = self.progress.rest, self.progress.placement.world_size
        is_at_block = not rest.missing and rest.position % self._block_samples == 0
        return is_at_block and self.begun % size == 0 and self._block_samples % (size * world_size) == 0

    def ends_batch(self, batch: Sequence[Any]) -> bool:
        """Whether the last of these samples belongs to another batch than the others.

        Only where a pass doesn't begin where a batch did, or some of one are left out.
        """
        key = self.parted_by
        if key is None or not all(isinstance(sample, Mapping) and key in sample for sample in batch[-2:]):
            return False
        return len(batch) > 1 and bool(batch[-1][key] != batch[-2][key])

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

    def _positions(self, skip: int) -> Iterator[int]:
        progress = self.progress
        return progress.rest.positions(progress.total, progress.placement, progress.ends, skip=skip)

    def _repeated(self) -> Iterator[int]:
        """What padding repeats where nothing else is left: the consumer's last sample or, if it has none, another's."""
        progress = self.progress
        taken, padding = progress.rest.shared(progress.total, progress.placement, progress.ends)
        if taken > padding:
            return self._positions(taken - padding - 1)
        return islice(progress.rest.positions(progress.total, Placement(), "uneven"), 1)

    def _first(self) -> int:
        return next(chain(self._positions(self.begun), self._repeated()), 0) if len(self) else 0

"""Batches of a pass's samples: as they come, or of one shape each, where the samples of a stream have several.

Samples of several shapes wait in a bucket for each, in the order in which they come. A full bucket is a batch. Where
more of them wait than memory is for, the bucket of the sample that has waited longest is a smaller batch; so are all
that are left at the end.

A state says which samples were given, and which of those before them still wait. A pass that resumes there begins with
the waiting ones, which so fill the same buckets: its batches are those of a pass that was never stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncfetch.order.placement import Placement
    from asyncfetch.order.plan import PassPlan
    from asyncfetch.stream.passes import StreamIterator
    from asyncfetch.stream.samples import DeliveredSample

BucketBy = Literal["frames", "shape"]
Key: TypeAlias = tuple[Any, ...]
"""What the samples of a bucket have in common."""

WAITING_BATCHES = 16
"""The samples of so many batches wait at most, of all shapes together."""

_END = object()


def check_bucket_by(given: object, batch_size: int | None, maker: str) -> None:
    """Raise ConfigError where it is no way to make batches, or ``maker`` makes none."""
    if given not in {None, "frames", "shape"}:
        raise ConfigError(f"bucket_by must be 'frames', 'shape' or None, not {given!r:.80}")
    if given is not None and batch_size is None:
        raise ConfigError(f"bucket_by={given!r} is about batches made here: give {maker} a batch_size")


def bucket_of(sample: Any, by: BucketBy) -> Key:  # noqa: ANN401 - what a transform returns
    """Return what the samples of one batch have in common: the shapes of their pictures, or how many these are."""
    import torch

    if not isinstance(sample, Mapping):
        raise ConfigError(
            f"bucket_by={by!r} looks at the tensors of dicts, not at {type(sample).__name__}: let the transform return "
            "a dict"
        )
    pictures = {key: value.shape for key, value in sample.items() if isinstance(value, torch.Tensor) and value.ndim > 2}
    if by == "shape":
        return tuple(pictures.items())
    return tuple((key, shape[0]) for key, shape in pictures.items() if len(shape) > 3)


@dataclass(frozen=True, slots=True)
class Bucketing:
    """A rule by which samples become batches."""

    by: BucketBy
    """The likeness of the samples of a batch: in the number of their frames, or in the shapes of their pictures."""
    size: int
    """Samples of a full batch."""
    drop_last: bool
    """True if smaller batches are left out."""
    max_bytes: int
    """Of samples that wait, where they are of several shapes."""


class InOrder:
    """Samples that become batches as they come; one batch's are those that the order means for one."""

    def __init__(self, size: int, least: int) -> None:
        self._size, self._least = size, least
        self._open: dict[range, Any] = {}
        self._batch = self._stop = 0  # of the samples in the open batch
        self._whole: deque[dict[range, Any]] = deque()

    def __len__(self) -> int:
        """Return how many samples wait."""
        return sum(map(len, self._whole)) + len(self._open)

    @property
    def numbers(self) -> list[int]:
        """Their numbers in the consumer's part of the epoch, and those of what was left out of their batches."""
        return list(chain(*chain(*self._whole, self._open)))

    def add(self, plan: PassPlan, given: DeliveredSample) -> None:
        """Put a sample into its batch. ``due`` is to be asked before the next one."""
        batch = plan.batch_of(given.number)
        if self._open and batch != self._batch:  # the others of that batch were left out
            self._close()
        start = self._stop if self._open else plan.batch_start(given.number)
        self._open[range(start, given.delivered)] = given.sample
        self._batch, self._stop = batch, given.delivered
        if len(self._open) == self._size or plan.batch_of(given.delivered) != batch:
            self._close()

    def due(self, *, at_end: bool = False) -> dict[range, Any] | None:
        """Take the samples of the next batch, by their numbers; None where all others are to wait."""
        if at_end:
            self._close()
        while self._whole:
            if len(batch := self._whole.popleft()) >= self._least:
                return batch
        return None

    def note(self, plan: PassPlan, latest: DeliveredSample) -> None:
        """Note that all that came was given but for what waits; at the pass's end also what was left out behind it."""
        if len(self) or not plan.is_over:
            plan.deliver(latest.delivered, self.numbers)

    def _close(self) -> None:
        if self._open:
            self._whole.append(self._open)
            self._open = {}


class Buckets:
    """Samples that wait, by what they have in common; the bucket that has waited longest is the first one."""

    def __init__(self, rule: Bucketing) -> None:
        self._rule = rule
        self._buckets: dict[Key, dict[range, Any]] = {}
        self._full: Key | None = None
        self._bytes: dict[range, int] = {}
        self._all_bytes = 0

    def __len__(self) -> int:
        """Return how many samples wait."""
        return len(self._bytes)

    @property
    def numbers(self) -> list[int]:
        """Their numbers in the consumer's part of the epoch."""
        return list(chain(*self._bytes))

    def add(self, _: PassPlan, given: DeliveredSample) -> None:
        """Put a sample into its bucket. ``due`` is to be asked before the next one."""
        import torch

        numbers, sample = given.numbers, given.sample
        key = bucket_of(sample, self._rule.by)
        bucket = self._buckets.setdefault(key, {})
        bucket[numbers] = sample
        tensors = (value for value in sample.values() if isinstance(value, torch.Tensor))
        self._bytes[numbers] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._all_bytes += self._bytes[numbers]
        if len(bucket) == self._rule.size:
            self._full = key

    def due(self, *, at_end: bool = False) -> dict[range, Any] | None:
        """Take the samples of the next batch, by their numbers; None where all others are to wait.

        At the end none of them waits any longer.
        """
        while (key := self._next_key(at_end=at_end)) is not None:
            bucket = self._buckets.pop(key)
            self._all_bytes -= sum(self._bytes.pop(numbers) for numbers in bucket)
            if not self._rule.drop_last or len(bucket) == self._rule.size:
                return bucket
        return None

    def note(self, plan: PassPlan, latest: DeliveredSample) -> None:
        """Note that all that came was given but for what waits."""
        plan.deliver(latest.delivered, self.numbers)

    def _next_key(self, *, at_end: bool) -> Key | None:
        if self._full is not None:
            full, self._full = self._full, None
            return full
        # Until there is room: so the samples that wait in a state find as much of it when they come again.
        is_crowded = len(self) >= WAITING_BATCHES * self._rule.size or self._all_bytes > self._rule.max_bytes
        return next(iter(self._buckets), None) if at_end or (is_crowded and len(self._buckets) > 1) else None


def batches_of(in_batches: Placement, bucketing: Bucketing | None) -> InOrder | Buckets:
    """Return the rule of a pass's batches: of one shape each, or else as the samples come."""
    if bucketing is not None:
        return Buckets(bucketing)
    return InOrder(in_batches.batch_size or 1, in_batches.least_samples)


def batched(
    samples: StreamIterator,
    together: Callable[[list[Any]], Any],
    batches: InOrder | Buckets,
    keep: Callable[[StreamIterator | None], None],
) -> Iterator[Any]:
    """Give batches of samples.

    Args:
        samples: Of one pass.
        together: Makes a batch of samples.
        batches: Says which samples go into one.
        keep: Takes the pass where it has ended, because its last samples were left out, while others wait: only it
            has the state then. Takes None when no more of them wait than make one batch.
    """
    has_more = True
    while has_more:
        came = _END
        try:
            came = next(samples, _END)
            if came is _END:
                keep(samples if len(batches) else None)
                break
            has_more = samples.__length_hint__() > 0  # as long as all that came counts as given
            batches.add(samples.plan, samples.latest)
        except BaseException:
            samples.give_but([*batches.numbers, *([] if came is _END else samples.latest.numbers)])
            raise
        while (batch := batches.due()) is not None:
            yield _made(samples, batches, batch, together)
    while (batch := batches.due(at_end=True)) is not None:
        if not len(batches):
            keep(None)
        yield _made(samples, batches, batch, together)
    keep(None)
    next(samples, None)  # the pass ends


def _made(
    samples: StreamIterator, batches: InOrder | Buckets, batch: dict[range, Any], together: Callable[[list[Any]], Any]
) -> Any:  # noqa: ANN401
    try:
        with samples.figures.handing_over():
            made = together(list(batch.values()))
    except BaseException:  # it was never given
        samples.give_but([*batches.numbers, *chain(*batch)])
        raise
    batches.note(samples.plan, samples.latest)
    return made

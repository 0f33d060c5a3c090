"""The samples of a job, made by one call in a decode thread; each fails for itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncfetch.errors import ConfigError, UsageError
from asyncfetch.formats import DoesNotFit, Field
from asyncfetch.observe.waits import Cause
from asyncfetch.runtime.concurrently import kept
from asyncfetch.runtime.threads import ThreadClock
from asyncfetch.stream.batch import BatchRow, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncfetch.formats import Asked, HeldStretch, Sample, SampleMaker
    from asyncfetch.order.line import Piece
    from asyncfetch.order.plan import Step
    from asyncfetch.stream.shapes import Shape

PADDING = "is_padding"
"""Key of a sample's mark of padding."""

Transform = Callable[["Sample"], "Sample"]
"""Called in a decode thread on every sample; what it returns is delivered."""


@dataclass(frozen=True, slots=True)
class FailedSample:
    """The error that a step came to in place of a sample, which may be anything that a transform returns.

    No frame hangs on an error of ours, and those of a transform's hold it only until it is delivered: a cycle would
    keep all that the consumer's own frames hold until the collector comes by, a whole stream with threads and files.
    """

    error: BaseException
    by_transform: bool = False
    """True if the transform raised it: it then says nothing of the data, whatever its type."""


class Reading(NamedTuple):
    """The making of one dataset's samples."""

    samples: SampleMaker
    """Reads them from pieces."""
    transform: Transform | None = None
    """A member's own, before it is shaped."""
    shape: Shape | None = None
    """Makes them go with those of other members; None outside of mixtures."""


class JobBuilder:
    """Makes the samples of a pass. ``transform`` is for samples of all members."""

    def __init__(self, readings: Sequence[Reading], transform: Transform | None, *, marks_padding: bool) -> None:
        self._readings = readings
        self._transform = transform
        self._marks_padding = marks_padding
        self.weights: Mapping[Cause, float] = {Cause.DECODING: 1e-9}
        """The time of threads so far, divided between reading samples and transforming them."""
        self._has_transform = transform is not None or any(one.transform is not None for one in readings)
        self.transform_seconds = (0.0, 0.0)
        """Seconds in which threads ran, or waited for a core, in the user's own functions; and those they ran."""
        self._given = [one.samples.layout() for one in readings]
        self._pictures = {
            key if one.shape is None else one.shape.rename.get(key, key)
            for one in readings
            if one.transform is None
            for key in one.samples.pictures
        }
        layouts = [self._laid_out(member) for member in range(len(readings))]
        # Only pictures lie channels-last, and what is one here may be a column of numbers there.
        known = [each for each in layouts if each is not None]
        are_one_way = len({each.pictures for each in known if each.fields == known[0].fields}) <= 1
        self._layouts = layouts if are_one_way else [None] * len(readings)

    @property
    def sample_bytes(self) -> int:
        """About what one sample takes; the largest, where they differ."""
        filled = [() if one.shape is None else one.shape.fill.values() for one in self._readings]
        each = zip(self._readings, filled, strict=True)
        return max(one.samples.sample_bytes + sum(like.nbytes for like in fill) for one, fill in each)

    def layout(self, step: Step) -> Layout | None:
        """Return the layout of a step's sample, and of others in a batch with it; None where a transform makes it."""
        return self._layouts[step.piece.member]

    def _laid_out(self, member: int) -> Layout | None:
        samples, transform, shape = self._readings[member]
        given = self._given[member]
        if given is None or transform is not None or self._transform is not None:
            return None
        if any(like.varies for like in given.values()):
            return None
        fields, pictures = dict(given), set(samples.pictures)
        if shape is not None:
            fields = shape.fields(fields)
            pictures = {shape.rename.get(key, key) for key in pictures} | (shape.fill.keys() & self._pictures)
        if self._marks_padding:
            if PADDING in fields:
                return None
            fields[PADDING] = Field("bool")
        return Layout(fields, frozenset(pictures & fields.keys()))

    def build(
        self,
        steps: Sequence[Step],
        episodes: Mapping[Piece, HeldStretch[Any] | Exception],
        is_given_up: Callable[[], bool],
        rows: Sequence[BatchRow] | None = None,
    ) -> list[Any]:
        """Return a sample for each step, its row in a batch, or a ``FailedSample``. Slow: call it in a thread.

        ``is_given_up`` says whether the pass was left: then samples are empty. Where one of a member doesn't fit its
        row, all of it are samples.
        """
        begun_at = time.perf_counter()
        read: deque[Any] = deque([None] * len(steps))  # each is let go of as it is taken: see ``FailedSample``
        asked: dict[int, dict[int, Asked]] = {}  # of each member, by place
        for place, step in enumerate(steps):
            episode = episodes[step.piece]
            if isinstance(episode, Exception):
                read[place] = FailedSample(episode)
            else:
                asked.setdefault(step.piece.member, {})[place] = (episode, step.frame, step.reader)
        for member, those in asked.items():
            samples, _, shape = self._readings[member]
            into = [] if rows is None else [rows[place] for place in those]
            if shape is not None:
                into = [shape.row(row, self._given[member] or {}) for row in into]
            made = self._read(samples, [*those.values()], into)
            for place, each in zip(those, made, strict=True):
                read[place] = each
            del made, each
        read_at = time.perf_counter()
        results: list[Any] = []
        with self._counted() if self._has_transform else nullcontext():  # to count costs 20 microseconds
            for place, step in enumerate(steps):
                if is_given_up():
                    return [{} for _ in steps]
                results.append(self._finish(step, read.popleft(), None if rows is None else rows[place]))
        transforming_seconds = time.perf_counter() - read_at if self._has_transform else 0.0
        # Of threads that add at once one may be lost. What is older counts less.
        self.weights = {
            Cause.DECODING: 0.9 * self.weights.get(Cause.DECODING, 0.0) + read_at - begun_at,
            Cause.TRANSFORM: 0.9 * self.weights.get(Cause.TRANSFORM, 0.0) + transforming_seconds,
        }
        return results

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count this block as a transform's; of threads that add at once one may be lost."""
        with closing(ThreadClock()) as clock:
            worked, ran = clock.seconds(), time.thread_time()
            yield
            before = self.transform_seconds
            worked_seconds = max(0.0, clock.seconds() - worked)
            self.transform_seconds = before[0] + worked_seconds, before[1] + time.thread_time() - ran

    def _read(self, samples: SampleMaker, asked: list[Asked], rows: list[BatchRow]) -> Sequence[Any]:
        try:
            if rows:
                samples.write(asked, rows)
                return rows
            return samples.build(asked)
        except DoesNotFit:
            return self._read(samples, asked, [])
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            if len(asked) == 1:
                return [FailedSample(kept(error))]
        return [self._read(samples, [one], rows[place : place + 1])[0] for place, one in enumerate(asked)]

    def _finish(self, step: Step, sample: Any, row: BatchRow | None) -> Any:  # noqa: ANN401
        member = step.piece.member
        _, transform, shape = self._readings[member]
        if isinstance(sample, FailedSample):
            return sample
        if row is not None and isinstance(sample, BatchRow):
            if shape is not None:
                shape.complete(member, row)
            if self._marks_padding:
                row.put(PADDING, step.is_padding)
            return row
        if transform is not None:
            sample = transformed(transform, sample)
            if isinstance(sample, FailedSample):
                return sample
        try:
            if shape is not None:
                sample = shape.apply(member, sample)
            if self._marks_padding:
                mark_padding(sample, step)
        except ConfigError as error:
            return FailedSample(kept(error))
        return sample if self._transform is None else transformed(self._transform, sample)


def mark_padding(sample: Sample, step: Step) -> None:
    """Mark whether a sample is padding. ConfigError where a feature has the mark's name."""
    import torch

    if PADDING in sample:
        raise ConfigError(
            'uneven_ends="pad" tells by is_padding whether a sample is some, and that is the name of a feature here: '
            'leave that out by features=, or choose "drop" or "uneven"'
        )
    sample[PADDING] = torch.tensor(step.is_padding)


def are_one(transform: Transform | None, other: Transform | None) -> bool:
    """Return whether they are one object, or one method of it. Others aren't compared: ``==`` may be of tensors."""
    return transform is other or (isinstance(transform, MethodType) and transform == other)


def transformed(transform: Transform, sample: Sample) -> Sample | FailedSample:
    """Return what the user's function makes of a sample, or the error that it raised."""
    try:
        made: Sample | None = transform(sample)
    except (StopIteration, StopAsyncIteration) as stop:  # raised by the iterator it would be a silent end: PEP 479
        failure = RuntimeError(f"the transform raised {type(stop).__name__}")
        failure.__cause__ = stop
        return FailedSample(failure, by_transform=True)
    except BaseException as failure:  # noqa: BLE001  the user's own; raised by the iterator as it is
        return FailedSample(failure, by_transform=True)
    if made is None:
        error = UsageError(f"the transform {transform!r:.80} gave None: end it by `return sample`")
        return FailedSample(error, by_transform=True)
    return made

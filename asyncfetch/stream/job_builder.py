"""The samples of a job, made by one call in a decode thread; each fails for itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

from asyncfetch.errors import ConfigError, UsageError
from asyncfetch.lerobot import DoesNotFit, Field
from asyncfetch.observe.waits import Cause
from asyncfetch.runtime.concurrently import kept
from asyncfetch.runtime.threads import ThreadClock
from asyncfetch.stream.batch import BatchRow, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncfetch.lerobot import Asked, HeldEpisode, Sample, SampleBuilder
    from asyncfetch.order.line import Piece
    from asyncfetch.order.plan import Step

__all__ = ["PADDING", "Builder", "FailedSample", "JobBuilder", "Transform", "are_one", "mark_padding", "transformed"]

PADDING = "is_padding"
"""Key of what tells of a sample whether it is padding."""

Transform = Callable[["Sample"], "Sample"]
"""Called in a decode thread on every sample; what it returns is delivered."""


@dataclass(frozen=True, slots=True)
class FailedSample:
    """The error that a step came to in place of a sample, which may be anything that a transform returns.

    No frame hangs on an error of ours. Those in the traceback of a transform's, and those that called them, hold it
    only until it is delivered. A cycle would keep all that the consumer's own frames hold until the collector comes by:
    a whole stream, with threads and files.
    """

    error: BaseException
    by_transform: bool = False
    """True if the transform raised it: it then says nothing of the data, whatever its type."""


class Builder(Protocol):
    """Makes the samples of a pass."""

    @property
    def sample_bytes(self) -> int:
        """About what one takes; the largest, where they differ."""
        ...

    @property
    def weights(self) -> Mapping[Cause, float]:
        """The time of threads so far, divided between reading samples and transforming them."""
        ...

    @property
    def transform_seconds(self) -> tuple[float, float]:
        """Those so far in which threads ran, or waited for a core, in the user's own functions; and those they ran."""
        ...

    def layout(self, step: Step) -> Layout | None:
        """Return the layout of a step's sample, and of others in a batch with it; None where a transform makes it."""
        ...

    def build(
        self,
        steps: Sequence[Step],
        episodes: Mapping[Piece, HeldEpisode | Exception],
        is_given_up: Callable[[], bool],
        rows: Sequence[BatchRow] | None = None,
    ) -> list[Any]:
        """See JobBuilder."""
        ...


class JobBuilder:
    """Makes samples of one dataset.

    Args:
        samples: Reads them from episodes.
        transform: The user's own.
        marks_padding: Whether samples say if they are padding.
    """

    def __init__(self, samples: SampleBuilder, transform: Transform | None, *, marks_padding: bool) -> None:
        self._samples = samples
        self._transform = transform
        self._marks_padding = marks_padding
        self._weights = {Cause.DECODING: 1e-9}
        self._transform_time = TransformTime(transform)

    @property
    def sample_bytes(self) -> int:
        """About what one sample takes."""
        return self._samples.sample_bytes

    @property
    def weights(self) -> Mapping[Cause, float]:
        """See Builder."""
        return self._weights

    @property
    def transform_seconds(self) -> tuple[float, float]:
        """See Builder."""
        return self._transform_time.worked_seconds, self._transform_time.ran_seconds

    def layout(self, step: Step | None = None) -> Layout | None:
        """See Builder."""
        fields = self._samples.layout()
        if self._transform is not None or PADDING in fields:
            return None
        if self._marks_padding:
            fields[PADDING] = Field("bool")
        return Layout(fields, self._samples.pictures)

    def build(
        self,
        steps: Sequence[Step],
        episodes: Mapping[Piece, HeldEpisode | Exception],
        is_given_up: Callable[[], bool],
        rows: Sequence[BatchRow] | None = None,
    ) -> list[Any]:
        """Return what each step comes to: a sample, its row in a batch, or ``FailedSample``. Slow: call it in a thread.

        Args:
            steps: What to read.
            episodes: By position in the selection, or why one can't be had.
            is_given_up: Whether nobody wants it any more. Asked before each sample is transformed, which may take long;
                empty samples are the answer then.
            rows: Where to write them; where one of them doesn't fit, all are samples.
        """
        asked: list[Asked] = []
        into: list[BatchRow] = []
        for place, step in enumerate(steps):
            episode = episodes[step.piece]
            if not isinstance(episode, Exception):
                asked.append((episode, step.frame, step.reader))
                into += [] if rows is None else [rows[place]]
        begun_at = time.perf_counter()
        read = deque(self._read(asked, into))  # each is let go of as it is taken: see ``FailedSample``
        read_at = time.perf_counter()
        results: list[Sample | FailedSample] = []
        with self._transform_time.counted():
            for step in steps:
                if is_given_up():
                    return [{} for _ in steps]
                episode = episodes[step.piece]
                results.append(
                    self._finish(step, FailedSample(episode) if isinstance(episode, Exception) else read.popleft())
                )
        transforming_seconds = 0.0 if self._transform is None else time.perf_counter() - read_at
        self._weights = divided(self._weights, read_at - begun_at, transforming_seconds)
        return results

    def _read(self, asked: list[Asked], rows: list[BatchRow]) -> Sequence[Any]:
        try:
            if rows:
                self._samples.write(asked, rows)
                return rows
            return self._samples.build(asked)
        except DoesNotFit:
            return self._read(asked, [])
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            if len(asked) == 1:
                return [FailedSample(kept(error))]
        return [self._read([one], rows[place : place + 1])[0] for place, one in enumerate(asked)]

    def _finish(self, step: Step, sample: Any) -> Any:  # noqa: ANN401
        if isinstance(sample, FailedSample):
            return sample
        if isinstance(sample, BatchRow):
            if self._marks_padding:
                sample.put(PADDING, step.is_padding)
            return sample
        if self._marks_padding:
            try:
                mark_padding(sample, step)
            except ConfigError as error:
                return FailedSample(kept(error))
        return sample if self._transform is None else transformed(self._transform, sample)


class TransformTime:
    """The time of threads in a user's own function, to be entered around its calls. Several threads may at once.

    Args:
        transform: None is never called: then nothing is counted, for it costs 20 microseconds.
    """

    def __init__(self, transform: Transform | None) -> None:
        self._counts = transform is not None
        self.worked_seconds = self.ran_seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count this block; of threads that add at once one may be lost."""
        if not self._counts:
            yield
            return
        with closing(ThreadClock()) as clock:
            worked, ran = clock.seconds(), time.thread_time()
            yield
            self.worked_seconds += max(0.0, clock.seconds() - worked)
            self.ran_seconds += time.thread_time() - ran


def divided(weights: Mapping[Cause, float], reading_seconds: float, transform_seconds: float) -> dict[Cause, float]:
    """Return the weights with these seconds; of threads that add at once one may be lost. What is older counts less."""
    return {
        Cause.DECODING: 0.9 * weights.get(Cause.DECODING, 0.0) + reading_seconds,
        Cause.TRANSFORM: 0.9 * weights.get(Cause.TRANSFORM, 0.0) + transform_seconds,
    }


def mark_padding(sample: Sample, step: Step) -> None:
    """Let the sample say whether it is padding. ConfigError where something of it has that name."""
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

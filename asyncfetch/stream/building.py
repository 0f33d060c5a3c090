"""The samples of a job, made by one call in a decode thread; each fails for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Protocol

from asyncfetch.errors import ConfigError
from asyncfetch.runtime.failures import kept

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncfetch.lerobot import Asked, HeldEpisode, Sample, SampleBuilder
    from asyncfetch.stream.order import Step

__all__ = ["Builder", "Failed", "JobBuilder", "Transform", "are_one", "mark_padding", "transformed"]

Transform = Callable[["Sample"], "Sample"]
"""Called in a decode thread on every sample; what it returns is delivered."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a step came to in place of a sample, which may be anything that a transform returns.

    No frame hangs on an error of ours. Those in the traceback of a transform's, and those that called them, hold it
    only until it is delivered. A cycle would keep all that the consumer's own frames hold until the collector comes by:
    a whole stream, with threads and files.
    """

    error: BaseException
    by_transform: bool = False
    """Whether the transform raised it: it then says nothing of the data, whatever its type."""


class Builder(Protocol):
    """Makes the samples of a pass."""

    @property
    def sample_bytes(self) -> int:
        """About what one takes; the largest, where they differ."""
        ...

    def build(
        self,
        steps: Sequence[Step],
        episodes: Mapping[int, HeldEpisode | Exception],
        is_given_up: Callable[[], bool],
    ) -> list[Sample | Failed]:
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

    @property
    def sample_bytes(self) -> int:
        """About what one sample takes."""
        return self._samples.sample_bytes

    def build(
        self,
        steps: Sequence[Step],
        episodes: Mapping[int, HeldEpisode | Exception],
        is_given_up: Callable[[], bool],
    ) -> list[Sample | Failed]:
        """What each step comes to. Takes a while: call it in a thread.

        Args:
            steps: What to read.
            episodes: By position in the selection, or why one can't be had.
            is_given_up: Whether nobody wants it any more. Asked before each sample is transformed, which may take long;
                empty samples are the answer then.
        """
        asked: list[Asked] = []
        for step in steps:
            episode = episodes[step.episode]
            if not isinstance(episode, Exception):
                asked.append((episode, step.frame, step.reader))
        read = deque(self._read(asked))  # each is let go of as it is taken: see ``Failed``
        results: list[Sample | Failed] = []
        for step in steps:
            if is_given_up():
                return [{} for _ in steps]
            episode = episodes[step.episode]
            results.append(self._finish(step, Failed(episode) if isinstance(episode, Exception) else read.popleft()))
        return results

    def _read(self, asked: list[Asked]) -> Sequence[Sample | Failed]:
        try:
            return self._samples.build(asked)
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            if len(asked) == 1:
                return [Failed(kept(error))]
        return [self._read([one])[0] for one in asked]

    def _finish(self, step: Step, sample: Sample | Failed) -> Sample | Failed:
        if isinstance(sample, Failed):
            return sample
        if self._marks_padding:
            try:
                mark_padding(sample, step)
            except ConfigError as error:
                return Failed(kept(error))
        return sample if self._transform is None else transformed(self._transform, sample)


def mark_padding(sample: Sample, step: Step) -> None:
    """Let the sample say whether it is padding. ConfigError where something of it has that name."""
    import torch

    if "is_padding" in sample:
        raise ConfigError(
            'uneven_ends="pad" tells by is_padding whether a sample is some, and that is the name of a feature here: '
            'leave that out by features=, or choose "drop" or "uneven"'
        )
    sample["is_padding"] = torch.tensor(step.is_padding)


def are_one(transform: Transform | None, other: Transform | None) -> bool:
    """Whether they are one object, or one method of it. Others aren't compared: their ``==`` may be of tensors."""
    return transform is other or (isinstance(transform, MethodType) and transform == other)


def transformed(transform: Transform, sample: Sample) -> Sample | Failed:
    """What the user's function makes of a sample, or the error that it raised."""
    try:
        return transform(sample)
    except (StopIteration, StopAsyncIteration) as stop:  # raised by the iterator it would be a silent end: PEP 479
        failure = RuntimeError(f"the transform raised {type(stop).__name__}")
        failure.__cause__ = stop
        return Failed(failure, by_transform=True)
    except BaseException as failure:  # noqa: BLE001  the user's own; raised by the iterator as it is
        return Failed(failure, by_transform=True)

"""Batches of one shape, where the samples of a stream have several.

Samples wait in a bucket for each shape, in the order in which they come. A full bucket is a batch. Where more of them
wait than memory is for, the bucket of the sample that has waited longest is a smaller batch; so are all that are left
at the end.

A state says which samples were given, and which of those before them still wait. A pass that resumes there begins with
the waiting ones, which so fill the same buckets: its batches are those of a pass that was never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from asyncfetch.stream import StreamIterator

BucketBy = Literal["frames", "shape"]

WAITING_BATCHES = 16
"""The samples of so many batches wait at most, of all shapes together."""

_END = object()


def bucket_of(sample: Any, by: BucketBy) -> Hashable:  # noqa: ANN401 - what a transform returns
    """Return what the samples of one batch have in common: the shapes of their pictures, or how many these are."""
    if not isinstance(sample, Mapping):
        raise ConfigError(
            f"bucket_by={by!r} looks at the tensors of dicts, not at {type(sample).__name__}: let the transform return "
            "a dict"
        )
    pictures = {key: value.shape for key, value in sample.items() if isinstance(value, torch.Tensor) and value.ndim > 2}
    if by == "shape":
        return tuple(pictures.items())
    return tuple((key, shape[0]) for key, shape in pictures.items() if len(shape) > 3)


class _Buckets:
    """Samples that wait, by what they have in common; the bucket that has waited longest is the first one."""

    def __init__(self) -> None:
        self._buckets: dict[Hashable, dict[range, Any]] = {}
        self._bytes: dict[range, int] = {}
        self.nbytes = 0
        """Memory of all samples."""

    def __len__(self) -> int:
        """Return how many samples wait."""
        return len(self._bytes)

    @property
    def numbers(self) -> list[int]:
        """Their numbers in the consumer's part of the epoch."""
        return list(chain(*self._bytes))

    @property
    def keys(self) -> list[Hashable]:
        """The keys of all buckets."""
        return list(self._buckets)

    def add(self, key: Hashable, numbers: range, sample: Any) -> int:  # noqa: ANN401
        """Put a sample into its bucket, and return how many are there."""
        bucket = self._buckets.setdefault(key, {})
        bucket[numbers] = sample
        tensors = (value for value in sample.values() if isinstance(value, torch.Tensor))
        self._bytes[numbers] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.nbytes += self._bytes[numbers]
        return len(bucket)

    def take(self, key: Hashable) -> dict[range, Any]:
        """Return a bucket, which is no more."""
        bucket = self._buckets.pop(key)
        self.nbytes -= sum(self._bytes.pop(numbers) for numbers in bucket)
        return bucket


def bucketed(
    samples: StreamIterator,
    together: Callable[[list[Any]], Any],
    *,
    by: BucketBy,
    size: int,
    least: int,
    max_bytes: int,
    keep: Callable[[StreamIterator | None], None],
) -> Iterator[Any]:
    """Give batches of samples that are alike.

    Args:
        samples: Of one pass.
        together: Makes a batch of samples.
        by: See ``bucket_of``.
        size: Samples of a full batch.
        least: Samples that make a batch; smaller ones are left out.
        max_bytes: Of samples that wait, where they are of several shapes.
        keep: Takes the pass where it has ended, because its last samples were left out, while others wait: only it
            has the state then. Takes None when no more of them wait than make one batch.
    """
    buckets = _Buckets()
    has_more = True
    while has_more:
        came = _END
        try:
            came = next(samples, _END)
            if came is _END:
                keep(samples if len(buckets) else None)
                break
            has_more = samples.__length_hint__() > 0  # as long as all that came counts as given
            key = bucket_of(came, by)
        except BaseException:
            samples.give_but([*buckets.numbers, *([] if came is _END else samples.latest_numbers)])
            raise
        if buckets.add(key, samples.latest_numbers, came) == size:
            yield from _given(samples, buckets, key, together, least)
        # Until there is room: so the samples that wait in a state find as much of it when they come again.
        while len(buckets.keys) > 1 and (len(buckets) >= WAITING_BATCHES * size or buckets.nbytes > max_bytes):
            yield from _given(samples, buckets, buckets.keys[0], together, least)
    while keys := buckets.keys:
        if len(keys) == 1:
            keep(None)
        yield from _given(samples, buckets, keys[0], together, least)
    next(samples, None)  # the pass ends


def _given(
    samples: StreamIterator, buckets: _Buckets, key: Hashable, together: Callable[[list[Any]], Any], least: int
) -> Iterator[Any]:
    bucket = buckets.take(key)
    if len(bucket) < least:
        return
    try:
        with samples.figures.handing_over():
            batch = together(list(bucket.values()))
    except BaseException:  # it was never given
        samples.give_but([*buckets.numbers, *chain(*bucket)])
        raise
    samples.give_but(buckets.numbers)
    yield batch

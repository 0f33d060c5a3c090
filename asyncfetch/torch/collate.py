"""Samples as a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["collate"]


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of samples, by key: tensors of one shape and dtype stacked along a new first dimension, others in lists.

    Unlike torch's ``default_collate`` it takes what can't be stacked as it is: strings, and values of changing length
    such as language annotations. In a loader's worker the stack is made in shared memory, as torch does it. The keys
    are those of the first sample; where another lacks one, its value is None, and the key's values are a list.
    """
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise ConfigError(
                f"a batch is made of dicts, not of {type(sample).__name__}: let the transform return a dict, or take "
                "single samples (batch_size=None here, and a collate_fn of your own)"
            )
    return {key: _together([sample.get(key) for sample in samples]) for key in samples[0]} if samples else {}


def _together(values: list[Any]) -> Any:  # noqa: ANN401
    first = values[0]
    if isinstance(first, torch.Tensor):
        alike = all(
            isinstance(value, torch.Tensor) and value.shape == first.shape and value.dtype == first.dtype
            for value in values
        )
        return default_collate(values) if alike else values
    return values

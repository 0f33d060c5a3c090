"""Statistics of features in the form of `meta/stats.json` and of the ``stats/*`` columns.

A statistic maps min, max, mean, std, count and five quantiles to arrays. Numeric features have one value a component,
pictures one a channel in the shape (C, 1, 1), colours scaled to [0, 1]. ``count`` is the number of frames looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["STATISTICS", "Statistics", "aggregate", "numeric_statistics", "picture_statistics"]

Statistics = dict[str, "NDArray[Any]"]

_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", "count", *_QUANTILES)
"""In the order in which LeRobot writes them."""


def numeric_statistics(values: NDArray[Any]) -> Statistics:
    """Over the first axis of ``values``, which holds at least one frame."""
    rows = values[:, None] if values.ndim == 1 else values
    return _statistics(rows.astype(np.float64), frames=len(values))


def picture_statistics(pictures: NDArray[Any]) -> Statistics:
    """Over at least one picture (N, H, W, C), each channel on its own; depth, in floats, keeps its unit."""
    channels = pictures.shape[-1]
    scale = 255.0 if pictures.dtype == np.uint8 else 1.0
    flat = _statistics(pictures.reshape(-1, channels) / scale, frames=len(pictures))
    return {name: value if name == "count" else value.reshape(channels, 1, 1) for name, value in flat.items()}


def aggregate(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of at least one part together; quantiles, as LeRobot's, are the parts' means weighted by count."""
    counts = np.concatenate([part["count"] for part in parts])
    shares = counts / counts.sum()

    def weighted(name: str) -> NDArray[Any]:
        return np.tensordot(shares, np.stack([part[name] for part in parts]), axes=1)

    mean = weighted("mean")
    variance = np.tensordot(shares, np.stack([part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in parts]), axes=1)
    return {
        "min": np.min([part["min"] for part in parts], axis=0),
        "max": np.max([part["max"] for part in parts], axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": counts.sum(keepdims=True),
        **{name: weighted(name) for name in _QUANTILES},
    }


def _statistics(values: NDArray[np.float64], frames: int) -> Statistics:
    return {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([frames]),
        **dict(zip(_QUANTILES, np.quantile(values, list(_QUANTILES.values()), axis=0), strict=True)),
    }

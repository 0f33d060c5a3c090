"""Statistics of features, as ``meta/stats.json`` and the ``stats/*`` columns have them. Pure.

Those of numbers are taken from the rows. Those of pictures would need decoding, so they are combined: counts, means and
deviations exactly, extremes and quantiles as an envelope, since quantiles can't be recovered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["QUANTILES", "STATISTICS", "combine", "of_rows"]

Statistics = dict[str, "NDArray[Any]"]

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", "count", *QUANTILES)
"""In the order in which LeRobot writes them."""
_LOWER = ("min", "q01", "q10", "q50")
"""Where the envelope is the least of the parts' values, as LeRobot has it; of the others it is the greatest."""


def of_rows(values: NDArray[Any]) -> Statistics:
    """Over the first axis, which holds at least one row; scalars count as one component."""
    rows = (values[:, None] if values.ndim == 1 else values).astype(np.float64)
    return {
        "min": rows.min(axis=0),
        "max": rows.max(axis=0),
        "mean": rows.mean(axis=0),
        "std": rows.std(axis=0),
        "count": np.array([len(rows)]),
        **dict(zip(QUANTILES, np.quantile(rows, list(QUANTILES.values()), axis=0), strict=True)),
    }


def combine(parts: Sequence[Mapping[str, Any]]) -> Statistics:
    """The statistics of at least one part together. A quantile that a part lacks is left out."""
    arrays = [{name: np.asarray(part[name], np.float64) for name in STATISTICS if name in part} for part in parts]
    counts = np.array([part["count"].item() for part in arrays])
    shares = counts / counts.sum()

    def weighted(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.tensordot(shares, np.stack(values), axes=1)

    mean = weighted([part["mean"] for part in arrays])
    variance = weighted([part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in arrays])
    combined = {"mean": mean, "std": np.sqrt(variance), "count": np.array([int(counts.sum())])}
    for name in ("min", "max", *QUANTILES):
        if all(name in part for part in arrays):
            values = np.stack([part[name] for part in arrays])
            combined[name] = values.min(axis=0) if name in _LOWER else values.max(axis=0)
    return {name: combined[name] for name in STATISTICS if name in combined}

"""Statistics of features, as ``meta/stats.json`` and the ``stats/*`` columns have them. Pure.

Those of numbers are taken from the rows, quantiles too: parts are sorted where they are read, and sorted parts are
merged. Those of pictures would need decoding, so they are combined: counts, means and deviations exactly, extremes and
quantiles as an envelope, since quantiles can't be recovered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["QUANTILES", "STATISTICS", "Distribution", "combine"]

Statistics = dict[str, "NDArray[Any]"]

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", "count", *QUANTILES)
"""In the order in which LeRobot writes them."""
_LOWER = ("min", "q01", "q10", "q50")
"""Where the envelope is the least of the parts' values, as LeRobot has it; of the others it is the greatest."""
_SHARES = np.array(list(QUANTILES.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """All values of a feature in some rows, by component."""

    ordered: NDArray[Any]
    """(\\*shape, rows), ascending in the last axis, of the stored dtype; NaN last."""
    mean: NDArray[np.float64]
    """(\\*shape)."""
    squares: NDArray[np.float64]
    """(\\*shape): sum of the squared distances from the mean."""

    @classmethod
    def of_rows(cls, values: NDArray[Any]) -> Distribution:
        """Over the first axis, which holds at least one row; scalars count as one component."""
        rows = np.ascontiguousarray(np.moveaxis(values[:, None] if values.ndim == 1 else values, 0, -1))
        exact = rows.astype(np.float64)
        with np.errstate(invalid="ignore"):  # of infinities the deviation is NaN
            mean = exact.mean(axis=-1)
            return cls(np.sort(rows, axis=-1), mean, ((exact - mean[..., None]) ** 2).sum(axis=-1))

    def __add__(self, other: Distribution) -> Distribution:
        n, m = self.ordered.shape[-1], other.ordered.shape[-1]
        ordered = np.concatenate((self.ordered, other.ordered), axis=-1)
        ordered.sort(axis=-1, kind="stable")  # which merges what is sorted
        with np.errstate(invalid="ignore"):
            apart = other.mean - self.mean
            squares = self.squares + other.squares + apart**2 * (n * m / (n + m))
            return Distribution(ordered, self.mean + apart * (m / (n + m)), squares)

    def statistics(self) -> Statistics:
        """As LeRobot names them. Quantiles are linear between neighbours."""
        count = self.ordered.shape[-1]
        position = _SHARES * (count - 1)
        below = np.floor(position).astype(np.int64)
        low = self.ordered[..., below].astype(np.float64)
        high = self.ordered[..., np.minimum(below + 1, count - 1)].astype(np.float64)
        with np.errstate(invalid="ignore"):
            quantiles = low + (high - low) * (position - below)
        least, greatest = self.ordered[..., 0].astype(np.float64), self.ordered[..., -1].astype(np.float64)
        unknown = np.isnan(greatest)
        if unknown.any():  # one NaN makes every statistic NaN
            least = np.where(unknown, np.nan, least)
            quantiles = np.where(unknown[..., None], np.nan, quantiles)
        return {
            "min": least,
            "max": greatest,
            "mean": self.mean,
            "std": np.sqrt(self.squares / count),
            "count": np.array([count]),
            **{name: quantiles[..., at] for at, name in enumerate(QUANTILES)},
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

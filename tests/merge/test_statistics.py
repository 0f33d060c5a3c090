"""Statistics of numbers: those of parts put together are those of the whole."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncfetch.merge.statistics import QUANTILES, Distribution

if TYPE_CHECKING:
    from numpy.typing import NDArray

CASES = {
    "vectors": np.random.default_rng(0).normal(size=(1000, 7)).astype(np.float32),
    "numbers": np.random.default_rng(1).integers(-50, 50, size=(301,)),
    "far from zero": np.random.default_rng(2).normal(loc=1e6, scale=1e-3, size=(257, 1)),
    "yes and no": np.random.default_rng(3).integers(0, 2, size=(64,)).astype(bool),
    "matrices": np.random.default_rng(4).normal(size=(33, 2, 3)),
    "one row": np.array([[4.0, 5.0]]),
    "a NaN": np.array([[1.0, 2.0], [np.nan, 3.0], [0.0, 4.0]]),
}


@pytest.mark.parametrize("values", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_parts_together_are_the_whole(values: NDArray[Any], num_parts: int) -> None:
    parts = [part for part in np.array_split(values, num_parts) if len(part)]
    taken = reduce(add, map(Distribution.of_rows, parts)).statistics()
    rows = (values[:, None] if values.ndim == 1 else values).astype(np.float64)
    expected = {name: getattr(rows, name)(axis=0) for name in ("min", "max", "mean", "std")}
    expected |= {name: np.quantile(rows, share, axis=0) for name, share in QUANTILES.items()}
    assert taken.pop("count") == [len(values)]
    assert taken.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(taken[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


def test_infinities_are_values_too() -> None:
    taken = reduce(add, map(Distribution.of_rows, (np.array([1.0, np.inf]), np.array([-np.inf, 2.0])))).statistics()
    assert [taken[name].item() for name in ("min", "q50", "max")] == [-np.inf, 1.5, np.inf]
    assert np.isnan(taken["std"])

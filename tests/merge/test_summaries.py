"""Statistics of numbers: those of parts put together are those of the whole."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from asyncfetch.merge import summaries
from asyncfetch.merge.summaries import (
    QUANTILES,
    QuantileSearch,
    Summary,
    combine,
    components_of,
    count_prefixes,
    describe,
    keys_of,
    quantile_ranks,
    quantiles_between,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from asyncfetch.merge.summaries import PrefixCounters

CASES = {
    "vectors": np.random.default_rng(0).normal(size=(1000, 7)).astype(np.float32),
    "numbers": np.random.default_rng(1).integers(-50, 50, size=(301,)),
    "large numbers": np.random.default_rng(1).integers(-(2**60), 2**60, size=(301,)),
    "far from zero": np.random.default_rng(2).normal(loc=1e6, scale=1e-3, size=(257, 1)),
    "yes and no": np.random.default_rng(3).integers(0, 2, size=(64,)).astype(bool),
    "matrices": np.random.default_rng(4).normal(size=(33, 2, 3)),
    "one row": np.array([[4.0, 5.0]]),
    "a NaN": np.array([[1.0, 2.0], [np.nan, 3.0], [0.0, 4.0]]),
    "zeros of both signs": np.array([0.0, -0.0, -0.0, 1.0, -1e-310]),
}


def total(counted: list[dict[str, list[PrefixCounters]]]) -> Mapping[str, Sequence[PrefixCounters]]:
    return reduce(add, (Summary(counted=one) for one in counted)).counted


def search(parts: list[NDArray[Any]], count: int) -> tuple[NDArray[np.float64], int]:
    """The values that the quantiles lie between, and in how many rounds they were found. Parts: (components, rows)."""
    found, rounds = QuantileSearch(count, quantile_ranks(count)), 1
    counted = [{"x": [count_prefixes(own, found.shift) for own in keys_of(part)]} for part in parts]
    found.learn(total(counted))
    while found.wanted:
        wanted, rounds = found.wanted["x"], rounds + 1
        counted = [
            {"x": [count_prefixes(own, found.shift, place) for own, place in zip(keys_of(part), wanted, strict=True)]}
            for part in parts
        ]
        found.learn(total(counted))
    return found.values("x"), rounds


@pytest.mark.parametrize("few_rows", [0, 65_536], ids=["in rounds", "at once"])
@pytest.mark.parametrize("values", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_parts_together_are_the_whole(
    values: NDArray[Any], num_parts: int, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "_FEW_ROWS", few_rows)
    parts = [components_of(part) for part in np.array_split(values, num_parts) if len(part)]
    taken = combine([describe(part) for part in parts])
    assert taken is not None
    ordered, rounds = search([part.reshape(-1, part.shape[-1]) for part in parts], len(values))
    assert few_rows == 0 or rounds == 1
    taken |= quantiles_between(ordered.reshape(*taken["min"].shape, -1), len(values), taken["min"])
    rows = (values[:, None] if values.ndim == 1 else values).astype(np.float64)
    expected = {name: getattr(rows, name)(axis=0) for name in ("min", "max", "mean", "std")}
    expected |= {name: np.quantile(rows, share, axis=0) for name, share in QUANTILES.items()}
    assert taken.pop("count") == [len(values)]
    assert taken.keys() == expected.keys()
    described = describe(components_of(values))
    for name, value in expected.items():
        np.testing.assert_allclose(taken[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
        np.testing.assert_allclose(described[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


NUMBERS = {
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "int64": st.integers(-(2**53), 2**53),
}


@pytest.mark.parametrize("dtype", NUMBERS)
@given(data=st.data())
def test_places_in_the_order_are_found_exactly(dtype: str, data: st.DataObject) -> None:
    """Whatever is counted together. float32 takes two rounds, which read no row more than they must."""
    values = data.draw(arrays(dtype, st.integers(1, 60), elements=NUMBERS[dtype]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summaries, "_FEW_ROWS", 0)
        ordered, rounds = search([part[None] for part in np.split(values, cuts)], len(values))
    np.testing.assert_array_equal(ordered[0], np.sort(values)[quantile_ranks(len(values))].astype(np.float64))
    assert rounds <= (2 if dtype == "float32" else 4)


def test_counts_do_not_grow_with_the_rows() -> None:
    """A million different values: no round counts more than some thousand bins of them."""
    values = np.random.default_rng(0).normal(size=(1, 1_000_000)).astype(np.float32)
    keys = keys_of(values)[0]
    found = QuantileSearch(keys.size, quantile_ranks(keys.size))
    first = count_prefixes(keys, found.shift)
    found.learn({"x": [first]})
    second = count_prefixes(keys, found.shift, found.wanted["x"][0])
    assert len(np.unique(values)) > 900_000
    assert len(first.bins) < 50_000
    assert len(second.bins) < 5_000


def test_infinities_are_values_too() -> None:
    taken = describe(components_of(np.array([1.0, np.inf, -np.inf, 2.0])))
    assert [taken[name].item() for name in ("min", "q50", "max")] == [-np.inf, 1.5, np.inf]
    assert np.isnan(taken["std"])

"""Numbers from columns of whatever type they are stored in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from asyncfetch.errors import FormatError
from asyncfetch.tables.columns import to_integers

FLOATS = [(pa.float16(), 11), (pa.float32(), 24), (pa.float64(), 53)]
"""Types, and the bits of a whole number that each holds."""


def column(values: list[float | None], kind: pa.DataType) -> pa.ChunkedArray[Any]:
    dtype: Any = kind.to_pandas_dtype()  # Arrow makes float16 of numpy's alone
    return pa.chunked_array([pa.array([None if value is None else dtype(value) for value in values], kind)])


@pytest.mark.parametrize(("kind", "bits"), FLOATS, ids=str)
def test_whole_numbers_of_any_float(kind: pa.DataType, bits: int) -> None:
    values = [0, 1, -3, 2**bits, -(2**bits)]
    assert to_integers(column([*values], kind), "c", "u").tolist() == values
    assert to_integers(column([7, None], kind), "c", "u", missing=-1).tolist() == [7, -1]
    assert to_integers(column([7, np.nan], kind), "c", "u", missing=-1).tolist() == [7, -1]
    assert to_integers(column([], kind), "c", "u").tolist() == []


@pytest.mark.parametrize(("kind", "bits"), FLOATS, ids=str)
def test_ambiguous_float_is_refused(kind: pa.DataType, bits: int) -> None:
    for value in (np.inf, -np.inf, 0.5, 2**bits + 2, -(2**bits) - 2):
        with pytest.raises(FormatError, match=rf"column c of u must hold whole numbers; row 1 is .*, stored as {kind}"):
            to_integers(column([1, value], kind), "c", "u")

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.tables.thrift import MAX_DEPTH, Long, read_struct, write_struct

NUMBERS = st.integers(0, 2**31 - 1)
VALUES = st.recursive(
    NUMBERS | NUMBERS.map(Long) | st.binary(max_size=300),
    lambda inner: (
        st.dictionaries(st.integers(1, 15), inner, max_size=5)
        | st.lists(NUMBERS, min_size=1, max_size=40)
        | st.lists(st.binary(max_size=9), min_size=1, max_size=20)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.integers(1, 15), VALUES, max_size=8), st.binary(max_size=9))
def test_structs_are_read_as_they_were_written(fields: dict[int, Any], after: bytes) -> None:
    written = write_struct(fields)
    assert read_struct(memoryview(b"before" + written + after), 6) == (fields, 6 + len(written))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_struct_are_refused_or_read(data: bytes) -> None:
    try:
        _, end = read_struct(memoryview(data))
    except (IndexError, ValueError):
        return
    assert 0 < end <= len(data)


def test_structs_deeper_than_any_of_parquet_are_refused() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} structs"):
        read_struct(memoryview(b"\x1c" * 100))

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.cache.disk.layout import BLOCK_BYTES, PAGE_BYTES, Piece, Version, cost_bytes, join, split
from asyncfetch.ranges import ObjectInfo

OFFSETS = st.integers(0, 5 * BLOCK_BYTES)


@given(OFFSETS, OFFSETS)
def test_a_range_is_cut_where_blocks_meet_and_joins_again(one: int, other: int) -> None:
    start, stop = sorted((one, other))
    pieces = split(start, stop)
    assert join(pieces) == ([(start, stop)] if start < stop else [])
    assert all(piece.start // BLOCK_BYTES == (piece.stop - 1) // BLOCK_BYTES for piece in pieces)
    assert len(pieces) <= (stop - start) // BLOCK_BYTES + 2


@given(st.lists(st.booleans(), max_size=6))
def test_what_is_missing_is_asked_for_in_as_few_ranges_as_possible(missing: list[bool]) -> None:
    pieces = [piece for piece, is_missing in zip(split(0, 6 * BLOCK_BYTES), missing, strict=False) if is_missing]
    spans = join(pieces)
    assert sum(stop - start for start, stop in spans) == len(pieces) * BLOCK_BYTES
    assert all(one[1] < other[0] for one, other in pairwise(spans))


@given(OFFSETS, st.integers(1, BLOCK_BYTES))
def test_a_name_tells_its_piece(start: int, size: int) -> None:
    assert Piece.parse(Piece(start, start + size).name) == Piece(start, start + size)


@pytest.mark.parametrize("name", ["", "-", "0-", "-1", "1-1", "2-1", "00-1", "0-1-2", "0x0-1", "g-h", "0-1~", "A-B"])
def test_other_names_are_no_pieces(name: str) -> None:
    assert Piece.parse(name) is None


@given(st.integers(1, 2**40))
def test_files_take_whole_pages(file_bytes: int) -> None:
    assert 0 <= cost_bytes(file_bytes) - file_bytes < PAGE_BYTES
    assert cost_bytes(file_bytes) % PAGE_BYTES == 0


def test_versions_differ_by_object_tag_and_size_and_not_by_signature() -> None:
    info = ObjectInfo("https://host/a", 10, '"tag"')
    assert Version.of(info) == Version.of(ObjectInfo("https://host/a?Signature=1&Expires=2", 10, '"tag"'))
    others = [
        ObjectInfo("https://host/b", 10, '"tag"'),
        ObjectInfo("https://host/a", 11, '"tag"'),
        ObjectInfo("https://host/a", 10, '"other"'),
    ]
    assert len({Version.of(one).digest for one in [info, *others]}) == 4

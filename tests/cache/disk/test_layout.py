from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.cache.disk.layout import (
    BLOCK_BYTES,
    PAGE_BYTES,
    SUBDIRECTORIES,
    BlockSpan,
    VersionFile,
    cost_bytes,
    file_path,
    find_parts,
    is_file_name,
    object_id,
    parse_file_name,
    split,
    subdirectories,
)
from asyncfetch.ranges import ObjectInfo, join_spans

VERSION = VersionFile.of(ObjectInfo("https://data.example.org/a", 100, '"tag"'))
OFFSETS = st.integers(0, 5 * BLOCK_BYTES)


def joined(pieces: list[BlockSpan]) -> list[tuple[int, int]]:
    return join_spans(((piece.start, piece.stop) for piece in pieces), max_gap_bytes=0)


@given(OFFSETS, OFFSETS)
def test_a_range_is_cut_where_blocks_meet_and_joins_again(one: int, other: int) -> None:
    start, stop = sorted((one, other))
    pieces = split(start, stop)
    assert joined(pieces) == ([(start, stop)] if start < stop else [])
    assert all(piece.start // BLOCK_BYTES == (piece.stop - 1) // BLOCK_BYTES for piece in pieces)
    assert len(pieces) <= (stop - start) // BLOCK_BYTES + 2


@given(st.lists(st.booleans(), max_size=6))
def test_missing_bytes_are_asked_for_in_few_ranges(missing: list[bool]) -> None:
    pieces = [piece for piece, is_missing in zip(split(0, 6 * BLOCK_BYTES), missing, strict=False) if is_missing]
    spans = joined(pieces)
    assert sum(stop - start for start, stop in spans) == len(pieces) * BLOCK_BYTES
    assert all(one[1] < other[0] for one, other in pairwise(spans))


@given(OFFSETS, st.integers(1, BLOCK_BYTES))
def test_a_name_tells_its_piece(start: int, size: int) -> None:
    subdirectory, _, name = file_path(VERSION, BlockSpan(start, start + size)).partition("/")
    assert is_file_name(name)
    assert parse_file_name(name) == (VERSION, BlockSpan(start, start + size))
    assert subdirectory in subdirectories(VERSION.object, start, start + 1)


@pytest.mark.parametrize("end", ["", "-", "0-", "-1", "00-1", "0-1-2", "0x0-1", "g-h", "0-1~", "A-B", "0-1\n"])
def test_other_names_are_no_pieces(end: str) -> None:
    assert is_file_name(f"{VERSION.name}-0-1")
    assert not is_file_name(f"{VERSION.name}-{end}")
    assert not is_file_name(end)


@given(OFFSETS, st.integers(1, 2**60))
def test_files_of_a_range_are_in_its_subdirectories(start: int, size: int) -> None:
    found = subdirectories(VERSION.object, start, start + size)
    assert len(found) <= min(SUBDIRECTORIES, size // BLOCK_BYTES + 2)
    for piece in split(start, start + min(size, 5 * BLOCK_BYTES)):
        assert file_path(VERSION, piece).partition("/")[0] in found


def test_a_million_small_objects_are_spread_evenly() -> None:
    counts = Counter[str]()
    for number in range(20 * SUBDIRECTORIES):  # the more, the more even
        version = VersionFile.of(ObjectInfo(f"https://data.example.org/{number}", 1, '"tag"'))
        counts[file_path(version, BlockSpan(0, 1)).partition("/")[0]] += 1
    assert len(counts) == SUBDIRECTORIES
    assert max(counts.values()) < 3 * 20


def test_parts_of_a_piece_are_in_files_of_the_same_version() -> None:
    other = VersionFile.of(ObjectInfo("https://data.example.org/b", 100, '"tag"'))
    names = [f"{VERSION.name}-{end}" for end in ("0-a", "14-1e", "1-1", "notes.txt")] + [f"{other.name}-0-64"]
    assert find_parts(names, VERSION, BlockSpan(10, 20)) == []
    names += [f"{VERSION.name}-{end}" for end in ("9-c", "a-b", "b-f", "11-64")]
    parts = [(BlockSpan(9, 12), (10, 12)), (BlockSpan(11, 15), (12, 15)), (BlockSpan(17, 100), (17, 20))]
    found = find_parts(names, VERSION, BlockSpan(10, 20))
    assert [(file, (part.start, part.stop)) for file, part in found] == parts
    assert find_parts([*names, f"{VERSION.name}-9-20"], VERSION, BlockSpan(10, 20)) == [
        (BlockSpan(9, 32), BlockSpan(10, 20))
    ]


@given(st.integers(1, 2**40))
def test_files_take_whole_pages(file_bytes: int) -> None:
    assert 0 <= cost_bytes(file_bytes) - file_bytes < PAGE_BYTES
    assert cost_bytes(file_bytes) % PAGE_BYTES == 0


def test_versions_differ_by_object_tag_and_size_not_signature() -> None:
    info = ObjectInfo("https://host/a", 10, '"tag"')
    assert VersionFile.of(info) == VersionFile.of(ObjectInfo("https://host/a?Signature=1&Expires=2", 10, '"tag"'))
    others = [
        ObjectInfo("https://host/b", 10, '"tag"'),
        ObjectInfo("https://host/a", 11, '"tag"'),
        ObjectInfo("https://host/a", 10, '"other"'),
    ]
    assert len({VersionFile.of(one) for one in [info, *others]}) == 4


def test_objects_differ_by_endpoint() -> None:
    assert object_id("https://data.example.org/a") == "eed78a5959f262d03b574f93b2f744a8"
    assert object_id("s3://bucket/key") == "16c6f7771024a5cdd314a7db08f50144"
    endpoints = ["", "https://one.example.org", "https://two.example.org"]
    assert len({object_id("s3://bucket/key", endpoint) for endpoint in endpoints}) == 3
    info = ObjectInfo("s3://bucket/key", 10, '"tag"')
    assert len({VersionFile.of(info, endpoint) for endpoint in endpoints}) == 3

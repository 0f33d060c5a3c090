"""Entries by rows: however a table is cut into chunks, it is the same collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.videos import entries as entries_of_tables
from asyncfetch.videos.entry_table import MEASURE, Entries, Place

if TYPE_CHECKING:
    from collections.abc import Iterator

PATHS = st.lists(st.text("aé/b.", min_size=1, max_size=6), min_size=1, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def _short_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries_of_tables, "PART_ROWS", 3)
        yield


def entries(paths: list[str], base: str = "https://a/", cuts: tuple[int, ...] = ()) -> Entries:
    parts = np.split(np.array([base + path for path in paths], object), sorted(cuts))
    chunks = [pa.array(part.tolist(), pa.string()) for part in parts]
    starts = pa.array([float(number) for number in range(len(paths))])
    return Entries(pa.table({"video": pa.chunked_array(chunks, pa.string()), "start": starts}), base)


@given(paths=PATHS, cuts=st.lists(st.integers(0, 12), max_size=3))
def test_chunks_make_no_other_collection(paths: list[str], cuts: list[int]) -> None:
    one, other = entries(paths), entries(paths, cuts=tuple(min(cut, len(paths)) for cut in cuts))
    assert one.fingerprint == other.fingerprint
    assert one.files.tolist() == other.files.tolist() == [list(dict.fromkeys(paths)).index(path) for path in paths]


@given(paths=PATHS, others=PATHS)
def test_the_fingerprint_is_that_of_what_lies_below(paths: list[str], others: list[str]) -> None:
    assert entries(paths).fingerprint == entries(paths, "s3://another/éé/").fingerprint
    below = [path.removeprefix(common_directory(paths)) for path in paths]
    is_same = below == [path.removeprefix(common_directory(others)) for path in others]
    assert (entries(paths).fingerprint == entries(others).fingerprint) == is_same


def common_directory(paths: list[str]) -> str:
    first, last = min(paths), max(paths)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind("/", 0, same) + 1]


def test_an_index_says_lengths_and_places() -> None:
    def measure(name: str, values: list[Any]) -> tuple[Any, Any]:
        return pa.field(f"my_{name}", pa.float64(), metadata={b"asyncfetch": MEASURE + name.encode()}), pa.array(values)

    columns: dict[str, list[Any]] = {
        "seconds": [2.0, 2.0, None],
        "frames": [20, 20, None],
        "span_seconds": [None, 0.5, None],
        "span_frames": [None, 5, None],
        "error": [None, None, 1],
        "height": [40, 60, None],
        "width": [50, 30, None],
        "moov_start": [7, 7, None],
        "moov_bytes": [3, 3, None],
    }
    given = [measure(name, values) for name, values in columns.items()]
    fields: list[Any] = [pa.field("video", pa.string()), pa.field("size", pa.int64()), pa.field("start", pa.float64())]
    arrays: list[Any] = [
        pa.array(["a", "a", "b"]),
        pa.array([100, 100, None]),
        pa.array([None, 1.5, None], pa.float64()),
    ]
    fields, arrays = fields + [field for field, _ in given], arrays + [array for _, array in given]
    found = Entries(pa.table(arrays, schema=pa.schema(fields)), "t")
    seconds, frames = found.lengths()
    assert frames.tolist() == [20, 5, 1]  # what is broken gives a clip, which fails
    assert seconds[:2].tolist() == [2.0, 0.5]
    assert 0 < seconds[2] < 1e-6
    assert found.largest_picture() == (60, 50)
    assert found.own == ()
    assert found.place(0) == Place("a", 0, 100, (7, 10))
    assert found.place(0).as_found() == Place("a")
    assert found.place(2) == Place("b")


def test_entries_without_an_index_have_no_lengths_or_sizes() -> None:
    found = entries(["a", "b"])
    assert np.isnan(found.lengths()).all()
    assert found.largest_picture() is None
    assert found.place(1) == Place("https://a/b")

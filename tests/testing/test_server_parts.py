"""The pure parts of the range server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.testing.contents import ObjectVersion, answer_object, answer_status, asked_range
from asyncfetch.testing.server import CATCH_UP_SECONDS, Pace

SIZES = st.integers(0, 300)
PLACES = st.integers(0, 400)


def answered(header: str, size: int) -> Any:  # noqa: ANN401 -- an Answer; its fields are compared below
    return answer_object("GET", {"Range": header}, ObjectVersion(size, '"x"', "then"))


@given(SIZES, PLACES, PLACES)
def test_first_to_last_is_the_inclusive_slice(size: int, first: int, last: int) -> None:
    answer = answered(f"bytes={first}-{last}", size)
    expected = range(size)[first : last + 1]
    if last < first:
        assert answer.status == 200
    elif not expected:
        assert answer.status == 416
    else:
        assert (answer.status, range(answer.start, answer.stop)) == (206, expected)


@given(SIZES, st.integers(1, 400))
def test_a_suffix_is_the_end_of_the_object(size: int, count: int) -> None:
    answer = answered(f"bytes=-{count}", size)
    assert answer.status == (206 if size else 416)
    if size:
        assert range(answer.start, answer.stop) == range(size)[-count:]


@given(st.text(max_size=40) | st.from_regex(r"bytes *= *[0-9]*-[0-9]*(,[0-9]*-[0-9]*)?", fullmatch=True), SIZES)
def test_any_header_gets_bytes_of_the_object_or_416(header: str, size: int) -> None:
    answer = answered(header, size)
    if answer.status == 416:
        assert answer.headers["Content-Range"] == f"bytes */{size}"
    else:
        assert answer.status in {200, 206}
        assert 0 <= answer.start <= answer.stop <= size
        assert answer.headers["Content-Length"] == str(answer.stop - answer.start)


@pytest.mark.parametrize("header", [None, "", "bytes=" + "9" * 19 + "-", "bytes=-" + "9" * 5000, "bytes=٣-٤"])
def test_nonsense_is_no_range(header: str | None) -> None:
    assert asked_range(header) is None


def test_an_unknown_status_has_a_body_and_204_has_none() -> None:
    assert answer_status(599, "GET").text == b"599 Status\n"
    assert answer_status(204, "GET").text == b""


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=50))
def test_bytes_are_due_when_the_rate_has_had_time_for_them(pieces: list[int]) -> None:
    pace, now, sent = Pace(1000.0, now=5.0), 5.0, 0
    for piece in pieces:
        sent += piece
        now = pace.due(piece, now=now)
        assert now == pytest.approx(5.0 + sent / 1000)


def test_a_late_stream_catches_up_but_does_not_burst() -> None:
    pace = Pace(1000.0, now=0.0)
    assert pace.due(100, now=0.05) == pytest.approx(0.1)  # on time in spite of a late start
    assert pace.due(100, now=60.0) == pytest.approx(60.0 - CATCH_UP_SECONDS + 0.1)
    assert pace.due(100, now=60.0) == pytest.approx(60.0 - CATCH_UP_SECONDS + 0.2)


def test_a_piece_is_small_against_the_rate_and_never_empty() -> None:
    assert Pace(1_000_000, now=0).piece_bytes == 20_000
    assert Pace(0.5, now=0).piece_bytes == 1

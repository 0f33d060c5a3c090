"""Which requests bring a batch of ranges: all of it once, nothing needless, in the order of need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.ranges import HEADERS_BYTES, SHORT_BYTES, ByteRange, Request, plan_requests, split_range

KIB = 1024
URL = "http://h/x"


@st.composite
def byte_ranges(draw: st.DrawFn) -> ByteRange:
    url = draw(st.sampled_from([URL, "http://h/y"]))
    start = draw(st.integers(0, 40)) * draw(st.sampled_from([1, 300, 5_000, 100_000]))
    size = draw(st.sampled_from([None, 0, 1, 700, 20_000, 300_000]))
    if size is None:
        return ByteRange(url, draw(st.sampled_from([start, -start - 1])), None)
    return ByteRange(url, start, start + size)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[ByteRange], dict[str, int], list[Request]]:
    ranges = draw(st.lists(byte_ranges(), max_size=40))
    limits = {
        "max_gap_bytes": draw(st.sampled_from([0, 100, 64 * KIB])),
        "max_span_bytes": draw(st.sampled_from([0, 1000, 400_000])),
        "streams": draw(st.sampled_from([1, 4, 64])),
    }
    return ranges, limits, plan_requests(ranges, **limits)


def unasked_runs(request: Request) -> list[int]:
    """Lengths of the runs of bytes of a request that none of its ranges asks for."""
    runs, reached = [], request.range.start
    for one in sorted(request.serves, key=lambda one: one.start):
        runs.append(max(0, one.start - reached))
        reached = max(reached, one.stop or 0)
    return runs


@given(plans())
def test_every_range_is_served_once(plan: tuple[list[ByteRange], dict[str, int], list[Request]]) -> None:
    ranges, _, requests = plan
    served = [one for request in requests for one in request.serves]
    assert len(served) == len(set(served))
    assert set(served) == set(ranges)


@given(plans())
def test_cutting_the_answer_gives_just_the_asked_bytes(
    plan: tuple[list[ByteRange], dict[str, int], list[Request]],
) -> None:
    for request in plan[2]:
        if len(request.serves) == 1:
            assert request.range == request.serves[0]
            continue
        assert {one.url for one in request.serves} == {request.range.url}
        assert request.range.stop is not None
        body = memoryview(bytes(at * 7 % 251 for at in range(request.range.start, request.range.stop)))
        for one in request.serves:
            assert one.stop is not None
            assert body[request.part(one)] == bytes(at * 7 % 251 for at in range(one.start, one.stop))


@given(plans())
def test_no_joined_request_is_beyond_the_cap(plan: tuple[list[ByteRange], dict[str, int], list[Request]]) -> None:
    _, limits, requests = plan
    for request in requests:
        if len(request.serves) > 1:
            assert request.range.stop is not None
            assert request.range.stop - request.range.start <= limits["max_span_bytes"]


@given(plans())
def test_unasked_bytes_are_bounded_by_the_gap(
    plan: tuple[list[ByteRange], dict[str, int], list[Request]],
) -> None:
    _, limits, requests = plan
    for request in requests:
        if len(request.serves) > 1:
            assert max(unasked_runs(request)) <= limits["max_gap_bytes"]


@given(plans())
def test_requests_follow_the_order_of_first_need(plan: tuple[list[ByteRange], dict[str, int], list[Request]]) -> None:
    ranges, _, requests = plan
    positions = [min(map(ranges.index, request.serves)) for request in requests]
    assert positions == sorted(positions)
    assert all(ranges.index(request.serves[0]) == first for request, first in zip(requests, positions, strict=True))


def plan_of(count: int, size: int, gap: int, *, streams: int, max_span_bytes: int = 1 << 24) -> list[Request]:
    ranges = [ByteRange(URL, at * (size + gap), at * (size + gap) + size) for at in range(count)]
    return plan_requests(ranges, max_gap_bytes=64 * KIB, max_span_bytes=max_span_bytes, streams=streams)


@pytest.mark.parametrize(
    ("size", "gap", "expected"),
    [
        pytest.param(1000, HEADERS_BYTES, 1, id="together"),
        pytest.param(1000, HEADERS_BYTES + 1, 40, id="apart"),
        pytest.param(SHORT_BYTES // 2 + 1, 0, 40, id="together but long"),
    ],
)
def test_idle_streams_are_preferred_to_needless_bytes_and_waits(size: int, gap: int, expected: int) -> None:
    assert len(plan_of(40, size, gap, streams=64)) == expected


@pytest.mark.parametrize(
    ("size", "gap"), [(4 * KIB, 32 * KIB), (256 * KIB, 0), (1000, 64 * KIB)], ids=["gaps", "adjacent", "mostly gaps"]
)
def test_busy_streams_get_one_turn_instead_of_many(size: int, gap: int) -> None:
    assert 48 <= len(plan_of(6_400, size, gap, streams=64, max_span_bytes=1 << 30)) <= 64


def test_gaps_beyond_the_limit_are_never_read_over() -> None:
    assert len(plan_of(1000, 1000, 64 * KIB + 1, streams=4)) == 1000


def test_ranges_are_not_joined_where_that_is_switched_off() -> None:
    assert len(plan_of(1000, 100, 0, streams=4, max_span_bytes=0)) == 1000


def test_a_plan_for_nothing() -> None:
    assert plan_requests([], max_gap_bytes=0, max_span_bytes=0, streams=1) == []


@given(st.integers(0, 1 << 60), st.integers(1, 10_000), st.integers(1, 5_000))
def test_parts_cover_a_range_once_and_are_alike(start: int, size: int, part_bytes: int) -> None:
    parts = split_range(ByteRange(URL, start, start + size), part_bytes)
    sizes = [stop - start for start, stop in parts]
    assert [parts[0][0], *(stop for _, stop in parts)] == [*(start for start, _ in parts), start + size]
    assert len(parts) == -(-size // part_bytes)
    assert max(sizes) <= part_bytes
    assert max(sizes) - min(sizes) <= 1

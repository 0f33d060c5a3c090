"""Quantiles beside those of a sorted list."""

from __future__ import annotations

import pickle
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.observe import Histogram, Quantiles
from asyncfetch.observe.figures import LONGEST_SECONDS, RELATIVE_ERROR, SHORTEST_SECONDS, sum_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WITHIN = RELATIVE_ERROR * (1 + 1e-9)  # and what rounding adds
DURATIONS = st.lists(st.floats(SHORTEST_SECONDS, LONGEST_SECONDS), min_size=1, max_size=300)
NOTHING = Quantiles(count=0, sum_seconds=0, p50_seconds=0, p95_seconds=0, p99_seconds=0, max_seconds=0)


def histogram(durations: Iterable[float]) -> Histogram:
    filled = Histogram()
    for seconds in durations:
        filled.record(seconds)
    return filled


def exactly(durations: Sequence[float], percent: int) -> float:
    """The first in order that at least so many aren't longer than."""
    ordered = sorted(durations)
    return next(each for rank, each in enumerate(ordered, 1) if 100 * rank >= percent * len(ordered))


@given(DURATIONS)
def test_every_quantile_is_within_the_relative_error(durations: list[float]) -> None:
    now = histogram(durations).snapshot()
    assert now.p50_seconds == pytest.approx(exactly(durations, 50), rel=WITHIN, abs=0)
    assert now.p95_seconds == pytest.approx(exactly(durations, 95), rel=WITHIN, abs=0)
    assert now.p99_seconds == pytest.approx(exactly(durations, 99), rel=WITHIN, abs=0)


@given(DURATIONS)
def test_count_sum_and_maximum_are_exact(durations: list[float]) -> None:
    now = histogram(durations).snapshot()
    assert (now.count, now.max_seconds) == (len(durations), max(durations))
    assert now.sum_seconds == pytest.approx(sum(durations))


@given(DURATIONS)
def test_quantiles_are_in_order(durations: list[float]) -> None:
    now = histogram(durations).snapshot()
    assert now.p50_seconds <= now.p95_seconds <= now.p99_seconds <= now.max_seconds


@given(DURATIONS, DURATIONS)
def test_merged_is_as_recorded_together(some: list[float], others: list[float]) -> None:
    merged, other = histogram(some), histogram(others)
    added = sum_of(merged.snapshot(), other.snapshot())
    merged.merge(other)
    together = histogram([*some, *others]).snapshot()
    for now in (merged.snapshot(), added):
        assert now.sum_seconds == pytest.approx(together.sum_seconds)
        assert replace(now, sum_seconds=together.sum_seconds) == together
        assert now.buckets == together.buckets
    assert other.snapshot() == histogram(others).snapshot()


@given(st.lists(st.floats(0, 2 * LONGEST_SECONDS) | st.just(None) | DURATIONS))
def test_the_median_is_the_snapshots_whenever_it_is_asked_for(
    recorded_asked_or_merged: list[float | list[float] | None],
) -> None:
    filled = Histogram()
    for one in [*recorded_asked_or_merged, None]:
        if one is None:
            assert filled.median_seconds == filled.snapshot().p50_seconds
        elif isinstance(one, list):
            filled.merge(histogram(one))
        else:
            filled.record(one)


@pytest.mark.parametrize(
    ("count", "slow", "p95_is_slow", "p99_is_slow"),
    [(20, 1, False, True), (20, 2, True, True), (100, 1, False, False), (100, 2, False, True), (1, 1, True, True)],
)
def test_a_quantile_counts_whole_durations(count: int, slow: int, p95_is_slow: bool, p99_is_slow: bool) -> None:
    now = histogram([0.001] * (count - slow) + [1.0] * slow).snapshot()
    assert (now.p95_seconds > 0.5, now.p99_seconds > 0.5) == (p95_is_slow, p99_is_slow)


def test_empty_histogram_is_all_zeros() -> None:
    assert Histogram().snapshot() == NOTHING
    merged = Histogram()
    merged.merge(Histogram())
    assert merged.snapshot() == NOTHING


@pytest.mark.parametrize("seconds", [0.0, 1e-300, 1e-9, SHORTEST_SECONDS])
def test_too_short_values_count_as_no_longer_than_they_were(seconds: float) -> None:
    now = histogram([seconds]).snapshot()
    assert (now.count, now.p50_seconds, now.p99_seconds, now.max_seconds) == (1, seconds, seconds, seconds)


@pytest.mark.parametrize("seconds", [LONGEST_SECONDS, 86_400.0, 1e300])
def test_durations_longer_than_an_hour_count(seconds: float) -> None:
    now = histogram([0.001, seconds]).snapshot()
    assert now.count == 2
    assert now.p50_seconds == pytest.approx(0.001, rel=WITHIN)
    assert now.p99_seconds == pytest.approx(seconds, rel=WITHIN)


def test_memory_is_bounded() -> None:
    filled = histogram(1.01**number for number in range(-3000, 3000))
    parts = [getattr(filled, name) for name in Histogram.__slots__]
    assert sum(map(sys.getsizeof, [filled, *parts])) < 5000


def test_a_snapshot_does_not_change_and_pickles() -> None:
    filled = histogram([0.5])
    now = filled.snapshot()
    filled.record(0.7)
    assert now == histogram([0.5]).snapshot()
    assert pickle.loads(pickle.dumps(now)) == now


def test_snapshots_are_taken_while_another_thread_records() -> None:
    filled, stop = Histogram(), threading.Event()

    def record() -> None:
        while not stop.is_set():
            filled.record(0.01)

    writer = threading.Thread(target=record)
    writer.start()
    try:
        counts = [filled.snapshot().count for _ in range(300)]
    finally:
        stop.set()
        writer.join()
    assert counts == sorted(counts)
    assert filled.snapshot().sum_seconds == pytest.approx(0.01 * filled.snapshot().count)

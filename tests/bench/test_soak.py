"""When the soak takes a process for one that stands still."""

from __future__ import annotations

from bench.soak import START_SECONDS, STILL_SECONDS, Progress

SOON = 0.1


def test_a_slow_start_is_not_standing_still() -> None:
    started = Progress(5, 0.0)  # another one read five times in its place
    assert not started.seen(5, STILL_SECONDS + SOON).is_late(STILL_SECONDS + SOON)
    late = START_SECONDS + SOON
    assert started.is_late(late)
    assert started.describe(late) == "has read nothing in the 60.1 s since its start"


def test_process_that_has_read_may_pause_for_seconds_only() -> None:
    at_work = Progress(5, 0.0).seen(6, 30.0).seen(6, 35.0)
    assert not at_work.is_late(30.0 + STILL_SECONDS)
    late = 30.0 + STILL_SECONDS + SOON
    assert at_work.is_late(late)
    assert at_work.describe(late) == "has stood still for 10.1 s, after 6 reads in its place"


def test_every_read_counts_as_progress() -> None:
    progress = Progress(0, 0.0)
    for number in range(1, 100):
        progress = progress.seen(number, number * STILL_SECONDS)
        assert not progress.is_late(number * STILL_SECONDS)

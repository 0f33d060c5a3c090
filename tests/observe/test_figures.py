"""Statistics: a line, a table, sums, and what was counted since."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.cache.staging.pool import StagingStatistics
from asyncfetch.decode.executor import DecodePoolStatistics
from asyncfetch.fetch import FetchStatistics, HostStatistics
from asyncfetch.formats import EpisodeCacheStatistics
from asyncfetch.observe import Figures, Histogram, Quantiles
from asyncfetch.observe.figures import counted_since, counts_of, sum_of
from asyncfetch.observe.waits import Cause, Waits
from asyncfetch.stream import PassStatistics
from asyncfetch.tensors.client import ClientStatistics
from asyncfetch.tensors.storage import StorageStatistics

if TYPE_CHECKING:
    from collections.abc import Iterator

durations = st.lists(st.floats(1e-6, 100), max_size=30)


def all_kinds(kind: type[Figures] = Figures) -> Iterator[type[Figures]]:
    for each in kind.__subclasses__():
        yield each
        yield from all_kinds(each)


def of(kind: type[Figures], number: int, **values: Any) -> Any:  # noqa: ANN401 - an instance
    """One whose counts are all this number."""
    needed = [each for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]  # type: ignore[arg-type]
    parts: dict[str, Any] = {each.name: Quantiles() if each.type == "Quantiles" else number for each in needed}
    return kind(**(parts | values))


@pytest.mark.parametrize("name", sorted({kind.__name__ for kind in all_kinds()}))
def test_figures_that_statistics_name_are_there(name: str) -> None:
    for kind in all_kinds():
        if kind.__name__ == name:
            names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
            assert {*kind._of_moment} <= names
            assert {*kind._telling} <= {*names, *dir(kind)}
            assert kind._telling or kind._is_line


@pytest.mark.parametrize("kind", [StagingStatistics, ClientStatistics, StorageStatistics, PassStatistics])
def test_a_line_and_a_table(kind: type[Figures]) -> None:
    statistics = of(kind, 1_234)
    assert len(repr(statistics)) < 200
    assert "\n" not in repr(statistics)
    assert len(str(statistics).splitlines()) >= len(kind._telling)


@given(durations, durations)
def test_quantiles_since_a_snapshot_are_those_begun_then(before: list[float], after: list[float]) -> None:
    whole, later = Histogram(), Histogram()
    for seconds in before:
        whole.record(seconds)
    then = whole.snapshot()
    for seconds in after:
        whole.record(seconds)
        later.record(seconds)
    since, expected = counted_since(whole.snapshot(), then), later.snapshot()
    assert (since.count, since.buckets) == (expected.count, expected.buckets)
    assert since.sum_seconds == pytest.approx(expected.sum_seconds, abs=1e-9)
    for name in ("p50_seconds", "p95_seconds", "p99_seconds", "max_seconds"):
        assert getattr(since, name) == pytest.approx(getattr(expected, name), rel=0.021)
    assert counted_since(then, then) == Quantiles()


def test_counts_since_a_snapshot_and_what_is_of_the_moment() -> None:
    earlier, later = of(DecodePoolStatistics, 10), of(DecodePoolStatistics, 14, threads=2)
    since = counted_since(later, earlier)
    assert (since.threads, since.busy, since.finished, since.busy_seconds) == (2, 14, 4, 4)
    assert counted_since(later, replace(earlier, finished=15)) is later  # it was counted anew
    episodes = counted_since(of(EpisodeCacheStatistics, 14, kept=3), of(EpisodeCacheStatistics, 10))
    assert (episodes.misses, episodes.kept) == (4, -7)


def test_new_and_forgotten_hosts_count_whole() -> None:
    hosts = [
        {"a": of(HostStatistics, 5), "b": of(HostStatistics, 5)},
        {"a": of(HostStatistics, 2), "c": of(HostStatistics, 7)},
    ]
    earlier, later = (of(FetchStatistics, 10 * number, hosts=each) for number, each in enumerate(hosts, 1))
    since = counted_since(later, earlier)
    assert {host: each.bytes for host, each in since.hosts.items()} == {"a": 2, "c": 7}
    assert since.bytes == 10


def test_ended_statistics_add_their_counts_alone() -> None:
    ended = counts_of(of(FetchStatistics, 5, hosts={"a": of(HostStatistics, 5)}))
    assert (ended.in_flight, ended.bytes, ended.hosts["a"].limit, ended.hosts["a"].bytes) == (0, 5, 0, 5)
    together = sum_of(of(FetchStatistics, 3, hosts={"a": of(HostStatistics, 3)}), ended)
    assert (together.in_flight, together.bytes, together.hosts["a"].limit, together.hosts["a"].bytes) == (3, 8, 3, 8)
    waits = Waits(
        consumers=1,
        samples=2,
        wall_seconds=3.0,
        longest_wait_episode=7,
        longest_wait_seconds=1.0,
        by_cause={Cause.DISK: 1.0},
    )
    both = sum_of(counts_of(waits), waits)
    assert (both.consumers, both.samples, both.wall_seconds, both.longest_wait_episode) == (1, 4, 6.0, 7)
    assert both.by_cause[Cause.DISK] == 2.0

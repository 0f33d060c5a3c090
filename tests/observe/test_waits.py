"""A consumer's time, second by second, and what is said of it."""

from __future__ import annotations

import pickle
import time
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig, StreamConfig, config_share
from asyncfetch.errors import FetchError
from asyncfetch.fetch import Fetcher
from asyncfetch.observe import Quantiles
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import FIGURES, Cause, Meter, WaitAccount, Waits, WaitStep, metered, running_meter
from asyncfetch.testing import RangeServer

if TYPE_CHECKING:
    from collections.abc import Mapping

seconds = st.floats(0, 100, allow_nan=False)
weights = st.dictionaries(st.sampled_from(Cause), seconds, max_size=3)
steps = st.builds(WaitStep, st.floats(-10, 1000), weights, st.none() | st.integers(0, 200))
events = st.tuples(st.sampled_from(["wait", "give", "end", "snapshot"]), seconds, st.lists(steps, max_size=4))


@given(st.lists(events, max_size=30))
def test_every_second_is_counted_once_in_any_order_of_events(
    given_events: list[tuple[str, float, list[WaitStep]]],
) -> None:
    account, now, started, idle, before = WaitAccount(), 5.0, None, 0.0, Waits()
    for name, passed, path in given_events:
        state = account.figures[0]
        now += passed
        if started is not None and not state:
            idle += passed
        if name == "wait":
            account.wait(now)
        elif name == "give":
            account.give(now, path)
        elif name == "end":
            account.end(now, path)
        if name in {"wait", "give"} and started is None:
            started = now
        settled = account.settled(now)
        assert [max(0.0, before.by_cause[cause] - settled.by_cause[cause]) for cause in Cause if before.by_cause] == (
            pytest.approx([0.0] * len(before.by_cause), abs=1e-6)
        )
        assert settled.wall_seconds >= before.wall_seconds - 1e-6
        before = settled
        waits = account.snapshot(now, path)
        assert waits.busy_seconds + waits.waited_seconds == pytest.approx(waits.wall_seconds)
        assert waits.wall_seconds == pytest.approx(0 if started is None else now - started - idle, abs=1e-6)


def test_wait_is_cut_where_handing_over_begins() -> None:
    account = WaitAccount()
    account.wait(10.0)
    path = [
        WaitStep(9.0, {Cause.ROOM: 1.0}),
        WaitStep(14.0, {Cause.FIRST_BYTE: 3.0, Cause.BODIES: 1.0}, 7),
        WaitStep(15.0, DECODED),
    ]
    account.give(15.5, path, samples=3)
    account.wait(17.5)
    account.end(18.5, [WaitStep(99.0, DECODED)])
    waits = account.snapshot(50.0)
    assert {cause: part for cause, part in waits.by_cause.items() if part} == {
        Cause.FIRST_BYTE: 3.0,
        Cause.BODIES: 1.0,
        Cause.DECODING: 2.0,
        Cause.HAND_OVER: 0.5,
    }
    assert (waits.samples, waits.busy_seconds, waits.wall_seconds) == (3, 2.0, 8.5)
    assert (waits.longest_wait_episode, waits.longest_wait_seconds) == (7, 4.0)


DECODED: Mapping[Cause, float] = {Cause.DECODING: 1.0}


def test_long_wait_is_known_while_it_lasts_in_any_process() -> None:
    account = WaitAccount()
    account.wait(1.0)
    under_way = [WaitStep(31.0, {Cause.LIMIT: 1.0})]
    assert account.snapshot(31.0, under_way).by_cause[Cause.LIMIT] == 30.0
    account.note_cause(under_way)
    seen = WaitAccount.read(array("d", account.figures), 41.0)
    assert seen.by_cause[Cause.LIMIT] == seen.wall_seconds == 40.0
    assert account.snapshot(31.0, under_way).wall_seconds == 30.0  # looking counts nothing


def test_waits_of_a_million_episodes_take_no_memory() -> None:
    account = WaitAccount()
    for episode in range(10_000):
        account.wait(episode)
        account.give(episode + 0.5, [WaitStep(episode + (0.5 if episode != 77 else 0.9), DECODED, episode)])
    assert len(account.figures) == FIGURES
    assert len(account._by_episode) <= 65


def test_a_meter_shares_a_life_out_as_its_requests_were() -> None:
    meter = Meter()
    assert meter.share(4.0, None, Cause.OPENING) == {Cause.OPENING: 4.0}
    meter.begin(Cause.FIRST_BYTE, 10.0)
    assert meter.share(4.0, 12.0, Cause.OPENING) == {Cause.FIRST_BYTE: 4.0}
    meter.add(Cause.FIRST_BYTE, 3.0)
    meter.add(Cause.BODIES, 1.0)
    assert meter.share(8.0, None, Cause.OPENING) == {Cause.FIRST_BYTE: 6.0, Cause.BODIES: 2.0}
    assert running_meter() is None
    with metered(meter):
        assert running_meter() is meter
    assert running_meter() is None


def of(
    by_cause: Mapping[Cause, float],
    busy: float = 0.0,
    workers: int = 0,
    mean_bytes: float = 0.0,
    transform_cores: float = 1.0,
    statistics: object = None,
) -> Report:
    consumers = max(1, workers)
    parts = dict.fromkeys(Cause, 0.0) | {cause: part * consumers for cause, part in by_cause.items()}
    waits = Waits(
        consumers=consumers,
        samples=100,
        wall_seconds=sum(parts.values()) + busy * consumers,
        busy_seconds=busy * consumers,
        least_idle_share=busy * consumers / (sum(parts.values()) + busy * consumers),
        by_cause=parts,
        transform_worked_seconds=transform_cores * (sum(parts.values()) + busy * consumers),
        transform_ran_seconds=transform_cores * (sum(parts.values()) + busy * consumers),
        mean_bytes=mean_bytes,
        largest_bytes=2 * mean_bytes,
    )
    return Report.of(waits, statistics, StreamConfig(), num_workers=workers)


@pytest.mark.parametrize(
    ("report", "binds"),
    [
        (of({Cause.DECODING: 5, Cause.BODIES: 2}), "decoding"),
        (of({Cause.DECODING: 5, Cause.BODIES: 4, Cause.FIRST_BYTE: 3}), "bodies"),  # hosts together
        (of({Cause.DECODING: 0.5}, busy=9.5), "trainer"),
        (of({Cause.DECODING: 2}, busy=8.0), "decoding"),
        (of({Cause.DECODING: 5}, busy=5.0, workers=64), "trainer"),
        (of({Cause.DECODING: 5}, busy=0.5, workers=64), "decoding"),
        (of({Cause.TRANSFORM: 5, Cause.DECODING: 1}), "transform"),
        (of({Cause.ROOM: 5}, mean_bytes=1e9), "room"),
        (of(dict.fromkeys(Cause, 1.0)), "limit"),
    ],
)
def test_bottleneck_is_the_largest_part(report: Report, binds: str) -> None:
    assert report.verdict.binds == binds
    assert binds in repr(report)
    assert f"bottleneck: {binds}. " in str(report)
    assert len(str(report).splitlines()) < 16
    assert all(isinstance(value, float) for value in report.as_dict().values())
    assert pickle.loads(pickle.dumps(report)).as_dict() == report.as_dict()


def test_a_report_of_nothing_says_that_nothing_has_begun() -> None:
    report = Report.of(Waits(), None, StreamConfig())
    assert str(report) == "no pass has begun in this process"
    assert report.as_dict()["samples"] == report.as_dict()["samples_per_second"] == 0.0
    assert all(isinstance(value, float) for value in report.as_dict().values())


def test_a_gain_is_no_more_than_the_consumer_could_take() -> None:
    assert of({Cause.TRANSFORM: 9}, busy=1.0).verdict.gain <= 10
    assert 1 < of({Cause.TRANSFORM: 5}, busy=5.0).verdict.gain <= 2


def test_keeping_the_account_costs_little() -> None:
    account, begun = WaitAccount(), time.thread_time()
    path = [WaitStep(0.0, DECODED), WaitStep(1e12, {Cause.FIRST_BYTE: 1.0, Cause.BODIES: 2.0}, 5)]
    for now in range(2_000):
        account.wait(now)
        account.give(now + 0.5, path)
    assert (time.thread_time() - begun) / 2_000 < 100e-6  # a micro-batch takes some 10 ms to decode


def test_time_to_the_first_sample_counts_in_a_short_run_alone() -> None:
    account = WaitAccount()
    account.wait(0.0)
    account.give(3.0, [WaitStep(3.0, {Cause.OPENING: 1.0})], samples=1)
    account.wait(3.1)
    account.give(4.0, [WaitStep(4.0, DECODED)], samples=1)
    assert Report.of(account.snapshot(4.0), None, StreamConfig()).verdict.binds == "opening"
    account.wait(4.1)
    account.give(7.0, [WaitStep(7.0, DECODED)], samples=1)
    assert Report.of(account.snapshot(7.0), None, StreamConfig()).verdict.binds == "decoding"


def test_workers_paused_for_the_slowest_do_not_blame_the_trainer() -> None:
    slow, quick = WaitAccount(), WaitAccount()
    for account, waited in ((slow, 0.9), (quick, 0.1)):
        account.wait(0.0)
        account.give(1.0, [WaitStep(1.0, DECODED)], samples=1)
        for now in range(1, 11):
            account.wait(now + 1.0 - waited)
            account.give(now + 1.0, [WaitStep(now + 1.0, DECODED)], samples=1)
    waits = Waits.together([slow.snapshot(11.0), quick.snapshot(11.0), Waits()])
    assert waits.least_idle_share == pytest.approx(0.1)
    assert quick.snapshot(11.0).least_idle_share == pytest.approx(0.9)
    assert Report.of(waits, None, StreamConfig(), num_workers=2).verdict.binds == "decoding"
    short = WaitAccount()
    short.wait(0.0)
    short.give(9.0, [WaitStep(9.0, DECODED)], samples=1)
    assert short.snapshot(10.0).least_idle_share == pytest.approx(0.1)  # of a run that has hardly begun


def test_room_lets_what_is_fetched_ahead_hide_its_first_byte() -> None:
    report = of({Cause.ROOM: 5, Cause.FIRST_BYTE: 2, Cause.OPENING: 1, Cause.DECODING: 2}, mean_bytes=1e6)
    assert report.verdict.binds == "room"
    assert report.verdict.gain == pytest.approx(5.0, rel=1e-3)


async def test_busy_loop_binds_where_hosts_are_waited_for() -> None:
    async with Fetcher(FetchConfig(trust_env=False)) as fetcher, RangeServer({"x": b"x"}) as server:
        with pytest.raises(FetchError):
            await fetcher.fetch(f"{server.url}/x")  # its certificate isn't known
        statistics = SimpleNamespace(fetch=fetcher.statistics(), disk=None, episodes=None)
    waits = Waits(
        consumers=1,
        samples=1,
        wall_seconds=10.0,
        loop_busy_seconds=8.5,
        by_cause={Cause.OPENING: 4.0, Cause.FIRST_BYTE: 6.0},
        start_by_cause={Cause.OPENING: 4.0},
    )
    verdict = Report.of(waits, statistics, StreamConfig()).verdict
    assert verdict.binds == "loop"
    assert "ran or waited for a core for 85%" in verdict.evidence
    assert not verdict.setting  # on cores that are all in use, more processes bring nothing
    assert verdict.advice.startswith("spare it TLS by http://")
    assert Report.of(replace(waits, loop_busy_seconds=5.0), statistics, StreamConfig()).verdict.binds == "first_byte"


def test_a_loop_that_takes_the_decoders_cores_binds() -> None:
    waits = Waits(
        consumers=1,
        samples=1,
        wall_seconds=10.0,
        loop_busy_seconds=8.8,
        loop_ran_seconds=3.5,
        by_cause={Cause.DECODING: 6.0, Cause.FIRST_BYTE: 4.0},
    )
    verdict = Report.of(waits, None, StreamConfig()).verdict
    assert verdict.binds == "loop"
    assert "ran for 35% of the whole time" in verdict.evidence
    assert "TLS" not in verdict.advice  # of no host it is known
    for other in (replace(waits, loop_busy_seconds=3.5), replace(waits, loop_ran_seconds=0.5)):  # of a busy machine
        assert Report.of(other, None, StreamConfig()).verdict.binds == "decoding"


def test_work_of_a_consumer_that_has_not_asked_again_counts_once() -> None:
    account = WaitAccount()
    account.give(1.0)
    account.note_worked(2.0)
    assert account.snapshot(4.0).working_seconds == 2.0
    account.wait(5.0, 3.0)
    account.note_worked(9.0)  # it isn't busy
    assert account.snapshot(6.0).working_seconds == 3.0


def waited_for_one(episode: int) -> Report:
    """Of hosts, for 60 s until the first sample came, and for 40 s in the 70 s after it; episode 3 is huge."""
    waits = Waits(
        consumers=1,
        samples=5,
        wall_seconds=130.0,
        busy_seconds=30.0,
        by_cause={Cause.BODIES: 100.0},
        start_by_cause={Cause.BODIES: 60.0},
        longest_wait_episode=episode,
        longest_wait_seconds=65.0,
        largest_bytes=50e6,
        largest_episode=3,
        other_bytes=1e6,
    )
    fetch = SimpleNamespace(hosts={}, bytes=10**6, body=Quantiles(), first_byte=Quantiles())
    return Report.of(waits, SimpleNamespace(fetch=fetch, disk=None, episodes=None), StreamConfig())


def test_wait_for_a_huge_episode_is_a_share_of_its_time() -> None:
    verdict = waited_for_one(3).verdict
    assert verdict.binds == "episode"
    assert verdict.evidence.startswith(
        "50% of the whole time went into waiting for episode 3, a segment of which has 48 "
    )


def test_awaited_episode_is_not_huge_because_another_is() -> None:
    assert waited_for_one(4).verdict.binds == "bodies"


def test_unknown_hosts_get_no_advice() -> None:
    verdict = waited_for_one(4).verdict
    assert not verdict.setting
    assert not verdict.advice


def test_a_cold_disk_cache_promises_no_more_than_it_holds() -> None:
    fetch = SimpleNamespace(hosts={}, bytes=10**6, body=Quantiles(), first_byte=Quantiles())
    statistics = SimpleNamespace(fetch=fetch, disk=SimpleNamespace(hits=1, misses=9, refusal=""), episodes=None)
    waits = Waits(consumers=1, samples=5, wall_seconds=10.0, by_cause={Cause.BODIES: 9.0})
    verdict = Report.of(waits, statistics, StreamConfig(disk_cache_max_bytes=3 * 1024**3)).verdict
    assert verdict.binds == "disk"
    assert "what fits into disk_cache_max_bytes, which is 3.0 GiB" in verdict.advice


@pytest.mark.parametrize("busy", [0.0, 99.0])
def test_a_disk_cache_that_takes_nothing_is_in_the_report(busy: float) -> None:
    fetch = SimpleNamespace(hosts={}, bytes=10**6, body=Quantiles(), first_byte=Quantiles())
    disk = SimpleNamespace(hits=1, misses=9, refusal="No space left on device")
    waits = Waits(
        consumers=1,
        samples=5,
        wall_seconds=10.0 + busy,
        busy_seconds=busy,
        by_cause={Cause.BODIES: 9.0, Cause.ROOM: 1.0},
    )
    report = Report.of(waits, SimpleNamespace(fetch=fetch, disk=disk, episodes=None), StreamConfig())
    assert report.verdict.binds == ("trainer" if busy else "disk")
    assert " ".join(str(report).split()).count("the disk cache takes no more: No space left on device") == 1


@pytest.mark.parametrize(
    ("cores", "workers", "transform_cores", "setting", "advice"),
    [
        (16, 0, 1.0, {"num_workers": 8}, "its own interpreter"),
        (2, 0, 0.8, {"num_workers": 2}, "its own interpreter"),
        (1, 0, 1.0, {}, "make it faster, or use more cores"),
        (16, 1, 1.0, {}, "make it faster, or use more loader workers (num_workers)"),
        (16, 16, 1.0, {}, "make it faster, or use more cores"),
        (2, 0, 1.8, {}, "make it faster, or use more cores"),  # it lets others run Python
        (2, 0, 0.1, {"decode_threads": 4}, "in each of these threads"),  # it computes nothing
    ],
)
def test_advice_for_a_transform_depends_on_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    workers: int,
    transform_cores: float,
    setting: dict[str, int],
    advice: str,
) -> None:
    monkeypatch.setattr("asyncfetch.observe.report.usable_cpus", lambda: cores)
    statistics = SimpleNamespace(decode=SimpleNamespace(threads=2))
    by_cause = {Cause.TRANSFORM: 5.0, Cause.DECODING: 1.0}
    verdict = of(by_cause, workers=workers, transform_cores=transform_cores, statistics=statistics).verdict
    assert (verdict.binds, verdict.setting) == ("transform", setting)
    assert verdict.advice.endswith(advice)
    assert (verdict.gain > 1.5) == bool(setting)


def test_proposed_workers_are_within_a_shared_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncfetch.observe.report.usable_cpus", lambda: 16)
    waits = of({Cause.TRANSFORM: 5}).waits
    for config in (StreamConfig(decode_threads=3), StreamConfig(fetch=FetchConfig(max_requests_per_host=3))):
        [(name, workers)] = Report.of(waits, None, config).verdict.setting.items()
        assert (name, workers) == ("num_workers", 3)
        config_share(config, workers)
    assert not Report.of(waits, None, StreamConfig(decode_threads=1)).verdict.setting

"""Why a consumer waits, told of real passes."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import asyncfetch as af
from asyncfetch.observe import trace
from asyncfetch.observe.report import Report
from asyncfetch.observe.trace import CONSUMER, FLUSH_BYTES, Tracer, running
from asyncfetch.observe.waits import Cause
from asyncfetch.stream import serve_samples
from asyncfetch.stream.samples import PassFigures
from asyncfetch.testing import Fault, FaultOnce, RangeServer

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, SpawnContext
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth, ServedRequest

FETCH = af.FetchConfig(trust_env=False)


def config(**options: Any) -> af.StreamConfig:  # noqa: ANN401 - StreamConfig's own
    return af.StreamConfig(fetch=FETCH, pool_segments=2, prefetch_segments=1, **options)


@pytest.fixture(autouse=True, scope="module")
def _decoders_are_loaded(truth: DatasetTruth) -> None:
    """The first job of a process imports torch, for seconds that would count as decoding."""
    stream = af.Stream(truth.root)
    list(stream)
    stream.close()


def test_a_synchronous_consumers_time_is_counted_whole(truth: DatasetTruth) -> None:
    with RangeServer(truth.root, tls=False, first_byte_seconds=0.1) as server:
        stream = af.Stream(server.url, config=config())
        began = time.perf_counter()
        samples = iter(stream)
        count = sum(1 for _ in samples)
        seconds = time.perf_counter() - began
        report = stream.report()
        assert samples.report().as_dict() == report.as_dict()
        stream.close()
    waits = report.waits
    assert waits.samples == count == truth.num_frames
    assert waits.wall_seconds == pytest.approx(seconds, rel=0.02)
    assert waits.busy_seconds + waits.waited_seconds == pytest.approx(seconds, rel=0.02)
    assert waits.by_cause[Cause.FIRST_BYTE] > 0.2  # an index and a clip, one after the other
    assert 0 < waits.loop_ran_seconds <= waits.loop_busy_seconds + 0.01 < waits.wall_seconds
    assert stream.report().as_dict() == report.as_dict()  # of a pass that is over, time goes no further


async def test_asynchronous_consumers_time_is_counted_from_opening_on(truth: DatasetTruth) -> None:
    async with RangeServer(truth.root, tls=False, first_byte_seconds=0.1) as server:
        stream = af.Stream(server.url, config=config())
        began = time.perf_counter()
        async with stream.samples() as samples:
            async for _ in samples:
                assert samples.report().waits.samples > 0
        seconds = time.perf_counter() - began
    waits = samples.report().waits
    assert waits.wall_seconds == pytest.approx(seconds, rel=0.02, abs=0.05)
    assert waits.by_cause[Cause.OPENING] > 0.1  # a round trip at least
    assert samples.statistics().waits == waits
    assert stream.report().as_dict() == samples.report().as_dict()
    assert samples.report().statistics.fetch.requests > 10


async def test_an_open_dataset_tells_of_the_latest_pass_over_it(truth: DatasetTruth) -> None:
    async with af.open_dataset(truth.root) as dataset:
        assert "no pass has begun" in str(dataset.report())
        async with af.Stream(dataset).samples() as samples:
            await anext(samples)
            assert dataset.report().waits.samples == 1
        assert dataset.report().as_dict() == samples.report().as_dict()


def test_the_evidence_is_of_the_pass_that_is_reported(truth: DatasetTruth) -> None:
    with RangeServer(truth.root, tls=False) as server:
        stream = af.Stream(server.url, shuffle=False, config=config())  # the same clips in each epoch
        reports, sent = [], [0]
        for _ in range(2):
            assert sum(1 for _ in stream) == truth.num_frames
            reports.append(stream.report())
            sent.append(server.statistics().bytes_sent)
        statistics = stream.statistics()
        stream.close()
    assert [report.as_dict()["fetched_bytes"] for report in reports] == [sent[1], sent[2] - sent[1]]
    assert [report.all_statistics.fetch.bytes for report in reports] == sent[1:]
    assert statistics is not None
    assert sum(report.statistics.decode.finished for report in reports) == statistics.decode.finished
    assert sum(report.as_dict()["decode_busy_seconds"] for report in reports) == pytest.approx(
        statistics.decode.busy_seconds
    )
    assert reports[1].all_waits.samples == 2 * truth.num_frames


async def test_the_evidence_is_of_the_pass_over_an_open_dataset(truth: DatasetTruth) -> None:
    async with (
        RangeServer(truth.root, tls=False) as server,
        af.open_dataset(server.url, config=config()) as dataset,
    ):
        for number, episodes in enumerate(([0, 1], [3, 4]), 1):
            sent_bytes = server.statistics().bytes_sent
            async with af.Stream(dataset, episodes=episodes).samples() as samples:
                assert [sample async for sample in samples]
            report = dataset.report()
            assert report.statistics.fetch.bytes == server.statistics().bytes_sent - sent_bytes > 0
            assert report.all_statistics.fetch.bytes == server.statistics().bytes_sent
            assert report.all_waits.samples == sum(truth.lengths[each] for each in [0, 1, 3, 4][: 2 * number])


def test_silent_host_is_reported_as_opening(truth: DatasetTruth) -> None:
    has_come, goes_on = threading.Event(), threading.Event()

    def late(_: ServedRequest) -> None:
        has_come.set()
        goes_on.wait(20)

    with RangeServer(truth.root, tls=False, fault=late) as server, ThreadPoolExecutor(1) as threads:
        stream = af.Stream(server.url, config=config())
        count = threads.submit(lambda: sum(1 for _ in stream))
        assert has_come.wait(10)
        report = stream.report()
        goes_on.set()
        assert count.result(30) == truth.num_frames
        stream.close()
    assert report.verdict.binds == "opening"
    assert report.waits.by_cause[Cause.OPENING] == report.waits.wall_seconds > 0
    assert "no sample has come; " in str(report)


def test_unread_pass_reports_the_reads_of_the_passes_before_it(truth: DatasetTruth) -> None:
    with RangeServer(truth.root, tls=False) as server:
        stream = af.Stream(server.url, config=config())
        assert sum(1 for _ in stream) == truth.num_frames
        before = stream.report()
        samples = iter(stream)
        report = samples.report()
        stream.close()
    assert before.all_statistics is not None
    assert report.statistics is not None
    assert report.all_statistics is not None
    assert report.statistics.fetch.bytes == 0
    assert report.all_statistics.fetch.bytes == before.all_statistics.fetch.bytes > 0


def test_a_slow_transform_binds_and_its_setting_is_workers(truth: DatasetTruth) -> None:
    stream = af.Stream(truth.root, transform=spin, config=config())
    assert sum(1 for _ in stream) == truth.num_frames
    report = stream.report()
    stream.close()
    assert report.verdict.binds == "transform"
    assert list(report.verdict.setting) == ["num_workers"]
    assert "num_workers=" in str(report)


@pytest.mark.alone  # a thread that waits for a core has work
def test_a_transform_that_computes_nothing_gets_threads(truth: DatasetTruth) -> None:
    stream = af.Stream(truth.root, transform=doze, config=config(decode_threads=2))
    assert sum(1 for _ in stream) == truth.num_frames
    report = stream.report()
    stream.close()
    assert (report.verdict.binds, report.verdict.setting) == ("transform", {"decode_threads": 4})
    assert report.waits.transform_worked_seconds < report.waits.wall_seconds / 2


def doze(sample: dict[str, Any]) -> dict[str, Any]:
    """Wait, as for another service."""
    time.sleep(0.08)
    return sample


def spin(sample: dict[str, Any]) -> dict[str, Any]:
    """Hold the interpreter for a while."""
    until = time.perf_counter() + 0.02
    while time.perf_counter() < until:
        pass
    return sample


def test_a_consumer_that_computes_binds(truth: DatasetTruth) -> None:
    stream = af.Stream(truth.root, config=config())
    for _ in stream:
        spin(spin(spin(spin({}))))
    report = stream.report()
    stream.close()
    assert report.verdict.binds == "trainer"
    assert report.verdict.setting == {}
    assert report.waits.busy_seconds >= 0.08 * truth.num_frames


def test_abandoned_and_failed_streams_report_what_was(truth: DatasetTruth) -> None:
    stream = af.Stream(truth.root, config=config())
    assert str(stream.report()) == "no pass has begun in this process"
    for _ in stream:
        break
    gc.collect()
    left = stream.report()
    assert left.waits.samples >= 1
    assert left.waits.busy_seconds + left.waits.waited_seconds == pytest.approx(left.waits.wall_seconds, rel=0.02)
    assert stream.report().waits.wall_seconds == left.waits.wall_seconds
    stream.close()

    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        spin(spin(spin(sample)))
        raise ValueError(sample["index"])

    stream = af.Stream(truth.root, transform=fail, config=config())
    with pytest.raises(ValueError, match="tensor"):
        list(stream)
    failed = stream.report()
    stream.close()
    assert failed.waits.samples == 0
    assert failed.waits.waited_seconds > 0
    assert failed.samples_per_second == 0
    assert failed.verdict.binds != "hand_over"  # the way of the error from the loop to here
    assert failed.waits.by_cause[Cause.TRANSFORM] >= 0.05
    assert "the pass ended by ValueError: tensor" in failed.verdict.evidence
    assert "no sample has come; " in failed.verdict.evidence
    assert not failed.verdict.advice


def test_a_stream_of_no_samples_and_one_of_no_dataset_say_so(truth: DatasetTruth, tmp_path: Path) -> None:
    for stream in (af.Stream(truth.root, episodes=[6]), af.Stream(tmp_path / "nowhere")):
        with suppress(af.NotFound):
            assert list(stream) == []
        report = stream.report()
        stream.close()
        assert report.verdict.binds == "opening"
        assert "no sample has come; " in str(report)
        assert (report.verdict.advice, report.verdict.setting, report.as_dict()["samples"]) == ("", {}, 0.0)


async def test_a_pass_whose_dataset_is_not_there_says_so(tmp_path: Path) -> None:
    stream = af.Stream(tmp_path / "nowhere")
    with pytest.raises(af.NotFound):
        async with stream.samples():
            pass
    told = stream.report().verdict.evidence
    assert "the pass ended by NotFound: " in told
    assert "no sample has come; " in told


def test_dataset_opened_again_and_again_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    stream = af.Stream(tmp_path / "nowhere")
    with trace(path):
        for _ in range(3):
            with pytest.raises(af.NotFound):
                iter(stream)
    waited = stream.report().all_waits.wall_seconds
    assert waited > stream.report().waits.wall_seconds > 0
    assert stream.report().all_waits.wall_seconds == waited
    assert stream._source.figures is not None
    assert stream._source.figures.handed_on()[1] == []
    events = json.loads(path.read_text().rstrip(",\n") + "]")
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert [lane for lane in lanes if lane.startswith(CONSUMER)] == [CONSUMER]


def test_a_report_repeats_a_long_error_in_part(truth: DatasetTruth) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("line\n" * 10_000)

    stream = af.Stream(truth.root, transform=fail, config=config())
    with pytest.raises(ValueError, match="line"):
        list(stream)
    report = stream.report()
    stream.close()
    assert "the pass ended by ValueError: line line " in report.verdict.evidence
    assert len(str(report)) < 1_500


def test_a_host_that_fails_at_first_is_seen_as_retries(truth: DatasetTruth) -> None:
    videos = [f"/{path.relative_to(truth.root)}" for path in truth.root.rglob("*.mp4")]
    faults = [FaultOnce(path, Fault.status(500, retry_after=1)) for path in videos]

    def fault(request: Any) -> Fault | None:  # noqa: ANN401 - a FaultRule's
        return next((found for each in faults if (found := each(request)) is not None), None)

    with RangeServer(truth.root, tls=False, fault=fault) as server:
        stream = af.Stream(server.url, config=config())
        assert sum(1 for _ in stream) == truth.num_frames
        report = stream.report()
        stream.close()
    assert report.verdict.binds == "retries"
    assert report.waits.by_cause[Cause.LIMIT] < report.waits.by_cause[Cause.RETRIES]


def test_a_host_that_was_away_is_seen_as_an_outage(truth: DatasetTruth) -> None:
    left = 20

    def fault(request: Any) -> Fault | None:  # noqa: ANN401 - a FaultRule's
        nonlocal left
        left -= request.path.endswith(".mp4") and left > 0
        return Fault.reset(None) if 0 < left < 20 else None

    retry = af.RetryConfig(initial_seconds=0.2, maximum_seconds=0.2)
    with RangeServer(truth.root, tls=False, fault=fault) as server:
        stream = af.Stream(server.url, config=replace(config(), fetch=af.FetchConfig(trust_env=False, retry=retry)))
        assert sum(1 for _ in stream) == truth.num_frames
        report = stream.report()
        stream.close()
    outages = report.statistics.fetch.outages
    assert report.as_dict()["outages"] == outages >= 1
    waits = replace(
        report.waits, busy_seconds=0.0, by_cause={Cause.OUTAGE: 0.9 * report.waits.wall_seconds}, start_by_cause={}
    )
    verdict = Report.of(waits, report.statistics, config()).verdict  # where nothing else took time
    assert verdict.binds == "outage"
    assert f"went into a host that was away: {server.url} {outages} times" in verdict.evidence


@pytest.mark.usefixtures("programs_are_warm")
def test_process_of_serve_samples_is_reported_on_and_afterwards(truth: DatasetTruth) -> None:
    began = time.perf_counter()
    stream = af.Stream(truth.root, shuffle=False, config=config())  # the same clips in each epoch
    with serve_samples(stream, batch_size=4) as batches:
        assert batches.report().verdict.binds == "opening"  # its process, or the dataset
        given = iter(batches)
        taken = len(next(given)["index"])
        waits, waited_seconds = batches.report().waits, time.perf_counter() - began
        assert waits.wall_seconds == pytest.approx(waited_seconds, rel=0.1)
        assert waits.by_cause[Cause.OPENING] > 0.5 * waited_seconds
        taken += sum(len(batch["index"]) for batch in itertools.islice(given, 2))
        assert batches.report().waits.samples >= taken
        totals = [taken]
        for epoch in (1, 2):
            assert sum(len(batch["index"]) for batch in batches) == truth.num_frames
            report = batches.report()
            assert report.waits.samples == truth.num_frames
            assert report.num_workers == 1
            assert report.statistics.fetch.bytes == 0 or epoch == 1  # all of it is in memory
            totals.append(report.all_waits.samples)
    report = batches.report()
    assert report.waits.samples == truth.num_frames
    assert report.all_statistics.fetch.bytes > 0
    assert batches.statistics() == report.all_statistics
    assert totals == sorted(totals)
    assert totals[-1] - totals[-2] == truth.num_frames


@pytest.mark.usefixtures("programs_are_warm")
def test_report_of_serve_samples_says_how_the_pass_ended(truth: DatasetTruth) -> None:
    stream = af.Stream(truth.root, transform=refuse, config=config())
    with serve_samples(stream, batch_size=4) as batches:
        for _ in range(2):
            with pytest.raises(ValueError, match="refused"):
                list(batches)
            assert "the pass ended by ValueError: refused" in batches.report().verdict.evidence


def refuse(sample: dict[str, Any]) -> dict[str, Any]:
    """Take no sample."""
    raise ValueError("refused")


def test_trace_has_lanes_of_requests_decoding_and_waits(truth: DatasetTruth, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with RangeServer(truth.root, tls=False) as server, trace(path):
        stream = af.Stream(f"{server.url}?signature=hidden", config=config())
        assert sum(1 for _ in stream) == truth.num_frames
        stream.close()
        requests = len(server.requests)
        with pytest.raises(af.ConfigError, match="leave that trace first"), trace(tmp_path / "other"):
            pass
    text = path.read_text()
    assert "hidden" not in text
    events = json.loads(text.rstrip(",\n") + "]")
    assert {event["ph"] for event in events} == {"M", "X", "b", "e"}
    for event in events:  # what the format asks of each phase
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] > 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] not in "be" or event["id"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert all(event["tid"] in named for event in events if event["ph"] == "X")
    sent = [event["args"] for event in events if event["name"] == "request"]
    assert len(sent) == requests
    assert {(each["host"], each["status"], each["attempt"]) for each in sent} == {(server.url[7:], 206, 1)}
    assert all(each["start"] is not None and each["bytes"] > 0 for each in sent)
    assert {event["name"] for event in events} >= {"decode", "episode", "wait: opening", "wait: hand_over", "body"}
    decoded = [event for event in events if event["name"] == "decode"]
    assert sum(event["args"]["frames"] for event in decoded) == truth.num_frames
    assert all(named[event["tid"]].startswith("decode") for event in decoded)
    by_lane: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["name"] == "request":
            by_lane.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_lane.values():  # a lane has one request at a time
        assert all(one[1] <= other[0] + 1 for one, other in itertools.pairwise(sorted(spans)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_begun_in_a_trace_write_its_file_to_the_end(tmp_path: Path, method: str) -> None:
    path = tmp_path / "trace.json"
    with trace(path):
        tell("before")
        process = _context(method).Process(target=tell, args=("the child's",))
        process.start()
        process.join()
        assert process.exitcode == 0
        tell("after")
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert sorted(event["name"] for event in events if event["ph"] == "X") == ["after", "before", "the child's"]


@pytest.mark.usefixtures("programs_are_warm")
def test_program_and_its_workers_are_traced_by_the_environment(truth: DatasetTruth, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of an earlier program")
    program = (
        "import sys, asyncfetch as af; from torch.utils.data import DataLoader; stream = af.Stream(sys.argv[1])\n"
        "dataset = af.torch.StreamDataset(stream)\n"
        "assert sum(1 for _ in DataLoader(dataset, batch_size=None, num_workers=2)) == int(sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(truth.root), str(truth.num_frames)],
        env=os.environ | {"ASYNCFETCH_TRACE": str(path)},
        check=True,
    )
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    decoded: dict[int, int] = {}
    for event in events:
        if event["name"] == "decode":
            decoded[event["pid"]] = decoded.get(event["pid"], 0) + event["args"]["frames"]
    assert len(decoded) == 2
    assert sum(decoded.values()) == truth.num_frames
    assert len({event["pid"] for event in events}) == 3


def test_a_spawned_process_goes_on_to_the_bound_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace(path, max_bytes=5_000):
        process = _context("spawn").Process(target=tell, args=("x" * 10_000,))
        process.start()
        process.join()
        assert process.exitcode == 0
    assert path.stat().st_size <= 5_000


def test_no_lane_of_a_host_or_consumer_is_a_threads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(str(path))
    lanes = [tracer.enter(f"host {number % 3}") for number in range(3_600)] + [tracer.enter(CONSUMER)]
    tracer.episode(1, 0.0, 1.0, {})
    tracer.close()
    lanes += [json.loads(line.rstrip(",\n"))["tid"] for line in path.read_text().splitlines()][:1]
    assert len(lanes) == len(set(lanes)) == 3_602
    assert min(lanes) >= 2**22  # the largest number of a thread is less
    assert max(lanes) < 2**31


def _context(method: str) -> ForkContext | SpawnContext:
    return multiprocessing.get_context(method)  # type: ignore[return-value]


def tell(name: str) -> None:
    """Add a span to the trace of this process."""
    tracer = running()
    assert tracer is not None
    tracer.span(name, 0.0, 0.001, 3, "a thread")


def test_request_under_way_spans_the_end_and_start_of_traces(truth: DatasetTruth, tmp_path: Path) -> None:
    has_come = threading.Event()

    def late(_: ServedRequest) -> Fault:
        has_come.set()
        return Fault.slow(first_byte_seconds=0.2)

    async def fetch(url: str) -> bytes:
        async with af.Fetcher() as fetcher:
            return bytes(await fetcher.fetch(url))

    with RangeServer(truth.root, tls=False, fault=late) as server, ThreadPoolExecutor(1) as threads:
        with trace(tmp_path / "first.json"):
            fetched = threads.submit(anyio.run, fetch, f"{server.url}/meta/info.json")
            assert has_come.wait(10)
        with trace(tmp_path / "second.json"):
            assert fetched.result(10) == (truth.root / "meta/info.json").read_bytes()


def test_spans_of_a_trace_end_where_the_next_ones_begin(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(str(path))
    for number in range(100):
        since = 1e5 + number / 7
        tracer.span("first byte", since, since + 0.01 / 3, 1000, "host 0")
        tracer.span("body", since + 0.01 / 3, since + 0.1 / 7, 1000, "host 0")
    tracer.close()
    events = [json.loads(line.rstrip(",\n")) for line in path.read_text().splitlines()]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 200
    for first_byte, body in zip(spans[::2], spans[1::2], strict=True):
        assert first_byte["ts"] + first_byte["dur"] == body["ts"]


def test_equal_episode_numbers_of_two_passes_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(str(path))
    for since, until in [(1.0, 4.0), (2.0, 5.0), (4.0, 6.0), (1.5, 2.5)]:
        tracer.episode(7, since, until, {Cause.BODIES: until - since})
    tracer.close()
    events = [json.loads(line.rstrip(",\n")) for line in path.read_text().splitlines()]
    by_id: dict[str, list[tuple[int, str]]] = {}
    for event in events:
        if event["ph"] in "be":
            by_id.setdefault(event["id"], []).append((event["ts"], event["ph"]))
            assert event["args"] == {"episode": 7, "bodies_ms": event["args"]["bodies_ms"]}
    assert sorted(len(each) for each in by_id.values()) == [2, 2, 4]
    for each in by_id.values():  # a viewer takes an end for that of what began last
        assert [phase for _, phase in sorted(each, key=lambda event: event[0])] == ["b", "e"] * (len(each) // 2)


def test_passes_side_by_side_are_all_counted(truth: DatasetTruth) -> None:
    stream = af.Stream(truth.root, config=config())
    first, second = iter(stream), iter(stream)
    next(second)
    next(first)
    assert stream.report().all_waits.samples >= 2
    taken = 2 + sum(1 for _ in itertools.chain(first, second))
    assert taken == 2 * truth.num_frames
    for epoch in (1, 2):
        assert stream.report().all_waits.samples == taken + (epoch - 1) * truth.num_frames
        assert sum(1 for _ in stream) == truth.num_frames
        assert stream.report().waits.samples == truth.num_frames
    stream.close()


def test_passes_side_by_side_have_a_lane_each(truth: DatasetTruth, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace(path):
        stream = af.Stream(truth.root, config=config())
        for _ in range(2):  # a lane is used again
            passes = iter(stream), iter(stream)
            for each in passes:
                next(each)
            for each in passes:
                each.close()
        stream.close()
    events = json.loads(path.read_text().rstrip(",\n") + "]")
    waits = [event for event in events if event["name"].startswith("wait: ")]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {named[wait["tid"]] for wait in waits} == {"consumer", "consumer 1"}


def test_a_trace_ends_where_its_file_is_full(truth: DatasetTruth, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace(path, max_bytes=3_000):
        stream = af.Stream(truth.root, config=config())
        list(stream)
        stream.close()
    assert 2_000 < path.stat().st_size <= 3_000
    events = json.loads(path.read_text().rstrip(",\n") + "]")
    assert [event["name"] == "the file is full" for event in events] == [False] * (len(events) - 1) + [True]
    with pytest.raises(af.ConfigError, match="at least 1024, not 1000"), trace(path, max_bytes=1_000):
        pass


def test_a_full_disk_ends_a_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with trace(path):
        tracer = running()
        assert tracer is not None
        tracer.span("x" * FLUSH_BYTES, 0.0, 1.0, 1, "thread")
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
        try:
            for _ in range(3):
                tracer.span("y" * FLUSH_BYTES, 1.0, 2.0, 1, "thread")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.name for record in caplog.records] == ["asyncfetch.observe.trace"]
    assert len(json.loads(path.read_text().rstrip(",\n") + "]")) == 3
    assert path.stat().st_size == size
    assert "ASYNCFETCH_TRACE" not in os.environ


@pytest.mark.parametrize(("rank", "begins"), [({"LOCAL_RANK": "0", "RANK": "8"}, True), ({"RANK": "1"}, False)])
def test_program_is_traced_where_it_began_by_a_nodes_first_rank(
    tmp_path: Path, rank: dict[str, str], begins: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    program = "import os; import asyncfetch.stream; os.chdir('elsewhere'); print(os.environ['ASYNCFETCH_TRACE'])"
    environment = {**os.environ, "ASYNCFETCH_TRACE": "trace.json", **rank}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text().startswith("[\n") == begins


def test_program_runs_and_says_that_its_trace_is_unwritable(tmp_path: Path) -> None:
    environment = {**os.environ, "ASYNCFETCH_TRACE": str(tmp_path / "gone" / "trace.json"), "RANK": "first"}
    done = subprocess.run(
        [sys.executable, "-c", "import asyncfetch.stream; print('goes on')"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "goes on\n"
    assert "can't be written: No such file or directory. Nothing is traced" in done.stderr


async def test_statistics_are_a_line_as_repr_and_a_table_as_str(truth: DatasetTruth) -> None:
    async with af.open_dataset(truth.root) as dataset, af.Stream(dataset).samples() as samples:
        assert len([sample async for sample in samples]) == truth.num_frames
        whole = dataset.statistics()
        parts = [whole, whole.fetch, whole.clips, whole.decode, *whole.fetch.hosts.values(), samples.statistics()]
        for statistics in [*parts, samples.statistics().waits]:
            assert len(repr(statistics)) < 400
            assert "\n" not in repr(statistics)
            assert len(str(statistics).splitlines()) > 5
            assert max(map(len, str(statistics).splitlines())) < 120
        assert "\n" not in repr(samples.report())


def test_work_at_handing_over_is_not_the_trainers_too() -> None:
    figures = PassFigures(config())
    figures.clock = clock = Clock()  # type: ignore[assignment]
    figures.wait(time.perf_counter())
    figures.give(time.perf_counter(), samples=1)
    with figures.handing_over():
        clock.now += 5.0
    clock.now += 1.0
    figures.wait(time.perf_counter())
    assert figures.waits().working_seconds == 1.0


class Clock:
    """A clock that somebody sets."""

    now = 100.0

    def seconds(self) -> float:
        """As ThreadClock."""
        return self.now

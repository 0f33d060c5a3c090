"""A host that is away is waited for, by one request at a time; the others go on when it is back."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import random
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig, RetryConfig, TimeoutConfig
from asyncfetch.errors import (
    AccessDenied,
    ClosedError,
    ConfigError,
    ConnectionFailed,
    FetchError,
    NotFound,
    ObjectChanged,
    Throttled,
)
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.hosts import Host, Hosts
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.fetch.outage import AWAY_FAILURES, LONGEST_PROBE_SECONDS, WARNING_SECONDS, Outage
from asyncfetch.fetch.retry import AttemptFailed, Clock, retried
from asyncfetch.fetch.urls import Route
from asyncfetch.observe.waits import Cause, Meter, metered
from asyncfetch.ranges import ByteRange
from asyncfetch.testing import Fault, HubServer, Keys, S3Server
from tests.conftest import all_others_wait
from tests.fetch.conftest import FakeTime, Step, s3_fetcher
from tests.fetch.odd_files import CONTENT as ODD

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.fetch.conftest import LyingServer, Request
    from tests.fetch.odd_files import OddFileSystem

CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


# --- the state, by events


def away(now: float = 0.0, config: RetryConfig | None = None) -> Outage:
    """One that has just begun."""
    outage = Outage(config or RetryConfig())
    for _ in range(AWAY_FAILURES):
        assert not outage.is_away
        assert not outage.failed(now, luck=1.0, is_probe=False)
    assert outage.is_away
    return outage


def test_failures_in_a_row_are_an_outage_and_others_not() -> None:
    outage = Outage(RetryConfig())
    for _ in range(100):
        for _ in range(AWAY_FAILURES - 1):
            outage.failed(0.0, luck=1.0, is_probe=False)
        assert not outage.answered(0.0)
    assert not outage.is_away


def test_probes_come_later_each_time_up_to_a_bound() -> None:
    outage, now, waits = away(), 0.0, []
    outage.warning_seconds(WARNING_SECONDS)  # which is something to wait for, too
    while not outage.failed(now, luck=1.0, is_probe=True):
        waits.append(outage.wait_seconds(now))
        now += waits[-1]
    assert waits[:6] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0])
    assert max(waits) == pytest.approx(LONGEST_PROBE_SECONDS)
    assert 300 - LONGEST_PROBE_SECONDS < now <= 300
    assert (outage.is_away, outage.gave_up_at) == (False, now)


def test_request_that_was_under_way_moves_no_probe() -> None:
    outage = away()
    before = outage.wait_seconds(0.05)
    assert not outage.failed(0.05, luck=1.0, is_probe=False)
    assert outage.wait_seconds(0.05) == before > 0


def test_a_pause_that_is_asked_for_is_kept_by_the_probe() -> None:
    outage = away()
    outage.failed(0.0, luck=0.0, is_probe=True, pause_seconds=30.0)
    outage.warning_seconds(WARNING_SECONDS)
    assert outage.wait_seconds(WARNING_SECONDS) == 30.0 - WARNING_SECONDS


def test_an_outage_that_had_not_ended_goes_on_with_its_probes() -> None:
    outage = away()
    for _ in range(9):
        outage.failed(1.0, luck=1.0, is_probe=True)
    assert outage.answered(2.0)
    for _ in range(AWAY_FAILURES):
        outage.failed(3.0, luck=1.0, is_probe=False)
    outage.warning_seconds(3.0 + WARNING_SECONDS)
    assert outage.wait_seconds(3.0) == LONGEST_PROBE_SECONDS
    assert outage.answered(4.0)
    for _ in range(AWAY_FAILURES):
        outage.failed(60.0, luck=1.0, is_probe=False)
    assert outage.wait_seconds(60.0) == pytest.approx(RetryConfig().initial_seconds)


def test_a_warning_comes_once_and_says_how_long_still() -> None:
    outage = away()
    assert outage.warning_seconds(WARNING_SECONDS - 0.1) is None
    assert outage.warning_seconds(WARNING_SECONDS) == 300 - WARNING_SECONDS
    assert outage.warning_seconds(WARNING_SECONDS + 1) is None


@pytest.mark.parametrize("config", [RetryConfig(attempts=1), RetryConfig(outage_seconds=0)])
def test_outage_never_begins_where_it_is_switched_off(config: RetryConfig) -> None:
    outage = Outage(config)
    assert not any(outage.failed(0.0, luck=1.0, is_probe=False) for _ in range(100))
    assert not outage.is_away


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="outage_seconds must not be negative"):
        RetryConfig(outage_seconds=-1)


@given(
    st.lists(st.tuples(st.sampled_from(["failed", "probe", "answered"]), st.floats(0, 400), st.floats(0, 1))),
    st.floats(0, 400),
)
def test_no_probe_is_later_than_the_bound(events: list[tuple[str, float, float]], bound: float) -> None:
    outage, now = Outage(RetryConfig(outage_seconds=bound)), 0.0
    for event, seconds, luck in events:
        was_away = outage.is_away
        now += min(seconds, outage.wait_seconds(now)) if was_away and event == "probe" else seconds / 100
        if event == "answered":
            assert outage.answered(now) == was_away
        else:
            given_up = outage.failed(now, luck=luck, is_probe=was_away and event == "probe")
            assert not (given_up and outage.is_away)
        if outage.is_away:
            outage.warning_seconds(outage.since + WARNING_SECONDS)
            assert now + outage.wait_seconds(now) <= max(now, outage.since + bound)
            assert outage.since <= now


# --- a host and those who ask it, in virtual time


@dataclass
class VirtualTime:
    """A clock that goes on to the next sleeper's end when everything waits: nothing is sent that would take turns."""

    now: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    _sleepers: list[tuple[float, int, asyncio.Event]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), event))
        await event.wait()

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, sleep=self.sleep, uniform=self.dice.random)

    async def until(self, seconds: float) -> None:
        """Let everything happen that happens until then."""
        await all_others_wait(quiet_turns=2)
        while self._sleepers and self._sleepers[0][0] <= seconds:
            self.now, _, event = heapq.heappop(self._sleepers)
            event.set()
            await all_others_wait(quiet_turns=2)
        self.now = seconds


class SimulatedHost:
    """A host whose server can be away, and what it was asked."""

    def __init__(self, time: VirtualTime, config: FetchConfig | None = None) -> None:
        self.time = time
        self.config = config or FetchConfig()
        self.host: Host = Hosts(self.config, time.clock(), lambda: time.now).get("https://h:443", Route)
        self.is_there = True
        self.seconds = 0.01
        self.failure: Callable[[], AttemptFailed] = lambda: AttemptFailed(ConnectionFailed, "refused")
        self.asked: list[float] = []
        self.answered: list[object] = []
        self.in_flight = self.peak_in_flight = 0

    async def attempt(self, _: AttemptFailed | None) -> None:
        async with self.host.permit() as permit:
            self.asked.append(self.time.now)
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            try:
                if not self.is_there:
                    raise self.failure()
                await self.time.sleep(self.seconds)
                permit.status = 206
                permit.answered(permit.status, self.time.now - self.seconds, self.time.now)
            finally:
                self.in_flight -= 1

    async def ask(self, number: object = 0) -> None:
        await retried(self.config.retry, self.time.clock(), "https://h/x", self.attempt)
        self.answered.append(number)


@pytest.mark.parametrize("seconds", [2.0, 12.0, 60.0])
async def test_outage_has_one_probe_then_the_learned_limit(seconds: float) -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time)
    simulated.is_there = False
    async with anyio.create_task_group() as group:
        for number in range(500):
            group.start_soon(simulated.ask, number)
        await time.until(1.0)
        simulated.peak_in_flight = 0
        while_away = len(simulated.asked)
        await time.until(seconds)
        assert simulated.peak_in_flight <= 1
        assert len(simulated.asked) - while_away <= 10 + seconds  # not one for each of 500
        simulated.is_there, back = True, len(simulated.asked)
        await time.until(seconds + LONGEST_PROBE_SECONDS + 1.0)
    first, second = simulated.asked[back : back + 2]
    assert first <= seconds + LONGEST_PROBE_SECONDS
    assert second >= first + simulated.seconds  # the probe was answered first
    assert simulated.peak_in_flight == simulated.host.limit == 64
    assert sorted(simulated.answered) == list(range(500))  # type: ignore[type-var]
    assert simulated.host.statistics().outages == 1
    assert (simulated.host.waiting, simulated.host.in_flight, simulated.host.is_idle) == (0, 0, True)


async def test_failure_of_a_busy_host_holds_up_no_other_request() -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time)
    async with anyio.create_task_group() as group:
        for number in range(64):
            group.start_soon(simulated.ask, number)
        await all_others_wait()
        simulated.is_there = False
        await time.until(0.005)
        group.start_soon(simulated.ask, 64)
        await all_others_wait()
        simulated.is_there = True
        await time.until(1.0)
    assert len(simulated.answered) == 65
    assert simulated.host.statistics().outages == 0


async def test_urgent_requests_go_before_read_ahead() -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time, FetchConfig(max_requests_per_host=8))
    simulated.is_there = False

    async def ask(number: int, urgent: bool) -> None:
        with calling(Caller(urgent=urgent)):
            await simulated.ask(number)

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(ask, number, False)
        await time.until(20.0)
        group.start_soon(ask, 100, True)
        await time.until(40.0)
        simulated.is_there = True
        await time.until(60.0)
    assert 100 in simulated.answered[:2]  # behind whoever was the probe, at most


async def test_an_outage_beyond_its_time_ends_all_that_waited() -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time, FetchConfig(max_requests_per_host=2, retry=RetryConfig(outage_seconds=60)))
    simulated.is_there = False
    errors: list[tuple[float, FetchError]] = []

    async def ask() -> None:
        with pytest.raises(ConnectionFailed, match=r"refused; .*outage_seconds=60") as caught:
            await simulated.ask()
        errors.append((time.now, caught.value))

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await time.until(59.0)
        group.start_soon(ask)  # late, and behind 98 others
        await time.until(61.0)
    assert len(errors) == 101
    assert all(60 - LONGEST_PROBE_SECONDS < now <= 60 for now, _ in errors)
    simulated.is_there = True  # who asks now is answered
    async with anyio.create_task_group() as group:
        group.start_soon(simulated.ask)
        await time.until(62.0)
    assert len(simulated.answered) == 1


async def test_outage_beyond_its_time_is_waited_for_anew() -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time, FetchConfig(retry=RetryConfig(outage_seconds=60)))
    simulated.is_there = False

    async def fail() -> None:
        with pytest.raises(ConnectionFailed):
            await simulated.ask()

    async with anyio.create_task_group() as group:
        group.start_soon(fail)
        await time.until(61.0)
    async with anyio.create_task_group() as group:
        group.start_soon(simulated.ask)
        await time.until(90.0)
        simulated.is_there = True
        await time.until(100.0)
    assert simulated.answered


async def test_a_long_queue_after_an_outage_is_not_the_outage() -> None:
    """Who failed in one outage, and waited for its turn long after, is waited for in the next one as anybody."""
    time = VirtualTime()
    simulated = SimulatedHost(time, FetchConfig(max_requests_per_host=2, retry=RetryConfig(outage_seconds=60)))
    simulated.is_there, simulated.seconds = False, 20.0
    async with anyio.create_task_group() as group:
        for number in range(40):
            group.start_soon(simulated.ask, number)
        await time.until(1.0)
        simulated.is_there = True
        await time.until(370.0)
        simulated.is_there, failed_before = False, simulated.host.statistics().errors
        await time.until(400.0)
        simulated.is_there = True
        await time.until(1000.0)
    assert sorted(simulated.answered) == list(range(40))  # type: ignore[type-var]
    assert simulated.host.statistics().errors > failed_before


async def test_a_cancelled_probe_hands_on() -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time)
    simulated.is_there = False
    async with anyio.create_task_group() as group:
        scopes = []

        async def ask(number: int) -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await simulated.ask(number)

        for number in range(8):
            group.start_soon(ask, number)
        await time.until(30.0)
        for scope in scopes[:7]:  # whoever of them sleeps, waits behind it, or waits for its turn
            scope.cancel()
            await all_others_wait()
        simulated.is_there = True
        await time.until(30.0 + LONGEST_PROBE_SECONDS + 1)
    assert simulated.answered == [7]
    assert (simulated.host.waiting, simulated.host.in_flight, simulated.host.is_idle) == (0, 0, True)


async def test_an_answer_to_what_was_under_way_ends_it() -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time)
    simulated.seconds = 20.0
    async with anyio.create_task_group() as group:
        group.start_soon(simulated.ask, "slow")
        await all_others_wait()
        simulated.is_there = False
        for number in range(8):
            group.start_soon(simulated.ask, number)
        await time.until(19.0)
        assert simulated.host.waiting == 8
        simulated.is_there, simulated.seconds = True, 0.0
        await time.until(20.0)
    assert len(simulated.answered) == 9


async def test_a_gateways_503_teaches_no_limit_by_probes() -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time)
    simulated.is_there = False
    simulated.failure = lambda: AttemptFailed(Throttled, "no", status=503)
    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(simulated.ask, number)
        await time.until(60.0)
        simulated.is_there = True
        await time.until(70.0)
    assert len(simulated.answered) == 100
    now = simulated.host.statistics()
    assert now.limit == 64  # two or three refusals are noise
    assert now.throttled == now.errors > 10


async def test_a_pause_that_is_too_long_is_told_at_once() -> None:
    time = VirtualTime()
    simulated = SimulatedHost(time)
    simulated.is_there = False
    simulated.failure = lambda: AttemptFailed(Throttled, "no", status=503, retry_after=3600.0)
    for _ in range(5):
        asking = asyncio.ensure_future(simulated.ask())
        await time.until(time.now + LONGEST_PROBE_SECONDS)
        with pytest.raises(Throttled, match="asks to wait 3600 s"):
            await asking


async def test_the_wait_is_the_meters_and_the_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncfetch")
    time = VirtualTime()
    simulated = SimulatedHost(time)
    simulated.is_there = False
    meter = Meter()

    async def ask() -> None:
        with metered(meter):
            await simulated.ask()

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await time.until(WARNING_SECONDS - 0.5)
        assert caplog.messages == []
        await time.until(WARNING_SECONDS + 0.5)
        [warning] = caplog.messages
        assert warning == (
            "https://h:443 has been away for 5 s, and is waited for, for 295 s more (RetryConfig.outage_seconds):"
            " ConnectionFailed: refused"
        )
        await time.until(40.0)
        simulated.is_there = True
        await time.until(50.0)
    [_, back] = caplog.messages
    assert back.startswith("https://h:443 is back, after 4")
    assert meter.seconds[Cause.OUTAGE] > 38


# --- servers


class Returning(FakeTime):
    """A clock at a time of which a server comes back."""

    def __init__(self, after_seconds: float, back: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.back_at, self._back, self._lock = self.now + after_seconds, back, asyncio.Lock()

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        async with self._lock:  # time stands still meanwhile
            if self.now >= self.back_at:
                self.back_at = inf
                await self._back()


async def check_all(fetcher: Fetcher, url: str) -> None:
    """By each verb that reads, many at a time."""

    async def one(start: int) -> None:
        assert await fetcher.fetch(url, start, start + 3000) == CONTENT[start : start + 3000]

    async def several() -> None:
        ranges = [ByteRange(url, start, start + 10) for start in range(0, 200_000, 20_000)]
        assert [bytes(one) for one in await fetcher.fetch_many(ranges)] == [CONTENT[r.start : r.stop] for r in ranges]

    async def end() -> None:
        _, last = await fetcher.fetch_tail(url, 100)
        assert last == CONTENT[-100:]
        assert (await fetcher.stat(url)).size == len(CONTENT)

    async with anyio.create_task_group() as group:
        for start in range(0, 100_000, 5000):
            group.start_soon(one, start)
        group.start_soon(several)
        group.start_soon(end)


@pytest.mark.parametrize("seconds", [2.0, 12.0, 60.0])
async def test_a_server_that_is_started_anew(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, seconds: float
) -> None:
    url = server.put("/x", CONTENT)
    time = Returning(seconds, server.__aenter__)
    async with fetcher_with(time, retry=RetryConfig(attempts=2)) as fetcher:
        await check_all(fetcher, url)
        await server.__aexit__()
        await check_all(fetcher, url)
        [host] = fetcher.statistics().hosts.values()
    assert host.outages == 1
    assert (host.waiting, host.in_flight, host.retry_budget) == (0, 0, RetryConfig().budget)


async def test_a_server_that_is_not_started_yet(fetcher_with: Callable[..., Fetcher], server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    await server.__aexit__()
    async with fetcher_with(Returning(60.0, server.__aenter__)) as fetcher:
        await check_all(fetcher, url)


@pytest.mark.parametrize("fault", [{"status": 502}, {"status": 503}, {"status": 504}, {"silent": "reset"}], ids=str)
async def test_a_gateway_whose_server_is_away(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[Step], fault: dict[str, Any]
) -> None:
    url = server.put("/x", CONTENT)

    async def back() -> None:
        server.every = lambda _: None

    async with fetcher_with(Returning(10.0, back), retry=RetryConfig(attempts=2)) as fetcher:
        if "silent" in fault:
            await fetcher.fetch(url, 0, 10)  # else it could be a port of TLS
        server.every = lambda _: step(**fault)
        await check_all(fetcher, url)
    assert len(server.requests) < 100


async def test_a_server_that_hangs(fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[Step]) -> None:
    url = server.put("/x", CONTENT)
    server.every = lambda _: step(silent="stall")

    async def back() -> None:
        server.every = lambda _: None

    timeouts = TimeoutConfig(first_byte_seconds=0.1, stall_seconds=0.1)
    async with fetcher_with(Returning(2.0, back), timeouts=timeouts, retry=RetryConfig(attempts=2)) as fetcher:
        await check_all(fetcher, url)


@pytest.mark.parametrize("etag", ["auto", None])
async def test_a_body_goes_on_where_the_server_was_killed(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[Step], etag: str | None
) -> None:
    url = server.put("/x", CONTENT, etag)
    cut = 200_000

    async def kill() -> None:
        server._server.close()  # nobody listens any more

    async def start() -> None:
        await server._server.wait_closed()
        await server.__aenter__()

    server.will(step(cut=cut, end="close", between=kill))
    async with fetcher_with(Returning(30.0, start), retry=RetryConfig(attempts=2)) as fetcher:
        assert await fetcher.fetch(url, 0, len(CONTENT)) == CONTENT
        fetched = fetcher.statistics().bytes
    kept = cut if etag is not None else 0
    assert [request.headers["range"] for request in server.requests] == [
        f"bytes=0-{len(CONTENT) - 1}",
        f"bytes={kept}-{len(CONTENT) - 1}",
    ]
    assert fetched == len(CONTENT) + cut - kept


async def test_another_version_after_an_outage_is_a_change(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    url = server.put("/x", CONTENT)

    async def back() -> None:
        server.put("/x", CONTENT[::-1])
        await server.__aenter__()

    async with fetcher_with(Returning(30.0, back)) as fetcher:
        await fetcher.fetch(url, 0, 10)
        await server.__aexit__()
        with pytest.raises(ObjectChanged):
            await fetcher.fetch(url, 10, 20)
        assert await fetcher.fetch(url, 10, 20) == CONTENT[::-1][10:20]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("number", [socket.EAI_AGAIN, socket.EAI_NONAME])
async def test_a_resolver_that_is_away(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    is_known: bool,
) -> None:
    resolve, is_there = socket.getaddrinfo, is_known

    def look_up(host: str, *arguments: Any, **options: Any) -> object:  # noqa: ANN401 - as the socket's
        if host == "localhost" and not is_there:
            raise socket.gaierror(number, "away")
        return resolve(host, *arguments, **options)

    async def back() -> None:
        nonlocal is_there
        is_there = True

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    server.put("/x", CONTENT)
    url = server.url("/x", "localhost")
    async with fetcher_with(Returning(60.0, back), keepalive_seconds=1e-3) as fetcher:
        if is_known:
            await fetcher.fetch(url, 0, 10)
            is_there = False
            fetcher._transports.http._connector.resolver._names._entries.clear()
            await asyncio.sleep(0.01)
        if number == socket.EAI_NONAME and not is_known:
            with pytest.raises(ConnectionFailed, match="resolved") as caught:  # most often a typing error
                await fetcher.fetch(url, 10, 20)
            assert caught.value.attempts == 2
        else:
            assert await fetcher.fetch(url, 10, 20) == CONTENT[10:20]


@pytest.mark.parametrize(("status", "kind"), [(401, AccessDenied), (403, AccessDenied), (404, NotFound)])
async def test_refusal_during_an_outage_is_raised_at_once(
    fetcher: Fetcher, server: LyingServer, step: type[Step], time: FakeTime, status: int, kind: type[FetchError]
) -> None:
    server.will(step(status=503), step(status=status))
    with pytest.raises(kind) as caught:
        await fetcher.fetch(server.put("/x", CONTENT), 0, 10)
    assert caught.value.attempts == 2
    assert time.now - 1000 <= 0.2


@pytest.mark.parametrize("ends_by", ["cancellation", "closing"])
async def test_waiting_requests_can_leave_at_once(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, ends_by: str
) -> None:
    url = server.put("/x", CONTENT)
    time = FakeTime()
    async with fetcher_with(time) as fetcher:
        await fetcher.fetch(url, 0, 10)
        await server.__aexit__()
        [host] = fetcher._hosts._hosts.values()
        clock = time.clock()
        host._clock = Clock(clock.monotonic, clock.wall, lambda _: asyncio.Event().wait(), clock.uniform)
        errors: list[BaseException] = []

        async def read(start: int) -> None:
            try:
                await fetcher.fetch(url, start, start + 10)
            except (ClosedError, asyncio.CancelledError) as error:
                errors.append(error)
                raise

        tasks = [asyncio.ensure_future(read(start)) for start in range(0, 200_000, 2000)]
        with anyio.fail_after(20):
            while not host._outage.is_away or host.in_flight:
                await anyio.lowlevel.checkpoint()
        if ends_by == "cancellation":
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert host.is_idle
            assert host.waiting == 0
    results = await asyncio.gather(*tasks, return_exceptions=True)
    kind = asyncio.CancelledError if ends_by == "cancellation" else ClosedError
    assert {type(result) for result in results} == {kind}
    assert len(errors) == 100
    await server.__aenter__()


async def test_another_host_goes_on(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, lying_server: type[LyingServer]
) -> None:
    url = server.put("/x", CONTENT)
    async with lying_server() as other:
        theirs = other.put("/x", CONTENT)

        async def back() -> None:
            for start in range(0, 1000, 10):
                assert await fetcher.fetch(theirs, start, start + 10) == CONTENT[start : start + 10]
            await server.__aenter__()

        async with fetcher_with(Returning(30.0, back)) as fetcher:
            await server.__aexit__()
            await check_all(fetcher, url)
            hosts = fetcher.statistics().hosts
    assert (hosts[server.url("")].outages, hosts[other.url("")].outages) == (1, 0)


@pytest.mark.usefixtures("aws_keys")
async def test_a_store_that_is_away() -> None:
    fault: Fault | None = None

    async def back() -> None:
        nonlocal fault
        fault = None

    async with S3Server({"b/x": CONTENT}, fault=lambda _: fault) as server:
        time = Returning(60.0, back)
        async with s3_fetcher(server, time, attempts=2) as fetcher:
            fault = Fault.reset(None)
            await check_all(fetcher, "s3://b/x")
            for verb in (
                lambda: fetcher.listdir("s3://b"),
                lambda: fetcher.put("s3://b/y", CONTENT),
                lambda: fetcher.delete("s3://b/y"),
            ):
                fault, time.back_at = Fault.status(503), time.now + 60.0
                await verb()


@pytest.fixture(params=["STS", "a container's"])
def credentials(
    request: pytest.FixtureRequest, server: LyingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, aws_keys: None
) -> Callable[[bool], None]:
    """A service at ``server`` that gives credentials for some minutes; called with whether it answers."""
    keys, soon = Keys(session_token="t"), (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    if request.param == "STS":
        (tmp_path / "token").write_text("a token")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url(""))
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    else:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url("/of-a-container"))
        monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    given = {"AccessKeyId": keys.access_key, "SecretAccessKey": keys.secret_key, "Token": "t", "Expiration": soon}
    xml = (
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
        f"<AccessKeyId>{keys.access_key}</AccessKeyId><SecretAccessKey>{keys.secret_key}</SecretAccessKey>"
        f"<SessionToken>t</SessionToken><Expiration>{soon}</Expiration>"
        "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )

    def serve(answers: bool) -> None:
        def step(asked: Request) -> Step:
            text = (xml if asked.path == "/" else json.dumps(given)).encode()
            if not answers:
                return Step(silent="close")
            return Step(status=200, headers={"Content-Length": str(len(text))}, body=text, end="close")

        server.every = step

    return serve


async def test_a_service_of_credentials_that_is_away(credentials: Callable[[bool], None]) -> None:
    async def back() -> None:
        credentials(True)

    async with S3Server({"b/x": CONTENT}, keys=Keys(session_token="t")) as server:
        time = Returning(5.0, back)
        credentials(False)
        async with s3_fetcher(server, time, attempts=2, outage_seconds=10.0) as fetcher:
            assert await fetcher.fetch("s3://b/x", 10, 20) == CONTENT[10:20]
            assert time.now >= 1005.0
            credentials(False)
            time.now += 300.0  # they are good for less
            with pytest.raises(ConnectionFailed, match=r"the credentials for S3 can't be had.*outage_seconds=10"):
                await fetcher.fetch("s3://b/x", 10, 20)


async def test_a_hub_that_is_away_and_a_url_that_expires() -> None:
    faults: dict[str, Fault | None] = {"hub": None, "cdn": None}
    hub = HubServer(fault=lambda _: faults["hub"], cdn_fault=lambda _: faults["cdn"])
    hub.push("datasets/org/name", {"x": CONTENT})

    async def back() -> None:
        if faults["cdn"] is not None:
            hub.revoke()  # the urls of before: a new one is asked for
        faults.update(hub=None, cdn=None)

    async with hub:
        time = Returning(60.0, back)
        config = FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url, trust_env=False)
        async with Fetcher(config, _clock=time.clock()) as fetcher:
            faults["hub"] = Fault.reset(None)
            await check_all(fetcher, "hf://datasets/org/name/x")
            faults["cdn"], time.back_at = Fault.reset(None), time.now + 60.0
            await check_all(fetcher, "hf://datasets/org/name/x")
            faults["hub"], time.back_at = Fault.status(503), time.now + 60.0
            await fetcher.listdir("hf://datasets/org/name")


async def test_a_back_end_of_fsspec_that_is_away(odd: type[OddFileSystem]) -> None:
    async def back() -> None:
        odd.read = lambda data: data

    odd.fail(ConnectionRefusedError("x"))
    config = FetchConfig(retry=RetryConfig(attempts=2))
    async with Fetcher(config, _clock=Returning(60.0, back).clock()) as fetcher, anyio.create_task_group() as group:

        async def read(start: int) -> None:
            assert await fetcher.fetch("odd://x", start, start + 10) == ODD[start : start + 10]

        for start in range(0, 20_000, 1000):
            group.start_soon(read, start)
    assert fetcher.statistics().outages == 1

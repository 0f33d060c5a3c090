"""A late answer and the second request for it."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from asyncfetch.config import FetchConfig, HedgeConfig, RetryConfig, S3Config, TimeoutConfig
from asyncfetch.errors import AccessDenied, ConfigError, FetchTimeout, NotFound
from asyncfetch.fetch import Fetcher, buffers, connector
from asyncfetch.fetch.connection import Connection
from asyncfetch.fetch.hedge import BURST, REFRESH, SHORTEST_PATIENCE_SECONDS, Hedging
from asyncfetch.fetch.hosts import Permit
from asyncfetch.fetch.request import HttpRequest
from asyncfetch.ranges import ByteRange
from asyncfetch.testing import Fault, HubServer, S3Server
from tests.fetch.test_engine_lifetime import connections_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncfetch.testing import ServedRequest
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = bytes(range(256)) * 1024
PATIENT = TimeoutConfig(connect_seconds=5, first_byte_seconds=5, stall_seconds=5)


@pytest.fixture(params=["direct"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def hedging(**settings: float) -> Hedging:
    return Hedging(HedgeConfig(**settings))


def answer(policy: Hedging, times: list[float]) -> None:
    for seconds in times:
        policy.sent()
        policy.answered(seconds)


@asynccontextmanager
async def acquainted(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, **settings: object
) -> AsyncIterator[tuple[Fetcher, str]]:
    """A fetcher that has a connection and thinks that answers come within 10 ms, and the object's url."""
    url = server.put("/x", CONTENT)
    settings.setdefault("timeouts", PATIENT)
    settings.setdefault("hedge", HedgeConfig())
    settings.setdefault("retry", RetryConfig(attempts=1))
    async with fetcher_with(**settings) as fetcher:
        await fetcher.fetch(url, 0, 1)
        become_acquainted(fetcher)
        server.requests.clear()
        yield fetcher, url


def become_acquainted(fetcher: Fetcher) -> None:
    """As if quick answers had come, and the budget were full."""
    [host] = fetcher._hosts._hosts.values()
    host.hedging = Hedging(fetcher.config.hedge)
    answer(host.hedging, [1e-4] * REFRESH)


def hold(server: LyingServer, *, first_seconds: float, second_seconds: float = 0.0) -> None:
    """Answers begin so long after the second request has arrived."""
    loop = asyncio.get_running_loop()
    answers = [loop.create_future(), loop.create_future()]

    def limiter() -> asyncio.Future[None] | None:
        if len(server.requests) == 2:
            loop.call_later(first_seconds, answers[0].set_result, None)
            loop.call_later(second_seconds, answers[1].set_result, None)
        return answers[len(server.requests) - 1] if len(server.requests) <= 2 else None

    server.limiter = limiter


def hedges(fetcher: Fetcher) -> tuple[int, int]:
    now = fetcher.statistics()
    [host] = now.hosts.values()
    assert (now.hedges, now.hedge_wins) == (host.hedges, host.hedge_wins)
    return now.hedges, now.hedge_wins


async def test_a_late_answer_is_overtaken(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.will(step(silent="stall"))
        with anyio.fail_after(2):
            assert await fetcher.fetch(url, 5, 100_000) == CONTENT[5:100_000]
        assert hedges(fetcher) == (1, 1)
        first, second = server.requests
        assert first.connection != second.connection
        assert first.headers == second.headers
        assert fetcher.statistics().in_flight == 0
        assert fetcher.statistics().errors == 0


async def test_the_losers_connection_is_closed(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.will(step(silent="stall"))
        await fetcher.fetch(url)
        for start in range(10):
            await fetcher.fetch(url, start, start + 1)
        assert [request.connection for request in server.requests[1:]] == [2] * 11
        assert connections_to(server.port) == 1


async def test_an_answer_in_time_stays_alone(fetcher_with: Callable[..., Fetcher], server: LyingServer) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        assert await fetcher.fetch(url) == CONTENT
        assert hedges(fetcher) == (0, 0)
        assert len(server.requests) == 1


async def test_the_first_answer_may_still_win(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.every = lambda request: step(silent="stall") if request.connection != 1 else None
        hold(server, first_seconds=0.0)
        with anyio.fail_after(2):
            assert await fetcher.fetch(url, 7, 90_000) == CONTENT[7:90_000]
        assert hedges(fetcher) == (1, 0)
        assert await fetcher.fetch(url, 0, 9) == CONTENT[:9]
        assert server.requests[-1].connection == 1  # the winner's is pooled again
        assert fetcher.statistics().in_flight == 0


def assert_one_failed(fetcher: Fetcher, kind: dict[str, Any]) -> None:
    now = fetcher.statistics()
    assert (now.errors, now.throttled, now.retries) == (1, int(kind.get("status") == 503), 0)


UNFIT: dict[str, dict[str, Any]] = {
    "refused": {"status": 503},
    "reset": {"silent": "reset"},
    "the wrong range": {"headers": {"Content-Range": f"bytes 1-10/{len(CONTENT)}"}},
    "another version": {"headers": {"ETag": '"other"'}},
    "no http": {"raw": b"what?\r\n\r\n", "end": "close"},
}


@pytest.mark.parametrize("kind", UNFIT.values(), ids=UNFIT)
async def test_a_second_answer_that_does_not_fit_changes_nothing(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], kind: dict[str, Any]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.every = lambda request: step(**kind) if request.connection != 1 else None
        hold(server, first_seconds=0.1)
        with anyio.fail_after(2):
            assert await fetcher.fetch(url, 7, 90_000) == CONTENT[7:90_000]
        assert hedges(fetcher) == (1, 0)
        assert_one_failed(fetcher, kind)


@pytest.mark.parametrize("kind", UNFIT.values(), ids=UNFIT)
async def test_a_first_answer_that_does_not_fit_waits_for_the_second(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], kind: dict[str, Any]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.every = lambda request: step(**kind) if request.connection == 1 else None
        hold(server, first_seconds=0.0, second_seconds=0.05)
        with anyio.fail_after(2):
            assert await fetcher.fetch(url, 7, 90_000) == CONTENT[7:90_000]
        assert hedges(fetcher) == (1, 1)
        assert_one_failed(fetcher, kind)


async def test_body_of_an_unfit_first_answer_is_not_hoarded(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one may take its time, while the first one's server sends on and on."""
    size = 60_000_000
    place = {"Content-Range": f"bytes 0-{size - 1}/{size}", "Content-Length": str(size)}
    held = [0]
    buffer_updated = Connection.buffer_updated

    def note(connection: Connection, nbytes: int) -> None:
        buffer_updated(connection, nbytes)
        held.append(len(connection.answer._held))

    monkeypatch.setattr(Connection, "buffer_updated", note)
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.every = lambda request: (
            step(headers=place, body=bytes(size), end="stall") if request.connection == 1 else None
        )
        hold(server, first_seconds=0.0, second_seconds=0.3)
        with anyio.fail_after(2):
            assert await fetcher.fetch(url, 7, 90_000) == CONTENT[7:90_000]
        assert hedges(fetcher) == (1, 1)
    assert max(held) < size // 4


@pytest.mark.parametrize("refused", [1, 2])
async def test_pause_of_either_refused_request_holds_for_the_host(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], refused: int
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        refusal = step(status=429, headers={"Retry-After": "5"})
        server.every = lambda request: refusal if (request.connection == 1) is (refused == 1) else None
        hold(server, first_seconds=0.0 if refused == 1 else 0.1, second_seconds=0.05 if refused == 1 else 0.0)
        with anyio.fail_after(2):
            assert await fetcher.fetch(url, 7, 90_000) == CONTENT[7:90_000]
        [host] = fetcher._hosts._hosts.values()
        assert fetcher.statistics().throttled == 1
        assert host._paused_until > fetcher._clock.monotonic()


async def test_overtaken_request_gives_up_its_place_at_once(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server, max_requests_per_host=2) as (fetcher, url):
        server.will(step(silent="stall"), step(cut=100, end="stall"))
        both_sent = anyio.Event()
        server.limiter = lambda: both_sent.set() if len(server.requests) == 2 else None
        with anyio.fail_after(2):
            async with anyio.create_task_group() as group:
                group.start_soon(fetcher.fetch, url)
                await both_sent.wait()
                assert await fetcher.fetch(url, 0, 9) == CONTENT[:9]
                assert hedges(fetcher) == (1, 1)
                assert fetcher.statistics().in_flight == 1
                group.cancel_scope.cancel()
        assert fetcher.statistics().in_flight == 0


async def test_first_error_is_raised_when_both_requests_fail(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.every = lambda request: step(status=404 if request.connection == 1 else 403)
        hold(server, first_seconds=0.1)
        with pytest.raises(NotFound):
            await fetcher.fetch(url)
        assert hedges(fetcher) == (1, 0)


async def test_a_body_that_breaks_after_it_won_is_resumed(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server, retry=RetryConfig(attempts=2)) as (fetcher, url):
        server.will(step(silent="stall"), step(cut=1000, end="reset"))
        with anyio.fail_after(2):
            assert await fetcher.fetch(url) == CONTENT
        assert server.requests[-1].headers["range"] == f"bytes=1000-{len(CONTENT) - 1}"
        assert hedges(fetcher) == (1, 1)


async def test_a_full_limiter_makes_no_second_request(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    timeouts = TimeoutConfig(first_byte_seconds=0.3)
    async with acquainted(fetcher_with, server, max_requests_per_host=1, timeouts=timeouts) as (fetcher, url):
        server.will(step(silent="stall"))
        with pytest.raises(FetchTimeout):
            await fetcher.fetch(url)
        assert hedges(fetcher) == (0, 0)
        assert server.peak_in_flight == 1


async def test_hedging_can_be_switched_off(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    timeouts = TimeoutConfig(first_byte_seconds=0.3)
    async with acquainted(fetcher_with, server, hedge=None, timeouts=timeouts) as (fetcher, url):
        server.will(step(silent="stall"))
        with pytest.raises(FetchTimeout):
            await fetcher.fetch(url)
        assert hedges(fetcher) == (0, 0)


async def test_a_redirect_that_is_late_is_overtaken(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.will(step(silent="stall"), step(status=302, headers={"Location": "/x"}))
        with anyio.fail_after(2):
            assert await fetcher.fetch(url.replace("/x", "/y"), 1, 9) == CONTENT[1:9]
        assert hedges(fetcher) == (1, 1)
        assert [request.path for request in server.requests] == ["/y", "/y", "/x"]


async def test_late_answer_over_tls_is_overtaken(
    fetcher_with: Callable[..., Fetcher], tls_server: LyingServer, step: type[StepType], ca_file: str
) -> None:
    async with acquainted(fetcher_with, tls_server, ca_file=ca_file) as (fetcher, url):
        tls_server.will(step(silent="stall"))
        with anyio.fail_after(2):
            assert await fetcher.fetch(url) == CONTENT
        assert hedges(fetcher) == (1, 1)


@pytest.mark.parametrize("kind", [{}, {"status": 503}, {"silent": "reset"}], ids=str)
async def test_a_race_leaves_nothing_to_the_garbage_collector(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], kind: dict[str, Any]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.will(step() if kind else step(silent="stall"), step(**kind))
        hold(server, first_seconds=0.1)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await fetcher.fetch(url)
            await anyio.lowlevel.checkpoint()
            gc.collect()
            left = [thing for thing in gc.garbage if type(thing) in {Connection, HttpRequest, Permit}]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert fetcher.statistics().hedges == 1
        assert not left


class Late:
    """A fault rule: the next request after ``arm`` gets no answer."""

    def __init__(self) -> None:
        self._armed = False

    def arm(self) -> None:
        self._armed = True

    def __call__(self, request: ServedRequest) -> Fault | None:
        armed, self._armed = self._armed, False
        return Fault.stall(after_bytes=None) if armed else None


async def overtakes(fetcher: Fetcher, url: str, late: Late) -> None:
    """A late answer costs little once the host is known."""
    for start in range(REFRESH):
        await fetcher.fetch(url, start, start + 1)
    late.arm()
    with anyio.fail_after(2):
        assert await fetcher.fetch(url, 1, 90_000) == CONTENT[1:90_000]
    now = fetcher.statistics()
    assert (now.hedges, now.hedge_wins) == (1, 1)


@pytest.mark.usefixtures("aws_keys")
async def test_late_answer_of_a_presigned_url_is_overtaken() -> None:
    late = Late()
    async with S3Server({"b/x": CONTENT}, fault=late) as server:
        s3 = S3Config(endpoint_url=server.url)
        async with Fetcher(FetchConfig(ca_file=server.ca_file, trust_env=False, s3=s3)) as fetcher:
            await overtakes(fetcher, "s3://b/x", late)


async def test_late_answer_of_the_hubs_cdn_is_overtaken() -> None:
    late = Late()
    async with HubServer(cdn_fault=late) as hub:
        hub.push("datasets/org/name", {"x": CONTENT})
        config = FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url, trust_env=False)
        async with Fetcher(config) as fetcher:
            await overtakes(fetcher, "hf://datasets/org/name/x", late)


async def test_the_buffer_holds_one_answer_and_no_byte_of_the_other(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        buffer = bytearray(len(CONTENT))
        for microseconds in range(0, 4000, 200):
            become_acquainted(fetcher)
            server.requests.clear()
            server.will(step(), step(body=bytes(len(CONTENT))))
            hold(server, first_seconds=2e-3, second_seconds=1e-6 * microseconds)
            buffer[:] = b"\xff" * len(CONTENT)
            await fetcher.fetch_into(url, 0, len(CONTENT), buffer)
            after = bytes(buffer)
            assert after in {CONTENT, bytes(len(CONTENT))}
            await anyio.sleep(2e-3)
            assert buffer == after
        assert fetcher.statistics().hedges > 5


async def test_ranges_of_one_request_are_of_one_answer(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    step: type[StepType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "LONG_BYTES", 1000)
    monkeypatch.setattr(connector, "SCRATCH_BYTES", 1024)
    spans = [(0, 20_000), (20_000, 20_100), (20_200, 60_000)]
    async with acquainted(fetcher_with, server) as (fetcher, url):
        for microseconds in range(0, 4000, 400):
            become_acquainted(fetcher)
            server.requests.clear()
            server.will(step(), step(body=bytes(60_000)))
            hold(server, first_seconds=2e-3, second_seconds=1e-6 * microseconds)
            views = await fetcher.fetch_many(ByteRange(url, *span) for span in spans)
            after = list(map(bytes, views))
            assert after in ([CONTENT[start:stop] for start, stop in spans], [bytes(stop - at) for at, stop in spans])
            await anyio.sleep(2e-3)
            assert views == after
        assert fetcher.statistics().hedges > 2


@pytest.mark.parametrize("seconds", [0.0, 0.011, 0.02, 0.05])
async def test_a_cancellation_ends_both(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], seconds: float
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.every = lambda _: step(silent="stall")
        with anyio.move_on_after(seconds) as scope:
            await fetcher.fetch(url)
        assert scope.cancelled_caught
        assert fetcher.statistics().in_flight == 0
        server.every = lambda _: None
        assert await fetcher.fetch(url) == CONTENT
        assert connections_to(server.port) == 1


async def test_cancellation_after_the_second_request_leaves_no_rest(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    """Among these turns is the one in which it has won, and nobody has taken it yet."""
    turns = 40
    async with acquainted(fetcher_with, server) as (fetcher, url):
        for turn in range(turns):
            become_acquainted(fetcher)
            server.requests.clear()
            both_there = asyncio.Event()

            def answer_second(_: object, both_there: asyncio.Event = both_there) -> StepType | None:
                if len(server.requests) == 1:
                    return step(silent="stall")
                both_there.set()
                return None

            server.every = answer_second
            fetching = asyncio.create_task(fetcher.fetch(url, 5, 200_000))
            await both_there.wait()
            for _ in range(turn):
                await asyncio.sleep(0)
            fetching.cancel()
            await asyncio.wait([fetching])
            assert fetcher.statistics().in_flight == 0
        assert hedges(fetcher)[1] < turns  # some were cancelled before it had won
        server.every = lambda _: None
        assert await fetcher.fetch(url) == CONTENT
        assert connections_to(server.port) == 1


async def test_a_host_that_falls_silent_gets_few_second_requests(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server, timeouts=TimeoutConfig(first_byte_seconds=0.3)) as (fetcher, url):
        server.every = lambda _: step(silent="stall")

        async def ask(start: int) -> None:
            with pytest.raises(FetchTimeout):
                await fetcher.fetch(url, start, start + 1)

        async with anyio.create_task_group() as group:
            for start in range(40):
                group.start_soon(ask, start)
        assert 1 <= fetcher.statistics().hedges <= BURST
        assert fetcher.statistics().hedge_wins == 0


def test_no_patience_before_the_host_is_known() -> None:
    policy = hedging()
    answer(policy, [0.1] * (REFRESH - 1))
    assert policy.patience_seconds is None
    answer(policy, [0.1])
    assert policy.patience_seconds == pytest.approx(0.2)


def test_patience_is_the_quantile_if_longer_than_a_head_start() -> None:
    policy = hedging(quantile=0.9)
    answer(policy, ([0.1] * 8 + [1.0, 2.0]) * 32)
    assert policy.patience_seconds == 2.0


def test_patience_has_a_floor() -> None:
    policy = hedging()
    answer(policy, [1e-4] * REFRESH)
    assert policy.patience_seconds == SHORTEST_PATIENCE_SECONDS


def test_host_slow_as_a_whole_gets_no_hedges_until_that_is_usual() -> None:
    policy = hedging()
    answer(policy, [0.1] * 320)
    answer(policy, [0.5] * REFRESH)
    assert policy.patience_seconds is None
    answer(policy, [0.5] * 320)
    assert policy.patience_seconds is None
    answer(policy, [0.5] * 10_000)
    assert policy.patience_seconds == pytest.approx(1.0)
    answer(policy, [0.1] * 320)
    assert policy.patience_seconds == pytest.approx(0.2)


def spend(policy: Hedging, requests: int, *, won: bool) -> int:
    """Hedges as often as the budget allows; how often that was."""
    count = 0
    for _ in range(requests):
        policy.sent()
        if policy.may_hedge:
            policy.hedged()
            policy.ended(won=won)
            count += 1
    return count


def test_the_budget_holds_whatever_is_won() -> None:
    assert 2_900 <= spend(hedging(max_share=0.03), 100_000, won=True) <= 3_000 + BURST


def test_second_requests_in_vain_become_rare_but_go_on() -> None:
    assert 100 <= spend(hedging(max_share=0.03), 100_000, won=False) <= 300


def test_hedging_of_none_is_off() -> None:
    policy = Hedging(None)
    answer(policy, [0.1] * 1000)
    assert policy.patience_seconds is None


@pytest.mark.parametrize("settings", [{"quantile": 1.0}, {"quantile": 0.1}, {"max_share": 0.0}, {"max_share": 1.0}])
def test_settings_that_make_no_sense(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        HedgeConfig(**settings)


async def test_an_answer_refused_in_time_is_final(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    async with acquainted(fetcher_with, server) as (fetcher, url):
        server.will(step(status=403))
        with pytest.raises(AccessDenied):
            await fetcher.fetch(url)
        assert len(server.requests) == 1

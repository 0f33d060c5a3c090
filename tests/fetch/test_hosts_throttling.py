"""What a host that says 429 or 503, or fails all the time, changes for its other requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from asyncfetch.config import FetchConfig, RetryConfig, StreamConfig, config_share
from asyncfetch.errors import AccessDenied, AsyncFetchError, ConfigError, FetchError, NotFound, Throttled
from asyncfetch.fetch.hosts import MAX_IDLE_HOSTS, PAUSE_SPREAD, Host, Hosts
from asyncfetch.fetch.limit import BACKOFF
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.fetch.urls import Route
from asyncfetch.runtime.memory_pool import MemoryPool
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = bytes(range(256)) * 4


def web_host(time: FakeTime, config: FetchConfig | None = None) -> Host:
    return Hosts(config or FetchConfig(), time.clock(), lambda: time.now).get("https://h:443", Route)


async def refuse(host: Host, *, retry_after: float | None = None) -> None:
    async with host.permit() as permit:
        permit.failed(AttemptFailed(Throttled, "no", status=503, retry_after=retry_after))


async def take_turn(host: Host) -> None:
    async with host.permit():
        pass


async def test_a_pause_is_every_request_s_and_ends_at_different_times(time: FakeTime) -> None:
    host = web_host(time)
    await refuse(host, retry_after=20.0)
    time.luck = 0.5
    await take_turn(host)
    assert time.sleeps == pytest.approx([20 * (1 + PAUSE_SPREAD / 2)])
    await take_turn(host)
    assert len(time.sleeps) == 1


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (500, {"Retry-After": "20"}),
        (503, {"Retry-After": "20"}),
        (404, {"RateLimit": '"api";r=0;t=19'}),
        (403, {"Retry-After": "20"}),
    ],
)
async def test_pause_is_the_hosts_and_error_its_own_for_any_refusal(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    step: type[StepType],
    time: FakeTime,
    ca_file: str,
    status: int,
    headers: dict[str, str],
) -> None:
    any_server.put("/a", CONTENT)
    url = any_server.put("/b", CONTENT)
    any_server.will(step(status=status, headers={"Content-Length": "0", **headers}, body=b""))
    time.luck = 0.0
    async with fetcher_with(time, ca_file=ca_file, retry=RetryConfig(attempts=1)) as fetcher:
        with pytest.raises(FetchError) as caught:
            await fetcher.fetch(any_server.url("/a"), 0, 10)
        assert caught.value.status == status
        assert type(caught.value) is {500: FetchError, 503: Throttled, 404: NotFound, 403: AccessDenied}[status]
        assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]
    assert time.sleeps == [20.0]


async def test_pause_that_ends_later_counts_of_two(time: FakeTime) -> None:
    host = web_host(time)
    time.luck = 0.0
    await refuse(host, retry_after=20.0)
    host.pause(5.0)
    await take_turn(host)
    assert time.sleeps == [20.0]


async def test_a_pause_that_nobody_waits_for_pauses_nobody(time: FakeTime) -> None:
    host = web_host(time)
    await refuse(host, retry_after=3600.0)
    await take_turn(host)
    assert time.sleeps == []


async def test_a_host_is_not_forgotten_before_its_pause_is_over(time: FakeTime) -> None:
    hosts = Hosts(FetchConfig(), time.clock(), lambda: time.now)
    paused = hosts.get("https://paused:443", Route)
    await refuse(paused, retry_after=20.0)
    for number in range(MAX_IDLE_HOSTS * 2):
        hosts.get(f"https://{number}:443", Route)
    assert hosts.get("https://paused:443", Route) is paused
    time.now += 20.0
    for number in range(MAX_IDLE_HOSTS):
        hosts.get(f"https://{number}:443", Route)
    assert hosts.get("https://paused:443", Route) is not paused


async def test_paused_host_with_the_earliest_end_is_forgotten_first(time: FakeTime) -> None:
    hosts = Hosts(FetchConfig(), time.clock(), lambda: time.now)
    paused = [hosts.get(f"https://paused{number}:443", Route) for number in range(MAX_IDLE_HOSTS)]
    for number, host in enumerate(paused):
        await refuse(host, retry_after=5.0 if number == 7 else 20.0)
    hosts.get("https://new:443", Route)
    left = hosts.statistics(MemoryPool(0).statistics()).hosts
    assert left.keys() == {host.origin for host in paused} - {paused[7].origin} | {"https://new:443"}


async def test_request_cancelled_in_a_pause_leaves_its_place(time: FakeTime) -> None:
    host = web_host(time, FetchConfig(max_requests_per_host=1))
    await refuse(host, retry_after=20.0)
    time.sleep = anyio.sleep  # type: ignore[assignment]
    host._clock = time.clock()
    with anyio.move_on_after(0.01):
        await host.permit().__aenter__()
    assert (host.waiting, host.in_flight, host.is_idle) == (0, 0, True)


async def test_requests_held_up_by_a_pause_count_as_waiting(time: FakeTime) -> None:
    host = web_host(time)
    await refuse(host, retry_after=20.0)
    resume = anyio.Event()

    async def sleep(_: float) -> None:
        await resume.wait()
        time.now += 30.0

    time.sleep = sleep  # type: ignore[assignment]
    host._clock = time.clock()
    async with anyio.create_task_group() as group:
        group.start_soon(take_turn, host)
        await all_others_wait()
        assert (host.waiting, host.in_flight, host.is_idle) == (1, 0, False)
        resume.set()
    assert host.is_idle


async def test_a_refusal_lowers_the_limit_and_is_counted(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], time: FakeTime
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(time) as fetcher:
        server.will(step(status=503, headers={"Retry-After": "1"}), step(status=500), step(status=429))
        await fetcher.fetch(url, 0, 10)
        now = fetcher.statistics()
    [host] = now.hosts.values()
    assert host.limit == int(BACKOFF * FetchConfig().max_requests_per_host)
    assert (now.throttled, host.throttled, host.errors, host.retries) == (2, 2, 3, 3)
    assert host.retry_budget == RetryConfig().budget - 2 + 1  # the one with Retry-After was free, the answer gave one


@pytest.mark.parametrize("path", ["/x", None])
async def test_a_limit_that_is_not_learned_stays(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], time: FakeTime, path: str | None
) -> None:
    async with fetcher_with(time, learn_limit=path is None) as fetcher:
        if path is None:
            await fetcher.fetch(__file__, 0, 10)
        else:
            server.will(step(status=503, headers={"Retry-After": "1"}))
            await fetcher.fetch(server.put(path, CONTENT), 0, 10)
        [host] = fetcher.statistics().hosts.values()
    assert host.limit == FetchConfig().max_requests_per_host


async def test_a_host_that_is_gone_is_given_up_for_all(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], time: FakeTime
) -> None:
    url = server.put("/x", CONTENT)
    server.every = lambda _: step(status=500)
    async with fetcher_with(time, retry=RetryConfig(attempts=5, budget=6)) as fetcher:
        errors = []
        for _ in range(4):
            with pytest.raises(FetchError) as caught:
                await fetcher.fetch(url, 0, 10)
            errors.append(caught.value)
        assert [error.attempts for error in errors] == [5, 3, 1, 1]
        assert ["budget of 6 repeats" in str(error) for error in errors] == [False, True, True, True]
        server.every = lambda _: None
        await fetcher.fetch(url, 0, 10)
        server.will(step(status=500))
        assert bytes(await fetcher.fetch(url, 0, 10)) == CONTENT[:10]


async def test_thirty_percent_of_faults_don_t_spend_it(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], time: FakeTime
) -> None:
    url = server.put("/x", CONTENT)
    count = 0

    def three_in_ten(_: object) -> StepType | None:
        nonlocal count
        count += 1
        return step(cut=3, end="close") if count % 10 in {0, 3, 7} else None

    server.every = three_in_ten
    async with fetcher_with(time, retry=RetryConfig(attempts=10), max_requests_per_host=8) as fetcher:
        for _ in range(300):
            assert bytes(await fetcher.fetch(url, 0, 10)) == CONTENT[:10]
        [host] = fetcher.statistics().hosts.values()
    assert host.retry_budget >= RetryConfig().budget - 10


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 64),
        ({"max_requests_per_host": 200}, 64),
        ({"max_requests_per_host": 2}, 2),
        ({"max_requests_per_host": 200, "learn_limit": False}, 200),
    ],
    ids=str,
)
async def test_limit_begins_as_configured(settings: dict[str, int], limit: int) -> None:
    assert Hosts(FetchConfig(**settings)).get("https://h:443", Route).limit == limit  # type: ignore[arg-type]


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_requests_per_host must be at least 1, not 0"):
        FetchConfig(max_requests_per_host=0)


def test_workers_share_the_bound() -> None:
    fetch = FetchConfig(max_requests_per_host=100)
    assert config_share(StreamConfig(fetch=fetch), 8).fetch.max_requests_per_host == 12


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget must not be negative"):
        RetryConfig(budget=-1)


async def test_no_budget_repeats_nothing(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType], time: FakeTime
) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(status=500))
    async with fetcher_with(time, retry=RetryConfig(budget=0)) as fetcher:
        with pytest.raises(AsyncFetchError, match="budget of 0 repeats"):
            await fetcher.fetch(url, 0, 10)

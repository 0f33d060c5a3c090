"""What is told of a host's failures: to the log, and to ``RetryConfig.on_retry``."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import asyncfetch as af
from asyncfetch.config import HedgeConfig, RetryConfig
from asyncfetch.errors import ConnectionFailed, FetchError, NotFound, Throttled
from asyncfetch.fetch import Fetcher, retry
from asyncfetch.fetch.retry import (
    LEAST_FAILURES,
    MOST_FAILURES,
    WATCH_SECONDS,
    AttemptFailed,
    FailureWatch,
    RetryVerdict,
)
from asyncfetch.testing import Fault, FaultOnce, S3Server
from tests.fetch.test_hedge import acquainted, hold
from tests.fetch.test_hosts_throttling import refuse, web_host

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncfetch.config import RetryDetails
    from tests.fetch.conftest import FakeTime, LyingServer
    from tests.fetch.conftest import Step as StepType
    from tests.fetch.odd_files import OddFileSystem

CONTENT = bytes(range(256)) * 40
SECRETS = "?X-Amz-Signature=hunter2&sig=hunter2"


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """Messages of the engine's records of a level so far."""
    caplog.set_level(logging.DEBUG, "asyncfetch")

    def messages(level: int = logging.DEBUG) -> list[str]:
        return [one.getMessage() for one in caplog.records if (one.name, one.levelno) == ("asyncfetch", level)]

    return messages


def fails(status: int = 500) -> AttemptFailed:
    kind = Throttled if status == 503 else FetchError
    return AttemptFailed(kind, "no", RetryVerdict.FATAL if status == 404 else RetryVerdict.AGAIN, status)


async def test_attempts_that_are_made_again_have_one_record_each(
    records: Callable[..., list[str]],
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    step: type[StepType],
    time: FakeTime,
    ca_file: str,
) -> None:
    any_server.put(f"/x{SECRETS}", CONTENT)
    any_server.will(step(status=500), step(cut=100, end="reset"), step(status=500), step(status=404))
    time.luck = 0.5
    async with fetcher_with(time, ca_file=ca_file) as fetcher:
        with pytest.raises(NotFound):
            await fetcher.fetch(any_server.url(f"/x{SECRETS}"), 0, 1000)
    told = records()
    host = f"127.0.0.1:{any_server.port}"
    assert len(told) == 3
    for number, (record, status, wait) in enumerate(zip(told, (500, 206, 500), (0.05, 0.05, 0.1), strict=True), 1):
        url = any_server.url("/x?X-Amz-Signature=***&sig=***")
        assert record.startswith(f"attempt {number} at {url} failed (host {host}, status {status}): ")
        assert record.endswith(f"; again in {wait:g} s")
    assert "hunter2" not in str(told)


async def test_a_second_request_has_a_record(
    records: Callable[..., list[str]], fetcher_with: Callable[..., Fetcher], server: LyingServer, way: str
) -> None:
    if way == "session":
        pytest.skip("what the session asks for isn't asked a second time")
    async with acquainted(fetcher_with, server, hedge=HedgeConfig()) as (fetcher, url):
        hold(server, first_seconds=0.2)
        assert await fetcher.fetch(url, 0, 9)
    assert records() == [f"{url}: an answer is late; asking 127.0.0.1:{server.port} a second time"]


async def test_pauses_and_moves_of_the_limit_have_records(records: Callable[..., list[str]], time: FakeTime) -> None:
    host = web_host(time)
    await refuse(host, retry_after=20.0)
    host.pause(1.0)  # over before that one
    assert records() == [
        "https://h:443 asks for a pause of 20 s",
        "https://h:443: the limit of requests in flight goes from 64 to 44",
    ]


async def test_a_host_that_throttles_most_is_warned_of_once_a_minute(
    records: Callable[..., list[str]],
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    step: type[StepType],
    time: FakeTime,
    ca_file: str,
) -> None:
    any_server.put(f"/x{SECRETS}", CONTENT)
    any_server.every = lambda _: step(status=503 if len(any_server.requests) % 4 else None)
    async with fetcher_with(
        time, ca_file=ca_file, retry=RetryConfig(initial_seconds=1.0, maximum_seconds=1.0, outage_seconds=0)
    ) as fetcher:
        while len(records(logging.WARNING)) < 3:
            await fetcher.fetch(any_server.url(f"/x{SECRETS}"), 0, 10)  # 3 s each
        assert 120 <= time.now - 1000 <= 135
    first, second, _ = records(logging.WARNING)
    scheme = "https" if any_server.speaks_tls else "http"
    assert first == (
        f"{scheme}://127.0.0.1:{any_server.port} failed 10 of 13 attempts in the last 9 s, 10 of them by Throttled"
        " (status 503): the server is overloaded: lower max_requests_per_host; ask less of it at a time, in all"
        " processes together (max_requests_per_host, max_bytes_per_second)"
    )
    assert "failed 60 of 80 attempts in the last 59 s" in second
    assert "hunter2" not in str(records(logging.WARNING))


async def test_a_host_that_is_gone_is_warned_of(
    records: Callable[..., list[str]], fetcher_with: Callable[..., Fetcher], time: FakeTime, unused_tcp_port: int
) -> None:
    async with fetcher_with(time, retry=RetryConfig(outage_seconds=0)) as fetcher:
        for _ in range(2):
            with pytest.raises(ConnectionFailed):
                await fetcher.fetch(f"http://127.0.0.1:{unused_tcp_port}/x{SECRETS}", 0, 10)
    [warning] = records(logging.WARNING)
    assert warning.startswith(f"http://127.0.0.1:{unused_tcp_port} failed 10 of 10 attempts in the last ")
    assert f"10 of them by ConnectionFailed: no connection to 127.0.0.1:{unused_tcp_port}" in warning
    assert warning.endswith("find out whether it, or the way to it, is broken; what fails after all repeats is raised")
    assert "hunter2" not in str(records())


async def test_a_back_end_that_fails_is_warned_of(
    records: Callable[..., list[str]], odd: type[OddFileSystem], time: FakeTime
) -> None:
    odd.fail(ConnectionResetError("http://me:hunter2@h/?sig=hunter2"))
    async with Fetcher(af.FetchConfig(retry=RetryConfig(outage_seconds=0)), _clock=time.clock()) as fetcher:
        for _ in range(2):
            with pytest.raises(ConnectionFailed):
                await fetcher.fetch("odd://x", 0, 10)
    [warning] = records(logging.WARNING)
    assert warning.startswith("odd://x failed 10 of 10 attempts")
    assert "hunter2" not in f"{warning}{records()}"


def test_no_warning_of_few_or_a_half_or_refusals_for_good() -> None:
    watch = FailureWatch()
    assert [watch.failed(fails(), now=0.0, ended=number) for number in range(LEAST_FAILURES - 1)] == [None] * 9
    assert watch.failed(fails(), now=WATCH_SECONDS, ended=9) is None  # the others are too old
    even = FailureWatch()
    assert {even.failed(fails(), now=number / 10, ended=2 * number) for number in range(100)} == {
        None,
        even.failed(fails(), now=10.0, ended=200),
    }
    good = FailureWatch()
    assert {good.failed(fails(404), now=1.0, ended=number) for number in range(100)} == {None}


def test_the_commonest_cause_is_named_and_the_memory_bounded() -> None:
    watch = FailureWatch()
    warnings = [watch.failed(fails(502 if number % 3 else 503), now=1.0, ended=number) for number in range(10)]
    assert warnings[:-1] == [None] * 9
    assert "6 of them by FetchError (status 502): no; find out" in str(warnings[-1])
    for number in range(10, 3 * MOST_FAILURES):
        assert watch.failed(fails(503), now=2.0, ended=number) is None
    warning = watch.failed(fails(503), now=1.0 + WATCH_SECONDS, ended=3 * MOST_FAILURES)
    assert str(warning).startswith(f"failed {MOST_FAILURES} of {MOST_FAILURES} attempts in the last 59 s")


@pytest.mark.parametrize("listens", [False, True])
async def test_details_are_made_for_listeners_only(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    step: type[StepType],
    time: FakeTime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listens: bool,
) -> None:
    made = []

    def make(**fields: Any) -> RetryDetails:  # noqa: ANN401
        made.append(af.RetryDetails(**fields))
        return made[-1]

    monkeypatch.setattr(retry, "RetryDetails", make)
    heard: list[object] = []
    url = server.put("/x", CONTENT)
    server.will(step(status=500), step(status=500))
    caplog.set_level(logging.INFO, "asyncfetch")
    async with fetcher_with(time, retry=RetryConfig(on_retry=heard.append if listens else None)) as fetcher:
        assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]
    assert made == heard
    assert len(made) == (2 if listens else 0)


async def test_the_hook_hears_of_http(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    step: type[StepType],
    time: FakeTime,
    ca_file: str,
) -> None:
    heard: list[RetryDetails] = []
    any_server.put(f"/x{SECRETS}", CONTENT)
    any_server.will(step(status=503, headers={"Retry-After": "7"}), step(cut=100, end="reset"))
    time.luck = 0.5
    async with fetcher_with(time, ca_file=ca_file, retry=RetryConfig(on_retry=heard.append)) as fetcher:
        assert await fetcher.fetch(any_server.url(f"/x{SECRETS}"), 10, 1000) == CONTENT[10:1000]
    first, second = heard
    assert first == af.RetryDetails(
        url=any_server.url("/x?X-Amz-Signature=***&sig=***"),
        start=10,
        stop=1000,
        host=f"127.0.0.1:{any_server.port}",
        status=503,
        cause="Throttled: the server is overloaded: lower max_requests_per_host",
        attempt=1,
        wait_seconds=7.05,
    )
    assert (second.status, second.attempt, second.wait_seconds) == (206, 2, 0.05)
    assert second.cause.startswith("ConnectionFailed: ")
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.attempt = 2  # type: ignore[misc]


@pytest.mark.usefixtures("aws_keys")
async def test_the_hook_hears_of_s3(time: FakeTime) -> None:
    heard: list[RetryDetails] = []
    time.luck = 0.0
    async with S3Server({"b/x": CONTENT}, fault=FaultOnce("/b/x", Fault.status(500))) as server:
        config = af.FetchConfig(
            ca_file=server.ca_file,
            trust_env=False,
            hedge=None,
            retry=RetryConfig(on_retry=heard.append),
            s3=af.S3Config(endpoint_url=server.url),
        )
        async with Fetcher(config, _clock=time.clock()) as fetcher:
            assert await fetcher.fetch("s3://b/x", 10, 100) == CONTENT[10:100]
        host = server.url.partition("://")[2]
    [details] = heard
    assert (details.url, details.start, details.stop) == ("s3://b/x", 10, 100)
    assert (details.host, details.status, details.attempt, details.wait_seconds) == (host, 500, 1, 0.0)
    assert "Signature" not in repr(details)


async def test_the_hook_hears_of_fsspec_and_of_what_asks_for_no_range(odd: type[OddFileSystem], time: FakeTime) -> None:
    heard: list[RetryDetails] = []
    odd.fail(ConnectionResetError("http://me:hunter2@h"))
    config = af.FetchConfig(retry=RetryConfig(on_retry=heard.append, attempts=2, outage_seconds=0))
    async with Fetcher(config, _clock=time.clock()) as fetcher:
        with pytest.raises(ConnectionFailed):
            await fetcher.fetch("odd://x", 5, 10)
    [details] = heard
    assert (details.url, details.start, details.stop, details.host) == ("odd://x", 5, 10, "x")
    assert (details.status, details.attempt) == (None, 1)
    assert "hunter2" not in repr(details)


async def stream(fetcher: Fetcher, url: str) -> None:
    async with fetcher.fetch_stream([af.ByteRange(url, 0, 10)]) as ranges:
        async for _ in ranges:
            pass


async def many(fetcher: Fetcher, url: str) -> None:
    await fetcher.fetch_many([af.ByteRange(url, 0, 10), af.ByteRange(url, 9000, 9010)])


async def several_parts(fetcher: Fetcher, url: str) -> None:
    await fetcher.fetch(url, 0, 2000)


@pytest.mark.parametrize("use", [several_parts, many, stream, Fetcher.stat])
async def test_error_of_the_hook_comes_out_of_the_verb(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    step: type[StepType],
    time: FakeTime,
    use: Callable[[Fetcher, str], Awaitable[object]],
) -> None:
    class HookError(Exception):
        pass

    def hook(_: RetryDetails) -> None:
        raise HookError

    url = server.put("/x", CONTENT)
    server.every = lambda _: step(status=500)
    async with fetcher_with(time, part_bytes=256, min_part_bytes=256, retry=RetryConfig(on_retry=hook)) as fetcher:
        with pytest.raises(HookError):
            await use(fetcher, url)
        server.every = lambda _: None
        assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]
        assert fetcher.statistics().in_flight == 0


def test_config_pickles_with_a_named_hook_and_refuses_a_lambda() -> None:
    config = RetryConfig(on_retry=print)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(RetryConfig(on_retry=lambda _: None))

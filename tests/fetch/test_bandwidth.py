"""The cap on bytes per second: as arithmetic, and on bodies of every kind."""

from __future__ import annotations

import heapq
import os
import random
import time
import warnings
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig, StreamConfig, TimeoutConfig, config_share
from asyncfetch.errors import ConfigError
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.bandwidth import BURST_SECONDS, HEAD_BYTES, Allowance, Bandwidth
from asyncfetch.ranges import ByteRange
from tests.conftest import all_others_wait
from tests.fetch.conftest import PATIENT
from tests.fetch.odd_files import CONTENT as ODD_CONTENT
from tests.fetch.odd_files import hanging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fetch.conftest import FakeTime, LyingServer
    from tests.fetch.conftest import Step as StepType
    from tests.fetch.odd_files import OddFileSystem

MIB = 1024 * 1024
CONTENT = random.Random(4).randbytes(2 * MIB)


@given(
    rate=st.integers(1, 10**9),
    asked=st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 10)), max_size=50),
)
def test_no_window_has_more_than_its_share(rate: int, asked: list[tuple[int, float]]) -> None:
    now, came = 100.0, []
    bandwidth = Bandwidth(rate, now=lambda: now)
    for nbytes, pause in asked:
        now += pause
        came.append((now + bandwidth.reserve(nbytes), nbytes))
    for first in range(len(came)):
        for last in range(first, len(came)):
            # What comes at the window's start was waited for before it.
            inside = sum(nbytes for _, nbytes in came[first + 1 : last + 1])
            seconds = came[last][0] - came[first][0]
            assert inside <= rate * (seconds + BURST_SECONDS) * (1 + 1e-9) + 1


def test_unused_bandwidth_is_lost_but_for_the_burst() -> None:
    now = 0.0
    bandwidth = Bandwidth(1000, now=lambda: now)
    assert bandwidth.reserve(1000) == pytest.approx(1 - BURST_SECONDS)
    now = 100.0
    assert bandwidth.reserve(1000) == pytest.approx(1 - BURST_SECONDS)
    assert bandwidth.reserve(10) == pytest.approx(1.01 - BURST_SECONDS)


def test_bandwidth_given_back_is_had_by_the_next() -> None:
    bandwidth = Bandwidth(1000, now=lambda: 0.0)
    bandwidth.reserve(1000)
    bandwidth.give_back(900)
    assert bandwidth.reserve(100) == pytest.approx(0.2 - BURST_SECONDS)


@pytest.mark.parametrize("lateness", [0.0, 0.002], ids=["punctual", "late"])
@pytest.mark.parametrize("body_bytes", [3_000, 64 * 1024, MIB, 8 * MIB])
@pytest.mark.parametrize("streams", [1, 3, 64])
@pytest.mark.parametrize("rate", [300_000, 10**6, 10**7, 10**8, 10**9])
def test_the_rate_is_met_within_5_percent(rate: int, streams: int, body_bytes: int, lateness: float) -> None:
    """In virtual time: streams that always want more, from a server that sends up to 256 KiB with each head."""
    rng = random.Random(5)
    now = 0.0
    bandwidth = Bandwidth(rate, now=lambda: now)
    came: list[tuple[float, int]] = []

    def stream() -> Iterator[float]:
        """Gives the seconds until it goes on."""
        while True:
            allowance = Allowance(bandwidth)
            yield allowance.begin(body_bytes) + rng.uniform(0, lateness)
            count, left = min(body_bytes, rng.randrange(1, 256 * 1024)), body_bytes
            while True:
                allowance.came(count)
                came.append((now, count))
                left -= count
                if not left:
                    break
                if allowance.left_bytes <= 0:
                    yield allowance.more() + rng.uniform(0, lateness)
                count = min(left, allowance.left_bytes)
            allowance.close()

    turns = [(0.0, number, stream()) for number in range(streams)]
    settled = 2 * streams * 256 * 1024 / rate
    while now < settled + 2 and len(came) < 20_000:
        now, number, one = turns[0]
        heapq.heapreplace(turns, (now + next(one), number, one))
    seconds = min(2.0, now / 2)
    share = seconds * rate
    counted = sum(count for at, count in came if now - seconds <= at < now)
    at_once = min(body_bytes, 256 * 1024)
    assert counted <= share * 1.05 + at_once
    assert lateness or counted >= share * 0.95 - at_once  # a stream that is late may want too little


def test_the_process_has_one_cap_for_each_rate() -> None:
    one = Bandwidth.of(1234)
    assert one is not None
    assert Bandwidth.of(1234) is one
    assert Bandwidth.of(1235) is not one
    assert Bandwidth.of(None) is None


async def test_a_forked_child_has_its_own() -> None:
    one = Bandwidth.of(1234)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads may be running
        child = os.fork()
    if child == 0:
        os._exit(int(Bandwidth.of(1234) is one))
    _, status = await to_thread.run_sync(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.fixture(params=["http", "https"])
def any_server(request: pytest.FixtureRequest) -> LyingServer:
    server: LyingServer = request.getfixturevalue("server" if request.param == "http" else "tls_server")
    return server


async def test_a_body_that_is_paused_again_and_again(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str
) -> None:
    """One that TLS holds the end of when it is paused must get it although nothing follows."""
    url = any_server.put("/x", CONTENT[:MIB])
    async with fetcher_with(ca_file=ca_file, max_bytes_per_second=8 * MIB, timeouts=PATIENT) as fetcher:
        for start in range(4):
            assert await fetcher.fetch(url, start, MIB) == CONTENT[start:MIB]
        assert fetcher.statistics().retries == 0


async def test_two_fetchers_share_it(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str
) -> None:
    """2 MiB at 4 MiB/s, by a body's every way. That they take no longer than that is shown in virtual time above.

    Each alone would take 0.25 s. What a last read brings beyond what was paid for is waited for by nobody.
    """
    content = CONTENT[: MIB // 2]
    url = any_server.put("/x", content)
    ways: dict[str, dict[str, object]] = {"direct": {}, "session": {"direct_bodies": False}}
    settings = {"ca_file": ca_file, "timeouts": PATIENT, "max_span_bytes": 0, "max_bytes_per_second": 4 * MIB}

    async def read(fetcher: Fetcher) -> None:
        views = await fetcher.fetch_many(ByteRange(url, start, len(content)) for start in (0, 1))
        assert [bytes(view) for view in views] == [content, content[1:]]
        assert fetcher.statistics().retries == 0

    async with AsyncExitStack() as stack:  # both are there before one reads, and until both have read
        fetchers = [await stack.enter_async_context(fetcher_with(**settings, **way)) for way in ways.values()]
        started = time.monotonic()
        async with anyio.create_task_group() as group:
            for fetcher in fetchers:
                group.start_soon(read, fetcher)
        unpaid_seconds = len(fetchers) * HEAD_BYTES / (4 * MIB)
        assert time.monotonic() - started >= 0.5 * 0.95 - BURST_SECONDS - unpaid_seconds


@pytest.mark.alone
@pytest.mark.parametrize("direct_bodies", [True, False])
async def test_the_stall_timeout_does_not_count_our_own_pauses(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, direct_bodies: bool
) -> None:
    """Steps of 20 ms and a limit of 100: with 8 streams each waits longer than that for its turn."""
    url = server.put("/x", CONTENT)
    async with fetcher_with(
        direct_bodies=direct_bodies,
        max_bytes_per_second=4 * MIB,
        max_span_bytes=0,
        timeouts=TimeoutConfig(stall_seconds=0.1, first_byte_seconds=5),
    ) as fetcher:
        views = await fetcher.fetch_many(ByteRange(url, start, start + MIB // 2) for start in range(8))
        assert [bytes(view) for view in views] == [CONTENT[start : start + MIB // 2] for start in range(8)]
        assert fetcher.statistics().retries == 0


async def test_a_server_that_stalls_is_still_noticed(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[StepType]
) -> None:
    url = server.put("/x", CONTENT)
    server.will(step(cut=MIB, end="stall"))
    async with fetcher_with(max_bytes_per_second=8 * MIB) as fetcher:
        assert await fetcher.fetch(url) == CONTENT
        assert fetcher.statistics().retries == 1


@pytest.mark.alone
async def test_a_cancelled_read_costs_the_others_nothing(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str
) -> None:
    url = any_server.put("/x", CONTENT)
    async with fetcher_with(ca_file=ca_file, max_bytes_per_second=16 * MIB) as fetcher:
        for moment in range(20):
            buffer = bytearray(len(CONTENT))
            with anyio.move_on_after(moment * 0.003) as scope:
                await fetcher.fetch_into(url, 0, len(CONTENT), buffer)
            if scope.cancelled_caught:
                buffer[:] = bytes(len(buffer))
                await all_others_wait()
                assert not any(buffer)
        before = time.monotonic()
        assert await fetcher.fetch(url) == CONTENT
        assert time.monotonic() - before < 1.0


async def test_back_ends_of_fsspec_come_under_it(fetcher_with: Callable[..., Fetcher]) -> None:
    files = MemoryFileSystem()
    files.pipe_file("/bandwidth/x", CONTENT)
    before = time.monotonic()
    async with fetcher_with(max_bytes_per_second=4 * MIB) as fetcher:
        assert await fetcher.fetch("memory://bandwidth/x") == CONTENT
    assert time.monotonic() - before >= 0.5 * 0.9
    files.rm("/bandwidth", recursive=True)


@pytest.fixture
def back_end_cap(monkeypatch: pytest.MonkeyPatch) -> Bandwidth:
    """Of 100,000 bytes/s, on a clock that stands still: the burst's 5,000 bytes come at once, each more takes 10 us."""
    bandwidth = Bandwidth(100_000, now=lambda: 0.0)
    monkeypatch.setattr(Bandwidth, "of", lambda _: bandwidth)
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.READ_STEP_BYTES", 1000)
    return bandwidth


def paid_bytes(bandwidth: Bandwidth) -> float:
    """Of the cap above, so far."""
    beyond_burst = 10_000
    seconds = bandwidth.reserve(beyond_burst)
    bandwidth.give_back(beyond_burst)
    return seconds * 100_000 - beyond_burst + 5_000


async def test_failed_read_of_a_back_end_gives_its_missing_bytes_back(
    odd: type[OddFileSystem], back_end_cap: Bandwidth, time: FakeTime
) -> None:
    def fail_for_some_time(data: bytes) -> bytes:
        if 2 <= len(odd.asked) <= 4:
            raise ConnectionResetError
        return data

    odd.read = fail_for_some_time
    async with Fetcher(FetchConfig(max_bytes_per_second=100_000), _clock=time.clock()) as fetcher:
        assert await fetcher.fetch("odd://x", 0, 2500) == ODD_CONTENT[:2500]
        assert fetcher.statistics().retries == 3
        assert paid_bytes(back_end_cap) == pytest.approx(2500)


async def test_cancelled_read_of_a_back_end_gives_missing_bytes_back(
    odd: type[OddFileSystem], back_end_cap: Bandwidth
) -> None:
    second = ODD_CONTENT[1001:2001]
    with hanging(odd, lambda data: data == second) as hang:
        async with Fetcher(FetchConfig(max_bytes_per_second=100_000)) as fetcher, anyio.create_task_group() as group:
            group.start_soon(fetcher.fetch, "odd://x", 1, 3000)
            await to_thread.run_sync(hang.began.wait)
            assert paid_bytes(back_end_cap) == pytest.approx(2000)
            group.cancel_scope.cancel()
        assert paid_bytes(back_end_cap) == pytest.approx(1000)


async def test_read_cancelled_before_its_turn_pays_nothing(odd: type[OddFileSystem], back_end_cap: Bandwidth) -> None:
    back_end_cap.reserve(100_000_000)
    async with Fetcher(FetchConfig(max_bytes_per_second=100_000)) as fetcher, anyio.create_task_group() as group:
        group.start_soon(fetcher.fetch, "odd://x", 0, 1000)
        while paid_bytes(back_end_cap) < 100_000_999:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert paid_bytes(back_end_cap) == pytest.approx(100_000_000)
    assert not odd.asked


def test_workers_share_it() -> None:
    config = StreamConfig(fetch=FetchConfig(max_bytes_per_second=20))
    assert config_share(config, 3).fetch.max_bytes_per_second == 6
    with pytest.raises(ConfigError, match="max_bytes_per_second=20"):
        config_share(config, 21)
    with pytest.raises(ConfigError, match="at least 1"):
        FetchConfig(max_bytes_per_second=0)

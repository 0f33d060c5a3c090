"""Back ends of fsspec that fail, hang or lie for a while: asked again by the rules of all, within limits of ours."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import pytest
from botocore.exceptions import ClientError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig, RetryConfig, TimeoutConfig
from asyncfetch.errors import (
    AsyncFetchError,
    FetchError,
    FetchTimeout,
    InvalidResponse,
    NotFound,
    ObjectChanged,
    Throttled,
)
from asyncfetch.fetch import Fetcher
from tests.fetch.odd_files import CONTENT, hanging

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fetch.conftest import FakeTime
    from tests.fetch.odd_files import OddFileSystem

QUICK = TimeoutConfig(connect_seconds=0.02, first_byte_seconds=0.02, stall_seconds=0.02)


@pytest.fixture
def fetcher(time: FakeTime) -> Fetcher:
    return Fetcher(_clock=time.clock())


@pytest.fixture
def steps_of_1000(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.READ_STEP_BYTES", 1000)


def fails_at(odd: type[OddFileSystem], number: int, error: Exception) -> Callable[[bytes], bytes]:
    """Raises it in the read of that number, from 1 on."""

    def read(data: bytes) -> bytes:
        if len(odd.asked) == number:
            raise error
        return data

    return read


@pytest.mark.usefixtures("steps_of_1000")
async def test_a_read_goes_on_from_the_byte_that_it_reached(odd: type[OddFileSystem], fetcher: Fetcher) -> None:
    odd.read = fails_at(odd, 2, ConnectionResetError("x"))
    async with fetcher:
        assert await fetcher.fetch("odd://x", 100, 2600) == CONTENT[100:2600]
        host = fetcher.statistics().hosts["odd://x"]
    assert odd.asked == [(100, 1100), (1100, 2100), (1100, 2100), (2100, 2600)]
    assert (host.requests, host.retries, host.errors, host.bytes) == (2, 1, 1, 2500)


@pytest.mark.usefixtures("steps_of_1000")
async def test_progress_starts_the_count_of_attempts_afresh(odd: type[OddFileSystem], fetcher: Fetcher) -> None:
    def every_other(data: bytes) -> bytes:
        if len(odd.asked) % 2 == 0:
            raise ConnectionResetError("x")
        return data

    odd.read = every_other
    async with fetcher:
        assert await fetcher.fetch("odd://x", 0, 9000) == CONTENT[:9000]
        assert fetcher.statistics().retries == 8 > RetryConfig().attempts


@pytest.mark.usefixtures("steps_of_1000")
async def test_read_without_a_version_begins_again(odd: type[OddFileSystem], fetcher: Fetcher) -> None:
    odd.info_of = lambda info: {**info, "created": None}
    odd.read = fails_at(odd, 2, ConnectionResetError("x"))
    async with fetcher:
        assert await fetcher.fetch("odd://x", 100, 1200) == CONTENT[100:1200]
    assert odd.asked == [(100, 1100), (1100, 1200), (100, 1100), (1100, 1200)]


@pytest.mark.usefixtures("steps_of_1000")
async def test_two_versions_are_never_joined(odd: type[OddFileSystem], fetcher: Fetcher) -> None:
    def replace(data: bytes) -> bytes:
        if len(odd.asked) == 2:
            odd().pipe_file("/x", bytes(len(CONTENT)))
            raise ConnectionResetError("x")
        return data

    odd.read = replace
    async with fetcher:
        with pytest.raises(ObjectChanged) as caught:
            await fetcher.fetch("odd://x", 100, 2600)
        assert caught.value.attempts == 2
        assert await fetcher.fetch("odd://x", 100, 2600) == bytes(2500)


async def test_a_short_read_is_asked_for_once_more(odd: type[OddFileSystem], fetcher: Fetcher) -> None:
    odd.read = lambda data: data[: 5 if len(odd.asked) == 1 else None]
    async with fetcher:
        assert await fetcher.fetch("odd://x", 10, 20) == CONTENT[10:20]
        odd.read = lambda data: data[:5]
        with pytest.raises(InvalidResponse) as caught:
            await fetcher.fetch("odd://x", 10, 20)
    assert caught.value.attempts == 2


class Answered(Exception):
    """As azure and aiohttp have them."""

    def __init__(self, name: str, status: int, **headers: str) -> None:
        super().__init__(f"{name} is {status}")
        setattr(self, name, status)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Refused(Exception):
    """As requests has it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, but it is an answer")
        self.response = Answered("status_code", status)


def translated() -> OSError:
    """As s3fs has it, which keeps the answer as the cause."""
    told = {"ResponseMetadata": {"HTTPStatusCode": 503, "HTTPHeaders": {"retry-after": "7"}}, "Error": {}}
    error = OSError("Please reduce your request rate")
    error.__cause__ = ClientError(cast("dict[str, object]", told), "GetObject")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [
        pytest.param(error, kind, attempts, id=str(error))
        for error, kind, attempts in [
            (Answered("status", 500), FetchError, 5),
            (Answered("status_code", 408), FetchTimeout, 5),
            (Answered("code", 429), Throttled, 5),
            (Answered("code", 404), NotFound, 1),
            (Answered("code", 400), FetchError, 1),
            (Answered("code", 200), FetchError, 2),
            (Answered("code", 7), FetchError, 2),
            (Refused(502), FetchError, 5),
            (translated(), Throttled, 5),
        ]
    ],
)
async def test_the_status_of_an_answer_counts(
    odd: type[OddFileSystem], time: FakeTime, error: Exception, kind: type[FetchError], attempts: int
) -> None:
    odd.fail(error)
    async with Fetcher(FetchConfig(retry=RetryConfig(outage_seconds=0)), _clock=time.clock()) as fetcher:
        with pytest.raises(FetchError) as caught:
            await fetcher.fetch("odd://x", 10, 20)
    assert (type(caught.value), caught.value.attempts) == (kind, attempts)


@pytest.mark.parametrize("error", [Answered("status", 429, Retry_After="7"), translated()], ids=["429", "503"])
async def test_the_pause_that_a_back_end_was_asked_for_is_kept(
    odd: type[OddFileSystem], fetcher: Fetcher, time: FakeTime, error: Exception
) -> None:
    odd.read = fails_at(odd, 1, error)
    async with fetcher:
        assert await fetcher.fetch("odd://x", 10, 20) == CONTENT[10:20]
        host = fetcher.statistics().hosts["odd://x"]
    assert time.sleeps == pytest.approx([7 + RetryConfig().initial_seconds])
    assert (host.throttled, host.retry_budget) == (1, RetryConfig().budget)


async def test_repeats_draw_on_the_budget_of_the_host(odd: type[OddFileSystem], time: FakeTime) -> None:
    odd.read = fails_at(odd, 1, OSError("x"))
    async with Fetcher(FetchConfig(retry=RetryConfig(budget=1)), _clock=time.clock()) as fetcher:
        assert await fetcher.fetch("odd://x", 10, 20) == CONTENT[10:20]  # and its answer gives the token back
        odd.read = lambda _: fails_at(odd, len(odd.asked), OSError("x"))(b"")
        with pytest.raises(FetchError, match="budget of 1 repeats") as caught:
            await fetcher.fetch("odd://x", 10, 20)
    assert caught.value.attempts == 2


async def test_listings_and_questions_are_asked_again(odd: type[OddFileSystem], fetcher: Fetcher) -> None:
    odd().pipe_file("/d/y", CONTENT)
    broken = {1, 2, 4}

    def info_of(info: dict[str, object]) -> dict[str, object]:
        if odd.looks in broken:
            raise ConnectionResetError("x")
        return info

    odd.info_of = info_of
    async with fetcher:
        entries = await fetcher.listdir("odd://d")  # fsspec takes the first of its two questions' errors for a no
        assert [entry.url for entry in entries] == ["odd://d/y"]
        assert (await fetcher.stat("odd://d/y")).size == len(CONTENT)
        assert fetcher.statistics().retries == 2


async def test_hanging_call_is_made_again_and_its_late_bytes_dropped(odd: type[OddFileSystem], time: FakeTime) -> None:
    buffer = bytearray(1000)
    async with Fetcher(FetchConfig(timeouts=QUICK), _clock=time.clock()) as fetcher:
        with hanging(odd, lambda _: len(odd.asked) == 1):
            await fetcher.fetch_into("odd://x", 0, 1000, buffer)
            now = fetcher.statistics()
            assert bytes(buffer) == CONTENT[:1000]
            assert (now.errors, now.retries) == (1, 1)
            buffer[:] = bytes(1000)
            left_behind = next(thread for thread in threading.enumerate() if is_at(thread, "take"))
        while is_at(left_behind, "take"):
            await anyio.lowlevel.checkpoint()
    assert not any(buffer)


def is_at(thread: threading.Thread, function: str) -> bool:
    """Whether the thread is in a function of that name."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("of", ["bytes", "info"])
async def test_a_back_end_that_hangs_is_a_timeout(odd: type[OddFileSystem], time: FakeTime, of: str) -> None:
    def info_of(info: dict[str, Any]) -> dict[str, Any]:
        if of == "info":
            odd.read(b"")
        return info

    config = FetchConfig(timeouts=QUICK, retry=RetryConfig(attempts=2, outage_seconds=0))
    odd.info_of = info_of
    with hanging(odd, lambda _: True):
        async with Fetcher(config, _clock=time.clock()) as fetcher:
            with pytest.raises(FetchTimeout, match=r"odd://.* within 0\.06 s.*timeouts=") as caught:
                await fetcher.fetch("odd://x", 10, 20)
            if of == "info":
                with pytest.raises(FetchTimeout):
                    await fetcher.listdir("odd://")
    ours = cast("FetchTimeout", pickle.loads(pickle.dumps(caught.value)))
    assert (ours.url, ours.start, ours.stop, ours.host, ours.attempts) == ("odd://x", 10, 20, "x", 2)


def test_a_process_ends_while_a_back_end_hangs() -> None:
    program = """
import threading, anyio, fsspec, asyncfetch as af
from fsspec.implementations.memory import MemoryFileSystem
class Hanging(MemoryFileSystem):
    protocol = "hanging"
    def info(self, path, **options): threading.Event().wait()
fsspec.register_implementation("hanging", Hanging)
timeouts = af.TimeoutConfig(connect_seconds=0.01, first_byte_seconds=0.01, stall_seconds=0.01)
async def main():
    async with af.Fetcher(af.FetchConfig(timeouts=timeouts, retry=af.RetryConfig(attempts=1))) as fetcher:
        await fetcher.fetch("hanging://x")
try: anyio.run(main)
except af.FetchTimeout: print("too late")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("too late\n", "")


async def test_hanging_threads_are_named_to_the_next_caller(
    odd: type[OddFileSystem], time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.THREADS", 2)
    urls = ["odd://x", "odd://y", "odd://z"]
    for url in urls:
        odd().pipe_file(url, CONTENT)
    said = []

    async def read(url: str, fetcher: Fetcher) -> None:
        with pytest.raises(FetchTimeout) as caught:
            await fetcher.fetch(url, 0, 10)
        said.append("all 2 threads" in str(caught.value))

    config = FetchConfig(timeouts=QUICK, retry=RetryConfig(attempts=1))
    async with Fetcher(config, _clock=time.clock()) as fetcher:
        with hanging(odd, lambda _: True):
            async with anyio.create_task_group() as group:
                for url in urls:  # the third waits for a place
                    group.start_soon(read, url, fetcher)
            await read(urls[0], fetcher)
            assert (sorted(said), len(odd.asked)) == ([False, False, True, True], 2)
            odd.read = lambda data: data
        while True:  # a thread ends in its own time
            try:
                assert await fetcher.fetch("odd://x", 0, 10) == CONTENT[:10]
            except FetchTimeout:
                continue
            break
        async with anyio.create_task_group() as group:  # and who waits for a place then gets one
            for url in urls:
                group.start_soon(fetcher.fetch, url, 0, 10)


async def test_pieces_are_smaller_after_one_that_took_too_long(
    odd: type[OddFileSystem], time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.READ_STEP_BYTES", 8000)
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.MIN_STEP_BYTES", 10)
    with hanging(odd, lambda data: len(data) > 1000):
        async with Fetcher(FetchConfig(timeouts=QUICK), _clock=time.clock()) as fetcher:
            assert await fetcher.fetch("odd://x", 0, 2500) == CONTENT[:2500]
    assert odd.asked == [(0, 2500), (0, 1000), (1000, 2000), (2000, 2500)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ask=st.tuples(st.integers(-3000, 3200), st.none() | st.integers(0, 3200)),
    faults=st.lists(st.sampled_from(["none", "reset", "short", "long", "refused", "fatal", "replaced"]), max_size=9),
    has_version=st.booleans(),
)
async def test_right_bytes_or_an_error_of_ours(
    odd: type[OddFileSystem],
    time: FakeTime,
    monkeypatch: pytest.MonkeyPatch,
    ask: tuple[int, int | None],
    faults: list[str],
    has_version: bool,
) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.READ_STEP_BYTES", 1000)
    old, new = CONTENT[:3000], CONTENT[3001:6001]
    odd.reset()
    odd().pipe_file("/x", old)
    told = odd().info("/x")["created"]
    left = list(faults)

    def read(data: bytes) -> bytes:
        match left.pop(0) if left else "none":
            case "reset":
                raise ConnectionResetError("x")
            case "refused":
                raise Answered("status", 429)
            case "fatal":
                raise ValueError("x")
            case "short":
                return data[:-1]
            case "long":
                return data + b"x"
            case "replaced" if has_version:
                odd().pipe_file("/x", new)
        return data

    odd.read = read
    if not has_version:
        odd.info_of = lambda info: {**info, "created": None}
    start, stop = ask
    async with Fetcher(_clock=time.clock()) as fetcher:
        try:
            got = bytes(await fetcher.fetch("odd://x", start, stop))
        except AsyncFetchError:
            return
    assert told is not None
    assert got in {old[start:stop], new[start:stop]}
    assert stop is None or len(got) == stop - start

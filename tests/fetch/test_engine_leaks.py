"""Thousands of requests leave no socket, task, thread or byte behind. ``bench/leaks.py`` makes 100,000."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import anyio
import psutil
import pytest
from anyio import to_thread

from asyncfetch.config import RetryConfig, S3Config
from asyncfetch.errors import FetchError
from asyncfetch.testing import HubServer, S3Server
from tests.conftest import all_others_wait
from tests.fetch.conftest import PATIENT, Step
from tests.fetch.fault_table import CONTENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer
    from tests.fetch.odd_files import OddFileSystem

WARM_UP = 1_000
ROUNDS = {("http", "honest"): 8_000, ("http", "faulty"): 1_500, ("http", "away"): 1_500, ("https", "honest"): 1_500}
"""By what is spoken, and what comes back."""
OTHERS = 1_500
"""Of S3, of a Hub, and by fsspec."""
SWING = 1_000
"""Objects, or blocks of memory, by which what is held goes up and down. Any one thing that stays by the request is
more."""
CONCURRENT = 32
FAULTS = [
    None,
    Step(status=503),
    Step(cut=1_000, end="close"),
    Step(silent="reset"),
    Step(headers={"Content-Range": None}),
    Step(status=404),
    None,
    Step(status=302, headers={"Location": "/x", "Content-Length": "0"}, body=b""),
]


@dataclass(frozen=True)
class Held:
    """What this process holds when nothing is under way."""

    descriptors: int
    tasks: int
    threads: int
    objects: int
    blocks: int

    @classmethod
    async def now(cls) -> Self:
        await drop_cancelled_timers()
        gc.collect()
        return cls(
            psutil.Process().num_fds(),
            len(asyncio.all_tasks()),
            threading.active_count(),
            len(gc.get_objects()),
            sys.getallocatedblocks(),
        )


async def drop_cancelled_timers() -> None:
    """asyncio keeps them, each with its context, until most of its timers are: so many that a leak would be hidden."""
    loop = asyncio.get_running_loop()
    for _ in range(10_000):
        loop.call_later(3600, print).cancel()
    await asyncio.sleep(0)


async def ask(fetcher: Fetcher, url: str, requests: int) -> None:
    left = iter(range(requests))

    async def work() -> None:
        for number in left:
            start = number * 7_919 % 1_900_000
            # Without a limit for the others: asyncio would keep their timers, which are cancelled, for a while.
            with anyio.move_on_after(0.001 if number % 10 == 9 else None):
                try:
                    assert len(await fetcher.fetch(url, start, start + 10_000)) == 10_000
                except FetchError:
                    continue

    async with anyio.create_task_group() as group:
        for _ in range(CONCURRENT):
            group.start_soon(work)


async def check_growth(fetcher: Fetcher, url: str, count: int, *forget: Callable[[], object]) -> Held:
    """What was held before. Each of ``forget`` empties what the test's own server or clock notes down."""
    await ask(fetcher, url, WARM_UP)
    for one in forget:
        one()
    before = await Held.now()
    await ask(fetcher, url, count)
    for one in forget:
        one()
    after = await Held.now()
    assert fetcher.statistics().requests > 0.8 * (WARM_UP + count)
    assert gc.garbage == []
    # The pool may hold a connection more or less, with the task of ours that serves it.
    assert after.descriptors <= before.descriptors + 2 * CONCURRENT
    assert after.tasks <= before.tasks + CONCURRENT
    assert after.threads <= before.threads + CONCURRENT  # a call of a back end that was left may have one to itself
    assert after.objects - before.objects < SWING
    assert after.blocks - before.blocks < SWING
    return before


@pytest.mark.slow
@pytest.mark.parametrize(("any_server", "kind"), ROUNDS, indirect=["any_server"])
async def test_web_requests_leave_nothing_behind(
    request: pytest.FixtureRequest,
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    time: FakeTime,
    ca_file: str,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    server = any_server
    url, count = server.put("/x", CONTENT), ROUNDS["https" if server.speaks_tls else "http", kind]
    if kind == "faulty":
        server.every = lambda request: FAULTS[sum(request.headers["range"].encode()) % len(FAULTS)]
    if kind == "away":  # of 64 requests the last 16
        server.every = lambda _: Step(status=503) if len(server.requests) % 64 >= 48 else None
        caplog.set_level(logging.ERROR, "asyncfetch")  # the test would keep the others
    retry = RetryConfig(outage_seconds=300 * (kind == "away"))
    async with fetcher_with(time, timeouts=PATIENT, max_span_bytes=0, ca_file=ca_file, retry=retry) as fetcher:
        before = await check_growth(fetcher, url, count, server.requests.clear, time.sleeps.clear)
    await all_others_wait()
    assert psutil.Process().num_fds() <= before.descriptors


async def start_threads() -> None:
    """All of anyio's, in which the servers look up objects: those that begin on the way would count as growth."""
    count = int(to_thread.current_default_thread_limiter().total_tokens)
    barrier = threading.Barrier(count)

    def wait() -> None:
        barrier.wait()

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(to_thread.run_sync, wait)


@pytest.mark.slow
@pytest.mark.usefixtures("aws_keys")
async def test_s3_requests_leave_nothing_behind(fetcher_with: Callable[..., Fetcher], time: FakeTime) -> None:
    async with S3Server({"b/x": CONTENT}, tls=False) as server:
        s3 = S3Config(endpoint_url=server.url)
        async with fetcher_with(time, timeouts=PATIENT, max_span_bytes=0, s3=s3) as fetcher:
            await start_threads()
            await check_growth(fetcher, "s3://b/x", OTHERS, server.reset)


@pytest.mark.slow
async def test_hub_requests_leave_nothing_behind(fetcher_with: Callable[..., Fetcher], time: FakeTime) -> None:
    async with HubServer(tls=False) as hub:
        hub.push("datasets/o/n", {"x": CONTENT})
        async with fetcher_with(time, timeouts=PATIENT, max_span_bytes=0, hub_endpoint=hub.url) as fetcher:
            await start_threads()
            await check_growth(fetcher, "hf://datasets/o/n/x", OTHERS, hub.hub.reset, hub.cdn.reset)


@pytest.mark.slow
async def test_fsspec_reads_leave_nothing_behind(
    fetcher_with: Callable[..., Fetcher], odd: type[OddFileSystem], time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd().pipe_file("odd://y", CONTENT)
    barrier = threading.Barrier(CONCURRENT)
    cat_file: Callable[..., bytes] = odd.cat_file

    def cat_with_all(*args: object, **options: object) -> bytes:
        barrier.wait()
        return cat_file(*args, **options)

    async with fetcher_with(time, timeouts=PATIENT, max_span_bytes=0) as fetcher:
        with monkeypatch.context() as patch:  # as many threads as there will ever be
            patch.setattr(odd, "cat_file", cat_with_all)
            async with anyio.create_task_group() as group:
                for start in range(CONCURRENT):
                    group.start_soon(fetcher.fetch, "odd://y", start, start + 1)
        await check_growth(fetcher, "odd://y", OTHERS, odd.asked.clear)


async def test_no_request_makes_a_cycle(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    await ask(fetcher, url, 200)
    for number in range(20):  # so many turns of the loop, in which the server lets go of what was cancelled
        await fetcher.fetch(url, number, number + 10_000)
    gc.collect()
    gc.disable()
    try:
        for number in range(500):
            await fetcher.fetch(url, number, number + 10_000)
        found = gc.collect()
    finally:
        gc.enable()
    assert found < 500

"""Everything that the engine has, switched on together, over each kind of store, while answers fail, lag and lie."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from asyncfetch.config import FetchConfig, HedgeConfig, RetryConfig, S3Config, TimeoutConfig
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.ranges import ByteRange
from asyncfetch.testing import Fault, HubServer, RangeServer, S3Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncfetch.testing import ServedRequest

CONTENT = random.Random(0).randbytes(12 << 20)
SMALL_BYTES = 8 * 1024
STORES = ["http", "https", "s3", "hub"]
CALLS = 200
CONCURRENT = 48


class Weather:
    """One request of eight goes wrong, each in a way of its own."""

    def __init__(self) -> None:
        self._dice = random.Random(1)
        self.faults = 0

    def __call__(self, request: ServedRequest) -> Fault | None:
        if self._dice.random() >= 1 / 8:
            return None
        self.faults += 1
        faults = [
            Fault.status(503),
            Fault.status(500),
            Fault.truncate(after_bytes=self._dice.randrange(2000)),
            Fault.reset(after_bytes=self._dice.randrange(2000)),
        ]
        return self._dice.choice(faults)


@asynccontextmanager
async def store(kind: str) -> AsyncIterator[tuple[str, Weather, dict[str, object]]]:
    """The url of an object, what its server does, and the settings that reach it."""
    weather = Weather()
    if kind in {"http", "https"}:
        async with RangeServer({"x": CONTENT}, tls=kind == "https", fault=weather) as server:
            yield f"{server.url}/x", weather, {"ca_file": server.ca_file}
    elif kind == "s3":
        async with S3Server({"b/x": CONTENT}, fault=weather) as s3:
            yield "s3://b/x", weather, {"ca_file": s3.ca_file, "s3": S3Config(endpoint_url=s3.url)}
    else:
        async with HubServer(cdn_fault=weather) as hub:
            hub.push("datasets/org/name", {"x": CONTENT})
            yield "hf://datasets/org/name/x", weather, {"ca_file": hub.ca_file, "hub_endpoint": hub.url}


class Reader:
    """Makes random calls, of every verb and urgency, some of which are raised or cancelled, and checks the bytes."""

    def __init__(self, fetcher: Fetcher, url: str) -> None:
        self._fetcher = fetcher
        self._url = url
        self._dice = random.Random(2)
        self._left = iter(range(CALLS))
        self.right = 0
        self.cancelled = 0

    async def run(self) -> None:
        for _ in self._left:
            caller = Caller(urgent=self._dice.random() < 0.5)
            async with anyio.create_task_group() as group:
                scope = anyio.CancelScope()
                group.start_soon(self._call, caller, scope)
                for _ in range(self._dice.randrange(20)):
                    await anyio.lowlevel.checkpoint()
                match self._dice.randrange(6):
                    case 0:
                        scope.cancel()
                    case 1:
                        caller.raise_priority()

    async def _call(self, caller: Caller, scope: anyio.CancelScope) -> None:
        with scope, calling(caller):
            await self._read()
            self.right += 1
        self.cancelled += scope.cancelled_caught

    async def _read(self) -> None:
        start = self._dice.randrange(0, 64 * SMALL_BYTES, SMALL_BYTES // 2)
        stop = start + SMALL_BYTES
        match self._dice.randrange(20):
            case 0:
                start, stop = 0, len(CONTENT)
                whole = await self._fetcher.fetch(self._url, start, stop)
                assert bytes(whole) == CONTENT  # a view compares itself a byte at a time
            case 1 | 2 | 3:
                spans = [(start, stop), (stop, stop + 1), (stop + 200_000, stop + 300_000), (start, stop)]
                views = await self._fetcher.fetch_many(ByteRange(self._url, *span) for span in spans)
                assert views == [CONTENT[slice(*span)] for span in spans]
            case 4 | 5 | 6:
                buffer = bytearray(SMALL_BYTES)
                await self._fetcher.fetch_into(self._url, start, stop, buffer)
                assert buffer == CONTENT[start:stop]
            case _:
                assert await self._fetcher.fetch(self._url, start, stop) == CONTENT[start:stop]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.usefixtures("aws_keys")
async def test_right_bytes_and_nothing_left_behind(kind: str) -> None:
    async with store(kind) as (url, weather, settings):
        config = FetchConfig(
            max_bytes_per_second=400 << 20,
            max_requests_per_host=16,
            hedge=HedgeConfig(quantile=0.5, max_share=0.5),
            retry=RetryConfig(attempts=30, initial_seconds=0.001, maximum_seconds=0.01),
            timeouts=TimeoutConfig(connect_seconds=10, first_byte_seconds=10, stall_seconds=2),
            part_bytes=5 << 20,
            trust_env=False,
            **settings,  # type: ignore[arg-type]
        )
        async with Fetcher(config) as fetcher:
            reader = Reader(fetcher, url)
            async with anyio.create_task_group() as group:
                for _ in range(CONCURRENT):
                    group.start_soon(reader.run)
            now = fetcher.statistics()
            assert (now.in_flight, now.waiting) == (0, 0)
            assert all(host.is_idle for host in fetcher._hosts._hosts.values())
            assert reader.right + reader.cancelled == CALLS
            assert reader.cancelled
            assert now.errors >= now.throttled > 0
            assert weather.faults
            with anyio.fail_after(5):
                assert await fetcher.fetch(url, 5, 50_000) == CONTENT[5:50_000]

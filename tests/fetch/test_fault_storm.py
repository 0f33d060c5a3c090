"""20,000 ranges while 30 % of the answers are faulty, all of their bytes compared."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncfetch.config import RetryConfig, TimeoutConfig
from asyncfetch.errors import FetchError, InvalidResponse
from tests.fetch.fault_table import CONTENT, WIRE

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer, Request, Step

RANGES = {"http": 4_500, "https": 500}
"""For each seed and each way that a body can take: 20,000 in all."""
FAULTY = 0.3
LONGEST_BYTES = 16_384
CONCURRENT = 128
STEPS = [
    wire.step
    for wire in WIRE
    if wire.once is None and not wire.waits and wire.group != "connection half-closed"  # TLS can't be
]
"""Every fault of the table that is no final answer and takes no timeout to notice."""


class Storm:
    """What the server does to each request: by one seed, an honest answer or any fault."""

    def __init__(self, seed: int) -> None:
        self.faults = 0
        self._dice = random.Random(seed)

    def __call__(self, request: Request) -> Step | None:
        if self._dice.random() >= FAULTY:
            return None
        self.faults += 1
        step = self._dice.choice(STEPS)
        return replace(step, cut=self._dice.randint(1, LONGEST_BYTES)) if step.cut else step


@pytest.mark.parametrize("direct_bodies", [True, False], ids=["direct", "copied"])
@pytest.mark.parametrize("seed", [11, 12])
async def test_right_bytes_through_a_storm(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, time: FakeTime, ca_file: str, seed: int
) -> None:
    server = any_server
    server.every = storm = Storm(seed)
    ranges = RANGES["https" if server.speaks_tls else "http"]
    url, dice, left = server.put("/x", CONTENT), random.Random(seed), iter(range(ranges))
    outcomes: Counter[str] = Counter()

    async def read() -> None:
        for _ in left:
            start = dice.randrange(len(CONTENT) - LONGEST_BYTES)
            stop = start + dice.randint(1, LONGEST_BYTES)
            try:
                view = await fetcher.fetch(url, start, stop)
            except FetchError as error:
                outcomes[type(error).__name__] += 1
            else:
                assert view == CONTENT[start:stop]
                outcomes["right"] += 1

    time.luck = 0.01
    patient = TimeoutConfig(connect_seconds=15, first_byte_seconds=15, stall_seconds=15)
    # A request for each range: those that ask at the same time would share them.
    settings = {"timeouts": patient, "retry": RetryConfig(attempts=20), "max_span_bytes": 0}
    async with fetcher_with(time, ca_file=ca_file, **settings) as fetcher:
        async with anyio.create_task_group() as group:
            for _ in range(CONCURRENT):
                group.start_soon(read)
        now = fetcher.statistics()
        assert (now.in_flight, now.waiting) == (0, 0)
        server.every = lambda _: None
        assert await fetcher.fetch(url) == CONTENT
    assert storm.faults > FAULTY * ranges
    # Who is lied to twice about one range gives up, and says so.
    assert outcomes.total() == ranges
    assert set(outcomes) <= {"right", InvalidResponse.__name__}
    assert outcomes["right"] > 0.95 * ranges

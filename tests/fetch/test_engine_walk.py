"""How far a warm range walks through the engine: that its code can be read, and its CPU stays low."""

from __future__ import annotations

import asyncio

from asyncfetch.config import FetchConfig
from bench.small_ranges import steps_of
from tests.fetch.conftest import LyingServer

RANGE_BYTES = 64 * 1024
# The goals of the walk are 10 files in 50 calls. A chunk may come in two.
MAX_FUNCTIONS = 46
MAX_FILES = 10
MAX_CALLS = 54
MAX_FRAMES = 11


def test_a_warm_range_enters_few_functions() -> None:
    async def count() -> None:
        async with LyingServer() as server:
            url = server.put("/x", bytes(8 * RANGE_BYTES))
            steps = await steps_of(FetchConfig(trust_env=False), url, RANGE_BYTES)
        assert steps.functions <= MAX_FUNCTIONS, steps
        assert steps.files <= MAX_FILES, steps
        assert steps.calls <= MAX_CALLS, steps
        assert steps.frames <= MAX_FRAMES, steps

    asyncio.run(count())

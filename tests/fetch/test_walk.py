"""How far a warm range walks through the engine: that its code can be read, and its CPU stays low."""

from __future__ import annotations

import asyncio

from asyncfetch.config import FetchConfig
from bench.small_ranges import steps_of
from tests.fetch.conftest import LyingServer

RANGE_BYTES = 64 * 1024
# The goals of the walk are 60 functions of 14 files in 80 calls, 12 frames deep; with room for a fifth.
MAX_FUNCTIONS = 72
MAX_FILES = 17
MAX_CALLS = 96
MAX_FRAMES = 14


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

"""What a connection says of itself."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest

from asyncfetch.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer, Step

CONTENT = bytes(range(256)) * 1000
LOGGER = "asyncfetch.fetch.connection"


@pytest.fixture
def way() -> str:
    return "direct"


async def test_connection_logs_each_step_at_debug(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, step: type[Step], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    url = server.put("/x?token=hidden", CONTENT)
    place = re.escape(f"<Connection to 127.0.0.1:{server.port} at ('127.0.0.1', {server.port}): ")
    steps: list[list[str]] = []
    messages: list[str] = []
    async with fetcher_with(headers={"127.0.0.1": {"Cookie": "hidden"}}) as fetcher:
        for wrong in (False, False, True):
            if wrong:
                server.will(step(cut=50_000, end="close"))
            assert await fetcher.fetch(url, 0, 200_000) == CONTENT[:200_000]
            said = [record.message for record in caplog.records if record.name == LOGGER]
            steps.append([re.sub(rf"^{place}(\w+), (\d+) bytes of a body came>", r"\1 \2", one) for one in said])
            messages += said
            caplog.clear()
    request = [r"awaiting_head 0 sends \d+ bytes", r"(held|receiving|ended) \d+ has the head of a 206"]
    assert len(steps[0]) == len(steps[1]) == 3
    broken = [*request, "receiving 50000 has ended: .*", "(closed|ended) 50000 is closed here"]
    for said, expected in zip(steps, [[*request, "idle 200000"]] * 2 + [broken], strict=True):
        for one, pattern in zip(said, expected, strict=False):
            assert re.fullmatch(pattern, one), said
    assert steps[2][-1] == "idle 150000"
    assert "hidden" not in str(messages)


async def test_connection_logs_nothing_at_info(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with fetcher_with() as fetcher:
        assert await fetcher.fetch(server.put("/x", CONTENT), 0, 9) == CONTENT[:9]
        with pytest.raises(FetchError):
            await fetcher.fetch(server.url("/absent"), 0, 9)
    assert not [record for record in caplog.records if record.name == LOGGER]

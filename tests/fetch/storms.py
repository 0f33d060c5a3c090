"""Who reads in a storm: random ranges by every verb at once, all of their bytes compared."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import anyio

from asyncfetch.config import HedgeConfig, RetryConfig, TimeoutConfig
from asyncfetch.errors import FetchError, InvalidResponse
from asyncfetch.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pytest

    from asyncfetch.fetch import Fetcher

CROWD = 128
"""Callers that are more than may ask at a time: they wait for their turns, and hardly an answer is asked for twice."""
LONGEST_BYTES = 16_384
PART_BYTES = 32 * 1024
LONG = 0.03
"""Share of the calls for one range of up to 6 parts."""
BATCH = 8
"""Ranges of a ``fetch_many``, near each other, so that they come by a request or two."""
SETTINGS: Mapping[str, object] = {
    "timeouts": TimeoutConfig(connect_seconds=15, first_byte_seconds=0.5, stall_seconds=0.5),
    "retry": RetryConfig(attempts=20, total_seconds=1e9, outage_seconds=0),
    "hedge": HedgeConfig(quantile=0.9, max_share=0.2),
    "max_span_bytes": 2 * LONGEST_BYTES,
    "part_bytes": PART_BYTES,
}
"""Of a fetcher that reads over connections."""


def here(ranges: int, request: pytest.FixtureRequest) -> int:
    """All of them on asyncio's own loop, a third on another one, where it is the same engine on other sockets."""
    return ranges if "asyncio" in request.node.name else ranges // 3


class Reader:
    """Asks for random ranges by every verb, compares their bytes and counts what came.

    Args:
        fetcher: That reads.
        urls: Of the objects; who is named twice is asked for twice as often.
        contents: All that an object of these may hold, each as long as the others.
        seed: Of the choices.
    """

    def __init__(self, fetcher: Fetcher, urls: Sequence[str], contents: Sequence[bytes], seed: int) -> None:
        self.outcomes: dict[str, Counter[str]] = {"one": Counter(), "long": Counter(), "batch": Counter()}
        self.errors: Counter[tuple[str, type[FetchError]]] = Counter()
        """Calls that failed, by url."""
        self.refusals: set[int | None] = set()
        """The statuses of those whose error is a plain FetchError."""
        self.unwritten: list[bytearray] = []
        """Buffers of calls that failed, none of which may be written to any more."""
        self._fetcher, self._urls, self._contents = fetcher, urls, contents
        self._dice = random.Random(seed)

    @property
    def right_ranges(self) -> int:
        return sum(outcomes["right"] for outcomes in self.outcomes.values())

    async def read(self, ranges: int, *, callers: int) -> None:
        """So many ranges, each of which comes right or has an error that is clear."""
        left = iter(range(ranges))
        async with anyio.create_task_group() as group:
            for _ in range(callers):
                group.start_soon(self._work, left)
        assert sum(outcomes.total() for outcomes in self.outcomes.values()) == ranges
        assert min(outcomes["right"] for outcomes in self.outcomes.values()) > 0
        assert not any(map(any, self.unwritten))
        now = self._fetcher.statistics()
        assert (now.in_flight, now.waiting) == (0, 0)

    async def _work(self, left: Iterator[int]) -> None:
        while True:
            kind = self._dice.choices(("one", "long", "batch"), (0.85 - LONG, LONG, 0.15))[0]
            count = len(list(islice(left, BATCH if kind == "batch" else 1)))
            if not count:
                return
            await self._read(kind, count)

    async def _read(self, kind: str, count: int) -> None:
        url, spans = self._dice.choice(self._urls), self._spans(kind, count)
        try:
            got = await self._ask(url, spans)
        except FetchError as error:
            _check_is_clear(error, url, spans)
            self.errors[url, type(error)] += 1
            if type(error) is FetchError:
                self.refusals.add(error.status)
            self.outcomes[kind]["failed"] += count
        else:
            for (start, stop), piece in zip(spans, got, strict=True):
                whole = bytes(piece)  # a view compares itself a byte at a time
                assert any(whole == content[start:stop] for content in self._contents)
            self.outcomes[kind]["right"] += count

    def _spans(self, kind: str, count: int) -> list[tuple[int, int]]:
        dice = self._dice
        longest = 6 * PART_BYTES if kind == "long" else LONGEST_BYTES
        first = dice.randrange(len(self._contents[0]) - 2 * longest)
        starts = [first] if count == 1 else [first + dice.randrange(longest) for _ in range(count)]
        return [(start, start + dice.randint(longest // 3 if kind == "long" else 1, longest)) for start in starts]

    async def _ask(self, url: str, spans: list[tuple[int, int]]) -> list[bytes | bytearray | memoryview]:
        (start, stop), *others = spans
        if others:
            return [*await self._fetcher.fetch_many([ByteRange(url, *span) for span in spans])]
        if self._dice.random() < 0.5:
            return [await self._fetcher.fetch(url, start, stop)]
        buffer = bytearray(stop - start)
        try:
            await self._fetcher.fetch_into(url, start, stop, buffer)
        except FetchError:
            buffer[:] = bytes(len(buffer))
            self.unwritten.append(buffer)
            raise
        return [buffer]


def _check_is_clear(error: FetchError, url: str, spans: list[tuple[int, int]]) -> None:
    assert (error.url, (error.start, error.stop) in spans) == (url, True)
    assert error.attempts > isinstance(error, InvalidResponse)  # who lies is asked once more

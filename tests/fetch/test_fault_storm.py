"""20,000 ranges while 30 % of the answers are faulty, all of their bytes compared.

They are asked for by ``fetch``, ``fetch_into`` and ``fetch_many`` at once: alone, in batches that share requests, and
in parts; of the server itself, through redirects to it and to another host, and of a Hub. What a redirect leads to is
signed, and all signatures expire now and then. Late answers are asked for twice.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncfetch.config import HedgeConfig, RetryConfig, TimeoutConfig
from asyncfetch.errors import AccessDenied, FetchError, InvalidResponse
from asyncfetch.ranges import ByteRange
from tests.fetch.conftest import Step
from tests.fetch.fault_table import ASKED, CONTENT, WIRE

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer, Request

RANGES = {"http": 4_500, "https": 500}
"""For each seed and each way that a body can take: 20,000 in all."""
CONCURRENT = 128
LONGEST_BYTES = 16_384
PART_BYTES = 32 * 1024
LONG = 0.03
"""Share of the calls for one range of up to 6 parts."""
BATCH = 8
"""Ranges of a ``fetch_many``, near each other, so that they come by a request or two."""

FAULTY = 0.3
SLOW = 0.02
"""Share of the answers that are faulty in a way which takes a timeout to notice, or a second request to overtake."""
SIGNED_REQUESTS = 300
"""For which a signature is handed out; after as many more it has expired."""
SIGNED_SECONDS = 60.0
"""The same by the clock: a target that is refused at once after it was found is taken to be refused for good."""
_PASSING = [wire for wire in WIRE if wire.once is None and wire.group != "connection half-closed"]  # TLS can't be
QUICK_FAULTS = [wire.step for wire in _PASSING if not wire.waits]
SLOW_FAULTS = [wire.step for wire in _PASSING if wire.waits]
"""Together every fault of the table that is no final answer."""
LOST = [
    Step(status=302, headers={"Content-Length": "0"}, body=b""),
    Step(status=503, headers={"Content-Length": "0"}, body=b""),
    Step(silent="reset"),
    Step(head_cut=-1, end="close"),
]
"""What becomes of a redirect."""
HALF = len(ASKED) // 2
COMMIT = "0" * 40
TARGETS = {"/near": "127.0.0.1", "/far": "localhost", f"/datasets/org/name/resolve/{COMMIT}/x": "localhost"}
"""The host of what a path redirects to."""


class Storm:
    """What the server does to each request: by one seed, an honest answer or any fault."""

    def __init__(self, server: LyingServer, time: FakeTime, seed: int) -> None:
        self.faults = self.expired = 0
        self.blows = True
        self._server, self._time = server, time
        self._dice = random.Random(seed)
        self._requests = self._signatures = 0
        self._sign()

    def __call__(self, request: Request) -> Step | None:
        self._requests += 1
        if self._requests % SIGNED_REQUESTS == 0:
            self._sign()
        is_faulty = self.blows and self._dice.random() < FAULTY
        self.faults += is_faulty
        if request.path in TARGETS:
            return self._dice.choice(LOST) if is_faulty else self._redirect(TARGETS[request.path])
        if request.path.startswith("/signed/") and request.path not in self._server.objects:
            self.expired += 1
            return Step(status=403)
        return self._fault(request) if is_faulty else None

    def _fault(self, request: Request) -> Step:
        step = self._dice.choice(SLOW_FAULTS if self._dice.random() < SLOW / FAULTY else QUICK_FAULTS)
        if isinstance(step.body, bytes):
            # It has bytes of the table's range, in halves. No reader can tell that they aren't those it asked for.
            start = int(request.headers["range"].removeprefix("bytes=").partition("-")[0])
            middle = start + HALF
            body = step.body.replace(ASKED[:HALF], CONTENT[start:middle])
            step = replace(step, body=body.replace(ASKED[HALF:], CONTENT[middle : middle + HALF]))
        return replace(step, cut=self._dice.randint(1, LONGEST_BYTES)) if step.cut else step

    def _redirect(self, host: str) -> Step:
        target = self._server.url(f"/signed/{self._signatures}", host)
        return Step(status=302, headers={"Location": target, "Content-Length": "0"}, body=b"")

    def _sign(self) -> None:
        objects, etags = self._server.objects, self._server.etags
        self._signatures += 1
        latest = f"/signed/{self._signatures}"
        objects[latest], etags[latest] = CONTENT, etags["/x"]
        objects.pop(f"/signed/{self._signatures - 2}", None)
        self._time.now += SIGNED_SECONDS


class Reader:
    """Asks for random ranges by every verb, compares their bytes and counts what came."""

    def __init__(self, fetcher: Fetcher, plain: str, led: list[str], seed: int) -> None:
        self.outcomes: dict[str, Counter[str]] = {"one": Counter(), "long": Counter(), "batch": Counter()}
        self.errors: set[tuple[bool, type[FetchError]]] = set()
        """By whether no redirect had to do with it."""
        self.unwritten: list[bytearray] = []
        """Buffers of calls that failed, none of which may be written to any more."""
        self._fetcher, self._plain, self._led = fetcher, plain, led
        self._dice = random.Random(seed)

    async def read(self, kind: str, count: int) -> None:
        url = self._plain if self._dice.random() < 0.5 else self._dice.choice(self._led)
        spans = self._spans(kind, count)
        try:
            got = await self._ask(url, spans)
        except FetchError as error:
            self.errors.add((url == self._plain, type(error)))
            self.outcomes[kind]["failed"] += count
        else:
            assert got == [CONTENT[start:stop] for start, stop in spans]
            self.outcomes[kind]["right"] += count

    def _spans(self, kind: str, count: int) -> list[tuple[int, int]]:
        dice = self._dice
        longest = 6 * PART_BYTES if kind == "long" else LONGEST_BYTES
        first = dice.randrange(len(CONTENT) - 2 * longest)
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


@pytest.fixture(params=["direct", "copied"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [11, 12])
async def test_right_bytes_through_a_storm(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, time: FakeTime, ca_file: str, seed: int
) -> None:
    server = any_server
    ranges = RANGES["https" if server.speaks_tls else "http"]
    plain = server.put("/x", CONTENT)
    led = [server.url("/near"), server.url("/far"), f"hf://datasets/org/name@{COMMIT}/x"]
    server.every = storm = Storm(server, time, seed)
    dice, left = random.Random(seed), iter(range(ranges))

    async def work() -> None:
        while True:
            kind = dice.choices(("one", "long", "batch"), (0.85 - LONG, LONG, 0.15))[0]
            count = len(list(islice(left, BATCH if kind == "batch" else 1)))
            if not count:
                return
            await reader.read(kind, count)

    time.luck = 0.01
    settings = {
        "timeouts": TimeoutConfig(connect_seconds=15, first_byte_seconds=0.5, stall_seconds=0.5),
        "retry": RetryConfig(attempts=20, total_seconds=1e9),
        "hedge": HedgeConfig(quantile=0.9, max_share=0.2),
        "max_span_bytes": 2 * LONGEST_BYTES,
        "part_bytes": PART_BYTES,
        "hub_endpoint": server.url(""),
    }
    async with fetcher_with(time, ca_file=ca_file, **settings) as fetcher:
        reader = Reader(fetcher, plain, led, seed)
        async with anyio.create_task_group() as group:
            for _ in range(CONCURRENT):
                group.start_soon(work)
        now = fetcher.statistics()
        assert (now.in_flight, now.waiting) == (0, 0)
        storm.blows = False
        for url in (plain, *led):
            assert await fetcher.fetch(url) == CONTENT
    assert storm.faults > 0.8 * FAULTY * len(server.requests)
    if not server.speaks_tls:  # over which there are few
        assert storm.expired > 0
        assert now.hedges > 0
    # Who is lied to twice about one range gives up, and says so; so does who is led to what expires on the way.
    right = {kind: outcomes["right"] for kind, outcomes in reader.outcomes.items()}
    assert sum(outcomes.total() for outcomes in reader.outcomes.values()) == ranges
    assert sum(right.values()) > 0.85 * ranges
    assert min(right.values()) > 0
    assert reader.errors <= {(True, InvalidResponse), (False, InvalidResponse), (False, AccessDenied)}
    assert not any(map(any, reader.unwritten))

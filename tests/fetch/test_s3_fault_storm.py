"""8,000 ranges of S3 while 30 % of the answers are faulty, all of their bytes compared.

The store verifies every signature. They expire now and then, by its clock sooner than by ours; others are refused,
though they are right. There are two buckets, in two regions.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from asyncfetch.config import S3Config
from asyncfetch.errors import AccessDenied, InvalidResponse, ObjectChanged
from asyncfetch.testing import Fault, Keys, S3Quirks, S3Server
from tests.fetch.fault_table import CONTENT
from tests.fetch.storms import CROWD, LONGEST_BYTES, SETTINGS, Reader, here

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from asyncfetch.testing import ServedRequest
    from tests.fetch.conftest import FakeTime

RANGES = {False: 3_500, True: 500}
"""By whether over TLS, for each way that a body can take: 8,000 in all on asyncio's loop."""
URLS = ["s3://near/x", "s3://far/x"]
REGIONS = {"far": "eu-central-1"}

FAULTY = 0.3
SLOW = 0.01
"""Share of the answers that take a timeout, or a second request, to notice."""
SIGNED_SECONDS = 1_200
AHEAD_SECONDS = 120.0
"""What the store's clock is ahead of ours: more than the last bit of a signature's life that is left unused."""
REQUEST_SECONDS = 2.0
"""What a request takes by both clocks. A signature that is refused within a second is taken to be refused for good."""
BREAKS = [Fault.reset, Fault.truncate]
FAULTS = [
    *map(Fault.status, (408, 429, 500, 502, 503, 504)),
    Fault.status(503, retry_after=1),
    *(end(after) for end in BREAKS for after in (None, 0, 1)),
    Fault.ignore_range(),
    Fault.wrong_content_range(),
    Fault.short(),
    Fault.surplus(),
    Fault.gzip(),
    *(Fault.headers({name: None}) for name in ("Content-Range", "Content-Length", "ETag")),
]
REFUSED = [Keys(secret_key="another"), Keys(session_token="another"), Keys(access_key="another")]
"""Whom the store takes for the only one with access: others are told 403, or 400: a token has expired."""
BUSY = S3Quirks(requests_per_second=1e-9)


class Storm:
    """What the store does to each request: by one seed, an honest answer or any fault."""

    def __init__(self, server: S3Server, time: FakeTime, passed: Callable[[], float], seed: int) -> None:
        self.faults = 0
        self.blows = False
        self._server, self._time, self._passed = server, time, passed
        self._dice = random.Random(seed)

    def __call__(self, _: ServedRequest) -> Fault | None:
        self._time.now += REQUEST_SECONDS
        self._server.clock_seconds = self._passed() + AHEAD_SECONDS
        self._server.keys, self._server._quirks = Keys(), S3Quirks()
        is_faulty = self.blows and self._dice.random() < FAULTY
        self.faults += is_faulty
        return self._fault() if is_faulty else None

    def _fault(self) -> Fault:
        dice = self._dice
        if dice.random() < SLOW / FAULTY:
            return Fault.stall(dice.choice([None, 0, dice.randint(1, LONGEST_BYTES)]))
        match dice.randrange(20):
            case 0:  # in the store's own words, as are refusals
                self._server._quirks = replace(BUSY, retry_after_seconds=dice.choice([None, 1]))
                self._server._allowance = 0
            case 1 | 2:
                self._server.keys = dice.choice(REFUSED)
            case 3:
                return Fault.change_etag()
            case 4 | 5 | 6 | 7:
                return dice.choice(BREAKS)(dice.randint(1, LONGEST_BYTES))
            case _:
                return dice.choice(FAULTS)
        return Fault()


@pytest.mark.slow
@pytest.mark.usefixtures("aws_keys")
@pytest.mark.parametrize("direct_bodies", [True, False], ids=["direct", "session"])
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
async def test_right_bytes_through_a_storm(
    fetcher_with: Callable[..., Fetcher],
    time: FakeTime,
    signing_clock: Callable[[], float],
    request: pytest.FixtureRequest,
    tls: bool,
) -> None:
    time.luck = 0.01
    ranges = RANGES[tls] if tls else here(RANGES[tls], request)
    content = {"near/x": CONTENT, "far/x": CONTENT}
    async with S3Server(content, regions=REGIONS, tls=tls, max_log=100_000) as server:
        server._fault = storm = Storm(server, time, signing_clock, seed=13)
        s3 = S3Config(endpoint_url=server.url, presign_seconds=SIGNED_SECONDS)
        async with fetcher_with(time, ca_file=server.ca_file, s3=s3, **SETTINGS) as fetcher:
            reader = Reader(fetcher, URLS, [CONTENT], seed=13)
            for url in URLS:  # for their regions, of which a refusal that breaks off says nothing
                await fetcher.fetch(url, 0, 1)
            storm.blows = True
            await reader.read(ranges, callers=CROWD)
            storm.blows = False
            for url in URLS:
                with suppress(ObjectChanged):  # where the storm's last word on the version was a lie: said once
                    await fetcher.stat(url)
                assert await fetcher.fetch(url) == CONTENT
    expired = [request for request in server.requests if request.status == 403 and request.fault is None]
    assert storm.faults > 0.8 * FAULTY * len(server.requests)
    assert len(expired) > (20 if ranges == RANGES[False] else 0) or tls  # over which there are few
    # Who is lied to twice about one range gives up, and says so; so does who is refused thrice in a row. Who is told
    # of another version can't know that there is none.
    assert reader.right_ranges > 0.85 * ranges
    kinds = {kind for _, kind in reader.errors}
    assert kinds <= {InvalidResponse, AccessDenied, ObjectChanged}
    assert ObjectChanged in kinds

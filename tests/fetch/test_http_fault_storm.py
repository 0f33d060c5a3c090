"""20,000 ranges while 30 % of the answers are faulty, all of their bytes compared.

They are asked for by ``fetch``, ``fetch_into`` and ``fetch_many`` at once: alone, in batches that share requests, and
in parts; of the server itself, through redirects to it and to another host, and of a Hub. What a redirect leads to is
signed, and all signatures expire now and then. Late answers are asked for twice, where there is room for that.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from asyncfetch.errors import AccessDenied, FetchError, InvalidResponse
from tests.fetch.conftest import Step
from tests.fetch.fault_table import ASKED, CONTENT, WIRE
from tests.fetch.storms import CROWD, LONGEST_BYTES, SETTINGS, Reader, here

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import FakeTime, LyingServer, Request

RANGES = {"http": 4_500, "https": 500}
"""For each seed and each way that a body can take: 20,000 in all on asyncio's loop."""
FEW = 32
"""Callers that find a free place at any time, and so does a second request for what is late."""
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
            # It has bytes of the table's range, in halves. No reader can tell that they aren't those it asked for, nor
            # what else comes where the table's range has ended. So it is for ranges that are within the first half.
            start, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
            middle = start + HALF
            if last >= middle:
                return self._fault(request)
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


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "callers"), [(11, CROWD), (12, FEW)], ids=["crowd", "few"])
async def test_right_bytes_through_a_storm(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    time: FakeTime,
    ca_file: str,
    request: pytest.FixtureRequest,
    seed: int,
    callers: int,
) -> None:
    server = any_server
    ranges = RANGES["https"] if server.speaks_tls else here(RANGES["http"], request)
    plain = server.put("/x", CONTENT)
    led = [server.url("/near"), server.url("/far"), f"hf://datasets/org/name@{COMMIT}/x"]
    server.every = storm = Storm(server, time, seed)
    time.luck = 0.01
    learns = callers == CROWD
    async with fetcher_with(
        time, ca_file=ca_file, learn_limit=learns, hub_endpoint=server.url(""), **SETTINGS
    ) as fetcher:
        # The server itself as often as all redirects to it.
        reader = Reader(fetcher, [plain] * len(led) + led, [CONTENT], seed)
        await reader.read(ranges, callers=callers)
        now = fetcher.statistics()
        storm.blows = False
        for url in (plain, *led):
            assert await fetcher.fetch(url) == CONTENT
    assert storm.faults > 0.8 * FAULTY * len(server.requests)
    if not server.speaks_tls:  # over which there are few
        assert storm.expired > 0
        assert now.hedges > 0 or callers == CROWD or fetcher._by_session
    # Who is lied to or misdirected twice about one range gives up, and says so; so does who is led to what expires on
    # the way.
    assert reader.right_ranges > 0.85 * ranges
    assert {kind for _, kind in reader.errors} <= {InvalidResponse, AccessDenied, FetchError}
    assert reader.refusals <= {421}
    assert (plain, AccessDenied) not in reader.errors

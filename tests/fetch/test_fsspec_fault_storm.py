"""6,000 ranges of fsspec while 30 % of the calls into its back end go wrong, all of their bytes compared.

Calls fail, bring too little, too much or the whole object, or take longer than they may. Objects are replaced by others
as long, while they are read piece by piece.
"""

from __future__ import annotations

import errno
import random
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import aiohttp
import fsspec
import pytest

from asyncfetch.config import FetchConfig, RetryConfig, TimeoutConfig
from asyncfetch.errors import FetchError, InvalidResponse, NotFound, ObjectChanged
from asyncfetch.fetch import Fetcher
from tests.fetch.fault_table import CONTENT
from tests.fetch.odd_files import OddFileSystem
from tests.fetch.storms import CROWD, LONGEST_BYTES, PART_BYTES, Reader, here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.fetch.conftest import FakeTime

RANGES = 3_000
"""For each seed."""
URLS = [f"odd://{number}" for number in range(32)]
VERSIONS = [CONTENT, CONTENT[::-1]]
STEP_BYTES = 8 * 1024
"""Asked for by one call, or less."""

FAULTY = 0.3
HANGING = 0.002
"""Share of the calls that take too long."""
MOST_HANGING = 16
"""At a time, of 64 threads; where it would be one more, the one that has hung longest goes on."""
LIMITS = TimeoutConfig(connect_seconds=0.1, first_byte_seconds=0.1, stall_seconds=0.1)
PASSING: list[Callable[[], Exception]] = [
    *(partial(kind, "x") for kind in (ConnectionResetError, TimeoutError, EOFError)),
    partial(OSError, errno.EBUSY, "x"),
    aiohttp.ServerDisconnectedError,
]

T = TypeVar("T")


class Storm:
    """What becomes of calls into the back end: by one seed, what they bring or any fault. Any thread may ask."""

    def __init__(self, seed: int) -> None:
        self.calls = self.faults = self.hung = self.gone = 0
        self.blows = True
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._hanging: deque[threading.Event] = deque()

    def over(self, path: str, call: Callable[[], T], lies: Sequence[Callable[[T], T]]) -> T:
        """What ``call()`` returns, or a lie about it, or an error."""
        with self._lock:
            fault = self._fault(path, lies)
        return call() if fault is None else fault(call)

    def calm(self) -> None:
        """No more faults, and whoever hangs goes on."""
        with self._lock:
            self.blows = False
            for hanging in self._hanging:
                hanging.set()

    def _fault(self, path: str, lies: Sequence[Callable[[T], T]]) -> Callable[[Callable[[], T]], T] | None:
        dice = self._dice
        self.calls += 1
        if not self.blows or dice.random() > FAULTY:
            return None
        self.faults += 1
        if dice.random() < HANGING / FAULTY:
            return self._hang()
        kind = dice.random()
        if kind < 0.003:
            self.gone += 1
            return partial(_fail, FileNotFoundError("x"))
        if kind < 0.006:
            content = dice.choice(VERSIONS)
            return lambda call: (call(), StormyFileSystem().pipe_file(path, content))[0]
        if kind < 0.03:
            return partial(_fail, RuntimeError("x"))  # nothing is known of it: it is believed the second time
        if kind < 0.1 and lies:
            lie = dice.choice(lies)
            return lambda call: lie(call())
        return partial(_fail, dice.choice(PASSING)())

    def _hang(self) -> Callable[[Callable[[], T]], T]:
        self.hung += 1
        released = threading.Event()
        self._hanging.append(released)
        if len(self._hanging) > MOST_HANGING:
            self._hanging.popleft().set()
        return lambda call: (released.wait(), call())[1]


def _fail(error: Exception, _: object) -> Any:  # noqa: ANN401 - it doesn't return
    raise error


class StormyFileSystem(OddFileSystem):
    storm: ClassVar[Storm]
    lies: ClassVar[list[Callable[[bytes], bytes]]] = [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda _: b"",
        lambda data: data + b"x",
        lambda _: CONTENT,
    ]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:  # noqa: ANN401
        return self.storm.over(path, partial(super().cat_file, path, start, end, **options), self.lies)

    def info(self, path: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        return self.storm.over(path, partial(super().info, path, **options), [])


@pytest.fixture(params=[14, 15])
def storm(request: pytest.FixtureRequest, odd: type[OddFileSystem]) -> Iterator[Storm]:
    """Over what ``odd`` has."""
    odd.reset()
    for url in URLS:
        odd().pipe_file(url, CONTENT)
    fsspec.register_implementation("odd", StormyFileSystem, clobber=True)
    StormyFileSystem.storm = storm = Storm(request.param)
    yield storm
    storm.calm()


@pytest.mark.slow
async def test_right_bytes_through_a_storm(
    storm: Storm, time: FakeTime, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.READ_STEP_BYTES", STEP_BYTES)
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.MIN_STEP_BYTES", STEP_BYTES // 8)
    config = FetchConfig(
        timeouts=LIMITS,
        # An attempt takes several calls, so most of them fail.
        retry=RetryConfig(attempts=100, total_seconds=1e9, outage_seconds=0, budget=1_000_000),
        max_span_bytes=2 * LONGEST_BYTES,
        part_bytes=PART_BYTES,
    )
    ranges = here(RANGES, request)
    async with Fetcher(config, _clock=time.clock()) as fetcher:
        reader = Reader(fetcher, URLS, VERSIONS, seed=14)
        await reader.read(ranges, callers=CROWD)
        calls = storm.calls
        storm.calm()
        for url in URLS:
            with suppress(ObjectChanged):  # that of the last call
                await fetcher.fetch(url, 0, 1)
            assert await fetcher.fetch(url) in VERSIONS
    assert storm.faults > 0.8 * FAULTY * calls
    assert storm.hung > 0
    # Who is lied to twice about one range gives up, and says so. What was replaced, or is gone, stays so.
    assert reader.right_ranges > 0.7 * ranges
    kinds = {kind for _, kind in reader.errors}
    assert kinds == {InvalidResponse, FetchError, NotFound, ObjectChanged}

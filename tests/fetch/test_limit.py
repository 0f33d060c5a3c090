"""The learned limit against modelled servers, in virtual time."""

from __future__ import annotations

import heapq
import random
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.fetch.limit import BACKOFF, LATE, MAX_TRUCE_SECONDS, TRUCE_SECONDS, LearnedLimit

if TYPE_CHECKING:
    from collections.abc import Callable

KIB, MIB = 1024, 1024**2
LOWEST, INITIAL, HIGHEST = 4, 64, 256
FIXED = (4, 8, 16, 32, 64, 128, 256)
SETTLED_SECONDS, END_SECONDS = 15.0, 40.0


class Answer(NamedTuple):
    """Of a modelled server."""

    first_byte_seconds: float
    body_seconds: float = 0.0
    size_bytes: int = 64 * KIB
    refused: bool = False
    pause_seconds: float = 0.0


class Server(Protocol):
    """Says what becomes of a request, with so many in flight including it."""

    def __call__(self, now: float, in_flight: int, dice: random.Random) -> Answer: ...


def unlimited(now: float, in_flight: int, dice: random.Random) -> Answer:
    """50 ms to the first byte, then 4 MiB/s."""
    return Answer(0.05 * dice.uniform(0.9, 1.2), 256 / 4096, 256 * KIB)


def noisy(now: float, in_flight: int, dice: random.Random) -> Answer:
    """As a store far away: first bytes over a factor of ten, one in 200 seconds late, ranges of all sizes."""
    size = dice.choice([16 * KIB, 256 * KIB, MIB, 4 * MIB])
    stall = 2.0 if dice.random() < 0.005 else 0.0
    rate = 4 * MIB * dice.lognormvariate(0, 0.4)
    return Answer(0.05 * dice.lognormvariate(0, 0.6) + stall, size / rate, size)


def full_link(now: float, in_flight: int, dice: random.Random) -> Answer:
    """300 MB/s over all streams."""
    return Answer(0.05 * dice.uniform(0.9, 1.2), 256 * KIB / min(4 * MIB, 300e6 / in_flight), 256 * KIB)


def queueing(now: float, in_flight: int, dice: random.Random) -> Answer:
    """32 at a time; the others wait."""
    return Answer(0.05 * max(1.0, in_flight / 32) * dice.uniform(0.9, 1.2))


def thrashing(now: float, in_flight: int, dice: random.Random) -> Answer:
    """Past 32 at a time it gets less done than before."""
    return Answer(0.05 * max(1.0, in_flight / 32) ** 2 * dice.uniform(0.9, 1.2))


class Throttling:
    """Refuses what is above 50 requests of any second."""

    def __init__(self, *, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._served: deque[float] = deque()

    def __call__(self, now: float, in_flight: int, dice: random.Random) -> Answer:
        while self._served and self._served[0] <= now - 1:
            self._served.popleft()
        if len(self._served) >= 50:
            return Answer(0.05, refused=True, pause_seconds=self._pause_seconds)
        self._served.append(now)
        return Answer(0.1 * dice.uniform(0.9, 1.2))


class Now:
    """A limit that isn't learned."""

    def __init__(self, limit: int) -> None:
        self.limit = limit


def simulate(
    server: Server, limit: LearnedLimit | Now, *, seed: int = 0, end: float = END_SECONDS, others_wait: bool = True
) -> float:
    """Bytes a second once it has settled, of a client that always has more to ask for and keeps the host's pauses."""
    dice = random.Random(seed)
    now, paused_until, in_flight, number, landed = 0.0, 0.0, 0, 0, 0
    ends: list[tuple[float, int, float, Answer]] = []
    while now < end:
        while in_flight < limit.limit and now >= paused_until:
            in_flight, number = in_flight + 1, number + 1
            answer = server(now, in_flight, dice)
            duration = answer.first_byte_seconds + answer.body_seconds
            heapq.heappush(ends, (now + duration, number, now, answer))
        if in_flight < limit.limit and (not ends or ends[0][0] > paused_until):
            now = paused_until
            continue
        now, _, since, answer = heapq.heappop(ends)
        if answer.refused:
            paused_until = max(paused_until, now + answer.pause_seconds * dice.uniform(1.0, 1.1))
        elif now > SETTLED_SECONDS:
            landed += answer.size_bytes
        if isinstance(limit, LearnedLimit):
            if answer.refused:
                limit.refused(now, seconds=now - since, pause_seconds=answer.pause_seconds)
            else:
                limit.ended(
                    now,
                    seconds=now - since,
                    first_byte_seconds=answer.first_byte_seconds,
                    size_bytes=answer.size_bytes,
                    in_flight=in_flight,
                    others_waited=others_wait,
                )
        in_flight -= 1
    return landed / (end - SETTLED_SECONDS)


def learned(*, lowest: int = LOWEST, initial: int = INITIAL, highest: int = HIGHEST) -> LearnedLimit:
    return LearnedLimit(lowest=lowest, initial=initial, highest=highest)


@pytest.mark.parametrize("initial", [LOWEST, INITIAL])
@pytest.mark.parametrize(
    "server",
    [
        pytest.param(lambda: unlimited, id="unlimited"),
        pytest.param(lambda: noisy, id="noisy"),
        pytest.param(lambda: full_link, id="full link"),
        pytest.param(lambda: Throttling(pause_seconds=1.0), id="throttling"),
        pytest.param(lambda: Throttling(pause_seconds=0.0), id="throttling without Retry-After"),
        pytest.param(lambda: queueing, id="queueing"),
        pytest.param(lambda: thrashing, id="thrashing"),
    ],
)
def test_limit_ends_within_a_fifth_of_the_best_fixed_one(server: Callable[[], Server], initial: int) -> None:
    best = max(simulate(server(), Now(limit)) for limit in FIXED)
    assert simulate(server(), learned(initial=initial)) >= 0.8 * best


def test_limit_is_what_a_slow_server_can_do() -> None:
    limit = learned()
    simulate(queueing, limit)
    assert 26 <= limit.limit <= 32 * LATE


def test_a_server_that_becomes_slow_by_itself_keeps_its_limit() -> None:
    def shifting(now: float, in_flight: int, dice: random.Random) -> Answer:
        return Answer((0.05 if now < 10 else 0.2) * dice.uniform(0.9, 1.2))

    limit = learned()
    simulate(shifting, limit)
    assert limit.limit == HIGHEST


def test_a_refusal_now_and_then_is_borne() -> None:
    def flaky(now: float, in_flight: int, dice: random.Random) -> Answer:
        return unlimited(now, in_flight, dice)._replace(refused=dice.random() < 0.03)

    limit = learned()
    simulate(flaky, limit)
    assert limit.limit == HIGHEST


def test_limit_comes_back_after_a_bad_minute() -> None:
    def bad_for_a_while(now: float, in_flight: int, dice: random.Random) -> Answer:
        return unlimited(now, in_flight, dice)._replace(refused=5 < now < 10)

    limit = learned()
    simulate(bad_for_a_while, limit, end=10.0)
    assert limit.limit == LOWEST
    limit = learned()
    simulate(bad_for_a_while, limit, end=30.0)
    assert limit.limit == HIGHEST


def test_limit_stays_where_it_doesnt_bind() -> None:
    limit = learned()
    simulate(unlimited, limit, others_wait=False)
    assert limit.limit == INITIAL


def test_the_same_bounds_fix_it() -> None:
    limit = learned(lowest=8, initial=8, highest=8)
    simulate(Throttling(pause_seconds=1.0), limit)
    assert limit.limit == 8


def test_a_round_trip_of_refusals_counts_once() -> None:
    limit = learned()
    for number in range(64):
        limit.refused(10.0 + number / 1000, seconds=0.1, pause_seconds=1.0)
    assert limit.limit == int(BACKOFF * INITIAL)
    limit.refused(12.0, seconds=0.1, pause_seconds=1.0)
    assert limit.limit == int(BACKOFF * BACKOFF * INITIAL)


def feed(limit: LearnedLimit, now: float, *, rounds: int) -> float:
    """Whole rounds of requests that all went well, each as fast as any before; the time after them."""
    for _ in range(rounds):
        now += 0.1
        for _ in range(max(16, 2 * limit.limit)):
            limit.ended(
                now,
                seconds=0.01,
                first_byte_seconds=0.01,
                size_bytes=KIB,
                in_flight=limit.limit,
                others_waited=True,
            )
    return now


def test_refused_limit_is_tried_again_after_a_truce_that_doubles() -> None:
    limit, now, truces = learned(initial=10, highest=100), 0.0, []
    for _ in range(5):
        refused, refused_at = limit.limit, now
        limit.refused(now, seconds=0.01, pause_seconds=0.5)
        while limit.limit < refused:
            now = feed(limit, now, rounds=1)
        truces.append(now - refused_at - 0.5)
    assert truces[0] == pytest.approx(TRUCE_SECONDS, abs=0.5)
    assert truces[1:] == pytest.approx([min(TRUCE_SECONDS * 2**n, MAX_TRUCE_SECONDS) for n in range(1, 5)], abs=0.5)


seconds = st.floats(0, 100)
events = st.one_of(
    st.tuples(st.just("ended"), seconds, seconds, seconds, st.integers(0, 10**12), st.integers(1, 1000), st.booleans()),
    st.tuples(st.just("refused"), seconds, seconds, st.one_of(st.just(0.0), seconds)),
)


@given(bounds=st.lists(st.integers(1, 300), min_size=3, max_size=3), history=st.lists(events, max_size=300))
def test_limit_is_never_outside_its_bounds(bounds: list[int], history: list[tuple[object, ...]]) -> None:
    lowest, initial, highest = sorted(bounds)
    limit, now = learned(lowest=lowest, initial=initial, highest=highest), 0.0
    for event in history:
        match event:
            case ("ended", float(later), float(took), float(first), int(size), int(flying), bool(waited)):
                now += later
                limit.ended(
                    now,
                    seconds=took,
                    first_byte_seconds=min(first, took),
                    size_bytes=size,
                    in_flight=flying,
                    others_waited=waited,
                )
            case ("refused", float(later), float(took), float(pause)):
                now += later
                limit.refused(now, seconds=took, pause_seconds=pause)
        assert lowest <= limit.limit <= highest

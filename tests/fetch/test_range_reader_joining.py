"""Calls of one turn of the loop share requests: right bytes for each, errors that fit, and nobody waits for nothing."""

from __future__ import annotations

import asyncio
import pickle
import random
import re
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NoReturn
from unittest.mock import Mock

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.cache import ByteCache
from asyncfetch.config import FetchConfig, RetryConfig, TimeoutConfig
from asyncfetch.errors import (
    AccessDenied,
    ClosedError,
    ConfigError,
    FetchError,
    InvalidResponse,
    NotFound,
    ObjectChanged,
    RangeNotSatisfiable,
)
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.batch import plan_batch
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.fetch.range_reader import MAX_PLANNED, MAX_SHARED_BYTES, Coalescer, RangeRequest, RequestGroup
from asyncfetch.ranges import ByteRange
from asyncfetch.runtime.concurrently import gather
from asyncfetch.testing import RangeServer
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncfetch.ranges import Request
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = random.Random(0).randbytes(200_000)


def asked(server: LyingServer) -> list[str]:
    return [request.headers["range"].removeprefix("bytes=") for request in server.requests]


async def outcomes(*calls: Callable[[], Awaitable[memoryview | None]]) -> list[bytes | Exception | None]:
    """What each of the calls, made in one turn, returns or raises."""

    async def outcome(call: Callable[[], Awaitable[memoryview | None]]) -> bytes | Exception | None:
        try:
            view = await call()
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            return error
        return None if view is None else bytes(view)

    return await gather(*(partial(outcome, call) for call in calls))


class Held:
    """Keeps a server from answering, and tells when it is asked."""

    def __init__(self, server: LyingServer) -> None:
        self.is_asked = anyio.Event()
        self.answer = asyncio.get_running_loop().create_future()
        server.limiter = self._limiter

    def _limiter(self) -> asyncio.Future[None]:
        self.is_asked.set()
        return self.answer


def reads(fetcher: Fetcher, url: str, *spans: tuple[int, int]) -> list[Callable[[], Awaitable[memoryview | None]]]:
    return [partial(fetcher.fetch, url, start, stop) for start, stop in spans]


# --- who shares what


async def test_near_ranges_of_one_turn_come_by_one_request(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    spans = [(300, 350), (100, 150), (120, 170), (300, 350)]
    assert await outcomes(*reads(fetcher, url, *spans)) == [CONTENT[start:stop] for start, stop in spans]
    assert asked(server) == ["100-349"]


async def test_ranges_of_different_turns_come_by_themselves(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)

    async def later() -> memoryview:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        return await fetcher.fetch(url, 50, 100)

    await outcomes(partial(fetcher.fetch, url, 0, 50), later)
    assert len(server.requests) == 2


async def test_a_lone_range_waits_for_one_turn_only(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    await fetcher.stat(url)
    turns = 0
    host = next(iter(fetcher._hosts._hosts.values()))
    async with anyio.create_task_group() as group:
        group.start_soon(fetcher.fetch, url, 0, 50)
        while not host.in_flight:
            turns += 1
            await anyio.lowlevel.checkpoint()
    assert turns <= 3  # one for the task to begin, one for its turn to end


async def test_calls_share_no_request_where_joining_is_off(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    url = server.put("/x", CONTENT)
    async with fetcher_with(max_span_bytes=0) as fetcher:
        assert await outcomes(*reads(fetcher, url, (0, 50), (50, 100))) == [CONTENT[:50], CONTENT[50:100]]
    assert sorted(asked(server)) == ["0-49", "50-99"]


async def test_shared_request_is_no_longer_than_its_wait_is_worth(
    fetcher_with: Callable[..., Fetcher], server: LyingServer
) -> None:
    content = bytes(8 * MAX_SHARED_BYTES)
    url = server.put("/x", content)
    step = MAX_SHARED_BYTES // 8
    async with fetcher_with(max_requests_per_host=1) as fetcher:
        await outcomes(*reads(fetcher, url, *((at, at + step) for at in range(0, len(content), step))))
    assert len(server.requests) == 8


async def test_open_ranges_and_empty_ones_take_no_part(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    spans = ((5, 5), (-9, None), (199_990, None))
    assert await outcomes(*(partial(fetcher.fetch, url, *span) for span in spans)) == [
        b"",
        CONTENT[-9:],
        CONTENT[199_990:],
    ]
    assert sorted(asked(server)) == ["-9", "199990-"]


async def test_a_turn_with_very_many_ranges_is_planned_in_pieces(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    spans = [(at, at + 10) for at in range(2 * MAX_PLANNED + 1)]
    assert await outcomes(*reads(fetcher, url, *spans)) == [CONTENT[start:stop] for start, stop in spans]
    assert len(server.requests) <= 3


async def test_batches_of_several_readers_are_joined(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    batches = [[ByteRange(url, at, at + 40), ByteRange(url, at + 100, at + 140)] for at in (0, 50, 200)]
    views = await gather(*(partial(fetcher.fetch_many, batch) for batch in batches))
    assert views == [[CONTENT[one.start : one.stop] for one in batch] for batch in batches]
    assert len(server.requests) == 1


@pytest.mark.parametrize("verb", ["fetch", "fetch_into"])
async def test_misses_of_the_byte_cache_are_joined(fetcher: Fetcher, server: LyingServer, verb: str) -> None:
    url = server.put("/x", CONTENT)
    async with ByteCache(fetcher, max_bytes=100_000) as cache:

        async def read(at: int) -> memoryview:
            if verb == "fetch":
                return await cache.fetch(url, at, at + 100)
            buffer = bytearray(100)
            await cache.fetch_into(url, at, at + 100, buffer)
            return memoryview(buffer)

        views = await gather(*(partial(read, at) for at in range(0, 5000, 100)))
    assert views == [CONTENT[at : at + 100] for at in range(0, 5000, 100)]
    assert len(server.requests) == 1


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_random_calls_have_their_bytes_beside_any_others(data: st.DataObject) -> None:
    spans = st.tuples(st.integers(0, 199_000), st.sampled_from([0, 1, 300, 999])).map(lambda at: (at[0], sum(at)))
    near = st.tuples(st.integers(0, 1500), st.sampled_from([0, 1, 300, 999])).map(lambda at: (at[0], sum(at)))
    wanted: Sequence[tuple[int, int]] = data.draw(st.lists(spans | near, max_size=30))
    into = data.draw(st.lists(st.booleans(), min_size=len(wanted), max_size=len(wanted)))
    config = FetchConfig(
        max_requests_per_host=data.draw(st.sampled_from([1, 3, 64])),
        part_bytes=data.draw(st.sampled_from([200, 1 << 23])),
        trust_env=False,
    )

    async def read(fetcher: Fetcher, url: str, span: tuple[int, int], into_buffer: bool) -> memoryview:
        if not into_buffer:
            return await fetcher.fetch(url, *span)
        buffer = bytearray(span[1] - span[0])
        await fetcher.fetch_into(url, *span, buffer)
        return memoryview(buffer)

    async def run() -> None:
        async with RangeServer({"x": CONTENT}, tls=False) as server, Fetcher(config) as fetcher:
            calls = (partial(read, fetcher, f"{server.url}/x", *one) for one in zip(wanted, into, strict=True))
            assert await gather(*calls) == [CONTENT[start:stop] for start, stop in wanted]

    anyio.run(run)


# --- priorities


async def test_read_ahead_and_what_somebody_waits_for_share_nothing(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    callers = [Caller(urgent=False), Caller(urgent=False), Caller(), Caller()]

    async def read(number: int) -> memoryview:
        with calling(callers[number]):
            return await fetcher.fetch(url, 10 * number, 10 * number + 10)

    assert await gather(*(partial(read, number) for number in range(4))) == [
        CONTENT[at : at + 10] for at in range(0, 40, 10)
    ]
    assert sorted(asked(server)) == ["0-19", "20-39"]


@pytest.mark.parametrize("raised", [0, 1, None])
async def test_shared_read_ahead_is_urgent_once_a_part_is_waited_for(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, raised: int | None
) -> None:
    url = server.put("/x", CONTENT)
    other, shared = Caller(urgent=False), [Caller(urgent=False), Caller(urgent=False)]
    async with fetcher_with(max_requests_per_host=1) as fetcher:
        await fetcher.stat(url)
        server.requests.clear()
        held = Held(server)

        async def read(caller: Caller, start: int) -> None:
            with calling(caller):
                await fetcher.fetch(url, start, start + 10)

        async with anyio.create_task_group() as group:
            group.start_soon(read, other, 50_000)
            await held.is_asked.wait()
            group.start_soon(read, other, 150_000)
            await all_others_wait()
            for number, caller in enumerate(shared):
                group.start_soon(read, caller, 10 * number)
            await all_others_wait()
            if raised is not None:
                shared[raised].raise_priority()
            held.answer.set_result(None)
    overtakes = raised is not None
    assert asked(server)[1:] == (["0-19", "150000-150009"] if overtakes else ["150000-150009", "0-19"])


# --- memory


async def test_joined_calls_have_memory_of_their_own(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    buffer = bytearray(50)
    one, other, _ = await gather(
        partial(fetcher.fetch, url, 0, 100_000),
        partial(fetcher.fetch, url, 60_000, 160_000),
        partial(fetcher.fetch_into, url, 10, 60, buffer),
    )
    assert one is not None
    assert other is not None
    assert len(server.requests) == 3  # longer than what is joined while streams are idle
    server.requests.clear()
    one, other, _ = await gather(
        partial(fetcher.fetch, url, 0, 10_000),
        partial(fetcher.fetch, url, 6_000, 16_000),
        partial(fetcher.fetch_into, url, 10, 60, buffer),
    )
    assert len(server.requests) == 1
    assert isinstance(one, memoryview)
    assert isinstance(other, memoryview)
    assert one.obj is not other.obj
    assert one.readonly
    assert buffer == CONTENT[10:60]


# --- errors


@pytest.mark.parametrize(("status", "kind"), [(404, NotFound), (403, AccessDenied), (500, FetchError)])
async def test_error_of_a_shared_request_names_each_callers_range(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    step: type[StepType],
    status: int,
    kind: type[FetchError],
) -> None:
    url = server.put("/x", CONTENT)
    server.every = lambda _: step(status=status)
    async with fetcher_with(retry=RetryConfig(attempts=2)) as fetcher:
        errors = await outcomes(*reads(fetcher, url, (300, 350), (100, 150), (300, 350)))
    assert [type(error) for error in errors] == [kind] * 3
    assert [(error.start, error.stop) for error in errors if isinstance(error, FetchError)] == [
        (300, 350),
        (100, 150),
        (300, 350),
    ]
    assert all(re.search(r"bytes \[(300, 350|100, 150)\)", str(error)) for error in errors)
    assert {error.status for error in errors if isinstance(error, FetchError)} == {status}
    assert len({id(error) for error in errors}) == 3
    assert len(server.requests) == (2 if status == 500 else 1)


async def test_only_the_range_beyond_the_end_is_refused(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    spans = [(199_900, 199_950), (199_950, 200_001), (199_990, 200_000)]
    first, refused, last = await outcomes(*reads(fetcher, url, *spans))
    assert first == CONTENT[199_900:199_950]
    assert last == CONTENT[199_990:]
    assert isinstance(refused, RangeNotSatisfiable)
    assert (refused.start, refused.stop, refused.size) == (199_950, 200_001, 200_000)


async def test_a_range_beyond_the_end_that_all_want_is_asked_for_once(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    errors = await outcomes(*reads(fetcher, url, *[(200_000, 200_001)] * 5))
    assert [type(error) for error in errors] == [RangeNotSatisfiable] * 5
    assert len(server.requests) == 1


async def test_change_reaches_all_callers_and_the_next_start_afresh(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    await fetcher.stat(url)
    server.put("/x", CONTENT[::-1])
    errors = await outcomes(*reads(fetcher, url, (0, 10), (10, 20)))
    assert [type(error) for error in errors] == [ObjectChanged] * 2
    assert await outcomes(*reads(fetcher, url, (0, 10), (10, 20))) == [CONTENT[::-1][:10], CONTENT[::-1][10:20]]


async def test_range_of_a_whole_body_comes_without_its_neighbour(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    """By a server that ignores Range, of which only the first mebibyte is read."""
    content = bytes(2 << 20)
    url = server.put("/x", content)
    server.every = lambda _: step(ignore_range=True)
    mebibyte = 1 << 20
    near, beyond = await outcomes(*reads(fetcher, url, (mebibyte - 10, mebibyte), (mebibyte, mebibyte + 10)))
    assert near == bytes(10)
    assert isinstance(beyond, InvalidResponse)
    assert pickle.loads(pickle.dumps(beyond)).ignores_range


async def test_failure_of_the_whole_object_is_not_asked_for_each_range(
    fetcher: Fetcher, server: LyingServer, step: type[StepType]
) -> None:
    """By a server that compresses all that it sends, which was asked not to."""
    url = server.put("/x", CONTENT)
    server.every = lambda _: step(ignore_range=True, headers={"Content-Encoding": "gzip"})
    errors = await outcomes(*reads(fetcher, url, (300, 350), (100, 150)))
    assert [type(error) for error in errors] == [InvalidResponse] * 2
    assert [(error.status, error.ignores_range) for error in errors if isinstance(error, InvalidResponse)] == [
        (200, False)
    ] * 2
    assert len(server.requests) == 2


async def test_invalid_argument_is_its_own_callers_error(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    wrong = partial(fetcher.fetch_into, url, 20, 30, bytearray(3))
    got, refused = await outcomes(partial(fetcher.fetch, url, 0, 10), wrong)
    assert got == CONTENT[:10]
    assert isinstance(refused, ConfigError)


async def _unread(request: Request, group: RequestGroup) -> NoReturn:
    raise NotImplementedError


async def planned_at_the_end_of_the_turn(joining: Coalescer, one: ByteRange) -> RangeRequest:
    """What the range is brought by, at the end of the turn."""
    ask = joining.ask(one)
    await asyncio.sleep(0)
    if not ask.requests:
        joining.settle()
    return ask


@pytest.mark.parametrize("number", [3, MAX_PLANNED + 1])
async def test_failed_planning_is_one_callers_error(
    number: int,
) -> None:
    def plan(_: Sequence[ByteRange]) -> NoReturn:
        raise MemoryError

    joining = Coalescer(plan, _unread)
    answers: list[RangeRequest | None] = []

    async def ask(at: int) -> None:
        try:
            answers.append(await planned_at_the_end_of_the_turn(joining, ByteRange("http://h/x", at, at + 10)))
        except MemoryError:
            answers.append(None)

    await gather(*(partial(ask, at) for at in range(number)))
    planned = min(number, MAX_PLANNED)
    places = [(None, RequestGroup(planned, ahead)) for ahead in range(planned)]
    assert [(answer.shared, answer.group) for answer in answers if answer is not None] == places[-(number - 1) :]
    assert answers.count(None) == 1


async def test_range_of_a_turn_knows_the_requests_before_its_own() -> None:
    joining = Coalescer(partial(plan_batch, config=FetchConfig(max_gap_bytes=10)), _unread)
    read_ahead = Caller(urgent=False)
    companies: dict[int, RequestGroup] = {}

    async def ask(start: int, caller: Caller) -> None:
        with calling(caller):
            companies[start] = (
                await planned_at_the_end_of_the_turn(joining, ByteRange("http://h/x", start, start + 10))
            ).group

    asks = [(5_000, read_ahead), (100, Caller()), (300, Caller()), (115, Caller()), (7_000, read_ahead)]
    await gather(*(partial(ask, start, caller) for start, caller in asks))
    assert companies == {
        100: RequestGroup(4, 0),
        115: RequestGroup(4, 0),  # by the same request
        300: RequestGroup(4, 1),
        5_000: RequestGroup(4, 2),
        7_000: RequestGroup(4, 3),
    }


async def test_calls_after_a_failed_planning_are_planned(
    fetcher: Fetcher, server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.put("/x", CONTENT)
    spans = [(0, 10), (20, 30), (40, 50)]
    with monkeypatch.context() as context:
        context.setattr(fetcher._assembly._joining, "_plan", Mock(side_effect=MemoryError))
        failed, *others = await outcomes(*reads(fetcher, url, *spans))
    assert isinstance(failed, MemoryError)
    assert others == [CONTENT[start:stop] for start, stop in spans[1:]]
    server.requests.clear()
    assert await outcomes(*reads(fetcher, url, *spans)) == [CONTENT[start:stop] for start, stop in spans]
    assert asked(server) == ["0-49"]


# --- cancellation


@pytest.mark.parametrize("cancelled", [0, 1, 2])
async def test_a_cancelled_caller_costs_the_others_nothing_but_time(
    fetcher: Fetcher, server: LyingServer, cancelled: int
) -> None:
    url = server.put("/x", CONTENT)
    await fetcher.stat(url)
    server.requests.clear()
    held = Held(server)
    scopes = [anyio.CancelScope() for _ in range(3)]
    got: dict[int, memoryview] = {}

    async def read(number: int) -> None:
        with scopes[number]:
            got[number] = await fetcher.fetch(url, 100 * number, 100 * number + 100)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(read, number)
        await held.is_asked.wait()
        scopes[cancelled].cancel()
        await anyio.sleep(0.05)
        held.answer.set_result(None)
    assert got == {number: CONTENT[100 * number : 100 * number + 100] for number in range(3) if number != cancelled}
    assert asked(server) == ["0-299"] * (2 if cancelled == 0 else 1)  # the first one's task had made the request
    assert fetcher.statistics().in_flight == 0


async def test_request_ends_with_its_last_caller(fetcher: Fetcher, server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    held = Held(server)
    async with anyio.create_task_group() as group:
        for start in (0, 100, 200):
            group.start_soon(fetcher.fetch, url, start, start + 100)
        await held.is_asked.wait()
        group.cancel_scope.cancel()
    assert fetcher.statistics().in_flight == 0
    assert len(server.requests) == 1


@pytest.mark.parametrize("turns", range(8))
async def test_cancellation_at_any_turn_leaves_others_their_bytes(
    fetcher: Fetcher, server: LyingServer, turns: int
) -> None:
    url = server.put("/x", CONTENT)
    buffer = bytearray(10)
    got: list[memoryview] = []

    async def read(start: int) -> None:
        got.append(await fetcher.fetch(url, start, start + 10))

    async with anyio.create_task_group() as group:
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(fetcher.fetch_into, url, 0, 10, buffer)
            cancelled.start_soon(fetcher.fetch, url, 0, 10)
            for start in (5, 10, 15):
                group.start_soon(read, start)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            cancelled.cancel_scope.cancel()
        buffer[:] = bytes(10)
    assert sorted(map(bytes, got)) == sorted([CONTENT[5:15], CONTENT[10:20], CONTENT[15:25]])
    assert buffer == bytes(10)
    assert await fetcher.fetch(url, 0, 10) == CONTENT[:10]


async def test_closing_ends_all_that_share_a_request(fetcher_with: Callable[..., Fetcher], server: LyingServer) -> None:
    url = server.put("/x", CONTENT)
    held = Held(server)
    errors: list[object] = []
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(anyio.create_task_group())
        timeouts = TimeoutConfig(first_byte_seconds=60)
        fetcher = await stack.enter_async_context(fetcher_with(timeouts=timeouts))

        async def read() -> None:
            errors.extend(await outcomes(*reads(fetcher, url, (0, 10), (10, 20), (20, 30))))

        group.start_soon(read)
        await held.is_asked.wait()
    assert [type(error) for error in errors] == [ClosedError] * 3

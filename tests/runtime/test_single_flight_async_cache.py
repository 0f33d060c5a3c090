"""Values that expire: found once for all who ask, again when they are worn out."""

from __future__ import annotations

from traceback import walk_tb

import anyio
import pytest

from asyncfetch.errors import AccessDenied, ConfigError
from asyncfetch.fetch.retry import AttemptFailed, RetryBudget
from asyncfetch.runtime.single_flight import MARGIN_SECONDS, MEANT_SECONDS, AsyncCache, CachedValue
from tests.conftest import all_others_wait


class FakeTime:
    now = 1000.0


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


class Finder:
    """Finds "1", "2", ...; waits for ``limiter`` where there is one."""

    def __init__(self, seconds: float = 1000.0) -> None:
        self.seconds = seconds
        self.calls = 0
        self.limiter: anyio.Event | None = None
        self.error: Exception | None = None

    async def __call__(self) -> CachedValue[str]:
        self.calls += 1
        number = self.calls
        if self.limiter is not None:
            await self.limiter.wait()
        if self.error is not None:
            raise self.error
        return CachedValue(str(number), self.seconds)


@pytest.fixture
def found(time: FakeTime) -> AsyncCache[str, str]:
    return AsyncCache(lambda: time.now, 3)


async def test_a_value_is_found_once(found: AsyncCache[str, str]) -> None:
    find = Finder()
    assert [await found.get("a", find) for _ in range(5)] == ["1"] * 5


async def test_value_is_found_again_before_it_expires(found: AsyncCache[str, str], time: FakeTime) -> None:
    find = Finder(seconds=1000)
    await found.get("a", find)
    time.now += 1000 - MARGIN_SECONDS - 1
    assert await found.get("a", find) == "1"
    time.now += 1
    assert await found.get("a", find) == "2"


async def test_a_short_life_has_a_short_margin(found: AsyncCache[str, str], time: FakeTime) -> None:
    find = Finder(seconds=10)
    await found.get("a", find)
    time.now += 8.9
    assert await found.get("a", find) == "1"
    time.now += 0.2
    assert await found.get("a", find) == "2"


async def test_concurrent_askers_share_one_search(found: AsyncCache[str, str]) -> None:
    find, got = Finder(), []
    find.limiter = anyio.Event()

    async def ask() -> None:
        got.append(await found.get("a", find))

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await all_others_wait()
        find.limiter.set()
    assert (got, find.calls) == (["1"] * 100, 1)


@pytest.mark.parametrize("error", [AttemptFailed(AccessDenied, "no"), ConfigError("no")])
async def test_an_error_reaches_all_and_is_forgotten(found: AsyncCache[str, str], error: Exception) -> None:
    find, errors = Finder(), []
    find.limiter, find.error = anyio.Event(), error

    async def ask() -> None:
        with pytest.raises(type(error)) as caught:
            await found.get("a", find)
        errors.append(caught.value)

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(ask)
        await all_others_wait()
        find.limiter.set()
    assert (len(errors), find.calls) == (10, 1)
    find.error = None
    assert await found.get("a", find) == "2"


@pytest.mark.parametrize("error", [AttemptFailed(AccessDenied, "no", budget=RetryBudget(1)), ConfigError("no")])
async def test_waiting_callers_have_errors_of_their_own(found: AsyncCache[str, str], error: Exception) -> None:
    find, errors = Finder(), []
    find.limiter, find.error = anyio.Event(), error
    error.__cause__ = OSError()

    async def ask() -> None:
        try:
            await found.get("a", find)
        except (AttemptFailed, ConfigError) as caught:
            errors.append(caught)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
        await all_others_wait()
        find.limiter.set()
    searched, *waited = errors
    assert searched is error
    assert len({id(one) for one in errors}) == 3
    assert {(type(one), str(one), repr(one.__cause__)) for one in errors} == {(type(error), str(error), "OSError()")}
    if isinstance(error, AttemptFailed):  # whoever repeats it first pays for all
        assert {one.budget for one in errors if isinstance(one, AttemptFailed)} == {error.budget}
    frames = [frame.f_code.co_name for one in waited for frame, _ in walk_tb(one.__traceback__)]
    assert frames == ["ask", "get", "load", "get"] * 2


async def test_a_cancelled_searcher_hands_over(found: AsyncCache[str, str]) -> None:
    find, got = Finder(), []
    find.limiter = anyio.Event()
    first = anyio.CancelScope()

    async def lead() -> None:
        with first:
            await found.get("a", find)

    async def follow() -> None:
        got.append(await found.get("a", find))

    async with anyio.create_task_group() as group:
        group.start_soon(lead)
        await all_others_wait()
        for _ in range(3):
            group.start_soon(follow)
        await all_others_wait()
        first.cancel()
        await all_others_wait()
        find.limiter.set()
    assert (got, find.calls) == (["2"] * 3, 2)


async def test_rejection_by_the_first_caller_counts_for_all(found: AsyncCache[str, str], time: FakeTime) -> None:
    find = Finder()
    old = await found.get("a", find)
    time.now += MEANT_SECONDS
    assert found.reject("a", old)
    new = await found.get("a", find)
    assert found.reject("a", old)  # it was replaced already
    assert await found.get("a", find) == new == "2"


async def test_a_brand_new_value_is_not_worn_out(found: AsyncCache[str, str]) -> None:
    find = Finder()
    value = await found.get("a", find)
    assert not found.reject("a", value)
    assert await found.get("a", find) == "1"


async def test_the_least_recently_used_is_forgotten(found: AsyncCache[str, str]) -> None:
    find = Finder()
    for key in "abc":
        await found.get(key, find)
    await found.get("a", find)
    await found.get("d", find)
    assert len(found) == 3
    assert await found.get("a", find) == "1"
    assert await found.get("b", find) == "5"


async def test_callers_may_ask_again_at_once_after_an_error(found: AsyncCache[str, str]) -> None:
    find, got = Finder(), []
    find.limiter, find.error = anyio.Event(), ConfigError("no")

    async def ask() -> None:
        with pytest.raises(ConfigError):
            await found.get("a", find)
        find.error = None
        got.append(await found.get("a", find))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
        await all_others_wait()
        find.limiter.set()
    assert (got, find.calls) == (["2"] * 3, 2)

"""An async iterator of one's own as an IterableDataset."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from torch.utils.data import DataLoader, get_worker_info

import asyncfetch as af

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.usefixtures("programs_are_warm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

Dataset = af.torch.AsyncIterableDataset


async def count(stop: int, error: BaseException | None = None) -> AsyncIterator[int]:
    for number in range(stop):
        await anyio.lowlevel.checkpoint()
        yield number
    if error is not None:
        raise error


@pytest.mark.parametrize("max_ahead", [1, 2, 16])
def test_items_come_in_order_again_and_again(max_ahead: int) -> None:
    dataset = Dataset(lambda: count(50), max_ahead=max_ahead)
    assert [list(dataset) for _ in range(2)] == [list(range(50))] * 2


def test_an_empty_iterator_is_empty() -> None:
    assert list(Dataset(lambda: count(0))) == []


def test_no_more_than_max_ahead_are_made() -> None:
    made = []

    async def note() -> AsyncIterator[int]:
        for number in range(100):
            made.append(number)
            yield number
            await anyio.lowlevel.checkpoint()

    iterator = iter(Dataset(note, max_ahead=3))
    assert [next(iterator) for _ in range(10)] == list(range(10))
    assert len(made) <= 10 + 3 + 1
    iterator.close()  # type: ignore[attr-defined]


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError("v"), Odd("o"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr
)
def test_an_error_of_any_type_comes_behind_the_items(error: BaseException) -> None:
    seen = []
    with pytest.raises(type(error)) as caught:  # noqa: PT012
        for item in Dataset(lambda: count(5, error)):
            seen.append(item)  # noqa: PERF402
    assert caught.value is error
    assert seen == list(range(5))


class Stopping:
    """An async iterator by hand: an async generator would turn the stops into RuntimeErrors itself."""

    def __init__(self, error: BaseException, at_entry: bool = False) -> None:
        self.error, self.number = error, 0

    def __aiter__(self) -> Stopping:
        return self

    async def __anext__(self) -> int:
        self.number += 1
        if self.number > 3:
            raise self.error
        return self.number


def test_a_stop_iteration_is_an_error_and_no_end() -> None:
    iterator = iter(Dataset(lambda: Stopping(StopIteration())))
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)


def test_a_stop_async_iteration_is_the_end() -> None:
    assert list(Dataset(lambda: Stopping(StopAsyncIteration()))) == [1, 2, 3]


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration()], ids=repr)
def test_a_stop_raised_by_the_factory_is_an_error(error: Exception) -> None:
    def factory() -> Any:  # noqa: ANN401
        raise error

    with pytest.raises((RuntimeError, StopAsyncIteration)):
        list(Dataset(factory))


@pytest.mark.parametrize("made", [[1, 2], None, 3], ids=repr)
def test_a_factory_of_something_else_is_refused(made: Any) -> None:  # noqa: ANN401
    with pytest.raises(af.ConfigError, match="async iterator"):
        list(Dataset(lambda: made))


def test_factory_that_is_no_generator_is_refused() -> None:
    async def nothing() -> None:
        pass

    made = nothing()
    with pytest.raises(af.ConfigError, match=r"async iterator.* not <coroutine"):
        list(Dataset(lambda: made))  # type: ignore[arg-type, return-value]
    assert inspect.getcoroutinestate(made) == inspect.CORO_CLOSED


def test_max_ahead_is_at_least_one() -> None:
    with pytest.raises(af.ConfigError, match="max_ahead"):
        Dataset(lambda: count(1), max_ahead=0)


class Context:
    """A context manager that is iterated itself, and notes what happens."""

    def __init__(self, log: list[str], error: BaseException | None = None) -> None:
        self.log, self.error = log, error

    async def __aenter__(self) -> Context:  # noqa: PYI034
        self.log.append("entered")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.log.append(f"left with {kind and kind.__name__}")

    def __aiter__(self) -> AsyncIterator[int]:
        return count(3, self.error)


@pytest.mark.parametrize(("error", "end"), [(None, "None"), (ValueError(), "ValueError")])
def test_context_manager_that_is_iterable_is_entered_and_left(error: Exception | None, end: str) -> None:
    log: list[str] = []
    iterator = iter(Dataset(lambda: Context(log, error)))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    if error is None:
        assert next(iterator, None) is None
    else:
        with pytest.raises(type(error)):
            next(iterator)
    assert log == ["entered", f"left with {end}"]


def test_a_context_manager_that_gives_no_iterator_is_left() -> None:
    log = []

    @asynccontextmanager
    async def nothing() -> AsyncIterator[Any]:
        try:
            yield None
        finally:
            log.append("left")

    with pytest.raises(af.ConfigError, match="async iterator"):
        list(Dataset(nothing))
    assert log == ["left"]


@pytest.mark.parametrize("end", ["break", "error", "close"])
def test_leaving_early_ends_the_iterator_and_its_thread(end: str) -> None:
    log, threads = [], threading.active_count()

    async def endless() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await anyio.sleep(0.001)
        finally:
            log.append("ended")

    iterator = iter(Dataset(endless))
    if end == "close":
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
    try:
        for _ in iterator:
            if end == "error":
                raise ZeroDivisionError  # noqa: TRY301
            break
    except ZeroDivisionError:
        pass
    del iterator
    assert log == ["ended"]
    assert threading.active_count() == threads


@pytest.mark.alone
@pytest.mark.parametrize("swallows", ["cancellation", "the loop", "a thread"])
def test_leaving_early_waits_a_second_at_most_for_the_source(swallows: str) -> None:
    end = threading.Event()

    async def stubborn() -> AsyncIterator[int]:
        yield 1
        if swallows == "the loop":
            end.wait()
        if swallows == "a thread":
            await asyncio.to_thread(end.wait)
        while not end.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    iterator = iter(Dataset(stubborn))
    assert next(iterator) == 1
    started_at = time.perf_counter()
    iterator.close()  # type: ignore[attr-defined]
    seconds = time.perf_counter() - started_at
    end.set()
    assert seconds < 1


def shares(stop: int) -> AsyncIterator[int]:
    worker = get_worker_info()
    return count(stop) if worker is None else count_share(stop, worker.id, worker.num_workers)


async def count_share(stop: int, worker: int, workers: int) -> AsyncIterator[int]:
    async for number in count(stop):
        if number % workers == worker:
            yield number


def test_forked_workers_make_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset(lambda: shares(20))
    assert list(dataset) == list(range(20))  # in the parent before the fork, too
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(loader) == list(range(20))


@pytest.mark.usefixtures("failed_loaders_end_soon")
def test_an_error_in_a_forked_worker_is_raised_in_the_parent() -> None:
    loader = DataLoader(
        Dataset(lambda: count(3, af.NotFound("nothing there"))),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    with pytest.raises(af.NotFound, match="nothing there"):
        list(loader)


@pytest.mark.slow
def test_spawned_workers_make_their_own() -> None:
    dataset = Dataset(partial(shares, 20))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert sorted(loader) == list(range(20))

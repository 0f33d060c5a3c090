from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfetch.errors import ClosedError, ConfigError
from asyncfetch.observe import Histogram
from asyncfetch.runtime.channel import HandOver
from asyncfetch.runtime.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(scope="module")
def loop_thread() -> Generator[LoopThread, None, None]:
    with LoopThread() as thread:
        yield thread


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches=st.lists(st.lists(st.integers(), max_size=5), max_size=12), max_batches=st.integers(1, 3))
def test_every_item_arrives_in_order(loop_thread: LoopThread, batches: list[list[int]], max_batches: int) -> None:
    hand_over: HandOver[int] = HandOver(max_batches)

    async def produce() -> None:
        for batch in batches:
            await hand_over.put(batch)
        hand_over.finish()

    call = loop_thread.start(produce)
    assert list(hand_over) == [item for batch in batches for item in batch]
    assert list(hand_over) == []
    call.result()


def test_the_producer_waits_where_the_consumer_is_behind(loop_thread: LoopThread) -> None:
    hand_over: HandOver[int] = HandOver(2)
    log: list[int] = []

    async def produce() -> None:
        for serial in range(5):
            await hand_over.put([serial, serial])
            log.append(serial)

    call = loop_thread.start(produce)
    loop_thread.run(anyio.wait_all_tasks_blocked)
    assert log == [0, 1]
    next(hand_over)
    loop_thread.run(anyio.wait_all_tasks_blocked)
    assert log == [0, 1]  # half a batch is no credit
    next(hand_over)
    loop_thread.run(anyio.wait_all_tasks_blocked)
    assert log == [0, 1, 2]
    call.cancel()
    hand_over.close()


def test_the_way_of_a_batch_is_timed_from_when_it_was_there_and_asked_for(loop_thread: LoopThread) -> None:
    times = Histogram()
    hand_over: HandOver[int] = HandOver(2, times=times)
    waited_seconds = 0.1

    async def produce(*items: int) -> None:
        await hand_over.put(items)

    loop_thread.run(produce, 1, 2)
    time.sleep(waited_seconds)  # the consumer is late
    assert [next(hand_over), next(hand_over)] == [1, 2]

    async def produce_later() -> None:
        await anyio.sleep(waited_seconds)
        await hand_over.put([3])

    call = loop_thread.start(produce_later)
    assert next(hand_over) == 3  # the producer is
    call.result()
    now = times.snapshot()
    assert now.count == 2
    assert 0 < now.sum_seconds < waited_seconds


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), StopAsyncIteration()]
)
def test_a_failure_is_raised_after_the_items_and_is_not_an_end(loop_thread: LoopThread, error: BaseException) -> None:
    hand_over: HandOver[int] = HandOver()

    async def produce() -> None:
        await hand_over.put([1, 2])
        hand_over.fail(error)

    loop_thread.run(produce)
    assert [next(hand_over), next(hand_over)] == [1, 2]
    with pytest.raises(type(error)) as caught:
        next(hand_over)
    assert caught.value is error
    assert next(hand_over, "over") == "over"


def test_a_stop_iteration_does_not_end_the_iteration_silently() -> None:
    hand_over: HandOver[int] = HandOver()
    hand_over.fail(StopIteration(5))
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(hand_over)


def test_close_wakes_a_waiting_producer_and_refuses_further_items(loop_thread: LoopThread) -> None:
    hand_over: HandOver[int] = HandOver(1)

    async def produce() -> str:
        await hand_over.put([1])
        with pytest.raises(ClosedError):
            await hand_over.put([2])
        with pytest.raises(ClosedError):
            await hand_over.put([3])
        return "told"

    call = loop_thread.start(produce)
    loop_thread.run(anyio.wait_all_tasks_blocked)
    hand_over.close()
    hand_over.close()
    assert call.result() == "told"
    assert list(hand_over) == []


def test_close_ends_an_iteration_that_waits_in_another_thread() -> None:
    hand_over: HandOver[int] = HandOver()
    got: list[list[int]] = []
    consumer = threading.Thread(target=lambda: got.append(list(hand_over)))
    consumer.start()
    hand_over.close()
    consumer.join(5)
    assert got == [[]]


def test_a_cancelled_put_hands_nothing_over(loop_thread: LoopThread) -> None:
    hand_over: HandOver[int] = HandOver(1)

    async def produce() -> None:
        await hand_over.put([1])
        with anyio.move_on_after(0.01) as scope:
            await hand_over.put([2])
        assert scope.cancelled_caught
        hand_over.finish()

    loop_thread.run(produce)
    assert list(hand_over) == [1]


def test_a_channel_without_room_is_refused() -> None:
    with pytest.raises(ConfigError):
        HandOver(0)

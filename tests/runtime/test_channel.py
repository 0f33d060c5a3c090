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
from asyncfetch.runtime.channel import ThreadChannel
from asyncfetch.runtime.loop_thread import LoopThread
from tests.conftest import all_others_wait

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(scope="module")
def loop_thread() -> Generator[LoopThread, None, None]:
    with LoopThread() as thread:
        yield thread


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches=st.lists(st.lists(st.integers(), max_size=5), max_size=12), max_batches=st.integers(1, 3))
def test_every_batch_arrives_in_order(loop_thread: LoopThread, batches: list[list[int]], max_batches: int) -> None:
    hand_over: ThreadChannel[int] = ThreadChannel(max_batches)

    async def produce() -> None:
        for batch in batches:
            await hand_over.room()
            hand_over.put(batch)
        hand_over.finish()

    call = loop_thread.start(produce)
    assert [list(batch) for batch in hand_over] == [batch for batch in batches if batch]
    assert list(hand_over) == []
    call.result()


@given(max_batches=st.integers(1, 6), taken=st.integers(0, 9))
def test_producer_is_woken_when_less_than_half_the_way_ahead(
    loop_thread: LoopThread, max_batches: int, taken: int
) -> None:
    hand_over: ThreadChannel[int] = ThreadChannel(max_batches)
    put: list[int] = []

    async def produce() -> None:
        while True:
            await hand_over.room()
            put.append(len(put))
            hand_over.put([len(put)])

    call = loop_thread.start(produce)
    loop_thread.run(all_others_wait)
    expected = max_batches
    for number in range(taken):
        assert len(put) == expected
        assert list(next(hand_over)) == [number + 1]
        loop_thread.run(all_others_wait)
        if 2 * (expected - number - 1) < max_batches:
            expected = number + 1 + max_batches
    call.cancel()
    hand_over.close()


def test_way_of_a_batch_is_timed_once_it_is_there_and_asked_for(loop_thread: LoopThread) -> None:
    times = Histogram()
    hand_over: ThreadChannel[int] = ThreadChannel(2, times=times)
    waited_seconds = 0.1

    async def produce(*items: int) -> None:
        hand_over.put(items)

    loop_thread.run(produce, 1, 2)
    time.sleep(waited_seconds)  # the consumer is late
    assert list(next(hand_over)) == [1, 2]

    async def produce_later() -> None:
        await anyio.sleep(waited_seconds)
        hand_over.put([3])

    call = loop_thread.start(produce_later)
    assert list(next(hand_over)) == [3]  # the producer is
    call.result()
    now = times.snapshot()
    assert now.count == 2
    assert 0 < now.sum_seconds < waited_seconds


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), StopAsyncIteration()]
)
def test_a_failure_is_raised_after_the_items_and_is_not_an_end(loop_thread: LoopThread, error: BaseException) -> None:
    hand_over: ThreadChannel[int] = ThreadChannel()

    async def produce() -> None:
        hand_over.put([1, 2])
        hand_over.fail(error)

    loop_thread.run(produce)
    assert list(next(hand_over)) == [1, 2]
    with pytest.raises(type(error)) as caught:
        next(hand_over)
    assert caught.value is error
    assert next(hand_over, "over") == "over"


def test_a_stop_iteration_does_not_end_the_iteration_silently() -> None:
    hand_over: ThreadChannel[int] = ThreadChannel()
    hand_over.fail(StopIteration(5))
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(hand_over)


def test_close_wakes_a_waiting_producer_and_refuses_items(loop_thread: LoopThread) -> None:
    hand_over: ThreadChannel[int] = ThreadChannel(1)

    async def produce() -> str:
        hand_over.put([1])
        for _ in range(2):
            with pytest.raises(ClosedError):
                await hand_over.room()
        return "told"

    call = loop_thread.start(produce)
    loop_thread.run(all_others_wait)
    hand_over.close()
    hand_over.close()
    assert call.result() == "told"
    assert list(hand_over) == []


def test_close_ends_an_iteration_that_waits_in_another_thread() -> None:
    hand_over: ThreadChannel[int] = ThreadChannel()
    got: list[object] = []
    consumer = threading.Thread(target=lambda: got.append(list(hand_over)))
    consumer.start()
    hand_over.close()
    consumer.join(5)
    assert got == [[]]


def test_producer_cancelled_while_it_waits_may_ask_again(loop_thread: LoopThread) -> None:
    hand_over: ThreadChannel[int] = ThreadChannel(1)

    async def produce() -> None:
        hand_over.put([1])
        with anyio.move_on_after(0.01) as scope:
            await hand_over.room()
        assert scope.cancelled_caught
        await hand_over.room()
        hand_over.put([2])
        hand_over.finish()

    call = loop_thread.start(produce)
    loop_thread.run(anyio.sleep, 0.02)
    assert [list(batch) for batch in hand_over] == [[1], [2]]
    call.result()


def test_a_channel_without_room_is_refused() -> None:
    with pytest.raises(ConfigError):
        ThreadChannel(0)

"""Items from an event loop to a blocking consumer in another thread, in batches.

A coroutine call per item costs 110-250 us of thread switches. Here a batch crosses in a ``queue.SimpleQueue``, and
Ctrl-C interrupts its ``get``. The consumer wakes the loop only if that waits for room, and not before it has taken more
than half of the batches on the way: so several batches cross for one wake-up. There is no polling and no lock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from asyncfetch.errors import ClosedError, ConfigError
from asyncfetch.runtime.fork import ForkGuard
from asyncfetch.runtime.threads import call_on, hold_daemon_at_exit

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Generator, Iterable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.observe import Histogram
    from asyncfetch.runtime.loop_thread import LoopThread

T = TypeVar("T")


class _ChannelEnd(NamedTuple):
    """The last entry of a queue: the end, or a failure."""

    error: BaseException | None = None


class _ItemBatch(NamedTuple, Generic[T]):
    """Items in a queue, and when they were put there."""

    items: deque[T]
    put_at: float


class ThreadChannel(Iterator[deque[T]]):
    """A bounded channel: ``put`` on one loop, iteration in one thread.

    Batches come out in the order they went in, none is lost, and after them the end or the error.

    ``room`` and ``put`` belong to one task on one loop; ``finish``, ``fail`` and ``close`` may be called from any
    thread and never wait; iteration belongs to one thread at a time that isn't the loop's. In a forked child iteration
    raises WrongLoop and ``close`` does nothing.

    Args:
        max_batches: Most batches on the way at a time, at least 1, beside the one that the consumer got last.
        times: Records how long each batch took from one thread to the other, from its ``put`` or from the consumer's
            request, whichever is later. Two consumers that record at once may lose one.
        on_ask, on_given: Called in the consumer's thread when it asks for a batch, and when it has one, or none.
    """

    def __init__(
        self,
        max_batches: int = 2,
        *,
        times: Histogram | None = None,
        on_ask: Callable[[], object] | None = None,
        on_given: Callable[[], object] | None = None,
    ) -> None:
        if max_batches < 1:
            raise ConfigError(f"max_batches must be at least 1, not {max_batches}")
        self._guard = ForkGuard("this iterator")
        self._queue: SimpleQueue[_ItemBatch[T] | _ChannelEnd] = SimpleQueue()
        self._max_batches = max_batches
        self._times = times
        self._on_ask, self._on_given = on_ask, on_given
        self._closed = False
        # Written by the loop:
        self._put = 0
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        # Written by the consumer:
        self._taken = 0
        self._ended = False

    async def room(self) -> None:
        """Wait until one more batch may be put; ClosedError if the consumer left."""
        if self._is_full:
            woken = asyncio.Event()
            self._waiting = asyncio.get_running_loop(), woken
            try:
                # The consumer counts, then looks at ``_waiting``. So this sets ``_waiting``, then looks at the count.
                if self._is_full:
                    await woken.wait()
            finally:
                self._waiting = None
        if self._closed:
            raise ClosedError("the consumer of these items is gone")

    def put(self, batch: Iterable[T]) -> None:
        """Hand a batch over, after ``room``. An empty one costs nothing."""
        items = deque(batch)
        if items:
            self._put += 1
            self._queue.put(_ItemBatch(items, time.perf_counter()))

    def finish(self) -> None:
        """End the iteration after the items on the way."""
        self._queue.put(_ChannelEnd())

    def fail(self, error: BaseException) -> None:
        """Raise the error in the consumer, after the items on the way; then iteration is over."""
        if isinstance(error, StopIteration):  # raised by __next__ it would be a silent end, as in PEP 479
            substitute = RuntimeError("StopIteration was raised where the items are made")
            substitute.__cause__ = error
            error = substitute
        self._queue.put(_ChannelEnd(error))

    def close(self) -> None:
        """Stop consuming: items on the way are dropped, iteration ends, ``room`` raises ClosedError. Idempotent."""
        if self._guard.in_child or self._closed:
            return
        self._closed = True
        self._queue.put(_ChannelEnd())  # for another thread that is waiting in the iteration
        self._wake_loop()

    def __next__(self) -> deque[T]:
        self._guard.check()
        hold_daemon_at_exit()
        if self._ended or self._closed:
            raise StopIteration
        if self._on_ask is not None:
            self._on_ask()
        since = time.perf_counter()
        try:
            received = self._queue.get()
        finally:
            if self._on_given is not None:
                self._on_given()
        if isinstance(received, _ChannelEnd):
            self._ended = True
            if received.error is None:
                raise StopIteration
            hold_daemon_at_exit()
            try:
                raise received.error
            finally:
                del received  # else error -> traceback -> this frame -> error is a cycle
        self._taken += 1
        # While the loop waits, the number on the way only falls: it passes this one once.
        if self._put - self._taken == (self._max_batches - 1) // 2:
            self._wake_loop()
        if self._times is not None:
            self._times.record(time.perf_counter() - max(since, received.put_at))
        return received.items

    @property
    def _is_full(self) -> bool:
        return not self._closed and self._put - self._taken >= self._max_batches

    def _wake_loop(self) -> None:
        if (waiting := self._waiting) is not None:
            loop, woken = waiting
            call_on(loop, woken.set)


def iterate(
    loop_thread: LoopThread,
    factory: Callable[[], AbstractAsyncContextManager[AsyncIterable[Iterable[T]]]],
    *,
    max_batches: int = 2,
    ends_thread: bool = False,
    times: Histogram | None = None,
    on_ask: Callable[[], object] | None = None,
    on_given: Callable[[], object] | None = None,
) -> Generator[T, None, None]:
    """Yield the items of ``async with factory() as batches: async for batch in batches``, run on the loop thread.

    All of it runs in one task, from the first ``next`` on, at most ``max_batches`` ahead of the consumer. Its errors,
    those of leaving the context too, are raised here after the items before them. Closing the generator (an early
    ``break``, ``close``, collection) cancels the task and waits for its end, but no longer than STOP_SECONDS; with
    ``ends_thread``, it closes the loop thread and waits for that. ``times``, ``on_ask`` and ``on_given`` are
    ThreadChannel's.

    Raises:
        ClosedError: The loop thread was closed meanwhile.
        WrongLoop: Iterated on the loop's own thread or in a forked child.
    """
    guard = ForkGuard("this iterator")
    hand_over: ThreadChannel[T] = ThreadChannel(max_batches, times=times, on_ask=on_ask, on_given=on_given)
    call = loop_thread.call(_produce, factory, hand_over)
    call.add_done_callback(lambda error: hand_over.finish() if error is None else hand_over.fail(error))
    try:
        call.start()
        for items in hand_over:
            while items:  # none is kept once it is given
                yield items.popleft()
                guard.check()
    finally:
        hand_over.close()
        if ends_thread:
            loop_thread.close()
        else:
            call.end()
        del call  # else error -> traceback -> this frame -> call -> error is a cycle


async def _produce(
    factory: Callable[[], AbstractAsyncContextManager[AsyncIterable[Iterable[T]]]], hand_over: ThreadChannel[T]
) -> None:
    async with factory() as batches:
        await hand_over.room()  # before a batch is asked for, so that none waits here
        async for batch in batches:
            hand_over.put(batch)
            await hand_over.room()

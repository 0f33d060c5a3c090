"""Items from an event loop to a blocking consumer in another thread, in batches.

A coroutine call per item costs 110-250 us of thread switches. Here a batch crosses in a ``queue.SimpleQueue``, whose
``get`` Ctrl-C interrupts, and is paid for with one credit, which the consumer returns by waking the loop once, with the
batch's last item. Nobody polls and nobody holds a lock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from asyncfetch.errors import ClosedError, ConfigError
from asyncfetch.runtime.fork import ForkGuard

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from asyncfetch.observe import Histogram

__all__ = ["HandOver"]

T = TypeVar("T")


class _End:
    """The last thing in a queue: the end, or with an error the failure, which is a different thing."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Batch(Generic[T]):
    """Items in a queue, and when they were put there."""

    __slots__ = ("items", "put_at")

    def __init__(self, items: deque[T], put_at: float) -> None:
        self.items = items
        self.put_at = put_at


class HandOver(Generic[T]):
    """A bounded channel: ``put`` on one loop, iteration in one thread.

    Items come out in the order they went in, none is lost, and after them the end or the error. Batches are unpacked:
    the consumer sees single items.

    ``put`` belongs to the loop of its first call; ``finish``, ``fail`` and ``close`` may be called from any thread and
    never wait; iteration belongs to one thread at a time that isn't the loop's. In a forked child iteration raises
    WrongLoop and ``close`` does nothing.

    Args:
        max_batches: Batches that may be on the way or in the consumer's hands at a time, at least 1.
        times: Records how long each batch took from one thread to the other, which begins when it is put or, where
            that is later, when the consumer asks for it. Two consumers that record at once may lose one.
    """

    def __init__(self, max_batches: int = 2, *, times: Histogram | None = None) -> None:
        if max_batches < 1:
            raise ConfigError(f"max_batches must be at least 1, not {max_batches}")
        self._guard = ForkGuard("this iterator")
        self._queue: SimpleQueue[_Batch[T] | _End] = SimpleQueue()
        self._times = times
        self._closed = False
        # Of the loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._credits = max_batches
        self._woken: anyio.Event | None = None
        # Of the consumer:
        self._items: deque[T] = deque()
        self._ended = False

    async def put(self, batch: Iterable[T]) -> None:
        """Hand a batch over, waiting for the consumer where it is ``max_batches`` behind. An empty one costs nothing.

        Cancelled while waiting, it hands over nothing.

        Raises:
            ClosedError: The consumer left, so nobody will see this batch.
        """
        items = deque(batch)
        self._loop = asyncio.get_running_loop()
        while not self._closed and not self._credits:
            if self._woken is None:
                self._woken = anyio.Event()
            await self._woken.wait()
        if self._closed:
            raise ClosedError("the consumer of these items is gone")
        if items:
            self._credits -= 1
            self._queue.put(_Batch(items, time.perf_counter()))

    def finish(self) -> None:
        """Tell the consumer that no more items come; iteration ends after those on the way."""
        self._queue.put(_End())

    def fail(self, error: BaseException) -> None:
        """Raise the error in the consumer, after the items on the way; then iteration is over."""
        if isinstance(error, StopIteration):  # raised by __next__ it would be a silent end: what PEP 479 is about
            substitute = RuntimeError("StopIteration was raised where the items are made")
            substitute.__cause__ = error
            error = substitute
        self._queue.put(_End(error))

    def close(self) -> None:
        """Stop consuming: items on the way are thrown away, iteration ends, ``put`` raises ClosedError. Idempotent."""
        if self._guard.in_child or self._closed:
            return
        self._closed = True
        self._items.clear()
        self._queue.put(_End())  # for another thread that is waiting in the iteration
        self._wake_loop(credits_returned=0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        self._guard.check()
        while not self._items:
            if self._ended or self._closed:
                raise StopIteration
            self._receive()
        item = self._items.popleft()
        if not self._items:
            self._wake_loop(credits_returned=1)
        return item

    def _receive(self) -> None:
        """Wait for a batch, the end, or the error."""
        since = time.perf_counter()
        received = self._queue.get()
        if not isinstance(received, _End):
            if self._times is not None:
                self._times.record(time.perf_counter() - max(since, received.put_at))
            self._items = received.items
            return
        self._ended = True
        if received.error is not None:
            try:
                raise received.error
            finally:
                del received  # else error -> traceback -> this frame -> error is a cycle

    def _wake_loop(self, *, credits_returned: int) -> None:
        # ``close`` sets its flag before it looks for a loop, ``put`` its loop before it looks at the flag.
        if self._loop is None:
            return
        with suppress(RuntimeError):  # the loop is closed: nobody there waits for credit
            self._loop.call_soon_threadsafe(self._on_wake, credits_returned)

    def _on_wake(self, credits_returned: int) -> None:
        self._credits += credits_returned
        if self._woken is not None:
            self._woken.set()
            self._woken = None

"""Synchronous iteration over an asynchronous iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from asyncfetch.runtime.channel import HandOver
from asyncfetch.runtime.fork import ForkGuard

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Generator, Iterable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.observe import Histogram
    from asyncfetch.runtime.loop_thread import LoopThread

__all__ = ["iterate"]

T = TypeVar("T")


def iterate(
    loop_thread: LoopThread,
    factory: Callable[[], AbstractAsyncContextManager[AsyncIterable[Iterable[T]]]],
    *,
    max_batches: int = 2,
    ends_thread: bool = False,
    times: Histogram | None = None,
) -> Generator[T, None, None]:
    """Yield the items of ``async with factory() as batches: async for batch in batches``, run on the loop thread.

    All of it runs in one task, from the first ``next`` on, at most ``max_batches`` ahead of the one that the consumer
    is at. What is raised there, by leaving the context too, is raised here after the items before it. Closing the
    generator (an early ``break``, ``close``, collection) cancels the task and waits for its end, but no longer than
    STOP_SECONDS; with ``ends_thread``, for that of the loop thread, which is closed then. ``times`` is HandOver's.

    Raises:
        ClosedError: The loop thread was closed meanwhile.
        WrongLoop: Iterated on the loop's own thread or in a forked child.
    """
    guard = ForkGuard("this iterator")
    hand_over: HandOver[T] = HandOver(max_batches, times=times)
    call = loop_thread.call(_produce, factory, hand_over)
    call.add_done_callback(lambda error: hand_over.finish() if error is None else hand_over.fail(error))
    try:
        call.start()
        for items in hand_over:
            while items:  # each is let go of as it is given
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
    factory: Callable[[], AbstractAsyncContextManager[AsyncIterable[Iterable[T]]]], hand_over: HandOver[T]
) -> None:
    async with factory() as batches:
        await hand_over.room()  # before a batch is asked for, so that none waits here
        async for batch in batches:
            hand_over.put(batch)
            await hand_over.room()

"""One pass over a dataset: an async iterator of samples, decoded ahead and delivered in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import anyio

from asyncfetch.errors import ClosedError
from asyncfetch.observe import Histogram
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.stream.window import EpisodeWindow

if TYPE_CHECKING:
    from types import TracebackType

    from asyncfetch.lerobot import HeldEpisode, LeRobotDataset, Sample, SampleBuilder
    from asyncfetch.observe import Quantiles
    from asyncfetch.stream.order import Step

__all__ = ["PassStatistics", "SamplePass", "Transform"]

Transform = Callable[["Sample"], "Sample"]
"""Called in a decode thread on every sample; what it returns is delivered."""


@dataclass(frozen=True, slots=True)
class PassStatistics:
    """A snapshot of one pass."""

    samples: int
    """Delivered."""
    waited_seconds: float
    """Time that the consumer waited for samples."""
    wait: Quantiles
    """Of those waits, one for each few samples that were decoded together."""
    hand_over: Quantiles
    """From the end of their decoding, or the consumer's call where that was later, until the consumer had them."""
    first_sample_seconds: float | None
    """From the start of the pass to its first sample; None before that."""
    open_episodes: int
    """Episodes in memory or on their way."""


STRETCH_STEPS = 500
"""Of the order that the look-ahead goes through at a time: about a millisecond."""


class _Chunk:
    """Consecutive samples of the order, decoded by one call in a thread."""

    __slots__ = ("error", "ready", "ready_at", "samples", "steps", "waits_for")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.ready = anyio.Event()
        self.ready_at = 0.0
        self.samples: list[Sample] = []
        self.error: BaseException | None = None
        self.waits_for: int | None = None
        """The episode whose arrival it waits for."""


class SamplePass:
    """The samples of one consumer for one epoch. Entered with ``async with``, iterated once.

    Samples come in order. An error is raised at its place, behind every sample in front of it, and ends the pass.
    A cancelled ``__anext__`` loses nothing, and several tasks may share the iterator. Leaving the context cancels and
    awaits everything under way; a call that is already in a decode thread is waited for.

    Args:
        dataset: Open dataset to read from.
        steps: Gives the order's steps afresh at each call; used twice, for the samples and for the look-ahead.
        selection: Episode index of each position that the order speaks of.
        builder: Makes the samples.
        transform: Applied to each sample in a decode thread.
        chunk_samples: Samples decoded by one call.
        ahead_chunks: Chunks decoded, or being decoded, ahead of the consumer.
        max_episodes: Episodes admitted at a time.
        on_end: Called when the consumer has come to the end.
    """

    def __init__(
        self,
        dataset: LeRobotDataset,
        steps: Callable[[], Iterator[Step]],
        selection: Sequence[int],
        *,
        builder: SampleBuilder,
        transform: Transform | None,
        chunk_samples: int,
        ahead_chunks: int,
        max_episodes: int,
        on_end: Callable[[], None],
    ) -> None:
        self._dataset = dataset
        self._steps = steps
        self._selection = selection
        self._builder = builder
        self._transform = transform
        self._chunk_samples = chunk_samples
        self._room = anyio.Semaphore(ahead_chunks)
        self._max_episodes = max_episodes
        self._on_end = on_end
        self._turn = anyio.Lock(fast_acquire=True)
        self._queue: deque[_Chunk] = deque()
        self._queued = anyio.Event()
        self._produced_all = self._ended = False
        self._failure: BaseException | None = None
        self._current: deque[Sample] = deque()
        self._closed = False
        self._delivered = 0
        self._waits, self._hand_overs = Histogram(), Histogram()
        self._first_sample_seconds: float | None = None

    async def __aenter__(self) -> Self:
        self._started_at = time.perf_counter()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._window = EpisodeWindow(
            self._dataset,
            self._first_uses(),
            self._group,
            max_episodes=self._max_episodes,
            on_full=self._fail_if_stuck,
        )
        self._group.start_soon(self._produce, name="produce samples")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._closed = True
        try:
            await end_tasks(self._group)
        finally:
            self._window.close()
            self._queued.set()  # for tasks that still wait for a sample
            for chunk in self._queue:
                chunk.ready.set()
            self._queue.clear()
            self._current.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sample:
        async with self._turn:
            while not self._current:
                self._current.extend(await self._next_chunk())
            return self._current.popleft()

    async def next_chunk(self) -> list[Sample]:
        """The next few samples as they were decoded together, for handing over to another thread.

        Empty where an error comes next. Raises StopAsyncIteration at the end. Don't mix it with ``async for``.
        """
        async with self._turn:
            return await self._next_chunk()

    async def _next_chunk(self) -> list[Sample]:
        """The next samples; none of them where an error is next."""
        self._check_open()
        if self._failure is not None:
            failure, self._failure, self._ended = self._failure, None, True
            raise failure
        waiting_since = time.perf_counter()
        while not (self._queue or self._produced_all or self._ended or self._closed):
            await self._queued.wait()
        self._check_open()
        if self._ended or not self._queue:
            if not self._ended:
                self._ended = True
                self._on_end()
            raise StopAsyncIteration
        chunk = self._queue[0]
        self._fail_if_stuck()
        if not chunk.ready.is_set():
            for step in chunk.steps:
                self._window.hurry(self._selection[step.episode])
        await chunk.ready.wait()
        self._check_open()
        self._queue.popleft()
        self._room.release()
        self._count(chunk, waiting_since)
        self._failure = chunk.error
        return chunk.samples

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this pass was left: iterate inside of `async with stream.samples() as samples`")

    def _count(self, chunk: _Chunk, waiting_since: float) -> None:
        now = time.perf_counter()
        self._waits.record(now - waiting_since)
        self._hand_overs.record(now - max(waiting_since, chunk.ready_at))
        self._delivered += len(chunk.samples)
        if self._first_sample_seconds is None:
            self._first_sample_seconds = now - self._started_at

    def _first_uses(self) -> Iterator[int | None]:
        used: set[int] = set()
        for number, step in enumerate(self._steps()):
            if number % STRETCH_STEPS == 0:
                yield None
            if step.episode not in used:
                used.add(step.episode)
                yield self._selection[step.episode]
            used.difference_update(step.finished)

    def _chunks(self) -> Iterator[_Chunk]:
        """The order, cut. A chunk ends where an episode does, so that none needs more clips at a time than the pool."""
        steps: list[Step] = []
        for step in self._steps():
            steps.append(step)
            if step.finished or len(steps) == self._chunk_samples:
                yield _Chunk(steps)
                steps = []
        if steps:
            yield _Chunk(steps)

    async def _produce(self) -> None:
        for chunk in self._chunks():
            if not self._room.value:
                self._fail_if_stuck()
            await self._room.acquire()
            self._dispatch(chunk)
        self._produced_all = True
        self._queued.set()
        self._fail_if_stuck()

    def _dispatch(self, chunk: _Chunk) -> None:
        for step in chunk.steps:
            self._window.use(self._selection[step.episode])
        for step in chunk.steps:
            for episode in step.finished:
                self._window.finish(self._selection[episode])
        self._queue.append(chunk)
        self._queued.set()
        self._queued = anyio.Event()
        self._group.start_soon(self._decode, chunk, name="decode a chunk")

    async def _decode(self, chunk: _Chunk) -> None:
        try:
            asked = await self._gather(chunk)
            if asked:
                chunk.samples, failure = await self._dataset.decode_pool.run(self._build, asked)
                chunk.error = failure or chunk.error
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            chunk.error = error
        finally:
            for step in chunk.steps:
                self._window.done(self._selection[step.episode])
        chunk.ready_at = time.perf_counter()
        chunk.ready.set()
        self._fail_if_stuck()

    async def _gather(self, chunk: _Chunk) -> list[tuple[HeldEpisode, int]]:
        """What the chunk is made of, up to the first episode that can't be had, whose error becomes the chunk's."""
        asked: list[tuple[HeldEpisode, int]] = []
        try:
            for step in chunk.steps:
                chunk.waits_for = self._selection[step.episode]
                self._fail_if_stuck()
                asked.append((await self._window.get(chunk.waits_for), step.frame))
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            chunk.error = error
        finally:
            chunk.waits_for = None
        return asked

    def _build(self, asked: list[tuple[HeldEpisode, int]]) -> tuple[list[Sample], BaseException | None]:
        """As many of the samples as come before the first error, and the error. Runs in a decode thread."""
        samples, error = self._read(asked)
        if self._transform is None:
            return samples, error
        transformed: list[Sample] = []
        try:
            for sample in samples:
                transformed.append(self._transform(sample))  # noqa: PERF401  those before an error count
        except (StopIteration, StopAsyncIteration) as stop:  # raised by the iterator it would be a silent end: PEP 479
            failure = RuntimeError(f"the transform raised {type(stop).__name__}")
            failure.__cause__ = stop
            return transformed, failure
        except BaseException as failure:  # noqa: BLE001  the user's own; raised by the iterator as it is
            return transformed, failure
        return transformed, error

    def _read(self, asked: list[tuple[HeldEpisode, int]]) -> tuple[list[Sample], Exception | None]:
        try:
            return self._builder.build(asked), None
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            if len(asked) == 1:
                return [], error
        samples: list[Sample] = []
        for one in asked:
            read, failure = self._read([one])
            samples += read
            if failure is not None:
                return samples, failure
        return samples, None

    def _fail_if_stuck(self) -> None:
        """Fail the pass where it would wait for ever: the consumer for an episode, and that for room nobody returns.

        Room comes back when decoding ends, and decoding goes on while a chunk can start or the consumer takes one.
        """
        if not self._queue or self._queue[0].ready.is_set() or (self._room.value and not self._produced_all):
            return
        first_error: Exception | None = None
        for chunk in self._queue:
            if chunk.ready.is_set():
                continue
            lacking = None if chunk.waits_for is None else self._window.lacks_room_for(chunk.waits_for)
            if lacking is None:
                return
            first_error = first_error or lacking
        self._queue[0].error = first_error
        self._queue[0].ready.set()

    def statistics(self) -> PassStatistics:
        """A snapshot; it may be taken in any thread."""
        wait = self._waits.snapshot()
        return PassStatistics(
            samples=self._delivered,
            waited_seconds=wait.sum_seconds,
            wait=wait,
            hand_over=self._hand_overs.snapshot(),
            first_sample_seconds=self._first_sample_seconds,
            open_episodes=self._window.open_episodes,
        )

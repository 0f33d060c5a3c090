"""Passes over a stream: opened on a loop of the caller's, or driven by one in a thread, kept from pass to pass."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from asyncfetch.errors import NotFound, UsageError
from asyncfetch.observe import Histogram
from asyncfetch.observe.waits import Cause, WaitStep
from asyncfetch.runtime import LoopThread, iterate
from asyncfetch.runtime.fork import AsyncOnly, ForkGuard, running_loop
from asyncfetch.runtime.loop_thread import BackgroundContext
from asyncfetch.runtime.threads import ThreadClock
from asyncfetch.stream.decode_jobs import Sizes
from asyncfetch.stream.samples import BegunPass, DeliveredSample, MicroBatches, PassFigures, RunningPass, SamplePass

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Never

    from asyncfetch.formats import DatasetStatistics, Sample
    from asyncfetch.observe.report import Report
    from asyncfetch.order.plan import PassPlan
    from asyncfetch.order.state import State
    from asyncfetch.stream.batch import BatchMemory
    from asyncfetch.stream.datasets import OpenDatasets
    from asyncfetch.stream.job_builder import JobBuilder

_log = logging.getLogger(__name__)

R = TypeVar("R", bound="OpenSource")


class OpenSource(Protocol):
    """Anything open that is read: a dataset, or those of a stream."""

    def statistics(self) -> DatasetStatistics:
        """A snapshot."""


class DatasetSession(Generic[R]):
    """A loop thread with one thing open on it, which ``opener`` gives: a dataset, or a mixture of them.

    Belongs to the process that made it. Collected or closed, it ends its thread and with it all that is open.
    """

    def __init__(self, opener: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        self._guard = ForkGuard("the open dataset of this stream")
        self.hand_over = Histogram()
        """Durations of the samples' way from this thread to its consumers."""
        self.thread = LoopThread(name="asyncfetch stream")
        self._kept = BackgroundContext(self.thread, opener, name="the dataset of this stream")

    @property
    def is_usable(self) -> bool:
        """False in a forked child, and where it could not be opened."""
        return not self._guard.in_child and not self._kept.has_failed

    def opened(self) -> R:
        """Return what is open; waits for it. Whatever ends the wait without it closes the session."""
        try:
            return self._kept.value()
        except BaseException as error:
            self.close()
            if isinstance(error, NotFound):  # most often a typing error: the way to it tells nothing
                raise error.with_traceback(None) from None
            raise

    def statistics(self) -> DatasetStatistics:
        """Return those of what is open, taken on its loop, and of the way to its consumers; waits, raises as opened."""
        self._guard.check()
        opened = self.opened()  # waited for here: on the loop it would keep itself from being opened

        async def take() -> DatasetStatistics:
            return opened.statistics()

        return replace(self.thread.run(take), hand_over=self.hand_over.snapshot())

    def close(self) -> None:
        """End the thread. Does nothing in a forked child."""
        self.thread.close()


WITH_SAMPLES = "`async with stream.samples() as samples:`, and in it `async for sample in samples:`"
"""The way to write a pass on a loop of one's own."""

JOB_BYTES = 16 * 1024 * 1024
"""Decoded by one call in a thread: about eight samples of two 640x480 cameras, some 40 ms. Enough that what a job costs
on the loop (0.3 ms) doesn't count."""
JOB_MAX_SAMPLES = 64
READERS_IN_TURNS = 2
"""Readers of an episode, which jobs in a row take. Where groups of pictures are longer than the dataset states, each of
them decodes all frames, so there are no more."""
AHEAD_JOBS = 64
"""Decoded ahead at most, beside the samples that wait for their turn: small samples would fill the bound on bytes with
hundreds of thousands, and open a thousand episodes for them. Those of pictures come to that bound first."""
HANDED_OVER_MICRO_BATCHES = 5
"""Micro-batches beside those decoded ahead: the consumer's own, and four between the loop and a synchronous consumer,
so that several cross for each time that one thread has to wake the other."""
HANDED_OVER_TO_BATCHES = 2
"""The same for batches of pictures. Rows of a batch take memory from its first one on, so those decoded ahead need
room for two turns of the pool: with five micro-batches threads were idle for a tenth of the time, with two for a
hundredth. One of pictures takes 40 ms to decode, so one wake-up for each is no matter."""


class Samples(AsyncOnly):
    """A pass that isn't open yet; entering it gives the ``SamplePass``."""

    def __init__(
        self,
        opener: Callable[[], AbstractAsyncContextManager[OpenDatasets]],
        begin: Callable[[OpenDatasets], BegunPass],
        new_figures: Callable[[], PassFigures],
        memory: BatchMemory | None = None,
    ) -> None:
        self._opener, self._begin, self._new_figures, self._memory = opener, begin, new_figures, memory
        self._stack = AsyncExitStack()

    def __iter__(self) -> Never:
        raise UsageError(f"samples() is for a loop of your own: {WITH_SAMPLES}; without one, `for sample in stream`")

    def __aiter__(self) -> Never:
        raise UsageError(f"samples() has to be entered first: {WITH_SAMPLES}")

    async def __aenter__(self) -> SamplePass:
        running_loop("a pass over a stream")
        self._figures = self._new_figures()
        self._figures.account.wait(time.perf_counter())
        async with AsyncExitStack() as stack:
            stack.callback(self._end)
            try:
                opened = await stack.enter_async_context(self._opener())
                begun = self._begin(opened)
                sizes, _ = _sizes(opened, begun, self._memory)
                running = await stack.enter_async_context(
                    RunningPass(opened, begun, sizes, self._figures, self._memory)
                )
            except BaseException as error:
                self._figures.fail(error)
                raise
            self._stack = stack.pop_all()
        return SamplePass(running)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    def _end(self) -> None:
        now = time.perf_counter()  # of a pass that has begun it is noted already
        self._figures.account.end(now, [WaitStep(now, {Cause.OPENING: 1.0})])
        self._figures.close()


def _sizes(opened: OpenDatasets, begun: BegunPass, memory: BatchMemory | None) -> tuple[Sizes, int]:
    """Return how much is decoded at a time, and how many micro-batches are on their way to the consumer at most."""
    plan, builder, threads = begun.plan, begun.builder, opened.engine.decode.threads
    _warn_of_parted_groups(plan, is_shuffled=opened.members[0].shuffle)
    _warn_of_few_segments(plan, opened)
    decoded_samples = opened.config.decoded_max_bytes // builder.sample_bytes
    _warn_of_large_samples(plan, builder, decoded_samples, opened)
    handed_over = _handed_over(builder, memory, decoded_samples)
    sizes = Sizes.within(
        decoded_samples,
        group_frames=plan.group_frames,
        open_pieces=plan.own_pieces,
        jobs=2 * threads + handed_over,  # so that every thread has work
        max_job_samples=max(1, min(JOB_MAX_SAMPLES, JOB_BYTES // builder.sample_bytes)),
        readers=min(READERS_IN_TURNS, threads),
    )
    ahead_samples = min(
        decoded_samples - handed_over * sizes.job_samples, sizes.waiting_samples + AHEAD_JOBS * sizes.job_samples
    )
    return replace(sizes, ahead_samples=ahead_samples), handed_over


def _warn_of_parted_groups(plan: PassPlan, *, is_shuffled: bool) -> None:
    """Say so where the next frame of a group of pictures is mostly another worker's: then several decode the group."""
    placement, pieces = plan.progress.placement, plan.open_pieces
    if placement.worker or plan.group_frames == 1 or len(plan.progress.leg.pools) > 1:
        return
    if is_shuffled and pieces < plan.progress.leg.pools[0]:  # a small dataset, which no pool helps
        return
    distance = pieces if is_shuffled else 1
    if placement.share_parted(distance) <= 1 / 2:
        return
    in_a_row = placement.workers * placement.turn_samples
    remedy = f"pool_segments={lcm(in_a_row, pieces)}" if is_shuffled else "StreamDataset(batch_size=...)"
    _log.warning(
        "num_workers=%d with batches of %d: the next frame of a group of pictures comes %d samples later, mostly in "
        "another worker, so several decode the same group. With num_workers=1 (decoding runs in threads), "
        "serve_samples() or %s one does",
        placement.workers,
        placement.block_samples,
        distance,
        remedy,
    )


def _warn_of_few_segments(plan: PassPlan, opened: OpenDatasets) -> None:
    """Say so where a rank has fewer segments in an epoch than its batch has samples: once, as the first one begins."""
    placement, progress, counts = plan.progress.placement, plan.progress, plan.order.real
    if placement.worker or progress.epoch or progress.is_resumed or not any(one.shuffle for one in opened.members):
        return
    batch, segments = placement.batch_size or placement.block_samples, plan.segments
    if segments >= batch or sum(counts) < batch:
        return
    each = zip(counts, (dataset.frames_per_second for dataset in opened.datasets), strict=True)
    cut = [(count, rate) for count, rate in each if rate is not None]  # of others each sample is a segment
    if not cut:
        return
    counts, rates = [count for count, _ in cut], [rate for _, rate in cut]
    frames = [sum(count * fps / rate for count, rate in zip(counts, rates, strict=True)) / batch for fps in rates]
    seconds = min(max(1, int(most)) / fps for most, fps in zip(frames, rates, strict=True))
    _log.warning(
        "this rank has %d segments of an epoch, fewer than the %d samples of a batch, so several samples of each come "
        "of one recording: StreamConfig(segment_seconds=%g) cuts recordings into more, down to groups of pictures",
        segments,
        batch,
        math.floor(1000 * seconds) / 1000,  # more would be too long
    )


def _warn_of_large_samples(plan: PassPlan, builder: JobBuilder, decoded_samples: int, opened: OpenDatasets) -> None:
    """Say so where threads have nothing to do, because what is decoded ahead has no room for a sample of each."""
    threads = opened.engine.decode.threads
    if plan.progress.placement.worker or plan.progress.epoch or decoded_samples >= threads + HANDED_OVER_TO_BATCHES:
        return
    _log.warning(
        "decoded_max_bytes=%d has room for %d samples of %d bytes, so not all of %d threads decode at a time: with "
        "StreamConfig(decoded_max_bytes=%d) they do; smaller pictures (size=) take less",
        opened.config.decoded_max_bytes,
        decoded_samples,
        builder.sample_bytes,
        threads,
        (2 * threads + HANDED_OVER_MICRO_BATCHES) * builder.sample_bytes,
    )


def _handed_over(builder: JobBuilder, memory: BatchMemory | None, decoded_samples: int) -> int:
    """Return how many micro-batches, at most, are between those decoded ahead and the end of what the consumer does."""
    are_large = builder.sample_bytes * JOB_MAX_SAMPLES > JOB_BYTES
    most = HANDED_OVER_MICRO_BATCHES if memory is None or not are_large else HANDED_OVER_TO_BATCHES
    return max(HANDED_OVER_TO_BATCHES, min(most, decoded_samples // 3))  # the rest is for those being decoded


class StreamIterator(Iterator["Sample"]):
    """The samples of one pass, driven by a loop in a thread. Closed, collected or at its end, it stops everything."""

    def __init__(
        self,
        session: DatasetSession[OpenDatasets],
        opened: OpenDatasets,
        begin: Callable[[], BegunPass],
        state_before: Callable[[], State],
        figures: PassFigures,
        memory: BatchMemory | None = None,
    ) -> None:
        """``begin`` is called when the first sample is asked for; until then ``state_before`` gives the state."""
        self._state_before = state_before
        self.figures = figures
        self._plans: list[PassPlan] = []  # one, from the first sample on
        self.latest = DeliveredSample(0, 0, {})
        """The sample that came last."""
        # No method of this object: it must be collected, and the pass with it, once it isn't iterated any more.
        self._deliveries = _deliver(session, opened, begin, self._plans, figures, memory)

    def __next__(self) -> Sample:
        self.latest = next(self._deliveries)
        self.plan.progress.delivered = self.latest.delivered
        sample: Sample = self.latest.sample
        return sample

    @property
    def plan(self) -> PassPlan:
        """The plan of the pass, which has begun."""
        return self._plans[0]

    def give_but(self, waiting: Iterable[int]) -> None:
        """Count all samples that came as delivered, for the state, but those with these numbers, which wait."""
        for plan in self._plans:
            plan.deliver(self.latest.delivered, waiting)

    def __length_hint__(self) -> int:
        """Samples that are yet to come at most, padding included; 0 before the first."""
        return sum(plan.left for plan in self._plans)

    def report(self) -> Report:
        """Return why the consumer waits, and what to set; also after the pass. It may be called in any thread."""
        return self.figures.report()

    def state_dict(self) -> State:
        """Return what this pass, and those before it, have delivered of the epoch: for ``Stream.load_state_dict``."""
        return self._plans[0].progress.state() if self._plans else self._state_before()

    def close(self) -> None:
        """Stop, as an early ``break`` does."""
        self._deliveries.close()


def _deliver(
    session: DatasetSession[OpenDatasets],
    opened: OpenDatasets,
    begin: Callable[[], BegunPass],
    plans: list[PassPlan],
    figures: PassFigures,
    memory: BatchMemory | None,
) -> Generator[DeliveredSample, None, None]:
    try:
        figures.clock = ThreadClock()
        figures.ask()
        begun = begin()
        plans.append(begun.plan)
        sizes, handed_over = _sizes(opened, begun, memory)
        deliveries = iterate(
            session.thread,
            partial(MicroBatches, opened, begun.ahead(), sizes, figures, memory),
            max_batches=handed_over - 1,
            times=session.hand_over,
            on_ask=figures.ask,
            on_given=figures.receive,
        )
        with closing(deliveries):
            for delivery in deliveries:
                begun.check()
                yield delivery
    finally:
        figures.close()
    begun.finish()

"""One pass over a dataset: an async iterator of samples, decoded ahead and delivered in order."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio
import anyio.lowlevel

from asyncfetch.errors import CacheError, ClosedError, DatasetError
from asyncfetch.observe import Figures, Histogram
from asyncfetch.observe.figures import counted_since, counts_of, sum_of
from asyncfetch.observe.report import Report
from asyncfetch.observe.trace import CONSUMER, running
from asyncfetch.observe.waits import Cause, WaitAccount, Waits, WaitStep
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.concurrently import copied
from asyncfetch.runtime.threads import ThreadClock, run_sync
from asyncfetch.stream.batch import Rows
from asyncfetch.stream.decode_ahead import DecodeAhead
from asyncfetch.stream.figures import PUBLISH_SECONDS
from asyncfetch.stream.job_builder import FailedSample
from asyncfetch.stream.quarantine import BAD_DATA, Quarantine, Substitutes, raise_where_none_is_good

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
    from types import TracebackType

    from asyncfetch.config import StreamConfig
    from asyncfetch.formats import DatasetStatistics, Sample
    from asyncfetch.observe import Quantiles
    from asyncfetch.observe.trace import Tracer
    from asyncfetch.order.plan import PassPlan, Step
    from asyncfetch.order.state import State
    from asyncfetch.stream.batch import BatchMemory
    from asyncfetch.stream.datasets import OpenDatasets
    from asyncfetch.stream.decode_jobs import Sizes
    from asyncfetch.stream.figures import FiguresPage
    from asyncfetch.stream.job_builder import JobBuilder


class DeliveredSample(NamedTuple):
    """A sample that a consumer gets."""

    number: int
    """Number of the sample in the consumer's part of the epoch."""
    delivered: int
    """Samples that the consumer has been given with it; one more, but for what is empty."""
    sample: Any
    """The sample, or its row in a batch; or what a transform gave."""

    @property
    def numbers(self) -> range:
        """The number of the sample, and those of what is empty beside it."""
        return range(self.number, self.delivered)


@dataclass(frozen=True, slots=True, repr=False)
class PassStatistics(Figures):
    """A snapshot of one pass."""

    _telling = ("samples", "waited_seconds", "first_sample_seconds", "open_segments")

    samples: int
    """Delivered."""
    waited_seconds: float
    """Time that the consumer waited for samples."""
    wait: Quantiles
    """Quantiles of those waits, one for each few samples that were decoded together."""
    hand_over: Quantiles
    """Time from the end of their decoding, or the consumer's call if that was later, until the consumer had them."""
    first_sample_seconds: float | None
    """Time from the start of the pass to its first sample; None before that."""
    open_segments: int
    """Segments, or parts of them, in memory or on their way."""
    waits: Waits = field(default_factory=Waits)
    """The consumer's time, by what it went to."""


FAILURE_COLUMNS = 400
"""The most of an error that a report repeats."""


class PassFigures:
    """Figures of a pass, while it lasts and after it: of its consumer's time, and of what it reads.

    Its consumer waits from the beginning on.

    Args:
        config: Of the pass.
        page: Where they are written for another process; None where this one's consumer is the trainer.
        before: The passes before, from ``handed_on``; a page knows those that were counted on it.
        is_open: Whether its datasets were open before it: what they did until then isn't counted.
        begun_at: The time when its consumer began to wait, if that was before now.
    """

    def __init__(
        self,
        config: StreamConfig,
        page: FiguresPage | None = None,
        *,
        before: tuple[Waits, Sequence[PassFigures]] = (Waits(), ()),
        is_open: bool = False,
        begun_at: float | None = None,
    ) -> None:
        self.begun_at = time.perf_counter() if begun_at is None else begun_at
        self._process = os.getpid()
        self._config = config
        self._page = page
        self._waits_before, self._others = before if page is None else (page.begin_pass(self.begun_at), ())
        self._is_open = is_open
        self.account = WaitAccount(None if page is None else page.numbers)
        """Counts the consumer's time."""
        self.path: Callable[[], Iterable[WaitStep]] = _opening
        """Gives the steps that a waiting consumer waits for."""
        self.seen: Callable[[], DatasetStatistics | None] = lambda: None
        """Returns what the open datasets have done so far; None before the first pass has begun."""
        self._seen_before: DatasetStatistics | None = None
        self.handed_over: deque[tuple[int, tuple[WaitStep, ...]]] = deque()
        """Samples of each micro-batch on its way to the consumer, and the steps that it was waited for."""
        self.clock: ThreadClock | None = None
        """The clock of the consumer's thread; None where that is the loop's."""
        self._asked_at = self._worked_before = 0.0
        self._lane: tuple[Tracer, int] | None = None
        self._failure = ""
        self._is_over = False
        self.account.wait(self.begun_at)
        self.account.note_cause(_opening())

    def opened(self) -> None:
        """Note that its datasets are open, or can't be opened; in the consumer's thread."""
        since, now = self.account.waiting_since, time.perf_counter()
        if since is not None:
            self.account.end(now, _opening())
            self.trace(since, now, _opening())

    def fail(self, error: BaseException) -> None:
        """Keep the error that ended the pass, for reports."""
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._failure = shorten(words, FAILURE_COLUMNS, placeholder="...")
        if self._page is not None:
            self._page.fail(self._failure)

    def begin(self, statistics: Callable[[], DatasetStatistics | None], path: Callable[[], Iterable[WaitStep]]) -> None:
        """Count reads from now on, by the statistics of the open datasets."""
        self._seen_before = statistics() if self._is_open else None
        self.path, self.seen = path, statistics

    def end(self, statistics: DatasetStatistics) -> None:
        """Keep the last figures in place of the pass, which ends."""
        self.path, self.seen = tuple, lambda: statistics
        self._publish()

    def close(self) -> None:
        """Note that the consumer won't ask any more; in its thread."""
        self.account.end(time.perf_counter())
        self._is_over = True
        self.leave_lane()
        self._publish()
        if self.clock is not None:
            self.clock.close()

    def ask(self) -> None:
        """Count a wait for a micro-batch from now on; in the consumer's thread."""
        self._asked_at = time.perf_counter()
        self.wait(self._asked_at)

    def receive(self) -> None:
        """Count a wait that ends with the next micro-batch handed over, or with the end; in the consumer's thread."""
        samples, path = self.handed_over.popleft() if self.handed_over else (0, ())
        now = time.perf_counter()
        self.give(now, path, samples)
        self.trace(self._asked_at, now, path)

    def wait(self, now: float) -> None:
        """Count a wait from now on; in the consumer's thread."""
        self.account.wait(now, self._worked())

    def give(self, now: float, path: Iterable[WaitStep] = (), samples: int = 0) -> None:
        """Count a wait that ends, by what it was for, and the samples that came; in the consumer's thread."""
        self.account.give(now, path, samples)
        self._worked_before = 0.0 if self.clock is None else self.clock.seconds()

    def _worked(self) -> float:
        """Seconds in which the consumer's thread had something to do since it was given something."""
        return 0.0 if self.clock is None else max(0.0, self.clock.seconds() - self._worked_before)

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Count a block that makes a batch, or hands it over: the consumer waits for it."""
        since = time.perf_counter()
        self.wait(since)
        try:
            yield
        finally:
            now = time.perf_counter()
            self.give(now)
            self.trace(since, now, ())

    async def publish(self) -> None:
        """Write to the page, now and then."""
        while self._page is not None:
            self._publish()
            await anyio.sleep(PUBLISH_SECONDS)

    def _publish(self) -> None:
        page = self._page
        seen = None if page is None else self.seen()
        if page is not None and seen is not None:
            self.account.note_cause(tuple(self.path()))
            self.account.note_worked(self._worked())
            page.publish(self._of_pass(seen), self.all_waits(), seen)

    def leave_page(self) -> None:
        """Stop writing to the page, which another pass takes, even if this one goes on."""
        if self._page is not None:
            self._publish()
            self._page, self.account.figures = None, array("d", self.account.figures)

    def _of_pass(self, seen: DatasetStatistics) -> DatasetStatistics:
        return seen if self._seen_before is None else counted_since(seen, self._seen_before)

    def waits(self) -> Waits:
        """Return where the consumer's time went. It may be called in any thread."""
        return self.account.snapshot(time.perf_counter(), self.path())

    def all_waits(self) -> Waits:
        """Return where its time went in this pass and in those before, without the wait that goes on now."""
        now = time.perf_counter()
        others = (counts_of(other.account.settled(now)) for other in self._others)
        return sum_of(counts_of(self._waits_before), *others, self.account.settled(now))

    def handed_on(self) -> tuple[Waits, Sequence[PassFigures]]:
        """Return the waits of the passes so far that are over, and the figures of those that go on."""
        now, each = time.perf_counter(), (*self._others, self)
        over = (counts_of(one.account.settled(now)) for one in each if one._is_over)
        return sum_of(counts_of(self._waits_before), *over), [one for one in each if not one._is_over]

    def trace(self, since: float, until: float, path: Iterable[WaitStep]) -> None:
        """Add a wait to the trace, if there is one, in a lane of this pass's own."""
        if (tracer := running()) is not None:
            if self._lane is None or self._lane[0] is not tracer:
                self._lane = tracer, tracer.enter(CONSUMER)
            tracer.waits(self._lane[1], since, until, path)

    def leave_lane(self) -> None:
        """Give the lane back."""
        if self._lane is not None:
            (tracer, lane), self._lane = self._lane, None
            tracer.leave(CONSUMER, lane)

    def report(self) -> Report:
        """Return why the consumer waits, and what to set; in a forked child that nothing has begun there."""
        if self._process != os.getpid():
            return Report.of(Waits(), None, self._config)
        num_workers, seen = 0 if self._page is None else self._page.num_workers, self.seen()
        return Report.of(
            self.waits(),
            None if seen is None else self._of_pass(seen),
            self._config,
            num_workers=num_workers,
            all_waits=self.all_waits(),
            all_statistics=seen,
            failure=self._failure,
        )


def _opening() -> tuple[WaitStep, ...]:
    return (WaitStep(math.inf, {Cause.OPENING: 1.0}),)


class SampleDelivery:
    """Decoded samples, as the consumer gets them: numbered, and bad samples raised, left out or replaced."""

    def __init__(self, opened: OpenDatasets, begun: BegunPass, rows: Rows | None) -> None:
        self._plan, self._quarantine, self._rows = begun.plan, begun.quarantine, rows
        self._on_error, self._origin = opened.config.on_error, opened.origin
        self._substitutes = Substitutes()
        self._first_bad: Exception | None = None
        self.samples = 0
        """Delivered by this pass."""
        self.failure: BaseException | None = None
        """The error that comes after them, if one does."""

    def deliver(self, results: Iterable[tuple[Step, Any]]) -> list[DeliveredSample]:
        """Return the samples up to the first error that isn't left out, which becomes the ``failure``."""
        samples: list[DeliveredSample] = []
        for step, result in results:
            given = self._given(step, result)
            for number, sample in enumerate(given, step.number + 1 - len(given)):
                if isinstance(sample, FailedSample):
                    self.failure = copied(sample.error)
                    break
                samples.append(DeliveredSample(number, number + 1, sample))
            if self.failure is not None:
                break
            if step.stop > step.number + 1:
                samples[-1:] = [last._replace(delivered=step.stop) for last in samples[-1:]]
        if self._on_error == "replace":
            self._substitutes.keep()
        self.samples += len(samples)
        return samples

    def end(self) -> None:
        """Note that all was delivered. Where nothing was good it raises: see ``raise_where_none_is_good``."""
        if self._first_bad is not None and not (self.samples or self._plan.is_resumed):
            placement, entries = self._plan.progress.placement, self._quarantine.entries
            raise_where_none_is_good(self._first_bad, placement, self._on_error, entries)

    def _given(self, step: Step, result: Any) -> list[Any]:  # noqa: ANN401 - what a transform returns
        """Return what to deliver for a step; nothing where it is left out, or where the pass fails there."""
        replaces = self._on_error == "replace"
        if not isinstance(result, FailedSample):
            return self._substitutes.good(result, self._origin(step.piece).member) if replaces else [result]
        if self._on_error == "raise" or result.by_transform or not isinstance(result.error, BAD_DATA):
            self.failure = result.error if result.by_transform else copied(result.error)
            return []
        origin = self._origin(step.piece)
        self._quarantine.add(origin, result.error)
        self._first_bad = self._first_bad or result.error
        # Another member's sample would not go into this one's batch.
        if replaces and (not self._plan.parts_batches or self._substitutes.has_of(origin.member)):
            return self._substitutes.bad(origin.member)
        if self._rows is not None:
            self._rows.leave_out()
        return []


class BegunPass(NamedTuple):
    """A pass that has taken its epoch, for one consumer."""

    plan: PassPlan
    builder: JobBuilder
    """Makes its samples."""
    quarantine: Quarantine
    """Gets what ``on_error`` leaves out or replaces."""
    beyond: PassPlan | None
    """Plan of the pass that will follow and find what this one leaves in memory, if one will."""
    check: Callable[[], object]
    """A function to call before a sample is given; an error that it raises comes in the sample's place."""
    finish: Callable[[], object]
    """Counts the pass, when it was read to its end."""

    def ahead(self) -> BegunPass:
        """Return the same for a loop that is ahead of the consumer: it neither counts, nor knows what was given.

        It doesn't refer to the stream, which may own that loop's thread: what tasks hold often waits for the collector.
        """
        return self._replace(check=_nothing, finish=_nothing)


def _nothing() -> None:
    pass


class MicroBatches(AsyncIterator[Any]):
    """A pass at work: the next few samples at a time, or none where an error comes next.

    Whoever iterates it counts its consumer's time, by the figures' ``ask`` and ``receive``.

    Args:
        opened, begun, sizes: What to read from; what and in which order; how much is decoded at a time.
        figures: Of its consumer's time.
        memory: For batches, of which samples are then rows where they can be.
    """

    def __init__(
        self,
        opened: OpenDatasets,
        begun: BegunPass,
        sizes: Sizes,
        figures: PassFigures,
        memory: BatchMemory | None = None,
    ) -> None:
        self._opened, self._begun, self.plan, self._sizes = opened, begun, begun.plan, sizes
        self._rows = None if memory is None else Rows(begun.plan, begun.builder.layout, memory)
        self._delivery = SampleDelivery(opened, begun, self._rows)
        self._max_pieces = sizes.open_pieces + opened.prefetch_segments
        self._ended = False
        self._waits, self._hand_overs = Histogram(), Histogram()
        self._first_sample_seconds: float | None = None
        self.figures = figures
        self._asked_at: float | None = None  # while the consumer waits
        self._waited_for: tuple[WaitStep, ...] = ()  # since samples were handed over

    async def __aenter__(self) -> Self:
        self._started_at = time.perf_counter()
        self._clock = ThreadClock()
        self._worked_seconds, self._ran_seconds = self._clock.seconds(), time.thread_time()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        try:
            if self.plan.is_far:
                await run_sync(self.plan.find)
            self._ahead = DecodeAhead(
                self._opened, self.plan, self._group, builder=self._begun.builder, sizes=self._sizes, rows=self._rows
            )
            self._group.start_soon(self.figures.publish, name="publish figures")
            if self._begun.beyond is not None:
                self._group.start_soon(self._look_beyond, self._begun.beyond, name="prefetch the next epoch")
        except BaseException as error:
            await self._group.__aexit__(type(error), error, error.__traceback__)
            self._clock.close()
            raise
        self.figures.begin(self._opened.statistics, self.path)
        self._opened.reader.pass_report = self.figures.report
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._ahead.leave()
        self.figures.end(self._opened.statistics())
        try:
            await end_tasks(self._group)
        finally:
            self._ahead.close()
            self._clock.close()

    async def __anext__(self) -> Any:  # noqa: ANN401 - a list of them; of a RunningPass one
        self._check_open()
        if self._delivery.failure is not None:
            failure, self._delivery.failure, self._ended = self._delivery.failure, None, True
            self.figures.fail(failure)
            self.figures.handed_over.append((0, self._waited_for))
            try:
                raise failure
            finally:
                del failure  # else error -> traceback -> this frame -> error is a cycle
        samples, self._asked_at = None, time.perf_counter()
        try:
            samples = await self._wait_for_micro_batch(self._asked_at)
            return samples
        finally:
            path, self._asked_at = self.path(), None
            self._ahead.forget_path()
            worked, ran = self._worked_seconds, self._ran_seconds
            self._worked_seconds, self._ran_seconds = self._clock.seconds(), time.thread_time()
            self.figures.account.note(
                self._worked_seconds - worked,
                self._ran_seconds - ran,
                self._ahead.prefetcher.sizes,
                self._begun.builder.transform_seconds,
            )
            self._waited_for += path
            if samples != []:  # else nothing goes to the consumer
                self.figures.handed_over.append((len(samples or ()), self._waited_for))
                self._waited_for = ()

    async def _wait_for_micro_batch(self, waiting_since: float) -> list[DeliveredSample]:
        if self._ended or not await self._ahead.wait():
            self._check_open()
            if not self._ended:
                self._ended = True
                self._delivery.end()
                self._begun.finish()
            raise StopAsyncIteration
        results, ready_at = self._ahead.take()
        samples = self._delivery.deliver(results)
        now = time.perf_counter()
        self._waits.record(now - waiting_since)
        self._hand_overs.record(now - max(waiting_since, ready_at))
        if self._first_sample_seconds is None and samples:
            self._first_sample_seconds = now - self._started_at
        return samples

    def _check_open(self) -> None:
        if self._ahead.is_left:
            raise ClosedError("this pass was left: iterate inside of `async with stream.samples() as samples`")

    async def _look_beyond(self, beyond: PassPlan) -> None:
        """Fetch as many pieces of the next epoch as this one's leave room for: its start then finds them here."""
        if beyond.is_far:
            await run_sync(beyond.find)
        prefetched = 0
        for piece in beyond.first_uses():
            if prefetched == self._max_pieces:
                return
            if piece is None:
                await anyio.lowlevel.checkpoint()
                continue
            await self._ahead.prefetcher.drained_to(self._max_pieces - prefetched - 1)
            prefetched += 1
            if piece in self._ahead.prefetcher:
                continue  # it will be in memory behind this pass, too
            with suppress(DatasetError, CacheError):  # the next pass will find it, at its place
                origin = self._opened.origin(piece)
                origin.reader.prefetch(origin.stretch)

    def path(self) -> tuple[WaitStep, ...]:
        """Return what the consumer waits for, and waited for since it asked; it may be called in any thread."""
        since = self._asked_at
        if since is None:
            return ()
        return self._ahead.path(since, Cause.HAND_OVER if self._delivery.samples else Cause.OPENING)

    def statistics(self) -> PassStatistics:
        """Return a snapshot; it may be taken in any thread."""
        wait = self._waits.snapshot()
        return PassStatistics(
            samples=self._delivery.samples,
            waited_seconds=wait.sum_seconds,
            wait=wait,
            hand_over=self._hand_overs.snapshot(),
            first_sample_seconds=self._first_sample_seconds,
            open_segments=self._ahead.prefetcher.open_pieces,
            waits=self.figures.account.snapshot(time.perf_counter(), self.path()),
        )


class RunningPass(MicroBatches):
    """A pass for a consumer on its loop: all that a ``SamplePass`` gives, and what the makers of batches need."""

    async def __aenter__(self) -> Self:
        self._turn = anyio.Lock(fast_acquire=True)
        self._current: deque[DeliveredSample] = deque()
        self.latest = DeliveredSample(0, 0, {})
        """The sample that came last."""
        await super().__aenter__()
        self.figures.opened()
        self.figures.account.give(time.perf_counter(), _opening())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.figures.account.end(time.perf_counter(), self.path())
        self._current.clear()
        await super().__aexit__(kind, error, at)

    async def __anext__(self) -> Any:  # noqa: ANN401 - what a transform returns
        if not self._current:
            async with self._turn:
                if not self._current:
                    self._check_open()
                    await self._receive()
        self._begun.check()
        self.latest = self._current.popleft()
        self.plan.progress.delivered = self.latest.delivered
        return self.latest.sample

    async def _receive(self) -> None:
        self.figures.ask()
        try:
            while not self._current:
                self._current.extend(await super().__anext__())
        finally:
            self.figures.receive()


class SamplePass(AsyncIterator["Sample"]):
    """The samples of one consumer for one epoch. Entered with ``async with``, iterated once.

    Samples come in order. An error is raised at its place, after every sample before it, and ends the pass.
    A cancelled ``__anext__`` loses nothing, and several tasks may share the iterator. Leaving the context cancels and
    awaits everything under way; a call that is already in a decode thread is waited for.
    """

    def __init__(self, running: RunningPass) -> None:
        """``running`` is entered already."""
        self._running = running

    def __anext__(self) -> Coroutine[Any, Any, Sample]:
        return self._running.__anext__()

    def state_dict(self) -> State:
        """Return what was delivered of the epoch, this pass and those before it: for ``Stream.load_state_dict``."""
        return self._running.plan.progress.state()

    def report(self) -> Report:
        """Return why the consumer waits, and what to set; also after the pass. It may be called in any thread."""
        return self._running.figures.report()

    def statistics(self) -> PassStatistics:
        """A snapshot; it may be taken in any thread."""
        return self._running.statistics()


def running_pass(samples: SamplePass) -> RunningPass:
    """Return the pass behind a user's, for makers of batches."""
    return samples._running

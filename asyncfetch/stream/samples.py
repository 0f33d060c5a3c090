"""One pass over a dataset: an async iterator of samples, decoded ahead and delivered in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncfetch.errors import CacheError, ClosedError, DatasetError
from asyncfetch.observe import Figures, Histogram
from asyncfetch.observe.report import Report
from asyncfetch.observe.trace import running
from asyncfetch.observe.waits import Cause, WaitAccount, Waits, WaitStep
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.failures import copied, kept
from asyncfetch.runtime.threads import ThreadClock
from asyncfetch.stream.decode_jobs import Sizes, micro_batches
from asyncfetch.stream.figures import PUBLISH_SECONDS
from asyncfetch.stream.job_builder import FailedSample
from asyncfetch.stream.prefetcher import EpisodePrefetcher
from asyncfetch.stream.quarantine import BAD_DATA, Quarantine, Substitutes, raise_where_none_is_good

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from asyncfetch.config import OnError, StreamConfig
    from asyncfetch.lerobot import DatasetStatistics, HeldEpisode, Sample
    from asyncfetch.observe import Quantiles
    from asyncfetch.stream.batch import BatchRow, Rows
    from asyncfetch.stream.decode_jobs import DecodeJob, MicroBatch
    from asyncfetch.stream.figures import FiguresPage
    from asyncfetch.stream.job_builder import Builder
    from asyncfetch.stream.order import Step
    from asyncfetch.stream.plan import PassPlan
    from asyncfetch.stream.protocols import Origin, Readable
    from asyncfetch.stream.state import State

COMING_EPISODES = 64
"""Episodes on their way at a time, for jobs that are started ahead; the pool's own may be more. A job of short ones
takes dozens. Where a thousand are asked for at once, the first of them is as late as the last."""

__all__ = ["Decoding", "DeliveredSample", "PassFigures", "PassStatistics", "PendingMicroBatch", "SamplePass"]


class Decoding:
    """A job under way in a thread, and then what came of it."""

    __slots__ = ("is_ready", "path", "ready", "ready_at", "results", "rows", "steps", "waits_for")

    def __init__(self, job: DecodeJob, rows: list[BatchRow] | None) -> None:
        self.steps = job.steps
        self.rows = rows
        """Rows that it goes to, with batches in memory of ours."""
        self.is_ready = False
        """Asked for each sample of a micro-batch, for which an Event's two calls are too many."""
        self.ready = anyio.Event()
        """Set then, and when nobody wants it any more."""
        self.ready_at = 0.0
        self.results: list[Any] = []
        """One result for each step; empty ones once they were delivered."""
        self.waits_for: int | None = None
        """The episode whose arrival it waits for."""
        self.path: list[WaitStep] = []
        """The steps that it waited for."""

    def end(self, results: list[Any], weights: Mapping[Cause, float] | None = None) -> None:
        """Called once or, where it was given up before, twice. ``weights`` say what its thread's time was."""
        if not self.is_ready:
            self.results, self.rows = results, None
            self.ready_at = time.perf_counter()
            if weights is not None:
                self.path.append(WaitStep(self.ready_at, weights))
            self.is_ready = True
            self.ready.set()


class PendingMicroBatch:
    """A micro-batch that the consumer hasn't been given yet."""

    __slots__ = ("decodings", "micro_batch")

    def __init__(self, micro_batch: MicroBatch, decodings: list[Decoding]) -> None:
        self.micro_batch = micro_batch
        self.decodings = decodings
        """The decoding of each step."""

    @property
    def is_ready(self) -> bool:
        """True if all of it is decoded."""
        return all(decoding.is_ready for decoding in self.decodings)


class DeliveredSample(NamedTuple):
    """A sample that a consumer gets."""

    number: int
    """Number of the sample in the consumer's part of the epoch."""
    delivered: int
    """Samples that the consumer has been given with it; one more, but for what is empty."""
    sample: Any
    """The sample, or its row in a batch; or what a transform gave."""


@dataclass(frozen=True, slots=True, repr=False)
class PassStatistics(Figures):
    """A snapshot of one pass."""

    telling = ("samples", "waited_seconds", "first_sample_seconds", "open_episodes")

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
    open_episodes: int
    """Episodes in memory or on their way."""
    waits: Waits = field(default_factory=Waits)
    """The consumer's time, by what it went to."""


class PassFigures:
    """Figures of a pass, while it lasts and after it: of its consumer's time, and of what it reads.

    Args:
        config: Of the pass.
        page: Where they are written for another process; None where this one's consumer is the trainer.
    """

    def __init__(self, config: StreamConfig, page: FiguresPage | None = None) -> None:
        self.account = WaitAccount(None if page is None else page.numbers)
        """Counts the consumer's time."""
        self._config = config
        self._page = page
        self.path: Callable[[], Iterable[WaitStep]] = tuple
        """Gives what a consumer that waits is waiting for."""
        self.statistics: Callable[[], DatasetStatistics | None] = lambda: None
        self.clock: ThreadClock | None = None
        """The clock of the consumer's thread; None where that is the loop's."""
        self._worked_before = 0.0

    def end(self, statistics: DatasetStatistics) -> None:
        """Keep the last figures in place of the pass, which ends."""
        self.path, self.statistics = tuple, lambda: statistics
        self._publish()

    def wait(self, now: float) -> None:
        """See WaitAccount; in the consumer's thread."""
        self.account.wait(now, self._worked())

    def give(self, now: float, path: Iterable[WaitStep] = (), samples: int = 0) -> None:
        """See WaitAccount; in the consumer's thread."""
        self.account.give(now, path, samples)
        self._worked_before = 0.0 if self.clock is None else self.clock.seconds()

    def _worked(self) -> float:
        """Seconds in which the consumer's thread had something to do since it was given something."""
        return 0.0 if self.clock is None else max(0.0, self.clock.seconds() - self._worked_before)

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Count a block in which a batch is made of what the pass gave, or handed over: the consumer waits for it."""
        self.wait(time.perf_counter())
        try:
            yield
        finally:
            self.give(time.perf_counter())

    async def publish(self) -> None:
        """Write to the page, now and then."""
        while self._page is not None:
            self._publish()
            await anyio.sleep(PUBLISH_SECONDS)

    def _publish(self) -> None:
        statistics = None if self._page is None else self.statistics()
        if self._page is not None and statistics is not None:
            self.account.note_cause(tuple(self.path()))
            self.account.note_worked(self._worked())
            self._page.publish(statistics)

    def waits(self) -> Waits:
        """Return where the consumer's time went. It may be called in any thread."""
        return self.account.snapshot(time.perf_counter(), self.path())

    def report(self) -> Report:
        """Return why the consumer waits, and what to set."""
        num_workers = 0 if self._page is None else self._page.num_workers
        return Report.of(self.waits(), self.statistics(), self._config, num_workers=num_workers)


def _traced(build: Callable[..., list[Any]], steps: Sequence[Step], *rest: Any) -> list[Any]:  # noqa: ANN401
    """Build as ``build`` does, in a decode thread, and trace it."""
    since = time.perf_counter()
    try:
        return build(steps, *rest)
    finally:
        if (tracer := running()) is not None:
            lane, name = threading.get_native_id(), threading.current_thread().name
            episodes = sorted({step.episode for step in steps})
            tracer.span("decode", since, time.perf_counter(), lane, name, episodes=episodes, frames=len(steps))


class SamplePass:
    """The samples of one consumer for one epoch. Entered with ``async with``, iterated once.

    Samples come in order. An error is raised at its place, after every sample before it, and ends the pass.
    A cancelled ``__anext__`` loses nothing, and several tasks may share the iterator. Leaving the context cancels and
    awaits everything under way; a call that is already in a decode thread is waited for.

    Args:
        dataset: What to read from, open.
        plan: What to read, in which order.
        builder: Makes the samples of a job, in a decode thread.
        sizes: How much is decoded at a time.
        rows: Where in which batch each sample goes, for a consumer of batches.
        max_samples: Decoded, or being decoded, that the consumer hasn't been given yet.
        max_episodes: That the order draws from at a time, and that are fetched ahead.
        prefetch_episodes: Those of them that are fetched ahead.
        on_error: As in StreamConfig.
        quarantine: Where to note what is left out or replaced.
        origin: Where an episode comes from.
        beyond: Of the pass that will follow on the same dataset, if one will: its first episodes are prefetched while
            the last ones of this pass are used.
        check: Called before a sample is given to who iterates this itself; what it raises comes in its place.
        on_end: Called when the consumer has come to the end.
        figures: Of its consumer's time.
        hands_over: Whether that consumer is in another thread, which counts there.
    """

    def __init__(
        self,
        dataset: Readable,
        plan: PassPlan,
        *,
        builder: Builder,
        sizes: Sizes,
        rows: Rows | None,
        max_samples: int,
        max_episodes: int,
        prefetch_episodes: int,
        on_error: OnError,
        quarantine: Quarantine,
        origin: Callable[[int], Origin],
        beyond: PassPlan | None,
        check: Callable[[], None],
        on_end: Callable[[], None],
        figures: PassFigures,
        hands_over: bool = False,
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._selection = plan.selection
        self._builder = builder
        self._sizes = sizes
        self._rows = rows
        self._max_samples = max_samples
        self._max_episodes = max_episodes
        self._prefetch_episodes = prefetch_episodes
        self._on_error = on_error
        self._quarantine = quarantine
        self._origin = origin
        self._substitutes = Substitutes()
        self._first_bad: Exception | None = None
        self._beyond = beyond
        self._check_given = check
        self._on_end = on_end
        self._turn = anyio.Lock(fast_acquire=True)
        self._queue: deque[PendingMicroBatch] = deque()
        self._queued = anyio.Event()
        self._undone: dict[Decoding, None] = {}
        self._undelivered = 0  # samples of all jobs that were started
        self._taken = 0  # samples of the order that were delivered or left out, what is empty counted in
        self._freed = anyio.Event()
        self._is_waiting_for_room = self._produced_all = self._ended = False
        self._failure: BaseException | None = None
        self._current: deque[DeliveredSample] = deque()
        self._latest = DeliveredSample(0, 0, {})
        self._left = threading.Event()  # decode threads keep what they are given: they get this, and not the pass
        self._given = plan.progress.delivered  # of the consumer's part of the epoch
        self._delivered = 0  # by this pass
        self._waits, self._hand_overs = Histogram(), Histogram()
        self._first_sample_seconds: float | None = None
        self._figures = figures
        self._account = WaitAccount() if hands_over else figures.account
        self._asked_at: float | None = None  # while the consumer waits
        self._awaited: tuple[PendingMicroBatch, float] | None = None  # and since when that was known
        self.latest_path: tuple[WaitStep, ...] = ()
        """The steps that it waited for when it had its latest samples."""

    async def __aenter__(self) -> Self:
        self._started_at = time.perf_counter()
        self._clock = ThreadClock()
        self._worked_seconds = self._clock.seconds()
        self._account.wait(self._started_at)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        try:
            if self._plan.is_far:
                await anyio.to_thread.run_sync(self._plan.find)
            self._prefetcher = EpisodePrefetcher(
                self._dataset,
                self._origin,
                self._plan.first_uses(),
                self._group,
                prefetch_episodes=self._prefetch_episodes,
                pool=self._plan.pool,
                on_full=self._fail_if_stuck,
                on_arrival=self._wake_producer,
            )
            self._group.start_soon(self._produce, name="produce samples")
            self._group.start_soon(self._figures.publish, name="publish figures")
            if self._beyond is not None:
                self._group.start_soon(self._look_beyond, self._beyond, name="prefetch the next epoch")
        except BaseException as error:
            await self._group.__aexit__(type(error), error, error.__traceback__)
            self._account.end(time.perf_counter())
            raise
        self._figures.path, self._figures.statistics = self.path, self._dataset.statistics
        self._dataset.pass_report = self._figures.report
        now = time.perf_counter()
        self._account.give(now, [WaitStep(now, {Cause.OPENING: 1.0})])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._left.set()
        self._account.end(time.perf_counter(), self.path())
        self._figures.end(self._dataset.statistics())
        try:
            await end_tasks(self._group)
        finally:
            self._prefetcher.close()
            self._queued.set()  # for tasks that still wait for a sample
            for pending in self._queue:
                for decoding in pending.decodings:
                    decoding.ready.set()
            self._queue.clear()
            self._current.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sample:
        if not self._current:
            async with self._turn:
                while not self._current:
                    self._current.extend(await self._next_micro_batch())
        self._check_given()
        self._latest = self._current.popleft()
        self._plan.progress.delivered = self._latest.delivered
        sample: Sample = self._latest.sample
        return sample

    def put_back(self) -> None:
        """The sample that came last comes once more, as if it hadn't."""
        self._plan.progress.delivered = self._plan.batch_start(self._latest.number)
        self._current.appendleft(self._latest)

    @property
    def batches(self) -> tuple[int, int]:
        """The batch that the latest sample is in, and that of the next one; see ``PassPlan.batch_of``."""
        return self._plan.batch_of(self._latest.number), self._plan.batch_of(self._latest.delivered)

    async def next_micro_batch(self) -> list[DeliveredSample]:
        """The next few samples, for handing over to another thread, which is to note how many it delivered.

        Empty where an error comes next. Raises StopAsyncIteration at the end. Don't mix it with ``async for``.
        """
        async with self._turn:
            return await self._next_micro_batch()

    def state_dict(self) -> State:
        """Return what was delivered of the epoch, this pass and those before it: for ``Stream.load_state_dict``."""
        return self._plan.progress.state()

    async def _next_micro_batch(self) -> list[DeliveredSample]:
        """The next samples; none of them where an error is next."""
        self._check_open()
        if self._failure is not None:
            failure, self._failure, self._ended = self._failure, None, True
            try:
                raise failure
            finally:
                del failure  # else error -> traceback -> this frame -> error is a cycle
        before, waiting_since = self._delivered, time.perf_counter()
        self._account.wait(waiting_since)
        self._asked_at = waiting_since
        try:
            return await self._wait_for_micro_batch(waiting_since)
        finally:
            self.latest_path, self._asked_at, self._awaited = self.path(), None, None
            before_that, self._worked_seconds = self._worked_seconds, self._clock.seconds()
            self._figures.account.note(self._worked_seconds - before_that, self._prefetcher.sizes)
            now = time.perf_counter()
            self._account.give(now, self.latest_path, self._delivered - before)
            if self._account is self._figures.account and (tracer := running()) is not None:
                tracer.waits(waiting_since, now, self.latest_path)

    async def _wait_for_micro_batch(self, waiting_since: float) -> list[DeliveredSample]:
        while not (self._queue or self._produced_all or self._ended or self._left.is_set()):
            await self._queued.wait()
        self._check_open()
        if self._ended or not self._queue:
            if not self._ended:
                self._ended = True
                if self._first_bad is not None and not (self._delivered or self._plan.is_resumed):
                    raise_where_none_is_good(self._first_bad, self._plan.progress.placement, self._on_error)
                self._on_end()
            raise StopAsyncIteration
        pending = self._queue[0]
        self._awaited = pending, time.perf_counter()
        self._fail_if_stuck()
        for step, decoding in zip(pending.micro_batch.steps, pending.decodings, strict=True):
            if not decoding.is_ready:
                self._prefetcher.raise_priority(self._selection[step.episode])
        for decoding in pending.decodings:
            if not decoding.is_ready:
                await decoding.ready.wait()
        self._check_open()
        self._queue.popleft()
        samples = self._take(pending)
        self._count(len(samples), waiting_since, max(decoding.ready_at for decoding in pending.decodings))
        return samples

    def _take(self, pending: PendingMicroBatch) -> list[DeliveredSample]:
        """The micro-batch's samples up to the first error that isn't left out, which is kept for the next call."""
        samples: list[DeliveredSample] = []
        replaces = self._on_error == "replace"
        for step, (_, place), decoding in zip(
            pending.micro_batch.steps, pending.micro_batch.takes, pending.decodings, strict=True
        ):
            result, decoding.results[place] = decoding.results[place], {}
            self._undelivered -= 1
            self._taken += 1 + step.empty
            if not isinstance(result, FailedSample):
                given = self._substitutes.good(result, self._origin_of(step).member) if replaces else [result]
            elif self._on_error == "raise" or result.by_transform or not isinstance(result.error, BAD_DATA):
                self._failure = result.error if result.by_transform else copied(result.error)
                break
            else:
                origin = self._origin_of(step)
                self._quarantine.add(origin, result.error)
                self._first_bad = self._first_bad or result.error
                # Another member's sample would not go into this one's batch.
                is_replaced = replaces and (not self._plan.parts_batches or self._substitutes.has_of(origin.member))
                given = self._substitutes.bad(origin.member) if is_replaced else []
                self._given += not is_replaced
                if self._rows is not None and not is_replaced:
                    self._rows.leave_out()
            for sample in given:
                if isinstance(sample, FailedSample):
                    self._failure = copied(sample.error)
                    break
                samples.append(DeliveredSample(self._given, self._given + 1, sample))
                self._given += 1
            if self._failure is not None:
                break
            if step.empty:
                self._given += step.empty
                samples[-1:] = [last._replace(delivered=self._given) for last in samples[-1:]]
        if replaces:
            self._substitutes.keep()
        self._delivered += len(samples)
        self._wake_producer()
        return samples

    def _origin_of(self, step: Step) -> Origin:
        return self._origin(self._selection[step.episode])

    def _check_open(self) -> None:
        if self._left.is_set():
            raise ClosedError("this pass was left: iterate inside of `async with stream.samples() as samples`")

    def _count(self, samples: int, waiting_since: float, ready_at: float) -> None:
        now = time.perf_counter()
        self._waits.record(now - waiting_since)
        self._hand_overs.record(now - max(waiting_since, ready_at))
        if self._first_sample_seconds is None and samples:
            self._first_sample_seconds = now - self._started_at

    async def _look_beyond(self, beyond: PassPlan) -> None:
        """Fetch as many episodes of the next epoch as this one's leave room for: its start then finds them here."""
        if beyond.is_far:
            await anyio.to_thread.run_sync(beyond.find)
        prefetched = 0
        for episode in beyond.first_uses():
            if prefetched == self._max_episodes:
                return
            if episode is None:
                await anyio.lowlevel.checkpoint()
                continue
            await self._prefetcher.drained_to(self._max_episodes - prefetched - 1)
            prefetched += 1
            if episode in self._prefetcher:
                continue  # it will be in memory behind this pass, too
            with suppress(DatasetError, CacheError):  # the next pass will find it, at its place
                self._dataset.prefetch(episode)

    async def _produce(self) -> None:
        decodings: WeakKeyDictionary[DecodeJob, Decoding] = WeakKeyDictionary()
        for micro_batch in micro_batches(self._plan.steps(), self._sizes):
            for job in micro_batch.starts:
                await self._wait_for_room(job)
                decodings[job] = self._start(job)
            self._queue.append(PendingMicroBatch(micro_batch, [decodings[job] for job, _ in micro_batch.takes]))
            for step in micro_batch.steps:
                for episode in step.finished:
                    self._prefetcher.finish(self._selection[episode])
            self._queued.set()
            self._queued = anyio.Event()
        self._prefetcher.finish_all()
        self._produced_all = True
        self._queued.set()
        self._fail_if_stuck()

    async def _wait_for_room(self, job: DecodeJob) -> None:
        await anyio.lowlevel.checkpoint()  # others' turn: there may be room for thousands of samples
        # What the consumer needs next is decoded in any case: then nothing else will give room back.
        while self._queue and (
            self._held_with(job) > self._max_samples
            or self._prefetcher.coming >= max(COMING_EPISODES, self._max_episodes)
        ):
            self._is_waiting_for_room = True
            self._fail_if_stuck()
            self._freed = anyio.Event()
            await self._freed.wait()
        self._is_waiting_for_room = False

    def _wake_producer(self) -> None:
        self._freed.set()

    def _held_with(self, job: DecodeJob) -> int:
        """Samples whose memory is taken if the job is started: in batches those between the first and the last one."""
        if self._rows is None or not self._rows.are_used:
            return self._undelivered + len(job.steps)
        return max(job.numbers) + 1 - self._taken

    def _start(self, job: DecodeJob) -> Decoding:
        decoding = Decoding(job, None if self._rows is None else self._rows.of(job))
        for step in job.steps:
            self._prefetcher.use(self._selection[step.episode])
        self._undelivered += len(job.steps)
        self._undone[decoding] = None
        self._group.start_soon(self._decode, decoding, name="decode samples")
        return decoding

    async def _decode(self, decoding: Decoding) -> None:
        try:
            episodes = await self._gather(decoding)
            build, is_left = self._builder.build, self._left.is_set
            if running() is not None:
                build = partial(_traced, build)
            results = await self._dataset.decode_pool.run(build, decoding.steps, episodes, is_left, decoding.rows)
            if self._rows is not None and decoding.rows and any(type(result) is dict for result in results):
                self._rows.stop()
            decoding.end(results, self._builder.weights)
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            decoding.end([FailedSample(kept(error))] * len(decoding.steps))
        finally:
            for step in decoding.steps:
                self._prefetcher.done(self._selection[step.episode])
            self._undone.pop(decoding, None)
        self._fail_if_stuck()

    async def _gather(self, decoding: Decoding) -> dict[int, HeldEpisode | Exception]:
        """The episodes that the job reads, or why one can't be had."""
        episodes: dict[int, HeldEpisode | Exception] = {}
        try:
            for episode in dict.fromkeys(step.episode for step in decoding.steps):
                decoding.waits_for = self._selection[episode]
                self._fail_if_stuck()
                try:
                    is_late = not self._prefetcher.has(decoding.waits_for)
                    episodes[episode] = await self._prefetcher.get(decoding.waits_for)
                    if is_late:
                        decoding.path += self._prefetcher.steps(decoding.waits_for, time.perf_counter())
                except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
                    episodes[episode] = kept(error)
        finally:
            decoding.waits_for = None
        return episodes

    def _fail_if_stuck(self) -> None:
        """Fail the pass where it would wait for ever: the consumer for an episode, and that for room nobody returns.

        Room comes back when decoding ends, and decoding goes on while a job can start or the consumer takes a
        micro-batch.
        """
        if self._left.is_set() or not self._queue or not (self._is_waiting_for_room or self._produced_all):
            return
        first_error: Exception | None = None
        for decoding in self._undone:
            lacking = None if decoding.waits_for is None else self._prefetcher.lacks_room_for(decoding.waits_for)
            if lacking is None:
                return
            first_error = first_error or lacking
        if self._queue[0].is_ready:
            return
        for decoding in self._queue[0].decodings:
            assert first_error is not None
            decoding.end([FailedSample(first_error)] * len(decoding.steps))

    def path(self) -> tuple[WaitStep, ...]:
        """Return what the consumer waits for, and waited for since it asked; it may be called in any thread."""
        since, awaited, now = self._asked_at, self._awaited, time.perf_counter()
        if since is None:
            return ()
        unknown = {Cause.HAND_OVER if self._delivered else Cause.OPENING: 1.0}
        if awaited is None:
            return (WaitStep(now, unknown),)
        pending, known_at = awaited
        steps = [WaitStep(known_at, unknown)]
        for decoding in dict.fromkeys(pending.decodings):
            if not decoding.is_ready:
                episode = decoding.waits_for
                late = [] if episode is None else self._prefetcher.steps(episode, now)
                return (*steps, *decoding.path, *late, WaitStep(now, self._builder.weights))
            if decoding.ready_at > since:
                steps += decoding.path
        return tuple(steps)

    def handing_over(self) -> AbstractContextManager[None]:
        """See PassFigures, for a consumer on this loop."""
        return self._figures.handing_over()

    def report(self) -> Report:
        """Return why the consumer waits, and what to set; also after the pass. It may be called in any thread."""
        return self._figures.report()

    def statistics(self) -> PassStatistics:
        """A snapshot; it may be taken in any thread."""
        wait = self._waits.snapshot()
        return PassStatistics(
            samples=self._delivered,
            waited_seconds=wait.sum_seconds,
            wait=wait,
            hand_over=self._hand_overs.snapshot(),
            first_sample_seconds=self._first_sample_seconds,
            open_episodes=self._prefetcher.open_episodes,
            waits=self._account.snapshot(time.perf_counter(), self.path()),
        )

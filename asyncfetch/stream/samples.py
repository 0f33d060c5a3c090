"""One pass over a dataset: an async iterator of samples, decoded ahead and delivered in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncfetch.errors import CacheError, ClosedError, DatasetError
from asyncfetch.observe import Histogram
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.failures import copied, kept
from asyncfetch.stream.building import Failed
from asyncfetch.stream.coming import Coming, Decoding, Delivery
from asyncfetch.stream.jobs import Sizes, parcels
from asyncfetch.stream.quarantine import BAD_DATA, Quarantine, Substitutes, raise_where_none_is_good
from asyncfetch.stream.window import EpisodeWindow

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from asyncfetch.config import OnError
    from asyncfetch.lerobot import HeldEpisode, Sample
    from asyncfetch.observe import Quantiles
    from asyncfetch.stream.batch import Rows
    from asyncfetch.stream.building import Builder
    from asyncfetch.stream.jobs import Job
    from asyncfetch.stream.order import Step
    from asyncfetch.stream.plan import PassPlan
    from asyncfetch.stream.readable import Origin, Readable
    from asyncfetch.stream.state import State

__all__ = ["PassStatistics", "SamplePass"]


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


class SamplePass:
    """The samples of one consumer for one epoch. Entered with ``async with``, iterated once.

    Samples come in order. An error is raised at its place, behind every sample in front of it, and ends the pass.
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
        self._queue: deque[Coming] = deque()
        self._queued = anyio.Event()
        self._undone: dict[Decoding, None] = {}
        self._undelivered = 0  # samples of all jobs that were started
        self._taken = 0  # samples of the order that were delivered or left out, what is empty counted in
        self._freed = anyio.Event()
        self._is_waiting_for_room = self._produced_all = self._ended = False
        self._failure: BaseException | None = None
        self._current: deque[Delivery] = deque()
        self._latest = Delivery(0, 0, {})
        self._left = threading.Event()  # decode threads keep what they are given: they get this, and not the pass
        self._given = plan.progress.delivered  # of the consumer's part of the epoch
        self._delivered = 0  # by this pass
        self._waits, self._hand_overs = Histogram(), Histogram()
        self._first_sample_seconds: float | None = None

    async def __aenter__(self) -> Self:
        self._started_at = time.perf_counter()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        try:
            if self._plan.is_far:
                await anyio.to_thread.run_sync(self._plan.find)
            self._window = EpisodeWindow(
                self._dataset,
                self._origin,
                self._plan.first_uses(),
                self._group,
                prefetch_episodes=self._prefetch_episodes,
                pool=self._plan.pool,
                on_full=self._fail_if_stuck,
            )
            self._group.start_soon(self._produce, name="produce samples")
            if self._beyond is not None:
                self._group.start_soon(self._look_beyond, self._beyond, name="prefetch the next epoch")
        except BaseException as error:
            await self._group.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._left.set()
        try:
            await end_tasks(self._group)
        finally:
            self._window.close()
            self._queued.set()  # for tasks that still wait for a sample
            for coming in self._queue:
                for decoding in coming.decodings:
                    decoding.ready.set()
            self._queue.clear()
            self._current.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sample:
        if not self._current:
            async with self._turn:
                while not self._current:
                    self._current.extend(await self._next_parcel())
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
        """Which batch the latest sample is in, and which the next one is; see ``PassPlan.batch_of``."""
        return self._plan.batch_of(self._latest.number), self._plan.batch_of(self._latest.delivered)

    async def next_parcel(self) -> list[Delivery]:
        """The next few samples, for handing over to another thread, which is to note how many it delivered.

        Empty where an error comes next. Raises StopAsyncIteration at the end. Don't mix it with ``async for``.
        """
        async with self._turn:
            return await self._next_parcel()

    def state_dict(self) -> State:
        """What was delivered of the epoch, this pass and those before it: for ``Stream.load_state_dict``."""
        return self._plan.progress.state()

    async def _next_parcel(self) -> list[Delivery]:
        """The next samples; none of them where an error is next."""
        self._check_open()
        if self._failure is not None:
            failure, self._failure, self._ended = self._failure, None, True
            try:
                raise failure
            finally:
                del failure  # else error -> traceback -> this frame -> error is a cycle
        waiting_since = time.perf_counter()
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
        coming = self._queue[0]
        self._fail_if_stuck()
        for step, decoding in zip(coming.parcel.steps, coming.decodings, strict=True):
            if not decoding.is_ready:
                self._window.hurry(self._selection[step.episode])
        for decoding in coming.decodings:
            if not decoding.is_ready:
                await decoding.ready.wait()
        self._check_open()
        self._queue.popleft()
        samples = self._take(coming)
        self._count(len(samples), waiting_since, max(decoding.ready_at for decoding in coming.decodings))
        return samples

    def _take(self, coming: Coming) -> list[Delivery]:
        """The parcel's samples up to the first error that isn't left out, which is kept for the next call."""
        samples: list[Delivery] = []
        replaces = self._on_error == "replace"
        for step, (_, place), decoding in zip(coming.parcel.steps, coming.parcel.takes, coming.decodings, strict=True):
            result, decoding.results[place] = decoding.results[place], {}
            self._undelivered -= 1
            self._taken += 1 + step.empty
            if not isinstance(result, Failed):
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
                if isinstance(sample, Failed):
                    self._failure = copied(sample.error)
                    break
                samples.append(Delivery(self._given, self._given + 1, sample))
                self._given += 1
            if self._failure is not None:
                break
            if step.empty:
                self._given += step.empty
                samples[-1:] = [last._replace(delivered=self._given) for last in samples[-1:]]
        if replaces:
            self._substitutes.keep()
        self._delivered += len(samples)
        self._freed.set()
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
        """As many episodes of the next epoch as those of this one leave room for: its start then finds them here."""
        if beyond.is_far:
            await anyio.to_thread.run_sync(beyond.find)
        prefetched = 0
        for episode in beyond.first_uses():
            if prefetched == self._max_episodes:
                return
            if episode is None:
                await anyio.lowlevel.checkpoint()
                continue
            await self._window.drained_to(self._max_episodes - prefetched - 1)
            prefetched += 1
            if episode in self._window:
                continue  # it will be in memory behind this pass, too
            with suppress(DatasetError, CacheError):  # the next pass will find it, at its place
                self._dataset.prefetch(episode)

    async def _produce(self) -> None:
        decodings: WeakKeyDictionary[Job, Decoding] = WeakKeyDictionary()
        for parcel in parcels(self._plan.steps(), self._sizes):
            for job in parcel.starts:
                await self._wait_for_room(job)
                decodings[job] = self._start(job)
            self._queue.append(Coming(parcel, [decodings[job] for job, _ in parcel.takes]))
            for step in parcel.steps:
                for episode in step.finished:
                    self._window.finish(self._selection[episode])
            self._queued.set()
            self._queued = anyio.Event()
        self._window.finish_all()
        self._produced_all = True
        self._queued.set()
        self._fail_if_stuck()

    async def _wait_for_room(self, job: Job) -> None:
        await anyio.lowlevel.checkpoint()  # others' turn: there may be room for thousands of samples
        # What the consumer needs next is decoded in any case: then nothing else will give room back.
        while self._queue and self._held_with(job) > self._max_samples:
            self._is_waiting_for_room = True
            self._fail_if_stuck()
            self._freed = anyio.Event()
            await self._freed.wait()
        self._is_waiting_for_room = False

    def _held_with(self, job: Job) -> int:
        """Samples whose memory is taken if the job is started: in batches those between the first and the last one."""
        if self._rows is None or not self._rows.are_used:
            return self._undelivered + len(job.steps)
        return max(job.numbers) + 1 - self._taken

    def _start(self, job: Job) -> Decoding:
        decoding = Decoding(job, None if self._rows is None else self._rows.of(job))
        for step in job.steps:
            self._window.use(self._selection[step.episode])
        self._undelivered += len(job.steps)
        self._undone[decoding] = None
        self._group.start_soon(self._decode, decoding, name="decode samples")
        return decoding

    async def _decode(self, decoding: Decoding) -> None:
        try:
            episodes = await self._gather(decoding)
            build, is_left = self._builder.build, self._left.is_set
            results = await self._dataset.decode_pool.run(build, decoding.steps, episodes, is_left, decoding.rows)
            if self._rows is not None and decoding.rows and any(type(result) is dict for result in results):
                self._rows.stop()
            decoding.end(results)
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            decoding.end([Failed(kept(error))] * len(decoding.steps))
        finally:
            for step in decoding.steps:
                self._window.done(self._selection[step.episode])
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
                    episodes[episode] = await self._window.get(decoding.waits_for)
                except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
                    episodes[episode] = kept(error)
        finally:
            decoding.waits_for = None
        return episodes

    def _fail_if_stuck(self) -> None:
        """Fail the pass where it would wait for ever: the consumer for an episode, and that for room nobody returns.

        Room comes back when decoding ends, and decoding goes on while a job can start or the consumer takes a parcel.
        """
        if self._left.is_set() or not self._queue or not (self._is_waiting_for_room or self._produced_all):
            return
        first_error: Exception | None = None
        for decoding in self._undone:
            lacking = None if decoding.waits_for is None else self._window.lacks_room_for(decoding.waits_for)
            if lacking is None:
                return
            first_error = first_error or lacking
        if self._queue[0].is_ready:
            return
        for decoding in self._queue[0].decodings:
            assert first_error is not None
            decoding.end([Failed(first_error)] * len(decoding.steps))

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

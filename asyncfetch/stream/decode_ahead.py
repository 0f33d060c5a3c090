"""The jobs that a pass decodes ahead of its consumer: in the order's order, within a bound, each in a decode thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel

from asyncfetch.observe.trace import running
from asyncfetch.observe.waits import WaitStep
from asyncfetch.runtime.concurrently import kept
from asyncfetch.stream.decode_jobs import Sizes, micro_batches
from asyncfetch.stream.job_builder import FailedSample
from asyncfetch.stream.prefetcher import Prefetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anyio.abc import TaskGroup

    from asyncfetch.formats import HeldStretch
    from asyncfetch.observe.waits import Cause
    from asyncfetch.order.line import Piece
    from asyncfetch.order.plan import PassPlan, Step
    from asyncfetch.stream.batch import BatchRow, Rows
    from asyncfetch.stream.datasets import OpenDatasets
    from asyncfetch.stream.decode_jobs import DecodeJob
    from asyncfetch.stream.job_builder import JobBuilder

COMING_PIECES = 64
"""Most episodes on their way at a time, for jobs that are started ahead, unless the pool has more. A job of short ones
takes dozens. Of a thousand that are requested at once, the first would be as late as the last."""


class _Decoding:
    """A job under way in a thread, and then what came of it."""

    __slots__ = ("path", "pieces", "ready", "ready_at", "results", "rows", "steps", "waits_for")

    def __init__(self, job: DecodeJob, rows: list[BatchRow] | None) -> None:
        self.steps, self.rows = job.steps, rows
        self.pieces = dict.fromkeys(step.piece for step in job.steps)
        self.results: list[Any] | None = None
        """One for each step, once it has ended; an empty one once it was delivered."""
        self.ready = anyio.Event()
        """Set then, and when the pass is left."""
        self.ready_at = 0.0
        self.waits_for: Piece | None = None
        """The piece whose arrival it waits for."""
        self.path: list[WaitStep] = []
        """The steps that it waited for."""

    def end(self, results: list[Any], weights: Mapping[Cause, float] | None = None) -> None:
        """Note its results, unless it was given up before. ``weights`` divide its thread's time by cause."""
        if self.results is None:
            self.ready_at = time.perf_counter()
            if weights is not None:
                self.path.append(WaitStep(self.ready_at, weights))
            self.results, self.rows = results, None
            self.ready.set()


class DecodeAhead:
    """Starts the jobs of a plan ahead of the consumer, and gives what they made in order, a micro-batch at a time.

    Bound to the loop of its pass. What it starts runs in ``group``: cancel that before ``close``.
    """

    def __init__(
        self,
        opened: OpenDatasets,
        plan: PassPlan,
        group: TaskGroup,
        *,
        builder: JobBuilder,
        sizes: Sizes,
        rows: Rows | None,
    ) -> None:
        self._pool, self._plan, self._group, self._builder = opened.engine.decode, plan, group, builder
        self._sizes, self._rows = sizes, rows
        self._max_coming = max(COMING_PIECES, sizes.open_pieces + opened.prefetch_segments)
        self._queue: deque[list[tuple[_Decoding, int]]] = deque()
        """Micro-batches that the consumer hasn't been given yet: of each step the decoding, and its place there."""
        self._undone: dict[_Decoding, None] = {}
        self._undelivered = 0  # samples of all jobs that were started
        self._taken = plan.begun  # the number up to which samples were delivered or left out
        self._queued, self._freed = anyio.Event(), anyio.Event()
        self._first_turn = self._pool.turn - plan.begun  # of the sample with number 0
        self._is_waiting_for_room = self._produced_all = False
        self._left = threading.Event()  # decode threads keep what they are given: they get this, and not the pass
        self._awaited: tuple[list[tuple[_Decoding, int]], float] | None = None  # and since when that was known
        self.prefetcher = Prefetcher(
            opened,
            plan.first_uses(),
            group,
            prefetch_segments=opened.prefetch_segments,
            pool=plan.pool,
            on_full=self._fail_if_stuck,
            on_arrival=lambda: self._freed.set(),
        )
        """Episodes held and fetched ahead."""
        group.start_soon(self._produce, name="produce samples")

    def leave(self) -> None:
        """End calls in decode threads early, and all waits. Idempotent."""
        self._left.set()

    def close(self) -> None:
        """Give back what is held; its tasks have ended."""
        self.prefetcher.close()
        self._queued.set()  # for tasks that still wait for a sample
        for decoding, _ in chain(*self._queue):
            decoding.ready.set()
        self._queue.clear()

    @property
    def is_left(self) -> bool:
        """True once ``leave`` was called."""
        return self._left.is_set()

    async def wait(self) -> bool:
        """Wait until the next micro-batch is decoded, for ``take``; False at the end. Cancelled, it loses nothing."""
        while not (self._queue or self._produced_all or self.is_left):
            await self._queued.wait()
        if self.is_left or not self._queue:
            return False
        pending = self._queue[0]
        self._awaited = pending, time.perf_counter()
        self._fail_if_stuck()
        for decoding, place in pending:
            if decoding.results is None:
                self.prefetcher.raise_priority(decoding.steps[place].piece)
        for decoding, _ in pending:
            if decoding.results is None:
                await decoding.ready.wait()
        return not self.is_left

    def take(self) -> tuple[list[tuple[Step, Any]], float]:
        """Return the micro-batch that was waited for, a result for each step, and when the last of them was decoded."""
        taken, results = self._queue.popleft(), []
        for decoding, place in taken:
            assert decoding.results is not None
            results.append((decoding.steps[place], decoding.results[place]))
            decoding.results[place] = {}
        self._taken = results[-1][0].stop
        self._undelivered -= len(results)
        self._freed.set()
        return results, max(decoding.ready_at for decoding, _ in taken)

    def path(self, since: float, otherwise: Cause) -> tuple[WaitStep, ...]:
        """Return what a consumer waited for since then; ``otherwise`` until that is known. Any thread may call it."""
        awaited, now = self._awaited, time.perf_counter()
        if awaited is None:
            return (WaitStep(now, {otherwise: 1.0}),)
        pending, known_at = awaited
        steps = [WaitStep(known_at, {otherwise: 1.0})]
        for decoding in dict.fromkeys(decoding for decoding, _ in pending):
            if decoding.results is None:
                piece = decoding.waits_for
                late = [] if piece is None else self.prefetcher.steps(piece, now)
                return (*steps, *decoding.path, *late, WaitStep(now, self._builder.weights))
            if decoding.ready_at > since:
                steps += decoding.path
        return tuple(steps)

    def forget_path(self) -> None:
        """Forget what the consumer waited for."""
        self._awaited = None

    async def _produce(self) -> None:
        decodings: WeakKeyDictionary[DecodeJob, _Decoding] = WeakKeyDictionary()
        for micro_batch in micro_batches(self._plan.steps(), self._sizes):
            for job in micro_batch.starts:
                await self._wait_for_room(job)
                decodings[job] = self._start(job)
            self._queue.append([(decodings[job], place) for job, place in micro_batch.takes])
            for step in micro_batch.steps:
                for piece in step.finished:
                    self.prefetcher.finish(piece)
            self._queued.set()
            self._queued = anyio.Event()
        self.prefetcher.finish_all()
        self._produced_all = True
        self._queued.set()
        self._fail_if_stuck()

    async def _wait_for_room(self, job: DecodeJob) -> None:
        await anyio.lowlevel.checkpoint()  # others' turn: there may be room for thousands of samples
        # What the consumer needs next is decoded in any case: then nothing else will give room back.
        while self._queue and (
            self._held_with(job) > self._sizes.ahead_samples or self.prefetcher.coming >= self._max_coming
        ):
            self._is_waiting_for_room = True
            self._fail_if_stuck()
            self._freed = anyio.Event()
            await self._freed.wait()
        self._is_waiting_for_room = False

    def _held_with(self, job: DecodeJob) -> int:
        """Samples whose memory is taken if the job is started: in batches those between the first and the last one."""
        if self._rows is None or not self._rows.are_used:
            return self._undelivered + len(job.steps)
        return max(step.number for step in job.steps) + 1 - self._taken

    def _start(self, job: DecodeJob) -> _Decoding:
        decoding = _Decoding(job, None if self._rows is None else self._rows.of(job))
        for piece in decoding.pieces:
            self.prefetcher.use(piece)
        self._undelivered += len(job.steps)
        self._undone[decoding] = None
        self._group.start_soon(self._decode, decoding, name="decode samples")
        return decoding

    async def _decode(self, decoding: _Decoding) -> None:
        try:
            pieces = await self._gather(decoding)
            build, is_left = self._builder.build, self._left.is_set
            if running() is not None:
                build = partial(_traced, build)
            # One that stood still for long goes before the others by what it decodes ahead, and no further.
            first = decoding.steps[0].number
            self._first_turn = max(self._first_turn, self._pool.turn - self._sizes.ahead_samples - first)
            turn = self._first_turn + first
            results = await self._pool.run(build, decoding.steps, pieces, is_left, decoding.rows, turn=turn)
            if self._rows is not None and decoding.rows and any(type(result) is dict for result in results):
                self._rows.stop()
            decoding.end(results, self._builder.weights)
        except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
            decoding.end([FailedSample(kept(error))] * len(decoding.steps))
        finally:
            for piece in decoding.pieces:
                self.prefetcher.done(piece)
            self._undone.pop(decoding, None)
            self.prefetcher.end_head_start()
        self._fail_if_stuck()

    async def _gather(self, decoding: _Decoding) -> dict[Piece, HeldStretch[Any] | Exception]:
        """Return the pieces that the job reads, or the error of one."""
        pieces: dict[Piece, HeldStretch[Any] | Exception] = {}
        try:
            for piece in decoding.pieces:
                decoding.waits_for = piece
                self._fail_if_stuck()
                try:
                    is_late = not self.prefetcher.has(piece)
                    pieces[piece] = await self.prefetcher.get(piece)
                    if is_late:
                        decoding.path += self.prefetcher.steps(piece, time.perf_counter())
                except Exception as error:  # noqa: BLE001  raised by the iterator, at its place in the order
                    pieces[piece] = kept(error)
        finally:
            decoding.waits_for = None
        return pieces

    def _fail_if_stuck(self) -> None:
        """Fail the pass where it would wait for ever: the consumer for an episode, and that for room.

        Room comes back when decoding ends, which goes on while a job can start or the consumer takes a micro-batch.
        """
        if self.is_left or not self._queue or not (self._is_waiting_for_room or self._produced_all):
            return
        first_error: Exception | None = None
        for decoding in self._undone:
            lacking = None if decoding.waits_for is None else self.prefetcher.lacks_room_for(decoding.waits_for)
            if lacking is None:
                return
            first_error = first_error or lacking
        for decoding, _ in self._queue[0]:
            if first_error is not None:
                decoding.end([FailedSample(first_error)] * len(decoding.steps))


def _traced(build: Callable[..., list[Any]], steps: Sequence[Step], *rest: Any) -> list[Any]:  # noqa: ANN401
    """Build as ``build`` does, in a decode thread, and trace it."""
    since = time.perf_counter()
    try:
        return build(steps, *rest)
    finally:
        if (tracer := running()) is not None:
            lane, name = threading.get_native_id(), threading.current_thread().name
            episodes = sorted({step.piece.episode for step in steps})
            tracer.span("decode", since, time.perf_counter(), lane, name, episodes=episodes, frames=len(steps))

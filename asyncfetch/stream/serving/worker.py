"""The process that does the work: reads the stream and makes batches in shared memory."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncfetch.observe.trace import running
from asyncfetch.order.state import identity_of
from asyncfetch.runtime.cancellation import was_cancelled
from asyncfetch.runtime.liveness import beat
from asyncfetch.runtime.loop_thread import STOP_SECONDS
from asyncfetch.runtime.shared_memory import MemorySlots, can_hand_over
from asyncfetch.runtime.threads import call_on, run_sync
from asyncfetch.stream.batch import batch_of, samples_of
from asyncfetch.stream.buckets import batches_of
from asyncfetch.stream.datasets import OpenDatasets
from asyncfetch.stream.figures import FiguresPage
from asyncfetch.stream.handing_over import HandedOver, PackedBatch, SlotMemory, stacks
from asyncfetch.stream.samples import running_pass
from asyncfetch.stream.serving.messages import Begin, Channel, FilledBatch, PassEnd, Signal, failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from anyio.abc import TaskGroup

    from asyncfetch.order.placement import Placement
    from asyncfetch.order.state import State
    from asyncfetch.runtime.shared_memory import SharedBytes
    from asyncfetch.stream.buckets import Bucketing, Buckets, InOrder
    from asyncfetch.stream.passes import Samples
    from asyncfetch.stream.samples import PassFigures, RunningPass
    from asyncfetch.stream.source import SampleSource

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of the batches to make, and for which consumer."""

    placement: Placement
    bucketing: Bucketing | None
    """Which samples go into one batch, where it isn't those that come one after the other."""
    max_ahead: int
    max_ahead_bytes: int
    page: SharedBytes
    """The memory of the page on which the consumer looks for what is done here."""
    begun_at: float
    """The time when the process was asked for, by the clock of ``time.perf_counter``, which processes share."""


def serve(stream: SampleSource, plan: Plan, connection: Connection) -> None:
    """The process's main function. It was started with SIGINT and SIGTERM blocked, and leaves them to its parent."""
    with suppress(ImportError):  # the stream says what is missing
        import torch

        torch.set_num_threads(1)  # the decode threads fill the cores; torch's own would fight them for each
    parent = parent_process()
    assert parent is not None
    assert parent.pid is not None
    page = stream.page = FiguresPage(plan.page.memory)
    channel = Channel(connection, parent.pid)
    if os.getppid() == parent.pid:  # else it is dead already, and the channel may watch a stranger
        anyio.run(_run, stream, plan, channel, page)
    if (tracer := running()) is not None:
        tracer.close()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(0)  # everything is closed; an interpreter with torch in it takes another second to take itself apart


async def _run(stream: SampleSource, plan: Plan, channel: Channel, page: FiguresPage) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat, page.beat)
        await _ServingWorker(stream, plan, channel).run()
        tasks.cancel_scope.cancel()


class _ServingWorker:
    """Serves one pass at a time, over one open dataset. Made on the loop.

    The main task reads the stream. A thread writes batches and announces them, one at a time. Another thread listens,
    and sees to it that the process ends soon after its parent, whatever the loop is doing.
    """

    _loop: asyncio.AbstractEventLoop
    _tasks: TaskGroup

    def __init__(self, stream: SampleSource, plan: Plan, channel: Channel) -> None:
        self._stream = stream
        self._plan = plan
        self._channel = channel
        self._memory = SlotMemory(MemorySlots()) if can_hand_over() else None
        self._one_at_a_time = anyio.CapacityLimiter(1)
        self._everything = anyio.CancelScope()
        self._messages: asyncio.Queue[object] = asyncio.Queue()
        self._changed = anyio.Event()
        self._opened: OpenDatasets | BaseException | None = None
        """The datasets, or the error of opening them, which one pass gets; the next one tries again."""
        self._figures: PassFigures | None = None
        """The figures of the next pass; its consumer waits until the dataset is open."""
        self._wanted: Begin | None = None
        self._pass = anyio.CancelScope()
        self._ahead: deque[int] = deque()
        """Bytes of each batch that the consumer hasn't taken."""

    async def run(self) -> None:
        """Run until the parent says so, or ends."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, name="asyncfetch listener", daemon=True).start()
        with self._everything:
            async with anyio.create_task_group() as self._tasks, AsyncExitStack() as stack:
                self._tasks.start_soon(self._heed_all)
                await self._say(Signal.READY)
                await self._open(stack, self._plan.begun_at)
                while True:
                    while self._wanted is None:
                        await self._changed.wait()
                    begin, self._wanted = self._wanted, None
                    self._pass = anyio.CancelScope()  # what comes while the datasets are opened ends this pass, too
                    if self._opened is None:
                        await self._open(stack)
                    with self._pass:
                        await self._serve(begin)

    async def _open(self, stack: AsyncExitStack, begun_at: float | None = None) -> None:
        """Open the datasets, for the next pass."""
        self._figures = figures = self._stream.new_figures(begun_at=begun_at)
        try:
            self._opened = await stack.enter_async_context(self._stream.opener()())
        except BaseException as error:
            if was_cancelled():
                raise
            self._opened = error
            figures.fail(error)
        finally:
            figures.opened()

    async def _serve(self, begin: Begin) -> None:
        """One pass. An error is sent in its place, and ends the pass."""
        try:
            async with self._samples(begin) as given:
                samples = running_pass(given)
                batches = batches_of(self._plan.placement, self._plan.bucketing)
                while taken := await _next_batch(batches, samples):
                    await self._hand_over(begin.number, taken, samples)
                identity = identity_of(given.state_dict())
            await self._say(PassEnd(begin.number, identity, self._stream.quarantine.take_news()))
        except BaseException as error:
            if was_cancelled():
                raise
            await self._say(failure(begin.number, error))

    def _samples(self, begin: Begin) -> Samples:
        opened = self._opened
        if not isinstance(opened, OpenDatasets):
            assert opened is not None
            self._opened = None
            raise opened
        # The state's epoch, though nothing may be left of it: the other side has chosen.
        self._stream.go_on(begin.state, begin.state["epoch"])
        self._stream.known_identity = begin.known_identity
        stream = self._stream.over(opened)  # it stays open from pass to pass
        makes_rows = self._plan.placement.batch_size is not None and self._plan.bucketing is None
        memory = self._memory if makes_rows else None
        figures, self._figures = self._figures, None
        return stream.samples_of(self._plan.placement, memory=memory, figures=figures)

    async def _hand_over(self, number: int, taken: list[Any], samples: RunningPass) -> None:
        state = samples.plan.progress.state()
        with samples.figures.handing_over():
            batch, nbytes = await self._in_thread(partial(self._batch, taken))
        taken.clear()
        plan, ahead = self._plan, self._ahead
        # Where none is ahead, a batch of any size goes.
        while len(ahead) >= plan.max_ahead or (ahead and sum(ahead) + nbytes > plan.max_ahead_bytes):
            await self._changed.wait()
        self._ahead.append(nbytes)
        try:
            with samples.figures.handing_over():
                await self._in_thread(partial(self._send, number, batch, state))
        except BaseException:
            self._ahead.pop()  # cancelled before it began, or failed: the consumer will never take it
            raise

    def _batch(self, taken: list[Any]) -> tuple[HandedOver | PackedBatch, int]:
        """The batch of these samples, in a slot or measured for one, and its size."""
        is_single = self._plan.placement.batch_size is None
        if self._memory is not None and not is_single and (found := batch_of(taken)) is not None:
            batch = HandedOver.of(*found, self._memory)
            return batch, batch.slot.memory.nbytes
        samples = samples_of(taken)
        packed = PackedBatch(samples[0] if is_single else stacks(samples))
        return packed, packed.nbytes

    def _send(self, number: int, batch: HandedOver | PackedBatch, state: State) -> None:
        slots = None if self._memory is None else self._memory.slots
        given = batch.written(slots) if isinstance(batch, PackedBatch) else batch
        self._channel.send(FilledBatch(number, given, state, self._stream.quarantine.take_news()))

    async def _say(self, message: object) -> None:
        await self._in_thread(partial(self._channel.send, message))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """One at a time, in order; once it has begun a cancellation waits for its end."""
        return await run_sync(call, limiter=self._one_at_a_time)

    def _listen(self) -> None:
        """Receive messages, in a thread of its own."""
        message: object = None
        while message is not Signal.CLOSE:
            try:
                message = self._channel.receive()
            except EOFError:  # the parent is gone
                message = Signal.CLOSE
            call_on(self._loop, self._messages.put_nowait, message)
        threading.Event().wait(STOP_SECONDS)
        os._exit(0)  # something doesn't let go: a transform that computes, or a decoder

    async def _heed_all(self) -> None:
        while True:
            match message := await self._messages.get():
                case Begin() | Signal.STOP:
                    self._wanted = message if isinstance(message, Begin) else None
                    self._pass.cancel()
                case Signal.RECEIPT:
                    self._ahead.popleft()
                case Signal.CLOSE:
                    self._everything.cancel()
            self._changed.set()
            self._changed = anyio.Event()


async def _next_batch(batches: InOrder | Buckets, samples: RunningPass) -> list[Any]:
    """The samples of the next batch; none at the end. Those that wait come again where its state is resumed."""
    has_ended = False
    while (batch := batches.due(at_end=has_ended)) is None and not has_ended:
        try:
            await anext(samples)
            batches.add(samples.plan, samples.latest)
        except StopAsyncIteration:
            has_ended = True
    batches.note(samples.plan, samples.latest)
    return [] if batch is None else list(batch.values())

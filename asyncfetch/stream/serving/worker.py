"""The process that does the work: reads the stream and writes batches into shared memory."""

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
from asyncfetch.runtime.memory_pool import block_bytes
from asyncfetch.runtime.threads import call_on, run_sync
from asyncfetch.stream.batch import RowBatch, batch_of, samples_of
from asyncfetch.stream.samples import running_pass
from asyncfetch.stream.serving.memory import MemorySlot, MemorySlots, Packed, SlotMemory, collate
from asyncfetch.stream.serving.messages import Begin, Channel, Close, Ended, Filled, Ready, Stop, Taken, failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from anyio.abc import TaskGroup

    from asyncfetch.lerobot import Sample
    from asyncfetch.order.placement import Placement
    from asyncfetch.order.state import State
    from asyncfetch.stream.datasets import OpenDatasets
    from asyncfetch.stream.figures import FiguresPage
    from asyncfetch.stream.passes import Samples
    from asyncfetch.stream.samples import PassFigures, RunningPass
    from asyncfetch.stream.source import SampleSource

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of what is made of the samples, and for whom."""

    placement: Placement
    max_ahead: int
    max_ahead_bytes: int
    page: FiguresPage
    """The page on which the consumer looks for what is done here."""
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
    stream.page = plan.page
    channel = Channel(connection, parent.pid)
    if os.getppid() == parent.pid:  # else it is dead already, and the channel may watch a stranger
        anyio.run(_run, stream, plan, channel)
    if (tracer := running()) is not None:
        tracer.close()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(0)  # everything is closed; an interpreter with torch in it takes another second to take itself apart


async def _run(stream: SampleSource, plan: Plan, channel: Channel) -> None:
    await _ServingWorker(stream, plan, channel).run()


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
        self._slots = MemorySlots()
        self._memory = SlotMemory(self._slots)
        self._one_at_a_time = anyio.CapacityLimiter(1)
        self._everything = anyio.CancelScope()
        self._messages: asyncio.Queue[object] = asyncio.Queue()
        self._changed = anyio.Event()
        self._dataset: OpenDatasets | None = None
        self._failure: BaseException | None = None
        """The error that opening it ended with."""
        self._failure_is_told = False
        self._figures: PassFigures | None = None
        """The figures of the next pass, whose consumer waits until the dataset is open."""
        self._wanted: Begin | None = None
        self._number = 0
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
                self._tasks.start_soon(beat, self._plan.page.beat)
                await self._say(Ready())
                await self._open(stack, self._plan.begun_at)
                while True:
                    while self._wanted is None:
                        await self._changed.wait()
                    begin, self._wanted = self._wanted, None
                    self._number = begin.number
                    if self._failure_is_told:
                        await self._open(stack)
                    with anyio.CancelScope() as self._pass:
                        await self._serve(begin)

    async def _open(self, stack: AsyncExitStack, begun_at: float | None = None) -> None:
        """Open the dataset; an error is for those who ask for something that needs it."""
        self._failure_is_told = False
        self._figures = figures = self._stream.new_figures(begun_at=begun_at)
        try:
            self._dataset = await stack.enter_async_context(self._stream.opener()())
        except BaseException as error:
            if was_cancelled():
                raise
            self._failure = error
            figures.fail(error)
        finally:
            figures.opened()

    async def _serve(self, begin: Begin) -> None:
        """One pass. Whatever goes wrong is told at its place, and ends the pass."""
        try:
            async with self._samples(begin) as given:
                samples = running_pass(given)
                while taken := await self._take(samples):
                    await self._hand_over(begin.number, taken, samples)
                identity = identity_of(samples.state_dict())
            await self._say(Ended(begin.number, identity, self._stream.quarantine.take_news()))
        except BaseException as error:
            if was_cancelled():
                raise
            await self._say(failure(begin.number, error))

    def _opened(self) -> OpenDatasets:
        if self._dataset is None:
            assert self._failure is not None
            self._failure_is_told = True  # the next pass tries again
            raise self._failure
        return self._dataset

    def _samples(self, begin: Begin) -> Samples:
        # The state's epoch, though nothing may be left of it: the other side has chosen.
        self._stream.go_on(begin.state, begin.state["epoch"])
        self._stream.known_identity = begin.known_identity
        stream = self._stream.over(self._opened())  # it stays open from pass to pass
        memory = None if self._plan.placement.batch_size is None else self._memory
        figures, self._figures = self._figures, None
        return stream.samples_of(self._plan.placement, memory=memory, figures=figures)

    async def _take(self, samples: RunningPass) -> list[Sample]:
        """The samples of the next batch; none at the end."""
        size, drop_last = self._plan.placement.batch_size or 1, self._plan.placement.drop_last
        taken: list[Sample] = []
        number = 0
        async for sample in samples:
            batch, following = samples.batches
            if taken and batch != number:  # the others of this batch were left out
                samples.put_back()
            else:
                taken.append(sample)
                number = batch
                if batch == following and len(taken) < size:
                    continue
            if len(taken) == size or not drop_last:
                return taken
            taken = []
        return [] if drop_last else taken

    async def _hand_over(self, number: int, taken: list[Any], samples: RunningPass) -> None:
        state = samples.state_dict()
        found = None if self._plan.placement.batch_size is None else batch_of(taken)
        slot: MemorySlot | None = None if found is None else found[0].slot
        with samples.handing_over():
            packed = await self._in_thread(partial(self._pack, found or taken, slot, state))
        taken.clear()
        nbytes = packed.nbytes if slot is None else slot.nbytes
        while self._is_full(nbytes):
            await self._changed.wait()
        self._ahead.append(nbytes)
        try:
            with samples.handing_over():
                await self._in_thread(partial(self._write, number, packed, slot))
        except BaseException:
            self._ahead.pop()  # cancelled before it began, or failed: the consumer will never take it
            raise

    def _is_full(self, nbytes: int) -> bool:
        """Return whether a batch of so many bytes has to wait; where none is ahead, one of any size goes."""
        plan, ahead = self._plan, self._ahead
        return len(ahead) >= plan.max_ahead or (bool(ahead) and sum(ahead) + nbytes > plan.max_ahead_bytes)

    def _pack(self, taken: tuple[RowBatch, slice] | list[Any], slot: MemorySlot | None, state: State) -> Packed:
        if slot is not None:
            batch, rows = taken
            return Packed((batch.rows(rows), state), slot.memory)
        samples = samples_of(taken)
        return Packed((samples[0] if self._plan.placement.batch_size is None else collate(samples), state))

    def _write(self, number: int, batch: Packed, slot: MemorySlot | None) -> None:
        rest = b""
        if slot is not None:
            start, stop, rest = 0, slot.nbytes, batch.rest
        else:
            slot, dropped = self._slots.take(block_bytes(batch.nbytes))  # one that is a little longer will fit, too
            self._memory.dropped += dropped
            try:
                start, stop = batch.write(slot.memory)
            except BaseException:
                self._slots.give_back([slot.number])
                raise
        self._slots.hand_over(slot)
        dropped, self._memory.dropped = self._memory.dropped, []
        is_new = slot.descriptor >= 0
        news = self._stream.quarantine.take_news()
        filled = Filled(number, slot.number, slot.nbytes if is_new else 0, start, stop, dropped, rest, news)
        self._channel.send(filled, slot.descriptor if is_new else None)
        if is_new:
            slot.close_descriptor()

    async def _say(self, message: object) -> None:
        await self._in_thread(partial(self._channel.send, message))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """One at a time, in order; once it has begun a cancellation waits for its end."""
        return await run_sync(call, limiter=self._one_at_a_time)

    def _listen(self) -> None:
        """Listen, in a thread of its own."""
        message: object = None
        while not isinstance(message, Close):
            try:
                message, _ = self._channel.receive()
            except EOFError:  # the parent is gone
                message = Close()
            if isinstance(message, Taken):
                self._slots.give_back(message.freed)
                self._slots.forget(message.forgotten)
            call_on(self._loop, self._messages.put_nowait, message)
        threading.Event().wait(STOP_SECONDS)
        os._exit(0)  # something doesn't let go: a transform that computes, or a decoder

    async def _heed_all(self) -> None:
        while True:
            self._heed(await self._messages.get())

    def _heed(self, message: object) -> None:
        match message:
            case Begin():
                self._wanted = message
                self._pass.cancel()
            case Stop(number):
                if self._wanted is not None and self._wanted.number == number:
                    self._wanted = None
                elif self._number == number:
                    self._pass.cancel()
            case Taken():
                self._ahead.popleft()
            case Close():
                self._everything.cancel()
        self._changed.set()
        self._changed = anyio.Event()

"""The consumer's side: the worker's process, and an iterator over its batches."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker, util
from typing import TYPE_CHECKING, Any, Self

from asyncfetch.config.checks import whole_number
from asyncfetch.errors import AsyncFetchError, ClosedError, ConfigError, WorkerError
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import Waits
from asyncfetch.order.placement import Placement
from asyncfetch.order.state import has_given_all, identity_of
from asyncfetch.runtime.fork import ForkGuard
from asyncfetch.runtime.liveness import LOOK_SECONDS, Watch, how_it_ended
from asyncfetch.runtime.loop_thread import STOP_SECONDS
from asyncfetch.runtime.shared_memory import SharedBytes, give_back_slots, slot_reader
from asyncfetch.stream.batch import MIB, MemoryPlan
from asyncfetch.stream.buckets import Bucketing, check_bucket_by
from asyncfetch.stream.epoch_stream import EpochStream, source_for
from asyncfetch.stream.figures import PAGE_BYTES, FiguresPage, report_of
from asyncfetch.stream.ranks import found_placement
from asyncfetch.stream.samples import PassFigures
from asyncfetch.stream.serving.messages import Begin, Channel, FailedBatch, FilledBatch, PassEnd, Signal
from asyncfetch.stream.serving.worker import Plan, serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncfetch.formats import DatasetStatistics
    from asyncfetch.order.state import State
    from asyncfetch.stream.buckets import BucketBy
    from asyncfetch.stream.epochs import Turn
    from asyncfetch.stream.serving.messages import Answer
    from asyncfetch.stream.source import SampleSource

_LEFT_TO_US = {signal.SIGINT, signal.SIGTERM}
"""A terminal and a batch system send these to every process of a job. What they mean is the consumer's to decide."""


_GO_ON = "To go on where it stopped, call serve_samples anew and give it this one's state_dict()"


class WorkerProcess:
    """A running worker. ``end`` or the end of this process ends it.

    Started by multiprocessing, as a merge's are not: it imports the caller's main module, which may have the transform.

    Args:
        stream, plan: Its work.
        page: The page of the plan's memory.

    Raises:
        ConfigError: The stream can't be sent to another process, or this process may have no children.
        WorkerError: The system refuses another process.
    """

    def __init__(self, stream: SampleSource, plan: Plan, page: FiguresPage) -> None:
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                "this process is daemonic, as the workers of a DataLoader are, and may have no children: call "
                "serve_samples in the training process, without a DataLoader"
            )
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(stream, plan, theirs), name="asyncfetch worker")
        try:
            with _deaf_children():
                self._process.start()
        except BaseException as error:
            ours.close()
            if (mapped := _start_error(error)) is not None:
                raise mapped from error
            raise
        finally:
            theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._page = page
        self._silent_seconds = stream.config.fetch.timeouts.silent_process_seconds
        self._channel = Channel(ours, self.pid)
        self._reader = slot_reader()  # keeps slots mapped for a consumer that holds no batch when it takes the next
        self._is_ready = False

    def send(self, message: object) -> None:
        """Send it to the worker; where it has ended, ``receive`` says so."""
        self._channel.send(message)

    def receive(self, number: int) -> Answer:
        """Return the worker's next message about the pass of this number. Messages about others are thrown away.

        Raises:
            WorkerError: It has ended.
            ClosedError: This side has ended it.
        """
        while True:
            message = self._receive()
            if isinstance(message, FilledBatch):
                self._channel.send(Signal.RECEIPT)  # of other passes' too: else they would count as ahead for ever
            if message.number == number:
                return message

    def _receive(self) -> Answer:
        watch: Watch | None = None
        while not self._channel.has_news(LOOK_SECONDS):
            watch = watch or Watch(self.pid, self._silent_seconds, _GO_ON, time.monotonic())
            if why := watch.look(time.monotonic(), self._page.beat_at):
                self._process.kill()
                raise self._lost(WorkerError(f"the process of serve_samples (pid {self.pid}) {why}"))
        try:
            message = self._channel.receive()
        except (EOFError, WorkerError) as error:
            raise self._lost(self._why_it_ended(error)) from None
        if message is Signal.READY:
            self._is_ready = True
            return self._receive()
        answer: Answer = message
        return answer

    def end(self) -> None:
        """Tell it to end; it does within STOP_SECONDS. Idempotent, and doesn't wait."""
        self._channel.send(Signal.CLOSE)
        self._channel.close()

    def wait(self) -> None:
        """Wait after ``end`` until it has ended, which it is made to after STOP_SECONDS."""
        self._process.join(STOP_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        give_back_slots()

    def _lost(self, error: ClosedError | WorkerError) -> ClosedError | WorkerError:
        if isinstance(error, WorkerError):
            self._page.lose(error)
        return error

    def _why_it_ended(self, error: Exception) -> ClosedError | WorkerError:
        if self._channel.is_closed:
            return ClosedError("these batches were closed, or interrupted halfway through one: call serve_samples anew")
        self._process.join(STOP_SECONDS)
        code = self._process.exitcode
        if code is None and isinstance(error, WorkerError):  # it hasn't
            return error
        if code == -signal.SIGKILL:
            why = "Lower max_bytes, decoded_max_bytes or max_ahead then."
        elif not self._is_ready:
            why = (
                'What it printed says why. A program needs `if __name__ == "__main__":` around serve_samples, and a '
                "transform must be a function at the top of a module."
            )
        else:
            why = "What it printed may say why."
        return WorkerError(f"the process of serve_samples (pid {self.pid}) {how_it_ended(code)}. {why} {_GO_ON}")


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Start processes in here that never get a SIGINT or SIGTERM; this one gets them a little later."""
    resource_tracker.ensure_running()  # else it would be started within, and unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_US)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_error(error: BaseException) -> AsyncFetchError | None:
    """Return our error for one that starting a process raises; None where there is none."""
    if isinstance(error, OSError):
        return WorkerError(f"the system refuses another process: {error}")
    if isinstance(error, pickle.PicklingError | AttributeError | TypeError):
        return ConfigError(
            f"this stream can't be sent to another process: {error}. Its transform must be a function at the top of a "
            "module, or an object that pickles"
        )
    return None


def serve_samples(
    stream: EpochStream,
    batch_size: int | None = 32,
    *,
    drop_last: bool = False,
    bucket_by: BucketBy | None = None,
    max_ahead: int = 2,
    max_ahead_bytes: int = 256 * 1024 * 1024,
) -> ServedBatches:
    """The whole pipeline in one process beside this one.

    ``with serve_samples(stream) as batches: for batch in batches: ...`` goes through one epoch.

    For trainers with a busy Python: fetching, decoding and batching take none of this process's time, and no thread of
    it. Order, epochs and state are the stream's own.

    A batch is what ``asyncfetch.torch.dataset`` makes of the samples: tensors of one shape and dtype stacked along a
    new first dimension, other values in lists. Its large tensors are views of shared memory, so that nothing is copied
    here: taking 56 MiB took 2 ms where copying them took 52 (``bench.serving``, two cores).
    That memory is used again when the last of them is gone: one that is kept keeps its batch. Of a ninth batch that is
    held the consumer gets a copy, and one that is held while this process forks stays in the child's memory as long as
    that lives or holds it. Tensors of up to 64 KiB are copies, so that actions that are kept keep no pictures.

    The process is started by spawn, so a program that isn't a module of its own needs ``if __name__ == "__main__":``
    around this, and a transform must be a function at the top of a module. It ends with the ``with`` block, with this
    process whatever ends it, and within a second.

    Args:
        stream: What to read, of a URL; rank and world size are found here and hold there, and so do its bounds.
        batch_size: Samples in a batch; None hands over single samples.
        drop_last: Whether the last batch of an epoch is left out where it is smaller; with ``bucket_by`` all that are.
        bucket_by: What the samples of a batch have in common where sizes differ: "shape", "frames", or None, as in
            ``asyncfetch.torch.StreamDataset``. States are as exact.
        max_ahead: Batches made and not yet taken.
        max_ahead_bytes: Of them together; one may be larger. The default is that of decoded samples in
            ``StreamConfig``, which come on top.

    Raises:
        ConfigError: A number is out of range, or the stream can't follow into another process.
    """
    if batch_size is not None:
        batch_size = whole_number("batch_size", batch_size, least=1)
    max_ahead = whole_number("max_ahead", max_ahead, least=1)
    max_ahead_bytes = whole_number("max_ahead_bytes", max_ahead_bytes, least=1)
    source = source_for(stream, "serve_samples")
    check_bucket_by(bucket_by, batch_size, "serve_samples")
    rule = None
    if bucket_by is not None:
        assert batch_size is not None
        rule, drop_last = Bucketing(bucket_by, batch_size, drop_last, source.config.decoded_max_bytes), False
    in_batches = Placement(batch_size=batch_size, drop_last=drop_last)
    return ServedBatches(source, in_batches, rule, max_ahead, max_ahead_bytes)


class ServedBatches:
    """The result of ``serve_samples``: an iterable of batches, one epoch at a time, and the process that makes them.

    Iterating begins a pass, which counts as one over the stream does: a finished one is followed by the next epoch, and
    after an early ``break`` the same comes again, unless ``stream.set_epoch`` says otherwise. A new pass ends the one
    before. Errors are raised at their place, whatever their type; one that can't be pickled comes as a WorkerError, and
    so does the end of the process, after which only ``state_dict`` is of use.

    Belongs to one thread at a time. In a forked child it raises WrongLoop and leaves the parent's alone.
    """

    def __init__(
        self,
        stream: SampleSource,
        in_batches: Placement,
        bucketing: Bucketing | None,
        max_ahead: int,
        max_ahead_bytes: int,
    ) -> None:
        self._stream, self._in_batches, self._bucketing = stream, in_batches, bucketing
        self._max_ahead, self._max_ahead_bytes = max_ahead, max_ahead_bytes
        self._guard = ForkGuard("this iterator of batches")
        self._worker: WorkerProcess | None = None
        self._page: FiguresPage | None = None
        self._numbers = itertools.count(1)
        self._pass = 0
        self._latest: tuple[Turn, int, State] | None = None
        """The turn of the latest pass, how often an epoch was set when its last batch was taken, and the state then."""

    def __enter__(self) -> Self:
        """Start the process. That it can't begin its work is found when it is asked for some.

        Raises:
            ConfigError, WorkerError: As ``WorkerProcess`` does.
            ClosedError: They were entered before.
        """
        self._guard.check()
        if self._worker is not None:
            raise ClosedError("these batches were entered before: call serve_samples anew")
        rank = found_placement()
        placement = replace(self._in_batches, rank=rank.rank, world_size=rank.world_size, nodes=rank.nodes)
        memory = SharedBytes(PAGE_BYTES)
        self._page = FiguresPage(memory.memory)
        self._page.begin(0, 0, 1)
        figures = PassFigures(self._stream.config, self._page)  # the process goes on with what these count
        plan = Plan(placement, self._bucketing, self._max_ahead, self._max_ahead_bytes, memory, figures.begun_at)
        self._worker = WorkerProcess(self._stream, plan, self._page)
        # Called at exit too, before multiprocessing waits for all its children; not in a forked child.
        self._finalizer = util.Finalize(self, _let_go, (self._worker,), exitpriority=1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and wait for that, a second at most. Batches at hand stay valid. Idempotent."""
        if self._worker is not None and not self._guard.in_child:
            self._finalizer()
            self._worker.wait()

    def __iter__(self) -> Iterator[Any]:
        """One epoch. It begins when the first batch is asked for."""
        self._entered()
        # As of a stream: a pass that has given all it had is finished, also if the consumer never asked for more.
        state = self._given()
        if state is not None and has_given_all(state, self._in_batches.least_samples):
            assert self._latest is not None
            self._stream.end_epoch(self._latest[0])
        self._latest = None
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        worker = self._entered()
        turn = self._stream.take_turn()
        self._latest = None
        number = self._pass = next(self._numbers)
        worker.send(Begin(number, self._stream.start_of(turn.epoch), self._stream.known_identity))
        try:
            while isinstance(message := self._receive(worker, number), FilledBatch):
                self._stream.quarantine.extend(message.quarantined)
                turn.check()
                self._latest = (turn, self._stream.epochs.settings, message.state)
                self._stream.known_identity = identity_of(message.state)
                given = [message.batch]
                del message  # else this frame would hold the batch for as long as its consumer works on it
                yield given.pop()
        except GeneratorExit:
            if number == self._pass and not self._guard.in_child:
                worker.send(Signal.STOP)
            raise
        if isinstance(message, FailedBatch):
            message.raise_it()
        assert isinstance(message, PassEnd)
        self._stream.quarantine.extend(message.quarantined)
        self._latest = None
        self._stream.known_identity = message.identity
        self._stream.end_epoch(turn)

    def _receive(self, worker: WorkerProcess, number: int) -> Answer:
        self._guard.check()
        if number != self._pass:
            raise ClosedError("a later iteration over these batches has ended this one")
        return worker.receive(number)

    def _given(self) -> State | None:
        """Return the state of the next pass's epoch; None if nothing of it was given, or an epoch was set since."""
        if self._latest is None or self._latest[1] != self._stream.epochs.settings:
            return None
        return self._latest[2]

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._entered().pid

    def state_dict(self) -> State:
        """Return what the consumer was given of the epoch, not what was made ahead; see ``Stream.state_dict``.

        It needs no process: it may be taken when that has died, and when these batches are closed.
        """
        return self._given() or self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, of these batches or of the stream read in another way.

        It is loaded into the stream: see ``Stream.load_state_dict``. Where less than a batch was left and such are
        dropped, the next epoch's beginning comes.

        Raises:
            StateMismatch: It isn't a state; where it is one of another dataset or order, the next pass raises it.
        """
        self._stream.load(state, self._in_batches.least_samples)
        self._latest = None

    def statistics(self) -> DatasetStatistics | None:
        """Return those of the process's engine and caches, which it writes twice a second; None before a pass begins.

        It isn't asked: they may be taken in any thread, of a process that computes, and of one that has ended.
        """
        return None if self._page is None else self._page.published().all_statistics

    def report(self) -> Report:
        """Return why the trainer waits, and what to set, by what the process wrote last. It isn't asked."""
        page = self._page
        if page is None:
            return Report.of(Waits(), None, self._stream.config)
        published = page.published()
        report = report_of([page], self._stream.config)
        return replace(report, all_waits=published.all_waits, all_statistics=published.all_statistics)

    def memory_plan(self) -> MemoryPlan:
        """Return what this process and that one take at most; see ``Stream.memory_plan``. It may be asked before them.

        What is read is opened here for it, where that wasn't done yet: ``stream.close()`` closes that again.
        """
        size = self._in_batches.batch_size or 1
        most, most_bytes = self._max_ahead, self._max_ahead_bytes / MIB
        return MemoryPlan.of(
            self._stream.config,
            self._stream.sample_bytes(),
            size,
            num_workers=1,
            ahead=lambda batch: max(batch, min(most * batch, most_bytes)),
        )

    def _entered(self) -> WorkerProcess:
        self._guard.check()
        if self._worker is None:
            raise ClosedError("enter these batches first: `with serve_samples(stream) as batches`")
        return self._worker

    def __repr__(self) -> str:
        return f"<batches of {self._stream!r}>"


def _let_go(worker: WorkerProcess) -> None:
    worker.end()
    if util.is_exiting():
        worker.wait()

"""The consumer's side: starts the worker's process and iterates what it hands over."""

from __future__ import annotations

import itertools
from dataclasses import replace
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Self

from asyncfetch.errors import ClosedError, ConfigError
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import Waits
from asyncfetch.ranges import whole_number
from asyncfetch.runtime.fork import ForkGuard
from asyncfetch.stream.figures import FiguresPage
from asyncfetch.stream.placement import Placement
from asyncfetch.stream.serving.messages import Begin, Ended, FailedBatch, Filled, Stop
from asyncfetch.stream.serving.packing import unpack
from asyncfetch.stream.serving.process import WorkerProcess
from asyncfetch.stream.serving.worker import Plan
from asyncfetch.stream.source import SampleSource
from asyncfetch.stream.state import identity_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncfetch.lerobot import DatasetStatistics
    from asyncfetch.stream.epochs import Turn
    from asyncfetch.stream.serving.messages import Answer
    from asyncfetch.stream.state import State

__all__ = ["ServedBatches", "serve_samples"]


def serve_samples(
    stream: SampleSource[Any],
    batch_size: int | None = 32,
    *,
    drop_last: bool = False,
    max_ahead: int = 2,
    max_ahead_bytes: int = 256 * 1024 * 1024,
) -> ServedBatches:
    """The whole pipeline in one process beside this one.

    ``with serve_samples(stream) as batches: for batch in batches: ...`` goes through one epoch.

    For trainers whose Python is busy: fetching, decoding and batching take none of this process's time, and no thread
    of this process. Order, epochs and state are the stream's own.

    A batch is what ``asyncfetch.torch.dataset`` makes of the samples: tensors of one shape and dtype stacked along a
    new first dimension, other values in lists. Its tensors are views of shared memory, so that nothing is copied here:
    taking 56 MiB took 2 ms where copying them took 52 (``bench.serving``, two cores).
    That memory is used again when the last of them is gone: one that is kept keeps its batch. Of a ninth batch that is
    held the consumer gets a copy.

    The process is started by spawn, so a program that isn't a module of its own needs ``if __name__ == "__main__":``
    around this, and a transform must be a function at the top of a module. It ends with the ``with`` block, with this
    process whatever ends it, and within a second.

    Args:
        stream: What to read, of a URL; rank and world size are found here and hold there, and so do its bounds.
        batch_size: Samples in a batch; None hands over single samples.
        drop_last: Whether the last batch of an epoch is left out where it is smaller.
        max_ahead: Batches made and not yet taken.
        max_ahead_bytes: Of them together; one may be larger. The default is that of decoded samples in
            ``StreamConfig``, which come on top.

    Raises:
        ConfigError: A number is out of range, or the stream can't follow into another process.
    """
    return ServedBatches(
        stream, batch_size=batch_size, drop_last=drop_last, max_ahead=max_ahead, max_ahead_bytes=max_ahead_bytes
    )


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
        stream: SampleSource[Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        max_ahead: int,
        max_ahead_bytes: int,
    ) -> None:
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, least=1)
        self._max_ahead = whole_number("max_ahead", max_ahead, least=1)
        self._max_ahead_bytes = whole_number("max_ahead_bytes", max_ahead_bytes, least=1)
        if not isinstance(stream, SampleSource):
            raise ConfigError(
                f"serve_samples takes a Stream or Mixture, not {stream!r:.80}; of a StreamDataset, its .stream"
            )
        if stream.is_open:
            raise ConfigError(
                "serve_samples needs a stream of a URL, as an open dataset can't follow it into another process: make "
                "the stream of the dataset's URL"
            )
        self._stream = stream
        self._in_batches = Placement().in_batches(batch_size, drop_last=drop_last)
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
        rank = self._stream.placement()
        placement = replace(self._in_batches, rank=rank.rank, world_size=rank.world_size)
        with FiguresPage.made() as self._page:
            self._page.begin(0, 1)
            plan = Plan(placement, self._max_ahead, self._max_ahead_bytes, self._page)
            self._worker = WorkerProcess(self._stream, plan)
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
        # As of a stream: a pass is finished, too, where it has given all it had and nobody asked whether there is more.
        state = self._given()
        if state is not None and self._stream.is_over(state, self._in_batches.least_samples):
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
            while isinstance(message := self._receive(worker, number), Filled):
                self._stream.quarantine.extend(message.quarantined)
                yield self._open(worker, message, turn)
        except GeneratorExit:
            if not self._guard.in_child:
                worker.send(Stop(number))
            raise
        if isinstance(message, FailedBatch):
            message.raise_it()
        assert isinstance(message, Ended)
        self._stream.quarantine.extend(message.quarantined)
        self._latest = None
        self._stream.known_identity = message.identity
        self._stream.end_epoch(turn)

    def _receive(self, worker: WorkerProcess, number: int) -> Answer:
        self._guard.check()
        if number != self._pass:
            raise ClosedError("a later iteration over these batches has ended this one")
        return worker.receive(number)

    def _open(self, worker: WorkerProcess, message: Filled, turn: Turn) -> Any:  # noqa: ANN401
        batch, state = unpack(worker.take(message), message.start, message.stop, message.rest)
        turn.check()
        self._latest = (turn, self._stream.epochs.settings, state)
        self._stream.known_identity = identity_of(state)
        return batch

    def _given(self) -> State | None:
        """Return what was given of the epoch that the next pass takes; None if nothing was, or one was set since."""
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
        return None if self._page is None else self._page.statistics()

    def report(self) -> Report:
        """Return why the trainer waits, and what to set, by what the process wrote last. It isn't asked."""
        page = self._page
        if page is None:
            return Report.of(Waits(), None, self._stream.config)
        return Report.of(page.waits(), page.statistics(), self._stream.config, num_workers=page.num_workers)

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

"""The worker's process as the consumer sees it."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections import deque
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from asyncfetch.errors import AsyncFetchError, ClosedError, ConfigError, WorkerError
from asyncfetch.runtime.loop_thread import STOP_SECONDS
from asyncfetch.stream.serving.memory import MemorySlot, Returned, lease
from asyncfetch.stream.serving.messages import Channel, Close, Filled, Ready, Taken
from asyncfetch.stream.serving.worker import Plan, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.stream.serving.messages import Answer
    from asyncfetch.stream.source import SampleSource

__all__ = ["WorkerProcess"]

MAX_VIEWS = 8
"""Batches that the consumer may hold as views of shared memory; of those beyond it gets copies. That bounds the memory
and the descriptors of one that keeps what it gets, and leaves room for one that queues a few batches for its device."""

_LEFT_TO_US = {signal.SIGINT, signal.SIGTERM}
"""A terminal and a batch system send these to every process of a job. What they mean is the consumer's to decide."""


class WorkerProcess:
    """A running worker. ``end`` or the end of this process ends it.

    Args:
        stream, plan: Its work.

    Raises:
        ConfigError: The stream can't be sent to another process, or this process may have no children.
        WorkerError: The system refuses another process.
    """

    def __init__(self, stream: SampleSource[Any], plan: Plan) -> None:
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
        self._channel = Channel(ours, self.pid)
        self._is_ready = False
        self._slots: dict[int, MemorySlot] = {}
        self._returned: deque[Returned] = deque()
        self._held = 0

    def send(self, message: object) -> None:
        """Send it to the worker; where it has ended, ``receive`` says so."""
        self._channel.send(message)

    def receive(self, number: int) -> Answer:
        """Return what the worker says next about the pass of this number. What is about others is thrown away.

        Raises:
            WorkerError: It has ended.
            ClosedError: This side has ended it.
        """
        while (message := self._receive()).number != number:
            if isinstance(message, Filled):
                self.take(message)  # else it would count as ahead for ever
        return message

    def _receive(self) -> Answer:
        try:
            message, descriptor = self._channel.receive()
        except EOFError:
            raise self._why_it_ended() from None
        if isinstance(message, Ready):
            self._is_ready = True
            return self._receive()
        if isinstance(message, Filled):
            if descriptor is not None:
                slot = self._slots[message.slot] = MemorySlot(message.slot, descriptor, message.new_bytes)
                slot.close_descriptor()
            for number in message.dropped:
                self._slots.pop(number, None)  # it may never have been sent
        answer: Answer = message
        return answer

    def take(self, message: Filled) -> NDArray[np.uint8]:
        """The memory of a batch, which the worker uses again when the last view of it is gone."""
        memory = lease(self._slots[message.slot], self._returned)
        self._held += 1
        if self._held > MAX_VIEWS:
            memory = memory[: message.stop].copy()
        freed = [self._returned.popleft().number for _ in range(len(self._returned))]
        self._held -= len(freed)
        self._channel.send(Taken(freed))
        return memory

    def end(self) -> None:
        """Tell it to end; it does within STOP_SECONDS. Idempotent, and doesn't wait."""
        self._channel.send(Close())
        self._channel.close()

    def wait(self) -> None:
        """Wait after ``end`` until it has ended, which it is made to after STOP_SECONDS."""
        self._process.join(STOP_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _why_it_ended(self) -> ClosedError | WorkerError:
        if self._channel.is_closed:
            return ClosedError("these batches were closed, or interrupted halfway through one: call serve_samples anew")
        self._process.join(STOP_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            why = "If nobody did that, the system was out of memory: lower max_bytes, decoded_max_bytes or max_ahead."
        elif not self._is_ready:
            why = (
                'What it printed says why. A program needs `if __name__ == "__main__":` around serve_samples, and a '
                "transform must be a function at the top of a module."
            )
        else:
            why = "What it printed may say why."
        return WorkerError(
            f"the process of serve_samples (pid {self.pid}) {how}. {why} To go on where it stopped, call serve_samples "
            "anew and give it this one's state_dict()"
        )


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started in here never get a SIGINT or SIGTERM; this one gets them a little later."""
    resource_tracker.ensure_running()  # else it would be started within, and unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_US)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_error(error: BaseException) -> AsyncFetchError | None:
    """Ours for what starting a process raises; None where there is none."""
    if isinstance(error, OSError):
        return WorkerError(f"the system refuses another process: {error}")
    if isinstance(error, pickle.PicklingError | AttributeError | TypeError):
        return ConfigError(
            f"this stream can't be sent to another process: {error}. Its transform must be a function at the top of a "
            "module, or an object that pickles"
        )
    return None

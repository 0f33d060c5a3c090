"""The places where pieces of a merge run: in this process, in others, or on a cluster.

On this machine they run on this loop with threads, or in processes when those pay. Pieces compute little: the pictures
of a video are copied without the GIL, a header of 38,400 frames takes 43 ms, an episode's rows and their summary 2 ms.
For most merges a process, which takes 1.1 s of CPU for its imports, costs more than it saves, so ``processes_pay``
decides by the plan.

A process is started by ``subprocess``, not by multiprocessing, which would run the caller's main module again in each:
a merge needs no ``if __name__ == "__main__"``. It runs one piece at a time. Requests go to its standard input and
answers come from its standard output, as pickles with their length in front; its prints go to standard error. When its
standard input closes, because the merge has ended or was killed, it ends at once.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncfetch.config.secrets import among_own_processes
from asyncfetch.errors import AsyncFetchError, WorkerError
from asyncfetch.fetch import Fetcher
from asyncfetch.runtime.concurrently import ungrouped
from asyncfetch.runtime.liveness import LOOK_SECONDS, Watch, beat, how_it_ended
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import Process

    from asyncfetch.config import FetchConfig

Piece = Any
"""``async def piece(setup: WorkerSetup, *arguments)``, at the top of a module. Arguments pickle."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The surroundings of a piece in its process."""

    fetcher: Fetcher
    """Reads the sources, and writes to a destination that isn't local."""
    wrote: Callable[[str, int], object]
    """Called with the place of a file that is being written, and its bytes so far."""


class WorkerPool(Protocol):
    """Open workers."""

    workers: int
    """Pieces that run at a time."""
    fetcher: Fetcher
    """The fetcher of this process, for the work around the pieces."""

    def expect(self, seconds: float) -> None:
        """Expect about so many seconds of one processor's work now; 0 for work that must stay in this process."""
        ...

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        """The piece's value."""
        ...


class Executor(Protocol):
    """The place where a merge's pieces run."""

    def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AbstractAsyncContextManager[WorkerPool]:
        """Open the workers for one merge. They are gone when the block is left.

        Args:
            fetch: Configuration for reading the sources.
            workers: Number of workers; None for the number of processors.
            wrote: ``WorkerSetup.wrote``, called as far as the executor hears of the pieces' writes.
        """
        ...


START_SECONDS = 1.5
"""Seconds of a processor for the imports of one process."""


def processes_pay(work_seconds: float, workers: int) -> bool:
    """Return whether work ends earlier with so many processes than with threads of this one. Pure.

    Threads count as one processor, since most of the work holds the GIL. The gain must be twice the time that a process
    takes to start, since it is an estimate, and processes take memory, too.
    """
    return workers > 1 and work_seconds - work_seconds / workers > 2 * START_SECONDS


class OnThisMachine:
    """An Executor that starts a process for each worker if there is enough work.

    Args:
        pays: Decides, from seconds of work and a number of workers, whether processes pay.

    Raises:
        WorkerError: A process died, or can't be started.
    """

    def __init__(self, pays: Callable[[float, int], bool] = processes_pay) -> None:
        self._pays = pays

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_LocalPool]:
        """Open the workers; leaving the block ends the processes at once."""
        async with Fetcher(fetch) as fetcher, AsyncExitStack() as processes:
            workers = workers or os.cpu_count() or 1
            if fetch.max_bytes_per_second is not None:  # a bound of each process
                fetch = replace(fetch, max_bytes_per_second=max(1, fetch.max_bytes_per_second // workers))
            yield _LocalPool(workers, fetcher, wrote, fetch, self._pays, processes)


class InProcess(OnThisMachine):
    """An Executor without processes."""

    def __init__(self) -> None:
        super().__init__(pays=lambda _seconds, _workers: False)


@dataclass
class _LocalPool:
    workers: int
    fetcher: Fetcher
    wrote: Callable[[str, int], object]
    fetch: FetchConfig
    """Each process's."""
    pays: Callable[[float, int], bool]
    processes: AsyncExitStack
    idle: list[PieceProcess] = field(default_factory=list)
    in_processes: bool = False

    def expect(self, seconds: float) -> None:
        self.in_processes = seconds > 0 and self.pays(seconds, self.workers)

    async def run(self, piece: Piece, *arguments: Any) -> Any:  # noqa: ANN401
        if not self.in_processes:
            return await piece(WorkerSetup(self.fetcher, self.wrote), *arguments)
        if self.idle:
            worker = self.idle.pop()
        else:
            worker = await PieceProcess.start(self.fetch)
            self.processes.push_async_callback(worker.end)
        try:
            value = await worker.run(piece, arguments, self.wrote)
        except BaseException:
            await worker.end()
            raise
        self.idle.append(worker)
        return value


LENGTH_BYTES = 8
WROTE, DONE, FAILED, BEAT = "wrote", "done", "failed", "beat"
"""Kinds of answers: arguments of ``WorkerSetup.wrote``, the piece's value, its error, or a sign of life meanwhile."""


@dataclass(slots=True)
class PieceProcess:
    """The parent's side of the process."""

    process: Process
    answers: BufferedByteReceiveStream
    silent_seconds: float
    """``TimeoutConfig.silent_process_seconds``."""
    beats: int | None = None
    """Signs of life so far; None before the first."""

    @classmethod
    async def start(cls, fetch: FetchConfig) -> Self:
        """Start it; it reads with this configuration, secrets included. WorkerError if the system refuses."""
        path = os.pathsep.join(filter(None, sys.path))
        try:
            process = await anyio.open_process(
                [sys.executable, "-c", "from asyncfetch.merge.executor import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # this process decides what Ctrl-C means
            )
        except OSError as error:
            raise WorkerError(f"the system refuses another process for the merge: {error}") from error
        assert process.stdout is not None
        worker = cls(process, BufferedByteReceiveStream(process.stdout), fetch.timeouts.silent_process_seconds)
        try:
            await worker._send(fetch)
        except BaseException:
            await worker.end()
            raise
        return worker

    async def run(self, piece: Piece, arguments: Sequence[Any], wrote: Callable[[str, int], object]) -> Any:  # noqa: ANN401
        """The piece's value, or its error; WorkerError if the process has died, is stopped, or hangs.

        After an error or a cancellation, ``end`` the process.
        """
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                await self._send((piece, arguments))
                value = await self._answer(wrote)
                tasks.cancel_scope.cancel()
        return value

    async def end(self) -> None:
        """Kill it. Nothing of it runs when this returns."""
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()

    async def _watch(self) -> None:
        """Raise WorkerError when the process has shown no sign of life for too long."""
        watch = Watch(self.process.pid, self.silent_seconds, "The same call goes on where it stopped", time.monotonic())
        while True:
            await anyio.sleep(LOOK_SECONDS)
            if reason := await run_sync(watch.look, time.monotonic(), self.beats):
                raise WorkerError(f"a process of the merge (pid {self.process.pid}) {reason}")

    async def _answer(self, wrote: Callable[[str, int], object]) -> Any:  # noqa: ANN401
        while True:
            try:
                length = int.from_bytes(await self.answers.receive_exactly(LENGTH_BYTES), "big")
                data = await self.answers.receive_exactly(length)
            except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
                raise await self._why_it_ended() from None
            kind, value = await run_sync(pickle.loads, data)
            if kind == DONE:
                return value
            if kind == FAILED:
                raise value
            if kind == WROTE:
                wrote(*value)
            else:
                self.beats = (self.beats or 0) + 1

    async def _send(self, request: object) -> None:
        assert self.process.stdin is not None
        packed = await run_sync(pack, request)
        try:
            await self.process.stdin.send(packed)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            raise await self._why_it_ended() from None

    async def _why_it_ended(self) -> WorkerError:
        how = how_it_ended(await self.process.wait())
        return WorkerError(
            f"a process of the merge (pid {self.process.pid}) {how}. What it printed may say why. The same call goes "
            "on where it stopped"
        )


def pack(message: object) -> bytes:
    """A pickle with its length in front, secrets included."""
    with among_own_processes():
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def main() -> None:
    """The process's main function."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    anyio.run(_serve, _next_request(requests), requests, answers)


async def _serve(fetch: FetchConfig, requests: IO[bytes], answers: IO[bytes]) -> None:
    outbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    threading.Thread(target=_send_all, args=(outbox, answers), name="asyncfetch answers", daemon=True).start()
    async with Fetcher(fetch) as fetcher, anyio.create_task_group() as tasks:
        setup = WorkerSetup(fetcher, lambda url, nbytes: outbox.put((WROTE, (url, nbytes))))
        while True:  # even while a piece runs, to notice the end of the input
            piece, arguments = await run_sync(_next_request, requests)
            tasks.start_soon(_run, setup, piece, arguments, outbox)


async def _run(
    setup: WorkerSetup, piece: Piece, arguments: Sequence[Any], outbox: SimpleQueue[tuple[str, Any]]
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat, lambda turns: outbox.put((BEAT, turns)))
        try:
            outbox.put((DONE, await piece(setup, *arguments)))
        except Exception as error:  # noqa: BLE001 - it is raised in the parent
            if not isinstance(error, AsyncFetchError):
                error.add_note(traceback.format_exc())
            outbox.put((FAILED, error))
        tasks.cancel_scope.cancel()


def _next_request(requests: IO[bytes]) -> Any:  # noqa: ANN401
    length = requests.read(LENGTH_BYTES)
    data = requests.read(int.from_bytes(length, "big"))
    if not data:
        os._exit(0)  # an incomplete file may stay; it isn't noted as finished
    return pickle.loads(data)


def _send_all(outbox: SimpleQueue[tuple[str, Any]], answers: IO[bytes]) -> None:
    """Send all answers in order, in a thread of its own."""
    while True:
        kind, value = outbox.get()
        try:
            packed = pack((kind, value))
            if kind == FAILED:
                pickle.loads(packed[LENGTH_BYTES:])
        except Exception as error:  # noqa: BLE001 - a foreign error that doesn't pickle, or doesn't come back
            packed = pack((FAILED, WorkerError(f"a piece of the merge gave what doesn't pickle: {value!r}, {error!r}")))
        try:
            answers.write(packed)
            answers.flush()
        except OSError:
            os._exit(0)

"""A merge's pieces on this machine: coroutines on this loop, what blocks in threads, or in processes where they pay.

Little is computed for a piece: the pictures of a video are copied without the interpreter, a header of 38,400 frames
takes 43 ms, an episode's rows and their summary 2 ms. So for most merges to start a process, 1.1 s of CPU for imports,
costs more than it brings, and ``processes_pay`` decides by what the plan says. The reductions stay here, where their
values are wanted.

Processes are started by ``subprocess``, not by multiprocessing, which would run the caller's main module once more in
each: a merge needs no ``if __name__ == "__main__"``. Each does one piece at a time. It is asked through its standard
input and answers through its standard output, by pickles with their length in front. What anybody prints goes to
standard error. When nobody can ask any more, because the merge has ended or was killed, it ends at once, in the midst
of whatever it does.
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
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Self

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncfetch.config.secrets import among_own_processes
from asyncfetch.errors import AsyncFetchError, WorkerError
from asyncfetch.fetch import Fetcher
from asyncfetch.merge.scheduler import WorkerSetup
from asyncfetch.merge.summaries import add
from asyncfetch.runtime.concurrently import ungrouped
from asyncfetch.runtime.liveness import LONGER_SILENCE, LOOK_SECONDS, Silence, beat, how_it_ended, how_silent, vitals
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from anyio.abc import Process

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.scheduler import TaskPiece

LENGTH_BYTES = 8
WROTE, DONE, FAILED, BEAT = "wrote", "done", "failed", "beat"
"""Kinds of answers: arguments of ``WorkerSetup.wrote``, the piece's value, its error, or a sign of life meanwhile."""


def pack(message: object) -> bytes:
    """A pickle with its length in front, secrets included."""
    with among_own_processes():
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def main() -> None:
    """The process's main function."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    anyio.run(_serve, _receive(requests), requests, answers)


async def _serve(fetch: FetchConfig, requests: IO[bytes], answers: IO[bytes]) -> None:
    outbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    threading.Thread(target=_send_all, args=(outbox, answers), name="asyncfetch answers", daemon=True).start()
    async with Fetcher(fetch) as fetcher, anyio.create_task_group() as tasks:
        place = WorkerSetup(fetcher, lambda url, nbytes: outbox.put((WROTE, (url, nbytes))))
        while True:  # also while a piece is done, so as to see the end
            piece, arguments = await run_sync(_receive, requests)
            tasks.start_soon(_perform, place, piece, arguments, outbox)


async def _perform(
    place: WorkerSetup, piece: TaskPiece, arguments: Sequence[Any], outbox: SimpleQueue[tuple[str, Any]]
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat, lambda turns: outbox.put((BEAT, turns)))
        try:
            outbox.put((DONE, await piece(place, *arguments)))
        except Exception as error:  # noqa: BLE001 - it is raised where the piece was asked for
            if not isinstance(error, AsyncFetchError):
                error.add_note(traceback.format_exc())
            outbox.put((FAILED, error))
        tasks.cancel_scope.cancel()


def _receive(requests: IO[bytes]) -> Any:  # noqa: ANN401
    length = requests.read(LENGTH_BYTES)
    data = requests.read(int.from_bytes(length, "big"))
    if not data:
        os._exit(0)  # half a file stays, which isn't noted to be whole
    return pickle.loads(data)


def _send_all(outbox: SimpleQueue[tuple[str, Any]], answers: IO[bytes]) -> None:
    """Send all answers in order, in a thread of its own."""
    while True:
        kind, value = outbox.get()
        try:
            packed = pack((kind, value))
        except Exception as error:  # noqa: BLE001 - somebody's error that doesn't pickle
            packed = pack((FAILED, WorkerError(f"a piece of the merge gave what doesn't pickle: {value!r}, {error!r}")))
        try:
            answers.write(packed)
            answers.flush()
        except OSError:
            os._exit(0)


START_SECONDS = 1.5
"""Seconds of a processor for the imports of one process."""


def processes_pay(work_seconds: float, workers: int) -> bool:
    """Return whether work is done earlier by so many processes than by threads of this one. Pure.

    Threads are taken to have one processor among them, since most of the work holds the interpreter's lock. The gain
    must be twice what is known: an estimate is one, and processes take memory, too.
    """
    return workers > 1 and work_seconds - work_seconds / workers > 2 * START_SECONDS


@dataclass(slots=True)
class Child:
    """A process that does pieces."""

    process: Process
    answers: BufferedByteReceiveStream
    silent_seconds: float
    """See ``TimeoutConfig.silent_process_seconds``."""
    beats: int | None = None
    """Signs of life so far; None before the first."""

    @classmethod
    async def start(cls, fetch: FetchConfig) -> Self:
        """Start it; it reads with this configuration, secrets included.

        Raises:
            WorkerError: The system refuses another process.
        """
        path = os.pathsep.join(filter(None, sys.path))
        try:
            process = await anyio.open_process(
                [sys.executable, "-c", "from asyncfetch.merge.local_executor import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # what Ctrl-C means is this process's to decide
            )
        except OSError as error:
            raise WorkerError(f"the system refuses another process for the merge: {error}") from error
        assert process.stdout is not None
        child = cls(process, BufferedByteReceiveStream(process.stdout), fetch.timeouts.silent_process_seconds)
        try:
            await child._send(pack(fetch))
        except BaseException:
            await child.end()
            raise
        return child

    async def do(self, piece: TaskPiece, arguments: Sequence[Any], wrote: Callable[[str, int], object]) -> Any:  # noqa: ANN401
        """The piece's value, or its error. When it fails or is cancelled the child is of no use any more.

        Raises:
            WorkerError: The process has died, is stopped, or hangs.
        """
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                await self._send(await run_sync(pack, (piece, arguments)))
                value = await self._answer(wrote)
                tasks.cancel_scope.cancel()
        return value

    async def _answer(self, wrote: Callable[[str, int], object]) -> Any:  # noqa: ANN401
        while True:
            kind, value = await self._receive()
            if kind == WROTE:
                wrote(*value)
            elif kind == DONE:
                return value
            elif kind == FAILED:
                raise value
            else:
                self.beats = (self.beats or 0) + 1

    async def _watch(self) -> None:
        """Raise WorkerError when the process has shown no sign of life for too long."""
        pid, silence = self.process.pid, Silence(time.monotonic())
        while True:
            await anyio.sleep(LOOK_SECONDS)
            seen = await run_sync(vitals, pid)
            seconds = silence.look(time.monotonic(), self.beats, seen)
            if seconds > self.silent_seconds:
                raise WorkerError(
                    f"a process of the merge (pid {pid}) {how_silent(seconds, seen)}, so it was killed. The same call "
                    f"goes on where it stopped. {LONGER_SILENCE}"
                )

    async def end(self) -> None:
        """Kill it. Nothing of it runs when this returns."""
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()

    async def _send(self, packed: bytes) -> None:
        assert self.process.stdin is not None
        try:
            await self.process.stdin.send(packed)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            raise await self._why_it_ended() from None

    async def _receive(self) -> tuple[str, Any]:
        try:
            length = int.from_bytes(await self.answers.receive_exactly(LENGTH_BYTES), "big")
            data = await self.answers.receive_exactly(length)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            raise await self._why_it_ended() from None
        message: tuple[str, Any] = await run_sync(partial(pickle.loads, data))
        return message

    async def _why_it_ended(self) -> WorkerError:
        how = how_it_ended(await self.process.wait())
        return WorkerError(
            f"a process of the merge (pid {self.process.pid}) {how}. What it printed may say why. The same call goes "
            "on where it stopped"
        )


class InProcess:
    """An Executor without processes."""

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_Loop]:
        """One fetcher for all pieces."""
        async with Fetcher(fetch) as fetcher:
            yield _Loop(WorkerSetup(fetcher, wrote), workers or os.cpu_count() or 1)


class _Loop:
    def __init__(self, place: WorkerSetup, workers: int) -> None:
        self.workers = workers
        self.fetcher = place.fetcher
        self._place = place

    def expect(self, seconds: float) -> None:
        """It is all done here."""

    async def run(self, piece: TaskPiece, *arguments: Any) -> Any:  # noqa: ANN401
        return await piece(self._place, *arguments)

    async def get(self, value: Any) -> Any:  # noqa: ANN401
        return value


class OnThisMachine:
    """An Executor that starts a process for each worker where there is enough to do.

    Args:
        pays: Whether processes do so many seconds of work earlier, by so many workers.

    Raises:
        WorkerError: A process died, or can't be started.
    """

    def __init__(self, pays: Callable[[float, int], bool] = processes_pay) -> None:
        self._pays = pays

    @asynccontextmanager
    async def open(
        self, fetch: FetchConfig, workers: int | None, wrote: Callable[[str, int], object]
    ) -> AsyncIterator[_Processes]:
        """The processes are gone when the block is left, whatever they were doing."""
        async with Fetcher(fetch) as fetcher, AsyncExitStack() as children:
            place = WorkerSetup(fetcher, wrote)
            yield _Processes(place, workers or os.cpu_count() or 1, fetch, children, self._pays)


class _Processes(_Loop):
    def __init__(
        self,
        place: WorkerSetup,
        workers: int,
        fetch: FetchConfig,
        children: AsyncExitStack,
        pays: Callable[[float, int], bool],
    ) -> None:
        super().__init__(place, workers)
        if fetch.max_bytes_per_second is not None:  # which is each process's
            fetch = replace(fetch, max_bytes_per_second=max(1, fetch.max_bytes_per_second // workers))
        self._fetch = fetch
        self._children = children
        self._idle: list[Child] = []
        self._pay = pays
        self._is_worth_it = False

    def expect(self, seconds: float) -> None:
        self._is_worth_it = seconds > 0 and self._pay(seconds, self.workers)

    async def run(self, piece: TaskPiece, *arguments: Any) -> Any:  # noqa: ANN401
        if not self._is_worth_it or piece is add:
            return await super().run(piece, *arguments)
        if self._idle:
            child = self._idle.pop()
        else:
            child = await Child.start(self._fetch)
            self._children.push_async_callback(child.end)
        try:
            value = await child.do(piece, arguments, self._place.wrote)
        except BaseException:
            await child.end()
            raise
        self._idle.append(child)
        return value

"""A process that does a merge's pieces; ``children`` starts it and asks it.

It is asked through its standard input and answers through its standard output, by pickles with their length in front.
What anybody prints goes to standard error. When nobody can ask any more, because the merge has ended or was killed, it
ends at once, in the midst of whatever it does.
"""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncfetch.config.secrets import among_own_processes
from asyncfetch.errors import AsyncFetchError, WorkerError
from asyncfetch.fetch import Fetcher
from asyncfetch.merge.kernel import Workplace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.config import FetchConfig
    from asyncfetch.merge.kernel import Piece

__all__ = ["DONE", "FAILED", "LENGTH_BYTES", "WROTE", "main", "pack"]

LENGTH_BYTES = 8
WROTE, DONE, FAILED = "wrote", "done", "failed"
"""What an answer is: arguments of ``Workplace.wrote``, the piece's value, or its error."""


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
        place = Workplace(fetcher, lambda url, nbytes: outbox.put((WROTE, (url, nbytes))))
        while True:  # also while a piece is done, so as to see the end
            piece, arguments = await anyio.to_thread.run_sync(_receive, requests)
            tasks.start_soon(_perform, place, piece, arguments, outbox)


async def _perform(
    place: Workplace, piece: Piece, arguments: Sequence[Any], outbox: SimpleQueue[tuple[str, Any]]
) -> None:
    try:
        outbox.put((DONE, await piece(place, *arguments)))
    except Exception as error:  # noqa: BLE001 - it is raised where the piece was asked for
        if not isinstance(error, AsyncFetchError):
            error.add_note(traceback.format_exc())
        outbox.put((FAILED, error))


def _receive(requests: IO[bytes]) -> Any:  # noqa: ANN401
    length = requests.read(LENGTH_BYTES)
    data = requests.read(int.from_bytes(length, "big"))
    if not data:
        os._exit(0)  # half a file stays, which isn't noted to be whole
    return pickle.loads(data)


def _send_all(outbox: SimpleQueue[tuple[str, Any]], answers: IO[bytes]) -> None:
    """In a thread of its own, in order."""
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

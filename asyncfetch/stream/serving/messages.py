"""Messages between the consumer's process and the worker's. For batches among them see ``stream/handing_over.py``."""

from __future__ import annotations

import os
import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn

from asyncfetch.errors import AsyncFetchError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from asyncfetch.order.state import State
    from asyncfetch.stream.quarantine import Quarantined


class Signal(Enum):
    """A message without further content."""

    STOP = auto()
    """To the worker: the consumer wants no more of the latest pass."""
    RECEIPT = auto()
    """To the worker: the consumer has one batch more."""
    CLOSE = auto()
    """To the worker: end."""
    READY = auto()
    """The first thing that the worker says: it has got the stream."""


@dataclass(frozen=True, slots=True)
class Begin:
    """To the worker: start a pass, in place of the one before."""

    number: int
    """Number of the pass, for what is said about it."""
    state: State
    """The state to go on from: an epoch, and how far into it."""
    known_identity: Mapping[str, Any]
    """The identity that the consumer's source knows."""


@dataclass(frozen=True, slots=True)
class FilledBatch:
    """A batch."""

    number: int
    """Number of the pass."""
    batch: Any
    state: State
    """The state behind it."""
    quarantined: tuple[Quarantined, ...] = ()
    """Bad data among the samples up to it, since the message before."""


@dataclass(frozen=True, slots=True)
class PassEnd:
    """No more batches in this pass."""

    number: int
    identity: Mapping[str, Any]
    """Identity of what it has read: see Progress."""
    quarantined: tuple[Quarantined, ...] = ()


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """An error, in its place in the order of a pass."""

    number: int
    pickled: bytes
    """The exception."""

    def raise_it(self) -> NoReturn:
        """Raise it in the other process."""
        error = pickle.loads(self.pickled)
        try:
            raise error
        finally:
            del error  # else error -> traceback -> this frame -> error is a cycle


Answer = FilledBatch | PassEnd | FailedBatch


def failure(number: int, error: BaseException) -> FailedBatch:
    """The error as it can be raised in another process: itself, with a note of where it was raised.

    One that can't be pickled, there and back, becomes a WorkerError with its type, message and traceback.
    """
    where = "".join(traceback.format_exception(error)).rstrip()
    if not isinstance(error, AsyncFetchError):  # ours say what happened
        error.add_note(f"raised in the process of serve_samples:\n{where}")
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001  whatever a stranger's exception does; what it says goes on
        pickled = pickle.dumps(WorkerError(f"{type(error).__name__} in the process of serve_samples:\n{where}"))
    return FailedBatch(number, pickled)


class Channel:
    """Messages, and the other process's end, noticed at once.

    That end is seen in two ways. The connection ends, unless a process that was forked from the other one has a copy of
    it. And the other's pidfd becomes readable, which nothing can delay; it is Linux's. PR_SET_PDEATHSIG would do
    neither: it kills a child when the thread ends that started it.

    Two threads may send and receive, one each.

    Args:
        connection: Becomes the channel's.
        peer: Id of the other process, a child or the parent of this one.
    """

    def __init__(self, connection: Connection, peer: int) -> None:
        self._connection = connection
        self._peer: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # a kernel or a sandbox without it, or it has ended
                self._peer = os.pidfd_open(peer)

    def send(self, message: object) -> None:
        """Send a message. Does nothing where the other process has ended, which ``receive`` notices."""
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):  # the other process has ended
            pass
        except OSError:
            if not self.is_closed:
                raise

    def has_news(self, timeout_seconds: float) -> bool:
        """Wait so long at most for what ``receive`` then has at once: a message, or the other process's end."""
        return self.is_closed or bool(wait(self._ends(), timeout_seconds))

    def receive(self) -> Any:  # noqa: ANN401
        """Wait for the next message.

        Interrupted while it waits it loses nothing; in the middle of a message it closes the channel.

        Raises:
            EOFError: The other process has ended, after all it said, or this channel is closed.
            WorkerError: The same, and the message was a batch in its memory.
        """
        if self.is_closed or self._connection not in wait(self._ends()):
            raise EOFError
        try:
            return self._connection.recv()
        except OSError as error:  # ended in the middle of a message
            raise EOFError from error
        except (EOFError, WorkerError):
            raise
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """True if it is closed at this end."""
        return self._connection.closed

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()
        if self._peer is not None:
            os.close(self._peer)
            self._peer = None

    def _ends(self) -> list[Any]:
        return [self._connection] if self._peer is None else [self._connection, self._peer]

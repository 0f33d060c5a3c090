"""What the consumer's process and the worker's say to each other. Batches travel in shared memory, not in here."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from asyncfetch.errors import AsyncFetchError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.lerobot import DatasetStatistics
    from asyncfetch.stream.quarantine import Quarantined
    from asyncfetch.stream.state import State

__all__ = [
    "Answer",
    "AskStatistics",
    "Begin",
    "Close",
    "Ended",
    "Failed",
    "Filled",
    "Ready",
    "Statistics",
    "Stop",
    "Taken",
    "failure",
]

# To the worker.


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a pass, in place of the one before."""

    number: int
    """Of the pass, for what is said about it."""
    state: State
    """Where to: an epoch, and how far into it."""
    known_identity: Mapping[str, Any]
    """See SampleSource."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody wants more of this pass."""

    number: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The consumer has one batch more."""

    freed: list[int]
    """Slots whose last view is gone."""


@dataclass(frozen=True, slots=True)
class AskStatistics:
    """Answered by Statistics, or Failed."""

    number: int
    """For the answer; no pass has it."""


@dataclass(frozen=True, slots=True)
class Close:
    """End."""


# From the worker.


@dataclass(frozen=True, slots=True)
class Ready:
    """The first thing it says: it has got the stream."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A batch. Where the slot is new its descriptor comes with it."""

    number: int
    """Of the pass."""
    slot: int
    new_bytes: int
    """Of a new slot; 0 where it is known."""
    start: int
    """Of the pickled rest of the batch in the slot."""
    stop: int
    dropped: list[int]
    """Slots that won't be used any more."""
    rest: bytes = b""
    """The same, where it isn't in the slot."""
    quarantined: tuple[Quarantined, ...] = ()
    """Bad data among the samples up to it, since the message before."""


@dataclass(frozen=True, slots=True)
class Ended:
    """No more batches in this pass."""

    number: int
    identity: Mapping[str, Any]
    """Of what it has read: see Progress."""
    quarantined: tuple[Quarantined, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """An error, in its place in the order of a pass."""

    number: int
    pickled: bytes
    """The exception."""

    def raise_it(self) -> NoReturn:
        """In the other process."""
        error = pickle.loads(self.pickled)
        try:
            raise error
        finally:
            del error  # else error -> traceback -> this frame -> error is a cycle


@dataclass(frozen=True, slots=True)
class Statistics:
    """What was asked for."""

    number: int
    value: DatasetStatistics


Answer = Filled | Ended | Failed | Statistics


def failure(number: int, error: BaseException) -> Failed:
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
    return Failed(number, pickled)

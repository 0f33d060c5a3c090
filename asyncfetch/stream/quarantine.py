"""Bad data: how a pass handles it, and the list of it."""

from __future__ import annotations

import copy
import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import ConfigError, DatasetError, DecodeError, NotFound, RangeNotSatisfiable, redact_url
from asyncfetch.runtime.concurrently import copied
from asyncfetch.stream.job_builder import FailedSample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from asyncfetch.config import OnError
    from asyncfetch.formats import OpenFormat
    from asyncfetch.order.placement import Placement
    from asyncfetch.stream.datasets import Origin

_log = logging.getLogger("asyncfetch.stream")

BAD_DATA = (DatasetError, DecodeError, NotFound, RangeNotSatisfiable)
"""Errors that lie in the data and come again. A host that is down or slow isn't bad data."""
MAX_LISTED = 10_000
"""Episodes in the list; further ones are counted only."""

BOARD_WORKERS, BOARD_EPISODES = 64, 31
_NUMBERS = [("member", np.int64), ("episode", np.int64), ("samples", np.int64)]
_ENTRY = np.dtype([*_NUMBERS, ("file", "S200"), ("cause", "S296")])
BOARD_BYTES = BOARD_WORKERS * (BOARD_EPISODES + 1) * _ENTRY.itemsize
"""A megabyte, of which only what is written to takes memory."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An episode, or entry of another format, of which some samples could not be read."""

    episode: int
    file: str
    """The file that the first error names, without credentials; the episode's table file where it names none."""
    cause: str
    """Type and message of the first error."""
    samples: int = 1
    """Samples that were left out or replaced."""
    member: int = 0
    """The member of a mixture whose episode it is."""

    @property
    def key(self) -> tuple[int, int]:
        """Member and episode."""
        return self.member, self.episode


class Board:
    """A board to which a loader's workers write what they find bad, for the process that has them to read.

    Memory that all of them share, with a part for each worker to write to. A worker that finds no room
    there counts on without a name; what those beyond ``BOARD_WORKERS`` find is neither listed nor counted. An entry is
    there for readers when its samples are counted, which is last.

    Args:
        memory: ``BOARD_BYTES`` zeros, or what another process made of them.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._entries = memory.view(_ENTRY).reshape(BOARD_WORKERS, BOARD_EPISODES + 1)  # the last one has no name

    def write(self, worker: int, found: Quarantined) -> None:
        """Note samples of an episode. Called in that worker."""
        if worker >= BOARD_WORKERS:
            return
        entries = self._entries[worker]
        named = entries[:-1]
        is_it = (named["member"] == found.member) & (named["episode"] == found.episode)
        known = np.flatnonzero((named["samples"] == 0) | is_it)
        place = int(known[0]) if len(known) else BOARD_EPISODES
        if entries["samples"][place] == 0:
            entries["member"][place], entries["episode"][place] = found.key
            entries["file"][place] = found.file.encode()[-200:]  # the end of a path says more
            entries["cause"][place] = found.cause.encode()
        entries["samples"][place] += found.samples

    def read(self) -> tuple[list[Quarantined], int]:
        """Return what all workers have listed, and how many samples they have counted without a name."""
        listed = self._entries[:, :-1]
        found = [
            Quarantined(
                int(entry["episode"]),
                entry["file"].decode(errors="ignore"),
                entry["cause"].decode(errors="ignore"),
                int(entry["samples"]),
                int(entry["member"]),
            )
            for entry in listed[listed["samples"] > 0]
        ]
        return found, int(self._entries[:, -1]["samples"].sum())


class Quarantine:
    """The list. It may be read in any thread.

    It is that of the process and of those that read its stream for it: a loader's workers, the process of
    ``serve_samples`` up to the batches that were taken from it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: dict[tuple[int, int], Quarantined] = {}
        self._samples = 0
        self._news: dict[tuple[int, int], Quarantined] = {}
        self.entries = "episodes"
        """What the format of what was found last calls these."""
        self._board: Board | None = None
        self._worker: int | None = None

    @property
    def samples(self) -> int:
        """Samples left out or replaced, of all episodes."""
        listed, unnamed = self._of_workers()
        return self._samples + sum(found.samples for found in listed) + unnamed

    def episodes(self) -> tuple[Quarantined, ...]:
        """Return them in the order in which they were found; after this process's those of its loader's workers."""
        with self._lock:
            together = dict(self._listed)
        for found in self._of_workers()[0]:
            _count(together, found)
        return tuple(together.values())

    def add(self, origin: Origin, error: Exception) -> None:
        """Note a sample; the first of an episode is logged, too."""
        dataset, episode, member = origin.dataset, origin.episode, origin.member
        with self._lock:
            known = self._listed.get((member, episode))
            if known is None:
                cause = f"{type(error).__name__}: {error}"
                found = Quarantined(episode, _file(dataset, episode, error), cause, member=member)
            else:
                found = replace(known, samples=1)
            self._note(found)
            if self._board is not None and self._worker is not None:
                self._board.write(self._worker, found)
            is_new = known is None and found.key in self._listed
        if is_new:
            self.entries, entry = dataset.reader.words.entries, dataset.reader.words.entry
            _log.warning("samples of %s %d can't be read, because of %s: %s", entry, episode, found.file, found.cause)

    def extend(self, found: Iterable[Quarantined]) -> None:
        """Note finds of another process, which has logged them."""
        with self._lock:
            for each in found:
                self._note(each)

    def take_news(self) -> tuple[Quarantined, ...]:
        """Return what was noted since the last call, to send it to another process."""
        with self._lock:
            news, self._news = self._news, {}
        return tuple(news.values())

    def share(self, board: Board, worker: int | None = None) -> None:
        """List what is on the board as well; in a loader's ``worker``, write there."""
        self._board, self._worker = board, worker

    def _note(self, found: Quarantined) -> None:
        self._samples += found.samples
        for listed in (self._listed, self._news):
            _count(listed, found)

    def _of_workers(self) -> tuple[list[Quarantined], int]:
        return ([], 0) if self._board is None or self._worker is not None else self._board.read()

    def __reduce__(self) -> tuple[type[Quarantine], tuple[()]]:
        return Quarantine, ()  # another process has its own


def _count(listed: dict[tuple[int, int], Quarantined], found: Quarantined) -> None:
    known = listed.get(found.key)
    if known is not None:
        listed[found.key] = replace(known, samples=known.samples + found.samples)
    elif len(listed) < MAX_LISTED:
        listed[found.key] = found


def _file(dataset: OpenFormat, episode: int, error: Exception) -> str:
    try:
        urls = dataset.urls(episode)
    except DatasetError:  # which is what is bad about it
        return redact_url(dataset.url)
    message = str(error)
    return redact_url(next((url for url in urls if redact_url(url) in message), urls[-1]))


def raise_where_none_is_good(first_bad: Exception, placement: Placement, on_error: OnError, entries: str) -> None:
    """Raise an error where a consumer's part of a whole epoch has ended without a good sample.

    A single consumer raises the first error. One of several knows its own part alone, and the others' may be good: it
    gets nothing, unless "replace" promised it as many samples as there are.
    """
    if placement.world_size * placement.workers == 1:
        raise copied(first_bad)
    if on_error == "replace":
        raise DatasetError(
            f"{placement} got no good sample that could stand for its bad ones, of which the first is bad because of "
            f"{type(first_bad).__name__}: {first_bad}",
            remedy=f"leave the {entries} that the stream's quarantine lists out by episodes=..., read with fewer ranks "
            'and workers, or choose on_error="skip", with which this one gets nothing',
        ) from first_bad


class Substitutes:
    """Samples that come in place of bad ones: a copy of the good one before it or, where there is none, after it.

    In a mixture that is one of the same member, but where the member has given none yet.

    So it depends on the order and on the data alone. Where it can't be copied, a ``FailedSample`` comes that says so.
    """

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}
        """The latest good sample of each member, or why there is no copy; those of the latest micro-batch last."""
        self._fresh: set[int] = set()
        self._waiting = 0

    def good(self, sample: Any, member: int) -> list[Any]:  # noqa: ANN401 - what a transform returns
        """Return what to deliver where a sample is good."""
        waiting, self._waiting = self._waiting, 0
        self._last.pop(member, None)
        self._last[member] = sample
        self._fresh.add(member)
        return [*(_copied(sample) for _ in range(waiting)), sample]

    def has_of(self, member: int) -> bool:
        """Return whether a sample of the member itself would come in place of a bad one."""
        return member in self._last

    def bad(self, member: int) -> list[Any]:
        """Return what to deliver where it isn't; nothing yet, as long as none was good."""
        if not self._last:
            self._waiting += 1
            return []
        last = self._last[member] if member in self._last else next(reversed(self._last.values()))
        return [last if isinstance(last, FailedSample) else _copied(last)]

    def keep(self) -> None:
        """Copy what was delivered, since its consumer may change it."""
        for member in self._fresh:
            self._last[member] = _copied(self._last[member])
        self._fresh.clear()


def _copied(sample: Any) -> Any | FailedSample:  # noqa: ANN401
    """Return a copy, or a ``FailedSample`` that says why there is none: an error only if the copy is needed."""
    try:
        return copy.deepcopy(sample)
    except Exception as error:  # noqa: BLE001  what a transform returns may raise any
        message = (
            f"no copy of a good sample can stand for bad ones, because of {type(error).__name__}: {error}. Let the "
            'transform return what copy.deepcopy can copy, or choose on_error="skip"'
        )
        return FailedSample(ConfigError(message))

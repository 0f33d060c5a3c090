"""Bad data: what a pass does about it, and the list of what was bad."""

from __future__ import annotations

import copy
import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asyncfetch.errors import DatasetError, DecodeError, NotFound, RangeNotSatisfiable, redact_url

if TYPE_CHECKING:
    from asyncfetch.lerobot import LeRobotDataset
    from asyncfetch.stream.source import Origin

__all__ = ["BAD_DATA", "Quarantine", "Quarantined", "Substitutes"]

_log = logging.getLogger("asyncfetch.stream")

BAD_DATA = (DatasetError, DecodeError, NotFound, RangeNotSatisfiable)
"""Errors that lie in the data and come again. A host that is down or slow isn't bad data."""
MAX_LISTED = 10_000
"""Episodes in the list; further ones are counted only."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An episode of which some samples could not be read."""

    episode: int
    file: str
    """The file that the first error names, without credentials; the episode's table file where it names none."""
    cause: str
    """Type and message of the first error."""
    samples: int = 1
    """How many were left out or replaced."""
    member: int = 0
    """Of a mixture, whose episode it is."""


class Quarantine:
    """The list. It may be read in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: dict[tuple[int, int], Quarantined] = {}
        self._samples = 0

    @property
    def samples(self) -> int:
        """Samples left out or replaced, of all episodes."""
        return self._samples

    def episodes(self) -> tuple[Quarantined, ...]:
        """In the order in which they were found."""
        with self._lock:
            return tuple(self._listed.values())

    def add(self, origin: Origin, error: Exception) -> None:
        """Note a sample; the first of an episode is logged, too."""
        dataset, episode, member = origin
        with self._lock:
            self._samples += 1
            known = self._listed.get((member, episode))
            if known is not None:
                self._listed[member, episode] = replace(known, samples=known.samples + 1)
                return
            if len(self._listed) >= MAX_LISTED:
                return
            cause = f"{type(error).__name__}: {error}"
            found = Quarantined(episode, _file(dataset, episode, error), cause, member=member)
            self._listed[member, episode] = found
        _log.warning("samples of episode %d can't be read, because of %s: %s", episode, found.file, found.cause)

    def __reduce__(self) -> tuple[type[Quarantine], tuple[()]]:
        return Quarantine, ()  # another process has its own


def _file(dataset: LeRobotDataset, episode: int, error: Exception) -> str:
    try:
        known = dataset.episodes[episode]
    except DatasetError:  # which is what is bad about it
        return redact_url(dataset.url)
    urls = [known.data_url, *(span.url for span in known.videos.values())]
    message = str(error)
    return redact_url(next((url for url in urls if redact_url(url) in message), known.data_url))


class Substitutes:
    """What comes in place of bad samples: a copy of the good one before it or, where there is none, behind it.

    In a mixture that is one of the same member, but where the member has given none yet.

    So it depends on the order and on the data alone.
    """

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}
        """The latest good sample of each member, those of the latest parcel behind the others."""
        self._fresh: set[int] = set()
        self._waiting = 0

    def good(self, sample: Any, member: int) -> list[Any]:  # noqa: ANN401 - what a transform returns
        """What to deliver where a sample is good."""
        waiting, self._waiting = self._waiting, 0
        self._last.pop(member, None)
        self._last[member] = sample
        self._fresh.add(member)
        return [*(copy.deepcopy(sample) for _ in range(waiting)), sample]

    def bad(self, member: int) -> list[Any]:
        """What to deliver where it isn't; nothing yet, as long as none was good."""
        if not self._last:
            self._waiting += 1
            return []
        return [copy.deepcopy(self._last[member] if member in self._last else next(reversed(self._last.values())))]

    def keep(self) -> None:
        """What was given out goes to the consumer now, who may change it."""
        for member in self._fresh:
            self._last[member] = copy.deepcopy(self._last[member])
        self._fresh.clear()

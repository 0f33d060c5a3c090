"""The epoch that comes next, also where the workers of a loader each read a share of it.

A loader's pass has no head in the process that counts: each worker starts it at a moment of its own, when others may
have come to its end already, and after an early ``break`` some have finished their share and some have not. All must
take the same epoch. So each keeps a note in memory that they share: which pass it reads, at which epoch, and whether it
came to the end. A worker that begins a pass looks for a note of the same pass and takes its epoch. One that finds none
is the first: no worker is at the pass before any more, so its notes won't change, and all workers that come as early
read the same in them.

Several loaders may read one dataset at a time. A note names its loader, and each process writes in a place of its own:
children of one process have different numbers, so places need no lock. Only where another loader's pass comes to its
end just when two workers of one both find themselves the first, the two may read different epochs: to agree on what
changes meanwhile takes a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.config.checks import is_whole_number
from asyncfetch.errors import ConfigError
from asyncfetch.order.state import MAX_EPOCH, MAX_WORKERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_SETTINGS = 5
_PLACES = 4 * MAX_WORKERS
"""Places for notes; 492 kB. A place is used again by the process that was started so many later."""
_FIELDS = ("loader", "worker", "turn", "workers", "settings", "epoch", "finished")
_NOTE = np.dtype([(name, np.int64) for name in _FIELDS])
"""A worker's note on a pass: the turn-th, from 1, of this loader with so many workers. ``settings`` counts the calls of
``set`` before it: those after it make it void."""
COUNTER_BYTES = 8 * (_SETTINGS + _PLACES * (1 + 2 * len(_FIELDS)))
"""The size of all that is counted."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One worker's part in one pass."""

    epoch: int
    finish: Callable[[], bool]
    """A function to call where the worker came to its share's end; True if no epoch was set or loaded meanwhile."""
    is_share: bool = False
    """True if it is a loader's worker's, which doesn't know how far the pass is when its share has ended."""
    check: Callable[[], None] = lambda: None
    """A function to call before a sample is given: raises ConfigError where a state was loaded meanwhile."""


class EpochCounter:
    """The next epoch of a rank: the last one asked for by ``set``, and one more for each pass that was finished.

    A pass of one consumer is finished when its iterator has ended or has nothing left to give, one of several workers
    when all of them have come to the end of their shares, an empty share included; otherwise the next one takes its
    epoch again. A worker's word stays good whatever its process does afterwards. Belongs to one thread of each process.
    """

    def __init__(self) -> None:
        self._memory: NDArray[np.int64] | None = None  # made at first use: a member of a mixture counts no epochs

    @property
    def memory(self) -> NDArray[np.int64]:
        """The memory of all counts, for ``share`` in other processes."""
        if self._memory is None:
            self._memory = np.zeros(COUNTER_BYTES // 8, dtype=np.int64)
        return self._memory

    def share(self, memory: NDArray[np.int64]) -> None:
        """Count in this memory, made as a copy of ``self.memory``; other processes may share it."""
        self._memory = memory

    @property
    def _set(self) -> NDArray[np.int64]:
        return self.memory[:_SETTINGS]

    @property
    def _newest(self) -> NDArray[np.int64]:
        return self.memory[_SETTINGS : _SETTINGS + _PLACES]

    @property
    def _notes(self) -> NDArray[Any]:
        """Two notes a place: the newer one is announced when it is whole, and the other isn't read any more."""
        return self.memory[_SETTINGS + _PLACES :].view(_NOTE).reshape(_PLACES, 2)

    def current(self) -> int:
        """Epoch of the next pass."""
        return self._next(self._newest_notes())

    def shared(self) -> int | None:
        """Epoch of the latest pass that workers share, begun after the latest ``set``; None where there was none."""
        epochs = self._shared_notes()["epoch"]
        return int(epochs.max()) if len(epochs) else None

    def sharing(self) -> set[int]:
        """Return how many workers share that pass; of several loaders, each."""
        notes = self._shared_notes()
        return set(notes["workers"][notes["epoch"] == self.shared()].tolist())

    @property
    def settings(self) -> int:
        """The number of times that an epoch was set; also where a pass of one consumer was finished."""
        return int(self._set[0])

    @property
    def finished(self) -> int:
        """Epochs below it were finished by workers, and set back: what was loaded of them doesn't count any more."""
        return int(self._set[2])

    @property
    def loaded(self) -> int:
        """Epoch that the state loaded latest goes on with; 0 where none was."""
        return int(self._set[3])

    @property
    def loads(self) -> int:
        """The number of states that were loaded for all that count here: see ``note_load``."""
        return int(self._set[4])

    def note_load(self) -> None:
        """Announce a loaded state to those that count here and weren't given it: passes that have begun, copies."""
        self._set[4] += 1

    def check_loads(self, known: int) -> None:
        """Raise ConfigError where more states were loaded than are known."""
        if self._set[4] != known:
            raise ConfigError(
                "a state was loaded after this pass, or the loader's workers that read it, had begun, and these can't "
                "go on from it: call load_state_dict before iterating, with persistent workers before the loader is "
                "iterated for the first time; to go on now, iterate anew, by a new loader where its workers persist"
            )

    def load(self, epoch: int, state_epoch: int) -> None:
        """Set the epoch by a loaded state, of this epoch or of the one before it."""
        self._set[2:4] = state_epoch, epoch
        self._note_set(epoch)

    def set(self, epoch: int) -> None:
        """Set the epoch of all passes begun from now on, until one of them is finished."""
        epoch = check_epoch(epoch)
        self._note_finished(self.current())
        self._note_set(epoch)

    def _note_finished(self, current: int) -> None:
        if current > self._set[1]:  # by what workers have finished since
            self._set[2] = max(self.finished, current)

    def _note_set(self, epoch: int) -> None:
        # The count is written last here and read first elsewhere: the new count never goes with the old epoch.
        self._set[1] = epoch
        self._set[0] += 1

    def begin(self, epoch: int | None = None) -> Turn:
        """A pass of one consumer in this process; one of a given epoch counts only where that is the next."""
        epoch = check_epoch(self.current() if epoch is None else epoch)
        finish = partial(self._finish_alone, epoch, self.settings)
        return Turn(epoch, finish, check=partial(self.check_loads, self.loads))

    def begin_share(self, worker: int, workers: int, loader: int, process: int | None = None) -> Turn:
        """A worker's share of a pass, to be begun when no worker of this loader is busy with the pass before.

        Args:
            worker: Below ``workers``; begins each pass of its loader once.
            workers: That share the pass.
            loader: The same number for all workers of a loader and all its passes, another one for another loader.
            process: Another number in each process that begins shares here; None in one that begins them all.
        """
        if not 1 <= workers <= MAX_WORKERS:
            raise ConfigError(f"a rank can have 1 to {MAX_WORKERS} workers, not {workers}")
        notes = self._newest_notes()
        ours = (notes["loader"] == loader) & (notes["workers"] == workers)
        # A worker that missed a pass, killed before it began, comes level with the others here.
        own = ours & (notes["worker"] == worker)
        turn = max(int(notes["turn"][own].max(initial=0)) + 1, int(notes["turn"][ours].max(initial=0)))
        begun = notes[ours & (notes["turn"] == turn)]
        settings, epoch = begun[["settings", "epoch"]][0] if len(begun) else (int(self._set[0]), self._next(notes))
        place = (worker if process is None else process) % _PLACES
        slot = 1 - int(self._newest[place])
        self._notes[place, slot] = (loader, worker, turn, workers, settings, epoch, False)
        self._newest[place] = slot
        finish = partial(self._finish_share, place, slot, (loader, worker, turn))
        return Turn(int(epoch), finish, is_share=True, check=partial(self.check_loads, self.loads))

    def _finish_alone(self, epoch: int, settings: int) -> bool:
        is_latest = self.settings == settings
        if is_latest and self.current() == epoch:
            self._note_finished(epoch)
            self._note_set(epoch + 1)
        return is_latest

    def _finish_share(self, place: int, slot: int, begun: tuple[int, int, int]) -> bool:
        note = self._notes[place, slot]
        if (note["loader"], note["worker"], note["turn"]) == begun:  # not the note of a later pass
            self._notes["finished"][place, slot] = True
        return bool(note["settings"] == self.settings)

    def _shared_notes(self) -> NDArray[Any]:
        notes = self._newest_notes()
        shared: NDArray[Any] = notes[(notes["settings"] == self._set[0]) & (notes["turn"] > 0)]
        return shared

    def _newest_notes(self) -> NDArray[Any]:
        notes: NDArray[Any] = self._notes[np.arange(_PLACES), self._newest]
        return notes

    def _next(self, notes: NDArray[Any]) -> int:
        settings, epoch = self._set[:2].tolist()
        notes = notes[(notes["settings"] == settings) & (notes["turn"] > 0)]
        if not len(notes):
            return int(epoch)
        last = notes[notes["epoch"] == notes["epoch"].max()]
        passes, finished = np.unique(last[last["finished"] > 0][["loader", "turn", "workers"]], return_counts=True)
        return int(last["epoch"][0]) + bool((finished == passes["workers"]).any())

    def __reduce__(self) -> tuple[Any, ...]:
        return _counter_at, (self.current(), self._set.tolist())


def check_epoch(epoch: Any) -> int:  # noqa: ANN401 - what a user gave
    """Return an epoch as Python's int; ConfigError where it is none."""
    if not is_whole_number(epoch) or not 0 <= epoch <= MAX_EPOCH:
        raise ConfigError(f"epoch must be a whole number from 0, below 2**63 - 1, not {epoch!r}")
    return int(epoch)


def child_number() -> int | None:
    """This process's among those that multiprocessing has started in its parent; None where it wasn't started so."""
    from multiprocessing.process import current_process  # loaded where it has a number

    identity = current_process()._identity  # private, but its public form is a name that its starter may choose
    return identity[-1] if identity else None


def _counter_at(epoch: int, settings: list[int]) -> EpochCounter:
    counter = EpochCounter()
    counter._set[:] = settings
    counter._note_finished(epoch)
    counter._note_set(epoch)
    return counter

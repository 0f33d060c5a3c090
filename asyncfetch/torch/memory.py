"""Memory that a rank and its loader's workers share, to count epochs, bad data and what workers do.

It follows a dataset wherever that is forked or spawned to. To workers it should; but ranks may come of one process in
just that way (``mp.spawn``, a notebook's launcher), and one that counted in the memory of all would move the others on.
So memory knows its owner, and any other process that isn't a loader's worker counts in a copy of its own, from its
first use of the dataset on, or before it forks what may be its workers.
"""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from torch.utils.data import get_worker_info

from asyncfetch.runtime.shared_memory import SharedBytes
from asyncfetch.stream.epochs import COUNTER_BYTES
from asyncfetch.stream.figures import BOARD_BYTES as FIGURES_BYTES
from asyncfetch.stream.figures import FiguresBoard
from asyncfetch.stream.quarantine import BOARD_BYTES, Board

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncfetch.stream import SampleSource
    from asyncfetch.stream.epochs import EpochCounter
    from asyncfetch.stream.quarantine import Quarantine

_FIGURES_AT = COUNTER_BYTES + BOARD_BYTES
_live: WeakSet[WorkersMemory] = WeakSet()


class WorkersMemory:
    """A stream's counts of epochs, bad data and figures, shared with workers, whether they were forked or spawned.

    All datasets of a stream count in one, and a copy of a dataset in one of its own. ``owner`` is the id of the process
    that it belongs to.
    """

    def __init__(self, shared: SharedBytes, owner: int) -> None:
        self._shared, self._owner = shared, owner
        self._users: tuple[EpochCounter, Quarantine] | None = None
        """The stream's, and its copies'."""
        _live.add(self)

    @classmethod
    def of(cls, stream: SampleSource) -> WorkersMemory:
        """The stream's, made where it has none."""
        if stream.workers_memory is None:
            _copy(stream.epochs.memory.view(np.uint8)).attach(stream)
        memory: WorkersMemory = stream.workers_memory
        return memory

    @property
    def _counts(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._shared.memory[:_FIGURES_AT], np.uint8)

    @property
    def board(self) -> Board:
        """The board to which workers write what they find bad."""
        return Board(self._counts[COUNTER_BYTES:])

    @property
    def figures(self) -> FiguresBoard:
        """The board to which workers write what they do."""
        return FiguresBoard(self._shared.memory[_FIGURES_AT:])

    def attach(self, stream: SampleSource) -> None:
        """Have the stream count here."""
        stream.workers_memory = None  # it would keep apart what a worker shares, which doesn't know yet that it is one
        self._users = stream.epochs, stream.quarantine
        self._share()
        stream.workers_memory = self

    def _share(self) -> None:
        if self._users is not None:
            epochs, quarantine = self._users
            epochs.share(self._counts[:COUNTER_BYTES].view(np.int64))
            quarantine.share(self.board)

    def keep_apart(self) -> None:
        """Count in a copy from now on, as its owner, in a process that is neither the owner nor a loader's worker."""
        if self._owner == os.getpid() or get_worker_info() is not None:
            return
        self._shared, self._owner = _copied(self._counts), os.getpid()
        self._share()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return _copy, (self._counts,)
        return WorkersMemory, (self._shared, self._owner)


def _copy(counts: NDArray[np.uint8]) -> WorkersMemory:
    return WorkersMemory(_copied(counts), os.getpid())


def _copied(counts: NDArray[np.uint8]) -> SharedBytes:
    """Memory that begins with these counts. The figures are another process's workers' and stay behind."""
    shared = SharedBytes(_FIGURES_AT + FIGURES_BYTES)
    if counts.any():  # else it stays without a page
        np.frombuffer(shared.memory, np.uint8)[: len(counts)] = counts
    return shared


def _keep_apart() -> None:
    for memory in list(_live):
        memory.keep_apart()


# A loader that forks its workers asks the dataset nothing before.
os.register_at_fork(before=_keep_apart)

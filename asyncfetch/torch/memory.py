"""Memory that a rank and its loader's workers share, to count epochs, bad data and what workers do.

Torch's shared memory follows a dataset wherever it is forked or pickled to. To workers it should; but ranks may come of
one process in just that way (``mp.spawn``, a notebook's launcher), and one that counted in the memory of all would move
the others on. So memory knows whose it is, and any other process that isn't a loader's worker counts in a copy of its
own, from its first use of the dataset on, or before it forks what may be its workers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import get_worker_info

from asyncfetch.stream.figures import BOARD_BYTES as FIGURES_BYTES
from asyncfetch.stream.figures import FiguresBoard
from asyncfetch.stream.quarantine import BOARD_BYTES, Board

if TYPE_CHECKING:
    from asyncfetch.stream import SampleSource
    from asyncfetch.stream.epochs import EpochCounter
    from asyncfetch.stream.quarantine import Quarantine

_live: WeakSet[WorkersMemory] = WeakSet()


class WorkersMemory:
    """A stream's counts of epochs and bad data, shared with workers, whether they were forked or spawned.

    All datasets of a stream count in one, and a copy of a dataset in one of its own.
    """

    def __init__(self, epochs: torch.Tensor, board: torch.Tensor, figures: torch.Tensor, owner: int) -> None:
        """``owner`` is the id of the process whose memory it is, where it is shared already."""
        self._owner = owner if _is_shared(epochs) else os.getpid()
        self._epochs, self._board, self._figures = (
            each if _is_shared(each) else _shared_copy(each) for each in (epochs, board, figures)
        )
        self._users: tuple[EpochCounter, Quarantine] | None = None
        """The stream's, and its copies'."""
        _live.add(self)

    @classmethod
    def of(cls, stream: SampleSource) -> WorkersMemory:
        """The stream's, made where it has none."""
        if stream.workers_memory is None:
            board, pages = (torch.from_numpy(np.zeros(size, np.uint8)) for size in (BOARD_BYTES, FIGURES_BYTES))
            cls(torch.from_numpy(stream.epochs.memory), board, pages, os.getpid()).attach(stream)
        memory: WorkersMemory = stream.workers_memory
        return memory

    @property
    def board(self) -> Board:
        """The board to which workers write what they find bad."""
        return Board(self._board.numpy())

    @property
    def figures(self) -> FiguresBoard:
        """The board to which workers write what they do."""
        return FiguresBoard(self._figures.numpy().data)

    def attach(self, stream: SampleSource) -> None:
        """Have the stream count here."""
        stream.workers_memory = None  # it would keep apart what a worker shares, which doesn't know yet that it is one
        self._users = stream.epochs, stream.quarantine
        self._share()
        stream.workers_memory = self

    def _share(self) -> None:
        if self._users is not None:
            epochs, quarantine = self._users
            epochs.share(self._epochs.numpy())
            quarantine.share(self.board)

    def keep_apart(self) -> None:
        """Count in a copy from now on, as its owner, in a process that is neither the owner nor a loader's worker."""
        if self._owner == os.getpid() or get_worker_info() is not None:
            return
        self._owner = os.getpid()
        self._epochs, self._board = map(_shared_copy, (self._epochs, self._board))
        # The workers whose figures are here are another process's.
        self._figures = _shared_copy(torch.from_numpy(np.zeros(FIGURES_BYTES, np.uint8)))
        self._share()

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkersMemory, (self._epochs, self._board, self._figures, self._owner)


def _keep_apart() -> None:
    for memory in list(_live):
        memory.keep_apart()


# A loader that forks its workers asks the dataset nothing before.
os.register_at_fork(before=_keep_apart)


def _is_shared(values: torch.Tensor) -> bool:
    return bool(values.is_shared())  # type: ignore[no-untyped-call]


def _shared_copy(values: torch.Tensor) -> torch.Tensor:
    """These values where forked and spawned workers share them.

    By numpy: share_memory_() copies and torch.zeros clears them by OpenMP's threads, which a forked child of a process
    that has used them lacks: it waits for them without end, or crashes.
    """
    storage = torch.UntypedStorage._new_shared(values.nbytes)  # type: ignore[no-untyped-call]
    shared = torch.empty(0, dtype=values.dtype, device="cpu").set_(storage)
    if values.numpy().any():  # else it stays without a page
        shared.numpy()[:] = values.numpy()
    return shared

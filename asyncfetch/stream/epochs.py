"""Counting epochs where several workers finish them one by one."""

from __future__ import annotations

import numpy as np

from asyncfetch.errors import ConfigError

__all__ = ["MAX_WORKERS", "EpochCounter"]

MAX_WORKERS = 1024
"""Loader workers of one rank that epochs are counted for; 8 kB."""


class EpochCounter:
    """The next epoch of each worker of a rank, in an array that the workers may share.

    A worker that starts late must not take the epoch that a fast one has already moved on to, so each writes only its
    own place and all start from the lowest.
    """

    def __init__(self) -> None:
        self.places = np.zeros(MAX_WORKERS, dtype=np.int64)
        """By worker; replace it with memory of the same shape and type to share the counter."""

    def current(self, workers: int = 1) -> int:
        """Epoch of the next pass of that many workers."""
        if not 1 <= workers <= MAX_WORKERS:
            raise ConfigError(f"a rank can have 1 to {MAX_WORKERS} workers, not {workers}")
        return int(self.places[:workers].min())

    def finish(self, epoch: int, worker: int = 0) -> None:
        """A worker came to the end of an epoch. One that the counter isn't at changes nothing."""
        if self.places[worker] == epoch:
            self.places[worker] = epoch + 1

    def set(self, epoch: int) -> None:
        """All workers go on with this epoch at their next pass."""
        if epoch < 0:
            raise ConfigError(f"epoch must not be negative, not {epoch}")
        self.places[:] = epoch

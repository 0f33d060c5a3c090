"""Which part of the order this process takes: rank of world size, worker of workers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Placement", "find_rank"]


@dataclass(frozen=True, slots=True)
class Placement:
    """One consumer of an order among all."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    """Of the rank's loader workers."""
    workers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must be in [0, world_size), not {self.rank} of {self.world_size}")
        if not 0 <= self.worker < self.workers:
            raise ConfigError(f"worker must be in [0, workers), not {self.worker} of {self.workers}")

    @property
    def consumer(self) -> int:
        """A rank's workers together take what the rank would take alone."""
        return self.rank + self.world_size * self.worker

    @property
    def consumers(self) -> int:
        """Over all ranks and workers."""
        return self.world_size * self.workers


def find_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, world size) from torch.distributed where it is initialised, else as torchrun sets them, else (0, 1)."""
    torch = sys.modules.get("torch")  # not imported for this: who uses torch.distributed has imported it
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
    except ValueError as error:
        message = f"RANK={environ.get('RANK')!r} and WORLD_SIZE={environ.get('WORLD_SIZE')!r} must be whole numbers"
        raise ConfigError(message) from error

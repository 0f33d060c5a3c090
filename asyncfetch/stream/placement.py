"""Which part of the order this process takes: rank of world size, worker of workers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Placement", "find_rank"]

ENVIRONMENTS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, and all who imitate it
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun. SLURM_NTASKS is the job's, set where its script runs alone, too
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
)


@dataclass(frozen=True, slots=True)
class Placement:
    """One consumer among all that share some samples: ranks take them in turns, and so do the workers of a rank."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    """Of the rank's loader workers."""
    workers: int = 1
    block_samples: int = 1
    """Of the rank's samples, how many in a row a worker takes at its turn: where it makes batches, a batch."""
    batch_size: int | None = field(default=None, compare=False)
    """Consecutive samples of a consumer that become a batch, where we make the batches."""
    drop_last: bool = field(default=False, compare=False)
    """Whether a last batch that is smaller is left out."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must be in [0, world_size), not {self.rank} of {self.world_size}")
        if not 0 <= self.worker < self.workers:
            raise ConfigError(f"worker must be in [0, workers), not {self.worker} of {self.workers}")
        if self.block_samples < 1:
            raise ConfigError(f"a worker takes at least 1 sample at its turn, not {self.block_samples}")

    def __str__(self) -> str:
        rank = f"rank {self.rank} of {self.world_size}"
        return rank if self.workers == 1 else f"{rank}, worker {self.worker} of {self.workers}"

    @property
    def consumers(self) -> int:
        """Over all ranks and workers. A rank's workers together take what the rank would take alone."""
        return self.world_size * self.workers

    @property
    def period(self) -> int:
        """After so many samples it is the same consumer's turn in the same way."""
        return self.world_size * (self.workers * self.block_samples if self.workers > 1 else 1)

    @property
    def least_samples(self) -> int:
        """Fewer than so many that are left of an epoch are given to nobody."""
        return self.batch_size if self.batch_size is not None and self.drop_last else 1

    def index(self, number: int) -> int:
        """Which of the samples that are shared is the consumer's ``number``-th, from 0."""
        turn, place = divmod(number, self.block_samples)
        of_rank = (turn * self.workers + self.worker) * self.block_samples + place
        return self.rank + self.world_size * of_rank

    def count(self, total: int) -> int:
        """How many of ``total`` samples are the consumer's. Those of any two ranks differ by one at most."""
        of_rank = max(0, -(-(total - self.rank) // self.world_size))
        rounds, rest = divmod(of_rank, self.workers * self.block_samples)
        return rounds * self.block_samples + min(max(rest - self.worker * self.block_samples, 0), self.block_samples)


def find_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, world size) from torch.distributed where it is initialised, else from torchrun, srun or MPI, else (0, 1).

    Raises:
        ConfigError: What the environment says is no rank of a world size.
    """
    torch = sys.modules.get("torch")  # not imported for this: who uses torch.distributed has imported it
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank_name, size_name in ENVIRONMENTS:
        if rank_name in environ and size_name in environ:
            return _whole_numbers(environ, rank_name, size_name)
    return 0, 1


def _whole_numbers(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    try:
        rank, world_size = int(environ[rank_name]), int(environ[size_name])
    except ValueError as error:
        message = f"{rank_name}={environ[rank_name]!r} and {size_name}={environ[size_name]!r} must be whole numbers"
        raise ConfigError(message) from error
    if not 0 <= rank < world_size:
        raise ConfigError(f"{rank_name}={rank} must be in [0, {size_name}={world_size})")
    return rank, world_size

"""The part of the order that this process takes: rank of world size, worker of workers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError
from asyncfetch.ranges import is_whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["STEP_SAMPLES", "Placement", "find_rank", "found_placement"]

STEP_SAMPLES = 32
"""Samples of a rank in a step, where nobody says how large batches are: a common size."""
MAX_STEP_SAMPLES = 1024
"""A consumer looks through the whole step of all ranks for its own samples: 24 MB of 1,000 ranks."""

ENVIRONMENTS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, and all who imitate it
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun. SLURM_NTASKS is the job's, set where its script runs alone, too
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
)


@dataclass(frozen=True, slots=True)
class Placement:
    """One consumer among all that share some samples: see ``remaining``. A rank's workers take its samples in turns."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    """The number of the process among the rank's loader workers."""
    workers: int = 1
    block_samples: int = 1
    """Samples of the rank that a worker takes in a row at its turn: where it makes batches, a batch."""
    step_samples: int = 0
    """Samples that a rank takes of each step of all ranks together; 0 where ranks take samples in turns, as in 0.1."""
    batch_size: int | None = field(default=None, compare=False)
    """Consecutive samples of a consumer that become a batch, where we make the batches."""
    drop_last: bool = field(default=False, compare=False)
    """True if a last batch that is smaller is left out."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must be in [0, world_size), not {self.rank} of {self.world_size}")
        if not 0 <= self.worker < self.workers:
            raise ConfigError(f"worker must be in [0, workers), not {self.worker} of {self.workers}")
        if self.block_samples < 1:
            raise ConfigError(f"a worker takes at least 1 sample at its turn, not {self.block_samples}")
        if self.step_samples < 0:
            raise ConfigError(f"a rank takes some samples of each step, or 0 for turns, not {self.step_samples}")

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

    def in_batches(self, batch_size: int | None, *, drop_last: bool) -> Placement:
        """This where we make batches of that size; None where others do."""
        largest = range(min(batch_size or 0, MAX_STEP_SAMPLES), 0, -1)
        whole = (samples for samples in largest if batch_size is not None and batch_size % samples == 0)
        return replace(self, batch_size=batch_size, drop_last=drop_last, step_samples=next(whole, STEP_SAMPLES))

    def of_rank(self, number: int) -> int:
        """Return which of the rank's samples is the consumer's ``number``-th, from 0."""
        turn, place = divmod(number, self.block_samples)
        return (turn * self.workers + self.worker) * self.block_samples + place

    def share_parted(self, distance: int) -> float:
        """Return the share of the rank's samples that are another worker's than the one so many samples later."""
        turns, rest = divmod(distance, self.block_samples)
        later = rest / self.block_samples
        return (1 - later) * (turns % self.workers > 0) + later * ((turns + 1) % self.workers > 0)

    def count_of(self, of_rank: int) -> int:
        """Return how many of the rank's first so many samples are the consumer's."""
        rounds, rest = divmod(of_rank, self.workers * self.block_samples)
        return rounds * self.block_samples + min(max(rest - self.worker * self.block_samples, 0), self.block_samples)

    def count(self, total: int) -> int:
        """Return how many of ``total`` samples are the consumer's. Those of any two ranks differ by one at most."""
        return self.count_of(max(0, -(-(total - self.rank) // self.world_size)))


def found_placement(rank: int | None = None, world_size: int | None = None) -> Placement:
    """The given rank of a world size, or where both are None the one that ``find_rank`` finds."""
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or none of them")
    if rank is None or world_size is None:
        rank, world_size = find_rank()
    if not (is_whole_number(rank) and is_whole_number(world_size)):
        raise ConfigError(f"rank and world_size must be whole numbers, not {rank!r} of {world_size!r}")
    return Placement(int(rank), int(world_size), step_samples=STEP_SAMPLES)


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

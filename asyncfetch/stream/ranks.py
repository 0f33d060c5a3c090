"""The rank of this process among how many, and the machines that they are on."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from asyncfetch.config.checks import is_whole_number
from asyncfetch.errors import ConfigError
from asyncfetch.order.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENTS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, and launchers like it
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun. SLURM_NTASKS is the job's, set where its script runs alone, too
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
)
NODES = ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES")
"""Names of the number of machines, by torchrun and srun: the same on all of them, however many ranks each has."""
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
"""Names of the number of ranks on one machine, by torchrun, Open MPI, MPICH and srun."""


def found_placement(rank: int | None = None, world_size: int | None = None) -> Placement:
    """The given rank of a world size, or where both are None the one that ``find_rank`` finds."""
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or none of them")
    if rank is None or world_size is None:
        rank, world_size = find_rank()
    if not (is_whole_number(rank) and is_whole_number(world_size)):
        raise ConfigError(f"rank and world_size must be whole numbers, not {rank!r} of {world_size!r}")
    return Placement(int(rank), int(world_size), nodes=find_nodes(int(world_size)))


def find_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, world size) from torch.distributed where it is initialised, else from torchrun, srun or MPI, else (0, 1).

    Raises:
        ConfigError: What the environment says is no rank of a world size.
    """
    torch = sys.modules.get("torch")  # not imported for this: a user of torch.distributed has imported it
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank_name, size_name in ENVIRONMENTS:
        if rank_name in environ and size_name in environ:
            return _whole_numbers(environ, rank_name, size_name)
    return 0, 1


def find_nodes(world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return on how many machines so many ranks are, by the launcher's variables; 1 where they don't say it.

    Where they say only how many ranks this machine has, as many are on each; 0 where that can't be, since all ranks
    must come to the same number.
    """
    found = {name: int(environ[name]) for name in (*NODES, *LOCAL_SIZES) if environ.get(name, "").isdecimal()}
    for name in NODES:
        if 1 <= found.get(name, 0) <= world_size:
            return found[name]
    local = next((found[name] for name in LOCAL_SIZES if found.get(name)), world_size or 1)
    return world_size // local if world_size % local == 0 else 0


def _whole_numbers(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    try:
        rank, world_size = int(environ[rank_name]), int(environ[size_name])
    except ValueError as error:
        message = f"{rank_name}={environ[rank_name]!r} and {size_name}={environ[size_name]!r} must be whole numbers"
        raise ConfigError(message) from error
    if not 0 <= rank < world_size:
        raise ConfigError(f"{rank_name}={rank} must be in [0, {size_name}={world_size})")
    return rank, world_size

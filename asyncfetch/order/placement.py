"""The part of an epoch that one process takes: rank of world size, worker of workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncfetch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """One consumer among all that share some samples. A rank's workers take its samples in turns."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    """The number of the process among the rank's loader workers."""
    workers: int = 1
    block_samples: int = 1
    """Samples that a worker takes at its turn: a batch where we or the loader make batches of them."""
    nodes: int = field(default=1, compare=False)
    """Machines that the ranks are on, in their order; 0 if that isn't known, because some have more ranks."""
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

    def __str__(self) -> str:
        rank = f"rank {self.rank} of {self.world_size}"
        return rank if self.workers == 1 else f"{rank}, worker {self.worker} of {self.workers}"

    @property
    def turn_samples(self) -> int:
        """Samples that a worker takes at its turn; of a single one that is all the same."""
        return self.block_samples if self.workers > 1 else 1

    @property
    def least_samples(self) -> int:
        """The fewest samples that make a batch; fewer that are left of an epoch aren't given."""
        return self.batch_size if self.batch_size is not None and self.drop_last else 1

    def of_rank(self, number: int) -> int:
        """Return which of the rank's samples is the consumer's ``number``-th, from 0."""
        turn, place = divmod(number, self.turn_samples)
        return (turn * self.workers + self.worker) * self.turn_samples + place

    def count_of(self, of_rank: int) -> int:
        """Return how many of the rank's first so many samples are the consumer's."""
        rounds, rest = divmod(of_rank, self.workers * self.turn_samples)
        return rounds * self.turn_samples + min(max(rest - self.worker * self.turn_samples, 0), self.turn_samples)

    def share_parted(self, distance: int) -> float:
        """Return the share of the rank's samples that are another worker's than the one so many samples later."""
        turns, rest = divmod(distance, self.turn_samples)
        later = rest / self.turn_samples
        return (1 - later) * (turns % self.workers > 0) + later * ((turns + 1) % self.workers > 0)

"""The parts of ``max_bytes``, and the ``max_bytes`` that would make a part large enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from asyncfetch.config.stream import WorkerConfig, rank_config

if TYPE_CHECKING:
    from asyncfetch.config.stream import StreamConfig

_DECODERS, _TABLES = 4, 8
"""A quarter is for decoders and an eighth for rows and indexes; clips have the other five eighths. A decoder takes 2-3
MiB at 640x480, a clip of 150 frames 1.3 MiB, its rows 15 kB, its file's index 8 bytes a frame."""
_SMALL_TABLES = 6
"""A sixth of the memory for rows and indexes is for the indexes, another for the rows of single episodes. The rest is
for footers and row groups that episodes share: one that isn't kept is fetched again for each episode."""
_OWN = 4
"""Three quarters of the memory for clips hold those that a rank's loader workers have in common. The last quarter is
divided among the workers, for clips that find no room there. Of the memory for rows and indexes, a quarter is
common."""


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The parts of a rank's ``max_bytes`` that one process has: the rank's only one, or a loader worker.

    Every part is at least one byte.
    """

    max_bytes: int
    """The rank's."""
    workers: int = 1
    """Number of processes that share it."""
    reads_as_one: bool = False
    """True if these processes keep clips in common memory."""

    @classmethod
    def of(cls, config: StreamConfig) -> Self:
        """Return the plan of a process with this configuration."""
        rank = rank_config(config)
        if isinstance(config, WorkerConfig):
            return cls(rank.max_bytes, config.workers, config.readers_name is not None)
        return cls(rank.max_bytes)

    @property
    def decoders_bytes(self) -> int:
        """Memory for decoders."""
        return max(1, self._share_bytes // _DECODERS)

    @property
    def clips_bytes(self) -> int:
        """Memory for clips of its own."""
        clips = _clips(self._share_bytes)
        return max(1, clips // _OWN if self.reads_as_one else clips)

    @property
    def pool_bytes(self) -> int:
        """Memory for the clips that the rank draws from, the same for any number of workers; the common part."""
        clips = _clips(self.max_bytes)
        return max(1, clips - clips // _OWN)

    @property
    def common_small_bytes(self) -> int:
        """Memory for rows and indexes that the workers have in common."""
        return self.max_bytes // _TABLES // _OWN

    @property
    def indexes_bytes(self) -> int:
        """Memory for the indexes of videos; the rows of single episodes and their clips' plans have as much."""
        return self._tables_bytes // _SMALL_TABLES

    @property
    def shared_rows_bytes(self) -> int:
        """Memory for footers, and for row groups that episodes share."""
        return self._tables_bytes - 2 * self.indexes_bytes

    def max_bytes_for_clips(self, clips_bytes: int) -> int:
        """Return a ``StreamConfig.max_bytes`` of the rank that gives this process so much for clips of its own."""
        clips = clips_bytes * _OWN if self.reads_as_one else clips_bytes
        return _whole(clips) * self.workers

    def max_bytes_for_pool(self, pool_bytes: int) -> int:
        """Return a ``StreamConfig.max_bytes`` of the rank that gives its pool so much."""
        return _whole(-(-pool_bytes * _OWN // (_OWN - 1)))

    @property
    def _share_bytes(self) -> int:
        return max(1, self.max_bytes // self.workers)

    @property
    def _tables_bytes(self) -> int:
        tables = self._share_bytes // _TABLES
        return tables - tables // _OWN if self.reads_as_one else tables


def _clips(max_bytes: int) -> int:
    return max_bytes - max_bytes // _TABLES - max_bytes // _DECODERS


def _whole(clips_bytes: int) -> int:
    """Return the total that leaves so much for clips, when the other parts are rounded down."""
    return -(-clips_bytes * _TABLES * _DECODERS // (_TABLES * _DECODERS - _TABLES - _DECODERS))

"""The engine of LeRobot datasets: what is kept of their tables and indexes, beside what any reader shares.

A dataset has one of its own, unless it is a member of a mixture: hundreds of those are read by one engine. What an open
dataset takes besides is its metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncfetch.config import rank_config
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.limiter import Limiter
from asyncfetch.lerobot.listing import list_tables
from asyncfetch.lerobot.rows import RowCache
from asyncfetch.resources import Engine
from asyncfetch.runtime.single_flight import SharedLRU

if TYPE_CHECKING:
    from asyncfetch.config import StreamConfig
    from asyncfetch.lerobot.stretch import Stretch
    from asyncfetch.lerobot.video_index import VideoFile

PLANNED_AT_ONCE = 32
"""Episodes that are planned side by side. With all of a pool at once the first clip waits for the last index, and the
network for the processor."""


class DatasetEngine(Engine):
    """Engine of LeRobot datasets."""

    def __init__(self, config: StreamConfig) -> None:
        super().__init__(config)
        self.planning, self.locating = Limiter(PLANNED_AT_ONCE), Limiter(PLANNED_AT_ONCE)
        """Limiters for indexes of videos, and for footers of tables."""
        small_bytes = self.memory.indexes_bytes
        self.plans: SharedLRU[tuple[int, Stretch], Any] = SharedLRU(small_bytes // 2)
        """Places of the clips of stretches, by the dataset's number and the stretch."""
        self.tables: SharedLRU[tuple[int, Stretch | int], Any] = SharedLRU(small_bytes // 2)
        """Rows of episodes, by the numbers of the dataset and the episode; of stretches, where there are pictures."""
        self.rows = RowCache(self.memory.shared_rows_bytes)
        self.indexes: SharedLRU[str, VideoFile] = SharedLRU(small_bytes)
        """Indexes of videos, by url."""
        self._datasets = 0

    async def list_tables(self, directory: str) -> list[str] | None:
        """See ListTables. Rare, so that a worker that doesn't fetch itself connects for it."""
        if self.rank is None:
            return await list_tables(self.fetcher, directory)
        async with Fetcher(rank_config(self.config).fetch) as fetcher:
            return await list_tables(fetcher, directory)

    def join(self, open_clips: int) -> int:
        """A dataset joins, with so many clips in its pool; the number that it has here."""
        self.expect_clips(open_clips)
        self._datasets += 1
        return self._datasets

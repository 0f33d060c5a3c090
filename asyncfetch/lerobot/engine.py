"""The engine that the open datasets of one reader share: connections, caches, threads, and the bounds on all of them.

A dataset has one of its own, unless it is a member of a mixture: hundreds of those are read by one engine. What an open
dataset takes besides is its metadata.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio

from asyncfetch.cache import ByteCache, DiskTier
from asyncfetch.cache.disk import DiskReader
from asyncfetch.cache.memory import ReservationQueue
from asyncfetch.cache.rank_reader import RankReader
from asyncfetch.config import WorkerConfig, rank_config, usable_cpus
from asyncfetch.decode import DecodePool, DecoderCache, FrameDecoder
from asyncfetch.decode.cache import SIZE_VARIABLE
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.engine import FILE_THREADS
from asyncfetch.fetch.limiter import Limiter
from asyncfetch.lerobot.listing import list_tables
from asyncfetch.lerobot.rows import RowCache
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.leased_lru import LeasedLRU
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.runtime.single_flight import SharedLRU
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import TracebackType

    from asyncfetch.cache import CacheKey, CacheStatistics
    from asyncfetch.config import StreamConfig
    from asyncfetch.fetch import RangeReader
    from asyncfetch.lerobot.stretch import Stretch
    from asyncfetch.lerobot.video_index import VideoFile


class Budget:
    """A bound in bytes, divided by who takes first. Nobody waits in it. Belongs to one thread.

    No ReservationQueue: who waits there doesn't find out that it waits for what it holds itself, and can't fail.

    Args:
        max_bytes: Most that all shares together hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._shares: list[Share] = []
        self._watchers: dict[object, Callable[[], object]] = {}

    def share(self, on_freed: Callable[[], object]) -> Share:
        """A share that holds nothing yet; ``on_freed`` is called when bytes come back, its own or another's."""
        share = Share(self, on_freed)
        self._shares.append(share)
        return share

    def fits(self, size_bytes: int) -> bool:
        """Return whether so much can be taken now."""
        return self.used_bytes + size_bytes <= self.max_bytes

    @contextmanager
    def watched(self, on_taken: Callable[[], object]) -> Iterator[None]:
        """Call ``on_taken`` whenever a share has taken some, while in this context."""
        watcher = object()
        self._watchers[watcher] = on_taken
        try:
            yield
        finally:
            del self._watchers[watcher]

    def change(self, change_bytes: int) -> None:
        """Account for what a share took or gave back. For shares."""
        self.used_bytes += change_bytes
        if change_bytes < 0:
            for share in sorted(self._shares, key=lambda share: share.used_bytes):  # so that none is starved
                share.on_freed()
        else:
            for on_taken in list(self._watchers.values()):
                on_taken()

    def leave(self, share: Share) -> None:
        """Forget a share that holds nothing. For shares."""
        self._shares.remove(share)


class Share:
    """The share that one user holds of a budget. Made by ``Budget.share``; close it."""

    def __init__(self, budget: Budget, on_freed: Callable[[], object]) -> None:
        self.budget = budget
        self.on_freed = on_freed
        self.used_bytes = 0

    def fits(self, size_bytes: int) -> bool:
        """Return whether so much can be taken now."""
        return self.budget.fits(size_bytes)

    def take(self, size_bytes: int) -> None:
        """Take what ``fits``."""
        self.used_bytes += size_bytes
        self.budget.change(size_bytes)

    def give(self, size_bytes: int) -> None:
        """Give some back."""
        self.used_bytes -= size_bytes
        self.budget.change(-size_bytes)

    def close(self) -> None:
        """Give everything back and leave. Once."""
        self.budget.leave(self)
        self.give(self.used_bytes)


DECODERS_SHARE, TABLES_SHARE = 4, 8
"""Parts of ``max_bytes``: a quarter is for decoders and an eighth for rows and indexes; clips have the rest. A decoder
takes 2-3 MiB at 640x480, a clip of 150 frames 1.3 MiB, its rows 15 kB, its file's index 8 bytes a frame."""
SMALL_TABLES_SHARE = 6
"""Part of what is for rows and indexes: a sixth is for the indexes and one for the rows of single episodes. The rest is
for tables' footers and row groups that episodes share: one that isn't kept is fetched again for each of them."""
PARSER_THREADS = 2
"""Threads that parse parquet and MP4 indexes beside those that decode: short work, which mustn't queue behind them."""
PLANNED_AT_ONCE = 32
"""Episodes that are planned side by side. With all of a pool at once the first clip waits for the last index, and the
network for the processor."""
COMMON_SHARE = 4
"""Of what is for clips, all but a quarter is for those that a rank's loader workers have in common. The rest, divided
among them, is for what finds no room there. Of what is for rows and indexes, the quarter is common."""
SMALL_SHARE = 8
"""An eighth of the requests to a host is left to plans and rows: the clips that somebody waits for are urgent too, and
of no use before their rows."""


class DatasetEngine:
    """Entered with ``async with``; loop-bound. Leaving it ends what is under way and closes everything.

    Args:
        config: Bounds, limits and threads, for all datasets together.
    """

    fetcher: Fetcher
    reader: RangeReader
    """The fetcher, behind the disk cache where there is one."""
    disk: DiskReader | None = None
    clips: ByteCache
    rank: RankReader | None = None
    """Of all loader workers of the rank, where this is one of them."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self._stack = AsyncExitStack()
        tables_bytes = config.max_bytes // TABLES_SHARE
        self._decoder_bytes = max(1, config.max_bytes // DECODERS_SHARE)
        self._clips_bytes = max(1, config.max_bytes - tables_bytes - self._decoder_bytes)
        if isinstance(config, WorkerConfig) and config.readers_name is not None:
            self._clips_bytes = max(1, self._clips_bytes // COMMON_SHARE)
            tables_bytes -= tables_bytes // COMMON_SHARE
        small_bytes = tables_bytes // SMALL_TABLES_SHARE
        rows_bytes = tables_bytes - 2 * small_bytes
        self.run = partial(run_sync, limiter=anyio.CapacityLimiter(PARSER_THREADS))
        """Runs parsers off the loop."""
        self.read_files = partial(run_sync, limiter=anyio.CapacityLimiter(FILE_THREADS))
        """Runs reads of members' small local files off the loop. A dataset that is alone leaves them to its reader."""
        self.decode = DecodePool(config.decode_threads or usable_cpus())
        self.planning, self.locating = Limiter(PLANNED_AT_ONCE), Limiter(PLANNED_AT_ONCE)
        """Limiters for indexes of videos, and for footers of tables."""
        requests = config.fetch.max_requests_per_host
        self.fetching_clips = Limiter(max(1, requests - requests // SMALL_SHARE))
        self.plans: SharedLRU[tuple[int, Stretch], Any] = SharedLRU(small_bytes // 2)
        """Places of the clips of stretches, by the dataset's number and the stretch."""
        self.tables: SharedLRU[tuple[int, Stretch | int], Any] = SharedLRU(small_bytes // 2)
        """Rows of episodes, by the numbers of the dataset and the episode; of stretches, where there are pictures."""
        self.rows = RowCache(rows_bytes)
        self.indexes: SharedLRU[str, VideoFile] = SharedLRU(small_bytes)
        """Indexes of videos, by url."""
        self._datasets = 0
        self._open_clips = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        config = self.config
        if isinstance(config, WorkerConfig) and config.readers_name is not None:
            self.fetcher = Fetcher(config.fetch)  # fetches nothing, and says so
            rank = RankReader(
                config.readers_name,
                partial(self._opened_reader, config.rank),
                clips_bytes=pool_bytes(config),
                small_bytes=config.rank.max_bytes // TABLES_SHARE // COMMON_SHARE,
                workers=config.workers,
            )
            self.reader = self.rank = await stack.enter_async_context(rank)
        else:
            self.reader = await stack.enter_async_context(self._opened_reader(config))
        self.clips = await stack.enter_async_context(ByteCache(self.reader, max_bytes=self._clips_bytes))
        self.clip_budget = Budget(self.clips.max_bytes)
        """What passes have paid for clips."""
        self.room: ReservationQueue[None, None] = ReservationQueue(LeasedLRU(self.clips.max_bytes))
        """In the byte cache: for all clips of a stretch, before the first is asked for. Its LRU stays empty: the byte
        cache itself sets room aside clip by clip."""
        self.decoders = _decoder_cache(config, self._decoder_bytes)
        self.decoder_keys: dict[CacheKey, set[tuple[object, ...]]] = {}
        """Keys that the clips' decoders may be kept by, by the clip's key in the byte cache, as long as that has it."""
        self.clips.on_evict(self.drop_decoders)
        stack.callback(self.decoders.close)
        stack.callback(self.decode.close)
        self.group = await anyio.create_task_group().__aenter__()
        stack.push_async_callback(end_tasks, self.group)

    @asynccontextmanager
    async def _opened_reader(self, config: StreamConfig) -> AsyncIterator[RangeReader]:
        # Clips land in the cache's memory; what else is fetched is small, and no bound speaks of memory kept for it.
        async with Fetcher(config.fetch, _memory=MemoryPool(0)) as self.fetcher:
            if config.disk_cache_dir is None:
                yield self.fetcher
                return
            tier = DiskTier(config.disk_cache_dir, config.disk_cache_max_bytes)
            async with DiskReader(self.fetcher, tier) as self.disk:
                yield self.disk

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    async def list_tables(self, directory: str) -> list[str] | None:
        """See ListTables. Rare, so that a worker that doesn't fetch itself connects for it."""
        if self.rank is None:
            return await list_tables(self.fetcher, directory)
        async with Fetcher(rank_config(self.config).fetch) as fetcher:
            return await list_tables(fetcher, directory)

    def drop_decoders(self, clip: CacheKey) -> None:
        """Forget the decoders of a clip whose bytes are gone."""
        for key in self.decoder_keys.pop(clip, ()):
            self.decoders.discard(key)

    def clips_statistics(self) -> CacheStatistics:
        """Of the clips in memory; in the loader worker that reads for the rank, of those of all its workers."""
        common = None if self.rank is None else self.rank.clips
        return (common or self.clips).statistics()

    def join(self, open_clips: int) -> int:
        """A dataset joins, with so many clips in its pool; the number that it has here.

        The pool needs a decoder for each of its clips, since frames are drawn from all of them in turn, and room for
        half as many that were read through. Where there is none, one that has been used lately, though nobody will
        again, stays in place of one that is needed next; that one, opened anew, takes the place of the one after it,
        and so on, once around.
        """
        self._open_clips += open_clips + open_clips // 2
        if self.config.decoder_cache_size is None and SIZE_VARIABLE not in os.environ:
            self.decoders.allow(self._open_clips)
        self._datasets += 1
        return self._datasets


def pool_bytes(config: StreamConfig) -> int:
    """What a rank has for the clips that it draws from, for any number of loader workers the same."""
    rank = rank_config(config)
    clips_bytes = rank.max_bytes - rank.max_bytes // TABLES_SHARE - rank.max_bytes // DECODERS_SHARE
    return max(1, clips_bytes - clips_bytes // COMMON_SHARE)


def _decoder_cache(config: StreamConfig, max_bytes: int) -> DecoderCache[FrameDecoder]:
    if config.decoder_cache_size is None:
        return DecoderCache(max_bytes=max_bytes)
    return DecoderCache(config.decoder_cache_size, max_bytes=max_bytes)

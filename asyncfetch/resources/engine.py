"""The engine that the open datasets of one reader share: connections, caches, threads, and the bounds on all of them.

It knows of no format: what one keeps of its own files, for all its datasets together, it asks for by ``shared``.

A dataset has one of its own, unless it is a member of a mixture: hundreds of those are read by one engine. What an open
dataset takes besides is its metadata.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from asyncfetch.cache import ByteCache, DiskTier
from asyncfetch.cache.disk import DiskReader
from asyncfetch.cache.rank_reader import RankReader
from asyncfetch.config import MemoryShares, WorkerConfig, rank_config
from asyncfetch.decode import DecodePool, DecoderCache, FrameDecoder
from asyncfetch.decode.cache import SIZE_VARIABLE
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.engine import FILE_THREADS
from asyncfetch.fetch.limiter import Limiter
from asyncfetch.resources.room import ClipRoom
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.runtime.single_flight import SharedLRU
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.unpacked import UnpackedReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from asyncfetch.cache import CacheKey, CacheStatistics
    from asyncfetch.config import StreamConfig
    from asyncfetch.fetch import RangeReader

T = TypeVar("T")

PLANNED_AT_ONCE = 32
"""Episodes that are planned side by side. With all of a pool at once the first clip waits for the last index, and the
network for the processor."""
PARSER_THREADS = 2
"""Threads that parse tables and MP4 indexes beside those that decode: short work, which mustn't queue behind them."""
SMALL_SHARE = 8
"""An eighth of the requests to a host is left to plans and rows: clips that are waited for are urgent too, and useless
before their rows."""


class Engine:
    """Entered with ``async with``; loop-bound. Leaving it ends what is under way and closes everything.

    Args:
        config: Bounds, limits and threads, for all datasets together.
    """

    fetcher: Fetcher
    reader: RangeReader
    """The fetcher, behind the disk cache where there is one; it unpacks what is compressed."""
    disk: DiskReader | None = None
    clips: ByteCache
    rank: RankReader | None = None
    """The reader that all loader workers of the rank share, where this is one of them."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.memory = MemoryShares.of(config)
        self._stack = AsyncExitStack()
        self.run = partial(run_sync, limiter=anyio.CapacityLimiter(PARSER_THREADS))
        """Runs parsers off the loop."""
        self.read_files = partial(run_sync, limiter=anyio.CapacityLimiter(FILE_THREADS))
        """Runs reads of members' small local files off the loop. A dataset that is alone leaves them to its reader."""
        self.decode = DecodePool(config.decode_threads)
        requests = config.fetch.max_requests_per_host
        self.fetching_clips = Limiter(max(1, requests - requests // SMALL_SHARE))
        self.planning, self.locating = Limiter(PLANNED_AT_ONCE), Limiter(PLANNED_AT_ONCE)
        """Limiters for indexes of videos, and for footers of tables."""
        small_bytes = self.memory.indexes_bytes
        self.plans: SharedLRU[tuple[int, Any], Any] = SharedLRU(small_bytes // 2)
        """Places of the bytes of stretches, by the dataset's number and the stretch."""
        self.beside: SharedLRU[tuple[int, Any], Any] = SharedLRU(small_bytes // 2)
        """Parts that formats have beside them, such as rows, by the dataset's number and the format's name for it."""
        self.indexes: SharedLRU[Any, Any] = SharedLRU(small_bytes)
        """Indexes of files, by url, and where in the file the video is."""
        self._shared: dict[Callable[..., Any], Any] = {}
        self._open_clips = self._datasets = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        config, memory = self.config, self.memory
        if isinstance(config, WorkerConfig) and config.readers_name is not None:
            self.fetcher = Fetcher(config.fetch)  # fetches nothing, and says so
            rank = RankReader(
                config.readers_name,
                partial(self._opened_reader, config.rank),
                clips_bytes=memory.pool_bytes,
                small_bytes=memory.common_small_bytes,
                workers=config.workers,
            )
            self.reader = self.rank = await stack.enter_async_context(rank)
        else:
            self.reader = await stack.enter_async_context(self._opened_reader(config))
        self.clips = await stack.enter_async_context(ByteCache(self.reader, max_bytes=memory.clips_bytes))
        self.room = ClipRoom(memory.clips_bytes)
        size, decoders_bytes = config.decoder_cache_size, memory.decoders_bytes
        self.decoders: DecoderCache[FrameDecoder] = (
            DecoderCache(max_bytes=decoders_bytes) if size is None else DecoderCache(size, max_bytes=decoders_bytes)
        )
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
                yield UnpackedReader(self.fetcher, max_page_bytes=config.max_bytes // 8)
                return
            tier = DiskTier(config.disk_cache_dir, config.disk_cache_max_bytes)
            async with DiskReader(self.fetcher, tier) as self.disk:
                yield UnpackedReader(
                    self.disk,
                    directory=tier.path,
                    max_bytes=tier.max_bytes,
                    max_page_bytes=config.max_bytes // 8,
                )

    @asynccontextmanager
    async def lister(self) -> AsyncIterator[Fetcher]:
        """A fetcher that lists directories. Rare, so that a loader worker, which fetches nothing, connects for it."""
        if self.rank is None:
            yield self.fetcher
        else:
            async with Fetcher(rank_config(self.config).fetch) as fetcher:
                yield fetcher

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    def drop_decoders(self, clip: CacheKey) -> None:
        """Forget the decoders of a clip that lost its bytes."""
        for key in self.decoder_keys.pop(clip, ()):
            self.decoders.discard(key)

    def clips_statistics(self) -> CacheStatistics:
        """A snapshot of the clips in memory; of all its workers' in the loader worker that reads for the rank."""
        common = None if self.rank is None else self.rank.clips
        return (common or self.clips).statistics()

    def shared(self, make: Callable[[int], T], max_bytes: int) -> T:
        """Return what ``make`` gives, with a bound in bytes; the same for all datasets."""
        if make not in self._shared:
            self._shared[make] = make(max_bytes)
        found: T = self._shared[make]
        return found

    def join(self, open_clips: int) -> int:
        """A dataset joins, with so many clips in its pool; the number that it has here.

        The pool needs a decoder for each of its clips, since frames are drawn from all of them in turn, and room for
        half as many that were read through. With less, a decoder that was used lately and is no longer needed stays in
        place of one that is needed next, which then takes the place of the one after it, and so on.
        """
        self._open_clips += open_clips + open_clips // 2
        if self.config.decoder_cache_size is None and SIZE_VARIABLE not in os.environ:
            self.decoders.allow(self._open_clips)
        self._datasets += 1
        return self._datasets

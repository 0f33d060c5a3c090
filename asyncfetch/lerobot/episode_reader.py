"""The episodes of an open dataset, for who reads them: passes, mixtures, and the dataset's own verbs."""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import anyio

from asyncfetch.errors import (
    LEAVE_OUT_FEATURE,
    AccessDenied,
    AsyncFetchError,
    CacheError,
    ClosedError,
    FormatError,
    NotFound,
    redact_url,
)
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.lerobot.engine import DECODERS_SHARE, TABLES_SHARE
from asyncfetch.lerobot.episode_cache import EpisodeCache
from asyncfetch.lerobot.samples import SampleBuilder, resolve_windows
from asyncfetch.lerobot.scan import scan
from asyncfetch.lerobot.stretch import Stretch
from asyncfetch.observe import Figures, Quantiles
from asyncfetch.runtime.concurrently import copied, gather, kept

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

    import numpy as np
    import pyarrow as pa
    from anyio.abc import TaskGroup
    from numpy.typing import NDArray

    from asyncfetch.cache import CacheStatistics
    from asyncfetch.cache.disk import DiskStatistics
    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import DecodePool, DecodePoolStatistics, DecoderCacheStatistics
    from asyncfetch.fetch import FetchStatistics
    from asyncfetch.lerobot.engine import Budget, DatasetEngine
    from asyncfetch.lerobot.episode_cache import EpisodeCacheStatistics, HeldEpisode
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.info import DepthUnit
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.lerobot.samples import ImageDtype, Windows
    from asyncfetch.observe.report import Report
    from asyncfetch.runtime.fork import LoopGuard

__all__ = ["DatasetStatistics", "EpisodeReader"]

MAX_PREFETCHES = 1024
"""Stretches that may be asked for and not yet be done; more would only queue up behind the host's limit."""
MAX_FAILURES = 1024
"""Failures that are remembered; the oldest is forgotten, and its stretch is then fetched again when it is read."""


class _Try:
    """The state that all who ask for a stretch share until the first is told what came of it; later ones try anew.

    Those who are told later, because they still had something to end, have nothing to say of what was asked meanwhile.
    """

    __slots__ = ("__weakref__", "is_ahead")

    def __init__(self) -> None:
        self.is_ahead = False
        """True if a task of its own fetches the stretch."""


class Prefetches:
    """Prefetches of one dataset. Loop-bound, as that is.

    Args:
        fetch: Brings a stretch into memory.
    """

    def __init__(self, fetch: Callable[[Stretch], Awaitable[None]]) -> None:
        self._fetch_episode = fetch
        self._under_way = 0
        self._tries: WeakValueDictionary[Stretch, _Try] = WeakValueDictionary()  # as long as somebody is at it
        self._ahead = Caller(urgent=False)
        self._failures: OrderedDict[Stretch, AsyncFetchError] = OrderedDict()

    def start(self, stretch: Stretch, group: TaskGroup) -> None:
        """Fetch it in a task of this group, unless one is at it; what it failed by before is forgotten.

        Raises:
            CacheError: 1,024 are under way.
        """
        self._failures.pop(stretch, None)
        attempt = self._try(stretch)
        if attempt.is_ahead:
            return
        if self._under_way >= MAX_PREFETCHES:
            raise CacheError(f"{MAX_PREFETCHES} prefetches are under way; await ready() of some before asking for more")
        self._under_way += 1
        attempt.is_ahead = True
        group.start_soon(self._run, stretch, attempt, name=f"prefetch episode {stretch.episode}")

    async def _run(self, stretch: Stretch, attempt: _Try) -> None:
        try:
            with calling(Caller(urgent=False, behind=self._ahead)):
                await self._fetch(stretch, attempt)
        except AsyncFetchError:
            pass  # whoever reads this stretch gets it from self._failures, or meets it again
        finally:
            self._under_way -= 1

    def is_fetching(self, stretch: Stretch) -> bool:
        """Return whether a task of its own is at it."""
        attempt = self._tries.get(stretch)
        return attempt is not None and attempt.is_ahead

    async def ready(self, stretch: Stretch) -> None:
        """Wait until it is in memory, fetching it where nobody did. Raises what its fetch ended with."""
        self.raise_failure(stretch)
        await self._fetch(stretch, self._try(stretch))

    def raise_failure(self, stretch: Stretch) -> None:
        """Raise what fetching it ended with, if that failed and wasn't started again since."""
        failure = self._failures.get(stretch)
        if failure is not None:
            raise copied(failure)

    @contextmanager
    def told(self, stretch: Stretch, *, is_whole: bool = True) -> Iterator[None]:
        """Around what brings the stretch, or a part of it, beside these fetches: who gets its error is told, too."""
        attempt = self._try(stretch)
        try:
            yield
        except AsyncFetchError:
            self._end(stretch, attempt)
            raise
        if is_whole:
            self._end(stretch, attempt)

    async def _fetch(self, stretch: Stretch, attempt: _Try) -> None:
        try:
            await self._fetch_episode(stretch)
        except AsyncFetchError as error:
            # After CacheError there may be room when it is asked for again.
            if self._end(stretch, attempt) and not isinstance(error, CacheError):
                self._failures[stretch] = kept(error)
                if len(self._failures) > MAX_FAILURES:
                    self._failures.popitem(last=False)
            raise
        self._end(stretch, attempt)

    def _try(self, stretch: Stretch) -> _Try:
        return self._tries.setdefault(stretch, _Try())

    def _end(self, stretch: Stretch, attempt: _Try) -> bool:
        """Return what came of a try; False where somebody was told before."""
        if self._tries.get(stretch) is not attempt:
            return False
        del self._tries[stretch]
        return True


@dataclass(frozen=True, slots=True, repr=False)
class DatasetStatistics(Figures):
    """A snapshot of everything that works for one open dataset. Counters are since it was opened."""

    _telling = ("fetch", "decode", "clips")

    fetch: FetchStatistics
    clips: CacheStatistics
    episodes: EpisodeCacheStatistics
    decoders: DecoderCacheStatistics
    decode: DecodePoolStatistics
    disk: DiskStatistics | None = None
    """Statistics of the disk cache; None without one."""
    hand_over: Quantiles = field(default_factory=Quantiles)
    """Seconds from the loop's thread to a synchronous consumer that waits, for each few samples; of a Stream's
    statistics."""

    def without_hosts(self) -> DatasetStatistics:
        """Return the same without what is known of each host."""
        return replace(self, fetch=replace(self.fetch, hosts={}))


class EpisodeReader:
    """Reads an open dataset's episodes, and keeps what was read of them within the engine's bounds.

    Belongs to the dataset's loop, as ``check`` says: WrongLoop elsewhere, and ClosedError once the dataset was closed.
    Verbs take a stretch, or the number of an episode for all of it, and raise EpisodeNotFound for one that isn't there.

    Args:
        url: The dataset's root.
        metadata: All of it.
        engine: What it reads by.
        config: Bounds, limits and threads.
        image_dtype: Of the pictures in its samples.
        depth_unit: Of depth cameras.
        guard: Knows the loop that opened the dataset.
    """

    def __init__(
        self,
        url: str,
        metadata: Metadata,
        engine: DatasetEngine,
        *,
        config: StreamConfig,
        image_dtype: ImageDtype,
        depth_unit: DepthUnit,
        guard: LoopGuard,
    ) -> None:
        self.config = config
        self.pass_report: Callable[[], Report] | None = None
        """Gives the report of the latest pass over it."""
        self.is_closed = False
        self._url = url
        self._metadata = metadata
        self._engine = engine
        self._image_dtype: ImageDtype = image_dtype
        self._depth_unit: DepthUnit = depth_unit
        self._guard = guard
        self._prefetches = Prefetches(self._load)
        self._episodes = EpisodeCache(
            engine,
            engine.join(config.pool_segments * len(metadata.cameras)),
            metadata=metadata,
            backend=config.decoder,
            tolerance_seconds=config.tolerance_seconds,
            depth_unit=depth_unit,
        )

    def check(self) -> None:
        """Raise WrongLoop or ClosedError where it can't be used."""
        if self.is_closed:
            raise ClosedError(f"{redact_url(self._url)} is closed: use it inside of `async with open_dataset(url)`")
        self._guard.check()

    @property
    def fetches(self) -> bool:
        """Whether it fetches by itself, as of loader workers that read as one just one does."""
        return self._engine.rank is None or self._engine.rank.clips is not None

    @property
    def clip_budget(self) -> Budget:
        """The budget that passes over this dataset, and over others of its engine, pay for clips from."""
        return self._engine.clip_budget

    @property
    def decode_pool(self) -> DecodePool:
        """The threads that this dataset decodes in."""
        return self._engine.decode

    def episode(self, episode: int) -> Episode:
        """Return where its rows and videos are."""
        self.check()
        return self._metadata.episodes[episode]

    def _stretch(self, wanted: Stretch | int) -> Stretch:
        """The stretch that is meant. All of an episode is the same one, however far windows reach."""
        episode = self.episode(wanted.episode if isinstance(wanted, Stretch) else wanted)
        if isinstance(wanted, Stretch) and (wanted.start, wanted.stop) != (0, episode.length):
            return wanted
        return Stretch(episode.index, 0, episode.length)

    def prefetch(self, wanted: Stretch | int) -> None:
        """Start fetching a stretch; see LeRobotDataset."""
        self._prefetches.start(self._stretch(wanted), self._engine.group)

    async def ready(self, wanted: Stretch | int) -> None:
        """Wait until a stretch is in memory; see LeRobotDataset."""
        await self._prefetches.ready(self._stretch(wanted))

    async def hold_beside_passes(self, wanted: Stretch | int) -> HeldEpisode:
        """The stretch, or CacheError as soon as its clips don't fit beside those that passes have paid for.

        Where all of the episode is in memory, or on its way, it is that, and nothing is fetched twice.
        """
        stretch = self._stretch(wanted)
        whole = self._stretch(stretch.episode)
        self._prefetches.raise_failure(whole)
        if self._prefetches.is_fetching(whole) or self._episodes.is_held(whole):
            stretch = whole
        elif (held := self._episodes.hold_nowait(whole)) is not None:
            return held
        with self._prefetches.told(stretch):
            return await self._hold_beside_passes(stretch)

    async def hold(self, wanted: Stretch | int) -> HeldEpisode:
        """The stretch in memory until it is released, fetched where needed; for a pass, which pays first."""
        stretch = self._stretch(wanted)
        with self._prefetches.told(stretch):
            return await self._episodes.hold(stretch, paid=True)

    async def hold_common(self, wanted: Stretch | int) -> HeldEpisode | None:
        """The same in memory that all loader workers of the rank share; None where there is none, or no room in it."""
        stretch = self._stretch(wanted)
        with self._prefetches.told(stretch):
            return await self._episodes.hold_common(stretch)

    def raise_priority(self, wanted: Stretch | int) -> None:
        """Somebody waits now for a stretch that was read ahead; for a pass."""
        self._episodes.raise_priority(self._stretch(wanted))

    async def clip_bytes(self, wanted: Stretch | int) -> int:
        """Memory that the clips of a stretch take; fetches its videos' indexes where needed."""
        stretch = self._stretch(wanted)
        with self._prefetches.told(stretch, is_whole=False):
            return await self._episodes.clip_bytes(stretch)

    async def range_bytes(self, wanted: Stretch | int) -> int:
        """Return what is fetched for the clips of a stretch; fetches its videos' indexes where needed."""
        return await self._episodes.range_bytes(self._stretch(wanted))

    async def locate_rows(self, wanted: Stretch | int) -> None:
        """Fetch the footer of a stretch's table where needed; for a pass, beside ``clip_bytes``."""
        stretch = self._stretch(wanted)
        with self._prefetches.told(stretch, is_whole=False):
            await self._episodes.locate_rows(stretch)

    async def file_bytes(self, url: str) -> int | None:
        """Return the size of one of its files; None where it isn't there."""
        self.check()
        try:
            return (await self._engine.reader.stat(url)).size
        except (AccessDenied, NotFound):  # S3 denies access to what isn't there to those who may not list
            return None

    def rows(self, keys: Sequence[str], positions: NDArray[np.int64]) -> AsyncGenerator[pa.RecordBatch, None]:
        """Rows of the tables alone; see ``LeRobotDataset.columns``.

        Args:
            keys: Columns that are there.
            positions: Those of the episodes in the dataset's table, in the order in which they are read.
        """
        return scan(self._episodes.rows, self._engine.reader, keys, positions, run=self._engine.run)

    def sample_builder(self, windows: Windows | None) -> SampleBuilder:
        """Return what makes samples with these windows, for the stream above. ConfigError where they don't fit."""
        features = self._metadata.sample_features
        if "task" in features:
            where = f"{redact_url(self._url)}/meta/info.json"
            message = f"{where} calls a feature 'task', where samples have the words of theirs"
            raise FormatError(message, remedy=LEAVE_OUT_FEATURE)
        offsets = resolve_windows(windows, fps=self._metadata.info.fps, keys=features)
        return SampleBuilder(
            features=features,
            tasks=self._metadata.tasks,
            windows=offsets,
            image_dtype=self._image_dtype,
            depth_unit=self._depth_unit,
        )

    def statistics(self) -> DatasetStatistics:
        """A snapshot of the engine, the caches and the decode threads; after closing too."""
        engine = self._engine
        return DatasetStatistics(
            fetch=engine.fetcher.statistics(),
            clips=engine.clips_statistics(),
            episodes=self._episodes.statistics(),
            decoders=engine.decoders.statistics(),
            decode=engine.decode.statistics(),
            disk=None if engine.disk is None else engine.disk.disk_statistics(),
        )

    async def _load(self, stretch: Stretch) -> None:
        (await self._hold_beside_passes(stretch)).release()

    async def _hold_beside_passes(self, stretch: Stretch) -> HeldEpisode:
        """The stretch, or CacheError as soon as its clips don't fit beside those that passes have paid for.

        For room that other calls like this one hold it waits: they give it back by themselves.
        """
        held = self._episodes.hold_nowait(stretch) or await self._episodes.hold_common(stretch)
        if held is not None:
            return held
        size_bytes, _ = await gather(
            partial(self._episodes.clip_bytes, stretch), partial(self._episodes.locate_rows, stretch)
        )
        assert size_bytes is not None
        what = f"the clips of {stretch.name(self._metadata.episodes[stretch.episode].length)} take {size_bytes} bytes"
        if size_bytes > self.clip_budget.max_bytes:
            raise self._no_room(what, size_bytes)
        with anyio.CancelScope() as scope:

            def check() -> None:
                if not (self.clip_budget.fits(size_bytes) or self._episodes.is_paid(stretch)):
                    scope.cancel()

            with self.clip_budget.watched(check):
                check()
                held = await self._episodes.hold(stretch)
        if held is None:
            passes_bytes = self.clip_budget.used_bytes
            raise self._no_room(
                f"{what} beside the {passes_bytes} that passes over this dataset hold",
                size_bytes + passes_bytes,
            )
        return held

    def _no_room(self, what: str, needed_bytes: int) -> CacheError:
        max_bytes = self.config.max_bytes
        least_bytes = math.ceil(needed_bytes / (1 - 1 / DECODERS_SHARE - 1 / TABLES_SHARE))
        return CacheError(
            f"{what}, but {max_bytes=} leaves {self.clip_budget.max_bytes} for clips: set StreamConfig(max_bytes=...) "
            f"to at least {least_bytes}, times the number of loader workers"
        )

"""The episodes of an open dataset, for their readers: passes, mixtures, and the dataset's own verbs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

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
from asyncfetch.lerobot.episode_cache import EpisodeCache
from asyncfetch.lerobot.samples import SampleBuilder, resolve_windows
from asyncfetch.lerobot.scan import scan
from asyncfetch.lerobot.stretch import Stretch
from asyncfetch.observe import Figures, Quantiles

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    import numpy as np
    import pyarrow as pa
    from anyio.abc import TaskGroup
    from numpy.typing import NDArray

    from asyncfetch.cache import CacheStatistics
    from asyncfetch.cache.disk import DiskStatistics
    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import DecodePoolStatistics, DecoderCacheStatistics, PictureSize
    from asyncfetch.fetch import FetchStatistics
    from asyncfetch.lerobot.engine import DatasetEngine
    from asyncfetch.lerobot.episode_cache import EpisodeCacheStatistics
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.held_episode import HeldEpisode
    from asyncfetch.lerobot.info import DepthUnit
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.lerobot.samples import ImageDtype, Windows
    from asyncfetch.observe.report import Report
    from asyncfetch.runtime.fork import LoopGuard

MAX_PREFETCHES = 1024
"""Stretches that may be asked for and not yet be done; more would only queue up behind the host's limit."""


class Prefetches:
    """Prefetches of one dataset. Loop-bound, as that is.

    All waiters for the same fetch get its error. It isn't kept: a later call asks anew.

    Args:
        fetch: Brings a stretch into memory.
    """

    def __init__(self, fetch: Callable[[Stretch], Awaitable[None]]) -> None:
        self._fetch = fetch
        self._under_way: set[Stretch] = set()
        self._ahead = Caller(urgent=False)

    def __contains__(self, stretch: Stretch) -> bool:
        """Return whether one is at it."""
        return stretch in self._under_way

    def start(self, stretch: Stretch, group: TaskGroup) -> None:
        """Fetch it in a task of this group, unless one is at it.

        Raises:
            CacheError: 1,024 are under way.
        """
        if stretch in self._under_way:
            return
        if len(self._under_way) >= MAX_PREFETCHES:
            raise CacheError(f"{MAX_PREFETCHES} prefetches are under way; await ready() of some before asking for more")
        self._under_way.add(stretch)
        group.start_soon(self._run, stretch, name=f"prefetch episode {stretch.episode}")

    async def _run(self, stretch: Stretch) -> None:
        try:
            with calling(Caller(urgent=False, behind=self._ahead)):
                await self._fetch(stretch)
        except AsyncFetchError:
            pass  # a reader of this stretch asks for it anew
        finally:
            self._under_way.discard(stretch)


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
        size: What pictures are brought to.
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
        size: PictureSize | None,
        guard: LoopGuard,
    ) -> None:
        self.config, self.engine = config, engine
        self.pass_report: Callable[[], Report] | None = None
        """Gives the report of the latest pass over it."""
        self.is_closed = False
        self._url = url
        self._metadata = metadata
        self._image_dtype: ImageDtype = image_dtype
        self._depth_unit: DepthUnit = depth_unit
        self._size = size
        self._guard = guard
        self._prefetches = Prefetches(self._load)
        self._episodes = EpisodeCache(
            engine,
            engine.join(config.pool_segments * len(metadata.cameras)),
            metadata=metadata,
            backend=config.decoder,
            tolerance_seconds=config.tolerance_seconds,
            depth_unit=depth_unit,
            size=size,
        )

    def check(self) -> None:
        """Raise WrongLoop or ClosedError where it can't be used."""
        if self.is_closed:
            raise ClosedError(f"{redact_url(self._url)} is closed: use it inside of `async with open_dataset(url)`")
        self._guard.check()

    @property
    def fetches(self) -> bool:
        """True if it fetches by itself: of loader workers that read as one, one does."""
        return self.engine.rank is None or self.engine.rank.clips is not None

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
        self._prefetches.start(self._stretch(wanted), self.engine.group)

    async def ready(self, wanted: Stretch | int) -> None:
        """Wait until a stretch is in memory; see LeRobotDataset."""
        await self._load(self._stretch(wanted))

    async def hold(self, wanted: Stretch | int) -> HeldEpisode:
        """The stretch in memory until it is released, for a moment, fetched where needed.

        Where all of the episode is in memory, or on its way, it is that, and nothing is fetched twice.

        Raises:
            CacheError: Its clips don't fit beside what passes hold. It waits for room that calls like this one hold.
        """
        stretch = self._stretch(wanted)
        whole = self._stretch(stretch.episode)
        if whole in self._prefetches or self._episodes.is_held(whole):
            stretch = whole
        return self._episodes.hold_nowait(whole) or await self._hold(stretch)

    def claim(self, wanted: Stretch | int, size_bytes: int) -> HeldEpisode | None:
        """Take the room of a stretch, which takes so much; see EpisodeCache. For a pass."""
        return self._episodes.claim(self._stretch(wanted), size_bytes)

    async def load(self, claimed: HeldEpisode) -> HeldEpisode:
        """Fetch what isn't in memory of a stretch that was claimed; see EpisodeCache. For a pass."""
        return await self._episodes.load(claimed)

    async def hold_common(self, wanted: Stretch | int) -> HeldEpisode | None:
        """Return it in memory that all loader workers of the rank share; None where there is none, or no room in it."""
        return await self._episodes.hold_common(self._stretch(wanted))

    def raise_priority(self, wanted: Stretch | int) -> None:
        """Make a stretch that was read ahead urgent; for a pass."""
        self._episodes.raise_priority(self._stretch(wanted))

    async def clip_bytes(self, wanted: Stretch | int) -> int:
        """Memory that the clips of a stretch take; fetches its videos' indexes where needed."""
        return await self._episodes.clip_bytes(self._stretch(wanted))

    async def range_bytes(self, wanted: Stretch | int) -> int:
        """Return what is fetched for the clips of a stretch; fetches its videos' indexes where needed."""
        return await self._episodes.range_bytes(self._stretch(wanted))

    async def missing_frames(self, wanted: Stretch | int, *, by_rows: bool) -> Mapping[str, int]:
        """See EpisodeCache; reads no clip."""
        return await self._episodes.missing_frames(self._stretch(wanted), by_rows=by_rows)

    async def locate_rows(self, wanted: Stretch | int) -> None:
        """Fetch the footer of a stretch's table where needed; for a pass, beside ``clip_bytes``."""
        await self._episodes.locate_rows(self._stretch(wanted))

    async def file_bytes(self, url: str) -> int | None:
        """Return the size of one of its files; None where it isn't there."""
        self.check()
        try:
            return (await self.engine.reader.stat(url)).size
        except (AccessDenied, NotFound):  # S3 denies access to a missing object where listing isn't allowed
            return None

    def rows(self, keys: Sequence[str], positions: NDArray[np.int64]) -> AsyncGenerator[pa.RecordBatch, None]:
        """Rows of the tables alone; see ``LeRobotDataset.columns``.

        Args:
            keys: Columns that are there.
            positions: Those of the episodes in the dataset's table, in the order in which they are read.
        """
        return scan(self._episodes.rows, self.engine.reader, keys, positions, run=self.engine.run)

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
            size=self._size,
            found_picture=self._metadata.found_picture,
        )

    def statistics(self) -> DatasetStatistics:
        """A snapshot of the engine, the caches and the decode threads; after closing too."""
        engine = self.engine
        return DatasetStatistics(
            fetch=engine.fetcher.statistics(),
            clips=engine.clips_statistics(),
            episodes=self._episodes.statistics(),
            decoders=engine.decoders.statistics(),
            decode=engine.decode.statistics(),
            disk=None if engine.disk is None else engine.disk.disk_statistics(),
        )

    async def _load(self, stretch: Stretch) -> None:
        (await self._hold(stretch)).release()

    async def _hold(self, stretch: Stretch) -> HeldEpisode:
        held = await self._episodes.hold(stretch)
        if held is None:
            room, memory = self.engine.room, self.engine.memory
            size_bytes = await self._episodes.clip_bytes(stretch)
            needed_bytes = room.pass_bytes + size_bytes
            raise CacheError(
                f"the clips of {stretch.name(self._metadata.episodes[stretch.episode].length)} take {size_bytes} bytes "
                f"beside the {room.pass_bytes} that passes over this dataset hold, but max_bytes={memory.max_bytes} "
                f"leaves {memory.clips_bytes} for clips: set StreamConfig(max_bytes=...) to at least "
                f"{memory.max_bytes_for_clips(needed_bytes)}"
            )
        return held

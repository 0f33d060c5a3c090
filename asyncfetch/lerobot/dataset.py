"""A LeRobot dataset at any URL, open for reading; its episodes that are fetched ahead of who reads them."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

import anyio
import numpy as np

from asyncfetch.config import PrivateUrl, StreamConfig, stream_config
from asyncfetch.config.checks import explains_keywords
from asyncfetch.errors import (
    LEAVE_OUT_FEATURE,
    AccessDenied,
    AsyncFetchError,
    CacheError,
    ClosedError,
    ConfigError,
    FormatError,
    FrameMissing,
    NotFound,
    redact_url,
)
from asyncfetch.fetch.limiter import Caller, calling
from asyncfetch.lerobot.engine import DECODERS_SHARE, TABLES_SHARE, DatasetEngine
from asyncfetch.lerobot.episode_cache import EpisodeCache
from asyncfetch.lerobot.info import depth_stats
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.lerobot.samples import ImageDtype, Sample, SampleBuilder, Windows, resolve_windows
from asyncfetch.lerobot.scan import scan
from asyncfetch.lerobot.version2 import load_version2
from asyncfetch.observe import Figures, Quantiles
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import Waits
from asyncfetch.runtime.concurrently import copied, gather, kept
from asyncfetch.runtime.fork import AsyncOnly, LoopGuard

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
    from types import TracebackType

    import pyarrow as pa
    from anyio.abc import TaskGroup

    from asyncfetch.cache import CacheStatistics
    from asyncfetch.cache.disk import DiskStatistics
    from asyncfetch.decode import DecodePool, DecodePoolStatistics, DecoderCacheStatistics
    from asyncfetch.fetch import FetchStatistics
    from asyncfetch.lerobot.engine import Budget
    from asyncfetch.lerobot.episode_cache import EpisodeCacheStatistics, HeldEpisode
    from asyncfetch.lerobot.episode_table import Episode, EpisodeTable
    from asyncfetch.lerobot.info import DepthUnit, Feature
    from asyncfetch.lerobot.metadata import Metadata

__all__ = ["DatasetStatistics", "LeRobotDataset", "Prefetches", "chosen_features", "open_dataset"]

MAX_PREFETCHES = 1024
"""Episodes that may be asked for and not yet be done; more would only queue up behind the host's limit."""
MAX_FAILURES = 1024
"""Failures that are remembered; the oldest is forgotten, and its episode is then fetched again when it is read."""


class _Try:
    """The state that all who ask for an episode share until the first is told what came of it; later ones try anew.

    Those who are told later, because they still had something to end, have nothing to say of what was asked meanwhile.
    """

    __slots__ = ("__weakref__", "is_ahead")

    def __init__(self) -> None:
        self.is_ahead = False
        """True if a task of its own fetches the episode."""


class Prefetches:
    """Prefetches of one dataset. Loop-bound, as that is.

    Args:
        fetch: Brings an episode into memory.
    """

    def __init__(self, fetch: Callable[[Episode], Awaitable[None]]) -> None:
        self._fetch_episode = fetch
        self._under_way = 0
        self._tries: WeakValueDictionary[int, _Try] = WeakValueDictionary()  # as long as somebody is at it
        self._ahead = Caller(urgent=False)
        self._failures: OrderedDict[int, AsyncFetchError] = OrderedDict()

    def start(self, episode: Episode, group: TaskGroup) -> None:
        """Fetch it in a task of this group, unless one is at it; what it failed by before is forgotten.

        Raises:
            CacheError: 1,024 are under way.
        """
        self._failures.pop(episode.index, None)
        attempt = self._try(episode)
        if attempt.is_ahead:
            return
        if self._under_way >= MAX_PREFETCHES:
            raise CacheError(f"{MAX_PREFETCHES} prefetches are under way; await ready() of some before asking for more")
        self._under_way += 1
        attempt.is_ahead = True
        group.start_soon(self._run, episode, attempt, name=f"prefetch episode {episode.index}")

    async def _run(self, episode: Episode, attempt: _Try) -> None:
        try:
            with calling(Caller(urgent=False, behind=self._ahead)):
                await self._fetch(episode, attempt)
        except AsyncFetchError:
            pass  # whoever reads this episode gets it from self._failures, or meets it again
        finally:
            self._under_way -= 1

    async def ready(self, episode: Episode) -> None:
        """Wait until it is in memory, fetching it where nobody did. Raises what its fetch ended with."""
        self.raise_failure(episode)
        await self._fetch(episode, self._try(episode))

    def raise_failure(self, episode: Episode) -> None:
        """Raise what fetching it ended with, if that failed and wasn't started again since."""
        failure = self._failures.get(episode.index)
        if failure is not None:
            raise copied(failure)

    @contextmanager
    def told(self, episode: Episode, *, is_whole: bool = True) -> Iterator[None]:
        """Around what brings the episode, or a part of it, beside these fetches: who gets its error is told, too."""
        attempt = self._try(episode)
        try:
            yield
        except AsyncFetchError:
            self._end(episode, attempt)
            raise
        if is_whole:
            self._end(episode, attempt)

    async def _fetch(self, episode: Episode, attempt: _Try) -> None:
        try:
            await self._fetch_episode(episode)
        except AsyncFetchError as error:
            # After CacheError there may be room when it is asked for again.
            if self._end(episode, attempt) and not isinstance(error, CacheError):
                self._failures[episode.index] = kept(error)
                if len(self._failures) > MAX_FAILURES:
                    self._failures.popitem(last=False)
            raise
        self._end(episode, attempt)

    def _try(self, episode: Episode) -> _Try:
        return self._tries.setdefault(episode.index, _Try())

    def _end(self, episode: Episode, attempt: _Try) -> bool:
        """Return what came of a try; False where somebody was told before."""
        if self._tries.get(episode.index) is not attempt:
            return False
        del self._tries[episode.index]
        return True


@dataclass(frozen=True, slots=True, repr=False)
class DatasetStatistics(Figures):
    """A snapshot of everything that works for one open dataset. Counters are since it was opened."""

    telling = ("fetch", "decode", "clips")

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


LEROBOT_GROUP_FRAMES = 2
"""``g`` of LeRobot's encoder settings."""


class LeRobotDataset(AsyncOnly):
    """An open dataset: metadata at once, samples on demand. Made by ``open_dataset``.

    Loop-bound: use it on the loop that opened it, else it raises WrongLoop; before and after its block, ClosedError.
    Cancelling any of its coroutines leaves it as it was.
    """

    def __init__(
        self,
        url: str,
        *,
        features: Collection[str] | None,
        image_dtype: ImageDtype,
        depth_unit: DepthUnit,
        config: StreamConfig,
        engine: DatasetEngine | None = None,
    ) -> None:
        """``engine`` is one that it shares with other datasets, and doesn't close."""
        self.url = url
        self.config = config
        self.image_dtype: ImageDtype = image_dtype
        self.depth_unit: DepthUnit = depth_unit
        self._chosen = features
        self._given_engine = engine
        self._stack = AsyncExitStack()
        self._guard: LoopGuard | None = None
        self._metadata: Metadata | None = None
        self._prefetches = Prefetches(self._load)
        self._closed = False
        self._builder: SampleBuilder | None = None  # of samples without windows
        self.pass_report: Callable[[], Report] | None = None
        """Gives the report of the latest pass over it."""

    async def __aenter__(self) -> Self:
        if self._guard is not None:
            raise ClosedError(f"{self!r} can be entered only once: call open_dataset again")
        self._guard = LoopGuard("this LeRobotDataset")
        async with AsyncExitStack() as stack:
            try:
                await self._open(stack)
            except NotFound as error:  # most often a typing error: the way to it tells nothing
                raise error.with_traceback(None) from None
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        if self._given_engine is None:
            self._engine = await stack.enter_async_context(DatasetEngine(self.config))
        else:
            self._engine = self._given_engine
        engine = self._engine
        metadata = await load_metadata(
            engine.reader,
            self.url,
            features=self._chosen,
            run=engine.run,
            read_files=None if self._given_engine is None else engine.read_files,
            version2=self._load_version2,
        )
        number = engine.join(self.config.pool_episodes * len(metadata.cameras))
        self._metadata = metadata
        self._episodes = EpisodeCache(
            engine,
            number,
            metadata=metadata,
            backend=self.config.decoder,
            tolerance_seconds=self.config.tolerance_seconds,
            depth_unit=self.depth_unit,
        )

    async def _load_version2(self) -> Metadata:
        engine = self._engine
        loaded = await load_version2(
            engine.reader, self.url, run=engine.run, features=self._chosen, episode_stats=False
        )
        return loaded.metadata

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._closed = True
        await self._stack.__aexit__(kind, error, at)

    # What the metadata says.

    @property
    def metadata(self) -> Metadata:
        """All of it, as read when the dataset was opened."""
        if self._metadata is None:
            raise ClosedError(f"{redact_url(self.url)} isn't open: `async with open_dataset(url) as dataset`")
        return self._metadata

    @property
    def fps(self) -> float:
        """Frames a second, of rows and videos alike."""
        return self.metadata.info.fps

    @property
    def num_episodes(self) -> int:
        """Episodes in the dataset: those that meta/episodes names."""
        return len(self.metadata.episodes)

    @property
    def num_frames(self) -> int:
        """Frames over all episodes; a frame is one row and one picture per camera."""
        return self.metadata.episodes.num_frames

    @property
    def cameras(self) -> tuple[str, ...]:
        """Keys of the video features that are read, depth cameras included."""
        return self.metadata.cameras

    @property
    def features(self) -> Mapping[str, Feature]:
        """The features that are read, by key, in the dataset's order. Audio isn't."""
        return {key: feature for key, feature in self.metadata.features.items() if feature.kind != "audio"}

    @property
    def fingerprint(self) -> str:
        """Equal for equal metadata, wherever it lies: frame rate, features that are read, tasks, lengths and places."""
        return self.metadata.fingerprint

    @property
    def group_frames(self) -> int:
        """Frames of a video's group of pictures, a key frame and what leans on it, as the dataset states it; nominal.

        The largest of the cameras; LeRobot's default where it isn't said, and 1 without cameras.
        """
        infos = [self.metadata.features[camera].info for camera in self.cameras]
        stated = [info.get("video.g") for info in infos]
        return max((g if isinstance(g, int) and g > 0 else LEROBOT_GROUP_FRAMES for g in stated), default=1)

    @property
    def tasks(self) -> Mapping[int, str]:
        """Task string by task_index."""
        return self.metadata.tasks

    @property
    def stats(self) -> Mapping[str, Any] | None:
        """meta/stats.json, but for depth, which is in ``depth_unit``; None where the dataset has none.

        Raises:
            FormatError: It is damaged.
        """
        stats = self.metadata.stats
        return None if stats is None else depth_stats(stats, self.metadata.info.features, self.depth_unit)

    @property
    def episodes(self) -> EpisodeTable:
        """Length, rows and videos of each episode."""
        return self.metadata.episodes

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

    # Reading.

    def prefetch(self, episode: int) -> None:
        """Start fetching an episode, all cameras and rows at once, and return at once.

        It is fetched in the order of these calls, after what somebody waits for: an episode that ``ready`` or
        ``sample`` is called for overtakes the others.

        A failure is kept for ``ready`` and ``sample`` of this episode, until ``prefetch`` is called for it again, which
        tries again. What arrives stays as long as the byte cache has room for it; without room nothing is fetched.

        Raises:
            EpisodeNotFound: The dataset has no such episode.
            DatasetError: The metadata doesn't say where its files are.
            CacheError: 1,024 prefetches are under way; await ``ready`` for some of them.
        """
        self._prefetches.start(self._episode(episode), self._engine.group)

    async def ready(self, episode: int) -> None:
        """Wait until an episode is in memory, fetching it where nobody did.

        Raises:
            EpisodeNotFound: The dataset has no such episode.
            FetchError, FormatError, DatasetError: What its fetch ended with, again at each call until ``prefetch``.
            CacheError: As in ``sample``; the next call tries again.
        """
        await self._prefetches.ready(self._episode(episode))

    async def _load(self, episode: Episode) -> None:
        (await self._hold_beside_passes(episode)).release()

    def _episode(self, episode: int) -> Episode:
        self._check_open()
        return self.metadata.episodes[episode]

    def _check_open(self) -> None:
        if self._guard is None or self._closed:
            raise ClosedError(f"{self!r}: use it inside of `async with open_dataset(url) as dataset`")
        self._guard.check()

    async def sample(self, episode: int, frame: int, *, windows: Windows | None = None) -> Sample:
        """The exact frame of an episode, or an error; never a neighbour.

        Args:
            episode: The episode's number in the dataset, its ``episode_index``.
            frame: Frame in the episode, from 0.
            windows: Seconds or ``frames(...)`` relative to the frame, by feature key.

        Raises:
            EpisodeNotFound, FrameMissing: There is no such episode or frame.
            ConfigError: ``frame`` isn't a whole number, or ``windows`` don't fit the dataset.
            FetchError, FormatError, DatasetError, DecodeError: It could not be read.
            CacheError: The episode's clips don't fit in their cache, beside what passes over this dataset hold: who
                iterates such a pass and awaits this call in between can't wait for it to give room back.
        """
        wanted = self._episode(episode)
        number = self._frame(wanted, frame)
        builder = self._plain_builder() if windows is None else self.sample_builder(windows)
        self._prefetches.raise_failure(wanted)
        with self._prefetches.told(wanted):
            holding = await self._hold_beside_passes(wanted)
        with holding as held:
            samples = await self.decode_pool.run(builder.build, [(held, number, 0)])
        return samples[0]

    async def _hold_beside_passes(self, episode: Episode) -> HeldEpisode:
        """The episode, or CacheError as soon as its clips don't fit beside those that passes have paid for.

        For room that other calls like this one hold it waits: they give it back by themselves.
        """
        held = self._episodes.hold_nowait(episode) or await self._episodes.hold_common(episode)
        if held is not None:
            return held
        size_bytes, _ = await gather(
            partial(self._episodes.clip_bytes, episode), partial(self._episodes.locate_rows, episode)
        )
        assert size_bytes is not None
        if size_bytes > self.clip_budget.max_bytes:
            raise self._no_room(f"the clips of episode {episode.index} take {size_bytes} bytes", size_bytes)
        with anyio.CancelScope() as scope:

            def check() -> None:
                if not (self.clip_budget.fits(size_bytes) or self._episodes.is_paid(episode)):
                    scope.cancel()

            with self.clip_budget.watched(check):
                check()
                held = await self._episodes.hold(episode)
        if held is None:
            passes_bytes = self.clip_budget.used_bytes
            raise self._no_room(
                f"the clips of episode {episode.index} take {size_bytes} bytes beside the {passes_bytes} that passes "
                "over this dataset hold",
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

    def _frame(self, episode: Episode, frame: int) -> int:
        try:
            number = operator.index(frame)
        except TypeError as error:
            raise ConfigError(f"frame must be a whole number, not {frame!r}") from error
        if not 0 <= number < episode.length:
            message = f"episode {episode.index} has frames [0, {episode.length}), not {number}"
            raise FrameMissing(f"{message}, in {redact_url(self.url)}")
        return number

    def sample_builder(self, windows: Windows | None) -> SampleBuilder:
        """Return what makes samples with these windows, for the stream above. ConfigError where they don't fit."""
        features = self.features
        if "task" in features:
            where = f"{redact_url(self.url)}/meta/info.json"
            message = f"{where} calls a feature 'task', where samples have the words of theirs"
            raise FormatError(message, remedy=LEAVE_OUT_FEATURE)
        offsets = resolve_windows(windows, fps=self.fps, keys=features)
        return SampleBuilder(
            features=features,
            tasks=self.tasks,
            windows=offsets,
            image_dtype=self.image_dtype,
            depth_unit=self.depth_unit,
        )

    def _plain_builder(self) -> SampleBuilder:
        if self._builder is None:
            self._builder = self.sample_builder(None)
        return self._builder

    async def hold(self, episode: int) -> HeldEpisode:
        """The episode in memory until it is released, fetched where needed; for a pass, which pays first."""
        wanted = self._episode(episode)
        with self._prefetches.told(wanted):
            return await self._episodes.hold(wanted, paid=True)

    async def hold_common(self, episode: int) -> HeldEpisode | None:
        """The same in memory that all loader workers of the rank share; None where there is none, or no room in it."""
        wanted = self._episode(episode)
        with self._prefetches.told(wanted):
            return await self._episodes.hold_common(wanted)

    def raise_priority(self, episode: int) -> None:
        """Somebody waits now for an episode that was read ahead; for a pass."""
        self._episodes.raise_priority(self._episode(episode))

    async def clip_bytes(self, episode: int) -> int:
        """Memory that the clips of an episode take; fetches its videos' indexes where needed."""
        wanted = self._episode(episode)
        with self._prefetches.told(wanted, is_whole=False):
            return await self._episodes.clip_bytes(wanted)

    async def range_bytes(self, episode: int) -> int:
        """Return what is fetched for the clips of an episode; fetches its videos' indexes where needed."""
        return await self._episodes.range_bytes(self._episode(episode))

    async def locate_rows(self, episode: int) -> None:
        """Fetch the footer of an episode's table where needed; for a pass, beside ``clip_bytes``."""
        wanted = self._episode(episode)
        with self._prefetches.told(wanted, is_whole=False):
            await self._episodes.locate_rows(wanted)

    async def file_bytes(self, url: str) -> int | None:
        """Return the size of one of its files; None where it isn't there."""
        self._check_open()
        try:
            return (await self._engine.reader.stat(url)).size
        except (AccessDenied, NotFound):  # S3 denies access to what isn't there to those who may not list
            return None

    def columns(
        self, keys: Sequence[str], *, episodes: Iterable[int] | None = None
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Rows of the tables alone, as Arrow record batches: ``async for batch in dataset.columns(["action"])``.

        All rows of all episodes, in the dataset's order: row i of all batches together is frame i of these episodes.
        They have the types that the files store them in. At most four units of 16 MiB are held, or of one row group
        where that is longer. ``pyarrow.Table.from_batches`` joins them, ``Stream.columns`` gives them without a loop.

        Args:
            keys: Features that are columns, in the order in which the batches have them; ``task_index`` numbers
                ``tasks``. Frames of videos aren't columns.
            episodes: Which ones, in this order; None means all.

        Raises:
            ConfigError: A key is none, or names what isn't a column.
            EpisodeNotFound: The dataset has no such episode.
            FetchError, FormatError, DatasetError: The rows can't be read, or aren't those that the metadata counts.
        """
        self._check_open()
        table, there = self.episodes, [key for key, feature in self.features.items() if feature.has_column]
        chosen = chosen_features(keys) or ()
        unknown = [key for key in chosen if key not in there]
        if unknown or not chosen or len(set(chosen)) < len(chosen):
            message = (
                f"columns of {redact_url(self.url)} must be different ones of {', '.join(there)}, not {keys!r:.200}"
            )
            if set(unknown) & set(self.cameras):
                message += "; frames of cameras are decoded: sample() and Stream give them"
            raise ConfigError(message)
        positions = np.arange(len(table)) if episodes is None else table.positions(list(episodes))
        return scan(self._episodes.rows, self._engine.reader, chosen, positions, run=self._engine.run)

    def report(self) -> Report:
        """Return why the consumer of the latest pass over it waits, or waited, and what to set."""
        if self.pass_report is not None:
            return self.pass_report()
        return Report.of(Waits(), None if self._metadata is None else self.statistics(), self.config)

    def statistics(self) -> DatasetStatistics:
        """A snapshot of the engine, the caches and the decode threads; after closing too."""
        _ = self.metadata  # ClosedError where it was never open
        engine = self._engine
        return DatasetStatistics(
            fetch=engine.fetcher.statistics(),
            clips=engine.clips_statistics(),
            episodes=self._episodes.statistics(),
            decoders=engine.decoders.statistics(),
            decode=engine.decode.statistics(),
            disk=None if engine.disk is None else engine.disk.disk_statistics(),
        )

    def __repr__(self) -> str:
        if self._metadata is None:
            return f"LeRobotDataset({redact_url(self.url)!r}, not open)"
        return (
            f"LeRobotDataset({redact_url(self.url)!r}, {self.num_episodes} episodes, {self.num_frames} frames, "
            f"{len(self.cameras)} cameras{', closed' if self._closed else ''})"
        )


@explains_keywords
def open_dataset(
    url: str | os.PathLike[str],
    *,
    features: Collection[str] | None = None,
    image_dtype: ImageDtype = "uint8",
    depth_unit: DepthUnit = "mm",
    config: StreamConfig = StreamConfig(),  # noqa: B008  frozen
) -> LeRobotDataset:
    """A LeRobot v3 dataset, not open yet: enter it with ``async with``.

    Args:
        url: Root of the dataset: ``https://...``, ``s3://bucket/prefix``, ``hf://datasets/org/name``, a path, or
            another url that Fetcher reads.
        features: Keys to read; None reads all. Nothing of the others is fetched. ``index``, ``episode_index``,
            ``frame_index``, ``timestamp``, ``task_index`` and ``task`` are always there.
        image_dtype: "uint8", or "float32" in [0, 1].
        depth_unit: "mm" or "m", of depth cameras, which are float32 either way.
        config: Bounds, limits and threads.

    Entering raises FetchError where the metadata can't be fetched, FormatError and DatasetError where it can't be
    read or contradicts itself, ConfigError for an unknown feature.
    """
    if image_dtype not in {"uint8", "float32"}:
        raise ConfigError(f"image_dtype must be 'uint8' or 'float32', not {image_dtype!r}")
    if depth_unit not in {"m", "mm"}:
        raise ConfigError(f"depth_unit must be 'm' or 'mm', not {depth_unit!r}")
    return LeRobotDataset(
        PrivateUrl(url),
        features=chosen_features(features),
        image_dtype=image_dtype,
        depth_unit=depth_unit,
        config=stream_config(config),
    )


def chosen_features(features: Collection[str] | None) -> tuple[str, ...] | None:
    """Return what a user gave as ``features``, once and for all: an iterator can be gone through only once."""
    if features is None:
        return None
    if isinstance(features, str) or not isinstance(features, Iterable):
        raise ConfigError(f"features must be a collection of keys, or None for all, not {features!r}")
    return tuple(features)

"""A LeRobot dataset at any URL, open for reading, its reader for streams, and the format by which they read it."""

from __future__ import annotations

import operator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from typing_extensions import override

from asyncfetch.config import PrivateUrl, StreamConfig, stream_config
from asyncfetch.config.checks import check_keys, chosen_features, explains_keywords
from asyncfetch.decode import picture_size
from asyncfetch.errors import (
    ClosedError,
    ConfigError,
    FrameMissing,
    NotFound,
    redact_url,
)
from asyncfetch.formats.protocol import Format
from asyncfetch.formats.reader import StretchReader
from asyncfetch.formats.stretch import Stretch
from asyncfetch.lerobot.episode_cache import EpisodeCache, HeldEpisode
from asyncfetch.lerobot.info import depth_stats
from asyncfetch.lerobot.listing import list_tables_of
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.lerobot.samples import SampleBuilder
from asyncfetch.lerobot.scan import scan
from asyncfetch.lerobot.version2 import load_version2
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import Waits
from asyncfetch.order.line import segment_of
from asyncfetch.resources import Engine
from asyncfetch.runtime.fork import AsyncOnly, LoopGuard

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping, Sequence
    from types import TracebackType

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.decode import Fit, PictureSize
    from asyncfetch.formats.reader import DatasetStatistics
    from asyncfetch.formats.samples import ImageDtype, Sample
    from asyncfetch.formats.stretch import Reach
    from asyncfetch.lerobot.episode_table import Episode, EpisodeTable
    from asyncfetch.lerobot.info import DepthUnit, Feature
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.lerobot.samples import Windows

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
        size: PictureSize | None = None,
        config: StreamConfig,
        engine: Engine | None = None,
    ) -> None:
        """``engine`` is one that it shares with other datasets, and doesn't close."""
        self.url = url
        self.config = config
        self.image_dtype: ImageDtype = image_dtype
        self.depth_unit: DepthUnit = depth_unit
        self.size = size
        self._chosen = features
        self._given_engine = engine
        self._stack = AsyncExitStack()
        self._guard: LoopGuard | None = None
        self._metadata: Metadata | None = None
        self._reader: EpisodeReader | None = None
        self._builder: SampleBuilder | None = None  # of samples without windows

    async def __aenter__(self) -> Self:
        if self._guard is not None:
            raise ClosedError(f"{self!r} can be entered only once: call open_dataset again")
        self._guard = LoopGuard("this LeRobotDataset")
        async with AsyncExitStack() as stack:
            try:
                await self._open(stack, self._guard)
            except NotFound as error:  # most often a typing error: the way to it tells nothing
                raise error.with_traceback(None) from None
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack, guard: LoopGuard) -> None:
        engine = self._given_engine
        if engine is None:
            engine = await stack.enter_async_context(Engine(self.config))
        reader, run, features = engine.reader, engine.run, self._chosen

        async def load_v2() -> Metadata:
            return (await load_version2(reader, self.url, run=run, features=features, episode_stats=False)).metadata

        metadata = await load_metadata(
            reader,
            self.url,
            features=features,
            run=run,
            read_files=None if self._given_engine is None else engine.read_files,
            list_tables=list_tables_of(engine),
            version2=load_v2,
        )
        self._reader = EpisodeReader(self, metadata, engine, guard)
        self._metadata = metadata

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.is_closed = True
        await self._stack.__aexit__(kind, error, at)

    # What the metadata says.

    @property
    def metadata(self) -> Metadata:
        """All of it, as read when the dataset was opened."""
        if self._metadata is None:
            raise self._not_open()
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
        return self.metadata.sample_features

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
        """meta/stats.json, depth in ``depth_unit``; None where there is none. FormatError where it is damaged."""
        stats = self.metadata.stats
        return None if stats is None else depth_stats(stats, self.metadata.info.features, self.depth_unit)

    @property
    def episodes(self) -> EpisodeTable:
        """Length, rows and videos of each episode."""
        return self.metadata.episodes

    # Reading.

    def prefetch(self, episode: int) -> None:
        """Start fetching an episode, all cameras and rows at once, and return at once.

        It is fetched in the order of these calls, after what is waited for: an episode that ``ready`` or
        ``sample`` is called for overtakes the others.

        All waiters for the same fetch get its error; afterwards none is kept, and ``ready`` and ``sample`` ask anew.
        What arrives stays as long as the byte cache has room for it; without room nothing is fetched.

        Raises:
            EpisodeNotFound: The dataset has no such episode.
            DatasetError: The metadata doesn't say where its files are.
            CacheError: 1,024 prefetches are under way; await ``ready`` for some of them.
        """
        reader_of(self).prefetch(episode)

    async def ready(self, episode: int) -> None:
        """Wait until an episode is in memory; fetches it if needed.

        Raises:
            EpisodeNotFound: The dataset has no such episode.
            FetchError, FormatError, DatasetError: What its fetch ended with; the next call tries again.
            CacheError: As in ``sample``.
        """
        await reader_of(self).ready(episode)

    async def sample(self, episode: int, frame: int, *, windows: Windows | None = None) -> Sample:
        """The exact frame of an episode, or an error; never a neighbour.

        Of an episode longer than ``StreamConfig(segment_seconds=...)`` the segment that has the frame is fetched, and
        not all of it, unless that is in memory or on its way.

        Args:
            episode: The episode's number in the dataset, its ``episode_index``.
            frame: Frame in the episode, from 0.
            windows: Seconds or ``frames(...)`` relative to the frame, by feature key.

        Raises:
            EpisodeNotFound, FrameMissing: There is no such episode or frame.
            ConfigError: ``frame`` isn't a whole number, or ``windows`` don't fit the dataset.
            FetchError, FormatError, DatasetError, DecodeError: It could not be read.
            CacheError: The episode's clips don't fit in their cache, beside what passes over this dataset hold: a
                caller that iterates such a pass itself can't wait for it to give room back.
        """
        reader = reader_of(self)
        found = reader.episode(episode)
        number = self._frame(found, frame)
        builder = reader.sample_builder(windows) if windows is not None else self._builder
        if builder is None:
            builder = self._builder = reader.sample_builder(None)
        held = reader.hold_nowait(found) or await reader.hold(self._segment(found, number, builder.reach))
        with held:
            samples = await reader.engine.decode.run(builder.build, [(held, number, 0)])
        return samples[0]

    def _frame(self, episode: Episode, frame: int) -> int:
        try:
            number = operator.index(frame)
        except TypeError as error:
            raise ConfigError(f"frame must be a whole number, not {frame!r}") from error
        if not 0 <= number < episode.length:
            message = f"episode {episode.index} has frames [0, {episode.length}), not {number}"
            raise FrameMissing(f"{message}, in {redact_url(self.url)}")
        return number

    def _segment(self, episode: Episode, frame: int, reach: Reach) -> Stretch:
        """The segment of an episode that a frame is in, and what windows at that frame reach of its neighbours."""
        segment_frames = max(1, round(self.config.segment_seconds * self.fps))
        if episode.length <= segment_frames:
            return Stretch(episode.index, 0, episode.length)
        start, stop = segment_of(frame, episode.length, segment_frames, self.group_frames)
        own = Stretch(episode.index, frame, frame + 1, reach)
        spans = [own.span(camera, episode.length) for camera, _, _ in reach]
        is_inside = all(start <= first and last <= stop for first, last in spans)
        return Stretch(episode.index, start, stop, () if is_inside else reach)

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
        reader = reader_of(self)
        reader.check()
        table, there = self.episodes, [key for key, feature in self.features.items() if feature.has_column]
        chosen, where = chosen_features(keys) or (), redact_url(self.url)
        check_keys(chosen, self.features, "columns", where)
        if not chosen or len(set(chosen)) < len(chosen):
            raise ConfigError(f"columns of {where} must be different ones of {', '.join(there)}, not {keys!r:.200}")
        if not set(chosen).isdisjoint(self.cameras):
            message = f"columns of {where} are {', '.join(there)}, not {keys!r:.200}"
            raise ConfigError(f"{message}; frames of cameras are decoded: sample() and Stream give them")
        positions = np.arange(len(table)) if episodes is None else table.positions(list(episodes))
        return scan(reader._episodes.rows, reader.engine.reader, chosen, positions, run=reader.engine.run)

    def report(self) -> Report:
        """Return why the consumer of the latest pass over it waits, or waited, and what to set."""
        reader = self._reader
        if reader is not None and reader.pass_report is not None:
            return reader.pass_report()
        return Report.of(Waits(), None if reader is None else reader.statistics(), self.config)

    def statistics(self) -> DatasetStatistics:
        """A snapshot of the engine, the caches and the decode threads; after closing too."""
        return reader_of(self).statistics()

    def _not_open(self) -> ClosedError:
        return ClosedError(f"{redact_url(self.url)} isn't open: `async with open_dataset(url) as dataset`")

    def __repr__(self) -> str:
        if self._metadata is None:
            return f"LeRobotDataset({redact_url(self.url)!r}, not open)"
        is_closed = self._reader is not None and self._reader.is_closed
        return (
            f"LeRobotDataset({redact_url(self.url)!r}, {self.num_episodes} episodes, {self.num_frames} frames, "
            f"{len(self.cameras)} cameras{', closed' if is_closed else ''})"
        )


class EpisodeReader(StretchReader[HeldEpisode]):
    """Reads an open dataset's episodes, and keeps what was read of them within the engine's bounds.

    Verbs take a stretch, or the number of an episode for all of it, and raise EpisodeNotFound for one that isn't there.
    """

    _episodes: EpisodeCache

    def __init__(self, dataset: LeRobotDataset, metadata: Metadata, engine: Engine, guard: LoopGuard) -> None:
        config = dataset.config
        number = engine.join(config.pool_segments * len(metadata.cameras))
        episodes = EpisodeCache(engine, number, metadata, config, depth_unit=dataset.depth_unit, size=dataset.size)
        super().__init__(dataset.url, engine, episodes, config=config, guard=guard)
        self._metadata = metadata
        self._image_dtype: ImageDtype = dataset.image_dtype  # not the dataset, which refers to this
        self._depth_unit, self._size = dataset.depth_unit, dataset.size

    def episode(self, episode: int) -> Episode:
        """Return where its rows and videos are."""
        self.check()
        return self._metadata.episodes[episode]

    @override
    def _stretch(self, wanted: Stretch | int) -> Stretch:
        """The stretch that is meant. All of an episode is the same one, however far windows reach."""
        episode = self.episode(wanted.episode if isinstance(wanted, Stretch) else wanted)
        if isinstance(wanted, Stretch) and (wanted.start, wanted.stop) != (0, episode.length):
            return wanted
        return Stretch(episode.index, 0, episode.length)

    def hold_nowait(self, episode: Episode) -> HeldEpisode | None:
        """All of the episode, if it is in memory."""
        return self._episodes.hold_nowait(Stretch(episode.index, 0, episode.length))

    @override
    async def hold(self, wanted: Stretch | int) -> HeldEpisode:
        """The stretch, or all of the episode where that is in memory or on its way: nothing is fetched twice."""
        stretch = self._stretch(wanted)
        whole = self._stretch(stretch.episode)
        if whole in self._prefetches or self._episodes.is_held(whole):
            stretch = whole
        return self._episodes.hold_nowait(whole) or await super().hold(stretch)

    async def missing_frames(self, wanted: Stretch | int, *, by_rows: bool) -> Mapping[str, int]:
        """Return how many frames the video of each camera lacks: see EpisodeCache. Reads no clip."""
        return await self._episodes.missing_frames(self._stretch(wanted), by_rows=by_rows)

    def sample_builder(self, windows: Windows | None) -> SampleBuilder:
        """Return what makes samples with these windows, for the stream above. ConfigError where they don't fit."""
        unit, size = self._depth_unit, self._size
        return SampleBuilder(self._metadata, windows, image_dtype=self._image_dtype, depth_unit=unit, size=size)


def reader_of(dataset: LeRobotDataset) -> EpisodeReader:
    """Return what reads a user's dataset, for the rooms above. ClosedError where it was never open."""
    if dataset._reader is None:
        raise dataset._not_open()
    return dataset._reader


def check_values(image_dtype: object, depth_unit: object) -> None:
    """Raise ConfigError where the values of pictures can't be given so."""
    if image_dtype not in {"uint8", "float32"}:
        raise ConfigError(f"image_dtype must be 'uint8' or 'float32', not {image_dtype!r}")
    if depth_unit not in {"m", "mm"}:
        raise ConfigError(f"depth_unit must be 'm' or 'mm', not {depth_unit!r}")


@explains_keywords
def open_dataset(
    url: str | os.PathLike[str],
    *,
    features: Collection[str] | None = None,
    image_dtype: ImageDtype = "uint8",
    depth_unit: DepthUnit = "mm",
    size: tuple[int, int] | None = None,
    fit: Fit | None = None,
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
        size: (height, width) that all pictures are brought to; None leaves them as they are.
        fit: "stretch", "crop" or "pad", where their shape is another one; None is "stretch".
        config: Bounds, limits and threads.

    Entering raises FetchError where the metadata can't be fetched, FormatError and DatasetError where it can't be
    read or contradicts itself, ConfigError for an unknown feature.
    """
    check_values(image_dtype, depth_unit)
    return LeRobotDataset(
        PrivateUrl(url),
        features=chosen_features(features),
        image_dtype=image_dtype,
        depth_unit=depth_unit,
        size=picture_size(size, fit),
        config=stream_config(config),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeRobotFormat(Format):
    """A LeRobot dataset, and how it is read; ``Stream`` documents the fields."""

    source: str | LeRobotDataset
    windows: Windows | None = None
    features: tuple[str, ...] | None = None
    image_dtype: ImageDtype = "uint8"
    depth_unit: DepthUnit = "mm"
    size: PictureSize | None = None

    @property
    @override
    def is_open(self) -> bool:
        return isinstance(self.source, LeRobotDataset)

    @override
    def reader(self) -> EpisodeReader | None:
        return reader_of(self.source) if isinstance(self.source, LeRobotDataset) else None

    @asynccontextmanager
    @override
    async def opened(self, engine: Engine | None, config: StreamConfig) -> AsyncIterator[OpenLeRobot]:
        """Open it over an engine; one that is open stays open."""
        if isinstance(self.source, LeRobotDataset):
            yield OpenLeRobot(self.source, self.windows)
            return
        dataset = LeRobotDataset(
            self.source,
            features=self.features,
            image_dtype=self.image_dtype,
            depth_unit=self.depth_unit,
            size=self.size,
            config=config,
            engine=engine,
        )
        async with dataset:
            yield OpenLeRobot(dataset, self.windows)

    def __repr__(self) -> str:
        return repr(self.source)


class OpenLeRobot:
    """A LeRobot dataset that is open for a stream: see OpenFormat."""

    draws_anew = False

    def __init__(self, dataset: LeRobotDataset, windows: Windows | None) -> None:
        self.dataset = dataset
        self.url, self.config, self.reader = dataset.url, dataset.config, reader_of(dataset)
        self.fingerprint, self.group_frames = dataset.fingerprint, dataset.group_frames
        self.frames_per_second, self.file_bytes = dataset.fps, dataset.metadata.info.video_file_bytes
        self._windows = windows

    @property
    def stats(self) -> Mapping[str, Any] | None:
        """The statistics of its features, for normalising; None where it has none."""
        return self.dataset.stats

    def episodes(self, chosen: Sequence[int] | None) -> Sequence[int]:
        """Return the indices of all episodes, or those chosen."""
        return self.dataset.episodes.indices if chosen is None else chosen

    def lengths(self, chosen: Sequence[int] | None) -> NDArray[np.integer[Any]]:
        """Return how many frames each of them has. EpisodeNotFound where one isn't there."""
        table = self.dataset.episodes
        return table.lengths if chosen is None else table.lengths[table.positions(chosen)]

    def files(self, chosen: Sequence[int] | None) -> dict[str, NDArray[np.int64]]:
        """Return the number of the video file that each of them lies in, by camera."""
        table = self.dataset.episodes
        places = slice(None) if chosen is None else table.positions(chosen)
        return {camera: table.video_files(camera)[places] for camera in self.dataset.cameras}

    def urls(self, episode: int) -> list[str]:
        """Return the videos of an episode, and last the table of its rows."""
        known = self.dataset.episodes[episode]
        return [*(span.url for span in known.videos.values()), known.data_url]

    def sample_maker(self) -> SampleBuilder:
        """Return a maker of samples with its windows. ConfigError where they don't fit."""
        return self.reader.sample_builder(self._windows)

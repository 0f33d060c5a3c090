"""A dataset as an endless supply of epochs: what to read, in which order, within which bounds."""

from __future__ import annotations

import hashlib
from contextlib import aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncfetch.config import PrivateUrl, stream_config
from asyncfetch.config.checks import explains_keywords
from asyncfetch.errors import ConfigError, UsageError
from asyncfetch.lerobot import LeRobotDataset, check_windows, chosen_features, open_dataset, reader_of, summarise
from asyncfetch.ranges import index_of
from asyncfetch.runtime import iterate
from asyncfetch.stream.job_builder import JobBuilder
from asyncfetch.stream.order import Order
from asyncfetch.stream.plan import PassPlan
from asyncfetch.stream.pool import Fitted, Pool
from asyncfetch.stream.protocols import Origin
from asyncfetch.stream.remaining import Remaining
from asyncfetch.stream.source import EpochStream, SampleSource
from asyncfetch.stream.state import EpochProgress

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.lerobot import DatasetSummary, DepthUnit, EpisodeReader, ImageDtype, Windows
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.stream.job_builder import Transform
    from asyncfetch.stream.placement import Placement

__all__ = ["Stream", "StreamSource", "distinct_episodes"]


class StreamSource(SampleSource[LeRobotDataset]):
    """What a ``Stream`` reads; its arguments are that one's."""

    def __init__(
        self,
        source: str | os.PathLike[str] | LeRobotDataset,
        *,
        shuffle: bool,
        seed: int,
        windows: Windows | None,
        episodes: Sequence[int] | None,
        features: Collection[str] | None,
        transform: Transform | None,
        image_dtype: ImageDtype | None,
        depth_unit: DepthUnit | None,
        config: StreamConfig | None,
    ) -> None:
        if isinstance(source, LeRobotDataset):
            if any(given is not None for given in (features, image_dtype, depth_unit, config)):
                message = "features, image_dtype, depth_unit and config of an open dataset were given to open_dataset()"
                raise ConfigError(message)
            config = source.config
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle must be True or False, not {shuffle!r}")
        self.source = source if isinstance(source, LeRobotDataset) else PrivateUrl(source)
        self.shuffle = shuffle
        check_windows(windows)
        self.windows = windows
        self.episodes = None if episodes is None else distinct_episodes(episodes)
        self.chosen_features = chosen_features(features)
        self.image_dtype: ImageDtype = image_dtype or "uint8"
        self.depth_unit: DepthUnit = depth_unit or "mm"
        self.config = stream_config(config)
        self.pool: Pool = Pool(self.config, is_shuffled=shuffle)
        """The pool of its order, which is fitted to memory when a dataset is opened."""
        self.has_config = config is not None
        """True if it was given one."""
        super().__init__(seed, transform)
        if isinstance(source, LeRobotDataset):
            self._opened = source

    def plan(self, opened: LeRobotDataset, placement: Placement, epoch: int) -> PassPlan:
        """See SampleSource."""
        order, selection = self.order(opened, epoch)
        identity = {"dataset": opened.fingerprint, "order": self.identity(order)}
        progress = EpochProgress(identity, epoch, len(order), Remaining(), placement, self.config.uneven_ends)
        loaded = self._loaded_of(epoch)
        if loaded is not None:
            progress = progress.resumed(loaded, order)
        return PassPlan(order, selection, progress)

    def order(self, dataset: LeRobotDataset, epoch: int) -> tuple[Order, Sequence[int]]:
        """The order of an epoch, and the episode at each position that it speaks of."""
        selection = dataset.episodes.indices if self.episodes is None else self.episodes
        order = Order(
            self.lengths(dataset),
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            lanes=self.pool.lanes,
            pool_episodes=self.pool.episodes,
            group_frames=self.config.group_frames or dataset.group_frames,
        )
        return order, selection

    def described(self) -> LeRobotDataset:
        """Return the dataset, for what its metadata says; opens it where nothing has."""
        return self._opened or self.opened()

    def lengths(self, dataset: LeRobotDataset) -> NDArray[np.integer[Any]]:
        """Return those of the chosen episodes. EpisodeNotFound where one isn't there."""
        table = dataset.episodes
        return table.lengths if self.episodes is None else table.lengths[table.positions(self.episodes)]

    def identity(self, order: Order) -> dict[str, Any]:
        """Return what the order depends on beside the dataset and the epoch, as JSON."""
        chosen = None if self.episodes is None else hashlib.sha256(str(self.episodes).encode()).hexdigest()
        return {"episodes": chosen, **order.identity()}

    def whole(
        self, opened: LeRobotDataset, layout: Placement
    ) -> tuple[Order, list[tuple[LeRobotDataset, Sequence[int]]]]:
        """See SampleSource."""
        order, selection = self.order(opened, self.epoch)
        return order, [(opened, selection)]

    def builder(self, opened: LeRobotDataset) -> JobBuilder:
        """See SampleSource."""
        samples = reader_of(opened).sample_builder(self.windows)
        return JobBuilder(samples, self.transform, marks_padding=self.config.uneven_ends == "pad")

    @staticmethod
    def reader(opened: LeRobotDataset) -> EpisodeReader:
        """See SampleSource."""
        return reader_of(opened)

    @staticmethod
    def origin(opened: LeRobotDataset, episode: int) -> Origin:
        """See SampleSource."""
        return Origin(opened, episode)

    def _total(self, opened: LeRobotDataset, placement: Placement, epoch: int) -> int:
        return int(self.lengths(opened).sum())

    def opener(self) -> Callable[[], AbstractAsyncContextManager[LeRobotDataset]]:
        """See SampleSource."""
        opened = self._opened
        opener: Callable[[], AbstractAsyncContextManager[LeRobotDataset]]
        if opened is not None:
            opener = lambda: nullcontext(opened)  # noqa: E731
        else:
            source = self.source
            assert isinstance(source, str)
            opener = partial(
                open_dataset,
                source,
                features=self.chosen_features,
                image_dtype=self.image_dtype,
                depth_unit=self.depth_unit,
                config=self.config,
            )
        return partial(Fitted, self.pool, opener, self.episodes) if self.shuffle else opener

    def __getstate__(self) -> dict[str, Any]:
        if self.is_open:
            raise UsageError("a stream of an open dataset can't be pickled: make it of the dataset's URL")
        return super().__getstate__()

    def __repr__(self) -> str:
        return f"Stream({self.source!r}, shuffle={self.shuffle}, seed={self.seed}, epoch={self.epoch})"


class Stream(EpochStream[StreamSource]):
    """The samples of a dataset, epoch after epoch, in a seeded order.

    Iterate it (``for sample in stream``), or ``async with stream.samples() as samples`` on a loop of your own. The
    order is a pure function of the seed, the epoch, the chosen episodes' lengths and the configuration's lanes and
    pool; every frame comes exactly once an epoch over all ranks and workers.

    Args:
        source: URL or path of a LeRobot v3 dataset, or an open ``LeRobotDataset``, which is then read on its own loop,
            with its own features, image_dtype and config.
        shuffle: Whether frames are drawn from a pool of episodes, or come in the dataset's order. That is the same for
            any number of ranks and workers. Ranks take its frames a batch at a time, so each of them fetches nearly
            every episode.
        seed: Any whole number.
        windows: By feature key: seconds or ``frames(...)`` relative to the sample's frame.
        episodes: Indices of the episodes to read; None means all. Without shuffle they are read in this order.
        features: Keys to fetch and deliver; None means all.
        transform: Applied to each sample in a decode thread. To use loader workers started by spawn it must pickle.
        image_dtype: "uint8", or "float32" in [0, 1].
        depth_unit: "mm" or "m".
        config: Bounds, limits and threads, for one rank.

    Pickles, as what to read; connections and caches stay behind, and so does the url's password or signature, except on
    the way to a process that multiprocessing starts, such as a loader's worker. Not thread-safe: one thread at a time.
    """

    @explains_keywords
    def __init__(
        self,
        source: str | os.PathLike[str] | LeRobotDataset,
        *,
        shuffle: bool = True,
        seed: int = 0,
        windows: Windows | None = None,
        episodes: Sequence[int] | None = None,
        features: Collection[str] | None = None,
        transform: Transform | None = None,
        image_dtype: ImageDtype | None = None,
        depth_unit: DepthUnit | None = None,
        config: StreamConfig | None = None,
    ) -> None:
        self._source = StreamSource(
            source,
            shuffle=shuffle,
            seed=seed,
            windows=windows,
            episodes=episodes,
            features=features,
            transform=transform,
            image_dtype=image_dtype,
            depth_unit=depth_unit,
            config=config,
        )

    @property
    def fps(self) -> float:
        """Frames a second. Opens the dataset where nothing has; so do the others."""
        return self._source.described().fps

    @property
    def num_episodes(self) -> int:
        """Number of episodes that are read."""
        return self._source.described().num_episodes if self._source.episodes is None else len(self._source.episodes)

    @property
    def features(self) -> Mapping[str, Feature]:
        """The features that are read, by key, in the dataset's order."""
        return self._source.described().features

    @property
    def stats(self) -> Mapping[str, Any] | None:
        """meta/stats.json, for normalising; None where the dataset has none, FormatError where it is damaged."""
        return self._source.described().stats

    def columns(self, keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of the tables alone, as Arrow record batches: ``for batch in stream.columns(["action"])``.

        Of the episodes that are read, in their order; row i of all batches together is frame i of these. The types are
        those that the files store. ``pyarrow.Table.from_batches`` joins them.

        Args:
            keys: See ``LeRobotDataset.columns``, as for errors.
        """
        session = self._source.session()
        batches = partial(_some_columns, session.opened(), keys, self._source.episodes)
        return iterate(session.thread, batches, max_batches=1)

    def dataset_info(self) -> DatasetSummary:
        """Return what is in the dataset, as ``asyncfetch.dataset_info`` says it; of the features that are read."""
        session = self._source.session()
        return session.thread.run(summarise, session.opened())


@asynccontextmanager
async def _some_columns(
    dataset: LeRobotDataset, keys: Sequence[str], episodes: Sequence[int] | None
) -> AsyncIterator[AsyncIterator[list[pa.RecordBatch]]]:
    async with aclosing(dataset.columns(keys, episodes=episodes)) as batches:
        yield ([batch] async for batch in batches)


def distinct_episodes(episodes: Sequence[int]) -> tuple[int, ...]:
    """Return what a user gave as ``episodes``, once and for all; ConfigError where one comes twice, or is none."""
    try:
        chosen = tuple(map(index_of, episodes))
    except TypeError as error:
        raise ConfigError(f"episodes must be whole numbers, not {episodes!r:.80}") from error
    if len(set(chosen)) != len(chosen):
        raise ConfigError("episodes must not name an episode twice: every frame comes once an epoch")
    return chosen

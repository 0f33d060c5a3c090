"""A dataset as an endless supply of epochs: what to read, in which order, within which bounds."""

from __future__ import annotations

import operator
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from asyncfetch.config import StreamConfig
from asyncfetch.errors import ConfigError, redact_url
from asyncfetch.lerobot import LeRobotDataset, open_dataset
from asyncfetch.runtime import iterate
from asyncfetch.stream.epochs import EpochCounter, Turn
from asyncfetch.stream.order import Order
from asyncfetch.stream.placement import Placement, find_rank
from asyncfetch.stream.samples import SamplePass, Transform
from asyncfetch.stream.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from asyncfetch.lerobot import DatasetStatistics, DepthUnit, ImageDtype, Sample, Windows

__all__ = ["Samples", "Stream"]

CHUNK_BYTES = 16 * 1024 * 1024
"""Decoded by one call in a thread: about eight samples of two 640x480 cameras, some 40 ms. Enough that what a chunk
costs on the loop (0.3 ms) doesn't count."""
CHUNK_MAX_SAMPLES = 64
HANDED_OVER_CHUNKS = 3
"""Beside those decoded ahead: the consumer's own, and two between the loop and a synchronous consumer."""


class Stream:
    """The samples of a dataset, epoch after epoch, in a seeded order.

    Iterate it (``for sample in stream``), or ``async with stream.samples() as samples`` on a loop of your own. The
    order is a pure function of the seed, the epoch, the chosen episodes' lengths and the configuration's lanes and
    pool; every frame comes exactly once an epoch over all ranks and workers.

    Args:
        source: URL or path of a LeRobot v3 dataset, or an open ``LeRobotDataset``, which is then read on its own loop,
            with its own features, image_dtype and config.
        shuffle: Whether frames are drawn from a pool of episodes, or come in the dataset's order. That is the same for
            any number of ranks and workers, which take its frames in turns, so each of them fetches every episode.
        seed: Any whole number.
        windows: By feature key: seconds or ``frames(...)`` relative to the sample's frame.
        episodes: Indices of the episodes to read; None means all. Without shuffle they are read in this order.
        features: Keys to fetch and deliver; None means all.
        transform: Applied to each sample in a decode thread. To use loader workers started by spawn it must pickle.
        image_dtype: "uint8", or "float32" in [0, 1].
        depth_unit: "mm" or "m".
        config: Bounds, limits and threads, for one rank.

    Pickles, as what to read; connections and caches stay behind. Not thread-safe: one thread at a time.
    """

    def __init__(
        self,
        source: str | LeRobotDataset,
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
        if isinstance(source, LeRobotDataset):
            if any(given is not None for given in (features, image_dtype, depth_unit, config)):
                message = "features, image_dtype, depth_unit and config of an open dataset were given to open_dataset()"
                raise ConfigError(message)
            config = source.config
        self.source = source
        self.shuffle = shuffle
        self.seed = seed
        self.windows = windows
        self.episodes = None if episodes is None else _distinct(episodes)
        self.features = features
        self.transform = transform
        self.image_dtype: ImageDtype = image_dtype or "uint8"
        self.depth_unit: DepthUnit = depth_unit or "mm"
        self.config = config or StreamConfig()
        self.epochs = EpochCounter()
        """Which epoch comes next; a loader puts it into memory that its workers share."""
        self._session: Session | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next pass that isn't told another one."""
        return self.epochs.current()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, in the workers of a running loader too.

        A pass takes its epoch when its first sample is asked for, a loader's when the loader is iterated.
        """
        self.epochs.set(epoch)

    def samples(self, *, epoch: int | None = None, rank: int | None = None, world_size: int | None = None) -> Samples:
        """One pass, on the running loop: ``async with stream.samples() as samples: async for sample in samples``.

        Args:
            epoch: None counts: 0 or what ``set_epoch`` said, and one more after each pass that was finished: whose
                iterator has ended. After an early ``break`` the next pass takes the same epoch again.
            rank: This process among ``world_size``; None finds both, from torch.distributed or torchrun's variables.
            world_size: Processes that share the epoch.

        Entering opens the dataset, where the source is a URL: FetchError, FormatError, DatasetError as it says. An
        error of a sample is raised by the iterator at that sample's place. Leaving stops everything.
        """
        return Samples(self, self._opener(), epoch=epoch, placement=self.placement(rank, world_size))

    @staticmethod
    def placement(rank: int | None = None, world_size: int | None = None) -> Placement:
        """The given rank and world size, or those found."""
        if (rank is None) != (world_size is None):
            raise ConfigError("give both rank and world_size, or none of them")
        if rank is None or world_size is None:
            rank, world_size = find_rank()
        return Placement(rank, world_size)

    def __iter__(self) -> Iterator[Sample]:
        """One pass, driven by a loop in a thread of its own, which stays for the next pass with its connections."""
        return self.iterate(self.placement())

    def iterate(self, placement: Placement, *, epoch: int | None = None, loader: int | None = None) -> Iterator[Sample]:
        """What iterating does, for one consumer of many.

        Args:
            placement: Which one.
            epoch: None counts; the pass then takes its epoch when the first sample is asked for. One that is given
                isn't counted.
            loader: In a loader's worker the number that all workers of this loader have; see ``EpochCounter``.
        """
        session = self._open_session()
        return self._iterate(session, session.dataset(), placement, partial(self._begin, placement, epoch, loader))

    def _begin(self, placement: Placement, epoch: int | None, loader: int | None) -> Turn:
        if epoch is not None:
            return Turn(epoch, lambda: None)
        if loader is None and placement.workers == 1:
            return self.epochs.begin()
        return self.epochs.begin_share(placement.worker, placement.workers, loader or 0)

    def _iterate(
        self, session: Session, dataset: LeRobotDataset, placement: Placement, begin: Callable[[], Turn]
    ) -> Iterator[Sample]:
        turn = begin()
        # The pass itself is ahead of the consumer, so it doesn't count the epoch.
        opened = Samples(self, lambda: nullcontext(dataset), epoch=turn.epoch, placement=placement, counts=False)
        yield from iterate(session.thread, partial(_Chunks, opened), times=session.hand_over)
        turn.finish()

    def _open_session(self) -> Session:
        if isinstance(self.source, LeRobotDataset):
            raise ConfigError("an open dataset lives on its own loop: `async with stream.samples()` there")
        if self._session is None or not self._session.is_usable:
            self._session = Session(self._opener())
        return self._session

    def _opener(self) -> Callable[[], AbstractAsyncContextManager[LeRobotDataset]]:
        """What gives the dataset, to be entered. It doesn't refer to the stream, which would never be collected."""
        source = self.source
        if isinstance(source, LeRobotDataset):
            return lambda: nullcontext(source)
        return partial(
            open_dataset,
            source,
            features=self.features,
            image_dtype=self.image_dtype,
            depth_unit=self.depth_unit,
            config=self.config,
        )

    def statistics(self) -> DatasetStatistics | None:
        """What the synchronous iteration's engine and caches have done in this process; None before the first."""
        return self._session.statistics() if self._session is not None else None

    def close(self) -> None:
        """End the loop thread of the synchronous iteration, if there is one. The stream can be iterated again."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def shared_by(self, workers: int) -> Stream:
        """This stream for one of a rank's loader workers: bounds, host limits and threads divided among them."""
        stream = self.__class__.__new__(self.__class__)
        stream.__dict__.update(self.__dict__)
        stream.config = self.config.shared_by(workers)
        stream._session = None
        return stream

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.source, LeRobotDataset):
            raise TypeError("a stream of an open dataset can't be pickled: make it of the dataset's URL")
        return self.__dict__ | {"_session": None}

    def __repr__(self) -> str:
        source = redact_url(self.source) if isinstance(self.source, str) else repr(self.source)
        return f"Stream({source!r}, shuffle={self.shuffle}, seed={self.seed}, epoch={self.epoch})"


def _distinct(episodes: Sequence[int]) -> tuple[int, ...]:
    chosen = tuple(operator.index(episode) for episode in episodes)
    if len(set(chosen)) != len(chosen):
        raise ConfigError("episodes must not name an episode twice: every frame comes once an epoch")
    return chosen


class Samples:
    """A pass that isn't open yet; entering it gives the ``SamplePass``."""

    def __init__(
        self,
        stream: Stream,
        opener: Callable[[], AbstractAsyncContextManager[LeRobotDataset]],
        *,
        epoch: int | None,
        placement: Placement,
        counts: bool = True,
    ) -> None:
        self._stream = stream
        self._opener = opener
        self._epoch = epoch
        self._placement = placement
        self._counts = counts
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> SamplePass:
        async with AsyncExitStack() as stack:
            dataset = await stack.enter_async_context(self._opener())
            samples = await stack.enter_async_context(self._start(dataset))
            self._stack = stack.pop_all()
        return samples

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    def _start(self, dataset: LeRobotDataset) -> SamplePass:
        stream, config, placement = self._stream, dataset.config, self._placement
        turn = stream.epochs.begin(self._epoch)
        selection = dataset.episodes.indices if stream.episodes is None else stream.episodes
        for episode in stream.episodes or ():
            dataset.episodes[episode]  # EpisodeNotFound
        lengths = dataset.episodes.lengths
        order = Order(
            lengths if stream.episodes is None else lengths[list(stream.episodes)],
            shuffle=stream.shuffle,
            seed=stream.seed,
            epoch=turn.epoch,
            lanes=config.lanes,
            pool_episodes=config.pool_episodes,
        )
        builder = dataset.sample_builder(stream.windows)
        fewest_chunks = 2 * dataset.decode_pool.threads + HANDED_OVER_CHUNKS  # so that every thread has work
        chunk_bytes = min(CHUNK_BYTES, config.decoded_max_bytes // fewest_chunks)
        chunk_samples = max(1, min(CHUNK_MAX_SAMPLES, chunk_bytes // builder.sample_bytes))
        chunks = config.decoded_max_bytes // (chunk_samples * builder.sample_bytes) - HANDED_OVER_CHUNKS
        return SamplePass(
            dataset,
            partial(order.steps, placement.consumer, placement.consumers),
            selection,
            builder=builder,
            transform=stream.transform,
            chunk_samples=chunk_samples,
            ahead_chunks=max(1, chunks),
            max_episodes=order.open_episodes(placement.consumers) + config.prefetch_episodes,
            on_end=turn.finish if self._counts else lambda: None,
        )


class _Chunks:
    """A pass as an async iterator of lists, for ``runtime.iterate``."""

    def __init__(self, opened: Samples) -> None:
        self._opened = opened

    async def __aenter__(self) -> Self:
        self._samples = await self._opened.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._opened.__aexit__(kind, error, at)

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> list[Sample]:
        return await self._samples.next_chunk()

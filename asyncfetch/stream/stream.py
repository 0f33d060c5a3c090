"""A dataset as an endless supply of epochs: what to read, in which order, within which bounds."""

from __future__ import annotations

import hashlib
import operator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncfetch.config import StreamConfig
from asyncfetch.errors import ConfigError, redact_url
from asyncfetch.lerobot import LeRobotDataset, open_dataset
from asyncfetch.stream.cursor import Rest
from asyncfetch.stream.epochs import EpochCounter, Turn
from asyncfetch.stream.order import Order
from asyncfetch.stream.passes import Samples, StreamIterator
from asyncfetch.stream.placement import Placement, find_rank
from asyncfetch.stream.plan import PassPlan
from asyncfetch.stream.quarantine import Quarantine
from asyncfetch.stream.session import Session
from asyncfetch.stream.state import Progress, State, beginning, check_state, is_beginning, is_finished

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.lerobot import DatasetStatistics, DepthUnit, ImageDtype, Windows
    from asyncfetch.stream.building import Transform

__all__ = ["Stream"]


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
        self._loaded: State | None = None
        self._progress: Progress | None = None
        """Of the latest pass, while it lasts."""
        self._waiting: tuple[LeRobotDataset, Placement] | None = None
        """What the latest synchronous pass will read, and as whom, until it takes its epoch."""
        self.quarantine = Quarantine()
        """What ``on_error`` left out or replaced, in this process and in those that read for it."""
        self._passes = 0

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

        Where a state was loaded, a pass of its epoch begins where the state was taken.

        Entering opens the dataset, where the source is a URL: FetchError, FormatError, DatasetError as it says. An
        error of a sample is raised by the iterator at that sample's place. Leaving stops everything.
        """
        placement = self.placement(rank, world_size)
        stays_open = isinstance(self.source, LeRobotDataset)
        return Samples(self, self._opener(), epoch=epoch, placement=placement, is_followed=stays_open and epoch is None)

    @staticmethod
    def placement(rank: int | None = None, world_size: int | None = None) -> Placement:
        """The given rank and world size, or those found."""
        if (rank is None) != (world_size is None):
            raise ConfigError("give both rank and world_size, or none of them")
        if rank is None or world_size is None:
            rank, world_size = find_rank()
        return Placement(rank, world_size)

    def __iter__(self) -> StreamIterator:
        """One pass, driven by a loop in a thread of its own, which stays for the next pass with its connections."""
        return self.iterate(self.placement())

    def iterate(self, placement: Placement, *, epoch: int | None = None, loader: int | None = None) -> StreamIterator:
        """What iterating does, for one consumer of many.

        Args:
            placement: Which one.
            epoch: None counts; the pass then takes its epoch when the first sample is asked for. One that is given
                isn't counted.
            loader: In a loader's worker the number that all workers of this loader have; see ``EpochCounter``.
        """
        session = self._open_session()
        dataset = session.dataset()
        # A loader's worker ends with its first epoch, unless it is seen to go on to a second one.
        is_followed = epoch is None and (loader is None or self._passes > 0)
        iterator = partial(StreamIterator, self, session, dataset, placement, is_followed=is_followed)
        self._progress, self._waiting = None, (dataset, placement) if epoch is None else None
        if loader is not None and self._loaded_of(self.epoch) and not self.plan(dataset, placement, self.epoch):
            # A StatefulDataLoader that was loaded at an epoch's end makes workers for it, and at once those of the next
            # epoch, which must find it finished: so this isn't left to the first sample that is asked for.
            turn = self._begin(placement, epoch, loader)
            self.begin(dataset, placement, turn.epoch)
            turn.finish()
            return iterator(lambda: turn)
        return iterator(partial(self._begin, placement, epoch, loader))

    def _begin(self, placement: Placement, epoch: int | None, loader: int | None) -> Turn:
        if epoch is not None:
            return Turn(epoch, lambda: None)
        if loader is None and placement.workers == 1:
            return self.epochs.begin()
        return self.epochs.begin_share(placement.worker, placement.workers, loader or 0)

    def plan(self, dataset: LeRobotDataset, placement: Placement, epoch: int) -> PassPlan:
        """What one consumer reads in this epoch; the rest of it, where a state of it was loaded.

        Raises:
            EpisodeNotFound: ``episodes`` names one that isn't there.
            StateMismatch: The state is of another dataset or order.
        """
        for episode in self.episodes or ():
            dataset.episodes[episode]
        selection = dataset.episodes.indices if self.episodes is None else self.episodes
        lengths = dataset.episodes.lengths
        order = Order(
            lengths if self.episodes is None else lengths[list(self.episodes)],
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            lanes=self.config.lanes,
            pool_episodes=self.config.pool_episodes,
            group_frames=self.config.group_frames or dataset.group_frames,
        )
        chosen = None if self.episodes is None else hashlib.sha256(str(self.episodes).encode()).hexdigest()
        identity = {"dataset": dataset.fingerprint, "order": {"episodes": chosen, **order.identity()}}
        progress = Progress(identity, epoch, len(order), Rest(), placement, self.config.uneven_ends)
        loaded = self._loaded_of(epoch)
        if loaded is not None:
            progress = progress.resumed(loaded)
        return PassPlan(order, selection, progress)

    def begin(self, dataset: LeRobotDataset, placement: Placement, epoch: int) -> PassPlan:
        """``plan`` of the pass that ``state_dict`` speaks of from now on."""
        plan = self.plan(dataset, placement, epoch)
        self._progress, self._waiting = plan.progress, None
        self._passes += 1
        return plan

    def count(self, placement: Placement) -> int:
        """How many samples a consumer takes of a whole epoch. Opens the dataset where no pass has."""
        dataset = self._open_session().dataset()
        lengths = dataset.episodes.lengths
        total = int((lengths if self.episodes is None else lengths[list(self.episodes)]).sum())
        return Rest().shared(total, placement, self.config.uneven_ends)[0]

    def planned(self, placement: Placement, epoch: int) -> PassPlan:
        """``plan`` of the dataset that the synchronous iteration reads."""
        return self.plan(self._open_session().dataset(), placement, epoch)

    def finish(self, turn: Turn, plan: PassPlan) -> None:
        """A pass came to its end."""
        self.end_epoch(turn)
        if self._progress is plan.progress and not turn.is_share:
            self._progress = None

    def end_epoch(self, turn: Turn) -> None:
        """An epoch was finished, here or in another process."""
        turn.finish()
        if self._loaded_of(turn.epoch):
            self._loaded = None

    def start_of(self, epoch: int) -> State:
        """Where a pass of this epoch begins: where a loaded state of it was taken, or at the beginning."""
        return self._loaded_of(epoch) or beginning(epoch)

    def _loaded_of(self, epoch: int) -> State | None:
        return self._loaded if self._loaded is not None and self._loaded["epoch"] == epoch else None

    def state_dict(self) -> State:
        """What the latest pass has delivered of its epoch, as small JSON; not what was only fetched ahead.

        Behind a pass that came to its end, and before the first, it is the beginning of the next epoch. It tells of
        this process's consumer alone: one rank, or one worker of its loader. To go on with another number of ranks or
        workers, take it from each and put them together with ``asyncfetch.torch.merge_states``.
        """
        if self._waiting is not None:
            return self.plan(*self._waiting, self.epoch).progress.state()
        if self._progress is not None:
            return self._progress.state()
        return self.start_of(self.epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: the next passes of its epoch give what was left of it, those behind it all.

        With as many ranks and workers as before, order and batches are those of an uninterrupted run. With others, what
        is left is shared anew. The state is compared with the dataset when the next pass begins. Where nothing was left
        of the epoch for any rank, that is the next epoch's.

        Raises:
            StateMismatch: It isn't a state, or one of a version that can't be read.
        """
        state = check_state(state)
        self.go_on(state, state["epoch"] + is_finished(state, self.config.uneven_ends))

    def go_on(self, state: State, epoch: int) -> None:
        """What loading does: a state that was checked, and the epoch to begin with, which may be the one behind it."""
        if self.epochs.current() != epoch:  # the workers of a loader load it each
            self.epochs.set(epoch)
        self._loaded = None if is_beginning(state) else state
        self._progress = self._waiting = None

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
        self._waiting = None
        if self._session is not None:
            self._session.close()
            self._session = None

    def shared_by(self, workers: int) -> Stream:
        """This stream for one of a rank's loader workers: bounds, host limits and threads divided among them."""
        stream = self.__class__.__new__(self.__class__)
        stream.__dict__.update(self.__dict__)
        stream.config = self.config.shared_by(workers)
        stream._session = stream._progress = stream._waiting = None
        return stream

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.source, LeRobotDataset):
            raise TypeError("a stream of an open dataset can't be pickled: make it of the dataset's URL")
        return self.__dict__ | {"_session": None, "_progress": None, "_waiting": None}

    def __repr__(self) -> str:
        source = redact_url(self.source) if isinstance(self.source, str) else repr(self.source)
        return f"Stream({source!r}, shuffle={self.shuffle}, seed={self.seed}, epoch={self.epoch})"


def _distinct(episodes: Sequence[int]) -> tuple[int, ...]:
    chosen = tuple(operator.index(episode) for episode in episodes)
    if len(set(chosen)) != len(chosen):
        raise ConfigError("episodes must not name an episode twice: every frame comes once an epoch")
    return chosen

"""The source behind a stream and a mixture: epochs, passes, states, and the loop thread of synchronous iteration."""

from __future__ import annotations

import copy
import hashlib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from asyncfetch.config import WorkerConfig
from asyncfetch.config.checks import is_whole_number
from asyncfetch.config.secrets import goes_to_own_child
from asyncfetch.errors import ConfigError, NotFound, UsageError
from asyncfetch.observe.report import Report
from asyncfetch.observe.waits import Waits
from asyncfetch.order.deal import Deal, Left, Leg
from asyncfetch.order.plan import PassPlan
from asyncfetch.order.runs import Runs
from asyncfetch.order.state import (
    EpochProgress,
    State,
    beginning,
    check_state,
    identity_of,
    is_beginning,
    is_finished,
)
from asyncfetch.runtime.liveness import beat
from asyncfetch.stream.datasets import Member, OpenDatasets
from asyncfetch.stream.epochs import EpochCounter, Turn, check_epoch, child_number
from asyncfetch.stream.job_builder import JobBuilder, Reading
from asyncfetch.stream.passes import DatasetSession, Samples, StreamIterator
from asyncfetch.stream.quarantine import Quarantine
from asyncfetch.stream.samples import BegunPass, PassFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.config import StreamConfig
    from asyncfetch.formats import DatasetStatistics
    from asyncfetch.order.placement import Placement
    from asyncfetch.stream.batch import BatchMemory
    from asyncfetch.stream.figures import FiguresPage
    from asyncfetch.stream.job_builder import Transform

ORDER_VERSION = 4
"""The version of the order of a shuffled dataset: a state of another one is refused. Up to the third, all ranks drew
from one pool of episodes."""


class SampleSource:
    """Epochs of samples of one dataset or several, in a seeded order, and where they resume.

    Pickles, as what to read; connections and caches stay behind. Not thread-safe: one thread at a time.
    """

    def __init__(
        self, members: Sequence[Member], config: StreamConfig, *, seed: int, transform: Transform | None = None
    ) -> None:
        self.members: tuple[Member, ...] = tuple(members)
        """The datasets that are read."""
        self.config = config
        """Settings of all together."""
        self.seed = whole_seed(seed)
        self.transform: Transform | None = checked_transform(transform)
        self._epochs: EpochCounter = EpochCounter()
        self._opened: OpenDatasets | None = None
        """The datasets, if they are open; else each pass, or the session of all synchronous ones, opens them."""
        self._session: DatasetSession[OpenDatasets] | None = None
        self._loaded: dict[int, State] = {}
        """The state that was loaded, by epoch."""
        self._loads: int = 0
        """The number of that load among those counted in ``epochs``."""
        self.has_unused_state: bool = False
        """True if no pass in this process has gone on from it yet."""
        self.figures: PassFigures | None = None
        """Figures of the latest pass in this process."""
        self.page: FiguresPage | None = None
        """The page to which figures are written for another process to read, if one does."""
        self.known_identity: Mapping[str, Any] = {}
        """Identity of what the latest pass read, here or elsewhere: see EpochProgress. A mixture counts on from it."""
        # Of the latest pass. Not one value: these four don't end together.
        self._progress: EpochProgress | None = None
        """Progress of the latest pass, while it lasts."""
        self._latest: tuple[Turn, PassPlan] | None = None
        """The latest pass of one consumer, until it is counted."""
        self.latest_plan: PassPlan | None = None
        """Plan of the latest pass of one consumer that counts, after its end too, until an epoch is set or loaded."""
        self._waiting: tuple[OpenDatasets, Placement] | None = None
        """The source that the latest synchronous pass will read, and as whom, until it takes its epoch."""
        self.quarantine: Quarantine = Quarantine()
        """Samples that ``on_error`` left out or replaced, in this process and in those that read for it."""
        self.workers_memory: Any = None
        """Memory in which a loader's workers share epochs and quarantine, where there is a torch dataset of this."""
        self._passes: int = 0

    def opener(self) -> Callable[[], AbstractAsyncContextManager[OpenDatasets]]:
        """Return a function that gives the datasets, to be entered. It holds no reference to this."""
        opened = self._opened
        if opened is not None:
            return lambda: nullcontext(opened)
        return partial(OpenDatasets, self.members, self.config)

    def plan(self, opened: OpenDatasets, placement: Placement, epoch: int) -> PassPlan:
        """Return what one consumer reads in this epoch: the rest of it, if a state of it was loaded.

        Raises:
            EpisodeNotFound: ``episodes`` names one that isn't there.
            StateMismatch: The state is of another dataset or order.
        """
        loaded = self._loaded_of(epoch)
        nodes = self._nodes(placement)
        if loaded is not None and not is_beginning(loaded):
            nodes = loaded["nodes"]
        identity, whole = self.epoch_of(opened, placement, epoch, nodes)
        progress = EpochProgress(identity, epoch, whole.total, self.leg(opened, placement), placement, nodes)
        return PassPlan(whole, progress if loaded is None else progress.resumed(loaded), self.seed)

    def _nodes(self, placement: Placement) -> int:
        """Return the number of machines that keep their segments from epoch to epoch; 1 if none does."""
        if not self._keeps_shares(has_disk_cache=self.config.disk_cache_dir is not None):
            return 1
        if not placement.nodes:
            raise ConfigError(
                f"this machine's number of ranks doesn't divide the {placement.world_size} of all, so machines have "
                "different numbers, and their shares can't be kept: set StreamConfig(keep_shares=None), or start by "
                "torchrun or srun, which say how many machines there are"
            )
        return placement.nodes

    def _keeps_shares(self, *, has_disk_cache: bool) -> bool:
        keeps = self.config.keep_shares
        return len(self.members) == 1 and (has_disk_cache if keeps == "auto" else keeps == "node")

    def leg(self, opened: OpenDatasets, placement: Placement) -> Leg:
        """Return how ranks share an epoch."""
        return Leg(placement.world_size, opened.pools, self.config.uneven_ends)

    def epoch_of(
        self, opened: OpenDatasets, placement: Placement, number: int, nodes: int
    ) -> tuple[dict[str, Any], Left]:
        """Return an epoch's identity (see EpochProgress), and all of it."""
        line = opened.lines(nodes)[0]
        identity = {"dataset": opened.datasets[0].fingerprint, "order": self.order_identity(opened, 0)}
        first = number * line.total
        return identity, Left((Runs.whole(line, first, first + line.total),), np.array([[line.total]]))

    def order_identity(self, opened: OpenDatasets, member: int) -> dict[str, Any]:
        """Return what a member's order depends on beside the dataset and the epoch, as JSON."""
        one, line = self.members[member], opened.lines(1)[member]
        chosen = None if one.episodes is None else hashlib.sha256(str(one.episodes).encode()).hexdigest()
        order: dict[str, Any] = {"episodes": chosen, "shuffle": one.shuffle}
        if one.shuffle:
            frames = {"segment_frames": line.segment_frames, "group_frames": line.group_frames}
            order |= {"version": ORDER_VERSION, "seed": one.seed, **frames}
        return order

    def builder(self, opened: OpenDatasets) -> JobBuilder:
        """Return the maker of its samples, in decode threads."""
        return JobBuilder(self.readings(opened), self.transform, marks_padding=self.config.uneven_ends == "pad")

    def readings(self, opened: OpenDatasets) -> list[Reading]:
        """Return how each member's samples are made."""
        return [Reading(opened.datasets[0].sample_maker())]

    @property
    def is_open(self) -> bool:
        """True if it reads a dataset that is open on a user's loop, and so can't follow into another process."""
        return self._opened is not None or any(one.format.is_open for one in self.members)

    def over(self, opened: OpenDatasets) -> Self:
        """Return a source that reads these open datasets, and counts the same epochs."""
        twin = self._unread()
        twin._opened = opened
        return twin

    @property
    def epochs(self) -> EpochCounter:
        """The counter of epochs; a loader puts it into memory that its workers share, and those of no other rank."""
        if self.workers_memory is not None:
            self.workers_memory.keep_apart()
        return self._epochs

    @property
    def epoch(self) -> int:
        """Epoch of the next pass that isn't given another one."""
        return self.epochs.current()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; see EpochStream."""
        epoch = check_epoch(epoch)
        if self._passes_over(epoch):
            raise self._passed_over(f"set_epoch({epoch})")
        if self.epochs.shared() is not None:
            self.has_unused_state = False
        if epoch < self.epochs.loaded:
            self._loaded = {}  # a pass that begins before a rest reaches the whole of its epoch
        self.epochs.set(epoch)
        self._latest = self._progress = self.latest_plan = None

    def checked_samples(self, placement: Placement, epoch: int | None) -> Samples:
        """``samples_of``; ConfigError where an epoch that a user gave passes over a state that was loaded."""
        if epoch is not None:
            epoch = check_epoch(epoch)
            if epoch not in self._loaded and self._passes_over(epoch):
                raise self._passed_over(f"samples(epoch={epoch})")
        return self.samples_of(placement, epoch=epoch)

    def samples_of(
        self,
        placement: Placement,
        *,
        epoch: int | None = None,
        memory: BatchMemory | None = None,
        figures: PassFigures | None = None,
    ) -> Samples:
        """Return what ``samples`` does, for one consumer of many. ``figures`` may have begun as the dataset opened."""
        is_followed = self.is_open and epoch is None
        return Samples(
            self.opener(),
            lambda opened: self._begun(opened, placement, self.take_turn(epoch), is_followed=is_followed),
            self.new_figures if figures is None else lambda: figures,
            memory,
        )

    def iterate(
        self,
        placement: Placement,
        *,
        epoch: int | None = None,
        loader: int | None = None,
        memory: BatchMemory | None = None,
    ) -> StreamIterator:
        """Iterate for one consumer of many.

        Args:
            placement: Which one.
            epoch: None counts; the pass then takes its epoch when the first sample is asked for.
            loader: In a loader's worker the number that all workers of this loader have; see ``EpochCounter``.
            memory: For batches of the placement's size, of which samples are then rows where they can be.
        """
        self._count_latest()
        figures = self.new_figures(is_open=self._session is not None and self._session.is_usable)
        try:
            session = self.session()  # begins to open: a report taken from now on has to know of this pass
            opened = session.opened()
        except BaseException as error:
            figures.fail(error)
            figures.opened()
            figures.close()
            if isinstance(error, NotFound):  # the frames of the session tell nothing, either
                raise error.with_traceback(None) from None
            raise
        figures.opened()
        # A loader's worker ends with its first epoch, unless it is seen to go on to a second one.
        is_followed = epoch is None and (loader is None or self._passes > 0)
        self._progress, self._waiting = None, (opened, placement) if epoch is None else None
        begin: Callable[[], Turn] = partial(self._take_turn, placement, epoch, loader)
        loaded = self._loads == self.epochs.loads and self._loaded_of(self.epoch)  # else the first sample is an error
        if loader is not None and loaded and not self.plan(opened, placement, self.epoch):
            # A StatefulDataLoader that was loaded at an epoch's end makes workers for it, and at once those of the next
            # epoch, which must find it finished: so this isn't left to the first sample that is asked for.
            turn = begin()
            self.begin(opened, placement, turn)
            turn.finish()
            begin = lambda: turn  # noqa: E731
        return StreamIterator(
            session,
            opened,
            lambda: self._begun(opened, placement, begin(), is_followed=is_followed),
            lambda: self.plan(opened, placement, self.epoch).progress.state(),
            figures,
            memory,
        )

    def _take_turn(self, placement: Placement, epoch: int | None, loader: int | None) -> Turn:
        if epoch is not None:
            return Turn(epoch, lambda: True)
        if loader is None and placement.workers == 1:
            return self.take_turn()
        process = None if loader is None else child_number()
        return self.epochs.begin_share(placement.worker, placement.workers, loader or 0, process)

    def take_turn(self, epoch: int | None = None) -> Turn:
        """Return the turn of a pass of one consumer: see ``EpochCounter.begin``."""
        self._count_latest()
        return self.epochs.begin(epoch)

    def begin(self, opened: OpenDatasets, placement: Placement, turn: Turn) -> PassPlan:
        """Return ``plan`` of a pass that begins; ``state_dict`` is of it from now on."""
        self.epochs.check_loads(self._loads)
        self._note_use(turn.epoch)
        if turn.is_share and turn.epoch < self.epochs.loaded:
            self._loaded = {}  # as set_epoch does, which persistent workers don't hear of
        plan = self.plan(opened, placement, turn.epoch)
        self._progress, self._waiting = plan.progress, None
        if turn.epoch == self.epoch or not self.known_identity:  # else no pass goes on from it
            self.known_identity = plan.progress.identity
        self._latest = None if turn.is_share else (turn, plan)  # of a share, other workers read whether it is finished
        if self._latest is not None and turn.epoch == self.epoch:
            self.latest_plan = plan
        self._passes += 1
        return plan

    def _begun(self, opened: OpenDatasets, placement: Placement, turn: Turn, *, is_followed: bool) -> BegunPass:
        """Begin a pass; ``is_followed`` says that one of the next epoch will find what this one leaves in memory."""
        plan = self.begin(opened, placement, turn)
        beyond = self.plan(opened, placement, turn.epoch + 1) if is_followed else None
        finish = partial(self.finish, turn, plan)
        return BegunPass(plan, self.builder(opened), self.quarantine, beyond, turn.check, finish)

    def _count_latest(self) -> None:
        """Finish the latest pass if it has given all it had, though its consumer, as Lightning, didn't ask for more."""
        if self._latest is not None and self._latest[1].left < self._latest[1].progress.placement.least_samples:
            self.finish(*self._latest)

    def count(self, placement: Placement) -> int:
        """Return how many samples a consumer takes of the whole next epoch. Opens the datasets if no pass has."""
        opened = self.session().opened()
        _, whole = self.epoch_of(opened, placement, self.epoch, 1)
        order = Deal(whole, self.leg(opened, placement), self.seed).rank(placement.rank)
        return placement.count_of(order.total)

    def planned(self, placement: Placement, epoch: int) -> PassPlan:
        """Return ``plan`` over the datasets of the synchronous iteration."""
        return self.plan(self.session().opened(), placement, epoch)

    def finish(self, turn: Turn, plan: PassPlan) -> None:
        """Count a pass that came to its end."""
        plan.finish()
        if turn.is_share:  # where others have something left of theirs, all read the epoch again from where it began
            turn.finish()
        else:
            self.end_epoch(turn)
        if self._latest is not None and self._latest[1] is plan:
            self._latest = None
        if self._progress is plan.progress and not turn.is_share:
            self._progress = None

    def end_epoch(self, turn: Turn) -> None:
        """Count an epoch that its one consumer finished, here or in another process."""
        if turn.finish():
            self._loaded = {epoch: state for epoch, state in self._loaded.items() if epoch != turn.epoch}

    def start_of(self, epoch: int) -> State:
        """Return where a pass that begins has to: where a loaded state of this epoch was taken, or at the beginning."""
        self.epochs.check_loads(self._loads)
        self._note_use(epoch)
        return self._loaded_of(epoch) or beginning(epoch)

    def _note_use(self, epoch: int) -> None:
        if epoch == self.epochs.loaded or epoch in self._loaded:
            self.has_unused_state = False

    def _passes_over(self, epoch: int) -> bool:
        """Return whether a pass of this epoch leaves out a loaded state that no pass has resumed yet."""
        if not self.has_unused_state or self.epochs.shared() is not None:  # by a loader's workers
            return False
        loaded = self.epochs.loaded
        rest = self._loaded.get(loaded)
        return epoch < loaded or (epoch > loaded and rest is not None and not is_beginning(rest))

    def _passed_over(self, call: str) -> ConfigError:
        loaded = self.epochs.loaded
        return ConfigError(
            f"a state was loaded that goes on with epoch {loaded}, and {call} would pass it over: go on with epoch "
            f"{loaded}, which load_state_dict has set already, and count from there (accelerate sets epochs by itself, "
            f"from 0 on: call set_epoch({loaded}) of its loader before iterating); or make this anew, without the state"
        )

    def _loaded_of(self, epoch: int) -> State | None:
        return None if epoch < self.epochs.finished else self._loaded.get(epoch)

    def state_dict(self) -> State:
        """Return what the latest pass has delivered; see EpochStream."""
        if self.epochs.shared() is not None:
            raise ConfigError(
                "a loader's workers read this stream, and only they know how far they are: use "
                "StreamDataset.state_after(batches, batch_size=..., num_workers=...), or torchdata's "
                "StatefulDataLoader; behind set_epoch or load_state_dict it is known here again"
            )
        return self.latest_state()

    def latest_state(self) -> State:
        """``state_dict`` of a consumer that may be a loader's worker, and share the count of epochs with others."""
        if self._waiting is not None:
            return self.plan(*self._waiting, self.epoch).progress.state()
        if self._progress is not None:
            return self._progress.state()
        return self._loaded_of(self.epoch) or beginning(self.epoch, self.known_identity)

    def load(self, state: Mapping[str, Any], least_samples: int = 1) -> None:
        """Load a state; fewer than ``least_samples`` aren't given: see ``Placement``."""
        state = check_state(state)
        self.go_on(state, state["epoch"] + is_finished(state, least_samples))
        # What workers of earlier loaders are still doing doesn't count any more.
        self.epochs.load(self.epoch, state["epoch"])
        self.epochs.note_load()
        self._loads, self.has_unused_state = self.epochs.loads, True

    def go_on(self, state: State, epoch: int) -> None:
        """Resume from a checked state with this epoch, which may be the one after the state's."""
        if self.epochs.current() != epoch or self.epochs.finished > state["epoch"]:  # a loader's workers load it each
            self.epochs.load(epoch, state["epoch"])
        identity = identity_of(state)
        self._loaded = {epoch: beginning(epoch, identity), state["epoch"]: state} if identity else {}
        self._progress = self._waiting = self._latest = self.latest_plan = None

    def session(self) -> DatasetSession[OpenDatasets]:
        """Return the loop thread of the synchronous iteration, on which its datasets open."""
        if self.is_open:
            raise ConfigError("an open dataset lives on its own loop: `async with stream.samples()` there")
        if self._session is None or not self._session.is_usable:
            self._session = DatasetSession(self.opener())
            if self.page is not None:
                self._session.thread.start(beat, self.page.beat)
        return self._session

    def new_figures(self, *, is_open: bool = False, begun_at: float | None = None) -> PassFigures:
        """Return the figures of a pass that begins, which are from now on those of the latest one."""
        before: tuple[Waits, Sequence[PassFigures]] = Waits(), ()
        if self.figures is not None:
            self.figures.leave_page()
            before = self.figures.handed_on()
        if self.is_open:
            reader = self.members[0].format.reader() if self._opened is None else self._opened.reader
            is_open, report = True, None if reader is None else reader.pass_report
            before = Waits() if report is None else report().all_waits, ()  # whichever stream's they were
        figures = PassFigures(self.config, self.page, before=before, is_open=is_open, begun_at=begun_at)
        if is_open and self.figures is not None:
            figures.begin(self.figures.seen, figures.path)  # until its first sample is asked for
        self.figures = figures
        return figures

    def sample_bytes(self) -> int:
        """Return the bytes of a decoded sample. Opens the datasets if no pass has."""
        return self.builder(self.session().opened()).sample_bytes

    def report(self) -> Report:
        """Return why the consumer waits; see EpochStream."""
        return Report.of(Waits(), None, self.config) if self.figures is None else self.figures.report()

    def statistics(self) -> DatasetStatistics | None:
        """Return those of the synchronous iteration; see EpochStream."""
        session = self._session
        return session.statistics() if session is not None and session.is_usable else None

    def close(self) -> None:
        """End the loop thread; see EpochStream."""
        self._waiting = None
        if self._session is not None:
            self._session.close()
            self._session = None

    def shared_by(self, workers: int, readers_name: str | None = None) -> Self:
        """Return the source of one of a rank's loader workers, with its share of bounds, host limits and threads.

        With a name that only those of one loader have, they read as one: see ``RankReader``.
        """
        twin = self._unread()
        twin.config = WorkerConfig.of(self.config, workers, readers_name)
        twin.members = tuple(replace(one, config=WorkerConfig.of(one.config, workers, None)) for one in self.members)
        return twin

    def _unread(self) -> Self:
        """Return a copy that no pass has read."""
        twin = copy.copy(self)
        twin._session = twin._progress = twin._waiting = twin._latest = twin.latest_plan = twin.figures = None
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.is_open:
            raise UsageError("a stream of an open dataset can't be pickled: make it of the dataset's URL")
        for transform in (self.transform, *(one.transform for one in self.members)):
            if transform is not None and goes_to_own_child():
                _check_goes_along(transform)
        return self._unread().__dict__ | {"workers_memory": None, "page": None}

    def __copy__(self) -> Self:  # not by way of __getstate__, which is for other processes
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        return twin


def whole_seed(seed: Any) -> int:  # noqa: ANN401 - what a user gave
    """Return a seed; ConfigError where it is none."""
    if not is_whole_number(seed):
        raise ConfigError(f"seed must be a whole number, not {seed!r}")
    return int(seed)


def checked_transform(transform: Transform | None) -> Transform | None:
    """Return a transform; ConfigError where it is none."""
    if transform is not None and not callable(transform):
        raise ConfigError(f"transform must be a function of a sample, or None, not {transform!r}")
    return transform


def _check_goes_along(transform: Transform) -> None:
    """Raise UsageError if a spawned process can't get a transform. Elsewhere another pickler may know how."""
    try:
        ForkingPickler.dumps(transform)
    except (AttributeError, PicklingError, TypeError) as error:  # which of them depends on Python's version
        raise UsageError(
            f"transform={transform!r} can't be sent to a process that starts by spawn ({error}): define it by def, or "
            'its class, at a module\'s top; or start loader workers by DataLoader(multiprocessing_context="fork")'
        ) from None

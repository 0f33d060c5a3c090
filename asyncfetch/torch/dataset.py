"""A Stream, or a Mixture of them, as torch datasets; samples as a batch."""

from __future__ import annotations

import gc
import operator
import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from asyncfetch.config import PrivateUrl, config_share, stream_config
from asyncfetch.config.checks import chosen_features, explains_keywords, is_whole_number
from asyncfetch.decode import picture_size
from asyncfetch.errors import ConfigError, StateMismatch, UsageError, redact_url
from asyncfetch.formats import DatasetStatistics, RangeFormat
from asyncfetch.lerobot import open_dataset
from asyncfetch.lerobot.dataset import check_values
from asyncfetch.observe.figures import sum_of
from asyncfetch.order.state import MAX_WORKERS, State, check_state, merge_shares
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.runtime.shared_memory import MemorySlots, can_hand_over
from asyncfetch.stream import DatasetSession, Placement
from asyncfetch.stream.batch import PinnedMemory, PooledMemory, batch_of, samples_of
from asyncfetch.stream.buckets import Bucketing, batched, batches_of, check_bucket_by
from asyncfetch.stream.epoch_stream import EpochStream, source_for, source_of
from asyncfetch.stream.epochs import child_number
from asyncfetch.stream.figures import report_of, sum_known
from asyncfetch.stream.handing_over import HandedOver, SlotMemory, Stack, stacks
from asyncfetch.stream.quarantine import Quarantine
from asyncfetch.stream.ranks import found_placement
from asyncfetch.streams import distinct_episodes
from asyncfetch.torch.memory import WorkersMemory
from asyncfetch.torch.watching import Care, watch_loaders
from asyncfetch.videos import Videos

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch.utils.data._utils.worker import WorkerInfo

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import Fit
    from asyncfetch.formats import ImageDtype, Sample
    from asyncfetch.lerobot import DepthUnit, LeRobotDataset, Windows
    from asyncfetch.observe.report import Report
    from asyncfetch.stream import SampleSource, StreamIterator
    from asyncfetch.stream.batch import BatchMemory
    from asyncfetch.stream.buckets import BucketBy
    from asyncfetch.stream.figures import FiguresBoard


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of samples, by key: tensors of one shape and dtype stacked along a new first dimension, others in lists.

    Unlike torch's ``default_collate`` it takes what can't be stacked as it is: strings, and values of changing length
    such as language annotations. In a loader's worker the stack is made in shared memory, as torch does it. The keys
    are those of the first sample; where another lacks one, its value is None, and the key's values are a list.
    """
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise ConfigError(
                f"a batch is made of dicts, not of {type(sample).__name__}: let the transform return a dict, or take "
                "single samples (batch_size=None here, and a collate_fn of your own)"
            )
    batch = stacks(samples) if samples else {}
    return {key: default_collate(value.tensors) if isinstance(value, Stack) else value for key, value in batch.items()}


class StreamDataset(IterableDataset[Any]):
    """A ``Stream`` or ``Mixture`` for ``torch.utils.data.DataLoader``, with any number of workers, forked or spawned.

    Every frame comes exactly once an epoch over all ranks and workers. The stream's byte bounds, host limits and
    threads are for the rank, whose workers read as one: the first of them fetches for all, each byte once, and says so
    in its statistics. They map what it fetched, and get equal shares of the rest. Connections and caches live as long
    as the worker: give the loader ``persistent_workers=True`` to keep them from epoch to epoch.

    All workers of a pass take the same epoch. A pass that was finished is followed by the next epoch, one that wasn't
    by the same epoch again, and ``set_epoch`` has the last word. Without workers, a pass is finished when its iterator
    has ended or has given all there is, but for what ``drop_last`` leaves out: Lightning doesn't ask for more. What a
    loader drops of its own isn't known here. With workers, a pass is finished when each of them has come to the end
    of its share. They read ``prefetch_factor`` batches ahead of the trainer: after a ``break`` among the last of
    these, the epoch may count as finished.

    It may be made in the process that starts the ranks, by fork or spawn: each then counts its epochs for itself.

    It shards itself. Under Hugging Face accelerate use the loader without ``prepare``, which would share out once more
    what is one rank's share already: of two processes, half of the frames never came.

    Resuming: ``state_dict`` says what was delivered in this process, and ``load_state_dict``, called before the loader
    is iterated, lets it go on from there; what was iterated before, and workers made before, raise ConfigError then
    instead of going on. A ``StatefulDataLoader``'s own ``load_state_dict`` is for its next ``iter``. Without workers
    that is all of a rank; torchdata's ``StatefulDataLoader`` calls them in its workers; after a ``break`` among the
    last batches of a pass, ask its state only when each of its persistent workers has given a batch again, for before
    that some may not know yet which epoch it is of. For a plain loader with workers, count its batches and ask
    ``state_after``. States of several ranks are put together by ``merge_states``.

    Args:
        stream: What to read. ``set_epoch`` on it, or here, reaches the workers of a running loader when it is iterated
            again.
        batch_size: Samples of a batch that the dataset makes itself, with ``collate``; give the loader
            ``batch_size=None`` then. The batches, and their order, are the same for every number of workers, where
            nothing is left out or replaced: each worker has samples of its own before a bad one. None gives single
            samples, for the loader to put into batches: then each worker makes batches of its own share. Frames of a
            group of pictures come ``pool_segments`` samples apart: unless that is a multiple of the batch size times
            the workers, several of them decode the same groups, and a warning says so.
        drop_last: Whether smaller batches are left out: a last one, and in a mixture of members that disagree those at
            the end of a rest that was dealt out anew, one of each member at most, and those that lack what ``on_error``
            left out.
        pin_memory: Whether batches made in the training process are in page-locked memory, where there is CUDA:
            ``.to("cuda", non_blocking=True)`` then needs no copy before it, nor does a loader's ``pin_memory=True``
            make one. It is torch's, which locks it once and hands it out again when no tensor and no copy to a device
            needs it any more. Samples that are copied together get there by one copy more. Batches of workers are
            pinned by the loader, and those of a ``collate_fn`` where they are made.
        collate_fn: Makes a batch of a list of samples, instead of ``collate``, and may return anything. Reports count
            its time as hand-over, with and without workers; without, that of a loader's own is the trainer's to them.
        bucket_by: What the samples of a batch have in common where sizes differ: "shape", the shapes of all pictures
            (tensors of three axes or more), or "frames", how many each clip has. None makes batches of samples as they
            come; what can't be stacked is a list. Samples wait for others of their shape: up to 16 batches of them,
            and ``decoded_max_bytes``. Beyond that the one that has waited longest goes in a smaller batch, as all do
            at the end; with ``drop_last`` these are left out. States tell of those that wait, so that resuming is as
            exact. Each worker has buckets of its own, and ranks may come to different numbers of batches, which
            aren't known before: there is no ``len``, nor ``state_after``.

    A batch is what ``collate`` makes of its samples, but without a copy: each picture is written to its place when it
    has been decoded, channels-last in memory (``contiguous()`` gives another order). Workers hand batches over in
    shared memory. A batch's memory is used again when its last tensor is gone; of a worker's ninth batch that is held
    the trainer gets a copy, and one that is held while the process forks stays in the child's memory as long as that
    lives or holds it. Samples that a transform makes are copied together, at 1.3 times the CPU; those around bad
    data that is left out or replaced, too.

    ``len`` counts this rank's samples, or batches, of a whole epoch; it opens the dataset. ``len(loader)`` is right
    where this makes the batches or there are no workers; else each worker may end with a smaller batch, and there are
    more of them than that.
    """

    @explains_keywords
    def __init__(
        self,
        stream: EpochStream,
        batch_size: int | None = None,
        *,
        drop_last: bool = False,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        bucket_by: BucketBy | None = None,
    ) -> None:
        source = source_for(stream, "StreamDataset")
        self.batch_size = _batch_size(batch_size)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn must be a function of a list of samples, or None, not {collate_fn!r}")
        if collate_fn is not None and batch_size is None:
            raise ConfigError("collate_fn makes batches of batch_size samples: give batch_size too, or the loader both")
        check_bucket_by(bucket_by, batch_size, "StreamDataset")
        self.collate_fn = collate_fn
        self.bucket_by = bucket_by
        self.stream = stream
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self._memory = WorkersMemory.of(source)
        self._token = os.urandom(16).hex()
        self._workers_stream: SampleSource | None = None
        self._batches_memory: tuple[int, BatchMemory] | None = None
        """A process's id and its memory for batches, from pass to pass. A forked child gets memory of its own."""
        self._sent_rank: tuple[int, Placement] | None = None
        """The process's id and its rank, in a spawned worker, which knows nothing of torch.distributed."""
        self._ended: StreamIterator | None = None
        """A pass that has ended, while samples of it wait in buckets."""

    @property
    def _source(self) -> SampleSource:
        return source_of(self.stream)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, in persistent workers too; see ``Stream.set_epoch``."""
        self._ended = None
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        memory = self._memory_of_batches()
        rows = None if self.bucket_by is not None else memory
        self._ended = None
        if worker is None:
            samples = self._source.iterate(self._in_batches(found_placement()), memory=rows)
        else:
            # A loader draws one seed, and gives each of its workers that and the worker's number.
            loader = worker.seed - worker.id
            if self._workers_stream is None:
                self._workers_stream = self._source.shared_by(worker.num_workers, self._readers_name(worker))
                self._workers_stream.quarantine = Quarantine()
                self._workers_stream.quarantine.share(self._memory.board, worker.id)
                process = child_number()
                self._workers_stream.page = self._memory.figures.claim(
                    loader, worker.id, worker.num_workers, worker.id if process is None else process
                )
            samples = self._workers_stream.iterate(
                self._placement(worker.id, worker.num_workers), loader=loader, memory=rows
            )
        if self.batch_size is None:
            return samples
        together = self.collate_fn or partial(_together, memory=memory)
        max_bytes, bucketing = (self._workers_stream or self._source).config.decoded_max_bytes, None
        if self.bucket_by is not None:
            bucketing = Bucketing(self.bucket_by, self.batch_size, self.drop_last, max_bytes)
        batches = batches_of(self._in_batches(Placement()), bucketing)
        made = batched(samples, together, batches, keep=partial(setattr, self, "_ended"))
        return _warning_of_second_batching(self.batch_size, made)

    def _readers_name(self, worker: WorkerInfo) -> str | None:
        """Return what the workers of this worker's loader find each other by; None where they can't."""
        if worker.num_workers == 1 or not can_hand_over():
            return None
        return f"{self._token}-{os.getppid()}-{worker.seed - worker.id}"

    def _memory_of_batches(self) -> BatchMemory | None:
        if self.batch_size is None or self.collate_fn is not None:
            return None
        if self._batches_memory is None or self._batches_memory[0] != os.getpid():
            self._batches_memory = os.getpid(), self._new_memory()
        return self._batches_memory[1]

    def _new_memory(self) -> BatchMemory:
        if get_worker_info() is not None and can_hand_over():
            return SlotMemory(MemorySlots())
        if self.pin_memory and get_worker_info() is None and torch.cuda.is_available():
            return PinnedMemory()
        return PooledMemory(MemoryPool(self._source.config.decoded_max_bytes, sizes_recur=True))

    def _rank(self) -> Placement:
        # A copy for anything but a worker may have been made before its process became a rank.
        if self._sent_rank is not None and self._sent_rank[0] == os.getpid() and get_worker_info() is not None:
            return self._sent_rank[1]
        return found_placement()

    def _placement(self, worker: int, workers: int) -> Placement:
        rank = self._rank()
        return self._in_batches(replace(rank, worker=worker, workers=workers, block_samples=self.batch_size or 1))

    def _in_batches(self, placement: Placement) -> Placement:
        return replace(placement, batch_size=self.batch_size, drop_last=self.drop_last and self.bucket_by is None)

    def __len__(self) -> int:
        if self.bucket_by is not None:
            raise UsageError(
                f"the number of batches isn't known before: it depends on the samples (bucket_by={self.bucket_by!r}); "
                "len(StreamDataset(stream)) counts these"
            )
        samples = self._source.count(self._placement(0, 1))
        return samples if self.batch_size is None else self._count_batches(samples, self.batch_size)

    def _count_batches(self, samples: int, size: int) -> int:
        """Return how many batches of this size a consumer makes of so many samples."""
        return -(-(samples + 1 - self._in_batches(Placement()).least_samples) // size)

    def state_dict(self) -> State:
        """Return what this process was given of the epoch; see ``Stream.state_dict``.

        Where the loader makes the batches, an error in the middle of one leaves it counted so far, though it was
        never given: make the batches here, by ``StreamDataset(batch_size=)``, to go on exactly after errors.

        Raises:
            StateMismatch: Workers read it, of which this process knows nothing: ask ``state_after``.
        """
        if get_worker_info() is None and self._source.epochs.shared() is not None:
            raise StateMismatch(
                "a loader's workers read this dataset, and only they know how far they are: use "
                "StreamDataset.state_after(batches, batch_size=..., num_workers=...), or torchdata's StatefulDataLoader"
            )
        if self._ended is not None:
            return self._ended.state_dict()
        return (self._workers_stream or self._source).latest_state()

    def load_state_dict(self, state: State) -> None:
        """Go on where ``state`` was taken: see ``Stream.load_state_dict``. Before the loader makes its workers."""
        self._workers_stream = self._ended = None
        if get_worker_info() is None:
            self._source.load(state, self._in_batches(Placement()).least_samples)
        else:  # a StatefulDataLoader's, which goes on to the next epoch by itself
            state = check_state(state)
            self._source.go_on(state, state["epoch"])

    def state_after(self, batches: int, *, batch_size: int | None = None, num_workers: int = 0) -> State:
        """This rank's state where a plain ``DataLoader`` has given so many batches of the epoch.

        Exact where the loader keeps its batches in order, as it does by default. What ``on_error="skip"`` left out in
        the workers isn't known here: as many samples as that may come again.

        Args:
            batches: Since the epoch began, or was resumed; of this epoch only. Where it is 0 that is the
                epoch that the next pass takes, which is the running one's too, unless the workers have read all of that
                ahead already.
            batch_size: The loader's; None where it has none, or where this dataset makes the batches.
            num_workers: The loader's.

        Raises:
            ConfigError: So many batches aren't in an epoch; or the loader has another number of workers, or, with
                several of them, ``in_order=False``: then it isn't known which of them has given which batches.
        """
        if self.bucket_by is not None:
            raise ConfigError(
                f"with bucket_by={self.bucket_by!r} the number of batches doesn't tell which samples they had: ask "
                "state_dict, without workers, or torchdata's StatefulDataLoader"
            )
        size = self.batch_size or _batch_size(batch_size) or 1
        if not is_whole_number(batches):
            raise ConfigError(f"batches must be a whole number, not {batches!r}")
        if not is_whole_number(num_workers) or not 0 <= num_workers <= MAX_WORKERS:
            raise ConfigError(f"num_workers must be a whole number from 0 to {MAX_WORKERS}, not {num_workers!r}")
        batches, num_workers = int(batches), int(num_workers)
        if num_workers > 1 and _is_taken_out_of_order(self):
            raise ConfigError(
                f"batches={batches} don't tell which of {num_workers} workers gave them where the loader has "
                "in_order=False: leave it out, as loaders keep their batches in order by default"
            )
        # Batches made here are the rank's, whichever process makes them.
        workers = max(1, num_workers) if self.batch_size is None else 1
        placements = [self._placement(worker, workers) for worker in range(workers)]
        begun = self._source.epochs.shared() if batches else None
        alone = self._source.latest_plan if batches and not num_workers else None
        if alone is not None and (begun is None or begun <= alone.progress.epoch):
            epoch, plans = alone.progress.epoch, [alone]  # which may have been counted by now
        else:
            epoch = self.stream.epoch if begun is None else begun
            sharing = self._source.epochs.sharing() if begun is not None and self.batch_size is None else {num_workers}
            if num_workers not in sharing:
                read_by = f"{min(sharing)} workers read epoch {epoch}"
                raise ConfigError(f"num_workers={num_workers}, and {read_by}: give the loader's num_workers")
            plans = [self._source.planned(placement, epoch) for placement in placements]
        left = [self._count_batches(len(plan), size) for plan in plans]
        if not 0 <= batches <= sum(left):
            raise ConfigError(f"batches={batches} isn't among the {sum(left)} of what this rank takes of epoch {epoch}")
        turns = (worker for turn in count() for worker in range(workers) if turn < left[worker])
        given = Counter(islice(turns, batches))
        states = []
        for worker, plan in enumerate(plans):
            delivered = min(plan.begun + given[worker] * size, plan.end)
            states.append(replace(plan.progress, placement=placements[worker], delivered=delivered).state())
        return merge_shares(states)

    def statistics(self) -> DatasetStatistics | None:
        """Return this rank's statistics: of the loader's workers together, where it has some, still running or not.

        They write theirs twice a second, and aren't asked. In a worker they are that worker's; before anything was
        read, None. For Prometheus: ``asyncfetch.prometheus.Collector(dataset.statistics)``.
        """
        own = (self._workers_stream or self._source).statistics()
        if get_worker_info() is not None:
            return own
        return sum_known([own, self._board().together()[1]])

    def report(self) -> Report:
        """Return why the trainer waits, and what to set, in the latest pass: of its workers, where it has some."""
        own = self._workers_stream or self._source
        report = own.report()
        if get_worker_info() is not None:
            return report
        board = self._board()
        pages = board.latest()
        waits, statistics = board.together()
        all_waits, all_statistics = sum_of(waits, report.all_waits), sum_known([statistics, report.all_statistics])
        own_begun_at = own.figures.begun_at if own.figures is not None and report.waits.consumers else 0.0
        if pages and max(page.begun_at for page in pages) > own_begun_at:
            report = report_of(pages, self._source.config)
        return replace(report, all_waits=all_waits, all_statistics=all_statistics)

    def _board(self) -> FiguresBoard:
        self._memory.keep_apart()  # a forked child's loaders are its own
        return self._memory.figures

    def __getstate__(self) -> dict[str, Any]:
        self._memory.keep_apart()
        apart = dict.fromkeys(("_workers_stream", "_batches_memory", "_ended"))
        return self.__dict__ | apart | {"_sent_rank": self._rank()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _sent_rank=(os.getpid(), state["_sent_rank"]))
        self._memory.attach(self._source)

    def __repr__(self) -> str:
        return f"StreamDataset({self.stream!r})"


def _batch_size(given: Any) -> int | None:  # noqa: ANN401 - what a user gave
    if given is None:
        return None
    if not is_whole_number(given) or given < 1:
        raise ConfigError(f"batch_size must be a whole number, at least 1, or None, not {given!r}")
    return int(given)


def _is_taken_out_of_order(dataset: StreamDataset) -> bool:
    """Return whether a loader of this process takes batches of several workers as they come. Torch tells no dataset."""
    holders = gc.get_referrers(dataset)
    holders += gc.get_referrers(*(each for each in holders if type(each) is dict))  # attributes of an object
    orders = [
        (getattr(each, "in_order", True), each.num_workers)
        if issubclass(type(each), DataLoader)
        else (getattr(each, "_in_order", True), each._num_workers)
        for each in holders
        if issubclass(type(each), DataLoader | _BaseDataLoaderIter)
    ]
    return any(workers > 1 and not in_order for in_order, workers in orders)


def _frame_number(index: Any) -> int:  # noqa: ANN401 - what a user gave
    try:
        return operator.index(index)
    except TypeError as error:
        raise UsageError(f"a frame's number must be a whole number, not {index!r:.80}: frames[3]") from error


def _warning_of_second_batching(size: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Warn where a loader that makes batches asks for the first of these, which tells its size nowhere else."""
    caller = sys._getframe(1)
    asked = caller.f_locals.get("possibly_batched_index") if caller.f_code.co_name == "fetch" else None
    if isinstance(asked, list):
        warnings.warn(
            f"batches of batches: StreamDataset(batch_size={size}) makes batches, and so does "
            f"DataLoader(batch_size={len(asked)}): give the loader batch_size=None",
            stacklevel=1,
        )
    yield from batches


def _together(batch: list[Any], memory: BatchMemory | None) -> Any:  # noqa: ANN401
    if (found := batch_of(batch)) is None:
        collated = collate(samples_of(batch))
        return memory.pinned(collated) if isinstance(memory, PinnedMemory) else collated
    whole, rows = found
    return HandedOver.of(whole, rows, memory) if isinstance(memory, SlotMemory) else whole.rows(rows)


class FrameDataset(Dataset["Sample"]):
    """Random access to a dataset's samples, ``dataset[i]``, over the same caches; for samplers of your own.

    ``i`` counts frames in the dataset's order, over the chosen episodes. Works in loader workers started by fork or
    spawn: each process opens the dataset for itself, at its first read, a worker with its share of the configuration's
    bounds. Reading a batch (``__getitems__``, as torch's loader does) fetches all its episodes at once, of
    long ones the segments with its frames.

    Args:
        source: URL or path of a LeRobot v3 dataset.
        windows, episodes, features, image_dtype, depth_unit, size, fit, config: As in ``Stream``.

    Raises:
        IndexError: ``i`` is out of range.
        AsyncFetchError: What ``LeRobotDataset.sample`` raises.
    """

    @explains_keywords
    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        windows: Windows | None = None,
        episodes: Sequence[int] | None = None,
        features: Collection[str] | None = None,
        image_dtype: ImageDtype = "uint8",
        depth_unit: DepthUnit = "mm",
        size: tuple[int, int] | None = None,
        fit: Fit | None = None,
        config: StreamConfig | None = None,
    ) -> None:
        if isinstance(source, Videos | RangeFormat):
            read = "videos, clips=ClipSampler(...)" if isinstance(source, Videos) else "format"
            raise ConfigError(
                f"FrameDataset takes the url or path of a LeRobot dataset, not {source!r}: use "
                f"StreamDataset(Stream({read})), which gives samples in an order, not by number"
            )
        self.source = source = PrivateUrl(source)
        check_values(image_dtype, depth_unit)  # refused here, not at the first read; so are the following
        picture_size(size, fit)
        self.windows = windows
        self.episodes = None if episodes is None else distinct_episodes(episodes)
        self.config = stream_config(config)
        self._open = partial(
            open_dataset,
            source,
            features=chosen_features(features),
            image_dtype=image_dtype,
            depth_unit=depth_unit,
            size=size,
            fit=fit,
        )
        self._session: DatasetSession[LeRobotDataset] | None = None
        self._chosen: Sequence[int] = ()
        self._ends: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __len__(self) -> int:
        ends = self._episode_ends()
        return int(ends[-1]) if len(ends) else 0

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of several frames, read concurrently, in the asked order."""
        places = [self._locate(_frame_number(index)) for index in indices]
        session = self._opened()
        return session.thread.run(_read_all, session.opened(), places, self.windows)

    def _locate(self, index: int) -> tuple[int, int]:
        total = len(self)
        if not -total <= index < total:
            raise IndexError(f"frame {index} isn't among the {total} frames of {redact_url(self.source)}")
        index %= total
        ends = self._episode_ends()
        number = int(np.searchsorted(ends, index, side="right"))
        start = int(ends[number - 1]) if number else 0
        return self._chosen[number], index - start

    def _episode_ends(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._ends is None:
            table = self._opened().opened().episodes
            self._chosen = table.indices if self.episodes is None else self.episodes
            self._ends = np.cumsum(table.lengths[table.positions(self._chosen)], dtype=np.int64)
        return self._ends

    def _opened(self) -> DatasetSession[LeRobotDataset]:
        if self._session is None or not self._session.is_usable:
            worker = get_worker_info()
            config = self.config if worker is None else config_share(self.config, worker.num_workers)
            self._session = DatasetSession(partial(self._open, config=config))
        return self._session

    def close(self) -> None:
        """Close the dataset in this process; the next read opens it again."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None}


async def _read_all(dataset: LeRobotDataset, places: list[tuple[int, int]], windows: Windows | None) -> list[Sample]:
    return await gather(*(partial(dataset.sample, episode, frame, windows=windows) for episode, frame in places))


def _care_of(dataset: Any) -> Care | None:  # noqa: ANN401
    if isinstance(dataset, StreamDataset):
        return Care(dataset.stream.config.fetch.timeouts.silent_process_seconds, dataset._memory.figures.pages)
    if isinstance(dataset, FrameDataset):
        return Care(dataset.config.fetch.timeouts.silent_process_seconds, tuple)
    return None


watch_loaders(_care_of)

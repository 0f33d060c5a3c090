"""The face of a stream and of a mixture: epochs of samples, iterated in both ways, and what can be asked of them."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from asyncfetch.config.checks import whole_number
from asyncfetch.decode.backends import choose_backend
from asyncfetch.errors import AsyncFetchError, ConfigError, UsageError
from asyncfetch.order.deal import Deal
from asyncfetch.order.placement import Placement
from asyncfetch.runtime.concurrently import gather
from asyncfetch.stream.batch import MemoryPlan
from asyncfetch.stream.passes import WITH_SAMPLES
from asyncfetch.stream.ranks import find_nodes, found_placement
from asyncfetch.stream.traffic import TrafficPlan, traffic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Never

    from asyncfetch.config import StreamConfig
    from asyncfetch.formats import DatasetStatistics
    from asyncfetch.observe.report import Report
    from asyncfetch.order.state import State
    from asyncfetch.stream.datasets import Origin
    from asyncfetch.stream.passes import Samples, StreamIterator
    from asyncfetch.stream.quarantine import Quarantine
    from asyncfetch.stream.source import SampleSource


class EpochStream:
    """The samples of a Stream or Mixture, epoch after epoch; iterated, or read by ``samples`` on a loop of your own.

    Pickles, as what to read; connections and caches stay behind. Not thread-safe: one thread at a time.
    """

    _source: SampleSource
    """All that it does; the rooms above take it by ``source_of``."""

    @property
    def epoch(self) -> int:
        """Epoch of the next pass that isn't given another one."""
        return self._source.epoch

    @property
    def config(self) -> StreamConfig:
        """Bounds, limits and threads, for one rank."""
        return self._source.config

    @property
    def quarantine(self) -> Quarantine:
        """Samples that ``on_error`` left out or replaced, in this process and in those that read for it."""
        return self._source.quarantine

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, in the workers of a running loader too.

        A pass takes its epoch when its first sample is asked for, a loader's when the loader is iterated. Until then
        ``state_dict`` is of this epoch, whatever the pass before has delivered.

        Raises:
            ConfigError: It isn't an epoch; or a state was loaded from which no pass has gone on yet, and this lies
                before the epoch that it goes on with, or after it where something of that is left.
        """
        self._source.set_epoch(epoch)

    def samples(self, *, epoch: int | None = None, rank: int | None = None, world_size: int | None = None) -> Samples:
        """One pass, on the running loop: ``async with stream.samples() as samples: async for sample in samples``.

        Args:
            epoch: None counts: 0 or what ``set_epoch`` said, and one more after each pass that was finished: its
                iterator has ended, or has given its last sample. After an earlier ``break`` the next pass takes the
                same epoch again.
            rank: This process among ``world_size``; None finds both, from torch.distributed or torchrun's variables.
            world_size: Processes that share the epoch.

        Where a state was loaded, a pass of its epoch begins where the state was taken, and the first one can't be of
        another: ConfigError.

        Entering opens the dataset, where the source is a URL: FetchError, FormatError, DatasetError as it says. An
        error of a sample is raised by the iterator at that sample's place. Leaving stops everything.
        """
        return self._source.checked_samples(found_placement(rank, world_size), epoch)

    def __iter__(self) -> StreamIterator:
        """One pass, driven by a loop in a thread of its own, which stays for the next pass with its connections."""
        return self._source.iterate(found_placement())

    def __aiter__(self) -> Never:
        raise UsageError(f"a {type(self).__name__} is iterated by `for`, or on a loop of your own: {WITH_SAMPLES}")

    def __len__(self) -> int:
        raise UsageError(
            f"a {type(self).__name__} isn't a torch dataset: write "
            "DataLoader(af.torch.StreamDataset(stream, batch_size=32), "
            "batch_size=None); len() of that StreamDataset is its length"
        )

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: object) -> Never:
        raise UsageError(f"a {type(self).__name__} has no frame {index!r} by number: af.torch.FrameDataset(url)[i] has")

    def state_dict(self) -> State:
        """Return what the latest pass has delivered of its epoch, as small JSON; not what was only fetched ahead.

        Behind a pass that came to its end, and before the first, it is the beginning of the next epoch. Before the
        first it doesn't say of which dataset, which wasn't opened yet. It tells of this process's consumer alone: one
        rank, or one worker of its loader. To go on with another number of ranks or workers, take it from each and put
        them together with ``asyncfetch.torch.merge_states``.

        Raises:
            ConfigError: A loader's workers read it, of which this process knows nothing.
        """
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: the next passes of its epoch give what was left of it, those after it all.

        With as many ranks and workers as before, order and batches are those of an uninterrupted run. With others, what
        is left is shared anew. The state is compared with the dataset when the next pass begins. Where nothing was left
        of the epoch for any rank, that is the next epoch's. Where smaller batches are dropped, load it into what makes
        the batches, which knows that less than one is nothing.

        Call it before iterating: a pass that has begun, and a loader's workers that were made, don't go on from it, and
        raise ConfigError at their next sample.

        Raises:
            StateMismatch: It isn't a state, or one of a version that can't be read.
        """
        self._source.load(state)

    def warm_up(self, *, clips: bool = False) -> None:
        """Bring what comes before the first sample of the next pass in this process, and return when it is there.

        That is the library that decodes, the metadata, and for each episode that the first 500 samples are of the
        indexes of its videos and the footer of its table. Call it before what is timed, or while nothing else happens.
        Loader workers have engines of their own, which it doesn't reach.

        Args:
            clips: Bring these episodes themselves, too, as many as there is room for.

        What an episode can't be read for is raised at its sample. Opening raises as iterating does.
        """
        session = self._source.session()
        opened = session.opened()
        choose_backend(self._source.config.decoder)
        pieces = list(self._source.plan(opened, found_placement(), self.epoch).first_pieces())
        session.thread.run(_warm_up, [opened.origin(piece) for piece in pieces], clips)

    def statistics(self) -> DatasetStatistics | None:
        """Return what the synchronous iteration's engine and caches have done in this process; None before the first.

        So in a forked child, and after ``close``, until it iterates; and where what it reads couldn't be opened. While
        that is being opened, this waits for it, and raises as iterating does.
        """
        return self._source.statistics()

    def report(self) -> Report:
        """Return why the consumer of the latest pass waits, or waited, and what to set. It may be called in any thread.

        Before the first pass, and in a process other than the one that iterates, it says so.
        """
        return self._source.report()

    def memory_plan(self, batch_size: int | None = None, *, num_workers: int = 0) -> MemoryPlan:
        """Return what a rank takes at most, known before a sample is read. Opens what is read where no pass has.

        Args:
            batch_size: Of a ``StreamDataset`` that makes batches; None for single samples.
            num_workers: Of its loader, which reads two batches ahead of each of them.

        With ``pin_memory=True`` rows and batches may take twice as much: torch rounds each tensor up to a power of two.

        Raises:
            ConfigError: There can't be so many.
        """
        size = 0 if batch_size is None else whole_number("batch_size", batch_size, least=1)
        workers = whole_number("num_workers", num_workers, least=0)
        return MemoryPlan.of(self._source.config, self._source.sample_bytes(), size, workers)

    def traffic_plan(self, *, world_size: int = 1, num_workers: int = 0, batch_size: int | None = None) -> TrafficPlan:
        """Return what the next epoch fetches, by lengths and indexes alone: nothing of it is read.

        Takes about a second for 5 million frames, of a mixture ten, and the indexes of up to 1,024 episodes' videos of
        each dataset. Of an episode that comes in two epochs of a mixture's member it counts both.

        Args:
            world_size: Ranks that share it.
            num_workers: Loader workers of each, which read as one: whatever their number, it costs the same.
            batch_size: Of the batches that ``StreamDataset`` makes; None where the loader makes them.

        Raises:
            ConfigError: There can't be so many.
            FetchError, FormatError, DatasetError: The dataset, or an index, can't be read.
        """
        ranks, workers = (
            whole_number("world_size", world_size, least=1),
            whole_number("num_workers", num_workers, least=0),
        )
        size = None if batch_size is None else whole_number("batch_size", batch_size, least=1)
        nodes = find_nodes(ranks) or 1
        layout = Placement(0, ranks, workers=max(1, workers), nodes=nodes, batch_size=size)
        session, source = self._source.session(), self._source
        opened = session.opened()
        _, whole = source.epoch_of(opened, layout, self.epoch, source._nodes(layout))
        deal = Deal(whole, source.leg(opened, layout), source.seed)
        kept = source._keeps_shares(has_disk_cache=True)
        return session.thread.run(traffic, opened, deal, layout, 1 if kept else nodes)

    def close(self) -> None:
        """End the loop thread of the synchronous iteration, if there is one. The stream can be iterated again."""
        self._source.close()

    def __copy__(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        twin._source = copy.copy(self._source)
        return twin

    def __repr__(self) -> str:
        return repr(self._source)


def source_of(stream: EpochStream) -> SampleSource:
    """Return the source of a user's stream, for the rooms above."""
    return stream._source


def source_for(stream: object, taker: str) -> SampleSource:
    """Return the source of a stream that ``taker`` has read in other processes; ConfigError where that can't be."""
    if not isinstance(stream, EpochStream):
        raise ConfigError(f"{taker} takes a Stream or a Mixture, not {stream!r:.80}; of a StreamDataset, its .stream")
    if stream._source.is_open:
        raise ConfigError(
            f"{taker} needs a stream of a URL, as an open dataset can't follow it into another process: make the "
            "stream of the dataset's URL"
        )
    return stream._source


async def _warm_up(origins: Sequence[Origin], clips: bool) -> None:
    async def bring(origin: Origin) -> None:
        with suppress(AsyncFetchError):  # the pass meets it again, at the episode's place
            reader, stretch = origin.reader, origin.stretch
            await gather(partial(reader.clip_bytes, stretch), partial(reader.locate_beside, stretch))
            if clips:
                await reader.ready(stretch)

    await gather(*(partial(bring, origin) for origin in origins))

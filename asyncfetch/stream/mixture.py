"""Several datasets as one supply of samples, in given proportions, with nothing merged on disk."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from asyncfetch.config import StreamConfig
from asyncfetch.config.checks import explains_keywords
from asyncfetch.errors import ConfigError
from asyncfetch.lerobot import LeRobotDataset, reader_of
from asyncfetch.ranges import is_whole_number
from asyncfetch.stream.epochs import MAX_EPOCH
from asyncfetch.stream.job_builder import JobBuilder, are_one
from asyncfetch.stream.mixed import AsNamed, Missing, MixedBuilder, MixedOrder, OpenMixture, Shape, shapes
from asyncfetch.stream.mixing import Batching, MixedEpoch, MixedRemaining, Mixing, StopOn, left_of_members
from asyncfetch.stream.plan import PassPlan
from asyncfetch.stream.pool import Drawn, Pool, fit
from asyncfetch.stream.remaining import Remaining
from asyncfetch.stream.source import EpochStream, SampleSource, source_of
from asyncfetch.stream.state import (
    MIXTURE_VERSION,
    EpochProgress,
    State,
    identity_of,
    is_beginning,
    place_of,
    resharded,
    resharded_in,
    run_of,
)
from asyncfetch.stream.stream import Stream, StreamSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.lerobot import DatasetEngine
    from asyncfetch.stream.job_builder import Transform
    from asyncfetch.stream.placement import Placement
    from asyncfetch.stream.protocols import Origin

__all__ = ["Mixture", "MixtureSource"]

Schedule = tuple[tuple[int, tuple[float, ...]], ...]


class MixtureSource(SampleSource[OpenMixture]):
    """What a ``Mixture`` reads; its arguments are that one's, the members as their sources."""

    def __init__(
        self,
        streams: Sequence[StreamSource],
        weights: Sequence[float] | Mapping[int, Sequence[float]] | Sequence[tuple[int, Sequence[float]]],
        *,
        stop_on: StopOn,
        seed: int,
        keys: Sequence[Mapping[str, str] | None] | Mapping[int, Mapping[str, str] | None] | None,
        missing: Missing,
        transform: Transform | None,
        block_samples: int | None,
        config: StreamConfig | None,
    ) -> None:
        super().__init__(seed, transform)
        self.schedule = _schedule(weights, len(streams))
        if stop_on not in ("first", "all") and not _is_count(stop_on):
            message = f'stop_on must be "first", "all" or a number of samples from 1, below 2**63 - 1, not {stop_on!r}'
            raise ConfigError(message)
        if missing not in {"keep", "drop", "pad", "raise"}:
            raise ConfigError(f'missing must be "keep", "drop", "pad" or "raise", not {missing!r}')
        if block_samples is not None and not _is_count(block_samples):
            raise ConfigError(f"block_samples must be from 1, below 2**63 - 1, or None, not {block_samples!r}")
        self.stop_on: StopOn = stop_on if isinstance(stop_on, str) else operator.index(stop_on)
        self.keys = _renames(keys, len(streams))
        self.missing: Missing = missing
        self.block_samples = None if block_samples is None else int(block_samples)
        self.config = config or _common_config(streams)
        self.streams = _members(streams, self.config, self.schedule)
        """The members, with the configurations that they are read with."""

    def go_on(self, state: State, epoch: int) -> None:
        """See SampleSource."""
        super().go_on(state, epoch)
        self.known_identity = identity_of(state)

    def shared_by(self, workers: int, readers_name: str | None = None) -> Self:
        """See SampleSource."""
        twin = super().shared_by(workers, readers_name)
        twin.streams = tuple(stream.shared_by(workers) for stream in self.streams)
        return twin

    def opener(self) -> Callable[[], AbstractAsyncContextManager[OpenMixture]]:
        """See SampleSource."""
        opened = self._opened
        if opened is not None:
            return lambda: nullcontext(opened)
        members = [partial(_dataset, stream) for stream in self.streams]
        pools = [(stream.pool, stream.episodes) for stream in self.streams]
        return partial(OpenMixture, self.config, members, partial(_fit, pools))

    def plan(self, opened: OpenMixture, placement: Placement, epoch: int) -> PassPlan:
        """See SampleSource."""
        for member, stream in enumerate(self.streams):
            if stream.has_unused_state:
                raise ConfigError(
                    f"a state was loaded into member {member} of this mixture, which reads no member's own state: load "
                    "a state of the mixture into the mixture, and make it of streams that none was loaded into"
                )
        identity, mixed = self._epoch(opened, placement, epoch)
        batching, ends = self._batching(opened, placement), self.config.uneven_ends
        progress = EpochProgress(identity, epoch, mixed.total, Remaining(), placement, ends)
        loaded = self._loaded_of(epoch)
        if loaded is not None:
            progress.check(loaded)
        if loaded is None or is_beginning(loaded):
            return self._plan(opened, mixed, progress, batching)
        known: MixedEpoch | MixedRemaining = mixed
        dealt = resharded_in(loaded, mixed.taken, mixed.ends()[-1])
        if dealt is not None:
            known, identity = self._reshard(identity, mixed, *dealt)
        order = self._order(opened, known)
        progress = EpochProgress(identity, epoch, known.total, Remaining(), placement, ends).resumed(loaded, order)
        needed = batching
        if needed is None and isinstance(known, MixedRemaining) and progress.is_known_of_all(loaded):
            # What others left out of it, and the empty positions of their batches, are no matter of single samples.
            needed = Batching(1, placement.world_size, drop_last=False, ends=ends)
        if needed is None or (known.suits(needed) and progress.goes_on_between_batches(loaded)):
            return self._plan(opened, known, progress, batching)
        rests = left_of_members(known, progress.left_of(loaded, order))
        rest, identity = self._reshard(identity, mixed, rests, needed)
        return self._plan(
            opened, rest, EpochProgress(identity, epoch, rest.total, Remaining(), placement, ends), batching
        )

    def _reshard(
        self, identity: Mapping[str, Any], mixed: MixedEpoch, rests: Sequence[Remaining], batching: Batching
    ) -> tuple[MixedRemaining, dict[str, Any]]:
        """Return what is left of an epoch in blocks that suit these batches, and its identity."""
        order = identity["order"] | resharded(rests, batching)
        return MixedRemaining(mixed, rests, batching, self.seed), {**identity, "order": order}

    def _plan(
        self,
        opened: OpenMixture,
        mixed: MixedEpoch | MixedRemaining,
        progress: EpochProgress,
        batching: Batching | None,
    ) -> PassPlan:
        return PassPlan(
            self._order(opened, mixed),
            AsNamed(),
            progress,
            parts_batches=batching is not None,
            empty_at=mixed.empty_at if isinstance(mixed, MixedRemaining) else None,
        )

    def _order(self, opened: OpenMixture, mixed: MixedEpoch | MixedRemaining) -> MixedOrder:
        members = zip(self.streams, opened.datasets, strict=True)
        orders = [partial(stream.order, dataset) for stream, dataset in members]
        return MixedOrder(mixed, self._lengths(opened), orders)

    def whole(
        self, opened: OpenMixture, layout: Placement
    ) -> tuple[MixedOrder, list[tuple[LeRobotDataset, Sequence[int]]]]:
        """See SampleSource."""
        members = zip(self.streams, opened.datasets, strict=True)
        selections = [(dataset, stream.order(dataset, 0)[1]) for stream, dataset in members]
        return self._order(opened, self._epoch(opened, layout, self.epoch)[1]), selections

    def builder(self, opened: OpenMixture) -> MixedBuilder:
        """See SampleSource."""
        return MixedBuilder(
            [
                JobBuilder(reader_of(dataset).sample_builder(stream.windows), stream.transform, marks_padding=False)
                for stream, dataset in zip(self.streams, opened.datasets, strict=True)
            ],
            self._shapes(opened)[0],
            self.transform,
            marks_padding=self.config.uneven_ends == "pad",
        )

    @staticmethod
    def reader(opened: OpenMixture) -> OpenMixture:
        """See SampleSource."""
        return opened

    @staticmethod
    def origin(opened: OpenMixture, episode: int) -> Origin:
        """See SampleSource."""
        return opened.origin(episode)

    def _total(self, opened: OpenMixture, placement: Placement, epoch: int) -> int:
        return self._epoch(opened, placement, epoch)[1].total

    def _epoch(self, opened: OpenMixture, placement: Placement, number: int) -> tuple[dict[str, Any], MixedEpoch]:
        """An epoch, and its identity: see EpochProgress."""
        members = zip(self.streams, opened.datasets, strict=True)
        orders = [[dataset.fingerprint, stream.identity(stream.order(dataset, 0)[0])] for stream, dataset in members]
        mix = {
            "version": MIXTURE_VERSION,
            "members": len(orders),
            "weights": _digest(self.schedule)[:16],
            "stop_on": self.stop_on,
            "seed": self.seed,
        }
        run = {"dataset": _digest(orders), "order": mix}
        loaded = self._loaded_of(number)
        known = self.known_identity if loaded is None else identity_of(loaded)
        place = place_of(known) if run_of(known) == run else None
        batching = self._batching(opened, placement)
        whole = 1 if batching is None else batching.round_samples
        block = self.block_samples or whole
        if block % whole:
            raise ConfigError(
                f"block_samples={block} isn't a multiple of the {whole} samples of a batch of each rank (batch_size="
                f"{placement.batch_size}, world_size={placement.world_size}), and the members disagree in keys, "
                f"dtypes, shapes or transforms, so batches would end early: give block_samples="
                f"{-(-block // whole) * whole}, or None"
            )
        if place is not None and loaded is not None and not is_beginning(loaded):
            block = place.block_samples
        epoch = Mixing(self._lengths(opened), self.schedule, self.stop_on, block, self.seed).epoch(number, place)
        here = {"epoch": number, "block_samples": block, "taken": list(epoch.taken)}
        return {**run, "order": mix | here}, epoch

    def _lengths(self, opened: OpenMixture) -> tuple[int, ...]:
        return tuple(
            int(stream.lengths(dataset).sum()) for stream, dataset in zip(self.streams, opened.datasets, strict=True)
        )

    def _batching(self, opened: OpenMixture, placement: Placement) -> Batching | None:
        """Return that of batches that we make, where samples of two members can't be stacked."""
        size = placement.batch_size
        if size is None or self._shapes(opened)[1]:
            return None
        return Batching(size, placement.world_size, placement.drop_last, self.config.uneven_ends)

    def _shapes(self, opened: OpenMixture) -> tuple[list[Shape], bool]:
        layouts = [
            reader_of(dataset).sample_builder(stream.windows).layout()
            for stream, dataset in zip(self.streams, opened.datasets, strict=True)
        ]
        found, are_alike = shapes(layouts, self.keys, self.missing)
        # What a transform makes isn't known: those of one are taken to be as alike as what it is given.
        return found, are_alike and all(are_one(self.streams[0].transform, each.transform) for each in self.streams)

    def __repr__(self) -> str:
        return f"Mixture({len(self.streams)} streams, stop_on={self.stop_on!r}, seed={self.seed}, epoch={self.epoch})"


class Mixture(EpochStream[MixtureSource]):
    """The samples of several datasets in turns, by weight, epoch after epoch; cameras and shapes may differ.

    Used as a ``Stream`` is: iterated, by ``samples()``, in ``StreamDataset`` and ``serve_samples``, with the same
    states, shares of ranks and workers, and errors. Each sample has its member's number as ``dataset``, a 0-d int64
    tensor.

    Whose sample comes when is arithmetic on weights and seed: at any point every member has been given its share within
    a few samples (see ``mixing``). The k-th sample of a member is the k-th of the member's own epochs, one after the
    other: who is used up begins its next epoch, in its next order, and what a member has left where the mixture's epoch
    ends comes in the next one. An epoch is counted on from the one that was read or loaded last; one that is set and
    lies before that, from the run's beginning, as if all had been read at this number of ranks and batch size.

    All members are read by one engine, within the bounds of one configuration; each takes only its metadata besides,
    which is read when the mixture is opened.

    Args:
        streams: The members: streams of URLs. What they say of features, windows, episodes, order and transform holds
            for their samples; their epochs and states aren't used.
        weights: How often each is drawn, relative to the others: one list, or lists by the step from which on they
            hold, ``{0: [1, 0], 10_000: [0.5, 0.5]}`` or ``[(0, [1, 0]), (10_000, [0.5, 0.5])]``. A step is a sample of
            all ranks together, counted since epoch 0 began.
        stop_on: Where an epoch ends: where the "first" member is used up, where "all" have been used up once, or after
            so many samples.
        seed: Of the choice of members; each stream has its own for its order.
        keys: New names, for each member: ``{"observation.images.front": "observation.images.top"}``, or None. By the
            member's number where it is a mapping.
        missing: What becomes of keys that only some members have. "keep" keeps them; "drop" leaves them out; "pad"
            gives zeros, "" and None in their place, and ``<key>_is_missing`` in every sample; "raise" refuses them.
            Those that a stream's own transform adds are not among them.
        transform: Applied to each sample, renamed and completed, in a decode thread, after its stream's own.
        block_samples: How many samples in a row come of one member. None means 1, but where members disagree in keys,
            dtypes, shapes or their own transforms and batches are made (``StreamDataset(batch_size=)``,
            ``serve_samples``) as many as all ranks take for one batch each, so that each batch is of one member; there
            a number must be a multiple of that. The rest of an epoch that was loaded keeps the number that it was begun
            with; where batches of one member each don't come out even by that, it is dealt out anew, as many samples as
            that in a row.
        config: Bounds, limits and threads of all members together, for one rank. None means that of the streams that
            have one, which must then agree. A stream's own configuration is used for its order alone: ``lanes``,
            ``pool_episodes`` and ``group_frames``; one without gets a part of the mixture's pool, by weight.

    Raises:
        ConfigError: Something doesn't fit; where that is a matter of the datasets, when they are opened.
    """

    @explains_keywords
    def __init__(
        self,
        streams: Sequence[Stream],
        weights: Sequence[float] | Mapping[int, Sequence[float]] | Sequence[tuple[int, Sequence[float]]],
        *,
        stop_on: StopOn = "first",
        seed: int = 0,
        keys: Sequence[Mapping[str, str] | None] | Mapping[int, Mapping[str, str] | None] | None = None,
        missing: Missing = "keep",
        transform: Transform | None = None,
        block_samples: int | None = None,
        config: StreamConfig | None = None,
    ) -> None:
        self._source = MixtureSource(
            _members_of(streams),
            weights,
            stop_on=stop_on,
            seed=seed,
            keys=keys,
            missing=missing,
            transform=transform,
            block_samples=block_samples,
            config=config,
        )

    @property
    def stats(self) -> list[Mapping[str, Any] | None]:
        """meta/stats.json of each member, by the mixture's keys, for normalising: ``stats[int(sample["dataset"])]``.

        None for a member without, FormatError where one's is damaged. Opens the datasets where no synchronous pass has,
        and waits for that.
        """
        stats = [dataset.stats for dataset in self._source.session().opened().datasets]
        return [
            None if one is None else {rename.get(key, key): value for key, value in one.items()}
            for one, rename in zip(stats, self._source.keys, strict=True)
        ]


def _dataset(stream: StreamSource, engine: DatasetEngine) -> LeRobotDataset:
    assert isinstance(stream.source, str)
    return LeRobotDataset(
        stream.source,
        features=stream.chosen_features,
        image_dtype=stream.image_dtype,
        depth_unit=stream.depth_unit,
        config=stream.config,
        engine=engine,
    )


async def _fit(pools: Sequence[tuple[Pool, tuple[int, ...] | None]], datasets: Sequence[LeRobotDataset]) -> None:
    await fit([Drawn(pool, dataset, chosen) for (pool, chosen), dataset in zip(pools, datasets, strict=True)])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _members_of(streams: Sequence[Stream]) -> list[StreamSource]:
    if not isinstance(streams, Sequence) or not streams:  # type: ignore[redundant-expr]
        raise ConfigError("a mixture needs at least one stream, in a list")
    for member, stream in enumerate(streams):
        if not isinstance(stream, Stream) or source_of(stream).is_open:  # type: ignore[redundant-expr]
            raise ConfigError(f"member {member} of a mixture must be a Stream of a URL, not {stream!r}")
    return [source_of(stream) for stream in streams]


def _is_count(value: Any) -> bool:  # noqa: ANN401 - what a user gave
    return is_whole_number(value) and 1 <= value <= MAX_EPOCH


def _schedule(weights: Any, members: int) -> Schedule:  # noqa: ANN401
    try:
        if isinstance(weights, Mapping):
            stages = sorted(weights.items())
        elif len(weights) and isinstance(weights[0], Sequence) and not isinstance(weights[0], str):
            stages = list(weights)
        else:
            stages = [(0, weights)]
        schedule = tuple((operator.index(step), _numbers(these)) for step, these in stages)
    except (TypeError, ValueError) as error:
        message = f"weights must be a number for each stream, or a schedule {{step: numbers}}, not {weights!r}"
        raise ConfigError(message) from error
    steps = [step for step, _ in schedule]
    if steps[:1] != [0] or sorted(set(steps)) != steps:
        raise ConfigError(f"weights must begin at step 0, and their steps must ascend, not {steps}")
    for step, these in schedule:
        if len(these) != members:
            raise ConfigError(f"{members} streams need {members} weights, not {len(these)}, from step {step} on")
        if not all(weight >= 0 for weight in these) or not 0 < sum(these) < math.inf:
            raise ConfigError(
                f"weights must be 0 or more, one of them above 0, their sum finite, not {these} from step {step} on"
            )
    return schedule


def _numbers(weights: Any) -> tuple[float, ...]:  # noqa: ANN401
    if isinstance(weights, str):
        raise TypeError("digits of a string are no weights")
    return tuple(map(float, weights))


def _renames(
    keys: Sequence[Mapping[str, str] | None] | Mapping[int, Mapping[str, str] | None] | None, members: int
) -> tuple[Mapping[str, str], ...]:
    if keys is None:
        return ({},) * members
    if isinstance(keys, Mapping):
        unknown = [member for member in keys if member not in range(members)]
        if unknown:
            raise ConfigError(f"keys: there are no members {unknown} among {members}")
        keys = [keys.get(member) for member in range(members)]
    is_list = isinstance(keys, Sequence)
    if not is_list or not all(these is None or isinstance(these, Mapping) for these in keys):
        raise ConfigError(f"keys must be a mapping or None for each stream, or {{member: mapping}}, not {keys!r}")
    if len(keys) != members:
        raise ConfigError(f"keys: {members} streams need {members} mappings, or None in their place, not {len(keys)}")
    for key, new in chain.from_iterable(these.items() for these in keys if these):
        if {type(key), type(new)} != {str}:
            message = f"keys: a new name must be a string, as that of {key!r} isn't: {new!r}"
            raise ConfigError(f"{message}; to leave a key out, use its stream's features=")
    return tuple(these or {} for these in keys)


def _common_config(streams: Sequence[StreamSource]) -> StreamConfig:
    """Return what the streams say apart from their order."""
    default = StreamConfig()
    order = {name: getattr(default, name) for name in ("lanes", "pool_episodes", "group_frames")}
    common = None
    for member, stream in enumerate(streams):
        if stream.has_config:
            config = replace(stream.config, **order)
            if common is not None and config != common:
                raise ConfigError(
                    f"the configuration of stream {member} differs from that of one before it: give "
                    "Mixture(config=...), whose bounds, limits and threads are for all streams together"
                )
            common = config
    return common or default


def _members(streams: Sequence[StreamSource], config: StreamConfig, schedule: Schedule) -> tuple[StreamSource, ...]:
    """The streams with the mixture's configuration, and a pool each."""
    most = [max(weights[member] / sum(weights) for _, weights in schedule) for member in range(len(streams))]
    members = []
    for stream, weight in zip(streams, most, strict=True):
        twin = copy.copy(stream)
        if stream.has_config:
            own = stream.config
            lanes, pool, group_frames = own.lanes, own.pool_episodes, own.group_frames
        else:
            pool = max(1, int(config.pool_episodes * weight / sum(most)))
            lanes, group_frames = min(config.lanes, 1 << (pool.bit_length() - 1)), config.group_frames
        twin.config = replace(config, lanes=lanes, pool_episodes=pool, group_frames=group_frames)
        twin.pool = Pool(twin.config, is_shuffled=twin.shuffle)
        members.append(twin)
    return tuple(members)

"""Several datasets as one supply of samples, in given proportions, with nothing merged on disk."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from asyncfetch.config import StreamConfig
from asyncfetch.config.checks import explains_keywords, is_whole_number
from asyncfetch.errors import ConfigError
from asyncfetch.order.deal import Left, Leg
from asyncfetch.order.mixing import Mixing, StopOn
from asyncfetch.order.runs import Runs
from asyncfetch.order.state import MAX_EPOCH, MIXTURE_VERSION, State, identity_of, is_beginning, place_of, run_of
from asyncfetch.stream.epoch_stream import EpochStream, source_of
from asyncfetch.stream.job_builder import Reading, are_one
from asyncfetch.stream.shapes import Missing, Shape, shapes
from asyncfetch.stream.source import SampleSource

if TYPE_CHECKING:
    from asyncfetch.order.placement import Placement
    from asyncfetch.order.plan import PassPlan
    from asyncfetch.stream.datasets import Member, OpenDatasets
    from asyncfetch.stream.job_builder import Transform

Schedule = tuple[tuple[int, tuple[float, ...]], ...]
_Keys = Sequence[Mapping[str, str] | None] | Mapping[int, Mapping[str, str] | None] | None
_OF_ORDER = ("pool_segments", "segment_seconds", "group_frames")
"""Settings of a stream's own that hold for its samples in a mixture, too."""


class MixtureSource(SampleSource):
    """The source of a ``Mixture``; its arguments are that one's, the members as their sources."""

    def __init__(
        self,
        streams: Sequence[SampleSource],
        weights: object,
        stop_on: StopOn,
        seed: int,
        keys: _Keys,
        missing: Missing,
        transform: Transform | None,
        block_samples: int | None,
        config: StreamConfig | None,
    ) -> None:
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
        given = [stream.members[0] for stream in streams]
        config = config or _common_config(given)
        super().__init__(_members(given, config, self.schedule), config, seed=seed, transform=transform)
        self._streams = tuple(streams)
        """The members as they were given: none may have a state of its own."""

    def go_on(self, state: State, epoch: int) -> None:
        """Resume from a checked state; its epoch is counted on from."""
        super().go_on(state, epoch)
        self.known_identity = identity_of(state)

    def plan(self, opened: OpenDatasets, placement: Placement, epoch: int) -> PassPlan:
        """Return what one consumer reads; ConfigError where a member has a state of its own."""
        for member, stream in enumerate(self._streams):
            if stream.has_unused_state:
                raise ConfigError(
                    f"a state was loaded into member {member} of this mixture, which reads no member's own state: load "
                    "a state of the mixture into the mixture, and make it of streams that none was loaded into"
                )
        return super().plan(opened, placement, epoch)

    def leg(self, opened: OpenDatasets, placement: Placement) -> Leg:
        """Return how ranks share an epoch, in blocks of one member."""
        size, ends = placement.batch_size, self.config.uneven_ends
        if size is None or self._shapes(opened)[1]:
            block = (self.block_samples or 1) // placement.world_size
            return Leg(placement.world_size, opened.pools, ends, max(1, block))
        return Leg(placement.world_size, opened.pools, ends, size, "whole" if placement.drop_last else "one")

    def readings(self, opened: OpenDatasets) -> list[Reading]:
        """Return how each member's samples are made and shaped."""
        each = zip(self.members, opened.datasets, self._shapes(opened)[0], strict=True)
        return [Reading(dataset.sample_maker(), one.transform, shape) for one, dataset, shape in each]

    def epoch_of(
        self, opened: OpenDatasets, placement: Placement, number: int, nodes: int
    ) -> tuple[dict[str, Any], Left]:
        """Return an epoch's identity, and all of it, by the members' weights."""
        lines = opened.lines(nodes)
        orders = [
            [dataset.fingerprint, self.order_identity(opened, member)] for member, dataset in enumerate(opened.datasets)
        ]
        mix = {"version": MIXTURE_VERSION, "members": len(orders), "weights": _digest(self.schedule)[:16]}
        mix |= {"stop_on": self.stop_on, "seed": self.seed}
        run = {"dataset": _digest(orders), "order": mix}
        loaded = self._loaded_of(number)
        known = self.known_identity if loaded is None else identity_of(loaded)
        place = place_of(known) if run_of(known) == run else None
        leg = self.leg(opened, placement)
        whole = 1 if leg.batches == "any" else leg.block_samples * leg.world_size
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
        lengths = tuple(line.total for line in lines)
        epoch = Mixing(lengths, self.schedule, self.stop_on, block, self.seed).epoch(number, place)
        here = {"epoch": number, "block_samples": block, "taken": list(epoch.taken)}
        cells = epoch.cells()
        runs = [
            Runs.whole(line, before, before + count)
            for line, before, count in zip(lines, epoch.taken, cells.sum(axis=0).tolist(), strict=True)
        ]
        return {**run, "order": mix | here}, Left(tuple(runs), cells)

    def _shapes(self, opened: OpenDatasets) -> tuple[list[Shape], bool]:
        layouts = [dataset.sample_maker().layout() for dataset in opened.datasets]
        found, are_alike = shapes(layouts, self.keys, self.missing)
        # What a transform makes isn't known: those of one are taken to be as alike as what it is given.
        return found, are_alike and all(are_one(self.members[0].transform, each.transform) for each in self.members)

    def __repr__(self) -> str:
        return f"Mixture({len(self.members)} streams, stop_on={self.stop_on!r}, seed={self.seed}, epoch={self.epoch})"


class Mixture(EpochStream):
    """The samples of several datasets in turns, by weight, epoch after epoch; cameras and shapes may differ.

    Used as a ``Stream`` is: iterated, by ``samples()``, in ``StreamDataset`` and ``serve_samples``, with the same
    states, shares of ranks and workers, and errors. Each sample has its member's number as ``dataset``, a 0-d int64
    tensor.

    Which member's sample comes when is arithmetic on weights and seed: at any point every member has been given its
    share within a few samples (see ``mixing``), on each rank. A member gives its own epochs, one after the other: one
    that is used up begins its next, and what it has left where the mixture's epoch ends comes in the next. An epoch
    is counted on from the one that was read or loaded last; one that is set and lies before that, from the run's
    beginning, as if all had been read at this number of ranks and batch size.

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
            have one, which must then agree. A stream's own configuration is used for its order alone:
            ``pool_segments``, ``segment_seconds`` and ``group_frames``; one without gets a part of the mixture's pool,
            by weight.

    Raises:
        ConfigError: Something doesn't fit; where that is a matter of the datasets, when they are opened.
    """

    _source: MixtureSource

    @explains_keywords
    def __init__(
        self,
        streams: Sequence[EpochStream],
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
            _members_of(streams), weights, stop_on, seed, keys, missing, transform, block_samples, config
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


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _members_of(streams: Sequence[EpochStream]) -> list[SampleSource]:
    if not isinstance(streams, Sequence) or not streams:  # type: ignore[redundant-expr]
        raise ConfigError("a mixture needs at least one stream, in a list")
    for member, stream in enumerate(streams):
        is_stream = isinstance(stream, EpochStream) and not isinstance(stream, Mixture)  # type: ignore[redundant-expr]
        if not is_stream or source_of(stream).is_open:
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


def _renames(keys: _Keys, members: int) -> tuple[Mapping[str, str], ...]:
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


def _common_config(members: Sequence[Member]) -> StreamConfig:
    """Return what the streams say apart from their order."""
    default = StreamConfig()
    order = {name: getattr(default, name) for name in _OF_ORDER}
    common = None
    for member, one in enumerate(members):
        if one.has_config:
            config = replace(one.config, **order)
            if common is not None and config != common:
                raise ConfigError(
                    f"the configuration of stream {member} differs from that of one before it: give "
                    "Mixture(config=...), with bounds, limits and threads for all streams together"
                )
            common = config
    return common or default


def _members(members: Sequence[Member], config: StreamConfig, schedule: Schedule) -> list[Member]:
    """The streams with the mixture's configuration, and a pool each."""
    most = [max(weights[member] / sum(weights) for _, weights in schedule) for member in range(len(members))]
    found = []
    for one, weight in zip(members, most, strict=True):
        own = {name: getattr(one.config if one.has_config else config, name) for name in _OF_ORDER}
        if not one.has_config:
            own["pool_segments"] = max(1, int(config.pool_segments * weight / sum(most)))
        found.append(replace(one, config=replace(config, **own)))
    return found

"""A mixture's pass: its members' episodes in one order, read by one engine, as samples that say whose they are.

Members' samples are changed so that they go together.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from asyncfetch.errors import ConfigError
from asyncfetch.fetch.limiter import Limiter
from asyncfetch.lerobot import DatasetEngine, Field, LeRobotDataset, reader_of
from asyncfetch.observe.figures import sum_of
from asyncfetch.observe.waits import Cause
from asyncfetch.runtime.concurrently import gather, kept
from asyncfetch.stream.batch import BatchRow, Layout
from asyncfetch.stream.job_builder import PADDING, FailedSample, TransformTime, divided, mark_padding, transformed
from asyncfetch.stream.order import Step
from asyncfetch.stream.placement import Placement
from asyncfetch.stream.protocols import Origin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import DecodePool
    from asyncfetch.lerobot import DatasetStatistics, EpisodeReader, HeldEpisode, Sample
    from asyncfetch.lerobot.engine import Budget
    from asyncfetch.observe.report import Report
    from asyncfetch.stream.job_builder import JobBuilder, Transform
    from asyncfetch.stream.mixing import MixedEpoch, MixedRemaining, Walk
    from asyncfetch.stream.order import Affinities, Order, SlotAssignment, Visits

__all__ = ["DATASET", "AsNamed", "Missing", "MixedBuilder", "MixedOrder", "OpenMixture", "Shape", "shapes"]

DATASET = "dataset"
"""Key of a sample's member number."""

Missing = Literal["keep", "drop", "pad", "raise"]
"""The choice of what becomes of keys that only some members have."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Changes to the samples of a member, so that they go with those of others."""

    rename: Mapping[str, str]
    """Key here by key there, where they differ."""
    drop: frozenset[str] = frozenset()
    """Keys here that other members lack."""
    fill: Mapping[str, Field] = field(default_factory=dict)
    """Fields that others have and this one lacks."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """``<key>_is_missing`` of keys that some lack."""

    def apply(self, member: int, sample: Sample) -> Sample:
        """The sample as the mixture gives it."""
        import torch

        if not isinstance(sample, dict):
            raise ConfigError(
                f"the transform of member {member} gave {type(sample).__name__}, and in a mixture a sample is a dict: "
                "return one, or give the transform to the mixture"
            )
        shaped = {self.rename.get(key, key): value for key, value in sample.items()}
        for key in self.drop:
            shaped.pop(key, None)
        for key, like in self.fill.items():
            shaped.setdefault(key, _nothing(like))
        shaped |= {key: torch.tensor(flag) for key, flag in self.flags.items()}
        shaped[DATASET] = torch.tensor(member)
        return shaped

    def fields(self, given: Mapping[str, Field]) -> dict[str, Field]:
        """Return the fields of what ``apply`` gives, by those of the member's own samples."""
        fields = {self.rename.get(key, key): like for key, like in given.items()}
        fields = {key: like for key, like in fields.items() if key not in self.drop}
        flags = dict.fromkeys(self.flags, Field("bool"))
        return fields | {**self.fill, **fields} | flags | {DATASET: Field("int64")}

    def row(self, row: BatchRow, given: Mapping[str, Field]) -> BatchRow:
        """The same by the member's own keys."""
        dropped = {key: like for key, like in given.items() if self.rename.get(key, key) in self.drop}
        return BatchRow(row.batch, row.number, self.rename, dropped)

    def complete(self, member: int, row: BatchRow) -> None:
        """Add what ``apply`` adds, for a sample that was written to the row."""
        for key, like in self.fill.items():
            row.put(key, 0 if like.is_tensor else _nothing(like))
        for key, flag in self.flags.items():
            row.put(key, flag)
        row.put(DATASET, member)


def _nothing(like: Field) -> Any:  # noqa: ANN401
    import torch

    if like.is_tensor:
        return torch.zeros(like.shape, dtype=getattr(torch, like.dtype))
    nothing = "" if like.dtype == "string" else None
    return [nothing] * like.shape[0] if like.shape else nothing


def shapes(
    layouts: Sequence[Mapping[str, Field]], renames: Sequence[Mapping[str, str]], missing: Missing
) -> tuple[list[Shape], bool]:
    """Return what is done to each member's samples, and whether they are then alike in keys, dtypes and shapes. Pure.

    Raises:
        ConfigError: Two keys of a member get one name, a key isn't there, or ``missing`` can't be done.
    """
    complete = [
        _with_masks(layout, rename, member)
        for member, (layout, rename) in enumerate(zip(layouts, renames, strict=True))
    ]
    renamed = [
        {rename.get(key, key): like for key, like in layout.items()}
        for layout, rename in zip(layouts, complete, strict=True)
    ]
    for member, (layout, new) in enumerate(zip(layouts, renamed, strict=True)):
        if len(new) < len(layout) or DATASET in new:
            raise ConfigError(
                f"keys of member {member}: every key needs a name of its own, which isn't {DATASET!r}, not {list(new)}"
            )
    somewhere = {key: like for layout in renamed for key, like in layout.items()}
    uncommon = {key for key in somewhere if any(key not in layout for layout in renamed)}
    if uncommon and missing == "raise":
        lacking = {
            key: [number for number, layout in enumerate(renamed) if key not in layout] for key in sorted(uncommon)
        }
        raise ConfigError(
            f'members lack keys, by key: {lacking}. Rename by keys=..., or choose missing="keep", "drop" or "pad"'
        )
    filled = sorted(uncommon) if missing == "pad" else []
    for key in filled:
        if len({layout[key] for layout in renamed if key in layout}) > 1:
            raise ConfigError(
                f'missing="pad" can\'t tell the shape of {key!r}, in which members differ: rename it, leave it out by '
                'features=..., or choose missing="drop"'
            )
    found = []
    for layout, rename in zip(renamed, complete, strict=True):
        lacks = {key: somewhere[key] for key in filled if key not in layout}
        found.append(
            Shape(
                rename,
                frozenset(uncommon & layout.keys()) if missing == "drop" else frozenset(),
                lacks,
                {f"{key}_is_missing": key in lacks for key in filled},
            )
        )
    final = [
        {key: like for key, like in layout.items() if key not in shape.drop} | dict(shape.fill)
        for layout, shape in zip(renamed, found, strict=True)
    ]
    return found, all(layout == final[0] for layout in final)


def _with_masks(layout: Mapping[str, Field], rename: Mapping[str, str], member: int) -> dict[str, str]:
    """The new names, those of the masks of windows with them."""
    unknown = rename.keys() - layout.keys()
    if unknown:
        raise ConfigError(f"keys of member {member}: it has no {sorted(unknown)}; there are {sorted(layout)}")
    masks = {f"{key}_is_pad": f"{new}_is_pad" for key, new in rename.items() if f"{key}_is_pad" in layout}
    return {**masks, **rename}


OPENED_AT_ONCE = 64
"""Members whose metadata is read side by side: four or five small requests each, mostly one after the other."""
_EPISODE_BITS = 63
"""Bits of an episode_index, which may be any int64 from 0."""


def _name(members: int, member: int, cycle: int, episode: int) -> int:
    """One number for an episode of a member in one of the member's epochs: it may be open in two of them at a time."""
    return cycle * members + member << _EPISODE_BITS | episode


def _member(members: int, name: int) -> int:
    return (name >> _EPISODE_BITS) % members


class AsNamed:
    """The selection of episodes whose positions are their names."""

    def __getitem__(self, name: int, /) -> int:
        return name


class MixedOrder:
    """The order of a mixture's epoch, in place of an ``Order``.

    Args:
        epoch: Whose turn it is, or in what is left of it.
        lengths: Samples in an epoch of each member.
        orders: Of each member: its order in one of its epochs, and the episode at each position that it speaks of.
    """

    def __init__(
        self,
        epoch: MixedEpoch | MixedRemaining,
        lengths: Sequence[int],
        orders: Sequence[Callable[[int], tuple[Order, Sequence[int]]]],
    ) -> None:
        self._epoch = epoch
        self._lengths = lengths
        self._orders = orders
        self._latest: dict[int, tuple[int, tuple[Order, Sequence[int]]]] = {}  # by member, with its epoch
        firsts = [self._order(member, 0)[0] for member in range(len(orders))]
        self._firsts = [order for order, length in zip(firsts, lengths, strict=True) if length]
        self._ends = np.cumsum([0, *(len(order.lengths) for order in firsts)]).tolist()

    def _order(self, member: int, cycle: int) -> tuple[Order, Sequence[int]]:
        """The member's order in one of its epochs; of the latest one that was asked for without making it anew."""
        known = self._latest.get(member)
        if known is None or known[0] != cycle:
            known = self._latest[member] = cycle, self._orders[member](cycle)
        return known[1]

    def __len__(self) -> int:
        return self._epoch.total

    @property
    def slots(self) -> int:
        """See SharedOrder."""
        return max((order.slots for order in self._firsts), default=1)

    @property
    def affinity_stop(self) -> int:
        """See SharedOrder. Behind that, positions may be empty."""
        return self._epoch.affinity_stop

    def largest_group(self) -> int:
        """See EpisodeOrder."""
        return max((order.largest_group() for order in self._firsts), default=1)

    def open_episodes(self, placement: Placement) -> int:
        """Return how many episodes a consumer draws from at a time."""
        return sum(min(order.slots, len(order.lengths)) for order in self._firsts)

    def pool(self, placement: Placement) -> tuple[int, int]:
        """See EpisodeOrder. A consumer may draw from all slots of each member."""
        each = [order.pool(Placement()) for order in self._firsts]
        return sum(episodes for episodes, _ in each), sum(frames for _, frames in each)

    def is_far(self, position: int) -> bool:
        """Return whether its assignment there takes long to find."""
        return True

    def assignment(self, position: int) -> dict[int, tuple[int, SlotAssignment]]:
        """Return for each member which sample of its run comes next, and who sits where then."""
        found = {}
        for member, rest in enumerate(self._epoch.left(position)):
            if length := self._lengths[member]:
                number = rest.missing[0] if rest.missing else rest.position
                cycle, place = divmod(number, length)
                found[member] = (number, self._order(member, cycle)[0].assignment(place))
        return found

    def affinities(self, assignment: Mapping[int, tuple[int, SlotAssignment]], ranks: int) -> _MixedSlots:
        """See SharedOrder. They number episodes through all members, and go on in the members' next epochs."""

        def enter(member: int, number: int) -> Affinities:
            order, known = self._entered(member, number, assignment)
            return order.affinities(known, ranks)

        return _MixedSlots(self._epoch, self._lengths, enter, self._ends)

    def steps(
        self, positions: Iterable[int], assignment: Mapping[int, tuple[int, SlotAssignment]] | None = None
    ) -> Iterator[Step]:
        """Yield what comes at these positions, which must ascend and hold something; see ``Order.steps``."""
        walk = members = None
        open_members: dict[int, _OpenMember] = {}
        step: Step | None = None
        for position in positions:
            walk = self._epoch.walk(position) if walk is None else walk
            given = walk.at(position)
            assert given is not None
            member, number, is_padding = given
            cycle, place = divmod(number, self._lengths[member])
            finished: list[int] = []
            if walk.members is not members:  # the schedule has changed, and may have taken some out
                members = walk.members
                for gone in open_members.keys() - members:
                    finished += open_members.pop(gone).used()
            opened = open_members.get(member)
            if opened is None or opened.cycle != cycle:
                finished += [] if opened is None else opened.used()
                opened = open_members[member] = self._enter(member, number, assignment or {})
            left, episode, frame, reader = opened.visits.at(place)
            finished += map(opened.name, left)
            if step is not None:
                yield step._replace(finished=tuple(finished))
            step = Step(opened.name(episode), frame, reader, is_padding=is_padding)
        if step is not None:
            yield step

    def _enter(self, member: int, number: int, assignment: Mapping[int, tuple[int, SlotAssignment]]) -> _OpenMember:
        order, known = self._entered(member, number, assignment)
        cycle = number // self._lengths[member]
        selection, members = self._order(member, cycle)[1], len(self._orders)
        return _OpenMember(
            cycle, order.visits(known), lambda episode: _name(members, member, cycle, int(selection[episode]))
        )

    def _entered(
        self, member: int, number: int, assignment: Mapping[int, tuple[int, SlotAssignment]]
    ) -> tuple[Order, SlotAssignment]:
        """The member's order that this number of its run is in, and who sits where there, or before it."""
        length = self._lengths[member]
        cycle, place = divmod(number, length)
        order, _ = self._order(member, cycle)
        next_number, known = assignment.get(member, (number + 1, None))
        is_here = next_number // length == cycle and next_number <= number
        return order, known if known is not None and is_here else order.assignment(place)


class _MixedSlots:
    """See AffinityWalk: those of each member's own order."""

    def __init__(
        self,
        epoch: MixedEpoch | MixedRemaining,
        lengths: Sequence[int],
        enter: Callable[[int, int], Affinities],
        firsts: Sequence[int],
    ) -> None:
        self._epoch = epoch
        self._lengths = lengths
        self._enter = enter
        self._firsts = firsts
        """The number of each member's first episode, and how many there are."""
        self._walk: Walk | None = None
        self._open: dict[int, tuple[int, Affinities]] = {}  # by member, with its epoch

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """See AffinityWalk."""
        found = np.empty(len(positions))
        for _, places, affinities, numbers in self._parts(positions):
            found[places] = affinities.at(numbers)
        return found

    def episodes(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See traffic.NamedWalk."""
        found = np.empty(len(positions), np.int64)
        for first, places, affinities, numbers in self._parts(positions):
            found[places] = affinities.episodes(numbers) + first
        return found

    def _parts(self, positions: NDArray[np.int64]) -> Iterator[tuple[int, list[int], Affinities, NDArray[np.int64]]]:
        """The positions by member and its epoch: its first episode, places, affinities, and numbers of samples."""
        if self._walk is None:
            self._walk = self._epoch.walk(int(positions[0]))
        parts: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for place, position in enumerate(positions.tolist()):
            given = self._walk.at(position)
            assert given is not None
            cycle, number = divmod(given.number, self._lengths[given.member])
            places, numbers = parts.setdefault((given.member, cycle), ([], []))
            places.append(place)
            numbers.append(number)
        for (member, cycle), (places, numbers) in parts.items():
            opened = self._open.get(member)
            if opened is None or opened[0] != cycle:
                number = cycle * self._lengths[member] + numbers[0]
                opened = self._open[member] = cycle, self._enter(member, number)
            yield cycle * self._firsts[-1] + self._firsts[member], places, opened[1], np.array(numbers, np.int64)


@dataclass(frozen=True, slots=True)
class _OpenMember:
    """A member in one of its epochs."""

    cycle: int
    visits: Visits
    name: Callable[[int], int]
    """A function that names an episode, by its position in the member's order."""

    def used(self) -> list[int]:
        """The names of the episodes of which some frame was taken and that weren't finished."""
        return [self.name(episode) for episode in self.visits.used()]


class OpenMixture:
    """The datasets of a mixture, open, over one engine; what a pass over it reads. Entered with ``async with``.

    Args:
        config: Bounds, limits and threads of all together.
        members: Makes each dataset of an engine.
        fit: Makes the pools of the open datasets as large as memory lets them be.
    """

    def __init__(
        self,
        config: StreamConfig,
        members: Sequence[Callable[[DatasetEngine], LeRobotDataset]],
        fit: Callable[[Sequence[LeRobotDataset]], Awaitable[None]],
    ) -> None:
        self.config = config
        self._members = members
        self._fit = fit
        self._stack = AsyncExitStack()
        self.datasets: list[LeRobotDataset] = []
        self.pass_report: Callable[[], Report] | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._engine = await stack.enter_async_context(DatasetEngine(self.config))
            datasets = [make(self._engine) for make in self._members]
            limiter = Limiter(OPENED_AT_ONCE)

            async def open_one(dataset: LeRobotDataset) -> None:
                async with limiter.permit():
                    await dataset.__aenter__()

            await gather(*(partial(open_one, dataset) for dataset in datasets))
            for dataset in datasets:
                stack.push_async_exit(dataset)
            await self._fit(datasets)
            self.datasets = datasets
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    @property
    def clip_budget(self) -> Budget:
        """See Readable."""
        return self._engine.clip_budget

    @property
    def decode_pool(self) -> DecodePool:
        """See Readable."""
        return self._engine.decode

    def origin(self, name: int) -> Origin:
        """Return where an episode of a MixedOrder comes from."""
        member = _member(len(self.datasets), name)
        return Origin(self.datasets[member], name & ((1 << _EPISODE_BITS) - 1), member)

    def prefetch(self, episode: int) -> None:
        """See Readable."""
        reader, number = self._reader(episode)
        reader.prefetch(number)

    async def ready(self, episode: int) -> None:
        """See Readable."""
        reader, number = self._reader(episode)
        await reader.ready(number)

    def raise_priority(self, episode: int) -> None:
        """See Readable."""
        reader, number = self._reader(episode)
        reader.raise_priority(number)

    async def clip_bytes(self, episode: int) -> int:
        """See Readable."""
        reader, number = self._reader(episode)
        return await reader.clip_bytes(number)

    async def locate_rows(self, episode: int) -> None:
        """See Readable."""
        reader, number = self._reader(episode)
        await reader.locate_rows(number)

    async def hold(self, episode: int) -> HeldEpisode:
        """See Readable."""
        reader, number = self._reader(episode)
        return await reader.hold(number)

    async def hold_common(self, episode: int) -> HeldEpisode | None:
        """See Readable."""
        reader, number = self._reader(episode)
        return await reader.hold_common(number)

    def _reader(self, name: int) -> tuple[EpisodeReader, int]:
        dataset, number, _ = self.origin(name)
        return reader_of(dataset), number

    def statistics(self) -> DatasetStatistics:
        """Return those of the engine; of the episode caches their sum."""
        each = [dataset.statistics() for dataset in self.datasets]
        return replace(each[0], episodes=sum_of(*(one.episodes for one in each)))


class MixedBuilder:
    """Makes the samples of a mixture, in decode threads.

    Args:
        builders, shapes: Of each member.
        transform: The mixture's own.
        marks_padding: Whether samples say if they are padding.
    """

    def __init__(
        self,
        builders: Sequence[JobBuilder],
        shapes: Sequence[Shape],
        transform: Transform | None,
        *,
        marks_padding: bool,
    ) -> None:
        self._builders = builders
        self._shapes = shapes
        self._transform = transform
        self._marks_padding = marks_padding
        self._weights: Mapping[Cause, float] = {}
        self._transform_time = TransformTime(transform)
        self._given = [builder.layout() for builder in builders]
        self._pictures = {
            shape.rename.get(key, key)
            for shape, given in zip(shapes, self._given, strict=True)
            if given is not None
            for key in given.pictures
        }
        layouts = [self._laid_out(member) for member in range(len(builders))]
        # Only pictures lie channels-last, and what is one here may be a column of numbers there.
        told = [each for each in layouts if each is not None]
        are_one_way = len({each.pictures for each in told if each.fields == told[0].fields}) <= 1
        self._layouts = layouts if are_one_way else [None] * len(builders)

    @property
    def sample_bytes(self) -> int:
        """See Builder."""
        each = zip(self._builders, self._shapes, strict=True)
        return max(builder.sample_bytes + sum(like.nbytes for like in shape.fill.values()) for builder, shape in each)

    @property
    def weights(self) -> Mapping[Cause, float]:
        """See Builder."""
        each = [self._weights, *(builder.weights for builder in self._builders)]
        return {cause: sum(weights.get(cause, 0.0) for weights in each) for cause in (Cause.DECODING, Cause.TRANSFORM)}

    @property
    def transform_seconds(self) -> tuple[float, float]:
        """See Builder."""
        each = [builder.transform_seconds for builder in self._builders]
        own = self._transform_time
        return own.worked_seconds + sum(worked for worked, _ in each), own.ran_seconds + sum(ran for _, ran in each)

    def layout(self, step: Step) -> Layout | None:
        """See Builder."""
        return self._layouts[_member(len(self._builders), step.episode)]

    def _laid_out(self, member: int) -> Layout | None:
        given, shape = self._given[member], self._shapes[member]
        if given is None or self._transform is not None:
            return None
        fields = shape.fields(given.fields)
        if self._marks_padding:
            if PADDING in fields:
                return None
            fields[PADDING] = Field("bool")
        pictures = {shape.rename.get(key, key) for key in given.pictures}
        pictures |= {key for key in shape.fill if key in self._pictures}
        return Layout(fields, frozenset(pictures & fields.keys()))

    def build(
        self,
        steps: Sequence[Step],
        episodes: Mapping[int, HeldEpisode | Exception],
        is_given_up: Callable[[], bool],
        rows: Sequence[BatchRow] | None = None,
    ) -> list[Any]:
        """See JobBuilder."""
        places: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            places.setdefault(_member(len(self._builders), step.episode), []).append(place)
        results: list[Any] = [{} for _ in steps]
        for member, those in places.items():
            given = self._given[member]
            into = None
            if rows is not None and given is not None:
                into = [self._shapes[member].row(rows[place], given.fields) for place in those]
            built = self._builders[member].build([steps[place] for place in those], episodes, is_given_up, into)
            built_at = time.perf_counter()
            with self._transform_time.counted():
                for place, result in zip(those, built, strict=True):
                    if is_given_up():
                        return results
                    if rows is not None and isinstance(result, BatchRow):
                        result = rows[place]
                    results[place] = self._finish(member, steps[place], result)
            if self._transform is not None:
                self._weights = divided(self._weights, 0.0, time.perf_counter() - built_at)
        return results

    def _finish(self, member: int, step: Step, result: Any) -> Any:  # noqa: ANN401
        if isinstance(result, FailedSample):
            return result
        if isinstance(result, BatchRow):
            self._shapes[member].complete(member, result)
            if self._marks_padding:
                result.put(PADDING, step.is_padding)
            return result
        try:
            sample = self._shapes[member].apply(member, result)
            if self._marks_padding:
                mark_padding(sample, step)
        except ConfigError as error:
            return FailedSample(kept(error))
        return sample if self._transform is None else transformed(self._transform, sample)

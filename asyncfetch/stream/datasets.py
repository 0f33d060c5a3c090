"""The open datasets that a pass reads: one, or a mixture's, over one engine."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from asyncfetch.fetch.limiter import Limiter
from asyncfetch.formats import Stretch
from asyncfetch.observe.figures import sum_of
from asyncfetch.order.line import Line
from asyncfetch.resources import Engine
from asyncfetch.runtime.concurrently import gather
from asyncfetch.stream.pool import fit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from asyncfetch.config import StreamConfig
    from asyncfetch.formats import DatasetStatistics, Format, OpenFormat, StretchReader
    from asyncfetch.order.line import Piece
    from asyncfetch.stream.job_builder import Transform

OPENED_AT_ONCE = 64
"""Members whose metadata is read side by side: four or five small requests each, mostly one after the other."""


class Origin(NamedTuple):
    """The origin of a piece of a pass."""

    dataset: OpenFormat
    stretch: Stretch
    """The frames of an episode there."""
    member: int = 0
    """The member of a mixture."""

    @property
    def episode(self) -> int:
        """The episode's index."""
        return self.stretch.episode

    @property
    def reader(self) -> StretchReader[Any]:
        """Reads it."""
        return self.dataset.reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One dataset of a pass: the part of it that is read, and its order; ``Stream`` documents the fields."""

    format: Format
    shuffle: bool
    seed: int
    episodes: tuple[int, ...] | None
    transform: Transform | None
    config: StreamConfig
    """Settings that it is read with."""
    has_config: bool
    """True if it was given one."""

    def line(self, dataset: OpenFormat, nodes: int) -> Line:
        """Return what its order is made of."""
        rate = dataset.frames_per_second
        return Line(
            dataset.lengths(self.episodes),
            segment_frames=1 if rate is None else max(1, round(self.config.segment_seconds * rate)),
            group_frames=self.config.group_frames or dataset.group_frames,
            coded_frames=dataset.group_frames,
            shuffle=self.shuffle,
            seed=self.seed,
            nodes=nodes,
        )


class OpenDatasets:
    """Datasets, open, and what a pass needs to know of them. Entered with ``async with``.

    Either none of the members is open before, or there is one that is, which stays open.
    """

    def __init__(self, members: Sequence[Member], config: StreamConfig) -> None:
        self.config, self.members = config, members
        self.datasets: list[OpenFormat] = []
        self.pools: tuple[int, ...] = ()
        """Segments that a rank draws from at a time, of each: as asked for, or as fit into memory."""
        self._lines: dict[int, list[Line]] = {}  # of no nodes, and of one number of them
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            engine = None
            if not any(one.format.is_open for one in self.members):
                engine = await stack.enter_async_context(Engine(self.config))
            limiter = Limiter(OPENED_AT_ONCE)

            async def opened(one: Member) -> OpenFormat:
                async with limiter.permit():
                    opening = one.format.opened(engine, one.config)
                    dataset = await opening.__aenter__()
                stack.push_async_exit(opening)
                return dataset

            datasets = self.datasets = await gather(*(partial(opened, one) for one in self.members))
            self._reaches = [dataset.sample_maker().reach for dataset in datasets]
            chosen = [one.episodes for one in self.members]
            self.pools = await fit(list(zip(datasets, chosen, self.lines(1), self._reaches, strict=True)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    def lines(self, nodes: int) -> list[Line]:
        """Return what the order of each is made of."""
        if nodes not in self._lines:
            each = zip(self.members, self.datasets, strict=True)
            whole = {1: self._lines[1]} if 1 in self._lines else {}
            self._lines = whole | {nodes: [one.line(dataset, nodes) for one, dataset in each]}
        return self._lines[nodes]

    @property
    def prefetch_segments(self) -> int:
        """Segments fetched ahead of the pools; of single samples, which need none, as many more as one would have."""
        are_single = all(line.largest == 1 for line in self.lines(1))
        return self.config.prefetch_segments + (self.config.pool_segments if are_single else 0)

    def origin(self, piece: Piece) -> Origin:
        """Return where a piece comes from."""
        member, dataset = self.members[piece.member], self.datasets[piece.member]
        episode = int(dataset.episodes(member.episodes)[piece.episode])
        epoch = piece.epoch if dataset.draws_anew else 0
        stretch = Stretch(episode, piece.start, piece.stop, self._reaches[piece.member], epoch)
        return Origin(dataset, stretch, piece.member)

    @property
    def reader(self) -> StretchReader[Any]:
        """The reader of the first of them, which has the report of the latest pass over all."""
        return self.datasets[0].reader

    @property
    def engine(self) -> Engine:
        """The engine that they are read by."""
        return self.reader.engine

    def statistics(self) -> DatasetStatistics:
        """Return those of the engine; of the episode caches their sum."""
        each = [dataset.reader.statistics() for dataset in self.datasets]
        return replace(each[0], episodes=sum_of(*(one.episodes for one in each)))

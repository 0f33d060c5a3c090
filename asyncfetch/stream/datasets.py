"""The open datasets that a pass reads: one, or a mixture's, over one engine."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from asyncfetch.errors import ConfigError
from asyncfetch.fetch.limiter import Limiter
from asyncfetch.lerobot import DatasetEngine, LeRobotDataset, Stretch, reader_of
from asyncfetch.observe.figures import sum_of
from asyncfetch.order.line import Line
from asyncfetch.runtime.concurrently import gather
from asyncfetch.stream.pool import fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import PictureSize
    from asyncfetch.lerobot import DatasetStatistics, DepthUnit, EpisodeReader, ImageDtype, SampleBuilder, Windows
    from asyncfetch.observe.report import Report
    from asyncfetch.order.line import Piece
    from asyncfetch.resources import Engine
    from asyncfetch.stream.job_builder import Transform

OPENED_AT_ONCE = 64
"""Members whose metadata is read side by side: four or five small requests each, mostly one after the other."""


class Origin(NamedTuple):
    """The origin of a piece of a pass."""

    dataset: LeRobotDataset
    stretch: Stretch
    """The frames of an episode there."""
    member: int = 0
    """The member of a mixture."""

    @property
    def episode(self) -> int:
        """The episode's index."""
        return self.stretch.episode

    @property
    def reader(self) -> EpisodeReader:
        """Reads it."""
        return reader_of(self.dataset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One dataset of a pass: the part of it that is read, and its order; ``Stream`` documents the fields."""

    source: str | LeRobotDataset
    shuffle: bool
    seed: int
    windows: Windows | None
    episodes: tuple[int, ...] | None
    features: tuple[str, ...] | None
    transform: Transform | None
    image_dtype: ImageDtype
    depth_unit: DepthUnit
    size: PictureSize | None
    config: StreamConfig
    """Settings that it is read with."""
    has_config: bool
    """True if it was given one."""

    def chosen(self, dataset: LeRobotDataset) -> Sequence[int]:
        """Return the indices of the episodes that are read."""
        return dataset.episodes.indices if self.episodes is None else self.episodes

    def lengths(self, dataset: LeRobotDataset) -> NDArray[np.integer]:
        """Return the frames of each of them. EpisodeNotFound where one isn't there."""
        table = dataset.episodes
        return table.lengths if self.episodes is None else table.lengths[table.positions(self.episodes)]

    def line(self, dataset: LeRobotDataset, nodes: int) -> Line:
        """Return what its order is made of."""
        return Line(
            self.lengths(dataset),
            segment_frames=max(1, round(self.config.segment_seconds * dataset.fps)),
            group_frames=self.config.group_frames or dataset.group_frames,
            coded_frames=dataset.group_frames,
            shuffle=self.shuffle,
            seed=self.seed,
            nodes=nodes,
        )

    def builder(self, dataset: LeRobotDataset) -> SampleBuilder:
        """Return what makes its samples."""
        return reader_of(dataset).sample_builder(self.windows)

    def dataset(self, engine: DatasetEngine) -> LeRobotDataset:
        """Return its dataset over an engine, yet to be entered."""
        assert isinstance(self.source, str)
        return LeRobotDataset(
            self.source,
            features=self.features,
            image_dtype=self.image_dtype,
            depth_unit=self.depth_unit,
            size=self.size,
            config=self.config,
            engine=engine,
        )


class OpenDatasets:
    """Datasets, open, and what a pass needs to know of them. Entered with ``async with``.

    Args:
        members: What is read; either all by url, or one that is open already, which stays open.
        config: Bounds, limits and threads of all together.
    """

    def __init__(self, members: Sequence[Member], config: StreamConfig) -> None:
        self.config = config
        self.members = members
        self.datasets: list[LeRobotDataset] = []
        self.pools: tuple[int, ...] = ()
        """Segments that a rank draws from at a time, of each: as asked for, or as fit into memory."""
        self._lines: dict[int, list[Line]] = {}  # of no nodes, and of one number of them
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            datasets = [one.source for one in self.members if isinstance(one.source, LeRobotDataset)]
            if not datasets:
                engine = await stack.enter_async_context(DatasetEngine(self.config))
                datasets = [one.dataset(engine) for one in self.members]
                limiter = Limiter(OPENED_AT_ONCE)

                async def open_one(dataset: LeRobotDataset) -> None:
                    async with limiter.permit():
                        await dataset.__aenter__()

                await gather(*(partial(open_one, dataset) for dataset in datasets))
                for dataset in datasets:
                    stack.push_async_exit(dataset)
            self.datasets = datasets
            chosen = [one.chosen(dataset) for one, dataset in zip(self.members, datasets, strict=True)]
            self._reaches = [one.builder(dataset).reach for one, dataset in zip(self.members, datasets, strict=True)]
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

    def origin(self, piece: Piece) -> Origin:
        """Return where a piece comes from."""
        member, dataset = self.members[piece.member], self.datasets[piece.member]
        episode = int(member.chosen(dataset)[piece.episode])
        return Origin(dataset, Stretch(episode, piece.start, piece.stop, self._reaches[piece.member]), piece.member)

    @property
    def _reader(self) -> EpisodeReader:
        if not self.datasets:
            raise ConfigError("these datasets aren't open")
        return reader_of(self.datasets[0])

    @property
    def engine(self) -> Engine:
        """The engine that they are read by."""
        return self._reader.engine

    @property
    def pass_report(self) -> Callable[[], Report] | None:
        """Gives the report of the latest pass over them."""
        return self._reader.pass_report

    @pass_report.setter
    def pass_report(self, report: Callable[[], Report]) -> None:
        self._reader.pass_report = report

    def statistics(self) -> DatasetStatistics:
        """Return those of the engine; of the episode caches their sum."""
        each = [dataset.statistics() for dataset in self.datasets]
        return replace(each[0], episodes=sum_of(*(one.episodes for one in each)))

"""A LeRobot dataset as a stream reads it: with windows, and of some features."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from asyncfetch.formats.protocol import Format
from asyncfetch.lerobot.dataset import LeRobotDataset, reader_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import PictureSize
    from asyncfetch.formats.samples import ImageDtype
    from asyncfetch.lerobot.dataset import EpisodeReader
    from asyncfetch.lerobot.info import DepthUnit
    from asyncfetch.lerobot.samples import SampleBuilder, Windows
    from asyncfetch.resources import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class LeRobotFormat(Format):
    """A LeRobot dataset, and how it is read; ``Stream`` documents the fields."""

    source: str | LeRobotDataset
    windows: Windows | None = None
    features: tuple[str, ...] | None = None
    image_dtype: ImageDtype = "uint8"
    depth_unit: DepthUnit = "mm"
    size: PictureSize | None = None

    @property
    @override
    def is_open(self) -> bool:
        return isinstance(self.source, LeRobotDataset)

    @override
    def reader(self) -> EpisodeReader | None:
        return reader_of(self.source) if isinstance(self.source, LeRobotDataset) else None

    @asynccontextmanager
    @override
    async def opened(self, engine: Engine | None, config: StreamConfig) -> AsyncIterator[OpenLeRobot]:
        """Open it over an engine; one that is open stays open."""
        if isinstance(self.source, LeRobotDataset):
            yield OpenLeRobot(self.source, self.windows)
            return
        dataset = LeRobotDataset(
            self.source,
            features=self.features,
            image_dtype=self.image_dtype,
            depth_unit=self.depth_unit,
            size=self.size,
            config=config,
            engine=engine,
        )
        async with dataset:
            yield OpenLeRobot(dataset, self.windows)

    def __repr__(self) -> str:
        return repr(self.source)


class OpenLeRobot:
    """A LeRobot dataset that is open for a stream: see OpenFormat."""

    draws_anew = False

    def __init__(self, dataset: LeRobotDataset, windows: Windows | None) -> None:
        self.dataset = dataset
        self.url, self.config, self.reader = dataset.url, dataset.config, reader_of(dataset)
        self.fingerprint, self.group_frames = dataset.fingerprint, dataset.group_frames
        self.frames_per_second, self.file_bytes = dataset.fps, dataset.metadata.info.video_file_bytes
        self._windows = windows

    @property
    def stats(self) -> Mapping[str, Any] | None:
        """The statistics of its features, for normalising; None where it has none."""
        return self.dataset.stats

    def episodes(self, chosen: Sequence[int] | None) -> Sequence[int]:
        """Return the indices of all episodes, or those chosen."""
        return self.dataset.episodes.indices if chosen is None else chosen

    def lengths(self, chosen: Sequence[int] | None) -> NDArray[np.integer[Any]]:
        """Return how many frames each of them has. EpisodeNotFound where one isn't there."""
        table = self.dataset.episodes
        return table.lengths if chosen is None else table.lengths[table.positions(chosen)]

    def files(self, chosen: Sequence[int] | None) -> dict[str, NDArray[np.int64]]:
        """Return the number of the video file that each of them lies in, by camera."""
        table = self.dataset.episodes
        places = slice(None) if chosen is None else table.positions(chosen)
        return {camera: table.video_files(camera)[places] for camera in self.dataset.cameras}

    def urls(self, episode: int) -> list[str]:
        """Return the videos of an episode, and last the table of its rows."""
        known = self.dataset.episodes[episode]
        return [*(span.url for span in known.videos.values()), known.data_url]

    def sample_maker(self) -> SampleBuilder:
        """Return a maker of samples with its windows. ConfigError where they don't fit."""
        return self.reader.sample_builder(self._windows)

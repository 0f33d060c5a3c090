"""A dataset in one value: what it says of itself, and the sizes of its files. Nothing is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncfetch.config import StreamConfig
from asyncfetch.fetch.batch import for_each
from asyncfetch.lerobot.dataset import open_dataset, reader_of
from asyncfetch.runtime import LoopThread
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from asyncfetch.lerobot.dataset import LeRobotDataset
    from asyncfetch.lerobot.info import Feature

WEIGHED_FILES = 1024
"""Files of a kind that are asked for their sizes, spread over the dataset; those of the others go by their frames."""
ASKED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class FileSizes:
    """The files of one kind."""

    files: int
    bytes: int
    """Bytes of all of them; of more than 1,024 files an estimate by the frames in them."""
    missing: int
    """Files of those asked for that aren't there."""


@dataclass(frozen=True, slots=True)
class CameraSummary:
    """One camera of a dataset, as info.json describes it, and its video files."""

    key: str
    width: int | None
    """Pixels; None where it isn't said, as for the others."""
    height: int | None
    codec: str | None
    """Such as "av1"."""
    is_depth: bool
    videos: FileSizes


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """The content of a dataset. Plain values: it pickles, and stays when the dataset is closed."""

    version: str
    """The format's, such as "v3.0"."""
    robot_type: str | None
    fps: float
    num_episodes: int
    num_frames: int
    cameras: tuple[CameraSummary, ...]
    """Features in videos, in the dataset's order."""
    features: Mapping[str, Feature]
    """All features, by key, in the dataset's order; audio isn't read."""
    tasks: tuple[str, ...]
    """Task strings, in the order of their task_index."""
    has_stats: bool
    """True if there is a meta/stats.json."""
    rows: FileSizes
    """The table's files, data/."""

    @property
    def bytes(self) -> int:
        """Bytes of rows and videos together."""
        return self.rows.bytes + sum(camera.videos.bytes for camera in self.cameras)

    @property
    def seconds(self) -> float:
        """Length of all episodes, one after the other."""
        return self.num_frames / self.fps


def dataset_info(url: str | os.PathLike[str], *, config: StreamConfig = StreamConfig()) -> DatasetSummary:  # noqa: B008
    """Return what is in a LeRobot dataset: ``print(af.dataset_info("hf://datasets/lerobot/pusht").num_frames)``.

    Reads the metadata, and asks for the size of each file, of at most 1,024 of each kind. Blocks, on a loop of its own:
    in a coroutine call it in a thread.

    Args:
        url: Root of the dataset, as for ``open_dataset``.
        config: Limits and credentials, by its ``fetch``.

    Raises:
        FetchError, FormatError, DatasetError: As opening it does.
    """

    async def read() -> DatasetSummary:
        async with open_dataset(url, config=config) as dataset:
            return await summarise(dataset)

    with LoopThread(name="asyncfetch info") as thread:
        return thread.run(read)


async def summarise(dataset: LeRobotDataset) -> DatasetSummary:
    """Return what ``dataset_info`` does, of an open dataset; its features are those that are read."""
    table, info = dataset.episodes, dataset.metadata.info
    rows, *videos = await gather(*(partial(_weigh, dataset, table.files(kind)) for kind in (None, *dataset.cameras)))
    return DatasetSummary(
        version=info.version,
        robot_type=info.robot_type,
        fps=dataset.fps,
        num_episodes=dataset.num_episodes,
        num_frames=dataset.num_frames,
        cameras=tuple(
            _camera(dataset.features[key], sizes) for key, sizes in zip(dataset.cameras, videos, strict=True)
        ),
        features=dict(dataset.features),
        tasks=tuple(dataset.tasks.values()),
        has_stats=dataset.metadata.statistics is not None,
        rows=rows,
    )


def _camera(feature: Feature, videos: FileSizes) -> CameraSummary:
    named: dict[str, int] = {}
    if isinstance(feature.names, list) and len(feature.names) == len(feature.shape):
        named = dict(zip(feature.names, feature.shape, strict=True))
    said = (feature.info.get("video.width"), feature.info.get("video.height"))
    width, height = (
        size if isinstance(size, int) else named.get(key) for key, size in zip(("width", "height"), said, strict=True)
    )
    codec = feature.info.get("video.codec")
    return CameraSummary(
        feature.key, width, height, codec if isinstance(codec, str) else None, feature.is_depth, videos
    )


async def _weigh(dataset: LeRobotDataset, files: Mapping[str, int]) -> FileSizes:
    """Return the sizes of files, of each of which the number of its frames is given."""
    urls, frames = list(files), np.array(list(files.values()), np.int64)
    chosen = np.unique(np.linspace(0, len(urls) - 1, min(len(urls), WEIGHED_FILES)).astype(np.int64)).tolist()
    asked = (urls[place] for place in chosen)
    found = await for_each(asked, reader_of(dataset).file_bytes, workers=ASKED_AT_ONCE)
    there = [size for size in found if size is not None]
    total_bytes = sum(there)
    if len(chosen) < len(urls):
        total_bytes = round(total_bytes * frames.sum() / max(1, frames[chosen].sum()))
    return FileSizes(len(urls), total_bytes, len(found) - len(there))

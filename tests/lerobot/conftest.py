"""Readers of local files, one that answers in rounds, and small tables to read with them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import all_others_wait
from tests.lerobot.serving import Library
from tests.local_reader import LocalReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from asyncfetch.fetch.reader import WritableBuffer
    from asyncfetch.ranges import ByteRange, ObjectInfo


T = TypeVar("T")


@dataclass
class RoundReader(LocalReader):
    """Answers when nobody has anything left to do but to wait for it, and counts how often that was."""

    rounds: int = 0
    answering: anyio.Event | None = None

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        await self._answer()
        return await super().fetch(url, start, stop)

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        await self._answer()
        return [await super(RoundReader, self).fetch(one.url, one.start, one.stop) for one in ranges]

    def known(self, url: str) -> None:
        """It remembers no versions."""

    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo:
        await self.fetch_into(url, start, stop, buffer)
        return await self.stat(url)

    async def _answer(self) -> None:
        if self.answering is not None:
            await self.answering.wait()
            return
        self.answering = anyio.Event()
        await all_others_wait()
        self.rounds += 1
        answering, self.answering = self.answering, None
        answering.set()

    async def run_here(self, call: Callable[..., T], *arguments: object, **_: object) -> T:
        """In place of a thread, which nobody sees waiting for the reader."""
        return call(*arguments)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory, {})


@pytest.fixture
def reader() -> LocalReader:
    return LocalReader()


@pytest.fixture
def tables() -> Tables:
    return Tables()


class WriteTable(Protocol):
    def __call__(self, path: Path, columns: Mapping[str, Any], groups: Iterable[int] = (), **options: Any) -> None:  # noqa: ANN401
        ...


@pytest.fixture(name="write_table")
def write_table_fixture() -> WriteTable:
    return write_table


@dataclass
class Tables:
    """Tables of a dataset to be bent and written. Row k of the data is frame k of the dataset."""

    lengths: tuple[int, ...] = (3, 4, 5)
    fps: int = 10
    camera: str = "observation.images.top"
    info: dict[str, Any] = field(default_factory=dict)
    """Changes to info.json; None drops a key."""
    features: dict[str, Any] = field(default_factory=dict)
    """More features."""

    def __post_init__(self) -> None:
        lengths = np.array(self.lengths, np.int64)
        stops = np.cumsum(lengths)
        episodes = np.arange(len(lengths))
        self.episodes: dict[str, Any] = {
            "episode_index": episodes,
            "tasks": [["pick"] if index % 2 == 0 else ["place", "pick"] for index in episodes],
            "length": lengths,
            "data/chunk_index": 0 * episodes,
            "data/file_index": 0 * episodes,
            "dataset_from_index": stops - lengths,
            "dataset_to_index": stops,
            f"videos/{self.camera}/chunk_index": 0 * episodes,
            f"videos/{self.camera}/file_index": episodes,
            f"videos/{self.camera}/from_timestamp": (stops - lengths) / self.fps,
            f"videos/{self.camera}/to_timestamp": stops / self.fps,
            "stats/action/mean": [[0.5] * 400 for _ in episodes],
        }
        frames = np.concatenate([np.arange(length) for length in lengths] or [np.arange(0)])
        total = len(frames)
        self.rows: dict[str, Any] = {
            "action": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6 * total, dtype=np.float32)), 6),
            "reward": np.arange(total, dtype=np.float32) / 7,
            "timestamp": (frames / self.fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.repeat(episodes, lengths),
            "index": np.arange(total),
            "task_index": np.repeat(episodes % 2, lengths),
        }
        self.tasks: dict[str, Any] = {"task_index": [0, 1], "task": ["pick", "place"]}

    def describe(self) -> dict[str, Any]:
        scalar = {"shape": [1], "names": None}
        features = {
            "action": {"dtype": "float32", "shape": [6], "names": [f"j{i}" for i in range(6)]},
            "reward": {"dtype": "float32", **scalar},
            self.camera: {"dtype": "video", "shape": [8, 8, 3], "names": ["height", "width", "channels"], "info": {}},
            **self.features,
            "timestamp": {"dtype": "float32", **scalar},
            **{key: {"dtype": "int64", **scalar} for key in ("frame_index", "episode_index", "index", "task_index")},
        }
        info = {
            "codebase_version": "v3.0",
            "fps": self.fps,
            "features": features,
            "total_episodes": len(self.lengths),
            "total_frames": sum(self.lengths),
            "total_tasks": 2,
            "chunks_size": 1000,
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
            "robot_type": None,
            "splits": {"train": f"0:{len(self.lengths)}"},
            **self.info,
        }
        return {key: value for key, value in info.items() if value is not None or key in {"robot_type", "video_path"}}

    def write(self, root: Path, *, group_rows: int | None = None, **parquet_options: Any) -> str:  # noqa: ANN401
        """Write all of it, the data in row groups of this many rows (None: one an episode), and return the root."""
        (root / "meta").mkdir(parents=True, exist_ok=True)
        (root / "meta/info.json").write_text(json.dumps(self.describe()))
        write_table(root / "meta/tasks.parquet", self.tasks)
        write_table(root / "meta/episodes/chunk-000/file-000.parquet", self.episodes)
        lengths = self.lengths if group_rows is None else [group_rows] * -(-len(self.rows["index"]) // group_rows)
        write_table(root / "data/chunk-000/file-000.parquet", self.rows, lengths, **parquet_options)
        return str(root)


def write_table(path: Path, columns: Mapping[str, Any], groups: Iterable[int] = (), **options: Any) -> None:  # noqa: ANN401
    """Write a parquet file in row groups of these lengths; without any, in one."""
    table = pa.table(dict(columns))
    path.parent.mkdir(parents=True, exist_ok=True)
    start = 0
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for length in groups or [max(1, len(table))]:
            writer.write_table(table.slice(start, length), row_group_size=max(1, length))
            start += length

"""The episode table in memory: which frames, files and tasks each episode has, in compact columns."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import LEAVE_OUT_EPISODE, DatasetError, EpisodeNotFound, redact_url
from asyncfetch.fetch.urls import join_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from asyncfetch.lerobot.info import DatasetInfo

__all__ = ["ABSENT", "Episode", "EpisodeTable", "FilePlaces", "TaskLists", "VideoPlaces", "VideoSpan"]

ABSENT = -1
"""A chunk, file or frame number that the table doesn't have."""


@dataclass(frozen=True, slots=True)
class VideoSpan:
    """Where a camera's frames of one episode are."""

    url: str
    """MP4 file."""
    first_frame: int
    """Number in the file of the episode's frame 0: the nearest to ``from_timestamp * fps``."""
    num_frames: int
    """The episode's length."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode: its rows are those whose ``index`` is in [from_index, to_index)."""

    index: int
    length: int
    """Frames; may be 0."""
    tasks: tuple[str, ...]
    """The different tasks of its frames, in no order."""
    data_url: str
    """Parquet file with its rows."""
    from_index: int
    to_index: int
    videos: Mapping[str, VideoSpan]
    """By camera."""


@dataclass(frozen=True, slots=True)
class FilePlaces:
    """In which file each episode is."""

    chunk: NDArray[np.int32]
    """Chunk number per episode, or ABSENT."""
    file: NDArray[np.int32]
    """File number in the chunk per episode, or ABSENT."""


@dataclass(frozen=True, slots=True)
class VideoPlaces:
    """Where each episode is in a camera's files."""

    files: FilePlaces
    first_frame: NDArray[np.int64]
    """Number of its frame 0 in the file per episode, or ABSENT."""
    contradictions: Mapping[int, str] = field(default_factory=dict)
    """What the table says of an episode's frames that can't be true, of those few where that is so."""


@dataclass(frozen=True, slots=True)
class TaskLists:
    """Task strings per episode i: those that ``codes[starts[i] : starts[i] + counts[i]]`` number."""

    vocabulary: tuple[str, ...]
    codes: NDArray[np.int32]
    starts: NDArray[np.int64]
    counts: NDArray[np.int32]

    def __getitem__(self, index: int) -> tuple[str, ...]:
        start = self.starts[index]
        return tuple(self.vocabulary[code] for code in self.codes[start : start + self.counts[index]])


class EpisodeTable:
    """All episodes, 0 to ``len(table) - 1``; about 30 bytes each and 16 a camera. Immutable."""

    def __init__(
        self,
        root: str,
        info: DatasetInfo,
        *,
        lengths: NDArray[np.int32],
        starts: NDArray[np.int64],
        tasks: TaskLists,
        data: FilePlaces,
        videos: Mapping[str, VideoPlaces],
    ) -> None:
        self._root = root
        self._info = info
        self._lengths = lengths
        self._starts = starts
        self._tasks = tasks
        self._data = data
        self._videos = videos
        for array in (self._lengths, self._starts):
            array.flags.writeable = False

    def __repr__(self) -> str:
        return f"<EpisodeTable of {redact_url(self._root)!r}, {len(self)} episodes, {self.num_frames} frames>"

    def __len__(self) -> int:
        return len(self._lengths)

    def __contains__(self, index: object) -> bool:
        if isinstance(index, bool):  # a mask names no episodes
            return False
        return hasattr(index, "__index__") and 0 <= operator.index(index) < len(self)

    def __iter__(self) -> Iterator[Episode]:
        return (self[index] for index in self.indices)

    @property
    def indices(self) -> range:
        """The episode indices."""
        return range(len(self))

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Frames of each episode, read-only."""
        return self._lengths

    @property
    def starts(self) -> NDArray[np.int64]:
        """The ``index`` of each episode's first row, read-only; between episodes there may be rows of none."""
        return self._starts

    @property
    def num_frames(self) -> int:
        """Frames of all episodes."""
        return int(self._lengths.sum(dtype=np.int64))

    def __getitem__(self, index: int) -> Episode:
        """The episode with this episode_index.

        Raises:
            EpisodeNotFound: There is none.
            DatasetError: The table doesn't say where the episode's files are, or contradicts itself about it.
        """
        if index not in self:
            raise self.not_found(index)
        index = operator.index(index)
        length = int(self._lengths[index])
        return Episode(
            index=index,
            length=length,
            tasks=self._tasks[index],
            data_url=self._url(index, self._data, "data"),
            from_index=int(self._starts[index]),
            to_index=int(self._starts[index]) + length,
            videos={camera: self._span(index, camera) for camera in self._videos},
        )

    def not_found(self, index: object) -> EpisodeNotFound:
        """The error for an episode that isn't there."""
        have = f"it has 0 to {len(self) - 1}" if len(self) else "it has none"
        return EpisodeNotFound(f"{redact_url(self._root)} has no episode {index!r}; {have}")

    def sharing_data_file(self, index: int) -> int:
        """How many episodes have their rows in the same file as this one, itself included."""
        data = self._data
        return int(np.count_nonzero((data.chunk == data.chunk[index]) & (data.file == data.file[index])))

    def sharing_video_file(self, index: int, camera: str) -> tuple[int, int]:
        """How many episodes have their frames of this camera in the same file as this one, and how many frames."""
        files = self._videos[camera].files
        shares = (files.chunk == files.chunk[index]) & (files.file == files.file[index])
        return int(np.count_nonzero(shares)), int(self._lengths[shares].sum(dtype=np.int64))

    def digest(self) -> bytes:
        """Hash over lengths and places; equal for equal tables wherever they lie."""
        digest = hashlib.sha256()
        arrays: list[NDArray[Any]] = [self._lengths, self._data.chunk, self._data.file]
        if (self._starts != np.cumsum(self._lengths, dtype=np.int64) - self._lengths).any():
            arrays.append(self._starts)  # elsewhere they follow from the lengths
        for _, places in sorted(self._videos.items()):
            arrays += [places.files.chunk, places.files.file, places.first_frame]
        for array in arrays:
            digest.update(array.astype("<i8").tobytes())
        return digest.digest()

    def _span(self, index: int, camera: str) -> VideoSpan:
        places = self._videos[camera]
        url = self._url(index, places.files, f"videos/{camera}", camera)
        first_frame, length = int(places.first_frame[index]), int(self._lengths[index])
        if length and index in places.contradictions:
            raise DatasetError(places.contradictions[index], remedy=LEAVE_OUT_EPISODE)
        if first_frame == ABSENT and length:
            raise self._absent(index, f"videos/{camera}/from_timestamp")
        return VideoSpan(url, max(first_frame, 0), length)

    def _url(self, index: int, files: FilePlaces, column: str, camera: str = "") -> str:
        chunk, file = int(files.chunk[index]), int(files.file[index])
        if ABSENT in {chunk, file} and self._lengths[index]:
            raise self._absent(index, f"{column}/{'chunk' if chunk == ABSENT else 'file'}_index")
        template = self._info.video_path if camera else self._info.data_path
        if template is None:
            message = f"info.json of {redact_url(self._root)} doesn't say by video_path where the files of {camera} are"
            raise DatasetError(message, remedy="write it there, or leave the camera out with features=")
        # An episode without frames needs no file, so it may lack the numbers.
        path = template.format(chunk_index=max(chunk, 0), file_index=max(file, 0), video_key=camera)
        return join_url(self._root, path)

    def _absent(self, index: int, column: str) -> DatasetError:
        message = f"meta/episodes of {redact_url(self._root)} has no value in {column} for episode {index}"
        return DatasetError(f"{message}, which has {self._lengths[index]} frames", remedy=LEAVE_OUT_EPISODE)

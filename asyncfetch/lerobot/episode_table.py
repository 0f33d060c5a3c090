"""The episode table in memory: which frames, files and tasks each episode has, in compact columns."""

from __future__ import annotations

import hashlib
import math
import operator
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import LEAVE_OUT_EPISODE, DatasetError, EpisodeNotFound, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.listing import places_beside

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from asyncfetch.lerobot.info import DatasetInfo

ABSENT = -1
"""A chunk, file or frame number that the table doesn't have."""


@dataclass(frozen=True, slots=True)
class VideoSpan:
    """The place where a camera's frames of one episode are."""

    url: str
    """MP4 file."""
    first_frame: int
    """Number in the file of the episode's frame 0: the nearest to ``from_timestamp * fps``."""
    num_frames: int
    """The episode's length."""
    start_seconds: float
    """Time at which the episode begins by the metadata, ``from_timestamp``; a row's own time is counted from there."""
    contradiction: str = ""
    """The reason why it can't be true, unless its rows are at other times than the rate of frames says."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode: its rows are those with an ``index`` in [from_index, to_index)."""

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
    """Spans of the videos, by camera."""


@dataclass(frozen=True, slots=True)
class FilePlaces:
    """The file that each episode is in."""

    chunk: NDArray[np.int32]
    """Chunk number per position, or ABSENT."""
    file: NDArray[np.int32]
    """File number in the chunk per position, or ABSENT."""

    @property
    def numbers(self) -> NDArray[np.int64]:
        """A number for the file per position."""
        return self.chunk.astype(np.int64) << 32 | self.file

    def sharing(self, position: int) -> NDArray[np.intp]:
        """The positions whose file is that of this one, itself included."""
        return np.flatnonzero((self.chunk == self.chunk[position]) & (self.file == self.file[position]))


@dataclass(frozen=True, slots=True)
class VideoPlaces:
    """The place of each episode in a camera's files."""

    files: FilePlaces
    start_seconds: NDArray[np.float64]
    """Time at which its frame 0 is shown in the file per position, or NaN."""
    contradictions: Mapping[int, str] = field(default_factory=dict)
    """Contradictions, as of VideoSpan, by position of the few episodes that have one."""
    refusals: Mapping[int, str] = field(default_factory=dict)
    """Statements of the table on an episode's frames that can't be true at all, by position."""


@dataclass(frozen=True, slots=True)
class TaskLists:
    """Task strings per position i: those that ``codes[starts[i] : starts[i] + counts[i]]`` number."""

    vocabulary: tuple[str, ...]
    codes: NDArray[np.int32]
    starts: NDArray[np.int64]
    counts: NDArray[np.int32]

    def __getitem__(self, position: int) -> tuple[str, ...]:
        start = self.starts[position]
        return tuple(self.vocabulary[code] for code in self.codes[start : start + self.counts[position]])


MAX_MADE = 1024
"""Episodes of which urls and times are kept, about 1 KiB each; their samples need them again and again."""


class EpisodeTable:
    """All episodes, by their episode_index; about 40 bytes each and 16 a camera. Immutable.

    Numbers that no episode has may lie between theirs. What is known of an episode stands at its position in
    ``indices``.
    """

    def __init__(
        self,
        root: str,
        info: DatasetInfo,
        *,
        numbers: NDArray[np.int64],
        lengths: NDArray[np.int32],
        starts: NDArray[np.int64],
        tasks: TaskLists,
        data: FilePlaces,
        videos: Mapping[str, VideoPlaces],
        urls: Sequence[str] = (),
    ) -> None:
        self.urls = urls
        """The files that it was read from."""
        first, stop = (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)
        has_gaps = stop - first != len(numbers)
        self.indices: Sequence[int] = tuple(numbers.tolist()) if has_gaps else range(first, stop)
        """The episode indices, ascending."""
        self.lengths, self.starts = lengths, starts
        """Frames of each episode, in the order of ``indices``, and the ``index`` of its first row, read-only; between
        episodes there may be rows of none."""
        for array in (lengths, starts):
            array.flags.writeable = False
        self._root, self._info, self._numbers = root, info, numbers
        self._tasks, self._data, self._videos = tasks, data, videos
        self._made: dict[int, Episode] = {}  # by position

    def __repr__(self) -> str:
        return f"<EpisodeTable of {redact_url(self._root)!r}, {len(self)} episodes, {self.num_frames} frames>"

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, index: object) -> bool:
        return self._find(index) is not None

    def __iter__(self) -> Iterator[Episode]:
        return (self[index] for index in self.indices)

    @property
    def num_frames(self) -> int:
        """Frames of all episodes."""
        return int(self.lengths.sum(dtype=np.int64))

    def __getitem__(self, index: int) -> Episode:
        """The episode with this episode_index. EpisodeNotFound where there is none.

        DatasetError where the table doesn't say where the episode's files are, or contradicts itself about it.
        """
        position = self._position(index)
        made = self._made.get(position)
        if made is None:
            if len(self._made) >= MAX_MADE:
                self._made.clear()
            start, length = int(self.starts[position]), int(self.lengths[position])
            made = self._made[position] = Episode(
                index=self.indices[position],
                length=length,
                tasks=self._tasks[position],
                data_url=self._url(position, self._data, "data"),
                from_index=start,
                to_index=start + length,
                videos={camera: self._span(position, camera) for camera in self._videos},
            )
        return made

    def positions(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return where these episodes stand in ``indices``; EpisodeNotFound where one doesn't."""
        for index in (min(indices), max(indices)) if len(indices) else ():  # those between fit in 64 bits
            self._position(index)
        wanted = np.asarray(indices, np.int64)
        found = np.searchsorted(self._numbers, wanted)
        for unknown in wanted[self._numbers[found] != wanted][:1].tolist():
            raise self._not_found(unknown)
        return found

    def _position(self, index: object) -> int:
        position = self._find(index)
        if position is None:
            raise self._not_found(index)
        return position

    def _find(self, index: object) -> int | None:
        if isinstance(index, bool) or not hasattr(index, "__index__"):  # a mask names no episodes
            return None
        number = operator.index(index)
        position = bisect_left(self.indices, number)
        return position if position < len(self.lengths) and self.indices[position] == number else None

    def _not_found(self, index: object) -> EpisodeNotFound:
        have = "it has none"
        if len(self):
            have = f"it has {self.indices[0]} to {self.indices[-1]}"
            have += "" if isinstance(self.indices, range) else f", but only {len(self)} of these numbers"
        return EpisodeNotFound(f"{redact_url(self._root)} has no episode {index!r}; {have}")

    def data_place(self, index: int) -> tuple[int, int]:
        """The chunk and the file that have the episode's rows by the table."""
        position = self._position(index)
        return int(self._data.chunk[position]), int(self._data.file[position])

    def data_urls_beside(self, place: tuple[int, int], step: int) -> dict[tuple[int, int], str]:
        """The data files that may come after that place, or with ``step`` -1 before it, the likeliest first."""
        template = self._info.data_path
        if not template.has("file_index") or min(place) < 0:
            return {}
        places = places_beside(place, step, self._info.chunks_size)
        if not template.has("chunk_index"):
            places = [(place[0], place[1] + step)] if place[1] + step >= 0 else []
        return {
            (chunk, file): join_url(self._root, template.format(chunk_index=chunk, file_index=file))
            for chunk, file in places
        }

    def other_starts(self, index: int) -> set[int]:
        """The ``index`` that the episode's first row has where that begins anew in each episode, or in each file."""
        position = self._position(index)
        start = int(self.starts[position])
        return {0, start - int(self.starts[self._data.sharing(position)].min())} - {start}

    def sharing_data_file(self, index: int) -> int:
        """Return how many episodes have their rows in the same file as this one, itself included."""
        return len(self._data.sharing(self._position(index)))

    def sharing_video_file(self, index: int, camera: str) -> tuple[int, int]:
        """Return how many episodes have frames of this camera in the same file as this one, and how many frames."""
        sharing = self._videos[camera].files.sharing(self._position(index))
        return len(sharing), int(self.lengths[sharing].sum(dtype=np.int64))

    def video_files(self, camera: str) -> NDArray[np.int64]:
        """A number for the file that has each episode's frames of this camera, as ``lengths``."""
        return self._videos[camera].files.numbers

    def data_files(self) -> NDArray[np.int64]:
        """A number for the file that has each episode's rows, as ``lengths``."""
        return self._data.numbers

    def files(self, camera: str | None) -> dict[str, int]:
        """The files that have rows, or this camera's frames, of an episode, each with how many of its frames."""
        places = self._data if camera is None else self._videos[camera].files
        known = np.flatnonzero((places.chunk != ABSENT) & (places.file != ABSENT) & (self.lengths > 0))
        _, first, which = np.unique(places.numbers[known], return_index=True, return_inverse=True)
        frames = np.bincount(which, weights=self.lengths[known], minlength=len(first)).astype(np.int64)
        column = "data" if camera is None else f"videos/{camera}"
        urls = [self._url(position, places, column, camera or "") for position in known[first].tolist()]
        return dict(zip(urls, frames.tolist(), strict=True))

    def digest(self) -> bytes:
        """Hash over numbers, lengths and places; equal for equal tables wherever they lie."""
        digest = hashlib.sha256()
        if (self._numbers != np.arange(len(self))).any():
            digest.update(b"episode_index" + self._numbers.astype("<i8").tobytes())
        arrays: list[NDArray[Any]] = [self.lengths, self._data.chunk, self._data.file]
        if (self.starts != np.cumsum(self.lengths, dtype=np.int64) - self.lengths).any():
            arrays.append(self.starts)  # elsewhere they follow from the lengths
        for _, places in sorted(self._videos.items()):
            first_frames = np.nan_to_num(np.rint(places.start_seconds * self._info.fps), nan=ABSENT)
            arrays += [places.files.chunk, places.files.file, first_frames]
        for array in arrays:
            digest.update(array.astype("<i8").tobytes())
        return digest.digest()

    def _span(self, position: int, camera: str) -> VideoSpan:
        places = self._videos[camera]
        url = self._url(position, places.files, f"videos/{camera}", camera)
        start_seconds, length = float(places.start_seconds[position]), int(self.lengths[position])
        if length and position in places.refusals:
            raise DatasetError(places.refusals[position], remedy=LEAVE_OUT_EPISODE)
        if math.isnan(start_seconds):
            if length:
                raise self._absent(position, f"videos/{camera}/from_timestamp")
            start_seconds = 0.0
        contradiction = places.contradictions.get(position, "") if length else ""
        return VideoSpan(url, round(start_seconds * self._info.fps), length, start_seconds, contradiction)

    def _url(self, position: int, files: FilePlaces, column: str, camera: str = "") -> str:
        chunk, file = int(files.chunk[position]), int(files.file[position])
        if ABSENT in {chunk, file} and self.lengths[position]:
            raise self._absent(position, f"{column}/{'chunk' if chunk == ABSENT else 'file'}_index")
        template = self._info.video_path if camera else self._info.data_path
        if template is None:
            message = f"info.json of {redact_url(self._root)} doesn't say by video_path where the files of {camera} are"
            raise DatasetError(message, remedy="write it there, or leave the camera out with features=")
        # An episode without frames needs no file, so it may lack the numbers.
        path = template.format(chunk_index=max(chunk, 0), file_index=max(file, 0), video_key=camera)
        return join_url(self._root, path)

    def _absent(self, position: int, column: str) -> DatasetError:
        episode, length = self.indices[position], self.lengths[position]
        message = f"meta/episodes of {redact_url(self._root)} has no value in {column} for episode {episode}"
        return DatasetError(f"{message}, which has {length} frames", remedy=LEAVE_OUT_EPISODE)

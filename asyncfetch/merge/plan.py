"""The whole merged dataset as data, before a byte of it is written. Pure.

Which file, frame, task and time each episode gets follows from the sources' metadata alone, so every file can be
written on its own and once. Files are filled in the order of the episodes, which makes a merge of merges the same as
one merge of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError
from asyncfetch.merge.validate import disagreements, refuse
from asyncfetch.ranges import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.merge.segments import Segment
    from asyncfetch.merge.sources import Source

__all__ = ["FilePlace", "Limits", "MergePlan", "PlannedEpisode", "VideoPlan", "plan_merge"]

MOST_FILES_PER_CHUNK = 1000
"""LeRobot reads files in the order of their names, which have three digits: file-1000 comes before file-101."""
_FORMAT = 1
"""Counted up with what is written for the same plan, so that nothing older is gone on with."""
_GROUP_BYTES = 200
"""What a column of a row group takes in the file's footer, about."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large files and directories may become. One episode is never split, so a long one makes a longer file.

    Raises:
        ConfigError: They aren't whole numbers of at least 1, or more files in a directory than keep the order of names.
    """

    data_file_max_bytes: int
    video_file_max_bytes: int
    files_per_chunk: int

    def __post_init__(self) -> None:
        for name in ("data_file_max_bytes", "video_file_max_bytes", "files_per_chunk"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=1))
        if self.files_per_chunk > MOST_FILES_PER_CHUNK:
            raise ConfigError(
                f"files_per_chunk must be at most {MOST_FILES_PER_CHUNK}, or LeRobot would read the files in another "
                f"order; not {self.files_per_chunk}"
            )


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where an episode begins in a file."""

    file: int
    """Number of the file, counted on over the chunk directories."""
    first: int
    """Its first frame in there."""


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """An episode of the merged dataset."""

    source: int
    """Number of the source that it comes from."""
    episode: Episode
    """As it is there."""
    index: int
    from_index: int
    data_file: int
    row_bytes: float
    """What its rows take in that, about."""
    videos: Mapping[str, FilePlace]
    """By camera."""


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """A video file to be written."""

    camera: str
    file: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """All that will be written."""

    sources: tuple[Source, ...]
    limits: Limits
    tasks: tuple[str, ...]
    """By task_index."""
    task_maps: tuple[Mapping[int, int], ...]
    """From a source's task_index to the new one, by source."""
    episodes: tuple[PlannedEpisode, ...]
    videos: tuple[VideoPlan, ...]

    @property
    def num_frames(self) -> int:
        """Frames of all episodes."""
        return sum(planned.episode.length for planned in self.episodes)

    def fingerprint(self) -> str:
        """Of all that the files follow from: the sources as they are now, and the limits."""
        digest = blake2b(digest_size=16)
        for source in self.sources:
            digest.update(repr((source.url, source.version)).encode())
        digest.update(repr((_FORMAT, self.limits)).encode())
        return digest.hexdigest()

    def data_files(self) -> list[list[PlannedEpisode]]:
        """The episodes of each data file, by its number; at least one file."""
        files: list[list[PlannedEpisode]] = [[]]
        for planned in self.episodes:
            if planned.data_file == len(files):
                files.append([])
            files[planned.data_file].append(planned)
        return files


def plan_merge(sources: Sequence[Source], limits: Limits) -> MergePlan:
    """Where everything goes.

    Args:
        sources: At least one, in the order in which their episodes follow each other.
        limits: Of the files.

    Raises:
        MergeError: They disagree; the message lists in what.
    """
    refuse(disagreements(sources))
    tasks: dict[str, int] = {}
    task_maps = [
        {index: tasks.setdefault(word, len(tasks)) for index, word in sorted(source.metadata.tasks.items())}
        for source in sources
    ]
    videos: list[VideoPlan] = []
    places: dict[str, dict[tuple[int, int], FilePlace]] = {}
    for camera in sources[0].metadata.cameras:
        files, places[camera] = _pack_videos(sources, camera, limits.video_file_max_bytes)
        videos += [VideoPlan(camera, number, tuple(segments)) for number, segments in enumerate(files)]
    episodes = _place_episodes(sources, limits.data_file_max_bytes, places)
    return MergePlan(tuple(sources), limits, tuple(tasks), tuple(task_maps), tuple(episodes), tuple(videos))


def _pack_videos(
    sources: Sequence[Source], camera: str, max_bytes: int
) -> tuple[list[list[Segment]], dict[tuple[int, int], FilePlace]]:
    """The segments of each file, and where (source, episode) begins."""
    files: list[list[Segment]] = []
    places: dict[tuple[int, int], FilePlace] = {}
    filled_bytes = num_frames = 0
    for number, source in enumerate(sources):
        for segment in source.segments[camera]:
            # One decoder configuration a file: players and torchcodec read the first one only.
            full = not files or filled_bytes + segment.nbytes > max_bytes
            if full or files[-1][0].configuration != segment.configuration:
                files.append([])
                filled_bytes = num_frames = 0
            files[-1].append(segment)
            for episode, offset in segment.offsets:
                places[number, episode] = FilePlace(len(files) - 1, num_frames + offset)
            filled_bytes += segment.nbytes
            num_frames += segment.num_frames
    return files, places


def _place_episodes(
    sources: Sequence[Source], max_bytes: int, places: Mapping[str, Mapping[tuple[int, int], FilePlace]]
) -> list[PlannedEpisode]:
    planned: list[PlannedEpisode] = []
    data_file = from_index = 0
    filled_bytes = 0.0
    columns = sum(feature.has_column for feature in sources[0].metadata.features.values())
    for number, source in enumerate(sources):
        for episode in source.episodes:
            nbytes = 0.0
            if episode.length:
                nbytes = _GROUP_BYTES * columns + episode.length * source.data_files[episode.data_url].row_bytes
                if filled_bytes and filled_bytes + nbytes > max_bytes:
                    data_file, filled_bytes = data_file + 1, 0.0
                filled_bytes += nbytes
            # An episode without frames is nowhere, and may say so.
            videos = {camera: found.get((number, episode.index), FilePlace(0, 0)) for camera, found in places.items()}
            planned.append(PlannedEpisode(number, episode, len(planned), from_index, data_file, nbytes, videos))
            from_index += episode.length
    return planned

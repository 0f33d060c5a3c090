"""Writes the files of one dataset, in the layout of LeRobot's recorder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.testing.clips import DEPTH_ENCODING, Encoding, encode_clip, join_clips
from asyncfetch.testing.info import DATA_PATH, VIDEO_PATH, describe_dataset, describe_features
from asyncfetch.testing.statistics import STATISTICS, Statistics, aggregate, numeric_statistics, picture_statistics
from asyncfetch.testing.tables import data_schema, write_data, write_episodes, write_tasks
from asyncfetch.testing.truth import DEPTH, DatasetTruth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from asyncfetch.testing.quirks import Quirks

__all__ = ["Recorder", "Recording"]

SAMPLED_PICTURES = 8
SAMPLED_SIDE_PX = 64
"""What picture statistics look at: so many pictures an episode, thinned to about so many pixels a side."""

EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

Columns = dict[str, list[Any]]
"""Columns of meta/episodes, one value an episode, in the order in which they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """How a dataset is stored, as opposed to what is in it."""

    encoding: Encoding
    """Of the colour videos."""
    gop: int
    crf: int | None
    episodes_per_video_file: Mapping[str, int]
    """By video feature."""
    episodes_per_data_file: int
    chunks_size: int
    quirks: Quirks


class Recorder:
    """Writes one dataset, once.

    Args:
        truth: What to write, and where.
        recording: How.
        progress: Called with the videos finished and all there will be.
    """

    def __init__(
        self, truth: DatasetTruth, recording: Recording, progress: Callable[[int, int], object] | None
    ) -> None:
        self._truth = truth
        self._recording = recording
        self._quirks = recording.quirks
        self._progress = progress
        self._features = describe_features(
            truth, recording.encoding, gop=recording.gop, crf=recording.crf, quirks=recording.quirks
        )
        self._filled = [episode for episode, length in enumerate(truth.lengths) if length]
        self._videos_done = 0
        # An episode may have a second clip, cut short. Without repeats there is nothing to remember.
        remembered = 2 * (truth.distinct_videos or 0)
        self._clip = lru_cache(maxsize=remembered)(self._encode)
        self._picture_statistics = lru_cache(maxsize=remembered)(self._sample_pictures)

    def write(self) -> None:
        """Writes every file, info.json last: without it there is no dataset yet."""
        truth, quirks = self._truth, self._quirks
        columns: Columns = {
            "episode_index": list(range(truth.num_episodes)),
            "tasks": [[truth.task(episode)] for episode in range(truth.num_episodes)],
            "length": list(truth.lengths),
            **self._write_data(),
        }
        for video in truth.video_features:
            columns |= self._write_videos(video)
        if not quirks.no_stats:
            columns |= self._write_statistics()
        self._write_episodes(columns)
        write_tasks(truth.root / "meta/tasks.parquet", truth.tasks, quirks)
        self._write_json(
            "meta/info.json",
            describe_dataset(truth, self._features, chunks_size=self._recording.chunks_size, quirks=quirks),
        )

    def _write_data(self) -> Columns:
        truth, per_file = self._truth, self._recording.episodes_per_data_file
        schema = data_schema(self._features, self._quirks)
        for file, episodes in self._files(per_file):
            path = self._path(DATA_PATH, file)
            write_data(path, truth, schema, episodes, self._quirks, orphan_rows=self._quirks.orphan_rows)
        if self._quirks.orphan_files and self._filled:
            path = self._path(DATA_PATH, self._file_count(per_file))
            write_data(path, truth, schema, self._filled[:1], self._quirks)
        starts = [truth.first_index(episode) for episode in range(truth.num_episodes)]
        return {
            **self._file_columns("data", per_file),
            "dataset_from_index": starts,
            "dataset_to_index": [start + length for start, length in zip(starts, truth.lengths, strict=True)],
        }

    def _write_videos(self, video: str) -> Columns:
        truth, per_file = self._truth, self._recording.episodes_per_video_file[video]
        for file, episodes in self._files(per_file):
            path = self._path(VIDEO_PATH, file, video_key=video)
            lengths = [truth.lengths[episode] for episode in episodes]
            lengths[-1] -= self._quirks.short_video_frames
            clips = (
                self._clip(video, truth.painted_episode(episode), length)
                for episode, length in zip(episodes, lengths, strict=True)
                if length > 0
            )
            join_clips(self._counted(clips), path, fps=truth.fps)
            if file == self._quirks.empty_video_file and video == truth.video_features[0]:
                path.write_bytes(b"")
        if self._quirks.orphan_files and self._filled:
            orphan = self._filled[0]
            clip = self._clip(video, truth.painted_episode(orphan), truth.lengths[orphan])
            join_clips([clip], self._path(VIDEO_PATH, self._file_count(per_file), video_key=video), fps=truth.fps)
        starts, stops = self._video_times(per_file)
        return {
            **self._file_columns(f"videos/{video}", per_file),
            f"videos/{video}/from_timestamp": starts,
            f"videos/{video}/to_timestamp": stops,
        }

    def _video_times(self, per_file: int) -> tuple[list[float], list[float]]:
        """Where each episode lies in its file, summed up in floats as LeRobot does, with the errors this brings."""
        starts: list[float] = []
        stops: list[float] = []
        for episode, length in enumerate(self._truth.lengths):
            starts.append(0.0 if episode % per_file == 0 else stops[-1])
            stops.append(starts[-1] + float(Fraction(length, self._truth.fps)))
        return starts, stops

    def _write_statistics(self) -> Columns:
        """Writes stats.json; gives the ``stats/*`` columns, null for an episode without frames."""
        columns: Columns = {}
        overall: dict[str, dict[str, Any]] = {}
        for name, feature in self._features.items():
            if feature["dtype"] == "string" or not self._filled:
                continue
            by_episode = {episode: self._feature_statistics(name, feature, episode) for episode in self._filled}
            overall[name] = _plain(aggregate(list(by_episode.values())))
            plain = {episode: _plain(statistics) for episode, statistics in by_episode.items()}
            for statistic in STATISTICS:
                columns[f"stats/{name}/{statistic}"] = [
                    plain[episode][statistic] if episode in plain else None
                    for episode in range(self._truth.num_episodes)
                ]
        self._write_json("meta/stats.json", overall)
        return columns

    def _feature_statistics(self, name: str, feature: Mapping[str, Any], episode: int) -> Statistics:
        match feature["dtype"]:
            case "video":
                return self._picture_statistics(name, self._truth.painted_episode(episode))
            case "image":
                return self._sample_pictures(name, episode)
            case _:
                return numeric_statistics(self._truth.column(name, episode))

    def _sample_pictures(self, name: str, episode: int) -> Statistics:
        truth = self._truth
        length = truth.lengths[episode]
        step = max(1, min(truth.height, truth.width) // SAMPLED_SIDE_PX)
        frames = sorted({length * n // SAMPLED_PICTURES for n in range(SAMPLED_PICTURES)})
        pictures = [
            truth.depth_metres(episode, frame)[..., None] if name == DEPTH else truth.picture(episode, frame, name)
            for frame in frames
        ]
        return picture_statistics(np.stack(pictures)[:, ::step, ::step])

    def _write_episodes(self, columns: Columns) -> None:
        count = self._truth.num_episodes
        per_file = self._quirks.episodes_per_meta_file or max(1, count)
        columns |= self._file_columns("meta/episodes", per_file)
        if self._quirks.stale_self_references:
            beyond = self._file_count(per_file)
            columns["meta/episodes/file_index"] = [beyond + episode for episode in range(count)]
        for episode in self._quirks.null_index_episodes:
            for name in columns:
                if name.endswith(("/chunk_index", "/file_index")):
                    columns[name][episode] = None
        for file in range(self._file_count(per_file)):
            rows = slice(file * per_file, (file + 1) * per_file)
            write_episodes(self._path(EPISODES_PATH, file), columns, rows, self._quirks)

    def _encode(self, video: str, episode: int, length: int) -> bytes:
        truth, recording = self._truth, self._recording
        if video == DEPTH:
            depth = (truth.depth_codes(episode, frame) for frame in range(length))
            return encode_clip(depth, encoding=DEPTH_ENCODING, fps=truth.fps, gop=recording.gop)
        pictures = (truth.picture(episode, frame, video) for frame in range(length))
        return encode_clip(pictures, encoding=recording.encoding, fps=truth.fps, gop=recording.gop, crf=recording.crf)

    def _counted(self, clips: Iterator[bytes]) -> list[bytes]:
        """Draws the clips and reports each."""
        total = len(self._filled) * len(self._truth.video_features)
        drawn = []
        for clip in clips:
            drawn.append(clip)
            self._videos_done += 1
            if self._progress is not None:
                self._progress(self._videos_done, total)
        return drawn

    def _files(self, per_file: int) -> Iterator[tuple[int, list[int]]]:
        """The files that hold frames, each with its episodes that have some."""
        for file, episodes in groupby(self._filled, key=lambda episode: episode // per_file):
            yield file, list(episodes)

    def _file_count(self, per_file: int) -> int:
        return -(-self._truth.num_episodes // per_file)

    def _file_columns(self, prefix: str, per_file: int) -> Columns:
        places = [
            divmod(episode // per_file, self._recording.chunks_size) for episode in range(self._truth.num_episodes)
        ]
        return {
            f"{prefix}/chunk_index": [chunk for chunk, _ in places],
            f"{prefix}/file_index": [file for _, file in places],
        }

    def _path(self, template: str, file: int, **fields: str) -> Path:
        chunk, file_in_chunk = divmod(file, self._recording.chunks_size)
        return self._truth.root / template.format(chunk_index=chunk, file_index=file_in_chunk, **fields)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        path = self._truth.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")


def _plain(statistics: Statistics) -> dict[str, Any]:
    return {name: value.tolist() for name, value in statistics.items()}

"""Writes the files of one dataset as LeRobot's recorder does, with the irregularities of public ones on demand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.decode.image import encode_png
from asyncfetch.testing.clips import DEPTH_ENCODING, Encoding, encode_clip, join_clips
from asyncfetch.testing.truth import (
    DEFAULT_FEATURES,
    DEPTH,
    DEPTH_MAX_METRES,
    DEPTH_MIN_METRES,
    DEPTH_SHIFT_METRES,
    DONE,
    GRID,
    GRID_SHAPE,
    NOTE,
    SNAPSHOT,
    DatasetTruth,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

EPISODES_PER_FLUSH = 10
"""Rows of meta/episodes that LeRobot writes at a time, each time as one row group."""
UNNAMED_INDEX = "__index_level_0__"


def data_schema(features: Features, quirks: Quirks) -> pa.Schema:
    """The schema of the data files: every feature but the videos, in order."""
    import pyarrow as pa

    stored = {name: feature for name, feature in features.items() if feature["dtype"] != "video"}
    fields = [_field(name, feature, quirks) for name, feature in stored.items()]
    if quirks.no_huggingface_metadata:
        return pa.schema(fields)
    described = {name: _huggingface_feature(feature) for name, feature in stored.items()}
    fingerprint = sha256(json.dumps(described).encode()).hexdigest()[:16]
    info = {"info": {"features": described}, "fingerprint": fingerprint}
    return pa.schema(fields, metadata={"huggingface": json.dumps(info)})


def write_tasks(path: Path, tasks: Sequence[str], quirks: Quirks) -> None:
    """Writes tasks.parquet: the task is the index of a pandas frame, hence the second column."""
    import pyarrow as pa

    rows = list(enumerate(tasks))
    if quirks.permuted_tasks:
        rows.reverse()
    index = UNNAMED_INDEX if quirks.unnamed_tasks_index else "task"
    table = pa.table({"task_index": pa.array([row[0] for row in rows], pa.int64()), index: [row[1] for row in rows]})
    index_name = None if quirks.unnamed_tasks_index else "task"
    pandas = {
        "index_columns": [index],
        "column_indexes": [_pandas_column(None, None, "object") | {"metadata": {"encoding": "UTF-8"}}],
        "columns": [_pandas_column("task_index", "task_index", "int64"), _pandas_column(index_name, index, "object")],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    _write_row_groups(path, [table.replace_schema_metadata({"pandas": json.dumps(pandas)})])


def _write_row_groups(path: Path, tables: Sequence[pa.Table]) -> None:
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, tables[0].schema, compression="snappy") as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))


def _field(name: str, feature: Mapping[str, Any], quirks: Quirks) -> pa.Field[Any]:
    import pyarrow as pa

    if feature["dtype"] == "image":
        return pa.field(name, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    scalar = pa.bool_() if feature["dtype"] == "bool" else getattr(pa, feature["dtype"])()
    shape = feature["shape"]
    if shape == [1]:
        return pa.field(name, scalar)
    element = pa.field("element", scalar)
    if len(shape) == 1:
        return pa.field(name, pa.list_(element) if quirks.plain_lists else pa.list_(element, shape[0]))
    nested = scalar
    for _ in shape:
        nested = pa.list_(pa.field("element", nested))
    extension = {
        "ARROW:extension:name": f"datasets.features.features.Array{len(shape)}DExtensionType",
        "ARROW:extension:metadata": json.dumps([shape, feature["dtype"]]),
    }
    return pa.field(name, nested, metadata=extension)


def _huggingface_feature(feature: Mapping[str, Any]) -> dict[str, Any]:
    if feature["dtype"] == "image":
        return {"_type": "Image"}
    value = {"dtype": feature["dtype"], "_type": "Value"}
    shape = feature["shape"]
    if shape == [1]:
        return value
    if len(shape) == 1:
        return {"feature": value, "length": shape[0], "_type": "List"}
    return {"shape": shape, "dtype": feature["dtype"], "_type": f"Array{len(shape)}D"}


def _episode_table(truth: DatasetTruth, schema: pa.Schema, episode: int) -> pa.Table:
    import pyarrow as pa

    def values(field: pa.Field[Any]) -> list[Any]:
        if pa.types.is_struct(field.type):
            pictures = (truth.picture(episode, frame, field.name) for frame in range(truth.lengths[episode]))
            return [{"bytes": encode_png(picture), "path": f"frame-{n:06d}.png"} for n, picture in enumerate(pictures)]
        rows: list[Any] = truth.column(field.name, episode).tolist()
        return rows

    return pa.Table.from_arrays([pa.array(values(field), field.type) for field in schema], schema=schema)


def _orphans(table: pa.Table, truth: DatasetTruth, count: int) -> pa.Table:
    """``count`` rows like the first of ``table``, of an episode and with indices that no metadata mention."""
    import pyarrow as pa

    orphans = table.take(np.zeros(count, np.int64))
    beyond = {
        "episode_index": np.full(count, truth.num_episodes),
        "index": truth.num_frames + np.arange(count),
        "frame_index": np.arange(count),
    }
    for name in beyond.keys() & set(orphans.column_names):
        position = orphans.column_names.index(name)
        orphans = orphans.set_column(position, orphans.schema.field(position), pa.array(beyond[name]))
    return orphans


def _episode_column(name: str, values: Sequence[Any], quirks: Quirks) -> pa.Array[Any]:
    import pyarrow as pa

    if name.startswith("stats/"):
        column: pa.Array[Any] = pa.array(values)  # nested as deep as the values are
        return column
    if name == "tasks":
        return pa.array(values, pa.list_(pa.string()))
    is_double = name.endswith("_timestamp") or quirks.float_index_columns
    return pa.array(values, pa.float64() if is_double else pa.int64())


def _pandas_column(name: str | None, field_name: str | None, numpy_type: str) -> dict[str, Any]:
    return {
        "name": name,
        "field_name": field_name,
        "pandas_type": "int64" if numpy_type == "int64" else "unicode",
        "numpy_type": numpy_type,
        "metadata": None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """Deviations of `write_dataset` from LeRobot's recorder. By default there are none.

    For an episode without frames, which has only a row of metadata, give a length of 0.
    """

    collapsed_row_groups: bool = False
    """One row group for all episodes of a data file, as by conversion and push_to_hub, instead of one an episode."""
    plain_lists: bool = False
    """``list`` in place of ``fixed_size_list``, as in merged and edited files."""
    no_huggingface_metadata: bool = False
    """No ``huggingface`` key in the schema metadata of the data files."""
    sorted_episode_columns: bool = False
    """Columns of meta/episodes in alphabetic order."""
    float_index_columns: bool = False
    """Every integer column of meta/episodes as double, as after a conversion by pandas."""
    null_index_episodes: tuple[int, ...] = ()
    """Episodes whose chunk and file indices, of data, videos and metadata, are null."""
    episodes_per_meta_file: int | None = None
    """Split meta/episodes into files of this many rows; None writes one file."""
    stale_self_references: bool = False
    """``meta/episodes/file_index`` names a file that doesn't exist."""
    unnamed_tasks_index: bool = False
    """The tasks' column is called ``__index_level_0__``, as in LeRobot 0.4."""
    permuted_tasks: bool = False
    """The rows of tasks.parquet in reverse order: row position is no longer task index."""
    orphan_rows: int = 0
    """This many rows at the start of every data file belong to an episode beyond the last and carry indices beyond the
    last, so that the position of a row isn't its ``index``."""
    orphan_files: bool = False
    """One more data file, with the rows of episode 0 again, and one more video for each camera, without metadata."""
    no_stats: bool = False
    """Neither meta/stats.json nor ``stats/*`` columns."""
    short_video_frames: int = 0
    """The last episode in every video file lacks this many frames at its end, unlike the metadata."""
    empty_video_file: int | None = None
    """This file of the first camera has no bytes."""
    without_default_feature: str | None = None
    """This one of `DEFAULT_FEATURES` is missing from info.json, the data files and the statistics."""
    unknown_info_keys: bool = False
    """info.json has keys of older versions, ``total_videos`` and ``total_chunks``."""
    legacy_video_info: bool = False
    """``video_info`` in place of ``info`` in the features of info.json."""
    codebase_version: str = "v3.0"
    """The version that info.json declares; the layout stays that of v3.0."""


Features = dict[str, dict[str, Any]]
"""The ``features`` of info.json: dtype, shape, names, and for videos ``info``."""

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def describe_features(
    truth: DatasetTruth, encoding: Encoding, *, gop: int, crf: int | None, quirks: Quirks
) -> Features:
    """All features in the order of the columns: the robot's, the cameras, the defaults."""
    joints = [f"j{joint}" for joint in range(6)]
    picture_axes = ["height", "width", "channels"]
    colour_shape = [truth.height, truth.width, 3]
    features: Features = {
        "observation.state": _feature("float32", [6], joints),
        "action": _feature("float32", [6], joints),
        "next.reward": _feature("float32", [1]),
    }
    extras = {
        DONE: _feature("bool", [1]),
        NOTE: _feature("string", [1]),
        GRID: _feature("float32", list(GRID_SHAPE)),
        SNAPSHOT: _feature("image", colour_shape, picture_axes),
        DEPTH: _feature("video", [truth.height, truth.width, 1], picture_axes),
    }
    features |= {name: extras[name] for name in truth.extras}
    features |= {camera: _feature("video", colour_shape, picture_axes) for camera in truth.cameras}
    features |= {name: _feature("float32" if name == "timestamp" else "int64", [1]) for name in DEFAULT_FEATURES}
    for name, feature in features.items():
        if feature["dtype"] == "video":
            used = DEPTH_ENCODING if name == DEPTH else encoding
            info_key = "video_info" if quirks.legacy_video_info else "info"
            feature[info_key] = _video_info(truth, used, gop=gop, crf=None if name == DEPTH else crf)
    if quirks.without_default_feature is not None:
        del features[quirks.without_default_feature]
    return features


def describe_dataset(truth: DatasetTruth, features: Features, *, chunks_size: int, quirks: Quirks) -> dict[str, Any]:
    """The content of info.json, its keys in LeRobot's order."""
    info: dict[str, Any] = {
        "codebase_version": quirks.codebase_version,
        "fps": truth.fps,
        "features": features,
        "total_episodes": truth.num_episodes,
        "total_frames": truth.num_frames,
        "total_tasks": len(truth.tasks),
        "chunks_size": chunks_size,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if truth.video_features else None,
        "robot_type": "so100",
        "splits": {"train": f"0:{truth.num_episodes}"},
    }
    if quirks.unknown_info_keys:
        info |= {"total_videos": truth.num_episodes * len(truth.video_features), "total_chunks": 1}
    return info


def _feature(dtype: str, shape: list[int], names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "names": names}


def _video_info(truth: DatasetTruth, encoding: Encoding, *, gop: int, crf: int | None) -> dict[str, Any]:
    is_depth = encoding is DEPTH_ENCODING
    info = {
        "video.height": truth.height,
        "video.width": truth.width,
        "video.codec": encoding.codec,
        "video.pix_fmt": encoding.pixel_format,
        "video.fps": truth.fps,
        "video.channels": 1 if is_depth else 3,
        "has_audio": False,
        "video.g": gop,
        "video.crf": encoding.crf if crf is None else crf,
        "video.preset": encoding.preset,
        "video.fast_decode": 0,
        "video.video_backend": "pyav",
        "video.extra_options": {"x265-params": "lossless=1"} if is_depth else {},
        "is_depth_map": is_depth,
    }
    if is_depth:
        info |= {
            "depth_unit": "m",
            "video.depth_min": DEPTH_MIN_METRES,
            "video.depth_max": DEPTH_MAX_METRES,
            "video.shift": DEPTH_SHIFT_METRES,
            "video.use_log": True,
        }
    return info


Statistics = dict[str, "NDArray[Any]"]

_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
STATISTICS = ("min", "max", "mean", "std", "count", *_QUANTILES)
"""Statistics in the order in which LeRobot writes them."""


# Statistics have the form of meta/stats.json and of the ``stats/*`` columns: min, max, mean, std, count and five
# quantiles as arrays. Numeric features have one value a component, pictures one a channel in the shape (C, 1, 1),
# colours scaled to [0, 1]. ``count`` is the number of frames.


def numeric_statistics(values: NDArray[Any]) -> Statistics:
    """The statistics over the first axis of ``values``, which holds at least one frame."""
    rows = values[:, None] if values.ndim == 1 else values
    return _statistics(rows.astype(np.float64), frames=len(values))


def picture_statistics(pictures: NDArray[Any]) -> Statistics:
    """The statistics over at least one picture (N, H, W, C), by channel; depth, in floats, keeps its unit."""
    channels = pictures.shape[-1]
    scale = 255.0 if pictures.dtype == np.uint8 else 1.0
    flat = _statistics(pictures.reshape(-1, channels) / scale, frames=len(pictures))
    return {name: value if name == "count" else value.reshape(channels, 1, 1) for name, value in flat.items()}


def aggregate(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of at least one part together; quantiles are weighted means of the parts', as in LeRobot."""
    counts = np.concatenate([part["count"] for part in parts])
    shares = counts / counts.sum()

    def weighted(name: str) -> NDArray[Any]:
        return np.tensordot(shares, np.stack([part[name] for part in parts]), axes=1)

    mean = weighted("mean")
    variance = np.tensordot(shares, np.stack([part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in parts]), axes=1)
    return {
        "min": np.min([part["min"] for part in parts], axis=0),
        "max": np.max([part["max"] for part in parts], axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": counts.sum(keepdims=True),
        **{name: weighted(name) for name in _QUANTILES},
    }


def _statistics(values: NDArray[np.float64], frames: int) -> Statistics:
    return {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([frames]),
        **dict(zip(_QUANTILES, np.quantile(values, list(_QUANTILES.values()), axis=0), strict=True)),
    }


SAMPLED_PICTURES = 8
SAMPLED_SIDE_PX = 64
"""Statistics use so many pictures of an episode, thinned to about so many pixels a side."""

EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

Columns = dict[str, list[Any]]
"""Columns of meta/episodes, one value an episode, in the order in which they are written."""


@dataclass(kw_only=True)
class Recorder:
    """Writes one dataset, once."""

    truth: DatasetTruth
    """The contents, and the directory."""
    encoding: Encoding
    """Encoding of the colour videos."""
    gop: int
    crf: int | None
    episodes_per_video_file: Mapping[str, int]
    """Number of episodes in a file, by video feature."""
    episodes_per_data_file: int
    chunks_size: int
    quirks: Quirks
    progress: Callable[[int, int], object] | None
    """Called with the numbers of finished and of all videos."""

    def __post_init__(self) -> None:
        truth = self.truth
        self._features = describe_features(truth, self.encoding, gop=self.gop, crf=self.crf, quirks=self.quirks)
        self._filled = [episode for episode, length in enumerate(truth.lengths) if length]
        self._videos_done = 0
        # An episode may have a second, shorter clip. Without repeats there is nothing to remember.
        remembered = 2 * (truth.distinct_videos or 0)
        self._clip = lru_cache(maxsize=remembered)(self._encode)
        self._picture_statistics = lru_cache(maxsize=remembered)(self._sample_pictures)

    def write(self) -> None:
        """Writes every file, info.json last: without it there is no dataset."""
        truth, quirks = self.truth, self.quirks
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
        info = describe_dataset(truth, self._features, chunks_size=self.chunks_size, quirks=quirks)
        self._write_json("meta/info.json", info)

    def _write_data(self) -> Columns:
        import pyarrow as pa

        truth, quirks, per_file = self.truth, self.quirks, self.episodes_per_data_file
        schema = data_schema(self._features, quirks)
        files = [(file, episodes, quirks.orphan_rows) for file, episodes in self._files(per_file)]
        if quirks.orphan_files and self._filled:
            files.append((self._file_count(per_file), self._filled[:1], 0))
        for file, episodes, orphan_rows in files:
            tables = [_episode_table(truth, schema, episode) for episode in episodes]
            if orphan_rows:
                tables.insert(0, _orphans(tables[0], truth, orphan_rows))
            _write_row_groups(
                self._path(DATA_PATH, file), [pa.concat_tables(tables)] if quirks.collapsed_row_groups else tables
            )
        starts = [truth.first_index(episode) for episode in range(truth.num_episodes)]
        return {
            **self._file_columns("data", per_file),
            "dataset_from_index": starts,
            "dataset_to_index": [start + length for start, length in zip(starts, truth.lengths, strict=True)],
        }

    def _write_videos(self, video: str) -> Columns:
        truth, per_file = self.truth, self.episodes_per_video_file[video]
        for file, episodes in self._files(per_file):
            path = self._path(VIDEO_PATH, file, video_key=video)
            lengths = [truth.lengths[episode] for episode in episodes]
            lengths[-1] -= self.quirks.short_video_frames
            clips = []
            for episode, length in zip(episodes, lengths, strict=True):
                clips.append(self._clip(video, truth.painted_episode(episode), length))
                self._videos_done += 1
                if self.progress is not None:
                    self.progress(self._videos_done, len(self._filled) * len(truth.video_features))
            join_clips(clips, path, fps=truth.fps)
            if file == self.quirks.empty_video_file and video == truth.video_features[0]:
                path.write_bytes(b"")
        if self.quirks.orphan_files and self._filled:
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
        """The times of each episode in its file, summed up in floats as in LeRobot, rounding errors included."""
        starts: list[float] = []
        stops: list[float] = []
        for episode, length in enumerate(self.truth.lengths):
            starts.append(0.0 if episode % per_file == 0 else stops[-1])
            stops.append(starts[-1] + float(Fraction(length, self.truth.fps)))
        return starts, stops

    def _write_statistics(self) -> Columns:
        """Writes stats.json; returns the ``stats/*`` columns, null for an episode without frames."""
        columns: Columns = {}
        overall: dict[str, dict[str, Any]] = {}
        for name, feature in self._features.items():
            if feature["dtype"] == "string" or not self._filled:
                continue
            by_episode = {episode: self._feature_statistics(name, feature, episode) for episode in self._filled}
            overall[name] = _plain(aggregate(list(by_episode.values())))
            plain = {episode: _plain(statistics) for episode, statistics in by_episode.items()}
            for statistic in STATISTICS:
                values = (plain.get(episode, {}).get(statistic) for episode in range(self.truth.num_episodes))
                columns[f"stats/{name}/{statistic}"] = list(values)
        self._write_json("meta/stats.json", overall)
        return columns

    def _feature_statistics(self, name: str, feature: Mapping[str, Any], episode: int) -> Statistics:
        match feature["dtype"]:
            case "video":
                return self._picture_statistics(name, self.truth.painted_episode(episode))
            case "image":
                return self._sample_pictures(name, episode)
            case _:
                return numeric_statistics(self.truth.column(name, episode))

    def _sample_pictures(self, name: str, episode: int) -> Statistics:
        truth = self.truth
        length = truth.lengths[episode]
        step = max(1, min(truth.height, truth.width) // SAMPLED_SIDE_PX)
        frames = sorted({length * n // SAMPLED_PICTURES for n in range(SAMPLED_PICTURES)})
        pictures = [
            truth.depth_metres(episode, frame)[..., None] if name == DEPTH else truth.picture(episode, frame, name)
            for frame in frames
        ]
        return picture_statistics(np.stack(pictures)[:, ::step, ::step])

    def _write_episodes(self, columns: Columns) -> None:
        import pyarrow as pa

        count = self.truth.num_episodes
        per_file = self.quirks.episodes_per_meta_file or max(1, count)
        columns |= self._file_columns("meta/episodes", per_file)
        if self.quirks.stale_self_references:
            beyond = self._file_count(per_file)
            columns["meta/episodes/file_index"] = [beyond + episode for episode in range(count)]
        for episode in self.quirks.null_index_episodes:
            for name in columns:
                if name.endswith(("/chunk_index", "/file_index")):
                    columns[name][episode] = None
        names = sorted(columns) if self.quirks.sorted_episode_columns else list(columns)
        for file in range(self._file_count(per_file)):
            rows = slice(file * per_file, (file + 1) * per_file)
            table = pa.table({name: _episode_column(name, columns[name][rows], self.quirks) for name in names})
            flushed = [table.slice(start, EPISODES_PER_FLUSH) for start in range(0, len(table), EPISODES_PER_FLUSH)]
            _write_row_groups(self._path(EPISODES_PATH, file), flushed)

    def _encode(self, video: str, episode: int, length: int) -> bytes:
        truth = self.truth
        if video == DEPTH:
            depth = (truth.depth_codes(episode, frame) for frame in range(length))
            return encode_clip(depth, encoding=DEPTH_ENCODING, fps=truth.fps, gop=self.gop)
        pictures = (truth.picture(episode, frame, video) for frame in range(length))
        return encode_clip(pictures, encoding=self.encoding, fps=truth.fps, gop=self.gop, crf=self.crf)

    def _files(self, per_file: int) -> Iterator[tuple[int, list[int]]]:
        """The files with frames, each with its episodes that have some."""
        for file, episodes in groupby(self._filled, key=lambda episode: episode // per_file):
            yield file, list(episodes)

    def _file_count(self, per_file: int) -> int:
        return -(-self.truth.num_episodes // per_file)

    def _file_columns(self, prefix: str, per_file: int) -> Columns:
        files = [episode // per_file for episode in range(self.truth.num_episodes)]
        return {
            f"{prefix}/chunk_index": [file // self.chunks_size for file in files],
            f"{prefix}/file_index": [file % self.chunks_size for file in files],
        }

    def _path(self, template: str, file: int, **fields: str) -> Path:
        chunk, file_in_chunk = divmod(file, self.chunks_size)
        return self.truth.root / template.format(chunk_index=chunk, file_index=file_in_chunk, **fields)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        path = self.truth.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")


def _plain(statistics: Statistics) -> dict[str, Any]:
    return {name: value.tolist() for name, value in statistics.items()}

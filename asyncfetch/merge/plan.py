"""The check whether datasets can be merged, and the plan of the merged dataset, before a byte is written. Pure.

Each episode's file, frames, tasks and times follow from the sources' metadata alone, so every file can be written by
itself and once. Files are filled in the order of the episodes, so a merge of merges equals one merge of all. All
disagreements are listed, not only the first.

Tables are made here, too: rows with their new numbers, tasks and episodes. That blocks, so run it in a thread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.config.checks import whole_number
from asyncfetch.errors import ConfigError, FormatError, MergeError, redact_url
from asyncfetch.fetch.objects import difference
from asyncfetch.merge.summaries import EpisodeColumn
from asyncfetch.tables.columns import Array, ArrowType, is_list, plain_type, take_rows, to_array, to_integers
from asyncfetch.tables.parquet import require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from pyarrow import Schema

    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.sources import MergeSource
    from asyncfetch.merge.videos import Segment
    from asyncfetch.ranges import ObjectInfo


def common_type(one: ArrowType, other: ArrowType) -> ArrowType | None:
    """The type that holds the values of both, which may differ in the representation of text, bytes and lists.

    None if they differ in more than that and in nulls, at any depth.
    """
    pa = require_pyarrow()
    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if one.id != other.id or isinstance(one, pa.BaseExtensionType) or not one.num_fields:
        alike = plain_type(one), plain_type(other)
        return None if alike == (one, other) else common_type(*alike)
    if types.is_fixed_size_list(one) and one.list_size != other.list_size:
        return None
    if types.is_struct(one) and [field.name for field in one] != [field.name for field in other]:
        return None
    fields: list[Any] = []
    for field, like in ((one.field(at), other.field(at)) for at in range(one.num_fields)):
        if (common := common_type(field.type, like.type)) is None:
            return None
        fields.append(field.with_type(common).with_nullable(field.nullable or like.nullable))
    if types.is_struct(one):
        return pa.struct(fields)
    if types.is_map(one):
        return pa.map_(*fields[0].type, one.keys_sorted)
    if types.is_fixed_size_list(one):
        return pa.list_(fields[0], one.list_size)
    return pa.large_list(fields[0]) if types.is_large_list(one) else pa.list_(fields[0])


def converted(column: pa.ChunkedArray[Any], arrow_type: ArrowType) -> pa.ChunkedArray[Any] | Array:
    """The column's values as this type, a ``common_type`` of its own."""
    pa = require_pyarrow()
    if column.type == arrow_type:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), arrow_type)
    array = to_array(column)
    try:
        return array.cast(arrow_type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # pyarrow (26) casts no null type within a list
        return pa.array(array.to_pylist(), arrow_type)


_COMPRESSION = "snappy"
"""LeRobot's."""
_EPISODES_PER_GROUP = 100
"""Rows of meta/episodes in a row group; LeRobot's recorder has 10, one for each flush."""
_NUMBERED_ANEW = ("episode_index", "index", "task_index")


def column_type(feature: Feature, stored: Any) -> Any:  # noqa: ANN401  (pyarrow's types know no lists)
    """The type of the feature's column: the stored one, but a vector as a list of fixed size.

    Renumbered columns are int64, as in LeRobot: a narrower type may be too small for all sources' numbers. Views within
    other types become plain: pyarrow (26) doesn't write all of them.
    """
    pa = require_pyarrow()
    if feature.key in _NUMBERED_ANEW:
        return pa.int64()
    if feature.kind == "value" and len(feature.shape) == 1 and feature.shape != (1,) and is_list(stored):
        return pa.list_(pa.field("element", plain_type(stored.value_type)), feature.shape[0])
    return plain_type(stored) if stored.num_fields and _has_views(stored) else stored


def _has_views(arrow_type: ArrowType) -> bool:
    types = require_pyarrow().types
    if types.is_string_view(arrow_type) or types.is_binary_view(arrow_type):
        return True
    return any(_has_views(arrow_type.field(at).type) for at in range(arrow_type.num_fields))


def rows_schema(plan: MergePlan) -> pa.Schema:
    """The schema of the data files, which holds the values of all sources.

    It has the ``huggingface`` metadata of the first file that has some for exactly these types.
    """
    pa = require_pyarrow()
    schemas = [file.schema for source in plan.sources for file in source.data_files.values()]
    if not schemas:
        empty: Schema = pa.schema([])
        return empty
    features = {key: one for key, one in plan.sources[0].metadata.features.items() if one.has_column}
    types: dict[str, Any] = {}
    is_nullable = dict.fromkeys(features, False)
    for schema in schemas:
        for key, feature in features.items():
            field = schema.field(key)
            own = column_type(feature, field.type)
            types[key] = common_type(types.get(key, own), own)
            is_nullable[key] |= field.nullable
    described = (
        one.metadata[b"huggingface"]
        for one in schemas
        if b"huggingface" in (one.metadata or {})
        and all(column_type(feature, one.field(key).type) == types[key] for key, feature in features.items())
    )
    metadata = next(described, None)
    fields = [schemas[0].field(key).with_type(types[key]).with_nullable(is_nullable[key]) for key in features]
    united: Schema = pa.schema(fields, metadata={b"huggingface": metadata} if metadata else None)
    return united


def write_rows(
    writer: Any,  # noqa: ANN401  (pyarrow has no types)
    table: pa.Table,
    episodes: Sequence[PlannedEpisode],
    task_maps: Mapping[int, Mapping[int, int]],
) -> None:
    """Write rows of a source's file, found by ``index`` in any order: each episode's with new numbers, as a row group.

    FormatError if they are missing, have an unknown task or don't fit the schema, or Parquet can't hold them.
    """
    pa, url = require_pyarrow(), episodes[0].episode.data_url
    episode_of = to_integers(table["episode_index"], "episode_index", url)
    indices = to_integers(table["index"], "index", url)
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    for planned in episodes:
        episode, task_map = planned.episode, task_maps[planned.source]
        where = f"{redact_url(url)}: episode {episode.index}"
        first, stop = np.searchsorted(indices, (episode.from_index, episode.to_index))
        places = np.arange(first, stop)[episode_of[order[first:stop]] == episode.index]
        if not np.array_equal(indices[places], np.arange(episode.from_index, episode.to_index)):
            raise FormatError(
                f"{where} has {len(places)} rows with index in [{episode.from_index}, {episode.to_index}); "
                f"there must be one for each of its {episode.length} frames"
            )
        own = take_rows(table, order[places])
        tasks = to_integers(own["task_index"], "task_index", url)
        if unknown := sorted(set(tasks.tolist()) - task_map.keys()):
            raise FormatError(f"{where} has task_index {unknown}, which meta/tasks.parquet doesn't number")
        numbers = {
            "episode_index": np.full(len(places), planned.index),
            "index": np.arange(len(places)) + planned.from_index,
            "task_index": np.array([task_map[task] for task in tasks.tolist()], np.int64),
        }
        try:
            columns = [
                pa.array(numbers[field.name]) if field.name in numbers else converted(own[field.name], field.type)
                for field in writer.schema
            ]
            writer.write_table(pa.table(columns, schema=writer.schema), row_group_size=len(places))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise FormatError(f"{where} can't be written anew: {str(error).strip()}") from error


def open_writer(path: Path, schema: pa.Schema) -> Any:  # noqa: ANN401  (pyarrow has no types)
    """A parquet writer; its ``write_table`` writes row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return require_pyarrow().parquet.ParquetWriter(path, schema, compression=_COMPRESSION)


def write_tasks(path: Path, tasks: Sequence[str]) -> None:
    """tasks.parquet: the task is the index of a pandas frame, hence the second column."""
    pa = require_pyarrow()
    index = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    column = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    header = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [{**header, "metadata": {"encoding": "UTF-8"}}],
        "columns": [{**column, "metadata": None}, index],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    columns = {"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())}
    table = pa.table(columns).replace_schema_metadata({"pandas": json.dumps(pandas)})
    with open_writer(path, table.schema) as writer:
        writer.write_table(table)


def write_episodes(path: Path, columns: Mapping[str, Sequence[Any] | EpisodeColumn], first: int, stop: int) -> None:
    """Write rows [first, stop) of meta/episodes. ``columns`` has all episodes' values; unknown ones become null."""
    pa = require_pyarrow()
    arrays = {
        name: _nested(pa, values.take(np.arange(first, stop)))
        if isinstance(values, EpisodeColumn)
        else pa.array(values[first:stop], _episode_type(pa, name))
        for name, values in columns.items()
    }
    table = pa.table(arrays)
    with open_writer(path, table.schema) as writer:
        writer.write_table(table, row_group_size=_EPISODES_PER_GROUP)


def _nested(pa: Any, column: EpisodeColumn) -> Any:  # noqa: ANN401
    """Nested lists, one level for each axis of an episode's value."""
    values = column.values[column.is_known]  # pyarrow up to 23 can't write nulls over values
    array = pa.array(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        is_outer = axis == 1
        has_values = column.is_known if is_outer else np.ones(int(np.prod(values.shape[:axis])), bool)
        offsets = pa.array(np.append(0, np.cumsum(has_values * values.shape[axis])).astype(np.int32))
        mask = pa.array(~column.is_known) if is_outer else None
        array = pa.ListArray.from_arrays(offsets, array, type=pa.list_(pa.field("element", array.type)), mask=mask)
    return array


def _episode_type(pa: Any, name: str) -> Any:  # noqa: ANN401
    """The type LeRobot gives the column."""
    if name == "tasks":
        return pa.list_(pa.field("element", pa.string()))
    return pa.float64() if name.endswith("_timestamp") else pa.int64()


_DEPTH_KEYS = ("depth_unit", "video.depth_min", "video.depth_max", "video.shift", "video.use_log")
"""Keys of a depth feature's ``info`` that change the meaning of its pixels. The rest describes the encoder, or one
file."""


def disagreements(sources: Sequence[MergeSource]) -> list[str]:
    """The disagreements of sources, at least one, each with the first source.

    Encoder settings, per-feature ``fps`` and the probed numbers of ``info`` may differ: the files themselves are
    compared.
    """
    found: list[str] = []
    first_of: dict[str, tuple[object, str]] = {}

    def compare(what: str, value: object, url: str) -> None:
        first, where = first_of.setdefault(what, (value, url))
        if value != first:
            found.append(f"{what} is {first!r:.200} in {redact_url(where)}, but {value!r:.200} in {redact_url(url)}")

    for source in sources:
        info, features = source.metadata.info, source.metadata.features
        compare("fps", info.fps, source.url)
        compare("robot_type", info.robot_type, source.url)
        compare("the set of features", sorted(features), source.url)
        for key, feature in features.items():
            meaning = {"dtype": feature.dtype, "shape": feature.shape, "names": feature.names}
            meaning |= {"is_depth_map": feature.is_depth}
            meaning |= {one: feature.info.get(one) if feature.is_depth else None for one in _DEPTH_KEYS}
            for name, value in meaning.items():
                compare(f"{name} of feature {key}", value, source.url)
    found += _different_columns(sources)
    for camera in sources[0].metadata.cameras:
        for source in sources:
            for url, pictures in source.pictures.get(camera, {}).items():
                for name, value in pictures._asdict().items():
                    compare(f"{name} of {camera}", value, url)
    for source in sources:
        for key, columns in source.picture_statistics.items():  # those of numbers are computed again
            for name, column in columns.items():
                compare(f"the shape of stats/{key}/{name}", column.values.shape[1:], source.url)
    return [*found, *_different_versions(sources)]


def refuse(problems: Sequence[str], cause: BaseException | None = None) -> None:
    """Raise a MergeError that lists the problems, if there are any."""
    if problems:
        count = f"{len(problems)} reason{'s' if len(problems) > 1 else ''}"
        raise MergeError(f"can't merge, for {count}:\n" + "\n".join(f"- {problem}" for problem in problems)) from cause


def _different_columns(sources: Sequence[MergeSource]) -> Iterator[str]:
    """Yield missing columns and different types of every file of rows; nulls don't matter."""
    types: dict[str, tuple[Any, str]] = {}
    files = [(source, *item) for source in sources for item in source.data_files.items()]
    for source, url, file in files:
        schema, where = file.schema, redact_url(url)
        columns = [feature for feature in source.metadata.features.values() if feature.has_column]
        if missing := [feature.key for feature in columns if feature.key not in schema.names]:
            yield f"{where} has no column {', '.join(missing)}"
        for feature in columns:
            if feature.key in missing:
                continue
            stored = column_type(feature, schema.field(feature.key).type)
            first, first_where = types.setdefault(feature.key, (stored, where))
            common = common_type(first, stored)
            if common is not None:
                types[feature.key] = common, first_where
            else:
                yield f"the stored type of feature {feature.key} is {first} in {first_where}, but {stored} in {where}"


def _different_versions(sources: Sequence[MergeSource]) -> Iterator[str]:
    """Yield changes of a file that several sources have, read at different times."""
    objects: dict[str, ObjectInfo] = {}
    for source in sources:
        for url, info in source.objects.items():
            if (changed := difference(objects.setdefault(url, info), info)) is not None:
                yield f"{redact_url(url)} was changed while the sources were read, {changed}: merge again"


MOST_FILES_PER_CHUNK = 1000
"""LeRobot reads files in the order of their names, which have three digits: file-1000 comes before file-101."""
_FORMAT = 2
"""Raised with each change of the files for the same plan, so that no older build is resumed."""
_GROUP_BYTES = 200
"""Bytes of a row group's column in the file's footer, about."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the size of files and directories. An episode is never split, so a long one makes a longer file."""

    data_file_max_bytes: int
    video_file_max_bytes: int
    files_per_chunk: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=1))
        if self.files_per_chunk > MOST_FILES_PER_CHUNK:
            raise ConfigError(
                f"files_per_chunk must be at most {MOST_FILES_PER_CHUNK}, or LeRobot would read the files in another "
                f"order; not {self.files_per_chunk}"
            )


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The place of an episode in a file."""

    file: int
    """Number of the file, over all chunk directories."""
    first: float
    """Origin of its rows' times in the file, in frames; whole if they follow the frame rate."""
    length: float
    """Its duration, in frames."""


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """An episode of the merged dataset."""

    source: int
    """Number of its source."""
    episode: Episode
    """The source's episode."""
    index: int
    from_index: int
    data_file: int
    row_bytes: float
    """Bytes of its rows in the data file, about."""
    videos: Mapping[str, FilePlace]
    """Place in the video file, by camera."""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The whole merged dataset, as data."""

    sources: tuple[MergeSource, ...]
    limits: Limits
    tasks: tuple[str, ...]
    """Tasks by task_index."""
    task_maps: tuple[Mapping[int, int], ...]
    """For each source, the new task_index by its own."""
    episodes: tuple[PlannedEpisode, ...]
    videos: Mapping[str, Sequence[Sequence[Segment]]]
    """Segments of each video file, by camera and the file's number."""

    def fingerprint(self) -> str:
        """A hash of everything that determines the files: the sources' versions, and the limits."""
        digest = blake2b(digest_size=16)
        for source in self.sources:
            digest.update(repr((source.url, source.version)).encode())
        digest.update(repr((_FORMAT, self.limits)).encode())
        return digest.hexdigest()

    @property
    def num_frames(self) -> int:
        """Frames of all episodes."""
        return sum(planned.episode.length for planned in self.episodes)


def plan_merge(sources: Sequence[MergeSource], limits: Limits) -> MergePlan:
    """The plan for these sources, at least one, in this order; MergeError with every disagreement."""
    refuse(disagreements(sources))
    tasks: dict[str, int] = {}
    task_maps = [
        {index: tasks.setdefault(word, len(tasks)) for index, word in sorted(source.metadata.tasks.items())}
        for source in sources
    ]
    videos: dict[str, list[list[Segment]]] = {}
    places: dict[str, dict[tuple[int, int], FilePlace]] = {}
    for camera in sources[0].metadata.cameras:
        videos[camera], places[camera] = _pack_videos(sources, camera, limits.video_file_max_bytes)
    episodes = _place_episodes(sources, limits.data_file_max_bytes, places)
    return MergePlan(tuple(sources), limits, tuple(tasks), tuple(task_maps), tuple(episodes), videos)


def _pack_videos(
    sources: Sequence[MergeSource], camera: str, max_bytes: int
) -> tuple[list[list[Segment]], dict[tuple[int, int], FilePlace]]:
    """The segments of each file, and the place of each (source, episode)."""
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
            for episode, first, length in segment.places:
                places[number, episode] = FilePlace(len(files) - 1, num_frames + first, length)
            filled_bytes += segment.nbytes
            num_frames += segment.num_frames
    return files, places


def _place_episodes(
    sources: Sequence[MergeSource], max_bytes: int, places: Mapping[str, Mapping[tuple[int, int], FilePlace]]
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
            # An episode without frames has no place.
            videos = {
                camera: found.get((number, episode.index), FilePlace(0, 0, 0)) for camera, found in places.items()
            }
            planned.append(PlannedEpisode(number, episode, len(planned), from_index, data_file, nbytes, videos))
            from_index += episode.length
    return planned

"""meta/info.json: what the dataset says of itself, checked, where its files are, and its units of depth. Pure."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from asyncfetch.config.checks import check_keys, chosen_features
from asyncfetch.decode import DepthScale
from asyncfetch.errors import COPY_ANEW, LEAVE_OUT_FEATURE, WRITE_ANEW, DatasetError, FormatError, redact_url

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_FIELDS = frozenset({"chunk_index", "file_index", "video_key"})
_NUMBER_SPEC = re.compile(r"0?\d{0,2}d?")


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """A path with ``{chunk_index:03d}``, ``{file_index:03d}`` and ``{video_key}`` in it.

    The text comes from the dataset, so from anyone: it may format these fields as whole numbers of up to 99 digits and
    do nothing else that ``str.format`` can (reach attributes, ask for gigabytes of padding), nor leave the root.
    FormatError where it asks for more.
    """

    text: str
    """The template's text as in info.json."""

    def __post_init__(self) -> None:
        try:
            pieces = list(Formatter().parse(self.text))
        except ValueError as error:
            raise FormatError(f"path template {self.text!r} of info.json can't be read: {error}") from error
        for _, field, spec, conversion in pieces:
            is_plain = field in _FIELDS and not conversion and _NUMBER_SPEC.fullmatch(spec or "")
            if field is not None and (not is_plain or (spec and field == "video_key")):
                message = f"path template {self.text!r} of info.json may only use {', '.join(sorted(_FIELDS))}"
                raise FormatError(f"{message} (numbers as :03d), not {{{field}}}")

    def has(self, field: str) -> bool:
        """Return whether paths differ where this field does."""
        return any(name == field for _, name, _, _ in Formatter().parse(self.text))

    def format(self, *, chunk_index: int, file_index: int, video_key: str = "") -> str:
        """The path, relative to the dataset's root. FormatError where it would leave that."""
        path = self.text.format(chunk_index=chunk_index, file_index=file_index, video_key=video_key)
        if path.startswith("/") or ".." in path.split("/"):
            raise FormatError(f"path {path!r} of info.json must be relative to the dataset's root, without '..'")
        return path


INFO_PATH, STATS_PATH, TASKS_PATH = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
"""Paths of LeRobot's own writers."""
EPISODES_PATH = PathTemplate("meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")
"""The episode table's files. info.json has no template for them."""


MAX_FPS = 1_000_000
"""Highest rate of a camera."""
DEFAULT_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Features that every LeRobot dataset has."""

FeatureKind = Literal["value", "string", "image", "language", "video", "depth", "audio", "other"]

INDEX_FEATURES = ("frame_index", "episode_index", "index", "task_index")
"""Default features that number a row."""

_CHANNELS = frozenset({1, 3, 4})
"""Numbers of channels that a picture may have."""

_NUMERIC = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
_KINDS: tuple[FeatureKind, ...] = ("string", "image", "language", "audio", "video")
"""Kinds that are called as their dtype."""
_CHUNKS_SIZE = 1000
_CONVERT = "asyncfetch convert SOURCE DESTINATION"
_OLD_PATHS = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
_OLD_FIELDS = {"{episode_chunk": "{chunk_index", "{episode_index": "{file_index"}
"""The names that v2 has for the numbers of a file in its path templates; a file there is an episode."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of the dataset."""

    key: str
    """Its name, dots kept."""
    dtype: str
    """Type as in info.json: a numpy name, "string", "video", "image", "language" or something else."""
    shape: tuple[int, ...]
    """Shape of one frame; (1,) for scalars, (height, width, channels) for pictures."""
    names: Any
    """Names of the axes or their elements, as in info.json: list, dict or None."""
    kind: FeatureKind
    """The way in which it is read: numbers ("value"), "string", pictures in the table ("image") or in MP4 ("video",
    "depth") ..."""
    info: Mapping[str, Any]
    """The ``info`` (older: ``video_info``) block. For videos it describes the camera's first file only."""

    @property
    def is_camera(self) -> bool:
        """True if its frames are in MP4 files."""
        return self.kind in {"video", "depth"}

    @property
    def is_depth(self) -> bool:
        """True if its pictures, in MP4 or in the table, are depth maps."""
        return bool(self.info.get("is_depth_map") or self.info.get("video.is_depth_map"))

    @property
    def row_dtype(self) -> str:
        """Type of its values in a row: what numbers a row is an int64, however it is declared."""
        return "int64" if self.key in INDEX_FEATURES else self.dtype

    @property
    def has_column(self) -> bool:
        """True if its values are a column of the data files."""
        return not self.is_camera and self.kind != "audio"

    def has_sizes(self, *sizes: int) -> bool:
        """Return whether a picture's sizes are among its own, in whatever order: there are datasets with either."""
        return not Counter(sizes) - Counter((*self.shape, *(1,) * (3 - len(self.shape))))

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """The shape of a picture, channels first; of a camera by its first file, where ``info`` tells of that."""
        shape = self.shape
        if len(shape) == 2:
            shape = (1, *shape)
        elif len(shape) == 3 and not self._begins_with_channels:
            shape = (shape[2], *shape[:2])
        height, width = self.info.get("video.height"), self.info.get("video.width")
        if self.is_camera and isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:
            return shape if self.has_sizes(height, width) else (self.channels, height, width)
        return shape

    @property
    def channels(self) -> int:
        """Channels of a camera's pictures."""
        return 1 if self.is_depth else 3

    @property
    def _begins_with_channels(self) -> bool:
        """True if the channels are the first of three axes: by their names or else by which axis is small.

        LeRobot writes height, width and channels.
        """
        axes = [str(name).lower() for name in self.names] if isinstance(self.names, list) else []
        is_channels = [axis == "c" or axis.startswith("channel") for axis in axes]
        return is_channels[0] if any(is_channels) else self.shape[0] in _CHANNELS and self.shape[2] not in _CHANNELS

    def resized(self, channels: int, height: int, width: int, /) -> Feature:
        """Return the feature with pictures of these sizes."""
        shape: tuple[int, ...] = (height, width, channels)
        if len(self.shape) == 3 and self._begins_with_channels:
            shape = (channels, height, width)
        sizes = {key: size for key, size in (("video.height", height), ("video.width", width)) if key in self.info}
        return replace(self, shape=shape, info={**self.info, **sizes})


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """The content of info.json; keys that aren't listed here are ignored."""

    version: str
    """Format version, such as "v3.0"."""
    fps: float
    """Frames a second, more than 0."""
    features: Mapping[str, Feature]
    """All features, in the order of info.json."""
    total_episodes: int
    total_frames: int | None
    """Number of frames as stored, None where it isn't; of these totals the tables' own count."""
    total_tasks: int | None
    chunks_size: int
    """Most files in one chunk directory, more than 0."""
    data_file_bytes: int
    """Length from which on a file of the table of episodes, or of rows, is followed by another one; more than 0."""
    video_file_bytes: int
    """Length of a camera's file, likewise."""
    data_path: PathTemplate
    video_path: PathTemplate | None
    """None in a dataset without videos."""
    robot_type: str | None
    splits: Mapping[str, str]
    """Half-open episode ranges by name, such as {"train": "0:50"}."""


def parse_json(data: memoryview | bytes, url: str) -> dict[str, Any]:
    """The JSON object in ``data``. FormatError where it is none, with how it begins: it often is an error page."""
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        begin = bytes(data[:40]).decode("utf-8", "replace")
        message = f"{redact_url(url)} isn't JSON ({error}); its {len(data)} bytes begin {begin!r}"
        raise FormatError(message, remedy=COPY_ANEW) from error
    if not isinstance(value, dict):
        raise FormatError(f"{redact_url(url)} must hold a JSON object, not {type(value).__name__}")
    return value


def parse_info(data: memoryview | bytes, url: str) -> DatasetInfo:
    """Return what the info.json in ``data`` says.

    Raises:
        FormatError: It isn't JSON, or a key is missing or has a value that can't be meant.
        DatasetError: It is another version's, or a default feature is missing.
    """
    raw = parse_json(data, url)
    version = _version(raw, url)
    features = _features(raw, url)
    given_path = raw.get("video_path", VIDEO_PATH)
    video_path = _template(given_path, "video_path", url) if given_path is not None else None
    videos = [key for key, feature in features.items() if feature.is_camera]
    if len(videos) > 1 and video_path is not None and not video_path.has("video_key"):
        where = f"video_path of {redact_url(url)}, {given_path!r:.80},"
        raise FormatError(f"{where} has no {{video_key}}: {' and '.join(videos)} would show the same pictures")
    return DatasetInfo(
        version=version,
        fps=_number(raw, "fps", url, f"a number above 0, {MAX_FPS} at most", lambda value: 0 < value <= MAX_FPS),
        features=features,
        total_episodes=_integer(raw, "total_episodes", url, minimum=0),
        total_frames=_total(raw, "total_frames", url),
        total_tasks=_total(raw, "total_tasks", url),
        chunks_size=_integer({"chunks_size": _CHUNKS_SIZE, **raw}, "chunks_size", url, minimum=1),
        data_file_bytes=_file_bytes(raw, "data_files_size_in_mb", 100, url),
        video_file_bytes=_file_bytes(raw, "video_files_size_in_mb", 200, url),
        data_path=_template(raw.get("data_path", DATA_PATH), "data_path", url),
        video_path=video_path,
        robot_type=raw.get("robot_type"),
        splits=raw.get("splits") or {},
    )


def is_v2(raw: Mapping[str, Any]) -> bool:
    """Return whether an info.json is of LeRobot v2.0 or v2.1."""
    return re.match(r"v?2\.[01]\b", str(raw.get("codebase_version"))) is not None


def as_v3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A v2 info.json in the terms of v3: a file for each episode, numbered as that is, in the chunk of its number."""
    converted = {**raw, "codebase_version": "v3.0"}
    for key, default in _OLD_PATHS.items():
        template = raw.get(key, default)
        if isinstance(template, str):
            for old, new in _OLD_FIELDS.items():
                template = template.replace(old, new)
            converted[key] = template
    return converted


def _version(raw: Mapping[str, Any], url: str) -> str:
    version = raw.get("codebase_version")
    match = re.match(r"v?(\d{1,6})(\.\d|$)", version) if isinstance(version, str) else None
    if match is None:
        message = f"codebase_version of {redact_url(url)} is {version!r:.80}, not 'v3.0': is it LeRobot's?"
        raise FormatError(message)
    major = int(match[1])
    if major < 3:
        message = f"{redact_url(url)} is a LeRobot {version} dataset; asyncfetch reads v3. Convert it with `{_CONVERT}`"
        raise DatasetError(message + ("" if is_v2(raw) else ", after LeRobot's own converters have made it v2.1"))
    if major > 3:
        message = f"{redact_url(url)} is a LeRobot {version} dataset; this asyncfetch reads v3 only. Upgrade asyncfetch"
        raise DatasetError(message)
    if raw.get("storage_format", "parquet") != "parquet":
        message = f"storage_format of {redact_url(url)} is {raw['storage_format']!r}; asyncfetch reads 'parquet' only"
        raise DatasetError(message)
    return str(version)


def _features(raw: Mapping[str, Any], url: str) -> dict[str, Feature]:
    blocks = raw.get("features")
    if not isinstance(blocks, dict):
        raise FormatError(f"features of {redact_url(url)} must be an object, not {blocks!r:.80}")
    features = {key: _feature(key, block, url) for key, block in blocks.items()}
    missing = [key for key in DEFAULT_FEATURES if key not in features]
    if missing:
        message = f"features of {redact_url(url)} lack {', '.join(missing)}, which every LeRobot dataset has"
        raise DatasetError(f"{message}; present are {', '.join(features) or 'none'}", remedy=WRITE_ANEW)
    for key in DEFAULT_FEATURES:
        if features[key].kind != "value":
            raise FormatError(f"feature {key!r} of {redact_url(url)} is {features[key].dtype!r}; it must be numbers")
    if (shape := features["timestamp"].shape) not in {(), (1,)}:
        raise FormatError(f"feature 'timestamp' of {redact_url(url)} has shape {shape}; it must be one number a row")
    return features


def _feature(key: str, block: object, url: str) -> Feature:
    where = f"feature {key!r} of {redact_url(url)}"
    if not isinstance(block, dict) or not isinstance(block.get("dtype"), str):
        raise FormatError(f"{where} must be an object with a dtype, not {block!r:.80}")
    dtype, shape = block["dtype"], block.get("shape")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise FormatError(f"{where} has shape {shape!r:.80}; it must be a list of sizes")
    said = [block.get(name) or {} for name in ("video_info", "info")]
    if not all(isinstance(one, dict) for one in said):
        raise FormatError(f"{where} has an info, or a video_info, that is no object: {said!r:.80}")
    info = said[0] | said[1]
    kind: FeatureKind = "value" if _NUMERIC.fullmatch(dtype) else "other"
    kind = next((one for one in _KINDS if one == dtype), kind)
    feature = Feature(key, dtype, tuple(shape), block.get("names"), kind, info)
    return replace(feature, kind="depth") if kind == "video" and feature.is_depth else feature


def _number(raw: Mapping[str, Any], key: str, url: str, rule: str, fits: Callable[[float], bool]) -> Any:  # noqa: ANN401
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise FormatError(f"{key} of {redact_url(url)} is {value!r:.80}; it must be {rule}")
    return value


def _integer(raw: Mapping[str, Any], key: str, url: str, *, minimum: int) -> int:
    rule = f"a whole number of at least {minimum}"
    return int(_number(raw, key, url, rule, lambda value: value == value // 1 and value >= minimum))


def _total(raw: Mapping[str, Any], key: str, url: str) -> int | None:
    return None if raw.get(key) is None else _integer(raw, key, url, minimum=0)


def _file_bytes(raw: Mapping[str, Any], key: str, default: int, url: str) -> int:
    size = _number({key: default, **raw}, key, url, "a number above 0", lambda value: 0 < value < math.inf)
    return max(1, int(2**20 * size))


def _template(value: object, key: str, url: str) -> PathTemplate:
    if not isinstance(value, str):
        raise FormatError(f"{key} of {redact_url(url)} is {value!r:.80}; it must be a path template")
    return PathTemplate(value)


DepthUnit = Literal["m", "mm"]
"""Unit of delivered depth; LeRobot's reader gives millimetres by default."""
MILLIMETRES = 1000.0
"""A metre."""


def depth_scale(feature: Feature, unit: DepthUnit) -> DepthScale | None:
    """Return how the codes of a depth video become distances, with LeRobot's defaults; None for other features."""
    if feature.kind != "depth":
        return None
    defaults = DepthScale()
    given = {key: value for key, value in feature.info.items() if value is not None}
    try:
        return DepthScale(
            minimum=float(given.get("video.depth_min", defaults.minimum)),
            maximum=float(given.get("video.depth_max", defaults.maximum)),
            shift=float(given.get("video.shift", defaults.shift)),
            use_log=bool(given.get("video.use_log", defaults.use_log)),
            unit=unit,
        )
    except (TypeError, ValueError) as error:  # ConfigError is a ValueError
        message = f"info.json describes depth camera {feature.key} by numbers that make no scale: {error}"
        raise FormatError(message, remedy=LEAVE_OUT_FEATURE) from error


def stored_unit(feature: Feature) -> DepthUnit | None:
    """The unit of recorded depth, that of depth maps in the table and of all statistics; None where unknown."""
    unit: Any = feature.info.get("depth_unit")
    if unit not in {"m", "mm", None}:
        message = f"info.json says that {feature.key} is in depth_unit {unit!r:.80}; it must be 'm' or 'mm'"
        raise FormatError(message, remedy=LEAVE_OUT_FEATURE)
    return unit  # type: ignore[no-any-return]


def depth_stats(stats: Mapping[str, Any], features: Mapping[str, Feature], unit: DepthUnit) -> dict[str, Any]:
    """The statistics, those of depth in the unit that samples have it in. An unknown unit is left as it is."""
    converted = dict(stats)
    for key, feature in features.items():
        own = converted.get(key)
        if feature.is_depth and isinstance(own, dict) and stored_unit(feature) not in {unit, None}:
            factor = MILLIMETRES if unit == "mm" else 1 / MILLIMETRES
            converted[key] = {name: value if name == "count" else _scaled(value, factor) for name, value in own.items()}
    return converted


def _scaled(value: Any, factor: float) -> Any:  # noqa: ANN401
    return [_scaled(one, factor) for one in value] if isinstance(value, list) else value * factor


def choose_features(info: DatasetInfo, features: Collection[str] | None, url: str) -> dict[str, Feature]:
    """Return the features with these keys and the default ones, in the dataset's order. ConfigError where one lacks."""
    chosen = chosen_features(features)
    if chosen is None:
        return dict(info.features)
    check_keys(chosen, info.features, "features", redact_url(url))
    return {key: feature for key, feature in info.features.items() if key in chosen or key in DEFAULT_FEATURES}

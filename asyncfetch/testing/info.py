"""meta/info.json: what a dataset says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncfetch.testing.clips import DEPTH_ENCODING, Encoding
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
    from asyncfetch.testing.quirks import Quirks

__all__ = ["DATA_PATH", "VIDEO_PATH", "Features", "describe_dataset", "describe_features"]

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

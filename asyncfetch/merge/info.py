"""info.json of a merged dataset. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.codecs import Pictures
    from asyncfetch.merge.plan import MergePlan
    from asyncfetch.merge.sources import Source

__all__ = ["DATA_PATH", "INFO_PATH", "VIDEO_PATH", "merged_info"]

INFO_PATH = "meta/info.json"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
"""LeRobot's own writers know no others, whatever the sources have."""

_ENCODER_KEYS = (
    "video.g",
    "video.crf",
    "video.preset",
    "video.fast_decode",
    "video.extra_options",
    "video.video_backend",
)
"""How the videos were made. Null where the sources differ."""
_STALE_KEYS = frozenset({"total_videos", "total_chunks"})
"""Older versions' counts."""


def merged_info(plan: MergePlan) -> dict[str, Any]:
    """The content of info.json, its keys in LeRobot's order; of other keys those that all sources agree on."""
    sources, limits = plan.sources, plan.limits
    first = sources[0].raw_info
    cameras = sources[0].metadata.cameras
    info: dict[str, Any] = {
        "codebase_version": "v3.0",
        "fps": first["fps"],
        "features": {key: _feature(sources, feature) for key, feature in sources[0].metadata.features.items()},
        "total_episodes": len(plan.episodes),
        "total_frames": plan.num_frames,
        "total_tasks": len(plan.tasks),
        "chunks_size": limits.files_per_chunk,
        "data_files_size_in_mb": max(1, limits.data_file_max_bytes >> 20),
        "video_files_size_in_mb": max(1, limits.video_file_max_bytes >> 20),
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if cameras else None,
        "robot_type": first.get("robot_type"),
        "splits": {"train": f"0:{len(plan.episodes)}"},
    }
    if tools := _united([tool for source in sources for tool in source.raw_info.get("tools") or ()]):
        info["tools"] = tools
    for key, value in first.items():
        if key not in info and key not in _STALE_KEYS and all(_has(source.raw_info, key, value) for source in sources):
            info[key] = value
    return info


def _feature(sources: Sequence[Source], feature: Feature) -> dict[str, Any]:
    blocks = [source.raw_info["features"][feature.key] for source in sources]
    merged = {"dtype": feature.dtype, "shape": list(feature.shape), "names": feature.names}
    if feature.is_camera:
        infos = [source.metadata.features[feature.key].info for source in sources]
        files = [one for source in sources for one in source.pictures[feature.key].values()]
        merged["info"] = _video_info(infos, files[0] if files else None, sources[0].metadata.info.fps, feature)
    for key, value in blocks[0].items():
        if key not in {*merged, "info", "video_info"} and all(_has(block, key, value) for block in blocks):
            merged[key] = value
    return merged


def _video_info(
    infos: Sequence[Mapping[str, Any]], pictures: Pictures | None, fps: float, feature: Feature
) -> dict[str, Any]:
    """What all say alike, and what the files themselves say. No sound any more: only the pictures are merged."""
    info = {key: value for key, value in infos[0].items() if all(_has(other, key, value) for other in infos)}
    info = {key: value for key, value in info.items() if not key.startswith("audio.") and key != "video.is_depth_map"}
    for key in _ENCODER_KEYS:
        if key not in info and any(key in other for other in infos):
            info[key] = {} if key == "video.extra_options" else None
    info |= {"video.fps": fps, "has_audio": False, "is_depth_map": feature.is_depth}
    if pictures is not None:
        info |= {"video.height": pictures.height, "video.width": pictures.width, "video.codec": pictures.codec}
        if pictures.pixel_format:
            info["video.pix_fmt"] = pictures.pixel_format
    return info


def _has(block: Mapping[str, Any], key: str, value: object) -> bool:
    return key in block and block[key] == value


def _united(values: Sequence[Any]) -> list[Any]:
    """The different ones, in first-seen order."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different

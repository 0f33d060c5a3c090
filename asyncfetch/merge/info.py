"""info.json of a merged dataset. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncfetch.errors import redact_url
from asyncfetch.lerobot.info import DATA_PATH, VIDEO_PATH

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from asyncfetch.lerobot.info import Feature
    from asyncfetch.merge.plan import MergePlan
    from asyncfetch.merge.sources import MergeSource
    from asyncfetch.merge.videos import Pictures

_ENCODER_KEYS = (
    "video.g",
    "video.crf",
    "video.preset",
    "video.fast_decode",
    "video.extra_options",
    "video.video_backend",
)
"""Keys that describe the videos' encoder. Null if the sources differ."""
_SPLIT = "train"
_MARKS = ("is_depth_map", "video.is_depth_map")
"""Marks of a depth feature: today's, and an older one."""
_STALE_KEYS = frozenset({"total_videos", "total_chunks"})
"""Older versions' counts."""
_OF_FILES = frozenset({"video.fps", "video.height", "video.width", "video.codec", "video.pix_fmt", "has_audio"})
"""Keys that are taken from the merged files themselves."""


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
        "splits": {_SPLIT: f"0:{len(plan.episodes)}"},
    }
    if tools := [tool for source in sources for tool in source.raw_info.get("tools") or ()]:
        info["tools"] = [tool for at, tool in enumerate(tools) if tool not in tools[:at]]
    agreed, _ = _agreed([source.raw_info for source in sources])
    return info | {key: value for key, value in agreed.items() if key not in info and key not in _STALE_KEYS}


def differences(plan: MergePlan) -> list[str]:
    """Statements of some sources' info.json that the merged dataset's lacks, a line each."""
    sources, merged = plan.sources, merged_info(plan)
    lines: list[str] = []

    def list_disagreements(blocks: Sequence[Mapping[str, Any]], skipped: Collection[str], of: str = "") -> None:
        for key in _agreed(blocks)[1]:
            if key not in skipped:
                places = [(redact_url(source.url), block) for source, block in zip(sources, blocks, strict=True)]
                first, one = next((url, block[key]) for url, block in places if key in block)
                other, block = next(place for place in places if not _has(place[1], key, one))
                says = f"{block[key]!r:.200}" if key in block else "missing"
                lines.append(f"{key}{of} is {one!r:.200} in {first}, but {says} in {other}")

    raws = [source.raw_info for source in sources]
    list_disagreements(raws, {*merged, *_STALE_KEYS, "tools"})
    for source in sources:
        own = source.raw_info.get("splits") or {}
        if own.keys() - {_SPLIT}:
            lines.append(f"splits is {own!r:.200} in {redact_url(source.url)}")
    for key, feature in sources[0].metadata.features.items():
        blocks = [raw["features"][key] for raw in raws]
        list_disagreements(blocks, {"dtype", "shape", "names", "info", "video_info"}, f" of {key}")
        skipped = {*_MARKS, *(_OF_FILES if feature.is_camera else ())}
        list_disagreements(_infos(sources, feature), skipped, f" of {key}")
    return lines


def _feature(sources: Sequence[MergeSource], feature: Feature) -> dict[str, Any]:
    blocks = [source.raw_info["features"][feature.key] for source in sources]
    merged = {"dtype": feature.dtype, "shape": list(feature.shape), "names": feature.names}
    infos = _infos(sources, feature)
    if feature.is_camera:
        files = [one for source in sources for one in source.pictures[feature.key].values()]
        merged["info"] = _video_info(infos, files[0] if files else None, sources[0].metadata.info.fps, feature)
    elif any(infos) or all("info" in block for block in blocks):
        merged["info"] = _common_info(infos)
        if feature.is_depth or any(_MARKS[0] in own for own in infos):
            merged["info"][_MARKS[0]] = feature.is_depth
    agreed, _ = _agreed(blocks)
    return merged | {key: value for key, value in agreed.items() if key not in {*merged, "info", "video_info"}}


def _infos(sources: Sequence[MergeSource], feature: Feature) -> list[Mapping[str, Any]]:
    """Each source's info of the feature; of a camera without its sound, since only the pictures are merged."""
    infos = [source.metadata.features[feature.key].info for source in sources]
    if not feature.is_camera:
        return infos
    return [{key: value for key, value in own.items() if not key.startswith("audio.")} for own in infos]


def _video_info(
    infos: Sequence[Mapping[str, Any]], pictures: Pictures | None, fps: float, feature: Feature
) -> dict[str, Any]:
    """The info that all agree on, and that of the files themselves."""
    info = _common_info(infos)
    for key in _ENCODER_KEYS:
        if key not in info and any(key in other for other in infos):
            info[key] = {} if key == "video.extra_options" else None
    info |= {"video.fps": fps, "has_audio": False, _MARKS[0]: feature.is_depth}
    if pictures is not None:
        info |= {"video.height": pictures.height, "video.width": pictures.width, "video.codec": pictures.codec}
        if pictures.pixel_format:
            info["video.pix_fmt"] = pictures.pixel_format
    return info


def _common_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in _agreed(infos)[0].items() if key != _MARKS[1]}


def _agreed(blocks: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The entries that are equal in all blocks, and the keys of the others."""
    agreed = {key: value for key, value in blocks[0].items() if all(_has(block, key, value) for block in blocks)}
    return agreed, [key for key in dict.fromkeys(key for block in blocks for key in block) if key not in agreed]


def _has(block: Mapping[str, Any], key: str, value: object) -> bool:
    return key in block and block[key] == value

"""The files in ``meta``, when those of rows and videos are written. Blocks: for use in a thread."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.lerobot.layout import EPISODES_PATH
from asyncfetch.merge import statistics
from asyncfetch.merge.info import INFO_PATH, merged_info
from asyncfetch.merge.sources import has_pictures
from asyncfetch.merge.tables import write_episodes, write_tasks
from asyncfetch.merge.units import file_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from asyncfetch.merge.plan import MergePlan
    from asyncfetch.merge.units import EpisodeSummary, Summary

__all__ = ["write_metadata"]


@dataclass(frozen=True, slots=True)
class _Build:
    plan: MergePlan
    root: Path
    rows: Mapping[int, EpisodeSummary]
    """By episode; without those that have no frames."""
    numbers: Mapping[str, statistics.Distribution]


def write_metadata(plan: MergePlan, summary: Summary, root: Path) -> list[str]:
    """Write them into the dataset at ``root``.

    Args:
        plan: Of the merge.
        summary: Of all rows.
        root: Has the directory ``meta``, or gets it.

    Returns:
        Their paths in the dataset, info.json last.
    """
    filled = [planned.index for planned in plan.episodes if planned.episode.length]
    build = _Build(plan, root, dict(zip(filled, summary.episodes, strict=True)), summary.numbers)
    meta = root / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    write_tasks(meta / "tasks.parquet", plan.tasks)
    _write_episode_table(build)
    if overall := _overall_statistics(build):
        listed = {key: {name: value.tolist() for name, value in values.items()} for key, values in overall.items()}
        (meta / "stats.json").write_text(json.dumps(listed, indent=4))
    (root / INFO_PATH).write_text(json.dumps(merged_info(plan), indent=4, ensure_ascii=False))
    paths = [path.relative_to(root).as_posix() for path in sorted(meta.rglob("*")) if path.is_file()]
    return sorted(paths, key=lambda path: path == INFO_PATH)


def _overall_statistics(build: _Build) -> dict[str, dict[str, NDArray[Any]]]:
    overall: dict[str, dict[str, NDArray[Any]]] = {}
    sources = build.plan.sources
    for key, feature in sources[0].metadata.features.items():
        if has_pictures(feature):
            parts = [_picture_statistics(build, number, key) for number in range(len(sources))]
            weighed = [part for part in parts if part is not None]
            if weighed and len(weighed) == len(parts):
                overall[key] = statistics.combine(weighed)
        elif key in build.numbers:
            overall[key] = build.numbers[key].statistics()
    return overall


def _picture_statistics(build: _Build, number: int, key: str) -> Mapping[str, Any] | None:
    """A source's own, or those of its episodes; None where neither are there."""
    source = build.plan.sources[number]
    own = (source.metadata.stats or {}).get(key)
    if own is not None:
        return own  # type: ignore[no-any-return]  # JSON
    parts = [part for part in source.picture_statistics[key] if part is not None]
    return statistics.combine(parts) if parts else None


def _write_episode_table(build: _Build) -> None:
    columns = _episode_columns(build)
    per_file = _episodes_per_file(build, len(columns))
    count = len(build.plan.episodes)
    for number, first in enumerate(range(0, max(1, count), per_file)):
        path = build.root / file_path(build.plan, EPISODES_PATH.text, number)
        write_episodes(path, columns, first, min(count, first + per_file))


def _episodes_per_file(build: _Build, num_columns: int) -> int:
    """As many as fit with about five numbers a column, unpacked: more than most have."""
    return max(1, build.plan.limits.data_file_max_bytes // (40 * num_columns))


def _episode_columns(build: _Build) -> dict[str, list[Any]]:
    plan, per_chunk = build.plan, build.plan.limits.files_per_chunk
    fps = plan.sources[0].metadata.info.fps
    episodes = plan.episodes
    columns: dict[str, list[Any]] = {
        "episode_index": [planned.index for planned in episodes],
        "tasks": [_tasks(build, planned.index) for planned in episodes],
        "length": [planned.episode.length for planned in episodes],
        "data/chunk_index": [planned.data_file // per_chunk for planned in episodes],
        "data/file_index": [planned.data_file % per_chunk for planned in episodes],
        "dataset_from_index": [planned.from_index for planned in episodes],
        "dataset_to_index": [planned.from_index + planned.episode.length for planned in episodes],
    }
    for camera in plan.sources[0].metadata.cameras:
        places = [planned.videos[camera] for planned in episodes]
        columns[f"videos/{camera}/chunk_index"] = [place.file // per_chunk for place in places]
        columns[f"videos/{camera}/file_index"] = [place.file % per_chunk for place in places]
        columns[f"videos/{camera}/from_timestamp"] = [place.first / fps for place in places]
        columns[f"videos/{camera}/to_timestamp"] = [
            (place.first + planned.episode.length) / fps for place, planned in zip(places, episodes, strict=True)
        ]
    columns |= _statistics_columns(build)
    per_file = _episodes_per_file(build, len(columns) + 2)
    columns["meta/episodes/chunk_index"] = [planned.index // per_file // per_chunk for planned in episodes]
    columns["meta/episodes/file_index"] = [planned.index // per_file % per_chunk for planned in episodes]
    return columns


def _tasks(build: _Build, index: int) -> list[str]:
    return [build.plan.tasks[task] for task in build.rows[index].tasks] if index in build.rows else []


def _statistics_columns(build: _Build) -> dict[str, list[Any]]:
    plan = build.plan
    columns: dict[str, list[Any]] = {}
    for key, feature in plan.sources[0].metadata.features.items():
        taken: list[Mapping[str, Any] | None]
        if has_pictures(feature):
            taken = [plan.sources[one.source].picture_statistics[key][one.episode.index] for one in plan.episodes]
        elif feature.kind == "value":
            taken = [build.rows[one.index].statistics[key] if one.episode.length else None for one in plan.episodes]
        else:
            continue
        for name in statistics.STATISTICS:
            values = [None if one is None or name not in one else np.asarray(one[name]).tolist() for one in taken]
            if any(value is not None for value in values):
                columns[f"stats/{key}/{name}"] = values
    return columns

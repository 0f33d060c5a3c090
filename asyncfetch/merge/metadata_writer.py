"""The files in ``meta``, when those of rows and videos are written. Blocks: for use in a thread."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.lerobot.info import EPISODES_PATH
from asyncfetch.merge.info import INFO_PATH, merged_info
from asyncfetch.merge.plan import write_episodes, write_tasks
from asyncfetch.merge.sources import has_pictures
from asyncfetch.merge.summaries import STATISTICS, EpisodeColumn, combine
from asyncfetch.merge.tasks import file_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from asyncfetch.merge.plan import MergePlan
    from asyncfetch.merge.sources import MergeSource
    from asyncfetch.merge.summaries import Statistics, Summary

__all__ = ["write_metadata"]

_NEEDED = {"count", "mean", "std"}
"""Statistics of a part that are needed to put it together with others."""


@dataclass(frozen=True, slots=True)
class _MetadataBuild:
    plan: MergePlan
    root: Path
    summary: Summary
    """Summary of the episodes that have frames."""
    numbers: Mapping[str, Statistics]


def write_metadata(plan: MergePlan, summary: Summary, numbers: Mapping[str, Statistics], root: Path) -> list[str]:
    """Write them into the dataset at ``root``.

    Args:
        plan: Of the merge.
        summary: Of all rows.
        numbers: Statistics of numeric features over all rows.
        root: Has the directory ``meta``, or gets it.

    Returns:
        Their paths in the dataset, info.json last.
    """
    build = _MetadataBuild(plan, root, summary, numbers)
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


def _overall_statistics(build: _MetadataBuild) -> dict[str, Statistics]:
    overall: dict[str, Statistics] = {}
    sources = build.plan.sources
    for key, feature in sources[0].metadata.features.items():
        if has_pictures(feature):
            parts = [_picture_statistics(source, key) for source in sources]
            weighed = [part for own in parts for part in own]
            if all(parts) and (combined := combine(weighed)) is not None:
                overall[key] = combined
        elif key in build.numbers:
            overall[key] = build.numbers[key]
    return overall


def _picture_statistics(source: MergeSource, key: str) -> Sequence[Mapping[str, Any]]:
    """A source's own, or those of its episodes; empty where neither are there whole, or they are of no picture.

    Where both say the same, counts, means and deviations are those of its episodes: then the sums of a merge of merges
    are those of the merge of all, term by term.
    """
    columns = source.picture_statistics[key]
    parts: list[dict[str, Any]] = []
    if columns.keys() >= _NEEDED:
        is_known = np.all([columns[name].is_known for name in _NEEDED], axis=0)
        parts = [
            {name: column.values[episode] for name, column in columns.items() if column.is_known[episode]}
            for episode in np.flatnonzero(is_known)
        ]
    combined = combine(parts)
    own = (source.metadata.stats or {}).get(key)
    if own is None or not own.keys() >= _NEEDED:
        return parts if combined is not None else ()
    if not np.any(own["count"]):
        return ()
    if combined is None or not all(_is_same(own[name], combined[name]) for name in _NEEDED):
        return (own,)
    return [{**own, **{name: part[name] for name in _NEEDED}} for part in parts]


def _is_same(one: Any, other: NDArray[Any]) -> bool:  # noqa: ANN401 - as JSON has it
    """Return whether rounding alone tells them apart: a deviation that LeRobot takes of square sums is off by 1e-8."""
    return np.shape(one) == other.shape and np.allclose(one, other, rtol=1e-6, atol=1e-9)


def _write_episode_table(build: _MetadataBuild) -> None:
    columns = _episode_columns(build)
    per_file = _episodes_per_file(build, len(columns))
    count = len(build.plan.episodes)
    for number, first in enumerate(range(0, max(1, count), per_file)):
        path = build.root / file_path(build.plan, EPISODES_PATH.text, number)
        write_episodes(path, columns, first, min(count, first + per_file))


def _episodes_per_file(build: _MetadataBuild, num_columns: int) -> int:
    """Return as many as fit with about five numbers a column, unpacked: more than most have."""
    return max(1, build.plan.limits.data_file_max_bytes // (40 * num_columns))


def _episode_columns(build: _MetadataBuild) -> dict[str, list[Any] | EpisodeColumn]:
    plan, per_chunk = build.plan, build.plan.limits.files_per_chunk
    fps = plan.sources[0].metadata.info.fps
    episodes = plan.episodes
    columns: dict[str, list[Any] | EpisodeColumn] = {
        "episode_index": [planned.index for planned in episodes],
        "tasks": _tasks(build),
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


def _tasks(build: _MetadataBuild) -> list[list[str]]:
    found = iter(build.summary.tasks)
    return [
        [build.plan.tasks[task] for task in next(found)] if planned.episode.length else []
        for planned in build.plan.episodes
    ]


def _statistics_columns(build: _MetadataBuild) -> dict[str, EpisodeColumn]:
    plan = build.plan
    has_frames = np.array([planned.episode.length > 0 for planned in plan.episodes], np.bool_)
    columns: dict[str, EpisodeColumn] = {}
    for key, feature in plan.sources[0].metadata.features.items():
        for name in STATISTICS:
            column = None
            if has_pictures(feature):
                column = _picture_column(plan, key, name)
            elif key in build.numbers:
                parts = [part[key][name] for part in build.summary.episodes]
                values = np.zeros((len(has_frames), *parts[0].shape[1:]), parts[0].dtype)
                values[has_frames] = np.concatenate(parts)
                column = EpisodeColumn(values, has_frames)
            if column is not None:
                columns[f"stats/{key}/{name}"] = column
    return columns


def _picture_column(plan: MergePlan, key: str, name: str) -> EpisodeColumn | None:
    """A statistic that the sources have for their episodes; None where none has."""
    columns = [source.picture_statistics[key].get(name) for source in plan.sources]
    like = next((column.values for column in columns if column is not None), None)
    if like is None:
        return None
    parts = []
    for source, column in zip(plan.sources, columns, strict=True):
        if column is None:
            count = len(source.episodes)
            parts.append(EpisodeColumn(np.zeros((count, *like.shape[1:]), like.dtype), np.zeros(count, np.bool_)))
        else:
            positions = source.metadata.episodes.positions([episode.index for episode in source.episodes])
            parts.append(column.take(positions))
    return EpisodeColumn(
        np.concatenate([part.values for part in parts]), np.concatenate([part.is_known for part in parts])
    )

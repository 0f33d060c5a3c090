"""A dataset as LeRobot v2.1 wrote it: a file of rows, and of each camera, for every episode."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path

    from asyncfetch.testing import DatasetTruth

EPISODE_FILE = {"episodes_per_data_file": 1, "episodes_per_video_file": 1}
"""What ``write_dataset`` must be told for a dataset that can be rewritten."""
CHUNKS_SIZE = 2


def as_version2(truth: DatasetTruth, root: Path, *, stats: bool = True) -> Path:
    """The same dataset at ``root``; ``stats`` as v2.1 has them, by episode, or as v2.0, of all."""
    source = truth.root
    for episode, length in enumerate(truth.lengths):
        if length:
            name, chunk = f"episode_{episode:06d}", f"chunk-{episode // CHUNKS_SIZE:03d}"
            _copy(source / f"data/chunk-000/file-{episode:03d}.parquet", root / f"data/{chunk}/{name}.parquet")
            for camera in truth.cameras:
                video = source / f"videos/{camera}/chunk-000/file-{episode:03d}.mp4"
                _copy(video, root / f"videos/{chunk}/{camera}/{name}.mp4")
    rows = pq.read_table(source / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    tasks = [{"task_index": index, "task": task} for index, task in enumerate(truth.tasks)]
    _write_lines(root, "tasks", tasks[::-1])  # numbers say which is which, not lines
    _write_lines(root, "episodes", [{key: row[key] for key in ("episode_index", "tasks", "length")} for row in rows])
    if stats:
        _write_lines(root, "episodes_stats", [_stats(row) for row in rows if row["length"]])
    else:
        _copy(source / "meta/stats.json", root / "meta/stats.json")
    info = json.loads((source / "meta/info.json").read_text())
    for key in ("data_files_size_in_mb", "video_files_size_in_mb"):
        del info[key]
    info |= {
        "codebase_version": "v2.1" if stats else "v2.0",
        "chunks_size": CHUNKS_SIZE,
        "total_videos": truth.num_episodes * len(truth.cameras),
        "total_chunks": -(-truth.num_episodes // CHUNKS_SIZE),
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def _stats(row: dict[str, Any]) -> dict[str, Any]:
    stats: dict[str, dict[str, Any]] = {}
    for column, value in row.items():
        if column.startswith("stats/"):
            _, feature, name = column.split("/")
            stats.setdefault(feature, {})[name] = value
    return {"episode_index": row["episode_index"], "stats": stats}


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_lines(root: Path, name: str, lines: list[dict[str, Any]]) -> None:
    (root / "meta").mkdir(parents=True, exist_ok=True)
    (root / f"meta/{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

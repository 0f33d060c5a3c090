"""LeRobot's metadata of a dataset of any version, and the place of its frames."""

from __future__ import annotations

import atexit
import importlib
import json
import re
import tempfile
from codecs import BOM_UTF8
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from anyio.from_thread import start_blocking_portal

from asyncfetch.errors import ConfigError, MissingDependency, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.reader import fetch_if_there
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.info import EPISODES_PATH, INFO_PATH, STATS_PATH, TASKS_PATH, is_v2, parse_json
from asyncfetch.lerobot.listing import list_tables
from asyncfetch.lerobot.metadata import load_metadata as read_metadata
from asyncfetch.lerobot.version2 import load_version2
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from asyncfetch.config import FetchConfig
    from asyncfetch.lerobot.version2 import Version2

INSTALL_LEROBOT = 'pip install "lerobot[training]==0.6.1"'
"""Needs Python 3.12. Its commands change with each release: see ``commands``."""


def import_lerobots(module: str) -> Any:  # noqa: ANN401 - LeRobot is optional
    """A module of LeRobot, or of one of its dependencies; MissingDependency where it isn't installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(f"asyncfetch.compat.lerobot needs LeRobot ({error}): {INSTALL_LEROBOT}") from error


def load_metadata(
    repo_id: str,
    root: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """LeRobot's metadata of a dataset; for a URL or a dataset of v2, from a copy for this process."""
    return find(repo_id, root, revision, **options).meta


@dataclass(frozen=True, slots=True)
class FoundDataset:
    """LeRobot's metadata of a dataset, and the place of its frames."""

    meta: Any
    source: str
    """The root of its frames: the given one, LeRobot's own folder of the dataset, or the Hub."""
    episodes: list[int] | None = None
    """The numbers of all episodes; None if none is missing."""


def find(
    repo_id: str,
    root: str | os.PathLike[str] | None,
    revision: str | None,
    *,
    repo_type: str = "dataset",
    episodes: Sequence[int] | None = None,
    config: FetchConfig | None = None,
    **options: Any,  # noqa: ANN401
) -> FoundDataset:
    """Find a dataset. ConfigError where the arguments contradict each other."""
    root = _root(repo_id, root, revision, repo_type)
    if root is None or not ("://" in root or _needs_copy(Path(root))):
        try:
            meta = _metadata_of(repo_id, root=root, revision=revision, **options)
        except (import_lerobots("lerobot.datasets.utils").BackwardCompatibilityError, NotImplementedError) as error:
            return _find_version2(repo_id, revision, error, episodes=episodes, config=config, **options)
        if root is not None and (Path(root) / "data").is_dir():
            return FoundDataset(meta, root)
        # LeRobot's own folder, into which it may have downloaded only some episodes.
        is_complete = _has_files(meta, Path(meta.root), episodes)
        return FoundDataset(meta, str(meta.root) if is_complete else _hub_url(meta.repo_id, meta.revision))
    return _copied(repo_id, root, revision, config=config, **options)


def _find_version2(
    repo_id: str,
    revision: str | None,
    error: Exception,
    *,
    episodes: Sequence[int] | None,
    config: FetchConfig | None,
    **options: Any,  # noqa: ANN401
) -> FoundDataset:
    """Find a dataset of v2, which LeRobot refuses with ``error``: in its local folder if complete, or on the Hub."""
    home = import_lerobots("lerobot.utils.constants").HF_LEROBOT_HOME / repo_id
    if revision is None and _is_v2(home):
        found = _copied(repo_id, str(home), None, config=config, **options)
        if _has_files(found.meta, home, found.episodes if episodes is None else episodes):
            return found
    if revision is None:
        versions = import_lerobots("lerobot.datasets.utils").get_repo_versions(repo_id, token=options.get("token"))
        of_v2 = [version for version in versions if version.major == 2]
        if not of_v2:
            raise error
        revision = f"v{max(of_v2)}"
    return _copied(repo_id, _hub_url(repo_id, revision), revision, config=config, **options)


def _copied(
    repo_id: str,
    source: str,
    revision: str | None,
    *,
    config: FetchConfig | None,
    force_cache_sync: bool = False,
    **options: Any,  # noqa: ANN401
) -> FoundDataset:
    """Find a dataset by a new copy of its metadata, which is deleted when this process exits."""
    directory = tempfile.TemporaryDirectory(prefix="asyncfetch-meta-")
    atexit.register(directory.cleanup)
    with start_blocking_portal() as portal:
        episodes = portal.call(_copy_metadata, source, Path(directory.name), config)
    return FoundDataset(_metadata_of(repo_id, root=directory.name, revision=revision, **options), source, episodes)


def _metadata_of(repo_id: str, **options: Any) -> Any:  # noqa: ANN401
    return import_lerobots("lerobot.datasets.dataset_metadata").LeRobotDatasetMetadata(repo_id, **options)


def _needs_copy(root: Path) -> bool:
    """Return whether only we can read its info.json."""
    file = root / INFO_PATH
    return file.exists() and (_is_v2(root) or file.read_bytes().startswith(BOM_UTF8))


def _is_v2(root: Path) -> bool:
    file = root / INFO_PATH
    return file.exists() and is_v2(parse_json(file.read_bytes(), str(file)))


async def _copy_metadata(url: str, directory: Path, config: FetchConfig | None) -> list[int] | None:
    """Copy the metadata; returns the numbers of all episodes, None if none is missing."""
    async with Fetcher(config) as fetcher:
        data, info_url = await fetcher.fetch(join_url(url, INFO_PATH)), join_url(url, INFO_PATH)
        raw = parse_json(data, info_url)
        if is_v2(raw):
            dataset = await load_version2(fetcher, url, run=run_sync)
            await run_sync(_write_as_v3, dataset, directory)
            numbers = list(dataset.metadata.episodes.indices)
            return None if numbers == list(range(len(numbers))) else numbers
        metadata = await read_metadata(fetcher, url, list_tables=partial(list_tables, fetcher), run=run_sync)
        totals = {f"total_{what}": found for what, (_, found) in metadata.wrong_totals().items()}
        await run_sync(_write, directory / INFO_PATH, json.dumps({**raw, **totals}).encode())
        await run_sync(_write, directory / TASKS_PATH, await fetcher.fetch(join_url(url, TASKS_PATH)))
        if (stats := await fetch_if_there(fetcher, join_url(url, STATS_PATH))) is not None:
            await run_sync(_write, directory / STATS_PATH, bytes(stats).removeprefix(BOM_UTF8))
        for number, table_url in enumerate(metadata.episodes.urls):
            path = directory / EPISODES_PATH.format(chunk_index=0, file_index=number)
            await run_sync(_write, path, await fetcher.fetch(table_url))
    return None


def _write_as_v3(dataset: Version2, directory: Path) -> None:
    """Write the metadata that LeRobot's trainer reads. The frames stay where they are.

    LeRobot takes an episode's number for its row, so a missing episode has a row, without frames.
    """
    pandas, io = import_lerobots("pandas"), import_lerobots("lerobot.datasets.io_utils")
    metadata, table = dataset.metadata, dataset.metadata.episodes
    numbers = np.asarray(table.indices, np.int64)
    rows = int(numbers[-1]) + 1 if len(numbers) else 0
    info = {key: value for key, value in dataset.raw_info.items() if key not in {"total_chunks", "total_videos"}}
    _write(directory / INFO_PATH, json.dumps({**info, "total_episodes": rows}).encode())
    tasks = dict(sorted(metadata.tasks.items()))
    pandas.DataFrame({"task_index": list(tasks)}, index=list(tasks.values())).to_parquet(directory / TASKS_PATH)
    file = directory / EPISODES_PATH.format(chunk_index=0, file_index=0)
    file.parent.mkdir(parents=True)
    lengths = np.zeros(rows, np.int64)
    lengths[numbers] = table.lengths
    stops = np.cumsum(lengths)
    of_episodes = {episode.index: list(episode.tasks) for episode in table}
    columns = {
        "episode_index": np.arange(rows),
        "length": lengths,
        "tasks": [of_episodes.get(number, []) for number in range(rows)],
        "dataset_from_index": stops - lengths,
        "dataset_to_index": stops,
    }
    for name in ("data", *(f"videos/{camera}" for camera in metadata.cameras)):
        columns[f"{name}/chunk_index"] = np.arange(rows) // metadata.info.chunks_size
        columns[f"{name}/file_index"] = np.arange(rows)
    pandas.DataFrame(columns).to_parquet(file, index=False)
    if metadata.stats is not None:
        _write(directory / STATS_PATH, json.dumps(metadata.stats).encode())
    elif dataset.episode_stats:
        known = [io.cast_stats_to_numpy(dict(own)) for number, own in dataset.episode_stats.items() if number in table]
        io.write_stats(import_lerobots("lerobot.datasets.compute_stats").aggregate_stats(known), directory)


def _write(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


_URL_AS_PATH = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")
"""A URL that went through a Path, like the root in some of LeRobot's commands."""


def _root(repo_id: str, root: str | os.PathLike[str] | None, revision: str | None, repo_type: str) -> str | None:
    """The path or URL of a dataset; None for a repository of the Hub."""
    if repo_type not in {"dataset", "bucket"}:
        raise ConfigError(f"repo_type must be 'dataset' or 'bucket', not {repo_type!r:.80}")
    if repo_type == "bucket" and root is not None:
        raise ConfigError(f"root={str(root)!r} isn't read where repo_type='bucket': leave out one of the two")
    if repo_type == "dataset" and root is None:
        return None
    where = f"hf://buckets/{repo_id}" if root is None else str(root)
    if isinstance(root, PurePath):
        where = _URL_AS_PATH.sub(r"\1://", where, count=1)
    if revision is not None and "://" in where:
        raise ConfigError(
            f"revision={revision!r} isn't read where the dataset is at {redact_url(where)}: leave it out, or write it "
            "in the URL, as hf://datasets/org/name@revision"
        )
    return where


def _hub_url(repo_id: str, revision: str) -> str:
    return f"hf://datasets/{repo_id}@{quote(revision, safe='')}"


def _has_files(meta: Any, folder: Path, episodes: Sequence[int] | None) -> bool:  # noqa: ANN401
    if meta.episodes is None:  # there are none
        return True
    table = meta.episodes
    if episodes is not None:
        table = table.select([episode for episode in episodes if 0 <= episode < len(table)])
    videos = ((f"videos/{key}", meta.video_path, {"video_key": key}) for key in meta.video_keys)
    return all(
        (folder / template.format(chunk_index=chunk, file_index=file, **fields)).exists()
        for name, template, fields in (("data", meta.data_path, {}), *videos)
        for chunk, file in set(zip(table[f"{name}/chunk_index"], table[f"{name}/file_index"], strict=True))
    )

"""A dataset's metadata: info.json, tasks, statistics and the episode table, loaded and checked together."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncfetch.errors import COPY_ANEW, WRITE_ANEW, AccessDenied, ConfigError, FormatError, NotFound, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.columns import to_integers, to_objects
from asyncfetch.lerobot.episode_files import episodes_url, load_episodes
from asyncfetch.lerobot.info import DEFAULT_FEATURES, is_v2, parse_info, parse_json
from asyncfetch.lerobot.parquet import fetch_end, open_table, read_columns
from asyncfetch.runtime.concurrently import Eventual, copied, kept, ungrouped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    import pyarrow as pa

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.episode_table import EpisodeTable
    from asyncfetch.lerobot.info import DatasetInfo, Feature
    from asyncfetch.runtime.concurrently import RunSync

__all__ = ["Metadata", "choose_features", "fingerprint_of", "load_metadata"]

_INFO, _TASKS, _STATS = "meta/info.json", "meta/tasks.parquet", "meta/stats.json"
_TASK_COLUMNS = ("task", "__index_level_0__")
"""Columns that may have the task's string; the second one in sets that LeRobot 0.4 converted."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """All that a dataset says of itself, checked for contradictions."""

    url: str
    """Root of the dataset, as the caller wrote it."""
    info: DatasetInfo
    features: Mapping[str, Feature]
    """The chosen features and the default ones, in the order of info.json."""
    cameras: tuple[str, ...]
    """The chosen features whose frames are in MP4 files, in the order of info.json. Kind "depth" marks depth maps."""
    tasks: Mapping[int, str]
    """Task strings by task_index."""
    statistics: Mapping[str, Any] | FormatError | None
    """The statistics that ``stats`` gives, or the error that it raises."""
    episodes: EpisodeTable
    fingerprint: str
    """Hash of what defines the samples: chosen features, fps, tasks, lengths and places, but not the url."""
    has_files_of_episodes: bool = False
    """True if each file of rows is one episode's, which then says where its ``index`` begins: of v2."""

    @property
    def stats(self) -> Mapping[str, Any] | None:
        """Statistics as in stats.json; None where there is none. Its image counts are of sampled frames or pixels.

        Raises:
            FormatError: It is damaged.
        """
        if isinstance(self.statistics, FormatError):
            raise copied(self.statistics)
        return self.statistics


async def load_metadata(
    reader: RangeReader,
    url: str,
    *,
    features: Collection[str] | None = None,
    run: RunSync = anyio.to_thread.run_sync,
    version2: Callable[[], Awaitable[Metadata]] | None = None,
) -> Metadata:
    """Load and check a LeRobot dataset's metadata. Its files are fetched side by side, episodes by column.

    Args:
        reader: Fetches the files.
        url: The directory that holds ``meta/``.
        features: Keys of the features that will be used; None means all. The default features are always among them.
        run: Runs the blocking parts.
        version2: Loads it where it turns out to be of v2; None: that is refused.

    A damaged stats.json is no matter before somebody asks for ``stats``.

    Raises:
        ConfigError: ``features`` has a key that the dataset hasn't.
        NotFound: There is no info.json, or no tasks.parquet.
        FetchError: A file could not be fetched.
        FormatError: A file is missing or damaged, or two numbers contradict each other.
        DatasetError: It is another version's, or lacks a default feature.
        MissingDependency: pyarrow isn't installed.
    """
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            info_file = Eventual(tasks, partial(reader.fetch, join_url(url, _INFO)))
            task_strings = Eventual(tasks, partial(_load_tasks, reader, join_url(url, _TASKS), run))
            stats = Eventual(tasks, partial(_load_stats, reader, join_url(url, _STATS), run))
            first = Eventual(tasks, partial(fetch_end, reader, episodes_url(url, 0, 1)))
            # info.json first, since it explains what else is wrong: a v2 dataset, say, has no tasks.parquet.
            data = await _root_file(info_file, url)
            info = await run(partial(_parse_unless_v2, data, join_url(url, _INFO), refuses=version2 is None))
            if info is None:
                tasks.cancel_scope.cancel()
            else:
                chosen = choose_features(info, features, url)
                cameras = tuple(key for key, feature in chosen.items() if feature.is_camera)
                episodes = await load_episodes(reader, url, info, cameras, first_end=first.get, run=run)
                names, numbers = await task_strings.get(), await stats.get()
    if info is None:
        assert version2 is not None
        return await version2()
    fingerprint = await run(partial(fingerprint_of, info, chosen, names, episodes))
    return Metadata(url, info, chosen, cameras, names, numbers, episodes, fingerprint)


def _parse_unless_v2(data: memoryview, url: str, *, refuses: bool) -> DatasetInfo | None:
    return parse_info(data, url) if refuses or not is_v2(parse_json(data, url)) else None


async def _root_file(info_file: Eventual[memoryview], url: str) -> memoryview:
    try:
        return await info_file.get()
    except NotFound as error:
        message = f"{redact_url(url)} has no {_INFO}: is it the root of a LeRobot dataset? {_hint(url, error)}".rstrip()
        raise NotFound(
            message, url=error.url, host=error.host, status=error.status, attempts=error.attempts
        ) from None  # which says all that the other did


def _hint(url: str, error: NotFound) -> str:
    """Return what was meant, most likely; empty where nobody knows."""
    if url.startswith("hf://"):
        return str(error).partition(" [")[0]
    if url.endswith(f"/{_INFO}"):
        return f"Its root would be {redact_url(url.removesuffix(_INFO))}"
    if "://" in url or url.startswith(("/", ".")):
        return ""
    return f"That is a path; a dataset of the Hub is hf://datasets/{url}, one of a web server https://{url}"


async def _load_tasks(reader: RangeReader, url: str, run: RunSync) -> dict[int, str]:
    file = await open_table(reader, url, run=run)
    task = next((name for name in _TASK_COLUMNS if name in file.columns), _TASK_COLUMNS[0])
    columns = ("task_index", task)
    table = await read_columns(reader, file, range(file.metadata.num_row_groups), columns, run=run)
    return await run(partial(_parse_tasks, table, task, url))


def _parse_tasks(table: pa.Table, task: str, url: str) -> dict[int, str]:
    indices = to_integers(table["task_index"], "task_index", url).tolist()
    words = to_objects(table[task], f"column {task} of {redact_url(url)}", remedy=COPY_ANEW)
    for row, word in enumerate(words):
        if not isinstance(word, str):
            message = f"column {task} of {redact_url(url)} must hold the text of each task; row {row} is {word!r:.80}"
            raise FormatError(message, remedy=WRITE_ANEW)
    # By the number in the row: LeRobot itself goes by the row's position, and rows may be permuted.
    tasks = dict(zip(indices, words, strict=True))
    if len(tasks) != len(indices):
        number, count = Counter(indices).most_common(1)[0]
        message = f"{redact_url(url)} has {count} tasks of task_index {number}; each needs a number of its own"
        raise FormatError(message, remedy=WRITE_ANEW)
    return dict(sorted(tasks.items()))


async def _load_stats(reader: RangeReader, url: str, run: RunSync) -> dict[str, Any] | FormatError | None:
    try:
        data = await reader.fetch(url)
    except (AccessDenied, NotFound):
        return None  # S3 denies access to what isn't there to those who may not list.
    try:
        return await run(partial(parse_json, data, url))
    except FormatError as error:
        return kept(error)


def choose_features(info: DatasetInfo, features: Collection[str] | None, url: str) -> dict[str, Feature]:
    """Return those with these keys and the default ones, in the dataset's order; ConfigError where one is missing."""
    if features is None:
        return dict(info.features)
    unknown = [key for key in features if key not in info.features]
    if unknown or isinstance(features, str):
        message = (
            f"{redact_url(url)} has no feature {', '.join(map(repr, unknown))}" if unknown else "features is a str"
        )
        raise ConfigError(f"{message}; features= takes a collection of {', '.join(info.features)}")
    return {key: feature for key, feature in info.features.items() if key in features or key in DEFAULT_FEATURES}


def fingerprint_of(
    info: DatasetInfo, features: Mapping[str, Feature], tasks: Mapping[int, str], episodes: EpisodeTable
) -> str:
    """Hash of what defines the samples."""
    described = {
        "fps": float(info.fps),
        "features": {key: [feature.dtype, feature.shape] for key, feature in sorted(features.items())},
        "tasks": sorted(tasks.items()),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode() + episodes.digest()).hexdigest()

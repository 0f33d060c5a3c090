"""A dataset's metadata: info.json, tasks, statistics and the episode table, loaded and checked together."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio
import numpy as np

from asyncfetch.errors import COPY_ANEW, WRITE_ANEW, AsyncFetchError, FormatError, NotFound, redact_url
from asyncfetch.fetch.reader import fetch_if_there
from asyncfetch.fetch.transports.file import is_local, read_small_files
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.episode_files import episodes_url, load_episodes, read_episodes, wrong_totals
from asyncfetch.lerobot.info import INFO_PATH, STATS_PATH, TASKS_PATH, choose_features, is_v2, parse_info, parse_json
from asyncfetch.runtime.concurrently import ungrouped
from asyncfetch.runtime.single_flight import SharedCall
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.columns import to_integers, to_objects
from asyncfetch.tables.parquet import WHOLE_BYTES, fetch_end, open_end, read_columns, read_whole, whole_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

    import pyarrow as pa

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.episode_table import EpisodeTable
    from asyncfetch.lerobot.info import DatasetInfo, Feature
    from asyncfetch.lerobot.listing import ListTables
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.concurrently import RunSync
    from asyncfetch.tables.parquet import TableEnd

_TASK_COLUMNS = ("task", "__index_level_0__")
"""Columns that may have the task's string; the second one in sets that LeRobot 0.4 converted."""


class StoredStatistics:
    """stats.json as it is stored, parsed when it is asked for: of most members of a mixture it never is."""

    def __init__(self, data: memoryview, url: str) -> None:
        self._data, self._url = bytes(data), url
        self._parsed: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        """The statistics; FormatError if the file is damaged."""
        if self._parsed is None:
            self._parsed, self._data = parse_json(self._data, self._url), b""
        return self._parsed


class Oddities:
    """Wrong statements of one dataset's metadata that change no sample, as they are met. Thread-safe."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def note(self, kind: str, text: str) -> None:
        """Warn of it, unless the dataset has shown this kind before."""
        if self._said.setdefault(kind, text) is text:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The kinds and the first of each, in the order in which they were met."""
        return iter(list(self._said.items()))


@dataclass(frozen=True, slots=True)
class Metadata:
    """All that a dataset says of itself, checked for contradictions."""

    url: str
    """Root of the dataset, as the caller wrote it."""
    info: DatasetInfo
    features: dict[str, Feature]
    """The chosen features and the default ones, in the order of info.json; of pictures as they were found to be."""
    cameras: tuple[str, ...]
    """The chosen features with frames in MP4 files, in the order of info.json. Kind "depth" marks depth maps."""
    tasks: Mapping[int, str]
    """Task strings by task_index."""
    statistics: StoredStatistics | Mapping[str, Any] | None
    """The statistics that ``stats`` gives; read by then, or still as stored."""
    episodes: EpisodeTable
    fingerprint: str
    """Hash of what defines the samples: chosen features, fps, tasks, lengths and places, but not the url."""
    has_files_of_episodes: bool = False
    """True if each file of rows is one episode's, which then says where its ``index`` begins: of v2."""
    oddities: Oddities = field(default_factory=Oddities, compare=False, repr=False)
    """Oddities found so far."""

    @property
    def sample_features(self) -> Mapping[str, Feature]:
        """The features that samples have, in the dataset's order: all but audio."""
        return {key: feature for key, feature in self.features.items() if feature.kind != "audio"}

    @property
    def stats(self) -> Mapping[str, Any] | None:
        """Statistics as in stats.json; None where there is none, FormatError where it is damaged.

        Image counts are of sampled frames or pixels.
        """
        return self.statistics.read() if isinstance(self.statistics, StoredStatistics) else self.statistics

    def checked(self) -> Self:
        """Return this; warns where the totals of info.json aren't those of the tables, which count."""
        if wrong := self.wrong_totals():
            counts = [f"{said} {what} where there are {found}" for what, (said, found) in wrong.items()]
            self.oddities.note(
                "totals",
                f"info.json of {redact_url(self.url)} counts {' and '.join(counts)} in the tables. Those count: write "
                "their numbers there, or copy the files of the tables anew if one of them is missing",
            )
        return self

    def wrong_totals(self) -> dict[str, tuple[int, int]]:
        """The counts of info.json, "episodes", "frames" or "tasks", that aren't the tables': its number and theirs."""
        table = self.episodes
        wrong = wrong_totals(self.info, np.asarray(table.indices), table.lengths, table.starts + table.lengths)
        said = self.info.total_tasks
        if said is not None and said not in {len(self.tasks), max(self.tasks, default=-1) + 1}:
            wrong["tasks"] = said, len(self.tasks)
        return wrong

    def found_picture(self, key: str, sizes: Sequence[int], url: str) -> None:
        """Take pictures of a feature to be of the sizes of one that was found: (height, width), or with channels first.

        Where info.json says others, its reader is warned.
        """
        feature = self.features[key]
        if feature.has_sizes(*sizes):
            return
        *channels, height, width = sizes
        self.oddities.note(
            "picture size",
            f"{redact_url(url)}: the pictures of {key} are {height} high and {width} wide"
            f"{f', of {channels[0]} channels' if channels else ''}; info.json says {feature.shape}. They are read as "
            "they are; write their shape there",
        )
        self.features[key] = feature.resized(channels[0] if channels else feature.channels, height, width)


async def load_metadata(
    reader: RangeReader,
    url: str,
    *,
    features: Collection[str] | None = None,
    run: RunSync = run_sync,
    read_files: RunSync | None = None,
    list_tables: ListTables | None = None,
    version2: Callable[[], Awaitable[Metadata]] | None = None,
) -> Metadata:
    """Load and check a LeRobot dataset's metadata. Its files are fetched side by side, episodes by column.

    A damaged stats.json is no matter until ``stats`` is asked for.

    Args:
        reader: Fetches the files.
        url: The directory that holds ``meta/``.
        features: Keys of the features that will be used; None means all. The default features are always among them.
        run: Runs the blocking parts.
        read_files: Reads a local dataset's files at once, in a thread, where they are small. None: by ``reader``.
        list_tables: Lists the files of a directory, where their names don't hold. None: they can't be listed.
        version2: Loads it where it turns out to be of v2; None: that is refused.

    Raises:
        ConfigError: ``features`` has a key that the dataset hasn't.
        NotFound: There is no info.json, or no tasks.parquet.
        FetchError: A file could not be fetched.
        FormatError: A file is missing or damaged, or two numbers contradict each other.
        DatasetError: It is another version's, or lacks a default feature.
    """
    if read_files is not None and is_local(url):
        urls = [*(join_url(url, name) for name in (INFO_PATH, TASKS_PATH, STATS_PATH)), episodes_url(url, 0, 1)]
        files = await read_files(partial(read_small_files, urls, WHOLE_BYTES))
        small = None if files is None else await run(partial(_parse_all, url, features, files))
        if small is not None:
            return small.checked()
    metadata: Metadata | None = None
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            info_file = SharedCall(partial(reader.fetch, join_url(url, INFO_PATH))).begun_in(tasks)
            first_tasks = SharedCall(partial(fetch_end, reader, join_url(url, TASKS_PATH))).begun_in(tasks)
            stats = SharedCall(partial(fetch_if_there, reader, join_url(url, STATS_PATH))).begun_in(tasks)
            first = SharedCall(partial(fetch_end, reader, episodes_url(url, 0, 1))).begun_in(tasks)
            # info.json first, since it explains what else is wrong: a v2 dataset, say, has no tasks.parquet.
            data = await _root_file(info_file, url)
            info = await run(partial(_parse_unless_v2, data, join_url(url, INFO_PATH), refuses=version2 is None))
            if info is None:
                tasks.cancel_scope.cancel()
            else:
                chosen = choose_features(info, features, url)
                end = await _arrived(first)
                tasks_end = await _arrived(first_tasks) if end is not None and end.is_whole else None
                if end is not None and tasks_end is not None and tasks_end.is_whole:
                    metadata = await run(partial(_parse_small, url, info, chosen, end, tasks_end))
                if metadata is None:
                    names = SharedCall(partial(_load_tasks, reader, first_tasks.get, run)).begun_in(tasks)
                    episodes = await load_episodes(
                        reader, url, info, cameras_of(chosen), first_end=first.get, list_tables=list_tables, run=run
                    )
                    metadata = await run(partial(put_together, url, info, chosen, await names.get(), episodes))
                if (stored := await stats.get()) is not None:
                    metadata = replace(metadata, statistics=StoredStatistics(stored, join_url(url, STATS_PATH)))
    if metadata is None:
        assert version2 is not None
        return await version2()
    return metadata.checked()


def cameras_of(features: Mapping[str, Feature]) -> tuple[str, ...]:
    """Return the keys of those with frames in MP4 files."""
    return tuple(key for key, feature in features.items() if feature.is_camera)


def put_together(
    url: str,
    info: DatasetInfo,
    features: dict[str, Feature],
    tasks: Mapping[int, str],
    episodes: EpisodeTable,
    statistics: StoredStatistics | Mapping[str, Any] | None = None,
    *,
    has_files_of_episodes: bool = False,
) -> Metadata:
    """Return the metadata of these parts."""
    described = {
        "fps": float(info.fps),
        "features": {key: [feature.dtype, feature.shape] for key, feature in sorted(features.items())},
        "tasks": sorted(tasks.items()),
    }
    fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode() + episodes.digest()).hexdigest()
    cameras = cameras_of(features)
    return Metadata(url, info, features, cameras, tasks, statistics, episodes, fingerprint, has_files_of_episodes)


def _parse_small(
    url: str, info: DatasetInfo, features: dict[str, Feature], first: TableEnd, tasks: TableEnd
) -> Metadata | None:
    """The metadata by files that are whole, in one call in a thread; None if there are more files.

    Going to a thread takes longer than parsing the files of a dataset of a few episodes.
    """
    episodes = read_episodes(url, info, cameras_of(features), first)
    if episodes is None:
        return None
    return put_together(url, info, features, _parse_tasks(read_whole(tasks, _task_columns), tasks.url), episodes)


def _parse_all(
    url: str, features: Collection[str] | None, files: Sequence[tuple[ObjectInfo, memoryview]]
) -> Metadata | None:
    """Return the metadata in these files; None if there are more, or something is wrong, which the long way finds."""
    (info_file, data), tasks, (stats_file, stats), first = files
    try:
        info = _parse_unless_v2(data, info_file.url, refuses=False)
        if info is None:
            return None
        metadata = _parse_small(url, info, choose_features(info, features, url), whole_end(*first), whole_end(*tasks))
    except AsyncFetchError:
        return None
    return None if metadata is None else replace(metadata, statistics=StoredStatistics(stats, stats_file.url))


def _parse_unless_v2(data: memoryview, url: str, *, refuses: bool) -> DatasetInfo | None:
    return parse_info(data, url) if refuses or not is_v2(parse_json(data, url)) else None


async def _arrived(file: SharedCall[TableEnd]) -> TableEnd | None:
    """The file's end, as soon as it is there; None where it can't be had."""
    outcome = await file.outcome()
    return None if isinstance(outcome, Exception) else outcome


async def _root_file(info_file: SharedCall[memoryview], url: str) -> memoryview:
    try:
        return await info_file.get()
    except NotFound as error:
        message = (
            f"{redact_url(url)} has no {INFO_PATH}: is it the root of a LeRobot dataset? {_hint(url, error)}".rstrip()
        )
        raise NotFound(
            message, url=error.url, host=error.host, status=error.status, attempts=error.attempts
        ) from None  # which says all that the other did


def _hint(url: str, error: NotFound) -> str:
    """Return what was most likely meant; empty where that isn't clear."""
    if url.startswith("hf://"):
        return str(error).partition(" [")[0]
    if url.endswith(f"/{INFO_PATH}"):
        return f"Its root would be {redact_url(url.removesuffix(INFO_PATH))}"
    if "://" in url or url.startswith(("/", ".")):
        return ""
    return f"That is a path; a dataset of the Hub is hf://datasets/{url}, one of a web server https://{url}"


def _task_columns(there: Collection[str]) -> tuple[str, str]:
    return "task_index", next((name for name in _TASK_COLUMNS if name in there), _TASK_COLUMNS[0])


async def _load_tasks(reader: RangeReader, end: Callable[[], Awaitable[TableEnd]], run: RunSync) -> dict[int, str]:
    file = await open_end(reader, await end(), run=run)
    columns = _task_columns(file.columns)
    table = await read_columns(reader, file, range(file.metadata.num_row_groups), columns, run=run)
    return await run(partial(_parse_tasks, table, file.url))


def _parse_tasks(table: pa.Table, url: str) -> dict[int, str]:
    _, task = _task_columns(table.column_names)
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

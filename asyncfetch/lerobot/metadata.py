"""A dataset's metadata: info.json, tasks, statistics and the episode table, loaded and checked together."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from asyncfetch.errors import COPY_ANEW, WRITE_ANEW, AccessDenied, DatasetError, FormatError, NotFound, redact_url
from asyncfetch.fetch.reader import fetch_if_there
from asyncfetch.fetch.transports.file import is_local, read_small_files
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.episode_files import episodes_url, load_episodes, read_episodes, wrong_totals
from asyncfetch.lerobot.info import INFO_PATH, STATS_PATH, TASKS_PATH, choose_features, is_v2, parse_info, parse_json
from asyncfetch.runtime.concurrently import gather
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
    urls = [*(join_url(url, name) for name in (INFO_PATH, TASKS_PATH, STATS_PATH)), episodes_url(url, 0, 1)]
    files = await read_files(partial(read_small_files, urls, WHOLE_BYTES)) if read_files and is_local(url) else None
    found: list[Any]
    if files is not None:
        (_, data), tasks, (_, stats), first = files
        found = [data, whole_end(*tasks), stats, whole_end(*first)]
    else:
        found = await gather(
            partial(_fetch_info, reader, url),
            partial(_end_if_there, reader, urls[1]),
            partial(fetch_if_there, reader, urls[2]),
            partial(_end_if_there, reader, urls[3]),
        )
    data, tasks, stats, first = found
    metadata = await run(partial(_parse, url, features, data, tasks, first, refuses=version2 is None))
    if metadata is None:
        assert version2 is not None
        return await version2()
    if not isinstance(metadata, Metadata):
        info, chosen = metadata
        cameras = cameras_of(chosen)
        parts: list[Any] = await gather(
            partial(_load_tasks, reader, tasks, urls[1], run),
            partial(load_episodes, reader, url, info, cameras, first=first, list_tables=list_tables, run=run),
        )
        metadata = await run(partial(put_together, url, info, chosen, *parts))
    if stats is not None:
        metadata = replace(metadata, statistics=StoredStatistics(stats, urls[2]))
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


def _parse(
    url: str,
    features: Collection[str] | None,
    data: memoryview,
    tasks: TableEnd | None,
    first: TableEnd | None,
    *,
    refuses: bool,
) -> Metadata | tuple[DatasetInfo, dict[str, Feature]] | None:
    """The metadata by files that are whole; where there are more, info.json and its chosen features; None of v2.

    info.json counts first, since it explains what else is wrong: a v2 dataset, say, has no tasks.parquet. It is one
    call in a thread: going there takes longer than parsing the files of a dataset of a few episodes.
    """
    info_url = join_url(url, INFO_PATH)
    if not refuses and is_v2(parse_json(data, info_url)):
        return None
    info = parse_info(data, info_url)
    chosen = choose_features(info, features, url)
    if first is None or tasks is None or not (first.is_whole and tasks.is_whole):
        return info, chosen
    episodes = read_episodes(url, info, cameras_of(chosen), first)
    if episodes is None:
        return info, chosen
    return put_together(url, info, chosen, _parse_tasks(read_whole(tasks, _task_columns), tasks.url), episodes)


async def _end_if_there(reader: RangeReader, url: str) -> TableEnd | None:
    """The file's end; None where it can't be had, which is an error once it is needed."""
    try:
        return await fetch_end(reader, url)
    except (DatasetError, AccessDenied, NotFound):
        return None


async def _fetch_info(reader: RangeReader, url: str) -> memoryview:
    try:
        return await reader.fetch(join_url(url, INFO_PATH))
    except NotFound as error:
        message = f"{redact_url(url)} has no {INFO_PATH}: is it the root of a LeRobot dataset?"
        message = f"{message} {_hint(url, error)}".rstrip()
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


async def _load_tasks(reader: RangeReader, end: TableEnd | None, url: str, run: RunSync) -> dict[int, str]:
    file = await open_end(reader, end or await fetch_end(reader, url), run=run)
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

"""LeRobot v2.0 and v2.1: a parquet file and, for each camera, an MP4 for every episode; metadata in lines of JSON.

In the terms of v3 each file of such a dataset holds one episode.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.errors import WRITE_ANEW, FormatError, redact_url
from asyncfetch.fetch.reader import fetch_if_there
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.episode_files import MAX_NUMBER, check_episodes
from asyncfetch.lerobot.episode_table import EpisodeTable, FilePlaces, TaskLists, VideoPlaces
from asyncfetch.lerobot.info import INFO_PATH, STATS_PATH, as_v3, choose_features, parse_info, parse_json
from asyncfetch.lerobot.metadata import cameras_of, put_together
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.info import DatasetInfo, Feature
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.runtime.concurrently import RunSync

_TASKS, _EPISODES, _EPISODE_STATS = "meta/tasks.jsonl", "meta/episodes.jsonl", "meta/episodes_stats.jsonl"


@dataclass(frozen=True, slots=True)
class Version2:
    """A v2 dataset's metadata."""

    metadata: Metadata
    raw_info: Mapping[str, Any]
    """info.json in the terms of v3."""
    episode_stats: Mapping[int, Mapping[str, Mapping[str, Any]]]
    """Statistics by episode and feature, where the dataset has them."""


async def load_version2(
    reader: RangeReader, url: str, *, run: RunSync, features: Collection[str] | None = None, episode_stats: bool = True
) -> Version2:
    """Read and check what a v2 dataset says of itself; of ``features`` alone, which None means all of.

    The statistics of each episode, which may be long, are left out without ``episode_stats``. FormatError where a file
    is damaged, or two numbers contradict each other; DatasetError where a default feature is missing.
    """

    async def lines(name: str, *, needed: bool = True) -> list[dict[str, Any]]:
        at = join_url(url, name)
        data = await (reader.fetch(at) if needed else fetch_if_there(reader, at))
        return [] if data is None else await run(partial(_parse_lines, data, at))

    info_url = join_url(url, INFO_PATH)
    stored = await run(partial(parse_json, await reader.fetch(info_url), info_url))
    raw = as_v3(stored)
    info = await run(partial(parse_info, json.dumps(raw).encode(), info_url))
    info = replace(info, version=stored["codebase_version"])
    named = (_TASKS, _EPISODES, *[_EPISODE_STATS] * episode_stats)
    tasks, episodes, *rest = await gather(*(partial(lines, name, needed=name != _EPISODE_STATS) for name in named))
    stats = await fetch_if_there(reader, join_url(url, STATS_PATH))
    chosen = choose_features(info, features, url)
    return await run(partial(_build, url, raw, info, chosen, tasks, episodes, rest[0] if rest else [], stats))


def _parse_lines(data: memoryview, url: str) -> list[dict[str, Any]]:
    # Files that were put together may have a byte order mark before any line.
    return [parse_json(line, url) for line in bytes(data).splitlines() if line.removeprefix(BOM_UTF8).strip()]


def _build(
    url: str,
    raw: Mapping[str, Any],
    info: DatasetInfo,
    features: dict[str, Feature],
    tasks: Sequence[Mapping[str, Any]],
    episodes: Sequence[Mapping[str, Any]],
    episode_stats: Sequence[Mapping[str, Any]],
    stats: memoryview | None,
) -> Version2:
    names: dict[int, str] = {}
    for task in tasks:
        number, words = _whole(task, "task_index", url, _TASKS), str(task.get("task"))
        if names.setdefault(number, words) != words:
            message = f"{redact_url(join_url(url, _TASKS))} has two tasks of task_index {number}"
            raise FormatError(f"{message}: {names[number]!r:.80} and {words!r:.80}", remedy=WRITE_ANEW)
    table = _episode_table(
        url, info, cameras_of(features), sorted(episodes, key=lambda one: _whole(one, "episode_index", url))
    )
    overall = parse_json(stats, join_url(url, STATS_PATH)) if stats else None
    metadata = put_together(url, info, features, names, table, overall, has_files_of_episodes=True).checked()
    by_episode = {_whole(one, "episode_index", url, _EPISODE_STATS): one.get("stats") or {} for one in episode_stats}
    return Version2(metadata, raw, by_episode)


def _episode_table(
    url: str, info: DatasetInfo, cameras: Sequence[str], episodes: Sequence[Mapping[str, Any]]
) -> EpisodeTable:
    numbers = np.array([_whole(one, "episode_index", url) for one in episodes], np.int64)
    lengths = np.array([_whole(one, "length", url) for one in episodes], np.int64)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    columns = {"episode_index": numbers, "length": lengths, "dataset_from_index": starts, "dataset_to_index": stops}
    check_episodes(columns, [redact_url(join_url(url, _EPISODES))] * len(episodes))
    places = FilePlaces((numbers // info.chunks_size).astype(np.int32), numbers.astype(np.int32))
    words: dict[str, int] = {}
    codes = [[words.setdefault(str(word), len(words)) for word in one.get("tasks") or ()] for one in episodes]
    counts = np.array([len(own) for own in codes], np.int32)
    flat = np.array([code for own in codes for code in own], np.int32)
    return EpisodeTable(
        url,
        info,
        numbers=numbers,
        lengths=lengths.astype(np.int32),
        starts=starts,
        tasks=TaskLists(tuple(words), flat, np.cumsum(counts, dtype=np.int64) - counts, counts),
        data=places,
        videos={camera: VideoPlaces(places, np.zeros(len(episodes))) for camera in cameras},
    )


def _whole(line: Mapping[str, Any], key: str, url: str, name: str = _EPISODES) -> int:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        message = f"{key} in {redact_url(join_url(url, name))} is {value!r:.80}"
        raise FormatError(f"{message}; it must be a whole number, from 0 and below 2**31")
    return value

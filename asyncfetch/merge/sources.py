"""All that has to be known of a dataset before it is merged: metadata, video indexes, table schemas; no rows.

A dataset of LeRobot v2 is known in the terms of v3, and of one of which some episodes are wanted nothing else is read.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from asyncfetch.config import PrivateUrl
from asyncfetch.config.checks import index_of
from asyncfetch.errors import AccessDenied, ConfigError, DatasetError, FetchError, FormatError, NotFound, redact_url
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.columns import to_array, to_column, to_integers
from asyncfetch.lerobot.frame_times import own_seconds
from asyncfetch.lerobot.info import is_v2, parse_json
from asyncfetch.lerobot.listing import list_tables
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.lerobot.parquet import fetch_end, open_end, open_table, read_columns, require_pyarrow
from asyncfetch.lerobot.rows import RowCache, RowReader, first_indices, index_table
from asyncfetch.lerobot.scan import scan
from asyncfetch.lerobot.version2 import load_version2
from asyncfetch.lerobot.video_index import fetch_moov
from asyncfetch.media import parse_moov
from asyncfetch.media.clip import H264, recovery_pictures
from asyncfetch.merge.summaries import STATISTICS, EpisodeColumn
from asyncfetch.merge.videos import EpisodeSpan, Pictures, Segment, cut_file, describe_pictures
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from asyncfetch.fetch import Fetcher
    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.episode_table import Episode, EpisodeTable, VideoSpan
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.lerobot.rows import IndexedTable
    from asyncfetch.lerobot.version2 import Version2
    from asyncfetch.media import Mp4Index
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.concurrently import RunSync


def pack_schema(schema: pa.Schema) -> bytes:
    """All of it, metadata included."""
    packed: bytes = schema.serialize().to_pybytes()
    return packed


def unpack_schema(packed: bytes) -> pa.Schema:
    """Return what was packed."""
    arrow = require_pyarrow()
    schema: pa.Schema = arrow.ipc.read_schema(arrow.py_buffer(packed))
    return schema


_INFO = "meta/info.json"
_KEPT_BYTES = 16 * 1024 * 1024
"""Footers that are kept while the times of rows are read."""
_FILES_AT_ONCE = 32
"""Footers and video indexes of one source that are read side by side."""
_FOOTERS_BYTES = 64 * 1024 * 1024
"""Memory for what is known of files that are looked at because rows aren't where they should be."""
_ENTRY_BYTES = 4096
"""Bytes of a frame, where what is said beside its picture is all in these."""
_ENTRIES_LOOKED_AT = 2
_CARRIED = frozenset({"info.json", "stats.json", "tasks.parquet", "episodes"})
_CARRIED_OF_V2 = frozenset({"info.json", "stats.json", "tasks.jsonl", "episodes.jsonl", "episodes_stats.jsonl"})
"""Files that are merged of what lies in ``meta``."""


_PictureStatistics = dict[str, dict[str, EpisodeColumn]]


@dataclass(frozen=True, slots=True)
class Selection:
    """A dataset of which some episodes are meant. No repr shows the secrets of its url, and no pickle carries them."""

    source: str | os.PathLike[str]
    """A directory or url."""
    episodes: Iterable[int] | None = None
    """Their indices, in any order; None for all. Kept ascending, which is the order they are taken in.

    Raises:
        ConfigError: They are none, or not different whole numbers of at least 0.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", PrivateUrl(self.source))
        if self.episodes is not None:
            object.__setattr__(self, "episodes", _ascending(self.episodes))

    @property
    def url(self) -> PrivateUrl:
        """The source, as text."""
        return PrivateUrl(self.source)


def _ascending(episodes: Iterable[int]) -> tuple[int, ...]:
    try:
        indices = sorted(map(index_of, episodes))
    except TypeError as error:
        raise ConfigError(f"episodes must be whole numbers, not {episodes!r:.80}") from error
    if not indices:
        raise ConfigError(f"episodes must be at least one index, not {episodes!r}; None means all")
    if indices[0] < 0 or len(set(indices)) < len(indices):
        raise ConfigError(f"episodes must be different indices of at least 0, not {indices!r:.80}")
    return tuple(indices)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of rows."""

    packed_schema: bytes
    """The schema as ``pack_schema`` packs it: pickle would lose the names of lists' elements."""
    row_bytes: float
    """Bytes of a row as it is stored, on average."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the file."""
        return unpack_schema(self.packed_schema)


@dataclass(frozen=True, slots=True)
class MergeSource:
    """A dataset to be merged, checked by itself."""

    url: str
    raw_info: Mapping[str, Any]
    """info.json as it is, or in the terms of v3."""
    metadata: Metadata
    """Metadata of the whole dataset, but without its statistics where not all episodes are to be merged."""
    episodes: Sequence[Episode]
    """Episodes to be merged, in their order."""
    data_files: Mapping[str, DataFile]
    """Files by url, those that episodes with frames name; what else lies there is left alone."""
    pictures: Mapping[str, Mapping[str, Pictures]]
    """Pictures by camera and video file."""
    segments: Mapping[str, Sequence[Segment]]
    """Segments by camera, in the order of the episodes."""
    objects: Mapping[str, ObjectInfo]
    """Objects by url, the files of rows and videos as they were when all this was read of them."""
    picture_statistics: Mapping[str, Mapping[str, EpisodeColumn]]
    """Statistics by feature with pictures and name, of all episodes of the dataset; of those that aren't to be merged
    none."""
    version: str
    """Hash of what the files of rows and videos are, in their order, and of the metadata that tells how."""
    dropped: tuple[str, ...]
    """Urls of what lies in ``meta`` and isn't carried over, where the source can be listed."""


def has_pictures(feature: Feature) -> bool:
    """Return whether its statistics are of pictures, so that they can't be taken from the rows' numbers."""
    return feature.is_camera or feature.kind == "image"


async def load_source(reader: Fetcher, selection: Selection, *, run: RunSync) -> MergeSource:
    """Read what a merge has to know of a dataset.

    Raises:
        FetchError: A file could not be fetched.
        EpisodeNotFound: It hasn't all of the episodes.
        DatasetError: It isn't whole, or not what it says it is.
        MissingDependency: pyarrow isn't installed.
    """
    url = selection.url
    metadata, raw, old = await _load_metadata(reader, url, run)
    episodes = list(metadata.episodes)
    if selection.episodes is not None:
        episodes = [metadata.episodes[index] for index in selection.episodes]
    spans: dict[str, dict[str, list[tuple[int, VideoSpan]]]] = {
        camera: defaultdict(list) for camera in metadata.cameras
    }
    by_data_url: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.length:
            by_data_url[episode.data_url].append(episode)
            for camera, span in episode.videos.items():
                spans[camera][span.url].append((episode.index, span))
    limiter = anyio.CapacityLimiter(_FILES_AT_ONCE)
    data_files: dict[str, DataFile] = {}
    indexes: dict[str, Mp4Index] = {}
    seconds: dict[int, NDArray[np.float64]] = {}
    objects: dict[str, ObjectInfo] = {}
    statistics: _PictureStatistics = {}
    dropped: list[str] = []
    placed: dict[int, Episode] = {}  # those whose rows aren't where the metadata says
    kept = RowCache(_FOOTERS_BYTES)
    rows = RowReader(reader, metadata, columns=(), kept=kept, list_tables=partial(list_tables, reader), run=run)

    async def data_file(data_url: str) -> IndexedTable | None:
        end = await fetch_end(reader, data_url)
        file = await open_end(reader, end, run=run)
        objects[data_url] = end.file
        schema = pack_schema(file.metadata.schema.to_arrow_schema())
        data_files[data_url] = DataFile(schema, file.data_stop / max(1, file.metadata.num_rows))
        is_numbered = {"index", "episode_index"} <= {*file.columns}
        return await index_table(reader, file, run=run) if is_numbered else None  # what it lacks is told with all else

    async def rows_of(data_url: str, own: list[Episode]) -> None:
        async with limiter:
            try:
                indexed = await data_file(data_url)
            except (AccessDenied, NotFound):
                if old is not None:
                    raise
            else:
                if indexed is not None and old is not None:
                    placed.update((episode.index, indexed.beginning(episode)) for episode in own)
                if indexed is None or old is not None or (indexed.key == "index" and all(map(indexed.may_have, own))):
                    return
            for episode in own:
                found = await rows.file(episode)
                placed[episode.index] = replace(episode, data_url=found.table.url)
                if found.key != "index":
                    begin = (await first_indices(reader, found.table, run=run))[episode.index]
                    placed[episode.index] = _beginning_at(begin, placed[episode.index])
            for url in {placed[episode.index].data_url for episode in own} - data_files.keys():
                await data_file(url)

    async def video_file(video_url: str) -> None:
        async with limiter:
            objects[video_url], moov = await fetch_moov(reader, video_url)
            indexes[video_url] = await run(partial(parse_moov, moov, url=video_url))

    async def times_of_rows() -> None:
        if metadata.cameras:
            seconds.update(await _own_seconds(reader, metadata, episodes, run))

    async def statistics_of_pictures() -> None:
        found = await _picture_statistics(reader, metadata, run) if old is None else _statistics_of_version2(old)
        statistics.update(found)

    async def look_for_others() -> None:
        carried = _CARRIED if old is None else _CARRIED_OF_V2
        dropped.extend(await _dropped(reader, join_url(url, "meta"), carried))

    await gather(
        statistics_of_pictures,
        look_for_others,
        times_of_rows,
        *(partial(rows_of, *item) for item in by_data_url.items()),
        *(partial(video_file, video_url) for of_file in spans.values() for video_url in of_file),
    )
    segments: dict[str, list[Segment]] = {}
    for camera, of_camera in spans.items():
        sizes = {(indexes[one].height, indexes[one].width) for one in of_camera}
        if len(sizes) == 1:  # where they differ, that is told with all else
            metadata.found_picture(camera, sizes.pop(), redact_url(next(iter(of_camera))))
        cut: list[Segment] = []
        for video_url, of_file in of_camera.items():
            wanted = [EpisodeSpan(episode, span, seconds.get(episode)) for episode, span in of_file]
            cut += await _cut(reader, indexes[video_url], wanted, fps=metadata.info.fps, run=run)
        segments[camera] = sorted(cut, key=lambda one: one.places[0])
    episodes = [placed.get(episode.index, episode) for episode in episodes]
    indices = [episode.index for episode in episodes]
    if indices != list(range(len(metadata.episodes))):  # its statistics may be of others, too
        metadata = replace(metadata, statistics=None)
        is_chosen = np.zeros(len(metadata.episodes), np.bool_)
        is_chosen[metadata.episodes.positions(indices)] = True
        for columns in statistics.values():
            for column in columns.values():
                column.is_known[~is_chosen] = False
    versions = sorted((one, (info.size, info.version)) for one, info in objects.items())
    return MergeSource(
        url=url,
        raw_info=raw,
        metadata=metadata,
        episodes=episodes,
        data_files={episode.data_url: data_files[episode.data_url] for episode in episodes if episode.length},
        pictures={
            camera: {one: describe_pictures(indexes[one]) for one in of_file} for camera, of_file in spans.items()
        },
        segments=segments,
        objects=objects,
        picture_statistics=statistics,
        version=_digest(raw, metadata.fingerprint, indices, versions),
        dropped=tuple(dropped),
    )


async def _own_seconds(
    reader: Fetcher, metadata: Metadata, episodes: Iterable[Episode], run: RunSync
) -> dict[int, NDArray[np.float64]]:
    """The times of the rows of those episodes, by index, in which they aren't those of the rate of frames."""
    filled = [episode for episode in episodes if episode.length]
    positions = metadata.episodes.positions([episode.index for episode in filled])
    listed = partial(list_tables, reader)
    rows = RowReader(reader, metadata, columns=(), kept=RowCache(_KEPT_BYTES), list_tables=listed, run=run)
    columns: list[Any] = []
    with suppress(DatasetError):  # of rows that can't be read, or aren't there, who copies them says so
        async for batch in scan(rows, reader, ["timestamp"], positions, run=run):
            columns += batch.columns

    def look() -> dict[int, NDArray[np.float64]]:
        column, found = require_pyarrow().chunked_array(columns), {}
        seconds = to_column(column, metadata.features["timestamp"], metadata.url)
        for episode, stop in zip(filled, accumulate(episode.length for episode in filled), strict=True):
            own = own_seconds(seconds[stop - episode.length : stop], metadata.info.fps)
            if own is not None:
                found[episode.index] = own
        return found

    return await run(look) if columns else {}


def _beginning_at(index: int, episode: Episode) -> Episode:
    return replace(episode, from_index=index, to_index=index + episode.length)


def _digest(*described: object) -> str:
    return blake2b(repr(described).encode(), digest_size=16).hexdigest()


async def _cut(
    reader: RangeReader, index: Mp4Index, wanted: Sequence[EpisodeSpan], *, fps: float, run: RunSync
) -> list[Segment]:
    """Cut the file where decoding can start: of H.264 not at recovery points, which lean on what is before them.

    A few places are looked at, and all of them where one is none: an encoder writes them all alike.
    """
    no_edges: frozenset[int] = frozenset()
    while True:
        cut = await run(partial(cut_file, index, wanted, fps=fps, no_edges=no_edges))
        entered = [segment.first for segment in cut if segment.first]
        looked_at = entered if no_edges else entered[:_ENTRIES_LOOKED_AT]
        found = await gather(*(partial(_is_recovery_point, reader, index, sample) for sample in looked_at))
        if not any(found):
            return cut
        no_edges |= {sample for sample, is_one in zip(looked_at, found, strict=True) if is_one}


async def _is_recovery_point(reader: RangeReader, index: Mp4Index, sample: int) -> bool:
    length_bytes = index.track.length_bytes
    if index.codec not in H264 or not length_bytes:
        return False
    run = index.samples.byte_runs(sample, sample + 1)
    start, size = int(run.offset[0]), int(run.num_bytes[0])
    head = await reader.fetch(index.url, start, start + min(size, _ENTRY_BYTES))
    return recovery_pictures(head, 0, len(head), length_bytes) > 0


async def _dropped(fetcher: Fetcher, directory: str, carried: Collection[str]) -> tuple[str, ...]:
    try:
        entries = await fetcher.listdir(directory)
    except (ConfigError, FetchError):  # a web server; or one may read, but not list
        return ()
    return tuple(entry.url for entry in entries if entry.url.rstrip("/").rsplit("/", 1)[-1] not in carried)


async def read_indices(reader: Fetcher, url: str, *, run: RunSync) -> Sequence[int]:
    """Return the indices of the dataset's episodes, ascending; errors as of load_source."""
    metadata, _, _ = await _load_metadata(reader, url, run)
    return metadata.episodes.indices


async def read_version(reader: RangeReader, url: str, *, run: RunSync) -> str:
    """Return the version of LeRobot, as the dataset has it; empty where it says nothing, and is none."""
    with suppress(NotFound):
        return str((await _raw_info(reader, url, run)).get("codebase_version", ""))
    return ""


async def _raw_info(reader: RangeReader, url: str, run: RunSync) -> dict[str, Any]:
    info_url = join_url(url, _INFO)
    return await run(partial(parse_json, await reader.fetch(info_url), info_url))


async def _load_metadata(
    reader: Fetcher, url: str, run: RunSync
) -> tuple[Metadata, Mapping[str, Any], Version2 | None]:
    """Load it with info.json in the terms of v3, and all that is known of a dataset of v2."""
    raw: Mapping[str, Any] = {}
    with suppress(NotFound):  # which is told better by who reads the rest
        raw = await _raw_info(reader, url, run)
    if is_v2(raw):
        old = await load_version2(reader, url, run=run)
        return old.metadata, old.raw_info, old
    metadata = await load_metadata(reader, url, list_tables=partial(list_tables, reader), run=run)
    _ = metadata.stats  # a damaged one is to fail now, not when all is written
    return metadata, raw, None


def _statistics_of_version2(old: Version2) -> _PictureStatistics:
    found: _PictureStatistics = {}
    episodes = old.metadata.episodes
    for key, feature in old.metadata.features.items():
        if has_pictures(feature):
            named = [(episode, stats) for episode, stats in old.episode_stats.items() if episode in episodes]
            given = {episode: stats[key] for episode, stats in named if key in stats}
            found[key] = {}
            for name in STATISTICS:
                values = {episode: own[name] for episode, own in given.items() if name in own}
                where = f"{name} of {key} in meta/episodes_stats.jsonl of {redact_url(old.metadata.url)}"
                _put(found[key], name, episodes, list(values), list(values.values()), where)
    return found


async def _picture_statistics(reader: RangeReader, metadata: Metadata, run: RunSync) -> _PictureStatistics:
    keys = [key for key, feature in metadata.features.items() if has_pictures(feature)]
    found: _PictureStatistics = {key: {} for key in keys}
    for url in metadata.episodes.urls if keys else ():
        file = await open_table(reader, url, run=run)
        wanted = [f"stats/{key}/{name}" for key in keys for name in STATISTICS]
        columns = ["episode_index", *(column for column in wanted if column in file.columns)]
        table = await read_columns(reader, file, range(file.metadata.num_row_groups), columns, run=run)
        await run(partial(_collect, found, table, metadata.episodes, file.url))
    return found


def _collect(found: _PictureStatistics, table: pa.Table, episodes: EpisodeTable, url: str) -> None:
    indices = to_integers(table["episode_index"], "episode_index", url)
    for key, columns in found.items():
        for name in STATISTICS:
            if (label := f"stats/{key}/{name}") in table.column_names:
                column = to_array(table[label])
                is_known = column.is_valid()
                values = column.filter(is_known).to_pylist()
                known = indices[is_known.to_numpy(zero_copy_only=False)].tolist()
                _put(columns, name, episodes, known, values, f"{label} in {redact_url(url)}")


def _put(
    columns: dict[str, EpisodeColumn],
    name: str,
    episodes: EpisodeTable,
    indices: Sequence[int],
    values: Sequence[Any],
    where: str,
) -> None:
    """Note a statistic of some of the episodes."""
    if not len(values):
        return
    try:
        array = np.asarray(values, np.int64 if name == "count" else np.float64)
        if name not in columns:
            count = len(episodes)
            columns[name] = EpisodeColumn(np.zeros((count, *array.shape[1:]), array.dtype), np.zeros(count, np.bool_))
        positions = episodes.positions(indices)
        columns[name].values[positions] = array
        columns[name].is_known[positions] = True
    except (ValueError, TypeError) as error:
        raise FormatError(f"{where} isn't a number, or a list of one length, for each episode: {error}") from error

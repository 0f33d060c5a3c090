"""The parts of a dataset that are read before a merge: metadata, video indexes, table schemas; no rows.

A dataset of LeRobot v2 is described in the terms of v3. If only some episodes are selected, only those are read.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.config import PrivateUrl
from asyncfetch.config.checks import index_of
from asyncfetch.errors import AccessDenied, ConfigError, DatasetError, FormatError, NotFound, redact_url
from asyncfetch.fetch.batch import for_each
from asyncfetch.fetch.urls import join_url
from asyncfetch.formats.clips import fetch_moov
from asyncfetch.lerobot.columns import to_column
from asyncfetch.lerobot.frame_times import own_seconds
from asyncfetch.lerobot.info import INFO_PATH, is_v2, parse_json
from asyncfetch.lerobot.listing import list_tables
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.lerobot.rows import RowCache, RowReader, first_indices, index_table
from asyncfetch.lerobot.scan import scan
from asyncfetch.lerobot.version2 import load_version2
from asyncfetch.media import parse_moov
from asyncfetch.media.clip import H264, recovery_pictures
from asyncfetch.merge.summaries import STATISTICS, EpisodeColumn
from asyncfetch.merge.videos import EpisodeSpan, Pictures, Segment, cut_file, describe_pictures
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.columns import to_array, to_integers
from asyncfetch.tables.parquet import fetch_end, open_end, open_table, read_columns, require_pyarrow

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

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


def pack_schema(schema: pa.Schema) -> bytes:
    """The schema's bytes, metadata included."""
    packed: bytes = schema.serialize().to_pybytes()
    return packed


def unpack_schema(packed: bytes) -> pa.Schema:
    """The schema of ``pack_schema``'s bytes."""
    arrow = require_pyarrow()
    schema: pa.Schema = arrow.ipc.read_schema(arrow.py_buffer(packed))
    return schema


_FILES_AT_ONCE = 32
"""Footers of one source that are read side by side, and indexes of videos."""
_FOOTERS_BYTES = 64 * 1024 * 1024
"""Memory for footers and row indexes while rows, or their times, are looked up."""
_ENTRY_BYTES = 4096
"""Bytes at the beginning of a frame that hold all but its picture."""
_ENTRIES_LOOKED_AT = 2
_CARRIED = frozenset({"info.json", "stats.json", "tasks.parquet", "episodes"})
_CARRIED_OF_V2 = frozenset({"info.json", "stats.json", "tasks.jsonl", "episodes.jsonl", "episodes_stats.jsonl"})
"""Files in ``meta`` that are merged."""


_PictureStatistics = dict[str, dict[str, EpisodeColumn]]


@dataclass(frozen=True, slots=True)
class Selection:
    """A dataset, or some of its episodes. Reprs and pickles leave out the secrets of its url."""

    source: str | os.PathLike[str]
    """A directory or url."""
    episodes: Iterable[int] | None = None
    """Their indices, in any order; None for all. They are sorted, and taken in ascending order.

    Raises:
        ConfigError: There are none, or they aren't distinct whole numbers of at least 0.
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
    """The schema by ``pack_schema``: pickle would lose the names of lists' elements."""
    row_bytes: float
    """Mean bytes of a stored row."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the file."""
        return unpack_schema(self.packed_schema)


@dataclass(frozen=True, slots=True)
class MergeSource:
    """A dataset to merge, checked by itself."""

    url: str
    raw_info: Mapping[str, Any]
    """The content of info.json, in the terms of v3."""
    metadata: Metadata
    """Metadata of the whole dataset, but without its statistics if only some episodes are merged."""
    episodes: Sequence[Episode]
    """Episodes to merge, in their order."""
    data_files: Mapping[str, DataFile]
    """Files of rows by url: those of episodes with frames."""
    pictures: Mapping[str, Mapping[str, Pictures]]
    """Pictures by camera and video file."""
    segments: Mapping[str, Sequence[Segment]]
    """Segments by camera, in the order of the episodes."""
    objects: Mapping[str, ObjectInfo]
    """The files of rows and videos by url, in the versions that were read."""
    picture_statistics: Mapping[str, Mapping[str, EpisodeColumn]]
    """Statistics of features with pictures, by feature and name, for each of ``episodes``."""
    version: str
    """Hash of the versions of the files of rows and videos, and of the metadata."""
    dropped: tuple[str, ...]
    """Urls of entries of ``meta`` that aren't carried over, if the source can be listed."""


def has_pictures(feature: Feature) -> bool:
    """Return whether the feature's statistics are of pictures, and so can't be computed from the rows' numbers."""
    return feature.is_camera or feature.kind == "image"


async def load_source(reader: Fetcher, selection: Selection) -> MergeSource:
    """Read a dataset's metadata, video indexes and table schemas.

    FetchError if a file can't be fetched; DatasetError if the dataset lacks an episode or contradicts itself.
    """
    url = selection.url
    metadata, raw, old = await _load_metadata(reader, url)
    indices = [*(metadata.episodes.indices if selection.episodes is None else selection.episodes)]
    episodes = [metadata.episodes[index] for index in indices]
    files = _SourceFiles(reader, metadata, old)
    await files.read(episodes)
    segments = {camera: await files.cut(camera) for camera in metadata.cameras}
    episodes = [files.placed.get(episode.index, episode) for episode in episodes]
    positions = metadata.episodes.positions(indices)
    if indices != list(range(len(metadata.episodes))):  # its statistics include other episodes
        metadata = replace(metadata, statistics=None)
    versions = sorted((one, (info.size, info.version)) for one, info in files.objects.items())
    return MergeSource(
        url=url,
        raw_info=raw,
        metadata=metadata,
        episodes=episodes,
        data_files={one.data_url: files.tables[one.data_url] for one in episodes if one.length},
        pictures={camera: files.pictures(camera) for camera in metadata.cameras},
        segments=segments,
        objects=files.objects,
        picture_statistics={
            key: {name: column.take(positions) for name, column in columns.items()}
            for key, columns in files.statistics.items()
        },
        version=blake2b(repr((raw, metadata.fingerprint, indices, versions)).encode(), digest_size=16).hexdigest(),
        dropped=files.dropped,
    )


class _SourceFiles:
    """The parts of a dataset's files that are read before a merge."""

    def __init__(self, reader: Fetcher, metadata: Metadata, old: Version2 | None) -> None:
        self.tables: dict[str, DataFile] = {}
        """Files of rows, by url."""
        self.objects: dict[str, ObjectInfo] = {}
        """Files of rows and videos, by url."""
        self.placed: dict[int, Episode] = {}
        """Episodes by index, with corrected places, if they are elsewhere than the metadata says."""
        self.statistics: _PictureStatistics = {}
        self.dropped: tuple[str, ...] = ()
        self._reader, self._metadata, self._old = reader, metadata, old
        find_tables, kept = partial(list_tables, reader), RowCache(_FOOTERS_BYTES)
        self._rows = RowReader(reader, metadata, columns=(), kept=kept, list_tables=find_tables, run=run_sync)
        self._spans: dict[str, dict[str, list[tuple[int, VideoSpan]]]] = {
            camera: defaultdict(list) for camera in metadata.cameras
        }
        self._indexes: dict[str, Mp4Index] = {}
        self._seconds: dict[int, NDArray[np.float64]] = {}

    async def read(self, episodes: Iterable[Episode]) -> None:
        """Read everything about these episodes."""
        filled = [episode for episode in episodes if episode.length]
        by_table: dict[str, list[Episode]] = defaultdict(list)
        for episode in filled:
            by_table[episode.data_url].append(episode)
            for camera, span in episode.videos.items():
                self._spans[camera][span.url].append((episode.index, span))
        videos = [url for of_camera in self._spans.values() for url in of_camera]
        await gather(
            self._read_statistics,
            self._list_dropped,
            partial(self._read_seconds, filled),
            partial(for_each, by_table.items(), self._read_table, workers=_FILES_AT_ONCE),
            partial(for_each, videos, self._read_video, workers=_FILES_AT_ONCE),
        )

    async def cut(self, camera: str) -> list[Segment]:
        """The segments of a camera's videos, in the order of the episodes."""
        spans = self._spans[camera]
        sizes = {(self._indexes[url].height, self._indexes[url].width) for url in spans}
        if len(sizes) == 1:  # ``disagreements`` lists different ones
            self._metadata.found_picture(camera, sizes.pop(), redact_url(next(iter(spans))))
        segments: list[Segment] = []
        for url, of_file in spans.items():
            wanted = [EpisodeSpan(episode, span, self._seconds.get(episode)) for episode, span in of_file]
            segments += await _cut(self._reader, self._indexes[url], wanted, self._metadata.info.fps)
        return sorted(segments, key=lambda one: one.places[0])

    def pictures(self, camera: str) -> dict[str, Pictures]:
        """The picture properties of each of a camera's videos."""
        return {url: describe_pictures(self._indexes[url]) for url in self._spans[camera]}

    async def _read_statistics(self) -> None:
        if self._old is None:
            self.statistics = await _picture_statistics(self._reader, self._metadata)
        else:
            self.statistics = _statistics_of_version2(self._old)

    async def _list_dropped(self) -> None:
        carried = _CARRIED if self._old is None else _CARRIED_OF_V2
        with suppress(ConfigError, AccessDenied, NotFound):  # a web server, or no permission to list
            entries = await self._reader.listdir(join_url(self._metadata.url, "meta"))
            names = ((entry.url, entry.url.rstrip("/").rpartition("/")[2]) for entry in entries)
            self.dropped = tuple(url for url, name in names if name not in carried)

    async def _read_seconds(self, episodes: Sequence[Episode]) -> None:
        """Read the times of the rows, and keep those that don't follow the frame rate."""
        if not self._metadata.cameras:
            return
        columns: list[Any] = []
        positions = self._metadata.episodes.positions([episode.index for episode in episodes])
        with suppress(DatasetError):  # writing unreadable or missing rows will raise it
            async for batch in scan(self._rows, self._reader, ["timestamp"], positions, run=run_sync):
                columns += batch.columns
        if columns:
            self._seconds = await run_sync(_own_seconds, columns, self._metadata, episodes)

    async def _read_video(self, url: str) -> None:
        self.objects[url], _, moov = await fetch_moov(self._reader, url)
        self._indexes[url] = await run_sync(partial(parse_moov, moov, url=url))

    async def _read_table(self, of_file: tuple[str, Sequence[Episode]]) -> None:
        """Read the schema of a file of rows, and look elsewhere for episodes that it lacks."""
        url, episodes = of_file
        if self._old is not None:
            indexed = await self._open_table(url)
            if indexed is not None:
                self.placed.update((episode.index, indexed.beginning(episode)) for episode in episodes)
        elif not await self._has(url, episodes):
            await self._look_for(episodes)

    async def _has(self, url: str, episodes: Sequence[Episode]) -> bool:
        """Return whether the file may have the episodes' rows under the metadata's numbers."""
        try:
            indexed = await self._open_table(url)
        except (AccessDenied, NotFound):
            return False
        return indexed is None or (indexed.key == "index" and all(map(indexed.may_have, episodes)))

    async def _look_for(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            found = await self._rows.file(episode)
            placed = replace(episode, data_url=found.table.url)
            if found.key != "index":
                begin = (await first_indices(self._reader, found.table, run=run_sync))[episode.index]
                placed = replace(placed, from_index=begin, to_index=begin + placed.length)
            self.placed[episode.index] = placed
        for url in {self.placed[episode.index].data_url for episode in episodes} - self.tables.keys():
            await self._open_table(url)

    async def _open_table(self, url: str) -> IndexedTable | None:
        """Read the schema; None if the file doesn't number its rows, which ``disagreements`` will list."""
        end = await fetch_end(self._reader, url)
        file = await open_end(self._reader, end, run=run_sync)
        self.objects[url] = end.file
        schema = pack_schema(file.metadata.schema.to_arrow_schema())
        self.tables[url] = DataFile(schema, file.data_stop / max(1, file.metadata.num_rows))
        is_numbered = {"index", "episode_index"} <= {*file.columns}
        return await index_table(self._reader, file, run=run_sync) if is_numbered else None


def _own_seconds(columns: list[Any], metadata: Metadata, episodes: Sequence[Episode]) -> dict[int, NDArray[np.float64]]:
    """The times of the rows by episode, for episodes that don't follow the frame rate."""
    column = require_pyarrow().chunked_array(columns)
    seconds = to_column(column, metadata.features["timestamp"], metadata.url)
    found = {}
    for episode, stop in zip(episodes, accumulate(episode.length for episode in episodes), strict=True):
        own = own_seconds(seconds[stop - episode.length : stop], metadata.info.fps)
        if own is not None:
            found[episode.index] = own
    return found


async def _cut(reader: RangeReader, index: Mp4Index, wanted: Sequence[EpisodeSpan], fps: float) -> list[Segment]:
    """Cut the file where decoding can start; in H.264 not at recovery points, which depend on earlier frames.

    A few places are checked, and all of them once one is a recovery point: an encoder writes all of them alike.
    """
    no_edges: frozenset[int] = frozenset()
    while True:
        cut = await run_sync(partial(cut_file, index, wanted, fps=fps, no_edges=no_edges))
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


async def read_indices(reader: Fetcher, url: str) -> Sequence[int]:
    """The indices of the dataset's episodes, ascending; errors as of load_source."""
    metadata, _, _ = await _load_metadata(reader, url)
    return metadata.episodes.indices


async def read_version(reader: RangeReader, url: str) -> str:
    """The dataset's version of LeRobot's format; empty if it says none, or there is no dataset."""
    with suppress(NotFound):
        return str((await _raw_info(reader, url)).get("codebase_version", ""))
    return ""


async def _raw_info(reader: RangeReader, url: str) -> dict[str, Any]:
    info_url = join_url(url, INFO_PATH)
    return await run_sync(parse_json, await reader.fetch(info_url), info_url)


async def _load_metadata(reader: Fetcher, url: str) -> tuple[Metadata, Mapping[str, Any], Version2 | None]:
    """The metadata, info.json in the terms of v3, and for a dataset of v2 its own description."""
    raw: Mapping[str, Any] = {}
    with suppress(NotFound):  # loading the rest raises a better error
        raw = await _raw_info(reader, url)
    if is_v2(raw):
        old = await load_version2(reader, url, run=run_sync)
        return old.metadata, old.raw_info, old
    metadata = await load_metadata(reader, url, list_tables=partial(list_tables, reader), run=run_sync)
    _ = metadata.stats  # raises for damaged statistics now, not after all is written
    return metadata, raw, None


def _statistics_of_version2(old: Version2) -> _PictureStatistics:
    episodes = old.metadata.episodes
    known = {episode: stats for episode, stats in old.episode_stats.items() if episode in episodes}
    found: _PictureStatistics = {key: {} for key, feature in old.metadata.features.items() if has_pictures(feature)}
    for key, columns in found.items():
        for name in STATISTICS:
            values = {episode: stats[key][name] for episode, stats in known.items() if name in stats.get(key, {})}
            where = f"{name} of {key} in meta/episodes_stats.jsonl of {redact_url(old.metadata.url)}"
            _put(columns, name, episodes, list(values), list(values.values()), where)
    return found


async def _picture_statistics(reader: RangeReader, metadata: Metadata) -> _PictureStatistics:
    keys = [key for key, feature in metadata.features.items() if has_pictures(feature)]
    found: _PictureStatistics = {key: {} for key in keys}
    for url in metadata.episodes.urls if keys else ():
        file = await open_table(reader, url, run=run_sync)
        wanted = [f"stats/{key}/{name}" for key in keys for name in STATISTICS]
        columns = ["episode_index", *(column for column in wanted if column in file.columns)]
        table = await read_columns(reader, file, range(file.metadata.num_row_groups), columns, run=run_sync)
        await run_sync(_collect, found, table, metadata.episodes, file.url)
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
    """Note a statistic of some episodes."""
    if not len(values):
        return
    try:
        array = np.asarray(values, np.int64 if name == "count" else np.float64)
        if name not in columns:
            columns[name] = EpisodeColumn.unknown(len(episodes), array)
        positions = episodes.positions(indices)
        columns[name].values[positions] = array
        columns[name].is_known[positions] = True
    except (ValueError, TypeError) as error:
        raise FormatError(f"{where} isn't a number, or a list of one length, for each episode: {error}") from error

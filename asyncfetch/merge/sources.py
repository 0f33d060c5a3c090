"""All that has to be known of a dataset before it is merged: metadata, video indexes, table schemas; no rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import anyio

from asyncfetch.errors import ConfigError, FetchError
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.columns import to_integers
from asyncfetch.lerobot.episode_files import episodes_url
from asyncfetch.lerobot.info import parse_json
from asyncfetch.lerobot.metadata import load_metadata
from asyncfetch.lerobot.parquet import open_table, read_columns
from asyncfetch.lerobot.video_index import fetch_moov
from asyncfetch.media import parse_moov
from asyncfetch.merge.codecs import Pictures, describe_pictures
from asyncfetch.merge.schemas import pack_schema, unpack_schema
from asyncfetch.merge.segments import EpisodeSpan, Segment, cut_file
from asyncfetch.merge.statistics import STATISTICS
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from asyncfetch.fetch import Fetcher
    from asyncfetch.fetch.reader import RangeReader
    from asyncfetch.lerobot.info import Feature
    from asyncfetch.lerobot.metadata import Metadata
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.concurrently import RunSync

__all__ = ["DataFile", "Source", "has_pictures", "load_source"]

_FILES_AT_ONCE = 32
"""Footers and video indexes of one source that are read side by side."""
_CARRIED = frozenset({"info.json", "stats.json", "tasks.parquet", "episodes"})
"""What in ``meta`` is merged."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of rows."""

    packed_schema: bytes
    """As ``pack_schema`` has it: pickle would lose the names of lists' elements."""
    row_bytes: float
    """Of a row as it is stored, on average."""

    @property
    def schema(self) -> pa.Schema:
        """Of the file."""
        return unpack_schema(self.packed_schema)


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset to be merged, checked by itself."""

    url: str
    raw_info: Mapping[str, Any]
    """info.json as it is."""
    metadata: Metadata
    data_files: Mapping[str, DataFile]
    """By url, those that episodes with frames name; what else lies there is left alone."""
    pictures: Mapping[str, Mapping[str, Pictures]]
    """By camera and video file."""
    segments: Mapping[str, Sequence[Segment]]
    """By camera, in the order of the episodes."""
    picture_statistics: Mapping[str, Sequence[Mapping[str, Any] | None]]
    """By feature with pictures, per episode."""
    version: str
    """Hash of what the files of rows and videos are, in their order, and of the metadata that tells how."""
    dropped: tuple[str, ...]
    """Urls of what lies in ``meta`` and isn't carried over, where the source can be listed."""


def has_pictures(feature: Feature) -> bool:
    """Whether its statistics are of pictures, so that they can't be taken from the rows' numbers."""
    return feature.is_camera or feature.kind == "image"


async def load_source(reader: Fetcher, url: str, *, run: RunSync) -> Source:
    """Read what a merge has to know of the dataset at ``url``.

    Raises:
        FetchError: A file could not be fetched.
        DatasetError: It isn't whole, or not what it says it is.
        MissingDependency: pyarrow isn't installed.
    """
    metadata = await load_metadata(reader, url, run=run)
    info = await reader.fetch(join_url(url, "meta/info.json"))
    raw = parse_json(info, url)
    limiter = anyio.CapacityLimiter(_FILES_AT_ONCE)
    spans: dict[str, dict[str, list[EpisodeSpan]]] = {camera: defaultdict(list) for camera in metadata.cameras}
    data_urls: dict[str, None] = {}
    versions: dict[str, tuple[int, str | None] | None] = {}
    for episode in metadata.episodes:
        if episode.length:
            data_urls[episode.data_url] = None
            for camera, span in episode.videos.items():
                spans[camera][span.url].append(EpisodeSpan(episode.index, span.first_frame, span.num_frames))

    async def data_file(data_url: str) -> DataFile:
        async with limiter:
            file = await open_table(reader, data_url, run=run)
            versions[data_url] = _version(reader.known(data_url))
        return DataFile(
            pack_schema(file.metadata.schema.to_arrow_schema()), file.data_stop / max(1, file.metadata.num_rows)
        )

    async def video_file(video_url: str, wanted: list[EpisodeSpan]) -> tuple[Pictures, list[Segment]]:
        async with limiter:
            known, moov = await fetch_moov(reader, video_url)
            versions[video_url] = _version(known)
            index = await run(partial(parse_moov, moov, url=video_url))
            cut = await run(partial(cut_file, index, wanted, fps=metadata.info.fps))
            return describe_pictures(index), cut

    files = await gather(*(partial(data_file, data_url) for data_url in data_urls))
    pictures: dict[str, dict[str, Pictures]] = {}
    segments: dict[str, list[Segment]] = {}
    for camera, of_file in spans.items():
        videos = await gather(*(partial(video_file, *item) for item in of_file.items()))
        pictures[camera] = dict(zip(of_file, (video[0] for video in videos), strict=True))
        segments[camera] = sorted((one for video in videos for one in video[1]), key=lambda one: one.offsets[0])
    return Source(
        url=url,
        raw_info=raw,
        metadata=metadata,
        data_files=dict(zip(data_urls, files, strict=True)),
        pictures=pictures,
        segments=segments,
        picture_statistics=await _picture_statistics(reader, metadata, run),
        version=_digest(bytes(info), metadata.fingerprint, sorted(versions.items())),
        dropped=await _dropped(reader, join_url(url, "meta")),
    )


def _digest(*described: object) -> str:
    return blake2b(repr(described).encode(), digest_size=16).hexdigest()


def _version(known: ObjectInfo | None) -> tuple[int, str | None] | None:
    return None if known is None else (known.size, known.version)


async def _dropped(fetcher: Fetcher, directory: str) -> tuple[str, ...]:
    try:
        entries = await fetcher.listdir(directory)
    except (ConfigError, FetchError):  # a web server; or one may read, but not list
        return ()
    return tuple(entry.url for entry in entries if entry.url.rstrip("/").rsplit("/", 1)[-1] not in _CARRIED)


async def _picture_statistics(
    reader: RangeReader, metadata: Metadata, run: RunSync
) -> dict[str, list[dict[str, Any] | None]]:
    keys = [key for key, feature in metadata.features.items() if has_pictures(feature)]
    found: dict[str, list[dict[str, Any] | None]] = {key: [None] * len(metadata.episodes) for key in keys}
    rows = number = 0
    while keys and rows < len(metadata.episodes):
        file = await open_table(reader, episodes_url(metadata.url, number, metadata.info.chunks_size), run=run)
        wanted = [f"stats/{key}/{name}" for key in keys for name in STATISTICS]
        columns = ["episode_index", *(column for column in wanted if column in file.columns)]
        table = await read_columns(reader, file, range(file.metadata.num_row_groups), columns, run=run)
        await run(partial(_collect, found, table, file.url))
        rows, number = rows + len(table), number + 1
    return found


def _collect(found: Mapping[str, list[dict[str, Any] | None]], table: pa.Table, url: str) -> None:
    episodes = to_integers(table["episode_index"], "episode_index", url).tolist()
    for key, per_episode in found.items():
        names = [name for name in STATISTICS if f"stats/{key}/{name}" in table.column_names]
        columns = [table[f"stats/{key}/{name}"].to_pylist() for name in names]
        for episode, values in zip(episodes, zip(*columns, strict=True), strict=False):
            if all(value is not None for value in values):
                per_episode[episode] = dict(zip(names, values, strict=True))

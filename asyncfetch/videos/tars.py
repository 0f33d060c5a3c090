"""Tar shards as WebDataset writes them, as a table of entries: one a sample, with the places of its files.

Only headers are read, by hops: a request for each long file, which brings the short ones beside it and the next header
along. Shards are read side by side. An index beside a shard saves hops: DALI's has the places of all files, Energon's
those of the samples, whose headers are then read side by side. What an index says is compared with the shard, and one
that contradicts it is left aside with a warning: the headers count.

A compressed shard is read whole, and unpacked; its places are those in what it unpacks to, see ``tables.unpacked``.
"""

from __future__ import annotations

import logging
import os
import re
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfetch.errors import ConfigError, DatasetError, FormatError, redact_url
from asyncfetch.fetch.batch import for_each
from asyncfetch.fetch.reader import fetch_if_there
from asyncfetch.media.tar import BLOCK_BYTES, LOOK_BYTES, MAX_GAP_BYTES, MAX_NAME_BYTES, compression_of, walk_tar
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.packed import Packed
from asyncfetch.tables.parquet import require_pyarrow
from asyncfetch.videos.entries import ENTRY_COLUMNS, MEMBER, RESERVED, entry_table
from asyncfetch.videos.listing import find_files
from asyncfetch.videos.tar_index import WRITE_INDEX_ANEW, index_names, parse_index, parse_wids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pyarrow as pa

    from asyncfetch.fetch import Fetcher, RangeReader
    from asyncfetch.media.boxes import Buffer
    from asyncfetch.media.tar import TarredFile

VIDEO_EXTENSIONS = frozenset((
    "3gp",
    "avi",
    "flv",
    "m2ts",
    "m4v",
    "mkv",
    "mov",
    "mp4",
    "mpeg",
    "mpg",
    "mts",
    "ogv",
    "ts",
    "webm",
    "wmv",
))
"""Extensions of videos, in lower case."""
TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
"""The ends of names of shards."""
SHARDS_AT_ONCE = 64
"""Shards that are read side by side, each by one request at a time: the default limit of a host."""
SAMPLES_AT_ONCE = 16
"""Samples of an indexed shard that are read side by side."""

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
"""WebDataset's: the key is the path up to the first dot of its last part, the extension what follows that."""
_META = re.compile(r"__[^/]*__($|/)")
"""Files that WebDataset passes over."""
_RESERVED = frozenset({*RESERVED, "__key__"})
_VIDEO = "\0video"
"""Stands for the column of videos, where that of an extension can't be."""

_log = logging.getLogger(__name__)


async def tar_entries(
    reader: RangeReader,
    fetcher: Fetcher,
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    video: str | None = None,
    on_bad_shard: Callable[[str, FormatError], object] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> pa.Table:
    """The samples of tar shards, in the order of the shards and in theirs.

    The user's columns are ``__key__`` (string), and one of each other extension, in lower case and by name: see
    ``member_field``; null where a sample has no such file. Samples without a video are left out, and counted in a line
    of the log.

    Args:
        reader: Reads ranges, also of packed parts (``UnpackedReader``).
        fetcher: Lists directories.
        urls: Shards, with braces and wildcards (``listing.find_files``); a url with a slash behind means all ``.tar``
            files below it, and one of a ``.json`` the shards of a wids index. A shard that is named twice is read once,
            and is there twice.
        video: Extension of the videos, such as "left.mp4". None for the one file of a sample whose extension ends in
            one of VIDEO_EXTENSIONS.
        on_bad_shard: Called with each shard that a FormatError is about, which is left out as a whole; None raises it.
        on_progress: Called with the number of shards that were read, and of all, after each of them; None writes a line
            to the log for each tenth.

    Raises:
        ConfigError: Nothing matches a pattern, or it can't be meant.
        FormatError: A shard isn't a tar, or is damaged; a sample has an extension twice, several videos, or
            a sparse file. The message names the shard and the key.
        DatasetError: No sample has a video.
        FetchError: As for reading.
    """
    await run_sync(require_pyarrow)
    given = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    shards, counts, listed = await _find_shards(given, fetcher, reader)
    if not shards:
        raise ConfigError("there are no shards: give at least one url")
    unread = list(dict.fromkeys(shards))
    indexes = await _find_indexes(unread, listed, reader)
    read: dict[str, _Shard] = {}
    done = 0

    async def read_one(url: str) -> None:
        nonlocal done
        try:
            read[url] = await _read_shard(url, reader, indexes.get(url), video)
        except FormatError as error:
            if on_bad_shard is None:
                raise
            on_bad_shard(url, error)
        done += 1
        if on_progress is not None:
            on_progress(done, len(unread))
        elif 10 * done // len(unread) > 10 * (done - 1) // len(unread):
            _log.info("headers of %d of %d shards were read", done, len(unread))

    await for_each(unread, read_one, workers=SHARDS_AT_ONCE)
    _report(read, counts)
    tables = [read[url].entries for url in shards if url in read]
    read.clear()
    return await run_sync(_joined, tables)


class TarSample(NamedTuple):
    """Files of one key that follow each other in a shard."""

    key: str
    files: dict[str, TarredFile]
    """The files by extension, in lower case."""


def group_samples(files: Iterable[TarredFile], *, url: str) -> list[TarSample]:
    """The samples of a shard, as WebDataset groups its files; FormatError where one has an extension twice.

    A key that comes again after another one is another sample. Files without an extension, and those in directories
    and with names such as ``__meta__``, are passed over.
    """
    samples: list[TarSample] = []
    for file in files:
        match = _NAME.fullmatch(file.name)
        if match is None or _META.match(file.name):
            continue
        key, extension = match[1], match[2].lower()
        if not samples or samples[-1].key != key:
            samples.append(TarSample(key, {}))
        if extension in samples[-1].files:
            raise FormatError(
                f"{redact_url(url)}: sample {key!r} has two files with the extension {extension!r}",
                remedy="write the shard anew, with a key of its own for each sample",
            )
        samples[-1].files[extension] = file
    return samples


async def _find_shards(
    given: Sequence[str | os.PathLike[str]], fetcher: Fetcher, reader: RangeReader
) -> tuple[list[str], dict[str, int], frozenset[str]]:
    """The shards, the counts of samples that wids has for them, and all files that were seen beside them."""
    found = await find_files([f"{url}**/*.tar" if os.fspath(url).endswith("/") else url for url in given], fetcher)
    shards: list[str] = []
    counts: dict[str, int] = {}
    for url in found.urls:
        if not url.partition("?")[0].endswith(".json"):
            shards.append(url)
            continue
        for shard in parse_wids(await reader.fetch(url), url=url):
            shards.append(shard.url)
            if shard.samples is not None:
                counts[shards[-1]] = shard.samples
    return shards, counts, found.listed


class _FoundIndex(NamedTuple):
    """An index that lies beside a shard, or may do so."""

    url: str
    data: Buffer | None = None
    """None where it wasn't read."""


async def _find_indexes(shards: Sequence[str], listed: frozenset[str], reader: RangeReader) -> dict[str, _FoundIndex]:
    """The indexes by shard: those that were listed; without a listing, all of the kind that the first shard has.

    Signed urls have none: the signature isn't good for a neighbour.
    """
    found = {}
    for url in shards:
        name = next((name for name in index_names(url) if name in listed), None)
        if name is not None:
            found[url] = _FoundIndex(name)
    unlisted = [url for url in shards if url not in listed and "?" not in url]
    if unlisted:
        names = index_names(unlisted[0])
        contents = await gather(*(partial(fetch_if_there, reader, name) for name in names))
        kind = next((kind for kind, data in enumerate(contents) if data is not None), None)
        if kind is not None:
            found |= {url: _FoundIndex(name) for url in unlisted for name in index_names(url)[kind : kind + 1]}
            found[unlisted[0]] = _FoundIndex(names[kind], contents[kind])
    return found


class _Shard(NamedTuple):
    """A shard that was read."""

    entries: pa.Table
    samples: int
    """Number of samples, those without a video included."""
    without_video: TarSample | None
    """The first of those."""
    bad_index: FormatError | None


async def _read_shard(url: str, reader: RangeReader, index: _FoundIndex | None, video: str | None) -> _Shard:
    info, head = await reader.fetch_head(url, LOOK_BYTES)
    files, bad_index = None, None
    codec = compression_of(head)
    if codec is not None:
        url = str(Packed(url, codec, 0, info.size))
        info, head = await reader.fetch_head(url, LOOK_BYTES)
    elif index is not None:
        data = index.data if index.data is not None else await fetch_if_there(reader, index.url)
        try:
            if data is not None:
                files = await _read_by_index(url, info.size, reader, index.url, data)
        except FormatError as error:
            bad_index = error
    if files is None:
        files = await _read_headers(url, info.size, reader, head=head)
    return await run_sync(_shard_of, url, files, video, bad_index)


async def _read_headers(
    url: str, size: int, reader: RangeReader, *, start: int = 0, stop: int | None = None, head: Buffer | None = None
) -> list[TarredFile]:
    """The files in bytes [start, stop) of a shard; ``head`` are its first LOOK_BYTES where they are there already."""
    walk = walk_tar(url=url, size=size, start=start, stop=stop)
    try:
        wanted = next(walk)
        piece = await reader.fetch(url, *wanted) if head is None else head
        while True:
            wanted = walk.send(piece)
            piece = await reader.fetch(url, *wanted)
    except StopIteration as end:
        files: list[TarredFile] = end.value
        return files


async def _read_by_index(
    url: str, size: int, reader: RangeReader, index_url: str, index: Buffer
) -> list[TarredFile] | None:
    """The files of a shard as its index has them; None where that saves nothing.

    Raises:
        FormatError: The index contradicts the shard. Of DALI's, three files and the shard's end are compared.
    """
    found = await run_sync(lambda: parse_index(index, url=index_url, size=size))
    contradiction = FormatError(f"{redact_url(index_url)}: contradicts the shard", remedy=WRITE_INDEX_ANEW)
    if not isinstance(found, array):
        compared = sorted({0, len(found) // 2, len(found) - 1})
        headers = await gather(*(partial(_read_file, url, size, reader, found, place) for place in compared))
        if [found[place] for place in compared] != headers:
            raise contradiction
        return found
    count = len(found) - 1
    if found[-1] - found[0] < count * (LOOK_BYTES + MAX_GAP_BYTES):
        return None  # a walk brings several samples at a time

    async def read_one(place: int) -> list[TarredFile]:
        stop = found[place + 1] if place + 1 < count else None
        return await _read_headers(url, size, reader, start=found[place], stop=stop)

    parts = await for_each(range(count), read_one, workers=SAMPLES_AT_ONCE)
    files = [file for part in parts for file in part]
    if len(group_samples(files, url=url)) != count:
        raise contradiction
    return files


async def _read_file(
    url: str, size: int, reader: RangeReader, files: Sequence[TarredFile], place: int
) -> TarredFile | None:
    """One file as its header has it, where an index says that it is; None where another one is there.

    A name of more than 100 bytes isn't in the header alone, and taken from the index as far as it begins so.
    """
    said = files[place]
    is_last = place == len(files) - 1
    stop = None if is_last else said.offset + -(-said.size // BLOCK_BYTES) * BLOCK_BYTES
    there = await _read_headers(url, size, reader, start=said.offset - BLOCK_BYTES, stop=stop)
    if len(there) != 1:
        return None
    is_cut = len(there[0].name) == MAX_NAME_BYTES and said.name.startswith(there[0].name)
    return there[0]._replace(name=said.name) if is_cut else there[0]


def _shard_of(url: str, files: Sequence[TarredFile], video: str | None, bad_index: FormatError | None) -> _Shard:
    samples = group_samples(files, url=url)
    chosen = [(sample, _video_of(sample, url, video)) for sample in samples]
    without_video = next((sample for sample, extension in chosen if extension is None), None)
    entries = _entries_of(url, [(sample, extension) for sample, extension in chosen if extension is not None])
    return _Shard(entries, len(samples), without_video, bad_index)


def _video_of(sample: TarSample, url: str, video: str | None) -> str | None:
    """The extension of the sample's video; None where it has none."""
    if video is not None:
        return video.lower() if video.lower() in sample.files else None
    found = [extension for extension in sample.files if extension.rpartition(".")[2] in VIDEO_EXTENSIONS]
    if len(found) > 1:
        raise FormatError(
            f"{redact_url(url)}: sample {sample.key!r} has several videos: {', '.join(found)}",
            remedy=f"choose one with video={found[0]!r}",
        )
    return found[0] if found else None


def _entries_of(url: str, samples: Sequence[tuple[TarSample, str]]) -> pa.Table:
    """The entries of a shard: samples and the extensions of their videos."""
    import pyarrow as pa

    rows: dict[str, list[int]] = {}
    places: dict[str, list[TarredFile]] = {}
    for row, (sample, video) in enumerate(samples):
        for extension, file in sample.files.items():
            if file.is_sparse:
                raise FormatError(
                    f"{redact_url(url)}: {file.name!r} is a sparse file, which can't be read by range",
                    remedy="write the shard anew, without --sparse",
                )
            column = _VIDEO if extension == video else extension
            rows.setdefault(column, []).append(row)
            places.setdefault(column, []).append(file)
    bad = sorted(_RESERVED & places.keys())
    if bad:
        sample = samples[rows[bad[0]][0]][0]
        raise FormatError(
            f"{redact_url(url)}: sample {sample.key!r} has a file with the extension {bad[0]!r}, which is the name of "
            "another column",
            remedy="write the shard anew, with another extension",
        )
    videos = np.array([(file.offset, file.size) for file in places.pop(_VIDEO, [])], np.int64).reshape(-1, 2)
    urls = pa.repeat(pa.scalar(url, pa.string()), len(samples))
    keys = pa.array([sample.key for sample, _ in samples], pa.string())
    columns = {"offset": pa.array(videos[:, 0]), "size": pa.array(videos[:, 1])}
    entries = entry_table(urls, columns, pa.table({"__key__": keys}))
    for extension, files in places.items():
        member = _member_column(rows[extension], files, len(samples))
        entries = entries.append_column(member_field(extension), member)
    return entries


def member_field(name: str, more: Sequence[tuple[str, pa.DataType]] = ()) -> pa.Field[Any]:
    """The field of a column of places of files beside the videos; ``more`` is there beside offset and size."""
    import pyarrow as pa

    place = pa.struct([("offset", pa.int64()), ("size", pa.int64()), *more])
    return pa.field(name, place, metadata={b"asyncfetch": MEMBER})


def _member_column(rows: Sequence[int], files: Sequence[TarredFile], length: int) -> pa.Array[Any]:
    """The places of files in these rows, and null in the others of ``length``."""
    import pyarrow as pa

    numbers = np.zeros((2, length), np.int64)
    numbers[:, rows] = np.array([(file.offset, file.size) for file in files], np.int64).T
    is_null = np.ones(length, np.bool_)
    is_null[rows] = False
    fields = list(member_field("").type)
    return pa.StructArray.from_arrays([pa.array(each) for each in numbers], fields=fields, mask=pa.array(is_null))


def _joined(tables: list[pa.Table]) -> pa.Table:
    """The tables one after the other, in one piece; a column that one doesn't have is null there.

    The list is emptied, so that a column's pieces go as soon as it is in one piece.
    """
    import pyarrow as pa

    joined = pa.concat_tables(tables, promote_options="default")
    tables.clear()
    own = [*ENTRY_COLUMNS, "__key__"]
    schema = pa.schema([joined.schema.field(name) for name in [*own, *sorted(set(joined.column_names) - set(own))]])
    columns = dict(zip(joined.column_names, joined.columns, strict=True))
    del joined
    whole = [pa.table([columns.pop(field.name)], schema=pa.schema([field])).combine_chunks()[0] for field in schema]
    return pa.table(whole, schema=schema)


def _report(read: dict[str, _Shard], counts: dict[str, int]) -> None:
    """Write what was left out, and what was left aside, to the log; DatasetError where nothing is left."""
    samples = sum(shard.samples for shard in read.values())
    videos = sum(shard.entries.num_rows for shard in read.values())
    if videos < samples or not samples:
        example = next(((url, shard.without_video) for url, shard in read.items() if shard.without_video), None)
        shown = ""
        if example is not None:
            url, sample = example
            shown = f", such as {sample.key!r} in {redact_url(url)} ({', '.join(sample.files)})"
        if not videos:
            raise DatasetError(
                f"{len(read)} shards have no sample with a video, of {samples}{shown}",
                remedy="name the videos' extension with video=",
            )
        _log.warning("%d of %d samples have no video and are left out%s", samples - videos, samples, shown)
    bad = [shard.bad_index for shard in read.values() if shard.bad_index is not None]
    if bad:
        message = "%d of %d shards have an index that isn't theirs, and are read without it: %s"
        _log.warning(message, len(bad), len(read), bad[0])
    off = [url for url, count in counts.items() if url in read and read[url].samples != count]
    if off:
        message = "%d of %d shards have other numbers of samples than their index says: %s has %d, not %d"
        _log.warning(message, len(off), len(counts), redact_url(off[0]), read[off[0]].samples, counts[off[0]])

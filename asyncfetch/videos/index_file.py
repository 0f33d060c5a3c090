"""The index of a collection: a Parquet file of its entries, with what was measured of their videos.

It has the columns of entries, the user's own, and one for each measure: see ``Measured``. Of an entry that is a span,
``span_frames`` and ``span_seconds`` are its own. ``error`` says why a video could not be read. Where the user has a
column of such a name, the measure's is called ``measured_`` and the name; the field's metadata says what it is. Urls of
files below the index's own directory are relative.

A *journal* beside it, a line for each video that was measured, lets a run that was ended go on. The headers of tar
shards are kept beside it, too, in a directory.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asyncfetch.cache import DiskTier
from asyncfetch.cache.disk import DiskReader
from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.batch import for_each
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.columns import is_text
from asyncfetch.tables.parquet import require_pyarrow
from asyncfetch.tables.unpacked import UnpackedReader
from asyncfetch.videos.entries import ENTRY_COLUMNS, INDEX_KEY, INDEX_VERSION, relative_index
from asyncfetch.videos.entry_table import MEASURE
from asyncfetch.videos.index import BROKEN, MEASURED_AT_ONCE, Measured, Measuring, videos_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import RawIOBase

    import pyarrow as pa

    from asyncfetch.videos.collection import Videos
    from asyncfetch.videos.entry_table import Entries

ROWS_IN_A_GROUP = 128 * 1024
"""Rows of a row group. Each is read by a request, or several of them by one."""
JOURNAL_SUFFIX = ".part"
HEADERS_SUFFIX = ".part.headers"
HEADERS_MAX_BYTES = 16 * 1024**3
"""Bound on headers of shards on disk: of a million videos. With more, the last ones are kept."""

_log = logging.getLogger("asyncfetch")


@dataclass(frozen=True, slots=True)
class IndexReport:
    """The result of ``write_index``."""

    output: str
    entries: int
    videos: int
    """Files, or parts of files, that entries are spans of."""
    resumed: int
    """Videos that an earlier run had measured."""
    bytes: int
    """Bytes of all videos."""
    seconds: float
    """Length of all videos together."""
    broken: tuple[tuple[int | None, str, str], ...]
    """The first entry of each video that could not be read, its url without secrets, and why. None for a damaged shard,
    which is left out as a whole."""


async def write_index(
    videos: Videos,
    output: str | os.PathLike[str],
    *,
    config: FetchConfig = FetchConfig(),  # noqa: B008  frozen
    on_progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> IndexReport:
    """Measure each video of a collection, and write an index that ``Videos.from_table`` opens.

    What was read is kept in ``output`` + ".part" and ".part.headers" until the index is whole: after a crash, or where
    a host fails, the next call with the same arguments goes on from there. If the collection has changed meanwhile it
    begins anew, and a line of the log says so.

    Args:
        videos: The collection.
        output: Local path of the Parquet file. An index that is there is replaced once the new one is whole.
        config: Of requests.
        on_progress: Called with "shards", of tars, then "videos"; the number of them that are done, and of all.

    Raises:
        ConfigError: The output isn't a local path, or is a file that is no index.
        FetchError: A host failed. A single video that is missing or broken is none of these: see ``IndexReport``.
    """
    if "://" in os.fspath(output):
        message = f"{redact_url(os.fspath(output))}: an index is written to a local path"
        raise ConfigError(f"{message}: write it there, and copy it with asyncfetch cp")
    path = await run_sync(_checked_path, output)
    async with Fetcher(config) as fetcher:
        reader = UnpackedReader(fetcher)
        bad_shards: list[tuple[None, str, str]] = []
        entries = await _read_entries(
            videos,
            fetcher,
            reader,
            path + HEADERS_SUFFIX,
            on_bad_shard=lambda url, error: bad_shards.append((None, redact_url(url), str(error))),
            on_progress=partial(on_progress, "shards"),
        )
        if redact_url(entries.place(0).url) != entries.place(0).url:
            _log.warning("%s will hold passwords or signatures of its videos' urls: keep it as you keep these", path)
        groups = await run_sync(videos_of, entries)
        with closing(_Journal(path + JOURNAL_SUFFIX)) as journal:
            found = await run_sync(journal.start, entries, len(groups))
            resumed, broken = len(found), dict[int, str]()
            measuring, done = Measuring(reader), resumed
            on_progress("videos", done, len(groups))

            async def measure(number: int) -> None:
                nonlocal done
                group = groups[number]
                spans = [entries.span(entry) for entry in group]
                has_spans = any(edge is not None for span in spans for edge in span)
                try:
                    measured = await measuring.measure(entries.place(group[0]), spans if has_spans else ())
                except BROKEN as error:
                    broken[number] = str(error)
                else:
                    found[number] = measured
                    await journal.add(number, measured)
                done += 1
                on_progress("videos", done, len(groups))

            left = [number for number in range(len(groups)) if number not in found]
            await for_each(left, measure, workers=MEASURED_AT_ONCE)
            table = await run_sync(_index_table, entries, groups, found, broken, path)
            await fetcher.put(path, await run_sync(_file_of, table))
            await run_sync(os.unlink, path + JOURNAL_SUFFIX)
            await run_sync(partial(shutil.rmtree, path + HEADERS_SUFFIX, ignore_errors=True))
    return IndexReport(
        output=path,
        entries=len(entries),
        videos=len(groups),
        resumed=resumed,
        bytes=sum(each.size for each in found.values()),
        seconds=sum(each.seconds for each in found.values()),
        broken=(
            *bad_shards,
            *(
                (groups[number][0], redact_url(entries.place(groups[number][0]).url), reason)
                for number, reason in sorted(broken.items())
            ),
        ),
    )


async def _read_entries(
    videos: Videos,
    fetcher: Fetcher,
    reader: UnpackedReader,
    headers: str,
    **callbacks: Any,  # noqa: ANN401
) -> Entries:
    """Read the entries; what takes many requests is kept in a directory for the next run, if this one is ended."""
    if not videos.is_walked or importlib.util.find_spec("xxhash") is None:
        return await videos.read(fetcher, reader=reader, **callbacks)
    async with DiskReader(reader, DiskTier(headers, HEADERS_MAX_BYTES)) as kept:
        return await videos.read(fetcher, reader=kept, **callbacks)


def _checked_path(output: str | os.PathLike[str]) -> str:
    path = os.path.abspath(output)
    if not os.path.isdir(os.path.dirname(path)):
        raise ConfigError(f"{path}: there is no directory {os.path.dirname(path)}: make it, or name a file elsewhere")
    if not path.endswith(".parquet"):
        raise ConfigError(f"{path}: the name of an index must end in .parquet")
    if os.path.exists(path) and INDEX_KEY not in _metadata(path):
        raise ConfigError(
            f"{path}: there is another file of this name, which is no index: name another one, or move it"
        )
    return path


def _metadata(path: str) -> dict[bytes, bytes]:
    """The metadata of a file's schema; nothing of a file that isn't Parquet."""
    arrow = require_pyarrow()
    import pyarrow.parquet as pq

    try:
        return dict(pq.read_schema(path).metadata or {})
    except (arrow.ArrowException, OSError):
        return {}


class _Journal:
    """Measured videos on disk, a line of JSON each, in any order. The first line says of which collection."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: RawIOBase | None = None
        self._lock = anyio.Lock()
        self._pending: list[bytes] = []

    def start(self, entries: Entries, count: int) -> dict[int, Measured]:
        """Open it, and return what it has of a collection of so many videos. Blocks."""
        head = {"asyncfetch.index": int(INDEX_VERSION), "of": entries.url, "fingerprint": entries.fingerprint}
        found: dict[int, Measured] = {}
        end = 0
        if os.path.exists(self._path):
            with open(self._path, "rb") as file:
                end = _read_lines(file, head, count, found)
            if not end and os.path.getsize(self._path):
                _log.warning(
                    "%s is of another collection, or this one has changed since: all videos are measured anew",
                    self._path,
                )
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  close() does
        self._file.truncate(end)  # without a line that was cut off
        if not end:
            self._write([_line(head)])
        return found

    async def add(self, number: int, measured: Measured) -> None:
        """Write the measures of a video; they are on disk when this returns. Calls side by side share a write."""
        self._pending.append(_line([number, *measured]))
        async with self._lock:
            lines, self._pending = self._pending, []
            if lines:
                await run_sync(self._write, lines)

    def _write(self, lines: Sequence[bytes]) -> None:
        assert self._file is not None
        data = memoryview(b"".join(lines))
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _read_lines(file: Any, head: dict[str, object], count: int, found: dict[int, Measured]) -> int:  # noqa: ANN401
    """Read the lines of a journal into ``found``; return where whole ones end: at 0 if it is of another collection."""
    end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            value = json.loads(line)
            if end == 0 and value != head:
                return 0
            if end:
                number, *measures, spans = value
                if 0 <= number < count:
                    found[number] = Measured._make((*measures, tuple(map(tuple, spans))))
        except (ValueError, TypeError):
            break
        end += len(line)
    return end


def _file_of(table: pa.Table) -> memoryview:
    arrow = require_pyarrow()
    # Numbers of very many videos all differ: as a dictionary they take more room.
    texts: Any = [field.name for field in table.schema if is_text(field.type) or arrow.types.is_dictionary(field.type)]
    sink = arrow.BufferOutputStream()
    arrow.parquet.write_table(table, sink, compression="zstd", use_dictionary=texts, row_group_size=ROWS_IN_A_GROUP)
    return memoryview(sink.getvalue())


def _index_table(
    entries: Entries, groups: Sequence[Sequence[int]], found: dict[int, Measured], broken: dict[int, str], path: str
) -> pa.Table:
    """The entries with a column for each measure, as they lie at that path."""
    arrow = require_pyarrow()
    kinds: dict[str, Any] = {  # as small as they may be: an index is held in memory
        "frames": arrow.int32(),
        "seconds": arrow.float64(),
        "fps": arrow.float32(),
        "width": arrow.int32(),
        "height": arrow.int32(),
        "codec": arrow.dictionary(arrow.int8(), arrow.string()),
        "groups": arrow.int32(),
        "has_audio": arrow.bool_(),
        "moov_start": arrow.int64(),
        "moov_bytes": arrow.int32(),
    }
    count = len(entries)
    number_of: list[int] = [0] * count
    span_frames: list[int | None] = [None] * count
    span_seconds: list[float | None] = [None] * count
    for number, group in enumerate(groups):
        spans = found[number].spans if number in found else ()
        for place, entry in enumerate(group):
            number_of[entry] = number
            if spans:
                span_frames[entry], span_seconds[entry] = spans[place]
    rows = arrow.array(number_of, arrow.int64())
    videos = range(len(groups))

    def column(name: str, kind: pa.DataType) -> Any:  # noqa: ANN401
        at = Measured._fields.index(name)
        return arrow.array((found[number][at] if number in found else None for number in videos), kind).take(rows)

    sizes = entries.table.column("size")
    columns: dict[str, Any] = {name: entries.table.column(name) for name in ENTRY_COLUMNS}
    columns["size"] = arrow.compute.coalesce(column("size", arrow.int64()), sizes)
    fields = [arrow.field(name, each.type) for name, each in columns.items()]
    for name in (*entries.own, *entries.members):
        columns[name] = entries.table.column(name)
        fields.append(entries.table.schema.field(name))
    measures = {name: column(name, kind) for name, kind in kinds.items()}
    if any(frames is not None for frames in span_frames):
        measures["span_frames"] = arrow.array(span_frames, arrow.int32())
        measures["span_seconds"] = arrow.array(span_seconds, arrow.float64())
    measures["error"] = arrow.array((broken.get(number) for number in videos), arrow.string()).take(rows)
    for measure, values in measures.items():
        name = measure
        while name in columns:
            name = f"measured_{name}"
        columns[name] = values
        fields.append(arrow.field(name, values.type, metadata={b"asyncfetch": MEASURE + measure.encode()}))
    schema = arrow.schema(fields, metadata={INDEX_KEY: INDEX_VERSION})
    return relative_index(arrow.table(list(columns.values()), schema=schema), path)

"""Collections of videos: where their entries are found. What they have is read when a stream opens them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from asyncfetch.config import FetchConfig, PrivateUrl
from asyncfetch.errors import ConfigError, FormatError, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.unpacked import UnpackedReader
from asyncfetch.videos.entry_table import Entries
from asyncfetch.videos.folders import folder_entries
from asyncfetch.videos.parquet_bytes import parquet_entries
from asyncfetch.videos.tables import table_entries
from asyncfetch.videos.tars import tar_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pyarrow as pa

    from asyncfetch.fetch import RangeReader
    from asyncfetch.resources import Engine
    from asyncfetch.videos.tables import TableSource

_log = logging.getLogger("asyncfetch")

Kind = Literal["table", "folder", "tars", "parquet"]


@dataclass(frozen=True, slots=True, repr=False)
class Videos:
    """A collection of videos, to be read by a ``Stream``. Made by one of the ``from_`` methods.

    Nothing is read before a stream opens it. Pickles; a table in memory goes along.
    """

    _kind: Kind
    _source: Any
    _video: str | None = None
    _start: str | None = None
    _stop: str | None = None

    @classmethod
    def from_table(
        cls, source: TableSource, *, video: str = "video", start: str | None = None, stop: str | None = None
    ) -> Videos:
        """Videos, or spans of them, that a table names, one in each row.

        Args:
            source: Url or path of Parquet (a directory or pattern of files, too), CSV, TSV or JSON lines; or a
                pyarrow, pandas or polars table, or a list of dicts. An index that ``asyncfetch index`` wrote is one.
            video: Column of urls, relative to the table's own; of a table in memory, to the working directory.
            start: Column of the seconds at which spans start, as numbers or ``HH:MM:SS.mmm``; None, or null in a row,
                is the begin.
            stop: Column of the seconds at which they stop, likewise.

        The other columns come with each sample. Reading raises ConfigError and FormatError with row and value.
        """
        return cls("table", _kept(source), video, start, stop)

    @classmethod
    def from_folder(cls, url: str | os.PathLike[str]) -> Videos:
        """All videos below a directory or prefix, by name, or those that its metadata.csv, .jsonl or .parquet names.

        Text and JSON of the same name beside a video come with its samples under their extension. The latter files are
        those of Hugging Face's VideoFolder, with a column ``file_name``; its other columns come along.
        """
        return cls("folder", PrivateUrl(url))

    @classmethod
    def from_tars(
        cls, urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, video: str | None = None
    ) -> Videos:
        """Tar shards as WebDataset writes them: files of one stem are one sample.

        Args:
            urls: One or several, with braces (``{000000..000123}``) and wildcards (``**/*.tar``).
            video: Extension of the video, where a sample has several.

        The other files come with each sample under their extension: text as str, JSON as what it holds, others as
        bytes. Headers are read by hops, unless an index of wids, DALI or Energon lies beside a shard. One that is
        compressed (gzip, bzip2, xz, zstd, LZ4) is read whole and unpacked, to open it and again where that isn't kept.
        """
        return cls("tars", _kept(urls), video)

    @classmethod
    def from_parquet(cls, url: str | os.PathLike[str], *, video: str = "video") -> Videos:
        """Videos whose bytes, or paths, are in a column of Parquet, as ``datasets`` writes them.

        Args:
            url: A file, a directory, a pattern, or ``hf://datasets/org/name``.
            video: The column.

        The other columns come with each sample. Of a column of bytes that is compressed, or has a dictionary, a row
        group is read and unpacked as a whole.
        """
        return cls("parquet", PrivateUrl(url), video)

    async def open(self, engine: Engine) -> Entries:
        """Read the entries over an engine."""
        on_bad_shard = _log_bad_shard if engine.config.on_error != "raise" else None
        async with engine.lister() as fetcher:
            return await self.read(fetcher, reader=engine.reader, on_bad_shard=on_bad_shard)

    async def entries(self, config: FetchConfig = FetchConfig()) -> pa.Table:  # noqa: B008  frozen
        """Read the entries, with the columns ``video``, ``offset``, ``size``, ``start`` and ``stop``."""
        async with Fetcher(config) as fetcher:
            return (await self.read(fetcher)).table

    @property
    def is_walked(self) -> bool:
        """True if reading the entries takes about a request for each of them."""
        return self._kind == "tars"

    async def read(
        self,
        fetcher: Fetcher,
        *,
        reader: RangeReader | None = None,
        on_bad_shard: Callable[[str, FormatError], object] | None = None,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> Entries:
        """Read the entries over a fetcher.

        Args:
            fetcher: Lists directories.
            reader: Reads ranges, also of packed parts; None for an ``UnpackedReader`` over the fetcher.
            on_bad_shard: Called with each shard that a FormatError is about, which is left out; None raises it.
            on_progress: Called with the number of shards that were read, and of all; None writes it to the log.
        """
        reader = reader or UnpackedReader(fetcher)
        source, video = self._source, self._video
        match self._kind:
            case "table":
                if not isinstance(source, str) and isinstance(source, Sized) and not len(source):
                    raise ConfigError(f"{self!r}: the collection has no video: the table has no rows")
                spans = {"start": self._start, "stop": self._stop}
                table = await table_entries(reader, fetcher, source, video=video or "video", **spans)
            case "folder":
                table = await folder_entries(reader, fetcher, source)
            case "tars":
                table = await tar_entries(
                    reader, fetcher, source, video=video, on_bad_shard=on_bad_shard, on_progress=on_progress
                )
            case "parquet":
                table = await parquet_entries(reader, fetcher, source, video=video or "video")
        if not table.num_rows:
            raise ConfigError(f"{self!r}: the collection has no video: check the url, or the pattern")
        return await run_sync(lambda: Entries(table, repr(self)))

    @property
    def url(self) -> str:
        """The url that it is found at, without secrets; empty for a table in memory."""
        return redact_url(self._source) if isinstance(self._source, str) else ""

    def __repr__(self) -> str:
        source = self._source
        shown = repr(redact_url(source)) if isinstance(source, str) else f"<{type(source).__name__}>"
        return f"Videos.from_{self._kind}({shown})"


def _log_bad_shard(url: str, error: FormatError) -> None:
    _log.warning("the shard %s is left out of the collection: %s", redact_url(url), error)


def _kept(source: Any) -> Any:  # noqa: ANN401 - what a user gave
    """Return what a user gave, its urls without secrets where it is pickled."""
    if isinstance(source, str | os.PathLike):
        return PrivateUrl(source)
    if isinstance(source, list | tuple) and source and all(isinstance(one, str | os.PathLike) for one in source):
        return tuple(PrivateUrl(one) for one in source)
    return source

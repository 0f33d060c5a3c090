"""The data that a command's URL means: a LeRobot dataset, or a collection of videos of one of four kinds."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from asyncfetch.errors import AccessDenied, ConfigError, DatasetError, FetchError, NotFound, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.urls import join_url
from asyncfetch.formats import RangeFormat
from asyncfetch.lerobot.info import INFO_PATH
from asyncfetch.runtime.threads import run_sync
from asyncfetch.videos import Videos
from asyncfetch.videos.folders import METADATA_NAMES
from asyncfetch.videos.listing import absolute_url, find_files, list_files
from asyncfetch.videos.tables import SUFFIXES
from asyncfetch.videos.tars import TAR_SUFFIXES, VIDEO_EXTENSIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncfetch.config import FetchConfig


OWN_FORMAT = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
"""A name in a Python module."""


class Kind(StrEnum):
    """Kinds of data."""

    LEROBOT = "lerobot"
    TARS = "tars"
    FOLDER = "folder"
    TABLE = "table"
    PARQUET = "parquet"


Source = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="A LeRobot dataset, a folder or tars of videos, a table or an index of them: path or URL."
    ),
]
KindOption = Annotated[
    Kind | None, typer.Option("--kind", help="What the URL is. [default: by what is there]", show_default=False)
]
VideoOption = Annotated[
    str | None, typer.Option("--video", help="Column of the videos; of tars, their extension.", show_default=False)
]
StartOption = Annotated[
    str | None, typer.Option("--start", help="Column of the seconds at which spans start.", show_default=False)
]
StopOption = Annotated[
    str | None, typer.Option("--stop", help="Column of the seconds at which spans stop.", show_default=False)
]


def names_videos(url: str) -> bool:
    """Return whether it is a tar or a table by its name, so no directory."""
    return url.partition("?")[0].lower().endswith((*TAR_SUFFIXES, *SUFFIXES))


def own_format(source: str) -> RangeFormat | None:
    """The format of a user's own that ``module:name`` names, of the working directory; None for anything else.

    Raises:
        ConfigError: The module can't be imported, or has no such format.
    """
    found = OWN_FORMAT.fullmatch(source)
    if found is None or os.path.exists(source):
        return None
    module, name = found.groups()
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source} is no format in a Python module of this directory: {error}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(value, RangeFormat):
        raise ConfigError(
            f"{source} must be a RangeFormat, such as one that `{name} = MyFormat(url)` makes, not {value!r:.80}"
        )
    return value


def find_source(
    url: str, config: FetchConfig, kind: Kind | None = None, *, video: str | None, start: str | None, stop: str | None
) -> str | Videos:
    """The url, of a LeRobot dataset, or the collection of videos that it is.

    It is of this ``kind``, or is looked at. ``video`` is the column or extension of videos (None for "video", or the
    only one), ``start`` and ``stop`` are columns of spans.

    Raises:
        ConfigError: Options don't fit the kind.
        DatasetError: It is none of them.
        FetchError: It could not be looked at.
    """
    kind = kind or anyio.run(_kind_of, url, config)
    given = {"--video": video, "--start": start, "--stop": stop}
    takes = {Kind.TABLE: {"--video", "--start", "--stop"}, Kind.TARS: {"--video"}, Kind.PARQUET: {"--video"}}
    for name in given.keys() - takes.get(kind, set()):
        if given[name] is not None:
            raise ConfigError(f"{name}={given[name]!r} doesn't fit {redact_url(url)}, taken for {kind}: see --kind")
    match kind:
        case Kind.LEROBOT:
            return url
        case Kind.TARS:
            is_directory = not url.partition("?")[0].endswith((*TAR_SUFFIXES, ".json", "/"))
            return Videos.from_tars(url + "/" if is_directory else url, video=video)
        case Kind.FOLDER:
            return Videos.from_folder(url)
        case Kind.TABLE:
            return Videos.from_table(url, video=video or "video", start=start, stop=stop)
        case Kind.PARQUET:
            return Videos.from_parquet(url, video=video or "video")


async def _kind_of(url: str, config: FetchConfig) -> Kind:
    path = url.partition("?")[0].lower()
    extension = path.rpartition("/")[2].rpartition(".")[2]
    async with Fetcher(config) as fetcher:
        if path.endswith((*TAR_SUFFIXES, ".json")):
            return Kind.TARS
        if extension == "parquet":
            return await _kind_of_parquet(url, fetcher)
        if f".{extension}" in SUFFIXES:
            return Kind.TABLE
        return await _kind_of_directory(url, fetcher)


async def _kind_of_parquet(url: str, fetcher: Fetcher) -> Kind:
    """Videos are in the file if a column of them isn't text."""
    from asyncfetch.tables.parquet import open_table

    file = await open_table(fetcher, (await find_files(url, fetcher)).urls[0], run=run_sync)
    leaves = await run_sync(lambda: [file.metadata.schema.column(n) for n in range(file.metadata.num_columns)])
    holds_bytes = any(leaf.physical_type == "BYTE_ARRAY" and "String" not in str(leaf.logical_type) for leaf in leaves)
    return Kind.PARQUET if holds_bytes else Kind.TABLE


async def _kind_of_directory(url: str, fetcher: Fetcher) -> Kind:
    try:
        await fetcher.stat(join_url(url, INFO_PATH))
    except (NotFound, AccessDenied):  # S3 refuses what isn't there to those who may not list
        pass
    else:
        return Kind.LEROBOT
    directory, looked = await run_sync(absolute_url, url), f"it has no {INFO_PATH}"
    for is_recursive in (False, True):
        try:
            files = [file.url for file in await list_files(fetcher, directory, recursive=is_recursive)]
        except NotFound as error:
            raise NotFound(f"{_neither(url)}: there is nothing", url=url) from error
        except ConfigError:  # a web server without index pages
            looked = f"{looked}, nor {' or '.join(METADATA_NAMES)}, and can't be listed"
            if await _any_is_there([join_url(url, name) for name in METADATA_NAMES], fetcher):
                return Kind.FOLDER
            break
        kind = await _kind_of_files(files, fetcher)
        if kind is not None:
            return kind
        looked = f"it has no {INFO_PATH}, and no tar, video or Parquet file below it"
    remedy = f"check the URL, or say what it is with --kind ({', '.join(Kind)})"
    raise DatasetError(f"{_neither(url)}: {looked}", remedy=remedy)


def _neither(url: str) -> str:
    return f"{redact_url(url)} is neither a LeRobot dataset nor a collection of videos"


async def _kind_of_files(files: Iterable[str], fetcher: Fetcher) -> Kind | None:
    """The kind of a directory's files; None where they are none of ours."""
    count: Counter[str] = Counter()
    tables = []
    for url in files:
        extension = url.rpartition("/")[2].rpartition(".")[2].lower()
        count["video" if extension in VIDEO_EXTENSIONS else extension] += 1
        if extension == "parquet":
            tables.append(url)
    if count["tar"]:
        return Kind.TARS
    if count["video"] or any(url.endswith(METADATA_NAMES) for url in tables):
        return Kind.FOLDER
    return await _kind_of_parquet(tables[0], fetcher) if tables else None


async def _any_is_there(urls: Iterable[str], fetcher: Fetcher) -> bool:
    for url in urls:
        try:
            await fetcher.stat(url)
        except FetchError:
            continue
        return True
    return False

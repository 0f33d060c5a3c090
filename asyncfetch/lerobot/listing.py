"""Tables that aren't where the record says: found by a listing, as LeRobot does, or by the next likely names."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from asyncfetch.errors import AccessDenied, ConfigError, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.fetch import Fetcher
    from asyncfetch.resources import Engine

ListTables = Callable[[str], Awaitable["list[str] | None"]]
"""Lists the Parquet files of a directory's chunks in the order of their numbers; None where nothing can be listed."""


async def list_tables(fetcher: Fetcher, directory: str) -> list[str] | None:
    """List a directory's tables, as ``ListTables`` says; None where that isn't possible, or not allowed.

    Plain web servers can't be listed, and elsewhere one may read, but not list. FetchError where there is a
    listing, but it could not be had: names that are guessed instead may not be all.
    """
    try:
        files = await fetcher.listdir(directory, recursive=True)
    except (ConfigError, AccessDenied, NotFound):
        return None
    depth = directory.rstrip("/").count("/") + 2
    tables = [file.url for file in files if file.url.endswith(".parquet") and file.url.count("/") == depth]
    return sorted(tables, key=_numbers)


def list_tables_of(engine: Engine) -> ListTables:
    """Return a ListTables over an engine."""

    async def list_them(directory: str) -> list[str] | None:
        async with engine.lister() as fetcher:
            return await list_tables(fetcher, directory)

    return list_them


def _numbers(url: str) -> list[tuple[int, str]]:
    """Sort names by the numbers in them: texts and numbers in turn."""
    parts = re.split(r"0*([0-9]+)", table_name(url))
    return [(len(part), part) if place % 2 else (0, part) for place, part in enumerate(parts)]


def table_name(url: str) -> str:
    """The name of a file and of its chunk, which tell it from others of its directory however that is written."""
    return "/".join(url.rsplit("/", 2)[1:])


def places_beside(place: tuple[int, int], step: int, chunks_size: int) -> Sequence[tuple[int, int]]:
    """The chunks and files that may come next after this one, or with ``step`` -1 before it, the likeliest first.

    A chunk may have been closed before it had as many files as chunks have by now, or after it.
    """
    chunk, file = place
    if step > 0:
        following = [(chunk, file + 1), (chunk + 1, 0)]
        return following if file + 1 < chunks_size else following[::-1]
    return [(chunk, file - 1)] * (file > 0) + [(chunk - 1, chunks_size - 1)] * (chunk > 0)

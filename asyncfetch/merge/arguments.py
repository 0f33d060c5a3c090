"""What a merge is told, checked before anything is read."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError, redact_url
from asyncfetch.fetch.transports.file import local_path
from asyncfetch.merge.local_folder import LocalFolder
from asyncfetch.merge.s3_prefix import S3Prefix
from asyncfetch.merge.sources import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.merge.destination import Destination

__all__ = ["destination_of", "destination_path", "selections_of"]


def selections_of(sources: Sequence[str | os.PathLike[str] | Selection] | str) -> list[Selection]:
    """The sources, at least one; a path is that of the working directory here, wherever it is read."""
    if isinstance(sources, str) or not sources:
        raise ConfigError(f"sources must be a list of at least one dataset, not {sources!r}")
    selections = [source if isinstance(source, Selection) else Selection(source) for source in sources]
    return [replace(one, source=os.path.abspath(one.url)) if _is_relative(one.url) else one for one in selections]


def _is_relative(url: str) -> bool:
    return bool(url) and "://" not in url and not os.path.isabs(url)


def destination_path(destination: str | os.PathLike[str]) -> str:
    """What a user names, which isn't empty: that would mean the working directory."""
    if not (named := os.fspath(destination)):
        raise ConfigError("destination is empty; give the directory to write")
    return named


def destination_of(destination: str | os.PathLike[str]) -> Destination:
    """The destination that a user names, read as a fetcher reads urls."""
    named = destination_path(destination)
    scheme, separator, place = named.partition("://")
    match scheme.lower() if separator else "file":
        case "file":
            found: Destination = LocalFolder(local_path(named).absolute())
        case "s3":
            found = S3Prefix(f"s3://{place.rstrip('/')}")
        case _:
            raise ConfigError(
                f"a dataset is written to a local directory or below an s3:// prefix, not to {redact_url(named)!r}: "
                "copy the result there"
            )
    try:
        str(found.name).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{named!r} has a name that isn't UTF-8, and pyarrow writes to no such: rename it") from error
    return found

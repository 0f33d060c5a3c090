"""The destination of a merge: a local folder, or a prefix of S3.

Both are values that pickle: any process can write its share, with a fetcher of its own. With a plan's fingerprint they
are its build there too, in any number of attempts. Their methods are the same: see ``LocalFolder``.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from asyncfetch.errors import AsyncFetchError, ConfigError, MergeError, redact_url
from asyncfetch.fetch.transports.file import local_path
from asyncfetch.merge.local_folder import LocalFolder
from asyncfetch.merge.s3_prefix import S3Prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Destination: TypeAlias = LocalFolder | S3Prefix


def destination_path(destination: str | os.PathLike[str]) -> str:
    """The destination as text; ConfigError if it is empty, which would mean the working directory."""
    if not (named := os.fspath(destination)):
        raise ConfigError("destination is empty; give the directory to write")
    return named


def destination_of(destination: str | os.PathLike[str]) -> Destination:
    """The destination of a path or url, parsed as a fetcher parses urls."""
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


@contextmanager
def system_errors(names: Iterable[Path | str]) -> Iterator[None]:
    """Raise the system's errors in this block, such as a full disk or missing permission, as MergeErrors."""
    try:
        yield
    except AsyncFetchError:
        raise
    except OSError as error:
        raise MergeError(
            f"the system doesn't let the merge write {', '.join(map(str, names))}: {error}. When it does, the same "
            "call goes on behind what is finished"
        ) from error

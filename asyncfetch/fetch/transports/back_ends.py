"""The border to fsspec and its back ends: what they are asked, in a thread, and what their exceptions mean."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from multidict import CIMultiDict

from asyncfetch.errors import (
    AccessDenied,
    AsyncFetchError,
    ConfigError,
    ConnectionFailed,
    FetchError,
    FetchTimeout,
    InvalidResponse,
    MissingDependency,
    NotFound,
    ObjectChanged,
    redact_text,
    redact_url,
)
from asyncfetch.fetch.listing import by_name, check_length, listed_size
from asyncfetch.fetch.objects import difference
from asyncfetch.fetch.responses import refusal
from asyncfetch.fetch.retry import AttemptFailed, Verdict, cause_of
from asyncfetch.ranges import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.fetch.transports.back_end_threads import Job

__all__ = ["check_version", "file_system", "foreign_errors", "list_directory", "look", "scheme_of"]

VERSION_KEYS = (
    "ETag", "etag", "md5", "md5Hash", "content_md5", "checksum", "crc32c", "sha256", "generation", "VersionId",
    "version", "mtime", "LastModified", "last_modified", "modified", "updated", "created",
)  # fmt: skip
"""What back ends call the things that change with an object's content."""

_UNKNOWN_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def file_system(url: str, options: Mapping[str, Mapping[str, object]]) -> tuple[Any, str]:
    """The file system for the url and the path within that. Runs in a thread."""
    scheme = scheme_of(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependency(f'{scheme}:// urls need fsspec: pip install "asyncfetch[fsspec]"') from error
    own = options.get(scheme, {})
    with foreign_errors(scheme):
        try:
            files, path = url_to_fs(url, **own)
        except ImportError as error:
            message = f"{scheme}:// urls are fsspec's, which needs another package for them: {redact_text(str(error))}"
            raise MissingDependency(message) from cause_of(error)
        except (ValueError, TypeError) as error:
            raise ConfigError(_cannot_open(url, scheme, error)) from cause_of(error)
    return files, path


def _cannot_open(url: str, scheme: str, error: Exception) -> str:
    from fsspec.registry import available_protocols

    if scheme not in available_protocols():
        return (
            f"{redact_url(url)!r}: no such scheme as {scheme}:// is known, neither here (http, https, s3, hf, file and"
            " paths) nor to fsspec: is it spelt right?"
        )
    return (
        f"{redact_url(url)!r}: fsspec's back end for {scheme}:// can't be made ({redact_text(str(error))}): check the"
        f" url and FetchConfig(fsspec={{{scheme!r}: {{...}}}})"
    )


def look(files: Any, path: str, url: str) -> ObjectInfo:  # noqa: ANN401 - untyped
    """Size and version of the object now, not those of a listing that fsspec remembers."""
    with foreign_errors(scheme_of(url)):
        files.invalidate_cache(path)
        return _info(url, files.info(path))


def _info(url: str, found: Mapping[str, Any]) -> ObjectInfo:
    if found.get("type") == "directory":
        raise AttemptFailed(NotFound, "there is something, but it is a directory", Verdict.FATAL)
    size = _size(found, "the object")
    version = [(key, str(found[key])) for key in VERSION_KEYS if found.get(key) is not None]
    return ObjectInfo(url, size, f'"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}"' if version else None)


def _size(found: Mapping[str, Any], what: str) -> int:
    said = found.get("size")
    try:
        return listed_size(said)
    except ValueError as error:
        message = f"the file system doesn't say how long {what} is, but {redact_text(repr(said))[:100]}"
        raise AttemptFailed(InvalidResponse, f"{message}: ranges of it can't be checked", Verdict.FATAL) from error


def check_version(known: ObjectInfo | None, seen: ObjectInfo) -> None:
    """AttemptFailed where they can't be the same content."""
    changed = difference(known, seen) if known is not None else None
    if changed is not None:
        message = f"the object was changed since it was first read, {changed}: read it again from its start"
        raise AttemptFailed(ObjectChanged, message, Verdict.FATAL)


def list_directory(
    url: str, options: Mapping[str, Mapping[str, object]], max_entries: int, job: Job
) -> list[ObjectInfo]:
    """Runs in a thread."""
    job.next_call()
    files, path = file_system(url, options)
    with foreign_errors(scheme_of(url)):
        files.invalidate_cache(path)
        if not files.isdir(path):
            files.info(path)  # isdir takes a broken connection for a no; this raises it
            raise FileNotFoundError("there is no such directory")
        job.next_call()
        entries = files.ls(path, detail=True)
        check_length(len(entries), max_entries)
        base = url if url.endswith("/") else f"{url}/"
        infos = []
        for entry in entries:
            found = str(entry["name"]).strip("/")
            if found == path.strip("/"):
                continue  # what consoles put into a bucket to show an empty folder
            name = found.rpartition("/")[2]
            is_directory = entry.get("type") == "directory"
            if is_directory:
                infos.append(ObjectInfo(f"{base}{name}/", 0))
            else:
                infos.append(ObjectInfo(f"{base}{name}", _size(entry, redact_url(f"{base}{name}"))))
    return sorted(infos, key=by_name)


def scheme_of(url: str) -> str:
    """What stands in front of ://."""
    return url.partition("://")[0]


@contextmanager
def foreign_errors(scheme: str) -> Iterator[None]:
    """The border to back ends, which raise anything."""
    try:
        yield
    except (AttemptFailed, AsyncFetchError):
        raise
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - ours from here on; a task of theirs ended so
        raise _as_failure(error, scheme) from cause_of(error)


def _as_failure(error: BaseException, scheme: str) -> AttemptFailed:
    said = redact_text(f"{type(error).__name__}: {error}")
    who = f"fsspec's back end for {scheme}://"
    match error:
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return AttemptFailed(NotFound, "there is no such object: check the url", Verdict.FATAL)
        case PermissionError():
            return AttemptFailed(AccessDenied, f"{who} may not read it ({said})", Verdict.FATAL)
        case ssl.SSLCertVerificationError():
            message = f"{who} doesn't trust the certificate of its server ({said})"
            return AttemptFailed(ConnectionFailed, message, Verdict.FATAL)
    answer = _answer_in(error) or _answer_in(error.__cause__)
    if answer is not None:
        status, headers = answer
        failure = refusal(status, headers)
        failure.message = f"{who} was answered {status} ({said}): FetchConfig(fsspec=...) has its login and options"
        failure.headers = headers
        return failure
    match error:
        case TimeoutError():
            return AttemptFailed(FetchTimeout, f"{who} took too long ({said})")
        case socket.gaierror():
            message = f"the name of the host can't be resolved, says {who} ({said}): check the url and the network"
            return AttemptFailed(
                ConnectionFailed, message, Verdict.ONCE if error.errno in _UNKNOWN_NAME else Verdict.AGAIN
            )
        case ConnectionError() | EOFError() | aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError():
            return AttemptFailed(ConnectionFailed, f"{who} has no connection, or lost it ({said})")
        case ValueError() | TypeError() | LookupError() | AttributeError() | NotImplementedError() | AssertionError():
            return AttemptFailed(FetchError, f"{who} can't do it ({said})", Verdict.FATAL)
        case OSError():
            return AttemptFailed(FetchError, f"{who} failed ({said})")
        case _:
            # Nobody knows: a lost connection, in the words of a library that isn't ours to import, or a refusal for
            # good. One repeat brings most of the former, and of the latter the back end has made some by itself.
            return AttemptFailed(FetchError, f"{who} failed ({said})", Verdict.ONCE)


def _answer_in(error: BaseException | None) -> tuple[int, Mapping[str, str]] | None:
    """Status and headers of the HTTP answer that an exception tells of; None where it tells of none.

    By the names that aiohttp (status), azure (status_code), google and urllib (code), requests (response.status_code)
    and botocore (response["ResponseMetadata"]) have for them, so that none of these is imported.
    """
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        metadata = response.get("ResponseMetadata", {})
        statuses, headers = [metadata.get("HTTPStatusCode")], metadata.get("HTTPHeaders")
    else:
        statuses = [getattr(error, name, None) for name in ("status", "status_code", "code")]
        statuses.append(getattr(response, "status_code", None))
        headers = getattr(error if response is None else response, "headers", None)
    for status in statuses:
        if isinstance(status, int) and 400 <= status <= 599:
            return status, CIMultiDict(headers if isinstance(headers, Mapping) else {})
    return None

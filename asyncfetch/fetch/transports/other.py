"""Every scheme that isn't read natively, through fsspec, in threads.

fsspec promises little: its ``cat_file`` may return the whole object for a range, or fewer bytes than asked. So every
read first learns the object's size and version, and is checked against both. Back ends repeat failed requests by
themselves; nothing is repeated here.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import socket
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio import to_thread

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
    redact_url,
)
from asyncfetch.fetch.batch import server_of
from asyncfetch.fetch.objects import difference
from asyncfetch.fetch.responses import Delivery
from asyncfetch.fetch.retry import AttemptFailed, Verdict, cause_of
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.thread_call import ThreadCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from asyncfetch.fetch.bandwidth import Bandwidth
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Hosts

__all__ = ["OtherTransport"]

READ_STEP_BYTES = 8 * 1024 * 1024
"""Asked for at once; between two of these a read can be cancelled."""
THREADS = 64
"""Threads that wait for back ends at a time, over all schemes."""
VERSION_KEYS = (
    "ETag", "etag", "md5", "md5Hash", "content_md5", "checksum", "crc32c", "sha256", "generation", "VersionId",
    "version", "mtime", "LastModified", "last_modified", "modified", "updated", "created",
)  # fmt: skip
"""What back ends call the things that change with an object's content."""

T = TypeVar("T")


class OtherTransport:
    """Fills downloads from fsspec's file systems.

    A cancelled read returns at once and leaves its thread to end by itself, because a back end that hangs can't be
    stopped; what it still brings is thrown away.
    """

    def __init__(
        self, hosts: Hosts, options: Mapping[str, Mapping[str, object]], bandwidth: Bandwidth | None = None
    ) -> None:
        """``bandwidth`` is the cap that its bytes come under, in steps of READ_STEP_BYTES; None for none."""
        self._hosts = hosts
        self._options = options
        self._bandwidth = bandwidth
        self._threads = anyio.CapacityLimiter(THREADS)
        self._unlimited = anyio.CapacityLimiter(math.inf)

    async def read(self, download: Download) -> None:
        """Fills ``download``."""
        host = self._hosts.get(_origin_of(download.url))
        async with host.turn():
            host.counts.requests += 1
            since = host.now()
            reading = _Reading(download, download.known, self._options, self._bandwidth)
            try:
                await self._in_thread(reading.run)
            except AttemptFailed as failure:
                host.counts.errors += 1
                if failure.kind is ObjectChanged:
                    download.changed()
                raise failure.error(
                    url=download.url, start=download.asked.start, stop=download.asked.stop, attempts=1
                ) from failure.__cause__
            except BaseException:
                reading.abandon()
                raise
            download.remember()
            host.times.body.record(host.now() - since)
            host.counts.bytes += download.landed_bytes

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The entries of a directory, sorted by url; a directory among them has size 0 and a url that ends in "/"."""
        host = self._hosts.get(_origin_of(url))
        async with host.turn():
            host.counts.requests += 1
            try:
                return await self._in_thread(partial(_list, url, self._options))
            except AttemptFailed as failure:
                host.counts.errors += 1
                raise failure.error(url=url, start=None, stop=None, attempts=1) from failure.__cause__

    async def _in_thread(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        call = ThreadCall(work)

        def release() -> None:
            with suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(self._threads.release_on_behalf_of, call)

        await self._threads.acquire_on_behalf_of(call)
        try:
            return await to_thread.run_sync(call.run, limiter=self._unlimited, abandon_on_cancel=True)
        finally:
            call.when_ended(release)  # a thread that was left behind still counts


class _Reading:
    """One read, in a thread that may outlive its caller."""

    def __init__(
        self,
        download: Download,
        known: ObjectInfo | None,
        options: Mapping[str, Mapping[str, object]],
        bandwidth: Bandwidth | None,
    ) -> None:
        self._download = download
        self._known = known
        self._options = options
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """After this, nothing is written any more: the buffer may be somebody else's."""
        with self._lock:  # held for a copy of READ_STEP_BYTES at most
            self._abandoned.set()

    def run(self) -> None:
        """Runs in a thread."""
        url, wanted = self._download.url, self._download.wanted
        files, path = _file_system(url, self._options)
        info = _look(files, path, url)
        _check_version(self._known, info)
        start, stop = wanted.span_in(info.size)
        with self._lock:
            if self._abandoned.is_set():
                return
            view = self._download.accept(Delivery(info, start, stop))
        while self._download.landed_bytes < len(view):
            landed = self._download.landed_bytes
            step = start + landed, min(stop, start + landed + READ_STEP_BYTES)
            if self._bandwidth is not None and self._abandoned.wait(self._bandwidth.reserve(step[1] - step[0])):
                return
            with _foreign_errors(_scheme_of(url)):
                chunk = files.cat_file(path, start=step[0], end=step[1])
            if len(chunk) != step[1] - step[0]:
                message = f"the back end returned {len(chunk)} bytes for [{step[0]}, {step[1]})"
                raise self._wrong_length(files, path, info, message)
            if not self._land(view, chunk):
                return
        # Back ends don't tell of which version the bytes are. If it is the one of before still, they are of it, too.
        _check_version(info, _look(files, path, url))

    def _land(self, view: memoryview, chunk: bytes) -> bool:
        with self._lock:
            if not self._abandoned.is_set():
                landed = self._download.landed_bytes
                view[landed : landed + len(chunk)] = chunk
                self._download.landed_bytes += len(chunk)
            return not self._abandoned.is_set()

    def _wrong_length(self, files: Any, path: str, info: ObjectInfo, message: str) -> AttemptFailed:  # noqa: ANN401
        """What it means that the back end returned too little or too much."""
        _check_version(info, _look(files, path, info.url))
        return AttemptFailed(InvalidResponse, message, Verdict.FATAL)


def _origin_of(url: str) -> str:
    """What its gate and its statistics go by: the server, whoever logs in."""
    return redact_url(server_of(url))


def _file_system(url: str, options: Mapping[str, Mapping[str, object]]) -> tuple[Any, str]:
    """The file system for the url and the path within that. Runs in a thread."""
    scheme = _scheme_of(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependency(f'{scheme}:// urls need fsspec: pip install "asyncfetch[fsspec]"') from error
    own = options.get(scheme, {})
    with _foreign_errors(scheme):
        try:
            files, path = url_to_fs(url, **own)
        except ImportError as error:
            message = f"{scheme}:// urls are fsspec's, which needs another package for them: {redact_url(str(error))}"
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
        f"{redact_url(url)!r}: fsspec's back end for {scheme}:// can't be made ({redact_url(str(error))}): check the"
        f" url and FetchConfig(fsspec={{{scheme!r}: {{...}}}})"
    )


def _look(files: Any, path: str, url: str) -> ObjectInfo:  # noqa: ANN401 - untyped
    """Size and version of the object now, not those of a listing that fsspec remembers."""
    with _foreign_errors(_scheme_of(url)):
        files.invalidate_cache(path)
        return _info(url, files.info(path))


def _info(url: str, found: Mapping[str, Any]) -> ObjectInfo:
    if found.get("type") == "directory":
        raise AttemptFailed(NotFound, "there is something, but it is a directory", Verdict.FATAL)
    size = found.get("size")
    if not isinstance(size, int):
        message = "the file system doesn't say how long the object is: ranges of it can't be checked"
        raise AttemptFailed(InvalidResponse, message, Verdict.FATAL)
    version = [(key, str(found[key])) for key in VERSION_KEYS if found.get(key) is not None]
    return ObjectInfo(url, size, f'"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}"' if version else None)


def _check_version(known: ObjectInfo | None, seen: ObjectInfo) -> None:
    changed = difference(known, seen) if known is not None else None
    if changed is not None:
        message = f"the object was changed since it was first read, {changed}: read it again from its start"
        raise AttemptFailed(ObjectChanged, message, Verdict.FATAL)


def _list(url: str, options: Mapping[str, Mapping[str, object]]) -> list[ObjectInfo]:
    """Runs in a thread."""
    files, path = _file_system(url, options)
    with _foreign_errors(_scheme_of(url)):
        files.invalidate_cache(path)
        if not files.isdir(path):
            raise FileNotFoundError("there is no such directory")
        entries = files.ls(path, detail=True)
    base = url if url.endswith("/") else f"{url}/"
    infos = []
    for entry in entries:
        name = str(entry["name"]).rstrip("/").rpartition("/")[2]
        is_directory = entry.get("type") == "directory"
        infos.append(ObjectInfo(f"{base}{name}/" if is_directory else f"{base}{name}", entry.get("size") or 0))
    return sorted(infos, key=lambda info: info.url)


def _scheme_of(url: str) -> str:
    return url.partition("://")[0]


@contextmanager
def _foreign_errors(scheme: str) -> Iterator[None]:
    """The border to back ends, which raise anything."""
    try:
        yield
    except (AttemptFailed, AsyncFetchError):
        raise
    except Exception as error:  # noqa: BLE001 - it is ours from here on
        raise _as_failure(error, scheme) from cause_of(error)


def _as_failure(error: Exception, scheme: str) -> AttemptFailed:
    said = redact_url(f"{type(error).__name__}: {error}")
    who = f"fsspec's back end for {scheme}://"
    match error:
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return AttemptFailed(NotFound, "there is no such object: check the url", Verdict.FATAL)
        case PermissionError():
            return AttemptFailed(AccessDenied, f"{who} may not read it ({said})", Verdict.FATAL)
        case TimeoutError():
            return AttemptFailed(FetchTimeout, f"{who} took too long ({said})", Verdict.FATAL)
        case socket.gaierror():
            message = f"the name of the host can't be resolved, says {who} ({said}): check the url and the network"
            return AttemptFailed(ConnectionFailed, message, Verdict.FATAL)
        case ConnectionError():
            return AttemptFailed(ConnectionFailed, f"{who} has no connection ({said})", Verdict.FATAL)
        case _:
            return AttemptFailed(FetchError, f"{who} failed ({said})", Verdict.FATAL)

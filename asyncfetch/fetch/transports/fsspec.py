"""Every scheme that isn't read natively, through fsspec, in threads.

fsspec promises little: its ``cat_file`` may return the whole object for a range, or fewer bytes than asked. So every
attempt first gets the object's size and version, and is checked against both. A broken read resumes at the byte that it
reached, if the version is still the same.

Retries. Most back ends retry by themselves, unseen by us, before they raise an error; that error is then one failed
attempt of ours, and retried by RetryConfig. So a server may get our attempts times theirs, 25 for 5 and 5. The total
time and the host's budget bound that. To have only one layer, switch theirs off (FetchConfig(fsspec=...)), or ours
(RetryConfig(attempts=1)).

Time limits. A back end doesn't show whether it connects, waits or receives. So each call into one, for the object's
size and version, for a piece of READ_STEP_BYTES, or for a listing, may take as long as the three phases of
TimeoutConfig together. A piece that took longer may be too large for a slow link, so the next attempt reads smaller
ones. fsspec returns all entries of a directory at once, after any number of pages, so a listing can't be limited page
by page.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import anyio
import anyio.lowlevel
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
    install_command,
    redact_text,
    redact_url,
)
from asyncfetch.fetch.bandwidth import Bandwidth
from asyncfetch.fetch.batch import server_of
from asyncfetch.fetch.listing import by_name, check_length, listed_size
from asyncfetch.fetch.refusals import UNKNOWN_NAME
from asyncfetch.fetch.responses import AcceptedBody, check_version, refusal
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict, cause_of, pause_seconds, retried
from asyncfetch.fetch.transports.fsspec_threads import FsspecThreads
from asyncfetch.ranges import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.buffers import Views
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Hosts, Permit
    from asyncfetch.fetch.retry import Clock
    from asyncfetch.fetch.transports.fsspec_threads import ThreadJob

VERSION_KEYS = (
    "ETag", "etag", "md5", "md5Hash", "content_md5", "checksum", "crc32c", "sha256", "generation", "VersionId",
    "version", "mtime", "LastModified", "last_modified", "modified", "updated", "created",
)  # fmt: skip
"""Back ends' names of attributes that change with an object's content."""

_CHANGED = "the object was changed"
_NOTHING = memoryview(b"")


def file_system(url: str, options: Mapping[str, Mapping[str, object]]) -> tuple[Any, str]:
    """The file system for the url and the path within that. Runs in a thread."""
    scheme = scheme_of(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependency(f"{scheme}:// urls need fsspec: {install_command('fsspec')}") from error
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
    """Size and version of the object now, not of a listing in fsspec's cache."""
    with foreign_errors(scheme_of(url)):
        files.invalidate_cache(path)
        return _info(url, files.info(path))


def _info(url: str, found: Mapping[str, Any]) -> ObjectInfo:
    if found.get("type") == "directory":
        raise AttemptFailed(NotFound, "there is something, but it is a directory", RetryVerdict.FATAL)
    size = _size(found, "the object")
    version = [(key, str(found[key])) for key in VERSION_KEYS if found.get(key) is not None]
    return ObjectInfo(url, size, f'"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}"' if version else None)


def _size(found: Mapping[str, Any], what: str) -> int:
    said = found.get("size")
    try:
        return listed_size(said)
    except ValueError as error:
        message = f"the file system doesn't say how long {what} is, but {redact_text(repr(said))[:100]}"
        raise AttemptFailed(InvalidResponse, f"{message}: ranges of it can't be checked", RetryVerdict.FATAL) from error


def list_directory(
    url: str, options: Mapping[str, Mapping[str, object]], max_entries: int, job: ThreadJob
) -> list[ObjectInfo]:
    """The entries of a directory, sorted by name. Runs in a thread."""
    job.next_call()
    files, path = file_system(url, options)
    with foreign_errors(scheme_of(url)):
        files.invalidate_cache(path)
        if not files.isdir(path):
            files.info(path)  # isdir returns False for a broken connection; this raises it
            raise FileNotFoundError("there is no such directory")
        job.next_call()
        entries = files.ls(path, detail=True)
        check_length(len(entries), max_entries)
        base = url if url.endswith("/") else f"{url}/"
        infos = []
        for entry in entries:
            found = str(entry["name"]).strip("/")
            if found == path.strip("/"):
                continue  # a console's object for an empty folder
            name = found.rpartition("/")[2]
            is_directory = entry.get("type") == "directory"
            if is_directory:
                infos.append(ObjectInfo(f"{base}{name}/", 0))
            else:
                infos.append(ObjectInfo(f"{base}{name}", _size(entry, redact_url(f"{base}{name}"))))
    return sorted(infos, key=by_name)


def scheme_of(url: str) -> str:
    """The part of the url before ://."""
    return url.partition("://")[0]


@contextmanager
def foreign_errors(scheme: str) -> Iterator[None]:
    """Turn any error of a back end into ours."""
    try:
        yield
    except (AttemptFailed, AsyncFetchError):
        raise
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - CancelledError: of a back end's own task
        raise _as_failure(error, scheme) from cause_of(error)


def _as_failure(error: BaseException, scheme: str) -> AttemptFailed:
    said = redact_text(f"{type(error).__name__}: {error}")
    backend = f"fsspec's back end for {scheme}://"
    match error:
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return AttemptFailed(NotFound, "there is no such object: check the url", RetryVerdict.FATAL)
        case PermissionError():
            return AttemptFailed(AccessDenied, f"{backend} may not read it ({said})", RetryVerdict.FATAL)
        case ssl.SSLCertVerificationError():
            message = f"{backend} doesn't trust the certificate of its server ({said})"
            return AttemptFailed(ConnectionFailed, message, RetryVerdict.FATAL)
    answer = _answer_in(error) or _answer_in(error.__cause__)
    if answer is not None:
        status, headers = answer
        failure = refusal(status, headers)
        failure.message = f"{backend} was answered {status} ({said}): FetchConfig(fsspec=...) has its login and options"
        failure.headers = headers
        return failure
    match error:
        case TimeoutError():
            return AttemptFailed(FetchTimeout, f"{backend} took too long ({said})")
        case socket.gaierror():
            message = f"the name of the host can't be resolved, says {backend} ({said}): check the url and the network"
            verdict = RetryVerdict.ONCE if error.errno in UNKNOWN_NAME else RetryVerdict.AGAIN
            return AttemptFailed(ConnectionFailed, message, verdict)
        case ConnectionError() | EOFError() | aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError():
            return AttemptFailed(ConnectionFailed, f"{backend} has no connection, or lost it ({said})")
        case ValueError() | TypeError() | LookupError() | AttributeError() | NotImplementedError() | AssertionError():
            return AttemptFailed(FetchError, f"{backend} can't do it ({said})", RetryVerdict.FATAL)
        case OSError():
            return AttemptFailed(FetchError, f"{backend} failed ({said})")
        case _:
            # It may be a lost connection, by an exception of an unknown library, or a final refusal. One retry suffices
            # for most of the former.
            return AttemptFailed(FetchError, f"{backend} failed ({said})", RetryVerdict.ONCE)


def _answer_in(error: BaseException | None) -> tuple[int, Mapping[str, str]] | None:
    """Status and headers of the HTTP answer in an exception; None without one.

    It knows the attributes of aiohttp (status), azure (status_code), google and urllib (code), requests
    (response.status_code) and botocore (response["ResponseMetadata"]), so none of these is imported.
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


READ_STEP_BYTES = 8 * 1024 * 1024
"""Bytes read at once; a read can be cancelled between two pieces."""
LAND_STEP_BYTES = 256 * 1024
"""Bytes copied at once on the loop, in some 30 us."""
SLOW_STEP_SHARE, MIN_STEP_BYTES = 8, 64 * 1024
"""Factor by which pieces get shorter after one that took too long, and their least length."""
THREADS = 64
"""Threads that wait for back ends at a time, over all schemes."""

T = TypeVar("T")


class FsspecTransport:
    """Fills downloads from fsspec's file systems.

    A read that is cancelled, or takes too long, leaves its thread to end by itself, because a back end that hangs can't
    be stopped; its bytes are dropped.
    """

    def __init__(self, config: FetchConfig, hosts: Hosts, clock: Clock) -> None:
        self._config = config
        self._hosts = hosts
        self._clock = clock
        self._bandwidth = Bandwidth.of(config.max_bytes_per_second)
        limits = config.timeouts
        limit_seconds = limits.connect_seconds + limits.first_byte_seconds + limits.stall_seconds
        self._threads = FsspecThreads(THREADS, limit_seconds)

    def close(self) -> None:
        """End the threads. Only abandoned reads may be under way."""
        self._threads.close()

    async def attempt(self, download: Download, failure: AttemptFailed | None) -> None:
        """Bring the bytes that a download lacks."""
        download.timeouts += failure is not None and failure.kind is FetchTimeout
        step_bytes = READ_STEP_BYTES
        if download.timeouts:
            step_bytes = max(step_bytes // SLOW_STEP_SHARE**download.timeouts, MIN_STEP_BYTES)
        await self._ask(download.url, partial(self._take, download, step_bytes), is_retry=failure is not None)

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The entries of a directory, sorted by name; a directory among them has size 0 and a url that ends in "/".

        FetchError if there are more than ``max_listed_entries``; by then the back end holds them all.
        """

        async def take(permit: Permit) -> list[ObjectInfo]:
            since = permit.host.now()
            take = partial(list_directory, url, self._config.fsspec, self._config.max_listed_entries)
            entries = await self._threads.run(take, scheme_of(url))
            permit.answered(None, since, permit.host.now())
            return entries

        def attempt(failure: AttemptFailed | None) -> Awaitable[list[ObjectInfo]]:
            return self._ask(url, take, is_retry=failure is not None)

        return await retried(self._config.retry, self._clock, url, attempt)

    async def _ask(self, url: str, take: Callable[[Permit], Awaitable[T]], *, is_retry: bool) -> T:
        """One attempt with a permit of its host, counted."""
        host = self._hosts.get(redact_url(server_of(url)))  # without a login
        async with host.permit() as permit:
            host.counts.requests += 1
            host.counts.retries += is_retry
            try:
                return await take(permit)
            except AttemptFailed as failure:
                failure.retry_after = pause_seconds(failure.headers, wall_now=self._clock.wall())
                raise

    async def _take(self, download: Download, step_bytes: int, permit: Permit) -> None:
        """Read the missing bytes, by one job for each piece."""
        now, scheme, bandwidth = permit.host.now, scheme_of(download.url), self._bandwidth
        reading = _Reading(download, self._config.fsspec, now)
        asked_at, has_answered = now(), False
        view: Views | None = None
        if bandwidth is not None:
            await self._threads.run(reading.open, scheme)  # gets the number of bytes
        while not reading.is_done:
            reading.piece = _NOTHING
            paid_bytes = min(reading.left_bytes, step_bytes)
            try:
                if bandwidth is not None:
                    await anyio.sleep(bandwidth.reserve(paid_bytes))
                await self._threads.run(partial(reading.take, step_bytes), scheme)
            finally:
                piece = reading.piece
                if bandwidth is not None:  # an abandoned call's bytes, too, since it is unknown how many it still reads
                    bandwidth.give_back(paid_bytes - len(piece))
                # Back ends cache an object's attributes, so opening it doesn't show that its server answers.
                if not has_answered and (piece or reading.is_done):
                    has_answered = True
                    permit.answered(None, asked_at, reading.opened_at)
                permit.landed(len(piece))
            if view is None:
                view = download.accept(AcceptedBody(reading.info, reading.at - len(piece), reading.stop))
            for start in range(0, len(piece), LAND_STEP_BYTES):
                if start:
                    await anyio.lowlevel.checkpoint()
                part = piece[start : start + LAND_STEP_BYTES]
                place = len(view) - reading.left_bytes - len(piece) + start
                view[place : place + len(part)] = part
                download.landed_bytes += len(part)
        download.remember()
        permit.body_seconds = now() - reading.opened_at


class _Reading:
    """One attempt at the bytes that a download lacks. Its jobs run in threads, one after the other."""

    info: ObjectInfo
    opened_at: float
    """The time at which size and version were there."""

    def __init__(
        self, download: Download, options: Mapping[str, Mapping[str, object]], now: Callable[[], float]
    ) -> None:
        """``now`` is the clock for statistics."""
        self._url, self._known, self._wanted = download.url, download.known, download.next_request()
        self._options = options
        self._now = now
        self._files: Any = None
        self.at = self.stop = 0
        """The part of the object that is still to be read, once it is open."""
        self.piece = _NOTHING
        """The bytes that the latest job has read."""
        self.is_done = False
        """True if all bytes were read, and checked."""

    @property
    def left_bytes(self) -> int:
        return self.stop - self.at

    def open(self, job: ThreadJob) -> None:
        """Get size and version."""
        job.next_call()
        self._files, self._path = file_system(self._url, self._options)
        self.info = look(self._files, self._path, self._url)
        check_version(self._known, self.info, what=_CHANGED)
        self.at, self.stop = self._wanted.span_in(self.info.size)
        self.opened_at = self._now()

    def take(self, max_bytes: int, job: ThreadJob) -> None:
        """Read the next bytes; opens before the first and checks after the last."""
        if self._files is None:
            self.open(job)
        count = min(self.left_bytes, max_bytes)
        if count:
            start, stop = self.at, self.at + count
            job.next_call()
            with foreign_errors(scheme_of(self._url)):
                piece = memoryview(self._files.cat_file(self._path, start=start, end=stop))
            if len(piece) != count:
                self._check(job)
                message = f"the back end returned {len(piece)} bytes for [{start}, {stop})"
                raise AttemptFailed(InvalidResponse, message, RetryVerdict.ONCE)
            self.at, self.piece = stop, piece
        if not self.left_bytes:
            self._check(job)
            self.is_done = True

    def _check(self, job: ThreadJob) -> None:
        """Check that the version is still the one from before, so the bytes are of it: back ends don't say theirs."""
        job.next_call()
        check_version(self.info, look(self._files, self._path, self._url), what=_CHANGED)

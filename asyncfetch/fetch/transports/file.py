"""Local files: ranges of them, read in threads, and whole ones that are put."""

from __future__ import annotations

import errno
import io
import logging
import os
import secrets
import stat
import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from urllib.parse import quote, unquote_to_bytes, urlsplit

import anyio
from anyio import from_thread

from asyncfetch.errors import AccessDenied, ConfigError, FetchError, NotFound, ObjectChanged, redact_url
from asyncfetch.fetch.buffers import ChainedBuffer
from asyncfetch.fetch.listing import check_length
from asyncfetch.fetch.responses import AcceptedBody, check_version
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.fetch.urls import check_characters
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.cancellation import outlast
from asyncfetch.runtime.threads import run_to_its_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Hosts
    from asyncfetch.fetch.upload_sources import UploadSource

READ_STEP_BYTES = 1024 * 1024
"""Bytes read at once: between two of these a read can be cancelled; about 1 ms on a local disk, and 10 ms on a slow
one."""

_CHANGED = "the file was changed"
_LEADS_NOWHERE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES})
"""Errors of a link to itself, through a file, too long, or to where this user may not look."""

T = TypeVar("T")

NextStep: TypeAlias = "Callable[[], None]"
"""Called in a thread before each step of work; it raises where the work was cancelled."""


class FileTransport:
    """Fills downloads from local files, and writes such.

    A file has a strong version: its modification time, size and inode.
    """

    def __init__(self, hosts: Hosts, threads: int, *, max_entries: int) -> None:
        """``max_entries`` is the most that a listing may have."""
        self._hosts = hosts
        self._max_entries = max_entries
        self.limiter = anyio.CapacityLimiter(threads)

    async def attempt(self, download: Download, _: AttemptFailed | None) -> None:
        """Fill ``download``. Cancelled, it returns when the thread has stopped writing: after a step at most."""
        asked = download.asked
        host = self._hosts.get("file://")
        async with host.permit() as permit:
            host.counts.requests += 1
            since = host.now()
            with _one_attempt(download.url, asked.start, asked.stop):
                try:
                    await self._run(partial(_read, download, download.known))
                except AttemptFailed as failure:
                    host.counts.errors += 1
                    download.keep_landed(failure)
                    raise
            download.remember()
            permit.body_seconds = host.now() - since
            permit.landed(download.landed_bytes)

    async def _run(self, work: Callable[[NextStep], T]) -> T:
        """``work(next_step)`` in a thread; a caller that is cancelled, in whichever way, waits for the step's end."""
        is_stopped = threading.Event()

        def next_step() -> None:
            from_thread.check_cancelled()  # an anyio scope's; a task's sets the flag
            if is_stopped.is_set():
                raise CancelledError  # in the thread alone: the task has its own

        return await run_to_its_end(partial(work, next_step), self.limiter, stop=is_stopped.set)

    async def put(self, url: str, source: UploadSource) -> ObjectInfo:
        """The file that the source is now; see write_file.

        It takes no permit: a source may wait for reads that want one.
        """
        counts = self._hosts.get("file://").counts
        counts.requests += 1
        path = local_path(url)
        if url.endswith("/") or not path.name:
            raise ConfigError(f"{url!r} names a directory: write the name of a file")
        with _one_attempt(url):
            try:
                return _info(url, await write_file(path, source, self.limiter))
            except AttemptFailed:
                counts.errors += 1
                raise

    async def delete(self, url: str) -> None:
        """Removes the file."""
        with _one_attempt(url):
            await run_to_its_end(partial(_delete, local_path(url)), self.limiter)

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The entries of a directory, sorted by name; a directory among them has size 0 and a url that ends in "/".

        FetchError where there are more than ``max_listed_entries``.
        """
        with _one_attempt(url):
            return await self._run(partial(_list, url, self._max_entries))


@contextmanager
def _one_attempt(url: str, start: int | None = None, stop: int | None = None) -> Iterator[None]:
    """Raise a failed attempt as the error of its range: the same disk gives the same error."""
    try:
        yield
    except AttemptFailed as failure:
        raise failure.error(url=url, start=start, stop=stop, attempts=1) from failure.__cause__


def is_local(url: str) -> bool:
    """Return whether it is a path, or a url of a local file."""
    return "://" not in url or url[:7].lower() == "file://"


def read_small_files(urls: Sequence[str], max_bytes: int) -> list[tuple[ObjectInfo, memoryview]] | None:
    """Version and bytes of each local file; None where one isn't as small, or can't be read. Blocks.

    One call in a thread for several files: going there takes longer than reading one. Who gets None reads them by the
    transport, which says what is wrong.
    """
    found = []
    for url in urls:
        try:
            with opened(local_path(url)) as descriptor:
                info = _info(url, os.fstat(descriptor))
                data = os.pread(descriptor, max_bytes + 1, 0)
        except (AttemptFailed, ConfigError, OSError):
            return None
        if len(data) != info.size or len(data) > max_bytes:
            return None
        found.append((info, memoryview(data)))
    return found


def local_path(url: str) -> Path:
    """The path that a ``file://`` url or a plain path names; ConfigError for what can't be one."""
    try:
        path = _path_in(url) if "://" in url else os.fsencode(url)
    except ConfigError:
        raise
    except ValueError:  # of urlsplit, or a UnicodeEncodeError
        path = b""
    if not path or b"\0" in path:
        message = f"{redact_url(url)!r} is no path: it is empty, or holds a zero byte or what no file's name can hold"
        raise ConfigError(message)
    return Path(os.fsdecode(path))


def _path_in(url: str) -> bytes:
    """Return what a ``file://`` url names; ConfigError where that is another host's, ValueError where it is no url."""
    check_characters(url)
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"}:
        host = parts.netloc.rpartition("@")[2]
        message = f"{redact_url(url)!r} names a file of the host {host!r}: write file:///path for a local one"
        raise ConfigError(message)
    if "?" in url or "#" in url:  # without what stands behind them it would name another file
        message = f"{redact_url(url)!r} has a query or a fragment: write %3F for a ? in a file's name and %23 for a #"
        raise ConfigError(message)
    return unquote_to_bytes(os.fsencode(parts.path))


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """The descriptor of a file that is open for reading."""
    # Without O_NONBLOCK, opening a named pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(download: Download, known: ObjectInfo | None, next_step: NextStep) -> None:
    """Fill ``download``, of which an earlier answer said ``known``."""
    url = download.url
    try:
        with opened(local_path(url)) as descriptor:
            info = _info(url, os.fstat(descriptor))
            check_version(known, info, what=_CHANGED)
            start, stop = download.wanted.span_in(info.size)
            view = download.accept(AcceptedBody(info, start, stop))
            while (landed := download.landed_bytes) < len(view):
                next_step()
                step = view[landed : landed + READ_STEP_BYTES]
                count = os.preadv(descriptor, step.views if isinstance(step, ChainedBuffer) else [step], start + landed)
                if count == 0:
                    message = "the file was truncated while it was being read"
                    raise AttemptFailed(ObjectChanged, message, RetryVerdict.FATAL)
                download.landed_bytes += count
            check_version(info, _info(url, os.fstat(descriptor)), what=_CHANGED)
    except OSError as error:
        raise read_failure(error) from error


def _list(url: str, max_entries: int, next_step: NextStep) -> list[ObjectInfo]:
    """The entries of a directory; without those that are neither file nor directory, or gone meanwhile."""
    base = url if url.endswith("/") else f"{url}/"
    entries: list[os.DirEntry[str]] = []
    infos: list[ObjectInfo] = []
    try:
        with os.scandir(local_path(url)) as found:
            for entry in found:
                next_step()
                entries.append(entry)
                check_length(len(entries), max_entries)
        for entry in sorted(entries, key=lambda entry: entry.name):
            next_step()
            name = quote(os.fsencode(entry.name)) if "://" in url else entry.name
            try:
                if entry.is_dir():
                    infos.append(ObjectInfo(f"{base}{name}/", 0))
                elif entry.is_file():
                    infos.append(_info(base + name, entry.stat()))
            except OSError as error:
                is_gone = error.errno == errno.ENOENT
                if not is_gone and not (error.errno in _LEADS_NOWHERE and entry.is_symlink()):
                    raise
    except OSError as error:
        raise read_failure(error) from error
    return infos


def _info(url: str, status: os.stat_result) -> ObjectInfo:
    if not stat.S_ISREG(status.st_mode):
        raise AttemptFailed(NotFound, "there is something, but it is no regular file", RetryVerdict.FATAL)
    return ObjectInfo(url, status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"')


def _delete(path: Path) -> None:
    """Runs in a thread."""
    try:
        path.unlink()
    except FileNotFoundError as error:
        raise read_failure(error) from error
    except OSError as error:
        reason = error.strerror or str(error)
        kind = AccessDenied if isinstance(error, PermissionError) else FetchError
        raise AttemptFailed(kind, f"it can't be removed: {reason}", RetryVerdict.FATAL) from error


def read_failure(error: OSError) -> AttemptFailed:
    """Return the failed attempt that an error of the system at reading a local file stands for."""
    reason = error.strerror or str(error)
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return AttemptFailed(NotFound, f"{reason}: check the path", RetryVerdict.FATAL)
        case PermissionError():
            return AttemptFailed(AccessDenied, f"{reason}: this user may not read it", RetryVerdict.FATAL)
        case _:
            return AttemptFailed(FetchError, f"reading failed: {reason}", RetryVerdict.FATAL)


WRITE_STEP_BYTES = 4 * 1024 * 1024
"""Bytes read and written at once; between two of these it can be cancelled."""
UNDO_SECONDS = 10.0
"""Longest wait for the removal of what was written in vain; a disk that takes longer doesn't answer at all."""

_log = logging.getLogger(__name__)


async def write_file(path: Path, source: UploadSource, limiter: anyio.CapacityLimiter) -> os.stat_result:
    """Writes the source to ``path`` in place of what was there, in one step at its end; what it is then.

    It is on the disk, not only in the system's memory, when this returns; its name, too, unless this user may not read
    the directory. Directories above it are made, and stay. Of the file itself, an error or a cancellation leaves
    nothing behind, and a killed process a hidden one beside it.

    Raises:
        AttemptFailed: Of the system; the source's own errors come as they are.
    """
    file = _Beside(path)
    try:
        await run_to_its_end(file.open, limiter)
        while not source.at_end:
            await run_to_its_end(partial(file.write, await source.read(WRITE_STEP_BYTES)), limiter)
        return await run_to_its_end(file.finish, limiter)
    except BaseException:
        await outlast(partial(run_to_its_end, file.discard, limiter), seconds=UNDO_SECONDS)
        raise


@contextmanager
def _errors_of_writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _write_failure(error) from error


class _Beside:
    """A file beside its place. Each verb runs in a thread, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        name = os.fsencode(path.name)[:200].decode(errors="ignore")  # one has 255 bytes, fewer characters
        self._beside = path.with_name(f".{name}.{secrets.token_hex(8)}")
        self._file: io.FileIO | None = None

    @_errors_of_writing()
    def open(self) -> None:
        """Create the file, with the permissions that any new one gets."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(self._beside, "x")

    @_errors_of_writing()
    def write(self, view: memoryview) -> None:
        """Append to what is there."""
        assert self._file is not None
        while view:
            view = view[self._file.write(view) :]

    @_errors_of_writing()
    def finish(self) -> os.stat_result:
        """Bring the file to the disk, and to its place."""
        assert self._file is not None
        os.fsync(self._file)
        with self._file, _synced(self._path.parent):
            os.replace(self._beside, self._path)
            return os.fstat(self._file.fileno())

    def discard(self) -> None:
        """Nothing of it stays, unless it is in its place already; an error of that goes to the log alone."""
        if self._file is not None:
            self._file.close()
            try:
                self._beside.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s is left: remove it by hand (%s)", self._beside, error.strerror)


@contextmanager
def _synced(path: Path) -> Iterator[None]:
    """Bring the directory's entries to the disk after the block, unless this user may write it and not read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        descriptor = -1
    try:
        yield
        if descriptor >= 0:
            os.fsync(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _write_failure(error: OSError) -> AttemptFailed:
    reason = error.strerror or str(error)
    match error:
        case IsADirectoryError():
            return AttemptFailed(
                FetchError, "there is a directory in its place: choose another name", RetryVerdict.FATAL
            )
        case FileExistsError() | NotADirectoryError():
            message = f"{reason}: a part of its path is a file, and would have to be a directory"
            return AttemptFailed(FetchError, message, RetryVerdict.FATAL)
        case PermissionError():
            return AttemptFailed(AccessDenied, f"{reason}: this user may not write there", RetryVerdict.FATAL)
        case _:
            return AttemptFailed(FetchError, f"writing failed: {reason}", RetryVerdict.FATAL)

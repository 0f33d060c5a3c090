"""Local files: ranges of them, read in threads, and whole ones that are put."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import quote, unquote_to_bytes, urlsplit

import anyio
from anyio import from_thread

from asyncfetch.errors import AccessDenied, ConfigError, FetchError, NotFound, ObjectChanged, redact_url
from asyncfetch.fetch.buffers import ChainedBuffer
from asyncfetch.fetch.listing import check_length
from asyncfetch.fetch.objects import difference
from asyncfetch.fetch.responses import AcceptedBody
from asyncfetch.fetch.retry import AttemptFailed, RetryVerdict
from asyncfetch.fetch.urls import check_characters
from asyncfetch.ranges import ObjectInfo
from asyncfetch.runtime.cancellation import outlast
from asyncfetch.runtime.threads import run_to_its_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncfetch.fetch.buffers import Views
    from asyncfetch.fetch.download import Download
    from asyncfetch.fetch.hosts import Hosts
    from asyncfetch.fetch.retry import Attempt
    from asyncfetch.fetch.upload_sources import UploadSource

READ_STEP_BYTES = 1024 * 1024
"""Bytes read at once: between two of these a read can be cancelled; about 1 ms on a local disk, and 10 ms on a slow
one."""

_LEADS_NOWHERE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES})
"""Errors of a link to itself, through a file, too long, or to where this user may not look."""

T = TypeVar("T")


class FileTransport:
    """Fills downloads from local files, and writes such.

    A file has a strong version: its modification time, size and inode.
    """

    def __init__(self, hosts: Hosts, threads: int, *, max_entries: int) -> None:
        """``max_entries`` is the most that a listing may have."""
        self._hosts = hosts
        self._max_entries = max_entries
        self.limiter = anyio.CapacityLimiter(threads)

    def attempts(self, download: Download) -> Attempt:
        """Return what reads the file, once: the same disk gives the same error."""
        return partial(self._read, download)

    async def _read(self, download: Download, _: AttemptFailed | None) -> None:
        """Fills ``download``. Cancelled, it returns when the thread has stopped writing: after a step at most."""
        asked = download.asked
        host = self._hosts.get("file://")
        async with host.permit() as permit:
            host.counts.requests += 1
            since = host.now()
            try:
                await self._run(_FileRead(download, download.known))
            except AttemptFailed as failure:
                host.counts.errors += 1
                download.keep_landed(failure)
                raise failure.error(
                    url=download.url, start=asked.start, stop=asked.stop, attempts=1
                ) from failure.__cause__
            download.remember()
            permit.body_seconds = host.now() - since
            permit.landed(download.landed_bytes)

    async def _run(self, work: _InThread[T]) -> T:
        return await run_to_its_end(work.run, self.limiter, stop=work.stop)

    async def put(self, url: str, source: UploadSource) -> ObjectInfo:
        """The file that the source is now; see write_file.

        It takes no permit: a source may wait for reads that want one.
        """
        counts = self._hosts.get("file://").counts
        counts.requests += 1
        path = local_path(url)
        if url.endswith("/") or not path.name:
            raise ConfigError(f"{url!r} names a directory: write the name of a file")
        try:
            return _info(url, await write_file(path, source, self.limiter))
        except AttemptFailed as failure:
            counts.errors += 1
            raise failure.error(url=url, start=None, stop=None, attempts=1) from failure.__cause__

    async def delete(self, url: str) -> None:
        """Removes the file."""
        try:
            await run_to_its_end(partial(_delete, local_path(url)), self.limiter)
        except AttemptFailed as failure:
            raise failure.error(url=url, start=None, stop=None, attempts=1) from failure.__cause__

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The entries of a directory, sorted by name; a directory among them has size 0 and a url that ends in "/".

        FetchError where there are more than ``max_listed_entries``.
        """
        try:
            return await self._run(_FileListing(url, self._max_entries))
        except AttemptFailed as failure:
            raise failure.error(url=url, start=None, stop=None, attempts=1) from failure.__cause__


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
            descriptor = os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (ConfigError, OSError):
            return None
        try:
            info = _info(url, os.fstat(descriptor))
            data = os.pread(descriptor, max_bytes + 1, 0)
        except (AttemptFailed, OSError):
            return None
        finally:
            os.close(descriptor)
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


class _InThread(ABC, Generic[T]):
    """Work in a thread that ends after its step when it is cancelled, whichever way."""

    def __init__(self) -> None:
        self._stopped = False

    @abstractmethod
    def run(self) -> T:
        """Do the work, in the thread."""

    def stop(self) -> None:
        """Makes the thread give up at its next step. On the loop, once its result isn't wanted any more."""
        self._stopped = True

    def _next_step(self) -> None:
        from_thread.check_cancelled()  # an anyio scope's; a task's sets the flag
        if self._stopped:
            raise CancelledError  # in the thread alone: the task has its own


class _FileRead(_InThread[None]):
    """One range of a file: read in a thread, stopped from the loop."""

    def __init__(self, download: Download, known: ObjectInfo | None) -> None:
        super().__init__()
        self._download = download
        self._known = known

    def run(self) -> None:
        """Read the file, in the thread."""
        url = self._download.url
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for its writer.
            descriptor = os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _as_failure(error) from error
        try:
            info = _info(url, os.fstat(descriptor))
            _check_version(self._known, info)
            start, stop = self._download.wanted.span_in(info.size)
            self._read_exactly(descriptor, start, self._download.accept(AcceptedBody(info, start, stop)))
            _check_version(info, _info(url, os.fstat(descriptor)))
        except OSError as error:
            raise _as_failure(error) from error
        finally:
            os.close(descriptor)

    def _read_exactly(self, descriptor: int, start: int, view: Views) -> None:
        download = self._download
        while download.landed_bytes < len(view):
            self._next_step()
            landed = download.landed_bytes
            step = view[landed : landed + READ_STEP_BYTES]
            count = os.preadv(descriptor, step.views if isinstance(step, ChainedBuffer) else [step], start + landed)
            if count == 0:
                raise AttemptFailed(ObjectChanged, "the file was truncated while it was being read", RetryVerdict.FATAL)
            download.landed_bytes += count


class _FileListing(_InThread[list[ObjectInfo]]):
    """A local directory's entries."""

    def __init__(self, url: str, max_entries: int) -> None:
        super().__init__()
        self._url = url
        self._base = url if url.endswith("/") else f"{url}/"
        self._max_entries = max_entries

    def run(self) -> list[ObjectInfo]:
        """List the directory, in the thread."""
        entries: list[os.DirEntry[str]] = []
        try:
            with os.scandir(local_path(self._url)) as found:
                for entry in found:
                    self._next_step()
                    entries.append(entry)
                    check_length(len(entries), self._max_entries)
            entries.sort(key=lambda entry: entry.name)
            infos = [self._info_of(entry) for entry in entries]
        except OSError as error:
            raise _as_failure(error) from error
        return [info for info in infos if info is not None]

    def _info_of(self, entry: os.DirEntry[str]) -> ObjectInfo | None:
        """None for what is neither file nor directory, or gone meanwhile."""
        self._next_step()
        name = quote(os.fsencode(entry.name)) if "://" in self._url else entry.name
        try:
            if entry.is_dir():
                return ObjectInfo(f"{self._base}{name}/", 0)
            return _info(self._base + name, entry.stat()) if entry.is_file() else None
        except OSError as error:
            is_gone = error.errno == errno.ENOENT
            if is_gone or (error.errno in _LEADS_NOWHERE and entry.is_symlink()):
                return None
            raise


def _check_version(known: ObjectInfo | None, seen: ObjectInfo) -> None:
    changed = difference(known, seen) if known is not None else None
    if changed is not None:
        message = f"the file was changed since it was first read, {changed}: read it again from its start"
        raise AttemptFailed(ObjectChanged, message, RetryVerdict.FATAL)


def _info(url: str, status: os.stat_result) -> ObjectInfo:
    if not stat.S_ISREG(status.st_mode):
        raise AttemptFailed(NotFound, "there is something, but it is no regular file", RetryVerdict.FATAL)
    return ObjectInfo(url, status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"')


def _delete(path: Path) -> None:
    """Runs in a thread."""
    try:
        path.unlink()
    except FileNotFoundError as error:
        raise _as_failure(error) from error
    except OSError as error:
        reason = error.strerror or str(error)
        kind = AccessDenied if isinstance(error, PermissionError) else FetchError
        raise AttemptFailed(kind, f"it can't be removed: {reason}", RetryVerdict.FATAL) from error


def _as_failure(error: OSError) -> AttemptFailed:
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


class _Beside:
    """A file beside its place. Each verb runs in a thread, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        name = os.fsencode(path.name)[:200].decode(errors="ignore")  # one has 255 bytes, fewer characters
        self._beside = path.with_name(f".{name}.{secrets.token_hex(8)}")
        self._descriptor = -1
        self._exists = False

    def open(self) -> None:
        """Create the file, with the permissions that any new one gets."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _write_failure(error) from error
        self._exists = True

    def write(self, view: memoryview) -> None:
        """Append to what is there."""
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise _write_failure(error) from error

    def finish(self) -> os.stat_result:
        """Bring the file to the disk, and to its place."""
        try:
            os.fsync(self._descriptor)
            with _synced(self._path.parent):
                os.replace(self._beside, self._path)
                self._exists = False
                status = os.fstat(self._descriptor)
        except OSError as error:
            raise _write_failure(error) from error
        self._close()
        return status

    def discard(self) -> None:
        """Nothing of it stays, unless it is in its place already; an error of that goes to the log alone."""
        self._close()
        if self._exists:
            self._exists = False
            try:
                self._beside.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s is left: remove it by hand (%s)", self._beside, error.strerror)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


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

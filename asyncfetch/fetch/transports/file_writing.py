"""Local files that are there whole or not at all."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from asyncfetch.errors import AccessDenied, FetchError
from asyncfetch.fetch.retry import AttemptFailed, Verdict
from asyncfetch.runtime.cancellation import outlast
from asyncfetch.runtime.thread_call import run_to_its_end

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import anyio

    from asyncfetch.fetch.sources import Source

__all__ = ["write_file"]

STEP_BYTES = 4 * 1024 * 1024
"""Read and written at once; between two of these it can be cancelled."""
UNDO_SECONDS = 10.0
"""Longest wait for the removal of what was written in vain; a disk that takes longer doesn't answer at all."""

_log = logging.getLogger(__name__)


async def write_file(path: Path, source: Source, limiter: anyio.CapacityLimiter) -> os.stat_result:
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
            await run_to_its_end(partial(file.write, await source.read(STEP_BYTES)), limiter)
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
        """With the permissions that any new file gets."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _as_failure(error) from error
        self._exists = True

    def write(self, view: memoryview) -> None:
        """Behind what is there."""
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise _as_failure(error) from error

    def finish(self) -> os.stat_result:
        """On the disk, and in its place."""
        try:
            os.fsync(self._descriptor)
            with _synced(self._path.parent):
                os.replace(self._beside, self._path)
                self._exists = False
                status = os.fstat(self._descriptor)
        except OSError as error:
            raise _as_failure(error) from error
        self._close()
        return status

    def discard(self) -> None:
        """Nothing of it stays, unless it is in its place already; an error of that is nobody's but the log's."""
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
    """Behind it, the directory's entries are on the disk, too, unless this user may write it and not read it."""
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


def _as_failure(error: OSError) -> AttemptFailed:
    reason = error.strerror or str(error)
    match error:
        case IsADirectoryError():
            return AttemptFailed(FetchError, "there is a directory in its place: choose another name", Verdict.FATAL)
        case FileExistsError() | NotADirectoryError():
            message = f"{reason}: a part of its path is a file, and would have to be a directory"
            return AttemptFailed(FetchError, message, Verdict.FATAL)
        case PermissionError():
            return AttemptFailed(AccessDenied, f"{reason}: this user may not write there", Verdict.FATAL)
        case _:
            return AttemptFailed(FetchError, f"writing failed: {reason}", Verdict.FATAL)

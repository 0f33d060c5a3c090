"""Where a merged dataset comes to lie: a local folder, or a prefix of S3.

Files are built in a local folder either way. That of a local destination takes its place at the end, in one step. Of
one on S3 each file is put as soon as it is whole and removed, and ``meta/info.json``, without which there is no
dataset, comes last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.to_thread

from asyncfetch.errors import ConfigError, MergeError, NotFound, redact_url
from asyncfetch.fetch.batch import for_each
from asyncfetch.fetch.urls import join_url
from asyncfetch.merge.info import INFO_PATH
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from asyncfetch.fetch import Fetcher

__all__ = ["Destination", "LocalFolder", "Room", "S3Prefix", "destination_of"]

_DELETED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a merge needs, about."""

    dataset: int
    """Of all its files."""
    at_once: int
    """Of those that are being written at a time."""


class Destination(Protocol):
    """Where the files go. Used once: checked, opened, each file placed, finished."""

    @property
    def name(self) -> Path | str:
        """A local path, or a url."""
        ...

    async def check(self, sources: Sequence[str], *, overwrite: bool) -> None:
        """It is free, or may be replaced, and has nothing to do with a source; else MergeError."""
        ...

    def open(self, room: Room) -> AbstractAsyncContextManager[Path]:
        """An empty local folder to build in, gone when the block is left; MergeError where there is no room."""
        ...

    async def place(self, path: Path, name: str) -> None:
        """The file ``name`` of the dataset is whole, at ``path`` in the folder, and isn't read there any more."""
        ...

    async def finish(self) -> None:
        """All files are placed: the dataset is there from now on."""
        ...


def destination_of(destination: str | os.PathLike[str], fetcher: Fetcher) -> Destination:
    """The destination that a user names; ConfigError where none can be written there."""
    named = os.fspath(destination)
    if named.startswith("file://"):
        named = named.removeprefix("file://")
    if named.startswith("s3://"):
        return S3Prefix(named.rstrip("/"), fetcher)
    if "://" in named:
        raise ConfigError(
            f"a dataset is written to a local directory or below an s3:// prefix, not to {redact_url(named)!r}: copy "
            "the result there"
        )
    if not named:
        raise ConfigError("destination is empty; give the directory to write")
    return LocalFolder(Path(named).absolute())


class LocalFolder:
    """Built beside, and renamed: until then the destination is as it was."""

    def __init__(self, target: Path) -> None:
        """``target`` is absolute."""
        self.name = target
        self._overwrite = False

    async def check(self, sources: Sequence[str], *, overwrite: bool) -> None:
        """See Destination."""
        self._overwrite = overwrite
        await anyio.to_thread.run_sync(self._check, sources)

    @asynccontextmanager
    async def open(self, room: Room) -> AsyncIterator[Path]:
        """See Destination."""
        self._folder = await anyio.to_thread.run_sync(self._make_folder, room)
        try:
            yield self._folder
        finally:
            await _remove(self._folder)

    async def place(self, path: Path, name: str) -> None:
        """It is there already."""

    async def finish(self) -> None:
        """See Destination."""
        await anyio.to_thread.run_sync(self._publish)

    def _check(self, sources: Sequence[str]) -> None:
        target = self.name
        resolved = target.resolve()
        for source in sources:
            own = Path(source.removeprefix("file://")).resolve()
            if "://" not in source.removeprefix("file://") and (
                own.is_relative_to(resolved) or resolved.is_relative_to(own)
            ):
                raise MergeError(f"{target} is, holds or lies in the source {source}: sources are never changed")
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise MergeError(f"{target} isn't a directory; remove it or choose another destination")
        if target.exists() and any(target.iterdir()) and not self._overwrite:
            raise _is_taken(str(target))

    def _make_folder(self, room: Room) -> Path:
        target = self.name
        _check_space(next(parent for parent in target.parents if parent.exists()), room.dataset)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.merging-", dir=target.parent))
        folder.chmod(0o777 & ~_umask())
        return folder

    def _publish(self) -> None:
        """Move the folder to the target; what is there moves into the folder's old place, and goes with it."""
        target, folder = self.name, self._folder
        if not self._overwrite or not target.exists():
            try:
                folder.rename(target)  # onto an empty directory too, but onto no other
            except OSError as error:
                raise MergeError(f"{target} was written to by somebody else during the merge: {error}") from error
            return
        replaced = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent))
        try:
            target.rename(replaced / target.name)
            try:
                folder.rename(target)
            except BaseException:
                (replaced / target.name).rename(target)
                raise
        finally:
            shutil.rmtree(replaced, ignore_errors=True)


class S3Prefix:
    """Put file by file. What it has replaced is gone where it fails; without info.json the rest is no dataset."""

    def __init__(self, url: str, fetcher: Fetcher) -> None:
        self.name = url
        self._fetcher = fetcher
        self._stale: set[str] = set()
        self._placed = 0

    async def check(self, sources: Sequence[str], *, overwrite: bool) -> None:
        """See Destination."""
        for source in sources:
            own = f"{source.rstrip('/')}/"
            if own.startswith(f"{self.name}/") or f"{self.name}/".startswith(own):
                raise MergeError(f"{self.name} is, holds or lies in the source {source}: sources are never changed")
        self._stale = set(await _objects_below(self._fetcher, self.name, deep=overwrite))
        if self._stale and not overwrite:
            raise _is_taken(self.name)

    @asynccontextmanager
    async def open(self, room: Room) -> AsyncIterator[Path]:
        """See Destination. From here on what was there is no dataset any more."""
        folder = Path(await anyio.to_thread.run_sync(partial(tempfile.mkdtemp, prefix="asyncfetch-merging-")))
        try:
            await anyio.to_thread.run_sync(_check_space, folder, room.at_once)
            info_url = join_url(self.name, INFO_PATH)
            if info_url in self._stale:
                await self._fetcher.delete(info_url)
                self._stale.remove(info_url)
            yield folder
        except Exception as error:
            if self._placed:
                error.add_note(
                    f"{self._placed} files are at {self.name}, and no dataset yet: overwrite=True replaces them"
                )
            raise
        finally:
            await _remove(folder)

    async def place(self, path: Path, name: str) -> None:
        """See Destination."""
        if name == INFO_PATH:
            self._info = path
            return
        url = join_url(self.name, name)
        await self._fetcher.put(url, path)
        self._placed += 1
        self._stale.discard(url)
        await anyio.to_thread.run_sync(path.unlink)

    async def finish(self) -> None:
        """See Destination."""
        await for_each(self._stale, self._fetcher.delete, key=lambda _: self.name, workers=_DELETED_AT_ONCE)
        await self._fetcher.put(join_url(self.name, INFO_PATH), self._info)


async def _objects_below(fetcher: Fetcher, url: str, *, deep: bool) -> list[str]:
    """All of them; only what lies directly there unless ``deep``."""
    try:
        infos = await fetcher.listdir(url)
    except NotFound:
        return []
    objects = [info.url for info in infos if not info.url.endswith("/")]
    below = [info.url for info in infos if info.url.endswith("/")]
    if not deep:
        return objects + below
    for found in await gather(*(partial(_objects_below, fetcher, one, deep=True) for one in below)):
        objects += found
    return objects


def _is_taken(name: str) -> MergeError:
    return MergeError(f"{name} isn't empty; pass overwrite=True to replace it, or choose another destination")


def _check_space(place: Path, nbytes: int) -> None:
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < nbytes:
        raise MergeError(f"{place} has {free_bytes} bytes free, but the merge takes about {nbytes} there")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


async def _remove(folder: Path) -> None:
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))

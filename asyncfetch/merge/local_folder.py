"""A local folder as a merge's destination; see ``folder`` for how it is built."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncfetch.errors import DatasetError, MergeError
from asyncfetch.fetch.transports.file import local_path
from asyncfetch.merge.destination import check_space, is_taken
from asyncfetch.merge.folder import (
    BuildFolder,
    build_folder,
    is_perhaps_finished,
    open_folder,
    restore_target,
    share_folder,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from asyncfetch.fetch import Fetcher
    from asyncfetch.merge.destination import Needed, WrittenFile

__all__ = ["LocalFolder"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A Destination. Until the dataset takes its place it is as it was."""

    name: Path
    """Absolute."""

    async def check(self, fetcher: Fetcher, sources: Sequence[str], *, overwrite: bool) -> None:
        """See Destination."""
        await anyio.to_thread.run_sync(self._check, sources, overwrite)

    def build(self, fingerprint: str) -> LocalBuild:
        """See Destination."""
        return LocalBuild(self.name, build_folder(self.name, fingerprint))

    def _check(self, sources: Sequence[str], overwrite: bool) -> None:
        target = self.name
        restore_target(target)
        resolved = target.resolve()
        for source in sources:
            own = _place_of(source)
            if own is not None and (own.is_relative_to(resolved) or resolved.is_relative_to(own)):
                raise MergeError(f"{target} is, holds or lies in the source {source}: sources are never changed")
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise MergeError(f"{target} isn't a directory; remove it or choose another destination")
        if not overwrite and not is_perhaps_finished(target):
            _check_free(target)


@dataclass(frozen=True, slots=True)
class LocalBuild:
    """A Build in a folder beside the target, on the same file system."""

    target: Path
    folder: BuildFolder

    @asynccontextmanager
    async def open(self, fetcher: Fetcher, needed: Needed, *, overwrite: bool) -> AsyncIterator[None]:
        """See Build."""
        folder = self.folder
        if not overwrite:
            await anyio.to_thread.run_sync(_check_free, self.target)
        with ExitStack() as stack:
            await anyio.to_thread.run_sync(stack.enter_context, open_folder(folder, self.target))
            try:
                await anyio.to_thread.run_sync(self._check_space, needed)
                yield
            except BaseException as error:
                with anyio.CancelScope(shield=True):
                    if isinstance(error, DatasetError):  # the next attempt would meet it too
                        await anyio.to_thread.run_sync(folder.remove)
                    elif kept := await anyio.to_thread.run_sync(folder.keep_finished):
                        logger.warning(
                            "%d finished files stay in %s: the same merge goes on from there", kept, folder.root
                        )
                raise

    @asynccontextmanager
    async def share(self, fetcher: Fetcher, needed: Needed, *, overwrite: bool) -> AsyncIterator[None]:
        """See Build."""
        if not overwrite:
            await anyio.to_thread.run_sync(_check_free, self.target)
        with ExitStack() as stack:
            await anyio.to_thread.run_sync(stack.enter_context, share_folder(self.folder, self.target))
            await anyio.to_thread.run_sync(self._check_space, needed)
            yield

    async def finished(self, fetcher: Fetcher) -> list[WrittenFile] | None:
        """See Build. Reads all of it."""
        return await anyio.to_thread.run_sync(self.folder.finished_at, self.target)

    async def forget(self, fetcher: Fetcher) -> None:
        """See Build."""
        await anyio.to_thread.run_sync(self.folder.remove)

    async def find(self, fetcher: Fetcher, path: str) -> WrittenFile | None:
        """See Build. Reads all of it."""
        return await anyio.to_thread.run_sync(self.folder.find, path)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[Path]:
        """See Build. Where the files stay."""
        yield self.folder.dataset

    async def finish(self, fetcher: Fetcher, room: Path, path: str) -> WrittenFile:
        """See Build."""
        return await anyio.to_thread.run_sync(self.folder.finish, path)

    def url(self, path: str) -> str:
        """See Build."""
        return str(self.folder.dataset / path)

    async def publish(
        self,
        fetcher: Fetcher,
        room: Path,
        files: Sequence[WrittenFile],
        metadata: Sequence[str],
        *,
        overwrite: bool,
    ) -> None:
        """See Build."""
        publish = partial(self.folder.publish, self.target, files, metadata, overwrite=overwrite)
        await anyio.to_thread.run_sync(publish)

    def _check_space(self, needed: Needed) -> None:
        check_space(self.folder.root, needed.dataset - self.folder.measure())


def _check_free(target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise is_taken(target)


def _place_of(source: str) -> Path | None:
    """Where on this machine a source lies, links followed; None where its url doesn't tell."""
    scheme, separator, rest = source.partition("://")
    match scheme.lower() if separator else "file":
        case "file":
            return local_path(source).resolve()
        case "local":  # fsspec's, which unquotes nothing
            return local_path(os.path.expanduser(rest)).resolve()
        case _:
            return None

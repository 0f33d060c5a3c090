"""The destination of a merge: a local folder, or a prefix of S3.

    local_folder    built in a folder beside it, which takes the destination's place in one step
    s3_prefix       each file is put as soon as it is whole; ``meta/info.json``, without which there is no dataset, last

Both are values that pickle: any process can write its share, with a fetcher of its own.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncfetch.errors import AsyncFetchError, MergeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from asyncfetch.fetch import Fetcher


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file of the dataset."""

    path: str
    """Path in the dataset."""
    nbytes: int
    checksum: str
    """The CRC-32 of a local file, the entity tag of an object."""


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """Bytes that a merge needs, about."""

    dataset: int
    """Bytes of all files of rows and videos."""
    at_once: int
    """Bytes of the files that are being written at a time."""


class Destination(Protocol):
    """A place for the dataset."""

    @property
    def name(self) -> Path | str:
        """A local path, or a url."""
        ...

    async def check(self, fetcher: Fetcher, sources: Sequence[str], *, overwrite: bool) -> None:
        """Repair the state that a killed merge left, and check that the destination can be used.

        Raises:
            MergeError: It isn't free and may not be replaced, or overlaps with a source. If it may be the result of a
                finished merge, ``Build.open`` raises this instead.
        """
        ...

    def build(self, fingerprint: str) -> Build:
        """The build of the plan with this fingerprint, new or begun."""
        ...


class Build(Protocol):
    """A dataset under construction, in any number of attempts."""

    def open(
        self, fetcher: Fetcher, needed: SpaceNeed, *, overwrite: bool, shared: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Hold it: alone, or ``shared`` with other processes of the same plan, which write other files.

        After an error, a build that was held alone stays if the next attempt can use it.

        Raises:
            MergeError: There is no room, or another merge holds it or has filled the destination.
        """
        ...

    async def finished(self, fetcher: Fetcher) -> list[WrittenFile] | None:
        """All files of the destination, if a merge of this plan was killed after it had published them.

        None if it wasn't, or the dataset has changed since.
        """
        ...

    async def forget(self, fetcher: Fetcher) -> None:
        """Remove all traces of the build of a published dataset."""
        ...

    async def find(self, fetcher: Fetcher, path: str) -> WrittenFile | None:
        """The file, if it is finished and unchanged."""
        ...

    def room(self) -> AbstractAsyncContextManager[Path]:
        """A local folder to write files in, laid out like the dataset."""
        ...

    async def finish(self, fetcher: Fetcher, room: Path, path: str) -> WrittenFile:
        """Note that the file in the room is complete, and store it."""
        ...

    def url(self, path: str) -> str:
        """The url of a finished file."""
        ...

    async def publish(
        self, fetcher: Fetcher, room: Path, files: Sequence[WrittenFile], metadata: Sequence[str], *, overwrite: bool
    ) -> None:
        """Publish the dataset. ``finished`` knows it until ``forget``.

        Args:
            fetcher: Writes.
            room: Has the files of metadata.
            files: The finished files.
            metadata: Paths of the files of metadata, info.json last.
            overwrite: Replace existing files.

        Raises:
            MergeError: The destination was made, or filled, by another process.
        """
        ...


def is_taken(name: Path | str) -> MergeError:
    """The error for a destination that isn't free."""
    return MergeError(f"{name} isn't empty; pass overwrite=True to replace it, or choose another destination")


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


def check_space(place: Path, nbytes: int) -> None:
    """MergeError unless there is room for this many bytes more. Blocks."""
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < nbytes:
        raise MergeError(
            f"{place} has {free_bytes} bytes free, but the merge has about {nbytes} to write there: make room, or "
            "choose another place"
        )

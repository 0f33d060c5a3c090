"""The place where a merged dataset is built, and stays: a local folder, or a prefix of S3.

    local_folder    built in a folder beside, which takes the destination's place in one step
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
    """Bytes of those that are being written at a time."""


class Destination(Protocol):
    """The place for the dataset."""

    @property
    def name(self) -> Path | str:
        """A local path, or a url."""
        ...

    async def check(self, fetcher: Fetcher, sources: Sequence[str], *, overwrite: bool) -> None:
        """Put right what a killed merge left.

        Raises:
            MergeError: It isn't free and may not be replaced, or has to do with a source. Where it is perhaps what a
                merge has finished, ``Build.open`` raises it.
        """
        ...

    def build(self, fingerprint: str) -> Build:
        """Return the build of the plan with this fingerprint, whether something of it is there or not."""
        ...


class Build(Protocol):
    """A dataset that is being built for its destination, in any number of attempts."""

    def open(
        self, fetcher: Fetcher, needed: SpaceNeed, *, overwrite: bool, shared: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Hold it: alone, or ``shared`` with others of the same plan, who have divided the files among them.

        On an error, what was held alone stays for the next attempt, if that can have anything of it.

        Raises:
            MergeError: There is no room, or another merge holds it or has filled the destination.
        """
        ...

    async def finished(self, fetcher: Fetcher) -> list[WrittenFile] | None:
        """All files of the destination, where a merge of this plan was killed after the dataset had taken its place.

        None where it wasn't, or the dataset isn't what it was then.
        """
        ...

    async def forget(self, fetcher: Fetcher) -> None:
        """Forget the build of what is published: there is nothing of it from now on."""
        ...

    async def find(self, fetcher: Fetcher, path: str) -> WrittenFile | None:
        """The file, if it is finished and still what it was."""
        ...

    def room(self) -> AbstractAsyncContextManager[Path]:
        """A local folder to write files in, laid out as the dataset is."""
        ...

    async def finish(self, fetcher: Fetcher, room: Path, path: str) -> WrittenFile:
        """The file in the room is whole, and noted to be."""
        ...

    def url(self, path: str) -> str:
        """Return where a finished file can be read."""
        ...

    async def publish(
        self, fetcher: Fetcher, room: Path, files: Sequence[WrittenFile], metadata: Sequence[str], *, overwrite: bool
    ) -> None:
        """The dataset is there from now on. That it is finished is known until ``forget``.

        Args:
            fetcher: Writes.
            room: With the files of metadata.
            files: Those that are finished.
            metadata: Paths of the others, info.json last.
            overwrite: Replace what is there.

        Raises:
            MergeError: The destination was made, or filled, by another process.
        """
        ...


def is_taken(name: Path | str) -> MergeError:
    """Return what is raised where a destination isn't free."""
    return MergeError(f"{name} isn't empty; pass overwrite=True to replace it, or choose another destination")


@contextmanager
def system_errors(names: Iterable[Path | str]) -> Iterator[None]:
    """Raise what the system refuses meanwhile, room or leave to write for one, as a MergeError."""
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
    """There is room for this many bytes more. Blocks.

    Raises:
        MergeError: There isn't.
    """
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < nbytes:
        raise MergeError(
            f"{place} has {free_bytes} bytes free, but the merge has about {nbytes} to write there: make room, or "
            "choose another place"
        )

"""A local folder as a merge's destination, and the folder in which it is built.

A merged dataset is built in a folder beside the destination, which a killed merge leaves and the next one finds.

    .NAME.merging-FINGERPRINT/
        lock        locked as long as a merge builds here
        dataset/    becomes the destination, by renaming
        journal/    a small file for each finished file, with its size and checksum
        replaced    the destination's former content, between two renames
        finished    a description of the dataset, from just before it is published until all else here is gone

The fingerprint is that of the plan, which determines every byte, so finished files aren't written again. A file that
isn't in the journal, or doesn't match it, is written again.

Files for destinations elsewhere are written in a temporary folder.

    TMPDIR/asyncfetch-merging-RANDOM/lock     locked as long as a merge writes there

A killed merge leaves its folders with free locks, and the next merge here removes them. On a file system without locks
they stay.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import zlib
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncfetch.errors import DatasetError, MergeError
from asyncfetch.fetch.transports.file import local_path
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from asyncfetch.fetch import Fetcher

_PREFIX = "asyncfetch-merging-"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file of the dataset."""

    path: str
    """Path in the dataset."""
    nbytes: int
    checksum: str
    """The CRC-32 of a local file, the entity tag of an object."""


def is_taken(name: Path | str) -> MergeError:
    """The error for a destination that isn't free."""
    return MergeError(f"{name} isn't empty; pass overwrite=True to replace it, or choose another destination")


def check_space(place: Path, nbytes: int) -> None:
    """MergeError unless there is room for this many bytes more. Blocks."""
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < nbytes:
        raise MergeError(
            f"{place} has {free_bytes} bytes free, but the merge has about {nbytes} to write there: make room, or "
            "choose another place"
        )


@contextmanager
def temporary_room() -> Iterator[Path]:
    """An empty folder, gone when the block is left. Blocks."""
    is_mine: bool | None = False
    while is_mine is False:  # a sweep may have removed it before it was locked
        with (
            tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name,
            locked(Path(name)) as is_mine,
        ):
            if is_mine is not False:
                yield Path(name)


def sweep_rooms() -> None:
    """Remove the folders of killed merges. Blocks."""
    for root in _directories(Path(tempfile.gettempdir()), _PREFIX):
        with suppress(OSError), locked(root) as is_mine:  # another user's can't be locked
            if is_mine:
                shutil.rmtree(root, ignore_errors=True)


_READ_BYTES = 1024 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A Destination. Until the dataset takes its place it is as it was."""

    name: Path
    """Absolute."""
    fingerprint: str = ""
    """That of the plan of the build."""

    def build(self, fingerprint: str) -> LocalFolder:
        """The same place with the build of the plan with this fingerprint, new or begun."""
        return replace(self, fingerprint=fingerprint)

    async def check(self, fetcher: Fetcher, sources: Sequence[str], *, overwrite: bool) -> None:
        """Repair the state that a killed merge left; MergeError unless the destination can be used.

        It must be free, unless it may be replaced, and apart from the sources. If it may be the result of a finished
        merge, ``open`` raises the error instead.
        """
        await run_sync(self._check, sources, overwrite)

    @asynccontextmanager
    async def open(
        self, fetcher: Fetcher, needed_bytes: int, bytes_at_once: int, *, overwrite: bool, shared: bool = False
    ) -> AsyncIterator[None]:
        """Hold the build: alone, or ``shared`` with other processes of the same plan, which write other files.

        After an error, a build that was held alone stays if the next attempt can use it. MergeError if there is no room
        for the bytes of all files, or of those that are written at a time, or if another merge holds the build or has
        filled the destination.
        """
        if not overwrite:
            await run_sync(self._check_free)
        with ExitStack() as stack:
            await run_sync(stack.enter_context, self.held(shared=shared))
            try:
                await run_sync(self._check_space, needed_bytes)
                yield
            except BaseException as error:
                if not shared:
                    with anyio.CancelScope(shield=True):
                        await run_sync(self._leave, error)
                raise

    async def finished(self, fetcher: Fetcher) -> list[WrittenFile] | None:
        """All files of the destination, if a merge of this plan was killed after it had published just these."""
        return await run_sync(self._finished)

    async def forget(self, fetcher: Fetcher) -> None:
        """Remove all traces of the build of a published dataset."""
        await run_sync(self._remove)

    async def find(self, fetcher: Fetcher, path: str) -> WrittenFile | None:
        """The file, if it is finished and unchanged."""
        return await run_sync(self.find_now, path)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[Path]:
        """A local folder to write files in, laid out like the dataset."""
        yield self.dataset

    async def finish(self, fetcher: Fetcher, room: Path, path: str) -> WrittenFile:
        """Note that the file in the room is complete, and store it."""
        return await run_sync(self._finish, path)

    def url(self, path: str) -> str:
        """The url of a finished file."""
        return str(self.dataset / path)

    async def publish(
        self, fetcher: Fetcher, room: Path, files: Sequence[WrittenFile], metadata: Sequence[str], *, overwrite: bool
    ) -> None:
        """Publish the finished files and those of metadata in the room, info.json last; MergeError if it isn't free.

        ``finished`` knows them until ``forget``.
        """
        await run_sync(self._publish, files, metadata, overwrite)

    @property
    def root(self) -> Path:
        """The folder of the build, which may not exist."""
        return self.name.parent / f"{self._prefix}{self.fingerprint}"

    @property
    def dataset(self) -> Path:
        """The dataset, which becomes the destination."""
        return self.root / "dataset"

    @property
    def replaced(self) -> Path:
        """The destination's former content."""
        return self.root / "replaced"

    @property
    def _note_of_all(self) -> Path:
        return self.root / "finished"

    @property
    def _prefix(self) -> str:
        return f".{self.name.name}.merging-"

    def builds(self) -> list[LocalFolder]:
        """The unfinished builds of all plans for this destination."""
        roots = _directories(self.name.parent, self._prefix)
        return [self.build(root.name.removeprefix(self._prefix)) for root in roots if (root / "lock").is_file()]

    @contextmanager
    def held(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the build, as ``open`` does; MergeError if another merge builds for this destination. Blocks.

        When held alone, dead merges' folders of other plans for the same destination are removed.
        """
        for other in () if shared else self.builds():
            if other != self:
                with locked(other.root) as is_mine:
                    if is_mine:
                        other._remove()
                    elif is_mine is False:
                        raise other._busy()
        self.dataset.mkdir(parents=True, exist_ok=True)
        with locked(self.root, shared=shared) as is_mine:
            if is_mine is False:
                raise self._busy()
            if not shared:
                self._note_of_all.unlink(missing_ok=True)  # its dataset is gone
                if self.name.exists():  # a merge was killed between publishing and tidying up
                    shutil.rmtree(self.replaced, ignore_errors=True)
            yield

    def find_now(self, path: str) -> WrittenFile | None:
        """``find``, which blocks."""
        with suppress(OSError, ValueError, TypeError):  # an unreadable file is written again
            noted = WrittenFile(**json.loads(self._note(path).read_text()))
            if noted == _measure(self.dataset / path, path):
                return noted
        return None

    def count_finished(self) -> int:
        """The number of files in the journal."""
        return sum(1 for _ in (self.root / "journal").glob("*.json"))

    def _check(self, sources: Sequence[str], overwrite: bool) -> None:
        target = self.name
        builds = self.builds()
        for build in builds:
            with locked(build.root) as is_mine:
                if is_mine and build.replaced.exists() and not target.exists():
                    build.replaced.rename(target)
        resolved = target.resolve()
        for source in sources:
            own = _place_of(source)
            if own is not None and (own.is_relative_to(resolved) or resolved.is_relative_to(own)):
                raise MergeError(f"{target} is, holds or lies in the source {source}: sources are never changed")
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise MergeError(f"{target} isn't a directory; remove it or choose another destination")
        if not overwrite and not any(build._note_of_all.exists() for build in builds):
            self._check_free()

    def _check_free(self) -> None:
        if self.name.exists() and any(self.name.iterdir()):
            raise is_taken(self.name)

    def _busy(self) -> MergeError:
        return MergeError(
            f"{self.name} is being built by another merge, in {self.root}: wait until that has ended, or end it"
        )

    def _check_space(self, needed_bytes: int) -> None:
        there = sum(path.stat().st_size for path in self.dataset.rglob("*") if path.is_file())
        check_space(self.root, needed_bytes - there)

    def _leave(self, error: BaseException) -> None:
        """Keep finished files for the next attempt, unless that would fail, too."""
        kept = self.count_finished()
        if isinstance(error, DatasetError) or not (kept or self._note_of_all.exists()):
            self._remove()
        elif kept:
            logger.warning("%d finished files stay in %s: the same merge goes on from there", kept, self.root)

    def _finished(self) -> list[WrittenFile] | None:
        try:
            noted = [WrittenFile(**one) for one in json.loads(self._note_of_all.read_text())]
            paths = sorted(str(path.relative_to(self.name)) for path in self.name.rglob("*") if not path.is_dir())
            return noted if noted == [_measure(self.name / path, path) for path in paths] else None
        except (FileNotFoundError, ValueError):  # it, or the dataset, is missing or incomplete
            return None

    def _finish(self, path: str) -> WrittenFile:
        with (self.dataset / path).open("rb") as file:
            os.fsync(file.fileno())  # the note mustn't outlive the file
        written = _measure(self.dataset / path, path)
        note = self._note(path)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(asdict(written)))
        return written

    def _publish(self, files: Sequence[WrittenFile], metadata: Sequence[str], overwrite: bool) -> None:
        moves = overwrite and self.name.exists()
        whole = [*files, *(_measure(self.dataset / path, path) for path in metadata)]
        noted = [asdict(file) for file in sorted(whole, key=lambda file: file.path)]
        self._note_of_all.write_text(json.dumps(noted))
        if moves:
            self.name.rename(self.replaced)
        try:
            self.dataset.rename(self.name)  # this replaces an empty directory, but no other
        except OSError as error:
            self._note_of_all.unlink()
            if moves:
                self.replaced.rename(self.name)
            raise MergeError(f"{self.name} was written to by another process during the merge: {error}") from error
        self._remove_all_but_the_note()

    def _remove(self) -> None:
        """Remove the folder, the lock last: after a kill in between, the next merge can remove the rest."""
        self._remove_all_but_the_note()
        self._note_of_all.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def _remove_all_but_the_note(self) -> None:
        for directory in (self.replaced, self.dataset, self.root / "journal"):
            shutil.rmtree(directory, ignore_errors=True)

    def _note(self, path: str) -> Path:
        return self.root / "journal" / f"{blake2b(path.encode(), digest_size=16).hexdigest()}.json"


def _measure(place: Path, path: str) -> WrittenFile:
    crc32 = nbytes = 0
    with place.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            crc32, nbytes = zlib.crc32(piece, crc32), nbytes + len(piece)
    return WrittenFile(path, nbytes, f"{crc32:08x}")


def _directories(parent: Path, prefix: str) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [Path(one.path) for one in entries if one.name.startswith(prefix) and not one.is_symlink()]
    except FileNotFoundError:
        return []


@contextmanager
def locked(root: Path, *, shared: bool = False) -> Iterator[bool | None]:
    """Yield whether the folder is ours until the block is left; None on a file system without locks."""
    try:
        descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # another merge is removing it
        yield False
        return
    try:
        yield _try_lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool | None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return os.fstat(descriptor).st_nlink > 0  # else it was swept away between the opening and the locking


def _place_of(source: str) -> Path | None:
    """The resolved path of a local source; None for another url."""
    scheme, separator, rest = source.partition("://")
    match scheme.lower() if separator else "file":
        case "file":
            return local_path(source).resolve()
        case "local":  # fsspec's, which unquotes nothing
            return local_path(os.path.expanduser(rest)).resolve()
        case _:
            return None

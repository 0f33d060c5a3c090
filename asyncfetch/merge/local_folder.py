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
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncfetch.errors import DatasetError, MergeError
from asyncfetch.fetch.transports.file import local_path
from asyncfetch.merge.destination import WrittenFile, check_space, is_taken
from asyncfetch.runtime.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from asyncfetch.fetch import Fetcher
    from asyncfetch.merge.destination import SpaceNeed

_PREFIX = "asyncfetch-merging-"


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
    with os.scandir(tempfile.gettempdir()) as entries:
        left = [Path(entry.path) for entry in entries if entry.name.startswith(_PREFIX) and not entry.is_symlink()]
    for root in left:
        try:
            with locked(root) as is_mine:
                if is_mine:
                    BuildFolder(root).remove()
        except OSError:  # another user's
            continue


_READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BuildFolder:
    """The folder's layout; a value, which any process on this file system can use. Its methods block."""

    root: Path

    @property
    def dataset(self) -> Path:
        """The dataset, which becomes the destination."""
        return self.root / "dataset"

    @property
    def lock(self) -> Path:
        """Locked as long as a merge builds here."""
        return self.root / "lock"

    @property
    def replaced(self) -> Path:
        """The destination's former content."""
        return self.root / "replaced"

    @property
    def finished(self) -> Path:
        """The description of the dataset that is being published, or was."""
        return self.root / "finished"

    def finished_at(self, target: Path) -> list[WrittenFile] | None:
        """The files of the target, if it is exactly the dataset built here. Reads all of it."""
        try:
            noted = [WrittenFile(**one) for one in json.loads(self.finished.read_text())]
            paths = sorted(str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir())
            return noted if noted == [_measure(target / path, path) for path in paths] else None
        except (FileNotFoundError, ValueError):  # it, or the dataset, is missing or incomplete
            return None

    def find(self, path: str) -> WrittenFile | None:
        """The file, if it is finished and unchanged. Reads all of it."""
        with suppress(OSError, ValueError, TypeError):  # an unreadable file is written again
            noted = WrittenFile(**json.loads(self._note(path).read_text()))
            if noted == _measure(self.dataset / path, path):
                return noted
        return None

    def finish(self, path: str) -> WrittenFile:
        """Note that the file is complete."""
        with (self.dataset / path).open("rb") as file:
            os.fsync(file.fileno())  # the note mustn't outlive the file
        written = _measure(self.dataset / path, path)
        note = self._note(path)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(asdict(written)))
        return written

    def measure(self) -> int:
        """Bytes of the files in the dataset."""
        return sum(path.stat().st_size for path in self.dataset.rglob("*") if path.is_file())

    def keep_finished(self) -> int:
        """The number of files in the journal; the folder is removed if there are none."""
        count = sum(1 for _ in (self.root / "journal").glob("*.json"))
        if not count and not self.finished.exists():
            self.remove()
        return count

    def publish(self, target: Path, files: Sequence[WrittenFile], metadata: Sequence[str], *, overwrite: bool) -> None:
        """Move the dataset to the target, and the target's former content away. ``finished`` notes it until ``remove``.

        Raises:
            MergeError: The target was made, or filled, by another process.
        """
        moves = overwrite and target.exists()
        whole = [*files, *(_measure(self.dataset / path, path) for path in metadata)]
        noted = [asdict(file) for file in sorted(whole, key=lambda file: file.path)]
        self.finished.write_text(json.dumps(noted))
        if moves:
            target.rename(self.replaced)
        try:
            self.dataset.rename(target)  # this replaces an empty directory, but no other
        except OSError as error:
            self.finished.unlink()
            if moves:
                self.replaced.rename(target)
            raise MergeError(f"{target} was written to by another process during the merge: {error}") from error
        self._remove_all_but_the_note()

    def remove(self) -> None:
        """Remove the folder, the lock last: after a kill in between, the next merge can remove the rest."""
        self._remove_all_but_the_note()
        self.finished.unlink(missing_ok=True)
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


def build_folder(target: Path, fingerprint: str) -> BuildFolder:
    """The folder for this destination and plan, which may not exist."""
    return BuildFolder(target.parent / f"{_prefix(target)}{fingerprint}")


@contextmanager
def open_folder(folder: BuildFolder, target: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the folder: alone, or with other processes of the same plan, which write other files.

    When held alone, dead merges' folders of other plans for the same destination are removed.

    Raises:
        MergeError: Another merge builds for this destination.
    """
    for other in _folders(target):
        if other != folder and not shared:
            with locked(other.root) as is_mine:
                if is_mine:
                    other.remove()
                elif is_mine is False:
                    raise _busy(target, other)
    folder.dataset.mkdir(parents=True, exist_ok=True)
    with locked(folder.root, shared=shared) as is_mine:
        if is_mine is False:
            raise _busy(target, folder)
        if not shared:
            folder.finished.unlink(missing_ok=True)  # its dataset is gone
            if target.exists():  # a merge was killed between publishing and tidying up
                shutil.rmtree(folder.replaced, ignore_errors=True)
        yield


def restore_target(target: Path) -> None:
    """Restore the target's former content if a merge was killed between its two renames."""
    for folder in _folders(target):
        with locked(folder.root) as is_mine:
            if is_mine and folder.replaced.exists() and not target.exists():
                folder.replaced.rename(target)


def is_perhaps_finished(target: Path) -> bool:
    """Return whether a merge was killed while it published a dataset here, or after that."""
    return any(folder.finished.exists() for folder in _folders(target))


def _prefix(target: Path) -> str:
    return f".{target.name}.merging-"


def _folders(target: Path) -> list[BuildFolder]:
    """The unfinished build folders of all plans for this target."""
    try:
        with os.scandir(target.parent) as entries:
            found = [entry for entry in entries if entry.name.startswith(_prefix(target)) and not entry.is_symlink()]
    except FileNotFoundError:
        return []
    return [folder for entry in found if (folder := BuildFolder(Path(entry.path))).lock.is_file()]


def _busy(target: Path, folder: BuildFolder) -> MergeError:
    return MergeError(
        f"{target} is being built by another merge, in {folder.root}: wait until that has ended, or end it"
    )


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


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A Destination. Until the dataset takes its place it is as it was."""

    name: Path
    """Absolute."""

    async def check(self, fetcher: Fetcher, sources: Sequence[str], *, overwrite: bool) -> None:
        """Put back a target that a killed merge had moved, and refuse one that can't be written."""
        await run_sync(self._check, sources, overwrite)

    def build(self, fingerprint: str) -> _LocalBuild:
        """Return the build in a folder beside it."""
        return _LocalBuild(self.name, build_folder(self.name, fingerprint))

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
class _LocalBuild:
    """A Build in a folder beside the target, on the same file system."""

    target: Path
    folder: BuildFolder

    @asynccontextmanager
    async def open(
        self, fetcher: Fetcher, needed: SpaceNeed, *, overwrite: bool, shared: bool = False
    ) -> AsyncIterator[None]:
        if not overwrite:
            await run_sync(_check_free, self.target)
        with ExitStack() as stack:
            await run_sync(stack.enter_context, open_folder(self.folder, self.target, shared=shared))
            try:
                await run_sync(self._check_space, needed)
                yield
            except BaseException as error:
                if not shared:
                    with anyio.CancelScope(shield=True):
                        await run_sync(self._leave, error)
                raise

    async def finished(self, fetcher: Fetcher) -> list[WrittenFile] | None:
        return await run_sync(self.folder.finished_at, self.target)

    async def forget(self, fetcher: Fetcher) -> None:
        await run_sync(self.folder.remove)

    async def find(self, fetcher: Fetcher, path: str) -> WrittenFile | None:
        return await run_sync(self.folder.find, path)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[Path]:
        """The dataset's folder."""
        yield self.folder.dataset

    async def finish(self, fetcher: Fetcher, room: Path, path: str) -> WrittenFile:
        return await run_sync(self.folder.finish, path)

    def url(self, path: str) -> str:
        return str(self.folder.dataset / path)

    async def publish(
        self, fetcher: Fetcher, room: Path, files: Sequence[WrittenFile], metadata: Sequence[str], *, overwrite: bool
    ) -> None:
        await run_sync(partial(self.folder.publish, self.target, files, metadata, overwrite=overwrite))

    def _check_space(self, needed: SpaceNeed) -> None:
        check_space(self.folder.root, needed.dataset - self.folder.measure())

    def _leave(self, error: BaseException) -> None:
        """Keep finished files for the next attempt, unless that would fail, too."""
        if isinstance(error, DatasetError):
            self.folder.remove()
        elif kept := self.folder.keep_finished():
            logger.warning("%d finished files stay in %s: the same merge goes on from there", kept, self.folder.root)


def _check_free(target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise is_taken(target)


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

"""Where a merged dataset is built: a folder beside the destination, which a killed merge leaves and the next one finds.

    .NAME.merging-FINGERPRINT/
        lock        locked as long as somebody builds here
        dataset/    what becomes the destination, by renaming
        journal/    a small file for each that is finished, with its size and checksum
        replaced    what was at the destination, between two renames
    finished    what the dataset is, from just before it takes its place until all else here is gone

The fingerprint is that of the plan, of which every byte follows, so what is finished there is what would be written
again. A file that isn't in the journal, or isn't what the journal says, is written anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from asyncfetch.errors import MergeError
from asyncfetch.merge.destination import WrittenFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "BuildFolder",
    "build_folder",
    "is_perhaps_finished",
    "locked",
    "open_folder",
    "restore_target",
    "share_folder",
]

_READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BuildFolder:
    """The folder's layout; a value, which any process on this file system can use. Its methods block."""

    root: Path

    @property
    def dataset(self) -> Path:
        """What becomes the destination."""
        return self.root / "dataset"

    @property
    def lock(self) -> Path:
        """Locked as long as somebody builds here."""
        return self.root / "lock"

    @property
    def replaced(self) -> Path:
        """What was at the destination."""
        return self.root / "replaced"

    @property
    def finished(self) -> Path:
        """What the dataset is that takes its place, or has taken it."""
        return self.root / "finished"

    def finished_at(self, target: Path) -> list[WrittenFile] | None:
        """The files of the target, where it is what was built here and nothing else. Reads all of it."""
        try:
            noted = [WrittenFile(**one) for one in json.loads(self.finished.read_text())]
            paths = sorted(str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir())
            return noted if noted == [_measure(target / path, path) for path in paths] else None
        except (FileNotFoundError, ValueError):  # there is none, or half of it, or of the dataset
            return None

    def find(self, path: str) -> WrittenFile | None:
        """The file, if it is finished and still what it was. Reads all of it."""
        with suppress(OSError, ValueError, TypeError):  # what can't be read is made anew
            noted = WrittenFile(**json.loads(self._note(path).read_text()))
            if noted == _measure(self.dataset / path, path):
                return noted
        return None

    def finish(self, path: str) -> WrittenFile:
        """Note that the file is whole."""
        with (self.dataset / path).open("rb") as file:
            os.fsync(file.fileno())  # the note mustn't outlive what it is about
        written = _measure(self.dataset / path, path)
        note = self._note(path)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(asdict(written)))
        return written

    def measure(self) -> int:
        """Bytes of the files in the dataset."""
        return sum(path.stat().st_size for path in self.dataset.rglob("*") if path.is_file())

    def keep_finished(self) -> int:
        """How many files the journal has; the folder is removed where nothing is finished."""
        count = sum(1 for _ in (self.root / "journal").glob("*.json"))
        if not count and not self.finished.exists():
            self.remove()
        return count

    def publish(self, target: Path, files: Sequence[WrittenFile], metadata: Sequence[str], *, overwrite: bool) -> None:
        """Move the dataset to the target, and what is there out of its way. Until ``remove`` that is known.

        Raises:
            MergeError: It was made, or filled, by somebody else.
        """
        moves = overwrite and target.exists()
        whole = [*files, *(_measure(self.dataset / path, path) for path in metadata)]
        noted = [asdict(file) for file in sorted(whole, key=lambda file: file.path)]
        self.finished.write_text(json.dumps(noted))
        if moves:
            target.rename(self.replaced)
        try:
            self.dataset.rename(target)  # onto an empty directory too, but onto no other
        except OSError as error:
            self.finished.unlink()
            if moves:
                self.replaced.rename(target)
            raise MergeError(f"{target} was written to by somebody else during the merge: {error}") from error
        self._remove_all_but_the_note()

    def remove(self) -> None:
        """All of it, the lock last: where that is killed, the next merge sees that it may go."""
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
    """The folder for this destination and plan, whether it is there or not."""
    return BuildFolder(target.parent / f"{_prefix(target)}{fingerprint}")


@contextmanager
def open_folder(folder: BuildFolder, target: Path) -> Iterator[None]:
    """Have the folder for oneself. Those of other plans for the same destination, which dead merges left, are removed.

    Raises:
        MergeError: Somebody is building for this destination.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for other in _folders(target):
        if other != folder:
            with locked(other.root) as is_mine:
                if is_mine:
                    other.remove()
                elif is_mine is False:
                    raise _busy(target, other)
    folder.dataset.mkdir(parents=True, exist_ok=True)
    with locked(folder.root) as is_mine:
        if is_mine is False:
            raise _busy(target, folder)
        folder.finished.unlink(missing_ok=True)  # of what isn't there any more
        if target.exists():  # a merge was killed when it had taken its place, before it had tidied up
            shutil.rmtree(folder.replaced, ignore_errors=True)
        yield


def restore_target(target: Path) -> None:
    """Put back what was at the target, where a merge that was to replace it was killed between two renames."""
    for folder in _folders(target):
        with locked(folder.root) as is_mine:
            if is_mine and folder.replaced.exists() and not target.exists():
                folder.replaced.rename(target)


def is_perhaps_finished(target: Path) -> bool:
    """Whether a merge was killed when its dataset was about to take its place here, or had taken it."""
    return any(folder.finished.exists() for folder in _folders(target))


def _prefix(target: Path) -> str:
    return f".{target.name}.merging-"


def _folders(target: Path) -> list[BuildFolder]:
    """Of all plans for this target, begun and not ended."""
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
def share_folder(folder: BuildFolder, target: Path) -> Iterator[None]:
    """Build there beside others of the same plan, who agree on who writes what; nobody has it for oneself meanwhile.

    Raises:
        MergeError: Somebody has.
    """
    folder.dataset.mkdir(parents=True, exist_ok=True)
    with locked(folder.root, shared=True) as is_ours:
        if is_ours is False:
            raise _busy(target, folder)
        yield


@contextmanager
def locked(root: Path, *, shared: bool = False) -> Iterator[bool | None]:
    """Whether the folder is ours until the block is left; None where the file system has no locks, so nobody knows."""
    try:
        descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # somebody is just removing it
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

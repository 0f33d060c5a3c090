"""Which file systems a disk tier can live on: those whose locks and renames work between the processes of a machine."""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncfetch.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Mount", "mount_of", "require_locks", "why_unfit"]

_MOUNTS: Final = Path("/proc/self/mountinfo")
_REMEDY: Final = "Choose a directory on a local disk (ext4, xfs, btrfs, tmpfs, ...), on each machine its own"
_UNFIT: Final = frozenset(("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "vboxsf", "drvfs"))
"""Shared over a network or with a host. Some have locks, on good days; none deletes a file that another reads as a
local disk does. Ceph, GPFS and Lustre with ``flock`` do."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo."""

    point: str
    file_system: str
    """Its type, such as "ext4" or "fuse.sshfs"."""
    options: frozenset[str]
    """Of the mount and of the file system."""


def mount_of(path: str, lines: Iterable[str]) -> Mount | None:
    """The mount that an absolute path lies on, the last one where several cover it; None where no line names one."""
    found: Mount | None = None
    for line in lines:
        left, separator, right = line.partition(" - ")
        front, back = left.split(), right.split()
        if not separator or len(front) < 6 or len(back) < 1:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), front[4])
        if not (path + "/").startswith(point.rstrip("/") + "/"):
            continue
        if found is None or len(point) >= len(found.point):
            options = frozenset(front[5].split(",")) | frozenset(back[2].split(",") if len(back) > 2 else ())
            found = Mount(point, back[0], options)
    return found


def why_unfit(mount: Mount) -> str | None:
    """What keeps a disk tier from living there; None where nothing is known to."""
    kind = mount.file_system
    if kind == "lustre" and not mount.options & {"flock", "localflock"}:
        return "Lustre is mounted without its option flock or localflock"
    if kind == "fuse" or kind.startswith("fuse."):
        return "a file system in user space promises neither locks nor whole renames"
    return "its locks, renames and deletions aren't those of a local disk" if kind in _UNFIT else None


def require_locks(directory: Path, lock_file: Path) -> None:
    """CacheError, which names the file system, where locks don't work in a directory or can't be relied on.

    Args:
        directory: What the error speaks of.
        lock_file: In it; made where it isn't there, and locked for a moment.

    Raises:
        OSError: The file can't be opened for writing.
    """
    mount = None
    if _MOUNTS.exists():
        # Names of mounts needn't be UTF-8.
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        mount = mount_of(os.path.realpath(directory), lines)
    unfit = why_unfit(mount) if mount is not None else None
    if unfit is None and not _locks_work(lock_file):
        unfit = "a lock that one has, another gets too"
    if unfit is not None:
        where = f"{mount.file_system} (mounted at {mount.point})" if mount is not None else "its file system"
        raise CacheError(f"the disk tier's directory {directory} is on {where}: {unfit}. {_REMEDY}")


def _locks_work(lock_file: Path) -> bool:
    one = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    other = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no locks at all
    else:
        return False
    finally:
        with suppress(OSError):
            fcntl.flock(one, fcntl.LOCK_UN)  # a child forked meanwhile has it open
        os.close(other)
        os.close(one)

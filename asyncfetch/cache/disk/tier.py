"""What a disk tier is: a directory and its bounds."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from asyncfetch.cache.directories import absolute_directory
from asyncfetch.ranges import whole_number

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DIRECTORY_VARIABLE", "DiskTier", "default_directory"]

DIRECTORY_VARIABLE = "ASYNCFETCH_DISK_CACHE_DIR"


def default_directory() -> Path:
    """Where the command line looks for a tier that isn't named: the environment's, or the user's cache directory."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return absolute_directory(named)
    return absolute_directory(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "asyncfetch" / "disk"


@dataclass(frozen=True, slots=True)
class DiskTier:
    """A directory that keeps fetched bytes for all processes and jobs of one machine, and after them.

    Only a description: it opens nothing, and crosses to other processes. All that use a directory at a time should give
    it the same bounds; where they don't, each keeps to its own.
    """

    directory: str | os.PathLike[str]
    """On a local disk; made where it isn't there, for this user alone. Whoever can write to it is trusted: what is read
    from it is checked against accidents, not against forgery."""
    max_bytes: int
    """Bound on the files in it, each rounded up to whole pages of 4 KiB."""
    _: KW_ONLY
    min_free_bytes: int = 1024**3
    """Of the disk that are left to others: with less free than this, the tier gives room back instead of taking more.
    Where not even all that it holds would be enough, it takes no more, but keeps and serves what it has. 1 GiB is what
    a log or a checkpoint needs to say that the disk is full."""

    def __post_init__(self) -> None:
        absolute_directory(self.directory)
        for name, least in (("max_bytes", 1), ("min_free_bytes", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))

    @property
    def path(self) -> Path:
        """The directory, absolute."""
        return absolute_directory(self.directory)

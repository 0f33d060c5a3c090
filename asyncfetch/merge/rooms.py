"""Temporary folders for files that are put elsewhere as soon as they are whole.

    TMPDIR/asyncfetch-merging-RANDOM/lock     locked as long as somebody writes there

A killed merge leaves its folders with locks that anybody can take; the next merge here removes those. Where the file
system has no locks nobody knows, and they stay.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncfetch.merge.folder import BuildFolder, locked

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["sweep_rooms", "temporary_room"]

_PREFIX = "asyncfetch-merging-"


@contextmanager
def temporary_room() -> Iterator[Path]:
    """An empty folder, gone when the block is left. Blocks."""
    is_mine: bool | None = False
    while is_mine is False:  # else it was swept away between its making and its locking
        with (
            tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name,
            locked(Path(name)) as is_mine,
        ):
            if is_mine is not False:
                yield Path(name)


def sweep_rooms() -> None:
    """Remove the folders that killed merges left. Blocks."""
    with os.scandir(tempfile.gettempdir()) as entries:
        left = [Path(entry.path) for entry in entries if entry.name.startswith(_PREFIX) and not entry.is_symlink()]
    for root in left:
        try:
            with locked(root) as is_mine:
                if is_mine:
                    BuildFolder(root).remove()
        except OSError:  # another user's
            continue

"""What a merge is told, checked before anything is read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from asyncfetch.errors import ConfigError, MergeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.merge.plan import Limits

__all__ = ["check_destination", "check_limits", "check_paths", "check_space", "check_workers"]


def check_workers(workers: object) -> None:
    """A whole number of at least 1, or None."""
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ConfigError(f"workers must be a whole number of at least 1, or None for one a processor, not {workers!r}")


def check_limits(limits: Limits) -> None:
    """Whole numbers of at least 1."""
    for name in ("data_file_max_bytes", "video_file_max_bytes", "files_per_chunk"):
        value = getattr(limits, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_paths(
    sources: Sequence[str | os.PathLike[str]] | str, destination: str | os.PathLike[str]
) -> tuple[list[str], Path]:
    """The sources, at least one, and a local directory, absolute."""
    if isinstance(sources, str) or not sources:
        raise ConfigError(f"sources must be a list of at least one dataset, not {sources!r}")
    target = os.fspath(destination)
    if target.startswith("file://"):
        target = target.removeprefix("file://")
    elif "://" in target:
        raise ConfigError(f"a merge writes to a local directory, not to {target!r}; copy the result there")
    if not target:
        raise ConfigError("destination is empty; give the directory to write")
    return [os.fspath(source) for source in sources], Path(target).absolute()


def check_destination(target: Path, sources: Sequence[str], overwrite: bool) -> None:
    """It is free, or may be replaced, and has nothing to do with a source. Blocks."""
    resolved = target.resolve()
    for source in sources:
        own = Path(source.removeprefix("file://")).resolve()
        if "://" not in source.removeprefix("file://") and (
            own.is_relative_to(resolved) or resolved.is_relative_to(own)
        ):
            raise MergeError(f"{target} is, holds or lies in the source {source}: sources are never changed")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise MergeError(f"{target} isn't a directory; remove it or choose another destination")
    if target.exists() and any(target.iterdir()) and not overwrite:
        raise MergeError(f"{target} isn't empty; pass overwrite=True to replace it, or choose another destination")


def check_space(target: Path, nbytes: int) -> None:
    """There is room for this many bytes more. Blocks."""
    place = next(parent for parent in target.parents if parent.exists())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < nbytes:
        raise MergeError(
            f"{place} has {free_bytes} bytes free, but the merge has about {nbytes} to write: make room, or choose "
            "another destination"
        )

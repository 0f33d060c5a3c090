"""Directories as users name them."""

from __future__ import annotations

import os
from pathlib import Path

from asyncfetch.errors import ConfigError

__all__ = ["absolute_directory"]


def absolute_directory(directory: str | os.PathLike[str]) -> Path:
    """Where it is, without asking the disk; ConfigError for a name that no directory can have."""
    try:
        path = Path(directory).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"the directory {os.fspath(directory)!r} begins with a user who has no home here") from error
    if not os.fspath(directory) or "\0" in str(path):
        raise ConfigError(f"{os.fspath(directory)!r} doesn't name a directory")
    return path

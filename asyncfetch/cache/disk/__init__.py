"""A directory that keeps fetched bytes for all processes of a machine, and after them.

reader           DiskReader: a reader over another one that keeps its ranges on disk
store            DiskStore: ranges of objects, read and written
folder           Folder: the directory; room, eviction, sweeping; the bytes of all processes; fit file systems
subdirectories   Subdirectories: the complete files, and their last uses
layout           DiskTier: the directory and its bounds; the names and contents of files
"""

from __future__ import annotations

from asyncfetch.cache.disk.folder import Folder, Survey
from asyncfetch.cache.disk.layout import DIRECTORY_VARIABLE, DiskTier, default_directory
from asyncfetch.cache.disk.reader import DiskReader
from asyncfetch.cache.disk.store import DiskStatistics, DiskStore, verify
from asyncfetch.cache.disk.subdirectories import BlockFile, Removal

__all__ = [
    "DIRECTORY_VARIABLE",
    "BlockFile",
    "DiskReader",
    "DiskStatistics",
    "DiskStore",
    "DiskTier",
    "Folder",
    "Removal",
    "Survey",
    "default_directory",
    "verify",
]

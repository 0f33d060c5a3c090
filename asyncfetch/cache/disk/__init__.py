"""A directory that keeps fetched bytes for all processes of a machine, and after them.

reader      DiskReader: a reader over another one that keeps what it read
store       DiskStore: ranges of objects, read and written
folder      Folder: the directory; room, eviction, sweeping; how many bytes all processes together hold
subdirectories   Subdirectories: the files that are whole, and their last uses
layout      DiskTier: where, and how much; what lies where, and what a file holds; which file systems will do
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

"""Files on a local disk, from the moment that they are chosen until they are needed.

pool        CachePool and NoCachePool
lazy        handles
stores      sources of files: the protocol, a directory, decoding, one sample's names; how a file is read, and staged;
            the sources of a sample
remote      files behind urls; members of tar archives, by range
engine      files on their way, the room on disk, the queue, and the threads that read
directory   the files themselves, whose they are, and what dead processes left
"""

from __future__ import annotations

from asyncfetch.cache.staging.lazy import Lazy
from asyncfetch.cache.staging.pool import CachePool, NoCachePool, StagingPool, StagingStatistics
from asyncfetch.cache.staging.remote import TarStore, UrlStore
from asyncfetch.cache.staging.stores import (
    DecodingStore,
    DirectoryStore,
    FileStore,
    KeyedStore,
    RawFileStore,
    SourceInfo,
    SplitStore,
    add_source_info,
    get_source_info,
)

__all__ = [
    "CachePool",
    "DecodingStore",
    "DirectoryStore",
    "FileStore",
    "KeyedStore",
    "Lazy",
    "NoCachePool",
    "RawFileStore",
    "SourceInfo",
    "SplitStore",
    "StagingPool",
    "StagingStatistics",
    "TarStore",
    "UrlStore",
    "add_source_info",
    "get_source_info",
]

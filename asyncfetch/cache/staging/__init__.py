"""Files on a local disk, between the moment that they are chosen and the moment that they are needed.

pool        CachePool and NoCachePool
lazy        handles
stores      where files come from: the protocol, a directory, decoding, one sample's names; how one of them is read,
            in which form it is staged, and where a sample's parts came from
remote      files behind urls; members of tar archives, by range
engine      files on their way, the room on disk, what comes next, and the threads that bring them
directory   the files themselves
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

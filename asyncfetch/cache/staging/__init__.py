"""Files on a local disk, between the moment that they are chosen and the moment that they are needed.

pool        CachePool and NoCachePool
lazy        handles
stores      where files come from: the protocol, a directory, decoding, one sample's names
remote      files behind urls
tar         members of tar archives, by range
sources     where a sample's parts came from
binding     how one file of one store is read, and in which form it is staged
entries     files on their way, and handles' references to them
table       who refers to what, and what comes next; pure
quota       room on disk
reading     one thread's way with one file
engine      threads, and the lock between them
directory   the files themselves
"""

from __future__ import annotations

from asyncfetch.cache.staging.lazy import Lazy
from asyncfetch.cache.staging.pool import CachePool, NoCachePool, StagingPool, StagingStatistics
from asyncfetch.cache.staging.remote import UrlStore
from asyncfetch.cache.staging.sources import SourceInfo, add_source_info, get_source_info
from asyncfetch.cache.staging.stores import (
    DecodingStore,
    DirectoryStore,
    FileStore,
    KeyedStore,
    RawFileStore,
    SplitStore,
)
from asyncfetch.cache.staging.tar import TarStore

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

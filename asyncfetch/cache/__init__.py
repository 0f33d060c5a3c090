"""The bytes that are kept, and where.

memory          ByteCache: byte ranges in memory, within a bound; who gets room next; one version for each object
lease           what callers see of cached bytes
range_stream    many ranges as they arrive
rank_reader     one reader for all loader workers of a rank
regions         memory that one process fills and others map
names           what an object is called, however its url is signed
disk            DiskTier: a directory below the memory, shared by processes and jobs
staging         files on disk between asking and consuming: CachePool
"""

from __future__ import annotations

from asyncfetch.cache.disk import DiskStatistics, DiskTier
from asyncfetch.cache.lease import CacheKey, CacheStatistics, Lease
from asyncfetch.cache.memory import ByteCache
from asyncfetch.cache.staging import (
    CachePool,
    DecodingStore,
    DirectoryStore,
    FileStore,
    KeyedStore,
    Lazy,
    NoCachePool,
    SourceInfo,
    StagingStatistics,
    TarStore,
    UrlStore,
)

__all__ = [
    "ByteCache",
    "CacheKey",
    "CachePool",
    "CacheStatistics",
    "DecodingStore",
    "DirectoryStore",
    "DiskStatistics",
    "DiskTier",
    "FileStore",
    "KeyedStore",
    "Lazy",
    "Lease",
    "NoCachePool",
    "SourceInfo",
    "StagingStatistics",
    "TarStore",
    "UrlStore",
]

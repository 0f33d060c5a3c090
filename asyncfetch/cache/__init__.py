"""Caches of fetched bytes.

memory          ByteCache: byte ranges in memory, within a bound; leases; turns for room; one version for each object
rank_reader     one reader for all loader workers of a rank
regions         memory that one process fills and others map
disk            DiskTier: a directory below the memory, shared by processes and jobs
staging         files on disk, from their request until they are consumed: CachePool
"""

from __future__ import annotations

from asyncfetch.cache.disk import DiskStatistics, DiskTier
from asyncfetch.cache.memory import ByteCache, CacheKey, CacheStatistics, Lease
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

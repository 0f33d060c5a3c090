"""Which bytes are kept, and where.

memory          ByteCache: byte ranges in memory, within a bound
lease           what callers see of cached bytes
space           who gets room next
range_stream    many ranges as they arrive
staging         files on disk between asking and consuming: CachePool
"""

from __future__ import annotations

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

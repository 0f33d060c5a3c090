"""Which bytes are kept, and where.

memory          ByteCache: byte ranges in memory, within a bound
lease           what callers see of cached bytes
space           who gets room next
range_stream    many ranges as they arrive
"""

from __future__ import annotations

from asyncfetch.cache.lease import CacheKey, CacheStatistics, Lease
from asyncfetch.cache.memory import ByteCache

__all__ = ["ByteCache", "CacheKey", "CacheStatistics", "Lease"]

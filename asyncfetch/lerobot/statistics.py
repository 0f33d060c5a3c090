"""What works for one open dataset, counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncfetch.observe import Quantiles

if TYPE_CHECKING:
    from asyncfetch.cache import CacheStatistics
    from asyncfetch.cache.disk import DiskStatistics
    from asyncfetch.decode import DecodePoolStatistics, DecoderCacheStatistics
    from asyncfetch.fetch import FetchStatistics
    from asyncfetch.lerobot.episode_cache import EpisodeCacheStatistics

__all__ = ["DatasetStatistics"]


@dataclass(frozen=True, slots=True)
class DatasetStatistics:
    """A snapshot of everything that works for one open dataset. Counters are since it was opened."""

    fetch: FetchStatistics
    clips: CacheStatistics
    episodes: EpisodeCacheStatistics
    decoders: DecoderCacheStatistics
    decode: DecodePoolStatistics
    disk: DiskStatistics | None = None
    """Of the disk cache; None without one."""
    hand_over: Quantiles = field(default_factory=Quantiles)
    """From the loop's thread to a synchronous consumer that waits, for each few samples; of a Stream's statistics."""

"""asyncfetch: many byte ranges, fast and safely, from anywhere into training.

    errors          every error, one tree
    config          every default, with its source
    ranges          half-open byte ranges
    observe         statistics, reports and traces
    fetch           the range engine: Fetcher
    cache           bytes kept in memory and on disk: ByteCache, DiskTier; staged files: CachePool
    decode          bytes to tensors: DecoderCache
    formats         what all formats share, and one of your own: RangeFormat
    lerobot         LeRobot datasets: open_dataset
    videos          any collection of videos, in clips: Videos, ClipSampler
    prometheus      statistics for Prometheus: Collector
    streams         samples of any format: Stream
    stream          the order of an epoch, look-ahead; of several streams: Mixture; in another process: serve_samples
    torch           the bridge to DataLoader: StreamDataset, FrameDataset, AsyncIterableDataset
    merge           LeRobot datasets joined to one, and parts of them: merge_datasets, select_episodes, split_dataset,
                    convert_dataset
    tensors         tensors on servers for many processes: TensorServer, TensorClient
    distributed     merges on a cluster: RayExecutor, merge_steps
    cli             the command asyncfetch
    testing         a range server with faults on demand, datasets whose frames carry their identity

Names are imported at their first use, so that ``import asyncfetch`` costs next to nothing and needs no extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncfetch import distributed, tensors, testing, torch
    from asyncfetch.cache import (
        ByteCache,
        CachePool,
        CacheStatistics,
        DecodingStore,
        DirectoryStore,
        DiskTier,
        FileStore,
        KeyedStore,
        Lazy,
        NoCachePool,
        SourceInfo,
        StagingStatistics,
        TarStore,
        UrlStore,
    )
    from asyncfetch.config import (
        FetchConfig,
        HedgeConfig,
        RetryConfig,
        RetryDetails,
        S3Config,
        StreamConfig,
        TimeoutConfig,
    )
    from asyncfetch.decode import DecoderCache
    from asyncfetch.errors import (
        AccessDenied,
        AsyncFetchError,
        CacheError,
        ClosedError,
        ConfigError,
        ConnectionFailed,
        DatasetError,
        DecodeError,
        EpisodeNotFound,
        FetchError,
        FetchTimeout,
        FormatError,
        FrameMissing,
        InvalidResponse,
        MergeError,
        MissingDependency,
        NotFound,
        ObjectChanged,
        RangeNotSatisfiable,
        ShardNotFound,
        StateMismatch,
        TensorError,
        Throttled,
        UsageError,
        WorkerError,
        WrongLoop,
    )
    from asyncfetch.fetch import Fetcher, FetchStatistics, RangeReader
    from asyncfetch.formats import RangeFormat
    from asyncfetch.lerobot import DatasetSummary, LeRobotDataset, dataset_info, frames, open_dataset
    from asyncfetch.merge import (
        MergeProgress,
        MergeReport,
        PlannedFile,
        Selection,
        convert_dataset,
        merge_datasets,
        select_episodes,
        split_dataset,
        split_episodes,
    )
    from asyncfetch.ranges import ByteRange, ObjectInfo
    from asyncfetch.stream import Mixture, SamplePass, ServedBatches, serve_samples
    from asyncfetch.streams import Stream
    from asyncfetch.videos import ClipSampler, Videos

__version__ = "0.2.0"

_HOMES = {
    "cache": [
        "ByteCache",
        "CachePool",
        "CacheStatistics",
        "DecodingStore",
        "DirectoryStore",
        "DiskTier",
        "FileStore",
        "KeyedStore",
        "Lazy",
        "NoCachePool",
        "SourceInfo",
        "StagingStatistics",
        "TarStore",
        "UrlStore",
    ],
    "config": [
        "FetchConfig",
        "HedgeConfig",
        "RetryConfig",
        "RetryDetails",
        "S3Config",
        "StreamConfig",
        "TimeoutConfig",
    ],
    "decode": ["DecoderCache"],
    "errors": [
        "AccessDenied",
        "AsyncFetchError",
        "CacheError",
        "ClosedError",
        "ConfigError",
        "ConnectionFailed",
        "DatasetError",
        "DecodeError",
        "EpisodeNotFound",
        "FetchError",
        "FetchTimeout",
        "FormatError",
        "FrameMissing",
        "InvalidResponse",
        "MergeError",
        "MissingDependency",
        "NotFound",
        "ObjectChanged",
        "RangeNotSatisfiable",
        "ShardNotFound",
        "StateMismatch",
        "TensorError",
        "Throttled",
        "UsageError",
        "WorkerError",
        "WrongLoop",
    ],
    "fetch": ["FetchStatistics", "Fetcher", "RangeReader"],
    "formats": ["RangeFormat"],
    "lerobot": ["DatasetSummary", "LeRobotDataset", "dataset_info", "frames", "open_dataset"],
    "merge": [
        "MergeProgress",
        "MergeReport",
        "PlannedFile",
        "Selection",
        "convert_dataset",
        "merge_datasets",
        "select_episodes",
        "split_dataset",
        "split_episodes",
    ],
    "ranges": ["ByteRange", "ObjectInfo"],
    "stream": ["Mixture", "SamplePass", "ServedBatches", "serve_samples"],
    "streams": ["Stream"],
    "videos": ["ClipSampler", "Videos"],
}
_ROOMS = ("distributed", "tensors", "testing", "torch")
_HOME = {name: room for room, names in _HOMES.items() for name in names}

__all__ = [
    "AccessDenied",
    "AsyncFetchError",
    "ByteCache",
    "ByteRange",
    "CacheError",
    "CachePool",
    "CacheStatistics",
    "ClipSampler",
    "ClosedError",
    "ConfigError",
    "ConnectionFailed",
    "DatasetError",
    "DatasetSummary",
    "DecodeError",
    "DecoderCache",
    "DecodingStore",
    "DirectoryStore",
    "DiskTier",
    "EpisodeNotFound",
    "FetchConfig",
    "FetchError",
    "FetchStatistics",
    "FetchTimeout",
    "Fetcher",
    "FileStore",
    "FormatError",
    "FrameMissing",
    "HedgeConfig",
    "InvalidResponse",
    "KeyedStore",
    "Lazy",
    "LeRobotDataset",
    "MergeError",
    "MergeProgress",
    "MergeReport",
    "MissingDependency",
    "Mixture",
    "NoCachePool",
    "NotFound",
    "ObjectChanged",
    "ObjectInfo",
    "PlannedFile",
    "RangeFormat",
    "RangeNotSatisfiable",
    "RangeReader",
    "RetryConfig",
    "RetryDetails",
    "S3Config",
    "SamplePass",
    "Selection",
    "ServedBatches",
    "ShardNotFound",
    "SourceInfo",
    "StagingStatistics",
    "StateMismatch",
    "Stream",
    "StreamConfig",
    "TarStore",
    "TensorError",
    "Throttled",
    "TimeoutConfig",
    "UrlStore",
    "UsageError",
    "Videos",
    "WorkerError",
    "WrongLoop",
    "convert_dataset",
    "dataset_info",
    "distributed",
    "frames",
    "merge_datasets",
    "open_dataset",
    "select_episodes",
    "serve_samples",
    "split_dataset",
    "split_episodes",
    "tensors",
    "testing",
    "torch",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"asyncfetch.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'asyncfetch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"asyncfetch.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

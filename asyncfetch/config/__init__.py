"""Every setting and its default in one place, with its unit in its name and its source in its docstring.

fetch       how objects are asked for: FetchConfig and its parts
stream      how a dataset is streamed: StreamConfig
memory      what its max_bytes is split into
secrets     settings and urls that keep their secrets out of every repr and pickle
checks      which values a field or an argument may hold; the error where a key that a user chose isn't there
"""

from __future__ import annotations

from asyncfetch.config.fetch import FetchConfig, HedgeConfig, RetryConfig, RetryDetails, S3Config, TimeoutConfig
from asyncfetch.config.memory import MemoryShares
from asyncfetch.config.secrets import PrivateUrl, Secrets
from asyncfetch.config.stream import (
    DecoderBackend,
    OnError,
    StreamConfig,
    WorkerConfig,
    config_share,
    rank_config,
    stream_config,
    usable_cpus,
)

__all__ = [
    "DecoderBackend",
    "FetchConfig",
    "HedgeConfig",
    "MemoryShares",
    "OnError",
    "PrivateUrl",
    "RetryConfig",
    "RetryDetails",
    "S3Config",
    "Secrets",
    "StreamConfig",
    "TimeoutConfig",
    "WorkerConfig",
    "config_share",
    "rank_config",
    "stream_config",
    "usable_cpus",
]

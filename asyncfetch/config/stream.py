"""Settings that say how a dataset is streamed, and the share of them that each of a rank's workers gets."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar

from asyncfetch.config.checks import check_types, require, require_least
from asyncfetch.config.fetch import MIB, FetchConfig
from asyncfetch.errors import ConfigError

DecoderBackend = Literal["auto", "torchcodec", "pyav", "pyav-unturned"]
OnError = Literal["raise", "skip", "replace"]
Limit = TypeVar("Limit", int, int | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings that say how a dataset is streamed. All bounds are for one rank, whose loader workers share them."""

    fetch: FetchConfig = field(default_factory=FetchConfig)
    max_bytes: int = 4096 * MIB
    """Clips, table rows and indexes in memory, and the decoders on them (a quarter of it)."""
    disk_cache_dir: str | os.PathLike[str] | None = None
    """A directory on a local disk that keeps fetched bytes for later epochs, and for other processes and jobs of the
    machine; None keeps nothing. Only objects on web servers, S3 and the Hub with a strong ETag are kept."""
    disk_cache_max_bytes: int = 64 * 1024 * MIB
    """Bound on that directory. All writers share it, so loader workers don't get a share each. An eighth of a common
    disk of 512 GB. The cache holds less when less than 1 GiB of the disk would stay free."""
    keep_shares: Literal["auto", "node"] | None = "auto"
    """ "node": a machine reads the same segments in each epoch, so it finds them in its disk cache from the second one
    on; its ranks share them anew each time. A rank's batch then never mixes segments of two machines. None shares all
    segments among all ranks. "auto" means "node" if there is a ``disk_cache_dir``. The launcher says how many ranks a
    machine has (LOCAL_WORLD_SIZE). A mixture's members are never kept apart."""
    decoded_max_bytes: int = 256 * MIB
    """Bound on decoded samples that wait for the consumer."""
    pool_segments: int = 64
    """Segments that a rank draws frames from at a time. An epoch begins with 16 of them, which come soon, and the rest
    join one by one."""
    segment_seconds: float = 20.0
    """Longest part of an episode that is fetched and held as one, up to a group of pictures more; a longer episode is
    cut into equal segments. A camera's bytes of a segment begin at a key frame, so short segments of videos with few
    key frames cost more."""
    group_frames: int | None = None
    """Neighbouring frames of an episode that a shuffled order takes in a row, so that they are decoded together. None
    means a group of pictures as the dataset states it (``video.g``, or LeRobot's default of 2); 1 draws each frame by
    itself, and then random access costs more than a third of the decoding."""
    uneven_ends: Literal["uneven", "drop", "pad"] = "uneven"
    """Handling of an epoch's last samples when there are fewer than ranks: some ranks take one more, the samples are
    dropped, or the other ranks repeat one. With "pad" every sample says whether it ``is_padding``."""
    on_error: OnError = "raise"
    """Handling of a sample with bad data: a broken or missing file, a missing frame. "raise" raises the error at the
    sample's place. "skip" leaves the sample out, so ranks may get different numbers of samples. "replace" gives a copy
    of the good sample before it (in batches of one member of a mixture: of that member, and nothing before its first
    good one), or ConfigError if ``copy.deepcopy`` can't copy it. ``Stream.quarantine`` lists all that were left out or
    replaced. If a single consumer reads an epoch without any good sample, its first error is raised. A rank or worker
    without a good sample in its share of an epoch gets none with "skip"; with "replace" it raises DatasetError. A host
    that is down always raises, and so do a transform's own errors."""
    prefetch_segments: int = 8
    """Segments fetched ahead of the pool; of single clips or files, which need none, ``pool_segments`` more."""
    decode_threads: int | None = None
    """Threads that decode; None means one for each core this process may use, divided among the loader workers, but at
    least one each."""
    decoder: DecoderBackend = "auto"
    """ "torchcodec", "pyav", or "auto": torchcodec if it loads, else PyAV. "pyav-unturned" ignores a video's rotation,
    as LeRobot does with its ``video_backend="pyav"``."""
    tolerance_seconds: float = 1e-4
    """Most that a frame's time in the video may differ from its row's time (its ``timestamp`` after the episode's
    ``from_timestamp``); LeRobot's ``tolerance_s``. Beyond it the frame is missing. It is never less than a tick of the
    video's clock, nor more than a quarter of a frame: beyond that the neighbour could be meant."""
    decoder_cache_size: int | None = None
    """Open decoders kept; None means ASYNCFETCH_DECODER_CACHE_SIZE or else what the pool needs, at least 100."""

    def __post_init__(self) -> None:
        given: object = self.decoder
        if isinstance(given, str) and "cuda" in given:
            raise ConfigError(
                f"decoder={self.decoder!r}: frames are decoded on the CPU, by 'torchcodec' or 'pyav'; move batches by "
                '.to("cuda"), and see pin_memory= of StreamDataset'
            )
        check_types(self)
        require(self.disk_cache_dir != "", "disk_cache_dir must name a directory, or be None for no disk cache")
        require_least(self, 1, "max_bytes", "disk_cache_max_bytes", "decoded_max_bytes")
        require_least(self, 1, "pool_segments", "group_frames", "decode_threads", "decoder_cache_size")
        require_least(self, 0, "prefetch_segments")
        require(0 < self.segment_seconds < math.inf, "segment_seconds must be positive and finite")
        require(self.tolerance_seconds > 0, "tolerance_seconds must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(StreamConfig):
    """A loader worker's share of its rank's configuration."""

    readers_name: str | None
    """The name by which the rank's workers find each other, to read as one; None if they can't."""
    rank: StreamConfig
    """The rank's configuration."""
    workers: int
    """Number of the rank's workers."""

    @classmethod
    def of(cls, rank: StreamConfig, workers: int, readers_name: str | None) -> WorkerConfig:
        """The configuration of one of ``workers``."""
        share = config_share(rank, workers)
        values = {each.name: getattr(share, each.name) for each in fields(share)}
        return cls(**values, readers_name=readers_name, rank=rank, workers=workers)


def config_share(rank: StreamConfig, workers: int) -> StreamConfig:
    """A rank's configuration for one of its workers: bytes, requests, threads and decoders divided, the order not.

    Raises:
        ConfigError: There are more workers than requests, threads or decoders allowed; each needs one.
    """
    require(workers >= 1, f"workers must be at least 1, not {workers}")
    return replace(
        rank,
        fetch=replace(
            rank.fetch,
            max_requests_per_host=_share("max_requests_per_host", rank.fetch.max_requests_per_host, workers),
            max_bytes_per_second=_share("max_bytes_per_second", rank.fetch.max_bytes_per_second, workers),
        ),
        max_bytes=max(1, rank.max_bytes // workers),
        decoded_max_bytes=max(1, rank.decoded_max_bytes // workers),
        prefetch_segments=-(-rank.prefetch_segments // workers),
        decode_threads=_share("decode_threads", rank.decode_threads, workers) or max(1, usable_cpus() // workers),
        decoder_cache_size=_share("decoder_cache_size", rank.decoder_cache_size, workers),
    )


def rank_config(config: StreamConfig) -> StreamConfig:
    """The rank's configuration: the whole of a loader worker's share, or ``config`` itself."""
    return config.rank if isinstance(config, WorkerConfig) else config


def stream_config(config: StreamConfig | None) -> StreamConfig:
    """The configuration, or the default for None; ConfigError for anything else."""
    kind = type(config).__name__
    require(
        config is None or isinstance(config, StreamConfig),
        f"config must be a StreamConfig, not of type {kind}" + ": StreamConfig(fetch=...)" * (kind == "FetchConfig"),
    )
    return config or StreamConfig()


def _share(name: str, limit: Limit, workers: int) -> Limit:
    """A worker's part of a rank's limit, at least 1; None for no limit."""
    if limit is None:
        return limit
    require(
        limit >= workers,
        f"{name}={limit} is a rank's limit, and each of its {workers} loader workers needs one: set {name} to at least "
        f"{workers}, or num_workers to at most {limit}",
    )
    return limit // workers


def usable_cpus() -> int:
    """CPUs that this process may run on, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1

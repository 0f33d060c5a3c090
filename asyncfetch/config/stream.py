"""Settings that say how a dataset is streamed, and what each of a rank's workers may take of it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from asyncfetch.config.checks import check_types, require
from asyncfetch.config.fetch import MIB, FetchConfig
from asyncfetch.errors import ConfigError

DecoderBackend = Literal["auto", "torchcodec", "pyav", "pyav-unturned"]
OnError = Literal["raise", "skip", "replace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings that say how a dataset is streamed. All bounds are for one rank, whose loader workers share them."""

    fetch: FetchConfig = field(default_factory=FetchConfig)
    max_bytes: int = 4096 * MIB
    """Clips, table rows and indexes in memory, and the decoders on them (a quarter of it)."""
    disk_cache_dir: str | os.PathLike[str] | None = None
    """A directory on a local disk that keeps what was fetched, for later epochs and for other processes and jobs of the
    machine; None keeps nothing. Kept are objects on web servers, S3 and the Hub that have a strong ETag."""
    disk_cache_max_bytes: int = 64 * 1024 * MIB
    """Bound on that directory, whoever writes to it: it is shared, so loader workers get no shares of it. An eighth of
    a common disk of 512 GB; less is kept where less than 1 GiB of the disk would be left."""
    keep_shares: Literal["auto", "node"] | None = "auto"
    """ "node": in each epoch a machine reads the same segments, so that it finds them in its disk cache from the second
    one on; they are shared among its ranks anew each time. Frames of two machines' segments then never are in one
    rank's batch. None shares all segments among all ranks. "auto" is "node" where there is a ``disk_cache_dir``. How
    many ranks a machine has is what its launcher says (LOCAL_WORLD_SIZE). A mixture's members are never kept apart."""
    decoded_max_bytes: int = 256 * MIB
    """Decoded samples that wait for the consumer."""
    pool_segments: int = 64
    """Segments that a rank draws frames from at a time."""
    segment_seconds: float = 20.0
    """Seconds of an episode that are fetched and held as one at most, but for a group of pictures: a longer one is cut
    into equal segments. A camera's bytes of one begin at a key frame, so short ones of videos with few of these cost
    more."""
    group_frames: int | None = None
    """Neighbouring frames of an episode that a shuffled order takes in a row as far as the episode goes, so that they
    are decoded together. None means a group of pictures as the dataset states it (``video.g``, or LeRobot's default of
    2); 1 draws each frame for itself, and then random access costs more than a third of the decoding."""
    uneven_ends: Literal["uneven", "drop", "pad"] = "uneven"
    """Choice of what becomes of the last samples of an epoch where they are fewer than the ranks: some ranks take one
    more, they are dropped, or the other ranks repeat a sample. With "pad" every sample says whether it
    ``is_padding``."""
    on_error: OnError = "raise"
    """Choice of what becomes of a sample whose data are bad: a broken or missing file, a frame that isn't there.
    "raise" raises the error at the sample's place; "skip" leaves it out, so ranks may get unequally many; "replace"
    gives a copy of the good sample before it, and ConfigError where ``copy.deepcopy`` can't make one; in batches of one
    member of a mixture one of that member, and before its first good one nothing. ``Stream.quarantine`` lists what was
    left out or replaced. Where one consumer reads an epoch alone and nothing is good, its first error is raised. A rank
    or worker that gets no good sample of those that several share gets none at all with "skip"; with "replace", which
    promises it as many as there are, it raises DatasetError. A host that is down always raises, and so do a transform's
    own errors."""
    prefetch_segments: int = 8
    """Segments fetched ahead of the pool."""
    decode_threads: int | None = None
    """Threads that decode; None means one a core this process may use, divided among the loader workers, but at least
    one each."""
    decoder: DecoderBackend = "auto"
    """ "torchcodec", "pyav", or "auto": torchcodec where it loads, PyAV elsewhere. "pyav-unturned" leaves pictures as
    they are stored where the video says to turn them, as LeRobot does with its ``video_backend="pyav"``."""
    tolerance_seconds: float = 1e-4
    """Seconds by which the time at which a video shows a frame may differ from its row's, which is the ``timestamp`` in
    the table and the episode's ``from_timestamp``; LeRobot's ``tolerance_s``. Further off the frame is missing. It is
    never less than a tick of the video's clock, nor more than a quarter of a frame: beyond that it could be the
    neighbour that is meant."""
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
        require(self.max_bytes > 0, "max_bytes must be positive")
        require(self.disk_cache_dir != "", "disk_cache_dir must name a directory, or be None for no disk cache")
        require(self.disk_cache_max_bytes > 0, "disk_cache_max_bytes must be positive")
        require(self.decoded_max_bytes > 0, "decoded_max_bytes must be positive")
        require(self.pool_segments >= 1, f"pool_segments must be at least 1, not {self.pool_segments}")
        require(0 < self.segment_seconds < math.inf, "segment_seconds must be positive and finite")
        require(self.group_frames is None or self.group_frames >= 1, "group_frames must be at least 1, or None")
        require(self.prefetch_segments >= 0, "prefetch_segments must not be negative")
        require(self.tolerance_seconds > 0, "tolerance_seconds must be positive")
        require(self.decode_threads is None or self.decode_threads >= 1, "decode_threads must be at least 1")
        require(
            self.decoder_cache_size is None or self.decoder_cache_size >= 1,
            "decoder_cache_size must be at least 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(StreamConfig):
    """A loader worker's share of its rank's configuration."""

    readers_name: str | None
    """The name by which the rank's workers find each other, to read as one; None where they can't."""
    rank: StreamConfig
    """The whole."""
    workers: int
    """Their number."""

    @classmethod
    def of(cls, rank: StreamConfig, workers: int, readers_name: str | None) -> WorkerConfig:
        """Return that of one of so many."""
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
            max_bytes_per_second=(
                None
                if rank.fetch.max_bytes_per_second is None
                else _share("max_bytes_per_second", rank.fetch.max_bytes_per_second, workers)
            ),
        ),
        max_bytes=max(1, rank.max_bytes // workers),
        decoded_max_bytes=max(1, rank.decoded_max_bytes // workers),
        prefetch_segments=-(-rank.prefetch_segments // workers),
        decode_threads=(
            max(1, usable_cpus() // workers)
            if rank.decode_threads is None
            else _share("decode_threads", rank.decode_threads, workers)
        ),
        decoder_cache_size=(
            None if rank.decoder_cache_size is None else _share("decoder_cache_size", rank.decoder_cache_size, workers)
        ),
    )


def rank_config(config: StreamConfig) -> StreamConfig:
    """The whole of which this is a loader worker's share, or itself."""
    return config.rank if isinstance(config, WorkerConfig) else config


def stream_config(config: StreamConfig | None) -> StreamConfig:
    """Return what a user gave as ``config``, or the default for None; ConfigError for anything else."""
    kind = type(config).__name__
    require(
        config is None or isinstance(config, StreamConfig),
        f"config must be a StreamConfig, not of type {kind}" + ": StreamConfig(fetch=...)" * (kind == "FetchConfig"),
    )
    return config or StreamConfig()


def _share(name: str, limit: int, workers: int) -> int:
    """A worker's part of a rank's limit, of which each needs one."""
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

"""Settings that say how objects are asked for."""

from __future__ import annotations

import math
import os  # noqa: TC003 - check_types reads the annotations
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from asyncfetch.config.checks import check_types, require, require_header, require_least, require_token
from asyncfetch.config.secrets import Secrets
from asyncfetch.errors import ConfigError, redact_url

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig:
    """Limits on the phases of one attempt, and on the silence of a process that works for this one.

    A whole body has no limit, as long as it moves fast enough.

    A back end of fsspec doesn't show its phases. Each call into it, for a piece of 8 MiB at most, may take as long as
    all three together.
    """

    connect_seconds: float = 10.0
    """TCP and TLS together, per attempt. object_store and s3fs allow 5 s, huggingface_hub 10 s."""
    first_byte_seconds: float = 30.0
    """Seconds from the request's last byte to the response's first. S3 answers in 0.1-0.2 s, 99.84 % within 10 s."""
    stall_seconds: float = 30.0
    """Longest silence inside a body."""
    min_bytes_per_second: float = 100.0
    """Least rate of a body, over any ``stall_seconds``: one that drips would hold its place at the host for days.
    aws-c-s3 gives up at 30 s below 1 B/s."""
    silent_process_seconds: float = 60.0
    """Seconds without a sign of life after which a process of ``serve_samples``, of a loader or of a merge is killed,
    and WorkerError raised. A process gives a sign every second, by its loop or by computing, so a slow one isn't
    killed, only one that is stopped or hangs. A loader's worker of a map-style dataset gives no signs: it is killed
    when it is stopped, not when it hangs."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("connect_seconds", "first_byte_seconds", "stall_seconds", "silent_process_seconds"):
            require(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        least = self.min_bytes_per_second
        require(0 <= least < math.inf, f"min_bytes_per_second must be finite and not negative, not {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDetails:
    """A failed attempt that is made again; the argument of ``RetryConfig.on_retry``."""

    url: str
    """The object as the caller wrote it, without its secrets."""
    start: int | None
    """First byte of the caller's range; None if the call had no range."""
    stop: int | None
    """One past the last byte; None means to the end."""
    host: str | None
    """``host:port`` that the attempt ended at; None if it reached no host."""
    status: int | None
    """Status of the answer; None without an answer."""
    cause: str
    """The cause, in words."""
    attempt: int
    """Attempts so far, this one included."""
    wait_seconds: float
    """Seconds until the next one; 0 while waiting for the end of an outage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """The one retry layer. Waits are drawn from U(0, min(initial * 2**n, maximum)): "full jitter"."""

    attempts: int = 5
    """Requests for one range, in all, when answers are wrong or break off. Progress in a body restarts the count. 1
    switches retrying off, and ``outage_seconds`` with it."""
    total_seconds: float = 120.0
    """No new attempt starts later than this after the first one, outages not counted; botocore and object_store allow
    60-180 s."""
    outage_seconds: float = 300.0
    """Longest wait for a host that is away: connections are refused, reset or not answered, its name can't be resolved,
    or a gateway says 502, 503 or 504. No attempt starts later. Meanwhile one request at a time probes the host and all
    others wait; none of this counts as ``attempts``. Kubernetes restarts a container that keeps failing every 300 s,
    object_store waits for 180 s. 0 treats these failures like others."""
    initial_seconds: float = 0.1
    """Upper bound of the first wait."""
    maximum_seconds: float = 10.0
    """Upper bound of any wait that the server didn't ask for."""
    retry_after_maximum_seconds: float = 60.0
    """A server's Retry-After above this ends the request as Throttled instead of being waited for."""
    budget: int = 500
    """Retries by which a host may be ahead of its answers, over all ranges; beyond that, failures are raised at once.
    These are the tokens of aws-c-s3 and botocore, but a retry takes one instead of 5 or 10, and each answer gives one
    back: theirs run out when 3 in 10 requests fail at random, or when a server restarts under many requests. Retries
    at the time that a server names are free. 0 allows no others."""
    on_retry: Callable[[RetryDetails], None] | None = None
    """Called on the fetcher's loop for each failed attempt that is made again, before the wait; it mustn't block. An
    error that it raises ends the caller's call, unchanged. The logger ``asyncfetch`` logs the same at DEBUG. To be
    pickled, as for spawned workers, it must be a function of a module, not a lambda."""

    def __post_init__(self) -> None:
        check_types(self)
        require_least(self, 1, "attempts")
        require(self.budget >= 0, f"budget must not be negative, not {self.budget}: 0 repeats nothing unasked")
        times = ("total_seconds", "outage_seconds", "initial_seconds", "maximum_seconds", "retry_after_maximum_seconds")
        for name in times:
            require(getattr(self, name) >= 0, f"{name} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeConfig:
    """Settings for second requests for late answers; the first answer to come is taken."""

    quantile: float = 0.95
    """An answer is late when it takes longer than this share of its host's latest answers. Dean and Barroso's value."""
    max_share: float = 0.03
    """Bound on second requests in the long run, as a share of all others. Dean and Barroso needed 2-5 %."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0.5 <= self.quantile < 1, f"quantile must be from 0.5 up to below 1, not {self.quantile}")
        require(0 < self.max_share <= 0.5, f"max_share must be above 0 and at most 0.5, not {self.max_share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """Settings that say how ``s3://bucket/key`` becomes a request.

    Credentials come from the environment, profiles, single sign-on or the instance's role, as for the AWS tools, and
    never from here, so this can be printed and pickled.
    """

    endpoint_url: str | None = None
    """Endpoint of an S3-compatible store (MinIO, B2, R2). None means AWS_ENDPOINT_URL_S3, the profile's, or AWS."""
    region: str | None = None
    """First region to try for a bucket; None means AWS_DEFAULT_REGION or the profile's. Other regions are found."""
    profile: str | None = None
    """Profile of ~/.aws/config; None means AWS_PROFILE or the default one."""
    anonymous: bool = False
    """True signs nothing: for public buckets, without any credentials."""
    requester_pays: bool = False
    """True accepts that the requests and bytes are charged to you."""
    path_style: bool | None = None
    """True puts the bucket into the path, False into the host's name; None into the path if there is an endpoint."""
    presign_seconds: int = 3600
    """Seconds for which a signed url is valid, and used for all ranges of its object. S3 allows 7 days."""
    upload_part_bytes: int = 16 * MIB
    """Length of a part; longer objects are put in parts, side by side. S3 takes 10,000 parts of at least 5 MiB, and its
    guide advises 8-16 MiB. Above 156 GiB the parts get longer, if the size is known. Four parts of an object are in
    flight while the next is read, so a source that isn't in memory yet takes five times this."""

    def __post_init__(self) -> None:
        check_types(self)
        require_least(self, 1, "upload_part_bytes")
        require(
            1 <= self.presign_seconds <= 604_800,
            f"presign_seconds must be between 1 and 604800 (7 days), not {self.presign_seconds}",
        )
        _check_endpoint("endpoint_url", self.endpoint_url)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Settings that say how objects are asked for.

    Pickles without the values of ``headers``, ``tokens`` and ``fsspec``, except into a process that multiprocessing
    starts with it; see Secrets. No other setting takes a secret.
    """

    max_requests_per_host: int = 64
    """Most requests in flight to one (scheme, host, port). 64 connections were the best of 4-128 on a Hub bucket. If
    this is higher, the limit grows as long as that increases throughput."""
    learn_limit: bool = True
    """True adapts the limit of a web server. It begins at 64 or ``max_requests_per_host``, whichever is less, rises
    while goodput grows and requests wait for it, and falls, to no less than 4, when the server says 429 or 503 or
    answers late. False holds it at ``max_requests_per_host``; a server's Retry-After pauses its requests either way."""
    max_gap_bytes: int = 64 * KIB
    """Longest gap between two ranges that one request may read over, when fetch_many or calls made at once have more
    requests than may be in flight. 1,000 ranges of 4 KiB so far apart took 0.39 s instead of 0.94 s, and a third of the
    CPU, at 50 ms and 4 MiB/s a stream. Over gaps of 256 KiB it took longer than without."""
    max_span_bytes: int = 16 * MIB
    """Longest request that fetch_many makes of several ranges; calls of one turn of the loop share at most 512 KiB.
    0 requests each range by itself. S3's guide advises requests of 8-16 MiB."""
    part_bytes: int = 8 * MIB
    """Longer ranges are fetched in parts, side by side. aws-c-s3's value; S3's guide advises 8-16 MiB. 32 MiB took
    2.1 s at 4 MiB/s a stream, 0.6 s in parts of 2 MiB, and the same CPU within a fifth in parts of 2-64 MiB."""
    min_part_bytes: int = 256 * KIB
    """Parts get shorter, down to this, if a host's streams are so slow that the last byte then comes sooner, and the
    host may get more requests. 16 MiB at 4 MiB/s a stream and 50 ms took 2.05 s in parts of 8 MiB and 0.17 s in the 43
    so chosen. Until the rate is known, a range from a far host comes in two parts. ``part_bytes`` switches it off."""
    max_bytes_per_second: int | None = None
    """Bound on the bytes a second of bodies, from web servers, S3, the Hub and fsspec's back ends together; None for no
    bound. All fetchers and loops of the process with the same figure share one cap, held within 5 % over 2 s and more.
    A stream's loader workers get equal shares. The system's own read-ahead (64-128 KiB a connection) isn't counted."""
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    hedge: HedgeConfig | None = field(default_factory=HedgeConfig)
    """Second requests for late answers; None makes none. With one first byte in a hundred at 1 s instead of 50 ms, they
    brought the 99.9th percentile from 1,007 to 195 ms for 1.05 % more requests; a host that became slow as a whole got
    0.50 % more. A request that is answered in time costs 4 us more."""
    max_redirects: int = 10
    """Redirects followed for one request; browsers, reqwest and aiohttp allow as many."""
    keepalive_seconds: float = 12.0
    """Idle connections are closed after this; S3 closes them at about 20 s, aiobotocore uses 12 s."""
    ca_file: str | os.PathLike[str] | None = None
    """PEM file of the authorities to trust instead of the system's."""
    client_cert_file: str | os.PathLike[str] | None = None
    """PEM file of the certificate to show to every server that asks for one, redirects included; None shows none."""
    client_key_file: str | os.PathLike[str] | None = None
    """PEM file of the certificate's key, without a password; None if ``client_cert_file`` has the key."""
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    """Extra request headers by host. "data.example.org:8443" means that port. "data.example.org" means https on port
    443, and the scheme and port of that host which a url of yours names. A redirect takes them nowhere else."""
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Bearer tokens by host as above, sent over https only (and to loopback)."""
    trust_env: bool = True
    """True uses HTTP_PROXY, HTTPS_PROXY, NO_PROXY and ~/.netrc. A login of netrc goes where headers by host go."""
    s3: S3Config = field(default_factory=S3Config)
    """Settings for s3:// urls."""
    hub_endpoint: str | None = None
    """Server of hf:// urls. None means HF_ENDPOINT or https://huggingface.co."""
    fsspec: Mapping[str, Mapping[str, object]] = field(default_factory=dict, repr=False)
    """Arguments of fsspec's file systems by scheme ("gs"), for every scheme that isn't read natively."""
    max_unsized_bytes: int = 128 * MIB
    """Bound on an object of unknown length, such as one sent in chunks: it is read whole into memory before its length
    is known. LeRobot closes a file of data at 100 MB. 0 reads none."""
    max_listed_entries: int = 1_000_000
    """Bound on the entries of a listing, all held in memory at about 370 bytes each; FetchError beyond it, since a
    server's pages may never end. S3 takes 1,000 requests for so many."""

    def __post_init__(self) -> None:
        for name in ("headers", "tokens", "fsspec"):
            values = getattr(self, name)
            if not isinstance(values, Secrets):
                object.__setattr__(self, name, Secrets(name, _checked_entries(name, Secrets(name, values))))
        check_types(self)
        at_least_1 = ("max_requests_per_host", "part_bytes", "min_part_bytes", "max_bytes_per_second")
        require_least(self, 1, *at_least_1, "max_listed_entries")
        require_least(self, 0, "max_gap_bytes", "max_span_bytes", "max_redirects", "max_unsized_bytes")
        require(0 < self.keepalive_seconds < math.inf, "keepalive_seconds must be positive and finite")
        for name in ("ca_file", "client_cert_file", "client_key_file"):
            require(getattr(self, name) != "", f"{name} must name a file, or be None")
        has_certificate = self.client_cert_file is not None
        require(has_certificate or self.client_key_file is None, "client_key_file needs client_cert_file beside it")
        _check_endpoint("hub_endpoint", self.hub_endpoint)


def _check_endpoint(name: str, url: str | None) -> None:
    if url is None:
        return
    require("@" not in url, f"{name} must not hold a password")  # it is shown and pickled with the rest
    require(not {"?", "#"} & set(url), f"{name} must have no query and no fragment")  # nor a token
    require(url.startswith(("http://", "https://")), f"{name} must begin with https:// or http://, not {url!r}")
    try:
        parts = urlsplit(url)
        is_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_place = False
    require(is_place, f"{name} {url!r} names no host, or a port that is none")


def _checked_entries(setting: str, entries: Mapping[Any, object]) -> Mapping[str, object]:
    """The entries with names in lower case, since hosts and schemes have no case.

    ConfigError unless names and values are of the right kinds. No value is shown.
    """
    lowered: dict[str, object] = {}
    by = "scheme, like 'gs'" if setting == "fsspec" else "host, like 'data.example.org' or 'data.example.org:8443'"
    for name, value in entries.items():
        if not isinstance(name, str) or {"/", "@"} & set(name):
            raise ConfigError(f"{setting} are by {by}, not by {redact_url(repr(name))}")
        where = f"{setting}[{name!r}]"
        require(name.lower() not in lowered, f"{where} is there twice, in capitals and without")
        lowered[name.lower()] = value
        if setting == "tokens":
            require_token(where, value)
            continue
        what = "arguments by name" if setting == "fsspec" else "strings by header"
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a mapping of {what}, not of type {type(value).__name__}")
        if setting == "headers":
            for header, text in value.items():
                require_header(where, header, text)
    return lowered

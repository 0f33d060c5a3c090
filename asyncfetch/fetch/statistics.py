"""All that is counted and timed of requests: while it grows, and in a snapshot of a host or of a fetcher."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from asyncfetch.observe import Figures, Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.observe import Quantiles


@dataclass(slots=True)
class Counters:
    """All that is counted and timed at a host. It only grows."""

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    redirects: int = 0
    errors: int = 0
    throttled: int = 0
    outages: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    wait: Histogram = field(default_factory=Histogram)
    first_byte: Histogram = field(default_factory=Histogram)
    body: Histogram = field(default_factory=Histogram)

    def add(self, other: Counters) -> None:
        """Adds ``other`` to this."""
        for item in fields(self):
            ours, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(ours, Histogram):
                ours.merge(theirs)
            else:
                setattr(self, item.name, ours + theirs)

    def figures(self) -> dict[str, Any]:
        """Return what the statistics of a host, and of all, show of it."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value.snapshot() if isinstance(value, Histogram) else value for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _RequestStatistics(Figures):
    """All that a host's statistics and a fetcher's have in common."""

    _telling: ClassVar[tuple[str, ...]] = ("requests", "bytes", "retries", "throttled", "outages")

    requests: int
    """Requests sent, repeats and redirects included."""
    bytes: int
    """Bytes of bodies, as received."""
    retries: int
    """Attempts after the first."""
    redirects: int
    """Answers that named another url."""
    errors: int
    """Attempts that failed, repeated or not."""
    throttled: int
    """Number of those that were answered 429 or 503."""
    outages: int
    """Times that a host was away, so that all requests but one at a time waited; see RetryConfig.outage_seconds."""
    hedges: int
    """Second requests for what a late answer was to bring."""
    hedge_wins: int
    """Number of those whose answer came first."""
    in_flight: int
    """Requests between their start and the end of their body."""
    waiting: int
    """Requests that wait for their host's limit, or for the end of its pause or outage."""
    wait: Quantiles
    """Seconds that requests which are over had waited for a permit within their host's limit."""
    first_byte: Quantiles
    """Seconds from having a connection to the answer's head, whatever it says. Web servers only."""
    body: Quantiles
    """Seconds from there to the last byte of an object's range that came whole. Other than web servers: the whole
    read."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HostStatistics(_RequestStatistics):
    """One host at one moment."""

    _telling = ("limit", "in_flight", "waiting", "requests", "bytes", "retries", "throttled", "outages", "first_byte")
    _of_moment = ("limit", "in_flight", "peak_in_flight", "waiting", "retry_budget")

    limit: int
    """Requests that may be in flight now."""
    peak_in_flight: int
    """Most requests that ever were in flight."""
    retry_budget: int
    """Repeats that may be made before the next answer comes; see RetryConfig.budget."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FetchStatistics(_RequestStatistics):
    """A fetcher at one moment. Sums and quantiles cover hosts that ``hosts`` has forgotten, too."""

    _telling = (*_RequestStatistics._telling, "in_flight", "waiting", "hosts")
    _of_moment = ("in_flight", "waiting", "idle_buffer_bytes")

    reused_buffers: int
    """Bodies that landed in memory of earlier ones."""
    idle_buffer_bytes: int
    """Memory kept for the next ones."""
    hosts: Mapping[str, HostStatistics]
    """Statistics of each host by its origin, ``scheme://host:port``; local files are ``file://``."""

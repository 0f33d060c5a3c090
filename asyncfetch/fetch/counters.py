"""What is counted and timed of requests, and the snapshots that show it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from asyncfetch.observe import Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.observe import Quantiles

__all__ = ["Counters", "Counts", "FetchStatistics", "HostStatistics", "Times"]


@dataclass(slots=True)
class Counts:
    """What has happened so far. All of them only grow."""

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    redirects: int = 0
    errors: int = 0
    throttled: int = 0
    hedges: int = 0
    hedge_wins: int = 0

    def add(self, other: Counts) -> None:
        """Adds ``other`` to this."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(slots=True)
class Times:
    """How long what requests consist of took so far."""

    wait: Histogram = field(default_factory=Histogram)
    first_byte: Histogram = field(default_factory=Histogram)
    body: Histogram = field(default_factory=Histogram)

    def add(self, other: Times) -> None:
        """Adds ``other`` to this."""
        self.wait.merge(other.wait)
        self.first_byte.merge(other.first_byte)
        self.body.merge(other.body)


@dataclass(slots=True)
class Counters:
    """What is counted and timed at a host."""

    counts: Counts = field(default_factory=Counts)
    times: Times = field(default_factory=Times)

    def add(self, other: Counters) -> None:
        """Adds ``other`` to this."""
        self.counts.add(other.counts)
        self.times.add(other.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatistics:
    """One host at one moment."""

    limit: int
    """Requests that may be in flight now."""
    in_flight: int
    """Requests between their start and the end of their body."""
    peak_in_flight: int
    """Most that ever were."""
    waiting: int
    """Requests that wait for one of those to end, or for the end of a pause that the host asked for."""
    requests: int
    """Sent, repeats and redirects included."""
    bytes: int
    """Of bodies, as received."""
    retries: int
    """Attempts after the first that began here."""
    redirects: int
    """Answers that named another url."""
    errors: int
    """Attempts that failed, repeated or not."""
    throttled: int
    """Of those, the ones that were answered 429 or 503."""
    retry_budget: int
    """Repeats that may be made before the next answer comes; see RetryConfig.budget."""
    hedges: int
    """Second requests for what a late answer was to bring."""
    hedge_wins: int
    """Those of them whose answer came first."""
    wait: Quantiles
    """Of requests for a permit within the limit."""
    first_byte: Quantiles
    """From having a connection to the answer's head, whatever it says. Web servers only."""
    body: Quantiles
    """From there to the last byte of an object's range that came whole. Other than web servers: the whole read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """A fetcher at one moment. Sums and quantiles cover hosts that ``hosts`` has forgotten, too."""

    requests: int
    """Sent, repeats and redirects included."""
    bytes: int
    """Of bodies, as received."""
    retries: int
    """Attempts after the first."""
    redirects: int
    """Answers that named another url."""
    errors: int
    """Attempts that failed, repeated or not."""
    throttled: int
    """Of those, the ones that were answered 429 or 503."""
    hedges: int
    """Second requests for what a late answer was to bring."""
    hedge_wins: int
    """Those of them whose answer came first."""
    in_flight: int
    """Requests between their start and the end of their body, over all hosts."""
    waiting: int
    """Requests that wait for their host's limit or pause."""
    reused_buffers: int
    """Bodies that landed in memory of earlier ones."""
    idle_buffer_bytes: int
    """Memory kept for the next ones."""
    wait: Quantiles
    """Of requests for a permit within their host's limit."""
    first_byte: Quantiles
    """From having a connection to the answer's head, whatever it says. Web servers only."""
    body: Quantiles
    """From there to the last byte of an object's range that came whole. Other than web servers: the whole read."""
    hosts: Mapping[str, HostStatistics]
    """By origin, ``scheme://host:port``; local files are ``file://``."""

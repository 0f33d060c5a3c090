"""One gate, one set of counters and the times of its requests per host."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Self

import anyio

from asyncfetch.fetch.hedge import Hedging
from asyncfetch.observe import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yarl import URL

    from asyncfetch.config import HedgeConfig
    from asyncfetch.observe import Quantiles
    from asyncfetch.runtime.memory_pool import MemoryPoolStatistics

__all__ = ["FetchStatistics", "Host", "HostStatistics", "Hosts", "Route"]

MAX_IDLE_HOSTS = 256
"""Idle hosts that are remembered, about 17 KB each. Signed urls of a CDN name a handful; a crawler's list must not grow
for ever."""


@dataclass(frozen=True, slots=True)
class Route:
    """What all requests to one origin have in common."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request to a url of the caller's, credentials included."""
    redirected_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request that a redirect brings here from another origin."""
    proxy: URL | None = None
    """The proxy to go through, without its credentials."""
    proxy_headers: Mapping[str, str] | None = field(default=None, repr=False)
    """Sent to the proxy alone."""


@dataclass(slots=True)
class Counts:
    """What has happened so far. All of them only grow."""

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    redirects: int = 0
    errors: int = 0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatistics:
    """One host at one moment."""

    limit: int
    """Requests that may be in flight."""
    in_flight: int
    """Requests between their start and the end of their body."""
    peak_in_flight: int
    """Most that ever were."""
    waiting: int
    """Requests that wait for one of those to end."""
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
    hedges: int
    """Second requests for what a late answer was to bring."""
    hedge_wins: int
    """Those of them whose answer came first."""
    wait: Quantiles
    """Of requests for their turn at the limit."""
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
    hedges: int
    """Second requests for what a late answer was to bring."""
    hedge_wins: int
    """Those of them whose answer came first."""
    in_flight: int
    """Requests between their start and the end of their body, over all hosts."""
    waiting: int
    """Requests that wait for their host's limit."""
    reused_buffers: int
    """Bodies that landed in memory of earlier ones."""
    idle_buffer_bytes: int
    """Memory kept for the next ones."""
    wait: Quantiles
    """Of requests for their turn at their host's limit."""
    first_byte: Quantiles
    """From having a connection to the answer's head, whatever it says. Web servers only."""
    body: Quantiles
    """From there to the last byte of an object's range that came whole. Other than web servers: the whole read."""
    hosts: Mapping[str, HostStatistics]
    """By origin, ``scheme://host:port``; local files are ``file://``."""


class Host:
    """A gate: held as ``async with host`` by every request in flight. First come, first served.

    ``now`` gives seconds since some point; all of the host's times are taken with it.
    """

    __slots__ = (
        "_gate",
        "counts",
        "hedging",
        "in_flight",
        "limit",
        "now",
        "origin",
        "peak_in_flight",
        "route",
        "times",
    )

    def __init__(
        self, origin: str, limit: int, route: Route, now: Callable[[], float], hedge: HedgeConfig | None = None
    ) -> None:
        self.origin = origin
        self.limit = limit
        self.route = route
        self.now = now
        self.counts = Counts()
        self.times = Times()
        self.hedging = Hedging(hedge)
        self.in_flight = 0
        self.peak_in_flight = 0
        self._gate = anyio.Semaphore(limit, max_value=limit, fast_acquire=True)

    async def __aenter__(self) -> Self:
        since = self.now()
        await self._gate.acquire()
        self.times.wait.record(self.now() - since)
        self._entered()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.leave()

    def enter_nowait(self) -> bool:
        """Enters where that needs no wait; then ``leave`` must follow. Whether it did."""
        try:
            self._gate.acquire_nowait()
        except anyio.WouldBlock:
            return False
        self._entered()
        return True

    def leave(self) -> None:
        """Lets the next one in."""
        self.in_flight -= 1
        self._gate.release()

    def _entered(self) -> None:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)

    @property
    def waiting(self) -> int:
        """Requests that wait at the gate."""
        return self._gate.statistics().tasks_waiting

    @property
    def is_idle(self) -> bool:
        """Whether nobody is in or waits."""
        return self.in_flight == 0 and self.waiting == 0

    def statistics(self) -> HostStatistics:
        """A snapshot."""
        return HostStatistics(
            limit=self.limit,
            in_flight=self.in_flight,
            peak_in_flight=self.peak_in_flight,
            waiting=self.waiting,
            requests=self.counts.requests,
            bytes=self.counts.bytes,
            retries=self.counts.retries,
            redirects=self.counts.redirects,
            errors=self.counts.errors,
            hedges=self.counts.hedges,
            hedge_wins=self.counts.hedge_wins,
            wait=self.times.wait.snapshot(),
            first_byte=self.times.first_byte.snapshot(),
            body=self.times.body.snapshot(),
        )


class Hosts:
    """Every host in use, and the idle ones used last. ``statistics`` may be called in any thread."""

    __slots__ = ("_forgotten", "_forgotten_times", "_hedge", "_hosts", "_limit", "_now")

    def __init__(
        self, limit: int, now: Callable[[], float] = time.perf_counter, *, hedge: HedgeConfig | None = None
    ) -> None:
        self._limit = limit
        self._hedge = hedge
        self._now = now
        self._hosts: OrderedDict[str, Host] = OrderedDict()
        self._forgotten = Counts()
        self._forgotten_times = Times()

    def get(self, origin: str, route: Callable[[], Route] = Route) -> Host:
        """The host of ``origin``; ``route`` is called when it is new. Enter it before you await anything else."""
        host = self._hosts.get(origin)
        if host is None:
            host = self._hosts[origin] = Host(origin, self._limit, route(), self._now, self._hedge)
            self._forget_idle(keep=host)
        else:
            self._hosts.move_to_end(origin)
        return host

    def _forget_idle(self, keep: Host) -> None:
        surplus = len(self._hosts) - MAX_IDLE_HOSTS
        if surplus <= 0:
            return
        for host in [host for host in self._hosts.values() if host.is_idle and host is not keep][:surplus]:
            self._forgotten.add(host.counts)
            self._forgotten_times.add(host.times)
            del self._hosts[host.origin]

    def statistics(self, memory: MemoryPoolStatistics) -> FetchStatistics:
        """A snapshot, with that of the memory that bodies land in; off the loop its figures can be one event apart."""
        hosts = list(self._hosts.values())  # in one go, which the loop's thread can't come between
        total, times = Counts(), Times()
        total.add(self._forgotten)
        times.add(self._forgotten_times)
        for host in hosts:
            total.add(host.counts)
            times.add(host.times)
        return FetchStatistics(
            requests=total.requests,
            bytes=total.bytes,
            retries=total.retries,
            redirects=total.redirects,
            errors=total.errors,
            hedges=total.hedges,
            hedge_wins=total.hedge_wins,
            in_flight=sum(host.in_flight for host in hosts),
            waiting=sum(host.waiting for host in hosts),
            reused_buffers=memory.reused,
            idle_buffer_bytes=memory.idle_bytes,
            wait=times.wait.snapshot(),
            first_byte=times.first_byte.snapshot(),
            body=times.body.snapshot(),
            hosts={host.origin: host.statistics() for host in hosts},
        )

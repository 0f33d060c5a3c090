"""Each host: its limit, its budgets, its idle connections; and a request's permit there."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from dataclasses import replace
from math import inf
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import anyio

from asyncfetch.errors import Throttled
from asyncfetch.fetch.hedge import Hedging
from asyncfetch.fetch.limit import LearnedLimit
from asyncfetch.fetch.limiter import Limiter
from asyncfetch.fetch.outage import Outage
from asyncfetch.fetch.retry import AWAY_STATUSES, AttemptFailed, Clock, FailureWatch, RetryBudget, RetryToken
from asyncfetch.fetch.statistics import Counters, FetchStatistics, HostStatistics
from asyncfetch.fetch.urls import Route
from asyncfetch.observe.trace import running
from asyncfetch.observe.waits import Cause, running_meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.connection import Connection
    from asyncfetch.runtime.memory_pool import MemoryPoolStatistics


log = logging.getLogger("asyncfetch")

MAX_IDLE_HOSTS = 256
"""Idle hosts that are remembered, about 17 KB each. Signed urls of a CDN name a handful; a crawler's list must not grow
for ever."""
MIN_TELLING_BYTES = 256 * 1024
"""Shorter bodies say nothing of a rate: they come with the head, or at the pace of a connection that warms up."""
REMEMBERED_BODIES = 16
"""Enough that a stalled one and one that had come while the loop was busy don't matter; few enough to see a change."""
FIRST_REQUESTS = 64
"""Requests in flight that a limit which is learned begins with: a stream that begins lower starts slowly."""
LEAST_REQUESTS, LEAST_SHARE = 4, 16
"""Fewest that such a limit falls to, or this part of the highest: the loader workers of a rank share that, and with it
the fewest. Where 4 are too many a server asks for pauses, which are kept. xet-core goes down to 1, aws-c-s3 to 10."""
ENDS_TOGETHER = 16
"""Requests that have ended and are counted in one go, as many as a round of the learned limit has at least."""
PAUSE_SPREAD = 0.1
"""Share of a pause that is added to it at random, for each request anew: all ranks of a job are paused together."""


class StreamRate:
    """The rate at which the latest bodies came, each in a stream of its own."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=REMEMBERED_BODIES)

    def record(self, nbytes: int, seconds: float) -> None:
        """Takes notice of a whole body and of what it took from its head on."""
        if nbytes >= MIN_TELLING_BYTES and seconds > 0:
            self._rates.append(nbytes / seconds)

    @property
    def bytes_per_second(self) -> float | None:
        """The median; None where there was no telling body yet."""
        return median(self._rates) if self._rates else None


class Host:
    """All that is known of a host. A request to it holds a permit: ``async with host.permit() as permit``.

    ``now`` gives seconds since some point; all of the host's times are taken with it.
    """

    def __init__(
        self,
        origin: str,
        route: Route,
        config: FetchConfig,
        *,
        clock: Clock,
        now: Callable[[], float],
        learns: bool,
    ) -> None:
        self.origin = origin
        self.name = origin.partition("://")[2]
        """``host:port``."""
        self.route = route
        self.now = now
        self.rate = StreamRate()
        self.budget = RetryBudget(config.retry.budget)
        self.counts = Counters()
        self.hedging = Hedging(config.hedge)
        self.idle_connections: dict[Connection, None] = {}
        """Its connections of ours that carry no request, the one used last at the end."""
        self.answers_plainly = True
        """True if the latest answer with an object's bytes was one that our own connections read."""
        self.lacks_suffixes = False
        """True if it has refused the last bytes of an object that has some: they are asked for by its size."""
        self.peak_in_flight = 0
        self._settlements = 0  # twice their number, and odd within one
        self._left = 0  # requests that have left their places
        self._ended: list[Permit] = []  # those of them that aren't counted yet
        self._config = config
        self._clock = clock
        self._failures = FailureWatch()
        limit = highest = config.max_requests_per_host
        self._learned: LearnedLimit | None = None
        if learns:
            limit, lowest = min(FIRST_REQUESTS, highest), max(1, min(LEAST_REQUESTS, highest // LEAST_SHARE))
            self._learned = LearnedLimit(lowest=lowest, initial=limit, highest=highest)
        self._limiter = Limiter(limit, reserves=True)
        self._paused_until = -inf
        self._pause_cause = Cause.LIMIT
        self._pausing = 0
        self._outage = Outage(config.retry)
        self._probes = Limiter(1)
        self._probe_sleep: anyio.CancelScope | None = None
        self._last_failure: AttemptFailed | None = None
        self._has_answered = False
        self.body_cause = Cause.DISK if origin.startswith("file:") else Cause.BODIES

    def permit(self) -> Permit:
        """Return a permit for one request, to be entered once; a block of it that raises AttemptFailed has failed."""
        return Permit(self)

    def take_idle_connection(self) -> Connection | None:
        """Return the usable connection that was idle for the shortest time; None where there is none."""
        # One that turned out dead speaks for its neighbours: all are dropped in turn.
        while self.idle_connections:
            connection, _ = self.idle_connections.popitem()
            if not connection.is_spoilt():
                return connection
            connection.abort()
        return None

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._limiter.limit

    @property
    def free(self) -> int:
        """Requests that the current caller could make now without a wait for a permit."""
        return self._limiter.free

    @property
    def in_flight(self) -> int:
        """Requests that have their places."""
        return self._limiter.in_use - self._pausing

    @property
    def waiting(self) -> int:
        """Requests that wait for a permit, or with one for the end of a pause or an outage."""
        return self._limiter.waiting + self._pausing

    @property
    def is_idle(self) -> bool:
        """True if no one has a permit or waits for one."""
        return self._limiter.in_use == 0 and self._limiter.waiting == 0

    @property
    def pause_left_seconds(self) -> float:
        """Seconds for which the server still wants not to be asked; 0 where it doesn't."""
        return max(0.0, self._paused_until - self._clock.monotonic())

    def enter_nowait(self) -> bool | None:
        """Take a place for the current caller where that needs no wait, else return None.

        Returns whether it counts as urgent, for ``leave``.
        """
        if self._outage.is_away or self._clock.monotonic() < self._paused_until:
            return None
        urgent = self._limiter.enter_nowait()
        if urgent is not None and self._limiter.in_use > self.peak_in_flight:
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        return urgent

    def leave(self, *, urgent: bool) -> None:
        """Give the place to the next one."""
        self._left += 1
        self._limiter.leave(urgent=urgent)

    def pause(self, seconds: float, *, is_quota: bool = True) -> None:
        """Ask nothing for so long: the server wants that, because of a quota or because it is in trouble.

        The pause is every request's: none is sent before it is over. One that is longer than any may wait pauses
        none, so that each fails at once.
        """
        if seconds <= self._config.retry.retry_after_maximum_seconds:
            until = self._clock.monotonic() + seconds
            if until > self._paused_until:
                self._paused_until = until
                self._pause_cause = Cause.LIMIT if is_quota else Cause.RETRIES
                log.debug("%s asks for a pause of %.3g s", self.origin, seconds)

    async def _enter(self, asked_at: float) -> tuple[bool, bool | None]:
        """Wait for a place. Whether it counts as urgent, for ``leave``; and, of a probe alone, for ``_probes``."""
        self.settle()  # the limit may have risen
        urgent, probe = await self._limiter.enter(), None
        # With a place in the limiter: no other may ask either, and the limiter needs no timer of its own.
        self._pausing += 1
        try:
            while left := self.pause_left_seconds:
                await self._clock.sleep(left * (1 + PAUSE_SPREAD * self._clock.uniform()))
            if self._outage.is_away or asked_at <= self._outage.gave_up_at:
                probe = await self._wait_out_outage(asked_at)
        except BaseException:
            self._pausing -= 1
            self._limiter.leave(urgent=urgent)
            raise
        self._pausing -= 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        return urgent, probe

    def _cause_of_wait(self, since: float) -> Cause:
        """What made a request wait that came then and has its place now."""
        if self._outage.is_away or self._outage.ended_at > since:
            return Cause.OUTAGE
        return self._pause_cause if self._paused_until > since else Cause.LIMIT

    async def _wait_out_outage(self, asked_at: float) -> bool | None:
        """Wait until the host is there, or until it is time to see whether it is.

        Whose turn it is at ``_probes`` is the probe, or the next one; who waits behind it waits for no timer, and has
        its turn when the host is there, is asked again, or is given up (AttemptFailed, where that was since
        ``asked_at``). Returns what ``_probes`` is left with, by the probe; None where the host is there.
        """
        urgent, is_probe = await self._probes.enter(), False
        try:
            while self._outage.is_away and (seconds := self._outage.wait_seconds(self._clock.monotonic())):
                with anyio.CancelScope() as self._probe_sleep:
                    await self._clock.sleep(seconds)
                self._warn_of_outage()
            if asked_at <= self._outage.gave_up_at and self._last_failure is not None:
                raise replace(self._last_failure, is_given_up=True)
            is_probe = self._outage.is_away
        finally:
            self._probe_sleep = None
            if not is_probe:
                self._probes.leave(urgent=urgent)
        return urgent if is_probe else None

    def _warn_of_outage(self) -> None:
        now = self._clock.monotonic()
        seconds = self._outage.warning_seconds(now) if self._outage.is_away else None
        if seconds is not None:
            log.warning(
                "%s has been away for %.0f s, and is waited for, for %.0f s more (RetryConfig.outage_seconds): %s",
                self.origin, now - self._outage.since, seconds, self._last_failure,
            )  # fmt: skip

    def _note_outage(self, failure: AttemptFailed) -> None:
        """Note a failure as of a host that is away: it may be, and be given up."""
        clock, outage = self._clock, self._outage
        was_away, pause_seconds = outage.is_away, failure.retry_after or 0.0
        if pause_seconds > self._config.retry.retry_after_maximum_seconds:  # see ``pause``
            pause_seconds = 0.0
        failure.is_given_up = outage.failed(
            clock.monotonic(), luck=clock.uniform(), is_probe=failure.is_probe, pause_seconds=pause_seconds
        )
        failure.is_host_away = outage.is_away
        if failure.is_host_away or failure.is_given_up:
            self._last_failure = replace(failure, budget=None)
        self.counts.outages += outage.is_away and not was_away
        self._warn_of_outage()

    def _is_there(self) -> None:
        """Note an answer that isn't one of a host that is away."""
        outage, now = self._outage, self._clock.monotonic()
        if outage.answered(now):
            self._last_failure = None
            level = logging.WARNING if outage.is_warned else logging.DEBUG
            log.log(level, "%s is back, after %.0f s", self.origin, now - outage.since)
            if self._probe_sleep is not None:
                self._probe_sleep.cancel()

    def _failed(self, failure: AttemptFailed, *, seconds: float) -> None:
        """Note how a request ended that had its place for so long, and complete the failure by what is known here."""
        self.counts.errors += 1
        failure.budget = RetryToken(self.budget)
        # A handshake of TLS is an answer, too: a connection of plain http may be one to a port of TLS.
        failure.has_answered = self._has_answered or (failure.address is not None and self.origin.startswith("https:"))
        if failure.looks_away:
            self._note_outage(failure)
        if not self._outage.is_away:  # of which there is a warning
            # Each attempt, a second request among them, has a place of its own; this one still has its.
            warning = self._failures.failed(failure, now=self._clock.monotonic(), ended=self._left)
            if warning is not None:
                log.warning("%s %s", self.origin, warning)
        if failure.retry_after is not None:
            self.pause(failure.retry_after, is_quota=failure.cause is Cause.LIMIT)
        if failure.kind is Throttled:
            self.counts.throttled += 1
            if not failure.is_probe and self._learned is not None:  # a probe says nothing of a limit
                self.settle()
                # The refused request waits by the rules of its own retry layer, without a permit, and finds the pause
                # over when it comes back.
                longest_seconds = self._config.retry.retry_after_maximum_seconds
                pause_seconds = min(failure.retry_after or 0.0, longest_seconds)
                self._learned.refused(self.now(), seconds=seconds, pause_seconds=pause_seconds)
                self._follow_learned()

    def settle(self) -> None:
        """Count the requests that have ended and weren't counted yet, and learn from them."""
        self._settlements += 1
        ended, self._ended = self._ended, []
        _count(self.counts, ended)
        self._settlements += 1
        learned, hedging, is_moved = self._learned, self.hedging, False
        for one in ended:
            hedging.sent()
            if one.body_seconds is not None and one.size_bytes >= MIN_TELLING_BYTES:
                self.rate.record(one.size_bytes, one.body_seconds)
            if one.first_byte_seconds is None or (one.status or 0) >= 400:  # refusals are quick
                continue
            hedging.answered(one.first_byte_seconds)
            if learned is not None and one.succeeded:
                is_moved |= learned.ended(
                    one.ended_at,
                    seconds=one.ended_at - one.sent_at,
                    first_byte_seconds=one.first_byte_seconds,
                    size_bytes=one.size_bytes,
                    in_flight=one.in_flight,
                    others_waited=one.others_waited,
                )
        if is_moved:
            self._follow_learned()

    def _follow_learned(self) -> None:
        assert self._learned is not None
        limit = self._learned.limit
        if limit != self._limiter.limit:
            log.debug("%s: the limit of requests in flight goes from %d to %d", self.origin, self._limiter.limit, limit)
            self._limiter.limit = limit

    def statistics(self) -> HostStatistics:
        """A snapshot."""
        return HostStatistics(
            limit=self.limit,
            in_flight=self.in_flight,
            peak_in_flight=self.peak_in_flight,
            waiting=self.waiting,
            retry_budget=self.budget.left,
            **self.counted().figures(),
        )

    def counted(self) -> Counters:
        """Return a copy of all that is counted, with the requests that have just ended."""
        while True:
            before, counted = self._settlements, Counters()
            counted.add(self.counts)
            _count(counted, list(self._ended))
            # In another thread ``settle`` may have come between, and moved some: then they are there twice, or not.
            if self._settlements == before and before % 2 == 0:
                return counted


def _count(counters: Counters, ended: Iterable[Permit]) -> None:
    """Count the times of requests that have ended."""
    for one in ended:
        counters.wait.record(one.waited_seconds)
        if one.first_byte_seconds is not None:
            counters.first_byte.record(one.first_byte_seconds)
        if one.body_seconds is not None:
            counters.body.record(one.body_seconds)


class Permit:
    """One request's place at its host, from the end of its wait to the end of its body, and what became of it.

    Its sender says when the answer's head is there (``answered``), what of the body has ``landed``, and how long that
    took where it came whole; or how the attempt ``failed``. The host counts it when it leaves.
    """

    status: int | None = None
    """Of the answer, where it is known."""
    waited_seconds = 0.0
    first_byte_seconds: float | None = None
    """Seconds from having a connection to the answer's head; None until that is there."""
    body_seconds: float | None = None
    """Seconds that the body took; None where no range of an object came whole."""
    size_bytes = 0
    """Bytes of the body, so far."""
    in_flight: int
    """Requests in flight at its end, itself included."""
    others_waited: bool
    """True if other requests waited for a place then."""
    details: Mapping[str, Any] = MappingProxyType({})
    """Facts of the request for the trace, beside those that are known here."""
    _lane: int | None = None  # in the trace
    _since = 0.0  # when the stretch of its time that is under way began
    _probe: bool | None = None  # what the host's ``_probes`` is left with; None where it isn't the probe of an outage

    def __init__(self, host: Host) -> None:
        self.host = host
        self._meter = running_meter()
        self.tracer = running()
        """The trace that it is written to; None where there is none. Another one may run when it ends."""

    async def __aenter__(self) -> Self:
        if not self.enter_nowait():
            await self.enter()
        return self

    async def __aexit__(self, kind: object, error: object, _: object) -> None:
        if isinstance(error, AttemptFailed):
            self.failed(error)
        self.leave(succeeded=kind is None)

    def enter_nowait(self) -> bool:
        """Take a place where that needs no wait. Returns whether there was one; then ``leave`` must follow."""
        urgent = self.host.enter_nowait()
        if urgent is None:
            return False
        self._urgent, self._entered_at = urgent, self.host.now()
        if self._meter is not None:
            self._turn(None, self._entered_at, Cause.FIRST_BYTE)
        if self.tracer is not None:
            self._lane = self.tracer.enter(self.host.name)
        return True

    async def enter(self) -> None:
        """Wait for a place; then ``leave`` must follow."""
        host = self.host
        since, asked_at = host.now(), host._clock.monotonic()
        self._turn(None, since, host._cause_of_wait(asked_at))
        self._urgent, self._probe = await host._enter(asked_at)
        self._entered_at = host.now()
        self.waited_seconds = self._entered_at - since
        self._turn(host._cause_of_wait(asked_at), self._entered_at, Cause.FIRST_BYTE)
        if self.tracer is not None:
            self._lane = self.tracer.enter(host.name)

    def held_back(self) -> None:
        """Note that what came since it was entered was a wait for bandwidth that the user has bounded."""
        self._turn(Cause.LIMIT, self.host.now(), Cause.FIRST_BYTE)

    def answered(self, status: int | None, sent_at: float, first_byte_at: float) -> None:
        """Note that the answer's head is there: when the request went out, and when that was, by the host's ``now``."""
        host = self.host
        self.status, self.sent_at, self.first_byte_seconds = status, sent_at, first_byte_at - sent_at
        if status not in AWAY_STATUSES:
            host._has_answered = True
            if host._outage.is_suspected:
                host._is_there()
                self._end_probe()
        if self._meter is not None and (status or 0) < 400:  # ``failed`` counts a refusal
            self._turn(Cause.FIRST_BYTE, first_byte_at, host.body_cause)

    def landed(self, count: int) -> None:
        """Note that so many bytes of the body came."""
        self.size_bytes += count
        self.host.counts.bytes += count

    def failed(self, failure: AttemptFailed) -> None:
        """Note that the attempt is over, and didn't bring what was asked."""
        self.status, failure.host = failure.status, self.host.name
        failure.is_probe, failure.waited_seconds = self._probe is not None, self.waited_seconds
        self.host._failed(failure, seconds=self.host.now() - self._entered_at)
        self._turn(failure.cause, self.host.now())

    def leave(self, *, succeeded: bool) -> None:
        """Give the place to the next one. ``succeeded`` says whether the answer was taken whole."""
        host, limiter = self.host, self.host._limiter
        self.ended_at, self.succeeded = host.now(), succeeded
        self.in_flight, self.others_waited = limiter.in_use - host._pausing, limiter.waiting > 0
        if succeeded and host.budget.is_drawn and self.first_byte_seconds is not None:
            host.budget.give_back()
        if self._meter is not None and self.body_seconds is not None:
            self._turn(host.body_cause, self.ended_at)
        if self.tracer is not None and self._lane is not None:
            seconds = self.first_byte_seconds
            first_byte = None if seconds is None else (self.sent_at, self.sent_at + seconds)
            facts: dict[str, Any] = {"succeeded": succeeded, "bytes": self.size_bytes, "status": self.status}
            facts = {**self.details, **facts, "waited_ms": 1e3 * self.waited_seconds}
            self.tracer.request(host.name, self._lane, self._entered_at, first_byte, facts)
            self.tracer.leave(host.name, self._lane)
        self._meter = self.tracer = None
        host._ended.append(self)
        if len(host._ended) >= ENDS_TOGETHER:
            host.settle()
        if self._probe is not None:
            self._end_probe()
        host._left += 1
        limiter.leave(urgent=self._urgent)

    def _turn(self, cause: Cause | None, now: float, then: Cause | None = None) -> None:
        """End a stretch of its time, which was due to ``cause``, and begin the next one, for its caller's meter."""
        if self._meter is not None:
            if cause is not None:
                self._meter.add(cause, now - self._since)
            if then is not None:
                self._meter.begin(then, now)
            self._since = now

    def _end_probe(self) -> None:
        """Let the next one see whether the host is there."""
        if self._probe is not None:
            self.host._probes.leave(urgent=self._probe)
            self._probe = None


class Hosts:
    """Every host in use, and the idle ones used last. ``statistics`` may be called in any thread."""

    def __init__(
        self, config: FetchConfig, clock: Clock | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """``clock`` is that of pauses, None the real one; ``now`` that of what is measured."""
        self._config = config
        self._clock = clock or Clock()
        self._now = now
        self._hosts: OrderedDict[str, Host] = OrderedDict()
        self._forgotten = Counters()

    def get(self, origin: str, route: Callable[..., Route] | None = None, *about: object) -> Host:
        """The host of ``origin``. Take a permit of it before you await anything else.

        ``route(*about)`` is a web server's, called when it is new. What has none, a disk or a back end with threads of
        its own, doesn't learn its limit.
        """
        host = self._hosts.get(origin)
        if host is None:
            learns = route is not None and self._config.learn_limit
            where = Route() if route is None else route(*about)
            host = Host(origin, where, self._config, clock=self._clock, now=self._now, learns=learns)
            self._hosts[origin] = host
            if len(self._hosts) > MAX_IDLE_HOSTS:
                self._forget_idle(keep=host)
        else:
            self._hosts.move_to_end(origin)
        return host

    def _forget_idle(self, keep: Host) -> None:
        # One that asked for a pause goes last: its next request would come too early, at a limit it has just refused.
        idle = [host for host in self._hosts.values() if host.is_idle and host is not keep]
        for host in sorted(idle, key=lambda host: host.pause_left_seconds)[: len(self._hosts) - MAX_IDLE_HOSTS]:
            host.settle()
            self._forgotten.add(host.counts)
            del self._hosts[host.origin]

    def settle(self) -> None:
        """Count all requests that have ended."""
        for host in self._hosts.values():
            host.settle()

    def statistics(self, memory: MemoryPoolStatistics) -> FetchStatistics:
        """A snapshot, also of the memory that bodies land in; off the loop its figures can be some events apart."""
        hosts = list(self._hosts.values())  # in one go, which the loop's thread can't come between
        total = Counters()
        for counters in (self._forgotten, *(host.counted() for host in hosts)):
            total.add(counters)
        return FetchStatistics(
            in_flight=sum(host.in_flight for host in hosts),
            waiting=sum(host.waiting for host in hosts),
            reused_buffers=memory.reused,
            idle_buffer_bytes=memory.idle_bytes,
            hosts={host.origin: host.statistics() for host in hosts},
            **total.figures(),
        )

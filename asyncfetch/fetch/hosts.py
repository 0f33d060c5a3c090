"""What is known of each host: its gate with its limit, its budgets, its tally."""

from __future__ import annotations

import time
from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, Self

from asyncfetch.errors import Throttled
from asyncfetch.fetch.gate import Gate
from asyncfetch.fetch.hedge import Hedging
from asyncfetch.fetch.limit import LearnedLimit
from asyncfetch.fetch.parts import StreamRate
from asyncfetch.fetch.redirects import Route
from asyncfetch.fetch.retry import Clock, RetryBudget
from asyncfetch.fetch.tally import FetchStatistics, HostStatistics, Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.config import FetchConfig
    from asyncfetch.fetch.retry import AttemptFailed
    from asyncfetch.runtime.memory_pool import MemoryPoolStatistics

__all__ = ["Host", "Hosts", "Turn"]

MAX_IDLE_HOSTS = 256
"""Idle hosts that are remembered, about 17 KB each. Signed urls of a CDN name a handful; a crawler's list must not grow
for ever."""
PAUSE_SPREAD = 0.1
"""Share of a pause that is added to it at random, for each request anew: all ranks of a job are paused together."""


class Host:
    """What is known of a host. A request to it holds a turn: ``async with host.turn() as turn``.

    ``now`` gives seconds since some point; all of the host's times are taken with it. ``own_tally``, of
    ``counts`` and ``times``, is that of the loop that the host belongs to.
    """

    __slots__ = (
        "_clock", "_config", "_gate", "_learned", "_paused_until", "_pausing", "_tallies", "budget", "counts",
        "hedging", "in_flight", "name", "now", "origin", "own_tally", "peak_in_flight", "rate", "route", "times",
    )  # fmt: skip

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
        self.own_tally = Tally()
        self._tallies = [self.own_tally]
        self.counts, self.times = self.own_tally.counts, self.own_tally.times
        self.hedging = Hedging(config.hedge)
        self.in_flight = 0
        self.peak_in_flight = 0
        self._config = config
        self._clock = clock
        self._learned = _learned_limit(config) if learns else None
        limit = self._learned.limit if self._learned else config.max_requests_per_host
        self._gate = Gate(limit, reserves=True)
        self._paused_until = -inf
        self._pausing = 0

    def turn(self) -> Turn:
        """For one request, once."""
        return Turn(self)

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._gate.limit

    @property
    def free(self) -> int:
        """Requests that the current caller could make now without a wait at the gate."""
        return self._gate.free

    @property
    def waiting(self) -> int:
        """Requests that wait at the gate, or behind it for the end of a pause."""
        return self._gate.waiting + self._pausing

    @property
    def is_idle(self) -> bool:
        """Whether nobody is in or waits."""
        return self._gate.in_use == 0 and self._gate.waiting == 0

    @property
    def pause_left_seconds(self) -> float:
        """How long the server still wants not to be asked; 0 where it doesn't."""
        return max(0.0, self._paused_until - self._clock.monotonic())

    async def _enter(self) -> bool:
        urgent = await self._gate.enter()
        if self.pause_left_seconds:
            try:
                await self._wait_out_pause()
            except BaseException:
                self._gate.leave(urgent=urgent)
                raise
        self._entered()
        return urgent

    def _enter_nowait(self) -> bool | None:
        urgent = None if self._clock.monotonic() < self._paused_until else self._gate.enter_nowait()
        if urgent is not None:
            self._entered()
        return urgent

    def _entered(self) -> None:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)

    def _leave(self, *, urgent: bool) -> None:
        self.in_flight -= 1
        self._gate.leave(urgent=urgent)

    async def _wait_out_pause(self) -> None:
        # With a place in the gate: nobody else may ask either, and the gate needs no timer of its own.
        self._pausing += 1
        try:
            while left := self.pause_left_seconds:
                await self._clock.sleep(left * (1 + PAUSE_SPREAD * self._clock.uniform()))
        finally:
            self._pausing -= 1

    def _pause(self, since: float, seconds: float) -> None:
        """The server asked, at that time of the clock, not to be asked for so long.

        The pause is every request's: nobody asks before it is over. One that is longer than anybody waits pauses
        nobody, so that each hears of it at once.
        """
        if seconds <= self._config.retry.retry_after_maximum_seconds:
            self._paused_until = max(self._paused_until, since + seconds)

    def _refused(self, seconds: float, asked_pause_seconds: float | None) -> None:
        """A request that began so long ago was answered 429 or 503.

        The refused request waits by the rules of its own retry layer, away from the gate, and finds the pause over when
        it comes back.
        """
        self.counts.throttled += 1
        pause_seconds = asked_pause_seconds or 0.0
        longest_seconds = self._config.retry.retry_after_maximum_seconds
        if self._learned is not None:
            self._learned.refused(self.now(), seconds=seconds, pause_seconds=min(pause_seconds, longest_seconds))
            self._gate.limit = self._learned.limit

    def _answered(self, seconds: float, first_byte_seconds: float, size_bytes: int) -> None:
        self.budget.give_back()
        if self._learned is not None:
            self._learned.ended(
                self.now(),
                seconds=seconds,
                first_byte_seconds=first_byte_seconds,
                size_bytes=size_bytes,
                in_flight=self.in_flight,
                others_waited=self._gate.waiting > 0,
            )
            self._gate.limit = self._learned.limit

    def tally(self, number: int) -> Tally:
        """That of the loop with this number, 0 for the host's own. To be asked for on the host's own."""
        while len(self._tallies) <= number:
            self._tallies.append(Tally())
        return self._tallies[number]

    def total(self) -> Tally:
        """All tallies so far, together. To be read, not kept: it may go on."""
        tallies = self._tallies[:]
        if len(tallies) == 1:
            return tallies[0]
        total = Tally()
        for tally in tallies:
            total.add(tally)
        return total

    def statistics(self) -> HostStatistics:
        """A snapshot."""
        total = self.total()
        counts, times = total.counts, total.times
        return HostStatistics(
            limit=self.limit,
            in_flight=self.in_flight,
            peak_in_flight=self.peak_in_flight,
            waiting=self.waiting,
            requests=counts.requests,
            bytes=counts.bytes,
            retries=counts.retries,
            redirects=counts.redirects,
            errors=counts.errors,
            throttled=counts.throttled,
            retry_budget=self.budget.left,
            hedges=counts.hedges,
            hedge_wins=counts.hedge_wins,
            wait=times.wait.snapshot(),
            first_byte=times.first_byte.snapshot(),
            body=times.body.snapshot(),
        )


class Turn:
    """One request's turn at its host: from the end of its wait to the end of its body.

    It tells the host how the request ended: ``answered`` when its head is there, ``landed`` with the bytes behind it
    and ``received`` with the last of them, or ``failed``. The first three count in ``tally``, which is that of the loop
    that the request runs on; the turn begins and ends on the host's.
    """

    __slots__ = (
        "_asked_at", "_body", "_entered_at", "_first_byte_seconds", "_has_place", "_quota", "_size_bytes", "_urgent",
        "host", "tally", "waited_seconds",
    )  # fmt: skip

    def __init__(self, host: Host) -> None:
        self.host = host
        self.tally = host.own_tally
        self._first_byte_seconds: float | None = None
        self._size_bytes = 0
        self._body: tuple[int, float] | None = None
        self._quota: tuple[float, float] | None = None
        self._has_place = False

    async def __aenter__(self) -> Self:
        since = self.host.now()
        urgent = self.host._enter_nowait()
        self._urgent = await self.host._enter() if urgent is None else urgent
        self._has_place = True
        self._entered_at = self.host.now()
        self.waited_seconds = self._entered_at - since
        self.host.times.wait.record(self.waited_seconds)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.leave(succeeded=kind is None)

    def enter_nowait(self) -> bool:
        """Enters where that needs no wait; then ``leave`` must follow. Whether it did."""
        urgent = self.host._enter_nowait()
        if urgent is None:
            return False
        self._urgent, self._has_place = urgent, True
        self._entered_at, self.waited_seconds = self.host.now(), 0.0
        return True

    def leave(self, *, succeeded: bool) -> None:
        """Ends the turn; whether the answer was taken whole. Nothing happens where that is over already."""
        host = self.host
        if succeeded and self._first_byte_seconds is not None:
            host._answered(host.now() - self._asked_at, self._first_byte_seconds, self._size_bytes)
        if self._body is not None:
            host.rate.record(*self._body)
        if self._quota is not None:
            host._pause(*self._quota)
        self._first_byte_seconds = self._body = self._quota = None
        self.vacate()

    def vacate(self) -> None:
        """Gives its place to the next one now, before its end: its connection is closed already."""
        if self._has_place:
            self._has_place = False
            self.host._leave(urgent=self._urgent)

    def answered(self, first_byte_seconds: float, *, is_refusal: bool) -> None:
        """The answer's head is there, so many seconds after the request had its connection."""
        self.tally.times.first_byte.record(first_byte_seconds)
        if self.tally is self.host.own_tally and not is_refusal:  # those are quick
            self.host.hedging.answered(first_byte_seconds)
        self._first_byte_seconds = first_byte_seconds
        self._asked_at = self.host.now() - first_byte_seconds

    def spent_quota(self, seconds: float) -> None:
        """The answer says that it was the last one for so long. Requests that are under way by now go on.

        The host's loop hears of it at once, or from another one with the end of the turn.
        """
        self._quota = self.host._clock.monotonic(), seconds
        if self.tally is self.host.own_tally:
            self.host._pause(*self._quota)

    def landed(self, count: int) -> None:
        """So many bytes of the body came."""
        self._size_bytes += count
        self.tally.counts.bytes += count

    def received(self, size_bytes: int, seconds: float) -> None:
        """The body came whole, in so much time."""
        self.tally.times.body.record(seconds)
        self._body = size_bytes, seconds

    def over(self) -> None:
        """The answer is taken whole, and its connection free: who is next needn't wait for the end of the block.

        On another loop than the host's, it must.
        """
        if self.tally is self.host.own_tally:
            self.leave(succeeded=True)

    def failed(self, failure: AttemptFailed) -> None:
        """The attempt is over, and didn't bring what was asked."""
        host = self.host
        host.counts.errors += 1
        failure.budget, failure.waited_seconds = host.budget, self.waited_seconds
        if failure.retry_after is not None:
            host._pause(host._clock.monotonic(), failure.retry_after)
        if failure.kind is Throttled:
            host._refused(host.now() - self._entered_at, failure.retry_after)


class Hosts:
    """Every host in use, and the idle ones used last. ``statistics`` may be called in any thread."""

    __slots__ = ("_clock", "_config", "_forgotten", "_hosts", "_now")

    def __init__(
        self, config: FetchConfig, clock: Clock | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """``clock`` is that of pauses, None the real one; ``now`` that of what is measured."""
        self._config = config
        self._clock = clock or Clock()
        self._now = now
        self._hosts: OrderedDict[str, Host] = OrderedDict()
        self._forgotten = Tally()

    def get(self, origin: str, route: Callable[[], Route] | None = None) -> Host:
        """The host of ``origin``. Take a turn at it before you await anything else.

        Args:
            origin: Scheme, host and port.
            route: Of a web server, called when it is new. What has none, a disk or a back end with threads of its own,
                doesn't learn its limit.
        """
        host = self._hosts.get(origin)
        if host is None:
            learns = route is not None and self._config.learn_limit
            where = Route() if route is None else route()
            host = Host(origin, where, self._config, clock=self._clock, now=self._now, learns=learns)
            self._hosts[origin] = host
            self._forget_idle(keep=host)
        else:
            self._hosts.move_to_end(origin)
        return host

    def _forget_idle(self, keep: Host) -> None:
        # One that asked for a pause goes last: its next request would come too early, at a limit it has just refused.
        surplus = len(self._hosts) - MAX_IDLE_HOSTS
        if surplus <= 0:
            return
        idle = [host for host in self._hosts.values() if host.is_idle and host is not keep]
        for host in sorted(idle, key=lambda host: host.pause_left_seconds)[:surplus]:
            self._forgotten.add(host.total())
            del self._hosts[host.origin]

    def statistics(self, memory: MemoryPoolStatistics) -> FetchStatistics:
        """A snapshot, with that of the memory that bodies land in; off the loop its figures can be one event apart."""
        hosts = list(self._hosts.values())  # in one go, which the loop's thread can't come between
        total = Tally()
        for tally in (self._forgotten, *(host.total() for host in hosts)):
            total.add(tally)
        counts, times = total.counts, total.times
        return FetchStatistics(
            requests=counts.requests,
            bytes=counts.bytes,
            retries=counts.retries,
            redirects=counts.redirects,
            errors=counts.errors,
            throttled=counts.throttled,
            hedges=counts.hedges,
            hedge_wins=counts.hedge_wins,
            in_flight=sum(host.in_flight for host in hosts),
            waiting=sum(host.waiting for host in hosts),
            reused_buffers=memory.reused,
            idle_buffer_bytes=memory.idle_bytes,
            wait=times.wait.snapshot(),
            first_byte=times.first_byte.snapshot(),
            body=times.body.snapshot(),
            hosts={host.origin: host.statistics() for host in hosts},
        )


def _learned_limit(config: FetchConfig) -> LearnedLimit:
    highest = config.max_requests_per_host
    lowest = min(config.min_requests_per_host, highest)
    return LearnedLimit(
        lowest=lowest, initial=max(lowest, min(config.initial_requests_per_host, highest)), highest=highest
    )

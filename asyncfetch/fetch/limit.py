"""The number of requests that a host should have in flight, learned from how they end. Pure: events in, a limit out.

Too few leave the link idle; too many make a server refuse, or slow down for all, and bring no byte sooner. The right
number isn't known beforehand, and it moves. So the limit is moved a step at a time, and each step is a trial:

- *Up* while requests wait for their turn. It stays if goodput follows the step, FOLLOWED of it at least.
- *Down* where first bytes come LATE: to where they would come in time if a queue made them late, by half at most. It
  stays unless goodput follows; where it does, the server was slow by itself, and that is its normal time from then on.
- *Down by BACKOFF at once*, no trial, where the server refuses (429, 503): once for all requests that were under way by
  then. From there it grows anew, at first to just below what was refused. That itself is tried again only when a truce
  is over, and the truce doubles each time that it is refused again.

Goodput is counted as the requests in flight times what one of them brings in a second (Little's law): requests come in
waves, and what lands between two points in time depends on where in a wave these lie. A round is measured over requests
that began within it, for those from before the last step say nothing about it.

What is not done: the rate of requests isn't limited, though some servers count just that. Their Retry-After is kept, by
the host's limiter, and the limit settles where they have no reason for it. And a server that was slow from the first
answer on, because the first limit was far too high, isn't known to be: there is nothing to compare it with.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import inf

ROUND_REQUESTS, ROUND_SECONDS = 16, 0.5
"""A round has so many requests at least, and twice the limit, so that each stream is seen about twice; and takes so
long, so that a few new connections or a busy moment don't decide."""
LARGEST_STEP, SMALLEST_STEP = 0.5, 0.2
"""Share by which a trial raises the limit, at least by one request. It halves with each trial that failed, and doubles
with each that didn't."""
FOLLOWED = 0.25
"""Share of a step that goodput must follow for the step to count. On a link that fills up smoothly the limit ends at
about 3/4 of what any number of requests could bring; with 1/2 it would be at half."""
LATE = 1.5
"""Multiple of the shortest time to the first byte. A queue in front of a full server makes it 2 at twice the right
limit."""
QUICK_SHARE = 10
"""A round's first byte is that of the quickest of so many: noise makes others late, a queue makes these late too."""
MEMORY_SECONDS = 30.0
"""The shortest time to the first byte is that of the last one to two times as long: paths and loads change."""
PATIENCE_SECONDS, MAX_PATIENCE_SECONDS = 1.0, 16.0
"""Seconds between a failed trial and the next one; doubled by each that fails, back to the least by one that
doesn't."""
BACKOFF = 0.7
"""Share of the limit that a refusal leaves: TCP Cubic's factor (RFC 9438)."""
TOLERATED_SHARE, SHARE_OF_REQUESTS = 0.1, 64
"""Refused requests of late that are taken for noise, where no pause is asked for; of at least so many requests. A store
that is healthy refuses one now and then. xet-core bears 20 %."""
TRUCE_SECONDS, MAX_TRUCE_SECONDS = 8.0, 60.0
"""Seconds from a refusal to the next trial of what was refused. Rates are counted by the second or by the minute."""
REQUEST_BYTES = 16 * 1024
"""Bytes that a request counts for beside its own: small ones are compared by their number, large ones by their
bytes."""


@dataclass(slots=True)
class _Round:
    """All that the requests brought that began and ended after ``since``."""

    since: float
    ended: int = 0
    waited: int = 0
    in_flight: int = 0
    work_bytes: int = 0
    seconds: float = 0.0
    first_bytes: array[float] = field(default_factory=lambda: array("d"))  # as floats, thousands a second are objects

    @property
    def goodput(self) -> float:
        """Bytes a second."""
        return self.in_flight / self.ended * self.work_bytes / max(self.seconds, 1e-9)

    @property
    def first_byte_seconds(self) -> float:
        """Seconds to the first byte of the quick ones."""
        return max(sorted(self.first_bytes)[self.ended // QUICK_SHARE], 1e-9)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A step that hasn't proved itself yet."""

    limit: float
    """The limit before it."""
    goodput: float
    """Goodput at that limit."""
    first_byte_seconds: float
    """Seconds to the first byte at that limit."""


class LearnedLimit:
    """The limit of one host. Times are those of any one clock that doesn't go backwards, in seconds."""

    def __init__(self, *, lowest: int, initial: int, highest: int) -> None:
        assert 1 <= lowest <= initial <= highest
        self._lowest, self._highest = lowest, highest
        self._limit = float(initial)
        self._round = _Round(-inf)
        self._shortest = _RecentMinimum()
        self._trial: _Trial | None = None
        self._step = LARGEST_STEP
        self._patience = PATIENCE_SECONDS
        self._next_trial_at = -inf
        self._refused_share = 0.0
        self._refused_limit = inf
        self._backed_off_at = -inf
        self._grew = False  # since it backed off
        self._truce = TRUCE_SECONDS
        self._truce_until = -inf

    @property
    def limit(self) -> int:
        """Requests that may be in flight."""
        return int(self._limit)

    def ended(
        self,
        now: float,
        *,
        seconds: float,
        first_byte_seconds: float,
        size_bytes: int,
        in_flight: int,
        others_waited: bool,
    ) -> bool:
        """A request was answered, whole and well. Whether the limit is another one now.

        Its last byte came at ``now``, ``seconds`` after it had its connection. ``in_flight`` includes it.
        ``others_waited`` says whether requests waited for their turn, so that it was the limit that held them.
        """
        limit = int(self._limit)
        self._refused_share -= self._refused_share / max(SHARE_OF_REQUESTS, limit)
        current = self._round
        if now - seconds < current.since:
            return False
        current.ended += 1
        current.waited += others_waited
        current.in_flight += in_flight
        current.work_bytes += REQUEST_BYTES + size_bytes
        current.seconds += seconds
        current.first_bytes.append(first_byte_seconds)
        if current.ended < max(ROUND_REQUESTS, 2 * limit) or now < current.since + ROUND_SECONDS:
            return False
        self._round = _Round(now)
        self._end_round(current, now)
        return limit != int(self._limit)

    def refused(self, now: float, *, seconds: float, pause_seconds: float = 0.0) -> None:
        """A request that began so many ``seconds`` ago was answered 429 or 503.

        No trial begins within twice the ``pause_seconds`` that the server asked for, which are 0 where it didn't.
        """
        self._refused_share += (1 - self._refused_share) / max(SHARE_OF_REQUESTS, self.limit)
        if not pause_seconds and self._refused_share < TOLERATED_SHARE:
            return
        self._next_trial_at = max(self._next_trial_at, now + 2 * pause_seconds)
        if now - seconds < self._backed_off_at:
            return  # under way when the limit was lowered: it says what is known
        self._truce = min(2 * self._truce, MAX_TRUCE_SECONDS) if self._grew else TRUCE_SECONDS
        self._truce_until = now + pause_seconds + self._truce
        self._refused_limit, self._refused_share = self._limit, 0.0
        self._backed_off_at, self._grew = now, False
        self._trial, self._step = None, SMALLEST_STEP
        self._move_to(BACKOFF * self._limit, now)

    def _end_round(self, done: _Round, now: float) -> None:
        trial, self._trial = self._trial, None
        self._shortest.add(done.first_byte_seconds, now)
        if 2 * done.waited < done.ended:
            return  # the limit held few back, so it didn't make these figures
        if trial is not None:
            if not self._is_worth_it(trial, done):
                self._undo(trial, now)
                return
            self._step = min(2 * self._step, LARGEST_STEP)
            self._patience = PATIENCE_SECONDS
        if now >= self._next_trial_at:
            self._try_step(done, now)

    def _is_worth_it(self, trial: _Trial, done: _Round) -> bool:
        followed = (done.goodput / trial.goodput - 1) / (self._limit / trial.limit - 1)
        return followed >= FOLLOWED if self._limit > trial.limit else followed < FOLLOWED

    def _undo(self, trial: _Trial, now: float) -> None:
        if trial.limit > self._limit:
            self._shortest.replace(trial.first_byte_seconds, now)
        self._step = max(self._step / 2, SMALLEST_STEP)
        self._patience = min(2 * self._patience, MAX_PATIENCE_SECONDS)
        self._next_trial_at = now + self._patience
        self._move_to(trial.limit, now)

    def _try_step(self, done: _Round, now: float) -> None:
        before, in_time = self._limit, self._shortest.value / done.first_byte_seconds
        if in_time * LATE < 1 and before > self._lowest:
            limit = before * max(in_time, 0.5)
        else:
            limit = max(before * (1 + self._step), before + 1)
            if now < self._truce_until:
                limit = max(min(limit, self._refused_limit - 1), before)
        self._move_to(limit, now)
        if self.limit != int(before):
            self._trial = _Trial(before, done.goodput, done.first_byte_seconds)
            self._grew = self._grew or self._limit > before

    def _move_to(self, limit: float, now: float) -> None:
        self._limit = min(max(limit, self._lowest), self._highest)
        self._round = _Round(now)


class _RecentMinimum:
    """The least of the values of the last one to two times MEMORY_SECONDS."""

    def __init__(self) -> None:
        self._earlier = self._latest = inf
        self._since = -inf

    @property
    def value(self) -> float:
        """Infinite where there was none."""
        return min(self._earlier, self._latest)

    def add(self, value: float, now: float) -> None:
        """One more."""
        if now - self._since >= MEMORY_SECONDS:
            self._earlier, self._latest, self._since = self._latest, inf, now
        self._latest = min(self._latest, value)

    def replace(self, value: float, now: float) -> None:
        """This one instead of all others."""
        self._earlier, self._latest, self._since = inf, value, now

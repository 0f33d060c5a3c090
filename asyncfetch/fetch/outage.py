"""The outage of a host: whether it is away, when it is asked again, and when that is given up. Pure: events in.

A host is away when several requests in a row came to nothing, whatever they asked for: refused, reset, no route, no
address, silence, or a gateway that says so (502, 503, 504). Repeats of all that were under way would only keep it from
coming back, and there is nothing to learn from them. So one request at a time is its probe, later each time, and all
others wait. Any other answer, to any request, ends the outage, and the learned limit goes on from where it was.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from asyncfetch.fetch.retry import backoff, waits_out_outages

if TYPE_CHECKING:
    from asyncfetch.config import RetryConfig

AWAY_FAILURES = 3
"""Failures in a row that are an outage. One or two are a connection that died, or an answer out of a full queue."""
WARNING_SECONDS = 5.0
"""Seconds from its beginning to the warning of it. A server that is started anew is back sooner, most often."""

LONGEST_PROBE_SECONDS = 5.0
"""Most that is between two probes: what the end of an outage may be noticed late by."""


class Outage:
    """The outages of one host. Times are those of any one clock that doesn't go backwards, in seconds."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._failures = 0  # since the last answer
        self._probes = 0  # that failed
        self._probe_at = -inf
        self.is_warned = False
        """True if it was warned of."""
        self.is_away = False
        self.is_suspected = False
        """True if ``answered`` would change something: after a failure, until an answer."""
        self.since = -inf
        """The time at which it began, or the latest one did."""
        self.ended_at = -inf
        """The time at which the latest one ended, or was given up."""
        self.gave_up_at = -inf
        """The time at which it was given up; -inf where an answer has come since."""

    def failed(self, now: float, *, luck: float, is_probe: bool, pause_seconds: float = 0.0) -> bool:
        """A request came to nothing, as those to a host that is away do. Whether this outage is given up now.

        ``luck``, in [0, 1), is for the time of the next probe; ``pause_seconds`` is what the answer asked to wait. What
        was no probe was under way when the outage began, and says nothing new.
        """
        self._failures += 1
        self.is_suspected = True
        if not self.is_away:
            if self._failures < AWAY_FAILURES or not waits_out_outages(self._config):
                return False
            if now > self.ended_at + self._config.maximum_seconds:  # else it is the one before, which had not ended
                self._probes = 0
            self.is_away, self.since, self.is_warned = True, now, False
        elif not is_probe:
            return False
        self._probes += 1
        seconds = min(backoff(self._config, self._probes, luck), luck * LONGEST_PROBE_SECONDS)
        self._probe_at = now + pause_seconds + seconds
        if self._probe_at <= self.since + self._config.outage_seconds:
            return False
        self._end(now)
        self.gave_up_at = now
        return True

    def answered(self, now: float) -> bool:
        """The host has said something, and not that it is away. Whether an outage ends by that."""
        self._failures, self.gave_up_at, self.is_suspected = 0, -inf, False
        if not self.is_away:
            return False
        self._end(now)
        return True

    def wait_seconds(self, now: float) -> float:
        """Seconds until there is something to do: the next probe, or the warning; 0 where the probe is due."""
        until = self._probe_at if self.is_warned else min(self._probe_at, self.since + WARNING_SECONDS)
        return max(0.0, until - now) if self._probe_at > now else 0.0

    def warning_seconds(self, now: float) -> float | None:
        """Return the seconds that it is waited for still where it is time to warn of that, once; None where not."""
        if self.is_warned or now < self.since + WARNING_SECONDS:
            return None
        self.is_warned = True
        return max(0.0, self.since + self._config.outage_seconds - now)

    def _end(self, now: float) -> None:
        self.is_away, self.ended_at, self._failures = False, now, 0

"""The second request, made where the answer to the first is late. Pure: times come from outside.

Of a hundred answers one may take twenty times as long as the others: its server was collecting garbage, its packet was
lost. The same question asked again is then answered long before (Dean and Barroso, "The Tail at Scale", 2013). On a
host that is slow as a whole, however, a second request makes it slower. So there are three brakes:

- Patience. An answer is late when it takes longer than nearly all of the host's latest ones, and twice as long as half
  of them: sooner, the second request could hardly win. While that half takes much longer than it used to, it is the
  host that is slow, and none of its answers is late.
- Budget. Second requests are a small share of all, and only a few can follow each other: when a host falls silent, all
  of its answers are late at once.
- Wins. The share shrinks with each second request that was in vain, and grows with each that wasn't.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncfetch.config import HedgeConfig

WINDOW = 256
"""Latest answers that lateness is measured by: 13 of them are beyond the 95th percentile. A power of two of REFRESH."""
REFRESH = 32
"""Answers between two looks at them, which take 20 us; also, how many are enough to know a host by."""
SHORTEST_PATIENCE_SECONDS = 0.01
"""An answer that comes within this isn't late: what can be saved is less than what the loop's own delays cost."""
HEAD_START = 2.0
"""Times the median that an answer has: a second request takes one median itself."""
SLOW_HOST = 2.0
"""Times the usual median from which on the host as a whole is slow."""
FORGIVENESS = 1.01
"""Growth of the usual median with each look, where it isn't usual any more: a host twice as slow as it was counts as
slow for some 2,200 answers."""
BURST = 4.0
"""Second requests that can follow each other at once."""
LEAST_SHARE = 0.05
"""Share of the budget for a host where second requests are in vain: enough to notice when they aren't any more."""
MEMORY = 8
"""Second requests by which their success is judged."""


class Hedging:
    """All that is learned of one host's first bytes, and its budget of second requests. For one loop."""

    def __init__(self, config: HedgeConfig | None) -> None:
        """``config`` None: no answer is ever late."""
        self.patience_seconds: float | None = None
        """Seconds that an answer may take before it is late; None where none is."""
        self.may_hedge = config is not None
        """True if the budget has room for a second request now."""
        self._config = config
        self._recent = array("d")
        self._count = 0
        self._usual_seconds: float | None = None
        self._budget = BURST
        self._success = 0.5

    def sent(self) -> None:
        """Note that a request was sent that isn't a second one: the budget grows."""
        if self._config is not None and self._budget < BURST:
            earned = self._config.max_share * max(self._success, LEAST_SHARE)
            self._budget = min(BURST, self._budget + earned)
            self.may_hedge = self._budget >= 1

    def answered(self, first_byte_seconds: float) -> None:
        """An answer came after so long, or would have come even later."""
        if self._config is None:
            return
        if len(self._recent) < WINDOW:
            self._recent.append(first_byte_seconds)
        else:
            self._recent[self._count % WINDOW] = first_byte_seconds
        self._count += 1
        if self._count % REFRESH == 0:
            self.patience_seconds = self._patience(self._config)

    def hedged(self) -> None:
        """A second request was sent."""
        self._budget -= 1
        self.may_hedge = self._budget >= 1

    def ended(self, *, won: bool) -> None:
        """A second request is over; whether its answer was taken."""
        self._success += (won - self._success) / MEMORY

    def _patience(self, config: HedgeConfig) -> float | None:
        end = self._count % WINDOW or WINDOW
        latest_median = sorted(self._recent[end - REFRESH : end])[REFRESH // 2]
        usual = self._usual_seconds
        usual = self._usual_seconds = latest_median if usual is None else min(latest_median, usual * FORGIVENESS)
        if latest_median > SLOW_HOST * usual:
            return None
        recent = sorted(self._recent)
        late = recent[min(len(recent) - 1, int(config.quantile * len(recent)))]
        return max(late, HEAD_START * recent[len(recent) // 2], SHORTEST_PATIENCE_SECONDS)

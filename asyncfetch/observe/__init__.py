"""Statistics of the engine, which cost next to nothing to keep.

figures     statistics, their sums and tables; Histogram: durations in bounded memory, with quantiles within 2 %. Pure
waits       the wait of a pass's consumer, by cause. Pure
report      the bottleneck, the setting to change, what is the trainer's own time, in a format's words. Pure
trace       a timeline, as a file that Perfetto opens
"""

from __future__ import annotations

from asyncfetch.observe.figures import Figures, Histogram, Quantiles
from asyncfetch.observe.trace import trace

__all__ = ["Figures", "Histogram", "Quantiles", "trace"]

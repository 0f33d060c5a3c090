"""What the engine does, in figures that cost next to nothing to keep.

quantiles   Histogram: durations in bounded memory, any quantile of them within 2 %. Pure
prometheus  Collector: statistics as Prometheus reads them
"""

from __future__ import annotations

from asyncfetch.observe.prometheus import Collector
from asyncfetch.observe.quantiles import Histogram, Quantiles

__all__ = ["Collector", "Histogram", "Quantiles"]

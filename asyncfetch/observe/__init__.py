"""Statistics of the engine, which cost next to nothing to keep.

figures     statistics, their sums and tables; Histogram: durations in bounded memory, with quantiles within 2 %. Pure
requests    the time of one request, for the meter and the trace
waits       the wait of a pass's consumer, by cause. Pure
report      the bottleneck, and the setting to change; words: a format's nouns in it. Pure
trace       a timeline, as a file that Perfetto opens

``Collector``, for Prometheus, is in ``asyncfetch.prometheus``, above all that it shows; its name here is from 0.1.
"""

from __future__ import annotations

import importlib
from typing import Any

from asyncfetch.observe.figures import Figures, Histogram, Quantiles
from asyncfetch.observe.trace import trace

__all__ = ["Figures", "Histogram", "Quantiles", "trace"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    if name == "Collector":  # not imported above: it imports rooms that import this one
        return importlib.import_module("asyncfetch.prometheus").Collector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Figures of what the engine does, which cost next to nothing to keep.

figures     Statistics as people read them, and sums of them; Histogram: durations in bounded memory, any quantile of
            them within 2 %. Pure
requests    Where the time of one request goes: the meter and the trace, told as one
waits       Where the wait of a pass's consumer went. Pure
report      Why it waits, and what to set. Pure
trace       What happened when, as a file that Perfetto opens

``Collector``, which gives statistics to Prometheus, is in ``asyncfetch.prometheus``, above all that it shows; its name
here, from 0.1, leads there.
"""

from __future__ import annotations

import importlib
from typing import Any

from asyncfetch.observe.figures import Figures, Histogram, Quantiles
from asyncfetch.observe.trace import trace

__all__ = ["Figures", "Histogram", "Quantiles", "trace"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    if name == "Collector":  # not above: it knows the rooms that stand on this one
        return importlib.import_module("asyncfetch.prometheus").Collector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

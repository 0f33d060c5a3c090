"""What a benchmark found, over its repeats."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One figure over the repeats."""

    question: str
    unit: str
    median: float
    lowest: float
    highest: float
    goal: str = ""

    @classmethod
    def of(cls, question: str, unit: str, values: list[float], goal: str = "") -> Row:
        """The row of these repeats."""
        return cls(question, unit, statistics.median(values), min(values), max(values), goal)

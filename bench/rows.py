"""What a benchmark found, over its repeats."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Row", "show"]


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


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print them, for people or for programs."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("question", "median", "lowest", "highest", "unit", "goal")
    for row in rows:
        figures = (row.median, row.lowest, row.highest)
        shown = (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" for value in figures)
        table.add_row(row.question, *shown, row.unit, row.goal)
    Console().print(table)

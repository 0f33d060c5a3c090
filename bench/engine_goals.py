"""What bench.engine is for: which share of a peer's CPU this engine may take, and in how many cases it does."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bench.engine import Row

__all__ = ["GOALS", "Goal", "Verdict", "verdicts"]

KIB, MIB = 1024, 1024**2


@dataclass(frozen=True)
class Goal:
    """For each case of some sizes: this engine's CPU is at most so much of a peer's, which is the same for GiB."""

    ours: str
    """A client of this engine: plain, or signing for S3."""
    peer: str
    tls: bool | None
    """None: either."""
    from_bytes: int
    to_bytes: int
    """Sizes of ranges, both included."""
    share: float


LARGE, SMALL = (MIB, 16 * MIB), (16 * KIB, 64 * KIB)
GOALS = (
    Goal("asyncfetch", "obstore", False, *LARGE, 0.7),
    Goal("asyncfetch", "obstore", True, *LARGE, 0.95),
    Goal("asyncfetch", "aiohttp", False, *LARGE, 0.55),
    Goal("asyncfetch", "aiohttp", True, *LARGE, 0.8),
    Goal("asyncfetch", "fsspec", None, *LARGE, 0.25),
    Goal("asyncfetch-s3", "s3fs", None, *LARGE, 0.25),
    Goal("asyncfetch", "obstore", None, *SMALL, 0.9),
)


@dataclass(frozen=True)
class Verdict:
    """How the measured cases of a goal came out."""

    goal: Goal
    ratios: tuple[float, ...]
    """This engine's CPU over the peer's, of each case, in ascending order."""

    @property
    def is_met(self) -> bool:
        """In every case."""
        return self.ratios[-1] <= self.goal.share

    def __str__(self) -> str:
        goal, ratios = self.goal, self.ratios
        where = {None: "plain and TLS", False: "plain", True: "TLS"}[goal.tls]
        within = sum(ratio <= goal.share for ratio in ratios)
        verdict = "met" if self.is_met else f"MISSED, but for {within} of {len(ratios)} cases"
        return (
            f"{goal.ours} / {goal.peer}, {where}, {goal.from_bytes // KIB}-{goal.to_bytes // KIB} KiB:"
            f" {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), goal {goal.share}: {verdict}"
        )


def verdicts(rows: Iterable[Row]) -> Iterator[Verdict]:
    """Of all goals of which a case was measured."""
    cases: dict[tuple[bool, int, int], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cases[row.tls, row.range_bytes, row.concurrency][row.client] = row
    for goal in GOALS:
        ratios = [
            rows_of[goal.ours].cpu_seconds_per_gib / rows_of[goal.peer].cpu_seconds_per_gib
            for (tls, size, _), rows_of in cases.items()
            if goal.tls in {None, tls}
            and goal.from_bytes <= size <= goal.to_bytes
            and {goal.ours, goal.peer} <= {*rows_of}
        ]
        if ratios:
            yield Verdict(goal, tuple(sorted(ratios)))

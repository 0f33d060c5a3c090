"""Whether anything must be set: the defaults on six links, beside the best of a grid of settings.

    python -m bench.defaults

Frames a second, cold start included, each setting in turn on each link, for a quarter of the time. The best of eight
runs is partly luck, so the defaults and the two fastest others then run by turns for the whole time, and only what they
do then is compared. A link that takes 50 requests a second refuses what is more by 429.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.data import bench_dataset
from bench.why import Setup, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIB = 1024 * 1024
PROFILES: dict[str, Setup] = {
    "fast link": Setup(server={}),
    "4 MiB/s a stream, 50 ms": Setup(server={"bytes_per_second": 4 * MIB, "first_byte_seconds": 0.05}),
    "2 MiB/s a stream, 100 ms": Setup(server={"bytes_per_second": 2 * MIB, "first_byte_seconds": 0.1}),
    "1 MiB/s a stream, 20 ms, p99 200": Setup(
        server={"bytes_per_second": MIB, "first_byte_seconds": 0.02}, fault="late"
    ),
    "50 requests/s": Setup(server={}, fault="quota of 50"),
    "local files": Setup(server=None),
}
GRID: dict[str, dict[str, int]] = {
    "smaller pool": {"pool_segments": 16},
    "larger pool": {"pool_segments": 128},
    "less ahead": {"prefetch_segments": 2},
    "more ahead": {"prefetch_segments": 32},
    "few requests": {"fetch.max_requests_per_host": 16},
    "many requests": {"fetch.max_requests_per_host": 256},
    "more threads": {"decode_threads": 4},
}
"""What is changed of the defaults."""
RIVALS = 2
"""The fastest of the others, which run again beside the defaults."""
FIRST_LOOK = 0.25
"""Share of the time for which each setting runs at first."""


@dataclass(frozen=True)
class Row:
    """One link."""

    profile: str
    frames_per_second: dict[str, float]
    """By setting, of its first run."""
    again: dict[str, list[float]]
    """The same of the defaults' further runs and their rivals', by turns."""
    binds: str
    """By the report of the defaults."""

    @property
    def share_of_best(self) -> float:
        """Of the defaults, by the medians of the further runs."""
        medians = {name: statistics.median(values) for name, values in self.again.items()}
        return medians["defaults"] / max(medians.values())


def measure(
    root: Path,
    console: Console,
    *,
    dataset: str,
    seconds: float,
    profiles: Sequence[str] = tuple(PROFILES),
    repeats: int = 3,
    grid: Mapping[str, dict[str, int]] = GRID,
) -> list[Row]:
    """All links, each setting in turn, and then the defaults and their rivals ``repeats`` times."""
    settings: dict[str, dict[str, int]] = {"defaults": {}, **grid}

    def run(profile: str, name: str, seconds: float) -> dict[str, Any]:
        setup = replace(PROFILES[profile], dataset=dataset, config=dict(settings[name]))
        told = read(setup, root, seconds)
        console.print(f"{profile}, {name}: {told['frames_per_second']:.0f} frames/s")
        return told

    rows = []
    for profile in profiles:
        found = {name: run(profile, name, seconds * FIRST_LOOK) for name in settings}
        speeds: dict[str, float] = {name: told["frames_per_second"] for name, told in found.items()}
        finalists = ["defaults", *sorted(grid, key=lambda name: -speeds[name])[:RIVALS]]
        again: dict[str, list[float]] = {name: [] for name in finalists}
        for _ in range(repeats):
            for name in finalists:
                again[name].append(run(profile, name, seconds)["frames_per_second"])
        rows.append(Row(profile, speeds, again, found["defaults"]["verdict"]["binds"]))
    return rows


def show(console: Console, rows: list[Row]) -> None:
    """The figures for people."""
    table = Table("link", "setting, by turns", "frames/s", "defaults / best", "binds")
    for row in rows:
        for number, (name, speeds) in enumerate(row.again.items()):
            first = (row.profile, f"{row.share_of_best:.2f}", row.binds) if number == 0 else ("", "", "")
            table.add_row(first[0], name, ", ".join(f"{speed:.0f}" for speed in speeds), *first[1:])
    console.print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run that is compared")
    parser.add_argument("--repeats", type=int, default=3, help="of the defaults and their rivals, by turns")
    parser.add_argument("--dataset", type=Path, help="a LeRobot dataset in a directory; one is made without")
    parser.add_argument("--profiles", nargs="*", default=tuple(PROFILES), help="some of the links")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args(arguments)
    console = Console(stderr=asked.json)
    path = asked.dataset or bench_dataset()
    rows = measure(
        path.parent,
        console,
        dataset=path.name,
        seconds=asked.seconds,
        profiles=asked.profiles,
        repeats=asked.repeats,
    )
    show(console, rows)
    if asked.json:
        print(json.dumps([asdict(row) | {"share_of_best": row.share_of_best} for row in rows], indent=2))


if __name__ == "__main__":
    main()

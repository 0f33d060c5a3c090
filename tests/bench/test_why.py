"""bench/why.py and bench/defaults.py, tiny: their rows are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from asyncfetch.testing import write_dataset
from bench import defaults, why

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("programs_are_warm")


@pytest.mark.slow  # five processes, each of which imports torch
def test_bench_why_compares_made_causes_with_named_ones(tmp_path: Path) -> None:
    write_dataset(tmp_path / "small", episodes=6, length=20, codec="h264", width=96, height=96, cameras=[why.CAMERA])
    rows = why.measure(
        tmp_path, Console(quiet=True), rounds=1, seconds=0.5, gains=False, only=["a slow consumer", "a cold disk cache"]
    )
    assert {row.made for row in rows} == {"a slow consumer", "a cold disk cache"}
    assert all(row.evidence and row.page and row.told for row in rows)
    assert len(why.CASES) == 12
    why.show(Console(quiet=True), rows)


@pytest.mark.slow
def test_the_defaults_are_set_beside_a_grid(tmp_path: Path) -> None:
    write_dataset(tmp_path / "small", episodes=6, length=20, codec="h264", width=96, height=96, cameras=[why.CAMERA])
    rows = defaults.measure(
        tmp_path, Console(quiet=True), dataset="small", seconds=0.5, profiles=["local files"], grid={}, repeats=1
    )
    assert [(row.profile, row.share_of_best) for row in rows] == [("local files", 1.0)]
    assert rows[0].frames_per_second["defaults"] > 0
    defaults.show(Console(quiet=True), rows)


@pytest.mark.slow
def test_bench_why_measures_the_cost_of_reports(tmp_path: Path) -> None:
    write_dataset(tmp_path / "small", episodes=6, length=20, codec="h264", width=96, height=96, cameras=[why.CAMERA])
    figures = why.measure_costs(tmp_path, Console(quiet=True), repeats=1)
    assert figures.keys() == set(why.TURNS)
    assert all(milliseconds > 0 for [milliseconds] in figures.values())
    why.show_costs(Console(quiet=True), figures)

"""bench/planning.py, tiny: joined ranges take fewer requests, and parts are as many as their size says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from bench import planning

if TYPE_CHECKING:
    from pathlib import Path

KIB, MIB = 1024, 1024**2

pytestmark = pytest.mark.usefixtures("needs_lua")


def test_ways_to_ask_differ_in_requests_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "GAPS", (16 * KIB,))
    monkeypatch.setattr(planning, "SPANS", (32 * KIB, 128 * KIB))
    monkeypatch.setattr(planning, "PARTS", (256 * KIB, MIB))
    settings = planning.measure_planning(
        tmp_path,
        repeats=1,
        short_ranges=100,
        neighbours=1000,
        long_bytes=MIB,
        first_byte_seconds=0.01,
        bytes_per_second=64 * MIB,
    )
    apart, joined, short, long, chosen, quarters, whole = settings
    assert (apart.requests, apart.fetched_bytes) == (100, 100 * 4 * KIB)
    assert joined.requests < 100
    assert apart.fetched_bytes < joined.fetched_bytes <= 100 * 20 * KIB
    assert (short.requests, long.requests) == (500, 125)
    assert short.fetched_bytes == long.fetched_bytes == 1000 * 16 * KIB
    assert long.share == pytest.approx(long.seconds / short.seconds)
    assert (quarters.requests, whole.requests) == (4, 1)
    assert {one.fetched_bytes for one in (chosen, quarters, whole)} == {MIB}
    assert joined.share == pytest.approx(joined.seconds / apart.seconds)
    assert whole.share == pytest.approx(whole.seconds / chosen.seconds)
    planning.show(settings, Console(width=120))
    assert "gaps of 16 KiB, joined" in capsys.readouterr().out

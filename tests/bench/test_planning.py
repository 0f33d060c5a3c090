"""bench/planning.py, tiny: joined ranges take fewer requests, and parts are as many as their size says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench import planning

if TYPE_CHECKING:
    from pathlib import Path

KIB, MIB = 1024, 1024**2

pytestmark = pytest.mark.usefixtures("needs_lua")


def test_ways_to_ask_differ_in_requests_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "GAPS", (16 * KIB,))
    monkeypatch.setattr(planning, "SPANS", (32 * KIB, 128 * KIB))
    monkeypatch.setattr(planning, "PARTS", (256 * KIB, MIB))
    rows = planning.measure_planning(
        tmp_path,
        repeats=1,
        short_ranges=100,
        neighbours=1000,
        long_bytes=MIB,
        first_byte_seconds=0.01,
        bytes_per_second=64 * MIB,
    )
    found = {row.question: row.median for row in rows}
    apart, joined = "gaps of 16 KiB, apart", "gaps of 16 KiB, joined"
    assert (found[f"{apart}: requests"], found[f"{apart}: fetched"]) == (100, 400)
    assert found[f"{joined}: requests"] < 100
    assert 400 < found[f"{joined}: fetched"] <= 2000
    short, long = "spans of 32 KiB", "spans of 128 KiB"
    assert (found[f"{short}: requests"], found[f"{long}: requests"]) == (500, 125)
    assert found[f"{short}: fetched"] == found[f"{long}: fetched"] == 16_000
    quarters, whole = "parts of 256 KiB", "parts of 1024 KiB"
    assert (found[f"{quarters}: requests"], found[f"{whole}: requests"]) == (4, 1)
    assert {found[f"{name}: fetched"] for name in ("parts as chosen", quarters, whole)} == {1024}
    for name, first in ((joined, apart), (long, short), (whole, "parts as chosen")):
        assert found[f"{name}: time / first"] == pytest.approx(found[f"{name}: time"] / found[f"{first}: time"])

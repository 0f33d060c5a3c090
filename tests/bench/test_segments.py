"""bench/segments.py, tiny."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncfetch.testing import write_dataset
from bench import segments

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("programs_are_warm")


def test_segments_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames, seconds, mib = segments.draw_order(1000)
    assert 90_000 < frames < 211_000
    assert min(seconds, mib) > 0
    path = tmp_path / "few"
    write_dataset(path, episodes=11, length=30, width=64, height=64, codec="h264")
    first = segments.measure_first(path, 1)
    assert [len(each) for each in first.values()] == [1, 1]
    ratios, fetched = segments.measure_groups(path, 1, 0.5)
    assert 0 < ratios[0] < 2
    assert fetched > 0.9
    monkeypatch.setattr(segments, "LONG", {"long": (1, 610), "short": (2, 30)})
    long = segments.measure_long(tmp_path / "made", width=64, height=64)
    assert {name: min(each) > 0 for name, each in long.items()} == {"long": True, "short": True}

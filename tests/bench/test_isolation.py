"""bench/isolation.py measures what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import isolation

if TYPE_CHECKING:
    import pytest


def test_each_kind_of_bad_host_has_its_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "RANGES", 8)
    ratios = isolation.measure_isolation(2)
    assert list(ratios) == list(isolation.BAD)
    # A good host that waited for the bad one would wait for its time-out, 30 s and more.
    assert all(len(values) == 2 and 0 < values[0] <= values[1] < 60 for values in ratios.values())

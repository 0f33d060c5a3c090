"""bench/windows.py, tiny: both ways read as many frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from bench import windows

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_rows_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "EPISODES", 1)
    monkeypatch.setattr(windows, "LENGTH", 70)
    monkeypatch.setattr(windows, "WIDTH", 64)
    monkeypatch.setattr(windows, "HEIGHT", 64)
    windows.make_dataset(tmp_path / "data")
    ours, plain, ratio = anyio.run(lambda: windows.measure(tmp_path / "data", repeats=1, samples=1))
    assert ours.median / plain.median == ratio.median > 0

"""bench/serving.py, tiny: its rows are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfetch.testing import write_dataset
from bench import parts, serving

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_rows_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BATCHES", 50)
    monkeypatch.setattr(serving, "SKIPPED_SAMPLES", serving.BATCH)
    truth = write_dataset(
        tmp_path,
        episodes=4,
        length=250,
        distinct_videos=1,
        width=64,
        height=64,
        codec="h264",
        cameras=["observation.images.top"],
    )
    rows = serving.measure_way(truth.root, repeats=1, seconds=0.02)
    assert [row.unit for row in rows] == ["us", "us", ""]
    assert all(0 < row.lowest == row.median == row.highest for row in rows)

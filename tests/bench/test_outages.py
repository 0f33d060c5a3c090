"""An epoch whose server is killed, with small numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncfetch.testing import write_dataset
from bench.outages import EPISODE_FRAMES, epoch

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_samples_come_once_over_restarts_of_the_server(tmp_path: Path) -> None:
    samples = 4 * EPISODE_FRAMES
    write_dataset(tmp_path / "dataset", episodes=4, length=EPISODE_FRAMES, distinct_videos=1)
    found = epoch(tmp_path / "dataset", samples, workers=0, restarts=2, max_away_seconds=0.5, seed=0)
    assert (found.restarts, found.samples) == (2, samples)
    assert found.fetched_bytes > 0

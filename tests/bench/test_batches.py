"""bench/batches.py, tiny: every way is measured, in processes of its own."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from asyncfetch.testing import write_dataset
from bench import batches

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nested_programs_are_warm")


@pytest.mark.timeout(300)  # it starts a process for each way, which imports torch
@pytest.mark.parametrize(
    ("skipped_samples", "ways"),
    [(1, batches.WAYS), (0, ["samples", "batches"])],  # without any, the start counts, as over a link
)
def test_every_way_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    skipped_samples: int,
    ways: Sequence[str],
) -> None:
    truth = write_dataset(tmp_path, episodes=4, length=40, width=64, height=64, codec="h264", cameras=batches.CAMERAS)
    monkeypatch.setattr(batches, "bench_dataset", lambda **_: truth.root)
    monkeypatch.setattr(batches, "SKIPPED_SAMPLES", skipped_samples)
    monkeypatch.setattr(
        sys, "argv", ["batches", "--repeats", "1", "--seconds", "0.1", "--json", "--ways", ",".join(ways)]
    )
    batches.main()
    found = {row["question"]: row["median"] for row in json.loads(capsys.readouterr().out)}
    assert len(found) == 5 * len(ways)
    assert all(figure > 0 for figure in found.values())
    name = batches.BASE.name
    assert found[f"{name}: samples: CPU / samples"] == found[f"{name}: samples: frames/s / samples"] == 1
    assert {f"{name}: {way}" for way in ways} <= found.keys()

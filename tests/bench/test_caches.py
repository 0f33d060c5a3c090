"""That the benchmark of the caches measures what it says, on little data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bench import caches, read_back

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_caches_bench_measures_every_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = [
        (read_back, {"OBJECT_BYTES": 8 * caches.MIB, "RANGES": 3}),
        (caches, {"HITS": 10, "STAGED_FILES": 32}),
    ]
    for module, sizes in small:
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)
    for arguments in (["--json"], []):
        caches.main(["--repeats", "1", "--directory", str(tmp_path), *arguments])
    first, _, table = capsys.readouterr().out.partition("\n")
    figures = {row["question"]: row["median"] for row in json.loads(first)}
    assert figures["bytes copied by a hit on 1 MiB"] == 0
    assert len(figures) == 3 + 4 + 3 + 2 + 5
    assert all(figure > 0 for question, figure in figures.items() if "copied" not in question)
    assert figures["staging: reads a file"] == 1
    assert figures["staging: files/s / those of handles that read for themselves"] > 1
    assert figures["staging: its lock held, p50"] < 1000
    assert "a plain file" in table
    assert list(tmp_path.iterdir()) == []

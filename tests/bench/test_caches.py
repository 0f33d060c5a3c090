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
        (caches, {"OBJECTS": 40, "HITS": 10, "WRITES": 3, "EVICTED_FILES": 20, "STAGED_FILES": 32}),
    ]
    for module, sizes in small:
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)
    for arguments in (["--json"], []):
        caches.main(["--repeats", "1", "--directory", str(tmp_path), *arguments])
    first, _, table = capsys.readouterr().out.partition("\n")
    told = json.loads(first)
    figures = {row["question"]: row["median"] for row in told["rows"]}
    assert figures["bytes copied by a hit on 1 MiB"] == 0
    assert len(figures) == 3 + len(read_back.BLOCKS) + 11 + 3 + 7
    assert all(figure > 0 for question, figure in figures.items() if "copied" not in question)
    assert told["staging"]["reads a file"] == 1
    assert "a plain file" in table
    assert "staging: reads a file" in table
    assert list(tmp_path.iterdir()) == []


def test_every_staged_file_is_read_once() -> None:
    figures = caches.measure_staging(files=32, repeats=1, workers=4)
    assert figures["reads a file"] == 1
    assert figures["staged / by itself"] > 1
    assert 0 < figures["lock held, p50 us"] < 1000

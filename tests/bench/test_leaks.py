"""bench/leaks.py, tiny: its rows are there, and flat."""

from __future__ import annotations

import json

import pytest

from bench import leaks

pytestmark = pytest.mark.usefixtures("needs_nginx", "programs_are_warm")


def test_leaks_bench_prints_what_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    leaks.main(["--requests", "300", "--plain", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["web", "s3", "hub", "fsspec"]
    for of in found.values():
        rows = of["held"]
        assert [row["requests"] for row in rows] == [*range(0, 301, 30), 300]
        assert rows[-1]["files"] <= rows[0]["files"]
    leaks.main(["--requests", "100", "--plain", "--of", "web"])
    assert "after closing" in capsys.readouterr().out

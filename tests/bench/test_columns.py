"""bench/columns.py, tiny."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bench import columns

if TYPE_CHECKING:
    import pytest


def test_columns_bench_compares_with_pyarrow(capsys: pytest.CaptureFixture[str]) -> None:
    assert columns.main(["--episodes", "6", "--length", "10", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 4
    assert all(row["median"] > 0 for row in found)

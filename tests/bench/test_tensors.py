"""The benchmark of remote tensors measures, and what it measures stays flat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import tensors

pytestmark = pytest.mark.usefixtures("programs_are_warm")

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024


def bench(*arguments: str) -> Any:  # noqa: ANN401 - JSON
    command = [sys.executable, "-m", "bench.tensors", "--json", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.timeout(90)
def test_put_localize_clear_takes_no_memory_on_either_side() -> None:
    steps = bench("--only", "steps", "--steps", "150")["steps"]
    assert steps["steps"] == 150
    assert steps["kept_bytes"] == 0
    for early, late in (steps["client_bytes"], steps["server_bytes"]):
        assert late - early < 24 * MIB  # a step's tensors are 0.6 MiB: kept, they were 50 by then


@pytest.mark.timeout(90)
def test_reading_is_measured_beside_a_plain_get_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tensors, "REPEAT_BYTES", MIB)
    tensors.main(["--json", "--only", "reading", "--sizes", "64", "--repeats", "1"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    by_way = {row["way"]: row for row in rows}
    assert by_way["plain GET"]["rate_to_get"] == 1
    assert by_way["base64 JSON"]["cpu_to_json"] == 1
    assert {"localize, views", "localize, copies"} <= by_way.keys()
    assert all(row["tensor_bytes"] == 64 * 1024 and row["cpu_seconds_per_gib"] > 0 for row in rows)

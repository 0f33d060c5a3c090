"""The benchmark of remote tensors measures, and what it measures stays flat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import tensors

pytestmark = pytest.mark.usefixtures("programs_are_warm")

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024


def by_question(text: str) -> dict[str, float]:
    return {row["question"]: row["median"] for row in json.loads(text)}


@pytest.mark.slow
def test_put_localize_clear_takes_no_memory_on_either_side() -> None:
    command = [sys.executable, "-m", "bench.tensors", "--json", "--only", "steps", "--steps", "150"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found, steps = by_question(ended.stdout), "150 steps of put, localize, clear over http"
    assert found[f"{steps}: kept at the end"] == 0
    for side in ("client", "server"):  # a step's tensors are 0.6 MiB: kept, they were 50 by then
        assert found[f"{steps}: {side}, last fifth"] - found[f"{steps}: {side}, second fifth"] < 24


@pytest.mark.slow
def test_reading_is_measured_beside_a_plain_get_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tensors, "REPEAT_BYTES", MIB)
    tensors.main(["--json", "--only", "reading", "--sizes", "64", "--repeats", "1"])
    found = by_question(capsys.readouterr().out)
    assert found["plain GET, 64 KiB: rate / plain GET"] == 1
    assert found["CPU of base64 JSON / base64 JSON, 64 KiB"] == 1
    assert {"localize, views, 64 KiB", "localize, copies, 64 KiB"} <= found.keys()
    assert all(found.values())

"""bench/limit.py, tiny: the servers do what they are said to, and the figures are there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio
import pytest
from rich.console import Console

from bench import limit

if TYPE_CHECKING:
    from pathlib import Path


def test_every_client_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "REST_SECONDS", 0.0)
    tiny = ["--servers", "slowing", "--limits", "2,4", "--repeats", "1", "--seconds", "0.5", "--settling", "0.2"]
    limit.main([*tiny, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["client"] for row in found["rows"]] == ["2", "4", "learned"]
    rates = [row["requests_per_second"] for row in found["rows"]]
    assert all(rate > 0 for rate in rates)
    assert found["share_of_best"]["slowing"] == pytest.approx(rates[2] / max(rates[:2]))


def test_the_throttling_server_throttles(tmp_path: Path) -> None:
    with limit.throttling(tmp_path, per_second=2) as url:
        plan = limit.Plan((), 1, measured_seconds=0.5, fixed_settling_seconds=0.1, learned_settling_seconds=0.1)
        run = anyio.run(limit.ask, url, 8, plan)
    assert run.requests_per_second * 0.5 <= 2.5


def test_a_goal_that_is_missed_is_called_missed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        limit.summarise("good", "8", [limit.Run(100.0, 0, 8)]),
        limit.summarise("good", "learned", [limit.Run(70.0, 0, 9), limit.Run(90.0, 0, 10), limit.Run(80.0, 3, 9)]),
        limit.summarise("bad", "8", [limit.Run(100.0, 0, 8)]),
        limit.summarise("bad", "learned", [limit.Run(79.0, 0, 7)]),
    ]
    limit.show(rows, Console(width=120))
    printed = capsys.readouterr().out
    assert "9, 10, 9" in printed
    assert "good: learned / best fixed 0.80, goal 0.8: met" in printed
    assert "bad: learned / best fixed 0.79, goal 0.8: MISSED" in printed

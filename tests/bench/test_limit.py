"""bench/limit.py, tiny: the servers do what they are said to, and the figures are there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio
import pytest

from bench import limit

if TYPE_CHECKING:
    from pathlib import Path


def test_every_client_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "REST_SECONDS", 0.0)
    tiny = ["--servers", "slowing", "--limits", "2,4", "--repeats", "1", "--seconds", "0.5", "--settling", "0.2"]
    limit.main([*tiny, "--json"])
    found = {row["question"]: row["median"] for row in json.loads(capsys.readouterr().out)}
    two, four, learned = (found[f"slowing, limit {name}"] for name in ("2", "4", "learned"))
    assert min(two, four, learned) > 0
    assert found["slowing: learned / best fixed"] == pytest.approx(learned / max(two, four))


def test_the_throttling_server_throttles(tmp_path: Path) -> None:
    with limit.throttling(tmp_path, per_second=2) as url:
        plan = limit.Plan((), 1, measured_seconds=0.5, fixed_settling_seconds=0.1, learned_settling_seconds=0.1)
        run = anyio.run(limit.ask, url, 8, plan)
    assert run.requests_per_second * 0.5 <= 2.5

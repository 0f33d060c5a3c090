"""bench/small_ranges.py, tiny: every client and the steps of a range are there."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from bench import engine, small_ranges


@pytest.mark.usefixtures("needs_nginx")
@pytest.mark.slow
def test_every_client_and_the_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(engine, "OBJECT_BYTES", engine.MIB)
    tiny = ["--sizes", "16", "--concurrency", "4", "--only", "tls", "--repeats", "2", "--requests", "8"]
    small_ranges.main([*tiny, "--json"])
    found = json.loads(capsys.readouterr().out)
    clients = [name for name in small_ranges.CLIENTS if engine.is_installed(name)]
    assert {"asyncfetch", "asyncio", "aiohttp"} <= {*clients}
    assert [(row["client"], row["tls"]) for row in found["rows"]] == [(name, True) for name in clients]
    assert all(row["cpu_microseconds_per_request"] > 0 < row["requests_per_second"] for row in found["rows"])
    [(name, steps)] = found["steps"].items()
    assert name == "TLS, 16 KiB"
    assert 1 < steps["files"] < steps["functions"] <= steps["calls"] < steps["python_calls"]
    assert 1 < steps["frames"] < steps["calls"]
    rows = [engine.Row(**row) for row in found["rows"]]
    small_ranges.show(rows, {name: small_ranges.Steps(**steps)}, Console(width=150))
    table = capsys.readouterr().out
    assert all(client in table for client in clients)
    assert f"{steps['functions']}" in table.partition("one warm range")[2]

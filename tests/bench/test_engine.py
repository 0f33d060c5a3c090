"""bench/engine.py, tiny: every client brings its ranges, and the figures are there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from bench import engine
from bench.engine import GOALS, verdicts
from bench.engine_client import CLIENTS, PLAIN_ONLY, Case, Measured
from bench.slow_link import SlowLink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("needs_nginx")


@pytest.mark.slow
def test_every_installed_client_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "OBJECT_BYTES", engine.MIB)
    clients = [name for name in CLIENTS if engine.is_installed(name)]
    picture = tmp_path / "picture.png"
    tiny = ["--sizes", "16,256", "--concurrency", "4", "--only", "tls", "--repeats", "2", "--repeat-mib", "1"]
    files = ["--save", str(tmp_path / "figures.json"), "--plot", str(picture)]
    engine.main([*tiny, "--clients", ",".join(clients), "--no-slow-link", "--json", *files])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["client"], row["range_bytes"]) for row in rows] == [
        (name, size) for size in (16 * engine.KIB, 256 * engine.KIB) for name in clients if name not in PLAIN_ONLY
    ]
    for row in rows:
        for figure, spread in (("cpu_seconds_per_gib", "cpu_spread"), ("mib_per_second", "mib_per_second_spread")):
            low, high = row[spread]
            assert 0 < low <= row[figure] <= high
        assert row["mib_per_second"] * engine.MIB == pytest.approx(row["requests_per_second"] * row["range_bytes"])
        assert 0 < row["peak_bytes"] < 256 * engine.MIB
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_results_are_written_after_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, picture = tmp_path / "engine.json", tmp_path / "engine.png"
    known: list[int] = []

    def measure(plan: engine.Plan, _: Path) -> Iterator[list[engine.Row]]:
        for _tls, size, concurrency in plan.cases():
            case = Case("", "", "", None, engine.MIB, size, concurrency, 8)
            yield [engine.summarise("asyncfetch", case, [Measured(1.0, 2.0, 0)])]
            known.append(len(json.loads(saved.read_text())["rows"]))
            assert picture.exists()

    monkeypatch.setattr(engine, "measure", measure)
    command = ["--quick", "--only", "plain", "--no-slow-link", "--save", str(saved), "--plot", str(picture)]
    engine.main(command)
    assert known == [1, 2]


@pytest.mark.parametrize(("minutes", "why"), [("0", "the time was up"), ("1", "too much memory in each client")])
def test_cases_and_clients_that_are_left_out_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, minutes: str, why: str
) -> None:
    monkeypatch.setattr(engine, "OBJECT_BYTES", engine.MIB)
    monkeypatch.setattr(engine, "MAX_IN_FLIGHT_BYTES", engine.GIB if minutes == "0" else 1)
    clients = ["--clients", "asyncfetch", "--save", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    engine.main(["--quick", "--only", "plain", "--no-slow-link", "--minutes", minutes, "--json", *clients])
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] == []
    said_lines = " ".join(said.err.split())
    assert said_lines.count("not measured: plain") == said_lines.count(why) == 2
    assert "not measured: obstore: not asked for, or not installed" in said_lines


def test_every_size_is_measured_at_every_concurrency() -> None:
    cases = engine.plan_of(engine.parse([])).cases()
    assert {concurrency for _, _, concurrency in cases[:12]} == {64}
    assert len(set(cases)) == len(cases) == 2 * len(engine.SIZES) * len(engine.CONCURRENCIES)


def test_a_goal_is_met_where_it_is_in_every_case() -> None:
    def row(client: str, size: int, concurrency: int, cpu: float) -> engine.Row:
        case = Case("", "", "", None, 64 * engine.MIB, size, concurrency, 100)
        return engine.summarise(client, case, [Measured(cpu, 1.0, 0)])

    small, large = 64 * engine.KIB, 4 * engine.MIB
    rows = [row("asyncfetch", large, 16, 1.0), row("obstore", large, 16, 2.0), row("aiohttp", large, 16, 4.0)]
    rows += [row("asyncfetch", large, 64, 0.75), row("obstore", large, 64, 1.0), row("aiohttp", large, 256, 0.1)]
    rows += [row("asyncfetch", small, 16, 0.5), row("obstore", small, 16, 1.0), row("obstore", small, 64, 0.1)]
    rows += [row("asyncfetch-s3", large, 64, 1.0), row("s3fs", large, 64, 4.0)]
    assert [(one.goal.peer, one.goal.to_bytes, one.ratios, one.is_met) for one in verdicts(rows)] == [
        ("obstore", 16 * engine.MIB, (0.5, 0.75), False),
        ("aiohttp", 16 * engine.MIB, (0.25,), True),
        ("s3fs", 16 * engine.MIB, (0.25,), True),
        ("obstore", small, (0.5,), True),
    ]
    missed, met, signed, _ = map(str, verdicts(rows))
    assert missed.endswith("0.62 (0.50-0.75), goal 0.7: MISSED, but for 1 of 2 cases")
    assert met.endswith("0.25 (0.25-0.25), goal 0.55: met")
    assert signed == "asyncfetch-s3 / s3fs, plain and TLS, 1024-16384 KiB: 0.25 (0.25-0.25), goal 0.25: met"


def test_default_run_covers_every_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda _: object())
    assert {name for goal in GOALS for name in (goal.ours, goal.peer)} <= {*engine.plan_of(engine.parse([])).clients}


def test_the_table_has_a_line_for_each_client(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("", "", "", None, engine.MIB, engine.MIB, 4, 1024)
    slow, fast = ([Measured(cpu, 2.0, 0)] for cpu in (3.0, 1.5))
    rows = [engine.summarise("asyncfetch", case, fast), engine.summarise("aiohttp", case, slow)]
    engine.show(rows, [SlowLink("asyncfetch", True, 1000, 128, 0.2, 2.0, 0.8, 0.98, 0.5)], Console(width=170))
    printed = capsys.readouterr().out
    assert "1.50 (1.00)" in printed
    assert "3.00 (0.50)" in printed
    assert "slow link, TLS, asyncfetch" in printed
    assert "0.800 of the ideal, 0.980 of the bare client; all cores full for 50% of it" in printed

"""The benchmark of merging measures, and a merge writes what it gives and no more."""

from __future__ import annotations

import json

import pytest

from bench import merge


@pytest.mark.timeout(90)
def test_a_merge_writes_every_byte_once(capsys: pytest.CaptureFixture[str]) -> None:
    merge.main(["--json", "--members", "4", "--repeats", "1", "--workers", "1,3"])
    rows = {(row["place"], row["way"]): row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["local", "flat, 1 worker"]["to_flat"] == 1
    for (_, way), row in rows.items():
        if way.startswith("flat"):
            assert row["written_to_output"] <= 1.05
    assert rows["local", "pairs, 1 worker"]["written_to_output"] > 1.8  # two rounds
    assert rows["local", "one by one"]["written_to_output"] > 2
    assert {("served", "flat, 3 workers"), ("local", "pairs, 3 workers")} <= rows.keys()


def test_merge_bench_measures_chosen_rows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--members", "2", "--repeats", "1", "--workers", "1,2", "--only", "local, flat"]
    merge.main(["--json", *arguments])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["place"], row["way"]) for row in rows] == [("local", "flat, 1 worker"), ("local", "flat, 2 workers")]

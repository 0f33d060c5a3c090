"""The benchmark of merging measures, and a merge writes what it gives and no more."""

from __future__ import annotations

import json

import pytest

from bench import merge


@pytest.mark.slow
def test_a_merge_writes_every_byte_once(capsys: pytest.CaptureFixture[str]) -> None:
    merge.main(["--json", "--members", "4", "--repeats", "1", "--workers", "1,3"])
    rows = {row["question"]: row["median"] for row in json.loads(capsys.readouterr().out)}
    assert rows["local, flat, 1 worker: time / flat"] == 1
    for question, figure in rows.items():
        if " flat, " in question and question.endswith("written / output"):
            assert figure <= 1.05
    assert rows["local, pairs, 1 worker: written / output"] > 1.8  # two rounds
    assert rows["local, one by one: written / output"] > 2
    assert {"served, flat, 3 workers: time", "local, pairs, 3 workers: time"} <= rows.keys()


def test_merge_bench_measures_chosen_rows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--members", "2", "--repeats", "1", "--workers", "1,2", "--only", "local, flat"]
    merge.main(["--json", *arguments])
    ways = dict.fromkeys(row["question"].partition(":")[0] for row in json.loads(capsys.readouterr().out))
    assert [*ways] == ["local, flat, 1 worker", "local, flat, 2 workers"]

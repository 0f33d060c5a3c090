"""bench/members.py, tiny."""

from __future__ import annotations

import json

import pytest

from bench import members

pytestmark = pytest.mark.usefixtures("programs_are_warm")


@pytest.mark.slow
def test_members_bench_tells_the_cost_of_a_member(capsys: pytest.CaptureFixture[str]) -> None:
    assert members.main(["--members", "1", "4", "--repeats", "1", "--json"]) == 0
    found = {row["question"]: row["median"] for row in json.loads(capsys.readouterr().out)}
    assert len(found) == 3 * len(members.UNITS)
    assert all(figure > 0 for question, figure in found.items() if not question.startswith("a member"))

"""bench/members.py, tiny."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench import members

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.usefixtures("programs_are_warm")


@pytest.mark.timeout(120)
def test_members_bench_tells_the_cost_of_a_member(capsys: pytest.CaptureFixture[str]) -> None:
    assert members.main(["--members", "1", "4", "--repeats", "1", "--json"]) == 0
    found: Mapping[str, object] = json.loads(capsys.readouterr().out)
    assert set(found) == {"mixtures", "a_member"}
    assert members.main(["--members", "1", "2", "--repeats", "1"]) == 0
    assert "a member, 1 to 2:" in capsys.readouterr().out

"""bench/traffic.py, tiny: what the order says is what a server counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from bench import traffic

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("programs_are_warm")


@pytest.mark.slow  # its processes import torch
def test_the_order_says_what_a_server_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = traffic.measure_served(tmp_path, [(2, 0, 8), (1, 3, 8)], episodes=24, length=30, pool=4)
    for each in served:
        assert 0.99 * each.counted < each.fetched < 1.01 * each.counted
        assert each.all_bytes > each.fetched or each.ranks == 1
    counted = [traffic.count(kind, 200, group, (1, 8, 24)) for kind in traffic.KINDS for group in (2, 30)]
    assert all(1 <= one.fetched < 1.05 and one.over_bound < 0.25 and one.fetched_by_20 < 1.02 for one in counted)
    mixed = traffic.mix(4, episodes=200)
    assert mixed.first > 15
    assert min(mixed.middle, mixed.last) > 28
    assert mixed.step > 0.9
    traffic.show(counted, [mixed], served, Console(width=120))
    shown = capsys.readouterr().out
    assert "fetched / needed" in shown
    assert "by a server's count" in shown

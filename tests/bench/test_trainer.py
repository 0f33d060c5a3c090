"""bench/trainer.py reads LeRobot's own log; it is run beside LeRobot in tests/peers."""

from __future__ import annotations

import pytest

from bench.trainer import Run, rows_of

LOG = """
INFO 2026-11-26 20:09:10 in_train.py:647 step:1 smpl:8 ep:0.03 grdn:57.517 lr:1.0e-05 updt_s:1.000 data_s:4.000 smp/s:6
Training:  33%|###3      | 1/3 [00:05<00:10]INFO step:2 smpl:16 ep:2 loss:0.711 updt_s:0.900 data_s:0.100 smp/s:12
INFO step:3 smpl:1K ep:2 epch:0.10 loss:0.635 grdn:50.759 lr:1.0e-05 updt_s:0.900 data_s:0.100 smp/s:11 l1_loss:0.635
"""


def test_the_first_wait_is_told_apart() -> None:
    run = Run.of(LOG)
    assert [run.first_seconds, run.step_seconds, run.share, run.whole_share] == pytest.approx([4.0, 0.9, 0.1, 0.6])
    first, *_ = rows_of("a way", [run, Run(2.0, 0.9, 0.2, 0.3), Run(9.0, 0.9, 0.0, 0.1)])
    assert (first.median, first.lowest, first.highest) == (4.0, 2.0, 9.0)

"""A thread's seconds of work."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest

from asyncfetch.runtime.threads import ThreadClock


def test_a_thread_works_while_it_runs_or_waits_for_a_core_and_not_while_it_sleeps() -> None:
    clocks: list[ThreadClock] = []
    seconds = [0.0] * 3

    def work() -> None:
        clocks.append(ThreadClock())
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [core])  # this thread alone
        rival = multiprocessing.get_context("fork").Process(target=spin, args=(10.0,))  # on the same core
        rival.start()
        try:
            began, before = time.perf_counter(), clocks[0].seconds()
            spin(0.3)
            seconds[0] = (clocks[0].seconds() - before) / (time.perf_counter() - began)
            before = clocks[0].seconds()
        finally:
            rival.kill()
            rival.join()
        time.sleep(0.2)
        seconds[1] = clocks[0].seconds() - before

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seconds[0] == pytest.approx(1.0, abs=0.1)
    assert seconds[1] < 0.15


def spin(seconds: float) -> None:
    """Compute for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass

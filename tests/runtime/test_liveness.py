"""Signs of life: whoever beats or computes lives, whoever does neither for too long is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import anyio
import pytest

from asyncfetch.runtime.liveness import Silence, Vitals, beat, how_it_ended, how_silent, vitals

IDLE, STOPPED = Vitals(False, 3.0), Vitals(True, 3.0)


def test_silence_is_counted_from_the_latest_beat() -> None:
    silence = Silence(100.0)
    assert silence.look(101.0, 5.0, IDLE) == 0.0
    assert [silence.look(now, 5.0, IDLE) for now in (102.0, 103.0, 104.0)] == [1.0, 2.0, 3.0]
    assert silence.look(105.0, 6.0, IDLE) == 0.0
    assert silence.look(106.0, 6.0, IDLE) == 1.0


@pytest.mark.parametrize("seen", [IDLE, STOPPED, None])
def test_silence_needs_no_more_than_beats(seen: Vitals | None) -> None:
    silence = Silence(0.0)
    assert [silence.look(float(now), 1.0, seen) for now in range(1, 62)][-1] == 60.0
    assert silence.look(62.0, 2.0, seen) == 0.0


def test_process_that_computes_is_not_silent() -> None:
    """A transform of two minutes that lets nobody else have the interpreter."""
    silence = Silence(0.0)
    assert max(silence.look(float(now), 1.0, Vitals(False, 0.05 * now)) for now in range(1, 121)) <= 1.0


def test_process_that_only_wakes_up_is_silent() -> None:
    silence = Silence(0.0)
    assert max(silence.look(float(now), 1.0, Vitals(False, 0.01 * (now // 20))) for now in range(1, 121)) > 60.0


def test_process_without_a_due_beat_is_silent_only_if_stopped() -> None:
    silence = Silence(0.0)
    assert max(silence.look(float(now), None, IDLE) for now in range(1, 121)) == 0.0
    assert [silence.look(float(now), None, STOPPED) for now in range(121, 124)] == [1.0, 2.0, 3.0]
    assert silence.look(124.0, None, IDLE) == 0.0


def test_time_in_which_this_process_stood_still_is_not_counted() -> None:
    """As when a job is suspended and continued: the others had no more time than it."""
    silence = Silence(0.0)
    silence.look(1.0, 7.0, IDLE)
    assert silence.look(2.0, 7.0, IDLE) == 1.0
    assert silence.look(600.0, 7.0, IDLE) == 1.0
    assert silence.look(601.0, 7.0, IDLE) == 2.0


@pytest.fixture
def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_stopped_process_is_seen(child: subprocess.Popen[bytes]) -> None:
    with child:
        try:
            seen = vitals(child.pid)
            assert seen is not None
            assert not seen.is_stopped
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            seen = vitals(child.pid)
            assert seen is not None
            assert seen.is_stopped
            assert seen.cpu_seconds >= 0.0
            assert "is stopped, by SIGSTOP" in how_silent(61.4, seen)
            assert how_silent(61.4, IDLE) == "hangs: it has shown no sign of life for 61 s"
        finally:
            child.kill()
        assert how_it_ended(child.wait()).startswith("was killed by SIGKILL. If nobody did that, the system was out of")
        assert vitals(child.pid) is None


def test_computing_is_seen() -> None:
    before = vitals(os.getpid())
    assert before is not None
    while (now := vitals(os.getpid())) is not None and now.cpu_seconds < before.cpu_seconds + 0.05:
        pass
    assert now is not None


async def test_a_loop_beats_until_its_end() -> None:
    told: list[bool] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat, told.append)
        await anyio.wait_all_tasks_blocked()
        assert told == [True]
        tasks.cancel_scope.cancel()
    assert told == [True, False]

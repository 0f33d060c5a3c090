"""Loops in threads while the process forks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

PRELUDE = """
import asyncio, os, threading, time, warnings
from asyncfetch.runtime.loop_thread import LoopThread
warnings.filterwarnings("ignore", message=".*use of fork")
lock = threading.Lock()

async def hold_it_nearly_always():
    while True:
        with lock:
            time.sleep(0.002)  # as OpenSSL holds its own during a handshake, which is no await
        await asyncio.sleep(0)

def fork(body=lambda: 0):
    child = os.fork()
    if child == 0:
        os._exit(body())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def take_it():
    return 0 if lock.acquire(timeout=5) else 1
"""


def run(body: str) -> str:
    """What it prints, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=15)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_no_lock_that_a_loop_takes_is_copied_taken() -> None:
    body = """
    with LoopThread() as first, LoopThread() as second:
        first.start(hold_it_nearly_always)
        second.start(hold_it_nearly_always)
        print([fork(take_it) for _ in range(20)])
        print(first.run(asyncio.sleep, 0, "goes on"), second.run(asyncio.sleep, 0, "goes on"))
    """
    assert run(body) == f"{[0] * 20}\ngoes on goes on\n"


def test_a_fork_on_a_loops_own_thread_waits_for_none_but_the_others() -> None:
    body = """
    async def fork_here():
        return fork()
    with LoopThread() as first, LoopThread():
        print(first.run(fork_here))
    """
    assert run(body) == "0\n"


def test_a_blocked_loop_delays_a_fork_for_a_while_only() -> None:
    body = """
    async def block():
        begun.set()
        end.wait()
    begun, end = threading.Event(), threading.Event()
    with LoopThread() as thread:
        thread.start(block)
        begun.wait()
        print(fork())
        end.set()
    """
    assert run(body) == "0\n"


def test_a_child_has_loops_of_its_own_that_stand_still() -> None:
    body = """
    def in_the_child():
        with LoopThread() as own:
            own.start(hold_it_nearly_always)
            return fork(take_it)
    with LoopThread():
        print(fork(in_the_child))
    """
    assert run(body) == "0\n"

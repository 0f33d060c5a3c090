"""What needs a process of its own: interpreter exit, Ctrl-C, fork in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

PRELUDE = """
import os, signal, sys, threading, anyio, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
from contextlib import asynccontextmanager
from asyncfetch.runtime.channel import iterate
from asyncfetch.runtime.loop_thread import LoopThread

class Numbers:
    def __init__(self, pause=0.0, limit=10**9):
        self.number, self.pause, self.limit = 0, pause, limit
    async def __aenter__(self):
        return self
    async def __aexit__(self, *exc_info):
        print("left", flush=True)
    def __aiter__(self):
        return self
    async def __anext__(self):
        await anyio.sleep(self.pause)
        self.number += 1
        if self.number > self.limit:
            await anyio.sleep_forever()
        return [self.number]

loop_thread = LoopThread()
"""


@dataclass(frozen=True)
class Case:
    name: str
    body: str
    exit_code: int = 0
    output: str = ""
    interrupt: bool = False


CASES = [
    Case("idle at exit", "loop_thread.run(anyio.sleep, 0)"),
    Case("call under way at exit", "loop_thread.start(anyio.sleep_forever)"),
    Case("iterator open at exit", "items = iterate(loop_thread, Numbers)\nnext(items)", output="left\n"),
    Case("exit code kept", "items = iterate(loop_thread, Numbers)\nnext(items)\nsys.exit(7)", 7, "left\n"),
    Case("error while open", "for item in iterate(loop_thread, Numbers):\n    raise ValueError", 1, "left\n"),
    Case(
        "a call in a thread that outlasts the wait for the loop",
        """
from asyncfetch.decode import DecodePool
pool = DecodePool(1)
async def work():
    try:
        await pool.run(time.sleep, 1.2)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.1)
            print("ended", flush=True)
loop_thread.start(work)
time.sleep(0.2)
""",
        output="ended\n",
    ),
    Case("worker thread idle at exit", "loop_thread.run(anyio.to_thread.run_sync, time.monotonic)"),
    *(
        Case(
            f"a worker thread idle whose loop was {how} and not closed",
            f"""
import asyncio
async def work(then):
    await anyio.to_thread.run_sync(time.monotonic)
    then()
    await anyio.sleep(0)
def interrupt():
    raise KeyboardInterrupt
loop = asyncio.new_event_loop()
try:
    {program}
except (KeyboardInterrupt, RuntimeError) as error:
    print(type(error).__name__)
""",
            output=output,
        )
        for how, program, output in [
            ("interrupted", "loop.run_until_complete(work(interrupt))", "KeyboardInterrupt\n"),
            ("stopped", "loop.run_until_complete(work(loop.stop))", "RuntimeError\n"),
            (
                "nest_asyncio's",
                "import nest_asyncio; asyncio.set_event_loop(loop); nest_asyncio.apply(); asyncio.run(work(int))",
                "",
            ),
        ]
    ),
    Case(
        "exit blocked by nothing",
        "async def block():\n    threading.Event().wait()\nloop_thread.start(block)",  # the fault under test
    ),
    Case(
        "interrupted while waiting for an item",
        "for item in iterate(loop_thread, lambda: Numbers(limit=1)):\n    print('ready', flush=True)",
        -signal.SIGINT,
        "ready\nleft\n",
        interrupt=True,
    ),
    Case(
        "interrupted while items flow",
        "for item in iterate(loop_thread, Numbers):\n    if item == 1:\n        print('ready', flush=True)",
        -signal.SIGINT,
        "ready\nleft\n",
        interrupt=True,
    ),
    Case(
        "interrupted in a call",
        """
async def forever():
    print("ready", flush=True)
    try:
        await anyio.sleep_forever()
    finally:
        print("cleaned up", flush=True)
try:
    loop_thread.run(forever)
except KeyboardInterrupt:
    print("interrupted", flush=True)
""",
        0,
        "ready\ncleaned up\ninterrupted\n",
        interrupt=True,
    ),
    Case(
        "forked while iterating",
        """
items = iterate(loop_thread, lambda: Numbers(limit=3))
first = next(items)
pid = os.fork()
if pid == 0:
    try:
        next(items)
    except Exception as error:
        print(type(error).__name__, flush=True)
    items.close()
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
assert [first, next(items), next(items)] == [1, 2, 3]
items.close()
""",
        0,
        "WrongLoop\nleft\n",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_process_ends_within_a_second_as_it_should(case: Case) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + case.body + "\nprint(time.monotonic(), file=sys.stderr)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in [os.getcwd(), *sys.path] if path)},
    )
    assert process.stdout is not None
    output, asked_to_end = "", 0.0
    if case.interrupt:
        output = process.stdout.readline()
        asked_to_end = time.monotonic()
        process.send_signal(signal.SIGINT)
    try:
        rest, errors = process.communicate(timeout=15)
    finally:
        process.kill()
    ended = time.monotonic()
    assert (process.returncode, output + rest) == (case.exit_code, case.output), errors
    if case.exit_code == 0:
        *noise, last = errors.splitlines()
        assert noise == []
        asked_to_end = max(asked_to_end, float(last))
    if asked_to_end:
        assert ended - asked_to_end < 2.5  # a second, and what a busy machine takes to end an interpreter

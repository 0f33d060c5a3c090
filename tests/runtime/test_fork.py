"""What other threads are at while the process forks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PRELUDE = """
import asyncio, os, threading, time, warnings
from asyncfetch.runtime import fork as forks
from asyncfetch.runtime.fork import forks_wait
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


def test_fork_on_a_loops_own_thread_waits_for_others_alone() -> None:
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


def test_no_import_is_copied_half_done(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import __main__; __main__.begun.set(); __main__.time.sleep(0.2)")
    body = f"""
    import signal, sys
    sys.path.append({str(tmp_path)!r})
    begun = threading.Event()
    def load():
        with forks_wait():
            import slow_to_import
    def in_the_child():
        signal.alarm(5)
        load()
        return 0
    loads = threading.Thread(target=load)
    loads.start()
    begun.wait()
    print(fork(in_the_child))
    loads.join()
    """
    assert run(body) == "0\n"


def test_a_block_waits_for_a_fork_under_way() -> None:
    body = """
    def hold_it_now_and_then():
        while not ended:
            with forks_wait(), forks_wait():
                with lock:
                    time.sleep(0.001)
    ended = []
    threads = [threading.Thread(target=hold_it_now_and_then) for _ in range(3)]
    for thread in threads:
        thread.start()
    print([fork(take_it) for _ in range(20)])
    ended.append(True)
    for thread in threads:
        thread.join()
    """
    assert run(body) == f"{[0] * 20}\n"


def test_threads_that_fork_in_blocks_do_not_wait_for_each_other() -> None:
    body = """
    def in_the_child():
        with forks_wait():
            return fork()
    def fork_inside():
        with forks_wait():
            both.wait()
            codes.append(fork(in_the_child))
    codes, both = [], threading.Barrier(2)
    threads = [threading.Thread(target=fork_inside) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(codes)
    """
    assert run(body) == "[0, 0]\n"


def test_forked_child_is_in_no_block_that_holds_up_its_threads() -> None:
    body = """
    forks.IMPORT_SECONDS = 3600
    def in_the_child():
        thread = threading.Thread(target=lambda: codes.append(fork()))
        thread.start()
        thread.join(5)
        return 0 if codes == [0] else 1
    codes = []
    print(fork(in_the_child))
    """
    assert run(body) == "0\n"


def test_a_block_without_an_end_delays_a_fork_for_a_while_only() -> None:
    body = """
    def hold():
        with forks_wait():
            begun.set()
            end.wait()
    forks.IMPORT_SECONDS = 0.1
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    print(fork())
    end.set()
    thread.join()
    """
    assert run(body) == "0\n"


def test_ending_threads_hold_no_lock_of_openssl_during_a_fork() -> None:
    body = """
    import ssl
    def forget_it_slowly():
        asked.append(threading.current_thread())
        with lock:
            time.sleep(0.05)
    async def thread_of_it():
        return threading.current_thread()
    def use_it():
        threads.append(threading.current_thread())
        with forks_wait(), forks_wait():
            begun.set()
    forks._thread_stop = lambda: forget_it_slowly
    asked, threads, begun = [], [], threading.Event()
    with LoopThread() as loop_thread:
        threads.append(loop_thread.run(thread_of_it))
    print(fork(take_it))
    thread = threading.Thread(target=use_it)
    thread.start()
    begun.wait()
    print(fork(take_it))
    thread.join()
    print(asked == threads)
    """
    assert run(body) == "0\n0\nTrue\n"


def test_openssl_itself_forgets_threads() -> None:
    body = """
    import ssl
    stop = forks._thread_stop()
    print(stop.__name__ if stop else ssl.OPENSSL_VERSION)
    context = ssl.create_default_context()
    for _ in range(3):
        with forks_wait():
            context = ssl.create_default_context()
        try:
            context.load_verify_locations(cafile="/dev/null")
        except ssl.SSLError as error:
            print(error.reason)
    """
    found = "NO_CERTIFICATE_OR_CRL_FOUND\n"
    assert run(body).startswith((f"OPENSSL_thread_stop\n{found * 3}", "LibreSSL"))


def test_holders_know_whether_a_child_may_see_what_they_held() -> None:
    """What was there when a fork began, and what came while it was under way; and nothing that came afterwards."""
    body = """
    under_way = []
    def look():
        under_way.append(forks.fork_count())
        print(forks.was_forked_since(before), forks.was_forked_since(under_way[0]))
    forks._stop_loops = look
    before = forks.fork_count()
    print(forks.was_forked_since(before))
    fork()
    print(forks.was_forked_since(before), forks.was_forked_since(under_way[0]))
    print(forks.was_forked_since(forks.fork_count()))
    """
    assert run(body).splitlines() == ["False", "True True", "True True", "False"]

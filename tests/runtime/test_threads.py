"""A thread's seconds of work; and what is raised where no thread can be started."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

import asyncfetch as af
from asyncfetch.decode import DecodePool
from asyncfetch.merge import merge_datasets
from asyncfetch.runtime.threads import ThreadClock, run_sync

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_thread_works_while_it_runs_or_waits_for_a_core() -> None:
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
        finally:
            rival.kill()
            rival.join()
        before = clocks[0].seconds()  # while it waited for the rival's end, others may have had the core
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


REMEDY = r"can't start new thread.*ulimit -u.*ulimit -v.*num_workers"


@pytest.fixture
def no_threads() -> Iterator[None]:
    before = threading.stack_size(2**46)  # more than there is of addresses
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("no_threads")
async def test_no_thread_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(af.WorkerError, match=REMEDY):
        await run_sync(int)
    with pytest.raises(af.WorkerError, match=REMEDY):
        await DecodePool(1).run(int)
    with pytest.raises(af.WorkerError, match=REMEDY):
        async with af.Fetcher():
            pass
    with pytest.raises(af.WorkerError, match=REMEDY):
        await merge_datasets([tmp_path], tmp_path / "out")


@pytest.mark.usefixtures("no_threads")
def test_no_thread_for_a_stream_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(af.WorkerError, match=REMEDY):
        next(iter(af.Stream(str(tmp_path))))


async def test_no_thread_for_a_name_is_an_error_with_the_remedy(request: pytest.FixtureRequest) -> None:
    config = af.FetchConfig(trust_env=False, retry=af.RetryConfig(attempts=1))
    async with af.Fetcher(config) as fetcher:
        request.getfixturevalue("no_threads")
        with pytest.raises(af.FetchError, match=REMEDY):
            await fetcher.fetch("http://localhost:1/x", 0, 1)


async def test_another_error_of_a_thread_stays_as_it_is() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match=r"^no$"):
        await run_sync(fail)

"""Threads for back ends of fsspec: one goes on from job to job, ends with its fetcher, and forgets what was left."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
import weakref
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from asyncfetch.config import FetchConfig, RetryConfig
from asyncfetch.errors import FetchError, FetchTimeout
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.fetch.transports.fsspec_threads import FsspecThreads, ThreadJob
from tests.fetch.conftest import fork
from tests.fetch.odd_files import CONTENT, hanging

if TYPE_CHECKING:
    from collections.abc import Callable

from tests.conftest import all_others_wait
from tests.fetch.odd_files import OddFileSystem

ONCE = FetchConfig(retry=RetryConfig(attempts=1))


@pytest.fixture
def used(odd: type[OddFileSystem]) -> set[threading.Thread]:
    """The threads that questions to odd:// were asked in."""
    threads: set[threading.Thread] = set()

    def note(info: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.current_thread())
        return info

    odd.info_of = note
    return threads


@pytest.fixture
def wake_ups(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[object]]:
    """How often threads have called the running loop, once it was called."""

    def note() -> list[object]:
        calls: list[object] = []
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *args: object) -> asyncio.Handle:
            calls.append(callback)
            return wake(callback, *args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        return calls

    return note


async def end_of(threads: set[threading.Thread]) -> None:
    for thread in threads:
        await to_thread.run_sync(thread.join, 5)
    assert not any(thread.is_alive() for thread in threads)


async def test_range_is_one_job_of_a_thread_that_takes_the_next(
    odd: type[OddFileSystem],
    used: set[threading.Thread],
    wake_ups: Callable[[], list[object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.READ_STEP_BYTES", 1000)
    async with Fetcher() as fetcher:
        calls = wake_ups()
        for number in range(5):
            assert await fetcher.fetch("odd://x", number, number + 1000) == CONTENT[number : number + 1000]
        assert len(calls) == 5
        assert await fetcher.fetch("odd://x", 0, 2001) == CONTENT[:2001]
        assert await fetcher.listdir("odd://")
        assert len(calls) == 5 + 3 + 1
        body, first_byte = fetcher.statistics().body, fetcher.statistics().first_byte
        assert (body.count, first_byte.count) == (6, 7)
    assert len(used) == 1
    assert odd.looks == 6 * 2 + 1
    await end_of(used)


async def test_threads_are_as_many_as_places_and_end_with_the_fetcher(
    odd: type[OddFileSystem], used: set[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.THREADS", 3)
    all_three = threading.Barrier(3)

    def meet(data: bytes) -> bytes:
        all_three.wait(5)
        return data

    async with Fetcher(FetchConfig(max_span_bytes=0)) as fetcher:
        for start in range(3):
            await fetcher.fetch("odd://x", start, start + 10)
        odd.read = meet
        async with anyio.create_task_group() as group:
            for start in range(12):
                group.start_soon(fetcher.fetch, "odd://x", start, start + 10)
    assert len(used) == 3
    await end_of(used)


async def test_a_thread_that_was_left_behind_ends_with_its_call(
    odd: type[OddFileSystem], used: set[threading.Thread]
) -> None:
    with hanging(odd) as hang:
        async with Fetcher() as fetcher, anyio.create_task_group() as group:
            group.start_soon(fetcher.fetch, "odd://x", 0, 10)
            await to_thread.run_sync(hang.began.wait)
            group.cancel_scope.cancel()
        assert all(thread.is_alive() for thread in used)
    await end_of(used)
    assert odd.looks == 1  # nobody checks what nobody waits for


async def test_caller_cancelled_as_it_gets_a_place_passes_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With anyio 4.9 nobody got that place any more."""
    threads, release = FsspecThreads(1, 30), threading.Event()
    waiters: list[asyncio.Task[None]] = []
    has_ended = threads.has_ended

    def end_and_cancel(job: ThreadJob) -> None:
        has_ended(job)
        while waiters:
            waiters.pop().cancel()

    async def leave() -> None:
        task = asyncio.current_task()
        assert task is not None
        waiters.append(task)
        with pytest.raises(asyncio.CancelledError):
            await threads.run(lambda _: None, "odd")
        task.uncancel()

    monkeypatch.setattr(threads, "has_ended", end_and_cancel)
    first = partial(threads.run, lambda _: release.wait(5), "odd")
    third = partial(threads.run, lambda _: None, "odd")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for work in (first, leave, third):
                group.start_soon(work)
                await all_others_wait()
            release.set()
    threads.close()


@pytest.mark.parametrize("verb", ["fetch", "listdir"])
async def test_a_job_that_was_left_makes_no_further_call(
    odd: type[OddFileSystem], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    began, release, listed = threading.Event(), threading.Event(), []
    odd().pipe_file("/d/x", CONTENT)
    monkeypatch.setattr(odd, "ls", lambda *_, **__: listed.append(1))
    used = set()

    def hang(info: dict[str, Any]) -> dict[str, Any]:
        used.add(threading.current_thread())
        began.set()
        release.wait()
        return info

    odd.info_of = hang
    async with Fetcher() as fetcher, anyio.create_task_group() as group:
        group.start_soon(getattr(fetcher, verb), "odd://d/x" if verb == "fetch" else "odd://d")
        await to_thread.run_sync(began.wait)
        group.cancel_scope.cancel()
    release.set()
    await end_of(used)
    assert (odd.asked, listed) == ([], [])


async def test_a_thread_that_came_back_is_used_again(odd: type[OddFileSystem], used: set[threading.Thread]) -> None:
    began, release, back = threading.Event(), threading.Event(), asyncio.Event()

    def hang(data: bytes) -> bytes:
        began.set()
        release.wait()
        return data

    odd.read = hang
    async with Fetcher() as fetcher:
        has_ended = FsspecThreads.has_ended

        def noted(threads: FsspecThreads, job: ThreadJob) -> None:
            has_ended(threads, job)
            back.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FsspecThreads, "has_ended", noted)
            async with anyio.create_task_group() as group:
                group.start_soon(fetcher.fetch, "odd://x", 0, 10)
                await to_thread.run_sync(began.wait)
                group.cancel_scope.cancel()
            release.set()
            await back.wait()
        odd.read = lambda data: data
        assert await fetcher.fetch("odd://x", 0, 10) == CONTENT[:10]
    assert len(used) == 1


async def test_calls_of_a_job_have_the_whole_limit_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec_threads.time", clock)
    jobs: list[ThreadJob] = []
    called, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def three_calls(job: ThreadJob) -> None:
        jobs.append(job)
        for _ in range(3):
            job.next_call()
            called.release()
            go_on.acquire()

    threads = FsspecThreads(1, 1000)
    try:
        async with anyio.create_task_group() as group:

            async def run() -> None:
                with pytest.raises(AttemptFailed, match="within 1000 s") as caught:
                    await threads.run(three_calls, "odd")
                assert caught.value.kind is FetchTimeout

            group.start_soon(run)
            await to_thread.run_sync(called.acquire)
            now = 600
            go_on.release()
            await to_thread.run_sync(called.acquire)
            now = 1200
            go_on.release()
            await to_thread.run_sync(called.acquire)
            now = 2199
            jobs[0].is_due(50.0)
            assert jobs[0].due == 51
            now = 2200
            jobs[0].is_due(51.0)
            with pytest.raises(CancelledError):  # its caller hasn't even heard of it
                jobs[0].next_call()
    finally:
        go_on.release()
        threads.close()


@pytest.mark.parametrize("is_late", [False, True])
async def test_result_in_the_turn_of_a_cancellation_is_dropped(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    work, worked = ThreadJob.work, threading.Event()
    jobs: list[ThreadJob] = []
    errors: list[object] = []

    def work_noted(job: ThreadJob) -> None:
        work(job)
        worked.set()

    monkeypatch.setattr(ThreadJob, "work", work_noted)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    threads = FsspecThreads(1, 60)
    task = asyncio.create_task(threads.run(jobs.append, "odd"))
    await anyio.lowlevel.checkpoint()
    assert worked.wait(5)  # and its end waits for the loop's next turn
    task.cancel()
    if is_late:
        with monkeypatch.context() as patch:
            clock = SimpleNamespace(monotonic=lambda: math.inf)
            patch.setattr("asyncfetch.fetch.transports.fsspec_threads.time", clock)
            jobs[0].is_due(0.0)
    with pytest.raises(asyncio.CancelledError):
        await task
    threads.close()
    assert errors == []


async def test_thread_that_cannot_be_started_is_an_error(
    odd: type[OddFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("asyncfetch.fetch.transports.fsspec.THREADS", 1)
    async with Fetcher(ONCE) as fetcher:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(2):
                with pytest.raises(FetchError, match=r"no thread can be started \(can't start new thread\)"):
                    await fetcher.fetch("odd://x", 0, 10)
        assert await fetcher.fetch("odd://x", 0, 10) == CONTENT[:10]
        assert odd.looks == 2


async def test_threads_end_where_their_owner_was_forgotten() -> None:
    threads = FsspecThreads(1, 60)
    thread = await threads.run(lambda _: threading.current_thread(), "odd")
    del threads
    gc.collect()
    await end_of({thread})


class Buffer(bytearray):
    """One that can be asked whether it is still there."""


async def test_a_thread_keeps_nothing_of_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    work, looked = ThreadJob.work, threading.Event()

    def work_slowly(job: ThreadJob) -> None:
        work(job)
        looked.wait(5)

    monkeypatch.setattr(ThreadJob, "work", work_slowly)
    threads, buffer = FsspecThreads(1, 60), Buffer(10)
    held = weakref.ref(buffer)
    await threads.run(partial(land, buffer), "odd")
    del buffer
    assert held() is None
    looked.set()
    threads.close()


def land(buffer: bytearray, _: ThreadJob) -> None:
    buffer[:] = bytes(10)


class Broken(ValueError):
    """One that can be asked whether it is still there."""


async def test_an_error_of_a_back_end_makes_no_cycle(odd: type[OddFileSystem], used: set[threading.Thread]) -> None:
    held: list[weakref.ref[Broken]] = []

    def fail(_: bytes) -> bytes:
        error = Broken("x")
        held.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    odd.read = fail
    gc.collect()
    gc.disable()
    try:
        async with Fetcher(ONCE) as fetcher:
            for _ in range(2):
                with suppress(FetchError):
                    await fetcher.fetch("odd://x", 0, 10)
        await end_of(used)
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


async def read_once() -> bytes:
    async with Fetcher() as fetcher:
        return bytes(await fetcher.fetch("odd://x", 0, 10))


async def test_a_forked_child_has_threads_of_its_own(odd: type[OddFileSystem], used: set[threading.Thread]) -> None:
    async with Fetcher() as fetcher:
        await fetcher.fetch("odd://x", 0, 10)
        assert all(thread.is_alive() for thread in used)
        child = fork()
        if child == 0:
            code = 1
            try:
                fetcher.__dict__.clear()  # what a worker does to the objects it inherited
                gc.collect()
                code = int(asyncio.run(read_once()) != CONTENT[:10])
            finally:
                os._exit(code)
        _, status = await to_thread.run_sync(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await fetcher.fetch("odd://x", 0, 10) == CONTENT[:10]
    assert len(used) == 1

"""A merge's pieces in processes: the same bytes, our errors, and nothing that goes on behind the caller's back."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pyarrow.parquet as pq
import pytest
from anyio import to_thread

from asyncfetch.config import FetchConfig, TimeoutConfig
from asyncfetch.errors import FormatError, WorkerError
from asyncfetch.merge import MergeProgress, Selection, merge_datasets
from asyncfetch.merge.executor import OnThisMachine, PieceProcess, processes_pay
from asyncfetch.merge.job import load_sources
from asyncfetch.testing import Fault, RangeServer
from tests.merge.test_job import all_files
from tests.merge.test_plan import names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncfetch.testing import ServedRequest
    from tests.lerobot.serving import Library

pytestmark = pytest.mark.usefixtures("programs_are_warm")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that were started."""
    pids, start = list[int](), PieceProcess.start

    async def note(fetch: FetchConfig) -> PieceProcess:
        worker = await start(fetch)
        pids.append(worker.process.pid)
        return worker

    monkeypatch.setattr(PieceProcess, "start", note)
    return pids


ALWAYS = OnThisMachine(pays=lambda _seconds, _workers: True)
"""However little there is to do."""


def are_gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize(
    ("seconds", "workers", "pays"),
    [(1000.0, 1, False), (5.9, 2, False), (6.1, 2, True), (3.1, 64, True), (2.9, 64, False), (0.0, 2, False)],
)
def test_processes_are_for_much_work(seconds: float, workers: int, pays: bool) -> None:
    assert processes_pay(seconds, workers) is pays


@pytest.mark.may_block  # it looks into /proc
async def test_the_same_bytes_and_report(library: Library, tmp_path: Path, started: list[int]) -> None:
    """They have the caller's secrets: those of the configuration, and those of a url."""
    one, two = library(episodes=(9, 4, 5), tasks=("a", "b")).root, library(episodes=(5, 6), tasks=("c", "a")).root
    told: list[MergeProgress] = []

    def refuse(request: ServedRequest) -> Fault | None:
        return None if request.headers.get("Authorization") else Fault.status(401)

    async with RangeServer(one, fault=refuse) as server, RangeServer(two, fault=refuse) as other:
        token = {server.url.partition("://")[2]: "right"}
        fetch = FetchConfig(ca_file=server.ca_file, trust_env=False, tokens=token)
        sources = [server.url, other.url.replace("://", "://user:hunter2@")]
        merge = partial(merge_datasets, sources, workers=2, fetch=fetch, video_file_max_bytes=1)
        there = await merge(tmp_path / "there", executor=ALWAYS, progress=told.append)
        assert len(started) == 2
        assert are_gone(started)
        local = await merge(tmp_path / "here")  # for which there is too little to do
    assert all_files(tmp_path / "there") == all_files(tmp_path / "here")
    assert (there.files, there.bytes, there.episodes) == (local.files, local.bytes, local.episodes)
    assert [now.files_done for now in told] == sorted(now.files_done for now in told)
    assert (told[-1].files_done, told[-1].bytes_done) == (
        told[-1].files_total,
        sum((tmp_path / "there" / file.path).stat().st_size for file in there.planned),
    )
    assert len(started) == 2


async def test_memory_filesystem_is_read_in_this_process(library: Library, tmp_path: Path, started: list[int]) -> None:
    """A file system of fsspec's in memory."""
    fsspec = pytest.importorskip("fsspec")
    root = library(episodes=(4, 5)).root
    memory = fsspec.filesystem("memory")
    await to_thread.run_sync(partial(memory.put, str(root), "/set", recursive=True))
    try:
        await merge_datasets(["memory://set", root], tmp_path / "out", workers=2, executor=ALWAYS)
    finally:
        memory.rm("/set", recursive=True)
    assert started == []


@pytest.mark.may_block  # it looks into /proc
async def test_an_error_in_a_process_is_raised_here(library: Library, tmp_path: Path, started: list[int]) -> None:
    root = tmp_path / "source"
    shutil.copytree(library(episodes=(4, 5)).root, root)
    path = next((root / "data").rglob("*.parquet"))
    pq.write_table(pq.read_table(path).slice(0, 6), path)
    with pytest.raises(FormatError, match="has 2 rows with index in") as caught:
        await merge_datasets([root], tmp_path / "out", workers=2, executor=ALWAYS)
    assert type(caught.value) is FormatError
    assert started
    assert are_gone(started)
    assert names(tmp_path) == {"source"}


async def _kill(worker: PieceProcess, _scope: anyio.CancelScope) -> None:
    worker.process.kill()


async def _cancel(_worker: PieceProcess, scope: anyio.CancelScope) -> None:
    scope.cancel()


async def _let_go(worker: PieceProcess, _scope: anyio.CancelScope) -> None:
    """As the system does when this process is killed."""
    assert worker.process.stdin is not None
    await worker.process.stdin.aclose()


@pytest.mark.parametrize(
    ("act", "code", "words"),
    [
        (_kill, -9, "killed by SIGKILL.*out of memory.*goes on where it"),
        (_cancel, -9, None),
        (_let_go, 0, "exit code 0"),
    ],
    ids=["killed", "cancelled", "its parent gone"],
)
async def test_in_the_midst_of_a_piece(
    library: Library, act: Callable[[PieceProcess, anyio.CancelScope], object], code: int, words: str | None
) -> None:
    """It ends at once, and whoever waits for it hears why."""
    asked = threading.Event()

    def stall(_request: ServedRequest) -> None:
        asked.set()

    async def disturb(worker: PieceProcess, scope: anyio.CancelScope) -> None:
        await to_thread.run_sync(asked.wait)
        await act(worker, scope)  # type: ignore[misc]

    async with RangeServer(library(episodes=(4,)).root, fault=stall, first_byte_seconds=999) as server:
        worker = await PieceProcess.start(FetchConfig(ca_file=server.ca_file, trust_env=False))
        try:
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as scope:
                    tasks.start_soon(disturb, worker, scope)
                    if words is None:
                        await worker.run(load_sources, ([Selection(server.url)],), print)
                    else:
                        with pytest.raises(WorkerError, match=words):
                            await worker.run(load_sources, ([Selection(server.url)],), print)
        finally:
            await worker.end()
        assert scope.cancelled_caught is (words is None)
        assert worker.process.returncode == code


@pytest.mark.may_block  # it looks into /proc
async def test_a_stopped_process_is_an_error_in_time(library: Library) -> None:
    asked = threading.Event()

    def stall(_request: ServedRequest) -> None:
        asked.set()

    async with RangeServer(library(episodes=(4,)).root, fault=stall, first_byte_seconds=999) as server:
        fetch = FetchConfig(ca_file=server.ca_file, trust_env=False, timeouts=TimeoutConfig(silent_process_seconds=1))
        worker = await PieceProcess.start(fetch)
        pid = worker.process.pid
        try:
            async with anyio.create_task_group() as tasks:

                async def stop() -> None:
                    await to_thread.run_sync(asked.wait)
                    worker.process.send_signal(signal.SIGSTOP)

                tasks.start_soon(stop)
                with pytest.raises(
                    WorkerError, match=rf"\(pid {pid}\) is stopped, by SIGSTOP.*The same call goes on"
                ) as caught:
                    await worker.run(load_sources, ([Selection(server.url)],), print)
        finally:
            await worker.end()
        assert "silent_process_seconds" in str(caught.value)
        assert are_gone([pid])

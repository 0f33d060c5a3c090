"""Cancellation at every await, closing in the middle, threads, forks, and ends without an end."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncfetch.errors import (
    AsyncFetchError,
    ClosedError,
    ConnectionFailed,
    ShardNotFound,
    TensorError,
    WrongLoop,
)
from asyncfetch.runtime.memory_pool import MemoryPool
from asyncfetch.tensors import RemoteTensor, TensorServer
from tests.tensors.conftest import MIB, QUICK, Backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from tests.tensors.conftest import ScriptedServer

ROOT = Path(__file__).parents[2]
http_client = Backend("http", "").client


@pytest.mark.parametrize("after", [0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016])
async def test_a_cancelled_localize_leaves_nothing_under_way(server: TensorServer, after: float) -> None:
    async with http_client() as client:
        remotes = await client.remotize([torch.ones(10), torch.ones(1_000_000), torch.ones(100_000)], server.url)
        with anyio.move_on_after(after):
            await client.localize(remotes)
        now = client.statistics()
        assert (now.in_flight, now.in_flight_bytes) == (0, 0)
        assert torch.equal((await client.localize(remotes))[1], torch.ones(1_000_000))


@pytest.mark.parametrize("after", [0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016])
async def test_a_cancelled_remotize_leaves_nothing_on_the_server(server: TensorServer, after: float) -> None:
    async with http_client() as client:
        with anyio.move_on_after(after) as scope:
            await client.remotize([torch.ones(10), torch.ones(4_000_000), torch.ones(100_000)], server.url)
        now = server.statistics()
        if scope.cancelled_caught:
            with anyio.fail_after(2):
                while server.statistics().reserved_bytes:  # noqa: ASYNC110 - it learns of the broken upload by itself
                    await anyio.sleep(0.005)
            now = server.statistics()
            assert (now.shards, now.bytes) == (0, 0)
        else:
            assert now.shards == 3


async def test_a_failed_remotize_leaves_nothing_on_the_server() -> None:
    async with TensorServer(max_bytes=MIB) as server, http_client() as client:
        with pytest.raises(TensorError, match="max_bytes"):
            await client.remotize([torch.ones(10_000) for _ in range(40)], server.url)
        assert server.statistics().shards == 0
        assert (await client.remotize(torch.ones(3), server.url)).shape == (3,)


async def stall(request: web.Request) -> None:
    await asyncio.Event().wait()


async def test_closing_ends_calls_of_tasks_and_threads(scripted: ScriptedServer) -> None:
    errors: list[Exception] = []
    waiting = threading.Event()
    async with http_client() as client:
        remote = await client.remotize(torch.ones(3), scripted.url)
        scripted.always = stall

        def ask_from_a_thread() -> None:
            waiting.set()
            try:
                client.blocking.localize(remote)
            except AsyncFetchError as error:
                errors.append(error)

        async def ask() -> None:
            try:
                await client.localize(remote)
            except AsyncFetchError as error:
                errors.append(error)

        thread = threading.Thread(target=ask_from_a_thread)
        thread.start()
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        tasks.start_soon(ask)
        await anyio.to_thread.run_sync(waiting.wait)
        while client.statistics().misses < 2:  # noqa: ASYNC110 - another thread counts
            await anyio.sleep(0.001)
    await tasks.__aexit__(None, None, None)
    await anyio.to_thread.run_sync(thread.join)
    assert [type(error) for error in errors] == [ClosedError, ClosedError]


async def test_shards_of_other_servers_arrive_if_one_is_down(server: TensorServer) -> None:
    async with http_client() as client:
        there = await client.remotize([torch.ones(3), torch.ones(200_000)], server.url)
        async with TensorServer(max_bytes=MIB) as gone:
            lost = await client.remotize(torch.ones(3), gone.url)
        with pytest.raises(ConnectionFailed, match=gone.url):
            await client.localize([*there, lost])
        assert client.statistics().entries == 2


async def test_a_server_started_anew_has_none_of_the_old_shards() -> None:
    async with http_client() as client:
        async with TensorServer(max_bytes=MIB) as first:
            old = await client.remotize([torch.ones(3), torch.ones(4)], first.url)
            await client.localize(old[0])
        port = int(first.url.rpartition(":")[2])
        async with TensorServer(port=port, max_bytes=MIB) as second:
            assert second.url == first.url
            with pytest.raises(ShardNotFound, match=f"1 of 2 shards.*{old[1].shard_id}.*started anew"):
                await client.localize(old)
            new = await client.remotize(torch.ones(5), second.url)
            assert torch.equal(await client.localize(new), torch.ones(5))


async def test_an_error_isnt_kept(scripted: ScriptedServer) -> None:
    async with http_client() as client:
        remote = await client.remotize(torch.ones(3), scripted.url)
        scripted.will(400)
        with pytest.raises(AsyncFetchError):
            await client.localize(remote)
        assert torch.equal(await client.localize(remote), torch.ones(3))


@pytest.mark.parametrize("change", [{"shape": (4,)}, {"shape": (2,)}, {"shape": (3, 1)}, {"dtype_name": "int32"}])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("own", [False, True])
async def test_remote_tensor_with_a_wrong_shape_or_dtype_is_refused(
    server: TensorServer, change: dict[str, object], together: bool, kept: bool, own: bool
) -> None:
    async with http_client(own=server if own else None) as client:
        remotes: list[RemoteTensor] = await client.remotize([torch.ones(3), torch.ones(5)], server.url)
        if kept:
            await client.localize(remotes)
        fields = {name: getattr(remotes[0], name) for name in ("server", "shard_id", "shape", "dtype_name")}
        wrong = RemoteTensor(**(fields | change))
        with pytest.raises(TensorError):
            await client.localize([wrong, *remotes] if together else wrong)
        assert torch.equal((await client.localize(remotes))[0], torch.ones(3))


@pytest.mark.parametrize(
    "change",
    [
        {"server": None},
        {"shard_id": 3},
        {"shard_id": "../statistics"},
        {"shape": None},
        {"shape": (-1,)},
        {"shape": (1.5,)},
        {"dtype_name": None},
    ],
    ids=str,
)
async def test_remote_tensor_that_no_remotize_made_is_refused(server: TensorServer, change: dict[str, object]) -> None:
    async with http_client() as client:
        remote: RemoteTensor = await client.remotize(torch.ones(3), server.url)
        before = client.statistics()
        with pytest.raises(TensorError, match="no remotize made this"):
            await client.localize([remote, dataclasses.replace(remote, **change)])  # type: ignore[arg-type]
        assert client.statistics() == before


def test_a_forked_child_is_told_and_the_parent_goes_on(server: TensorServer) -> None:
    with http_client() as client:
        remote = client.remotize(torch.ones(3), server.url)
        child = os.fork()
        if child == 0:
            told = 0
            for call in (lambda: client.localize(remote), client.clear_all, client.statistics):
                try:
                    call()
                except WrongLoop:
                    told += 1
            os._exit(0 if told == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(client.localize(remote), torch.ones(3))


@pytest.mark.parametrize("make", [http_client, lambda: TensorServer(max_bytes=MIB)], ids=["client", "server"])
def test_forked_child_leaves_the_block_by_its_own_exception(make: Callable[[], Any]) -> None:
    child = -1
    try:
        with make() as opened:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            opened.statistics()
    except BaseException as error:
        if child == 0:
            os._exit(error.code if isinstance(error, SystemExit) else 1)  # type: ignore[arg-type]
        raise


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_a_process_ends_whether_or_not_they_are_closed(end: str) -> None:
    program = f"""
import gc, torch
from asyncfetch.tensors import TensorClient, TensorServer
for is_collected in (True, False):
    server = TensorServer(max_bytes=1 << 26, shared_memory=False)
    server.__enter__()
    client = TensorClient(backend="http")
    blocking = client.__enter__()
    assert torch.equal(blocking.localize(blocking.remotize(torch.ones(100_000), server.url)), torch.ones(100_000))
    if is_collected:
        del blocking, client, server
        gc.collect()
{end}
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=50
    )
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_buffers_a_client_keeps_for_reuse_have_one_bound(
    server: TensorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its engine: what bodies land in, and what is copied out of them, comes from one pool."""
    bound_bytes = 2 * MIB + 1
    monkeypatch.setattr("asyncfetch.tensors.client.MAX_IDLE_BUFFER_BYTES", bound_bytes)
    async with http_client(delivery="copy", fetch=QUICK) as client:
        remotes = await client.remotize([torch.ones(MIB // 4) for _ in range(4)], server.url)
        tensors = [await client.localize(remote) for remote in remotes]
        del tensors
        client.clear_all()
        gc.collect()
        pools = [one.statistics() for one in gc.get_objects() if type(one) is MemoryPool]
    kept = [pool.idle_bytes for pool in pools if pool.max_idle_bytes == bound_bytes]
    assert 0 < sum(kept) <= bound_bytes


def own_threads() -> int:
    """But for anyio's, which end with the loop: how many it needs at a time is chance."""
    return sum(thread.name != "AnyIO worker thread" for thread in threading.enumerate())


async def test_threads_files_and_tasks_are_not_left_behind() -> None:
    async def once() -> None:
        async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True) as client:
            remotes = await client.remotize([torch.ones(3), torch.ones(100_000)], server.url)
            await client.localize(remotes)

    await once()
    gc.collect()
    threads, files = own_threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await once()
    gc.collect()
    assert own_threads() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
    assert len(asyncio.all_tasks()) == 1

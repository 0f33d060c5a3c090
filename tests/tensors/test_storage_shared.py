"""Shared memory: only between those who prove that they share it, and never in the way."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import numpy as np
import psutil
import pytest
import torch

from asyncfetch.errors import ConnectionFailed, FetchTimeout, ShardNotFound
from asyncfetch.tensors import RemoteTensor, TensorServer, http_store
from asyncfetch.tensors.storage import ROOT, ShardStorage, SharedDirectory, find_shared, read_shared
from asyncfetch.tensors.wire import describe
from tests.conftest import all_others_wait
from tests.tensors.conftest import MIB, Backend

pytestmark = pytest.mark.skipif(not ROOT.is_dir(), reason="no /dev/shm")
http_client = Backend("http", "").client
TREE = Path(__file__).parents[2]


def directories() -> set[str]:
    return {path.name for path in ROOT.glob("asyncfetch-tensors-*")}


async def test_shared_memory_is_read_before_the_server_is_asked() -> None:
    tensors = [torch.full((size,), float(size)) for size in (100, 20_000, 25_000, 30_000)]
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True) as client:
        remotes = await client.remotize(tensors, server.url)
        assert all(map(torch.equal, tensors, await client.localize(remotes)))
        assert (client.statistics().shared_reads, server.statistics().read) == (3, 1)
        await client.clear(server.url, [remotes[2].shard_id])
        client.clear_all()
        with pytest.raises(ShardNotFound, match=f"1 of 4 shards.*{remotes[2].shard_id}"):
            await client.localize(remotes)
        assert client.statistics().entries == 3


@pytest.mark.parametrize("delivery", ["copy", "view"])
async def test_large_shards_come_without_a_request(delivery: str) -> None:
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True, delivery=delivery) as client:
        tensors = [torch.ones(3), torch.arange(100_000), torch.full((500_000,), 2.0, dtype=torch.bfloat16)]
        remotes = await client.remotize(tensors, server.url)
        local = await client.localize(remotes)
        assert all(map(torch.equal, tensors, local))
        now = client.statistics()
        assert (now.fetched, now.shared_reads) == (3, 2)
        assert (server.statistics().shared_shards, server.statistics().read) == (2, 1)
        client.clear_all()
        before = client.statistics().requests
        await client.localize(remotes[1:])
        assert client.statistics().requests == before


async def test_files_are_read_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several took the interpreter from each other at every system call: 64 KiB cost two and a half times the CPU."""
    inside, met = threading.Semaphore(1), threading.Event()

    def read(path: Path, name: str, nbytes: int) -> object:
        if not inside.acquire(blocking=False):
            met.set()
            return None
        met.wait(0.1)
        frame = read_shared(path, name, nbytes)
        inside.release()
        return frame

    monkeypatch.setattr(http_store, "read_shared", read)
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True) as client:
        remotes = await client.remotize([torch.ones(100_000), torch.zeros(100_000)], server.url)
        await client.localize(remotes)
        assert client.statistics().shared_reads == 2
    assert not met.is_set()


async def test_a_broken_upload_leaves_no_file() -> None:
    async with TensorServer(max_bytes=64 * MIB) as server:
        folder = server.storage._shared_directory.path  # type: ignore[union-attr]
        shard_id, data = "f" * 32, np.zeros(100_000, np.uint8)
        head = describe(shard_id, "uint8", (len(data),), data).encode()
        host, port = server.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            length = len(head) + len(data)
            await stream.send(
                f"PUT /shards/{shard_id} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
            )
            await stream.send(head + bytes(5000))
            with anyio.fail_after(5):
                while not (folder / f"{shard_id}.part").exists():  # noqa: ASYNC110 - another task's doing
                    await anyio.sleep(0.005)
        with anyio.fail_after(5):
            while server.statistics().reserved_bytes:  # noqa: ASYNC110 - another task's doing
                await anyio.sleep(0.005)
        with anyio.fail_after(5):
            while (folder / f"{shard_id}.part").exists():  # noqa: ASYNC110 - another task's doing
                await anyio.sleep(0.005)


@pytest.mark.parametrize("work", ["take_memory", "commit"])
async def test_sender_that_vanishes_during_its_upload_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    began, go_on, ended, work_on = threading.Event(), threading.Event(), threading.Event(), getattr(ShardStorage, work)

    def hold(*args: object) -> object:
        began.set()
        go_on.wait(10)
        try:
            return work_on(*args)
        finally:
            ended.set()

    monkeypatch.setattr(ShardStorage, work, hold)
    async with TensorServer(max_bytes=64 * MIB) as server:
        folder = server.storage._shared_directory.path  # type: ignore[union-attr]
        shard_id, data = "f" * 32, np.zeros(4 * MIB, np.uint8)  # more than is checked on the loop
        frame = describe(shard_id, "uint8", (len(data),), data).encode() + data.tobytes()
        head = f"PUT /shards/{shard_id} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(frame)}\r\n\r\n"
        async with await anyio.connect_tcp("127.0.0.1", int(server.url.rpartition(":")[2])) as sender:
            await sender.send(head.encode() + (frame[:1000] if work == "take_memory" else frame))
            assert await anyio.to_thread.run_sync(began.wait, 10)
        await all_others_wait()  # until the server knows
        go_on.set()
        assert await anyio.to_thread.run_sync(ended.wait, 10)
        with anyio.fail_after(5):
            while server.statistics().reserved_bytes or (folder / f"{shard_id}.part").exists():  # noqa: ASYNC110
                await anyio.sleep(0.005)
        now = server.statistics()
        assert now.bytes == now.shards * len(frame)


async def test_an_own_servers_files_are_made_off_the_loop() -> None:
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(own=server) as client:
        remote = await client.remotize(torch.ones(20_000), server.url)
        assert server.statistics().shared_shards == 1
        assert torch.equal(await client.localize(remote), torch.ones(20_000))


async def test_an_edit_of_one_process_isnt_seen_by_others() -> None:
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True, delivery="view") as client:
        remote = await client.remotize(torch.ones(100_000), server.url)
        (await client.localize(remote)).add_(1)
        async with http_client() as other, http_client(shared_memory=True) as neighbour:
            assert torch.equal(await other.localize(remote), torch.ones(100_000))
            assert torch.equal(await neighbour.localize(remote), torch.ones(100_000))


async def test_a_tensor_outlives_its_shard_and_its_server() -> None:
    async with http_client(shared_memory=True, delivery="view") as client:
        async with TensorServer(max_bytes=64 * MIB) as server:
            remote = await client.remotize(torch.ones(100_000), server.url)
            local = await client.localize(remote)
            await client.clear(server.url, [remote.shard_id])
            assert server.statistics().shared_shards == 0
        assert torch.equal(local, torch.ones(100_000))


async def test_a_cleared_shard_is_gone_there_too() -> None:
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True) as client:
        remote = await client.remotize(torch.ones(100_000), server.url)
        [path] = ROOT.glob(f"asyncfetch-tensors-*/{remote.shard_id}")
        await client.clear(server.url, [remote.shard_id])
        assert not path.exists()


async def test_a_damaged_file_is_noticed() -> None:
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True) as client:
        remote = await client.remotize(torch.ones(100_000), server.url)
        [path] = ROOT.glob(f"asyncfetch-tensors-*/{remote.shard_id}")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        with pytest.raises(Exception, match="checksum"):
            await client.localize(remote)


async def test_shared_directory_is_not_left_behind() -> None:
    async with TensorServer(max_bytes=64 * MIB) as server, http_client() as client:
        directory = server.storage._shared_directory
        assert directory is not None
        assert directory.path.name in directories()
        await client.remotize(torch.ones(100_000), server.url)
    assert directory.path.name not in directories()


@pytest.mark.slow
@pytest.mark.usefixtures("programs_are_warm")
def test_files_of_a_killed_server_are_read_until_removed() -> None:
    program = """
import pickle, sys, torch
from asyncfetch.tensors import TensorClient, TensorServer
with TensorServer(max_bytes=1 << 26) as server, TensorClient(backend="http") as client:
    remote = client.remotize(torch.ones(100_000), server.url)
    print(server.storage._shared_directory.path.name, pickle.dumps(remote).hex(), flush=True)
    sys.stdin.read()
"""
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with (
        subprocess.Popen(command, cwd=TREE, text=True, stdin=pipe, stdout=pipe) as child,
        http_client(shared_memory=True, max_bytes=0) as client,
    ):
        assert child.stdout is not None
        name, pickled = child.stdout.readline().split()
        remote: RemoteTensor = pickle.loads(bytes.fromhex(pickled))
        assert torch.equal(client.localize(remote), torch.ones(100_000))
        with TensorServer(max_bytes=1):
            assert name in directories()  # it lives
        [remover] = psutil.Process(child.pid).children()
        remover.kill()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert torch.equal(client.localize(remote), torch.ones(100_000))
        with TensorServer(max_bytes=1):
            assert name not in directories()
        with pytest.raises(ConnectionFailed, match=remote.server):
            client.localize(remote)


@pytest.mark.slow
@pytest.mark.usefixtures("programs_are_warm")
def test_a_stopped_server_is_an_error_until_it_goes_on() -> None:
    """Within the time limits of requests; and the failure isn't remembered."""
    program = """
import pickle, sys, torch
from asyncfetch.tensors import TensorClient, TensorServer
with TensorServer(max_bytes=1 << 26, shared_memory=False) as server, TensorClient(backend="http") as client:
    print(pickle.dumps(client.remotize(torch.ones(100_000), server.url)).hex(), flush=True)
    sys.stdin.read()
"""
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with (
        subprocess.Popen(command, cwd=TREE, text=True, stdin=pipe, stdout=pipe) as child,
        http_client(max_bytes=0) as client,
    ):
        assert child.stdout is not None
        remote: RemoteTensor = pickle.loads(bytes.fromhex(child.stdout.readline()))
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            with pytest.raises(FetchTimeout, match=remote.server):
                client.localize(remote)
        finally:
            os.kill(child.pid, signal.SIGCONT)
        assert torch.equal(client.localize(remote), torch.ones(100_000))
        assert child.stdin is not None
        child.stdin.close()


@pytest.mark.parametrize("forgotten_by", ["clear", "time"])
async def test_shared_memory_of_a_killed_server_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, forgotten_by: str
) -> None:
    if forgotten_by == "time":
        monkeypatch.setattr(http_store, "ASK_AGAIN_SECONDS", 0.0)
    async with http_client(shared_memory=True, max_bytes=0) as client:
        with monkeypatch.context() as patch:
            patch.setattr(SharedDirectory, "close", lambda _: None)
            async with TensorServer(max_bytes=64 * MIB) as killed:
                directory = killed.storage._shared_directory
                remote = await client.remotize(torch.ones(100_000), killed.url)
                await client.localize(remote)
        assert client.statistics().shared_reads == 1
        assert directory is not None
        port = int(killed.url.rpartition(":")[2])
        try:
            async with TensorServer(port=port, max_bytes=64 * MIB, shared_memory=False):
                if forgotten_by == "clear":
                    assert torch.equal(await client.localize(remote), torch.ones(100_000))
                    await client.clear(killed.url, [remote.shard_id])
                with pytest.raises(ShardNotFound):
                    await client.localize(remote)
        finally:
            await anyio.to_thread.run_sync(directory.close)


def test_only_who_holds_the_secret_is_believed() -> None:
    directory = SharedDirectory()
    try:
        name = directory.path.name
        assert find_shared(name, directory.proof) == directory.path
        assert find_shared(name, "0" * 64) is None
        assert find_shared("asyncfetch-tensors-" + "0" * 32, directory.proof) is None
        for elsewhere in ("../etc", "asyncfetch-tensors-../../etc", "", "."):
            assert find_shared(elsewhere, directory.proof) is None
    finally:
        directory.close()


def test_only_whole_files_of_the_right_size_are_read() -> None:
    directory = SharedDirectory()
    try:
        array = directory.create("a", 100)
        assert array is not None
        array[:] = 7
        assert read_shared(directory.path, "a", 100) is None
        directory.publish("a")
        assert read_shared(directory.path, "a", 99) is None
        there = read_shared(directory.path, "a", 100)
        assert there is not None
        assert there.tolist() == [7] * 100
        (directory.path / "link").symlink_to(directory.path / "a")
        assert read_shared(directory.path, "link", 100) is None
        assert directory.create("a", 2**62) is None  # no room
    finally:
        directory.close()


async def test_private_memory_serves_if_shared_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedDirectory, "create", lambda *_: None)
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True) as client:
        remote = await client.remotize(torch.ones(100_000), server.url)
        assert torch.equal(await client.localize(remote), torch.ones(100_000))
        assert client.statistics().shared_reads == 0


async def test_a_server_that_shares_nothing_is_asked_once() -> None:
    silent = TensorServer(max_bytes=64 * MIB, shared_memory=False)
    async with silent as server, http_client(shared_memory=True) as client:
        remotes = await client.remotize([torch.ones(50_000) for _ in range(8)], server.url)
        before = client.statistics().requests
        await client.localize(remotes)
        assert client.statistics().requests == before + 9


async def test_a_missing_shard_is_missing() -> None:
    async with TensorServer(max_bytes=64 * MIB) as server, http_client(shared_memory=True) as client:
        with pytest.raises(KeyError):
            await client.localize(RemoteTensor(server.url, "0" * 32, (1_000_000,), "uint8"))
        with anyio.fail_after(1), pytest.raises(KeyError):
            await client.localize(RemoteTensor(server.url, "0" * 32, (1_000_000,), "uint8"))

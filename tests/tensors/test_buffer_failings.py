"""What other remote-tensor stores got wrong about memory: R4 to R7, R9 and R10 of sixteen.

R8 and R11 to R15 are in ``test_http_store_failings``; what any back end could have, in ``test_client_failings``.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import pytest
import torch

from asyncfetch.errors import ShardNotFound, TensorError
from asyncfetch.tensors import TensorServer
from asyncfetch.tensors.wire import DTYPES
from tests.tensors.conftest import MIB, http_client, store

if TYPE_CHECKING:
    from aiohttp import web

    from tests.tensors.conftest import ScriptedServer

ROOT = Path(__file__).parents[2]


# R4: every consumer got the same tensor object, and a store kept its caller's.


async def test_r4_an_own_server_shares_memory_with_nobody(server: TensorServer) -> None:
    mine = torch.ones(3)
    async with http_client(own=server, delivery="view") as client:
        [remote] = await store(client, server.url, mine)
        mine.add_(1)
        first = await client.localize(remote)
        assert torch.equal(first, torch.ones(3))
        first.add_(1)
        assert torch.equal(await client.localize(remote), torch.ones(3))


# R5: base64 in JSON, and four copies of the payload in memory.


class CountingProxy:
    """Passes a server's bytes on and counts them, both ways."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.bytes = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._writers: list[asyncio.StreamWriter] = []
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._pass, reader, far_writer)
            tasks.start_soon(self._pass, far_reader, writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.bytes += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.mark.parametrize("nbytes", [64 * 1024, 200_000, 8 * MIB])
async def test_r5_bytes_on_the_wire_are_those_of_the_tensor(server: TensorServer, nbytes: int) -> None:
    tensor = torch.zeros(nbytes // 2, dtype=torch.bfloat16)
    async with CountingProxy(int(server.url.rpartition(":")[2])) as proxy, http_client() as client:
        [remote] = await store(client, proxy.url, tensor)
        sent = proxy.bytes
        await client.localize(remote)
        assert nbytes <= sent <= 1.01 * nbytes
        assert nbytes <= proxy.bytes - sent <= 1.01 * nbytes


def test_r5_memory_grows_by_little_more_than_the_payload(server: TensorServer) -> None:
    program = """
import sys, torch, resource
from pathlib import Path
from asyncfetch.tensors import TensorClient
def memory(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].removesuffix("kB")) * 1024
with TensorClient(backend="http", delivery="view", shared_memory=False) as client:
    client.localize(client.remotize(torch.zeros(1000), sys.argv[1]))  # what the first call of anything takes
    tensor = torch.ones(16 << 20)
    remote = client.remotize(tensor, sys.argv[1])
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    local = client.localize(remote)
    print((memory("VmHWM") - before) / tensor.nbytes)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, server.url], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert 0.9 <= float(ended.stdout) <= 1.2


# R6: bfloat16 was cast up, and other dtypes were read as float32.


async def test_r6_every_dtype_of_torch_is_known_but_quantised_ones() -> None:
    names = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    plain = {str(getattr(torch, name)).removeprefix("torch.") for name in names}
    assert {name for name in plain if not name.startswith(("qint", "quint"))} <= {name for name, _ in DTYPES}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
async def test_r6_an_unknown_dtype_is_an_error_at_store(server: TensorServer) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    async with http_client() as client:
        with pytest.raises(TensorError, match="qint8"):
            await client.remotize(quantised, server.url)
    assert server.statistics().shards == 0


# R7: no limit on the buffer, nor on the storage.


async def test_r7_a_full_server_says_which_limit() -> None:
    async with TensorServer(max_bytes=10_000) as server, http_client() as client:
        await store(client, server.url, torch.ones(1000))
        with pytest.raises(TensorError, match=r"max_bytes=10000 are full: 4064 held, 8064 asked"):
            await store(client, server.url, torch.ones(2000))
        with pytest.raises(TensorError, match=r"max_bytes=10000 is less than the 40064 asked"):
            await store(client, server.url, torch.ones(10_000))
        now = server.statistics()
        assert (now.shards, now.bytes, now.reserved_bytes) == (1, 4064, 0)


async def test_r7_a_shard_that_nobody_asks_for_is_forgotten_in_time() -> None:
    async with TensorServer(max_bytes=MIB, ttl_seconds=0.2) as server, http_client() as client:
        [remote] = await store(client, server.url, torch.ones(1000))
        with anyio.fail_after(5):
            while server.statistics().shards:  # noqa: ASYNC110 - it happens in its own time
                await anyio.sleep(0.02)
        assert server.statistics().expired == 1
        with pytest.raises(ShardNotFound, match="ttl_seconds"):
            await client.localize(remote)


# R9: a consumer that overtook the prefetch left copies behind that filled it, and it stood still for ever.


async def test_r9_a_consumer_that_is_faster_is_caught_up_with(server: TensorServer) -> None:
    count = 1000
    async with http_client() as client:
        items = await client.remotize([torch.tensor([number]) for number in range(count)], server.url)
        before = client.statistics().requests
        async with client.ahead(items, max_bytes=8 * 512) as reader:
            for index in range(200):  # before anything came
                assert int(await reader.get(index)) == index
            chunks = reader.chunks
            for index in range(200, count):
                assert int(await reader.get(index)) == index
            assert reader.chunks - chunks >= (count - 200) // 64 - 2  # at most two chunks were fetched one by one
        assert client.statistics().requests - before < 200 + (count - 200) // 64 + 2 * 64


async def test_r9_what_was_consumed_out_of_order_leaves_room(server: TensorServer) -> None:
    async with http_client() as client:
        items = await client.remotize([torch.tensor([number]) for number in range(300)], server.url)
        async with client.ahead(items, max_bytes=8 * 64) as reader:
            jumps = [int(await reader.get(index)) for index in range(299, 0, -3)]
            rest = [int(item) async for item in reader]
    assert sorted(jumps + rest) == list(range(300))
    assert rest == sorted(rest)


async def test_r9_a_cancelled_wait_loses_no_item(scripted: ScriptedServer) -> None:
    async def stall(request: web.Request) -> None:
        await asyncio.Event().wait()

    async with http_client() as client:
        items = await client.remotize([torch.tensor([number]) for number in range(5)], scripted.url)
        scripted.will(400)  # for the chunk
        scripted.script.append(stall)  # for the first item, alone
        async with client.ahead(items) as reader:
            await anyio.wait_all_tasks_blocked()  # the chunk was asked for
            with anyio.move_on_after(0.2):
                await anext(reader)
            assert [int(item) async for item in reader] == list(range(5))


# R10: a failed chunk was retried for ever, and results of an old epoch reached the next.


async def test_r10_nothing_of_a_pass_reaches_the_next(scripted: ScriptedServer) -> None:
    asked = asyncio.Event()

    async def stall(request: web.Request) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with http_client() as client:
        items = await client.remotize([torch.tensor([number]) for number in range(10)], scripted.url)
        scripted.script.append(stall)
        async with client.ahead(items) as old:
            await asked.wait()
        assert client.statistics().in_flight == 0
        async with client.ahead(items, reversed(range(10))) as new:
            assert [int(item) async for item in new] == list(reversed(range(10)))
        assert not old._ready

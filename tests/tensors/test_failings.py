"""Sixteen failings that other remote-tensor stores have had, R1 to R16, and that this one must not have.

Those that any back end could have are in ``test_failings_anywhere``.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import pytest
import torch
from aiohttp import web

from asyncfetch.errors import AccessDenied, ConfigError, FetchTimeout, ShardNotFound, TensorError, Throttled
from asyncfetch.tensors import Cleared, RemoteTensor, TensorClient, TensorServer
from asyncfetch.tensors.stores import MAX_BATCH_BYTES, MAX_BATCH_SHARDS, plan_batches
from asyncfetch.tensors.wire import DTYPES
from tests.tensors.conftest import MIB, QUICK, Backend

if TYPE_CHECKING:
    from tests.tensors.conftest import ScriptedServer

ROOT = Path(__file__).parents[2]
http_client = Backend("http", "").client


async def store(client: TensorClient, server: str, *tensors: torch.Tensor) -> list[RemoteTensor]:
    remotes: list[RemoteTensor] = await client.remotize(list(tensors), server)
    return remotes


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


# R8: no authentication, and unpickling.


async def test_r8_without_the_token_nothing_can_be_stored_read_or_deleted() -> None:
    async with TensorServer(max_bytes=MIB, token="right") as server, http_client(token="right") as client:
        [remote] = await store(client, server.url, torch.ones(3))
        for token in (None, "wrong", "righ", "rightt", "r\xefght"):
            async with http_client(token=token) as stranger:
                with pytest.raises(AccessDenied) as caught:
                    await stranger.localize(remote)
                assert caught.value.status == 401
                with pytest.raises(AccessDenied):
                    await stranger.remotize(torch.ones(3), server.url)
                with pytest.raises(TensorError, match="401"):
                    await stranger.clear(server.url, [remote.shard_id])
        assert torch.equal(await client.localize(remote), torch.ones(3))
        assert server.statistics().shards == 1


def test_r8_a_server_for_everybody_has_to_be_asked_for_twice() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match="allow_anonymous=True"):
            TensorServer(host, max_bytes=1)
        TensorServer(host, max_bytes=1, token="t")
        TensorServer(host, max_bytes=1, allow_anonymous=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        TensorServer(host, max_bytes=1)


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


# R11: a delete that failed was taken for done.


async def test_r11_a_failed_delete_is_repeated(scripted: ScriptedServer) -> None:
    async with http_client() as client:
        [remote] = await store(client, scripted.url, torch.ones(3))
        scripted.will(500)
        assert await client.clear(scripted.url, [remote.shard_id]) == Cleared(0, 1)
    assert scripted.storage.statistics().shards == 0


async def test_r11_what_may_not_be_deleted_is_reported(scripted: ScriptedServer) -> None:
    async with http_client() as client:
        remotes = await store(client, scripted.url, *(torch.ones(1) for _ in range(MAX_BATCH_SHARDS + 3)))
        await client.localize(remotes)
        ids = [remote.shard_id for remote in remotes]

        async def fail_the_first(request: web.Request) -> web.Response | None:
            return web.Response(status=500) if ids[0] in request.path else None

        scripted.always = fail_the_first
        with pytest.raises(TensorError, match="may still be on") as caught:
            await client.clear(scripted.url, ids)
        assert list(caught.value.shard_ids) == ids[:MAX_BATCH_SHARDS]
        assert client.statistics().entries == 0
    assert scripted.storage.statistics().shards == MAX_BATCH_SHARDS


# R12: fixed waits, no Retry-After, 503 failed at once, timeouts of an hour, no check of lengths.


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_r12_a_busy_server_is_asked_again(scripted: ScriptedServer, status: int) -> None:
    async with http_client() as client:
        scripted.will(status, status)
        [remote] = await store(client, scripted.url, torch.ones(3))
        scripted.will(status, status)
        assert torch.equal(await client.localize(remote), torch.ones(3))


async def test_r12_retry_after_is_waited_for_or_too_long(scripted: ScriptedServer) -> None:
    async with http_client() as client:
        [remote] = await store(client, scripted.url, torch.ones(3))
        scripted.will(503, headers={"Retry-After": "1"})
        started = time.monotonic()
        await client.localize(remote)
        assert time.monotonic() - started >= 1
        client.clear_all()
        scripted.will(503, headers={"Retry-After": "3600"})
        with pytest.raises(Throttled, match="3600 s"):
            await client.localize(remote)


@pytest.mark.parametrize("size", [10, 100_000])
async def test_r12_a_stalled_body_ends_at_the_deadline(scripted: ScriptedServer, size: int) -> None:
    async def stall(request: web.Request) -> web.StreamResponse:
        frame = scripted.storage.get(remote.shard_id).frame  # type: ignore[union-attr]
        headers = {"Content-Length": str(len(frame)), "Content-Range": f"bytes 0-{len(frame) - 1}/{len(frame)}"}
        response = web.StreamResponse(status=206, headers=headers)
        await response.prepare(request)
        await response.write(frame[:30])
        await asyncio.Event().wait()
        return response

    async with http_client() as client:
        [remote] = await store(client, scripted.url, torch.ones(size))
        scripted.always = stall
        with anyio.fail_after(5), pytest.raises(FetchTimeout):
            await client.localize(remote)
        scripted.always = None
        assert torch.equal(await client.localize(remote), torch.ones(size))


# R13: a TCP connection for each request.


async def test_r13_a_hundred_fetches_share_connections(scripted: ScriptedServer) -> None:
    async with http_client() as client:
        remotes = await store(client, scripted.url, *(torch.full((40_000,), number) for number in range(100)))
        scripted.connections.clear()
        for remote in remotes[:50]:
            await client.localize(remote)
        await client.localize(remotes)
        assert len(scripted.connections) <= QUICK.max_requests_per_host
        for remote in remotes:
            client.clear_all()
            await client.localize(remote)
        assert len(scripted.connections) <= QUICK.max_requests_per_host


# R14: batches by count and one after the other, and one missing id failed the whole batch.


async def test_r14_one_id_is_missing_and_the_others_arrive(server: TensorServer) -> None:
    async with http_client() as client:
        remotes = await store(client, server.url, *(torch.tensor(number) for number in range(20)))
        await client.clear(server.url, [remotes[7].shard_id])
        with pytest.raises(ShardNotFound, match=f"1 of 20 shards.*{remotes[7].shard_id}"):
            await client.localize(remotes)
        assert client.statistics().entries == 19
        before = client.statistics().requests
        del remotes[7]
        await client.localize(remotes)
        assert client.statistics().requests == before


def test_r14_batches_are_bounded_in_bytes_and_shards() -> None:
    def remote(server: str, number: int, nbytes: int) -> RemoteTensor:
        return RemoteTensor(server, f"{number:032x}", (nbytes,), "uint8")

    small = [remote("a", number, 100) for number in range(300)]
    middle = [remote("b", 1000 + number, 100_000) for number in range(100)]
    large = [remote("a", 2000, 10 * MIB)]
    mixed = [one for group in zip(small[:100], middle, strict=True) for one in group] + small[100:] + large
    batches = plan_batches(mixed)
    assert sorted(one.shard_id for batch in batches for one in batch) == sorted(one.shard_id for one in mixed)
    for batch in batches:
        assert len({one.server for one in batch}) == 1
        assert len(batch) == 1 or sum(one.frame_bytes for one in batch) <= MAX_BATCH_BYTES
        assert len(batch) <= MAX_BATCH_SHARDS
    assert large in batches
    assert len(batches) == 3 + 3 + 1


async def test_r14_requests_to_one_server_run_side_by_side(scripted: ScriptedServer) -> None:
    together = asyncio.Barrier(8)

    async def meet(request: web.Request) -> None:
        async with asyncio.timeout(3):
            await together.wait()

    async with http_client() as client:
        remotes = await store(client, scripted.url, *(torch.ones(50_000) for _ in range(8)))
        scripted.always = meet
        await client.localize(remotes)


# R15: the owner fetched its own shard over HTTP, a fetch blocked the loop, and IPv6 addresses were misspelt.


async def test_r15_an_own_shard_needs_no_request(server: TensorServer) -> None:
    async with http_client(own=server) as client:
        remotes = await store(client, server.url, torch.ones(3), torch.ones(200_000))
        assert torch.equal((await client.localize(remotes))[1], torch.ones(200_000))
        with pytest.raises(ShardNotFound):
            await client.localize(RemoteTensor(server.url, "0" * 32, (1,), "uint8"))
        assert await client.clear(server.url, [one.shard_id for one in remotes]) == Cleared(0, 2)
        assert client.statistics().requests == 0
        with pytest.raises(TensorError, match="max_bytes"):
            await store(client, server.url, torch.empty(65 * MIB))


async def test_r15_the_loop_isnt_held_up_by_a_fetch(server: TensorServer) -> None:
    """By the time that its thread works between two turns, which is the same on a busy machine."""
    worked = []

    async def tick() -> None:
        while True:
            before = time.thread_time()
            await anyio.sleep(0.002)
            worked.append(time.thread_time() - before)

    async with http_client() as client:
        remotes = await store(client, server.url, *(torch.ones(2 * MIB) for _ in range(8)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            for _ in range(3):
                client.clear_all()
                await client.localize(remotes)
            tasks.cancel_scope.cancel()
    assert sorted(worked)[len(worked) * 95 // 100] <= 0.02


async def test_r15_ipv6_and_other_spellings_name_one_server() -> None:
    async with TensorServer("::1", max_bytes=MIB) as server, http_client(own=server) as client:
        assert server.url.startswith("http://[::1]:")
        remotes = await store(client, server.url + "/", torch.ones(3))
        assert remotes[0].server == server.url
        assert client.statistics().requests == 0
        async with http_client() as other:
            assert torch.equal((await other.localize(remotes))[0], torch.ones(3))
            assert await other.clear(server.url.upper(), [remotes[0].shard_id]) == Cleared(1, 1)
    for wrong in (
        "ftp://host:1",
        "http://",
        "host:1",
        "http://user:secret@host:1",
        "http://host:1/path",
        "http://host:99999",
    ):
        async with http_client() as client:
            with pytest.raises(ConfigError, match="tensor server") as caught:
                await client.remotize(torch.ones(1), wrong)
            assert "secret" not in str(caught.value)

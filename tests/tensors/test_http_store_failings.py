"""What other remote-tensor stores got wrong about requests: R8 and R11 to R15 of sixteen."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest
import torch
from aiohttp import web

from asyncfetch.config import FetchConfig
from asyncfetch.errors import AccessDenied, ConfigError, FetchTimeout, ShardNotFound, TensorError, Throttled
from asyncfetch.tensors import Cleared, RemoteTensor, TensorServer
from asyncfetch.tensors.buffer import (
    MAX_BATCH_BYTES,
    MAX_BATCH_SHARDS,
    FetchBuffer,
    FetchedShards,
    Flights,
    Shard,
    plan_batches,
)
from tests.conftest import all_others_wait
from tests.tensors.conftest import MIB, QUICK, http_client, store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tensors.conftest import ScriptedServer


# R8: no authentication, and unpickling.


async def test_r8_token_is_needed_to_store_read_and_delete() -> None:
    async with TensorServer(max_bytes=MIB, token="right") as server, http_client(token="right") as client:
        [remote] = await store(client, server.url, torch.ones(3))
        foreign = FetchConfig(headers={"127.0.0.1": {"Authorization": "Bearer r\xefght"}})
        strangers = [http_client(token=token) for token in (None, "wrong", "righ", "rightt")]
        for one in (*strangers, http_client(fetch=foreign)):
            async with one as stranger:
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


# R11: a delete that failed was taken for done.


async def test_r11_a_failed_delete_is_repeated(scripted: ScriptedServer) -> None:
    async with http_client() as client:
        [remote] = await store(client, scripted.url, torch.ones(3))
        scripted.will(500)
        assert await client.clear(scripted.url, [remote.shard_id]) == Cleared(0, 1)
    assert scripted.storage.statistics().shards == 0


async def test_r11_what_comes_while_the_server_deletes_is_not_kept(scripted: ScriptedServer) -> None:
    asked, fetched = anyio.Event(), anyio.Event()

    async def delete_late(_: web.Request) -> None:
        asked.set()
        await fetched.wait()

    async with http_client() as client:
        [remote] = await store(client, scripted.url, torch.ones(3))
        scripted.script.append(delete_late)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.clear, scripted.url, [remote.shard_id])
            await asked.wait()
            assert torch.equal(await client.localize(remote), torch.ones(3))
            fetched.set()
        assert client.statistics().entries == 0
        with pytest.raises(ShardNotFound):
            await client.localize(remote)


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


@pytest.mark.parametrize("size", [10, 50_000])
async def test_r14_requests_to_all_servers_run_side_by_side(scripted: ScriptedServer, size: int) -> None:
    """Two by their names."""
    together = asyncio.Barrier(2)

    async def meet(request: web.Request) -> None:
        async with asyncio.timeout(3):
            await together.wait()

    async with http_client() as client:
        servers = [scripted.url, scripted.url.replace("127.0.0.1", "localhost")]
        remotes = [one for server in servers for one in await store(client, server, torch.ones(size), torch.ones(10))]
        scripted.script = [meet, meet]
        assert all(tensor[-1] == 1 for tensor in await client.localize(remotes))
        assert set(client.collect_shards(remotes)) == set(servers)


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
        "http://:secret@host:1",
        "http://host:1/path",
        "http://host:99999",
        "http://[]@",
    ):
        async with http_client() as client:
            with pytest.raises(ConfigError, match="tensor server") as caught:
                await client.remotize(torch.ones(1), wrong)
            assert "secret" not in str(caught.value)


# What came of requests under way.


async def test_failure_of_an_abandoned_request_reaches_no_later_asker() -> None:
    remote = RemoteTensor("https://host", "0" * 32, (3,), "uint8")
    begun, unwinds, first = anyio.Event(), anyio.Event(), anyio.CancelScope()

    async def fetch(_: Sequence[RemoteTensor]) -> FetchedShards:
        if begun.is_set():
            return FetchedShards({remote.shard_id: Shard(np.ones(3, np.uint8), "uint8", (3,))}, {})
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await unwinds.wait()
            raise TensorError("of the first attempt")

    async def ask_first() -> None:
        with first:
            await flights.bring([remote])

    buffer = FetchBuffer(100)
    async with anyio.create_task_group() as owner:
        flights = Flights(owner, buffer, fetch)
        async with anyio.create_task_group() as askers:
            askers.start_soon(ask_first)
            await begun.wait()
            first.cancel()
            await all_others_wait()
            brought, errors = await flights.bring([remote])
            assert (list(brought.shards), errors) == ([remote.shard_id], [])
            unwinds.set()
        assert list(buffer.find([remote.shard_id])) == [remote.shard_id]
        assert (await flights.bring([remote]))[1] == []


async def test_the_error_of_a_request_keeps_no_frames() -> None:
    class Block:
        """What lies in a frame."""

    blocks: list[weakref.ref[Block]] = []

    async def fetch(_: Sequence[RemoteTensor]) -> FetchedShards:
        block = Block()
        blocks.append(weakref.ref(block))
        raise TensorError("no")

    gc.disable()  # what is in a cycle stays
    try:
        async with anyio.create_task_group() as owner:
            flights = Flights(owner, FetchBuffer(100), fetch)
            _, errors = await flights.bring([RemoteTensor("https://host", "0" * 32, (3,), "uint8")])
            await anyio.lowlevel.checkpoint()
            assert [str(error) for error in errors] == ["no"]
            assert [each() for each in blocks] == [None]
    finally:
        gc.enable()

"""Servers that lie: whatever comes, the right tensors or an error of ours, and no more memory than was asked for."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest
import torch
from aiohttp import web

from asyncfetch.errors import AsyncFetchError, InvalidResponse, TensorError
from asyncfetch.fetch import Fetcher
from tests.tensors.conftest import Backend

if TYPE_CHECKING:
    from tests.tensors.conftest import ScriptedServer

http_client = Backend("http", "").client


def responds(request: web.Request, body: bytes) -> web.Response:
    """The asked range of what is said to be there."""
    part = body[request.http_range]
    headers = {"Content-Range": f"bytes 0-{len(part) - 1}/{len(body)}"}
    return web.Response(status=206, body=part, headers=headers)


def frames(scripted: ScriptedServer, *shard_ids: str) -> bytes:
    stored = [scripted.storage.get(shard_id) for shard_id in shard_ids]
    return b"".join(one.frame for one in stored if one is not None)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ([0], "2 shards were asked for, the response holds 1"),
        ([0, 1, 2], "bytes are the response"),
        ([1, 0], "in the place of"),
        ([0, 0], "in the place of"),
        ([0, 2], "in the place of"),
    ],
)
async def test_response_of_fewer_more_or_other_shards_is_an_error(
    scripted: ScriptedServer, chosen: list[int], said: str
) -> None:
    async with http_client() as client:
        remotes = await client.remotize([torch.full((4,), number) for number in range(3)], scripted.url)

        async def lie(request: web.Request) -> web.Response:
            return responds(request, frames(scripted, *(remotes[number].shard_id for number in chosen)))

        scripted.script.append(lie)
        with pytest.raises(TensorError, match=said):
            await client.localize(remotes[:2])
        assert client.statistics().entries == 0
        assert torch.equal((await client.localize(remotes[:2]))[1], torch.full((4,), 1))


@pytest.mark.parametrize("size", [4, 100_000])
async def test_no_response_crashes_the_client_or_passes_for_the_tensor(scripted: ScriptedServer, size: int) -> None:
    luck = random.Random(size)
    async with http_client(max_bytes=0) as client:
        remotes = await client.remotize([torch.arange(size), torch.arange(size) + 1], scripted.url)
        honest = frames(scripted, *(remote.shard_id for remote in remotes[: 1 if size > 4 else 2]))
        body = b""

        async def lie(request: web.Request) -> web.Response:
            return responds(request, body)

        for _ in range(150):
            changed = bytearray(honest)
            at = luck.randrange(min(len(changed), 300))
            changed[at] ^= luck.randrange(1, 256)
            body = bytes(changed[: luck.choice([len(changed), luck.randrange(1, len(changed))])])
            scripted.always = lie
            with pytest.raises(AsyncFetchError):
                await client.localize(remotes[:1] if size > 4 else remotes)
        scripted.always = None
        assert torch.equal((await client.localize(remotes))[1], torch.arange(size) + 1)


async def test_an_over_long_response_takes_no_memory(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    fetch_head = Fetcher.fetch_head

    async def note(fetcher: Fetcher, url: str, max_bytes: int) -> object:
        info, view = await fetch_head(fetcher, url, max_bytes)
        received.append(len(view))
        return info, view

    monkeypatch.setattr(Fetcher, "fetch_head", note)

    async def boast(request: web.Request) -> web.StreamResponse:
        asked = request.http_range
        length = asked.stop - asked.start
        headers = {"Content-Range": f"bytes 0-{length - 1}/{2**50}", "Content-Length": str(length)}
        return web.Response(status=206, body=bytes(length), headers=headers)

    async with http_client() as client:
        remotes = await client.remotize([torch.ones(2), torch.ones(2)], scripted.url)
        scripted.always = boast
        with anyio.fail_after(5), pytest.raises(TensorError, match=str(2**50)):
            await client.localize(remotes)
    assert received == [sum(remote.frame_bytes for remote in remotes)]


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'{"deleted": -1}', b'{"deleted": "many"}', b'{"deleted": true}', b"<html>", DEEP],
    ids=lambda body: body[:20].decode(),
)
async def test_an_answer_that_is_no_tensor_servers_is_an_error(scripted: ScriptedServer, body: bytes) -> None:
    async def lie(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with http_client() as client:
        scripted.always = lie
        with pytest.raises(TensorError, match="isn't a tensor server's"):
            await client.clear(scripted.url, ["0" * 32])


@pytest.mark.parametrize("status", [200, 201, 204, 302, 307])
async def test_a_tensor_is_stored_only_where_the_answer_names_it(scripted: ScriptedServer, status: int) -> None:
    async def lie(request: web.Request) -> web.Response:
        body = None if status == 204 else "<html>"
        return web.Response(status=status, text=body, headers={"Location": "http://localhost:1/"})

    async with http_client() as client:
        scripted.script.append(lie)
        with pytest.raises(InvalidResponse, match="doesn't say that the tensor is stored"):
            await client.remotize(torch.ones(2), scripted.url)
        assert client.statistics().stored == 0


async def test_shared_memory_that_nobody_can_find_is_done_without(scripted: ScriptedServer) -> None:
    async def lie(request: web.Request) -> web.Response:
        return web.Response(body=DEEP)

    async with http_client(shared_memory=True) as client:
        remote = await client.remotize(torch.ones(100_000), scripted.url)
        scripted.script.append(lie)
        assert torch.equal(await client.localize(remote), torch.ones(100_000))

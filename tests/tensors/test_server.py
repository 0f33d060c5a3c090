"""What a server answers to whoever comes: limits, ranges, nonsense."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from typing import TYPE_CHECKING

import aiohttp
import anyio
import numpy as np
import pytest
import pytest_asyncio
import torch
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ClosedError, ConfigError, TensorError
from asyncfetch.tensors import TensorServer
from asyncfetch.tensors import server as server_module
from asyncfetch.tensors.server import MAX_IDS
from asyncfetch.tensors.storage import ShardStorage
from asyncfetch.tensors.wire import MAX_HEADER_BYTES, describe, parse_header
from tests.conftest import all_others_wait
from tests.tensors.conftest import MIB, Backend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SHARD, OTHER = "0123456789abcdef" * 2, "f" * 32
http_client = Backend("http", "").client


def frame(size: int, shard_id: str = SHARD) -> bytes:
    data = np.arange(size, dtype=np.uint8)
    return describe(shard_id, "uint8", (size,), data).encode() + data.tobytes()


@pytest_asyncio.fixture
async def session(server: TensorServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def put(session: aiohttp.ClientSession, body: bytes, shard_id: str = SHARD) -> tuple[int, str]:
    async with session.put(f"/shards/{shard_id}", data=body) as answer:
        return answer.status, answer.headers.get("X-Error-Code", "")


async def test_put_get_range_delete(session: aiohttp.ClientSession) -> None:
    body = frame(100)
    assert (await put(session, body))[0] == 201
    async with session.get(f"/shards/{SHARD}") as answer:
        assert (answer.status, await answer.read()) == (200, body)
        assert answer.headers["ETag"] == f'"{SHARD}"'
    for asked, start, stop in (("0-9", 0, 10), ("64-", 64, 164), ("-7", 157, 164), ("160-999", 160, 164)):
        async with session.get(f"/shards/{SHARD}", headers={"Range": f"bytes={asked}"}) as answer:
            assert (answer.status, await answer.read()) == (206, body[start:stop])
            assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/164"
    for asked in ("164-", "9-3", "x-y", "0-1,5-6"):
        async with session.get(f"/shards/{SHARD}", headers={"Range": f"bytes={asked}"}) as answer:
            assert answer.status == 416
    async with session.delete(f"/shards/{SHARD},{OTHER}") as answer:
        assert await answer.json() == {"deleted": 1}
    async with session.get(f"/shards/{SHARD}") as answer:
        assert answer.status == 404


async def test_the_same_shard_may_come_twice_and_another_may_not(session: aiohttp.ClientSession) -> None:
    assert (await put(session, frame(100)))[0] == 201
    assert (await put(session, frame(100)))[0] == 200
    assert (await put(session, frame(99)))[0] == 409


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 411, "at least 64"),
        (b"short", 411, "at least 64"),
        (b"GET / HTTP/1.1\r\n" * 10, 400, "AFT1"),
        (frame(100)[:-1], 400, "164 bytes"),
        (frame(100) + b"x", 400, "164 bytes"),
        (frame(100)[:-1] + b"x", 409, "checksum"),
        (frame(100, OTHER), 400, OTHER),
        (frame(100).replace(b"AFT1", b"AFT9"), 400, "AFT9"),
    ],
)
async def test_body_that_is_no_frame_is_refused(
    session: aiohttp.ClientSession, server: TensorServer, body: bytes, status: int, said: str
) -> None:
    answered, reason = await put(session, body)
    assert answered == status
    assert said in reason
    assert (server.statistics().shards, server.statistics().reserved_bytes) == (0, 0)
    assert (await put(session, frame(100)))[0] == 201


@pytest.mark.parametrize("ids", ["x", SHARD + ",", ",".join([SHARD] * (MAX_IDS + 1)), "..%2f..%2fetc", SHARD.upper()])
async def test_ids_that_are_none_or_too_many_are_refused(session: aiohttp.ClientSession, ids: str) -> None:
    for method in ("GET", "DELETE", "PUT"):
        async with session.request(method, f"/shards/{ids}") as answer:
            assert answer.status == 400
            assert f"1 to {MAX_IDS} times" in answer.headers["X-Error-Code"]


async def test_a_full_batch_fits_the_request_line(session: aiohttp.ClientSession) -> None:
    async with session.get(f"/shards/{','.join([OTHER] * MAX_IDS)}") as answer:
        assert len(await answer.read()) == 64 * MAX_IDS


async def speak(server: TensorServer, request: bytes) -> bytes:
    """What the server says to these bytes, up to its silence or the connection's end."""
    host, port = server.url.removeprefix("http://").split(":")
    said = b""
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(request)
        with anyio.move_on_after(0.3), anyio_ends():
            while True:
                said += await stream.receive()
    return said


class anyio_ends:  # noqa: N801 - reads as a phrase
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is not None and issubclass(kind, anyio.EndOfStream | anyio.BrokenResourceError)


async def test_an_over_long_upload_is_refused_before_its_body_is_sent(server: TensorServer) -> None:
    head = f"PUT /shards/{SHARD} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {2**60}\r\n\r\n"
    said = await speak(server, head.encode())
    assert said.startswith(b"HTTP/1.1 413 ")
    assert f"max_bytes={256 * MIB} is less than the {2**60} asked".encode() in said


async def test_header_that_exceeds_its_request_takes_no_memory(
    server: TensorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(server.storage, "reserve", lambda shard_id, nbytes: taken.append(nbytes))
    body = describe(SHARD, "uint8", (100 * MIB,), np.zeros(100 * MIB, np.uint8)).encode()
    head = f"PUT /shards/{SHARD} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) + 10}\r\n\r\n"
    said = await speak(server, head.encode() + body + bytes(10))
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"more than the 74 that may come" in said
    assert not taken


async def test_an_upload_that_goes_silent_gives_its_room_back(
    server: TensorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.05)
    body = frame(100_000)
    head = f"PUT /shards/{SHARD} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    said = await speak(server, head.encode() + body[:5000])
    assert said.startswith(b"HTTP/1.1 408 ")
    assert server.statistics().reserved_bytes == 0


async def test_an_upload_whose_sender_vanishes_gives_its_room_back(server: TensorServer) -> None:
    body = frame(100_000)
    head = f"PUT /shards/{SHARD} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(head.encode() + body[:5000])
        await wait_for(server, reserved_bytes=len(body))
    await wait_for(server, reserved_bytes=0)
    assert server.statistics().shards == 0


async def test_shard_deleted_during_its_upload_is_not_kept(
    server: TensorServer, session: aiohttp.ClientSession
) -> None:
    body = frame(100_000)
    head = f"PUT /shards/{SHARD} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(head.encode() + body[:5000])
        await wait_for(server, reserved_bytes=len(body))
        async with session.delete(f"/shards/{SHARD}") as answer:
            assert await answer.json() == {"deleted": 0}
        await stream.send(body[5000:])
        assert (await stream.receive()).startswith(b"HTTP/1.1 409 ")
    assert (server.statistics().shards, server.statistics().reserved_bytes) == (0, 0)


def test_an_upload_whose_room_was_given_back_isnt_kept() -> None:
    storage, body = ShardStorage(1000), frame(100)
    upload = storage.reserve(SHARD, len(body))
    storage.take_memory(upload)[:] = body
    storage.give_back(upload)
    with pytest.raises(TensorError, match="given back"):
        storage.commit(upload, parse_header(body, max_bytes=len(body)))
    now = storage.statistics()
    assert (now.shards, now.bytes, now.reserved_bytes) == (0, 0, 0)


async def wait_for(server: TensorServer, *, reserved_bytes: int) -> None:
    with anyio.fail_after(3):
        while server.statistics().reserved_bytes != reserved_bytes:  # noqa: ASYNC110 - another thread's doing
            await anyio.sleep(0.005)


def test_a_reader_that_vanishes_is_no_error_of_the_servers(
    server: TensorServer, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = torch.ones(2 * MIB)
    host, port = server.url.removeprefix("http://").split(":")
    with http_client() as client:
        remote = client.remotize(tensor, server.url)
        for _ in range(8):
            with socket.create_connection((host, int(port))) as reader:
                reader.sendall(f"GET /shards/{remote.shard_id} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                reader.recv(10)
                reader.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # as where it was killed
        assert torch.equal(client.localize(remote), tensor)
    assert not caplog.records


async def test_sender_that_vanishes_early_is_no_error_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with TensorServer(max_bytes=MIB, shared_memory=False) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as sender:
            head = f"PUT /shards/{SHARD} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1000\r\n\r\n"
            sender.sendall(head.encode())
        await all_others_wait()
        assert server.statistics().reserved_bytes == 0
    assert not caplog.records


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=MAX_HEADER_BYTES), st.integers(0, 2**64), st.booleans())
def test_no_upload_crashes_the_server(data: bytes, length: int, truthful: bool) -> None:
    async def check() -> None:
        async with TensorServer(max_bytes=100_000, shared_memory=False) as server:
            body = b"AFT1" + data
            said = len(body) if truthful else length
            head = f"PUT /shards/{SHARD} HTTP/1.1\r\nHost: x\r\nContent-Length: {said}\r\n\r\n"
            host, port = server.url.removeprefix("http://").split(":")
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(head.encode() + body)
                await stream.send_eof()
                with anyio_ends():
                    while not (await stream.receive()).startswith(b"HTTP/1.1 5"):
                        pass
                    pytest.fail("the server's own error")
            async with http_client() as client:
                remote = await client.remotize(torch.ones(3), server.url)
                assert torch.equal(await client.localize(remote), torch.ones(3))

    anyio.run(check)


async def test_statistics_are_served(session: aiohttp.ClientSession, server: TensorServer) -> None:
    await put(session, frame(100))
    async with session.get("/statistics") as answer:
        told = await answer.json()
    assert told == {
        **dict.fromkeys(("deleted", "expired", "read", "refused", "reserved_bytes", "shared_shards"), 0),
        "bytes": 164,
        "max_bytes": 256 * MIB,
        "shards": 1,
        "stored": 1,
    }
    assert json.loads(json.dumps(told)) == told


async def test_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    fetch = FetchConfig(ca_file=str(tmp_path / "ca.pem"), trust_env=False)
    async with TensorServer(max_bytes=64 * MIB, tls=context, token="t") as server:
        assert server.url.startswith("https://")
        async with http_client(token="t", fetch=fetch) as client:
            remotes = await client.remotize([torch.ones(3), torch.ones(3_000_000)], server.url)
            assert torch.equal((await client.localize(remotes))[1], torch.ones(3_000_000))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_bytes": 0},
        {"max_bytes": 1e9},
        {"max_bytes": 1, "ttl_seconds": 0},
        {"max_bytes": 1, "ttl_seconds": 10**400},
        {"max_bytes": 1, "token": ""},
        {"max_bytes": 1, "token": "a b"},
        {"max_bytes": 1, "token": "\xfc"},
        {"max_bytes": 1, "host": ""},
        {"max_bytes": 1, "port": -1},
        {"max_bytes": 1, "port": 70_000},
        {"max_bytes": 1, "port": "80"},
        {"max_bytes": 1, "port": 80.5},
        {"max_bytes": 1, "ttl_seconds": "1"},
        {"max_bytes": 1, "ttl_seconds": True},
    ],
)
def test_arguments_are_checked(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        TensorServer(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["", "hidden\n", "hid den", "hidden\xfc"])
def test_a_client_s_token_that_no_server_can_have_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match=r"token must be printable ASCII without spaces, .* strip\(\)") as caught:
        http_client(token=token)
    assert "hid" not in str(caught.value)


async def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1 port {port}"):
            async with TensorServer(port=port, max_bytes=1):
                pass


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
async def test_a_name_that_no_host_can_have_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"can't listen on {host} port 0"):
        async with TensorServer(host, max_bytes=1, token="t"):
            pass


async def test_a_server_for_all_addresses_says_one_that_can_be_reached() -> None:
    async with TensorServer("0.0.0.0", max_bytes=1000, token="t") as server:
        assert "0.0.0.0" not in server.url
        async with http_client(token="t") as client:
            assert await client.localize(await client.remotize(torch.tensor(1), server.url)) == 1
    async with TensorServer("0.0.0.0", max_bytes=1000, token="t", public_host="node-7") as server:
        assert server.url.startswith("http://node-7:")


def test_server_can_be_entered_once_and_is_gone_afterwards() -> None:
    server = TensorServer(max_bytes=1000)
    with pytest.raises(ClosedError):
        _ = server.url
    with server:
        assert server.statistics().shards == 0
    with pytest.raises(ClosedError):
        server.statistics()
    with pytest.raises(ClosedError):
        server.__enter__()

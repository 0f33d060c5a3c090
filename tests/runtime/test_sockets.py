"""Every socket that was made is seen to its end, by the system's own account."""

from __future__ import annotations

import asyncio
import socket

import anyio
import psutil
import pytest

from asyncfetch.runtime import sockets
from asyncfetch.runtime.sockets import Sockets, SocketsClosed


def descriptors() -> int:
    return int(psutil.Process().num_fds())


async def test_closing_ends_what_was_connected_to_a_peer_that_hangs() -> None:
    made = Sockets()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = descriptors()
        one = made.for_connecting(socket.AF_INET, socket.SOCK_STREAM, 0)
        await asyncio.get_running_loop().sock_connect(one, silent.getsockname())
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=one)
        assert descriptors() == before + 1
        await made.aclose()
        assert descriptors() == before


async def test_closing_ends_what_was_accepted_from_a_peer_that_hangs() -> None:
    made, accepted = Sockets(), anyio.Event()

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.set()

    listening = made.for_listening(("127.0.0.1", 0), family=socket.AF_INET)
    server = await asyncio.get_running_loop().create_server(Server, sock=listening)
    with socket.create_connection(listening.getsockname()):
        before = descriptors()
        await accepted.wait()
        assert descriptors() == before + 1
        await made.aclose()
        assert descriptors() == before
        server.close()


async def test_close_takes_no_time_where_no_socket_is_open() -> None:
    made = Sockets()
    made.for_connecting(socket.AF_INET, socket.SOCK_STREAM, 0).close()
    with made.for_connecting(socket.AF_INET, socket.SOCK_STREAM, 0) as one:
        other = socket.socket(fileno=one.detach())
    with other, anyio.fail_after(sockets.CLOSE_SECONDS / 2):
        await made.aclose()


async def test_socket_is_refused_after_the_close() -> None:
    """A call that goes on at the interpreter's exit tries again after its connection has ended."""
    made = Sockets()
    await made.aclose()
    with pytest.raises(SocketsClosed):
        made.for_connecting(socket.AF_INET, socket.SOCK_STREAM, 0)


async def test_unclosed_socket_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "CLOSE_SECONDS", 0.01)
    made = Sockets()
    with made.for_connecting(socket.AF_INET, socket.SOCK_STREAM, 0):
        await made.aclose()


def test_an_address_that_is_taken_leaves_no_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = descriptors()
        with pytest.raises(OSError, match="in use"):
            Sockets().for_listening(taken.getsockname(), family=socket.AF_INET)
        assert descriptors() == before

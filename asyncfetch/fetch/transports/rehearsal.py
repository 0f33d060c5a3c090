"""A trial of what is relied on of aiohttp beyond its documentation, before the first session on a kind of loop.

Requests are sent and their answers read as they will be, by the same connector, over pairs of sockets: no network, no
thread, no other task. They are plain: what TLS adds is asyncio's, not aiohttp's. An answer is written to the far end of
a pair when its request gets the connection, so nothing is waited for but turns of the loop. Those are counted; how long
they take, and what else runs in them, decides nothing.

Anything but what was expected, an exception included, leads to one warning and to aiohttp's documented ways.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import anyio.lowlevel
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from asyncfetch.fetch.transports.connecting import current_user
from asyncfetch.fetch.transports.direct import Answer, Channel
from asyncfetch.fetch.transports.requests import Requests
from asyncfetch.fetch.transports.resolver import Resolver
from asyncfetch.fetch.transports.session import PassableConnector, session_over
from asyncfetch.runtime.cancellation import Interrupt
from asyncfetch.runtime.sockets import Sockets

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import TracebackType

    from asyncfetch.fetch.transports.connecting import Connecting
    from asyncfetch.fetch.transports.hedging import Race

__all__ = ["is_as_expected"]

_log = logging.getLogger(__name__)

MAX_TURNS = 1000
"""Of the loop, in which a trial is over. It takes 56 where nothing is wrong, 37 with uvloop."""
CLOSING_TURNS = 100
"""For what is left of it; a few where nothing is wrong, too."""
SURPLUS_TURNS = 3
"""In which what has come unasked is read, lest it be found in the socket."""
MAX_KINDS = 16
"""Of loops, whose outcomes are kept; a process has one or two."""

_BODY = b"0123456789"
_HERE = URL("http://127.0.0.1/")
_GET = b"GET / HTTP/1.1\r\n"
_RANGE = b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-9/10\r\nContent-Length: 10\r\n\r\n0123"
"""An answer, and the bytes of its body that come with its head; the others come when those have landed."""
_WHOLE = b"HTTP/1.1 200 x\r\nContent-Length: 10\r\n\r\n0123456789"
_CHUNKED = b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n0\r\n\r\n"
_NOTHING = b""
"""The end of the connection."""


class _Unexpected(Exception):
    """Nothing was raised, but something else was done."""


@dataclass(frozen=True, slots=True)
class _Scene:
    """A request and its answer."""

    answer: bytes
    is_ranged: bool = False
    is_reused: bool = True
    """Whether it is to go out on a pooled connection."""
    is_second: bool = False
    method: str = "GET"
    proxy: URL | None = None
    asks: bytes = _GET
    """What arrives of it, to begin with."""
    surplus: bytes = b""
    """What comes while its connection rests, which then isn't to be used again."""


_SCENES = (
    # aiohttp's own protocol first: what is missing is missed by a task then, and not in a callback of the loop.
    _Scene(_WHOLE, is_reused=False),
    _Scene(_CHUNKED),
    _Scene(_RANGE, is_ranged=True),
    _Scene(_CHUNKED, is_ranged=True),
    _Scene(_RANGE, is_ranged=True),
    _Scene(_RANGE, is_ranged=True, is_second=True, is_reused=False),
    _Scene(_WHOLE, method="PUT", asks=b"PUT / HTTP/1.1\r\n"),
    _Scene(_RANGE, is_ranged=True),
    _Scene(_NOTHING, is_ranged=True),
    _Scene(_WHOLE, surplus=_WHOLE),
    _Scene(_RANGE, is_ranged=True, is_reused=False),
    _Scene(_CHUNKED, is_ranged=True, surplus=_WHOLE),
    _Scene(_WHOLE, proxy=URL("http://127.0.0.1:1"), asks=b"GET http://127.0.0.1/ HTTP/1.1\r\n", is_reused=False),
    _Scene(_WHOLE, is_reused=False),
)


_outcomes: dict[Hashable, bool] = {}
_told: dict[str, object] = {}


async def is_as_expected() -> bool:
    """Whether aiohttp is, on loops like the running one. Tried once for each kind of them; one warning where it isn't.

    Cancelled, it leaves nothing behind and is tried again.
    """
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    # A loop of aiofastnet's is another one's with other methods.
    kind = type(loop), getattr(getattr(connect, "func", connect), "__module__", None)
    outcome = _outcomes.get(kind)
    if outcome is None:
        try:
            cause = await _rehearse()
        except (OSError, MemoryError) as error:  # that says nothing of aiohttp, and the next session may have more luck
            _warn(f"no sockets or memory to try it with: {error}")
            return False
        if len(_outcomes) >= MAX_KINDS:
            _outcomes.clear()
        outcome = _outcomes[kind] = cause is None
        if cause is not None:
            _warn(cause)
    return outcome


def _warn(cause: str) -> None:
    token = object()
    if len(_told) < MAX_KINDS and _told.setdefault(cause, token) is token:  # of several threads, one tells
        message = "aiohttp %s isn't as expected (%s): only what it documents is used, which takes more CPU"
        _log.warning(message, aiohttp.__version__, cause)


async def _rehearse() -> str | None:
    """What is other than expected; None where nothing is. OSError or MemoryError where it can't be tried."""
    pairs = _Pairs(sum(not scene.is_reused for scene in _SCENES))
    try:
        session = session_over(PassableConnector(Resolver(_NoNames()), keepalive_seconds=3600, tls=True, sockets=pairs))
        try:
            requests = Requests(session, directly=True)
            with _Turns(MAX_TURNS):
                for scene in _SCENES:
                    await _play(scene, requests, pairs)
        finally:
            with anyio.CancelScope(shield=True), _Turns(CLOSING_TURNS):
                await session.close()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever has changed in there
        return f"{type(error).__name__}: {error}"
    finally:
        pairs.close()
    return None


async def _play(scene: _Scene, requests: Requests, pairs: _Pairs) -> None:
    user = _User(scene, pairs)
    token = current_user.set(user)
    byte_range = "bytes=0-9" if scene.is_ranged else None
    try:
        answer = await requests.send(scene.method, _HERE, {}, byte_range=byte_range, proxy=scene.proxy)
    except aiohttp.ServerDisconnectedError:
        if scene.answer:
            raise
        return
    finally:
        current_user.reset(token)
    try:
        if isinstance(answer, Answer) != (scene.answer == _RANGE):
            raise _Unexpected(f"a {type(answer).__name__} came of {scene}")
        body = await _read(answer, user)
        asked = user.far.recv(4096)
        if not asked.startswith(scene.asks) or scene.is_ranged != (b"\r\nRange: bytes=0-9\r\n" in asked):
            raise _Unexpected(f"{asked!r} came of {scene}")
        if body != _BODY or answer.status != (206 if scene.answer == _RANGE else 200) or answer.connection is not None:
            raise _Unexpected(f"{answer.status}, {body!r} and {answer.connection} came of {scene}")
    finally:
        answer.close()
    if scene.surplus:
        user.far.send(scene.surplus)
        for _ in range(SURPLUS_TURNS):
            await anyio.lowlevel.checkpoint()


async def _read(answer: Answer | aiohttp.ClientResponse, user: _User) -> bytes:
    body = bytearray()
    if isinstance(answer, Answer):
        body += bytes(len(_BODY))
        await answer.receive(memoryview(body), user.landed)
    else:
        while piece := await answer.content.readany():
            body += piece
    return bytes(body)


class _User:
    """A scene's request. See ConnectionUser."""

    needs_new_connection = False
    race: Race[Any] | None = None
    connecting: Connecting | None = None
    transport: asyncio.BaseTransport | None = None

    def __init__(self, scene: _Scene, pairs: _Pairs) -> None:
        self.is_second = scene.is_second
        self._scene = scene
        self._pairs = pairs

    def connected(self, transport: asyncio.Transport | None, *, reused: bool) -> None:
        """Answers it."""
        if transport is None or reused != self._scene.is_reused:
            raise _Unexpected(f"a connection, reused: {reused}, came of {self._scene}")
        protocol = transport.get_protocol()
        if not isinstance(protocol, asyncio.Protocol | Channel):
            raise _Unexpected(f"a {type(protocol).__name__} is a connection's protocol")
        self.transport = transport
        self.far = self._pairs.far_from(transport)
        if self._scene.answer:
            self.far.send(self._scene.answer)
        else:
            self.far.shutdown(socket.SHUT_WR)

    def landed(self, count: int) -> None:
        """The first of the body has come, or all of it."""
        if count == 4:
            self.far.send(_BODY[count:])


class _Near(socket.socket):
    """An end that is connected from the beginning."""

    def connect(self, _: object) -> None:
        pass


class _Pairs(Sockets):
    """Sockets that a connector takes for connections, and their other ends."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._used = 0
        try:
            for _ in range(count):
                one, far = socket.socketpair()
                far.setblocking(False)
                self._pairs.append((_Near(fileno=one.detach()), far))
        except OSError:
            self.close()
            raise

    def for_connecting(self, family: int, kind: int, protocol: int) -> socket.socket:
        """The near end of the next one."""
        if self._used == len(self._pairs):
            raise _Unexpected(f"it wants more than {self._used} connections")
        self._used += 1
        return self._pairs[self._used - 1][0]

    def far_from(self, transport: asyncio.Transport) -> socket.socket:
        """The other end of a connection."""
        number = transport.get_extra_info("socket").fileno()
        return next(far for near, far in self._pairs if near.fileno() == number)

    async def aclose(self) -> None:
        """Returns when those in use are closed, which their transports do in the loop's next turns."""
        while any(near.fileno() >= 0 for near, _ in self._pairs[: self._used]):
            await anyio.lowlevel.checkpoint()

    def close(self) -> None:
        """Closes what no transport does."""
        for near, _ in self._pairs[self._used :]:
            near.close()
        for _, far in self._pairs:
            far.close()


class _NoNames(AbstractResolver):
    """Knows none, and is asked for none: an address stands for itself."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        raise OSError(socket.EAI_NONAME, host)

    async def close(self) -> None:
        pass


class _Turns:
    """A block that may take so many turns of the loop: ``with _Turns(1000): ...``."""

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._loop = asyncio.get_running_loop()
        self._block = Interrupt()

    def __enter__(self) -> None:
        self._block.__enter__()
        self._handle = self._loop.call_soon(self._turn)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._block.__exit__(kind, error, traceback):
            raise _Unexpected(f"it isn't over after {self._count} turns of the loop") from error

    def _turn(self) -> None:
        self._left -= 1
        if self._left:
            self._handle = self._loop.call_soon(self._turn)
        else:
            self._block.cancel()

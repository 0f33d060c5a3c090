"""TensorServer: its lifecycle, its token, and its answers; urls of servers and shards.

Every refusal names its limit or rule in X-Error-Code, with the figures.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

import anyio
from aiohttp import web

from asyncfetch.config.checks import is_whole_number, require_token, whole_number
from asyncfetch.errors import ClosedError, ConfigError, TensorError, redact_url
from asyncfetch.fetch.urls import address_in, check_characters, is_loopback, read_url, userinfo
from asyncfetch.runtime import LoopThread
from asyncfetch.runtime.cancellation import end_tasks, outlast
from asyncfetch.runtime.fork import running_loop
from asyncfetch.runtime.loop_thread import BackgroundContext
from asyncfetch.runtime.sockets import Sockets, abort
from asyncfetch.runtime.threads import in_thread, run_in_thread, run_sync
from asyncfetch.tensors.storage import ShardStorage, SharedDirectory, StorageStatistics
from asyncfetch.tensors.wire import MAX_HEADER_BYTES, MIN_HEADER_BYTES, Header, is_shard_id, missing, parse_header

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from asyncfetch.tensors.storage import ShardUpload


def server_url(host: str, port: int, *, tls: bool) -> str:
    """``https://host:port``, an IPv6 address in brackets."""
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"


def normal_server(url: str) -> str:
    """A server's url as ``server_url`` spells it; ConfigError unless it is an http(s) url of just a host."""
    if not isinstance(url, str):
        raise ConfigError(f"the url of a tensor server must be a string, not of type {type(url).__name__}")
    check_characters(url)
    try:
        parsed = read_url(url)
        is_server = parsed.scheme in {"http", "https"} and parsed.path in {"", "/"} and not parsed.query_string
        if is_server and parsed.host and parsed.port and userinfo(parsed) is None:
            return server_url(parsed.host, parsed.port, tls=parsed.scheme == "https")
    except ValueError as error:
        raise ConfigError(f"{redact_url(url)!r} is no url of a tensor server: {error}") from error
    raise ConfigError(f"{redact_url(url)!r} is no url of a tensor server, which is http://host:port and nothing more")


def shards_url(server: str, shard_ids: Iterable[str]) -> str:
    """The url of these shards as one object."""
    return f"{server}/shards/{','.join(shard_ids)}"


REASON = "X-Error-Code"
MAX_IDS = 128
"""Shards in one request. Their ids take 4.2 KB of the request's line, which aiohttp bounds to 8 KiB."""
PIECE_BYTES = 512 * 1024
"""Bytes written at a time. Python 3.11 copies bytes that the socket doesn't take at once."""
STALL_SECONDS = 30.0
"""Longest silence within an upload, as the engine's stall_seconds. Then its room is given back."""
UNDO_SECONDS = 10.0
"""Longest wait for the removal of a broken upload."""


class ShardHandlers:
    """One method for each verb."""

    def __init__(self, storage: ShardStorage, shared: SharedDirectory | None) -> None:
        self._storage = storage
        self._shared = shared

    async def get(self, request: web.Request) -> web.StreamResponse:
        """One shard's frame, or the frames of several in the order asked; ranges of either.

        A missing one is 404; among several, it is a header that says so.
        """
        ids = _ids(request)
        if ids is None:
            return _bad_ids()
        found = [self._storage.get(shard_id) for shard_id in ids]
        if found == [None]:
            return refuse(404, "no such shard")
        parts = [one.frame if one else memoryview(missing(shard_id)) for one, shard_id in zip(found, ids, strict=True)]
        return await _send(request, parts, etag=etag_of(ids[0]) if len(ids) == 1 else None)

    async def put(self, request: web.Request) -> web.StreamResponse:
        """Stores a frame under the id in its header. The same frame again is 200, another one 409."""
        refusal = self.refusal(request)
        if refusal is not None:
            return refusal
        length, shard_id = request.content_length or 0, request.match_info["ids"]
        try:
            with anyio.fail_after(STALL_SECONDS):
                head = await request.content.readexactly(min(length, MAX_HEADER_BYTES))
            header = parse_header(head, max_bytes=length)
            if header.missing or header.shard_id != shard_id or header.frame_bytes != length:
                what = f"of {header.frame_bytes} bytes and {header.shard_id}"
                return refuse(400, f"the frame is {what}, not as its request says")
            upload = self._storage.reserve(shard_id, length)
            try:
                return await self._receive(request, upload, header, head)
            finally:
                if upload in self._storage.uploads:
                    give_back = partial(self._storage.give_back, upload)
                    await outlast(partial(run_in_thread, 0, give_back, blocks=upload.shared), seconds=UNDO_SECONDS)
        except asyncio.IncompleteReadError:
            return refuse(400, "the body ends within the header")
        except TensorError as error:
            return refuse(507 if str(error).startswith("max_bytes") else 409 if error.shard_ids else 400, str(error))
        except TimeoutError:
            return refuse(408, f"nothing came for {STALL_SECONDS:g} s")

    def refusal(self, request: web.Request) -> web.Response | None:
        """The refusal of an upload before its body is read; None to accept it."""
        ids, length = _ids(request), request.content_length
        if ids is None or len(ids) != 1:
            return _bad_ids()
        if length is None or length < MIN_HEADER_BYTES:
            return refuse(411, f"Content-Length must be there, and at least {MIN_HEADER_BYTES}")
        if length > self._storage.max_bytes:
            return refuse(413, f"max_bytes={self._storage.max_bytes} is less than the {length} asked")
        return None

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Forgets shards; missing ones are no error."""
        ids = _ids(request)
        if ids is None:
            return _bad_ids()
        deleted = await run_sync(self._storage.delete, ids)
        return web.json_response({"deleted": deleted})

    async def statistics(self, request: web.Request) -> web.StreamResponse:
        """The storage's."""
        return web.json_response(asdict(self._storage.statistics()))

    async def shared(self, request: web.Request) -> web.StreamResponse:
        """The name and proof of the directory in which processes of this machine can read the larger shards."""
        if self._shared is None:
            return web.json_response({})
        return web.json_response({"name": self._shared.path.name, "proof": self._shared.proof})

    async def _receive(self, request: web.Request, upload: ShardUpload, header: Header, head: bytes) -> web.Response:
        shared = self._storage.shares(upload.nbytes)
        take_memory = partial(self._storage.take_memory, upload)
        memory = await run_in_thread(upload.nbytes, take_memory, blocks=shared)
        memory[: len(head)] = head
        filled = len(head)
        while filled < len(memory):
            with anyio.fail_after(STALL_SECONDS):
                chunk = await request.content.readany()
            if not chunk or filled + len(chunk) > len(memory):
                raise TensorError(f"the body doesn't have the {len(memory)} bytes that Content-Length says")
            memory[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        del memory
        commit = partial(self._storage.commit, upload, header)
        is_new = await run_in_thread(upload.nbytes, commit, blocks=shared)
        return web.Response(status=201 if is_new else 200, headers={"ETag": etag_of(upload.shard_id)})


def etag_of(shard_id: str) -> str:
    """The ETag of answers to reads and uploads of a shard."""
    return f'"{shard_id}"'


def refuse(status: int, reason: str) -> web.Response:
    """A refusal and its reason."""
    return web.Response(status=status, text=reason + "\n", headers={REASON: reason.replace("\n", " ")})


def _bad_ids() -> web.Response:
    return refuse(400, f"ids must be 1 to {MAX_IDS} times 32 hexadecimal digits, with commas")


def _ids(request: web.Request) -> list[str] | None:
    """The shards that the request names; None if it names none or too many."""
    ids = request.match_info["ids"].split(",")
    return ids if len(ids) <= MAX_IDS and all(map(is_shard_id, ids)) else None


async def _send(request: web.Request, parts: list[memoryview], *, etag: str | None) -> web.StreamResponse:
    """The asked range of the parts one after the other."""
    size = sum(map(len, parts))
    try:
        asked = request.http_range
        start, stop, _ = slice(asked.start, asked.stop).indices(size)
    except ValueError:
        start, stop = 0, 0
    if start >= stop:
        return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
    headers = {"Content-Length": str(stop - start), "Content-Type": "application/octet-stream"}
    if etag is not None:
        headers["ETag"] = etag
    ranged = "Range" in request.headers
    if ranged:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
    with suppress(ConnectionError):  # aiohttp would log a lost client as an error of ours
        await response.prepare(request)
        for piece in pieces(parts, start, stop):
            await response.write(piece)
        await response.write_eof()
    return response


def pieces(parts: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) of the parts together, at most PIECE_BYTES at a time."""
    at = 0
    for part in parts:
        first, last = max(0, start - at), min(len(part), stop - at)
        for begin in range(first, last, PIECE_BYTES):
            yield part[begin : min(last, begin + PIECE_BYTES)]
        at += len(part)


CLOSE_SECONDS = 0.5
"""Longest wait for requests to unwind after their connections are gone."""
LINGER_SECONDS = 1.0
"""Seconds for which the rest of a refused upload is read and dropped, so that its sender reads the refusal. Large ones
ask before they send."""


class TensorServer:
    """Holds tensors in memory for every process that has its url, over HTTP: an aiohttp application.

    It runs on the loop of ``async with server:``, or in a thread of its own for ``with server:``. Leaving the block
    forgets every shard and closes every connection. It can be entered once.

    Args:
        host: Address to listen on.
        port: 0 takes a free one.
        max_bytes: Bound on the shards' bytes, uploads under way included. Uploads that don't fit are refused.
        ttl_seconds: Lifetime of a shard after it was last stored or read; None means until it is deleted. It frees the
            memory of workers that died before they could clear. Reads through shared memory don't count.
        token: A secret that every request must show; printable ASCII. None lets any client store, read and delete,
            which is only accepted for a loopback ``host``.
        allow_anonymous: Whether to accept any ``host`` without a token.
        tls: Server side context; None speaks plain HTTP, and the token is as secret as the network is.
        public_host: Name or address of this machine in ``url``; None means ``host``, or, if that is all addresses, the
            address of the default route.
        shared_memory: Whether clients of the same user on this machine read shards from 64 KiB on without a request,
            in files in /dev/shm. Shards that don't fit there are kept in private memory.

    Raises:
        ConfigError: An argument can't be used; on entering: the address isn't available.

    Not fork-safe: the child's copy doesn't serve.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_bytes: int,
        ttl_seconds: float | None = None,
        token: str | None = None,
        allow_anonymous: bool = False,
        tls: ssl.SSLContext | None = None,
        public_host: str | None = None,
        shared_memory: bool = True,
    ) -> None:
        if not host:
            raise ConfigError("host must be an address or a name; 0.0.0.0 means all of this machine's")
        if not is_whole_number(port) or not 0 <= port < 65536:
            raise ConfigError(f"port must be a whole number from 1 to 65535, or 0 for a free one, not {port!r}")
        max_bytes = whole_number("max_bytes", max_bytes, least=1)
        _check_ttl(ttl_seconds)
        if token is not None:
            require_token("token", token)
        elif not allow_anonymous and not is_loopback(host):
            raise ConfigError(
                f"on {host!r} every client that reaches it could read and delete: give a token=, or say that this is"
                " meant with allow_anonymous=True"
            )
        self._host, self._port, self._tls, self._public_host = host, int(port), tls, public_host
        self._max_bytes, self._ttl_seconds, self._shares = max_bytes, ttl_seconds, shared_memory
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._state = "new"
        self._url: str | None = None
        self._storage: ShardStorage | None = None
        self._thread = ExitStack()

    @property
    def url(self) -> str:
        """``http://host:port``, for ``remotize``."""
        if self._url is None:
            raise ClosedError("the TensorServer has no url before it is entered: use `with server:` or `async with`")
        return self._url

    @property
    def storage(self) -> ShardStorage:
        """The shards; ClosedError before and after the block."""
        if self._storage is None:
            raise ClosedError(f"this TensorServer is {self._state}: use it within its with block")
        return self._storage

    def statistics(self) -> StorageStatistics:
        """A snapshot, in any thread, within the block."""
        return self.storage.statistics()

    def __repr__(self) -> str:
        return f"<TensorServer {self._url or self._host} {self._state}>"

    async def __aenter__(self) -> Self:
        running_loop("a TensorServer")
        if self._state != "new":
            raise ClosedError(f"this TensorServer is {self._state}; it can be entered once: make another one")
        self._state = "open"
        shared = await run_sync(_shared_directory) if self._shares else None
        storage = self._storage = ShardStorage(self._max_bytes, ttl_seconds=self._ttl_seconds, shared=shared)
        self._http = web.AppRunner(
            make_application(storage, self._authorization, shared),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_SECONDS,
            lingering_time=LINGER_SECONDS,
        )
        self._sockets = Sockets()
        self._listener: asyncio.Server | None = None
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            await self._http.setup()
            await self._listen()
        except BaseException:
            await self._close()
            raise
        if self._ttl_seconds is not None:
            self._tasks.start_soon(_expire, storage, self._ttl_seconds)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            thread = stack.enter_context(LoopThread(name="asyncfetch tensor server"))
            kept = BackgroundContext(thread, lambda: self, name="this TensorServer")
            kept.value()
            stack.callback(kept.leave)
            self._thread = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.close()

    async def _listen(self) -> None:
        assert self._http.server is not None
        try:
            self._listener = await self._sockets.serve(self._http.server, self._host, self._port, self._tls)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"TensorServer can't listen on {self._host} port {self._port}: {error}") from error
        family, port = self._listener.sockets[0].family, self._listener.sockets[0].getsockname()[1]
        public = self._public_host or self._host
        if (address := address_in(public)) is not None and address.is_unspecified:  # all of this machine's
            public = await run_sync(_outgoing_address, family)
        self._url = server_url(public, port, tls=self._tls is not None)

    async def _close(self) -> None:
        """Close every connection, end every handler, forget every shard."""
        self._state = "closed"
        try:
            await end_tasks(self._tasks)
        finally:
            with anyio.CancelScope(shield=True):
                storage, self._storage = self._storage, None
                for connection in self._http.server.connections if self._http.server is not None else ():
                    if connection.transport is not None:
                        abort(connection.transport)
                await self._sockets.aclose()  # those in their handshake, too, which aiohttp doesn't know yet
                if self._listener is not None:
                    self._listener.close()
                await self._http.cleanup()
                if storage is not None:
                    await in_thread(storage.close)


def make_application(
    storage: ShardStorage, authorization: bytes | None, shared: SharedDirectory | None
) -> web.Application:
    """The aiohttp application: handlers, and the token in front of all of them."""

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refusal = _refusal(request, authorization)
        return refusal if refusal is not None else await handler(request)

    async def ask_to_continue(request: web.Request) -> web.StreamResponse | None:
        """Answer an upload that asks before it sends, with the refusal or with 100."""
        refusal = _refusal(request, authorization) or handlers.refusal(request)
        if refusal is None:
            request.writer.output_size = 0
            with suppress(ConnectionError):  # the client is gone, and this task is cancelled as soon as it waits
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return refusal

    handlers = ShardHandlers(storage, shared)
    application = web.Application(middlewares=[guard])
    router = application.router
    router.add_get("/shards/{ids}", handlers.get, allow_head=False)
    router.add_put("/shards/{ids}", handlers.put, expect_handler=ask_to_continue)
    router.add_delete("/shards/{ids}", handlers.delete)
    router.add_get("/statistics", handlers.statistics, allow_head=False)
    router.add_get("/shared", handlers.shared, allow_head=False)
    return application


def _check_ttl(seconds: Any) -> None:  # noqa: ANN401 - what a user gave
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds <= sys.float_info.max):
        raise ConfigError(f"ttl_seconds must be a positive number, or None for ever, not {seconds!r:.80}")


def _refusal(request: web.Request, authorization: bytes | None) -> web.Response | None:
    """401 unless the request has the token, compared in constant time."""
    shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if authorization is None or hmac.compare_digest(shown, authorization):
        return None
    return refuse(401, "the token is missing or wrong: TensorClient(token=...)")


def _shared_directory() -> SharedDirectory | None:
    with suppress(OSError):
        return SharedDirectory()
    return None


async def _expire(storage: ShardStorage, ttl_seconds: float) -> None:
    """Forget shards when they expire. No shard expires sooner than ``expire`` returns."""
    while True:
        seconds = await run_sync(storage.expire)
        await anyio.sleep(ttl_seconds if seconds is None else seconds)


def _outgoing_address(family: int) -> str:
    """This machine's address on its default route; connecting a datagram socket sends nothing."""
    far = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))
        address: str = probe.getsockname()[0]
        return address
    return socket.gethostname()

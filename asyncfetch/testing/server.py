"""RangeServer: its lifecycle, and one request from arrival to end."""

from __future__ import annotations

import asyncio
import functools
import gzip
import os
import socket
import ssl
import struct
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeAlias

import anyio
import anyio.lowlevel
import anyio.to_thread
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from asyncfetch.config.checks import is_whole_number, whole_number
from asyncfetch.errors import ClosedError, ConfigError, MissingDependency, install_command
from asyncfetch.runtime.fork import running_loop, stand_still_at_forks
from asyncfetch.runtime.sockets import Sockets, abort
from asyncfetch.testing.contents import (
    ContentAnswer,
    Contents,
    DirectoryContents,
    InMemory,
    answer_object,
    answer_status,
    asked_range,
)
from asyncfetch.testing.faults import Fault, FaultRule, RequestLog, ServedRequest, ServerStatistics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", "::1")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's certificate and its authority."""

    context: ssl.SSLContext
    """Context for the server's side; it may serve many servers at once."""
    authority_pem: bytes
    """The authority that clients must trust."""
    key_and_chain_pem: bytes
    """The private key and the certificate, for a server that isn't Python's."""


@functools.lru_cache(maxsize=16)
def certificate_for(host: str) -> Certificate:
    """The certificate for ``host`` and the loopback names, made once in a process. Blocks for some 50 ms.

    ConfigError where no host can have this name, MissingDependency where trustme isn't installed.
    """
    try:
        import trustme
    except ImportError as exc:
        message = f"a test server with TLS needs trustme: {install_command('testing')}, or pass tls=False"
        raise MissingDependency(message) from exc
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        issued = authority.issue_cert(*dict.fromkeys((host, *LOOPBACK_NAMES)))
    except UnicodeError as exc:
        raise ConfigError(f"no certificate can be made for the host {host!r}: {exc}") from exc
    issued.configure_cert(context)
    return Certificate(context, authority.cert_pem.bytes(), issued.private_key_and_cert_chain_pem.bytes())


def _unlink(path: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid and os.path.exists(path):  # a forked child that exits leaves its parent's file
        os.unlink(path)


BLOCK_BYTES = 256 * 1024
"""Bytes read and written at once without a rate: few system calls and thread hops, and little memory."""
PIECE_SECONDS = 0.02
"""Seconds of the rate written at once. 50 writes a second and stream: 64 streams at 4 MiB/s cost half a core."""
CATCH_UP_SECONDS = 0.1
"""Seconds of a pause, such as a busy loop, that a stream may make up for. A real link can't make up for any."""


class Pace:
    """The clock of a stream of ``bytes_per_second``. Pure: ``now`` is passed in."""

    def __init__(self, bytes_per_second: float, *, now: float) -> None:
        self._bytes_per_second, self._clock = bytes_per_second, now

    @property
    def piece_bytes(self) -> int:
        """Bytes to write at once."""
        return min(BLOCK_BYTES, max(1, int(self._bytes_per_second * PIECE_SECONDS)))

    def due(self, byte_count: int, *, now: float) -> float:
        """The time at which the next ``byte_count`` bytes are due."""
        self._clock = max(self._clock, now - CATCH_UP_SECONDS) + byte_count / self._bytes_per_second
        return self._clock


async def sleep_until(monotonic_seconds: float) -> None:
    """Sleep until then; for a time in the past, yield to other tasks once."""
    await anyio.sleep(max(0.0, monotonic_seconds - time.monotonic()))


CLOSE_SECONDS = 0.5
"""Longest wait for requests to unwind after their connections are gone; only a disk read may take time then."""
NO_FAULT = Fault()

Receive: TypeAlias = "Callable[[], Awaitable[bytes]]"


class RangeServer:
    """An HTTP server of byte ranges for tests: TLS, a pace per stream, a delay to the first byte, faults on demand.

    It runs on the loop of ``async with server:``, or in a thread of its own for ``with server:``, for synchronous tests
    and loader workers:

        with RangeServer({"a.bin": bytes(1000)}, fault=FaultOnce("/a.bin", Fault.status(503))) as server:
            fetch(f"{server.url}/a.bin", ca_file=server.ca_file)
        assert [request.status for request in server.requests] == [503, 206]

    It answers GET and HEAD: one Range (206, 416), If-Match (412), If-Range, strong ETags (of the content for a mapping,
    of time and size for a file), 404, and 405 to the rest. Leaving the block closes every connection; the log stays
    readable. It can be entered again after that.

    Args:
        content: A directory, read in pieces and without symbolic links out of it; or a mapping of path to content, read
            at each request, so that changing a value replaces the object.
        host: An address of this machine. Any of 127.0.0.0/8 works on Linux: several hosts on one machine.
        port: 0 takes a free one.
        tls: Whether to speak TLS. Needs the extra ``testing``.
        first_byte_seconds: From a request's arrival to its status line. Connecting and TLS are not delayed.
        bytes_per_second: Rate of each response's body.
        max_concurrent: Requests above so many in flight are answered 503 at once.
        fault: Chooses each request's fault. Called on the server's loop, so it must not block. Its errors are answered
            500 and logged by aiohttp.
        max_log: Requests remembered; older ones are forgotten.

    Raises:
        ConfigError: An argument can't be used; on entering: ``content`` is no directory, or the address isn't
            available.
        MissingDependency: On entering: trustme, for TLS, isn't installed.
    """

    def __init__(
        self,
        content: str | os.PathLike[str] | Mapping[str, bytes],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: bool = True,
        first_byte_seconds: float = 0.0,
        bytes_per_second: float | None = None,
        max_concurrent: int | None = None,
        fault: FaultRule | None = None,
        max_log: int = 10_000,
    ) -> None:
        if not is_whole_number(port) or not 0 <= port < 65536:
            raise ConfigError(f"port must be from 1 to 65535, or 0 for a free one, not {port!r}")
        is_mapping = isinstance(content, Mapping) and all(
            isinstance(one, bytes | memoryview) for one in content.values()
        )
        if not is_mapping and not isinstance(content, (str, os.PathLike)):
            raise ConfigError("content must be the path of a directory, or a mapping of path to bytes")
        pace = Fault.slow(first_byte_seconds=first_byte_seconds, bytes_per_second=bytes_per_second)
        self._content = content
        self._contents: Contents  # made on entering: it looks at the disk
        self._host, self._port, self._tls = host, port, tls
        self._first_byte_seconds, self._bytes_per_second = pace.first_byte_seconds or 0.0, pace.bytes_per_second
        self._max_concurrent, self._fault = max_concurrent, fault
        self._log = RequestLog(whole_number("max_log", max_log, least=0))
        self._url: str | None = None
        self._remove_ca_file: Callable[[], object] | None = None
        self._ca_file: str | None = None
        self._http: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._sockets = Sockets()
        self._thread = ExitStack()

    @property
    def url(self) -> str:
        """``https://127.0.0.1:PORT``, without a slash at its end; after the block, that of the last run."""
        if self._url is None:
            raise ClosedError("the RangeServer has no url before it is entered: use `with server:` or `async with`")
        return self._url

    @property
    def ca_file(self) -> str | None:
        """PEM file of the authority to trust, which exists while the server runs; None without TLS, before and after.

        It fits FetchConfig(ca_file=...) and ssl.create_default_context(cafile=...) either way.
        """
        return self._ca_file

    @property
    def requests(self) -> list[ServedRequest]:
        """The latest requests, in order of arrival, including those in flight."""
        return self._log.requests()

    def statistics(self) -> ServerStatistics:
        """Counters since the last reset."""
        return self._log.statistics()

    def reset(self) -> None:
        """Clear the log, and set the counters to zero and the peak to the requests in flight."""
        self._log.reset()

    def __repr__(self) -> str:
        state = "running" if self._listener else "not running"
        return f"<RangeServer {self._url or self._host} {state}: {self.statistics()}>"

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._close()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            portal.call(stand_still_at_forks)
            portal.call(self._open)
            stack.callback(portal.call, self._close)
            self._thread = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.close()

    async def _open(self) -> None:
        running_loop("a RangeServer")
        if self._http is not None:
            raise ConfigError(f"the RangeServer at {self._url or self._host} runs already; make another one")
        self._http = web.Server(self._handle, handler_cancellation=True, access_log=None)
        try:
            context = await anyio.to_thread.run_sync(self._prepare)
            self._sockets = Sockets()
            try:
                self._listener = await self._sockets.serve(self._http, self._host, self._port, context)
            except (OSError, UnicodeError) as exc:
                raise ConfigError(f"RangeServer can't listen on {self._host} port {self._port}: {exc}") from exc
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._close()
            raise
        host = f"[{self._host}]" if ":" in self._host else self._host
        port = self._listener.sockets[0].getsockname()[1]
        self._url = f"{'https' if self._tls else 'http'}://{host}:{port}"

    def _prepare(self) -> ssl.SSLContext | None:
        self._contents = self._open_contents()
        if not self._tls:
            return None
        certificate = certificate_for(self._host)
        descriptor, self._ca_file = tempfile.mkstemp(prefix="asyncfetch-ca-", suffix=".pem")
        self._remove_ca_file = weakref.finalize(self, _unlink, self._ca_file, os.getpid())
        with os.fdopen(descriptor, "wb") as file:
            file.write(certificate.authority_pem)
        return certificate.context

    def _open_contents(self) -> Contents:
        if not isinstance(self._content, (str, os.PathLike)):
            return InMemory(self._content)
        if not os.path.isdir(self._content):
            path = os.fspath(self._content)
            raise ConfigError(f"RangeServer serves a directory or a mapping; {path!r} isn't a directory")
        return DirectoryContents(self._content)

    async def _close(self) -> None:
        listener, http, remove = self._listener, self._http, self._remove_ca_file
        self._listener = self._http = self._ca_file = self._remove_ca_file = None
        if http is not None:
            # A connection's end cancels its handler. Without abort() each would wait for its client's good-bye.
            for connection in http.connections:
                if connection.transport is not None:
                    abort(connection.transport)
        await self._sockets.aclose()  # those in their handshake, too, which aiohttp doesn't know yet
        if listener is not None:
            listener.close()
        if http is not None:
            await http.shutdown(CLOSE_SECONDS)
        if remove is not None:
            await anyio.to_thread.run_sync(remove)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        start, stop = asked_range(request.headers.get("Range")) or (None, None)
        record = ServedRequest(
            method=request.method,
            path=request.path,
            target=request.raw_path,
            start=start,
            stop=stop,
            headers=request.headers,
            started=time.monotonic(),
        )
        in_flight = self._log.begin(record)
        try:
            return await self._respond(request, record, in_flight)
        except ConnectionResetError as error:  # the client is gone: nothing to answer, nothing to log
            raise asyncio.CancelledError from error
        except Exception:
            record.status = record.status or 500  # what aiohttp answers, unless a status line is out
            raise
        finally:
            self._log.end(record)

    async def _respond(self, request: web.BaseRequest, record: ServedRequest, in_flight: int) -> web.StreamResponse:
        if self._max_concurrent is not None and in_flight > self._max_concurrent:
            fault, answer = Fault.slow(first_byte_seconds=0.0), answer_status(503, record.method)
        else:
            record.fault = self._fault(record) if self._fault else None
            fault = record.fault or NO_FAULT
            if fault.taken_bytes is not None:
                await _break_off(request, fault.taken_bytes)
            answer = await self._answer(record, fault, request.content.read)
        record.status = answer.status
        if answer.stored and fault.encode_gzip and answer.start < answer.stop:
            answer = await _compressed(answer, await _body(answer, fault, 0, answer.stop - answer.start))
        delay = self._first_byte_seconds if fault.first_byte_seconds is None else fault.first_byte_seconds
        await sleep_until(record.started + delay)
        return await self._send(request, record, answer, fault)

    async def _answer(self, record: ServedRequest, fault: Fault, receive: Receive) -> ContentAnswer:
        """The answer. Servers with an API of their own override this. ``receive()`` returns the request's body."""
        if fault.answer_status is not None:
            return answer_status(fault.answer_status, record.method)
        if record.method not in {"GET", "HEAD"}:
            return answer_status(405, record.method, {"Allow": "GET, HEAD"})
        try:
            stored = await self._contents.find(record.path)
        except PermissionError:
            return answer_status(403, record.method)
        if stored is None:
            return answer_status(404, record.method)
        return replace(answer_object(record.method, record.headers, stored.version, fault), stored=stored)

    async def _send(
        self, request: web.BaseRequest, record: ServedRequest, answer: ContentAnswer, fault: Fault
    ) -> web.StreamResponse:
        """Send the answer as far as ``fault`` lets it; cancelled when the client goes."""
        response = web.StreamResponse(status=answer.status, headers=_changed(answer.headers, fault.answer_headers))
        is_whole = fault.ending == "complete"
        if is_whole or fault.after_bytes is not None:
            await self._send_body(request, record, response, answer, fault)
        else:
            record.status = None
        if fault.ending == "stall":
            await anyio.sleep_forever()
        transport = request.transport
        if not is_whole:
            self._log.end(record)
        if transport is None or transport.is_closing():
            return response
        if fault.ending == "reset":
            # Lingering for 0 s makes close() send RST instead of FIN (socket(7)).
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            abort(transport)
        elif not is_whole:
            transport.close()
        elif fault.surplus_bytes:
            transport.write(b"\xff" * fault.surplus_bytes)  # not by aiohttp, which limits a body to its declared length
        return response

    async def _send_body(
        self,
        request: web.BaseRequest,
        record: ServedRequest,
        response: web.StreamResponse,
        answer: ContentAnswer,
        fault: Fault,
    ) -> None:
        """Send the head, and of the body what the fault lets through. The request ends with the last byte."""
        length, is_whole = len(answer.text) or answer.stop - answer.start, fault.ending == "complete"
        if not is_whole:
            length = min(length, fault.after_bytes or 0)
        elif length == 0:
            self._log.end(record)
        await response.prepare(request)
        rate = fault.bytes_per_second or self._bytes_per_second
        pace = Pace(rate, now=time.monotonic()) if rate else None
        piece_bytes = pace.piece_bytes if pace else BLOCK_BYTES
        for start in range(0, length, BLOCK_BYTES):
            # Reading from memory and writing may never wait. Without this, the end of the connection, which cancels
            # this task, would be noticed only after the last block, and other streams would get no turn.
            await anyio.lowlevel.checkpoint()
            block = memoryview(await _body(answer, fault, start, min(length, start + BLOCK_BYTES)))
            for offset in range(0, len(block), piece_bytes):
                piece = block[offset : offset + piece_bytes]
                if pace:
                    await sleep_until(pace.due(len(piece), now=time.monotonic()))
                self._log.sent(record, len(piece))
                if is_whole and record.bytes_sent == length:
                    self._log.end(record)
                await response.write(piece)


async def _break_off(request: web.BaseRequest, after_bytes: int) -> None:
    """End the connection when so much of the request's body has come, or all of it."""
    taken = 0
    while taken < after_bytes and (some := await request.content.readany()):
        taken += len(some)
    if request.transport is not None:
        abort(request.transport)
    raise ConnectionResetError


async def _body(answer: ContentAnswer, fault: Fault, start: int, stop: int) -> bytes | memoryview:
    """Bytes [start, stop) of the answer's body."""
    if answer.text or answer.stored is None:
        return answer.text[start:stop]
    start, stop = answer.start + start, answer.start + stop
    content = await answer.stored.read(start, stop)
    return content if fault.corrupt_at is None else inverted(content, fault.corrupt_at - start)


def inverted(content: bytes | memoryview, at: int) -> bytes | memoryview:
    """The content with the byte at ``at`` inverted, if it has one."""
    if not 0 <= at < len(content):
        return content
    damaged = bytearray(content)
    damaged[at] ^= 0xFF
    return bytes(damaged)


async def _compressed(answer: ContentAnswer, body: bytes | memoryview) -> ContentAnswer:
    text = await anyio.to_thread.run_sync(gzip.compress, body)
    headers = {**answer.headers, "Content-Encoding": "gzip", "Content-Length": str(len(text))}
    return replace(answer, headers=headers, start=0, stop=0, text=text)


def _changed(headers: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    changed = {name.lower() for name in changes}
    kept = {name: value for name, value in headers.items() if name.lower() not in changed}
    return kept | {name: value for name, value in changes.items() if value is not None}

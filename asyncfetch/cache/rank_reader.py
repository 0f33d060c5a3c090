"""One reader for all loader workers of a rank: every range is fetched once.

Each worker decodes samples of all episodes of the rank's pool. So the first worker to read becomes the *server*: it
reads for all, keeps their clips in memory that all of them map, and small answers for a while. Its socket has an
abstract name that only these workers know, so it goes with the process. If that ends, the next worker to read takes its
place; memory that the others have mapped stays valid.

A clip is *lent* to its users, and each of them is charged an equal part of its bytes. A worker that reads ahead could
take all the room that the others need now. So a read-ahead that would charge its worker more than its share of the
bound waits for room. An urgent read may use all the room there is. If there is none, the worker reads into memory of
its own, so an urgent read never waits for room that others hold.
"""

from __future__ import annotations

import asyncio
import copyreg
import errno
import io
import itertools
import os
import pickle
import socket
import struct
import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio

from asyncfetch.cache.memory import ByteCache, CacheKey, Lease
from asyncfetch.cache.regions import MappedRegions, RegionPlace, Regions
from asyncfetch.config.secrets import among_own_processes
from asyncfetch.errors import ClosedError, ObjectChanged, WorkerError
from asyncfetch.fetch.batch import RangeByRange
from asyncfetch.fetch.limiter import Caller, calling, current_caller
from asyncfetch.fetch.objects import difference
from asyncfetch.fetch.reader import RangeReader, VersionedReader, byte_ranges
from asyncfetch.ranges import ByteRange, ObjectInfo
from asyncfetch.runtime.cancellation import end_tasks
from asyncfetch.runtime.single_flight import SharedLRU

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    from asyncfetch.fetch.reader import WritableBuffer

T = TypeVar("T")
_LENGTH = struct.Struct("!Q")
_PEER = struct.Struct("3i")
"""pid, uid and gid, of SO_PEERCRED."""
_BACKLOG = 1024
"""The most workers that a rank may have."""

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets that a forked child must not keep: a copy would hide this process's end from the others."""


def _unix_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    _sockets.add(made)
    made.setblocking(False)
    return made


def _close_in_child() -> None:
    for each in tuple(_sockets):
        each.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close_in_child)


class _Loan(NamedTuple):
    """The server's answer to a request for a clip."""

    name: int
    place: RegionPlace | None
    """None for an empty clip."""
    info: ObjectInfo | None


class _PieceAnswer(NamedTuple):
    """The server's answer to any other request."""

    pickled: bytes
    info: ObjectInfo | None
    """The object's version."""

    @property
    def nbytes(self) -> int:
        return len(self.pickled)


class _LostError(Exception):
    """The server has ended."""


@dataclass(eq=False, slots=True)
class _WorkerPeer:
    """A worker as the server sees it."""

    writer: asyncio.StreamWriter
    ahead: Caller
    requests: dict[int, tuple[anyio.CancelScope, Caller]] = field(default_factory=dict)
    """Those under way, by their number."""
    lent: dict[int, tuple[CacheKey, Lease]] = field(default_factory=dict)
    charged: list[CacheKey] = field(default_factory=list)
    """The clips that it has, or that are being fetched for it."""


class _Server:
    """Reads for all connected workers: lends clips, whose memory is in regions, and keeps small answers."""

    def __init__(
        self, reader: RangeReader, clips: ByteCache, regions: Regions, *, small_bytes: int, workers: int
    ) -> None:
        self._reader = reader
        self._versioned = reader if isinstance(reader, VersionedReader) else None
        self._clips = clips
        self._regions = regions
        self._small: SharedLRU[tuple[Any, ...], _PieceAnswer] = SharedLRU(small_bytes)
        self._share_bytes = clips.max_bytes // workers
        self._changed = anyio.Event()
        """Set when there may be room for a waiting request."""
        self._names = itertools.count(1)
        self._users: Counter[CacheKey] = Counter()
        self._lent_bytes = 0

    async def attend(self, connection: socket.socket) -> None:
        """Serve one worker, until it closes its connection and has given back its clips, or has ended."""
        _sockets.add(connection)
        try:
            process = _open_process(_check_peer(connection))
        except (WorkerError, ProcessLookupError):
            connection.close()
            return
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        worker = _WorkerPeer(writer, Caller(urgent=False))
        try:
            async with anyio.create_task_group() as group:
                while (message := await _read(reader)) is not None:
                    match message:
                        case "ask", number, is_urgent, verb, arguments:
                            caller = Caller(urgent=is_urgent, behind=None if is_urgent else worker.ahead)
                            worker.requests[number] = anyio.CancelScope(), caller
                            group.start_soon(self._answer, worker, number, verb, arguments)
                        case "raise_priority", number if number in worker.requests:
                            worker.requests[number][1].raise_priority()
                            self._wake()
                        case "cancel", number if number in worker.requests:
                            worker.requests[number][0].cancel()
                        case "gone", names:
                            self._take_back(worker, names)
                group.cancel_scope.cancel()
            writer.close()
            if worker.lent:  # it may have views of these as long as it lives
                await _ended(process)
                self._take_back(worker, list(worker.lent))
        finally:
            writer.close()
            if process is not None:
                os.close(process)

    async def _answer(self, worker: _WorkerPeer, number: int, verb: str, arguments: tuple[Any, ...]) -> None:
        scope, caller = worker.requests[number]
        url = arguments[0] if isinstance(arguments[0], str) else arguments[0][0].url
        try:
            with scope, calling(caller):
                if verb == "lease":
                    answer: object = await self._lend(worker, caller, *arguments)
                else:
                    answer = await self._small.get((verb, *arguments), partial(self._read, url, verb, arguments))
                _write(worker.writer, (number, True, answer))
        except ClosedError:  # this reader ends: the worker finds another one
            worker.writer.close()
        except Exception as error:  # noqa: BLE001  raised in the worker
            if isinstance(error, ObjectChanged):
                self._small.clear(lambda key: url in key or any(getattr(each, "url", "") == url for each in key[1]))
            _write(worker.writer, (number, False, error))
        finally:
            del worker.requests[number]

    async def _lend(
        self, worker: _WorkerPeer, caller: Caller, url: str, start: int, stop: int, header: bytes
    ) -> _Loan | None:
        key = CacheKey.of(ByteRange(url, start, stop), header)
        while not self._has_room(worker, key, is_urgent=caller.urgent):
            if caller.urgent:
                return None
            await self._changed.wait()
        worker.charged.append(key)
        if not self._users[key]:
            self._lent_bytes += key.size_bytes or 0
        self._users[key] += 1
        self._wake()
        try:
            lease = await self._clips.acquire(url, start, stop, header=header)
        except BaseException:
            self._uncount(worker, key)
            raise
        name = next(self._names)
        worker.lent[name] = key, lease
        return _Loan(name, self._regions.place_of(lease.buffer), self._known(url))

    def _has_room(self, worker: _WorkerPeer, key: CacheKey, *, is_urgent: bool) -> bool:
        size_bytes = key.size_bytes or 0
        if key in self._users:
            return True
        if self._lent_bytes + size_bytes > self._clips.max_bytes:
            return False
        charged = sum((charged.size_bytes or 0) / self._users[charged] for charged in worker.charged)
        return is_urgent or charged + size_bytes <= self._share_bytes

    def _uncount(self, worker: _WorkerPeer, key: CacheKey) -> None:
        worker.charged.remove(key)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._lent_bytes -= key.size_bytes or 0
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _take_back(self, worker: _WorkerPeer, names: list[int]) -> None:
        for name in names:
            key, lease = worker.lent.pop(name)
            lease.release()
            self._uncount(worker, key)
        self._regions.sweep()

    async def _read(self, url: str, verb: str, arguments: tuple[Any, ...]) -> _PieceAnswer:
        return _PieceAnswer(_pickled(await getattr(self._reader, verb)(*arguments)), self._known(url))

    def _known(self, url: str) -> ObjectInfo | None:
        return None if self._versioned is None else self._versioned.known(url)


def _pickled(value: object) -> bytes:
    """A pickle of a value that may hold memoryviews, which are copied."""
    pickler = pickle.Pickler(file := io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, memoryview: lambda view: (memoryview, (bytes(view),))}
    pickler.dump(value)
    return file.getvalue()


class _RemoteCaller(Caller):
    """A request's caller, which notifies the server when it becomes urgent."""

    __slots__ = ("_notify",)

    def __init__(self, asking: Caller, notify: Callable[[], None]) -> None:
        super().__init__(urgent=asking.urgent)
        self._notify = notify

    def raise_priority(self) -> None:
        if not self.urgent:
            super().raise_priority()
            self._notify()


class _ServerConnection:
    """A worker's connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader, self._writer = reader, writer
        self._regions = MappedRegions(pid)
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.is_lost = False

    async def listen(self) -> None:
        """Take answers until the server has ended."""
        try:
            while (message := await _read(self._reader)) is not None:
                number, is_good, value = message
                future = self._asked.pop(number, None)
                if future is None or future.done():
                    if isinstance(value, _Loan):  # its caller was cancelled
                        self._send("gone", [value.name])
                elif is_good:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        finally:
            self.is_lost = True
            self._writer.close()
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(_LostError())

    async def ask(self, verb: str, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """The server's answer; _LostError if the server has ended."""
        self.give_back()
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        asking = current_caller()
        caller = _RemoteCaller(asking, partial(self._send, "raise_priority", number))
        asking.carried_by(caller)
        self._send("ask", number, caller.urgent, verb, arguments)
        try:
            return await future
        except asyncio.CancelledError:
            self._asked.pop(number, None)
            self._send("cancel", number)
            raise
        finally:
            caller.urgent = True  # which sends nothing from now on

    def view(self, lent: _Loan) -> memoryview | None:
        """The lent bytes; None if they can't be mapped: the server has ended, or /proc hides its files."""
        if lent.place is None:
            self._send("gone", [lent.name])
            return memoryview(bytearray())
        try:
            return self._regions.view(lent.place, lent.name)
        except OSError:
            self._send("gone", [lent.name])
            return None

    def give_back(self) -> None:
        """Give back clips of which this process has no view."""
        if names := self._regions.gone():
            self._send("gone", names)

    def give_back_soon(self) -> None:
        """Give back, once the caller has dropped its view."""
        asyncio.get_running_loop().call_soon(self.give_back)

    def _send(self, *message: object) -> None:
        if not self.is_lost:
            _write(self._writer, message)


class RankReader(RangeByRange):
    """A RangeReader that reads as one with others of its name, which only the rank's loader workers know.

    Use it as an async context manager. ``open_reader`` opens the server's source, within the rank's limits. The bounds
    are for the clips lent and kept, over all workers, and for other answers kept.
    """

    def __init__(
        self,
        name: str,
        open_reader: Callable[[], AbstractAsyncContextManager[RangeReader]],
        *,
        clips_bytes: int,
        small_bytes: int,
        workers: int,
    ) -> None:
        self._address = f"\0asyncfetch-{name}"
        self._open_reader = open_reader
        self._clips_bytes, self._small_bytes, self._workers = clips_bytes, small_bytes, workers
        self._connecting = anyio.Lock()
        self._connection: _ServerConnection | None = None
        self._infos: dict[str, ObjectInfo] = {}
        self._closed = False
        self.clips: ByteCache | None = None
        """The clips of all workers, if this is the server."""

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._closed = True
        await end_tasks(self._group)

    # The server, in the first worker.

    async def _serve(self, listener: socket.socket) -> None:
        regions = Regions()
        loop = asyncio.get_running_loop()
        with listener:
            async with (
                self._open_reader() as reader,
                ByteCache(reader, max_bytes=self._clips_bytes, allocate=regions.allocate) as clips,
                anyio.create_task_group() as group,
            ):
                server = _Server(reader, clips, regions, small_bytes=self._small_bytes, workers=self._workers)
                self.clips = clips
                try:
                    while True:
                        connection, _ = await loop.sock_accept(listener)
                        group.start_soon(server.attend, connection)
                finally:
                    regions.close()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("this reader is closed")

    async def _connected(self) -> _ServerConnection:
        self._check()
        async with self._connecting:
            while self._connection is None or self._connection.is_lost:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> _ServerConnection | None:
        """A connection to the server. None without a server: then this becomes it, unless another worker was first."""
        connection = _unix_socket()
        try:
            await asyncio.get_running_loop().sock_connect(connection, self._address)
            pid = _check_peer(connection)
            reader, writer = await asyncio.open_unix_connection(sock=connection)
        except ConnectionRefusedError:
            connection.close()
            self._become_server()
            return None
        except BaseException:
            connection.close()
            raise
        server = _ServerConnection(reader, writer, pid)
        self._group.start_soon(server.listen)
        return server

    def _become_server(self) -> None:
        listener = _unix_socket()
        try:
            listener.bind(self._address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return
        self._group.start_soon(self._serve, listener)

    # A worker.

    async def lease(self, url: str, start: int, stop: int, *, header: bytes = b"") -> Lease | None:
        """A lease like ``ByteCache.acquire``'s, in common memory; None if there is no room, or it can't be mapped."""
        wanted = ByteRange(url, start, stop)
        server, loan = await self._ask(url, "lease", wanted.url, wanted.start, wanted.stop, header)
        buffer = None if loan is None else server.view(loan)
        if buffer is None:
            return None
        self._note(url, loan.info)
        return Lease(CacheKey.of(wanted, header), buffer, server.give_back_soon)

    async def _read(self, url: str, verb: Callable[..., Awaitable[T]], *arguments: object) -> T:
        _, answer = await self._ask(url, verb.__name__, *arguments)
        self._note(url, answer.info)
        value: T = pickle.loads(answer.pickled)
        return value

    async def _ask(self, url: str, verb: str, *arguments: object) -> tuple[_ServerConnection, Any]:
        """The server, and its answer."""
        while True:
            server = await self._connected()
            try:
                return server, await server.ask(verb, arguments)
            except _LostError:
                continue
            except ObjectChanged:
                self._infos.pop(url, None)
                raise

    def _note(self, url: str, info: ObjectInfo | None) -> None:
        known = self._infos.get(url)
        if info is None:
            return
        if known is not None and (changed := difference(known, info)) is not None:
            del self._infos[url]
            raise ObjectChanged(f"the object was replaced while it was being read: {changed}", url=url)
        if known is None or known.version is None:
            self._infos[url] = info

    def known(self, url: str) -> ObjectInfo | None:
        """The version that bytes of the object have; None before the first."""
        return self._infos.get(url)

    async def stat(self, url: str) -> ObjectInfo:
        """Size and version of the object."""
        return await self._read(url, RangeReader.stat, url)

    async def _fetch_range(self, wanted: ByteRange) -> memoryview:
        return await self._read(wanted.url, RangeReader.fetch, wanted.url, wanted.start, wanted.stop)

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size and version of the object and its first ``min(max_bytes, size)`` bytes."""
        return await self._read(url, RangeReader.fetch_head, url, max_bytes)

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size and version of the object and its last ``min(max_bytes, size)`` bytes."""
        return await self._read(url, RangeReader.fetch_tail, url, max_bytes)

    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo | None:
        """``fetch_into`` that returns the version; no ``version`` can be required, since caches are below this."""
        assert version is None
        await self.fetch_into(url, start, stop, buffer)
        return self.known(url)

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        """All ranges, in input order."""
        wanted = tuple(byte_ranges(ranges))
        return await self._read(wanted[0].url, RangeReader.fetch_many, wanted) if wanted else []


def _check_peer(connection: socket.socket) -> int:
    """Id of the process at the other end. WorkerError if it is another user's, since its messages are unpickled."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise WorkerError(f"what answers as the reader of this rank's workers is a process of another user ({uid=})")
    return int(pid)


def _open_process(pid: int) -> int | None:
    """A descriptor, readable at the end of the process; None in a sandbox. ProcessLookupError if it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


async def _ended(process: int | None) -> None:
    """Wait until the process has ended; for ever without a descriptor."""
    if process is None:
        return await anyio.sleep_forever()
    loop, ended = asyncio.get_running_loop(), anyio.Event()
    loop.add_reader(process, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process)


async def _read(reader: asyncio.StreamReader) -> Any:  # noqa: ANN401
    """The next message; None at the end."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _write(writer: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    with among_own_processes():
        try:
            data = pickle.dumps(message)
        except Exception as error:  # noqa: BLE001  a foreign exception that can't be pickled
            data = pickle.dumps((message[0], False, WorkerError(f"{type(error).__name__}: {message[-1]}")))
    if not writer.is_closing():
        writer.writelines((_LENGTH.pack(len(data)), data))

"""The fetcher: the verbs, and what they share."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import anyio

from asyncfetch.config import FetchConfig
from asyncfetch.errors import (
    ClosedError,
    ConfigError,
    FetchError,
    NotFound,
    ObjectChanged,
    WrongLoop,
    about_range,
    is_redacted,
    redact_url,
)
from asyncfetch.fetch.batch import WORKERS_PER_REQUEST, RangeStream, for_each, plan_batch, server_asked, through
from asyncfetch.fetch.download import Download
from asyncfetch.fetch.hosts import MIN_TELLING_BYTES, Hosts
from asyncfetch.fetch.objects import MAX_KNOWN_OBJECTS, ObjectMemory, difference
from asyncfetch.fetch.range_reader import RangeAssembler, concerns_some
from asyncfetch.fetch.reader import byte_count, byte_ranges, closed_range
from asyncfetch.fetch.responses import WantedRange
from asyncfetch.fetch.retry import AttemptFailed, Clock, retried
from asyncfetch.fetch.transports.file import FileTransport
from asyncfetch.fetch.transports.fsspec import FsspecTransport
from asyncfetch.fetch.transports.http import WEB_URLS, HttpTransport
from asyncfetch.fetch.transports.hub import HubTransport
from asyncfetch.fetch.transports.s3 import S3Transport
from asyncfetch.fetch.upload_sources import open_source
from asyncfetch.ranges import ByteRange, ObjectInfo
from asyncfetch.runtime.concurrently import gather
from asyncfetch.runtime.fork import AsyncOnly, running_loop
from asyncfetch.runtime.memory_pool import MAX_IDLE_BUFFER_BYTES, MemoryPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

    from asyncfetch.fetch.buffers import Target
    from asyncfetch.fetch.reader import WritableBuffer
    from asyncfetch.fetch.statistics import FetchStatistics
    from asyncfetch.fetch.transports.http import Response
    from asyncfetch.fetch.upload_sources import Content
    from asyncfetch.ranges import Request

DOWNLOAD_PIECE_BYTES = 64 * 1024 * 1024
"""Of an object that is downloaded: enough that its parts fill a link, and what is held of it."""
MAX_URLS = 1024
"""Urls whose transport is remembered."""
FILE_THREADS = 16
"""Threads that read local files; NVMe disks are saturated by fewer."""

WritableTransport = FileTransport | S3Transport
"""One way to reach objects that can be put and deleted."""


class Transport(Protocol):
    """One way to reach objects."""

    def attempt(self, download: Download, failure: AttemptFailed | None) -> Awaitable[None]:
        """Bring what the download lacks. ``failure`` is that of the attempt before; None for the first one."""
        ...

    async def listdir(self, url: str) -> list[ObjectInfo]:
        """The entries of a directory, as Fetcher.listdir gives them."""
        ...


class Transports:
    """All ways. Belongs to the loop that opened it."""

    def __init__(self, config: FetchConfig, hosts: Hosts, clock: Clock, http: HttpTransport) -> None:
        """Takes over ``http``; use ``open``."""
        self.http = http
        self.files = FileTransport(hosts, FILE_THREADS, max_entries=config.max_listed_entries)
        self._s3 = S3Transport(config, http, clock)
        self._hub = HubTransport(config, http, clock)
        self._others = FsspecTransport(config, hosts, clock)
        self.of_string = lru_cache(MAX_URLS)(self._find)
        """The same as ``of`` for what is known to be a string."""

    @classmethod
    async def open(cls, config: FetchConfig, hosts: Hosts, clock: Clock, *, by_session: bool) -> Self:
        """All ways on the running loop; ConfigError where ``ca_file`` or the environment can't be read."""
        return cls(config, hosts, clock, await HttpTransport.open(config, hosts, clock, by_session=by_session))

    async def aclose(self) -> None:
        """Closes every connection, without waiting for any server. Nothing may be under way."""
        self._others.close()
        await self._s3.aclose()
        await self.http.aclose()

    def of(self, url: str) -> Transport:
        """The way to ``url``; ConfigError where there is none."""
        if not isinstance(url, str):
            raise ConfigError(f"a url or path must be a string, not of type {type(url).__name__}: str(path) makes one")
        return self.of_string(url)

    def _find(self, url: str) -> Transport:
        scheme, separator, _ = url.partition("://")
        if not separator:
            return self.files
        if is_redacted(url):
            raise ConfigError(
                f"{url!r} has lost its password or signature, as a url does in a message and when it is pickled: use it"
                " as it was. Only a process that multiprocessing starts gets it whole, such as a loader's worker"
            )
        match scheme.lower():
            case "file":
                return self.files
            case "http" | "https":
                return self.http
            case "s3":
                return self._s3
            case "hf":
                return self._hub
            case "":
                raise ConfigError(f"{redact_url(url)!r} has no scheme in front of its ://")
            case _:
                return self._others

    async def endpoint(self, url: str) -> str:
        """The store that the object lies in, where its transport is configured with one; else empty."""
        transport = self.of(url)
        return await transport.endpoint(url) if isinstance(transport, S3Transport | HubTransport) else ""

    def writable(self, url: str, verb: str) -> WritableTransport:
        """The way to ``url`` for ``verb``, which writes; ConfigError where there is none."""
        transport = self.of(url)
        if not isinstance(transport, WritableTransport):
            message = f"{redact_url(url)!r} can't be written: {verb} takes s3:// and file:// urls and plain paths"
            raise ConfigError(message)
        return transport


_EMPTY = memoryview(b"")

T = TypeVar("T")


class Fetcher(AsyncOnly):
    """Reads byte ranges of objects on web servers, S3, the Hugging Face Hub, local disks and what else fsspec knows.

    It writes whole objects, to S3 and local disks: ``put``, ``delete``.

    Urls are ``http://``, ``https://``, ``s3://bucket/key``, ``hf://datasets/org/name@revision/path``,
    ``hf://buckets/org/name/path``, ``file://`` and plain paths; every other scheme is fsspec's.

    Offers the verbs of RangeReader, whose docstrings are their contracts. What calls made in one turn of the loop ask
    for comes by shared requests where that saves some; each call has errors and cancellation of its own, and memory
    that it shares with calls for just the same range at most. A long range comes in parts, side by side.

    The first version seen of an object is insisted on from then on: when it is replaced, a call raises ObjectChanged,
    once, and the next one starts afresh.

    Use it as ``async with Fetcher() as fetcher``. Leaving the block ends calls under way in other tasks with
    ClosedError, awaits them and closes every connection.

    Not thread-safe and not fork-safe: it belongs to the event loop that entered it, and raises WrongLoop in any other
    and in a forked child.
    """

    def __init__(
        self,
        config: FetchConfig | None = None,
        *,
        _clock: Clock | None = None,
        _memory: MemoryPool | None = None,
        _max_known_objects: int = MAX_KNOWN_OBJECTS,
        _by_session: bool = False,
    ) -> None:
        """``config`` None means FetchConfig(), the defaults."""
        self.config = FetchConfig() if config is None else config
        if not isinstance(self.config, FetchConfig):
            raise ConfigError(f"config must be a FetchConfig or None, not of type {type(config).__name__}")
        self._clock = _clock or Clock()
        self._hosts = Hosts(self.config, self._clock)
        self._objects = ObjectMemory(_max_known_objects)
        self._memory = _memory or MemoryPool(MAX_IDLE_BUFFER_BYTES)
        self._assembly = RangeAssembler(self.config, self._objects, self._memory, self._read)
        self._by_session = _by_session  # for tests: aiohttp's session asks for all
        self._calls: dict[object, asyncio.Task[object]] = {}
        """The tasks of the calls under way."""
        self._state = "new"
        self._pid = -1

    async def __aenter__(self) -> Self:
        """Binds the fetcher to the running loop; ConfigError where ``ca_file`` or the environment can't be read."""
        if self._state != "new":
            raise ClosedError(f"this Fetcher is {self._state}; it can be entered once: make another one")
        self._loop = running_loop("a Fetcher")
        self._state = "open"
        self._pid = os.getpid()
        self._last_call_left = anyio.Event()
        try:
            self._transports = await Transports.open(self.config, self._hosts, self._clock, by_session=self._by_session)
        except BaseException:
            self._state = "closed"
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._state = "closed"
        self._memory.close()
        if os.getpid() != self._pid:
            return  # the parent's connections; a child must not touch them
        for task in self._calls.values():
            task.cancel(getattr(task, "_cancel_message", None))  # by which anyio knows its own, if two come as one
        with anyio.CancelScope(shield=True):
            if self._calls:
                await self._last_call_left.wait()
            await self._transports.aclose()
        self._hosts.settle()

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<Fetcher {self._state}: {now.in_flight} in flight, {now.waiting} waiting, {now.requests} requests,"
            f" {now.bytes} bytes, {now.retries} retries, {now.errors} errors, {len(now.hosts)} hosts>"
        )

    def statistics(self) -> FetchStatistics:
        """A frozen snapshot, at any time and in any thread, also after closing. It takes about 0.1 ms a host."""
        return self._hosts.statistics(self._memory.statistics())

    async def stat(self, url: str) -> ObjectInfo:
        """Size and version of the object.

        Asks for the first byte rather than HEAD: urls signed for GET refuse that, and some servers lie in its answer.
        """
        info, _ = await self._read(url, WantedRange(0, 1, clamp=True))
        return info

    async def fetch(self, url: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Bytes [start, stop) of the object, read-only.

        Without a ``stop`` they come by one request, on one stream, however many they are: parts side by side, and
        sharing requests with other calls, take a range whose end is known when it is asked for. Give the ``stop``
        where an object is long; ``stat`` has its size.
        """
        if self._state != "open" or asyncio._get_running_loop() is not self._loop:
            self._check()
        wanted = ByteRange(url, start, stop)
        if wanted.start == wanted.stop:
            self._transports.of(url)
            return _EMPTY
        try:
            _, view = await self._assembly.fetch(wanted)
        except NotFound as error:  # most often a typing error: the way to it tells nothing
            raise error.with_traceback(None) from error.__cause__
        return view

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size and version of the object and its first ``min(max_bytes, size)`` bytes, in one request."""
        max_bytes = byte_count(max_bytes)
        if max_bytes == 0:
            return await self.stat(url), _EMPTY
        return await self._read(url, WantedRange(0, max_bytes, clamp=True))

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """Size and version of the object and its last ``min(max_bytes, size)`` bytes, in one request."""
        max_bytes = byte_count(max_bytes)
        if max_bytes == 0:
            return await self.stat(url), _EMPTY
        return await self._read(url, WantedRange(-max_bytes, None))

    async def fetch_into(self, url: str, start: int, stop: int, buffer: WritableBuffer) -> None:
        """Bytes [start, stop) into the caller's buffer of just that length."""
        await self._fetch(*closed_range(url, start, stop, buffer))

    def known(self, url: str) -> ObjectInfo | None:
        """Return what was seen first of the object and is insisted on; None where nothing was, or it is forgotten."""
        return self._objects.get(url)

    async def endpoint(self, url: str) -> str:
        """Return the store that the object lies in, where neither url nor scheme says it: see EndpointReader."""
        self._check()
        return await self._call(url, self._transports.endpoint(url))

    async def read_into(
        self, url: str, start: int, stop: int, buffer: WritableBuffer, *, version: ObjectInfo | None = None
    ) -> ObjectInfo:
        """Read as ``fetch_into``; return the version that all of the bytes are of. See VersionedReader."""
        self._check()
        wanted, view = closed_range(url, start, stop, buffer)
        if version is None:
            info, _ = await self._assembly.fetch(wanted, view)
            return info
        await self._assembly.fetch_version(wanted, version, view)
        return version

    async def fetch_many(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        """All ranges, in input order; equal ranges are fetched once and share a view.

        Ranges that lie near each other come by one request (``max_gap_bytes``, ``max_span_bytes``), each in memory of
        its own. An error of such a request names the first of them, but RangeNotSatisfiable the one that it is about.
        """
        self._check()
        wanted = byte_ranges(ranges)
        views: dict[ByteRange, memoryview] = {}

        async def work(request: Request) -> None:
            views.update(await self._answer(request))

        await for_each(await self._plan(wanted), work, key=server_asked, workers=self._workers)
        return await through(len(wanted), lambda: [views[one] for one in wanted])

    def fetch_stream(self, ranges: Iterable[ByteRange]) -> RangeStream:
        """(index in ``ranges``, whole range) pairs as they arrive.

        Asked for as ``fetch_many`` does. Ranges of one server are asked for in their order, those of different servers
        don't wait for each other. What has arrived and is not taken yet holds up what comes after it.
        """
        self._check()
        wanted = byte_ranges(ranges)
        return RangeStream(wanted, self._plan, self._answer, key=server_asked, workers=self._workers)

    async def listdir(self, url: str, *, recursive: bool = False) -> list[ObjectInfo]:
        """The entries of a directory or prefix, sorted by name; with ``recursive`` all files below it, by url.

        A sub-directory has size 0 and a url that ends in "/". What is neither file nor directory is left out. All
        entries are held: FetchError where there are more than ``max_listed_entries``. Plain web servers have no
        listings: ConfigError.
        """
        self._check()
        entries = await self._call(url, self._transports.of(url).listdir(url))
        if not recursive:
            return entries
        files: list[ObjectInfo] = []
        while entries:
            directories = [entry.url for entry in entries if entry.url.endswith("/")]
            files += [entry for entry in entries if not entry.url.endswith("/")]
            if len(files) + len(directories) > self.config.max_listed_entries:
                message = f"there are more than max_listed_entries={self.config.max_listed_entries} files: raise that"
                raise FetchError(message, url=url)
            levels = await gather(*(partial(self._below, directory) for directory in directories))
            entries = [entry for level in levels for entry in level]
        return sorted(files, key=lambda file: file.url)

    async def _below(self, directory: str) -> list[ObjectInfo]:
        try:
            return await self.listdir(directory)
        except NotFound:  # its last file was deleted since it was listed
            return []

    async def download(self, url: str, path: str | os.PathLike[str]) -> ObjectInfo:
        """Copy an object to a local file, or to another object that ``put`` can write: whole or not at all.

        It is read by ranges of 64 MiB, each of which comes in parts side by side, and never held as a whole.

        Returns:
            Size and version of the object that was read.

        Raises:
            ConfigError: ``path`` can't be written.
            FetchError: It could not be read or written. ObjectChanged where it was replaced meanwhile.
        """
        info = await self.stat(url)

        async def pieces() -> AsyncIterator[memoryview]:
            for start in range(0, info.size, DOWNLOAD_PIECE_BYTES):
                yield await self.fetch(url, start, min(start + DOWNLOAD_PIECE_BYTES, info.size))

        await self.put(os.fspath(path), pieces())
        return info

    async def put(self, url: str, source: Content) -> ObjectInfo:
        """Writes the source to the object, in place of what is there: whole or, after an error, not at all.

        A local file is written beside its place, brought to the disk and renamed; directories above it are made, and
        stay. An object of S3 takes one request, or a multipart upload where it is longer than
        ``S3Config.upload_part_bytes``; the store checks each part's MD5, and its tags are compared with that.

        Every request is repeated as the retry policy says. An error or a cancellation removes what was begun, for
        which a cancelled call may take some seconds more. What other fetchers and caches have of the object stays
        there; this fetcher takes the new version for the first one it sees.

        Args:
            url: An object of ``s3://``, or a local file: ``file://`` or a plain path.
            source: Bytes, left as they are until this returns; the path of a local file; or an async iterator of bytes,
                each of which may be used again when the next one is asked for. It is iterated in the calling task, and
                not closed. Its own errors come out as they are.

        Returns:
            Size and version of the object that was written.

        Raises:
            ConfigError: Urls of this scheme can't be written, or ``source`` is none.
            FetchError: As for reading.
        """
        self._check()
        return await self._call(url, self._put(self._transports.writable(url, "put"), url, source), doing="wrote")

    async def delete(self, url: str) -> None:
        """Removes the object, or the local file.

        Args:
            url: As ``put`` takes it.

        Raises:
            ConfigError: Urls of this scheme can't be written.
            FetchError: As for reading. NotFound for a local file that isn't there; S3 doesn't tell.
        """
        self._check()
        try:
            await self._call(url, self._transports.writable(url, "delete").delete(url), doing="deleted")
        finally:
            self._objects.forget(url)

    async def _put(self, transport: WritableTransport, url: str, content: Content) -> ObjectInfo:
        async with open_source(content, self._memory, self._transports.files.limiter) as source:
            try:
                return await transport.put(url, source)
            finally:
                self._objects.forget(url)

    @property
    def _workers(self) -> int:
        return WORKERS_PER_REQUEST * self.config.max_requests_per_host

    async def _plan(self, ranges: Sequence[ByteRange]) -> list[Request]:
        return await through(len(ranges), partial(plan_batch, ranges, self.config))

    async def _answer(self, request: Request) -> dict[ByteRange, memoryview]:
        """Return what a request serves, each range in memory of its own."""
        first = request.serves[0]
        if len(request.serves) == 1:
            return {first: await self._fetch(first)}
        try:
            return await self._assembly.fetch_all(request)
        except FetchError as error:
            if not concerns_some(error):
                raise about_range(error, first.start, first.stop) from error.__cause__
        return await self._assembly.fetch_apart(request)

    async def _fetch(self, wanted: ByteRange, buffer: memoryview | None = None) -> memoryview:
        """Any range, into ``buffer`` where there is one."""
        self._check()
        if wanted.start == wanted.stop:
            self._transports.of(wanted.url)
            return _EMPTY
        _, view = await self._assembly.fetch(wanted, buffer)
        return view

    async def _read(
        self,
        url: str,
        wanted: WantedRange,
        buffer: Target | None = None,
        *,
        asked: WantedRange | None = None,
        part_of: ObjectInfo | None = None,
    ) -> tuple[ObjectInfo, memoryview]:
        """One range through the transport of its url, which isn't empty; the other arguments are Download's."""
        if self._state != "open":  # since the call began
            self._check()
        download = Download(url, wanted, self._objects, self._memory, buffer, asked=asked, part_of=part_of)
        transport = self._transports.of_string(url) if type(url) is str else self._transports.of(url)
        began, task = self._clock.monotonic(), asyncio.current_task()
        assert task is not None
        self._calls[download], cancelled_before = task, task.cancelling()
        is_cancelled, rest = False, None
        try:
            try:
                await transport.attempt(download, None)
            except AttemptFailed as failure:
                rest = retried(
                    self.config.retry, self._clock, url, partial(transport.attempt, download), download.keep_landed,
                    span=(download.asked.start, download.asked.stop), first=(began, failure),
                )  # fmt: skip
            if rest is not None:  # not in the handler, whose failure would be the context of what is raised
                await rest
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            del self._calls[download]
            if self._state == "closed":
                self._left(task, cancelled_before, url, "read", is_cancelled=is_cancelled)
        if download.host is not None and (download.landed_bytes >= MIN_TELLING_BYTES or download.is_first):
            self._assembly.parts.came_from(url, download.host, download.landed_bytes)
        return download.result()

    async def _call(self, url: str, work: Awaitable[T], *, doing: str = "read") -> T:
        """Return what ``work`` returns; ClosedError where the fetcher is closed before that."""
        task = asyncio.current_task()
        assert task is not None
        self._calls[work], cancelled_before = task, task.cancelling()
        is_cancelled = False
        try:
            return await work
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            del self._calls[work]
            if self._state == "closed":
                self._left(task, cancelled_before, url, doing, is_cancelled=is_cancelled)

    def _left(
        self, task: asyncio.Task[object], cancelled_before: int, url: str, doing: str, *, is_cancelled: bool
    ) -> None:
        """Take back the cancellation by which the fetcher has ended a call; ClosedError where there was no other."""
        if not self._calls:
            self._last_call_left.set()
        if task.uncancel() <= cancelled_before and is_cancelled:
            raise ClosedError(f"the Fetcher was closed while it {doing} {redact_url(url)}") from None

    def _check(self) -> None:
        if self._state != "open":
            raise ClosedError(f"this Fetcher is {self._state}: use it within its async with block")
        if asyncio._get_running_loop() is not self._loop:  # none runs in a child that a task of ours has forked
            if os.getpid() != self._pid:
                raise WrongLoop("this Fetcher was entered before the process forked: make one in the child")
            raise WrongLoop("this Fetcher was entered on another event loop: make one per loop")


def insist_on(fetcher: Fetcher, version: ObjectInfo) -> None:
    """Take what another fetcher has seen of an object for what this one saw of it first. Sends no request.

    After an ObjectChanged that is forgotten, too, and may be once ``MAX_KNOWN_OBJECTS`` others were read: a
    caller that goes on with another's plan says it again for each read.

    Raises:
        ObjectChanged: Another version was seen first.
    """
    objects = fetcher._objects
    objects.remember(version)
    known = objects.get(version.url)
    changed = difference(version, known) if known is not None else None
    if changed is not None:
        message = f"the object was changed since another reader saw it, {changed}: read it again from its start"
        raise ObjectChanged(message, url=version.url)


async def ask_server(
    fetcher: Fetcher,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Callable[[], Iterable[bytes | memoryview]] | None = None,
) -> Response:
    """Return a web server's answer to what isn't a question for an object's bytes, read whole; for the rooms above.

    Sent again as the retry policy says, so it must be a request that may arrive twice.

    Args:
        fetcher: Entered.
        method: Of HTTP.
        url: Of http or https.
        headers: Beside the engine's own; ``Content-Length`` where there is a body.
        body: Gives the pieces of what is sent along, afresh for each attempt.

    Raises:
        FetchError: No answer, or one of 400 or above.
    """
    fetcher._check()
    http = fetcher._transports.http
    if fetcher._transports.of(url) is not http:
        raise ConfigError(f"{method} is for urls of http and https, not {redact_url(url)!r}")

    async def attempt(_: object) -> Response:
        address = await WEB_URLS.resolve(url)
        address = replace(address, headers={**address.headers, **(headers or {})})
        return await http.ask(method, address, WEB_URLS, body=body)

    return await fetcher._call(url, retried(fetcher.config.retry, fetcher._clock, url, attempt))

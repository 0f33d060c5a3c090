"""Many ranges over a link that is slow for each of them: how close the engine comes to what such a link allows.

    python -m bench.slow_link               1,000 ranges of 256 KiB, 128 at a time, 4 MiB/s after 100 ms; half a minute
    python -m bench.slow_link --plain                   the same over plain HTTP
    python -m bench.slow_link --mib-per-second 1        the same where a turn's bytes come over a quarter of a second

The ideal is that no range takes longer than one that comes alone: ceil(ranges / concurrency) times that. Server and
client share the machine's cores, and all ranges of a turn come at the same moment: at 512 MiB/s, most of two cores with
TLS, which both sides are busy with. Over plain HTTP it is much less, and latency counts alone. The server is one that
makes up for what it is late (bench/nginx.py); with nginx's own limit_rate, where each delay puts off all that comes
behind it, no client came above 0.88. And a bare client is measured beside the engine, which knows one server, one path
and one length and checks nothing. Where that one misses the ideal, so much of what is missing isn't the engine's: what
the engine itself makes of the link is the bare client's time over its own. The cores are looked at every 50 ms
meanwhile, to see whether it is they that don't allow more. All take turns at one nginx, over connections that are there
before.

Ranges are asked for in two ways. A consumer that takes each as it comes and lets go of it, which is what a stream of
samples does, has ``fetch_stream``; the bare client then reads into the same memory again and again. Who keeps them all
has ``fetch_many``, and 250 MiB of memory in the end, most of it fresh from the system; the bare client then allocates
what each range lands in.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

import anyio
import numpy as np

import asyncfetch as af
from bench.nginx import NginxServer

__all__ = ["BareClient", "BareConnection", "SlowLink", "measure_slow_link"]

KIB, MIB = 1024, 1024**2
STEP_BYTES = 4 * KIB
"""From one range's start to the next one's: they overlap, so that a small object holds them all."""
PIECE_BYTES = 32 * KIB
"""That the server sends at a time: a range of 256 KiB is to come evenly."""
BARE = "bare asyncio"
KEPT = ", all kept"
LOOK_SECONDS = 0.05
MAX_HEAD_BYTES = 4 * KIB
"""nginx's has 0.3 KiB."""


@dataclass(frozen=True)
class SlowLink:
    """One client over such a link: medians over the repeats."""

    client: str
    tls: bool
    ranges: int
    concurrency: int
    alone_seconds: float
    """Of one range at a time."""
    all_seconds: float
    """Of all of them."""
    share_of_ideal: float
    """ceil(ranges / concurrency) times the one, over the other."""
    share_of_bare: float
    """``all_seconds`` of the bare client that does the same with what comes, over these."""
    full_cores_share: float
    """Of the time that all of them took: while no core had anything left, whoever used them."""

    def __str__(self) -> str:
        return (
            f"slow link, {'TLS' if self.tls else 'plain'}, {self.client}: {self.ranges} ranges,"
            f" {self.concurrency} at a time,"
            f" in {self.all_seconds:.2f} s; one alone takes {self.alone_seconds:.3f} s:"
            f" {self.share_of_ideal:.3f} of the ideal, {self.share_of_bare:.3f} of the bare client;"
            f" all cores full for {self.full_cores_share:.0%} of it"
        )


class BareConnection(asyncio.BufferedProtocol):
    """Asks for one range at a time."""

    def __init__(self, path: str, range_bytes: int) -> None:
        self._request = f"GET {path} HTTP/1.1\r\nHost: bench\r\nRange: bytes={{}}-{{}}\r\n\r\n"
        self._range_bytes = range_bytes
        self._memory = self._new_memory()
        self._filled = 0
        self._expected = 0  # head and body; 0 until the head is whole
        self._answered: asyncio.Future[None] | None = None

    def _new_memory(self) -> memoryview:
        return np.empty(MAX_HEAD_BYTES + self._range_bytes, np.uint8).data

    def ask(self, start: int) -> asyncio.Future[None]:
        """Done when the range that begins there is in memory, in place of the last one."""
        self._filled = self._expected = 0
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(self._request.format(start, start + self._range_bytes - 1).encode())
        return self._answered

    def take(self) -> memoryview:
        """Head and body of what was asked for last. The next range gets memory of its own."""
        taken, self._memory = self._memory[: self._expected], self._new_memory()
        return taken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Behind what has come."""
        return self._memory[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """More has come."""
        self._filled += nbytes
        if not self._expected:
            head, end, _ = bytes(self._memory[: min(self._filled, MAX_HEAD_BYTES)]).partition(b"\r\n\r\n")
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 206 "):
                self.transport.abort()
                return
            self._expected = len(head) + len(end) + self._range_bytes
        if self._filled >= self._expected and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """It answers nothing any more."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionError("nginx closed the connection, or didn't answer 206"))


class BareClient:
    """Fetches ranges of one length from one url over so many connections, and does nothing else.

    ``async with BareClient(...) as client: await client.fetch_all(starts)``. A range that doesn't come is an OSError.
    """

    def __init__(self, server: NginxServer, name: str, *, range_bytes: int, concurrency: int) -> None:
        self._server, self._path = server, f"/{name}"
        self._range_bytes, self._concurrency = range_bytes, concurrency
        self._connections: list[BareConnection] = []

    async def __aenter__(self) -> Self:
        host, _, port = self._server.url.partition("://")[2].partition(":")
        context = ssl.create_default_context(cafile=self._server.ca_file) if self._server.ca_file else None
        loop = asyncio.get_running_loop()
        for _ in range(self._concurrency):
            _, connection = await loop.create_connection(
                lambda: BareConnection(self._path, self._range_bytes), host, int(port), ssl=context
            )
            self._connections.append(connection)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for connection in self._connections:
            connection.transport.abort()

    async def fetch_each(self, starts: Sequence[int]) -> None:
        """The ranges that begin there, each connection the next one as soon as it is free. None is kept."""
        await self._ask_all(starts, lambda _: None)

    async def fetch_all(self, starts: Sequence[int]) -> list[memoryview]:
        """The same, each range in memory of its own, behind its head. In no order."""
        fetched: list[memoryview] = []
        await self._ask_all(starts, lambda connection: fetched.append(connection.take()))
        return fetched

    async def _ask_all(self, starts: Sequence[int], came: Callable[[BareConnection], None]) -> None:
        waiting = iter(starts)

        async def work(connection: BareConnection) -> None:
            for start in waiting:
                await connection.ask(start)
                came(connection)

        async with anyio.create_task_group() as group:
            for connection in self._connections[: len(starts)]:
                group.start_soon(work, connection)


def measure_slow_link(
    directory: Path,
    *,
    repeats: int,
    ranges: int = 1_000,
    range_bytes: int = 256 * KIB,
    concurrency: int = 128,
    first_byte_seconds: float = 0.1,
    bytes_per_second: float = 4 * MIB,
    tls: bool = True,
) -> list[SlowLink]:
    """In turn, in each repeat: the engine with its limit fixed, as it is by default, the bare client; each both ways.

    Args:
        directory: The object is written there.
        repeats: Of all ranges; three times as many of one alone.
        ranges: How many.
        range_bytes: Of each.
        concurrency: How many at a time.
        first_byte_seconds: From a request's arrival to its answer.
        bytes_per_second: Of each answer.
        tls: Whether the server speaks TLS.
    """
    starts = range(0, ranges * STEP_BYTES, STEP_BYTES)
    (directory / "link").write_bytes(bytes(starts[-1] + range_bytes))
    with NginxServer(
        directory,
        tls=tls,
        first_byte_seconds=first_byte_seconds,
        bytes_per_second=bytes_per_second,
        piece_bytes=PIECE_BYTES,
    ) as server:
        by_default = af.FetchConfig(ca_file=server.ca_file, max_requests_per_host=concurrency, trust_env=False)
        fixed = af.FetchConfig(
            ca_file=server.ca_file,
            max_requests_per_host=concurrency,
            learn_limit=False,
            hedge=None,
            max_span_bytes=0,
            trust_env=False,
        )

        async def measure() -> dict[str, _Measured]:
            async with AsyncExitStack() as stack:
                clients: dict[str, _Fetch] = {}
                for name, config in (("asyncfetch", fixed), ("asyncfetch by default", by_default)):
                    fetcher = await stack.enter_async_context(af.Fetcher(config))
                    client = _EngineClient(fetcher, f"{server.url}/link", range_bytes)
                    clients |= {name: client.fetch_each, name + KEPT: client.fetch_all}
                bare = BareClient(server, "link", range_bytes=range_bytes, concurrency=concurrency)
                await stack.enter_async_context(bare)
                clients |= {BARE: bare.fetch_each, BARE + KEPT: bare.fetch_all}
                return await _measure(clients, starts, repeats=repeats)

        measured = anyio.run(measure)
    turns = math.ceil(ranges / concurrency)
    links = []
    for name, of_client in measured.items():
        one, all_of_them = statistics.median(of_client.alone), statistics.median(of_client.everything)
        bare_seconds = statistics.median(measured[BARE + KEPT if name.endswith(KEPT) else BARE].everything)
        links.append(
            SlowLink(
                client=name,
                tls=tls,
                ranges=ranges,
                concurrency=concurrency,
                alone_seconds=one,
                all_seconds=all_of_them,
                share_of_ideal=turns * one / all_of_them,
                share_of_bare=bare_seconds / all_of_them,
                full_cores_share=statistics.median(of_client.full_cores),
            )
        )
    return links


@dataclass
class _Measured:
    """Of one client, a figure a repeat."""

    alone: list[float]
    everything: list[float] = field(default_factory=list)
    full_cores: list[float] = field(default_factory=list)


_Fetch = Callable[[Sequence[int]], Awaitable[object]]


class _EngineClient:
    """Fetches ranges of one length from one url."""

    def __init__(self, fetcher: af.Fetcher, url: str, range_bytes: int) -> None:
        self._fetcher, self._url, self._range_bytes = fetcher, url, range_bytes

    async def fetch_each(self, starts: Sequence[int]) -> None:
        """The ranges that begin there, as they come. None is kept."""
        async with self._fetcher.fetch_stream(self._ranges(starts)) as arriving:
            async for _ in arriving:
                pass

    async def fetch_all(self, starts: Sequence[int]) -> list[memoryview]:
        """The ranges that begin there."""
        return await self._fetcher.fetch_many(self._ranges(starts))

    def _ranges(self, starts: Sequence[int]) -> list[af.ByteRange]:
        return [af.ByteRange(self._url, start, start + self._range_bytes) for start in starts]


async def _measure(clients: dict[str, _Fetch], starts: Sequence[int], *, repeats: int) -> dict[str, _Measured]:
    """Seconds of one range and of all, by client."""
    measured: dict[str, _Measured] = {}
    for name, fetch in clients.items():
        await fetch(starts)  # makes its connections, and learns its limit
        measured[name] = _Measured([await _timed(fetch([start])) for start in starts[: 3 * repeats]])
    for _ in range(repeats):
        for name, fetch in clients.items():
            with _Cores() as cores:
                measured[name].everything.append(await _timed(fetch(starts)))
            measured[name].full_cores.append(cores.full_share)
    return measured


class _Cores:
    """Looks, from a thread, at how busy the machine's cores are in the block: Linux's count of idle hundredths."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._idle = [_idle_ticks()]
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._idle.append(_idle_ticks())

    @property
    def full_share(self) -> float:
        """Of all looks, those since whose last one no core was idle."""
        idle = [later - earlier for earlier, later in pairwise(self._idle)]
        return sum(ticks == 0 for ticks in idle) / max(1, len(idle))


def _idle_ticks() -> int:
    idle, waiting = Path("/proc/stat").read_text().split(maxsplit=6)[4:6]
    return int(idle) + int(waiting)


async def _timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    fetched = await work
    seconds = time.perf_counter() - started
    del fetched  # here: to give 250 MiB back to the system takes 19 ms, which are no part of fetching them
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kib", type=int, default=256, help="of a range")
    parser.add_argument("--mib-per-second", type=float, default=4.0, help="of each answer")
    parser.add_argument("--plain", action="store_true", help="without TLS")
    asked = parser.parse_args(arguments)
    shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="asyncfetch-bench-", dir=shared_memory) as directory:
        for link in measure_slow_link(
            Path(directory),
            repeats=asked.repeats,
            range_bytes=asked.kib * KIB,
            bytes_per_second=asked.mib_per_second * MIB,
            tls=not asked.plain,
        ):
            print(link)


if __name__ == "__main__":
    main()

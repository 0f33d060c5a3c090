"""A call cancelled at its first wait, its second, and so on to its last: nothing of it stays, and the pool goes on."""

from __future__ import annotations

import asyncio
import socket
import threading
import types
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import psutil
import pytest

from asyncfetch.config import FetchConfig, S3Config
from asyncfetch.errors import NotFound
from asyncfetch.fetch import Fetcher
from asyncfetch.ranges import ByteRange
from asyncfetch.testing import HubServer, RangeServer, S3Server
from tests.conftest import all_others_wait
from tests.fetch.conftest import PATIENT, Step
from tests.fetch.fault_table import CONTENT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
    from pathlib import Path

    from tests.fetch.conftest import LyingServer
    from tests.fetch.odd_files import OddFileSystem

START, STOP = 200_000, 500_000
RANGES = [(0, 10), (500_000, 600_000), (1_900_000, 2_000_000)]


class Cancelled:
    """Awaits ``work`` and calls ``cancel`` when it waits for the ``at``-th time, just before the loop goes on."""

    def __init__(self, work: Coroutine[Any, Any, None], at: int, cancel: Callable[[], object]) -> None:
        self.work, self.at, self.cancel = work, at, cancel
        self.waits = 0

    @types.coroutine
    def run(self) -> Generator[Any, Any, None]:
        go_on, argument = self.work.send, None
        while True:
            try:
                waited = go_on(argument)
            except StopIteration:
                return
            self.waits += 1
            if self.waits == self.at:
                self.cancel()
            try:
                go_on, argument = self.work.send, (yield waited)
            except BaseException as error:  # noqa: BLE001 - handed on
                go_on, argument = self.work.throw, error


async def by_scope(work: Coroutine[Any, Any, None], at: int) -> bool:
    """Cancels as anyio does; whether ``work`` waited that often."""
    with anyio.CancelScope() as scope:
        running = Cancelled(work, at, scope.cancel)
        await running.run()
    return running.waits >= at


async def by_task(work: Coroutine[Any, Any, None], at: int) -> bool:
    """The same as asyncio does."""
    task: asyncio.Task[None]
    running = Cancelled(work, at, lambda: task.cancel())
    task = asyncio.ensure_future(running.run())
    with suppress(asyncio.CancelledError):
        await task
    return running.waits >= at


class EveryWait:
    """Ways to cancel a work: at its first wait in both ways, at its second, until it waits that often no more."""

    def __init__(self) -> None:
        self.count = 0
        """Waits that the work had, and one."""
        self._goes_on = True

    def __iter__(self) -> Iterator[Callable[[Coroutine[Any, Any, None]], Awaitable[None]]]:
        while self._goes_on:
            self._goes_on = False
            self.count += 1
            for cancel in (by_scope, by_task):
                yield partial(self._cancelled, cancel)

    async def _cancelled(
        self,
        cancel: Callable[[Coroutine[Any, Any, None], int], Awaitable[bool]],
        work: Coroutine[Any, Any, None],
    ) -> None:
        self._goes_on |= await cancel(work, self.count)


REDIRECT = Step(status=302, headers={"Location": "/x", "Content-Length": "0"}, body=b"")
STORIES: dict[str, list[Step]] = {
    "honest": [],
    "redirected": [REDIRECT, REDIRECT],
    "retried": [Step(status=503), Step(silent="reset")],
    "resumed": [Step(cut=150_000, end="close"), Step(cut=100_000, end="reset")],
    "refused": [Step(status=404)],
    "lied to": [Step(headers={"Content-Range": None}), Step(ignore_range=True)],
}


@pytest.fixture(params=["direct", "session"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def connections_to(port: int) -> int:
    """Sockets of this process that are connected to a server there, by the system's own account."""
    return sum(bool(one.raddr) and one.raddr.port == port for one in psutil.Process().net_connections())


def read_into(fetcher: Fetcher, url: str, buffer: bytearray) -> Coroutine[Any, Any, None]:
    return _settled(fetcher.fetch_into(url, START, STOP, buffer))


async def _settled(work: Coroutine[Any, Any, Any]) -> None:
    with suppress(OSError):  # NotFound is one
        await work


@pytest.mark.parametrize("story", STORIES)
async def test_cancellation_at_every_wait_of_a_read(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    ca_file: str,
    story: str,
) -> None:
    """All of them by one fetcher: what a cancellation spoilt would be met by the next read."""
    server, url = any_server, any_server.put("/x", CONTENT)
    waits, tasks = EveryWait(), len(asyncio.all_tasks())
    async with fetcher_with(ca_file=ca_file, timeouts=PATIENT) as fetcher:
        for cancelled in waits:
            server.steps[:] = STORIES[story]
            buffer = bytearray(STOP - START)
            await cancelled(read_into(fetcher, url, buffer))
            assert (fetcher.statistics().in_flight, fetcher.statistics().waiting) == (0, 0)
            await all_others_wait()  # what was sent still is answered with a fault
            server.steps.clear()
            buffer[:] = bytes(len(buffer))
            assert await fetcher.fetch(url, 10, 100_000) == CONTENT[10:100_000]
            assert not any(buffer)
    assert waits.count > 1
    assert connections_to(server.port) == 0
    assert len(asyncio.all_tasks() - server.tasks) <= tasks


async def test_cancellation_at_every_wait_of_a_first_read(
    fetcher_with: Callable[..., Fetcher],
    any_server: LyingServer,
    ca_file: str,
) -> None:
    """Resolving, connecting and the handshake are waited for, too."""
    url = any_server.put("/x", CONTENT).replace("127.0.0.1", "localhost")
    waits = EveryWait()
    for cancelled in waits:
        async with fetcher_with(ca_file=ca_file, timeouts=PATIENT) as fetcher:
            await cancelled(read_into(fetcher, url, bytearray(STOP - START)))
            assert await fetcher.fetch(url, 10, 100) == CONTENT[10:100]
        assert connections_to(any_server.port) == 0
    assert waits.count > 4


@pytest.mark.parametrize("verb", ["fetch_many", "fetch_stream", "parts"])
async def test_cancellation_at_every_wait_of_a_batch(
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    verb: str,
) -> None:
    url = server.put("/x", CONTENT)
    wanted = [ByteRange(url, start, stop) for start, stop in RANGES]

    async def read(fetcher: Fetcher) -> None:
        if verb == "fetch_many":
            await fetcher.fetch_many(wanted)
        elif verb == "parts":
            await fetcher.fetch(url)
        else:
            async with fetcher.fetch_stream(wanted) as stream:
                assert len([index async for index, _ in stream]) == 3

    for cancelled in EveryWait():
        async with fetcher_with(part_bytes=500_000, timeouts=PATIENT) as fetcher:
            server.steps[:] = [Step(status=503)]
            await cancelled(read(fetcher))
            assert (fetcher.statistics().in_flight, fetcher.statistics().waiting) == (0, 0)
            server.steps.clear()
            views = await fetcher.fetch_many(wanted)
            assert views == [CONTENT[start:stop] for start, stop in RANGES]
        assert connections_to(server.port) == 0


async def test_cancellation_at_every_wait_of_a_read_from_the_hub() -> None:
    url, buffer = "hf://datasets/org/name/x", bytearray(STOP - START)
    async with HubServer(token="t") as hub:
        hub.push("datasets/org/name", {"x": CONTENT})
        config = FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url, tokens={"127.0.0.1": "t"}, trust_env=False)
        waits = EveryWait()
        for cancelled in waits:
            async with Fetcher(config) as fetcher:
                await cancelled(read_into(fetcher, url, buffer))
                assert fetcher.statistics().in_flight == 0
                assert await fetcher.fetch(url, 5, 50) == CONTENT[5:50]
    assert waits.count > 6


@pytest.mark.usefixtures("aws_keys")
@pytest.mark.slow  # 5 s of CPU, most of it in threads that sign: on a busy machine they wait for each other
async def test_cancellation_at_every_wait_of_a_read_from_s3() -> None:
    url, buffer = "s3://b/x", bytearray(STOP - START)
    async with S3Server({"b/x": CONTENT}, regions={"b": "eu-west-1"}) as server:
        config = FetchConfig(ca_file=server.ca_file, trust_env=False, s3=S3Config(endpoint_url=server.url))
        waits = EveryWait()
        for cancelled in waits:
            async with Fetcher(config) as fetcher:
                await cancelled(read_into(fetcher, url, buffer))
                assert fetcher.statistics().in_flight == 0
                assert await fetcher.fetch(url, 5, 50) == CONTENT[5:50]
        assert not [thread.name for thread in threading.enumerate() if "asyncfetch s3" in thread.name]


@dataclass
class Place:
    """Two objects of CONTENT in one directory, and who keeps them."""

    directory: str
    config: FetchConfig
    port: int = 0
    """Of their server; 0 where there is none."""

    def url(self, name: str) -> str:
        return f"{self.directory}/{name}"


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.fixture
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, odd: type[OddFileSystem], aws_keys: None
) -> AsyncIterator[Place]:
    files = dict.fromkeys("xy", CONTENT)
    if request.param == "https":
        async with RangeServer({f"d/{name}": data for name, data in files.items()}) as server:
            yield Place(f"{server.url}/d", FetchConfig(ca_file=server.ca_file, trust_env=False), port_of(server.url))
    elif request.param == "s3":
        stored = {f"b/d/{name}": data for name, data in files.items()}
        async with S3Server(stored, regions={"b": "eu-west-1"}, page_keys=1) as server:
            s3 = S3Config(endpoint_url=server.url)
            yield Place("s3://b/d", FetchConfig(ca_file=server.ca_file, trust_env=False, s3=s3), port_of(server.url))
    elif request.param == "hub":
        async with HubServer(token="t", page_entries=1) as hub:
            hub.push("datasets/org/name", {f"d/{name}": data for name, data in files.items()})
            config = FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url, tokens={"127.0.0.1": "t"}, trust_env=False)
            yield Place("hf://datasets/org/name/d", config, port_of(hub.url))
    elif request.param == "file":
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        yield Place(str(tmp_path), FetchConfig())
    else:
        for name, data in files.items():
            odd().pipe_file(f"/d/{name}", data)
        yield Place("odd://d", FetchConfig())


async def stat(fetcher: Fetcher, place: Place) -> None:
    assert (await fetcher.stat(place.url("x"))).size == len(CONTENT)


async def listdir(fetcher: Fetcher, place: Place) -> None:
    assert [info.url for info in await fetcher.listdir(place.directory)] == [place.url(name) for name in "xy"]


@pytest.mark.slow  # as above, for S3
@pytest.mark.parametrize("place", ["https", "s3", "hub", "file", "fsspec"], indirect=True)
async def test_cancellation_at_every_wait_of_a_question(place: Place) -> None:
    """Credentials, revisions and redirects are waited for, too."""
    waits = EveryWait()
    for cancelled in waits:
        async with Fetcher(place.config) as fetcher:
            await cancelled(stat(fetcher, place))
            assert (fetcher.statistics().in_flight, fetcher.statistics().waiting) == (0, 0)
            await stat(fetcher, place)
        assert not place.port or connections_to(place.port) == 0
    assert waits.count > 1


@pytest.mark.parametrize("place", ["s3", "hub", "file", "fsspec"], indirect=True)
async def test_cancellation_at_every_wait_of_a_listing(place: Place) -> None:
    """Of all its pages, by one fetcher, as above."""
    waits = EveryWait()
    async with Fetcher(place.config) as fetcher:
        for cancelled in waits:
            await cancelled(listdir(fetcher, place))
            assert (fetcher.statistics().in_flight, fetcher.statistics().waiting) == (0, 0)
            await listdir(fetcher, place)
    assert not place.port or connections_to(place.port) == 0
    assert waits.count > 1


@pytest.mark.slow  # as above
@pytest.mark.parametrize("place", ["s3", "file"], indirect=True)
async def test_cancellation_at_every_wait_of_a_removal(place: Place) -> None:
    """Whether it was removed then, its fetcher sees it as it is; and it can be removed, or written anew."""
    waits, url = EveryWait(), place.url("x")
    for cancelled in waits:
        async with Fetcher(place.config) as fetcher:
            await stat(fetcher, place)
            await cancelled(fetcher.delete(url))
            assert (fetcher.statistics().in_flight, fetcher.statistics().waiting) == (0, 0)
            names = [info.url for info in await fetcher.listdir(place.directory)]
            assert names[-1] == place.url("y")
            if url in names:
                await stat(fetcher, place)
            else:
                with pytest.raises(NotFound):
                    await stat(fetcher, place)
            await fetcher.put(url, CONTENT)
            await stat(fetcher, place)
        assert not place.port or connections_to(place.port) == 0
    assert waits.count > 1


@pytest.mark.parametrize(
    "hangs",
    [
        Step(silent="stall"),
        Step(silent="deaf"),
        Step(head_cut=20, end="stall"),
        Step(cut=100, end="deaf"),
        Step(status=404, cut=0, headers={"Content-Length": "9"}, end="stall"),
        Step(drip_seconds=1.0),
    ],
    ids=["no answer", "deaf", "within the head", "within the body", "within an error's text", "slow loris"],
)
async def test_closing_waits_for_no_server(
    fetcher_with: Callable[..., Fetcher], any_server: LyingServer, ca_file: str, hangs: Step
) -> None:
    url = any_server.put("/x", CONTENT)
    any_server.every = lambda _: hangs
    all_arrived = anyio.Event()

    def arrived() -> None:
        if len(any_server.requests) == 5:
            all_arrived.set()

    any_server.limiter = arrived
    async with anyio.create_task_group() as group:
        async with fetcher_with(ca_file=ca_file, timeouts=PATIENT, max_span_bytes=0) as fetcher:
            for _ in range(5):
                group.start_soon(_closed, fetcher, url)
            await all_arrived.wait()
            await all_others_wait()
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 1.0
    assert connections_to(any_server.port) == 0


async def test_closing_waits_for_no_handshake(fetcher_with: Callable[..., Fetcher]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        async with anyio.create_task_group() as group:
            async with fetcher_with(timeouts=PATIENT) as fetcher:
                group.start_soon(_closed, fetcher, f"https://127.0.0.1:{port}/x")
                accepted, _ = await anyio.to_thread.run_sync(deaf.accept)
                await all_others_wait()
                began = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - began < 1.0
        accepted.close()
        assert connections_to(port) == 0


async def _closed(fetcher: Fetcher, url: str) -> None:
    with pytest.raises(RuntimeError, match="was closed while it read"):
        await fetcher.fetch(url, START, STOP)


async def test_closing_waits_for_no_resolver(
    fetcher_with: Callable[..., Fetcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        asked.set()
        release.wait(10)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with anyio.fail_after(2):
            async with anyio.create_task_group() as group, fetcher_with() as fetcher:
                group.start_soon(_closed, fetcher, "http://data.example.org/x")
                await anyio.to_thread.run_sync(asked.wait)
    finally:
        release.set()

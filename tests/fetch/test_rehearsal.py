"""The trial of what is relied on of aiohttp beyond its documentation, and what comes of each part that is different."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import pytest
from aiohttp.client_proto import ResponseHandler

from asyncfetch.config import RetryConfig
from asyncfetch.fetch.transports import rehearsal
from asyncfetch.fetch.transports.requests import Requests
from asyncfetch.fetch.transports.session_requests import SessionRequests

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType

pytestmark = pytest.mark.usefixtures("inner_parts")

CONTENT = bytes(range(256)) * 1024

Inner = Any


@pytest.fixture(params=["direct", "copied"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial was made yet in this process."""
    monkeypatch.setattr(rehearsal, "_outcomes", {})
    monkeypatch.setattr(rehearsal, "_told", {})


def for_us(kind: type, name: str, other: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Makes a part of aiohttp another one for whoever asks from outside; so aiohttp itself goes on working.

    ``other`` gets what the part was, and what it is called with.
    """
    part: Any = getattr(kind, name)

    def get(owner: object) -> object:
        was = part.__get__(owner)
        if not sys._getframe(1).f_globals["__name__"].startswith("asyncfetch."):
            return was
        return other(was) if isinstance(part, property) else functools.partial(other, was)

    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kind, name, property(get))

    return change


def made_by_us(kind: type, other: Callable[..., None]) -> Callable[[pytest.MonkeyPatch], None]:
    """As ``for_us``, for how something is made."""
    make: Any = kind.__init__  # type: ignore[misc]

    def make_otherwise(new: object, *args: object, **options: object) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("asyncfetch."):
            other(*args, **options)
        make(new, *args, **options)

    return lambda monkeypatch: monkeypatch.setattr(kind, "__init__", make_otherwise)


def gone(*_: object, **__: object) -> Any:  # noqa: ANN401 - nothing comes of it
    raise AttributeError("it is gone")


def takes_other_arguments(*_: object, **__: object) -> Any:  # noqa: ANN401
    raise TypeError("unexpected argument")


async def never(*_: object) -> None:
    await anyio.sleep_forever()


async def reads_another(was: Callable[..., Any], connection: object) -> aiohttp.ClientResponse:
    response: aiohttp.ClientResponse = await was(connection)
    response.status = 204
    return response


async def finds_none(*_: object) -> None:
    raise aiohttp.ServerDisconnectedError


def hears_wrong_bytes(was: Callable[[bytes], None], data: bytes) -> None:
    was(data.replace(b"0123456789", b"0123456780"))


def asks_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """``connect`` goes another way to the pool."""
    connect, get = aiohttp.BaseConnector.connect, aiohttp.BaseConnector._get

    async def connect_otherwise(connector: Inner, *args: Inner, **options: Inner) -> Inner:
        connector._get = functools.partial(get, connector)
        return await connect(connector, *args, **options)

    monkeypatch.setattr(aiohttp.BaseConnector, "connect", connect_otherwise)


def asks_the_pool_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """``_get`` is passed something more."""
    connect, get = aiohttp.BaseConnector.connect, aiohttp.BaseConnector._get

    async def connect_otherwise(connector: Inner, *args: Inner, **options: Inner) -> Inner:
        connector._get = functools.partial(type(connector)._get, connector, timeout=None)
        try:
            return await connect(connector, *args, **options)
        finally:
            del connector._get

    async def get_otherwise(connector: Inner, key: Inner, traces: Inner, *, timeout: None) -> Inner:
        return await get(connector, key, traces)

    monkeypatch.setattr(aiohttp.BaseConnector, "connect", connect_otherwise)
    monkeypatch.setattr(aiohttp.BaseConnector, "_get", get_otherwise)


class Buffered(asyncio.BufferedProtocol):
    """A protocol like Channel, but aiohttp's."""

    def __init__(self, handler: ResponseHandler) -> None:
        self._buffer = bytearray(65536)
        self._handler = handler
        self.eof_received, self.connection_lost = handler.eof_received, handler.connection_lost  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._handler.data_received(bytes(self._buffer[:nbytes]))


def reads_into_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ResponseHandler.connection_made

    def made_otherwise(handler: ResponseHandler, transport: asyncio.Transport) -> None:
        made(handler, transport)
        transport.set_protocol(Buffered(handler))

    monkeypatch.setattr(ResponseHandler, "connection_made", made_otherwise)


def connects_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = aiohttp.BaseConnector.connect

    async def connect_otherwise(connector: Inner, req: Inner, *, traces: Inner, timeout: Inner) -> Inner:
        return await connect(connector, req, traces, timeout)

    monkeypatch.setattr(aiohttp.BaseConnector, "connect", connect_otherwise)


CHANGES = {
    "a request takes other arguments": (made_by_us(aiohttp.ClientRequest, takes_other_arguments), "TypeError: "),
    "a request has no information": (for_us(aiohttp.ClientRequest, "request_info", gone), "AttributeError: "),
    "an answer takes other arguments": (made_by_us(aiohttp.ClientResponse, takes_other_arguments), "TypeError: "),
    "an answer has no start": (for_us(aiohttp.ClientResponse, "start", gone), "AttributeError: "),
    "an answer starts otherwise": (for_us(aiohttp.ClientResponse, "start", takes_other_arguments), "TypeError: "),
    "an answer never starts": (for_us(aiohttp.ClientResponse, "start", never), "_Unexpected: it isn't over"),
    "an answer finds none": (for_us(aiohttp.ClientResponse, "start", finds_none), "ServerDisconnectedError: "),
    "an answer reads another": (for_us(aiohttp.ClientResponse, "start", reads_another), "_Unexpected: 204"),
    "connecting takes other arguments": (connects_by_name, "TypeError: "),
    "the pool is asked by others": (asks_no_pool, "_Unexpected: a connection, reused: True"),
    "the pool is asked otherwise": (asks_the_pool_otherwise, "TypeError: "),
    "the pool isn't asked": (for_us(aiohttp.BaseConnector, "_get", gone), "AttributeError: "),
    "a handler isn't set up": (for_us(ResponseHandler, "set_response_params", gone), "AttributeError: "),
    "a handler is set up otherwise": (
        for_us(ResponseHandler, "set_response_params", takes_other_arguments),
        "TypeError: ",
    ),
    "a handler isn't told that": (
        for_us(ResponseHandler, "set_response_params", lambda *_, **__: None),
        "_Unexpected: ",
    ),
    "a handler doesn't know": (
        for_us(ResponseHandler, "should_close", gone),
        "_Unexpected: a connection, reused: False",
    ),
    "a handler is never at rest": (
        for_us(ResponseHandler, "should_close", lambda _: True),
        "_Unexpected: a connection, r",
    ),
    "a handler is always at rest": (
        for_us(ResponseHandler, "should_close", lambda _: False),
        "_Unexpected: a connection, ",
    ),
    "a handler can't read": (for_us(ResponseHandler, "data_received", gone), "AttributeError: "),
    "a handler reads into buffers": (reads_into_buffers, "_Unexpected: a Buffered"),
    "a handler reads for itself": (for_us(ResponseHandler, "data_received", lambda *_: None), "_Unexpected: it isn't"),
    "a handler reads wrong": (
        for_us(ResponseHandler, "data_received", hears_wrong_bytes),
        "_Unexpected: 200, b'0123456780'",
    ),
    "a handler can't be told of an end": (
        for_us(ResponseHandler, "connection_lost", lambda *_: None),
        "_Unexpected: it",
    ),
}


@pytest.mark.parametrize(("change", "cause"), CHANGES.values(), ids=CHANGES)
async def test_any_part_that_is_different_is_noticed_and_told_once(
    change: Callable[[pytest.MonkeyPatch], None],
    cause: str,
    fetcher_with: Callable[..., Fetcher],
    server: LyingServer,
    step: type[StepType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change(monkeypatch)
    url = server.put("/x", CONTENT)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with fetcher_with(retry=RetryConfig(attempts=2)) as fetcher:
                assert await fetcher.fetch(url) == CONTENT
                server.will(step(status=503), step(status=302, headers={"Location": "/x"}))
                for start in range(3):
                    assert await fetcher.fetch(url, start, start + 100_000) == CONTENT[start : start + 100_000]
                now = fetcher.statistics()
                assert (now.retries, now.redirects) == (1, 1)
    # asyncio has one of its own where a protocol raises.
    [record] = [record for record in caplog.records if record.name != "asyncio"]
    assert record.message.startswith(f"aiohttp {aiohttp.__version__} isn't as expected ({cause}")


@pytest.mark.may_block
async def test_nothing_is_different_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    assert await rehearsal._rehearse() is None
    open_files = os.listdir("/proc/self/fd")
    assert await rehearsal.is_as_expected()
    assert os.listdir("/proc/self/fd") == open_files
    assert caplog.records == []


async def test_what_is_found_decides(fetcher_with: Callable[..., Fetcher], monkeypatch: pytest.MonkeyPatch) -> None:
    async def something() -> str:
        return "something"

    def line_of(fetcher: Fetcher) -> SessionRequests:
        return fetcher._transports.http._lines.choose(0).requests

    async with fetcher_with() as fetcher:
        assert type(line_of(fetcher)) is Requests
    monkeypatch.setattr(rehearsal, "_rehearse", something)
    async with fetcher_with() as fetcher:
        assert type(line_of(fetcher)) is Requests
    rehearsal._outcomes.clear()
    async with fetcher_with() as fetcher:
        assert type(line_of(fetcher)) is SessionRequests


async def test_it_is_tried_once_for_each_kind_of_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    tried: list[str] = []
    rehearse = rehearsal._rehearse

    async def count() -> str | None:
        tried.append("once")
        return await rehearse()

    monkeypatch.setattr(rehearsal, "_rehearse", count)
    for _ in range(3):
        assert await rehearsal.is_as_expected()
    assert len(tried) == 1
    rehearsal._outcomes.update(dict.fromkeys(range(rehearsal.MAX_KINDS), True))
    monkeypatch.setattr(loop, "create_connection", lambda *args, **options: connect(*args, **options))
    assert await rehearsal.is_as_expected()
    assert len(tried) == 2
    assert len(rehearsal._outcomes) == 1


async def test_several_at_once_agree_and_one_tells(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rehearsal, "MAX_TURNS", 5)
    assert await asyncio.gather(*(rehearsal.is_as_expected() for _ in range(5))) == [False] * 5
    assert len(caplog.records) == 1


async def test_where_there_are_no_sockets_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [socket.socketpair() for _ in range(2)]

    def a_few() -> tuple[socket.socket, socket.socket]:
        if not pairs:
            raise OSError(errno.EMFILE, "too many open files")
        return pairs.pop()

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", a_few)
        assert not await rehearsal.is_as_expected()
    assert "no sockets or memory to try it with: [Errno 24]" in caplog.records[-1].message
    assert await rehearsal.is_as_expected()
    gc.collect()


async def test_where_memory_runs_out_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "_play", run_out)
        assert not await rehearsal.is_as_expected()
    assert await rehearsal.is_as_expected()


async def test_no_clock_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is blocked for a minute in each of its turns finds nothing else."""
    loop = asyncio.get_running_loop()
    if type(loop).__module__.startswith("uvloop"):
        pytest.skip("its clock can't be set")
    minutes = iter(range(1_000_000))
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + 60 * next(minutes))
    assert await rehearsal._rehearse() is None


async def leftovers() -> tuple[int, int, int, int]:
    """How many sockets, tasks, threads, and callbacks of the loop there are in a few turns."""
    for _ in range(3):
        await asyncio.sleep(0)
    callbacks = getattr(asyncio.get_running_loop(), "_ready", ())  # uvloop hides them
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), threading.active_count(), len(callbacks)


@pytest.mark.may_block
@pytest.mark.parametrize("scoped", [False, True], ids=["task", "scope"])
async def test_cancelled_in_any_turn_it_leaves_nothing_behind(scoped: bool) -> None:
    assert await rehearsal._rehearse() is None
    gc.collect()
    before = await leftovers()
    scope = anyio.CancelScope()

    async def in_scope() -> None:
        with scope:
            await rehearsal._rehearse()

    turns = 0
    while True:
        scope = anyio.CancelScope()
        task = asyncio.create_task(in_scope() if scoped else rehearsal._rehearse())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        if scoped:
            scope.cancel()
        else:
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or scope.cancel_called  # which may come too late to be caught
        if scoped:  # what is left is closed in spite of it, and awaited
            assert len(os.listdir("/proc/self/fd")) == before[0]
        assert await leftovers() == before
        turns += 1
    assert task.result() is None
    assert turns > 20
    gc.collect()  # what was left open would warn


async def test_too_many_turns_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await rehearsal._rehearse() is None  # uvloop opens something of its own with its first socket
    gc.collect()
    before = await leftovers()
    causes = []
    for turns in range(1, 60, 4):
        monkeypatch.setattr(rehearsal, "MAX_TURNS", turns)
        causes.append(await rehearsal._rehearse())
        for _ in range(3):
            assert await leftovers() == before
    assert causes[0] == "_Unexpected: it isn't over after 1 turns of the loop"
    assert causes[-1] is None
    gc.collect()

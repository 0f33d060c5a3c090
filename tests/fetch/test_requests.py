"""Requests that are sent past aiohttp's session: the same on the wire as those that it sends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import anyio
import anyio.lowlevel
import pytest
from yarl import URL

from asyncfetch.config import FetchConfig, Secrets, TimeoutConfig
from asyncfetch.errors import ConfigError
from asyncfetch.fetch.transports import session_requests
from asyncfetch.fetch.transports.exchange import Exchange
from asyncfetch.fetch.transports.hedging import Overtaken
from asyncfetch.fetch.transports.lines import Line
from asyncfetch.fetch.transports.requests import Requests
from asyncfetch.fetch.transports.session_requests import SessionRequests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from asyncfetch.fetch import Fetcher
    from tests.fetch.conftest import LyingServer
    from tests.fetch.conftest import Step as StepType

CONTENT = bytes(range(256))


@pytest.fixture(params=["direct", "copied"])
def way(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@asynccontextmanager
async def opened_line(config: FetchConfig) -> AsyncIterator[Line]:
    line = Line()
    await line.open(config)
    try:
        yield line
    finally:
        await line.aclose()


def exchange_of(line: Line) -> Exchange:
    deadlines = line.requests.deadlines
    return Exchange(TimeoutConfig(), "host", needs_new_connection=False, now=lambda: 0.0, deadlines=deadlines)


@pytest.mark.parametrize("place", ["/x", "/", "", "/a%2Fb/c d?q=1&r=%20+é#top", "/x?X-Amz-Signature=a%2Bb"])
async def test_a_head_is_what_the_session_would_send(any_server: LyingServer, ca_file: str, place: str) -> None:
    any_server.put(URL(place or "/").raw_path_qs, CONTENT)
    headers = {"user-agent": "another", "X-Own": "größer\tals", "If-Match": '"a"'}
    config = FetchConfig(ca_file=ca_file)
    url = URL(any_server.url(place))
    statuses = []
    async with opened_line(config) as line:
        for requests in (Requests(line.session, directly=True), SessionRequests(line.session)):
            with exchange_of(line) as exchange:
                response = await requests.send("GET", url, headers, byte_range="bytes=1-3")
                exchange.answered(response)
                statuses.append(response.status)
    lean, full = any_server.requests
    assert (lean.method, lean.path, list(lean.headers.items())) == (full.method, full.path, list(full.headers.items()))
    assert statuses[0] == statuses[1]


async def test_a_head_to_a_proxy_is_what_the_session_would_send(server: LyingServer) -> None:
    url, proxy = URL("http://elsewhere.invalid:81/a%2Fb?q=%20+é#top"), URL(server.url("/"))
    async with opened_line(FetchConfig()) as line:
        for requests in (Requests(line.session, directly=True), SessionRequests(line.session)):
            with exchange_of(line) as exchange:
                exchange.answered(await requests.send("GET", url, {}, byte_range="bytes=1-3", proxy=proxy))
    lean, full = server.requests
    assert (lean.path, list(lean.headers.items())) == (full.path, list(full.headers.items()))


@pytest.mark.usefixtures("inner_parts")
async def test_ranges_of_a_url_share_what_was_made_for_the_first(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    init = aiohttp.ClientRequest.__init__

    def count(self: aiohttp.ClientRequest, *args: object, **options: object) -> None:
        made.append(args)
        init(self, *args, **options)  # type: ignore[arg-type]

    url = server.put("/x", CONTENT)
    async with fetcher_with() as fetcher:
        await fetcher.fetch(url, 0, 1)
        monkeypatch.setattr(aiohttp.ClientRequest, "__init__", count)
        for start in range(1, 20):
            assert await fetcher.fetch(url, start, start + 1) == CONTENT[start : start + 1]
    assert made == []


@pytest.mark.usefixtures("inner_parts")
@pytest.mark.parametrize("header", ["a\r\nX-Smuggled: b", "a\nb", "a\0b", "a\x7f"])
@pytest.mark.parametrize("place", [0, 1])
async def test_no_header_smuggles_another_one(
    fetcher_with: Callable[..., Fetcher], server: LyingServer, header: str, place: int
) -> None:
    own = {header: "a"} if place == 0 else {"X-Own": header}
    url = server.put("/x", CONTENT)
    async with fetcher_with(headers=Secrets("headers", {"127.0.0.1": own})) as fetcher:  # as if it weren't checked
        with pytest.raises(ConfigError, match="control character"):
            await fetcher.fetch(url, 0, 1)
    assert server.requests == []


async def test_what_is_kept_of_a_head_is_only_sent_with_the_same_headers(server: LyingServer) -> None:
    server.put("/x", CONTENT)
    url = URL(server.url("/x"))
    asked: list[tuple[dict[str, str], str | None]] = [
        ({"If-Match": tag}, f"bytes={start}-{start}") for tag in ('"a"', '"b"', '"a"') for start in range(3)
    ]
    asked += [({"If-Match": '"a"'}, None), ({}, "bytes=5-5"), ({"Range": "bytes=6-6"}, None)]
    async with opened_line(FetchConfig()) as line:
        for headers, byte_range in asked:
            with exchange_of(line) as exchange:
                exchange.answered(await line.requests.send("GET", url, headers, byte_range=byte_range))
    own = [
        {name: one.headers[name.lower()] for name in ("If-Match", "Range") if name.lower() in one.headers}
        for one in server.requests
    ]
    assert own == [headers | ({"Range": byte_range} if byte_range else {}) for headers, byte_range in asked]


@pytest.mark.usefixtures("inner_parts")
async def test_no_range_smuggles_a_header(server: LyingServer) -> None:
    url = URL(server.url("/x"))
    async with opened_line(FetchConfig()) as line:
        with pytest.raises(ValueError, match="control character"):
            await line.requests.send("GET", url, {}, byte_range="bytes=0-0\r\nX-Smuggled: b")
    assert server.requests == []


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_nothing_is_repeated_beneath(server: LyingServer, step: type[StepType], method: str) -> None:
    """aiohttp sends what is idempotent a second time, on a new connection, where a pooled one has died."""
    server.put("/x", CONTENT)
    url = URL(server.url("/x"))
    async with opened_line(FetchConfig()) as line:
        requests = SessionRequests(line.session)
        with exchange_of(line) as exchange:
            exchange.answered(await requests.send("GET", url, {}))
            await exchange.read_all(1000)
        server.will(step(silent="reset"))
        with exchange_of(line) as exchange:
            with pytest.raises(aiohttp.ClientError) as caught:
                await requests.send(method, url, {})
            assert exchange.died_idle(caught.value)
    assert [(request.method, request.connection) for request in server.requests] == [("GET", 1), (method, 1)]


class Waiting:
    """A race: waits for a head, once in vain, and then does as it is told."""

    def __init__(self, then: Exception | None = None) -> None:
        self._then = then

    async def head(self, start: Callable[[], Awaitable[aiohttp.ClientResponse]]) -> aiohttp.ClientResponse:
        with anyio.move_on_after(0):
            await start()
        if self._then is not None:
            raise self._then
        return await start()


async def ask_in(race: object, ask: Callable[[], Awaitable[object]]) -> object:
    return await session_requests._ask_in_race(cast("Any", race), cast("Any", ask))


async def test_a_race_may_wait_again_for_what_a_session_does_once() -> None:
    asked: list[str] = []

    async def ask() -> str:
        asked.append("once")
        await anyio.sleep(0.01)
        return "the answer"

    assert await ask_in(Waiting(), ask) == "the answer"
    assert asked == ["once"]


async def test_what_a_race_has_lost_is_cancelled() -> None:
    with anyio.fail_after(5), pytest.raises(Overtaken):
        await ask_in(Waiting(Overtaken()), anyio.sleep_forever)


async def test_a_late_answer_to_what_a_race_has_lost_is_closed() -> None:
    closed: list[str] = []

    class Answered:
        def close(self) -> None:
            closed.append("once")

    class Late(Waiting):
        async def head(self, start: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401
            await start()
            return await super().head(start)

    async def ask() -> Answered:
        return Answered()

    with pytest.raises(Overtaken):
        await ask_in(Late(Overtaken()), ask)
    assert closed == ["once"]


@pytest.mark.parametrize("turns", range(8))
async def test_a_request_in_a_race_that_is_cancelled_is_nothing_else(turns: int) -> None:
    async def cancel() -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(cancel)
        with anyio.CancelScope() as scope:
            await ask_in(Waiting(), anyio.sleep_forever)
        assert scope.cancelled_caught


async def test_a_request_that_its_session_gives_up_is_an_error_of_aiohttps() -> None:
    async def ask() -> None:
        raise asyncio.CancelledError

    with anyio.fail_after(5), pytest.raises(aiohttp.ClientError, match="given it up"):
        await ask_in(Waiting(), ask)

"""Requests sent without what aiohttp does around each of them.

For every GET its session looks at thirty options and makes a request and a writer anew, which cost as much as all that
comes behind: of 130 us of CPU for a range of 16 KiB they took 75 where this was measured. All but the range is the same
for every range of an object. So a request is made once a url, to ask the connector for connections with, and of its
head only the last line is written range by range. Answers to ranges are read by ``direct``. Connector, pool, TLS, DNS
and all other answers stay aiohttp's; what has a body stays its session's.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import aiohttp
from multidict import CIMultiDict

from asyncfetch.config.checks import HEADER_CONTROL
from asyncfetch.fetch.transports.aiohttp_parts import arguments_to_connect, expect_answer, new_response, read_head
from asyncfetch.fetch.transports.connecting import current_user
from asyncfetch.fetch.transports.direct import Answer, Channel
from asyncfetch.fetch.transports.session_requests import SessionRequests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from yarl import URL

    from asyncfetch.fetch.transports.aiohttp_parts import Connection
    from asyncfetch.fetch.transports.session import Connector

__all__ = ["Requests"]

MAX_URLS = 1024
"""Urls whose requests are kept, about 3 KiB each; and of their heads, 0.5 KiB each."""


class _Asked:
    """A request on a connection, and the wait for its answer's head, which may be taken up again."""

    __slots__ = ("_channel", "_connection", "_make_response", "_response")

    def __init__(self, connection: Connection, make_response: Callable[[], aiohttp.ClientResponse]) -> None:
        """``make_response`` gives what aiohttp's protocol reads an answer into."""
        self._connection = connection
        self._make_response = make_response
        self._response: aiohttp.ClientResponse | None = None
        self._channel: Channel | None = None

    def ask(self, head: bytes, *, directly: bool) -> None:
        """Sends it; aiohttp.ClientError where the connection is closing."""
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            raise aiohttp.ClientConnectionResetError("the connection is closing")
        if directly:
            self._channel = Channel.of(transport)
            self._channel.ask(head)
        else:
            expect_answer(Channel.withdraw(transport))
            transport.write(head)

    async def answer(self) -> Answer | aiohttp.ClientResponse:
        """It has a head now. Cancelled, this may be called again."""
        fields = None if self._channel is None else await self._channel.head()
        if self._channel is not None and fields is not None:
            return Answer(self._channel, self._connection, fields)
        self._response = self._response or self._make_response()
        return await read_head(self._response, self._connection)

    def close(self) -> None:
        """Without an answer."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


class Requests(SessionRequests):
    """Sends the requests of a session, those without a body past it. Only where ``rehearsal`` has found that it can."""

    def __init__(self, session: aiohttp.ClientSession, *, directly: bool) -> None:
        """``directly`` says whether answers to ranges may be read from the socket."""
        super().__init__(session)
        self._directly = directly
        connector: Connector = session.connector  # type: ignore[assignment]
        self._take = connector.take
        self._headers = session.headers
        loop = asyncio.get_running_loop()
        self._new_response = partial(new_response, session, loop)
        self._new_arguments = partial(arguments_to_connect, session, loop)
        self._arguments = lru_cache(MAX_URLS)(self._new_arguments)
        self._head = lru_cache(MAX_URLS)(self._head_without_range)

    def send(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        *,
        byte_range: str | None = None,
        data: AsyncIterator[bytes | memoryview] | None = None,
        proxy: URL | None = None,
        proxy_headers: Mapping[str, str] | None = None,
    ) -> Awaitable[Answer | aiohttp.ClientResponse]:
        """See SessionRequests."""
        if method == "GET" and data is None:
            return self._get(url, headers, byte_range, proxy, proxy_headers)
        return super().send(
            method, url, headers, byte_range=byte_range, data=data, proxy=proxy, proxy_headers=proxy_headers
        )

    async def _get(
        self,
        url: URL,
        headers: Mapping[str, str],
        byte_range: str | None,
        proxy: URL | None,
        proxy_headers: Mapping[str, str] | None,
    ) -> Answer | aiohttp.ClientResponse:
        arguments = self._arguments(url) if proxy is None else self._new_arguments(url, proxy, proxy_headers)
        head = self._head(url, tuple(headers.items()), proxy is not None and url.scheme == "http")
        head += b"\r\n" if byte_range is None else _encoded([f"Range: {byte_range}", ""])
        directly = self._directly and byte_range is not None
        try:
            connection = await self._take(*arguments)
            asked = _Asked(connection, partial(self._new_response, arguments))
            try:
                asked.ask(head, directly=directly)
                race = current_user.get().race
                return await (asked.answer() if race is None else race.head(asked.answer))
            except BaseException:
                asked.close()
                raise
        except (aiohttp.ClientError, TimeoutError):
            raise
        except OSError as error:
            raise aiohttp.ClientOSError(*error.args) from error

    def _head_without_range(self, url: URL, headers: tuple[tuple[str, str], ...], to_proxy: bool) -> bytes:
        fields = CIMultiDict(self._headers)
        fields.update(headers)
        target = str(url.with_fragment(None)) if to_proxy else url.raw_path_qs
        lines = [f"GET {target} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return _encoded(lines)


def _encoded(lines: Sequence[str]) -> bytes:
    """Lines of a head as they are sent, each with its end; ValueError where one holds another."""
    if HEADER_CONTROL.search("".join(lines)):
        raise ValueError("a header holds a control character")
    return "\r\n".join([*lines, ""]).encode()

"""Requests sent without what aiohttp does around each of them.

For every GET its session looks at thirty options and makes a request and a writer anew, which cost as much as all that
comes behind: of 130 us of CPU for a range of 16 KiB they took 75 where this was measured. All but the range is the same
for every range of an object. So a request is made once a url, to ask the connector for connections with, and of its
head only the last line is written range by range. Answers to ranges are read by ``direct``. Connector, pool, TLS, DNS
and all other answers stay aiohttp's; what has a body stays its session's.

Relied on are the arguments that aiohttp makes its own requests, answers and handlers with, and that a handler takes
what it is passed of a connection; nothing else that isn't public. It is tried before.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import cache, lru_cache, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from asyncfetch.fetch.transports.direct import Answer, Channel
from asyncfetch.fetch.transports.session import current_user
from asyncfetch.runtime.deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from aiohttp.connector import Connection

    from asyncfetch.fetch.transports.session import Connector

__all__ = ["Requests"]

_log = logging.getLogger(__name__)

MAX_URLS = 1024
"""Urls whose requests are kept, about 3 KiB each; and of their heads, 0.5 KiB each."""
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
_set_up = methodcaller("set_response_params", read_until_eof=True, auto_decompress=False)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class _Sent:
    """In place of a writer: the request is on its way already."""

    output_size = 0


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
        handler = self._connection.protocol
        if handler is None or handler.transport is None or handler.transport.is_closing():
            raise aiohttp.ClientConnectionResetError("the connection is closing")
        if directly:
            self._channel = Channel.of(handler, _set_up)
            self._channel.ask(head)
        else:
            _set_up(handler)
            handler.transport.write(head)

    async def answer(self) -> Answer | aiohttp.ClientResponse:
        """It has a head now. Cancelled, this may be called again."""
        fields = None if self._channel is None else await self._channel.head()
        if self._channel is not None and fields is not None:
            return Answer(self._channel, self._connection, fields)
        self._response = self._response or self._make_response()
        return await aiohttp.ClientResponse.start(self._response, self._connection)

    def close(self) -> None:
        """Without an answer."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


class Requests:
    """Sends the requests of a session, which it doesn't own. Belongs to the session's loop."""

    def __init__(self, session: aiohttp.ClientSession, *, directly: bool) -> None:
        """One warning a process where aiohttp has changed inside; then the session sends and reads everything.

        ``directly`` says whether answers to ranges may be read from the socket.
        """
        self._session = session
        self._directly = directly
        self._loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self._loop)
        """For what waits for these requests' answers."""
        self._request = lru_cache(MAX_URLS)(self._new_request)
        self._head = lru_cache(MAX_URLS)(self._head_without_range)
        self._works = self._rehearse()

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
        """The answer, when its head is there, whatever its status.

        ``byte_range`` is the value of a Range header that isn't in ``headers``; with one the answer may be an Answer.

        Raises:
            aiohttp.ClientError, OSError, ValueError: There is none, or the request can't be made.
        """
        if method == "GET" and data is None and self._works:
            return self._get(url, headers, byte_range, proxy, proxy_headers)
        return self._session.request(
            method,
            url,
            headers=headers if byte_range is None else {**headers, "Range": byte_range},
            data=data,
            allow_redirects=False,
            proxy=proxy,
            proxy_headers=proxy_headers,
        )

    async def _get(
        self,
        url: URL,
        headers: Mapping[str, str],
        byte_range: str | None,
        proxy: URL | None,
        proxy_headers: Mapping[str, str] | None,
    ) -> Answer | aiohttp.ClientResponse:
        # Afresh for a proxy: connecting to one changes a request's headers for it, by which connections are pooled.
        request = self._request(url) if proxy is None else self._new_request(url, proxy, proxy_headers)
        head = self._head(url, tuple(headers.items()), request.proxy is not None and not request.is_ssl())
        head += b"\r\n" if byte_range is None else _encoded([f"Range: {byte_range}", ""])
        directly = self._directly and byte_range is not None
        connector: Connector = self._session.connector  # type: ignore[assignment]
        try:
            connect = connector.take if directly else connector.connect
            connection = await connect(request, [], _NO_TIMEOUT)
            asked = _Asked(connection, partial(self._response, request))
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

    def close(self) -> None:
        """Nothing may be under way. The session stays open."""
        self.deadlines.close()

    def _new_request(
        self, url: URL, proxy: URL | None = None, proxy_headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientRequest:
        return aiohttp.ClientRequest(
            "GET",
            url,
            loop=self._loop,
            session=self._session,
            response_class=self._session._response_class,
            proxy=proxy,
            proxy_headers=None if proxy_headers is None else CIMultiDict(proxy_headers),
        )

    def _head_without_range(self, url: URL, headers: tuple[tuple[str, str], ...], to_proxy: bool) -> bytes:
        fields = CIMultiDict(self._session.headers)
        fields.update(headers)
        target = str(url.with_fragment(None)) if to_proxy else url.raw_path_qs
        lines = [f"GET {target} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return _encoded(lines)

    def _response(self, request: aiohttp.ClientRequest) -> aiohttp.ClientResponse:
        sent: Any = _Sent()
        return request.response_class(
            request.method,
            request.url,
            writer=None,
            continue100=None,
            timer=request._timer,
            request_info=request.request_info,
            traces=[],
            loop=self._loop,
            session=self._session,
            stream_writer=sent,
        )

    def _rehearse(self) -> bool:
        """Whether all of it can be made, and an answer handed on, without a connection."""
        try:
            from aiohttp.client_proto import ResponseHandler  # here, so that its absence is an answer as well

            handler = ResponseHandler(self._loop)
            handler.connection_made(_Stage())
            rested = not handler.should_close
            channel = Channel.of(handler, _set_up)
            channel.ask(b"")
            strange = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"
            channel.get_buffer(-1)[: len(strange)] = strange
            channel.buffer_updated(len(strange))
            request = self._request(URL("http://localhost/"))
            response = self._response(request)
            is_made = response.method == "GET" and request.connection_key.host == "localhost"
            works = rested and handler.should_close and is_made
        except Exception:  # noqa: BLE001 - whatever has changed in there
            works = False
        if not works:
            _warn()
        return works


class _Stage(asyncio.Transport):
    """A transport that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self._protocol: asyncio.BaseProtocol = asyncio.Protocol()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def write(self, data: object) -> None:
        pass


def _encoded(lines: Sequence[str]) -> bytes:
    """Lines of a head as they are sent, each with its end; ValueError where one holds another."""
    if _CONTROL.search("".join(lines)):
        raise ValueError("a header holds a control character")
    return "\r\n".join([*lines, ""]).encode()


@cache
def _warn() -> None:
    _log.warning("aiohttp %s has changed inside: its session sends and reads all, at more CPU", aiohttp.__version__)

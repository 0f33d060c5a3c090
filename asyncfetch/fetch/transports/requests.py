"""Requests sent without what aiohttp does around each of them.

For every GET its session looks at thirty options and makes a request and a writer anew, which cost as much as all that
comes behind: of 130 us of CPU for a range of 16 KiB they took 75 where this was measured. All but the range is the same
for every range of an object. So a request is made once a url, to ask the connector for connections with, and of its
head only the last line is written range by range. Connector, pool, TLS, DNS, the parsing of heads and the answers stay
aiohttp's; what has a body or goes through a proxy stays its session's.

Relied on are the arguments that aiohttp makes its own requests, answers and handlers with, and nothing else that isn't
public; they are tried before.
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

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence

    from aiohttp.client_proto import ResponseHandler

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


class Requests:
    """Sends the requests of a session, which it doesn't own. Belongs to the session's loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        """One warning a process where aiohttp has changed inside; then the session sends all of them."""
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._request = lru_cache(MAX_URLS)(
            partial(
                aiohttp.ClientRequest,
                "GET",
                loop=self._loop,
                session=session,
                response_class=session._response_class,
            )
        )
        self._head = lru_cache(MAX_URLS)(self._head_without_range)
        self._works = self._rehearse()

    def send(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        *,
        data: AsyncIterator[bytes | memoryview] | None = None,
        proxy: URL | None = None,
        proxy_headers: Mapping[str, str] | None = None,
    ) -> Awaitable[aiohttp.ClientResponse]:
        """The answer, when its head is there, whatever its status.

        Raises:
            aiohttp.ClientError, OSError, ValueError: There is none, or the request can't be made.
        """
        if method == "GET" and data is None and proxy is None and self._works:
            return self._get(url, headers)
        return self._session.request(
            method,
            url,
            headers=headers,
            data=data,
            allow_redirects=False,
            proxy=proxy,
            proxy_headers=proxy_headers,
        )

    async def _get(self, url: URL, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        request = self._request(url)
        head = self._head(url, tuple(item for item in headers.items() if item[0] != "Range"))
        head += _encoded([f"Range: {headers['Range']}", ""] if "Range" in headers else [""])
        connector = self._session.connector
        assert connector is not None
        try:
            connection = await connector.connect(request, traces=[], timeout=_NO_TIMEOUT)
            response = None
            try:
                _expect_answer(connection.protocol).write(head)
                response = self._answer(request)
                return await response.start(connection)
            except BaseException:
                if response is not None:
                    response.close()
                connection.close()
                raise
        except (aiohttp.ClientError, TimeoutError):
            raise
        except OSError as error:
            raise aiohttp.ClientOSError(*error.args) from error

    def _head_without_range(self, url: URL, headers: tuple[tuple[str, str], ...]) -> bytes:
        fields = CIMultiDict(self._session.headers)
        fields.update(headers)
        lines = [f"GET {url.raw_path_qs} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return _encoded(lines)

    def _answer(self, request: aiohttp.ClientRequest) -> aiohttp.ClientResponse:
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
        """Whether all of it can be made, without a connection."""
        try:
            from aiohttp.client_proto import ResponseHandler  # here, so that its absence is an answer as well

            handler = ResponseHandler(self._loop)
            handler.connection_made(asyncio.Transport())
            _set_up(handler)
            request = self._request(URL("http://localhost/"))
            works = self._answer(request).method == "GET" and request.connection_key.host == "localhost"
        except Exception:  # noqa: BLE001 - whatever has changed in there
            works = False
        if not works:
            _warn()
        return works


def _encoded(lines: Sequence[str]) -> bytes:
    """Lines of a head as they are sent, each with its end; ValueError where one holds another."""
    if _CONTROL.search("".join(lines)):
        raise ValueError("a header holds a control character")
    return "\r\n".join([*lines, ""]).encode()


def _expect_answer(handler: ResponseHandler | None) -> asyncio.Transport:
    """Makes a connection wait for an answer, and gives what to write the request to."""
    if handler is None or handler.transport is None or handler.transport.is_closing():
        raise aiohttp.ClientConnectionResetError("the connection is closing")
    _set_up(handler)
    return handler.transport


@cache
def _warn() -> None:
    _log.warning("aiohttp %s has changed inside: its session sends all requests, at more CPU", aiohttp.__version__)

"""All that is relied on of aiohttp beyond its documentation; no other file of the engine knows any of it.

- ``ClientRequest`` is made with the arguments that a session makes it with, and ``ClientResponse`` likewise, whose
  ``start`` reads the head of an answer and nothing else, so that it may be cancelled and called again.
- ``TCPConnector._wrap_create_connection`` connects to one of ``addr_infos``, with TLS where ``ssl`` is a context.
- ``BaseConnector.connect`` takes traces and a timeout behind the request, and asks ``_get`` for a pooled connection.
- A new connection's protocol reads HTTP answers, one for each call of ``set_response_params``; its ``should_close``
  says whether something is left of the last one. It is an ``asyncio.Protocol``, and does not mind being handed what
  was read of a connection instead of reading it.

``rehearsal`` tries all of it before it is used, but for the second, which ``connects_as_expected`` looks at. Where
something is otherwise, none of it is but ``should_close``, which then tells at worst that no connection is fit to be
used twice.
"""

from __future__ import annotations

import inspect
import ssl
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import aiohappyeyeballs
import aiohttp
from multidict import CIMultiDict

from asyncfetch.fetch.transports.connecting import current_user

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine, Mapping

    from aiohttp.connector import Connection as Connection
    from yarl import URL

    from asyncfetch.fetch.transports.fast_tls import TlsCarrier

__all__ = [
    "PassablePool", "arguments_to_connect", "connects_as_expected", "expect_answer", "has_leftovers", "new_response",
    "read_head",
]  # fmt: skip

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)

expect_answer = methodcaller("set_response_params", read_until_eof=True, auto_decompress=False)
"""Makes the protocol of a connection wait for an answer. Not a function: it is one call less for every request."""
HAPPY_EYEBALLS_SECONDS = 0.25
"""After which the next address is tried beside the last one, as aiohttp does."""


class PassablePool(aiohttp.TCPConnector):
    """A connector that leaves the pooled connections alone where a second request asks."""

    tls_carrier: TlsCarrier | None = None
    """In place of the loop. Not unless ``connects_as_expected``."""

    async def _wrap_create_connection(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - aiohttp's own
        if self.tls_carrier is None or not options.get("ssl"):
            return await super()._wrap_create_connection(*arguments, **options)
        key = options["req"].connection_key
        try:
            connected = await aiohappyeyeballs.start_connection(
                options["addr_infos"],
                happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS,
                interleave=1,
                socket_factory=self._socket_factory,
            )
            return await self.tls_carrier(arguments[0], connected, options["server_hostname"])
        except ssl.SSLCertVerificationError as error:
            raise aiohttp.ClientConnectorCertificateError(key, error) from error
        except ssl.SSLError as error:
            raise aiohttp.ClientConnectorSSLError(key, error) from error
        except OSError as error:
            raise options.get("client_error", aiohttp.ClientConnectorError)(key, error) from error

    async def _get(self, key: Any, traces: Any) -> Connection | None:  # noqa: ANN401 - they are only handed on
        return None if current_user.get().is_second else await super()._get(key, traces)


def connects_as_expected() -> bool:
    """Whether something else may carry TLS, by what connecting is asked with. To try it takes a certificate."""
    connect = getattr(aiohttp.TCPConnector, "_wrap_create_connection", None)
    return connect is not None and {"addr_infos", "req", "client_error"} <= inspect.signature(connect).parameters.keys()


def arguments_to_connect(
    session: aiohttp.ClientSession,
    loop: asyncio.AbstractEventLoop,
    url: URL,
    proxy: URL | None = None,
    proxy_headers: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """What a connector is asked with for a connection that a GET of ``url`` can go out on. May be used again.

    Not with a proxy: connecting to one changes a request's headers for it, by which connections are pooled.
    """
    request = aiohttp.ClientRequest(
        "GET",
        url,
        loop=loop,
        session=session,
        proxy=proxy,
        proxy_headers=None if proxy_headers is None else CIMultiDict(proxy_headers),
    )
    return request, [], _NO_TIMEOUT


class _Sent:
    """In place of a writer: the request is on its way already."""

    output_size = 0


def new_response(
    session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop, arguments: tuple[Any, ...]
) -> aiohttp.ClientResponse:
    """What the answer to a request is read into, which a connection was asked for with ``arguments``."""
    request: aiohttp.ClientRequest = arguments[0]
    sent: Any = _Sent()
    timer: Any = None
    return aiohttp.ClientResponse(
        request.method,
        request.url,
        writer=None,
        continue100=None,
        timer=timer,
        request_info=request.request_info,
        traces=[],
        loop=loop,
        session=session,
        stream_writer=sent,
    )


def read_head(response: aiohttp.ClientResponse, connection: Connection) -> Coroutine[Any, Any, aiohttp.ClientResponse]:
    """The response, when it has a head. Cancelled, this may be called again."""
    return response.start(connection)


def has_leftovers(protocol: asyncio.BaseProtocol) -> bool:
    """Whether a connection that rests has more than it was asked for, or may have."""
    spent: bool = getattr(protocol, "should_close", True)
    return spent

"""TLS by aiofastnet, which takes less of the loop's time for it than asyncio does."""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
import anyio.to_thread

from asyncfetch.fetch.transports.aiohttp_parts import connects_as_expected
from asyncfetch.runtime.fork import forks_wait

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["TlsCarrier", "can_be_fast", "fast_tls"]

_log = logging.getLogger(__name__)

KNOWN_VERSION = "1.2."
"""Of aiofastnet: another one might take ``_QuietContext`` at its word."""
SHUTDOWN_SECONDS = 1.0
"""How long a closed connection says good-bye at most, and is kept alive for that."""


class TlsCarrier(Protocol):
    """What carries TLS in place of the loop."""

    async def __call__(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket, server_hostname: str
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Over a connected socket, which is the transport's from then on, and ends with it."""
        ...


class _QuietContext(ssl.SSLContext):
    """One that checks certificates as it was told to, which OpenSSL does, but doesn't say so.

    aiofastnet 1.2 asks for ``verify_mode`` only to find out whether somebody may want to read the certificate. For them
    it would write that to a temporary file in each handshake, on the loop; and where there is no room for the file, the
    handshake would never end.
    """

    @property
    def verify_mode(self) -> ssl.VerifyMode:  # type: ignore[override]
        return ssl.CERT_NONE


class _QuietLoop:
    """A loop that isn't told of an error's class, where an error is expected.

    aiofastnet 1.2 does so where a connection is closed in its handshake, and the loop's handler fails over it. The
    error itself is raised to who connects.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> object:
        found = getattr(self._loop, name)
        setattr(self, name, found)  # for the next time
        return found

    def call_exception_handler(self, context: dict[str, object]) -> None:
        """See asyncio."""
        if not isinstance(context.get("exception"), type):
            self._loop.call_exception_handler(context)


async def can_be_fast() -> bool:
    """Whether aiofastnet can carry TLS on the running loop.

    It reads sockets when the loop's ``add_reader`` says that they can be read. uvloop says so once for one that was
    reset, as libuv's polling is documented to do, and never again. A body that has not come whole by then would stall.
    """
    if not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
        return False
    return await anyio.to_thread.run_sync(_is_known)


@functools.cache
def _is_known() -> bool:
    """Whether it is installed, and of use; where only the latter is not so, one warning says why.

    Its import takes 7 ms: call it in a thread.
    """
    try:
        with forks_wait():
            import aiofastnet
    except ImportError:
        return False
    if not aiofastnet.__version__.startswith(KNOWN_VERSION):
        _log.warning("aiofastnet %s is not known here: the loop carries TLS, for more CPU", aiofastnet.__version__)
    elif not connects_as_expected():
        _log.warning("aiohttp %s connects in another way: the loop carries TLS, for more CPU", aiohttp.__version__)
    else:
        return True
    return False


def fast_tls(context: ssl.SSLContext, handshake_seconds: float) -> TlsCarrier:
    """Connects over TLS on the running loop, as ``context`` says. Only where it ``can_be_fast``.

    Args:
        context: Nobody else's, and changed.
        handshake_seconds: No handshake takes longer. aiofastnet 1.2 keeps one that was cancelled for as long.
    """
    import aiofastnet

    context.__class__ = _QuietContext
    loop: Any = _QuietLoop(asyncio.get_running_loop())

    async def connect(
        protocol_factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket, server_hostname: str
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        connection: tuple[asyncio.Transport, asyncio.BaseProtocol] = await aiofastnet.create_connection(
            loop,
            protocol_factory,
            ssl=context,
            sock=sock,
            server_hostname=server_hostname,
            ssl_handshake_timeout=handshake_seconds,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
        return connection

    return connect

"""TLS of our own connections: whom to trust, and what carries it.

asyncio's own loop may leave TLS to aiofastnet, where that is installed: it took 7-15 % less of the client's CPU over
TLS in ranges of 1-16 MiB, and as much or 9 % less in ranges of 64 KiB.

Not done: resuming TLS sessions. Python copies a session by writing and parsing it whenever it is used, 0.2 ms each
time, so the client's CPU of 64 handshakes fell by a tenth only (nginx: 70 to 64 ms, with RSA keys 58 to 51).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from asyncfetch.errors import ConfigError
from asyncfetch.runtime.fork import forks_wait

if TYPE_CHECKING:
    import os
    import socket
    from collections.abc import Callable

__all__ = ["can_be_fast", "connect_fast_tls", "tls_context"]

_log = logging.getLogger(__name__)

KNOWN_VERSION = "1.2."
"""The version of aiofastnet that is known: another one might take ``_QuietContext`` at its word."""
SHUTDOWN_SECONDS = 1.0
"""Seconds that a closed connection has at most to say good-bye, and is kept alive for."""


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


async def tls_context(ca_file: str | os.PathLike[str] | None, *, is_fast: bool = False) -> ssl.SSLContext:
    """Return a client's context that trusts the authorities in ``ca_file``, or the system's.

    Args:
        ca_file: A PEM file; None for the system's authorities.
        is_fast: Whether it is for ``connect_fast_tls``.

    Raises:
        ConfigError: ``ca_file`` can't be read.
    """
    if ca_file is None:
        return await anyio.to_thread.run_sync(_system_context, is_fast)
    return await anyio.to_thread.run_sync(_context, ca_file, is_fast)


def _context(ca_file: str | os.PathLike[str] | None, is_fast: bool) -> ssl.SSLContext:
    try:
        with forks_wait():
            context = ssl.create_default_context(cafile=ca_file)
            if is_fast:
                context.__class__ = _QuietContext
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError: no certificate in the file
        raise ConfigError(f"ca_file={str(ca_file)!r} is no readable PEM file of certificates: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


@functools.cache
def _system_context(is_fast: bool) -> ssl.SSLContext:
    """Made once: reading 144 authorities takes 20 ms."""
    return _context(None, is_fast)


async def can_be_fast() -> bool:
    """Return whether aiofastnet can carry TLS on the running loop.

    It reads sockets when the loop's ``add_reader`` says that they can be read. uvloop says so once for one that was
    reset, as libuv's polling is documented to do, and never again. A body that has not come whole by then would stall.
    """
    if not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
        return False
    return await anyio.to_thread.run_sync(_is_known)


@functools.cache
def _is_known() -> bool:
    """Return whether it is installed and of a version that is known; where only the latter isn't so, warn once.

    Its import takes 7 ms: call it in a thread.
    """
    try:
        with forks_wait():
            import aiofastnet
    except ImportError:
        return False
    if aiofastnet.__version__.startswith(KNOWN_VERSION):
        return True
    _log.warning("aiofastnet %s is not known here: the loop carries TLS, for more CPU", aiofastnet.__version__)
    return False


async def connect_fast_tls(
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    connected: socket.socket,
    context: ssl.SSLContext,
    server_hostname: str,
    *,
    handshake_seconds: float,
) -> asyncio.BaseProtocol:
    """Return the protocol of a TLS connection over a connected socket, carried by aiofastnet.

    Only where it ``can_be_fast``. No handshake takes longer than ``handshake_seconds``: aiofastnet 1.2 keeps one that
    was cancelled for as long.
    """
    import aiofastnet

    loop: Any = _QuietLoop(asyncio.get_running_loop())
    _, protocol = await aiofastnet.create_connection(
        loop,
        protocol_factory,
        ssl=context,
        sock=connected,
        server_hostname=server_hostname,
        ssl_handshake_timeout=handshake_seconds,
        ssl_shutdown_timeout=SHUTDOWN_SECONDS,
    )
    found: asyncio.BaseProtocol = protocol
    return found

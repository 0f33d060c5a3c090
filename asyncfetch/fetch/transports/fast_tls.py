"""TLS by aiofastnet, which takes less of the loop's time for it than asyncio does."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["TlsCarrier", "fast_tls"]

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


def fast_tls(context: ssl.SSLContext) -> TlsCarrier | None:
    """Connects over TLS as ``context`` says, which must be nobody else's and is changed; None without aiofastnet."""
    try:
        import aiofastnet
    except ImportError:
        return None
    context.__class__ = _QuietContext

    async def connect(
        protocol_factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket, server_hostname: str
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        connection: tuple[asyncio.Transport, asyncio.BaseProtocol] = await aiofastnet.create_connection(
            asyncio.get_running_loop(),
            protocol_factory,
            ssl=context,
            sock=sock,
            server_hostname=server_hostname,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
        return connection

    return connect
